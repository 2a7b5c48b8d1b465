//! The thread that looks at files, and the ends of its life.
//!
//! It is started when the first model is complete. It does not exist in a forked
//! child, where nothing of the drop-in works on, and it is kept from ggml once the
//! process ends.

use std::sync::Once;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use llama_sidecar::config::Config;
use serde_json::json;

use crate::{barrier, control, expert_trace, journal, reloader, sched, sigterm, thread};

/// Whether the drop-in takes part in anything.
static OFF: AtomicBool = AtomicBool::new(false);
/// Whether this process is a forked child of the one in which the drop-in was started.
static FORKED: AtomicBool = AtomicBool::new(false);
/// How long the end of the process waits for a reload to notice.
const LAST_WAIT: Duration = Duration::from_secs(2);

/// Whether anything is asked for and possible in this process.
pub fn is_on() -> bool {
    let config = Config::get();
    !OFF.load(Ordering::Relaxed) && (config.hotswap || config.traces())
}

/// Starts what runs beside the host, once.
pub fn start() {
    static STARTED: Once = Once::new();
    STARTED.call_once(|| {
        let config = Config::get();
        // SAFETY: both only register functions that stay loaded with this library,
        // which the loader never unloads.
        unsafe {
            libc::atexit(at_exit);
            libc::pthread_atfork(None, None, Some(in_child));
        }
        if let Some(poll) = config.poll.filter(|_| config.hotswap) {
            thread::spawn("llama-sidecar", move || {
                reloader::watch(poll, || !OFF.load(Ordering::Relaxed));
            });
        }
        if config.traces() && config.trace_names {
            thread::spawn("llama-sidecar-n", || {
                expert_trace::log_names(|| !OFF.load(Ordering::Relaxed));
            });
        }
        if let Some(period) = config.trace_every.filter(|_| config.traces()) {
            thread::spawn("llama-sidecar-w", move || {
                expert_trace::write_every(period, || !OFF.load(Ordering::Relaxed));
            });
        }
        if config.traces() {
            sigterm::trace_on_termination();
        }
        if let Some(path) = &config.control {
            control::start(path);
        }
    });
}

/// Takes no part in anything any more: something that cannot be has happened.
pub fn give_up() {
    OFF.store(true, Ordering::SeqCst);
    barrier::shut();
    log::error!("this is a defect of llama-sidecar; hot-swap is off from here on");
}

/// The host's libraries are torn down next: from here on nothing calls into them.
extern "C" fn at_exit() {
    OFF.store(true, Ordering::SeqCst);
    if FORKED.load(Ordering::SeqCst) {
        // The socket and the trace are the parent's.
        return;
    }
    barrier::shut();
    expert_trace::finish();
    control::stop();
    ended();
    reloader::wait_for_end(LAST_WAIT);
}

/// Tells a wrapper how it went.
pub fn ended() {
    journal::note("end", || {
        json!({
            "evaluations": sched::count(),
            "switches": barrier::generation(),
            "longest_pause_us": barrier::pauses().longest.as_micros() as u64,
        })
    });
}

/// In a forked child the threads are gone, and locks may be held for ever.
extern "C" fn in_child() {
    FORKED.store(true, Ordering::SeqCst);
    OFF.store(true, Ordering::SeqCst);
}
