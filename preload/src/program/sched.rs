//! The schedulers of the program, and what their graphs need after a switch.
//!
//! A program evaluates through a `ggml_backend_sched`. libllama keeps the graph of one
//! evaluation for the next when both have the same shape:
//!
//! * On the CPU alone, a kept graph reads the descriptors of its weights in each
//!   evaluation, so that it stays valid after a switch. The exceptions are a graph with
//!   *views* of weights that are switched, because a view has a copy of the old type and address,
//!   and the graphs of ik_llama.cpp: a node can read two weights, if they have one type.
//! * With another backend, the graph was split for the weights of that moment: copies of
//!   them were planned, captured graphs hold their addresses. It must be rebuilt. To split
//!   it again from here, the drop-in would have to undo the scheduler's changes to it, save
//!   its inputs, and repeat libllama's settings of single nodes. Instead the drop-in makes
//!   libllama rebuild the graph: libllama keeps a graph only if its input tensors still
//!   have the extents that the next batch needs; in ik_llama.cpp, if it still writes to the
//!   cache of the context. Before libllama compares them, one of these fields is set to zero
//!   ([`ComparedField`]).
//!
//! "Before libllama compares them" is when libllama reads the size of the buffer of its
//! results, which it does at the start of every decode and at no other time between an
//! evaluation and the next. The method is tried once, on the first graph that is kept, when
//! nothing depends on it. Where it fails, tensors are switched when the program builds a
//! graph of its own accord.
//!
//! Without swaps, this costs a few atomic operations per evaluation, a walk over each new
//! graph, and one more graph in the life of a context that uses a GPU.

use std::cell::Cell;
use std::ffi::CString;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use crate::ggml::{self, Ggml, Graph, Sched};
use crate::program::barrier::{self, ModelSet, Slot, SlotGraph};
use crate::program::completion::Completion;
use crate::program::graph::{self, Backends, ComparedField, GraphReads, Outputs};
use crate::program::models::{self, Model};
use crate::program::watched::Watched;
use crate::program::{derived, masks, own_cache};

/// A scheduler of the program, or a backend that is used without one. When the program frees it,
/// another takes its place.
pub struct Scheduler {
    number: usize,
    slot: Slot,
    ggml: AtomicPtr<Ggml>,
    /// The generation that its graph was built for. Only a graph that is built sets it.
    generation: AtomicU64,
    /// [`Table::frees`] when its graph was built.
    frees: AtomicU64,
    /// The generation in which the program began the decode that may build a graph.
    begun_in: AtomicU64,
    /// Whether the compared field of the graph is set to zero.
    invalidated: AtomicBool,
    /// Whether another graph is wanted, though this one is valid.
    is_unwanted: AtomicBool,
    graph: Mutex<KeptGraph>,
    /// The nodes of its graph at which routed experts are known.
    pub(super) watched: Watched,
    completion: Completion,
}

/// The schedulers of the program.
struct Table {
    all: [Scheduler; SLOTS],
    /// Schedulers that were ever used.
    used: AtomicUsize,
    /// Held while a scheduler gets its place.
    claiming: Mutex<()>,
    /// Counts evaluations.
    evaluations: AtomicU64,
    /// Counts graphs that the program was made to rebuild.
    rebuilt: AtomicU64,
    /// Counts the moments at which buffers on other machines were freed: their servers drop the
    /// graphs that they keep.
    frees: AtomicU64,
    /// [`activity`] when such a moment was last waited for in vain.
    no_free_after: AtomicU64,
}

/// More schedulers than any program has contexts.
pub const SLOTS: usize = 256;
const TOO_MANY: &str = "swap refused: this program has more than 256 contexts";
static TABLE: Table = Table::new();

impl Table {
    const fn new() -> Table {
        let mut all = [const { Scheduler::free() }; SLOTS];
        let mut number = 0;
        while number < SLOTS {
            all[number].number = number;
            number += 1;
        }
        Table {
            all,
            used: AtomicUsize::new(0),
            claiming: Mutex::new(()),
            evaluations: AtomicU64::new(0),
            rebuilt: AtomicU64::new(0),
            frees: AtomicU64::new(0),
            no_free_after: AtomicU64::new(u64::MAX),
        }
    }

    fn used(&self) -> &[Scheduler] {
        &self.all[..self.used.load(Ordering::Acquire)]
    }
}

/// What is known of the graph that a scheduler keeps. Used by the thread that evaluates.
struct KeptGraph {
    compared: Option<ComparedField>,
    /// The tokens of the graph that was dropped with its compared field set to zero.
    rebuilding: Option<i64>,
    /// Whether it is known if the program rebuilds it.
    tried: bool,
}

impl KeptGraph {
    const NONE: KeptGraph = KeptGraph {
        compared: None,
        rebuilding: None,
        tried: false,
    };
}

/// A graph that is about to be allocated.
pub struct Allocated {
    /// The graph.
    pub graph: *mut Graph,
    /// What it reads.
    pub reads: GraphReads,
    /// The backends that evaluate it.
    pub backends: Backends,
    /// Its tensors that are read after an evaluation.
    pub outputs: Outputs,
    /// Models that are complete since this graph reads their tensors.
    pub complete: Vec<Arc<Model>>,
}

/// How long buffers on other machines wait for a moment between evaluations.
const LONGEST_FREE: Duration = Duration::from_secs(1);

thread_local! {
    /// The buffer whose size libllama read last on this thread.
    static LAST_OUTPUT: Cell<usize> = const { Cell::new(0) };
}

/// Returns the number of graphs that the program was made to rebuild.
pub fn rebuilt() -> u64 {
    TABLE.rebuilt.load(Ordering::Relaxed)
}

/// Returns the number of evaluations.
pub fn count() -> u64 {
    TABLE.evaluations.load(Ordering::Relaxed)
}

/// Counts what may have removed an obstacle: evaluations, and schedulers that became idle.
pub fn activity() -> u64 {
    count() + barrier::rests()
}

/// Frees the buffers on other machines that wait for it, between evaluations. If there is no such
/// moment, they wait on, until the next attempt after an evaluation.
pub fn free_remote() {
    if !ggml::remote_waits() || TABLE.no_free_after.load(Ordering::Relaxed) == activity() {
        return;
    }
    // A server drops the graphs of all models that have tensors there.
    let models = models::models();
    let mut remote = ModelSet::default();
    for model in models.iter().filter(|model| model.is_remote()) {
        remote.extend(model.as_set());
    }
    let began = Instant::now();
    let is_wanted = || began.elapsed() < LONGEST_FREE;
    let freed = barrier::between_evaluations(remote, is_wanted, || {
        ggml::free_remote();
        TABLE.frees.fetch_add(1, Ordering::SeqCst);
    });
    if freed.is_err() {
        TABLE.no_free_after.store(activity(), Ordering::Relaxed);
        log::info!(
            "buffers of replaced tensors on other machines are not freed yet: they wait for a moment between evaluations"
        );
    }
}

/// Records that libllama read the size of a buffer, and begins the evaluation whose results
/// the buffer holds.
pub fn output_size_read(buffer: usize) {
    LAST_OUTPUT.set(buffer);
    if let Some(scheduler) = Scheduler::all().find(|known| known.slot.has_output(buffer)) {
        scheduler.begin();
        scheduler.invalidate_if_stale();
    }
}

/// Forgets a buffer that is about to be freed.
pub fn output_freed(buffer: usize) {
    if LAST_OUTPUT.get() == buffer {
        LAST_OUTPUT.set(0);
    }
    Scheduler::all().for_each(|scheduler| scheduler.slot.forget_output(buffer));
}

/// Finds out what a graph reads that was loaded from no file.
///
/// # Safety
///
/// The graph is live.
unsafe fn find_others(ggml: &Ggml, reads: &mut GraphReads) {
    if reads.others.is_empty() {
        return;
    }
    let mut models: Vec<Arc<Model>> = Vec::new();
    for weight in &reads.weights {
        if let Some((model, _)) = models::find(weight.tensor)
            && models.iter().all(|known| known.number != model.number)
        {
            models.push(model);
        }
    }
    if let [model] = models.as_slice() {
        // SAFETY: as the caller ensures.
        unsafe { own_cache::find(model, &mut reads.cached) };
    }
    for &tensor in &reads.others {
        // SAFETY: as the caller ensures.
        let is_derived = unsafe { derived::is_known(ggml, tensor) };
        if !is_derived && !own_cache::is_known(tensor) && !models::is_registered(tensor) {
            // SAFETY: as the caller ensures.
            let name = unsafe { graph::name(ggml, tensor) };
            let name = CString::new(name).unwrap_or_default();
            models.iter().for_each(|model| model.note_unknown(&name));
        }
    }
}

/// Whether the program has more than one scheduler: it may not wait for the last evaluation of each.
fn are_several() -> bool {
    let live = Scheduler::all().filter(|scheduler| scheduler.slot.key() != 0);
    live.count() > 1
}

/// Waits for evaluations that the program does not wait for.
fn finish_abandoned() {
    for scheduler in Scheduler::all() {
        if scheduler.slot.is_returned_and_abandoned() {
            let ended = || scheduler.slot.end_if_returned();
            scheduler.completion.wait(scheduler.ggml(), ended);
        }
    }
}

impl Scheduler {
    const fn free() -> Scheduler {
        Scheduler {
            number: 0,
            slot: Slot::free(),
            ggml: AtomicPtr::new(std::ptr::null_mut()),
            generation: AtomicU64::new(0),
            frees: AtomicU64::new(0),
            begun_in: AtomicU64::new(0),
            invalidated: AtomicBool::new(false),
            is_unwanted: AtomicBool::new(false),
            graph: Mutex::new(KeptGraph::NONE),
            watched: Watched::none(),
            completion: Completion::new(),
        }
    }

    /// Returns the scheduler at an address; `None` when there are too many.
    pub fn of(ggml: &'static Ggml, key: usize) -> Option<&'static Scheduler> {
        if let Some(known) = Scheduler::find(key) {
            return Some(known);
        }
        let _turn = TABLE.claiming.lock();
        let used = TABLE.used();
        let freed = used.iter().find(|scheduler| scheduler.slot.key() == 0);
        let Some(scheduler) = freed.or_else(|| TABLE.all.get(used.len())) else {
            if barrier::refuse(TOO_MANY) {
                log::warn!("{TOO_MANY}");
            }
            return None;
        };
        let ggml = std::ptr::from_ref(ggml).cast_mut();
        scheduler.ggml.store(ggml, Ordering::Relaxed);
        let now = barrier::generation();
        scheduler.generation.store(now, Ordering::Relaxed);
        scheduler.begun_in.store(now, Ordering::Relaxed);
        let frees = TABLE.frees.load(Ordering::SeqCst);
        scheduler.frees.store(frees, Ordering::Relaxed);
        if freed.is_none() {
            scheduler.slot.link(finish_abandoned);
            TABLE.used.store(used.len() + 1, Ordering::Release);
        }
        // Before that, neither a switch nor another thread finds it.
        scheduler.slot.claim(key);
        Some(scheduler)
    }

    /// Returns the scheduler at an address, if it is known.
    pub fn find(key: usize) -> Option<&'static Scheduler> {
        Scheduler::all().find(|scheduler| scheduler.slot.key() == key)
    }

    /// Returns every scheduler that was ever used, with those that were freed.
    pub fn all() -> impl Iterator<Item = &'static Scheduler> {
        TABLE.used().iter()
    }

    /// Returns its number, less than [`SLOTS`]; freed numbers are used again.
    pub fn number(&self) -> usize {
        self.number
    }

    /// Whether its graph reads weights of any of these models.
    pub fn reads(&self, models: ModelSet) -> bool {
        self.slot.reads(models)
    }

    /// Returns its copy of ggml.
    pub fn ggml(&self) -> &'static Ggml {
        // SAFETY: stored before the key, from a reference that lives for ever.
        unsafe { &*self.ggml.load(Ordering::Relaxed) }
    }

    /// Waits until its backends are done, as the program would.
    pub fn synchronize(&self) {
        let sched = self.slot.key() as *mut Sched;
        // SAFETY: called on the thread that evaluates with this scheduler.
        unsafe { (self.ggml().f.ggml_backend_sched_synchronize)(sched) }
        self.slot.backends_are_done();
    }

    /// Begins a decode: a pending switch can go first.
    fn begin(&self) {
        self.slot.begin(|| self.synchronize());
        let now = barrier::generation();
        self.begun_in.store(now, Ordering::Relaxed);
    }

    /// Drops the graph and begins a decode: the program will build another.
    pub fn reset(&self) {
        {
            let mut graph = self.graph.lock();
            let invalidated = self.invalidated.swap(false, Ordering::Relaxed);
            let tokens = graph.compared.take().map(|compared| compared.tokens);
            graph.rebuilding = tokens.filter(|_| invalidated);
        }
        self.slot.drop_graph();
        self.begin();
    }

    /// Makes the program build another graph when it next begins a decode, where it can be made to.
    pub fn rebuild(&self) {
        self.is_unwanted.store(true, Ordering::Relaxed);
    }

    /// Forgets the scheduler, which is about to be freed. Its graph and its backends may be
    /// gone: programs free them in any order, so nothing of them is touched.
    pub fn forget(&self) {
        let _no_switch = barrier::hold();
        self.invalidated.store(false, Ordering::Relaxed);
        self.is_unwanted.store(false, Ordering::Relaxed);
        *self.graph.lock() = KeptGraph::NONE;
        self.slot.release();
    }

    /// Enters a function of ggml that reads tensors, in the course of a decode.
    pub fn enter(&self) {
        self.slot.enter();
    }

    /// Leaves a function of ggml; the decode goes on.
    pub fn leave(&self) {
        self.slot.leave();
    }

    /// Leaves a function of ggml after which nothing runs.
    pub fn rest(&self) {
        self.slot.rest();
    }

    /// Enters the evaluation. Returns whether its graph is valid.
    pub fn enter_compute(&self) -> bool {
        let output = LAST_OUTPUT.get();
        if output != 0 {
            self.slot.set_output(output);
        }
        self.slot.enter_compute();
        own_cache::write_changed();
        masks::write_changed(|| self.synchronize());
        TABLE.evaluations.fetch_add(1, Ordering::Relaxed);
        self.restore_if_invalidated();
        // Only a graph that is rebuilt takes the new generation: this one stays stale.
        let keeps = self.slot.keeps_graph();
        let stale = keeps && (self.is_stale() || self.is_dropped());
        if stale && !self.ends_with_compute() {
            log::error!(
                "failing an evaluation that was begun before a swap, because its graph mixes old and new tensors; the program's next graph is correct"
            );
            return false;
        }
        true
    }

    /// Whether an evaluation has ended when the function that computes it returns.
    pub fn ends_with_compute(&self) -> bool {
        self.slot.stays_valid()
    }

    /// Leaves an evaluation.
    pub fn leave_compute(&self) {
        match self.ends_with_compute() {
            true => self.slot.leave_ended(),
            false => {
                let leave = || self.slot.leave_running();
                self.completion.record(self.ggml(), leave);
            }
        }
    }

    /// Enters a wait for the backends. Returns whether it is in the course of a decode.
    pub fn enter_synchronize(&self) -> bool {
        self.slot.enter_if_begun()
    }

    /// Records that the program waited for the backends. Returns whether that ended an
    /// evaluation.
    pub fn synchronized(&self) -> bool {
        self.slot.backends_are_done();
        self.slot.has_returned()
    }

    /// Leaves a wait for the backends that ended an evaluation. With several copies of its inputs
    /// (pipeline parallelism), libllama also waits between two parts of a batch.
    pub fn leave_synchronize(&self) {
        match self.is_parallel() {
            true => self.slot.leave(),
            false => self.slot.rest(),
        }
    }

    /// Whether it has several copies of its inputs, to evaluate several batches at a time. Called on a
    /// thread that uses it.
    pub fn is_parallel(&self) -> bool {
        let sched = self.slot.key() as *mut Sched;
        // SAFETY: the thread uses the scheduler, which is live.
        unsafe { (self.ggml().f.ggml_backend_sched_get_n_copies)(sched) > 1 }
    }

    /// Whether a switch since its graph was built may have made the graph invalid.
    fn is_stale(&self) -> bool {
        let built_in = self.generation.load(Ordering::Relaxed);
        match self.slot.survives_if_no_views() {
            true => built_in < barrier::viewed_in(),
            false => built_in != barrier::generation(),
        }
    }

    /// Whether a server on another machine may have dropped its graph.
    fn is_dropped(&self) -> bool {
        !self.slot.survives_if_no_views()
            && self.frees.load(Ordering::Relaxed) != TABLE.frees.load(Ordering::SeqCst)
    }

    /// Makes libllama rebuild the graph if a switch happened since it was built or a server may
    /// have dropped it, or once to find out whether it does.
    fn invalidate_if_stale(&self) {
        if !self.slot.keeps_graph() || self.slot.stays_valid() {
            return;
        }
        let graph = self.graph.lock();
        let unwanted = self.is_unwanted.load(Ordering::Relaxed);
        let stale = self.is_stale() || self.is_dropped() || unwanted;
        if let Some(field) = graph.compared
            && (stale || barrier::is_pending() || !graph.tried)
            && !self.invalidated.load(Ordering::Relaxed)
        {
            let layout = &self.ggml().layout;
            // SAFETY: the program keeps the graph, and its thread is here and not in it.
            unsafe {
                if layout.read::<i64>(field.tensor, field.offset) == field.value {
                    layout.write(field.tensor, field.offset, 0i64);
                    self.invalidated.store(true, Ordering::Relaxed);
                }
            }
        }
    }

    /// Restores the compared field: the program kept the graph all the same.
    fn restore_if_invalidated(&self) {
        if !self.invalidated.swap(false, Ordering::Relaxed) {
            return;
        }
        let mut graph = self.graph.lock();
        if let Some(field) = graph.compared {
            let layout = &self.ggml().layout;
            // SAFETY: the program is about to evaluate the graph that it kept.
            unsafe { layout.write(field.tensor, field.offset, field.value) };
            graph.tried = true;
            self.is_unwanted.store(false, Ordering::Relaxed);
            self.slot.set_can_rebuild(false);
        }
    }

    /// Records the graph that the scheduler is about to split and allocate, and whether it
    /// keeps it.
    ///
    /// # Safety
    ///
    /// `sched` and `graph` are live and of this copy of ggml.
    pub unsafe fn allocate(&self, sched: *mut Sched, graph: *mut Graph, keeps: bool) -> Allocated {
        let ggml = self.ggml();
        // SAFETY: as the caller ensures.
        let (mut reads, backends) = unsafe {
            (
                GraphReads::of(ggml, graph, models::may_be_registered(), models::is_loaded),
                Backends::of(ggml, sched),
            )
        };
        // SAFETY: as the caller ensures.
        let found = unsafe {
            let found = models::find_in_graph(&backends.devices, &mut reads.weights);
            for &other in &found.others {
                graph::note_other(ggml, other, &mut reads.others);
            }
            find_others(ggml, &mut reads);
            found
        };
        // After that: the first graph of a model completes its registration.
        let views_weights = reads
            .viewed
            .iter()
            .any(|&viewed| models::is_registered(viewed));
        let mut has_first_view = false;
        for &viewed in &reads.viewed {
            has_first_view |= models::note_view(viewed);
        }
        reads
            .kept_views
            .iter()
            .copied()
            .for_each(models::note_kept_view);
        let mut known = self.graph.lock();
        if let Some(tokens) = known.rebuilding.take() {
            // Another number of tokens would have made a new graph anyway.
            if reads.compared.is_some_and(|field| field.tokens == tokens) {
                TABLE.rebuilt.fetch_add(1, Ordering::Relaxed);
                known.tried = true;
                self.slot.set_can_rebuild(true);
            }
        }
        known.compared = reads.compared;
        self.invalidated.store(false, Ordering::Relaxed);
        self.is_unwanted.store(false, Ordering::Relaxed);
        let can_stay = backends.on_cpu && ggml.ops.fused.is_none();
        let stays_valid = can_stay && !views_weights;
        let begun_in = self.begun_in.load(Ordering::Relaxed);
        // A switch since the program began to build the graph did not know of its first views.
        let were_views_known = !has_first_view || begun_in == barrier::generation();
        // A view copied the type of its weight when the program made it.
        let built_in = match views_weights {
            true => begun_in,
            false => barrier::generation(),
        };
        self.generation.store(built_in, Ordering::Relaxed);
        let frees = TABLE.frees.load(Ordering::SeqCst);
        self.frees.store(frees, Ordering::Relaxed);
        // SAFETY: as the caller ensures.
        unsafe { self.completion.prepare(ggml, &backends, are_several()) };
        self.slot.set_graph(&SlotGraph {
            is_kept: keeps,
            stays_valid,
            survives_if_no_views: can_stay && were_views_known,
            reads: found.reads,
        });
        Allocated {
            graph,
            reads,
            backends,
            outputs: Outputs::default(),
            complete: found.complete,
        }
    }
}
