//! A model's tensors as the reload engine sees them.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;
use std::sync::Arc;

use parking_lot::Mutex;

use super::cut::Axis;
use super::fill::{FillError, from_file};
use super::load::{fill_parts, placed};
use super::placement::{HOST, Layout};
use super::tensor::{Home, PartPlan, Version, plan_parts};
use super::{Model, Versions};
use crate::device::{Buffer, DeviceError, DeviceKind};
use crate::error::{Error, Result};
use crate::gguf::{FileId, Source, TypeInfo};
use crate::parallel;
use crate::reload::{
    Change, Commit, Defects, Effect, Hash, Need, NoRoom, Outcome, Readers, Report, StageError,
    Store, Trigger, content_of, hash_reads, hash_source,
};

impl Model {
    /// Brings all tensors up to date with their files; see
    /// [`reload::Engine::reload`](crate::reload::Engine::reload).
    ///
    /// Waits for evaluations that run, so a thread cannot call it during its own.
    pub fn reload(&self) -> Result<Report> {
        let engine = self.reload.as_ref().ok_or(Error::HotSwapOff)?;
        self.gate.check_can_switch()?;
        engine.reload(self, Trigger::Command)
    }

    /// Hash of the bytes of a version, or `None` when they cannot be trusted.
    fn hash(&self, version: &Version) -> Option<Hash> {
        if let Some(placed) = version.placed() {
            return hash_reads(version.nbytes, |at, bytes| placed.read(at, bytes)).ok();
        }
        let Home::File { file, offset, .. } = version.home else {
            return None;
        };
        let source = &self.files[file].gguf.source;
        let hash = hash_source(source, offset, version.nbytes).ok();
        hash.filter(|_| self.files[file].is_trusted())
    }

    /// Lays out one group and allocates what is new; its bytes are filled in later.
    fn stage_group<'a>(
        &self,
        group: usize,
        layouts: Vec<Layout>,
        displaced: bool,
        changes: &[Change<'a>],
    ) -> Result<StagedGroup<'a>, DeviceError> {
        let mut staged = StagedGroup {
            group,
            displaced,
            layouts: Vec::new(),
            ready: Vec::new(),
            tasks: Vec::new(),
        };
        for (&index, layout) in self.plan().groups[group].tensors.iter().zip(&layouts) {
            let change = changes.iter().find(|change| change.tensor() == index);
            let current = self.current(index);
            let original = &self.tensors[index].original;
            if let Some(Change::Swap(job)) = change {
                let bytes = Bytes::File(job.source, job.offset);
                let task = self.task(index, job.ty, job.nbytes, layout, bytes)?;
                staged.tasks.push(task.outcome(Outcome::Swapped));
                continue;
            }
            let on_original = Arc::ptr_eq(&current, original);
            let returns = matches!(change, Some(Change::Return(_)));
            if (on_original || returns || current.is_moved()) && original.fits(layout) {
                match change {
                    _ if !on_original => {
                        staged
                            .ready
                            .push((index, original.clone(), Outcome::Returned));
                    }
                    Some(_) => staged.ready.push((index, current, Outcome::InPlace)),
                    None => {}
                }
            } else if returns || !current.fits(layout) {
                // The same bytes in other places: the original ones, or those in use.
                let (from, outcome) = match returns {
                    true => (original.clone(), Outcome::Swapped),
                    false => (current.clone(), Outcome::Moved),
                };
                let moved = returns || on_original || current.is_moved();
                let (ty, nbytes) = (from.ty, from.nbytes);
                let task = self.task(index, ty, nbytes, layout, Bytes::Version(from))?;
                staged.tasks.push(Task {
                    moved,
                    ..task.outcome(outcome)
                });
            }
        }
        staged.layouts = layouts;
        Ok(staged)
    }

    fn task<'a>(
        &self,
        tensor: usize,
        ty: &'static TypeInfo,
        nbytes: u64,
        layout: &Layout,
        bytes: Bytes<'a>,
    ) -> Result<Task<'a>, DeviceError> {
        let ne = &self.tensors[tensor].original.ne;
        let parts = plan_parts(ty, ne, nbytes, self.plan().rows[tensor], layout);
        Ok(Task {
            tensor,
            ty,
            nbytes,
            layout: layout.clone(),
            buffers: self.allocate_parts(&parts)?,
            parts,
            bytes,
            moved: false,
            outcome: Outcome::Moved,
        })
    }

    fn fill_task(&self, task: &mut Task<'_>) -> Result<(), FillError> {
        let (parts, buffers) = (&task.parts, &mut task.buffers);
        match &task.bytes {
            Bytes::File(source, offset) => fill_parts(&from_file(source, *offset), parts, buffers),
            Bytes::Version(version) => {
                let placed = version.placed().expect("only what is on devices is moved");
                fill_parts(&|at, bytes| Ok(placed.read(at, bytes)?), parts, buffers)
            }
        }
    }

    /// Where a version is, in words.
    fn describe(&self, version: &Version) -> String {
        let Some(placed) = version.placed() else {
            return String::new();
        };
        let mut text = String::new();
        for part in &placed.parts {
            let separator = if text.is_empty() { "" } else { ", " };
            let _ = write!(text, "{separator}{}", self.devices[part.device].name());
            if let Layout::Split { axis, .. } = placed.layout {
                let units = match axis {
                    Axis::Rows => "rows",
                    Axis::Columns => "columns",
                };
                let _ = write!(text, " {units} {}..{}", part.units.0, part.units.1);
            }
        }
        text
    }
}

/// The bytes of a task.
enum Bytes<'a> {
    /// A file from an offset on.
    File(&'a Source, u64),
    /// A version that is on devices.
    Version(Arc<Version>),
}

/// New buffers for a tensor, and what goes into them.
struct Task<'a> {
    tensor: usize,
    ty: &'static TypeInfo,
    nbytes: u64,
    layout: Layout,
    parts: Vec<PartPlan>,
    buffers: Vec<Mutex<Box<dyn Buffer>>>,
    bytes: Bytes<'a>,
    /// Whether the bytes are the original ones.
    moved: bool,
    outcome: Outcome,
}

impl Task<'_> {
    fn outcome(self, outcome: Outcome) -> Self {
        Task { outcome, ..self }
    }
}

/// A group with its new layout.
struct StagedGroup<'a> {
    group: usize,
    displaced: bool,
    layouts: Vec<Layout>,
    /// Tensors that need no copy.
    ready: Vec<(usize, Arc<Version>, Outcome)>,
    tasks: Vec<Task<'a>>,
}

/// New versions of tensors, filled and not yet in use.
pub struct Staged {
    next: Vec<(usize, Arc<Version>, Outcome)>,
    /// Tensors of the same groups that stay, and how they must be laid out by then.
    kept: Vec<(usize, Layout)>,
    /// Each group, and whether it will be in host memory for want of room.
    groups: Vec<(u32, bool)>,
}

impl Staged {
    /// Whether what stays is laid out as what comes: a tensor of a group may have been
    /// loaded since.
    fn still_fits(&self, versions: &Versions) -> bool {
        self.kept
            .iter()
            .all(|(tensor, layout)| versions.current[*tensor].version.fits(layout))
    }
}

fn stage_error(error: DeviceError) -> StageError {
    match error {
        DeviceError::OutOfMemory { .. } => StageError::OutOfMemory(error),
        DeviceError::Failed { .. } => StageError::Device(error),
    }
}

impl Store for Model {
    type Staged = Staged;

    fn live_hash(&self, tensor: usize, known: Option<Hash>) -> Option<Hash> {
        let version = self.current(tensor);
        let unchangeable = match version.home {
            Home::File { file, .. } => version.placed().is_some() || self.files[file].is_trusted(),
            Home::Private { .. } => true,
        };
        known
            .filter(|_| unchangeable)
            .or_else(|| self.hash(&version))
    }

    fn written_through(&self, tensor: usize, id: &FileId) -> Option<u64> {
        let version = self.current(tensor);
        let Home::File {
            file,
            offset,
            loaded,
            ..
        } = &version.home
        else {
            return None;
        };
        // In this order: a load that ends in between is published only if the file was not
        // written, and makes that sure while it holds the trusted identity.
        let written = self.files[*file].is_write_in_place(id);
        (written && loaded.get().is_none()).then_some(*offset)
    }

    fn can_return(&self, tensor: usize, hash: Hash) -> bool {
        let original = &self.tensors[tensor].original;
        let current = self.current(tensor);
        if Arc::ptr_eq(original, &current) || current.is_moved() {
            return false;
        }
        let untouched = match original.home {
            Home::File { file, .. } => {
                let source = &self.files[file].gguf.source;
                original.placed().is_some() || source.is_unwritten_since(&source.id())
            }
            Home::Private { .. } => true,
        };
        untouched || self.hash(original) == Some(hash)
    }

    fn original_defects(&self, tensor: usize) -> Option<Defects> {
        let tensor = &self.tensors[tensor];
        let file = &self.files[tensor.file as usize];
        let info = &file.gguf.header.tensors[tensor.info as usize];
        let content = content_of(&file.gguf.source, info).ok()?;
        let copied = tensor.original.placed().is_some();
        file.holds_bytes_in_use(copied).then_some(content.defects)
    }

    fn need(&self, changes: &[Change<'_>]) -> Need {
        let mut need = Need::default();
        for index in 0..self.tensors.len() {
            let version = self.current(index);
            if let Home::Private { .. } = version.home {
                need.held += version.nbytes;
            }
        }
        let is_host = |device: usize| self.devices[device].kind() == DeviceKind::Host;
        for change in changes {
            let Change::Swap(job) = change else { continue };
            // On a device if it is on one now, or is not loaded yet and there are any.
            let on_host = match self.current(job.tensor).placed() {
                Some(placed) => placed.parts.iter().all(|part| is_host(part.device)),
                None => (0..self.devices.len()).all(is_host),
            };
            match on_host {
                true => need.host += job.nbytes,
                false => need.device += job.nbytes,
            }
        }
        need
    }

    fn readers(&self) -> Readers {
        // The host itself asks for the reload, and waits for it.
        Readers::all()
    }

    fn group(&self, tensor: usize) -> usize {
        self.plan().group_of[tensor] as usize
    }

    fn staging_bytes(&self) -> u64 {
        self.staging_bytes
    }

    fn has_displaced(&self) -> bool {
        !self.versions.read().displaced.is_empty()
    }

    fn stage(&self, changes: &[Change<'_>], no_room: NoRoom) -> Result<Option<Staged>, StageError> {
        let mut asked: BTreeMap<usize, Vec<Change<'_>>> = BTreeMap::new();
        for change in changes {
            let group = self.group(change.tensor());
            asked.entry(group).or_default().push(*change);
        }
        for &displaced in &self.versions.read().displaced {
            asked.entry(displaced as usize).or_default();
        }
        let mut groups = Vec::new();
        for (group, changes) in asked {
            let ty = |index: usize| {
                let new = changes.iter().find_map(|change| match change {
                    Change::Swap(job) if job.tensor == index => Some(job.ty),
                    Change::Return(tensor) if *tensor == index => {
                        Some(self.tensors[index].original.ty)
                    }
                    _ => None,
                });
                new.unwrap_or_else(|| self.current(index).ty)
            };
            let layouts = self.device_layouts(group, ty);
            let on_host = vec![Layout::Whole(HOST); layouts.len()];
            let elsewhere = layouts != on_host;
            match self.stage_group(group, layouts, false, &changes) {
                Ok(staged) => groups.push(staged),
                // A displaced group that nothing is asked of stays where it is.
                Err(DeviceError::OutOfMemory { .. }) if changes.is_empty() => {}
                Err(DeviceError::OutOfMemory { .. })
                    if no_room == NoRoom::Fallback && elsewhere =>
                {
                    let staged = self.stage_group(group, on_host, true, &changes);
                    groups.push(staged.map_err(stage_error)?);
                }
                Err(error) => return Err(stage_error(error)),
            }
        }
        if groups.is_empty() {
            return Ok(None);
        }

        let failure = Mutex::new(None);
        let tasks = groups.iter_mut().flat_map(|group| &mut group.tasks);
        parallel::for_each(
            tasks.collect(),
            |task| {
                let filled = self.fill_task(task);
                filled
                    .map_err(|error| *failure.lock() = Some((task.tensor, error)))
                    .is_ok()
            },
            || true,
        );
        match failure.into_inner() {
            Some((tensor, FillError::Read(offset, error))) => {
                return Err(StageError::Read {
                    tensor,
                    reason: format!(
                        "cannot read {} at offset {offset}: {error}",
                        self.quoted(tensor)
                    ),
                });
            }
            Some((_, FillError::Device(error))) => return Err(stage_error(error)),
            None => {}
        }
        let mut staged = Staged {
            next: Vec::new(),
            kept: Vec::new(),
            groups: Vec::new(),
        };
        for group in groups {
            let comes: BTreeSet<usize> = group
                .ready
                .iter()
                .map(|ready| ready.0)
                .chain(group.tasks.iter().map(|task| task.tensor))
                .collect();
            let members = self.plan().groups[group.group].tensors.iter();
            let kept = members
                .copied()
                .zip(group.layouts)
                .filter(|(tensor, _)| !comes.contains(tensor));
            staged.kept.extend(kept);
            staged.groups.push((group.group as u32, group.displaced));
            staged.next.extend(group.ready);
            staged.next.extend(group.tasks.into_iter().map(|task| {
                let version = Version {
                    ty: task.ty,
                    ne: self.tensors[task.tensor].original.ne,
                    nbytes: task.nbytes,
                    home: Home::Private {
                        placed: placed(task.layout, &task.parts, task.buffers),
                        moved: task.moved,
                    },
                };
                (task.tensor, Arc::new(version), task.outcome)
            }));
        }
        Ok(Some(staged))
    }

    fn commit(&self, mut staged: Staged) -> Result<Commit> {
        self.gate.check_can_switch()?;
        let effects: Vec<Effect> = staged
            .next
            .iter()
            .map(|(tensor, version, outcome)| Effect {
                tensor: *tensor,
                outcome: *outcome,
                placement: self.describe(version),
            })
            .collect();
        let switched = self.gate.switch(|| {
            let mut versions = self.versions.write();
            if !staged.still_fits(&versions) {
                return Err(Error::Busy(
                    "a tensor of a layer was loaded while the layer was being replaced; nothing changed, reload again",
                ));
            }
            for (group, displaced) in &staged.groups {
                match displaced {
                    true => versions.displaced.insert(*group),
                    false => versions.displaced.remove(group),
                };
            }
            for (tensor, version, _) in &mut staged.next {
                let current = &mut versions.current[*tensor];
                std::mem::swap(&mut current.version, version);
                current.generation += 1;
            }
            versions.generation += 1;
            let generation = versions.generation;
            drop(versions);
            self.listeners.tell(generation);
            Ok(generation)
        });
        // Freeing what was replaced takes longer than replacing it: evaluations do
        // not wait for it.
        drop(staged);
        Ok(Commit {
            switched: switched?,
            effects,
        })
    }

    fn trust(&self, file: usize, id: FileId) {
        self.files[file].trust(id);
    }
}
