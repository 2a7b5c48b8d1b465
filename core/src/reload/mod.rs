//! Hot-swap: replaces tensors of a running model when their files change.
//!
//! The engine detects changed files and decides what happens to each tensor. A [`Store`] holds
//! the tensors and switches them: the buffers of our own models on several devices, or the
//! tensors of another program's ggml.
//!
//! A reload has these steps:
//!
//! 1. `detect`: one `stat` per file; the header of a changed file is parsed.
//! 2. `compare`: refuses files of another model, and decides for each tensor: refuse, keep, return to the
//!    original bytes, or swap. Type and a hash of the bytes tell versions apart.
//! 3. stage (`commit`): the store reads and uploads everything into new buffers.
//! 4. verify (`commit`): checks that the files were not written meanwhile.
//! 5. commit (`commit`): replaces all tensors at once, between evaluations.
//!
//! Nothing that the program can see changes before the commit, so a failure before it leaves
//! every byte in place.
//!
//! Modules, top to bottom:
//!
//! | module | contents |
//! |---|---|
//! | `overlay`, `switch` | tensors of other files than the model's; changed files of the model, and the return to the original bytes |
//! | `commit` | stage, verify and commit |
//! | `compare` | what happens to each tensor of a changed file |
//! | `detect` | changed files and their headers |
//! | `registry` | what is known of files and tensors between reloads |
//! | `same_model` | whether a file holds the model that was loaded |
//! | `known`, `store` | overlays, and what they have read; the interface to the tensors |
//! | `content` | the hash of a tensor's bytes, and defects |
//! | `budget`, `hash` | memory beside the model; hashes of bytes |
//! | `report`, `tracked`, `pauses` | reports; files of a model; how long evaluations were kept out |

mod budget;
mod commit;
mod compare;
mod content;
mod detect;
mod hash;
mod known;
mod overlay;
mod pauses;
mod registry;
mod report;
mod same_model;
mod store;
mod switch;
#[cfg(test)]
mod tests;
mod tracked;

use std::ffi::CStr;
use std::sync::Arc;
use std::time::Instant;

use parking_lot::Mutex;

use crate::error::{Error, Result};
use crate::gguf::FileId;
use crate::parallel;
use registry::{Registered, Registry};

pub use budget::Need;
pub use content::{Content, Defects, check_tensor, of_tensor as content_of};
pub use detect::Trigger;
pub use hash::of_reads as hash_reads;
pub use hash::{Hash, of_bytes as hash_bytes, of_source as hash_source};
pub use known::Origin;
pub use overlay::OverlaySource;
pub use pauses::Pauses;
pub use registry::Changed;
pub use report::{
    Cause, Effect, FileEvent, FileReport, Ignored, Outcome, Report, TensorReport, Times,
};
pub use same_model::LoadedModel;
pub use store::{Change, Commit, NewData, OnOutOfMemory, StageError, Store, Switched};
pub use tracked::TrackedFile;

/// The reload engine of one model.
#[derive(Debug)]
pub struct Engine {
    loaded: Arc<LoadedModel>,
    state: Mutex<Registry>,
    /// The changed tensors after the last request, and the files that are not used as they are. Both
    /// are read while a reload runs.
    after: Mutex<(Vec<Changed>, Vec<FileReport>)>,
}

impl Engine {
    /// Registers files and tensors as they are. A tensor is given by the index of its file and
    /// its position in the header of that file.
    ///
    /// A reload that would stage more than `staging_bytes` is done in steps, each consistent;
    /// 0 for no limit.
    pub fn new(
        files: &[TrackedFile],
        tensors: impl Iterator<Item = (usize, usize)>,
        staging_bytes: u64,
    ) -> Engine {
        let loaded = Arc::new(LoadedModel::of(files.iter().map(|file| &file.gguf)));
        let registry = Registry::new(files, loaded.clone(), tensors, staging_bytes);
        Engine {
            loaded,
            state: Mutex::new(registry),
            after: Mutex::default(),
        }
    }

    /// Brings the tensors in `store` up to date with their files.
    ///
    /// Everything that changed is switched together, or nothing is. Files that cannot be used as
    /// they are (unreadable, incomplete, of another model) are left out and reported. An error
    /// means that nothing changed.
    pub fn reload<S: Store>(&self, store: &S, trigger: Trigger) -> Result<Report> {
        let began = Instant::now();
        let mut registry = self.state.lock();
        let mut report = Report::default();
        let changed = detect::changed_files(&mut registry, trigger, store.activity(), &mut report);
        report.times.detect = began.elapsed();
        let mut result = Ok(());
        if !changed.is_empty() {
            let attempted: Vec<(usize, FileId)> = changed
                .iter()
                .map(|file| (file.file, file.gguf.source.id()))
                .collect();
            let activity = store.activity();
            let apply = |()| registry.apply(store, changed, &mut report);
            result = store.check().and_then(apply);
            if let Err(error) = &result {
                let activity = matches!(error, Error::Busy(_)).then_some(activity);
                for (file, id) in attempted {
                    registry.files[file].note_failure(id, activity);
                }
            }
        }
        let result = result.and_then(|()| registry.bring_back(store, &mut report));
        *self.after.lock() = (registry.changed(), registry.noted_files());
        report.finish(began, result)
    }

    /// Returns every tensor to its original bytes, all at once. A tensor whose file was written
    /// in place since cannot return, and is reported as refused.
    ///
    /// Files that differ from what was loaded count as changed at the next reload.
    pub fn revert<S: Store>(&self, store: &S) -> Result<Report> {
        let began = Instant::now();
        let mut registry = self.state.lock();
        let mut report = Report::default();
        let result = registry.revert(store, &mut report);
        let result = result.and_then(|()| registry.bring_back(store, &mut report));
        *self.after.lock() = (registry.changed(), registry.noted_files());
        report.finish(began, result)
    }

    /// Gives tensors the type and bytes of other files, and reverts overlays that were set before,
    /// in one commit. An error means that nothing changed.
    ///
    /// `revert` has tensors whose overlay is reverted, if they have one and are not in `set`: they
    /// get the bytes of the version of the model's file that is in use. `set` has each tensor and
    /// its source. The tensors keep these bytes, whatever happens to the model's file, until the
    /// overlay is reverted. A source may be removed afterwards.
    pub fn overlay<S: Store>(
        &self,
        store: &S,
        revert: &[usize],
        set: &[(usize, &OverlaySource)],
    ) -> Result<Report> {
        let began = Instant::now();
        let mut registry = self.state.lock();
        let mut report = Report::default();
        let result = registry.overlay(store, revert, set, &mut report);
        let result = result.and_then(|()| registry.bring_back(store, &mut report));
        *self.after.lock() = (registry.changed(), registry.noted_files());
        report.finish(began, result)
    }

    /// Returns the tensors that left their original bytes, and those that have an overlay. Does not
    /// wait for reloads.
    pub fn changed(&self) -> Vec<Changed> {
        self.after.lock().0.clone()
    }

    /// Returns the files whose version at the path is not used, or not all of it. Does not wait for
    /// reloads.
    pub fn noted_files(&self) -> Vec<FileReport> {
        self.after.lock().1.clone()
    }

    /// Returns why a source has no bytes for a tensor with this name and shape; `None` when it has.
    pub fn misfit(&self, source: &OverlaySource, name: &CStr, ne: &[u64; 4]) -> Option<String> {
        source.misfit(&self.loaded, name, ne)
    }

    /// Hashes tensors in use that were not hashed yet: as many as are read at a time, from
    /// `next` on. Advances `next` past them. Reloads and reverts can run between two calls.
    ///
    /// Returns `false` when the bytes of a tensor cannot be hashed, or were written in place
    /// and no reload has seen that yet.
    pub fn hash_some<S: Store>(&self, store: &S, next: &mut usize) -> bool {
        let mut registry = self.state.lock();
        let threads = store.threads();
        let tensors = registry.tensors.iter_mut().enumerate().skip(*next);
        let batch: Vec<_> = tensors.take(threads.count()).collect();
        *next += batch.len();
        let hash = |(at, tensor): (usize, &mut Registered)| {
            let hash = store.live_hash(at, tensor.live_hash);
            // A hash that is known stays: the next reload compares with it.
            tensor.live_hash = hash.or(tensor.live_hash);
            hash.is_some() && store.is_wanted()
        };
        parallel::for_each(threads, batch, hash, || true)
    }

    /// Returns a hash of the names, types, shapes and bytes of all tensors in use, in the order
    /// of their names: equal for two models that evaluate alike.
    ///
    /// `None` when a tensor is not hashed yet ([`Engine::hash_some`]), or while a reload runs. With
    /// `wait`, waits for the end of the reload.
    pub fn content_hash(&self, wait: bool) -> Option<Hash> {
        let registry = match wait {
            true => self.state.lock(),
            false => self.state.try_lock()?,
        };
        registry.content_hash()
    }
}
