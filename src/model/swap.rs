//! The store of the reload engine: stages and commits new versions of a model's tensors.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;
use std::sync::Arc;

use parking_lot::Mutex;

use super::copy::{CopyError, from_file};
use super::placement::{HOST, Layout};
use super::resident::{NewParts, part_extents};
use super::split::Axis;
use super::tensor::{Storage, Version};
use super::{Model, Versions};
use crate::device::{DeviceError, DeviceKind};
use sidecar_core::error::{Error, Result};
use sidecar_core::gguf::{FileId, Source, TypeInfo};
use sidecar_core::parallel::{self, Threads};
use sidecar_core::reload::{
    Change, Commit, Defects, Effect, Hash, Need, OnOutOfMemory, Outcome, OverlaySource, Report,
    StageError, Store, Trigger, content_of, hash_reads, hash_source,
};

impl Model {
    /// Brings all tensors up to date with their files; see [`Engine::reload`].
    ///
    /// Waits for running evaluations, so a thread cannot reload during its own evaluation.
    ///
    /// [`Engine::reload`]: sidecar_core::reload::Engine::reload
    pub fn reload(&self) -> Result<Report> {
        let engine = self.reload.as_ref().ok_or(Error::HotSwapOff)?;
        self.barrier.check_can_switch()?;
        engine.reload(self, Trigger::Command)
    }

    /// Reverts overlays and sets others; see [`Engine::overlay`]. Waits as [`Model::reload`] does.
    ///
    /// [`Engine::overlay`]: sidecar_core::reload::Engine::overlay
    pub fn overlay(&self, revert: &[usize], set: &[(usize, &OverlaySource)]) -> Result<Report> {
        let engine = self.reload.as_ref().ok_or(Error::HotSwapOff)?;
        self.barrier.check_can_switch()?;
        engine.overlay(self, revert, set)
    }

    /// Hashes the bytes of a version; `None` when the bytes cannot be trusted.
    fn hash(&self, version: &Version) -> Option<Hash> {
        if let Some(resident) = version.resident() {
            return hash_reads(version.nbytes, |at, bytes| resident.read(at, bytes)).ok();
        }
        let Storage::File { file, offset, .. } = version.storage else {
            return None;
        };
        let source = &self.files[file].gguf.source;
        let hash = hash_source(source, offset, version.nbytes).ok();
        hash.filter(|_| self.files[file].is_trusted())
    }

    /// Lays out one group and allocates new buffers, which are filled later.
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
            copies: Vec::new(),
        };
        for (&index, layout) in self.group_layout().groups[group]
            .tensors
            .iter()
            .zip(&layouts)
        {
            let change = changes.iter().find(|change| change.tensor() == index);
            let current = self.current(index);
            let original = &self.tensors[index].original;
            if let Some(Change::Swap(new_data)) = change {
                let from = CopyFrom::File(new_data.source, new_data.offset);
                let (ty, nbytes) = (new_data.ty, new_data.nbytes);
                staged.copies.push(TensorCopy {
                    outcome: Outcome::Swapped,
                    ..self.copy(index, ty, nbytes, layout, from)?
                });
                continue;
            }
            let on_original = Arc::ptr_eq(&current, original);
            let returns = matches!(change, Some(Change::Return(_)));
            if (on_original || returns || current.is_relocated()) && original.fits(layout) {
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
                // The same bytes in another layout: the original bytes, or the bytes in use.
                let (from, outcome) = match returns {
                    true => (original.clone(), Outcome::Swapped),
                    false => (current.clone(), Outcome::Moved),
                };
                let (ty, nbytes) = (from.ty, from.nbytes);
                staged.copies.push(TensorCopy {
                    relocates: returns || on_original || current.is_relocated(),
                    outcome,
                    ..self.copy(index, ty, nbytes, layout, CopyFrom::Version(from))?
                });
            }
        }
        staged.layouts = layouts;
        Ok(staged)
    }

    /// Allocates the buffers of a copy.
    fn copy<'a>(
        &self,
        tensor: usize,
        ty: &'static TypeInfo,
        nbytes: u64,
        layout: &Layout,
        from: CopyFrom<'a>,
    ) -> Result<TensorCopy<'a>, DeviceError> {
        let ne = &self.tensors[tensor].original.ne;
        let parts = part_extents(ty, ne, nbytes, self.group_layout().rows[tensor], layout);
        Ok(TensorCopy {
            tensor,
            ty,
            nbytes,
            parts: NewParts::allocate(&self.devices, layout.clone(), parts)?,
            from,
            relocates: false,
            outcome: Outcome::Moved,
        })
    }

    /// Describes the devices of a version and the units on each.
    fn describe(&self, version: &Version) -> String {
        let Some(resident) = version.resident() else {
            return String::new();
        };
        let mut text = String::new();
        for part in &resident.parts {
            let separator = if text.is_empty() { "" } else { ", " };
            let _ = write!(text, "{separator}{}", self.devices[part.device].name());
            if let Layout::Split { axis, .. } = resident.layout {
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

/// The source of a copy.
enum CopyFrom<'a> {
    /// A file, from an offset on.
    File(&'a Source, u64),
    /// A version on devices.
    Version(Arc<Version>),
}

/// A copy of a tensor into new buffers.
struct TensorCopy<'a> {
    tensor: usize,
    ty: &'static TypeInfo,
    nbytes: u64,
    parts: NewParts,
    from: CopyFrom<'a>,
    /// Whether the bytes are the original ones.
    relocates: bool,
    outcome: Outcome,
}

impl TensorCopy<'_> {
    fn run(&mut self) -> Result<(), CopyError> {
        match &self.from {
            CopyFrom::File(source, offset) => self.parts.fill(&from_file(source, *offset)),
            CopyFrom::Version(version) => {
                let resident = version.resident().expect("only residents are copied");
                let read = |at, bytes: &mut [u8]| Ok(resident.read(at, bytes)?);
                self.parts.fill(&read)
            }
        }
    }
}

/// A group with its new layout.
struct StagedGroup<'a> {
    group: usize,
    displaced: bool,
    layouts: Vec<Layout>,
    /// New versions that need no copy.
    ready: Vec<(usize, Arc<Version>, Outcome)>,
    copies: Vec<TensorCopy<'a>>,
}

/// New versions of tensors, which are filled and not in use yet.
pub struct Staged {
    next: Vec<(usize, Arc<Version>, Outcome)>,
    /// Tensors of the same groups that are not replaced, and the layout that they must have.
    kept: Vec<(usize, Layout)>,
    /// Each group, and whether it falls back to host memory.
    groups: Vec<(u32, bool)>,
}

impl Staged {
    /// Returns whether the tensors that are not replaced have the layout of their group: one of
    /// them may have been loaded since.
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
        let unchangeable = match version.storage {
            Storage::File { file, .. } => {
                version.resident().is_some() || self.files[file].is_trusted()
            }
            Storage::Private { .. } => true,
        };
        known
            .filter(|_| unchangeable)
            .or_else(|| self.hash(&version))
    }

    fn modified_mapped_offset(&self, tensor: usize, id: &FileId) -> Option<u64> {
        let version = self.current(tensor);
        let Storage::File {
            file,
            offset,
            loaded,
            ..
        } = &version.storage
        else {
            return None;
        };
        // `loaded` comes second. A load that ends in between checks under the lock of the trusted
        // identity that the file was not written, and is not published if the file was written.
        let written = self.files[*file].is_write_in_place(id);
        (written && loaded.get().is_none()).then_some(*offset)
    }

    fn can_return(&self, tensor: usize, hash: Hash) -> bool {
        let original = &self.tensors[tensor].original;
        let current = self.current(tensor);
        if Arc::ptr_eq(original, &current) || current.is_relocated() {
            return false;
        }
        let unwritten = match original.storage {
            Storage::File { file, .. } => {
                let source = &self.files[file].gguf.source;
                original.resident().is_some() || source.is_unwritten_since(&source.id())
            }
            Storage::Private { .. } => true,
        };
        unwritten || self.hash(original) == Some(hash)
    }

    fn original_defects(&self, tensor: usize) -> Option<Defects> {
        let tensor = &self.tensors[tensor];
        let file = &self.files[tensor.file as usize];
        let info = &file.gguf.header.tensors[tensor.info as usize];
        let content = content_of(&file.gguf.source, info).ok()?;
        let copied = tensor.original.resident().is_some();
        file.holds_bytes_in_use(copied).then_some(content.defects)
    }

    fn need(&self, changes: &[Change<'_>]) -> Need {
        let mut need = Need::default();
        for index in 0..self.tensors.len() {
            let version = self.current(index);
            if let Storage::Private { .. } = version.storage {
                need.held += version.nbytes;
            }
        }
        let is_host = |device: usize| self.devices[device].kind() == DeviceKind::Host;
        for change in changes {
            let Change::Swap(new_data) = change else {
                continue;
            };
            // A tensor that is not loaded yet goes to a device if there is one.
            let on_host = match self.current(new_data.tensor).resident() {
                Some(resident) => resident.parts.iter().all(|part| is_host(part.device)),
                None => (0..self.devices.len()).all(is_host),
            };
            match on_host {
                true => need.host += new_data.nbytes,
                false => need.device += new_data.nbytes,
            }
        }
        need
    }

    fn threads(&self) -> Threads {
        // The program itself called the reload, and waits for it.
        Threads::All
    }

    fn group(&self, tensor: usize) -> usize {
        self.group_layout().group_of[tensor] as usize
    }

    fn stage(
        &self,
        changes: &[Change<'_>],
        on_out_of_memory: OnOutOfMemory,
    ) -> Result<Option<Staged>, StageError> {
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
                    Change::Swap(new_data) if new_data.tensor == index => Some(new_data.ty),
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
                // A displaced group without changes stays in host memory.
                Err(DeviceError::OutOfMemory { .. }) if changes.is_empty() => {}
                Err(DeviceError::OutOfMemory { .. })
                    if on_out_of_memory == OnOutOfMemory::Fallback && elsewhere =>
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
        let copies = groups.iter_mut().flat_map(|group| &mut group.copies);
        parallel::for_each(
            Threads::All,
            copies.collect(),
            |copy| {
                copy.run()
                    .map_err(|error| *failure.lock() = Some((copy.tensor, error)))
                    .is_ok()
            },
            || true,
        );
        match failure.into_inner() {
            Some((tensor, CopyError::Read(offset, error))) => {
                return Err(StageError::Read {
                    tensor,
                    reason: format!(
                        "cannot read {} at offset {offset}: {error}",
                        self.quoted(tensor)
                    ),
                });
            }
            Some((_, CopyError::Device(error))) => return Err(stage_error(error)),
            None => {}
        }
        let mut staged = Staged {
            next: Vec::new(),
            kept: Vec::new(),
            groups: Vec::new(),
        };
        for group in groups {
            let ready = group.ready.iter().map(|ready| ready.0);
            let copied = group.copies.iter().map(|copy| copy.tensor);
            let replaced: BTreeSet<usize> = ready.chain(copied).collect();
            let members = self.group_layout().groups[group.group].tensors.iter();
            let kept = members
                .copied()
                .zip(group.layouts)
                .filter(|(tensor, _)| !replaced.contains(tensor));
            staged.kept.extend(kept);
            staged.groups.push((group.group as u32, group.displaced));
            staged.next.extend(group.ready);
            staged.next.extend(group.copies.into_iter().map(|copy| {
                let version = Version {
                    ty: copy.ty,
                    ne: self.tensors[copy.tensor].original.ne,
                    nbytes: copy.nbytes,
                    storage: Storage::Private {
                        resident: copy.parts.into_resident(),
                        relocated: copy.relocates,
                    },
                };
                (copy.tensor, Arc::new(version), copy.outcome)
            }));
        }
        Ok(Some(staged))
    }

    fn stage_displaced(&self) -> Result<Option<Staged>, StageError> {
        self.stage(&[], OnOutOfMemory::Fail)
    }

    fn commit(&self, mut staged: Staged) -> Result<Commit> {
        self.barrier.check_can_switch()?;
        let effects: Vec<Effect> = staged
            .next
            .iter()
            .map(|(tensor, version, outcome)| Effect {
                tensor: *tensor,
                outcome: *outcome,
                placement: self.describe(version),
            })
            .collect();
        let switched = self.barrier.switch(|| {
            let mut versions = self.versions.write();
            if !staged.still_fits(&versions) {
                return Err(Error::Busy(
                    "nothing was switched, because a tensor was loaded while its layer was replaced: reload again",
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
            self.listeners.notify(generation);
            Ok(generation)
        });
        // Frees the replaced buffers after the switch: evaluations do not wait for that.
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
