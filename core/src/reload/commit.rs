//! Stages planned changes, verifies that their files were not written meanwhile, and commits them:
//! all in one commit, or in steps.

use std::collections::{HashMap, HashSet};
use std::path::PathBuf;
use std::time::Instant;

use super::budget;
use super::compare::Action;
use super::content::Content;
use super::hash::Hash;
use super::known::Overlay;
use super::registry::{OriginalBytes, Registry};
use super::report::{Cause, Effect, Outcome, Report, TensorReport};
use super::store::{Change, Commit, NewData, OnOutOfMemory, StageError, Store};
use crate::config::Config;
use crate::error::{Error, Result};
use crate::gguf::{FileId, GgufFile, OpenError, Source, TensorInfo};

/// A tensor, and the bytes that it gets.
pub(super) struct Planned<'a> {
    pub tensor: usize,
    pub bytes: PlannedBytes<'a>,
}

/// The bytes that a tensor gets.
pub(super) enum PlannedBytes<'a> {
    /// The original bytes, which have this hash.
    Original(Hash),
    /// Bytes of a file, which were compared with the bytes in use.
    OfFile(FileBytes<'a>),
}

/// Bytes of a file for a tensor.
pub(super) struct FileBytes<'a> {
    pub file: &'a GgufFile,
    pub info: &'a TensorInfo,
    pub content: Content,
    pub action: Action,
    /// What is known of the original bytes after the commit; `None` when that does not change.
    pub leaves: Option<OriginalBytes>,
    pub follows: Follows,
}

/// What a tensor follows after the commit.
#[derive(Clone)]
pub(super) enum Follows {
    /// A new version of its own file.
    NewVersion,
    /// The version of its own file that is in use.
    VersionInUse,
    /// The source of an overlay.
    Overlay(Box<Overlay>),
}

/// How many commits the changes of a switch take.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Commits {
    /// One. An error means that nothing changed.
    One,
    /// As many as the limit of staged bytes needs.
    Steps,
}

/// Why a switch failed.
pub(super) enum Failure {
    /// Because of the bytes of a tensor.
    Tensor {
        tensor: usize,
        cause: Cause,
        reason: String,
    },
    /// Because the file of a tensor's bytes was written meanwhile.
    Changing { tensor: usize, path: PathBuf },
    /// For all tensors.
    Whole(Error),
}

impl From<Failure> for Error {
    fn from(failure: Failure) -> Error {
        match failure {
            Failure::Tensor { reason, .. } => Error::Invalid(reason),
            Failure::Changing { path, .. } => OpenError::Changing { path }.into(),
            Failure::Whole(error) => error,
        }
    }
}

impl From<Error> for Failure {
    fn from(error: Error) -> Failure {
        Failure::Whole(error)
    }
}

impl Planned<'_> {
    fn action(&self) -> Action {
        match &self.bytes {
            PlannedBytes::Original(_) => Action::Return,
            PlannedBytes::OfFile(bytes) => bytes.action,
        }
    }

    fn change(&self) -> Option<Change<'_>> {
        match (self.action(), &self.bytes) {
            (Action::Keep, _) => None,
            (Action::InPlace, _) => Some(Change::InPlace(self.tensor)),
            (Action::Swap, PlannedBytes::OfFile(bytes)) => Some(Change::Swap(NewData {
                tensor: self.tensor,
                ty: bytes.info.ty,
                source: &bytes.file.source,
                offset: bytes.info.offset,
                nbytes: bytes.info.nbytes,
            })),
            (Action::Return | Action::Swap, _) => Some(Change::Return(self.tensor)),
        }
    }

    /// Returns how many bytes are read for it.
    fn staged_bytes(&self) -> u64 {
        match self.change() {
            Some(Change::Swap(new_data)) => new_data.nbytes,
            _ => 0,
        }
    }

    /// Returns the file of its bytes, if they are read.
    fn source(&self) -> Option<&Source> {
        match &self.bytes {
            PlannedBytes::Original(_) => None,
            PlannedBytes::OfFile(bytes) => Some(&bytes.file.source),
        }
    }
}

impl Registry {
    /// Switches tensors as planned.
    pub fn switch<S: Store>(
        &mut self,
        store: &S,
        planned: &[Planned<'_>],
        commits: Commits,
        report: &mut Report,
    ) -> Result<(), Failure> {
        // Before the first step: a file is used as a whole or not at all.
        for change in planned {
            if let Some(Change::Swap(new_data)) = change.change()
                && let Some(reason) = store.refuses(&new_data)
            {
                return Err(Failure::Tensor {
                    tensor: change.tensor,
                    cause: Cause::Refused,
                    reason,
                });
            }
        }
        match commits {
            Commits::One => {
                self.check_staging(planned.iter().map(Planned::staged_bytes).sum())?;
                let all: Vec<&Planned<'_>> = planned.iter().collect();
                let staging = Instant::now();
                let staged = stage_or_fall_back(store, &all);
                report.times.stage += staging.elapsed();
                self.commit(store, planned, &all, staged, report)?;
            }
            Commits::Steps => {
                let steps = steps(store, self.staging_bytes, planned);
                // Each step verifies what was read. After the last one, the file is in use, whatever happens to it.
                if steps.is_empty() {
                    verify(planned)?;
                }
                for step in steps {
                    self.switch_step(store, planned, &step, report)?;
                }
            }
        }
        for kept in planned.iter().filter(|it| it.action() == Action::Keep) {
            self.note_one(kept, Outcome::Unchanged, String::new(), report);
        }
        Ok(())
    }

    /// Returns tensors that fell back to host memory to their devices, as far as they fit.
    pub fn bring_back<S: Store>(&mut self, store: &S, report: &mut Report) -> Result<()> {
        let staging = Instant::now();
        let staged = store.stage_displaced();
        report.times.stage += staging.elapsed();
        match staged {
            Ok(None) | Err(StageError::OutOfMemory(_)) => Ok(()),
            Ok(Some(staged)) => {
                let commit = store.commit(staged)?;
                self.note(&[], &commit, report);
                Ok(())
            }
            Err(error) => Err(error.into()),
        }
    }

    /// Stages and commits one step.
    ///
    /// When a device is out of memory, groups that only return to their original bytes are
    /// switched first: they need no memory, and free some.
    fn switch_step<S: Store>(
        &mut self,
        store: &S,
        planned: &[Planned<'_>],
        step: &[&Planned<'_>],
        report: &mut Report,
    ) -> Result<(), Failure> {
        let staging = Instant::now();
        let mut staged = stage(store, step, OnOutOfMemory::Fail);
        let mut rest = step.to_vec();
        if matches!(
            staged,
            Err(StageError::OutOfMemory(_) | StageError::OverBudget(_))
        ) {
            let swaps = step.iter().filter(|it| it.action() == Action::Swap);
            let busy: HashSet<usize> = swaps.map(|it| store.group(it.tensor)).collect();
            let (returning, others): (Vec<&Planned<'_>>, _) = rest
                .iter()
                .copied()
                .partition(|it| !busy.contains(&store.group(it.tensor)));
            if !returning.is_empty() {
                let first = stage(store, &returning, OnOutOfMemory::Fail);
                self.commit(store, planned, &returning, first, report)?;
                rest = others;
            }
            staged = stage_or_fall_back(store, &rest);
        }
        report.times.stage += staging.elapsed();
        self.commit(store, planned, &rest, staged, report)
    }

    /// Commits what was staged for `step`, unless a file of any planned tensor was written.
    fn commit<S: Store>(
        &mut self,
        store: &S,
        planned: &[Planned<'_>],
        step: &[&Planned<'_>],
        staged: Result<Option<S::Staged>, StageError>,
        report: &mut Report,
    ) -> Result<(), Failure> {
        let staged = staged.map_err(|error| match error {
            StageError::Read { tensor, reason } => Failure::Tensor {
                tensor,
                cause: Cause::Unreadable,
                reason,
            },
            StageError::Refused { tensor, reason } => Failure::Tensor {
                tensor,
                cause: Cause::Refused,
                reason,
            },
            other => Failure::Whole(other.into()),
        })?;
        verify(planned)?;
        let Some(staged) = staged else {
            return Ok(());
        };
        let commit = store.commit(staged)?;
        self.note(step, &commit, report);
        Ok(())
    }

    /// Records what a commit did to the tensors of a step, and to others that were laid out with
    /// them.
    fn note(&mut self, step: &[&Planned<'_>], commit: &Commit, report: &mut Report) {
        report.news = true;
        report.commits += 1;
        report.times.wait += commit.switched.wait;
        report.times.switch += commit.switched.switch;
        report.generation = commit.switched.generation;
        let mut effects: HashMap<usize, &Effect> = commit
            .effects
            .iter()
            .map(|effect| (effect.tensor, effect))
            .collect();
        for planned in step {
            if let Some(effect) = effects.remove(&planned.tensor) {
                self.note_one(planned, effect.outcome, effect.placement.clone(), report);
            }
        }
        for effect in effects.into_values() {
            let tensor = &self.tensors[effect.tensor];
            report.add(TensorReport {
                placement: effect.placement.clone(),
                ..tensor.report(effect.tensor, effect.outcome)
            });
        }
    }

    /// Records that a tensor now has its planned bytes.
    fn note_one(
        &mut self,
        planned: &Planned<'_>,
        outcome: Outcome,
        placement: String,
        report: &mut Report,
    ) {
        let tensor = &mut self.tensors[planned.tensor];
        let (ty, nbytes) = match &planned.bytes {
            PlannedBytes::Original(_) => (tensor.original_type, 0),
            PlannedBytes::OfFile(bytes) => (bytes.info.ty, bytes.info.nbytes),
        };
        if outcome == Outcome::Swapped {
            report.bytes_staged += nbytes;
        }
        report.add(TensorReport {
            new_type: ty,
            nbytes,
            placement,
            ..tensor.report(planned.tensor, outcome)
        });
        tensor.ty = ty;
        let bytes = match &planned.bytes {
            PlannedBytes::Original(hash) => {
                tensor.live_hash = Some(*hash);
                tensor.live_defects = None;
                tensor.original_bytes = OriginalBytes::InUse;
                return;
            }
            PlannedBytes::OfFile(bytes) => bytes,
        };
        tensor.live_hash = Some(bytes.content.hash);
        tensor.live_defects = Some(bytes.content.defects);
        if let Some(original_bytes) = bytes.leaves {
            tensor.original_bytes = original_bytes;
        }
        match &bytes.follows {
            Follows::NewVersion => {
                if outcome == Outcome::InPlace {
                    tensor.written_in_place = true;
                    tensor.overlay = None;
                }
                self.files[tensor.file].mixed |= outcome != Outcome::Unchanged;
            }
            Follows::VersionInUse => tensor.overlay = None,
            Follows::Overlay(overlay) => tensor.overlay = Some((**overlay).clone()),
        }
    }

    /// Checks the limit for the bytes that are staged before a commit that cannot be divided.
    fn check_staging(&self, bytes: u64) -> Result<()> {
        const MIB: u64 = 1 << 20;
        match self.staging_bytes {
            0 => Ok(()),
            limit if bytes <= limit => Ok(()),
            limit => Err(Error::NoMemory(format!(
                "staging {} MiB for one switch would exceed LLAMA_SIDECAR_STAGING_MB={}: raise the limit, or request fewer tensors at a time",
                bytes.div_ceil(MIB),
                limit / MIB
            ))),
        }
    }
}

/// Stages changes if their memory is within the limit; `None` when there are none. Tensors that may
/// fall back to host memory count as host memory.
fn stage<S: Store>(
    store: &S,
    planned: &[&Planned<'_>],
    on_out_of_memory: OnOutOfMemory,
) -> Result<Option<S::Staged>, StageError> {
    let changes: Vec<Change<'_>> = planned.iter().filter_map(|it| it.change()).collect();
    if changes.is_empty() {
        return Ok(None);
    }
    let check = || {
        let mut need = store.need(&changes);
        if on_out_of_memory == OnOutOfMemory::Fallback {
            need.host += std::mem::take(&mut need.device) + store.moved_along(&changes);
        }
        budget::check(Config::get().memory_bytes, need)
    };
    let mut checked = check();
    if checked.is_err() && store.release_unused() {
        checked = check();
    }
    checked.map_err(StageError::OverBudget)?;
    store.stage(&changes, on_out_of_memory)
}

/// Stages changes, in host memory where a device is full.
fn stage_or_fall_back<S: Store>(
    store: &S,
    planned: &[&Planned<'_>],
) -> Result<Option<S::Staged>, StageError> {
    match stage(store, planned, OnOutOfMemory::Fail) {
        Err(StageError::OutOfMemory(_)) => stage(store, planned, OnOutOfMemory::Fallback),
        staged => staged,
    }
}

impl From<StageError> for Error {
    fn from(error: StageError) -> Error {
        match error {
            StageError::OutOfMemory(error) | StageError::Device(error) => error.into(),
            StageError::OverBudget(reason) => Error::NoMemory(reason),
            StageError::Read { reason, .. } | StageError::Refused { reason, .. } => {
                Error::Invalid(reason)
            }
        }
    }
}

/// Splits the changes into steps: one step, or as many groups per step as may be staged at a
/// time. Groups that only return to their original bytes come first.
fn steps<'a, 'b, S: Store>(
    store: &S,
    staging_bytes: u64,
    planned: &'b [Planned<'a>],
) -> Vec<Vec<&'b Planned<'a>>> {
    let mut groups: HashMap<usize, Vec<&Planned<'a>>> = HashMap::new();
    for change in planned.iter().filter(|it| it.action() != Action::Keep) {
        let group = groups.entry(store.group(change.tensor)).or_default();
        group.push(change);
    }
    let bytes = |group: &[&Planned<'a>]| group.iter().map(|it| it.staged_bytes()).sum();
    let mut groups: Vec<(u64, Vec<&Planned<'a>>)> = groups
        .into_values()
        .map(|group| (bytes(&group), group))
        .collect();
    groups.sort_by_key(|(bytes, group)| (*bytes > 0, group[0].tensor));
    let limit = match staging_bytes {
        0 => u64::MAX,
        limit => limit,
    };
    let mut steps: Vec<Vec<&Planned<'a>>> = Vec::new();
    let mut left = 0;
    for (bytes, group) in groups {
        match steps.last_mut() {
            Some(step) if bytes <= left => {
                step.extend(group);
                left -= bytes;
            }
            _ => {
                steps.push(group);
                left = limit.saturating_sub(bytes);
            }
        }
    }
    steps
}

/// Checks that the files still exist and were not written since they were read: each once.
fn verify(planned: &[Planned<'_>]) -> Result<(), Failure> {
    let mut verified: Vec<&Source> = Vec::new();
    for change in planned {
        let Some(source) = change.source() else {
            continue;
        };
        if verified.iter().any(|known| std::ptr::eq(*known, source)) {
            continue;
        }
        if !is_as_read(source) {
            return Err(Failure::Changing {
                tensor: change.tensor,
                path: source.path().to_owned(),
            });
        }
        verified.push(source);
    }
    Ok(())
}

/// Returns whether a file is still at its path and was not written since it was opened.
fn is_as_read(source: &Source) -> bool {
    let same = |id: std::io::Result<FileId>| id.is_ok_and(|id| id.unwritten_since(&source.id()));
    same(source.id_now()) && same(FileId::of_path(source.path()))
}
