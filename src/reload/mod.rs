//! Hot-swap: replacing tensors of a running model by what their files now hold.
//!
//! The engine knows files, tensors and what may follow from a change. Where
//! tensors live and how they are switched is behind [`Store`]: the buffers of our
//! own models, several devices, or the tensors of a foreign process.
//!
//! One reload goes through these steps, each in a module of its own:
//!
//! 1. `detect`: one `stat` per file; a changed file is opened and its header
//!    parsed through reads.
//! 2. `compare`: for each tensor of it, refuse, keep, return to the original, or
//!    swap; told apart by type and by a hash of the bytes.
//! 3. stage: the store reads and uploads everything into new buffers.
//! 4. verify: the files are still the ones that were read.
//! 5. commit: between evaluations, all tensors at once.
//!
//! Up to the commit nothing that the host can see has changed, so every failure
//! before it leaves every byte in place.

mod budget;
mod compare;
mod content;
mod detect;
mod hash;
mod pauses;
mod report;
mod store;
#[cfg(test)]
mod tests;
mod tracked;

use std::collections::{HashMap, HashSet};
use std::ffi::CString;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use crate::background;
use crate::config::Config;
use crate::error::{Error, Result};
use crate::gguf::{FileId, GgufFile, TypeInfo};

pub use crate::background::Readers;
pub use budget::{Need, usable as usable_memory};
pub use content::{Content, Defects, of_tensor as content_of};
pub(crate) use hash::of_reads as hash_reads;
pub use hash::{Hash, of_bytes as hash_bytes, of_source as hash_source};
pub use pauses::Pauses;
pub use report::{
    Cause, Effect, FileEvent, FileReport, Ignored, Outcome, Report, TensorReport, Times,
};
pub use store::{Change, Commit, NewData, OnOutOfMemory, StageError, Store, Switched};
pub use tracked::TrackedFile;

/// What starts a reload.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Trigger {
    /// A command: every changed file is tried now.
    Command,
    /// A look at the files: a changed file is tried once it has been quiet for this long,
    /// and after a failure at growing intervals.
    Watch {
        /// How long a file must have been the same.
        quiet: Duration,
    },
}

/// A tensor that follows its file.
#[derive(Debug)]
struct SourceTensor {
    name: CString,
    /// Index of its file.
    file: usize,
    /// The type of the bytes in use.
    ty: &'static TypeInfo,
    /// Its shape, which never changes.
    ne: [u64; 4],
}

/// The reload state machine of one model.
#[derive(Debug)]
pub struct Engine {
    state: Mutex<Registry>,
}

/// What is known of files and tensors between reloads.
#[derive(Debug)]
struct Registry {
    files: Vec<Watched>,
    tensors: Vec<Registered>,
    /// The most bytes to stage before a switch; 0 for no limit.
    staging_bytes: u64,
}

#[derive(Debug)]
struct Watched {
    path: PathBuf,
    id: FileId,
    /// What it was at registration.
    first_id: FileId,
    /// Whether only some of its tensors were switched to another version, because a later
    /// step failed: no version of it is the one in use then.
    mixed: bool,
    tensors: Vec<usize>,
    /// The last version of the file that was not taken, and why. It is looked at
    /// again when the file changes.
    ignored: Option<(Option<FileId>, Cause, String)>,
    /// The version that was found last, and since when it has been the same.
    seen: Option<(FileId, Instant)>,
    /// What a version that is not yet in use holds: a further attempt reads no bytes twice.
    contents: Option<(FileId, Vec<(usize, Content)>)>,
    /// The version whose reload failed last for a reason that may pass.
    failed: Option<Failed>,
}

/// A reload that failed, and when it may be tried again.
#[derive(Debug)]
struct Failed {
    id: FileId,
    times: u32,
    at: Instant,
    /// The store's activity, when evaluations stood in the way.
    activity: Option<u64>,
}

impl Failed {
    /// The longest time between two attempts that nothing asks for.
    const LONGEST_DELAY: Duration = Duration::from_secs(300);

    /// The time after which the next attempt is made: it doubles from one second on.
    fn delay(&self) -> Duration {
        let doubled = Duration::from_secs(1).saturating_mul(1 << (self.times - 1).min(16));
        doubled.min(Self::LONGEST_DELAY)
    }

    /// Whether the next attempt can be made. While the host rests, its graphs are in the way
    /// as before.
    fn may_retry(&self, activity: u64) -> bool {
        self.at.elapsed() >= self.delay() && self.activity != Some(activity)
    }
}

#[derive(Debug)]
struct Registered {
    source: SourceTensor,
    /// Its type at registration.
    original_type: &'static TypeInfo,
    original_bytes: OriginalBytes,
    /// Hash of the bytes in use, once it was needed.
    live_hash: Option<Hash>,
    /// Defects of the bytes in use, once they were needed.
    live_defects: Option<Defects>,
    /// Whether the file of its original bytes was written in place.
    written_in_place: bool,
}

/// What is known of the bytes that a tensor had at first. They are hashed when it
/// leaves them: a model that is never swapped is never read for it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum OriginalBytes {
    /// The tensor never left them.
    InUse,
    /// It left them, and they hash to this.
    Left(Hash),
    /// It left them after their file was written in place: nobody knows them.
    Lost,
}

/// A file that changed and was found good.
struct ChangedFile {
    file: usize,
    gguf: GgufFile,
}

/// What is to happen to one tensor.
struct Decision {
    tensor: usize,
    /// Position of its file among the changed ones.
    changed: usize,
    /// Its place in the new header.
    info: usize,
    content: Content,
    action: Action,
    /// What will be known of its original bytes once it has left them.
    leaves: Option<OriginalBytes>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Action {
    Keep,
    InPlace,
    Return,
    Swap,
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
        let mut watched: Vec<Watched> = files
            .iter()
            .map(|file| &file.gguf.source)
            .map(|source| Watched {
                path: source.path().to_owned(),
                id: source.id(),
                first_id: source.id(),
                mixed: false,
                tensors: Vec::new(),
                ignored: None,
                seen: None,
                contents: None,
                failed: None,
            })
            .collect();
        let mut registered = Vec::new();
        for (index, (file, info)) in tensors.enumerate() {
            let header = &files[file].gguf.header;
            let info = &header.tensors[info];
            watched[file].tensors.push(index);
            registered.push(Registered {
                source: SourceTensor {
                    name: header.name(info).to_owned(),
                    file,
                    ty: info.ty,
                    ne: info.ne,
                },
                original_type: info.ty,
                original_bytes: OriginalBytes::InUse,
                live_hash: None,
                live_defects: None,
                written_in_place: false,
            });
        }
        Engine {
            state: Mutex::new(Registry {
                files: watched,
                tensors: registered,
                staging_bytes,
            }),
        }
    }

    /// Brings the tensors in `store` up to date with their files.
    ///
    /// Everything that changed is switched together, or nothing is. Files that
    /// cannot be taken as they are (unreadable, incomplete, of another model) are
    /// left out and reported. An error means that nothing changed.
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
            result = registry.apply(store, changed, &mut report);
            if let Err(error) = &result {
                let activity = matches!(error, Error::Busy(_)).then_some(activity);
                for (file, id) in attempted {
                    registry.files[file].note_failure(id, activity);
                }
            }
        }
        if result.is_ok() {
            result = registry.bring_back(store, &mut report);
        }
        report.finish(began, result)
    }

    /// Returns every tensor to its original bytes, all at once. Tensors that cannot return,
    /// because their file was written in place since, are reported as refused.
    ///
    /// Files that differ from what was loaded count as changed at the next reload.
    pub fn revert<S: Store>(&self, store: &S) -> Result<Report> {
        let began = Instant::now();
        let mut registry = self.state.lock();
        let mut report = Report::default();
        let result = registry.revert(store, &mut report);
        report.finish(began, result)
    }

    /// Hashes tensors in use that were not hashed yet: as many as are read at a time, from
    /// `next` on. Moves `next` behind them. Reloads and reverts can run between two calls.
    ///
    /// Returns `false` when the bytes of a tensor cannot be hashed, or were written in place
    /// and no reload has seen that yet.
    pub fn hash_some<S: Store>(&self, store: &S, next: &mut usize) -> bool {
        let mut registry = self.state.lock();
        let readers = store.readers();
        let tensors = registry.tensors.iter_mut().enumerate().skip(*next);
        let batch: Vec<_> = tensors.take(readers.threads.max(1)).collect();
        *next += batch.len();
        background::for_each(readers, batch, |(at, tensor)| {
            let hash = store.live_hash(at, tensor.live_hash);
            // Without one, what is known stays: the next reload compares with it.
            tensor.live_hash = hash.or(tensor.live_hash);
            hash.is_some() && store.is_wanted()
        })
    }

    /// Returns a hash of the names, types, shapes and bytes of all tensors in use, in the order
    /// of their names: equal for two models that evaluate alike.
    ///
    /// `None` when a tensor is not hashed yet ([`Engine::hash_some`]), or while a reload runs
    /// unless `wait` says to wait for its end.
    pub fn content_hash(&self, wait: bool) -> Option<Hash> {
        let registry = match wait {
            true => self.state.lock(),
            false => self.state.try_lock()?,
        };
        registry.content_hash()
    }
}

impl Watched {
    /// Takes note of a failure to take a version that may pass.
    fn note_failure(&mut self, id: FileId, activity: Option<u64>) {
        let before = self.failed.take().filter(|failed| failed.id == id);
        self.failed = Some(Failed {
            id,
            times: before.map_or(1, |failed| failed.times.saturating_add(1)),
            at: Instant::now(),
            activity,
        });
    }

    /// Forgets what was noted about versions that are not in use.
    fn forget_attempts(&mut self) {
        self.ignored = None;
        self.seen = None;
        self.contents = None;
        self.failed = None;
    }
}

impl Registry {
    fn apply<S: Store>(
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
                // Without the file that failed, the others can still be taken.
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

    /// Brings tensors that are in host memory for want of room back to their devices,
    /// as far as they fit.
    fn bring_back<S: Store>(&mut self, store: &S, report: &mut Report) -> Result<()> {
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

    fn revert<S: Store>(&mut self, store: &S, report: &mut Report) -> Result<()> {
        let mut returning = HashMap::new();
        for (index, tensor) in self.tensors.iter().enumerate() {
            match tensor.original_bytes {
                OriginalBytes::InUse if !tensor.written_in_place => {}
                OriginalBytes::Left(hash)
                    if !tensor.written_in_place && store.can_return(index, hash) =>
                {
                    returning.insert(index, hash);
                }
                _ => report.add(TensorReport {
                    tensor: index,
                    name: tensor.source.name.clone(),
                    outcome: Outcome::Refused,
                    old_type: tensor.source.ty,
                    new_type: tensor.source.ty,
                    nbytes: 0,
                    file: tensor.source.file,
                    placement: String::new(),
                    reason: "its original bytes are gone: the file was written in place".into(),
                }),
            }
        }
        if !returning.is_empty() {
            let changes: Vec<Change<'_>> = returning.keys().copied().map(Change::Return).collect();
            let staged = store
                .stage(&changes, OnOutOfMemory::Fallback)
                .map_err(Error::from)?;
            if let Some(staged) = staged {
                let commit = store.commit(staged)?;
                for effect in &commit.effects {
                    let Some(&hash) = returning.get(&effect.tensor) else {
                        continue;
                    };
                    let tensor = &mut self.tensors[effect.tensor];
                    let old_type = tensor.source.ty;
                    tensor.source.ty = tensor.original_type;
                    tensor.live_hash = Some(hash);
                    tensor.live_defects = None;
                    tensor.original_bytes = OriginalBytes::InUse;
                    report.add(TensorReport {
                        tensor: effect.tensor,
                        name: tensor.source.name.clone(),
                        outcome: Outcome::Returned,
                        old_type,
                        new_type: tensor.original_type,
                        nbytes: 0,
                        file: tensor.source.file,
                        placement: effect.placement.clone(),
                        reason: String::new(),
                    });
                }
                self.note(&[], [].into_iter(), &commit, report);
            }
        }
        for file in &mut self.files {
            file.id = file.first_id;
            file.mixed = false;
            file.forget_attempts();
        }
        Ok(())
    }

    fn content_hash(&self) -> Option<Hash> {
        let mut tensors: Vec<&Registered> = self.tensors.iter().collect();
        tensors.sort_by(|a, b| a.source.name.cmp(&b.source.name));
        let mut description = Vec::new();
        for tensor in tensors {
            description.extend(tensor.source.name.as_bytes_with_nul());
            description.extend(tensor.source.ty.id.to_le_bytes());
            description.extend(
                tensor
                    .source
                    .ne
                    .iter()
                    .flat_map(|extent| extent.to_le_bytes()),
            );
            description.extend(tensor.live_hash?.to_le_bytes());
        }
        Some(hash_bytes(&description))
    }

    /// Stages and commits all decisions: at once, or in consistent steps when they are
    /// more than the store wants to stage.
    fn switch<S: Store>(
        &mut self,
        store: &S,
        changed: &[ChangedFile],
        decisions: &[Decision],
        report: &mut Report,
    ) -> Result<(), Failure> {
        for decision in decisions {
            // Before the first step: a file is taken whole or not at all.
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

    /// Stages and commits what is switched together.
    ///
    /// When a device has no room, tensors that only return are switched first: they
    /// need no memory and free some.
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
        if lacks_room(&staged) {
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

    /// Takes note of what a commit did.
    fn note<'a>(
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
        // What moved along.
        for effect in effects.into_values() {
            let source = &self.tensors[effect.tensor].source;
            report.add(TensorReport {
                tensor: effect.tensor,
                name: source.name.clone(),
                outcome: effect.outcome,
                old_type: source.ty,
                new_type: source.ty,
                nbytes: 0,
                file: source.file,
                placement: effect.placement.clone(),
                reason: String::new(),
            });
        }
    }

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
            tensor: decision.tensor,
            name: tensor.source.name.clone(),
            outcome,
            old_type: tensor.source.ty,
            new_type: info.ty,
            nbytes: info.nbytes,
            file: file.file,
            placement,
            reason: String::new(),
        });
        tensor.source.ty = info.ty;
        tensor.live_hash = Some(decision.content.hash);
        tensor.live_defects = Some(decision.content.defects);
        tensor.written_in_place |= outcome == Outcome::InPlace;
        self.files[file.file].mixed |= outcome != Outcome::Unchanged;
        if let Some(original_bytes) = decision.leaves {
            tensor.original_bytes = original_bytes;
        }
    }

    /// Takes note of files whose tensors are now in use.
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

    /// Leaves a changed file out of this reload, and says so once for each version
    /// of it; of a file that is being written, once until it is whole.
    fn ignore(
        &mut self,
        file: usize,
        id: Option<FileId>,
        cause: Cause,
        reason: String,
        report: &mut Report,
    ) {
        let watched = &mut self.files[file];
        let still_written = cause == Cause::Incomplete
            && matches!(&watched.ignored, Some((_, Cause::Incomplete, _)));
        let known = matches!(&watched.ignored, Some((of, _, why)) if *of == id && *why == reason);
        let first = !known && !still_written;
        if first {
            report.news = true;
            log::warn!("{}: ignored: {reason}", watched.path.display());
        }
        report.files.push(FileReport {
            file,
            path: watched.path.clone(),
            ignored: Some(Ignored {
                cause,
                reason: reason.clone(),
                first,
            }),
        });
        watched.ignored = Some((id, cause, reason));
    }
}

/// Changes in the order in which they are staged: what returns, then the rest.
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

/// Stages changes if the memory that they need may be taken. What falls back to host memory
/// counts there.
fn stage<S: Store>(
    store: &S,
    changes: &[Change<'_>],
    on_out_of_memory: OnOutOfMemory,
) -> Result<Option<S::Staged>, StageError> {
    let mut need = store.need(changes);
    if on_out_of_memory == OnOutOfMemory::Fallback {
        need.host += std::mem::take(&mut need.device);
    }
    budget::check(Config::get().memory_bytes, need).map_err(StageError::OverBudget)?;
    store.stage(changes, on_out_of_memory)
}

fn lacks_room<T>(staged: &Result<T, StageError>) -> bool {
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
            StageError::Read { reason, .. } => Error::Invalid(reason),
        }
    }
}

/// What is switched together: everything, or as many groups as may be staged at a
/// time. Groups that only return come first.
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
    let mut room = 0;
    for (bytes, group) in groups {
        match steps.last_mut() {
            Some(step) if bytes <= room => {
                step.extend(group);
                room -= bytes;
            }
            _ => {
                steps.push(group);
                room = limit.saturating_sub(bytes);
            }
        }
    }
    steps
}

/// Why a switch did not happen.
enum Failure {
    /// One of the changed files is the reason.
    File {
        changed: usize,
        cause: Cause,
        reason: String,
    },
    /// Nothing can be switched.
    Whole(Error),
}

impl From<Error> for Failure {
    fn from(error: Error) -> Failure {
        Failure::Whole(error)
    }
}

/// Checks that the files are still what was read from them, and still there.
fn verify(changed: &[ChangedFile]) -> Result<(), Failure> {
    for (at, file) in changed.iter().enumerate() {
        let source = &file.gguf.source;
        let same =
            |id: std::io::Result<FileId>| id.is_ok_and(|id| id.unwritten_since(&source.id()));
        if !same(source.id_now()) || !same(FileId::of_path(source.path())) {
            return Err(Failure::File {
                changed: at,
                cause: Cause::Changing,
                reason: "it changed while it was read; it is looked at again at the next reload"
                    .into(),
            });
        }
    }
    Ok(())
}

/// How old a modification time must be before a later write is sure to change it.
///
/// File systems stamp writes with a clock that ticks every 1 to 10 ms: two writes
/// within a tick look the same. A file stamped more recently is read only after
/// this long, so that a write during the read gives it another time.
const SETTLE: Duration = Duration::from_millis(20);
