//! Filling the parts of a tensor from wherever its bytes are.

use std::io;

use parking_lot::Mutex;

use super::cut::Runs;
use crate::device::{Buffer, DeviceError};
use crate::gguf::Source;

/// How much is copied at a time.
pub(super) const CHUNK: usize = 4 << 20;

/// Runs of at least this many bytes are read one by one; shorter ones are picked out
/// of larger reads.
const WORTH_A_READ: u64 = 64 << 10;

/// Why a tensor was not filled.
#[derive(Debug)]
pub(super) enum FillError {
    /// Reading the file failed, near this offset.
    Read(u64, io::Error),
    Device(DeviceError),
}

impl From<DeviceError> for FillError {
    fn from(error: DeviceError) -> FillError {
        FillError::Device(error)
    }
}

/// Reads bytes of a whole tensor, from an offset within it.
pub(super) type ReadAt<'a> = dyn Fn(u64, &mut [u8]) -> Result<(), FillError> + 'a;

/// Reads a tensor that starts at `offset` of a file.
pub(super) fn from_file(
    source: &Source,
    offset: u64,
) -> impl Fn(u64, &mut [u8]) -> Result<(), FillError> {
    move |at, bytes| {
        source
            .read_at(bytes, offset + at)
            .map_err(|error| FillError::Read(offset + at, error))
    }
}

/// Where a part goes.
pub(super) enum Target<'a> {
    /// Memory that the process writes itself.
    Memory(&'a mut [u8]),
    /// A place in a buffer that several threads fill.
    Device(&'a Mutex<Box<dyn Buffer>>, u64),
}

impl<'a> Target<'a> {
    /// All of a buffer.
    pub fn all(buffer: &'a mut Mutex<Box<dyn Buffer>>) -> Target<'a> {
        if buffer.get_mut().host_mut().is_some() {
            let memory = buffer.get_mut().host_mut();
            return Target::Memory(memory.expect("just seen"));
        }
        Target::Device(buffer, 0)
    }

    fn put(&mut self, at: u64, bytes: &[u8]) -> Result<(), DeviceError> {
        match self {
            Target::Memory(memory) => {
                memory[at as usize..at as usize + bytes.len()].copy_from_slice(bytes);
                Ok(())
            }
            Target::Device(buffer, base) => buffer.lock().write(*base + at, bytes),
        }
    }

    /// Fills `len` bytes at `at` with those that `read` gives from `from` on.
    fn put_read(
        &mut self,
        at: u64,
        len: u64,
        from: u64,
        read: &ReadAt<'_>,
    ) -> Result<(), FillError> {
        if let Target::Memory(memory) = self {
            return read(from, &mut memory[at as usize..(at + len) as usize]);
        }
        let mut staging = vec![0; CHUNK.min(len as usize)];
        let mut done = 0;
        while done < len {
            let n = (len - done).min(CHUNK as u64);
            let piece = &mut staging[..n as usize];
            read(from + done, piece)?;
            self.put(at + done, piece)?;
            done += n;
        }
        Ok(())
    }
}

/// Fills all parts of a tensor.
pub(super) fn fill(read: &ReadAt<'_>, parts: &mut [(Runs, Target<'_>)]) -> Result<(), FillError> {
    let stride = parts.iter().map(|(runs, _)| runs.stride).max().unwrap_or(0);
    let repeats = parts
        .iter()
        .map(|(runs, _)| runs.repeats)
        .max()
        .unwrap_or(0);
    let short_runs = parts.iter().any(|(runs, _)| runs.len < WORTH_A_READ);
    if repeats > 1 && short_runs && stride <= CHUNK as u64 {
        return pick_out(read, parts, stride, repeats);
    }
    for (runs, target) in parts {
        for repeat in 0..runs.repeats {
            let from = repeat * runs.stride + runs.from;
            target.put_read(repeat * runs.len, runs.len, from, read)?;
        }
    }
    Ok(())
}

/// Reads some strides at a time and hands each part its runs.
fn pick_out(
    read: &ReadAt<'_>,
    parts: &mut [(Runs, Target<'_>)],
    stride: u64,
    repeats: u64,
) -> Result<(), FillError> {
    let at_once = (CHUNK as u64 / stride.max(1)).clamp(1, repeats);
    let mut block = vec![0; (at_once * stride) as usize];
    let mut first = 0;
    while first < repeats {
        let n = at_once.min(repeats - first);
        let bytes = &mut block[..(n * stride) as usize];
        read(first * stride, bytes)?;
        for (runs, target) in parts.iter_mut() {
            for (i, whole) in bytes.chunks_exact(stride as usize).enumerate() {
                let run = &whole[runs.from as usize..(runs.from + runs.len) as usize];
                target.put((first + i as u64) * runs.len, run)?;
            }
        }
        first += n;
    }
    Ok(())
}
