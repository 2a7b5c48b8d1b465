//! Destination of the messages of the [`log`] macros: standard error, or a callback.
//!
//! Programs that use the Rust API may install a logger of their own instead; the C API and
//! the drop-in call [`init`].

use std::io::Write;
use std::sync::{Arc, Once};

use log::{Level, LevelFilter, Log, Metadata, Record};
use parking_lot::RwLock;

use crate::config::Config;
use crate::signals::without_write_signals;
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

/// Sends messages to `sink`, or to standard error again with `None`.
pub fn set_sink(sink: Option<Arc<Sink>>) {
    *SINK.write() = sink;
}

/// Writes whole lines to standard error. A host may have closed it, or the pipe that it is: a failed write is
/// ignored.
pub fn print(lines: &str) {
    let lines = text::lines(lines);
    let _ = without_write_signals(|| std::io::stderr().write_all(lines.as_bytes()));
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
            None => {
                // One write for the whole line: the host writes to the same descriptor.
                let level = match record.level() {
                    Level::Error => "error",
                    Level::Warn => "warn",
                    Level::Info => "info",
                    Level::Debug | Level::Trace => "debug",
                };
                print(&format!("llama-sidecar: {level}: {message}\n"));
            }
        }
    }

    fn flush(&self) {}
}
