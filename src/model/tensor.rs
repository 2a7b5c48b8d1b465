//! One tensor at one moment: what it is and where its bytes are.

use std::sync::Arc;

use once_cell::sync::OnceCell;
use parking_lot::Mutex;

use super::cut::{Cut, Runs};
use super::placement::Layout;
use crate::device::{Buffer, DeviceError};
use crate::gguf::{TensorInfo, TypeInfo, strides};

/// What has happened to a tensor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum State {
    /// As it was when the model was opened.
    OnOriginal,
    /// In buffers of its own, with other bytes or laid out in another way.
    Detached,
    /// In host memory, with its whole layer, because a device had no room.
    FallbackCpu,
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
    /// In a file of the model, and on devices once somebody asked for that.
    File {
        file: usize,
        offset: u64,
        loaded: OnceCell<Placed>,
        /// Held by the thread that loads it.
        loading: Mutex<()>,
    },
    /// On devices only.
    Private {
        placed: Placed,
        /// Whether the bytes are the original ones, moved.
        moved: bool,
    },
}

/// The bytes of a tensor on devices, in one part or several.
#[derive(Debug, Clone)]
pub(super) struct Placed {
    pub layout: Layout,
    pub parts: Vec<Part>,
}

/// A part of a tensor: its bytes one after the other inside a buffer.
#[derive(Debug, Clone)]
pub(super) struct Part {
    pub buffer: Arc<dyn Buffer>,
    pub device: usize,
    /// First byte in the buffer.
    pub offset: u64,
    /// Where its bytes come from in the whole tensor.
    pub runs: Runs,
    /// The units that it holds.
    pub units: (u64, u64),
}

/// A part that is not filled yet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct PartPlan {
    pub device: usize,
    pub runs: Runs,
    pub units: (u64, u64),
}

/// The parts of a tensor under a layout; those without bytes are left out.
pub(super) fn plan_parts(
    ty: &TypeInfo,
    ne: &[u64; 4],
    nbytes: u64,
    rows: u64,
    layout: &Layout,
) -> Vec<PartPlan> {
    match layout {
        Layout::Whole(device) => vec![PartPlan {
            device: *device,
            runs: Runs::whole(nbytes),
            units: (0, ne[1]),
        }],
        Layout::Split { axis, bounds } => {
            let cut = Cut::new(ty, ne, rows, *axis);
            let parts = bounds.windows(2).enumerate().map(|(i, part)| PartPlan {
                device: i + 1,
                runs: Runs::of(&cut, part[0], part[1]),
                units: (part[0], part[1]),
            });
            parts.filter(|part| part.runs.bytes() > 0).collect()
        }
    }
}

impl Part {
    pub fn address(&self) -> u64 {
        self.buffer.address() + self.offset
    }
}

impl Placed {
    /// The part, if it is the only one.
    pub fn whole(&self) -> Option<&Part> {
        match (&self.layout, self.parts.as_slice()) {
            (Layout::Whole(_), [part]) => Some(part),
            _ => None,
        }
    }

    pub fn host(&self) -> Option<&[u8]> {
        let part = self.whole()?;
        let bytes = part.buffer.host()?;
        Some(&bytes[part.offset as usize..(part.offset + part.runs.bytes()) as usize])
    }

    /// Copies bytes of the whole tensor, put together from its parts.
    pub fn read(&self, at: u64, bytes: &mut [u8]) -> Result<(), DeviceError> {
        let end = at + bytes.len() as u64;
        for part in &self.parts {
            let runs = &part.runs;
            if runs.len == 0 {
                continue;
            }
            let first = (at.saturating_sub(runs.from + runs.len - 1)).div_ceil(runs.stride);
            for repeat in first..runs.repeats {
                let run = repeat * runs.stride + runs.from;
                if run >= end {
                    break;
                }
                let (from, to) = (run.max(at), (run + runs.len).min(end));
                let inside = part.offset + repeat * runs.len + (from - run);
                let target = &mut bytes[(from - at) as usize..(to - at) as usize];
                part.buffer.read(inside, target)?;
            }
        }
        Ok(())
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

    /// Whether the bytes are the original ones in other places.
    pub fn is_moved(&self) -> bool {
        matches!(self.home, Home::Private { moved: true, .. })
    }

    /// Whether it needs no copy to be laid out like this: it is, or it is on no device.
    pub fn fits(&self, layout: &Layout) -> bool {
        self.placed().is_none_or(|placed| placed.layout == *layout)
    }

    /// Where the bytes are on devices, if they are on any.
    pub fn placed(&self) -> Option<&Placed> {
        match &self.home {
            Home::File { loaded, .. } => loaded.get(),
            Home::Private { placed, .. } => Some(placed),
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
            Home::Private { .. } => None,
        }
    }

    /// Index of its device and its address there, once it is materialised in one
    /// part.
    pub fn placed(&self) -> Option<(usize, u64)> {
        let part = self.version.placed()?.whole()?;
        Some((part.device, part.address()))
    }

    /// How many parts it is in; 0 before it is materialised.
    pub fn part_count(&self) -> usize {
        self.version.placed().map_or(0, |placed| placed.parts.len())
    }

    /// Its parts on devices; none before it is materialised.
    pub fn parts(&self) -> Vec<PartView> {
        let placed = self.version.placed();
        let parts = placed.into_iter().flat_map(|placed| &placed.parts);
        parts
            .map(|part| PartView {
                device: part.device,
                address: part.address(),
                bytes: part.runs.bytes(),
                units: part.units,
            })
            .collect()
    }

    /// How it is laid out over devices, once it is materialised.
    pub fn layout(&self) -> Option<&Layout> {
        Some(&self.version.placed()?.layout)
    }
}

/// A part of a tensor on a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PartView {
    /// Index of the device.
    pub device: usize,
    /// Address there.
    pub address: u64,
    /// Bytes of the part.
    pub bytes: u64,
    /// First unit and one past the last: rows of each slice, or elements of each row.
    pub units: (u64, u64),
}
