//! Buffers of replaced tensors, for the next ones: the first write to new memory of the process
//! costs more than the copy of the bytes.
//!
//! Only memory of the process is kept. Memory of devices has no such cost, and programs need it.

use std::ffi::CStr;
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use crate::ggml::{BufferType, Ggml, OwnBuffer, Tensor};

/// The most bytes that are kept, if swapped tensors do not hold more.
const ALWAYS_KEPT: u64 = 256 << 20;

/// The buffers that are kept for a model.
#[derive(Default)]
pub struct Pool(Mutex<Kept>);

#[derive(Default)]
struct Kept {
    buffers: Vec<OwnBuffer>,
    /// When a buffer was kept last.
    since: Option<Instant>,
}

impl Pool {
    /// Returns a buffer for one tensor, and the tensor: a kept buffer if one has the size, else a
    /// new one; see [`OwnBuffer::for_tensor`].
    pub fn buffer(
        &self,
        ggml: &'static Ggml,
        buft: *mut BufferType,
        ty: i32,
        ne: &[i64],
        name: &CStr,
    ) -> Result<(OwnBuffer, *mut Tensor), u64> {
        match self.take(buft, OwnBuffer::size_for(ggml, buft, ty, ne)?) {
            Some(buffer) => buffer.reuse(ty, ne, name),
            None => OwnBuffer::for_tensor(ggml, buft, ty, ne, name),
        }
    }

    /// Takes the smallest buffer of a type that has this size, and not more than twice the size.
    fn take(&self, buft: *mut BufferType, size: u64) -> Option<OwnBuffer> {
        let mut kept = self.0.lock();
        let buffers = kept.buffers.iter().enumerate();
        let fits = |buffer: &OwnBuffer| {
            buffer.buffer_type() == buft && (size..=2 * size).contains(&buffer.size())
        };
        let fitting = buffers.filter(|(_, buffer)| fits(buffer));
        let (at, _) = fitting.min_by_key(|(_, buffer)| buffer.size())?;
        Some(kept.buffers.swap_remove(at))
    }

    /// Keeps replaced buffers, while swapped tensors hold `in_use` bytes: as many bytes, or
    /// [`ALWAYS_KEPT`], the newest first; none when all tensors are original. Frees the others.
    pub fn keep(&self, replaced: impl Iterator<Item = OwnBuffer>, in_use: u64) {
        let mut kept = self.0.lock();
        let replaced = replaced.filter(OwnBuffer::is_in_memory_of_process);
        let mut buffers: Vec<OwnBuffer> = replaced.collect();
        buffers.append(&mut kept.buffers);
        let mut left = match in_use {
            0 => 0,
            _ => in_use.max(ALWAYS_KEPT),
        };
        buffers.retain(|buffer| match left.checked_sub(buffer.size()) {
            Some(rest) => {
                left = rest;
                true
            }
            None => false,
        });
        kept.buffers = buffers;
        kept.since = Some(Instant::now());
    }

    /// Returns the size of all kept buffers.
    pub fn bytes(&self) -> u64 {
        self.0.lock().buffers.iter().map(OwnBuffer::size).sum()
    }

    /// Frees all kept buffers; returns whether there were any.
    pub fn clear(&self) -> bool {
        let mut kept = self.0.lock();
        let any = !kept.buffers.is_empty();
        kept.buffers.clear();
        any
    }

    /// Returns when a buffer was kept last; `None` if none is.
    pub fn since(&self) -> Option<Instant> {
        let kept = self.0.lock();
        kept.since.filter(|_| !kept.buffers.is_empty())
    }

    /// Frees all kept buffers if none was kept for so long.
    pub fn clear_after(&self, idle: Duration) {
        if self.since().is_some_and(|since| since.elapsed() >= idle) {
            self.clear();
        }
    }
}
