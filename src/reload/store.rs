//! The seam between the reload engine and whatever holds the tensors.

use std::time::Duration;

use super::budget::Need;
use super::content::Defects;
use super::hash::Hash;
use super::report::Effect;
use crate::background::Readers;
use crate::device::DeviceError;
use crate::error::Result;
use crate::gguf::{FileId, Source, TypeInfo};

/// What is to happen to a tensor.
#[derive(Debug, Clone, Copy)]
pub enum Change<'a> {
    /// It goes back to its original bytes.
    Return(usize),
    /// Its bytes have changed already, in the file that it is used out of.
    InPlace(usize),
    /// It gets new bytes.
    Swap(NewData<'a>),
}

impl Change<'_> {
    /// Index of the tensor.
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
    /// The file that holds them.
    pub source: &'a Source,
    /// Where they start.
    pub offset: u64,
    /// How many they are.
    pub nbytes: u64,
}

/// What to do where a device is out of memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OnOutOfMemory {
    /// Stage nothing, and say so.
    Fail,
    /// Stage the tensor, and all that must be laid out with it, in host memory.
    Fallback,
}

/// Why nothing was staged.
#[derive(Debug)]
pub enum StageError {
    /// The bytes of a tensor could not be read.
    Read {
        /// Index of the tensor.
        tensor: usize,
        /// What happened.
        reason: String,
    },
    /// More memory than the limit allows.
    OverBudget(String),
    /// A device had no room, and host memory neither or it was not to be used.
    OutOfMemory(DeviceError),
    /// A device failed otherwise.
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

/// Where tensors live and how they are switched.
///
/// Tensors are known by their index at registration. A store may move more than it
/// is asked to (siblings that must be laid out alike), inside the same commit.
pub trait Store: Sync {
    /// Everything that [`Store::stage`] prepared. Dropped, it leaves no trace.
    type Staged;

    /// Hash of the bytes in use of a tensor; `None` when they are not what was
    /// loaded, because their file was written in place.
    ///
    /// `known` is what it was when last asked for or last switched; a store that
    /// is sure that the bytes have not changed since gives it back.
    fn live_hash(&self, tensor: usize, known: Option<Hash>) -> Option<Hash>;

    /// Returns the offset of a tensor that is used through the mapping of a file, if that file
    /// was written in place and has the identity `id` now, which is not trusted yet.
    fn modified_mapped_offset(&self, tensor: usize, id: &FileId) -> Option<u64>;

    /// Whether a tensor has left its original bytes and can go back to them, and
    /// they still hash to `hash`.
    fn can_return(&self, tensor: usize, hash: Hash) -> bool;

    /// Why a tensor cannot get these bytes, however often it is tried; `None` when it can.
    fn refuses(&self, _job: &NewData<'_>) -> Option<String> {
        None
    }

    /// Defects of the bytes that a tensor had at first; `None` when their file was written
    /// since.
    fn original_defects(&self, tensor: usize) -> Option<Defects>;

    /// Memory that these changes need while they are staged, and what swapped tensors hold.
    fn need(&self, changes: &[Change<'_>]) -> Need;

    /// How tensors may be read and hashed, given what the host is doing.
    fn readers(&self) -> Readers;

    /// Whether the model is still there; a reload of one that is not ends early.
    fn is_wanted(&self) -> bool {
        true
    }

    /// Counts evaluations of the host. An attempt that evaluations stood in the way of is
    /// not repeated before this changed.
    fn activity(&self) -> u64 {
        0
    }

    /// Tensors with the same number are laid out together: never switched apart.
    fn group(&self, tensor: usize) -> usize;

    /// Reads and uploads everything that `changes` need into new buffers. Changes
    /// nothing that can be seen. `None` when there is nothing to switch.
    fn stage(
        &self,
        changes: &[Change<'_>],
        on_out_of_memory: OnOutOfMemory,
    ) -> Result<Option<Self::Staged>, StageError>;

    /// Stages the return of tensors that [`OnOutOfMemory::Fallback`] has put into host memory,
    /// as far as their devices have room again. `None` when there is nothing to switch.
    fn stage_displaced(&self) -> Result<Option<Self::Staged>, StageError> {
        Ok(None)
    }

    /// Switches everything staged, between evaluations, and tells whoever caches
    /// graphs. All or nothing.
    fn commit(&self, staged: Self::Staged) -> Result<Commit>;

    /// From now on, the bytes of a file are right under this identity.
    fn trust(&self, file: usize, id: FileId);
}
