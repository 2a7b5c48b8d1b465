//! Stages and commits what the comparison decided: all tensors at once, or in steps.

use std::collections::{HashMap, HashSet};
use std::time::Instant;

use super::budget;
use super::compare::{self, Action, Decision};
use super::detect::ChangedFile;
use super::registry::{OriginalBytes, Registry};
use super::report::{Cause, Effect, FileReport, Outcome, Report, TensorReport};
use super::store::{Change, Commit, NewData, OnOutOfMemory, StageError, Store};
use crate::config::Config;
use crate::error::{Error, Result};
use crate::gguf::{FileId, Source};

impl Registry {
    /// Switches the model to the changed files. A file that cannot be used is left out, and the
    /// other files are tried again.
    pub fn apply<S: Store>(
        &mut self,
        store: &S,
        mut changed: Vec<ChangedFile>,
        report: &mut Report,
    ) -> Result<()> {
        loop {
            let comparing = Instant::now();
            let decisions = compare::decide(self, store, &mut changed, report);
            report.times.compare += comparing.elapsed();
            if changed.is_empty() {
                return Ok(());
            }
            match self.switch(store, &changed, &decisions, report) {
                Ok(()) => {
                    self.accept(store, &changed, report);
                    return Ok(());
                }
                // The other files can still be used without the file that failed.
                Err(Failure::File {
                    changed: at,
                    cause,
                    reason,
                }) => {
                    let file = changed.swap_remove(at);
                    let id = file.gguf.source.id();
                    let lasting = cause == Cause::Refused;
                    if !lasting {
                        self.files[file.file].note_failure(id, None);
                    }
                    self.ignore(file.file, lasting.then_some(id), cause, reason, report);
                }
                Err(Failure::Whole(error)) => return Err(error),
            }
        }
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
                self.note(&[], [].into_iter(), &commit, report);
                Ok(())
            }
            Err(error) => Err(error.into()),
        }
    }

    /// Returns every tensor to its original bytes.
    pub fn revert<S: Store>(&mut self, store: &S, report: &mut Report) -> Result<()> {
        let mut returning = HashMap::new();
        for (index, tensor) in self.tensors.iter().enumerate() {
            match tensor.original_bytes {
                OriginalBytes::InUse if !tensor.written_in_place => {}
                OriginalBytes::Left(hash)
                    if !tensor.written_in_place && store.can_return(index, hash) =>
                {
                    returning.insert(index, hash);
                }
                _ => {
                    let reason = "its original bytes are gone, because the file was written in place: put the original file back and reload";
                    report.add(tensor.refused(index, reason.into()));
                }
            }
        }
        if !returning.is_empty() {
            let changes: Vec<Change<'_>> = returning.keys().copied().map(Change::Return).collect();
            let staged = store.stage(&changes, OnOutOfMemory::Fallback);
            if let Some(staged) = staged.map_err(Error::from)? {
                let commit = store.commit(staged)?;
                for effect in &commit.effects {
                    if let Some(&hash) = returning.get(&effect.tensor) {
                        self.note_returned(effect, hash, report);
                    }
                }
                self.note(&[], [].into_iter(), &commit, report);
            }
        }
        for file in &mut self.files {
            file.id = file.first_id;
            file.mixed = false;
            file.forget_attempts();
        }
        for tensor in &mut self.tensors {
            tensor.overlay = None;
        }
        Ok(())
    }

    /// Stages and commits all decisions: at once, or in consistent steps when they need more
    /// memory than may be staged.
    fn switch<S: Store>(
        &mut self,
        store: &S,
        changed: &[ChangedFile],
        decisions: &[Decision],
        report: &mut Report,
    ) -> Result<(), Failure> {
        for decision in decisions {
            // Before the first step: a file is used as a whole or not at all.
            for change in changes(changed, &[decision]) {
                if let Change::Swap(new_data) = change
                    && let Some(reason) = store.refuses(&new_data)
                {
                    return Err(Failure::File {
                        changed: decision.changed,
                        cause: Cause::Refused,
                        reason,
                    });
                }
            }
        }
        for step in steps(store, self.staging_bytes, changed, decisions) {
            self.switch_step(store, changed, &step, report)?;
        }
        verify(changed)?;
        let kept = decisions.iter().filter(|d| d.action == Action::Keep);
        for decision in kept {
            self.note_one(changed, decision, Outcome::Unchanged, String::new(), report);
        }
        Ok(())
    }

    /// Stages and commits one step.
    ///
    /// When a device is out of memory, groups that only return to their original bytes are
    /// switched first: they need no memory, and free some.
    fn switch_step<S: Store>(
        &mut self,
        store: &S,
        changed: &[ChangedFile],
        step: &[&Decision],
        report: &mut Report,
    ) -> Result<(), Failure> {
        let staging = Instant::now();
        let mut staged = stage(store, &changes(changed, step), OnOutOfMemory::Fail);
        let mut rest = step.to_vec();
        if is_out_of_memory(&staged) {
            let busy: HashSet<usize> = step
                .iter()
                .filter(|d| d.action == Action::Swap)
                .map(|d| store.group(d.tensor))
                .collect();
            let only_return = |d: &&Decision| !busy.contains(&store.group(d.tensor));
            let (first, others): (Vec<&Decision>, _) = rest.iter().copied().partition(only_return);
            if !first.is_empty() {
                let returning = stage(store, &changes(changed, &first), OnOutOfMemory::Fail);
                self.commit(store, changed, &first, returning, report)?;
                rest = others;
                staged = stage(store, &changes(changed, &rest), OnOutOfMemory::Fail);
            }
            if matches!(staged, Err(StageError::OutOfMemory(_))) {
                staged = stage(store, &changes(changed, &rest), OnOutOfMemory::Fallback);
            }
        }
        report.times.stage += staging.elapsed();
        self.commit(store, changed, &rest, staged, report)
    }

    fn commit<S: Store>(
        &mut self,
        store: &S,
        changed: &[ChangedFile],
        decisions: &[&Decision],
        staged: Result<Option<S::Staged>, StageError>,
        report: &mut Report,
    ) -> Result<(), Failure> {
        let of_file = |tensor| decisions.iter().find(|d| d.tensor == tensor);
        let of_tensor = |tensor, cause, reason| match of_file(tensor) {
            Some(decision) => Failure::File {
                changed: decision.changed,
                cause,
                reason,
            },
            None => Failure::Whole(Error::Invalid(reason)),
        };
        let staged = staged.map_err(|error| match error {
            StageError::Read { tensor, reason } => of_tensor(tensor, Cause::Unreadable, reason),
            StageError::Refused { tensor, reason } => of_tensor(tensor, Cause::Refused, reason),
            other => Failure::Whole(other.into()),
        })?;
        verify(changed)?;
        let Some(staged) = staged else {
            return Ok(());
        };
        let commit = store.commit(staged)?;
        self.note(changed, decisions.iter().copied(), &commit, report);
        Ok(())
    }

    /// Records what a commit did to the tensors of these decisions, and to others that were
    /// laid out with them.
    pub(super) fn note<'a>(
        &mut self,
        changed: &[ChangedFile],
        decisions: impl Iterator<Item = &'a Decision>,
        commit: &Commit,
        report: &mut Report,
    ) {
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
        for decision in decisions {
            if let Some(effect) = effects.remove(&decision.tensor) {
                let placement = effect.placement.clone();
                self.note_one(changed, decision, effect.outcome, placement, report);
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

    /// Records that a tensor now has the content of its changed file.
    fn note_one(
        &mut self,
        changed: &[ChangedFile],
        decision: &Decision,
        outcome: Outcome,
        placement: String,
        report: &mut Report,
    ) {
        let file = &changed[decision.changed];
        let info = &file.gguf.header.tensors[decision.info];
        let tensor = &mut self.tensors[decision.tensor];
        if outcome == Outcome::Swapped {
            report.bytes_staged += info.nbytes;
        }
        report.add(TensorReport {
            new_type: info.ty,
            nbytes: info.nbytes,
            file: file.file,
            placement,
            ..tensor.report(decision.tensor, outcome)
        });
        tensor.ty = info.ty;
        tensor.live_hash = Some(decision.content.hash);
        tensor.live_defects = Some(decision.content.defects);
        if outcome == Outcome::InPlace {
            tensor.written_in_place = true;
            tensor.overlay = None;
        }
        self.files[file.file].mixed |= outcome != Outcome::Unchanged;
        if let Some(original_bytes) = decision.leaves {
            tensor.original_bytes = original_bytes;
        }
    }

    /// Records that the tensors of these files are now in use.
    fn accept<S: Store>(&mut self, store: &S, changed: &[ChangedFile], report: &mut Report) {
        for file in changed {
            let id = file.gguf.source.id();
            store.trust(file.file, id);
            let watched = &mut self.files[file.file];
            watched.id = id;
            watched.mixed = false;
            watched.forget_attempts();
            report.news = true;
            report.files.push(FileReport {
                file: file.file,
                path: watched.path.clone(),
                ignored: None,
            });
        }
    }
}

/// Returns the changes of these decisions.
fn changes<'a>(changed: &'a [ChangedFile], decisions: &[&Decision]) -> Vec<Change<'a>> {
    let change = |decision: &&Decision| {
        let file = &changed[decision.changed].gguf;
        let info = &file.header.tensors[decision.info];
        match decision.action {
            Action::Keep => None,
            Action::Return => Some(Change::Return(decision.tensor)),
            Action::InPlace => Some(Change::InPlace(decision.tensor)),
            Action::Swap => Some(Change::Swap(NewData {
                tensor: decision.tensor,
                ty: info.ty,
                source: &file.source,
                offset: info.offset,
                nbytes: info.nbytes,
            })),
        }
    };
    decisions.iter().filter_map(change).collect()
}

/// Stages changes if their memory is within the limit. Tensors that may fall back to host memory
/// count as host memory.
pub(super) fn stage<S: Store>(
    store: &S,
    changes: &[Change<'_>],
    on_out_of_memory: OnOutOfMemory,
) -> Result<Option<S::Staged>, StageError> {
    let check = || {
        let mut need = store.need(changes);
        if on_out_of_memory == OnOutOfMemory::Fallback {
            need.host += std::mem::take(&mut need.device);
        }
        budget::check(Config::get().memory_bytes, need)
    };
    let mut checked = check();
    if checked.is_err() && store.release_unused() {
        checked = check();
    }
    checked.map_err(StageError::OverBudget)?;
    store.stage(changes, on_out_of_memory)
}

fn is_out_of_memory<T>(staged: &Result<T, StageError>) -> bool {
    matches!(
        staged,
        Err(StageError::OutOfMemory(_) | StageError::OverBudget(_))
    )
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

/// Splits the decisions into steps: one step, or as many groups per step as may be staged at a
/// time. Groups that only return to their original bytes come first.
fn steps<'a, S: Store>(
    store: &S,
    staging_bytes: u64,
    changed: &[ChangedFile],
    decisions: &'a [Decision],
) -> Vec<Vec<&'a Decision>> {
    let mut groups: HashMap<usize, Vec<&Decision>> = HashMap::new();
    for decision in decisions.iter().filter(|d| d.action != Action::Keep) {
        groups
            .entry(store.group(decision.tensor))
            .or_default()
            .push(decision);
    }
    let bytes = |group: &Vec<&Decision>| -> u64 {
        let swaps = group.iter().filter(|d| d.action == Action::Swap);
        swaps
            .map(|d| changed[d.changed].gguf.header.tensors[d.info].nbytes)
            .sum()
    };
    let mut groups: Vec<(u64, Vec<&Decision>)> = groups
        .into_values()
        .map(|group| (bytes(&group), group))
        .collect();
    groups.sort_by_key(|(bytes, group)| (*bytes > 0, group[0].tensor));
    let limit = match staging_bytes {
        0 => u64::MAX,
        limit => limit,
    };
    let mut steps: Vec<Vec<&Decision>> = Vec::new();
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

/// Why a switch failed.
enum Failure {
    /// Because of one of the changed files.
    File {
        changed: usize,
        cause: Cause,
        reason: String,
    },
    /// For all files.
    Whole(Error),
}

impl From<Error> for Failure {
    fn from(error: Error) -> Failure {
        Failure::Whole(error)
    }
}

/// Checks that the files still exist and were not written since they were read.
fn verify(changed: &[ChangedFile]) -> Result<(), Failure> {
    match changed
        .iter()
        .position(|file| !is_as_read(&file.gguf.source))
    {
        None => Ok(()),
        Some(changed) => Err(Failure::File {
            changed,
            cause: Cause::Changing,
            reason: "it changed while it was read; the next reload tries again".into(),
        }),
    }
}

/// Returns whether a file is still at its path and was not written since it was opened.
pub(super) fn is_as_read(source: &Source) -> bool {
    let same = |id: std::io::Result<FileId>| id.is_ok_and(|id| id.unwritten_since(&source.id()));
    same(source.id_now()) && same(FileId::of_path(source.path()))
}
