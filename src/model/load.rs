//! Loads tensors from their file into buffers on their devices.
//!
//! Bytes are read from the file and not copied from its mapping. A read causes no page faults
//! on the source, and a truncated file gives an error instead of a bus error.

use std::collections::BTreeMap;
use std::ffi::CStr;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use super::copy::{CopyError, Destination, copy_parts, from_file};
use super::placement::Layout;
use super::resident::{NewParts, PartExtent, Resident, part_extents};
use super::split::StridedRange;
use super::tensor::{Storage, Version};
use super::{Model, TensorView};
use crate::device::{ALIGNMENT, Buffer, DeviceError};
use sidecar_core::error::{Error, Result};
use sidecar_core::gguf::FileId;
use sidecar_core::parallel::{self, Threads};
use sidecar_core::reload::TrackedFile;
use sidecar_core::stream::page_size;

/// The most device allocations of [`Model::load_all`].
const MAX_ALLOCATIONS: usize = 9;
/// Bytes of a huge page.
const HUGE_PAGE: usize = 2 << 20;

/// Progress of [`Model::load_all`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Progress<'a> {
    /// Bytes loaded so far.
    pub done: u64,
    /// Bytes to load.
    pub total: u64,
    /// Number of tensors that are loaded completely.
    pub tensors: u64,
    /// Number of tensors to load.
    pub total_tensors: u64,
    /// Name of the tensor whose bytes were loaded last.
    pub name: &'a CStr,
}

/// Result of [`Model::load_all`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LoadReport {
    /// Number of tensors that were loaded.
    pub tensors: u64,
    /// Bytes of those tensors.
    pub bytes: u64,
    /// Number of device allocations: at most 9, or one per device if there are more devices.
    pub allocations: u64,
    /// Duration of the call.
    pub time: Duration,
}

/// A tensor that is to be loaded.
struct Pending {
    index: usize,
    version: Arc<Version>,
    layout: Layout,
    parts: Vec<PartExtent>,
}

/// Parts that share a buffer.
#[derive(Default)]
struct Arena {
    /// Index of the tensor, index of the part, and offset in the buffer.
    slots: Vec<(usize, usize, u64)>,
    bytes: u64,
}

/// What a thread reads at a time: the pieces in one huge page of the process, or one tensor.
#[derive(Default)]
struct Block<'a> {
    /// The addresses of the huge page, as far as they are in the arena.
    memory: Range<usize>,
    pieces: Vec<Piece<'a>>,
}

/// Bytes to read: a tensor, or a piece of a tensor in one part.
struct Piece<'a> {
    /// Position among the tensors that are to be loaded.
    tensor: usize,
    file: usize,
    offset: u64,
    bytes: u64,
    parts: Vec<(StridedRange, Destination<'a>)>,
}

impl Model {
    /// Loads one tensor into buffers on its devices and returns a view of the tensor.
    ///
    /// A tensor is loaded once: concurrent calls wait and return the same buffer. When a reload
    /// replaces the tensor meanwhile, the new version is loaded.
    pub fn load(&self, index: usize) -> Result<TensorView> {
        loop {
            let (pending, generation) = {
                let versions = self.versions.read();
                let version = versions.current[index].version.clone();
                if version.resident().is_some() {
                    drop(versions);
                    return Ok(self.tensor(index));
                }
                let layout = self.layout(&versions, index);
                (self.pending(index, version, layout), versions.generation)
            };
            let version = pending.version.clone();
            let Storage::File {
                file,
                offset,
                loaded,
                loading,
            } = &version.storage
            else {
                return Ok(self.tensor(index));
            };
            let _loading = loading.lock();
            if loaded.get().is_some() {
                return Ok(self.tensor(index));
            }
            let trusted = self.files[*file].trusted();
            let (layout, parts) = (pending.layout.clone(), pending.parts.clone());
            let mut parts = NewParts::allocate(&self.devices, layout, parts)?;
            parts
                .fill(&from_file(&self.files[*file].gguf.source, *offset))
                .map_err(|error| self.copy_error(error, *file, index))?;
            let loaded = vec![(pending, parts.into_resident())];
            self.publish(*file, trusted, generation, loaded)?;
        }
    }

    /// Copies bytes of a tensor from `at` on: from its devices if the tensor is loaded, else from
    /// its file.
    pub fn read(&self, index: usize, at: u64, bytes: &mut [u8]) -> Result<()> {
        self.read_view(index, &self.tensor(index), at, bytes)
    }

    /// Copies bytes of a tensor as it was at the moment of `view`; see [`Model::read`].
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
        if let Some(resident) = version.resident() {
            return Ok(resident.read(at, bytes)?);
        }
        let Storage::File { file, offset, .. } = version.storage else {
            unreachable!("a tensor that is in no file is on a device");
        };
        let trusted = self.files[file].trusted();
        let source = from_file(&self.files[file].gguf.source, offset);
        source(at, bytes).map_err(|error| self.copy_error(error, file, index))?;
        self.check_trusted(file, trusted, || self.quoted(index))
    }

    /// Loads every tensor that is not loaded yet, in at most 9 device allocations.
    ///
    /// Allocates one buffer per device, or several of about the same size when the device
    /// refuses one that large. Calls `progress` on this thread while pieces are read, and with
    /// `done == total` after the last piece, unless reading failed or no tensor was to be loaded.
    /// When `progress` returns `false`, all tensors loaded by this call are dropped again.
    ///
    /// A tensor that a reload replaces or relocates meanwhile may stay as it is.
    pub fn load_all(&self, mut progress: impl FnMut(Progress<'_>) -> bool) -> Result<LoadReport> {
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
        let mut of_file: Vec<Vec<(Pending, Resident)>> = Vec::new();
        of_file.resize_with(self.files.len(), Vec::new);
        for (tensor, parts) in
            pending
                .into_iter()
                .zip(shared_parts(report.tensors, &arenas, buffers))
        {
            let parts = tensor.parts.iter().zip(parts);
            let resident = Resident {
                layout: tensor.layout.clone(),
                parts: parts
                    .map(|(part, (buffer, offset))| part.at(buffer, offset))
                    .collect(),
            };
            of_file[self.tensors[tensor.index].file as usize].push((tensor, resident));
        }
        for (file, tensors) in of_file.into_iter().enumerate() {
            self.publish(file, trusted[file], generation, tensors)?;
        }
        Ok(report)
    }

    /// Returns every tensor that is not loaded, with its layout, and the generation in which
    /// that layout is right.
    fn all_pending(&self) -> (Vec<Pending>, u64) {
        let versions = self.versions.read();
        let mut pending = Vec::new();
        for group in 0..self.group_layout().groups.len() {
            let layouts = self.group_layouts(&versions, group);
            for (&index, layout) in self.group_layout().groups[group]
                .tensors
                .iter()
                .zip(layouts)
            {
                let version = &versions.current[index].version;
                if version.resident().is_none() {
                    pending.push(self.pending(index, version.clone(), layout));
                }
            }
        }
        (pending, versions.generation)
    }

    fn pending(&self, index: usize, version: Arc<Version>, layout: Layout) -> Pending {
        let rows = self.group_layout().rows[index];
        Pending {
            index,
            parts: part_extents(version.ty, &version.ne, version.nbytes, rows, &layout),
            version,
            layout,
        }
    }

    /// Assigns all parts to arenas and allocates the arenas.
    #[allow(clippy::type_complexity, reason = "two lists that go together")]
    fn allocate_arenas(
        &self,
        pending: &[Pending],
    ) -> Result<(Vec<Arena>, Vec<Mutex<Box<dyn Buffer>>>), DeviceError> {
        let slots_of = |device: usize| -> Vec<(usize, usize)> {
            let parts = pending.iter().enumerate().flat_map(|(at, tensor)| {
                let parts = tensor.parts.iter().enumerate();
                parts.map(move |(part, extent)| (at, part, extent.device))
            });
            parts
                .filter(|slot| slot.2 == device)
                .map(|slot| (slot.0, slot.1))
                .collect()
        };
        let bytes = |&(tensor, part): &(usize, usize)| pending[tensor].parts[part].range.bytes();
        let used: Vec<(usize, Vec<(usize, usize)>)> = (0..self.devices.len())
            .map(|device| (device, slots_of(device)))
            .filter(|(_, slots)| !slots.is_empty())
            .collect();
        // One allocation per device is tried first, then this many.
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
                    // The largest part first, each into the arena with the fewest bytes.
                    slots.sort_by_key(|slot| std::cmp::Reverse(bytes(slot)));
                    let mut several: Vec<Arena> = (0..many).map(|_| Arena::default()).collect();
                    for slot in slots {
                        let smallest = several.iter_mut().min_by_key(|arena| arena.bytes);
                        smallest.expect("more than one").push(slot, bytes(&slot));
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
        progress: &mut impl FnMut(Progress<'_>) -> bool,
    ) -> Result<()> {
        let done = AtomicU64::new(0);
        let empty = |tensor: &&Pending| tensor.version.nbytes == 0;
        let tensors = AtomicU64::new(pending.iter().filter(empty).count() as u64);
        // Bytes of each tensor that are left, and the tensor that was read last.
        let left: Vec<AtomicU64> = pending
            .iter()
            .map(|tensor| tensor.version.nbytes.into())
            .collect();
        let last = AtomicUsize::new(0);
        let failure: Mutex<Option<Error>> = Mutex::new(None);
        let cancelled = AtomicBool::new(false);
        let read = |mut piece: Piece<'_>| {
            let source = from_file(&self.files[piece.file].gguf.source, piece.offset);
            let result = copy_parts(&source, &mut piece.parts);
            if left[piece.tensor].fetch_sub(piece.bytes, Ordering::Relaxed) == piece.bytes {
                tensors.fetch_add(1, Ordering::Relaxed);
            }
            last.store(piece.tensor, Ordering::Relaxed);
            // After the counts that belong to it.
            done.fetch_add(piece.bytes, Ordering::Release);
            result
                .map_err(|error| {
                    let index = pending[piece.tensor].index;
                    *failure.lock() = Some(self.copy_error(error, piece.file, index));
                })
                .is_ok()
        };
        let read = |block: Block<'_>| {
            populate(&block.memory);
            block.pieces.into_iter().all(read)
        };
        let beside = || {
            let go_on = progress(Progress {
                done: done.load(Ordering::Acquire),
                total,
                tensors: tensors.load(Ordering::Relaxed),
                total_tensors: pending.len() as u64,
                name: self.name(pending[last.load(Ordering::Relaxed)].index),
            });
            cancelled.fetch_or(!go_on, Ordering::Relaxed);
            go_on
        };
        parallel::for_each(Threads::All, blocks(pending, arenas, buffers), read, beside);
        if let Some(error) = failure.into_inner() {
            return Err(error);
        }
        match cancelled.into_inner() {
            true => Err(Error::Cancelled),
            false => Ok(()),
        }
    }

    /// Makes loaded tensors of a file visible. Fails if the file was written in place since
    /// `trusted` was the identity of its bytes. Leaves out tensors that a reload has replaced or
    /// laid out in another way since `generation`.
    ///
    /// Holds the trusted identity, so that no reload decides at the same moment that these
    /// tensors are used through the mapping of the file.
    fn publish(
        &self,
        file: usize,
        trusted: FileId,
        generation: u64,
        tensors: Vec<(Pending, Resident)>,
    ) -> Result<()> {
        let now = self.files[file].lock_trusted();
        self.check_identity(file, *now, trusted, || match tensors.as_slice() {
            [(only, _)] => self.quoted(only.index),
            _ => "its tensors".into(),
        })?;
        let versions = self.versions.read();
        for (tensor, resident) in tensors {
            let current = || {
                Arc::ptr_eq(&versions.current[tensor.index].version, &tensor.version)
                    && self.layout(&versions, tensor.index) == tensor.layout
            };
            if let Storage::File { loaded, .. } = &tensor.version.storage
                && (versions.generation == generation || current())
            {
                // If another thread loaded the tensor meanwhile, its buffers may already be in
                // use.
                let _ = loaded.set(resident);
            }
        }
        Ok(())
    }

    fn check_trusted(&self, file: usize, trusted: FileId, what: impl Fn() -> String) -> Result<()> {
        let now = self.files[file].trusted();
        self.check_identity(file, now, trusted, what)
    }

    /// Returns an error unless the bytes that were read while the file had the identity `before`
    /// are the bytes that are trusted under the identity `now`.
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

    fn copy_error(&self, error: CopyError, file: usize, tensor: usize) -> Error {
        match error {
            CopyError::Device(error) => error.into(),
            CopyError::Read(offset, source) => Error::Read {
                path: self.file_path(file).to_owned(),
                what: self.quoted(tensor),
                offset,
                source,
            },
        }
    }
}

impl Arena {
    fn push(&mut self, (tensor, part): (usize, usize), bytes: u64) {
        self.slots.push((tensor, part, self.bytes));
        self.bytes += bytes.next_multiple_of(ALIGNMENT);
    }
}

/// Splits the memory of all arenas into blocks that are read at a time.
fn blocks<'a>(
    pending: &[Pending],
    arenas: &[Arena],
    buffers: &'a mut [Mutex<Box<dyn Buffer>>],
) -> Vec<Block<'a>> {
    let mut destinations: Vec<Vec<(StridedRange, Destination<'a>)>> = Vec::new();
    destinations.resize_with(pending.len(), Vec::new);
    let mut in_memory: Vec<Range<usize>> = Vec::new();
    for (arena, buffer) in arenas.iter().zip(buffers) {
        let mut whole = Destination::all(buffer);
        if let Destination::Memory(memory) = &whole {
            let start = memory.as_ptr().addr();
            in_memory.push(start..start + memory.len());
        }
        let mut at = 0;
        for &(tensor, part, offset) in &arena.slots {
            let range = pending[tensor].parts[part].range;
            let destination = match whole {
                Destination::Device(buffer, _) => Destination::Device(buffer, offset),
                Destination::Memory(memory) => {
                    let (_, memory) = memory.split_at_mut((offset - at) as usize);
                    let (part, rest) = memory.split_at_mut(range.bytes() as usize);
                    at = offset + range.bytes();
                    whole = Destination::Memory(rest);
                    Destination::Memory(part)
                }
            };
            destinations[tensor].push((range, destination));
        }
    }
    let mut blocks: BTreeMap<usize, Block<'a>> = BTreeMap::new();
    let mut others = Vec::new();
    for (at, (tensor, mut parts)) in pending.iter().zip(destinations).enumerate() {
        let Storage::File { file, offset, .. } = tensor.version.storage else {
            continue;
        };
        let piece = |from: u64, bytes, parts| Piece {
            tensor: at,
            file,
            offset: offset + from,
            bytes,
            parts,
        };
        match parts.pop() {
            // One part in memory of the process: several threads can read pieces of it.
            Some((_, Destination::Memory(mut rest))) if parts.is_empty() && tensor.is_whole() => {
                let mut from = 0;
                while !rest.is_empty() {
                    let memory = block_of(rest.as_ptr().addr(), &in_memory);
                    let bytes = rest.len().min(memory.end - rest.as_ptr().addr());
                    let (now, later) = rest.split_at_mut(bytes);
                    rest = later;
                    let bytes = bytes as u64;
                    let parts = vec![(StridedRange::whole(bytes), Destination::Memory(now))];
                    let block = blocks.entry(memory.start).or_default();
                    block.memory = memory;
                    block.pieces.push(piece(from, bytes, parts));
                    from += bytes;
                }
            }
            last => {
                parts.extend(last);
                others.push(Block {
                    memory: 0..0,
                    pieces: vec![piece(0, tensor.version.nbytes, parts)],
                });
            }
        }
    }
    blocks.into_values().chain(others).collect()
}

/// Returns the addresses around one in the same huge page and the same arena.
fn block_of(address: usize, arenas: &[Range<usize>]) -> Range<usize> {
    let start = address / HUGE_PAGE * HUGE_PAGE;
    let arena = arenas.iter().find(|arena| arena.contains(&address));
    let arena = arena.expect("the address is in an arena");
    start.max(arena.start)..(start + HUGE_PAGE).min(arena.end)
}

/// Lets the kernel allocate the memory of a block that is about to be written.
///
/// The kernel zeroes a huge page towards the address that is used first, and takes twice as long
/// from its end as from its start: a read into the page would use the start first. Only for speed:
/// Linux before 5.14 refuses.
fn populate(memory: &Range<usize>) {
    let page = page_size() as usize;
    let first = match memory.len() {
        HUGE_PAGE => memory.end - page,
        _ => memory.start,
    };
    let (first, end) = (first.next_multiple_of(page), memory.end / page * page);
    if first < end {
        // SAFETY: changes no byte. The addresses are in memory of an arena, which lives as long as the block.
        unsafe { libc::madvise(first as *mut _, end - first, libc::MADV_POPULATE_WRITE) };
    }
}

impl Pending {
    fn is_whole(&self) -> bool {
        matches!(self.layout, Layout::Whole(_))
    }
}

/// Returns the buffer and offset of each part of each tensor.
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
