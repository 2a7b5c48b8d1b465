//! Destination of the messages of the [`log`] macros: standard error, or a callback.
//!
//! Programs that use the Rust API may install a logger of their own instead; the C API and
//! the drop-in call [`init`].

use std::io::Write;
use std::mem::MaybeUninit;
use std::sync::{Arc, Once};

use log::{Level, LevelFilter, Log, Metadata, Record};
use parking_lot::RwLock;

use crate::config::Config;
use crate::text;

/// Target of messages that a variable of their own requests, for example
/// `LLAMA_POSTFETCH_DEBUG`: written at every value of `LLAMA_SIDECAR_LOG`.
pub const REQUESTED: &str = "llama_sidecar::requested";

/// Receives messages without their newline, on any thread.
pub type Sink = dyn Fn(Level, &str) + Send + Sync;

static SINK: RwLock<Option<Arc<Sink>>> = RwLock::new(None);

/// Installs the logger, once, and reports the variables whose values were rejected.
/// Has no effect in a program that has installed another logger.
pub fn init() {
    static ONCE: Once = Once::new();
    let mut first = false;
    ONCE.call_once(|| {
        first = true;
        if log::set_logger(&Messages).is_ok() {
            log::set_max_level(LevelFilter::Debug);
        }
    });
    // Not inside the call above: a sink may use the C API, which comes back here.
    if first {
        for message in &Config::get().rejected {
            log::error!("{message}");
        }
    }
}

/// Writes to a pipe or a socket. A reader that is gone does not end the process by SIGPIPE.
pub fn without_sigpipe<T>(write: impl FnOnce() -> T) -> T {
    let mut pipe = MaybeUninit::<libc::sigset_t>::uninit();
    let mut before = MaybeUninit::<libc::sigset_t>::uninit();
    let mut pending = MaybeUninit::<libc::sigset_t>::uninit();
    let now = libc::timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    // SAFETY: sets that are filled before they are read. A SIGPIPE of this write is taken before the
    // mask is restored; one that was pending before is the program's.
    unsafe {
        libc::sigemptyset(pipe.as_mut_ptr());
        libc::sigaddset(pipe.as_mut_ptr(), libc::SIGPIPE);
        libc::pthread_sigmask(libc::SIG_BLOCK, pipe.as_ptr(), before.as_mut_ptr());
        libc::sigemptyset(pending.as_mut_ptr());
        libc::sigpending(pending.as_mut_ptr());
        let written = write();
        if libc::sigismember(pending.as_ptr(), libc::SIGPIPE) == 0 {
            libc::sigtimedwait(pipe.as_ptr(), std::ptr::null_mut(), &now);
        }
        libc::pthread_sigmask(libc::SIG_SETMASK, before.as_ptr(), std::ptr::null_mut());
        written
    }
}

/// Sends messages to `sink`, or to standard error again with `None`.
pub fn set_sink(sink: Option<Arc<Sink>>) {
    *SINK.write() = sink;
}

struct Messages;

impl Log for Messages {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        metadata.target() == REQUESTED || metadata.level() <= Config::get().log
    }

    fn log(&self, record: &Record<'_>) {
        if !self.enabled(record.metadata()) {
            return;
        }
        // The lock is not held while the sink runs: a sink may log or replace itself.
        let sink = SINK.read().clone();
        let message = record.args().to_string();
        let message = text::line(&message);
        match sink {
            Some(sink) => sink(record.level(), &message),
            // A host may have closed its standard error: a failed write is ignored.
            None => {
                // One write for the whole line: the host writes to the same descriptor.
                let level = match record.level() {
                    Level::Error => "error",
                    Level::Warn => "warn",
                    Level::Info => "info",
                    Level::Debug | Level::Trace => "debug",
                };
                let line = format!("llama-sidecar: {level}: {message}\n");
                let _ = std::io::stderr().write_all(line.as_bytes());
            }
        }
    }

    fn flush(&self) {}
}
