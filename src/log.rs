//! Messages for people. They go to standard error, or where the host says.

use std::fmt;
use std::io::Write;
use std::sync::Arc;

use parking_lot::RwLock;

use crate::config::Config;

/// How much a message matters; the numbers are part of the C ABI.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
#[repr(u32)]
pub enum Level {
    /// Nothing at all; only a threshold, never a message.
    Off = 0,
    /// Something asked for was not done.
    Error = 1,
    /// Something the user should know, for example a file that was ignored.
    Warn = 2,
    /// What was done.
    Info = 3,
    /// How it was done.
    Debug = 4,
}

impl Level {
    /// The level with this lower-case name.
    pub fn from_name(name: &str) -> Option<Level> {
        use Level::*;
        [Off, Error, Warn, Info, Debug]
            .into_iter()
            .find(|level| level.name() == name)
    }

    /// Its lower-case name.
    pub fn name(self) -> &'static str {
        match self {
            Level::Off => "off",
            Level::Error => "error",
            Level::Warn => "warn",
            Level::Info => "info",
            Level::Debug => "debug",
        }
    }
}

/// Takes messages. Called from any thread.
pub type Sink = dyn Fn(Level, &str) + Send + Sync;

static SINK: RwLock<Option<Arc<Sink>>> = RwLock::new(None);

/// Sends messages to `sink`, or to standard error again with `None`.
pub fn set_sink(sink: Option<Arc<Sink>>) {
    *SINK.write() = sink;
}

/// Whether messages of this level are wanted.
pub fn enabled(level: Level) -> bool {
    level <= Config::get().log
}

/// Writes a message if its level is wanted.
pub fn log(level: Level, message: fmt::Arguments<'_>) {
    if enabled(level) {
        print(level, message);
    }
}

/// Writes a message that was asked for by a variable of its own, whatever the level.
pub fn print(level: Level, message: fmt::Arguments<'_>) {
    // The lock is not held while the sink runs: a sink may log or replace itself.
    let sink = SINK.read().clone();
    match sink {
        Some(sink) => sink(level, &message.to_string()),
        // A host may have closed its standard error: that is no reason to panic.
        None => {
            // In one write: the host writes there, too.
            let line = format!("llama-sidecar: {}: {message}\n", level.name());
            let _ = std::io::stderr().write_all(line.as_bytes());
        }
    }
}
