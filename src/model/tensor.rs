//! The versions of a tensor, and views of them.

use std::sync::Arc;

use once_cell::sync::OnceCell;
use parking_lot::Mutex;

use super::placement::Layout;
use super::resident::Resident;
use sidecar_core::gguf::{TensorInfo, TypeInfo, strides};

/// What reloads have done to a tensor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum State {
    /// The tensor has the bytes and the layout that it had when the model was opened.
    OnOriginal,
    /// The tensor is in buffers of its own, with other bytes or in another layout.
    Detached,
    /// The tensor is in host memory, with its whole group, because a device ran out of memory.
    FallbackCpu,
}

/// Bytes of a tensor and their type. Never changes: a reload replaces the version.
#[derive(Debug)]
pub(super) struct Version {
    pub ty: &'static TypeInfo,
    pub ne: [u64; 4],
    pub nbytes: u64,
    pub storage: Storage,
}

/// Where the bytes of a version are.
#[derive(Debug)]
pub(super) enum Storage {
    /// In a file of the model, and on devices after they were loaded.
    File {
        file: usize,
        offset: u64,
        loaded: OnceCell<Resident>,
        /// Held by the thread that loads the tensor.
        loading: Mutex<()>,
    },
    /// On devices only.
    Private {
        resident: Resident,
        /// Whether the bytes are the original ones in another layout.
        relocated: bool,
    },
}

impl Version {
    /// Returns the version that a file holds.
    pub fn in_file(info: &TensorInfo, file: usize) -> Version {
        Version {
            ty: info.ty,
            ne: info.ne,
            nbytes: info.nbytes,
            storage: Storage::File {
                file,
                offset: info.offset,
                loaded: OnceCell::new(),
                loading: Mutex::new(()),
            },
        }
    }

    /// Returns a version that is on devices only.
    pub fn on_devices(info: &TensorInfo, resident: Resident) -> Version {
        Version {
            ty: info.ty,
            ne: info.ne,
            nbytes: info.nbytes,
            storage: Storage::Private {
                resident,
                relocated: false,
            },
        }
    }

    /// Returns whether the bytes are the original ones in another layout.
    pub fn is_relocated(&self) -> bool {
        matches!(
            self.storage,
            Storage::Private {
                relocated: true,
                ..
            }
        )
    }

    /// Returns whether the version needs no copy to have this layout: it has it already, or it
    /// is on no device.
    pub fn fits(&self, layout: &Layout) -> bool {
        self.resident()
            .is_none_or(|resident| resident.layout == *layout)
    }

    /// Returns the bytes on devices; `None` before the tensor is loaded.
    pub fn resident(&self) -> Option<&Resident> {
        match &self.storage {
            Storage::File { loaded, .. } => loaded.get(),
            Storage::Private { resident, .. } => Some(resident),
        }
    }
}

/// A tensor as it was at one moment. A buffer seen through a view is not freed before the view
/// is dropped.
#[derive(Debug, Clone)]
pub struct TensorView {
    version: Arc<Version>,
    /// What reloads have done to the tensor.
    pub state: State,
    /// Index of the file that the tensor was loaded from.
    pub file: usize,
    /// How often the tensor changed since the model was opened.
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

    /// Returns the type of the elements.
    pub fn ty(&self) -> &'static TypeInfo {
        self.version.ty
    }

    /// Returns the number of elements per dimension, innermost first.
    pub fn ne(&self) -> [u64; 4] {
        self.version.ne
    }

    /// Returns the strides in bytes, as ggml computes them.
    pub fn nb(&self) -> [u64; 4] {
        strides(self.version.ty, &self.version.ne)
    }

    /// Returns the size of the data in bytes.
    pub fn nbytes(&self) -> u64 {
        self.version.nbytes
    }

    /// Returns the offset of the data in the file that the tensor was loaded from; `None` after
    /// a reload has replaced the data, and for a tensor of the program.
    pub fn file_offset(&self) -> Option<u64> {
        match self.version.storage {
            Storage::File { offset, .. } => Some(offset),
            Storage::Private { .. } => None,
        }
    }

    /// Returns the index of the device and the address there; `None` before the tensor is
    /// loaded, or if it is in several parts.
    pub fn placed(&self) -> Option<(usize, u64)> {
        let part = self.version.resident()?.whole()?;
        Some((part.device, part.address()))
    }

    /// Returns the number of parts; 0 before the tensor is loaded.
    pub fn part_count(&self) -> usize {
        self.version
            .resident()
            .map_or(0, |resident| resident.parts.len())
    }

    /// Returns the parts on devices; none before the tensor is loaded.
    pub fn parts(&self) -> Vec<PartView> {
        let resident = self.version.resident();
        let parts = resident.into_iter().flat_map(|resident| &resident.parts);
        parts
            .map(|part| PartView {
                device: part.device,
                address: part.address(),
                bytes: part.range.bytes(),
                units: part.units,
            })
            .collect()
    }

    /// Returns the layout over devices; `None` before the tensor is loaded.
    pub fn layout(&self) -> Option<&Layout> {
        Some(&self.version.resident()?.layout)
    }
}

/// A part of a tensor on a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PartView {
    /// Index of the device.
    pub device: usize,
    /// Address on the device.
    pub address: u64,
    /// Bytes of the part.
    pub bytes: u64,
    /// First unit and one past the last: rows of each slice, or elements of each row.
    pub units: (u64, u64),
}
