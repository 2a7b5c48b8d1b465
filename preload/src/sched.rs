//! What each scheduler of the host is doing, and what its graph needs after a switch.
//!
//! A host evaluates through a `ggml_backend_sched`. libllama keeps the graph of one
//! evaluation for the next when it looks the same:
//!
//! * On the CPU alone, a kept graph reads the descriptors of its weights anew each
//!   time, so that it goes on right after a switch. Only a graph with *views* of
//!   weights does not: a view has a copy of the old type.
//! * With another backend the graph was split for the weights as they were: copies
//!   of them were planned, captured graphs hold their addresses. It must be built
//!   again. Splitting it again ourselves would mean to undo what the scheduler did to
//!   it, to save its inputs, and to repeat what libllama told the scheduler about
//!   single nodes. So the host is made to do it, in the way that it does itself:
//!   libllama keeps a graph only if its input tensors still have the extents that the
//!   next batch needs. Before it looks, one extent is set to zero.
//!
//! "Before it looks" is when libllama asks for the size of the buffer of its
//! results, which it does at the start of every decode and at no other time between
//! an evaluation and the next. That it works is tried once, on the first graph that is
//! kept, when nothing depends on it: a host where it does not is switched when it
//! builds a graph for reasons of its own.
//!
//! Nothing swapped, this costs a few atomic operations per evaluation, a walk over
//! each new graph, and one graph more in the life of a context that uses a GPU.

use std::cell::Cell;
use std::ffi::{CStr, c_int};
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use llama_sidecar::config::Config;
use once_cell::sync::Lazy;
use parking_lot::Mutex;

use crate::barrier::{self, Obstacle};
use crate::expert_trace::Routed;
use crate::ggml::{Buffer, DEVICE_CPU, Device, Ggml, Graph, Sched, Tensor};
use crate::models::{self, ModelSet};

/// `GGML_TENSOR_FLAG_INPUT`.
const FLAG_INPUT: i32 = 1;
/// Inputs of libllama's graphs whose first extent is the number of tokens.
const COUNTED_INPUTS: [&CStr; 2] = [c"inp_tokens", c"inp_pos"];
/// After this long, a decode that was begun and did not evaluate is taken for given
/// up. Building a graph takes milliseconds.
const GIVEN_UP: Duration = Duration::from_secs(1);

/// Nothing runs.
const IDLE: u32 = 0;
/// A decode has begun; its graph is being built or is kept.
const BEGUN: u32 = 1;
/// Inside of a function of ggml.
const INSIDE: u32 = 2;
/// The evaluation was handed to a backend that may still be at it, or the decode
/// may go on with another part of its batch.
const RETURNED: u32 = 3;

/// One scheduler.
pub struct Evaluation {
    /// Address of the scheduler, or of the backend that is used without one; 0 when
    /// the place is free.
    key: AtomicUsize,
    state: AtomicU32,
    /// When it was begun, in milliseconds of the process.
    since: AtomicU64,
    /// The buffer of libllama's results whose size is asked for as a decode begins.
    output: AtomicUsize,
    /// Whether it keeps a graph.
    kept: AtomicBool,
    /// Whether a kept graph stays right after a switch.
    simple: AtomicBool,
    /// Whether the host can be made to build its graph again.
    renewable: AtomicBool,
    /// The generation that its graph was built for. Only a graph that is built sets it.
    generation: AtomicU64,
    /// The generation when the host began the decode that may build a graph.
    begun_in: AtomicU64,
    /// The models whose weights its graph reads: [`ModelSet`].
    reads: AtomicU64,
    ggml: AtomicPtr<Ggml>,
    /// Whether the extent of its graph's input is set to zero.
    voided: AtomicBool,
    /// Whether its graph has routed ids to count.
    counts: AtomicBool,
    /// Whether a backend may still be at the last evaluation.
    in_flight: AtomicBool,
    /// Whether those of the last evaluation are still to be counted.
    uncounted: AtomicBool,
    graph: Mutex<KeptGraph>,
}

/// What is known of the graph that a scheduler keeps. Used by the thread that
/// evaluates.
struct KeptGraph {
    input: Option<CountedInput>,
    /// The extent that was set to zero before this graph was dropped.
    renewing: Option<i64>,
    /// Whether it is known if that works.
    tried: bool,
    /// Routed ids to count after each evaluation.
    routed: Vec<Routed>,
    /// Where they are read to.
    ids: Vec<u8>,
    /// Addresses of the backends that evaluate it.
    backends: Vec<usize>,
}

impl KeptGraph {
    const NONE: KeptGraph = KeptGraph {
        input: None,
        renewing: None,
        tried: false,
        routed: Vec::new(),
        ids: Vec::new(),
        backends: Vec::new(),
    };
}

impl KeptGraph {
    fn has_ids_in(&self, range: &Range<usize>) -> bool {
        self.routed.iter().any(|routed| routed.is_in(range))
    }
}

#[derive(Clone, Copy)]
struct CountedInput {
    tensor: *mut Tensor,
    extent: i64,
}

// SAFETY: the tensor is only touched by the thread that evaluates, while it keeps the
// graph.
unsafe impl Send for CountedInput {}

/// More than any host has contexts; further ones are counted in [`REFUSED`].
const CAPACITY: usize = 256;
static ALL: [Evaluation; CAPACITY] = [const { Evaluation::free() }; CAPACITY];
/// Places that were ever used.
static USED: AtomicUsize = AtomicUsize::new(0);
/// Schedulers without a place. While there is one, nothing can be switched.
static REFUSED: AtomicUsize = AtomicUsize::new(0);
/// Evaluations so far.
static COUNT: AtomicU64 = AtomicU64::new(0);

/// How often a scheduler came to rest or was freed.
static ENDED: AtomicU64 = AtomicU64::new(0);

static RENEWED: AtomicU64 = AtomicU64::new(0);

thread_local! {
    /// The buffer whose size libllama asked for last on this thread.
    static LAST_OUTPUT: Cell<usize> = const { Cell::new(0) };
}

/// How many graphs were built again because of us.
pub fn renewed() -> u64 {
    RENEWED.load(Ordering::Relaxed)
}

/// How many evaluations there have been.
pub fn count() -> u64 {
    COUNT.load(Ordering::Relaxed)
}

/// Counts what may have removed an obstacle: evaluations, and schedulers that came to rest.
pub fn activity() -> u64 {
    count() + ENDED.load(Ordering::Relaxed)
}

/// Whether an evaluation runs, or one began within the last second.
pub fn any_recent() -> bool {
    let now = now_ms();
    used().any(|evaluation| {
        evaluation.key.load(Ordering::Relaxed) != 0
            && (evaluation.state.load(Ordering::Relaxed) != IDLE
                || now.saturating_sub(evaluation.since.load(Ordering::Relaxed)) < 1000)
    })
}

/// What stands in the way of a switch of tensors of these models.
pub fn obstacle(models: ModelSet) -> Option<Obstacle> {
    if REFUSED.load(Ordering::Relaxed) > 0 {
        return Some(Obstacle::Evaluation);
    }
    let mut kept = None;
    for evaluation in used() {
        if evaluation.key.load(Ordering::SeqCst) == 0 {
            continue;
        }
        match evaluation.state.load(Ordering::SeqCst) {
            IDLE => {}
            BEGUN if evaluation.was_given_up() && !evaluation.in_flight.load(Ordering::SeqCst) => {}
            _ => return Some(Obstacle::Evaluation),
        }
        let flag = |flag: &AtomicBool| flag.load(Ordering::SeqCst);
        // Without the buffer of its results it is not known when a decode begins.
        let noticed = evaluation.output.load(Ordering::SeqCst) != 0;
        let survives = flag(&evaluation.simple) || (flag(&evaluation.renewable) && noticed);
        let reads = ModelSet::from_bits(evaluation.reads.load(Ordering::SeqCst));
        if flag(&evaluation.kept) && !survives && reads.overlaps(models) {
            kept = Some(Obstacle::KeptGraph);
        }
    }
    kept
}

fn used() -> impl Iterator<Item = &'static Evaluation> {
    ALL[..USED.load(Ordering::Acquire)].iter()
}

fn find(key: usize) -> Option<&'static Evaluation> {
    used().find(|evaluation| evaluation.key.load(Ordering::Relaxed) == key)
}

fn now_ms() -> u64 {
    static START: Lazy<Instant> = Lazy::new(Instant::now);
    START.elapsed().as_millis() as u64
}

impl Evaluation {
    /// A place that nobody uses.
    const fn free() -> Evaluation {
        Evaluation {
            key: AtomicUsize::new(0),
            state: AtomicU32::new(IDLE),
            since: AtomicU64::new(0),
            output: AtomicUsize::new(0),
            kept: AtomicBool::new(false),
            simple: AtomicBool::new(true),
            renewable: AtomicBool::new(false),
            generation: AtomicU64::new(0),
            begun_in: AtomicU64::new(0),
            reads: AtomicU64::new(0),
            ggml: AtomicPtr::new(std::ptr::null_mut()),
            voided: AtomicBool::new(false),
            in_flight: AtomicBool::new(false),
            uncounted: AtomicBool::new(false),
            counts: AtomicBool::new(false),
            graph: Mutex::new(KeptGraph::NONE),
        }
    }

    /// The evaluation of a scheduler; `None` when there are too many.
    pub fn of(ggml: &'static Ggml, key: usize) -> Option<&'static Evaluation> {
        if let Some(known) = find(key) {
            return Some(known);
        }
        static NEW: Mutex<()> = Mutex::new(());
        let _one_at_a_time = NEW.lock();
        let used = USED.load(Ordering::Acquire);
        let free = ALL[..used]
            .iter()
            .find(|evaluation| evaluation.key.load(Ordering::Relaxed) == 0);
        let place = match free {
            Some(place) => place,
            None if used < CAPACITY => {
                USED.store(used + 1, Ordering::Release);
                &ALL[used]
            }
            None => {
                if REFUSED.fetch_add(1, Ordering::Relaxed) == 0 {
                    log::warn!(
                        "this program has more than {CAPACITY} contexts; nothing will be swapped"
                    );
                }
                return None;
            }
        };
        place
            .ggml
            .store(std::ptr::from_ref(ggml).cast_mut(), Ordering::Relaxed);
        let now = barrier::generation();
        place.generation.store(now, Ordering::Relaxed);
        place.begun_in.store(now, Ordering::Relaxed);
        place.key.store(key, Ordering::SeqCst);
        Some(place)
    }

    /// Takes note that libllama asked for the size of a buffer, and begins the
    /// evaluation whose results it holds.
    pub fn output_asked(buffer: usize) {
        LAST_OUTPUT.set(buffer);
        let mine = |evaluation: &&Evaluation| evaluation.output.load(Ordering::Relaxed) == buffer;
        if let Some(evaluation) = used().find(mine) {
            evaluation.begin();
            evaluation.void_if_stale();
        }
    }

    /// Forgets a buffer that is about to be freed.
    pub fn output_freed(buffer: usize) {
        if LAST_OUTPUT.get() == buffer {
            LAST_OUTPUT.set(0);
        }
        for evaluation in used() {
            let _ =
                evaluation
                    .output
                    .compare_exchange(buffer, 0, Ordering::Relaxed, Ordering::Relaxed);
        }
    }

    /// The host drops its graph and will build another.
    pub fn reset(sched: usize) {
        let Some(evaluation) = find(sched) else {
            return;
        };
        evaluation.count_before();
        {
            let mut graph = evaluation.graph.lock();
            graph.routed.clear();
            let voided = evaluation.voided.swap(false, Ordering::Relaxed);
            let extent = graph.input.take().map(|input| input.extent);
            graph.renewing = extent.filter(|_| voided);
        }
        evaluation.kept.store(false, Ordering::SeqCst);
        evaluation.begin();
    }

    /// The host is about to free the memory of tensors. Routed ids that are still to be
    /// counted are read while they exist.
    pub fn tensors_freed(range: &Range<usize>) {
        for evaluation in used() {
            if evaluation.uncounted.load(Ordering::Relaxed)
                && evaluation.graph.lock().has_ids_in(range)
            {
                evaluation.count_before();
            }
        }
    }

    /// A backend is about to be freed: what it evaluated can no longer be waited for.
    pub fn backend_freed(backend: usize) {
        for evaluation in used() {
            if evaluation.uncounted.load(Ordering::Relaxed)
                && evaluation.graph.lock().backends.contains(&backend)
            {
                evaluation.uncounted.store(false, Ordering::Relaxed);
            }
        }
        Evaluation::freed(backend);
    }

    /// The scheduler is about to be freed. Its graph and its backends may be gone: hosts
    /// free them in any order, so nothing of them is touched.
    pub fn freed(sched: usize) {
        if let Some(evaluation) = find(sched) {
            let _closed = barrier::closed();
            evaluation.forget();
        }
    }

    fn forget(&self) {
        self.key.store(0, Ordering::SeqCst);
        self.state.store(IDLE, Ordering::SeqCst);
        self.output.store(0, Ordering::Relaxed);
        self.kept.store(false, Ordering::SeqCst);
        self.simple.store(true, Ordering::SeqCst);
        self.renewable.store(false, Ordering::SeqCst);
        self.reads.store(0, Ordering::SeqCst);
        self.voided.store(false, Ordering::Relaxed);
        self.in_flight.store(false, Ordering::SeqCst);
        self.uncounted.store(false, Ordering::Relaxed);
        ENDED.fetch_add(1, Ordering::Relaxed);
        self.counts.store(false, Ordering::Relaxed);
        *self.graph.lock() = KeptGraph::NONE;
    }

    fn ggml(&self) -> &'static Ggml {
        // SAFETY: stored before the key, from a reference that lives for ever.
        unsafe { &*self.ggml.load(Ordering::Relaxed) }
    }

    fn was_given_up(&self) -> bool {
        let age = now_ms().saturating_sub(self.since.load(Ordering::SeqCst));
        age > GIVEN_UP.as_millis() as u64
    }

    /// A decode begins: a switch that waits can go first.
    fn begin(&self) {
        self.since.store(now_ms(), Ordering::SeqCst);
        let before = self.state.swap(BEGUN, Ordering::SeqCst);
        if before != INSIDE && barrier::is_waiting() {
            if self.in_flight.load(Ordering::SeqCst) {
                self.synchronize();
            }
            self.give_way(BEGUN);
        }
        self.begun_in
            .store(barrier::generation(), Ordering::Relaxed);
    }

    fn give_way(&self, then: u32) {
        self.state.store(IDLE, Ordering::SeqCst);
        barrier::give_way(|| self.state.store(then, Ordering::SeqCst));
    }

    /// Waits until the backends are done, as the host would.
    fn synchronize(&self) {
        let sched = self.key.load(Ordering::Relaxed) as *mut Sched;
        // SAFETY: called on the thread that evaluates with this scheduler.
        unsafe { (self.ggml().f.ggml_backend_sched_synchronize)(sched) }
        self.in_flight.store(false, Ordering::SeqCst);
    }

    /// Enters a function of ggml that reads tensors, in the course of a decode.
    pub fn enter(&self) {
        self.state.swap(INSIDE, Ordering::SeqCst);
        if barrier::is_waiting() {
            barrier::join();
        }
    }

    /// Enters the evaluation itself; whether its graph can be used.
    pub fn enter_compute(&self) -> bool {
        let output = LAST_OUTPUT.get();
        if output != 0 {
            self.output.store(output, Ordering::Relaxed);
        }
        let simple = self.simple.load(Ordering::Relaxed);
        let before = self.state.swap(INSIDE, Ordering::SeqCst);
        if barrier::is_waiting() {
            match before == IDLE && simple {
                true => self.give_way(INSIDE),
                false => barrier::join(),
            }
        }
        COUNT.fetch_add(1, Ordering::Relaxed);
        self.count_before();
        let counts = self.counts.load(Ordering::Relaxed);
        self.uncounted.store(counts, Ordering::Relaxed);
        self.restore_if_voided();
        // Only a graph that is built again takes the new generation: this one stays stale.
        let stale = self.kept.load(Ordering::Relaxed)
            && self.generation.load(Ordering::Relaxed) != barrier::generation();
        if stale && !simple {
            self.uncounted.store(false, Ordering::Relaxed);
            log::error!(
                "failing an evaluation that was begun before a swap, because its graph mixes old and new tensors; the host's next graph is correct"
            );
            return false;
        }
        true
    }

    /// Leaves a function of ggml; the decode goes on.
    pub fn leave(&self) {
        self.since.store(now_ms(), Ordering::SeqCst);
        self.state.store(BEGUN, Ordering::SeqCst);
    }

    /// Leaves an evaluation; one that failed or was aborted routed to nothing.
    pub fn leave_compute(&self, succeeded: bool) {
        if !succeeded {
            self.uncounted.store(false, Ordering::Relaxed);
        }
        let simple = self.simple.load(Ordering::Relaxed);
        if self.uncounted.load(Ordering::Relaxed) && simple {
            self.count();
        }
        self.in_flight.store(!simple, Ordering::SeqCst);
        self.settle(if simple { IDLE } else { RETURNED });
    }

    /// The host waited until the backends were done.
    pub fn synchronized(sched: usize) {
        let Some(evaluation) = find(sched) else {
            return;
        };
        evaluation.in_flight.store(false, Ordering::SeqCst);
        if evaluation.state.load(Ordering::SeqCst) == RETURNED {
            if evaluation.uncounted.load(Ordering::Relaxed) {
                evaluation.count();
            }
            evaluation.rest();
        }
    }

    /// Counts the experts of an evaluation whose backends are done.
    fn count(&self) {
        self.uncounted.store(false, Ordering::Relaxed);
        let mut graph = self.graph.lock();
        let KeptGraph { routed, ids, .. } = &mut *graph;
        for routed in routed.iter() {
            // SAFETY: the graph is kept, and evaluated to its end.
            unsafe { routed.count(self.ggml(), ids) };
        }
    }

    /// Before a graph is dropped or evaluated again: counts what is not counted yet.
    fn count_before(&self) {
        if self.uncounted.load(Ordering::Relaxed) {
            self.synchronize();
            self.count();
        }
    }

    /// Leaves a function of ggml after which nothing runs.
    pub fn rest(&self) {
        self.settle(IDLE);
    }

    fn settle(&self, state: u32) {
        self.state.store(state, Ordering::SeqCst);
        ENDED.fetch_add(u64::from(state == IDLE), Ordering::Relaxed);
        if barrier::is_waiting() {
            barrier::changed();
        }
    }

    /// Makes libllama build its graph again if it is from before a switch, or once to
    /// see that it does.
    fn void_if_stale(&self) {
        let flag = |flag: &AtomicBool| flag.load(Ordering::Relaxed);
        if !flag(&self.kept) || flag(&self.simple) {
            return;
        }
        let graph = self.graph.lock();
        let stale = self.generation.load(Ordering::Relaxed) != barrier::generation();
        if let Some(input) = graph.input
            && (stale || barrier::is_waiting() || !graph.tried)
            && !flag(&self.voided)
        {
            let layout = &self.ggml().layout;
            // SAFETY: the host keeps the graph, and its thread is here and not in it.
            unsafe {
                if layout.read::<i64>(input.tensor, layout.ne) == input.extent {
                    layout.write(input.tensor, layout.ne, 0i64);
                    self.voided.store(true, Ordering::Relaxed);
                }
            }
        }
    }

    /// Gives an input its extent back: the host kept the graph all the same.
    fn restore_if_voided(&self) {
        if !self.voided.swap(false, Ordering::Relaxed) {
            return;
        }
        let mut graph = self.graph.lock();
        if let Some(input) = graph.input {
            let layout = &self.ggml().layout;
            // SAFETY: the host is about to evaluate the graph that it kept.
            unsafe { layout.write(input.tensor, layout.ne, input.extent) };
            graph.tried = true;
            self.renewable.store(false, Ordering::SeqCst);
        }
    }

    /// Takes note of the graph that the scheduler is about to split and allocate, and
    /// whether it keeps it.
    ///
    /// # Safety
    ///
    /// `sched` and `graph` are live and of this copy of ggml.
    pub unsafe fn allocated(&self, sched: *mut Sched, graph: *mut Graph, keeps: bool) {
        // SAFETY: as the caller vouches.
        let seen = unsafe { look_at(self.ggml(), graph) };
        let (backends, devices, on_cpu) = backends(self.ggml(), sched);
        let reads = models::found_in_graph(&devices, &seen.weights);
        // Known only now: the first graph of a model completes its registration.
        let views_weights = seen
            .viewed
            .iter()
            .any(|&viewed| models::is_registered(viewed));
        seen.kept_views.iter().copied().for_each(models::note_view);
        let mut routed: Vec<Routed> = Vec::new();
        if Config::get().traces() {
            for weight in seen.weights.iter().filter(|weight| !weight.ids.is_null()) {
                if !routed.iter().any(|routed| routed.is_of(weight.ids)) {
                    // SAFETY: the graph is not yet allocated.
                    routed.extend(unsafe { models::keep_ids(weight.tensor, weight.ids) });
                }
            }
        }
        let mut known = self.graph.lock();
        if let Some(extent) = known.renewing.take() {
            // Another number of tokens would have made a new graph anyway.
            if seen.input.is_some_and(|input| input.extent == extent) {
                RENEWED.fetch_add(1, Ordering::Relaxed);
                known.tried = true;
                self.renewable.store(true, Ordering::SeqCst);
            }
        }
        known.input = seen.input;
        known.routed = routed;
        known.backends = backends;
        self.counts
            .store(keeps && !known.routed.is_empty(), Ordering::Relaxed);
        self.voided.store(false, Ordering::Relaxed);
        let simple = on_cpu && !views_weights;
        self.simple.store(simple, Ordering::SeqCst);
        self.reads.store(reads.bits(), Ordering::SeqCst);
        // A view copied the type of its weight when the host made it.
        let built_in = match views_weights {
            true => self.begun_in.load(Ordering::Relaxed),
            false => barrier::generation(),
        };
        self.generation.store(built_in, Ordering::Relaxed);
        self.kept.store(keeps, Ordering::SeqCst);
    }
}

/// The backends of a scheduler, their devices, and whether all of them are the CPU.
fn backends(ggml: &Ggml, sched: *mut Sched) -> (Vec<usize>, Vec<*mut Device>, bool) {
    let f = &ggml.f;
    // SAFETY: a live scheduler has as many backends as it says.
    let (backends, devices): (Vec<usize>, Vec<*mut Device>) = unsafe {
        let count = (f.ggml_backend_sched_get_n_backends)(sched);
        (0..count)
            .map(|i| (f.ggml_backend_sched_get_backend)(sched, i))
            .map(|backend| (backend as usize, (f.ggml_backend_get_device)(backend)))
            .unzip()
    };
    // SAFETY: live devices.
    let is_cpu = |device: &*mut Device| unsafe {
        !device.is_null() && (f.ggml_backend_dev_type)(*device) == DEVICE_CPU
    };
    let on_cpu = devices.iter().all(is_cpu);
    (backends, devices, on_cpu)
}

/// A weight that a graph reads.
pub struct UsedWeight {
    /// The tensor.
    pub tensor: *mut Tensor,
    /// The operation that reads it.
    pub op: i32,
    /// The routed ids, when it reads experts; else null.
    pub ids: *mut Tensor,
}

/// What is to be known of a graph.
struct Seen {
    input: Option<CountedInput>,
    weights: Vec<UsedWeight>,
    /// Weights of which nodes are views.
    viewed: Vec<*mut Tensor>,
    /// Weights of which there are views that outlive the graph.
    kept_views: Vec<*mut Tensor>,
}

/// # Safety
///
/// A live graph of this copy.
unsafe fn look_at(ggml: &Ggml, graph: *mut Graph) -> Seen {
    let (f, layout) = (&ggml.f, &ggml.layout);
    let range = models::addresses();
    let is_weight = |tensor: *mut Tensor| range.contains(&(tensor as usize));
    let mut seen = Seen {
        input: None,
        weights: Vec::new(),
        viewed: Vec::new(),
        kept_views: Vec::new(),
    };
    // SAFETY: nodes of a live graph are live tensors, and so are their sources.
    unsafe {
        let count: c_int = (f.ggml_graph_n_nodes)(graph);
        for i in 0..count {
            let node = (f.ggml_graph_node)(graph, i);
            let op: i32 = layout.read(node, layout.op);
            let viewed: *mut Tensor = layout.read(node, layout.view_src);
            for source in layout.sources(node) {
                // What reads a view of a weight reads the weight; making the view does not.
                let weight = match is_weight(source) {
                    true => source,
                    false => layout.read(source, layout.view_src),
                };
                if is_weight(weight) && weight != viewed {
                    seen.weights.push(UsedWeight {
                        tensor: weight,
                        op,
                        // GGML_OP_MUL_MAT_ID has weights, activations, ids as sources.
                        ids: match op == ggml.ops.mul_mat_id {
                            true => layout.read(node, layout.src + 16),
                            false => std::ptr::null_mut(),
                        },
                    });
                }
                let flags: i32 = layout.read(source, layout.flags);
                if flags & FLAG_INPUT != 0 && seen.input.is_none() {
                    let name = CStr::from_ptr((f.ggml_get_name)(source));
                    seen.input = COUNTED_INPUTS.contains(&name).then(|| CountedInput {
                        tensor: source,
                        extent: layout.read(source, layout.ne),
                    });
                }
            }
            if is_weight(viewed) {
                seen.viewed.push(viewed);
                // A view of this graph has no memory before the graph is allocated.
                if !layout.read::<*mut Buffer>(node, layout.buffer).is_null() {
                    seen.kept_views.push(viewed);
                }
            }
        }
    }
    seen
}
