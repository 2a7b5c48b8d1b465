//! What a reload did, file by file and tensor by tensor.

use std::ffi::CString;
use std::path::PathBuf;
use std::time::Duration;

use super::store::Commit;
use crate::gguf::TypeInfo;
use crate::log::{self, Level};

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

/// One file that is not as it was at the last reload.
#[derive(Debug, Clone)]
pub struct FileReport {
    /// Index of the file.
    pub file: usize,
    /// Its path.
    pub path: PathBuf,
    /// What became of it.
    pub event: FileEvent,
    /// Why it was ignored; empty otherwise.
    pub reason: String,
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
    /// How long it took.
    pub times: Times,
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

    pub(super) fn committed(&mut self, commit: &Commit) {
        self.commits += 1;
        self.times.wait += commit.wait;
        self.times.switch += commit.switch;
        self.generation = commit.generation;
    }

    pub(super) fn log(&self) {
        log::log(
            Level::Info,
            format_args!(
                "reload: {} swapped, {} returned, {} moved, {} unchanged, {} in place, {} refused; {:.1} ms, evaluations held for {:.0} us",
                self.count(Outcome::Swapped),
                self.count(Outcome::Returned),
                self.count(Outcome::Moved),
                self.count(Outcome::Unchanged),
                self.count(Outcome::InPlace),
                self.count(Outcome::Refused),
                self.times.total.as_secs_f64() * 1e3,
                self.times.switch.as_secs_f64() * 1e6,
            ),
        );
    }
}
