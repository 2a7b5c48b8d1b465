//! The expert trace: which experts the evaluations of a model use.
//!
//! The routed ids are an operand of each matrix product over experts. Other tensors of the
//! graph reuse their memory, unless the ids are marked as outputs before the graph is
//! allocated. Marked ids of all layers are read together after the evaluation, which does
//! not slow it down. The projections gate, up and down share one tensor of ids, which is
//! counted once.

use std::io::Write;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use llama_sidecar::config::Config;
use llama_sidecar::experts::{ExpertIndex, ExpertName};
use llama_sidecar::logger::REQUESTED;
use llama_sidecar::protocol::Event;
use llama_sidecar::trace::{ExpertLayout, Ids, ModelMeta, Trace, to_json, to_text, write};
use parking_lot::{Mutex, RwLock};
use serde_json::Value;

use crate::barrier::{self, SLOTS};
use crate::capability::Capability;
use crate::ggml::{Ggml, Tensor};
use crate::graph;
use crate::models::{self, Model};
use crate::routes::{GraphRoutes, Queue};
use crate::saliency::{GraphSaliency, ModelSaliency};
use crate::sched::{Allocated, Scheduler};
use crate::{journal, thread};

/// The expert trace, as a capability.
pub struct ExpertTrace;

/// Counters of one model.
struct ModelTrace {
    /// The number of the model.
    model: u64,
    counters: Trace,
    about: ModelMeta,
    /// The name of the tensor that is logged for each layer, by position.
    names: Mutex<Vec<String>>,
    /// Takes its routes, if they are written.
    routes: Option<Arc<Queue>>,
    /// The saliency of its experts, if it is wanted.
    saliency: Option<Arc<ModelSaliency>>,
}

/// Experts of a layer that an evaluation used; to be logged.
struct Used {
    trace: Arc<ModelTrace>,
    layer: usize,
    experts: Vec<u32>,
}

/// Entries to be logged, at most [`MOST_USED`]; further ones are dropped.
static USED: Mutex<Vec<Used>> = Mutex::new(Vec::new());
const MOST_USED: usize = 100_000;
/// How long the end of the process waits for a running write.
const LONGEST_WRITE: Duration = Duration::from_secs(2);
/// How often names are logged.
const NAMES_EVERY: Duration = Duration::from_millis(200);

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
    graph: Mutex<TracedGraph>,
}

/// Used by the thread that evaluates.
struct TracedGraph {
    /// Routed ids to count after each evaluation.
    routed: Vec<Routed>,
    /// The buffer that they are copied to.
    ids: Vec<u8>,
    routes: GraphRoutes,
    saliency: GraphSaliency,
    /// Addresses of the backends that evaluate the graph.
    backends: Vec<usize>,
}

/// By the number of the scheduler.
static SCHEDULERS: [SchedulerTrace; SLOTS] = [const { SchedulerTrace::new() }; SLOTS];
/// The counters of all models, also of freed ones.
static TRACES: RwLock<Vec<Arc<ModelTrace>>> = RwLock::new(Vec::new());

impl Capability for ExpertTrace {
    fn is_enabled(&self) -> bool {
        Config::get().traces()
    }

    fn start(&self) {
        let config = Config::get();
        if config.trace_names {
            thread::spawn("llama-sidecar-n", log_names);
        }
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
        if let Some(trace) = ModelTrace::of(model) {
            trace.counters.end_locality();
        }
    }

    fn graph_allocated(&self, scheduler: Scheduler, graph: &Allocated, keeps: bool) {
        if !self.is_enabled() {
            return;
        }
        let mut routed: Vec<Routed> = Vec::new();
        for (weight, ids) in graph.reads.routed() {
            if !routed.iter().any(|routed| routed.ids == ids) {
                // SAFETY: the graph is live and not yet allocated.
                routed.extend(unsafe { keep_ids(weight, ids) });
            }
        }
        let of = &SCHEDULERS[scheduler.number()];
        of.counts
            .store(keeps && !routed.is_empty(), Ordering::Relaxed);
        let mut known = of.graph.lock();
        let trace = routed.first().map(|routed| routed.trace.clone());
        let queue = trace.as_ref().and_then(|trace| trace.routes.clone());
        let saliency = trace.as_ref().and_then(|trace| trace.saliency.clone());
        // SAFETY: as above.
        unsafe {
            let ggml = scheduler.ggml();
            known.routes.renew(queue, ggml, graph.graph);
            known.saliency.renew(saliency, ggml, graph.graph);
        }
        known.routed = routed;
        known.backends.clone_from(&graph.backends.addresses);
    }

    fn graph_dropped(&self, scheduler: Scheduler) {
        count_pending(scheduler);
        let mut graph = SCHEDULERS[scheduler.number()].graph.lock();
        graph.routed.clear();
        graph.routes.clear();
        graph.saliency.clear();
    }

    fn evaluation_begun(&self, scheduler: Scheduler) {
        count_pending(scheduler);
        let of = &SCHEDULERS[scheduler.number()];
        let counts = of.counts.load(Ordering::Relaxed);
        of.uncounted.store(counts, Ordering::Relaxed);
        if counts {
            // SAFETY: the scheduler is about to evaluate its graph, whose inputs are set.
            unsafe { of.graph.lock().routes.read_inputs(scheduler.ggml()) };
        }
    }

    fn evaluation_ended(&self, scheduler: Scheduler) {
        let of = &SCHEDULERS[scheduler.number()];
        if of.uncounted.swap(false, Ordering::Relaxed) {
            of.count(scheduler);
        }
    }

    fn evaluation_failed(&self, scheduler: Scheduler) {
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
        for of in &SCHEDULERS[..barrier::slots().len()] {
            if of.uncounted.load(Ordering::Relaxed) && of.graph.lock().backends.contains(&backend) {
                of.uncounted.store(false, Ordering::Relaxed);
            }
        }
    }

    fn scheduler_freed(&self, scheduler: Scheduler) {
        let of = &SCHEDULERS[scheduler.number()];
        of.uncounted.store(false, Ordering::Relaxed);
        of.counts.store(false, Ordering::Relaxed);
        *of.graph.lock() = TracedGraph::EMPTY;
    }

    fn finish(&self) {
        if self.is_enabled() {
            write_without_sigpipe();
        }
    }
}

/// Counts the ids of the last evaluation before its graph is dropped or evaluated again.
fn count_pending(scheduler: Scheduler) {
    let of = &SCHEDULERS[scheduler.number()];
    if of.uncounted.load(Ordering::Relaxed) {
        scheduler.synchronize();
        of.uncounted.store(false, Ordering::Relaxed);
        of.count(scheduler);
    }
}

/// Marks the ids that route to a weight, so that they can be counted after the evaluation;
/// `None` when there is nothing to count.
///
/// # Safety
///
/// A weight of a live graph that is not yet allocated.
unsafe fn keep_ids(weight: *mut Tensor, ids: *mut Tensor) -> Option<Routed> {
    let (model, tensor) = models::find(weight)?;
    // Another thread may have found the model a moment before it is reported as complete.
    let trace = ModelTrace::of(&model).or_else(|| ModelTrace::register(&model))?;
    let name = model.name(tensor).to_str().ok()?;
    // SAFETY: as the caller ensures.
    unsafe { trace.keep_ids(model.ggml, name, ids) }
}

impl TracedGraph {
    const EMPTY: TracedGraph = TracedGraph {
        routed: Vec::new(),
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
            graph: Mutex::new(TracedGraph::EMPTY),
        }
    }

    /// Whether any of the routed ids lie in this memory.
    fn has_ids_in(&self, range: &Range<usize>) -> bool {
        let graph = self.graph.lock();
        let mut ids = graph.routed.iter().map(|routed| routed.ids as usize);
        ids.any(|ids| range.contains(&ids))
    }

    /// Counts the experts of an evaluation whose backends are done.
    fn count(&self, scheduler: Scheduler) {
        let ggml = scheduler.ggml();
        let mut graph = self.graph.lock();
        let TracedGraph {
            routed,
            ids,
            routes,
            saliency,
            ..
        } = &mut *graph;
        routes.begin();
        for routed in routed.iter() {
            // SAFETY: the graph is kept, and evaluated to its end.
            unsafe {
                if let Some(ids) = routed.read(ggml, ids) {
                    routed.count(&ids);
                    routes.add(ggml, routed.layer, &ids);
                    saliency.add(ggml, routed.layer, &ids);
                }
            }
        }
        routes.end(scheduler.number());
    }
}

impl ModelTrace {
    /// Returns the counters of a model that is registered.
    fn of(model: &Model) -> Option<Arc<ModelTrace>> {
        let traces = TRACES.read();
        let of_model = traces.iter().find(|trace| trace.model == model.number);
        of_model.cloned()
    }

    /// Adds counters for the experts of a model, once; `None` if it has no experts.
    fn register(model: &Model) -> Option<Arc<ModelTrace>> {
        let files = || model.files.iter().map(|file| &file.gguf);
        let layout = ExpertLayout::of(&ExpertIndex::of(files()));
        if layout.layers().is_empty() {
            return None;
        }
        let mut traces = TRACES.write();
        let registered = traces.iter().find(|trace| trace.model == model.number);
        if let Some(trace) = registered {
            return Some(trace.clone());
        }
        let about = ModelMeta::of(files());
        let config = Config::get();
        let path = |path: &Option<PathBuf>| Some(numbered(path.as_deref()?, traces.len()));
        let routes = path(&config.trace_routes)
            .and_then(|path| Queue::new(model, path, &about, layout.layers()));
        let saliency =
            path(&config.trace_saliency).map(|path| ModelSaliency::new(path, &about, &layout));
        let trace = Arc::new(ModelTrace {
            model: model.number,
            routes,
            saliency,
            names: Mutex::new(vec![String::new(); layout.layers().len()]),
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
    ) -> Option<Routed> {
        let layer = ExpertName::parse(weight)?.layer;
        let layer = self.counters.layout().position(layer)?;
        weight.clone_into(&mut self.names.lock()[layer]);
        // SAFETY: as the caller ensures.
        unsafe { graph::keep(ggml, ids) };
        Some(Routed {
            ids,
            trace: self.clone(),
            layer,
        })
    }
}

impl Routed {
    /// Reads the ids of an evaluation that has ended; `None` where there are none to count.
    ///
    /// # Safety
    ///
    /// The graph is live and its backends are done.
    unsafe fn read<'a>(&self, ggml: &Ggml, buffer: &'a mut Vec<u8>) -> Option<Ids<'a>> {
        // SAFETY: as the caller ensures.
        let ids = unsafe { graph::read_matrix(ggml, self.ids, 0, buffer) }?;
        // libllama warms a model up by routing to all experts: that is not counted.
        let expected = self.trace.about.experts_used as usize;
        (expected == 0 || ids.used <= expected).then_some(ids)
    }

    /// Counts ids.
    fn count(&self, ids: &Ids<'_>) {
        self.trace.counters.record_batch(self.layer, ids);
        if Config::get().trace_names {
            self.note_names(ids);
        }
    }

    /// Keeps the experts of an evaluation for the thread that logs names.
    fn note_names(&self, ids: &Ids<'_>) {
        let places = (0..ids.tokens).flat_map(|token| (0..ids.used).map(move |used| (token, used)));
        let mut experts: Vec<u32> = places
            .filter_map(|(token, used)| u32::try_from(ids.get(token, used)?).ok())
            .collect();
        experts.sort_unstable();
        experts.dedup();
        let mut used = USED.lock();
        if used.len() < MOST_USED {
            used.push(Used {
                trace: self.trace.clone(),
                layer: self.layer,
                experts,
            });
        }
    }
}

/// Logs the names of experts as evaluations use them; for a thread of its own.
fn log_names() {
    while !barrier::is_shut() {
        std::thread::sleep(NAMES_EVERY);
        print_names();
    }
}

fn print_names() {
    // The lock is not held while messages are written: evaluations take it.
    let all = std::mem::take(&mut *USED.lock());
    for used in all {
        let (layer, _) = used.trace.counters.layout().layers()[used.layer];
        let name = used.trace.names.lock()[used.layer].clone();
        for expert in used.experts {
            log::info!(target: REQUESTED, "[EXPERT-TRACE] Layer {layer}, Expert {expert}: {name}[{expert}]");
        }
    }
}

/// Returns the counts so far, model by model.
pub fn as_json() -> Vec<Value> {
    let traces = TRACES.read().clone();
    let json =
        |trace: &Arc<ModelTrace>| to_json(&trace.about, &trace.counters.snapshot_with_locality());
    traces.iter().map(json).collect()
}

/// Returns how many experts evaluations routed to, model by model.
pub fn activations() -> Vec<u64> {
    let traces = TRACES.read().clone();
    let all = |trace: &Arc<ModelTrace>| trace.counters.snapshot().activations();
    traces.iter().map(all).collect()
}

/// Sets all counts to zero.
pub fn reset() {
    for trace in TRACES.read().iter() {
        trace.counters.reset();
    }
}

/// Writes the trace at the end of the process. A reader that is gone must not end the
/// process by SIGPIPE, which would change its exit status.
fn write_without_sigpipe() {
    let mut pipe = std::mem::MaybeUninit::<libc::sigset_t>::uninit();
    let mut before = std::mem::MaybeUninit::<libc::sigset_t>::uninit();
    let now = libc::timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    // SAFETY: sets that are filled before they are read; a pending SIGPIPE is taken before
    // the mask is restored.
    unsafe {
        libc::sigemptyset(pipe.as_mut_ptr());
        libc::sigaddset(pipe.as_mut_ptr(), libc::SIGPIPE);
        libc::pthread_sigmask(libc::SIG_BLOCK, pipe.as_ptr(), before.as_mut_ptr());
        write_all();
        libc::sigtimedwait(pipe.as_ptr(), std::ptr::null_mut(), &now);
        libc::pthread_sigmask(libc::SIG_SETMASK, before.as_ptr(), std::ptr::null_mut());
    }
}

fn write_all() {
    let config = Config::get();
    print_names();
    // The process ends: a thread that holds the lock may never release it.
    let Some(traces) = TRACES.try_read() else {
        return;
    };
    if config.trace_summary {
        for trace in traces.iter() {
            let snapshot = trace.counters.snapshot();
            let text = to_text(&trace.about, &snapshot, config.trace_per_layer);
            // Fails when the reader is gone.
            let _ = std::io::stderr().write_all(text.as_bytes());
        }
    }
    write_outputs(&traces);
}

/// Writes the output of every model at an interval; for a thread of its own.
fn write_every(period: Duration) {
    while !barrier::is_shut() {
        std::thread::sleep(period);
        let traces = TRACES.read().clone();
        if !barrier::is_shut() {
            write_outputs(&traces);
        }
    }
}

fn write_outputs(traces: &[Arc<ModelTrace>]) {
    let Some(output) = &Config::get().trace_output else {
        return;
    };
    // The process may end while the other thread writes.
    static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());
    let _turn = ONE_AT_A_TIME.try_lock_for(LONGEST_WRITE);
    for (number, trace) in traces.iter().enumerate() {
        let path = numbered(output, number);
        let written = write(
            &path,
            &trace.about,
            &trace.counters.snapshot_with_locality(),
        );
        journal::note(|| Event::Trace {
            path: path.display().to_string(),
            error: written.as_ref().err().map(|error| error.to_string()),
        });
        if let Err(error) = written {
            log::error!(
                "LLAMA_EXPERT_TRACE_OUTPUT: cannot write {}: {error}; the counts are lost except for the summary of LLAMA_EXPERT_TRACE_STATS=1",
                path.display()
            );
        }
    }
}

/// Returns the path for a model: with a number from the second model on.
fn numbered(path: &Path, number: usize) -> PathBuf {
    if number == 0 {
        return path.to_owned();
    }
    let stem = path.file_stem().unwrap_or_default().to_string_lossy();
    let name = match path.extension() {
        Some(extension) => format!("{stem}-{}.{}", number + 1, extension.to_string_lossy()),
        None => format!("{stem}-{}", number + 1),
    };
    path.with_file_name(name)
}
