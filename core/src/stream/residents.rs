//! Experts that a reader keeps in memory of the process, in place of pages of their file.
//!
//! A matrix of an expert is *absent*, then *queued* by a routed layer, then *being read*, then *here*. What is
//! here stays until other experts need its memory. Absent matrices are in the mapping of their file as
//! before, so that code that is not known reads the right bytes, only slowly.
//!
//! While the page cache can hold all that is absent, nothing more is read into memory of the process: the page
//! cache also uses memory that is kept for the program, and has it in larger pieces. A matrix that was found there
//! is not looked for again until a page fault has waited for the disk.
//!
//! | situation | what gives memory back first |
//! |---|---|
//! | single tokens | the matrix with the least recent and frequent use: each use counts for half as much after 16 tokens |
//! | a prompt that reads layer after layer | the layer whose next use is the farthest, which is the one before the current one |

use std::collections::HashMap;
use std::io;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use parking_lot::{Mutex, MutexGuard};

use super::arrivals::{Arrivals, Read, Reason, State};
use super::memory::{self, Faults, Slots, Span};
use super::pages::{self, Residency, WINDOW, page_size};
use super::program;
use super::requests::{UNITS, Unit};
use crate::descriptors::{Kept, read_to_string};
use crate::experts::{ExpertIndex, ExpertSlice, ExpertTensor, Projection};
use crate::memory::free_memory;
use crate::signals::{self, Blocked};

/// What a use counts one token later: half after 16 tokens. A constant, because the drop-in links no
/// library of mathematical functions.
const DECAY: f32 = 0.957_603_3;
/// Matrices that are compared when one is to give its memory back.
const CANDIDATES: usize = 64;
/// Bytes of memory that is taken between two looks at the free memory.
const LOOK_BYTES: u64 = 32 << 20;
/// Mappings that are left to the program (`vm.max_map_count`). A matrix in memory needs two.
const SPARE_MAPPINGS: usize = 8192;
/// How long the end of the process waits for a lock.
const LONGEST_WAIT: Duration = Duration::from_millis(500);

/// Matrices that are in memory of this process, of all readers.
static PLACED: AtomicUsize = AtomicUsize::new(0);

/// Where the expert tensors of a model are mapped.
#[derive(Debug, Clone, Default)]
pub struct Mapped {
    /// The address of each tensor, by its index counted through all files of the model.
    pub tensors: HashMap<usize, usize>,
    /// The model's other mapped tensors, which stay in the page cache.
    pub others: Vec<Other>,
    /// The most bytes of experts in memory; `None` for what the free memory allows.
    pub most: Option<u64>,
}

/// A mapped tensor that has no experts.
#[derive(Debug, Clone, Copy)]
pub struct Other {
    /// Its bytes.
    pub span: Span,
    /// Whether each token uses all of it.
    pub is_always_used: bool,
}

impl Mapped {
    /// Returns the bytes of the tensors that have no experts.
    pub fn other_bytes(&self) -> u64 {
        self.others.iter().map(|other| other.span.len as u64).sum()
    }

    /// Returns the pages of all tensors, ascending and in few pieces.
    fn addresses(&self, index: &ExpertIndex, page: usize) -> Vec<Range<usize>> {
        let experts = index.tensors().iter().filter_map(|tensor| {
            let start = *self.tensors.get(&tensor.tensor)?;
            Some(start..start + tensor.nbytes as usize)
        });
        let others = self.others.iter().map(|other| other.span.addresses());
        let mut all: Vec<_> = experts.chain(others).collect();
        all.sort_unstable_by_key(|bytes| bytes.start);
        let mut pieces: Vec<Range<usize>> = Vec::new();
        for bytes in all {
            let pages = bytes.start / page * page..bytes.end.next_multiple_of(page);
            match pieces.last_mut() {
                Some(last) if pages.start <= last.end => last.end = last.end.max(pages.end),
                _ => pieces.push(pages),
            }
        }
        pieces
    }

    /// Returns the pages of a matrix, where they are mapped; the first and the last one may have bytes of its
    /// neighbours.
    fn span(&self, slice: &ExpertSlice, page: u64) -> Option<Span> {
        let tensor = *self.tensors.get(&slice.tensor)?;
        let address = tensor + (slice.nbytes * u64::from(slice.part)) as usize;
        let page = page as usize;
        let start = address / page * page;
        let end = (address + slice.nbytes as usize).next_multiple_of(page);
        Some(Span {
            file: slice.file,
            offset: slice.offset.checked_sub((address - start) as u64)?,
            address: start,
            len: end - start,
        })
    }
}

/// A matrix of an expert.
#[derive(Debug, Default)]
struct Piece {
    state: State,
    /// How often it was used, with less weight for uses long ago: the bits of an `f32`.
    uses: AtomicU32,
    /// The evaluation of the last use.
    last: AtomicU32,
    /// The slot of a matrix that is here.
    slot: AtomicUsize,
    /// The look at page faults after which it was found in the page cache.
    cached: AtomicU32,
}

/// The result of bringing a matrix into memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Brought {
    /// It is here, or another thread reads it; so many bytes were read from the disk.
    Here(u64),
    /// All of it is in the page cache, and is used there.
    Cached,
    /// It could not be read, or there is no memory for it.
    Left,
}

/// What is here.
#[derive(Debug, Default)]
struct Held {
    /// The matrices that are here, in no order.
    pieces: Vec<u32>,
    /// Slots without a matrix.
    free: Vec<usize>,
    /// Bytes of the slots of `pieces`, and of what is being read.
    bytes: u64,
    /// Where the next search for a matrix that gives its memory back begins.
    cursor: usize,
    /// How often everything was given back: what was read before is old.
    generation: u32,
    /// Whether nothing may be mapped any more.
    ended: bool,
    /// What a page fault reads.
    faults: Faults,
    /// Threads that are about to fork, during which nothing is mapped.
    forks: u32,
    /// Reads that are under way.
    reads: u32,
    /// When the first of them began, since none was.
    began: Option<Instant>,
    /// Time with a read under way.
    reading: Duration,
}

impl Held {
    fn begin_read(&mut self) {
        if self.reads == 0 {
            self.began = Some(Instant::now());
        }
        self.reads += 1;
    }

    fn end_read(&mut self) {
        self.reads -= 1;
        if let Some(began) = self.began.take_if(|_| self.reads == 0) {
            self.reading += began.elapsed();
        }
    }

    fn may_map(&self) -> bool {
        !self.ended && self.forks == 0
    }
}

/// Experts in memory of the process.
#[derive(Debug)]
pub struct Residents {
    index: ExpertIndex,
    /// The number of each layer.
    layers: Vec<u32>,
    /// Experts of the layer with the most.
    experts: usize,
    files: Vec<Arc<Kept>>,
    /// The files without the page cache.
    direct: Vec<Kept>,
    mapped: Mapped,
    /// The pages of all mapped tensors.
    addresses: Vec<Range<usize>>,
    page: u64,
    pieces: Vec<Piece>,
    slots: Slots,
    /// Bytes of each slot.
    slot_bytes: usize,
    held: Mutex<Held>,
    /// The most matrices that are in memory of this process.
    most_pieces: usize,
    /// Bytes of all matrices.
    all_bytes: u64,
    /// The most bytes for which there is free memory.
    fits: AtomicU64,
    /// The bytes that are missing for the program and the model's other tensors.
    missing: AtomicU64,
    /// Whether the page cache can hold all that is absent.
    fits_page_cache: AtomicBool,
    /// Whether the kernel has refused to read tensors ahead.
    is_refused: AtomicBool,
    /// Looks at page faults that found some.
    looks: AtomicU32,
    /// Bytes of memory that was taken since the last look at the free memory.
    unlooked: AtomicU64,
    /// Evaluations so far.
    evaluation: AtomicU32,
    /// The layer that was scheduled last.
    current: AtomicUsize,
    /// Whether all experts of the current layer, and of the layers after it, are used one after the other.
    scans: AtomicBool,
    arrivals: Arrivals,
}

impl Residents {
    /// Returns nothing in memory; the error states why no memory can take the place of the mapping.
    pub fn new(
        index: &ExpertIndex,
        layers: &[(u32, u32)],
        files: Vec<Arc<Kept>>,
        mapped: Mapped,
    ) -> io::Result<Residents> {
        let opened = files.iter().map(|file| memory::open_direct(file));
        let direct = opened.collect::<io::Result<Vec<Kept>>>().map_err(|error| {
            io::Error::new(
                error.kind(),
                format!("the file cannot be opened for direct reads: {error}"),
            )
        })?;
        let experts = layers.iter().map(|layer| layer.1).max().unwrap_or(0) as usize;
        let count = layers.len() * UNITS * experts;
        let page = page_size();
        let tensors = index.tensors().iter();
        let slices = tensors.flat_map(|of| of.range().filter_map(|expert| of.slice(expert)));
        let spans = slices.filter_map(|slice| mapped.span(&slice, page));
        let sizes: Vec<usize> = spans.map(|span| span.len).collect();
        let (slot_bytes, slot_count) = slots_for(&sizes, mapped.most);
        let bytes = slot_bytes.saturating_mul(slot_count);
        let slots = Slots::new(bytes)?;
        let residents = Residents {
            index: index.clone(),
            layers: layers.iter().map(|layer| layer.0).collect(),
            experts,
            files,
            direct,
            addresses: mapped.addresses(index, page as usize),
            mapped,
            page,
            slots,
            slot_bytes,
            pieces: (0..count).map(|_| Piece::default()).collect(),
            held: Mutex::new(Held {
                // The first one is used first.
                free: (0..slot_count).rev().map(|at| at * slot_bytes).collect(),
                ..Held::default()
            }),
            most_pieces: most_mappings().saturating_sub(SPARE_MAPPINGS) / 2,
            all_bytes: sizes.iter().map(|size| *size as u64).sum(),
            fits: AtomicU64::new(0),
            missing: AtomicU64::new(0),
            fits_page_cache: AtomicBool::new(false),
            is_refused: AtomicBool::new(false),
            looks: AtomicU32::new(1),
            unlooked: AtomicU64::new(0),
            evaluation: AtomicU32::new(0),
            current: AtomicUsize::new(0),
            scans: AtomicBool::new(false),
            arrivals: Arrivals::default(),
        };
        residents.look_at_memory();
        Ok(residents)
    }

    /// Returns the most bytes that may be here now.
    pub fn limit(&self) -> u64 {
        let fits = self.fits.load(Ordering::Relaxed);
        self.mapped.most.map_or(fits, |most| most.min(fits))
    }

    /// Returns the bytes of experts that fit, also where the page cache has them or the user allows fewer, and the bytes
    /// that are missing where none fits.
    pub fn fitting(&self) -> (u64, u64) {
        match self.fits_page_cache() {
            true => (self.all_bytes, 0),
            false => (
                self.fits.load(Ordering::Relaxed).min(self.all_bytes),
                self.missing.load(Ordering::Relaxed),
            ),
        }
    }

    /// Returns the bytes that are here, and the time in which a disk was read.
    pub fn figures(&self) -> (u64, Duration) {
        // At the end of the process, another thread may hold the lock for ever.
        let held = self.held.try_lock_for(LONGEST_WAIT);
        held.map(|held| (held.bytes, held.reading))
            .unwrap_or_default()
    }

    fn piece_of(&self, unit: Unit, expert: u32) -> usize {
        unit * self.experts + expert as usize
    }

    fn slice(&self, piece: usize) -> Option<ExpertSlice> {
        let (unit, expert) = (piece / self.experts, (piece % self.experts) as u32);
        let layer = *self.layers.get(unit / UNITS)?;
        self.index
            .slice(layer, Projection::ALL[unit % UNITS], expert)
    }

    fn span(&self, piece: usize) -> Option<Span> {
        self.mapped.span(&self.slice(piece)?, self.page)
    }

    /// Notes that a layer, by its position, is used now. `scans` is whether nearly all of its experts are,
    /// so that the next layers will be, too.
    pub fn begin(&self, layer: usize, scans: bool) {
        if self.current.swap(layer, Ordering::Relaxed) >= layer {
            self.evaluation.fetch_add(1, Ordering::Relaxed);
        }
        self.scans.store(scans, Ordering::Relaxed);
    }

    /// Whether nearly all experts of a layer after the other are used.
    pub fn scans(&self) -> bool {
        self.scans.load(Ordering::Relaxed)
    }

    /// Notes a use of a matrix. Returns whether it is here or on its way, and whether it must be requested.
    pub fn note_use(&self, unit: Unit, expert: u32) -> (bool, bool) {
        let piece = &self.pieces[self.piece_of(unit, expert)];
        if !self.scans() {
            let now = self.evaluation.load(Ordering::Relaxed);
            let uses = 1.0 + piece.uses_at(now);
            piece.uses.store(uses.to_bits(), Ordering::Relaxed);
            piece.last.store(now, Ordering::Relaxed);
        }
        let queued = !self.is_found(piece) && piece.state.queue();
        (!queued, queued)
    }

    /// Whether a matrix is neither here nor on its way.
    pub fn is_absent(&self, unit: Unit, expert: u32) -> bool {
        let piece = &self.pieces[self.piece_of(unit, expert)];
        piece.state.is_absent() && !self.is_found(piece)
    }

    /// Whether a matrix was found in the page cache, and no page fault has waited for the disk since.
    fn is_found(&self, piece: &Piece) -> bool {
        let looks = self.looks.load(Ordering::Relaxed);
        self.fits_page_cache() && piece.cached.load(Ordering::Relaxed) == looks
    }

    /// Notes that a page fault has waited for the disk.
    pub fn look_again(&self) {
        self.looks.fetch_add(1, Ordering::Relaxed);
    }

    /// Waits until no matrix of a unit is queued or being read, as long as `goes_on`. Returns whether it
    /// waited.
    pub fn wait(&self, unit: Unit, goes_on: impl Fn() -> bool) -> bool {
        let first = unit * self.experts;
        let mut waited = false;
        // The last one was requested last.
        for piece in (first..first + self.experts).rev() {
            let state = &self.pieces[piece].state;
            if state.is_coming() {
                waited = true;
                self.arrivals.wait(piece, state, &goes_on);
            }
        }
        waited
    }

    /// Reads a matrix into memory, in place of its pages in the mapping.
    pub fn bring(
        &self,
        unit: Unit,
        expert: u32,
        reason: Reason,
        residency: impl Fn(usize) -> Residency,
    ) -> Brought {
        let piece = self.piece_of(unit, expert);
        let state = &self.pieces[piece].state;
        let Some(reading) = self.arrivals.begin(piece, state, reason) else {
            // Another thread reads it, or a routed layer has requested it.
            return Brought::Here(0);
        };
        let read = self.read(piece, reading, residency);
        if self.unlooked.load(Ordering::Relaxed) >= LOOK_BYTES {
            self.look_at_memory();
        }
        read.unwrap_or(Brought::Left)
    }

    /// Reads a matrix into a slot, and maps the slot.
    fn read(
        &self,
        piece: usize,
        reading: Read,
        residency: impl Fn(usize) -> Residency,
    ) -> Option<Brought> {
        let slice = self.slice(piece)?;
        let span = self.mapped.span(&slice, self.page)?;
        let bytes = span.bytes();
        let residency = residency(span.file);
        let cached = self.is_cached(span.file, bytes, residency);
        if cached && self.uses_page_cache() {
            let looks = self.looks.load(Ordering::Relaxed);
            self.pieces[piece].cached.store(looks, Ordering::Relaxed);
            return Some(Brought::Cached);
        }
        // Where it cannot be counted what the page cache has, each use would be read ahead again.
        if self.fits_page_cache() && residency == Residency::Counted {
            return None;
        }
        let (slot, generation) = self.take_slot(span.len, piece)?;
        let from = match cached {
            true => self.files[span.file].get(),
            false => self.direct[span.file].get(),
        };
        // SAFETY: the slot was taken for this read, and is mapped nowhere else.
        let read =
            from.and_then(|from| unsafe { self.slots.read(slot, span.len, from, span.offset) });
        // The last page of a file may have a part only.
        let needed = (slice.offset - span.offset + slice.nbytes) as usize;
        let is_read = read.is_ok_and(|read| read >= needed);
        let (_blocked, mut held) = self.lock();
        held.end_read();
        let may_place = is_read && held.may_map() && held.generation == generation;
        // SAFETY: the tensor is mapped there until the reader ends, as its owner has promised.
        let placed = may_place.then(|| unsafe { self.slots.place(slot, &span) });
        if let Some(Ok(())) = placed {
            held.pieces.push(piece as u32);
            PLACED.fetch_add(1, Ordering::Relaxed);
            self.pieces[piece].slot.store(slot, Ordering::Relaxed);
            reading.succeed();
            let bytes = if cached { 0 } else { slice.nbytes };
            return Some(Brought::Here(bytes));
        }
        // The kernel may have removed what was mapped there before it failed. What may be mapped stays as it is.
        if placed.is_some() && !self.restore(&mut held, &span) {
            return None;
        }
        held.bytes -= span.len as u64;
        self.slots.release(slot, span.len);
        held.free.push(slot);
        None
    }

    /// Whether whole pages of a file are in the page cache.
    fn is_cached(&self, file: usize, bytes: Range<u64>, residency: Residency) -> bool {
        let pages = (bytes.end - bytes.start) / self.page;
        let open = self.files[file].get();
        open.is_ok_and(|open| residency.cached(open, &bytes, self.page) == Some(pages))
    }

    /// Whether what is in the page cache is used there: to copy it would take longer, and memory twice. Who states how
    /// much is to be in memory of the process gets that.
    fn uses_page_cache(&self) -> bool {
        self.mapped.most.is_none()
    }

    /// Whether the page cache can hold all that is absent.
    pub fn fits_page_cache(&self) -> bool {
        self.fits_page_cache.load(Ordering::Relaxed)
    }

    /// Whether all experts are used in the page cache.
    pub fn are_cached(&self, residency: impl Fn(usize) -> Residency) -> bool {
        let is_cached = |of: &ExpertTensor| {
            let bytes = pages::around(&(of.offset..of.offset + of.nbytes), self.page);
            self.is_cached(of.file, bytes, residency(of.file))
        };
        self.uses_page_cache() && self.index.tensors().iter().all(is_cached)
    }

    /// Returns a slot of a size for a matrix, and the generation; others give theirs back. `None` where none can.
    fn take_slot(&self, len: usize, wanted: usize) -> Option<(usize, u32)> {
        let (_blocked, mut held) = self.lock();
        let mut is_new = true;
        if !held.may_map() || len > self.slot_bytes {
            return None;
        }
        while held.bytes + len as u64 > self.limit()
            || PLACED.load(Ordering::Relaxed) >= self.most_pieces
            || held.free.is_empty()
        {
            if !self.give_back(&mut held, Some((wanted, len))) {
                return None;
            }
            is_new = false;
        }
        if is_new {
            self.unlooked.fetch_add(len as u64, Ordering::Relaxed);
        }
        let slot = held.free.pop()?;
        held.begin_read();
        held.bytes += len as u64;
        Some((slot, held.generation))
    }

    /// Gives the slot of the matrix back that is the least worth; with `wanted`, only of one that is worth
    /// less, and for a slot of that size. Returns whether there was one.
    fn give_back(&self, held: &mut Held, wanted: Option<(usize, usize)>) -> bool {
        let count = held.pieces.len();
        let mut worst: Option<(f32, usize)> = None;
        for step in 0..count.min(CANDIDATES) {
            let at = (held.cursor + step) % count;
            let worth = self.worth(held.pieces[at] as usize);
            if worst.is_none_or(|(least, _)| worth < least) {
                worst = Some((worth, at));
            }
        }
        held.cursor = (held.cursor + CANDIDATES) % count.max(1);
        let Some((worth, at)) = worst else {
            return false;
        };
        if wanted.is_some_and(|(wanted, _)| worth >= self.worth(wanted)) {
            return false;
        }
        let piece = held.pieces[at] as usize;
        let slot = self.pieces[piece].slot.load(Ordering::Relaxed);
        let Some(span) = self.span(piece) else {
            return false;
        };
        if !self.restore(held, &span) {
            // It stays here.
            return false;
        }
        held.pieces.swap_remove(at);
        PLACED.fetch_sub(1, Ordering::Relaxed);
        self.pieces[piece].state.leave();
        self.place_borders(piece, &span);
        held.bytes -= span.len as u64;
        // The next read is into this slot, unless its matrix needs more memory.
        let used = wanted.map_or(0, |(_, len)| if len > span.len { 0 } else { len });
        self.slots.release(slot + used, span.len - used);
        held.free.push(slot);
        true
    }

    /// Maps the file at a span again. After a failure, nothing more is mapped: a span could have no bytes.
    fn restore(&self, held: &mut Held, span: &Span) -> bool {
        // SAFETY: the tensor is mapped there until the reader ends, as its owner has promised.
        let restored = unsafe { memory::restore(span, &self.files[span.file], held.faults) };
        if let Err(error) = &restored
            && !std::mem::replace(&mut held.ended, true)
        {
            log::error!(
                "cannot map the file of an expert again: {error}: its memory stays as it is, and no more experts are read into memory; if mappings are missing, raise vm.max_map_count"
            );
        }
        restored.is_ok()
    }

    /// Maps the pages at the borders of a span, whose matrix has left, for the neighbours that are here and have
    /// bytes there.
    fn place_borders(&self, piece: usize, span: &Span) {
        for other in [piece.wrapping_sub(1), piece + 1] {
            let Some(of) = self.pieces.get(other) else {
                continue;
            };
            let Some(theirs) = self.span(other) else {
                continue;
            };
            let common = theirs.common(span);
            if common.len > 0 && of.state.is_here() {
                let slot = of.slot.load(Ordering::Relaxed) + common.address - theirs.address;
                // SAFETY: as in `read`. Without the slot, the page is that of the file.
                let _ = unsafe { self.slots.place(slot, &common) };
            }
        }
    }

    /// Maps the files again, so that a forked child shares no slot, until [`Residents::after_fork`].
    pub fn before_fork(&self) {
        let Some(mut held) = self.lock_around_fork() else {
            return;
        };
        let pieces = std::mem::take(&mut held.pieces);
        for span in pieces.iter().filter_map(|piece| self.span(*piece as usize)) {
            if !held.may_map() || !self.restore(&mut held, &span) {
                break;
            }
        }
        held.pieces = pieces;
        held.forks += 1;
    }

    /// Maps what is here in the parent of a fork.
    pub fn after_fork(&self) {
        let Some(mut held) = self.lock_around_fork() else {
            return;
        };
        held.forks = held.forks.saturating_sub(1);
        if held.may_map() {
            for piece in held.pieces.iter().map(|piece| *piece as usize) {
                if let Some(span) = self.span(piece) {
                    let slot = self.pieces[piece].slot.load(Ordering::Relaxed);
                    // SAFETY: as in `read`. Without the slot, the pages are those of the file.
                    let _ = unsafe { self.slots.place(slot, &span) };
                }
            }
        }
    }

    /// Locks what is here. The handler of a signal may fork, and lock it: no signal is handled until both values are
    /// dropped, the lock first.
    fn lock(&self) -> (Blocked, MutexGuard<'_, Held>) {
        (Blocked::all(), self.held.lock())
    }

    /// The same around a fork, however long another thread has the lock.
    fn lock_around_fork(&self) -> Option<MutexGuard<'_, Held>> {
        signals::lock_around_fork(Duration::MAX, || self.held.try_lock())
    }

    /// Returns what keeping a matrix is worth: more for one that is used sooner.
    fn worth(&self, piece: usize) -> f32 {
        let (layers, current) = (self.layers.len(), self.current.load(Ordering::Relaxed));
        let layer = piece / self.experts / UNITS;
        let distance = (layer + layers - current) % layers;
        if self.scans() {
            return -(distance as f32);
        }
        // What the current layer needs is used next.
        let of = &self.pieces[piece];
        let now = self.evaluation.load(Ordering::Relaxed);
        let is_in_use = distance == 0 && of.last.load(Ordering::Relaxed) == now;
        if is_in_use { f32::MAX } else { of.uses_at(now) }
    }

    /// Sets the limit by the free memory, and gives memory back where less is left.
    pub fn look_at_memory(&self) {
        self.unlooked.store(0, Ordering::Relaxed);
        let Some((free, _)) = free_memory() else {
            return;
        };
        let others = self.mapped.other_bytes();
        let needed = others.saturating_add(program::untouched());
        let (_blocked, mut held) = self.lock();
        if !held.may_map() {
            return;
        }
        let (fits, missing) = program::fitting(free, held.bytes, needed);
        self.fits.store(fits, Ordering::Relaxed);
        self.missing.store(missing, Ordering::Relaxed);
        let limit = self.limit();
        let cached = (held.bytes + free).saturating_sub(others);
        let fits_page_cache = self.uses_page_cache() && self.all_bytes <= cached;
        self.fits_page_cache
            .store(fits_page_cache, Ordering::Relaxed);
        // Where not even the other tensors fit, they are read again for each token, in large pieces.
        let others_fit = missing == 0 && !self.is_refused.load(Ordering::Relaxed);
        let faults = match others_fit && !fits_page_cache {
            true => Faults::Page,
            false => Faults::Window,
        };
        self.set_faults(&mut held, faults);
        while held.bytes > limit && self.give_back(&mut held, None) {}
    }

    fn set_faults(&self, held: &mut Held, faults: Faults) {
        if std::mem::replace(&mut held.faults, faults) != faults {
            for addresses in &self.addresses {
                faults.advise(addresses);
            }
        }
    }

    /// Lets the kernel begin to read what each token uses and is not in the page cache, if page faults read single pages.
    pub fn read_others(&self) {
        if self.lock().1.faults != Faults::Page {
            return;
        }
        for Other { span, .. } in self.mapped.others.iter().filter(|of| of.is_always_used) {
            let Ok(file) = self.files[span.file].get() else {
                return;
            };
            let refused = pages::read_ahead(file, &span.bytes(), WINDOW, || true);
            self.is_refused.fetch_or(refused > 0, Ordering::Relaxed);
        }
    }

    /// Maps nothing any more: the program may unmap its files after this call. What is here stays, and goes
    /// with the mapping.
    pub fn end(&self) {
        // Nothing maps without the lock. Who holds it for so long is this thread, which exits.
        if let Some(mut held) = self.held.try_lock_for(LONGEST_WAIT) {
            self.set_faults(&mut held, Faults::Window);
            held.ended = true;
        }
    }

    /// Gives all memory back, since the file has other bytes.
    pub fn read_again(&self) {
        let (_blocked, mut held) = self.lock();
        held.generation += 1;
        while held.may_map() && self.give_back(&mut held, None) {}
    }
}

impl Drop for Residents {
    fn drop(&mut self) {
        PLACED.fetch_sub(self.held.get_mut().pieces.len(), Ordering::Relaxed);
    }
}

/// Returns the bytes of a slot, in which each matrix fits, and how many slots there are: as many as matrices
/// of these sizes can be here at a time.
fn slots_for(sizes: &[usize], most: Option<u64>) -> (usize, usize) {
    let largest = sizes.iter().copied().max().unwrap_or(0);
    let smallest = sizes.iter().copied().min().unwrap_or(0).max(1) as u64;
    let fit = most.map_or(u64::MAX, |most| most / smallest).max(1);
    (
        largest,
        sizes.len().min(usize::try_from(fit).unwrap_or(usize::MAX)),
    )
}

impl Piece {
    /// Returns the uses, as they count in an evaluation.
    fn uses_at(&self, evaluation: u32) -> f32 {
        let age = evaluation.wrapping_sub(self.last.load(Ordering::Relaxed));
        let uses = f32::from_bits(self.uses.load(Ordering::Relaxed));
        // Zero long before.
        uses * DECAY.powi(age.min(1 << 16) as i32)
    }
}

/// Returns how many mappings a process may have.
fn most_mappings() -> usize {
    let text = read_to_string("/proc/sys/vm/max_map_count");
    text.ok()
        .and_then(|text| text.trim().parse().ok())
        .unwrap_or(65530)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_use_counts_for_half_as_much_after_16_tokens() {
        let piece = Piece::default();
        piece.uses.store(8f32.to_bits(), Ordering::Relaxed);
        assert!((piece.uses_at(16) - 4.0).abs() < 1e-4);
        assert!((piece.uses_at(48) - 1.0).abs() < 1e-4);
        assert_eq!(piece.uses_at(u32::MAX), 0.0);
    }
}
