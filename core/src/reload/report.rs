//! Reports of reloads: files, tensors and times.

use std::ffi::CString;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use crate::error::DeviceError;
use crate::error::{Error, Result};
use crate::gguf::{OpenError, TypeInfo};

/// The outcome of a reload for a tensor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Outcome {
    /// The file changed, the bytes of the tensor did not.
    Unchanged,
    /// New bytes, in a buffer of its own.
    Swapped,
    /// The original bytes are in use again.
    Returned,
    /// The file was written in place: the bytes in use had changed already.
    InPlace,
    /// The tensor or its whole file was refused; nothing changed.
    Refused,
    /// Same bytes, new placement: a tensor that is laid out with it changed, a device ran out of
    /// memory, or has memory again.
    Moved,
}

/// What a commit did to a tensor.
#[derive(Debug, Clone)]
pub struct Effect {
    /// Index of the tensor.
    pub tensor: usize,
    /// The outcome for the tensor.
    pub outcome: Outcome,
    /// Which devices hold which rows of the tensor now; empty while it is on no device.
    pub placement: String,
}

/// A tensor of a changed file.
#[derive(Debug, Clone)]
pub struct TensorReport {
    /// Index of the tensor.
    pub tensor: usize,
    /// Name of the tensor.
    pub name: CString,
    /// The outcome for the tensor.
    pub outcome: Outcome,
    /// Type before.
    pub old_type: &'static TypeInfo,
    /// Type now; for a refused tensor the type before.
    pub new_type: &'static TypeInfo,
    /// Bytes in the file; 0 for a tensor that was refused, returned by a revert, or only moved.
    pub nbytes: u64,
    /// Index of the file.
    pub file: usize,
    /// Which devices hold which rows of the tensor now; empty when the tensor did not change or is
    /// on no device.
    pub placement: String,
    /// Why the tensor was refused; empty otherwise.
    pub reason: String,
}

/// The outcome of a reload for a changed file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FileEvent {
    /// The tensors of the file are in use now.
    Taken,
    /// The file was left out; its tensors did not change.
    Ignored,
}

/// Why a file was ignored or a reload failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Cause {
    /// The file does not exist, is no regular file, or cannot be read.
    Unreadable,
    /// The file is shorter than its header says.
    Incomplete,
    /// The file is not a valid GGUF file.
    Malformed,
    /// The file changed while it was read.
    Changing,
    /// The file has other hyperparameters, tensors or shapes than the model.
    OtherModel,
    /// Tensors of the file have zeros or non-finite scales that the tensors in use do not have.
    Damaged,
    /// The program cannot use a tensor of the file, for example because of its type.
    Refused,
    /// Running evaluations, or a graph that the program keeps, prevented the switch.
    Busy,
    /// There is not enough memory.
    Memory,
    /// A device failed, or another error.
    Other,
}

impl Cause {
    /// All causes, in the order of their numbers.
    pub const ALL: [Cause; 10] = [
        Cause::Unreadable,
        Cause::Incomplete,
        Cause::Malformed,
        Cause::Changing,
        Cause::OtherModel,
        Cause::Damaged,
        Cause::Refused,
        Cause::Busy,
        Cause::Memory,
        Cause::Other,
    ];

    /// Returns the cause of a failed reload.
    pub fn of(error: &Error) -> Cause {
        match error {
            Error::Busy(_) => Cause::Busy,
            Error::NoMemory(_) | Error::Device(DeviceError::OutOfMemory { .. }) => Cause::Memory,
            Error::Read { .. } | Error::Open(OpenError::Io { .. }) => Cause::Unreadable,
            Error::Open(OpenError::Changing { .. }) => Cause::Changing,
            Error::Open(_) => Cause::Malformed,
            Error::Invalid(_) => Cause::Refused,
            _ => Cause::Other,
        }
    }

    /// Returns the name, in lower case.
    pub fn name(self) -> &'static str {
        match self {
            Cause::Unreadable => "unreadable",
            Cause::Incomplete => "incomplete",
            Cause::Malformed => "malformed",
            Cause::Changing => "changing",
            Cause::OtherModel => "other_model",
            Cause::Damaged => "damaged",
            Cause::Refused => "refused",
            Cause::Busy => "busy",
            Cause::Memory => "memory",
            Cause::Other => "other",
        }
    }
}

/// Why a file was ignored.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Ignored {
    /// The cause.
    pub cause: Cause,
    /// The cause, in a sentence.
    pub reason: String,
    /// Whether this is the first report of the cause for this version of the file.
    pub first: bool,
}

/// A file that changed since the last reload.
#[derive(Debug, Clone)]
pub struct FileReport {
    /// Index of the file.
    pub file: usize,
    /// Path of the file.
    pub path: PathBuf,
    /// Why the file was ignored; `None` when its tensors are in use now.
    pub ignored: Option<Ignored>,
    /// What of the file in use needs a new start of the program, in words.
    pub needs_start: Option<String>,
}

impl FileReport {
    /// Returns the outcome for the file.
    pub fn event(&self) -> FileEvent {
        match self.ignored {
            None => FileEvent::Taken,
            Some(_) => FileEvent::Ignored,
        }
    }

    /// Returns why the file was ignored, or what of it needs a new start of the program; empty
    /// otherwise.
    pub fn reason(&self) -> &str {
        let ignored = self.ignored.as_ref().map(|ignored| &ignored.reason);
        ignored
            .or(self.needs_start.as_ref())
            .map_or("", |reason| reason)
    }
}

/// Duration of each step of a reload.
#[derive(Debug, Clone, Copy, Default)]
pub struct Times {
    /// Checking files and parsing changed headers.
    pub detect: Duration,
    /// Reading and hashing tensors.
    pub compare: Duration,
    /// Allocating and filling new buffers.
    pub stage: Duration,
    /// Waiting for running evaluations to end.
    pub wait: Duration,
    /// Switching, while no evaluation runs.
    pub switch: Duration,
    /// The whole reload.
    pub total: Duration,
}

/// The report of a reload.
#[derive(Debug, Clone, Default)]
pub struct Report {
    /// Number of files that were checked, one `stat` each.
    pub files_checked: usize,
    /// Files that changed.
    pub files: Vec<FileReport>,
    /// Tensors of those files, sorted by index.
    pub tensors: Vec<TensorReport>,
    /// Bytes read into new buffers.
    pub bytes_staged: u64,
    /// Number of switches: one, or several when a reload is done in steps.
    pub commits: u32,
    /// Generation of the model after the reload; 0 when this reload changed nothing.
    pub generation: u64,
    /// Why a reload in steps stopped after some of them.
    pub failure: Option<String>,
    /// The cause of `failure`.
    pub cause: Option<Cause>,
    /// Duration of each step.
    pub times: Times,
    /// Time until a changed file has not changed for long enough; `None` when no file is waited
    /// for.
    pub look_again: Option<Duration>,
    /// Whether a changed file was postponed because its reload failed before.
    pub postponed: bool,
    /// Whether the report has anything to log that was not logged before.
    pub(super) news: bool,
}

impl Report {
    /// Returns the number of tensors with this outcome.
    pub fn count(&self, outcome: Outcome) -> usize {
        self.tensors.iter().filter(|t| t.outcome == outcome).count()
    }

    /// Returns whether any tensor was switched.
    pub fn changed(&self) -> bool {
        self.commits > 0
    }

    /// Adds the outcome for a tensor. An earlier entry keeps its outcome unless the outcome is
    /// `Unchanged`, and gets the new placement.
    pub(super) fn add(&mut self, mut entry: TensorReport) {
        match self
            .tensors
            .binary_search_by_key(&entry.tensor, |t| t.tensor)
        {
            Err(at) => self.tensors.insert(at, entry),
            Ok(at) => {
                let known = &mut self.tensors[at];
                if known.outcome == Outcome::Unchanged {
                    std::mem::swap(known, &mut entry);
                } else if !entry.placement.is_empty() {
                    known.placement = entry.placement;
                }
            }
        }
    }

    /// Ends a reload that began at `began`: returns the report, or the error of a reload that
    /// changed nothing.
    pub(super) fn finish(mut self, began: Instant, result: Result<()>) -> Result<Report> {
        self.times.total = began.elapsed();
        match result {
            Err(error) if self.commits == 0 => return Err(error),
            Err(error) => {
                self.cause = Some(Cause::of(&error));
                self.failure = Some(error.to_string());
            }
            Ok(()) => {}
        }
        if self.news {
            self.log();
        }
        Ok(self)
    }

    pub(super) fn log(&self) {
        log::info!(
            "reload: {} swapped, {} returned, {} moved, {} unchanged, {} in place, {} refused; {:.1} ms, pause {:.0} us",
            self.count(Outcome::Swapped),
            self.count(Outcome::Returned),
            self.count(Outcome::Moved),
            self.count(Outcome::Unchanged),
            self.count(Outcome::InPlace),
            self.count(Outcome::Refused),
            self.times.total.as_secs_f64() * 1e3,
            self.times.switch.as_secs_f64() * 1e6,
        );
    }
}
