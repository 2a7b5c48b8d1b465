//! The bytes of a tensor on devices, in one part or several.

use std::sync::Arc;

use parking_lot::Mutex;

use super::copy::{CopyError, Destination, ReadAt, copy_parts};
use super::placement::Layout;
use super::split::{SplitUnits, StridedRange};
use crate::device::{Buffer, Device, DeviceError};
use sidecar_core::gguf::TypeInfo;

/// The bytes of a tensor on devices.
#[derive(Debug, Clone)]
pub(super) struct Resident {
    pub layout: Layout,
    pub parts: Vec<Part>,
}

/// A part of a tensor: contiguous bytes inside a buffer.
#[derive(Debug, Clone)]
pub(super) struct Part {
    pub buffer: Arc<dyn Buffer>,
    pub device: usize,
    /// First byte in the buffer.
    pub offset: u64,
    /// Bytes of the whole tensor that the part holds.
    pub range: StridedRange,
    /// First unit that the part holds, and one past the last.
    pub units: (u64, u64),
}

/// A part that has no buffer yet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct PartExtent {
    pub device: usize,
    pub range: StridedRange,
    pub units: (u64, u64),
}

/// Parts with buffers of their own, which are not filled yet.
pub(super) struct NewParts {
    layout: Layout,
    parts: Vec<PartExtent>,
    buffers: Vec<Mutex<Box<dyn Buffer>>>,
}

/// Plans the parts of a tensor under a layout. Parts without bytes are left out.
pub(super) fn part_extents(
    ty: &TypeInfo,
    ne: &[u64; 4],
    nbytes: u64,
    rows: u64,
    layout: &Layout,
) -> Vec<PartExtent> {
    match layout {
        Layout::Whole(device) => vec![PartExtent {
            device: *device,
            range: StridedRange::whole(nbytes),
            units: (0, ne[1]),
        }],
        Layout::Split { axis, bounds } => {
            let units = SplitUnits::new(ty, ne, rows, *axis);
            let parts = bounds.windows(2).enumerate().map(|(i, part)| PartExtent {
                device: i + 1,
                range: StridedRange::of(&units, part[0], part[1]),
                units: (part[0], part[1]),
            });
            parts.filter(|part| part.range.bytes() > 0).collect()
        }
    }
}

impl PartExtent {
    /// Returns the part whose bytes start at `offset` of a buffer.
    pub fn at(&self, buffer: Arc<dyn Buffer>, offset: u64) -> Part {
        Part {
            buffer,
            device: self.device,
            offset,
            range: self.range,
            units: self.units,
        }
    }
}

impl Part {
    /// Returns the address of the first byte on the device.
    pub fn address(&self) -> u64 {
        self.buffer.address() + self.offset
    }
}

impl NewParts {
    /// Allocates a buffer for each part.
    pub fn allocate(
        devices: &[Arc<dyn Device>],
        layout: Layout,
        parts: Vec<PartExtent>,
    ) -> Result<NewParts, DeviceError> {
        let allocate = |part: &PartExtent| {
            let device = devices[part.device].clone();
            Ok(Mutex::new(device.allocate(part.range.bytes())?))
        };
        let buffers = parts.iter().map(allocate).collect::<Result<_, _>>()?;
        Ok(NewParts {
            layout,
            parts,
            buffers,
        })
    }

    /// Fills all parts with the bytes of the tensor.
    pub fn fill(&mut self, read: &ReadAt<'_>) -> Result<(), CopyError> {
        let parts = self.parts.iter().zip(&mut self.buffers);
        let mut destinations: Vec<_> = parts
            .map(|(part, buffer)| (part.range, Destination::all(buffer)))
            .collect();
        copy_parts(read, &mut destinations)
    }

    /// Returns the filled parts.
    pub fn into_resident(self) -> Resident {
        let parts = self.parts.iter().zip(self.buffers);
        Resident {
            layout: self.layout,
            parts: parts
                .map(|(part, buffer)| part.at(buffer.into_inner().into(), 0))
                .collect(),
        }
    }
}

impl Resident {
    /// Returns the part, if there is only one.
    pub fn whole(&self) -> Option<&Part> {
        match (&self.layout, self.parts.as_slice()) {
            (Layout::Whole(_), [part]) => Some(part),
            _ => None,
        }
    }

    /// Returns the bytes, if they are in one part in memory of the process.
    pub fn host(&self) -> Option<&[u8]> {
        let part = self.whole()?;
        let bytes = part.buffer.host()?;
        Some(&bytes[part.offset as usize..(part.offset + part.range.bytes()) as usize])
    }

    /// Copies bytes of the whole tensor from its parts.
    pub fn read(&self, at: u64, bytes: &mut [u8]) -> Result<(), DeviceError> {
        let end = at + bytes.len() as u64;
        for part in &self.parts {
            let range = &part.range;
            if range.len == 0 {
                continue;
            }
            let first = (at.saturating_sub(range.from + range.len - 1)).div_ceil(range.stride);
            for repeat in first..range.repeats {
                let start = repeat * range.stride + range.from;
                if start >= end {
                    break;
                }
                let (from, to) = (start.max(at), (start + range.len).min(end));
                let inside = part.offset + repeat * range.len + (from - start);
                let target = &mut bytes[(from - at) as usize..(to - at) as usize];
                part.buffer.read(inside, target)?;
            }
        }
        Ok(())
    }
}
