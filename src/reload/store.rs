//! The seam between the reload engine and whatever holds the tensors.

use std::time::Duration;

use super::hash::Hash;
use crate::device::DeviceError;
use crate::error::Result;
use crate::gguf::{FileId, Source, TypeInfo};

/// A tensor to replace: read `nbytes` of `source` from `offset` on.
#[derive(Debug, Clone, Copy)]
pub struct Job<'a> {
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

/// Why nothing was staged.
#[derive(Debug)]
pub enum StageError {
    /// The bytes of the job at this position could not be read.
    Read {
        /// Position among the jobs.
        job: usize,
        /// What happened.
        reason: String,
    },
    /// A device had no room.
    OutOfMemory(DeviceError),
    /// A device failed otherwise.
    Device(DeviceError),
}

/// What a commit cost.
#[derive(Debug, Clone, Copy)]
pub struct Commit {
    /// Waiting for running evaluations to end.
    pub wait: Duration,
    /// The switch itself, during which no evaluation could run.
    pub switch: Duration,
    /// The generation that it made.
    pub generation: u64,
}

/// Where tensors live and how they are switched.
///
/// Tensors are known by their index at registration. A store may move more than
/// it is asked to (parts on other devices, siblings that must be laid out alike)
/// as long as it does so inside the same commit.
pub trait Store: Sync {
    /// Everything that [`Store::stage`] prepared. Dropped, it leaves no trace.
    type Staged;

    /// Hash of the bytes in use of a tensor; `None` when they are not what was
    /// loaded, because their file was written in place.
    ///
    /// `known` is what it was when last asked for or last switched; a store that
    /// is sure that the bytes have not changed since gives it back.
    fn live_hash(&self, tensor: usize, known: Option<Hash>) -> Option<Hash>;

    /// Where a tensor is used straight out of the file with this identity, although
    /// that was written in place since its bytes were trusted: its offset there.
    fn written_through(&self, tensor: usize, id: &FileId) -> Option<u64>;

    /// Whether a tensor has left its original bytes and can go back to them, and
    /// they still hash to `hash`.
    fn can_return(&self, tensor: usize, hash: Hash) -> bool;

    /// Reads and uploads new bytes for all jobs into new buffers. Changes nothing
    /// that can be seen.
    fn stage(&self, jobs: &[Job<'_>]) -> Result<Self::Staged, StageError>;

    /// Switches everything staged, sends the tensors in `others` that left their
    /// original back to it, counts the rest of `others` as changed, and tells
    /// whoever caches graphs. Between evaluations; all or nothing.
    fn commit(&self, staged: Option<Self::Staged>, others: &[usize]) -> Result<Commit>;

    /// From now on, the bytes of a file are right under this identity.
    fn trust(&self, file: usize, id: FileId);
}
