//! Programs that a fault ended while the drop-in was in them, kept for the user: the next start of the same
//! program with the same model names it, and how to find out whether the drop-in was the cause.

use std::os::unix::process::ExitStatusExt;
use std::process::ExitStatus;

use serde::{Deserialize, Serialize};
use sidecar_core::text;

use crate::launch::kept::{Kept, machine};

/// The list.
const CRASHES: Kept = Kept { name: "crashes" };
/// Signals of faults: other signals come from a user or a supervisor.
const FAULTS: [(i32, &str); 6] = [
    (libc::SIGABRT, "SIGABRT"),
    (libc::SIGBUS, "SIGBUS"),
    (libc::SIGFPE, "SIGFPE"),
    (libc::SIGILL, "SIGILL"),
    (libc::SIGSEGV, "SIGSEGV"),
    (libc::SIGSYS, "SIGSYS"),
];

/// Returns the name of the fault that ended a program.
pub fn fault(status: ExitStatus) -> Option<&'static str> {
    let mut faults = FAULTS.iter();
    let found = faults.find(|(signal, _)| status.signal() == Some(*signal));
    found.map(|(_, name)| *name)
}

/// A start of a program, and the fault that ended it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Start {
    pub machine: String,
    pub version: String,
    /// The path of the program, and its arguments.
    pub words: Vec<String>,
    /// Variables of the drop-in.
    pub variables: Vec<String>,
    /// The models that it opened.
    pub models: Vec<String>,
    pub signal: String,
}

impl Start {
    /// A start that has not ended.
    pub fn new(words: Vec<String>, variables: Vec<String>) -> Start {
        Start {
            machine: machine(),
            version: env!("CARGO_PKG_VERSION").into(),
            words,
            variables,
            models: Vec::new(),
            signal: String::new(),
        }
    }

    /// Whether an earlier start was of the same program, with the same command or with a model that this command names.
    fn is_like(&self, earlier: &Start) -> bool {
        let names = |model: &String| self.words.contains(model);
        self.machine == earlier.machine
            && self.words.first() == earlier.words.first()
            && (self.words == earlier.words || earlier.models.iter().any(names))
    }

    /// Returns a sentence about an earlier start that a fault ended.
    pub fn earlier_crash(&self) -> Option<String> {
        let entries: Vec<Start> = CRASHES.entries();
        let crash = entries.iter().rfind(|earlier| self.is_like(earlier))?;
        let file = CRASHES.path()?;
        Some(format!(
            "this program ended by {} when it ran with the drop-in ({}): if it does not with --none, report it with {}",
            crash.signal,
            crash.variables.join(" "),
            text::path(&file)
        ))
    }

    /// Keeps the end of the start if a fault ended it; else forgets earlier ones that are like it.
    pub fn end(mut self, status: ExitStatus, models: Vec<String>) {
        let known: Vec<Start> = CRASHES.entries();
        let mut entries = known.clone();
        entries.retain(|earlier| !self.is_like(earlier));
        if let Some(name) = fault(status) {
            self.models = models;
            self.signal = name.into();
            entries.push(self);
        }
        if entries != known {
            // Without the list, the next start does not name it.
            let _ = CRASHES.write(entries);
        }
    }
}
