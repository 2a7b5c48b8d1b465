//! A simulated CUDA driver: what post-fetch calls of `libcuda.so.1`, without a GPU.
//!
//! Found through the loader path, as the real one. It is asynchronous (a worker per
//! stream), takes the time that a link would take (latency and bandwidth, one copy of a
//! direction at a time), and blocks the caller of a copy from pageable memory. Device
//! memory lies where no process can read it, is poisoned when it is fresh, and runs out.
//!
//! It checks its callers, more strictly than the real one: freed handles, freed memory,
//! memory that is used by two streams without an event between them, memory read or freed
//! before its copies were seen to end. What it finds are [`sim_cuda_problems`]; with
//! `SIM_CUDA_STRICT=1` they, and what was never freed, end the process with status 97.
//!
//! Modules, top to bottom:
//!
//! | module | contents |
//! |---|---|
//! | `driver` | the functions of cuda.h |
//! | `state` | what the driver holds, and the workers of its streams |
//! | `order` | who may touch what: a clock for each stream |
//!
//! | variable | default | meaning |
//! |---|---|---|
//! | `SIM_CUDA_DEVICES` | 1 | how many devices |
//! | `SIM_CUDA_MEMORY_MB` | 1024 | memory of each, MiB |
//! | `SIM_CUDA_LINK_MBPS` | 13000 | link, from page-locked memory, MB/s |
//! | `SIM_CUDA_PAGEABLE_MBPS` | 6000 | the same from pageable memory |
//! | `SIM_CUDA_LATENCY_NS` | 5000 | each copy, before its first byte |
//! | `SIM_CUDA_MOVE` | 1 | 0: copies take their time but move nothing; a GPU's copy engine takes no core from the benchmark, and a thread would |
//! | `SIM_CUDA_REGISTER` | 1 | 0: page-locking existing memory is refused |
//! | `SIM_CUDA_FAIL` | none | `cuEventRecord:3`: the third call of that function fails |
//! | `SIM_CUDA_LOSE` | 0 | the device is lost at the n-th call |
//! | `SIM_CUDA_HANG` | 0 | the n-th recorded event, and all after it, never completes |
//! | `SIM_CUDA_HOLD` | 0 | 1: copies do not begin until it is 0 again |

#![allow(
    non_snake_case,
    clippy::missing_safety_doc,
    reason = "names and contracts are those of cuda.h"
)]

mod driver;
mod order;
mod state;

use std::ffi::{CStr, c_char};

use state::{Config, SIM, lock};

/// Forgets everything: allocations, streams, faults, counts, problems. Settings are those
/// of the environment again.
#[unsafe(no_mangle)]
pub extern "C" fn sim_cuda_reset() {
    let mut sim = lock();
    for stream in sim.streams.values_mut() {
        stream.quit = true;
    }
    sim.start_over(Config::from_environment());
    SIM.changed.notify_all();
}

/// Sets a setting by the name of its variable, or a fault: `cuEventRecord` and n makes the
/// n-th call of it from now on fail.
///
/// # Safety
///
/// `name` is a C string.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sim_cuda_set(name: *const c_char, value: u64) {
    // SAFETY: the caller's promise.
    let name = unsafe { CStr::from_ptr(name) }.to_string_lossy();
    lock().set(&name, value);
    SIM.changed.notify_all();
}

/// Writes the copies to devices that streams made since the last call, a line each: the first and the last
/// address in the process, and the nanoseconds between the records around it. Returns the length.
///
/// # Safety
///
/// `buffer` holds `size` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sim_cuda_copies(buffer: *mut u8, size: usize) -> usize {
    let line = |(range, time): (std::ops::Range<u64>, std::time::Duration)| {
        format!("{} {} {}\n", range.start, range.end, time.as_nanos())
    };
    let text: String = lock().copied.drain(..).map(line).collect();
    // SAFETY: the caller's promise.
    unsafe { buffer.copy_from_nonoverlapping(text.as_ptr(), text.len().min(size)) };
    text.len()
}

/// Writes for how many nanoseconds a stream waited for events: from each call that made it wait, and
/// from the record before that call.
///
/// # Safety
///
/// `waited` holds two numbers.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sim_cuda_waited(stream: u64, waited: *mut [u64; 2]) {
    let sim = lock();
    let found = sim.streams.get(&stream).map(|stream| stream.figures.waited);
    let waited_ns = found.unwrap_or_default().map(|time| time.as_nanos() as u64);
    // SAFETY: the caller's promise.
    unsafe { waited.write(waited_ns) };
}

/// Returns for how many nanoseconds this thread polled events until they were reached, since the last
/// call.
#[unsafe(no_mangle)]
pub extern "C" fn sim_cuda_polled() -> u64 {
    driver::POLLED.with_borrow_mut(|polled| std::mem::take(polled).time.as_nanos() as u64)
}

/// How often a function was called; also `pageable`, copies from pageable memory, and `total`.
///
/// # Safety
///
/// `name` is a C string.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sim_cuda_count(name: *const c_char) -> u64 {
    // SAFETY: the caller's promise.
    let name = unsafe { CStr::from_ptr(name) }.to_string_lossy();
    lock().calls.get(&*name).copied().unwrap_or(0)
}

/// Writes what callers did wrong, and what was never freed, a line each; returns the length.
///
/// # Safety
///
/// `buffer` holds `size` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sim_cuda_problems(buffer: *mut u8, size: usize) -> usize {
    let text = lock().findings().join("\n");
    // SAFETY: the caller's promise.
    unsafe { buffer.copy_from_nonoverlapping(text.as_ptr(), text.len().min(size)) };
    text.len()
}
