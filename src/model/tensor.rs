//! One tensor at one moment: what it is and where its bytes are.

use std::sync::Arc;

use once_cell::sync::OnceCell;
use parking_lot::Mutex;

use crate::device::{Buffer, DeviceError};
use crate::gguf::{TensorInfo, TypeInfo, strides};

/// What has happened to a tensor; the numbers are part of the C ABI.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub enum State {
    /// As it was when the model was opened.
    OnOriginal = 0,
    /// Replaced by other bytes, in a buffer of its own.
    Detached = 1,
}

/// A tensor with certain bytes of a certain type. Never changes; a reload puts
/// another version in its place.
#[derive(Debug)]
pub(super) struct Version {
    pub ty: &'static TypeInfo,
    pub ne: [u64; 4],
    pub nbytes: u64,
    pub home: Home,
}

/// Where the bytes of a version are.
#[derive(Debug)]
pub(super) enum Home {
    /// In a file of the model, and in a buffer once somebody asked for that.
    File {
        file: usize,
        offset: u64,
        loaded: OnceCell<Placed>,
        /// Held by the thread that loads it.
        loading: Mutex<()>,
    },
    /// In a buffer only.
    Private(Placed),
}

/// A place inside a buffer.
#[derive(Debug, Clone)]
pub(super) struct Placed {
    pub buffer: Arc<dyn Buffer>,
    pub device: usize,
    pub offset: u64,
    pub len: u64,
}

impl Placed {
    pub fn address(&self) -> u64 {
        self.buffer.address() + self.offset
    }

    pub fn host(&self) -> Option<&[u8]> {
        let bytes = self.buffer.host()?;
        Some(&bytes[self.offset as usize..(self.offset + self.len) as usize])
    }

    pub fn read(&self, at: u64, bytes: &mut [u8]) -> Result<(), DeviceError> {
        self.buffer.read(self.offset + at, bytes)
    }
}

impl Version {
    pub fn in_file(info: &TensorInfo, file: usize) -> Version {
        Version {
            ty: info.ty,
            ne: info.ne,
            nbytes: info.nbytes,
            home: Home::File {
                file,
                offset: info.offset,
                loaded: OnceCell::new(),
                loading: Mutex::new(()),
            },
        }
    }

    /// Where the bytes are on a device, if they are on one.
    pub fn placed(&self) -> Option<&Placed> {
        match &self.home {
            Home::File { loaded, .. } => loaded.get(),
            Home::Private(placed) => Some(placed),
        }
    }
}

/// What a tensor is at one moment. Holds on to its bytes: a buffer seen here is
/// not freed before the view is dropped.
#[derive(Debug, Clone)]
pub struct TensorView {
    version: Arc<Version>,
    /// What has happened to it.
    pub state: State,
    /// Index of the file it was loaded from.
    pub file: usize,
    /// How often it changed since the model was opened.
    pub generation: u64,
}

impl TensorView {
    pub(super) fn new(
        version: Arc<Version>,
        state: State,
        file: usize,
        generation: u64,
    ) -> TensorView {
        TensorView {
            version,
            state,
            file,
            generation,
        }
    }

    pub(super) fn version(&self) -> &Version {
        &self.version
    }

    /// Type of its elements.
    pub fn ty(&self) -> &'static TypeInfo {
        self.version.ty
    }

    /// Elements per dimension, innermost first.
    pub fn ne(&self) -> [u64; 4] {
        self.version.ne
    }

    /// Strides in bytes, as ggml computes them.
    pub fn nb(&self) -> [u64; 4] {
        strides(self.version.ty, &self.version.ne)
    }

    /// Bytes of data.
    pub fn nbytes(&self) -> u64 {
        self.version.nbytes
    }

    /// Where its bytes start in the file it was loaded from, unless a reload has
    /// replaced them.
    pub fn file_offset(&self) -> Option<u64> {
        match self.version.home {
            Home::File { offset, .. } => Some(offset),
            Home::Private(_) => None,
        }
    }

    /// Index of its device and its address there, once it is materialised.
    pub fn placed(&self) -> Option<(usize, u64)> {
        let placed = self.version.placed()?;
        Some((placed.device, placed.address()))
    }

    /// Copies its bytes from the device they are on; `None` while it is on none.
    pub fn read(&self, at: u64, bytes: &mut [u8]) -> Option<Result<(), DeviceError>> {
        Some(self.version.placed()?.read(at, bytes))
    }
}
