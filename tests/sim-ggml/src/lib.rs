//! A simulated GPU as a ggml backend, for unmodified llama.cpp: `GGML_BACKEND_PATH` names it.
//!
//! It has one device, `SIM0`, or more. The memory of a device cannot be touched by the host, is poisoned when it is
//! fresh, and runs out. Each backend of the device is a stream with a thread. Kernels are those
//! of the host's CPU backend. Copies from page-locked memory are asynchronous; other copies
//! hold up their caller. What is copied to page-locked memory appears there only after a thread
//! has waited for it.
//!
//! It finds accesses of device memory that nothing orders. Streams and threads of the host are
//! participants. A thread hands what it knows to a stream when it submits work; it receives what
//! a stream knows when it synchronizes with it. Synchronous copies of a thread that have
//! returned are known to all threads: threads are ordered with each other by means that cannot
//! be seen here.
//!
//! Time is virtual: nothing waits for it. Each stream and each thread has its own. Work starts
//! when its stream, its submission and the events before it allow; copies take the
//! link in the order in which they could start, one at a time in each direction; a thread that synchronizes continues at the time of the stream. Graphs of
//! the host's CPU backend take time only where a variable sets how much. A thread's time is
//! not handed to another thread, except through streams and events.
//!
//! | variable | default | meaning |
//! |---|---|---|
//! | `SIM_GGML_DEVICES` | 1 | devices, each with a link of its own |
//! | `SIM_GGML_MEMORY_MB` | 8192 | memory of a device, MiB; more than one number, separated by commas: one for each device, the last for all further ones |
//! | `SIM_GGML_LINK_GBS` | 24 | link, from page-locked memory, GB/s in each direction |
//! | `SIM_GGML_PAGEABLE_GBS` | 12 | the same from other memory |
//! | `SIM_GGML_LATENCY_US` | 8 | each copy, before its first byte |
//! | `SIM_GGML_DEVICE_GBS` | 800 | what kernels read |
//! | `SIM_GGML_TFLOPS` | 60 | operations of products, 10^12/s |
//! | `SIM_GGML_LAUNCH_US` | 3 | each kernel, before its first byte |
//! | `SIM_GGML_HOST_GBS` | 0 | what the host's CPU backend reads; 0: no limit |
//! | `SIM_GGML_HOST_TFLOPS` | 0 | its operations of products; 0: no limit. The longer of both times counts |
//! | `SIM_GGML_COMPUTE` | 1 | 0: kernels and copies move nothing and only take their time; numbers of experts are made at random, the same in each run. `sums`: all is computed except routed products, which become numbers made from all bytes of the experts and from the input: a GPU computes a product in a small part of the time in which a disk reads its experts, and a CPU does not |
//! | `SIM_GGML_ROUTES` | none | a file with the numbers of experts for that: a line `LAYER,EXPERT` for each expert of each token |
//! | `SIM_GGML_CAPTURE` | 1 | 0: no graph is captured and replayed |
//! | `SIM_GGML_THREADS` | 1 | threads for the kernels of a stream |
//! | `SIM_GGML_FAIL` | none | `alloc_buffer:3`: the third call of that function fails; more than one, separated by commas; `all` for each call |
//! | `SIM_GGML_IGNORE` | none | the same for calls that order: they have no effect. `event_wait@2:3`: the third of stream 2. The threads of a host call in any order; the calls of one stream have the same order in each run |
//! | `SIM_GGML_LATE` | none | the same for `set_tensor_async`: the call begins only after the host has begun 32 more graphs |
//! | `SIM_GGML_CLOCK` | 0 | how often virtual time counts on the monotonic clock of a process that has this library in `LD_PRELOAD`, too |
//! | `SIM_GGML_REPORT` | none | a file for the report, JSON; written at the end of the process, and after the first finding |
//! | `GGML_OP_OFFLOAD_MIN_BATCH` | 32 | the smallest batch for which the device takes operations with weights in host memory |
//!
//! Modules, top to bottom:
//!
//! | module | contents |
//! |---|---|
//! | `backend` | the functions that ggml calls |
//! | `report` | what was called, what was found, and what it took in virtual time |
//! | `capture` | graphs that are replayed |
//! | `cpu`, `kernel` | graphs of the host's CPU backend; kernels of the device |
//! | `stream` | streams, each with a thread that does its work in order, and events |
//! | `clock` | the clock of a process that measures time itself |
//! | `sums` | what stands for routed products where they are not computed |
//! | `host`, `work` | threads of the host; how much work a node is |
//! | `sim` | the simulated devices: their memory, their links, and what was found |
//! | `memory`, `queue`, `settings` | device memory; who has the link when; the variables |
//! | `calls`, `order`, `routing`, `schedule` | calls by name; what comes after what; experts of tokens; times of work |
//! | `splitmix` | numbers that look random and are the same in each run |
//! | `ggml` | functions and structs of the process's ggml |

mod backend;
mod calls;
mod capture;
mod clock;
mod cpu;
mod ggml;
mod host;
mod kernel;
mod memory;
mod order;
mod queue;
mod report;
mod routing;
mod schedule;
mod settings;
mod sim;
mod splitmix;
mod stream;
mod sums;
mod work;

use std::ffi::{CStr, OsStr, c_char};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use ggml::Registry;

/// The entry that ggml calls after it has loaded this library.
#[unsafe(no_mangle)]
pub extern "C" fn ggml_backend_init() -> *mut Registry {
    if sim::started().is_none() {
        let ready = settings::Settings::from_environment()
            .and_then(|settings| Ok((settings, ggml::Ggml::of_process()?)));
        match ready {
            Ok((settings, ggml)) => {
                sim::start(settings, ggml, report::write_if_wanted);
                cpu::count_time();
                report::at_end();
            }
            Err(error) => {
                eprintln!("sim-ggml: {error}");
                return std::ptr::null_mut();
            }
        }
    }
    backend::registry()
}

/// Writes the report of what happened so far; whether it was written.
///
/// # Safety
///
/// `path` is a C string.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sim_ggml_report(path: *const c_char) -> bool {
    // SAFETY: the caller's promise.
    let path = Path::new(OsStr::from_bytes(
        unsafe { CStr::from_ptr(path) }.to_bytes(),
    ));
    sim::started().is_some_and(|sim| report::write(sim, path))
}
