//! Materialising tensors: from their file into buffers on their devices.
//!
//! Bytes are read from the file and not copied out of its mapping: a read costs no
//! page faults on the source, and a file that was cut short gives an error instead
//! of a bus error.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use super::cut::Runs;
use super::fill::{CHUNK, FillError, ReadAt, Target, fill, from_file};
use super::placement::Layout;
use super::tensor::{Home, Part, PartPlan, Placed, Version, plan_parts};
use super::{Model, TensorView};
use crate::device::{ALIGNMENT, Buffer, DeviceError};
use crate::error::{Error, Result};
use crate::gguf::FileId;
use crate::parallel;
use crate::reload::TrackedFile;

/// Device allocations that loading everything may take.
const MAX_ALLOCATIONS: usize = 9;

/// How far [`Model::load_all`] is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Progress {
    /// Bytes that are where they belong.
    pub done: u64,
    /// Bytes to load.
    pub total: u64,
}

/// What [`Model::load_all`] did.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LoadReport {
    /// Tensors that were not loaded before.
    pub tensors: u64,
    /// Their bytes.
    pub bytes: u64,
    /// Device allocations: at most 9, unless there are more devices than that.
    pub allocations: u64,
    /// How long it took.
    pub time: Duration,
}

/// A tensor that waits to be loaded.
struct Pending {
    index: usize,
    version: Arc<Version>,
    layout: Layout,
    parts: Vec<PartPlan>,
}

/// Parts that share a buffer.
#[derive(Default)]
struct Arena {
    /// Which tensor, which of its parts, and where in the buffer.
    slots: Vec<(usize, usize, u64)>,
    bytes: u64,
}

/// Something to read: a tensor, or a piece of one that is in one part.
struct Piece<'a> {
    tensor: usize,
    file: usize,
    offset: u64,
    bytes: u64,
    parts: Vec<(Runs, Target<'a>)>,
}

impl Model {
    /// Materialises one tensor and returns it as it then is.
    ///
    /// Loads once: threads that ask at the same time wait and get the same buffer.
    /// When a reload replaces the tensor meanwhile, it is loaded as it is then.
    pub fn load(&self, index: usize) -> Result<TensorView> {
        loop {
            let (pending, generation) = {
                let versions = self.versions.read();
                let version = versions.current[index].version.clone();
                if version.placed().is_some() {
                    drop(versions);
                    return Ok(self.tensor(index));
                }
                let layout = self.layout(&versions, index);
                (self.pending(index, version, layout), versions.generation)
            };
            let version = pending.version.clone();
            let Home::File {
                file,
                offset,
                loaded,
                loading,
            } = &version.home
            else {
                return Ok(self.tensor(index));
            };
            let _loading = loading.lock();
            if loaded.get().is_some() {
                return Ok(self.tensor(index));
            }
            let trusted = self.files[*file].trusted();
            let mut buffers = self.allocate_parts(&pending.parts)?;
            let source = from_file(&self.files[*file].gguf.source, *offset);
            fill_parts(&source, &pending.parts, &mut buffers)
                .map_err(|error| self.fill_error(error, *file, index))?;
            let placed = placed(pending.layout.clone(), &pending.parts, buffers);
            self.publish(*file, trusted, generation, vec![(pending, placed)])?;
        }
    }

    /// Copies bytes of a tensor, from `at` on: from its devices if it is loaded, else
    /// from its file.
    pub fn read(&self, index: usize, at: u64, bytes: &mut [u8]) -> Result<()> {
        self.read_view(index, &self.tensor(index), at, bytes)
    }

    /// [`Model::read`] of the tensor as it was at the moment of `view`.
    pub fn read_view(
        &self,
        index: usize,
        view: &TensorView,
        at: u64,
        bytes: &mut [u8],
    ) -> Result<()> {
        let version = view.version();
        let end = at.checked_add(bytes.len() as u64);
        if end.is_none_or(|end| end > version.nbytes) {
            return Err(Error::NotFound {
                what: "byte range",
                wanted: format!("{at} + {} of {}", bytes.len(), self.quoted(index)),
                available: format!("it has {} bytes", version.nbytes),
            });
        }
        if let Some(placed) = version.placed() {
            return Ok(placed.read(at, bytes)?);
        }
        let Home::File { file, offset, .. } = version.home else {
            unreachable!("a tensor that is in no file is on a device");
        };
        let trusted = self.files[file].trusted();
        let source = from_file(&self.files[file].gguf.source, offset);
        source(at, bytes).map_err(|error| self.fill_error(error, file, index))?;
        self.check_trusted(file, trusted, || self.quoted(index))
    }

    /// Materialises every tensor that is not yet, in at most 9 device allocations.
    ///
    /// Each device gives one arena, or several of about the same size, biggest tensor
    /// first, when it refuses one that large. `progress` is called on this thread
    /// while pieces are read, and with `done == total` after the last one, unless reading
    /// failed or nothing was to be loaded; when it returns `false`, everything loaded by
    /// this call is dropped again.
    ///
    /// A tensor that a reload replaces or moves meanwhile may stay as it is.
    pub fn load_all(&self, mut progress: impl FnMut(Progress) -> bool) -> Result<LoadReport> {
        let began = Instant::now();
        let trusted: Vec<FileId> = self.files.iter().map(TrackedFile::trusted).collect();
        let (pending, generation) = self.all_pending();
        let bytes: u64 = pending.iter().map(|tensor| tensor.version.nbytes).sum();
        let (arenas, mut buffers) = self.allocate_arenas(&pending)?;
        self.fill_arenas(&pending, &arenas, &mut buffers, bytes, &mut progress)?;

        let report = LoadReport {
            tensors: pending.len() as u64,
            bytes,
            allocations: buffers.len() as u64,
            time: began.elapsed(),
        };
        let mut of_file: Vec<Vec<(Pending, Placed)>> = Vec::new();
        of_file.resize_with(self.files.len(), Vec::new);
        for (tensor, parts) in
            pending
                .into_iter()
                .zip(shared_parts(report.tensors, &arenas, buffers))
        {
            let parts = tensor.parts.iter().zip(parts);
            let placed = Placed {
                layout: tensor.layout.clone(),
                parts: parts
                    .map(|(part, (buffer, offset))| part.at(buffer, offset))
                    .collect(),
            };
            of_file[self.tensors[tensor.index].file as usize].push((tensor, placed));
        }
        for (file, tensors) in of_file.into_iter().enumerate() {
            self.publish(file, trusted[file], generation, tensors)?;
        }
        Ok(report)
    }

    /// Every tensor that is not loaded, as it is to be laid out, and the generation
    /// that this holds for.
    fn all_pending(&self) -> (Vec<Pending>, u64) {
        let versions = self.versions.read();
        let mut pending = Vec::new();
        for group in 0..self.plan().groups.len() {
            let layouts = self.group_layouts(&versions, group);
            for (&index, layout) in self.plan().groups[group].tensors.iter().zip(layouts) {
                let version = &versions.current[index].version;
                if version.placed().is_none() {
                    pending.push(self.pending(index, version.clone(), layout));
                }
            }
        }
        (pending, versions.generation)
    }

    fn pending(&self, index: usize, version: Arc<Version>, layout: Layout) -> Pending {
        let rows = self.plan().rows[index];
        Pending {
            index,
            parts: plan_parts(version.ty, &version.ne, version.nbytes, rows, &layout),
            version,
            layout,
        }
    }

    /// A buffer of its own for each part.
    pub(super) fn allocate_parts(
        &self,
        parts: &[PartPlan],
    ) -> Result<Vec<Mutex<Box<dyn Buffer>>>, DeviceError> {
        parts
            .iter()
            .map(|part| {
                let device = self.devices[part.device].clone();
                Ok(Mutex::new(device.allocate(part.runs.bytes())?))
            })
            .collect()
    }

    /// Lays out all parts and allocates the arenas for them.
    #[allow(clippy::type_complexity, reason = "two lists that go together")]
    fn allocate_arenas(
        &self,
        pending: &[Pending],
    ) -> Result<(Vec<Arena>, Vec<Mutex<Box<dyn Buffer>>>), DeviceError> {
        let slots_of = |device: usize| -> Vec<(usize, usize)> {
            let parts = pending.iter().enumerate().flat_map(|(at, tensor)| {
                let parts = tensor.parts.iter().enumerate();
                parts.map(move |(part, plan)| (at, part, plan.device))
            });
            parts
                .filter(|slot| slot.2 == device)
                .map(|slot| (slot.0, slot.1))
                .collect()
        };
        let bytes = |&(tensor, part): &(usize, usize)| pending[tensor].parts[part].runs.bytes();
        let used: Vec<(usize, Vec<(usize, usize)>)> = (0..self.devices.len())
            .map(|device| (device, slots_of(device)))
            .filter(|(_, slots)| !slots.is_empty())
            .collect();
        // Each device is asked once for all of it, and then for this many parts.
        let many = MAX_ALLOCATIONS.saturating_sub(used.len()) / used.len().max(1);
        let (mut arenas, mut buffers) = (Vec::new(), Vec::new());
        for (device, mut slots) in used {
            let allocate = |bytes| self.devices[device].clone().allocate(bytes).map(Mutex::new);
            let mut one = Arena::default();
            slots.iter().for_each(|slot| one.push(*slot, bytes(slot)));
            match allocate(one.bytes) {
                Ok(buffer) => {
                    arenas.push(one);
                    buffers.push(buffer);
                }
                Err(DeviceError::OutOfMemory { .. }) if many > 1 => {
                    // The biggest first, each into the arena that holds least.
                    slots.sort_by_key(|slot| std::cmp::Reverse(bytes(slot)));
                    let mut several: Vec<Arena> = (0..many).map(|_| Arena::default()).collect();
                    for slot in slots {
                        let emptiest = several.iter_mut().min_by_key(|arena| arena.bytes);
                        emptiest.expect("more than one").push(slot, bytes(&slot));
                    }
                    several.retain(|arena| !arena.slots.is_empty());
                    for arena in several {
                        buffers.push(allocate(arena.bytes)?);
                        arenas.push(arena);
                    }
                }
                Err(error) => return Err(error),
            }
        }
        Ok((arenas, buffers))
    }

    fn fill_arenas(
        &self,
        pending: &[Pending],
        arenas: &[Arena],
        buffers: &mut [Mutex<Box<dyn Buffer>>],
        total: u64,
        progress: &mut impl FnMut(Progress) -> bool,
    ) -> Result<()> {
        let done = AtomicU64::new(0);
        let failure: Mutex<Option<Error>> = Mutex::new(None);
        let cancelled = AtomicBool::new(false);
        let read = |mut piece: Piece<'_>| {
            let source = from_file(&self.files[piece.file].gguf.source, piece.offset);
            let result = fill(&source, &mut piece.parts);
            done.fetch_add(piece.bytes, Ordering::Relaxed);
            result
                .map_err(|error| {
                    *failure.lock() = Some(self.fill_error(error, piece.file, piece.tensor));
                })
                .is_ok()
        };
        let beside = || {
            let done = done.load(Ordering::Relaxed);
            let go_on = progress(Progress { done, total });
            cancelled.fetch_or(!go_on, Ordering::Relaxed);
            go_on
        };
        parallel::for_each(pieces(pending, arenas, buffers), read, beside);
        if let Some(error) = failure.into_inner() {
            return Err(error);
        }
        match cancelled.into_inner() {
            true => Err(Error::Cancelled),
            false => Ok(()),
        }
    }

    /// Makes loaded tensors of a file visible, unless the file was written in place
    /// since `trusted` was the identity of its bytes. Leaves out those that a reload
    /// has replaced or laid out in another way since `generation`.
    ///
    /// The lock on the file keeps a reload from deciding at the same moment that
    /// these tensors are still read out of it.
    fn publish(
        &self,
        file: usize,
        trusted: FileId,
        generation: u64,
        tensors: Vec<(Pending, Placed)>,
    ) -> Result<()> {
        let now = self.files[file].lock_trusted();
        self.check_identity(file, *now, trusted, || match tensors.as_slice() {
            [(only, _)] => self.quoted(only.index),
            _ => "its tensors".into(),
        })?;
        let versions = self.versions.read();
        for (tensor, placed) in tensors {
            let current = || {
                Arc::ptr_eq(&versions.current[tensor.index].version, &tensor.version)
                    && self.layout(&versions, tensor.index) == tensor.layout
            };
            if let Home::File { loaded, .. } = &tensor.version.home
                && (versions.generation == generation || current())
            {
                // Whoever loaded it meanwhile was first, and its buffers may already
                // be in use.
                let _ = loaded.set(placed);
            }
        }
        Ok(())
    }

    fn check_trusted(&self, file: usize, trusted: FileId, what: impl Fn() -> String) -> Result<()> {
        let now = self.files[file].trusted();
        self.check_identity(file, now, trusted, what)
    }

    /// An error unless the bytes of a file that were read while it was `before` are
    /// those that are trusted now.
    fn check_identity(
        &self,
        file: usize,
        now: FileId,
        before: FileId,
        what: impl Fn() -> String,
    ) -> Result<()> {
        let source = &self.files[file].gguf.source;
        if now.unwritten_since(&before) && source.has_stamp_of(&before) {
            return Ok(());
        }
        Err(Error::WrittenInPlace {
            path: source.path().to_owned(),
            what: what(),
        })
    }

    pub(super) fn quoted(&self, index: usize) -> String {
        format!("tensor '{}'", self.name(index).to_string_lossy())
    }

    fn fill_error(&self, error: FillError, file: usize, tensor: usize) -> Error {
        match error {
            FillError::Device(error) => error.into(),
            FillError::Read(offset, source) => Error::Read {
                path: self.file_path(file).to_owned(),
                what: self.quoted(tensor),
                offset,
                source,
            },
        }
    }
}

impl PartPlan {
    /// The part, once its bytes are at `offset` of a buffer.
    fn at(&self, buffer: Arc<dyn Buffer>, offset: u64) -> Part {
        Part {
            buffer,
            device: self.device,
            offset,
            runs: self.runs,
            units: self.units,
        }
    }
}

/// Fills the parts of a tensor that have buffers of their own.
pub(super) fn fill_parts(
    read: &ReadAt<'_>,
    parts: &[PartPlan],
    buffers: &mut [Mutex<Box<dyn Buffer>>],
) -> Result<(), FillError> {
    let targets = parts.iter().zip(buffers);
    let mut targets: Vec<_> = targets
        .map(|(part, buffer)| (part.runs, Target::all(buffer)))
        .collect();
    fill(read, &mut targets)
}

/// A tensor whose parts have buffers of their own.
pub(super) fn placed(
    layout: Layout,
    parts: &[PartPlan],
    buffers: Vec<Mutex<Box<dyn Buffer>>>,
) -> Placed {
    let parts = parts.iter().zip(buffers);
    Placed {
        layout,
        parts: parts
            .map(|(part, buffer)| part.at(buffer.into_inner().into(), 0))
            .collect(),
    }
}

impl Arena {
    fn push(&mut self, (tensor, part): (usize, usize), bytes: u64) {
        self.slots.push((tensor, part, self.bytes));
        self.bytes += bytes.next_multiple_of(ALIGNMENT);
    }
}

/// Cuts the memory of all arenas into what is read at a time.
fn pieces<'a>(
    pending: &[Pending],
    arenas: &[Arena],
    buffers: &'a mut [Mutex<Box<dyn Buffer>>],
) -> Vec<Piece<'a>> {
    let mut targets: Vec<Vec<(Runs, Target<'a>)>> = Vec::new();
    targets.resize_with(pending.len(), Vec::new);
    for (arena, buffer) in arenas.iter().zip(buffers) {
        let mut whole = Target::all(buffer);
        let mut at = 0;
        for &(tensor, part, offset) in &arena.slots {
            let runs = pending[tensor].parts[part].runs;
            let target = match whole {
                Target::Device(buffer, _) => Target::Device(buffer, offset),
                Target::Memory(memory) => {
                    let (_, memory) = memory.split_at_mut((offset - at) as usize);
                    let (part, rest) = memory.split_at_mut(runs.bytes() as usize);
                    at = offset + runs.bytes();
                    whole = Target::Memory(rest);
                    Target::Memory(part)
                }
            };
            targets[tensor].push((runs, target));
        }
    }
    let mut pieces = Vec::new();
    for (tensor, mut parts) in pending.iter().zip(targets) {
        let Home::File { file, offset, .. } = tensor.version.home else {
            continue;
        };
        let piece = |from: u64, bytes, parts| Piece {
            tensor: tensor.index,
            file,
            offset: offset + from,
            bytes,
            parts,
        };
        match parts.pop() {
            // In one part and in memory: several threads can read it.
            Some((_, Target::Memory(memory))) if parts.is_empty() && tensor.is_whole() => {
                for (i, memory) in memory.chunks_mut(CHUNK).enumerate() {
                    let bytes = memory.len() as u64;
                    let parts = vec![(Runs::whole(bytes), Target::Memory(memory))];
                    pieces.push(piece((i * CHUNK) as u64, bytes, parts));
                }
            }
            last => {
                parts.extend(last);
                pieces.push(piece(0, tensor.version.nbytes, parts));
            }
        }
    }
    pieces
}

impl Pending {
    fn is_whole(&self) -> bool {
        matches!(self.layout, Layout::Whole(_))
    }
}

/// For each tensor, the buffer and offset of each of its parts.
fn shared_parts(
    tensors: u64,
    arenas: &[Arena],
    buffers: Vec<Mutex<Box<dyn Buffer>>>,
) -> impl Iterator<Item = Vec<(Arc<dyn Buffer>, u64)>> {
    let mut of_tensor: Vec<Vec<_>> = vec![Vec::new(); tensors as usize];
    for (arena, buffer) in arenas.iter().zip(buffers) {
        let buffer: Arc<dyn Buffer> = buffer.into_inner().into();
        for &(tensor, part, offset) in &arena.slots {
            of_tensor[tensor].push((part, buffer.clone(), offset));
        }
    }
    of_tensor.into_iter().map(|mut parts| {
        parts.sort_by_key(|part| part.0);
        parts.into_iter().map(|part| (part.1, part.2)).collect()
    })
}
