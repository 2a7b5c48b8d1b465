//! What a reload did, file by file and tensor by tensor.

use std::ffi::CString;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use crate::device::DeviceError;
use crate::error::{Error, Result};
use crate::gguf::TypeInfo;

/// What happened to a tensor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Outcome {
    /// Its file changed, its bytes did not.
    Unchanged,
    /// It has new bytes in a buffer of its own.
    Swapped,
    /// It is back on its original bytes.
    Returned,
    /// Its file was written in place: the bytes in use had changed already.
    InPlace,
    /// It, or its whole file, was refused; it is as before.
    Refused,
    /// The same bytes in other places, because something that is laid out with it
    /// changed, or there was no room on a device, or there is again.
    Moved,
}

/// What a commit did to a tensor.
#[derive(Debug, Clone)]
pub struct Effect {
    /// Index of the tensor.
    pub tensor: usize,
    /// What happened to the tensor.
    pub outcome: Outcome,
    /// Which devices hold which rows of the tensor now; empty while it is on no device.
    pub placement: String,
}

/// One tensor of a changed file.
#[derive(Debug, Clone)]
pub struct TensorReport {
    /// Its index.
    pub tensor: usize,
    /// Its name.
    pub name: CString,
    /// What happened to it.
    pub outcome: Outcome,
    /// Type before.
    pub old_type: &'static TypeInfo,
    /// Type now; for a refused tensor the type before.
    pub new_type: &'static TypeInfo,
    /// Bytes in the file; 0 for a tensor that was refused or only moved.
    pub nbytes: u64,
    /// Index of its file.
    pub file: usize,
    /// Which devices hold which rows of it now, in words; empty when it did not
    /// change or is on no device.
    pub placement: String,
    /// Why it was refused; empty otherwise.
    pub reason: String,
}

/// What became of a changed file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FileEvent {
    /// Its tensors are now the ones in use.
    Taken,
    /// It was left out; its tensors are as before.
    Ignored,
}

/// Why a file or a reload was not taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Cause {
    /// The file is gone, no regular file, or cannot be read.
    Unreadable,
    /// It is shorter than its header says.
    Incomplete,
    /// It is no GGUF file that can be read.
    Malformed,
    /// It changed while it was read.
    Changing,
    /// It lacks tensors of the model, or has them in another shape.
    OtherModel,
    /// Its tensors hold zeros or non-finite scales that those in use do not.
    Damaged,
    /// The program cannot use what it holds, for example its type.
    Refused,
    /// Evaluations, or a graph that the host keeps, stood in the way.
    Busy,
    /// There is no memory for it.
    Memory,
    /// A device failed, or something else.
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

    /// The cause of a reload that failed as a whole.
    pub fn of(error: &Error) -> Cause {
        match error {
            Error::Busy(_) => Cause::Busy,
            Error::NoMemory(_) | Error::Device(DeviceError::OutOfMemory { .. }) => Cause::Memory,
            Error::Read { .. } => Cause::Unreadable,
            _ => Cause::Other,
        }
    }

    /// Its name, in lower case.
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
    /// In one word.
    pub cause: Cause,
    /// In a sentence.
    pub reason: String,
    /// Whether no reload reported it before for this version of the file.
    pub first: bool,
}

/// One file that is not as it was at the last reload.
#[derive(Debug, Clone)]
pub struct FileReport {
    /// Index of the file.
    pub file: usize,
    /// Its path.
    pub path: PathBuf,
    /// Why it was left out; `None` when its tensors are now the ones in use.
    pub ignored: Option<Ignored>,
}

impl FileReport {
    /// What became of it.
    pub fn event(&self) -> FileEvent {
        match self.ignored {
            None => FileEvent::Taken,
            Some(_) => FileEvent::Ignored,
        }
    }

    /// Why it was ignored; empty otherwise.
    pub fn reason(&self) -> &str {
        self.ignored.as_ref().map_or("", |ignored| &ignored.reason)
    }
}

/// How long each step took.
#[derive(Debug, Clone, Copy, Default)]
pub struct Times {
    /// Looking at files and parsing changed headers.
    pub detect: Duration,
    /// Reading and hashing tensors.
    pub compare: Duration,
    /// Allocating and filling new buffers.
    pub stage: Duration,
    /// Waiting for running evaluations to end.
    pub wait: Duration,
    /// The switch, during which no evaluation could run.
    pub switch: Duration,
    /// Everything.
    pub total: Duration,
}

/// What a reload did.
#[derive(Debug, Clone, Default)]
pub struct Report {
    /// How many files were looked at, one `stat` each.
    pub files_checked: usize,
    /// Files that are not as they were.
    pub files: Vec<FileReport>,
    /// Tensors of those files, by index.
    pub tensors: Vec<TensorReport>,
    /// Bytes read into new buffers.
    pub bytes_staged: u64,
    /// How often evaluations were kept out: once, but when memory is short.
    pub commits: u32,
    /// The model's generation after the reload; 0 when this reload changed nothing.
    pub generation: u64,
    /// Why a reload that was done in steps stopped after some of them.
    pub failure: Option<String>,
    /// The same in one word.
    pub cause: Option<Cause>,
    /// How long it took.
    pub times: Times,
    /// When a file will have been quiet for long enough, if one is waited for.
    pub look_again: Option<Duration>,
    /// Whether a changed file was left for later because its reload failed before.
    pub postponed: bool,
    /// Whether anything is to be said about it that was not said before.
    pub(super) news: bool,
}

impl Report {
    /// How many tensors had this outcome.
    pub fn count(&self, outcome: Outcome) -> usize {
        self.tensors.iter().filter(|t| t.outcome == outcome).count()
    }

    /// Whether any tensor has other bytes than before the call.
    pub fn changed(&self) -> bool {
        self.commits > 0
    }

    /// Adds what happened to a tensor; an earlier entry keeps its outcome unless that
    /// is "unchanged", and gets the new placement.
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

    /// Ends a reload that began at `began`: the report of what was done, or the error of
    /// one that did nothing.
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
            "reload: {} swapped, {} returned, {} moved, {} unchanged, {} in place, {} refused; {:.1} ms, evaluations held for {:.0} us",
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
