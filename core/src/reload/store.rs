//! The interface between the reload engine and the tensors that it keeps up to date.

use std::time::Duration;

use super::budget::Need;
use super::content::Defects;
use super::hash::Hash;
use super::report::Effect;
use crate::error::DeviceError;
use crate::error::Result;
use crate::gguf::{FileId, Source, TypeInfo};
use crate::parallel::Threads;

/// A change of a tensor.
#[derive(Debug, Clone, Copy)]
pub enum Change<'a> {
    /// The original bytes are used again.
    Return(usize),
    /// The bytes in use have changed already, through the mapping of the file.
    InPlace(usize),
    /// New bytes replace the bytes in use.
    Swap(NewData<'a>),
}

impl Change<'_> {
    /// Returns the index of the tensor.
    pub fn tensor(&self) -> usize {
        match self {
            Change::Return(tensor) | Change::InPlace(tensor) => *tensor,
            Change::Swap(new_data) => new_data.tensor,
        }
    }
}

/// New bytes for a tensor: `nbytes` of `source` from `offset` on.
#[derive(Debug, Clone, Copy)]
pub struct NewData<'a> {
    /// Index of the tensor.
    pub tensor: usize,
    /// Type of the new bytes; the shape is the old one.
    pub ty: &'static TypeInfo,
    /// The file that holds the new bytes.
    pub source: &'a Source,
    /// Offset of the new bytes in the file.
    pub offset: u64,
    /// Number of new bytes.
    pub nbytes: u64,
}

/// What to do where a device is out of memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OnOutOfMemory {
    /// Stage nothing and return [`StageError::OutOfMemory`].
    Fail,
    /// Stage the tensor in host memory, with all tensors that are laid out with it.
    Fallback,
}

/// Why nothing was staged.
#[derive(Debug)]
pub enum StageError {
    /// The bytes of a tensor could not be read.
    Read {
        /// Index of the tensor.
        tensor: usize,
        /// The error.
        reason: String,
    },
    /// A tensor cannot have these bytes now.
    Refused {
        /// Index of the tensor.
        tensor: usize,
        /// Why, with the name of the tensor.
        reason: String,
    },
    /// The changes need more memory than the limit allows.
    OverBudget(String),
    /// A device is out of memory, and host memory is, too, or may not be used.
    OutOfMemory(DeviceError),
    /// A device failed in another way.
    Device(DeviceError),
}

/// A switch that was done.
#[derive(Debug, Clone, Copy)]
pub struct Switched {
    /// How long the switch waited for running evaluations to end.
    pub wait: Duration,
    /// How long the switch itself took. No evaluation ran meanwhile.
    pub switch: Duration,
    /// The generation after the switch.
    pub generation: u64,
}

/// What a commit did.
#[derive(Debug, Clone)]
pub struct Commit {
    /// The switch.
    pub switched: Switched,
    /// Every tensor that the commit touched.
    pub effects: Vec<Effect>,
}

/// Holds the tensors of a model, and stages and commits changes of them.
///
/// A tensor is given by its index at registration. A commit may also relocate tensors that no
/// change names, because they are laid out with a changed tensor.
pub trait Store: Sync {
    /// Staged changes. Dropping them changes nothing.
    type Staged;

    /// Hashes the bytes in use of a tensor; `None` when they are not the bytes that were loaded,
    /// because their file was written in place.
    ///
    /// `known` is the hash at the last call or switch. A store returns it without reading when
    /// the bytes cannot have changed since.
    fn live_hash(&self, tensor: usize, known: Option<Hash>) -> Option<Hash>;

    /// Returns the offset of a tensor that is used through the mapping of a file, if that file
    /// was written in place and has the identity `id` now, which is not trusted yet.
    fn modified_mapped_offset(&self, tensor: usize, id: &FileId) -> Option<u64>;

    /// Returns whether a tensor does not use its original bytes and can use them again, and the
    /// original bytes still have this hash.
    fn can_return(&self, tensor: usize, hash: Hash) -> bool;

    /// Returns why a tensor can never have these bytes; `None` when it can.
    fn refuses(&self, _job: &NewData<'_>) -> Option<String> {
        None
    }

    /// Returns the defects of the original bytes of a tensor; `None` when their file was written
    /// since.
    fn original_defects(&self, tensor: usize) -> Option<Defects>;

    /// Returns the memory that these changes need, and the memory that swapped tensors hold.
    fn need(&self, changes: &[Change<'_>]) -> Need;

    /// Frees memory that is counted as held and not in use, for example of replaced tensors; returns
    /// whether there was any.
    fn release_unused(&self) -> bool {
        false
    }

    /// Returns on how many threads tensors are read now, and at which priority.
    fn threads(&self) -> Threads;

    /// Fails if the memory of the model is not that which was registered. Called before a reload reads or
    /// writes it.
    fn check(&self) -> Result<()> {
        Ok(())
    }

    /// Returns whether the model still exists. Otherwise the reload ends early.
    fn is_wanted(&self) -> bool {
        true
    }

    /// Returns a number that changes with every evaluation. A switch that evaluations prevented
    /// is not tried again before the number has changed.
    fn activity(&self) -> u64 {
        0
    }

    /// Returns the bytes of other tensors that go to host memory with `changes`, where a device is out of memory.
    fn moved_along(&self, _changes: &[Change<'_>]) -> u64 {
        0
    }

    /// Returns the group of a tensor. Tensors of a group are laid out and switched together.
    fn group(&self, tensor: usize) -> usize;

    /// Reads and uploads everything that `changes` need into new buffers. The program sees no
    /// difference yet. `None` when there is nothing to switch.
    fn stage(
        &self,
        changes: &[Change<'_>],
        on_out_of_memory: OnOutOfMemory,
    ) -> Result<Option<Self::Staged>, StageError>;

    /// Stages the return of tensors that [`OnOutOfMemory::Fallback`] has put into host memory,
    /// as far as their devices have memory again. `None` when there is nothing to switch.
    fn stage_displaced(&self) -> Result<Option<Self::Staged>, StageError> {
        Ok(None)
    }

    /// Switches everything staged between evaluations, and calls the stale-graph callbacks. Either
    /// all changes are made or none.
    fn commit(&self, staged: Self::Staged) -> Result<Commit>;

    /// Trusts the bytes of a file under this identity; see [`TrackedFile::trust`](super::TrackedFile::trust).
    fn trust(&self, file: usize, id: FileId);
}
