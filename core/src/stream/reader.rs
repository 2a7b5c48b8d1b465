//! Threads that read experts ahead.

use std::cmp::Reverse;
use std::fs::File;
use std::io;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::thread::{JoinHandle, Thread};
use std::time::{Duration, Instant};

use once_cell::sync::OnceCell;

use super::arrivals::Reason;
use super::pages::{self, Residency, WINDOW};
use super::preference::Ranking;
use super::requests::{ExpertSet, Requests, UNITS, Unit};
use super::residents::{Brought, Mapped, Residents};
use crate::descriptors::{Kept, processors};
use crate::experts::{ExpertIndex, ExpertSlice, ExpertTensor, MAX_EXPERTS, Projection};
use crate::gguf::GgufFile;
use crate::memory::take_for_thread;
use crate::priority::clear_placement;
use crate::protocol::StreamFigures;
use crate::signals::without_signals;
use crate::text;
use crate::trace::{Ids, Snapshot};

/// The bytes of the first read-ahead calls. Halved as long as the kernel reads less.
const FIRST_CHUNK: u64 = 2 << 20;
/// Passes through all layers with all experts in memory, before a reader rests for the first
/// time. Four times as many after each time that it rested too early.
const RESIDENT_PASSES: usize = 4;
const MOST_RESIDENT_PASSES: usize = 1 << 16;
/// While a reader rests or has stopped, one of so many layers is read all the same.
const SAMPLE_PERIOD: u64 = 256;
/// While a reader rests or has stopped, its first thread checks samples and page faults so often;
/// nothing else wakes it.
const LOOK_PERIOD: Duration = Duration::from_secs(1);
/// Looks without an evaluation after which the reader neither rests nor looks: the next
/// evaluation wakes it.
const IDLE_LOOKS: u32 = 60;
/// Nanoseconds after which a layer that follows another one belongs to another text.
const LONGEST_LAYER: u64 = 2_000_000_000;
/// Matrices in a row that the kernel did not read ahead, after which the reader stops until a
/// sample succeeds.
const FRUITLESS: usize = 64;
/// The share of used experts, in percent, from which a batch reads all experts of the next layer. A
/// disk reads neighbours at almost no cost; post-fetch, whose link copies each byte at full cost, has
/// a higher one.
const NEARLY_ALL: u32 = 75;

/// The most disks that are read at once; further ones share the last.
const MOST_LANES: usize = 8;
/// Threads that read one disk directly; each waits for its read.
const DIRECT_THREADS: usize = 8;
/// The most of them that read before routing is known, besides in a prompt: a routed expert waits for what is on its way.
const AHEAD_THREADS: usize = 2;
/// Bytes of the next layers of a prompt that are read into memory of the process before they are routed,
/// if two layers are not more, and half of that memory is not less.
const AHEAD_BYTES: u64 = 1 << 30;

/// Settings of a [`Reader`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Settings {
    /// Whether the reader checks residency also after all experts were in memory for some time.
    pub always: bool,
    /// Number of threads.
    pub threads: usize,
    /// Bytes of the largest layer that is read as a whole for a batch, before it is routed. What
    /// is read ahead must stay in memory until the batch uses it.
    pub look_ahead_bytes: u64,
}

impl Settings {
    /// Returns half of the processors, from 1 to 4: a thread spends most of its time on freeing
    /// memory for the page cache, at about 1 GB/s.
    pub fn default_threads() -> usize {
        (processors() / 2).clamp(1, 4)
    }

    /// Returns [`Settings::look_ahead_bytes`] for an amount of free memory, if that is known: the
    /// layer that a batch uses and the next one fit, with as much to spare.
    pub fn look_ahead_in(free_memory: Option<u64>) -> u64 {
        free_memory.map_or(u64::MAX, |bytes| bytes / 3)
    }
}

/// Matrices of a layer.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Matrices(u8);

impl Matrices {
    /// All matrices.
    pub const ALL: Matrices = Matrices((1 << UNITS) - 1);

    /// Returns the matrices whose tensors fulfil a condition.
    pub fn of(tensors: &[ExpertTensor], condition: impl Fn(&ExpertTensor) -> bool) -> Matrices {
        let mut matrices = Matrices::default();
        for tensor in tensors.iter().filter(|tensor| condition(tensor)) {
            matrices.insert(tensor.name.projection);
        }
        matrices
    }

    /// Adds a matrix.
    pub fn insert(&mut self, projection: Projection) {
        self.0 |= 1 << projection as u8;
    }

    fn has(self, projection: usize) -> bool {
        self.0 & (1 << projection) != 0
    }
}

/// Reads the experts of one model ahead. Dropping a reader ends its threads.
///
/// ```
/// use sidecar_core::experts::ExpertIndex;
/// use sidecar_core::gguf::{Access, GgufFile};
/// use sidecar_core::stream::{Matrices, Reader, Settings};
/// use sidecar_core::trace::Ids;
/// # use testkit::writer::{Gguf, Q4_0};
/// # let folder = tempfile::tempdir()?;
/// # let path = folder.path().join("model.gguf");
/// # Gguf::default().tensor("blk.3.ffn_down_exps.weight", &[64, 32, 8], Q4_0, 1).write(&path)?;
///
/// let file = GgufFile::open(&path, Access::Read)?;
/// let settings = Settings {
///     always: true,
///     threads: 1,
///     look_ahead_bytes: 1 << 30,
/// };
/// let reader = Reader::new(&[&file], settings, |_| true)?;
///
/// // The router of layer 3 has chosen experts 1 and 6 for one token.
/// let layer = reader.position(3).expect("layer 3 has experts");
/// let bytes: Vec<u8> = [1i32, 6].iter().flat_map(|id| id.to_ne_bytes()).collect();
/// let ids = Ids::packed(&bytes, 2);
/// reader.schedule(layer, Matrices::ALL, &ids);
///
/// // For programs that wait, and tests: the bytes are in memory or on their way.
/// reader.finish();
/// assert!(reader.counts().checked_bytes > 0);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct Reader {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
    /// A forked child has no threads to wait for.
    process: u32,
}

#[derive(Debug)]
struct Shared {
    index: ExpertIndex,
    files: Vec<(Arc<Kept>, Residency)>,
    /// Number and experts of each layer, ascending.
    layers: Vec<(u32, u32)>,
    always: bool,
    page: u64,
    /// Experts in memory of the process; `None` where all are read through the page cache.
    residents: Option<Residents>,
    /// One for each disk.
    lanes: Vec<Lane>,
    /// The lane of each unit.
    lane_of: Vec<usize>,
    /// The bytes of an expert in each unit.
    unit_bytes: Vec<u64>,
    /// The matrices of each layer that the program uses in the mapping of their file.
    in_place: Vec<Matrices>,
    /// The matrices of each layer when it was scheduled last.
    matrices: Vec<AtomicU8>,
    /// Whether each layer may be read as a whole for a batch.
    look_ahead: Vec<bool>,
    /// The position of the layer that was scheduled last.
    current: AtomicUsize,
    chunk: AtomicU64,
    /// Units in a row whose experts were all in memory.
    resident_units: AtomicUsize,
    resting: AtomicBool,
    /// Passes with all experts in memory, before the reader rests.
    passes: AtomicUsize,
    /// Matrices in a row for which reading ahead had no effect.
    fruitless: AtomicUsize,
    stopped: AtomicBool,
    /// Whether the log has that it stopped.
    reported: AtomicBool,
    ended: AtomicBool,
    began: Instant,
    /// The margin of [`Reader::prefer`]: the bits of an `f32`.
    margin: AtomicU32,
    figures: Figures,
}

/// What is to be read from one disk, and its threads.
#[derive(Debug)]
struct Lane {
    /// Routed experts.
    wanted: Requests,
    /// Experts of layers that are not routed yet, which are read when none is wanted.
    ahead: Requests,
    /// Experts that are read while nothing else is requested.
    hottest: Requests,
    /// Bits of threads that wait for requests.
    idle: AtomicU64,
    threads: OnceCell<Vec<Thread>>,
}

impl Lane {
    fn new(layers: usize, experts: usize) -> Lane {
        Lane {
            wanted: Requests::new(layers, experts),
            ahead: Requests::new(layers, experts),
            hottest: Requests::new(layers, experts),
            idle: AtomicU64::new(0),
            threads: OnceCell::new(),
        }
    }

    fn is_pending(&self) -> bool {
        let all = [&self.wanted, &self.ahead, &self.hottest];
        all.iter().any(|requests| requests.is_pending())
    }

    /// Whether all threads wait for requests.
    fn is_idle(&self) -> bool {
        let threads = self.threads.get().map_or(0, Vec::len);
        self.idle.load(Ordering::SeqCst).count_ones() as usize == threads
    }

    /// Wakes so many threads, of the first `below` of them, if they wait.
    fn wake(&self, count: usize, below: usize) {
        let Some(threads) = self.threads.get() else {
            return;
        };
        let first = below.min(threads.len());
        let all = u64::MAX >> (u64::BITS as usize - first.max(1));
        for _ in 0..count.min(first) {
            let idle = self.idle.load(Ordering::SeqCst) & all;
            if idle == 0 {
                return;
            }
            let number = idle.trailing_zeros();
            self.idle.fetch_and(!(1 << number), Ordering::SeqCst);
            threads[number as usize].unpark();
        }
    }
}

#[derive(Debug, Default)]
struct Figures {
    layers: AtomicU64,
    tokens: AtomicU64,
    checked_pages: AtomicU64,
    resident_pages: AtomicU64,
    read_pages: AtomicU64,
    ahead_pages: AtomicU64,
    chosen: AtomicU64,
    replaced: AtomicU64,
    failed: AtomicU64,
    /// Nanoseconds in which evaluations waited for experts.
    waited: AtomicU64,
    /// Major faults of the process when the reader was made.
    faults_before: u64,
    /// Major faults when the reader began to rest.
    faults_seen: AtomicU64,
    /// Nanoseconds from `began` to the last schedule.
    last: AtomicU64,
    /// Nanoseconds between schedules, without pauses of the program.
    active: AtomicU64,
}

fn add(figure: &AtomicU64, count: u64) {
    figure.fetch_add(count, Ordering::Relaxed);
}

impl Reader {
    /// Makes a reader for the files of a model, and starts its threads. `in_place` is whether the
    /// program uses a tensor in the mapping of its file; others are not read before their
    /// layer is scheduled for the first time.
    ///
    /// # Errors
    ///
    /// Fails when the files have no routed experts, or no thread can be started.
    pub fn new(
        files: &[&GgufFile],
        settings: Settings,
        in_place: impl Fn(&ExpertTensor) -> bool,
    ) -> io::Result<Reader> {
        Reader::with(files, settings, in_place, None)
    }

    /// Makes a reader that keeps experts in memory of the process, in place of pages of their files, and
    /// reads them without the page cache. Where the files cannot be read so, it is one of [`Reader::new`].
    ///
    /// # Safety
    ///
    /// The tensors are mapped at the addresses of `mapped`, shared and for reading, until the reader ends:
    /// by [`Reader::end`] or its drop.
    ///
    /// # Errors
    ///
    /// As for [`Reader::new`].
    pub unsafe fn in_memory(
        files: &[&GgufFile],
        settings: Settings,
        mapped: Mapped,
    ) -> io::Result<Reader> {
        let tensors = mapped.tensors.clone();
        let in_place = |expert: &ExpertTensor| tensors.contains_key(&expert.tensor);
        Reader::with(files, settings, in_place, Some(mapped))
    }

    fn with(
        files: &[&GgufFile],
        settings: Settings,
        in_place: impl Fn(&ExpertTensor) -> bool,
        mapped: Option<Mapped>,
    ) -> io::Result<Reader> {
        let index = ExpertIndex::of(files.iter().copied());
        let layers: Vec<_> = index.layers().collect();
        let Some(most) = layers.iter().map(|layer| layer.1).max() else {
            return Err(io::Error::other("the model has no routed experts"));
        };
        let in_place: Vec<_> = layers
            .iter()
            .map(|(layer, _)| Matrices::of(index.of_layer(*layer), &in_place))
            .collect();
        let faults = pages::major_faults();
        let handles: Vec<_> = files.iter().map(with_residency).collect();
        let residents = mapped.and_then(|mapped| {
            let files = handles.iter().map(|(file, _)| file.clone()).collect();
            let made = Residents::new(&index, &layers, files, mapped);
            made.inspect_err(|error| {
                log::info!("experts are read through the page cache: {error}");
            })
            .ok()
        });
        // Nothing is to be read as long as no page fault waits for the disk.
        let are_cached = |of: &Residents| of.are_cached(|file| handles[file].1);
        let rests = !settings.always && residents.as_ref().is_some_and(are_cached);
        let mut disks: Vec<u64> = Vec::new();
        let disk_of: Vec<usize> = files
            .iter()
            .map(|file| {
                let disk = file.source.id().dev;
                let known = disks.iter().position(|other| *other == disk);
                known.unwrap_or_else(|| {
                    if disks.len() < MOST_LANES {
                        disks.push(disk);
                    }
                    disks.len() - 1
                })
            })
            .collect();
        let units = || (0..layers.len() * UNITS).map(|unit| first_slice(&index, &layers, unit));
        let lane_of = units().map(|slice| slice.map_or(0, |slice| disk_of[slice.file]));
        let threads = match residents {
            Some(_) => DIRECT_THREADS,
            None => settings.threads.clamp(1, u64::BITS as usize),
        };
        let shared = Arc::new(Shared {
            files: handles,
            always: settings.always,
            page: pages::page_size(),
            residents,
            lanes: disks
                .iter()
                .map(|_| Lane::new(layers.len(), most as usize))
                .collect(),
            lane_of: lane_of.collect(),
            unit_bytes: units()
                .map(|slice| slice.map_or(0, |slice| slice.nbytes))
                .collect(),
            matrices: in_place.iter().map(|of| of.0.into()).collect(),
            in_place,
            look_ahead: layers
                .iter()
                .map(|(layer, _)| {
                    let bytes = index.of_layer(*layer).iter().map(|tensor| tensor.nbytes);
                    bytes.sum::<u64>() <= settings.look_ahead_bytes
                })
                .collect(),
            index,
            layers,
            current: AtomicUsize::new(0),
            chunk: AtomicU64::new(FIRST_CHUNK),
            resident_units: AtomicUsize::new(0),
            resting: AtomicBool::new(rests),
            passes: AtomicUsize::new(RESIDENT_PASSES),
            fruitless: AtomicUsize::new(0),
            stopped: AtomicBool::new(false),
            reported: AtomicBool::new(false),
            ended: AtomicBool::new(false),
            began: Instant::now(),
            margin: AtomicU32::new(0),
            figures: Figures {
                faults_before: faults,
                faults_seen: AtomicU64::new(faults),
                ..Figures::default()
            },
        });
        let mut reader = Reader {
            shared,
            threads: Vec::new(),
            process: std::process::id(),
        };
        for lane in 0..reader.shared.lanes.len() {
            let first = reader.threads.len();
            for number in 0..threads {
                let shared = reader.shared.clone();
                let builder = std::thread::Builder::new().name("llama-sidecar-s".into());
                let thread = take_for_thread().and_then(|taken| {
                    without_signals(|| {
                        builder.spawn(move || {
                            let _taken = taken;
                            clear_placement();
                            shared.run(lane, number);
                        })
                    })
                });
                match thread {
                    Ok(thread) => reader.threads.push(thread),
                    Err(error) if number == 0 => {
                        return Err(io::Error::other(format!(
                            "cannot start a thread: {error}: raise the limits of threads and memory (ulimit -u, ulimit -v)"
                        )));
                    }
                    Err(_) => break,
                }
            }
            let threads = reader.threads[first..].iter();
            let threads = threads.map(|thread| thread.thread().clone()).collect();
            let _ = reader.shared.lanes[lane].threads.set(threads);
        }
        Ok(reader)
    }

    /// Returns the position of a layer among those with experts.
    pub fn position(&self, layer: u32) -> Option<usize> {
        let layers = &self.shared.layers;
        layers
            .binary_search_by_key(&layer, |(number, _)| *number)
            .ok()
    }

    /// Returns the matrices of a layer, by its position, that the program uses in the mapping of their
    /// file.
    pub fn in_place(&self, layer: usize) -> Matrices {
        self.shared.in_place[layer]
    }

    /// Requests the most used experts of a trace, as many as have these bytes in all. They are
    /// read while no layer needs others. Returns how many.
    pub fn request_hottest(&self, trace: &Snapshot, bytes: u64) -> usize {
        let shared = &self.shared;
        let mut hottest: Vec<(u64, usize, u32)> = Vec::new();
        for (position, &(layer, experts)) in shared.layers.iter().enumerate() {
            let traced = trace.layers.iter().find(|counts| counts.layer == layer);
            let traced = traced.filter(|counts| counts.experts.len() == experts as usize);
            let uses = traced.map_or(&[][..], |counts| &counts.experts);
            let used = (0u32..).zip(uses).filter(|(_, uses)| **uses > 0);
            hottest.extend(used.map(|(expert, uses)| (*uses, position, expert)));
        }
        hottest.sort_by_key(|&(uses, position, expert)| (Reverse(uses), position, expert));
        let mut sets = vec![ExpertSet::EMPTY; shared.layers.len()];
        let (mut left, mut count) = (bytes, 0);
        for (_, position, expert) in hottest {
            let Some(rest) = left.checked_sub(shared.bytes_of(position, expert)) else {
                break;
            };
            left = rest;
            count += 1;
            sets[position].insert(expert);
        }
        for (position, set) in sets.iter().enumerate().filter(|(_, set)| set.len() > 0) {
            shared.publish(|lane| &lane.hottest, position, set);
        }
        for lane in &shared.lanes {
            lane.wake(usize::MAX, usize::MAX);
        }
        count
    }

    /// Requests the matrices of the experts that a layer, by its position, was routed to. Calls for
    /// different matrices of a layer, one after the other, count as one.
    ///
    /// Never waits, takes no memory, and takes no lock for which another thread waits. Ids that
    /// are no experts of the layer are ignored.
    pub fn schedule(&self, layer: usize, matrices: Matrices, ids: &Ids<'_>) {
        self.shared.schedule(layer, matrices, ids);
    }

    /// Waits until matrices of a layer that were [scheduled](Reader::schedule) are in memory of the process, or
    /// are left to the page cache. Returns at once where the reader keeps none there.
    pub fn wait(&self, layer: usize, matrices: Matrices) {
        let shared = &self.shared;
        let Some(residents) = &shared.residents else {
            return;
        };
        let began = Instant::now();
        let goes_on = || !shared.ended.load(Ordering::SeqCst);
        let units = (0..UNITS).filter(|projection| matrices.has(*projection));
        let units = units.map(|projection| layer * UNITS + projection);
        // This thread reads, too: it has nothing else to do, and need not be woken for what it reads.
        let mut has_read = false;
        for unit in units.clone() {
            let wanted = &shared.lane(unit).wanted;
            while let Some(expert) = wanted.pop(unit) {
                has_read |= !shared.read(unit, expert, Reason::Routed);
            }
        }
        if units.fold(has_read, |waited, unit| {
            residents.wait(unit, goes_on) | waited
        }) {
            let waited = began.elapsed().as_nanos() as u64;
            add(&shared.figures.waited, waited);
        }
    }

    /// Whether experts are kept in memory of the process.
    pub fn is_in_memory(&self) -> bool {
        self.shared.residents.is_some()
    }

    /// Sets the margin of [`Reader::prefer`]; without, it is 0.
    pub fn set_margin(&self, margin: f32) {
        self.shared
            .margin
            .store(margin.to_bits(), Ordering::Relaxed);
    }

    /// Replaces experts that a layer, by its position, has chosen, and of which matrices are to be read, by experts in memory
    /// of the process whose scores differ by less than the margin. Returns whether the ranking was understood.
    pub fn prefer(&self, layer: usize, matrices: Matrices, ranking: &mut Ranking<'_>) -> bool {
        self.shared.prefer(layer, matrices, ranking)
    }

    /// Gives memory of experts back where less is free than is kept for the program.
    pub fn look_at_memory(&self) {
        if let Some(residents) = &self.shared.residents {
            residents.look_at_memory();
        }
    }

    /// Reads nothing any more. The program may unmap its files after this call.
    pub fn end(&self) {
        self.shared.ended.store(true, Ordering::SeqCst);
        if let Some(residents) = &self.shared.residents {
            residents.end();
        }
    }

    /// Prepares for a fork on this thread, until [`Reader::after_fork`]: the child shares no memory with the
    /// reader. The program may evaluate meanwhile.
    pub fn before_fork(&self) {
        if let Some(residents) = &self.shared.residents {
            residents.before_fork();
        }
    }

    /// Reads all experts again, whose files were written in place.
    pub fn read_again(&self) {
        if let Some(residents) = &self.shared.residents {
            residents.read_again();
        }
    }

    /// Ends what [`Reader::before_fork`] began, in the parent.
    pub fn after_fork(&self) {
        if let Some(residents) = &self.shared.residents {
            residents.after_fork();
        }
    }

    /// Waits until no request is left: the bytes are in memory or on their way. A reader that
    /// rests has looked whether it must go on.
    pub fn finish(&self) {
        let shared = &self.shared;
        // A forked child has no threads that could read.
        if self.process != std::process::id() {
            return;
        }
        let mut has_looked = false;
        loop {
            let mut lanes = shared.lanes.iter();
            if let Some(lane) = lanes.find(|of| of.wanted.is_pending() || of.hottest.is_pending()) {
                lane.wake(usize::MAX, usize::MAX);
            } else if shared.lanes.iter().all(Lane::is_idle) {
                if has_looked || !shared.is_quiet() {
                    return;
                }
                // A thread looks before it is idle again.
                has_looked = true;
                shared.lanes[0].wake(1, usize::MAX);
            }
            std::thread::yield_now();
        }
    }

    /// Returns the number of layers that were scheduled.
    pub fn layers(&self) -> u64 {
        self.shared.figures.layers.load(Ordering::Relaxed)
    }

    /// Returns the figures since the reader was made, except those of the program's other memory.
    pub fn counts(&self) -> StreamFigures {
        let shared = &self.shared;
        let figures = &shared.figures;
        let get = |figure: &AtomicU64| figure.load(Ordering::Relaxed);
        let bytes = |figure: &AtomicU64| get(figure) * shared.page;
        let residents = shared.residents.as_ref();
        let (held_bytes, reading) = residents.map(Residents::figures).unwrap_or_default();
        let fitting = residents.map(Residents::fitting).unwrap_or_default();
        StreamFigures {
            layers: get(&figures.layers),
            tokens: get(&figures.tokens),
            checked_bytes: bytes(&figures.checked_pages),
            resident_bytes: bytes(&figures.resident_pages),
            read_bytes: bytes(&figures.read_pages),
            ahead_bytes: bytes(&figures.ahead_pages),
            chosen: get(&figures.chosen),
            replaced: get(&figures.replaced),
            margin: shared.margin(),
            failed: get(&figures.failed),
            major_faults: pages::major_faults().saturating_sub(figures.faults_before),
            seconds: get(&figures.active) as f64 * 1e-9,
            waited_seconds: get(&figures.waited) as f64 * 1e-9,
            reading_seconds: reading.as_secs_f64(),
            held_bytes,
            fitting_bytes: fitting.0,
            missing_bytes: fitting.1,
            resting: shared.resting.load(Ordering::Relaxed),
            stopped: shared.stopped.load(Ordering::Relaxed),
            ..StreamFigures::default()
        }
    }
}

impl Drop for Reader {
    fn drop(&mut self) {
        self.end();
        if self.process != std::process::id() {
            self.threads.drain(..).for_each(std::mem::forget);
            return;
        }
        for thread in self.threads.drain(..) {
            thread.thread().unpark();
            let _ = thread.join();
        }
    }
}

/// What the first thread saw while the reader rested.
#[derive(Default)]
struct Looks {
    /// Layers that were scheduled at the last look.
    layers: u64,
    /// Looks in a row without a further layer.
    idle: u32,
    /// The last look at the free memory.
    last: Option<Instant>,
    /// Major faults at that time.
    faults: u64,
}

impl Shared {
    fn schedule(&self, layer: usize, matrices: Matrices, ids: &Ids<'_>) {
        let (Some(&(_, experts)), Some(of_layer)) =
            (self.layers.get(layer), self.matrices.get(layer))
        else {
            return;
        };
        let before = self.figures.layers.load(Ordering::Relaxed);
        let is_next_part = self.current.swap(layer, Ordering::Relaxed) == layer
            && before > 0
            && matrices != Matrices::default()
            && of_layer.load(Ordering::Relaxed) & matrices.0 == 0;
        let number = if is_next_part {
            of_layer.fetch_or(matrices.0, Ordering::Relaxed);
            before - 1
        } else {
            of_layer.store(matrices.0, Ordering::Relaxed);
            self.figures.layers.fetch_add(1, Ordering::Relaxed)
        };
        let now = self.began.elapsed().as_nanos() as u64;
        let pause = now.saturating_sub(self.figures.last.swap(now, Ordering::Relaxed));
        if pause < LONGEST_LAYER {
            add(&self.figures.active, pause);
        }
        if layer == 0 && !is_next_part {
            add(&self.figures.tokens, ids.tokens as u64);
        }
        let is_quiet = self.is_quiet();
        if is_quiet && !number.is_multiple_of(SAMPLE_PERIOD) {
            return;
        }
        let routed = routed(ids, experts);
        // A batch that uses most experts of a layer uses most of the next one.
        let is_batch = ids.tokens > 1 && routed.len() * 100 >= experts * NEARLY_ALL;
        if let Some(residents) = self.residents.as_ref().filter(|_| !is_next_part) {
            residents.begin(layer, is_batch);
        }
        let mut requested = [0; MOST_LANES];
        for projection in 0..UNITS {
            let unit = layer * UNITS + projection;
            let lane = self.lane(unit);
            lane.ahead.clear(unit);
            // A layer has gate and up in one matrix or in two.
            if !matrices.has(projection) || self.unit_bytes[unit] == 0 {
                continue;
            }
            let absent = match &self.residents {
                Some(residents) => {
                    // A read of one of them begins the count again.
                    self.resident_units.fetch_add(1, Ordering::Relaxed);
                    self.absent(residents, unit, &routed)
                }
                None => routed,
            };
            if absent.len() > 0 {
                lane.wanted.add(unit, &absent);
                lane.wanted.publish(unit);
                requested[self.lane_of[unit]] += 1;
            }
        }
        // A sample waits for the next look: to wake a thread is a system call.
        if is_quiet {
            return;
        }
        if is_batch {
            self.read_layers_ahead(layer + 1, &mut requested);
        }
        for (lane, requested) in self.lanes.iter().zip(requested) {
            lane.wake(requested, usize::MAX);
        }
    }

    fn margin(&self) -> f32 {
        f32::from_bits(self.margin.load(Ordering::Relaxed))
    }

    fn prefer(&self, layer: usize, matrices: Matrices, ranking: &mut Ranking<'_>) -> bool {
        let (Some(residents), Some(&(_, experts))) = (&self.residents, self.layers.get(layer))
        else {
            return false;
        };
        if ranking.experts != experts as usize {
            return false;
        }
        let units = (0..UNITS).map(|projection| (projection, layer * UNITS + projection));
        let units = units
            .filter(|(projection, unit)| matrices.has(*projection) && self.unit_bytes[*unit] > 0);
        let is_here = |expert: &u32| {
            let mut units = units.clone();
            !units.any(|(_, unit)| residents.is_absent(unit, *expert))
        };
        let here: ExpertSet = (0..experts).filter(is_here).collect();
        let Some(replaced) = ranking.prefer(&here, self.margin()) else {
            return false;
        };
        let tokens = ranking.order.len() / ranking.experts;
        add(&self.figures.chosen, (tokens * ranking.used) as u64);
        add(&self.figures.replaced, replaced);
        true
    }

    /// Notes a use of experts of a unit, and returns those that are to be brought into memory of the process.
    fn absent(&self, residents: &Residents, unit: Unit, routed: &ExpertSet) -> ExpertSet {
        let pages = self.unit_bytes[unit].div_ceil(self.page);
        let mut absent = ExpertSet::EMPTY;
        let mut here = 0;
        for expert in routed.iter() {
            let (is_here, is_absent) = residents.note_use(unit, expert);
            here += u64::from(is_here);
            if is_absent {
                absent.insert(expert);
            }
        }
        add(&self.figures.checked_pages, pages * u64::from(routed.len()));
        add(&self.figures.resident_pages, pages * here);
        absent
    }

    /// Requests the experts of the layers from `next` on, which a batch will use, as many as stay in memory
    /// until then.
    fn read_layers_ahead(&self, next: usize, requested: &mut [usize; MOST_LANES]) {
        let Some(residents) = &self.residents else {
            if self.look_ahead.get(next) == Some(&true) {
                let all = ExpertSet::first(self.layers[next].1);
                self.publish(|lane| &lane.ahead, next, &all);
                requested[self.lane_of[next * UNITS]] += 1;
            }
            return;
        };
        let layer: u64 = (0..UNITS)
            .map(|at| self.unit_bytes[(next - 1) * UNITS + at])
            .sum();
        let layer = layer * u64::from(self.layers[next - 1].1);
        let mut left = (2 * layer).max(AHEAD_BYTES).min(residents.limit() / 2);
        for unit in next * UNITS..self.layers.len() * UNITS {
            let matrices = Matrices(self.matrices[unit / UNITS].load(Ordering::Relaxed));
            let bytes = self.unit_bytes[unit];
            if !matrices.has(unit % UNITS) || bytes == 0 {
                continue;
            }
            // A matrix may begin and end inside a page. What does not fit besides the reads that are under way
            // is not read ahead at all.
            let bytes = bytes.next_multiple_of(self.page) + self.page;
            let fit = (left / bytes).min(self.layers[unit / UNITS].1.into()) as u32;
            let experts = (0..fit).filter(|expert| residents.is_absent(unit, *expert));
            let absent: ExpertSet = experts.collect();
            if absent.len() > 0 {
                let ahead = &self.lane(unit).ahead;
                ahead.add(unit, &absent);
                ahead.publish(unit);
                requested[self.lane_of[unit]] += 1;
            }
            left -= bytes * u64::from(fit);
            if fit < self.layers[unit / UNITS].1 {
                return;
            }
        }
    }

    fn lane(&self, unit: Unit) -> &Lane {
        &self.lanes[self.lane_of[unit]]
    }

    /// Whether only samples are read.
    fn is_quiet(&self) -> bool {
        self.resting.load(Ordering::SeqCst) || self.stopped.load(Ordering::SeqCst)
    }

    /// Lets the reader go on if the program waited for the disk since the reader began to rest, or
    /// evaluated nothing for some time: what it needs next may have left memory meanwhile.
    fn look(&self, looks: &mut Looks) {
        if let Some(residents) = &self.residents
            && looks.last.is_none_or(|last| last.elapsed() >= LOOK_PERIOD)
        {
            looks.last = Some(Instant::now());
            residents.look_at_memory();
            let faults = pages::major_faults();
            if std::mem::replace(&mut looks.faults, faults) != faults {
                residents.look_again();
                residents.read_others();
            }
            // Not when a layer is scheduled, which makes no system call.
            if self.resident_units.load(Ordering::Relaxed) >= self.units_to_rest() {
                self.rest();
            }
        }
        if !self.is_quiet() {
            (looks.layers, looks.idle) = (0, 0);
            return;
        }
        let layers = self.figures.layers.load(Ordering::Relaxed);
        looks.idle = if looks.layers == layers {
            looks.idle + 1
        } else {
            0
        };
        looks.layers = layers;
        let is_idle = looks.idle >= IDLE_LOOKS;
        let faults = pages::major_faults();
        let has_faults = self.figures.faults_seen.swap(faults, Ordering::Relaxed) != faults;
        if (is_idle || has_faults) && self.resting.load(Ordering::Relaxed) {
            // The fault may be of another file: one pass that finds all experts in memory suffices
            // to rest again.
            let units = self.units_to_rest() - self.units_of_pass();
            self.resident_units.store(units, Ordering::Relaxed);
            self.resting.store(false, Ordering::SeqCst);
        }
        if is_idle {
            // One matrix that the kernel does not read suffices to stop again.
            self.fruitless.store(FRUITLESS - 1, Ordering::Relaxed);
            self.stopped.store(false, Ordering::SeqCst);
        }
    }

    /// The matrices of all layers.
    fn units_of_pass(&self) -> usize {
        self.layers.len() * UNITS
    }

    /// The units in a row, all in memory, after which the reader rests.
    fn units_to_rest(&self) -> usize {
        self.units_of_pass() * self.passes.load(Ordering::Relaxed)
    }

    /// Requests experts of a layer in the matrices that it reads.
    fn publish(&self, requests: impl Fn(&Lane) -> &Requests, layer: usize, experts: &ExpertSet) {
        let matrices = Matrices(self.matrices[layer].load(Ordering::Relaxed));
        for projection in (0..UNITS).filter(|projection| matrices.has(*projection)) {
            let unit = layer * UNITS + projection;
            let requests = requests(self.lane(unit));
            requests.add(unit, experts);
            requests.publish(unit);
        }
    }

    /// Returns the bytes of an expert in the matrices that its layer reads.
    fn bytes_of(&self, layer: usize, expert: u32) -> u64 {
        let matrices = Matrices(self.matrices[layer].load(Ordering::Relaxed));
        let number = self.layers[layer].0;
        let read = (0..UNITS).filter(|projection| matrices.has(*projection));
        let slices = read.filter_map(|projection| {
            self.index
                .slice(number, Projection::ALL[projection], expert)
        });
        slices.map(|slice| slice.nbytes).sum()
    }

    /// The work of a thread.
    fn run(&self, lane: usize, number: usize) {
        let looks_at = lane == 0 && number == 0;
        let lane = &self.lanes[lane];
        let bit = 1 << number;
        let mut looks = Looks::default();
        while !self.ended.load(Ordering::SeqCst) {
            if self.work(lane, number) {
                continue;
            }
            if looks_at {
                self.look(&mut looks);
            }
            lane.idle.fetch_or(bit, Ordering::SeqCst);
            // What was requested before the bit was set would wake nothing.
            if !lane.is_pending() || number >= self.ahead_threads() && !lane.wanted.is_pending() {
                match looks_at && (self.is_quiet() || self.residents.is_some()) {
                    true => std::thread::park_timeout(LOOK_PERIOD),
                    false => std::thread::park(),
                }
            }
            lane.idle.fetch_and(!bit, Ordering::SeqCst);
        }
    }

    /// The number of threads of a lane that read before routing is known.
    fn ahead_threads(&self) -> usize {
        match &self.residents {
            Some(residents) if !residents.scans() => AHEAD_THREADS,
            _ => usize::MAX,
        }
    }

    /// Handles a request; returns whether there was one.
    fn work(&self, lane: &Lane, number: usize) -> bool {
        let first = self.current.load(Ordering::Relaxed) * UNITS;
        if self.residents.is_some() {
            let ahead = [(&lane.ahead, first), (&lane.hottest, 0)];
            return self.bring_one(lane, &lane.wanted, first, Reason::Routed)
                || number < self.ahead_threads()
                    && ahead.iter().any(|(requests, first)| {
                        self.bring_one(lane, requests, *first, Reason::Ahead)
                    });
        }
        if let Some(unit) = lane.wanted.claim(first) {
            let mut resident = true;
            while let Some(expert) = lane.wanted.pop(unit) {
                resident &= self.read(unit, expert, Reason::Routed);
            }
            self.note_residency(resident);
            return true;
        }
        let without = |others: &[&Requests]| !others.iter().any(|others| others.is_pending());
        self.read_ahead(&lane.ahead, first, || without(&[&lane.wanted]))
            || self.read_ahead(&lane.hottest, 0, || without(&[&lane.wanted, &lane.ahead]))
    }

    /// Reads one requested expert, while other threads read the next ones; returns whether there was one.
    fn bring_one(&self, lane: &Lane, requests: &Requests, first: Unit, reason: Reason) -> bool {
        let Some(unit) = requests.claim(first) else {
            return false;
        };
        let expert = requests.pop(unit);
        if requests.has_any(unit) {
            requests.publish(unit);
        }
        if requests.is_pending() {
            let below = match reason {
                Reason::Routed => usize::MAX,
                Reason::Ahead => self.ahead_threads(),
            };
            lane.wake(1, below);
        }
        if let Some(expert) = expert {
            self.read(unit, expert, reason);
        }
        true
    }

    /// Reads experts of a unit that is not routed yet while there is nothing else to do; returns whether there was
    /// a unit.
    fn read_ahead(&self, requests: &Requests, first: Unit, is_idle: impl Fn() -> bool) -> bool {
        let Some(unit) = requests.claim(first) else {
            return false;
        };
        while is_idle() {
            match requests.pop(unit) {
                Some(expert) => self.read(unit, expert, Reason::Ahead),
                None => return true,
            };
        }
        requests.publish(unit);
        true
    }

    /// Counts units without missing pages, and rests after enough of them.
    fn note_residency(&self, resident: bool) {
        let enough = self.units_to_rest();
        if !resident {
            let units = self.resident_units.swap(0, Ordering::Relaxed);
            if units >= enough - self.units_of_pass() {
                let passes = enough / self.units_of_pass() * 4;
                let passes = passes.min(MOST_RESIDENT_PASSES);
                self.passes.store(passes, Ordering::Relaxed);
            }
            self.resting.store(false, Ordering::SeqCst);
            return;
        }
        let units = self.resident_units.fetch_add(1, Ordering::Relaxed);
        if units >= enough && self.rest() {
            // The first thread sleeps for so long as to look.
            self.lanes[0].wake(1, usize::MAX);
        }
    }

    /// Rests, unless it does already or never shall; returns whether it began to.
    fn rest(&self) -> bool {
        if self.always || self.resting.load(Ordering::Relaxed) {
            return false;
        }
        let faults = pages::major_faults();
        self.figures.faults_seen.store(faults, Ordering::Relaxed);
        !self.resting.swap(true, Ordering::SeqCst)
    }

    /// Reads a matrix of an expert ahead; returns whether all of it was in memory.
    fn read(&self, unit: Unit, expert: u32, reason: Reason) -> bool {
        if self.ended.load(Ordering::Relaxed) {
            return true;
        }
        if let Some(residents) = &self.residents {
            let residency = |file: usize| self.files[file].1;
            let pages = |bytes: u64| bytes.div_ceil(self.page);
            match residents.bring(unit, expert, reason, residency) {
                Brought::Here(bytes) => {
                    self.note_residency(false);
                    let figure = match reason {
                        Reason::Routed => &self.figures.read_pages,
                        Reason::Ahead => &self.figures.ahead_pages,
                    };
                    add(figure, pages(bytes));
                    return false;
                }
                Brought::Cached => {
                    // It was counted as absent when it was scheduled.
                    if reason == Reason::Routed {
                        add(&self.figures.resident_pages, pages(self.unit_bytes[unit]));
                    }
                    return true;
                }
                Brought::Left => self.note_residency(false),
            }
            // It goes through the page cache once its layer is routed, which drops what is used before that.
            if reason == Reason::Ahead && !residents.fits_page_cache() {
                return false;
            }
        }
        let (layer, _) = self.layers[unit / UNITS];
        let projection = Projection::ALL[unit % UNITS];
        let Some(slice) = self.index.slice(layer, projection, expert) else {
            return true;
        };
        let Some((file, residency)) = self.files.get(slice.file) else {
            return true;
        };
        let Ok(file) = file.get() else {
            return true;
        };
        let bytes = slice.offset..slice.offset + slice.nbytes;
        let bytes = pages::around(&bytes, self.page);
        let all = (bytes.end - bytes.start) / self.page;
        let Some(before) = residency.cached(file, &bytes, self.page) else {
            self.request(file, &bytes, WINDOW);
            // All that is known of the pages: whether the program waits for them.
            let faults = pages::major_faults();
            return self.figures.faults_seen.swap(faults, Ordering::Relaxed) == faults;
        };
        let missing = all.saturating_sub(before);
        // In memory of the process, uses are counted when they are scheduled.
        if reason == Reason::Routed && self.residents.is_none() {
            add(&self.figures.checked_pages, all);
            add(&self.figures.resident_pages, all - missing);
        }
        if missing == 0 {
            return true;
        }
        let read = match residency {
            Residency::Counted => self.read_missing(file, &bytes, all, missing),
            // Pages that are being read are not found.
            _ => {
                self.request(file, &bytes, WINDOW);
                missing
            }
        };
        add(
            match reason {
                Reason::Routed => &self.figures.read_pages,
                Reason::Ahead => &self.figures.ahead_pages,
            },
            read,
        );
        if self.residents.is_none() {
            self.note_effect(read > 0);
        }
        false
    }

    /// Reads the missing pages of a range of `all` pages; returns how many the kernel began to
    /// read.
    fn read_missing(&self, file: &File, bytes: &Range<u64>, all: u64, missing: u64) -> u64 {
        loop {
            let chunk = self.chunk.load(Ordering::Relaxed);
            self.request(file, bytes, chunk);
            let after = Residency::Counted.cached(file, bytes, self.page);
            let left = all.saturating_sub(after.unwrap_or(all));
            // The kernel read the beginning of each chunk.
            if left * 8 > missing && chunk > WINDOW {
                self.chunk.store(chunk / 2, Ordering::Relaxed);
                continue;
            }
            return missing.saturating_sub(left);
        }
    }

    fn request(&self, file: &File, bytes: &Range<u64>, chunk: u64) {
        let goes_on = || !self.ended.load(Ordering::Relaxed);
        let refused = pages::read_ahead(file, bytes, chunk, goes_on);
        add(&self.figures.failed, refused);
    }

    /// Stops after many matrices for which the kernel read nothing, and goes on after one that it
    /// read.
    fn note_effect(&self, effective: bool) {
        if effective {
            self.fruitless.store(0, Ordering::Relaxed);
            self.stopped.store(false, Ordering::SeqCst);
        } else if self.fruitless.fetch_add(1, Ordering::Relaxed) + 1 >= FRUITLESS
            && !self.stopped.swap(true, Ordering::SeqCst)
        {
            self.lanes[0].wake(1, usize::MAX);
            if !self.reported.swap(true, Ordering::Relaxed) {
                log::warn!(
                    "reading experts ahead has no effect on this file system or with so little free memory: the program reads them as without streaming until a sample succeeds"
                );
            }
        }
    }
}

/// Returns where the first expert of a unit is.
fn first_slice(index: &ExpertIndex, layers: &[(u32, u32)], unit: Unit) -> Option<ExpertSlice> {
    let (layer, experts) = layers[unit / UNITS];
    let projection = Projection::ALL[unit % UNITS];
    (0..experts).find_map(|expert| index.slice(layer, projection, expert))
}

/// Returns an open file, and how its cached pages are found.
fn with_residency(file: &&GgufFile) -> (Arc<Kept>, Residency) {
    let handle = file.source.handle();
    let residency = handle.get().map_or(Residency::Unknown, Residency::of);
    if residency != Residency::Counted {
        log::info!(
            "{}: the kernel does not count its pages in memory for this user or file system, so that figures of streaming are estimates",
            text::path(file.source.path())
        );
    }
    (handle, residency)
}

/// Returns the experts that any token was routed to.
fn routed(ids: &Ids<'_>, experts: u32) -> ExpertSet {
    let mut set = ExpertSet::EMPTY;
    for token in 0..ids.tokens {
        for used in 0..ids.used {
            let expert = ids.get(token, used).and_then(|id| u32::try_from(id).ok());
            if let Some(expert) = expert.filter(|expert| *expert < experts.min(MAX_EXPERTS)) {
                set.insert(expert);
            }
        }
    }
    set
}
