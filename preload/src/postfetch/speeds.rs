//! How fast the link copies experts, and how fast memory can be read: what decides whether
//! experts that stay on a device are faster than the CPU.

use std::hint::black_box;
use std::time::{Duration, Instant};

use sidecar_core::parallel::{self, Threads};

use crate::ggml::{Ggml, Tensor};

/// Bytes that are read: more than the caches of most CPUs hold.
const READ: usize = 256 << 20;
/// Bytes that are copied.
const COPIED: usize = 64 << 20;
/// Bytes that a thread reads at a time.
const BLOCK: usize = 4 << 20;

/// Speeds in bytes per second.
#[derive(Debug, Clone, Copy)]
pub struct Speeds {
    /// Of copies to the device.
    pub link: f64,
    /// Of reads by the CPU, on several threads.
    pub memory: f64,
}

/// Measures both with a matrix of a model.
///
/// # Safety
///
/// A live tensor on a device that nothing uses.
pub unsafe fn measure(ggml: &Ggml, matrix: &[u8], on_device: *mut Tensor) -> Speeds {
    // SAFETY: as the caller ensures.
    let size = unsafe { (ggml.f.ggml_nbytes)(on_device) };
    let copied = &matrix[..matrix.len().min(size).min(COPIED)];
    let read = &matrix[..matrix.len().min(READ)];
    Speeds {
        memory: speed(read.len(), || {
            parallel::for_each(Threads::All, read.chunks(BLOCK).collect(), sum, || true);
        }),
        // SAFETY: the tensor has at least these bytes.
        link: speed(copied.len(), || unsafe {
            let from = copied.as_ptr().cast();
            (ggml.f.ggml_backend_tensor_set)(on_device, from, 0, copied.len());
        }),
    }
}

/// Reads bytes.
fn sum(bytes: &[u8]) -> bool {
    let (words, _) = bytes.as_chunks::<8>();
    let word = |of: &[u8; 8]| u64::from_ne_bytes(*of);
    black_box(words.iter().map(word).fold(0, u64::wrapping_add));
    true
}

/// Returns the speed of the second of two runs: the first one may wait for the disk.
fn speed(bytes: usize, run: impl Fn()) -> f64 {
    run();
    let begun = Instant::now();
    run();
    bytes as f64 / begun.elapsed().max(Duration::from_nanos(1)).as_secs_f64()
}
