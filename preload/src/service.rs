//! The thread that looks at files, and the ends of its life.
//!
//! It is started when the first model is complete. It does not exist in a forked
//! child, where nothing of the drop-in works on, and it is kept from ggml once the
//! process ends.

use std::sync::Once;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use llama_sidecar::config::Config;
use llama_sidecar::protocol::Event;

use crate::interpose::Inside;
use crate::{control, end, evaluations, gate, journal, reloads, tracing};

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
            spawn("llama-sidecar", move || {
                reloads::watch(poll, || !OFF.load(Ordering::Relaxed));
            });
        }
        if config.traces() && config.trace_names {
            spawn("llama-sidecar-n", || {
                tracing::log_names(|| !OFF.load(Ordering::Relaxed));
            });
        }
        if let Some(period) = config.trace_every.filter(|_| config.traces()) {
            spawn("llama-sidecar-w", move || {
                tracing::write_every(period, || !OFF.load(Ordering::Relaxed));
            });
        }
        if config.traces() {
            end::trace_on_termination();
        }
        if let Some(path) = &config.control {
            control::start(path);
        }
    });
}

/// Starts a thread that takes none of the host's signals; whether it could be had.
pub fn spawn(name: &str, work: impl FnOnce() + Send + 'static) -> bool {
    let mut all = std::mem::MaybeUninit::<libc::sigset_t>::uninit();
    let mut before = std::mem::MaybeUninit::<libc::sigset_t>::uninit();
    // SAFETY: valid sets; the thread inherits the mask, and this one gets its own back.
    let started = unsafe {
        libc::sigfillset(all.as_mut_ptr());
        libc::pthread_sigmask(libc::SIG_SETMASK, all.as_ptr(), before.as_mut_ptr());
        let started = std::thread::Builder::new().name(name.into()).spawn(|| {
            let _inside = Inside::enter();
            work();
        });
        libc::pthread_sigmask(libc::SIG_SETMASK, before.as_ptr(), std::ptr::null_mut());
        started
    };
    if let Err(error) = &started {
        log::error!("cannot start the thread '{name}': {error}");
    }
    started.is_ok()
}

/// Takes no part in anything any more: something that cannot be has happened.
pub fn give_up() {
    OFF.store(true, Ordering::SeqCst);
    gate::shut();
    log::error!("this is a defect of llama-sidecar; hot-swap is off from here on");
}

/// The host's libraries are torn down next: from here on nothing calls into them.
extern "C" fn at_exit() {
    OFF.store(true, Ordering::SeqCst);
    if FORKED.load(Ordering::SeqCst) {
        // The socket and the trace are the parent's.
        return;
    }
    gate::shut();
    tracing::finish();
    control::stop();
    ended();
    reloads::wait_for_end(LAST_WAIT);
}

/// Tells a wrapper how it went.
pub fn ended() {
    journal::note(|| Event::End {
        evaluations: evaluations::count(),
        switches: gate::generation(),
        longest_pause_us: gate::pauses().longest.as_micros() as u64,
    });
}

/// In a forked child the threads are gone, and locks may be held for ever.
extern "C" fn in_child() {
    FORKED.store(true, Ordering::SeqCst);
    OFF.store(true, Ordering::SeqCst);
}
