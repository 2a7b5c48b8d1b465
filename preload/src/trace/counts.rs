//! The expert trace: which experts the evaluations of a model use.
//!
//! The routed ids are an operand of each matrix product over experts. Other tensors of the
//! graph reuse their memory, unless the ids are marked as outputs before the graph is
//! allocated. Marked ids of all layers are read together after the evaluation, which does
//! not slow it down. The projections gate, up and down share one tensor of ids, which is
//! counted once.
//!
//! Warm-ups are not counted. In older versions of llama.cpp, they use all experts of a layer. In newer
//! ones, they are the first evaluation of a context, after which the program calls
//! `llama_perf_context_reset`: where a program has that call, a short first evaluation is counted
//! when the next one begins.
//!
//! Layers that are evaluated and never counted are found and reported: a program may read experts
//! in a way that has no routed ids of the model's own tensors.

use std::cell::Cell;
use std::collections::BTreeSet;
use std::ffi::c_void;
use std::ops::Range;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use parking_lot::{Mutex, RwLock};
use serde_json::Value;
use sidecar_core::config::{Config, OwnPath};
use sidecar_core::experts::{ExpertIndex, ExpertName};
use sidecar_core::files;
use sidecar_core::gguf::FileId;
use sidecar_core::logger::print;
use sidecar_core::protocol::{Event, NoEffect, Uncounted};
use sidecar_core::summary;
use sidecar_core::text;
use sidecar_core::trace::{
    ExpertLayout, ExpertNames, Ids, ModelMeta, Trace, enabled, log_unwritten, numbered,
    print_exported, print_summary, to_json, write,
};

use crate::ggml::{Ggml, Tensor};
use crate::loader::caller::Caller;
use crate::loader::redirect::Redirection;
use crate::process::{journal, thread};
use crate::program::barrier;
use crate::program::capability::{Capability, Effect};
use crate::program::graph::{self, Outputs, UsedWeight};
use crate::program::models::{self, Model};
use crate::program::sched::{Allocated, SLOTS, Scheduler};
use crate::trace::routes::{self, GraphRoutes, Queue};
use crate::trace::saliency::{self, GraphSaliency, ModelSaliency};

/// Reports about what is not counted.
static EFFECT: Effect = Effect::of(NoEffect::TRACE);

/// The expert trace, as a capability.
pub struct ExpertTrace;

/// Counters of all loads of one model.
struct ModelTrace {
    /// Its files: a load of the same files goes on with these counters.
    content: Content,
    /// The numbers of its loads that are not freed.
    loads: Mutex<Vec<u64>>,
    counters: Trace,
    about: ModelMeta,
    /// By the position of the layer.
    evaluations: Box<[Evaluations]>,
    /// The names of its experts, if they are printed.
    names: Option<ExpertNames>,
    /// The file of its routes, if they are written.
    routes_path: Option<PathBuf>,
    /// Takes its routes once it is known how many experts a token uses.
    routes: OnceLock<Option<Arc<Queue>>>,
    /// The saliency of its experts, if it is wanted.
    saliency: Option<Arc<ModelSaliency>>,
    /// Warm-ups that used no more experts than other evaluations.
    left_out: AtomicU64,
    /// Whether the output file does not have its counts.
    is_changed: AtomicBool,
    /// Whether the last write of the output file failed.
    has_failed: AtomicBool,
}

/// The files of a model, and their versions.
type Content = Vec<(PathBuf, FileId)>;

/// Numbers of evaluations of a layer.
#[derive(Default)]
struct Evaluations {
    /// Experts per token of the last one that was counted.
    used: AtomicU64,
    /// Those that were counted.
    counted: AtomicU64,
    /// Without known ids.
    unknown: AtomicU64,
    /// With all experts of the layer, as a warm-up.
    warm_ups: AtomicU64,
}

/// How many evaluations of a layer with all of its experts are taken for a warm-up, at most.
const WARM_UPS: u64 = 2;
/// How long the end of the process waits for a running write.
const LONGEST_WRITE: Duration = Duration::from_secs(2);

/// The routed ids of one layer in a graph.
struct Routed {
    ids: *mut Tensor,
    trace: Arc<ModelTrace>,
    /// Position of the layer.
    layer: usize,
}

// SAFETY: the tensor is only read by the thread that evaluates, while it keeps the graph.
unsafe impl Send for Routed {}

/// What is counted in the evaluations of one scheduler.
struct SchedulerTrace {
    /// Whether its graph has routed ids to count.
    counts: AtomicBool,
    /// Whether those of the last evaluation are still to be counted.
    uncounted: AtomicBool,
    /// Whether an evaluation has ended.
    has_evaluated: AtomicBool,
    graph: Mutex<TracedGraph>,
}

/// Used by the thread that evaluates.
struct TracedGraph {
    /// Routed ids to count after each evaluation.
    routed: Vec<Routed>,
    /// The layers, by position, that the graph evaluates without such ids.
    unknown: Option<(Arc<ModelTrace>, Vec<usize>)>,
    /// The buffer that they are copied to.
    ids: Vec<u8>,
    routes: GraphRoutes,
    saliency: GraphSaliency,
    /// Addresses of the backends that evaluate the graph.
    backends: Vec<usize>,
}

/// By the number of the scheduler.
static SCHEDULERS: [SchedulerTrace; SLOTS] = [const { SchedulerTrace::new() }; SLOTS];
/// The counters of all models, also of freed ones, in the order of their output files.
static TRACES: RwLock<Vec<Arc<ModelTrace>>> = RwLock::new(Vec::new());

impl Capability for ExpertTrace {
    fn is_enabled(&self) -> bool {
        Config::get().traces()
    }

    fn start(&self) {
        let config = Config::get();
        print(&enabled(config));
        if let Some(period) = config.trace_every {
            thread::spawn("llama-sidecar-w", move || write_every(period));
        }
    }

    fn model_complete(&self, model: &Arc<Model>) {
        if self.is_enabled() {
            ModelTrace::register(model);
        }
    }

    fn model_freed(&self, model: &Model) {
        let Some(trace) = ModelTrace::of(model) else {
            return;
        };
        let mut loads = trace.loads.lock();
        loads.retain(|number| *number != model.number);
        if loads.is_empty() {
            trace.counters.end_locality();
            if let Some(Some(queue)) = trace.routes.get() {
                queue.rest();
            }
        }
    }

    fn graph_allocated(&self, scheduler: &Scheduler, graph: &Allocated, keeps: bool) {
        if !self.is_enabled() {
            return;
        }
        let mut routed: Vec<Routed> = Vec::new();
        for (weight, ids) in graph.reads.routed() {
            if !routed.iter().any(|routed| routed.ids == ids) {
                // SAFETY: the graph is live and not yet allocated.
                routed.extend(unsafe { keep_ids(weight, ids, &graph.outputs) });
            }
        }
        let unknown = not_routed(&graph.reads.weights, &routed);
        let counts = keeps && (!routed.is_empty() || unknown.is_some());
        let of = &SCHEDULERS[scheduler.number()];
        of.counts.store(counts, Ordering::Relaxed);
        // Its graph was dropped by a call that did not arrive: only a first evaluation waits for so long on the CPU.
        of.leave_out();
        let mut known = of.graph.lock();
        // Counts add up; routes and saliency have a place for one set of experts in each layer.
        let several = several_in_a_layer(&routed);
        if let Some(routed) = several {
            routed.refuse_several();
        }
        let ggml = scheduler.ggml();
        // Rows of routes have places for the most experts of a layer.
        // SAFETY: the graph is live.
        let most = routed
            .iter()
            .rev()
            .max_by_key(|routed| unsafe { routed.used(ggml) });
        let most = most.filter(|_| several.is_none());
        // SAFETY: as above.
        let queue = most.and_then(|routed| unsafe { routed.routes(ggml) });
        let saliency = most.and_then(|routed| routed.trace.saliency.clone());
        // SAFETY: as above.
        unsafe {
            known.routes.renew(queue, ggml, graph);
            known.saliency.renew(saliency, ggml, graph);
        }
        known.routed = routed;
        known.unknown = unknown;
        known.backends.clone_from(&graph.backends.addresses);
    }

    fn graph_dropped(&self, scheduler: &Scheduler) {
        count_pending(scheduler);
        let mut graph = SCHEDULERS[scheduler.number()].graph.lock();
        graph.routed.clear();
        graph.unknown = None;
        graph.routes.clear();
        graph.saliency.clear();
    }

    fn evaluation_begun(&self, scheduler: &Scheduler) {
        count_pending(scheduler);
        FIRST.set(None);
        let of = &SCHEDULERS[scheduler.number()];
        let counts = of.counts.load(Ordering::Relaxed);
        of.uncounted.store(counts, Ordering::Relaxed);
        if counts {
            // SAFETY: the scheduler is about to evaluate its graph, whose inputs are set.
            unsafe { of.graph.lock().routes.read_inputs(scheduler.ggml()) };
        }
    }

    fn evaluation_ended(&self, scheduler: &Scheduler) {
        let of = &SCHEDULERS[scheduler.number()];
        if !of.uncounted.load(Ordering::Relaxed) {
            return;
        }
        let is_first = !of.has_evaluated.swap(true, Ordering::Relaxed);
        if is_first && RESET.before() != 0 && of.may_be_warm_up(scheduler.ggml()) {
            FIRST.set(Some(scheduler.number()));
            return;
        }
        of.uncounted.store(false, Ordering::Relaxed);
        of.count(scheduler);
    }

    fn evaluation_failed(&self, scheduler: &Scheduler) {
        let of = &SCHEDULERS[scheduler.number()];
        of.uncounted.store(false, Ordering::Relaxed);
    }

    fn tensors_freed(&self, addresses: &Range<usize>) {
        for scheduler in Scheduler::all() {
            let of = &SCHEDULERS[scheduler.number()];
            if of.uncounted.load(Ordering::Relaxed) && of.has_ids_in(addresses) {
                count_pending(scheduler);
            }
        }
    }

    fn backend_freed(&self, backend: usize) {
        for of in &SCHEDULERS[..Scheduler::all().count()] {
            if of.uncounted.load(Ordering::Relaxed) && of.graph.lock().backends.contains(&backend) {
                of.uncounted.store(false, Ordering::Relaxed);
            }
        }
    }

    fn scheduler_freed(&self, scheduler: &Scheduler) {
        let of = &SCHEDULERS[scheduler.number()];
        of.uncounted.store(false, Ordering::Relaxed);
        of.counts.store(false, Ordering::Relaxed);
        of.has_evaluated.store(false, Ordering::Relaxed);
        *of.graph.lock() = TracedGraph::EMPTY;
    }

    fn finish(&self) {
        if self.is_enabled() {
            write_all();
        }
    }

    fn no_effect(&self) -> Vec<NoEffect> {
        // The process ends: a thread that holds the lock may never release it.
        let Some(traces) = TRACES.try_read() else {
            return Vec::new();
        };
        let obstacles = EFFECT.obstacles();
        if !obstacles.is_empty() {
            return obstacles;
        }
        if traces.is_empty() {
            return vec![EFFECT.report(NoEffect::NO_EXPERTS.into(), false)];
        }
        let uncounted = traces.iter().filter_map(|trace| trace.uncounted());
        let missing: Vec<_> = uncounted
            .map(|layers| EFFECT.report(summary::uncounted(&layers), false))
            .collect();
        let is_empty = |trace: &Arc<ModelTrace>| trace.counters.snapshot().activations() == 0;
        if missing.is_empty() && !EFFECT.is_seen() && traces.iter().all(is_empty) {
            let sentence = "nothing was counted: no evaluation has ended besides warm-ups; let the program generate a token";
            return vec![EFFECT.report(sentence.into(), true)];
        }
        missing
    }
}

/// The call of llama.cpp's programs after their warm-up.
pub static RESET: Redirection = Redirection::of(c"llama_perf_context_reset");
/// The most tokens of a warm-up: the first and the last one of a text.
const WARM_UP_TOKENS: i64 = 2;

thread_local! {
    /// The number of the scheduler whose first evaluation ended last on this thread, and may have
    /// been a warm-up.
    static FIRST: Cell<Option<usize>> = const { Cell::new(None) };
}

/// Prepares for the warm-up of a program that has opened a file of a model.
pub fn file_opened(caller: &Caller) {
    if ExpertTrace.is_enabled() && caller.is_llama() {
        let real = caller.symbol(RESET.name()) as usize;
        // SAFETY: the type that llama.h gives; libllama stays loaded once its ggml is known, and
        // programs do not unload what calls it while they load a model.
        unsafe { RESET.install_in_all(performance_reset as *const () as usize, real) };
    }
}

/// Replaces `llama_perf_context_reset`.
unsafe extern "C-unwind" fn performance_reset(context: *mut c_void) {
    if let Some(number) = FIRST.take() {
        SCHEDULERS[number].leave_out();
    }
    // SAFETY: the function of this type that was called before.
    unsafe {
        let real: unsafe extern "C-unwind" fn(*mut c_void) = std::mem::transmute(RESET.before());
        real(context);
    }
}

/// Counts the ids of the last evaluation before its graph is dropped or evaluated again.
fn count_pending(scheduler: &Scheduler) {
    let of = &SCHEDULERS[scheduler.number()];
    if of.uncounted.load(Ordering::Relaxed) {
        scheduler.synchronize();
        of.uncounted.store(false, Ordering::Relaxed);
        of.count(scheduler);
    }
}

/// Returns ids of a layer that has others in the same graph.
fn several_in_a_layer(routed: &[Routed]) -> Option<&Routed> {
    let mut with_earlier = routed.iter().enumerate();
    let found = with_earlier.find(|(at, of)| {
        routed[..*at]
            .iter()
            .any(|earlier| earlier.layer == of.layer)
    });
    found.map(|(_, routed)| routed)
}

/// Marks the ids that route to a weight, so that they can be counted after the evaluation;
/// `None` when there is nothing to count.
///
/// # Safety
///
/// A weight of a live graph that is not yet allocated.
unsafe fn keep_ids(weight: *mut Tensor, ids: *mut Tensor, outputs: &Outputs) -> Option<Routed> {
    let (model, tensor) = models::find(weight)?;
    // Another thread may have found the model a moment before it is reported as complete.
    let trace = ModelTrace::of(&model).or_else(|| ModelTrace::register(&model))?;
    let name = model.name(tensor).to_str().ok()?;
    // SAFETY: as the caller ensures.
    unsafe { trace.keep_ids(model.ggml, name, ids, outputs) }
}

/// Returns the layers of experts, by position, that a graph evaluates without routed ids of their
/// tensors: it reads other weights of theirs.
fn not_routed(weights: &[UsedWeight], routed: &[Routed]) -> Option<(Arc<ModelTrace>, Vec<usize>)> {
    let trace = match routed.first() {
        Some(routed) => routed.trace.clone(),
        None => {
            let mut models = weights
                .iter()
                .filter_map(|weight| models::find(weight.tensor));
            ModelTrace::of(&models.next()?.0)?
        }
    };
    let layout = trace.counters.layout();
    let mut layers: Vec<usize> = (0..layout.layers().len())
        .filter(|layer| routed.iter().all(|routed| routed.layer != *layer))
        .collect();
    if layers.is_empty() {
        return None;
    }
    let layer_of = |weight: &UsedWeight| {
        let (model, tensor) = models::find(weight.tensor)?;
        let name = model.name(tensor).to_str().ok()?;
        let (layer, _) = name.strip_prefix("blk.")?.split_once('.')?;
        layout.position(layer.parse().ok()?)
    };
    let read: BTreeSet<usize> = weights.iter().filter_map(layer_of).collect();
    layers.retain(|layer| read.contains(layer));
    (!layers.is_empty()).then_some((trace, layers))
}

impl TracedGraph {
    const EMPTY: TracedGraph = TracedGraph {
        routed: Vec::new(),
        unknown: None,
        ids: Vec::new(),
        routes: GraphRoutes::NONE,
        saliency: GraphSaliency::NONE,
        backends: Vec::new(),
    };
}

impl SchedulerTrace {
    const fn new() -> SchedulerTrace {
        SchedulerTrace {
            counts: AtomicBool::new(false),
            uncounted: AtomicBool::new(false),
            has_evaluated: AtomicBool::new(false),
            graph: Mutex::new(TracedGraph::EMPTY),
        }
    }

    /// Whether any of the routed ids lie in this memory.
    fn has_ids_in(&self, range: &Range<usize>) -> bool {
        let graph = self.graph.lock();
        let mut ids = graph.routed.iter().map(|routed| routed.ids as usize);
        ids.any(|ids| range.contains(&ids))
    }

    /// Whether the evaluation has as few tokens as a warm-up.
    fn may_be_warm_up(&self, ggml: &Ggml) -> bool {
        self.graph.lock().routed.first().is_some_and(|routed| {
            // SAFETY: the graph is kept.
            let ne: [i64; 2] = unsafe { ggml.layout.read(routed.ids, ggml.layout.ne) };
            ne[1] <= WARM_UP_TOKENS
        })
    }

    /// Leaves the last evaluation out of the counts.
    fn leave_out(&self) {
        if self.uncounted.swap(false, Ordering::Relaxed)
            && let Some(routed) = self.graph.lock().routed.first()
        {
            routed.trace.left_out.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Counts the experts of an evaluation whose backends are done.
    fn count(&self, scheduler: &Scheduler) {
        let ggml = scheduler.ggml();
        let mut graph = self.graph.lock();
        let TracedGraph {
            routed,
            unknown,
            ids,
            routes,
            saliency,
            ..
        } = &mut *graph;
        routes.begin();
        for routed in routed.iter() {
            // SAFETY: the graph is kept, and evaluated to its end.
            unsafe {
                if let Some(ids) = graph::read_matrix(ggml, routed.ids, 0, ids)
                    && !routed.is_warm_up(&ids)
                {
                    routed.count(&ids);
                    routes.add(ggml, routed.layer, &ids);
                    saliency.add(ggml, routed.layer, &ids);
                }
            }
        }
        routes.end(scheduler.number());
        if let Some((trace, layers)) = unknown {
            for layer in layers {
                let unknown = &trace.evaluations[*layer].unknown;
                unknown.fetch_add(1, Ordering::Relaxed);
            }
        }
    }
}

impl ModelTrace {
    /// Returns the counters of a model that is registered.
    fn of(model: &Model) -> Option<Arc<ModelTrace>> {
        let traces = TRACES.read();
        let has = |trace: &&Arc<ModelTrace>| trace.loads.lock().contains(&model.number);
        traces.iter().find(has).cloned()
    }

    /// Returns the counters for the experts of a model, those of earlier loads of the same files
    /// if there are any; `None` if it has no experts.
    fn register(model: &Model) -> Option<Arc<ModelTrace>> {
        let files = || model.files.iter().map(|file| &file.gguf);
        let experts = ExpertIndex::of(files());
        let layout = ExpertLayout::of(&experts);
        if layout.layers().is_empty() {
            return None;
        }
        let files_now = files().map(|file| (file.source.path().to_owned(), file.source.id()));
        let content: Content = files_now.collect();
        if let Some(unreached) = &model.unreached.trace {
            let path = text::path(&model.path);
            EFFECT.log_obstacle(format!(
                "the experts of {path} are not counted: {unreached}"
            ));
            return None;
        }
        let mut traces = TRACES.write();
        if let Some(trace) = traces.iter().find(|trace| trace.content == content) {
            let mut loads = trace.loads.lock();
            if !loads.contains(&model.number) {
                loads.push(model.number);
            }
            return Some(trace.clone());
        }
        let about = ModelMeta::of(files());
        let config = Config::get();
        let path = |path: &Option<OwnPath>| Some(numbered(&path.as_ref()?.now(), traces.len()));
        let saliency =
            path(&config.trace_saliency).map(|path| ModelSaliency::new(path, &about, &layout));
        let trace = Arc::new(ModelTrace {
            content,
            loads: Mutex::new(vec![model.number]),
            evaluations: layout
                .layers()
                .iter()
                .map(|_| Evaluations::default())
                .collect(),
            names: config.trace_names.then(|| ExpertNames::of(files())),
            routes_path: path(&config.trace_routes),
            routes: OnceLock::new(),
            saliency,
            left_out: AtomicU64::new(0),
            is_changed: AtomicBool::new(true),
            has_failed: AtomicBool::new(false),
            counters: Trace::with_locality(layout),
            about,
        });
        traces.push(trace.clone());
        Some(trace)
    }

    /// Marks the ids that route to a weight of this name, so that they outlive their
    /// graph; `None` when they route to no experts.
    ///
    /// # Safety
    ///
    /// A live tensor of this copy of ggml, in a graph that is not yet allocated.
    unsafe fn keep_ids(
        self: &Arc<Self>,
        ggml: &Ggml,
        weight: &str,
        ids: *mut Tensor,
        outputs: &Outputs,
    ) -> Option<Routed> {
        let layer = ExpertName::parse(weight)?.layer;
        let layer = self.counters.layout().position(layer)?;
        // SAFETY: as the caller ensures.
        unsafe { outputs.keep(ggml, ids) };
        Some(Routed {
            ids,
            trace: self.clone(),
            layer,
        })
    }

    /// Whether so many experts of a token in a layer are those of a warm-up: libllama warms a model
    /// up by routing to all experts.
    fn is_warm_up(&self, layer: usize, used: usize) -> bool {
        let (_, experts) = self.counters.layout().layers()[layer];
        let expected = self.about.experts_used;
        used >= experts as usize && expected != 0 && expected != u64::from(experts)
    }

    /// Returns its metadata, with the experts per token that evaluations use.
    fn about(&self) -> ModelMeta {
        let mut about = self.about.clone();
        let used = self
            .evaluations
            .iter()
            .map(|of| of.used.load(Ordering::Relaxed));
        if let Some(most) = used.max().filter(|most| *most > 0) {
            about.experts_used = most;
        }
        about
    }

    /// Returns a line with the number of evaluations that are not counted; none if all are.
    fn left_out(&self) -> String {
        let all_experts = &self.evaluations[0].warm_ups;
        let [first, all_experts] =
            [&self.left_out, all_experts].map(|count| count.load(Ordering::Relaxed));
        match first + all_experts {
            0 => String::new(),
            count => format!("[EXPERT-TRACE] Evaluations not counted, warm-ups: {count}\n"),
        }
    }

    /// Returns its layers that were evaluated and whose counts are zero; `None` without such layers.
    fn uncounted(&self) -> Option<Uncounted> {
        let counts = self.counters.snapshot();
        let mut found = Uncounted {
            path: text::path(&self.content[0].0),
            ..Uncounted::default()
        };
        let layers = counts.layers.iter().zip(&self.evaluations);
        for (layer, of) in layers.filter(|(layer, _)| layer.activations() == 0) {
            let [counted, unknown, warm_ups] = [&of.counted, &of.unknown, &of.warm_ups]
                .map(|evaluations| evaluations.load(Ordering::Relaxed));
            let (evaluations, reason) = match (unknown, warm_ups) {
                (1.., _) => (
                    unknown,
                    "the program reads these experts in a way that llama-sidecar does not know; please report the program and its options",
                ),
                (0, warm_ups) if warm_ups > WARM_UPS => (
                    warm_ups,
                    "a token used all experts of a layer, which counts as a warm-up; evaluate with fewer experts per token",
                ),
                _ if layer.tokens > 0 => (
                    counted,
                    "the routed ids are no experts of their layer; please report the program and its options",
                ),
                _ => continue,
            };
            found.layers.push(layer.layer);
            found.evaluations = found.evaluations.max(evaluations);
            found.reason = reason.into();
        }
        (!found.layers.is_empty()).then_some(found)
    }

    fn reset(&self) {
        if self.counters.snapshot().activations() > 0 {
            EFFECT.note();
        }
        self.counters.reset();
        self.is_changed.store(true, Ordering::Relaxed);
        self.left_out.store(0, Ordering::Relaxed);
        for of in &self.evaluations {
            for evaluations in [&of.counted, &of.unknown, &of.warm_ups] {
                evaluations.store(0, Ordering::Relaxed);
            }
        }
    }
}

impl Routed {
    /// Returns the experts per token in the graph.
    ///
    /// # Safety
    ///
    /// The graph is live.
    unsafe fn used(&self, ggml: &Ggml) -> usize {
        // SAFETY: as the caller ensures.
        let used: i64 = unsafe { ggml.layout.read(self.ids, ggml.layout.ne) };
        used.max(0) as usize
    }

    /// Returns what takes the routes of the graph, if they are written. A warm-up has none.
    ///
    /// # Safety
    ///
    /// The graph is live.
    unsafe fn routes(&self, ggml: &Ggml) -> Option<Arc<Queue>> {
        let trace = &self.trace;
        let path = trace.routes_path.as_ref()?;
        // SAFETY: as the caller ensures.
        let used = unsafe { self.used(ggml) };
        if trace.is_warm_up(self.layer, used) {
            return None;
        }
        let queue = || {
            let (name, layers) = (&trace.about.name, trace.counters.layout().layers());
            Queue::new(path.clone(), name, layers, used)
        };
        let queue = trace.routes.get_or_init(queue).as_ref()?;
        queue.resume();
        Some(queue.clone())
    }

    /// Reports what is not recorded of a layer with several sets of ids.
    fn refuse_several(&self) {
        let trace = &self.trace;
        let (layer, _) = trace.counters.layout().layers()[self.layer];
        if trace.routes_path.is_some() {
            routes::refuse_several(layer);
        }
        if trace.saliency.is_some() {
            saliency::refuse_several(layer);
        }
    }

    /// Whether ids are those of a warm-up, which is not counted.
    fn is_warm_up(&self, ids: &Ids<'_>) -> bool {
        let is_warm_up = self.trace.is_warm_up(self.layer, ids.used);
        let warm_ups = &self.trace.evaluations[self.layer].warm_ups;
        warm_ups.fetch_add(u64::from(is_warm_up), Ordering::Relaxed);
        is_warm_up
    }

    /// Counts ids.
    fn count(&self, ids: &Ids<'_>) {
        let of_layer = &self.trace.evaluations[self.layer];
        of_layer.used.store(ids.used as u64, Ordering::Relaxed);
        of_layer.counted.fetch_add(1, Ordering::Relaxed);
        self.trace.counters.record_batch(self.layer, ids);
        self.trace.is_changed.store(true, Ordering::Relaxed);
        if let Some(names) = &self.trace.names {
            names.print(self.layer, ids);
        }
    }
}

/// Returns the counts so far, model by model.
pub fn as_json() -> Vec<Value> {
    let traces = TRACES.read().clone();
    let json =
        |trace: &Arc<ModelTrace>| to_json(&trace.about(), &trace.counters.snapshot_with_locality());
    traces.iter().map(json).collect()
}

/// Returns how many experts evaluations routed to, model by model.
pub fn activations() -> Vec<u64> {
    let traces = TRACES.read().clone();
    let all = |trace: &Arc<ModelTrace>| trace.counters.snapshot().activations();
    traces.iter().map(all).collect()
}

/// Returns how many layers were evaluated and have counts of zero, model by model.
pub fn uncounted_layers() -> Vec<usize> {
    let traces = TRACES.read().clone();
    let layers = |trace: &Arc<ModelTrace>| {
        trace
            .uncounted()
            .map_or(0, |uncounted| uncounted.layers.len())
    };
    traces.iter().map(layers).collect()
}

/// Returns the layers of a model that were evaluated and have counts of zero.
pub fn uncounted(model: &Model) -> Option<Uncounted> {
    ModelTrace::of(model)?.uncounted()
}

/// Sets all counts to zero.
pub fn reset() {
    for trace in TRACES.read().iter() {
        trace.reset();
    }
}

/// Writes the trace at the end of the process.
fn write_all() {
    let config = Config::get();
    // The process ends: a thread that holds the lock may never release it.
    let Some(traces) = TRACES.try_read_for(LONGEST_WRITE) else {
        return;
    };
    if traces.is_empty() {
        print("[EXPERT-TRACE] no evaluated model has routed experts: nothing was counted\n");
    }
    for trace in traces.iter() {
        print_summary(config, &trace.about(), &trace.counters.snapshot());
        print(&trace.left_out());
    }
    for path in write_outputs(&traces, true) {
        print_exported(&path);
    }
    for layers in traces.iter().filter_map(|trace| trace.uncounted()) {
        log::error!("{}", summary::uncounted(&layers));
    }
}

/// Writes the output of every model at an interval; for a thread of its own.
fn write_every(period: Duration) {
    while !barrier::is_shut() {
        std::thread::sleep(period);
        let traces = TRACES.read().clone();
        if !barrier::is_shut() {
            write_outputs(&traces, false);
        }
    }
}

/// Writes the output of every model, or before the end only of those whose counts have changed.
/// Returns the paths that were written. The journal has the results at the end, and failures.
fn write_outputs(traces: &[Arc<ModelTrace>], at_end: bool) -> Vec<PathBuf> {
    let Some(output) = &Config::get().trace_output else {
        return Vec::new();
    };
    let output = output.now();
    // The process may end while the other thread writes.
    static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());
    let _turn = ONE_AT_A_TIME.try_lock_for(LONGEST_WRITE);
    let mut paths = Vec::new();
    for (number, trace) in traces.iter().enumerate() {
        if !trace.is_changed.swap(false, Ordering::Relaxed) && !at_end {
            continue;
        }
        let mut path = numbered(&output, number);
        let counts = trace.counters.snapshot_with_locality();
        let about = trace.about();
        let written = files::at_free_name(&path, |path| write(path, &about, &counts));
        let written = written.map(|(name, ())| path = name);
        let failed = written.is_err();
        let had_failed = trace.has_failed.swap(failed, Ordering::Relaxed);
        // A failure is reported once until it is written, and at the end.
        let is_reported = at_end || failed && !had_failed;
        if let Some(error) = written.as_ref().err().filter(|_| is_reported) {
            log_unwritten(&path, error);
        }
        if is_reported {
            journal::note(|| Event::Trace {
                path: text::path(&path),
                error: written.as_ref().err().map(|error| error.to_string()),
            });
        }
        if failed {
            trace.is_changed.store(true, Ordering::Relaxed);
        }
        if written.is_ok() {
            paths.push(path);
        }
    }
    paths
}
