//! Copies the bytes of a tensor into its parts.

use std::io;

use parking_lot::Mutex;

use super::split::StridedRange;
use crate::device::{Buffer, DeviceError};
use sidecar_core::gguf::Source;

/// How much is copied at a time.
const CHUNK: usize = 4 << 20;

/// Ranges of at least this many bytes are read one by one. Shorter ranges are gathered from
/// larger reads.
const MIN_DIRECT_READ: u64 = 64 << 10;

/// Why the bytes of a tensor were not copied.
#[derive(Debug)]
pub(super) enum CopyError {
    /// Reading the file failed near this offset.
    Read(u64, io::Error),
    Device(DeviceError),
}

impl From<DeviceError> for CopyError {
    fn from(error: DeviceError) -> CopyError {
        CopyError::Device(error)
    }
}

/// Reads bytes of a whole tensor, from an offset within the tensor.
pub(super) type ReadAt<'a> = dyn Fn(u64, &mut [u8]) -> Result<(), CopyError> + 'a;

/// Reads a tensor that starts at `offset` of a file.
pub(super) fn from_file(
    source: &Source,
    offset: u64,
) -> impl Fn(u64, &mut [u8]) -> Result<(), CopyError> {
    move |at, bytes| {
        source
            .read_at(bytes, offset + at)
            .map_err(|error| CopyError::Read(offset + at, error))
    }
}

/// Where the bytes of a part are written.
pub(super) enum Destination<'a> {
    /// Memory of the process.
    Memory(&'a mut [u8]),
    /// A buffer that several threads write, and an offset in it.
    Device(&'a Mutex<Box<dyn Buffer>>, u64),
}

impl<'a> Destination<'a> {
    /// Returns a whole buffer as the destination.
    pub fn all(buffer: &'a mut Mutex<Box<dyn Buffer>>) -> Destination<'a> {
        if buffer.get_mut().host_mut().is_some() {
            let memory = buffer.get_mut().host_mut();
            return Destination::Memory(memory.expect("just seen"));
        }
        Destination::Device(buffer, 0)
    }

    fn write(&mut self, at: u64, bytes: &[u8]) -> Result<(), DeviceError> {
        match self {
            Destination::Memory(memory) => {
                memory[at as usize..at as usize + bytes.len()].copy_from_slice(bytes);
                Ok(())
            }
            Destination::Device(buffer, base) => buffer.lock().write(*base + at, bytes),
        }
    }

    /// Copies `len` bytes, which `read` returns from `from` on, to `at`.
    fn copy(&mut self, at: u64, len: u64, from: u64, read: &ReadAt<'_>) -> Result<(), CopyError> {
        if let Destination::Memory(memory) = self {
            return read(from, &mut memory[at as usize..(at + len) as usize]);
        }
        let mut staging = vec![0; CHUNK.min(len as usize)];
        let mut done = 0;
        while done < len {
            let n = (len - done).min(CHUNK as u64);
            let piece = &mut staging[..n as usize];
            read(from + done, piece)?;
            self.write(at + done, piece)?;
            done += n;
        }
        Ok(())
    }
}

/// Copies the bytes of all parts of a tensor.
pub(super) fn copy_parts(
    read: &ReadAt<'_>,
    parts: &mut [(StridedRange, Destination<'_>)],
) -> Result<(), CopyError> {
    let most = |of: fn(&StridedRange) -> u64| parts.iter().map(|part| of(&part.0)).max();
    let stride = most(|range| range.stride).unwrap_or(0);
    let repeats = most(|range| range.repeats).unwrap_or(0);
    let short = parts.iter().any(|(range, _)| range.len < MIN_DIRECT_READ);
    if repeats > 1 && short && stride <= CHUNK as u64 {
        return gather(read, parts, stride, repeats);
    }
    for (range, destination) in parts {
        for repeat in 0..range.repeats {
            let from = repeat * range.stride + range.from;
            destination.copy(repeat * range.len, range.len, from, read)?;
        }
    }
    Ok(())
}

/// Reads some strides at a time and writes the range of each part.
fn gather(
    read: &ReadAt<'_>,
    parts: &mut [(StridedRange, Destination<'_>)],
    stride: u64,
    repeats: u64,
) -> Result<(), CopyError> {
    let at_once = (CHUNK as u64 / stride.max(1)).clamp(1, repeats);
    let mut block = vec![0; (at_once * stride) as usize];
    let mut first = 0;
    while first < repeats {
        let n = at_once.min(repeats - first);
        let bytes = &mut block[..(n * stride) as usize];
        read(first * stride, bytes)?;
        for (range, destination) in parts.iter_mut() {
            for (i, whole) in bytes.chunks_exact(stride as usize).enumerate() {
                let bytes = &whole[range.from as usize..(range.from + range.len) as usize];
                destination.write((first + i as u64) * range.len, bytes)?;
            }
        }
        first += n;
    }
    Ok(())
}
