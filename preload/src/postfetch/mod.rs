//! Post-fetch in an unmodified program: experts in host memory that a GPU multiplies are copied
//! to it early.
//!
//! llama.cpp copies experts itself, for batches from a limit on, strictly by turns: it waits for
//! the GPU, reads the ids, copies the used experts of one matrix, and multiplies. Here the copies
//! of all matrices of a layer begin when its ids are known, in a queue of their own, and those of
//! the next layer if nearly all experts are used. The program's own copies are left out where
//! they would copy the same bytes. Whatever fails, they are not left out.
//!
//! The program's calls show when what is known:
//!
//! | call of the scheduler | here |
//! |---|---|
//! | it has split and allocated a graph | [`plan`]: each copy gets memory of its own |
//! | `ggml_backend_tensor_get_async` of ids, `ggml_backend_synchronize` | copies are requested |
//! | `ggml_backend_tensor_set_async` of experts | left out if requested |
//! | `ggml_backend_graph_compute_async` of a part | the GPU waits for the copies, or the CPU computes what is not on the GPU |
//!
//! The first evaluation of a scheduler only checks that the calls come in this order.
//!
//! Modules, top to bottom:
//!
//! | module | contents |
//! |---|---|
//! | [`plan`] | the matrices that a graph reads on a GPU although they are in host memory |
//! | [`on_cpu`], [`cache`] | experts without a slot, computed by the CPU; experts that stay on a device |
//! | [`choice`] | what computes experts without a slot, by the time of evaluations |
//! | [`transfer`] | copies to a device, and the thread that issues them |
//! | [`biases`] | expert biases that stay on a device |
//! | [`instance`] | a second instance of a backend of the program |
//! | [`figures`] | figures of post-fetch in this process |
//! | [`speeds`], [`experts`], [`page_lock`] | speeds of link and memory; where experts are, for the command; page locks on mappings |

mod biases;
mod cache;
mod choice;
mod experts;
mod figures;
mod instance;
mod on_cpu;
pub mod page_lock;
mod plan;
mod speeds;
mod transfer;

use std::cell::Cell;
use std::ffi::{CStr, c_int, c_void};
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use parking_lot::{Mutex, MutexGuard};
use sidecar_core::config::{Config, PostFetchMode};
use sidecar_core::experts::{ExpertName, Projection};
use sidecar_core::protocol::{Event, NoEffect, PostFetchFigures};
use sidecar_core::summary;
use sidecar_core::trace::Ids;

use crate::ggml::{Backend, Device, Ggml, Graph, STATUS_FAILED, Sched, Tensor};
use crate::process::journal;
use crate::program::barrier;
use crate::program::capability::{Capability, Effect};
use crate::program::graph::GraphReads;
use crate::program::models::Model;
use crate::program::routing::{self, Routed};
use crate::program::sched::{Allocated, SLOTS, Scheduler};
use crate::program::{own_cache, parts};
use biases::Biases;
use cache::{Cache, Changed};
use choice::Method;
use figures::{FIGURES, Reason};
use on_cpu::Readers;
use plan::{Devices, Layer, LayerSlots, Plan};
use transfer::{Fetcher, Piece, Progress, Request};

/// Why no experts of models can be copied early.
static EFFECT: Effect = Effect::of(NoEffect::POST_FETCH);

/// Post-fetch, as a capability.
pub struct PostFetch;

/// Bytes behind a run of experts that are copied with it, as ggml's scheduler does: kernels read
/// a little past the last expert, and nothing there may be a NaN.
const PADDING: usize = 512;

/// How long the end of the process waits for a copy.
const EXIT_TIMEOUT: Duration = Duration::from_secs(2);

/// Why there are no slots beside those of the program.
const OWN_CACHE_WORKS: &str = "llama.cpp's own expert cache works and this one is off: start the program without --moe-cache-mib to use this one";

/// The share of used experts, in percent, from which all experts of the next layer are copied. Each
/// byte costs time on the link, unlike reads of neighbours from disk (`sidecar_core::stream`).
const NEARLY_ALL: usize = 90;

/// What is known of the order of the program's calls.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Order {
    /// No evaluation had experts to copy.
    Unknown,
    /// An evaluation had the order that post-fetch needs.
    Expected,
    /// A call came out of this order.
    Other,
}

/// What post-fetch has for a scheduler.
struct State {
    /// The number of the scheduler, once there is a plan.
    number: usize,
    plan: Option<Plan>,
    devices: Devices,
    biases: Biases,
    fetcher: Option<Fetcher>,
    order: Order,
    /// Whether an evaluation has copied experts in the expected order.
    seen: bool,
    /// Whether an evaluation of the plan was begun, and has not failed.
    begun: bool,
    /// Whether nearly all experts of the last layer were used.
    nearly_all: bool,
    /// Whether the first part of the evaluation is still to come.
    at_start: bool,
    /// Experts that are requested next.
    used: Marked,
    /// Experts of the layer that the program copies from its own expert cache.
    in_own_cache: Vec<bool>,
    /// Experts that stay on a device.
    cache: Option<Cache>,
    /// Whether memory for them was looked for.
    cache_tried: bool,
    /// The generation whose bytes they have.
    generation: u64,
    /// Products of the part that is being submitted.
    changed: Vec<Changed>,
    /// Whether experts are being copied for later evaluations.
    uploads: bool,
    /// When experts were last looked up in this evaluation.
    looked_up: Option<Instant>,
    /// Whether the program looks at nodes while they are evaluated.
    observed: bool,
    /// The ids of a layer in the graph, and what computes those without a slot, if they fit slots.
    method: Option<(usize, Method)>,
    /// When an evaluation of such a graph began.
    began: Option<Instant>,
}

impl State {
    const fn new() -> State {
        State {
            number: 0,
            plan: None,
            devices: Devices::new(),
            biases: Biases::new(),
            fetcher: None,
            order: Order::Unknown,
            seen: false,
            begun: false,
            nearly_all: false,
            at_start: false,
            used: Marked(Vec::new()),
            in_own_cache: Vec::new(),
            cache: None,
            cache_tried: false,
            generation: 0,
            changed: Vec::new(),
            uploads: false,
            looked_up: None,
            observed: false,
            method: None,
            began: None,
        }
    }
}

/// By the number of the scheduler. Locked by the thread that evaluates.
static STATES: [Mutex<State>; SLOTS] = [const { Mutex::new(State::new()) }; SLOTS];

/// The addresses of the scheduler's copies in a plan.
struct Copies {
    start: AtomicUsize,
    end: AtomicUsize,
}

impl Copies {
    const fn none() -> Copies {
        Copies {
            start: AtomicUsize::new(0),
            end: AtomicUsize::new(0),
        }
    }

    fn set(&self, addresses: Range<usize>) {
        self.start.store(addresses.start, Ordering::Relaxed);
        self.end.store(addresses.end, Ordering::Relaxed);
    }

    fn overlaps(&self, addresses: &Range<usize>) -> bool {
        let (start, end) = (&self.start, &self.end);
        start.load(Ordering::Relaxed) < addresses.end
            && addresses.start < end.load(Ordering::Relaxed)
    }
}

/// By the number of the scheduler. A program frees a graph that is evaluated on the same thread,
/// or orders both itself.
static COPIES: [Copies; SLOTS] = [const { Copies::none() }; SLOTS];

/// Ids that the scheduler has requested: the layer, the tensor, and where its bytes go.
#[derive(Clone, Copy)]
struct Requested {
    layer: usize,
    ids: *const Tensor,
    data: *const u8,
    size: usize,
}

thread_local! {
    /// The number of slots of a layer, for the graph that this thread splits.
    static SLOTS_OF_GRAPH: Cell<usize> = const { Cell::new(0) };
    static REQUESTED: Cell<Option<Requested>> = const { Cell::new(None) };
}

/// Returns the states of all schedulers; none while post-fetch is off.
fn states() -> impl Iterator<Item = &'static Mutex<State>> {
    STATES.iter().filter(|_| is_on())
}

/// Returns the state of a scheduler; `None` while post-fetch is off.
fn state_of(scheduler: &Scheduler) -> Option<MutexGuard<'static, State>> {
    is_on().then(|| STATES[scheduler.number()].lock())
}

fn is_on() -> bool {
    Config::get().program_postfetch.mode != PostFetchMode::Off
}

impl Capability for PostFetch {
    fn is_enabled(&self) -> bool {
        is_on()
    }

    fn uses_routing(&self) -> bool {
        // The CPU computes gate and up: the ids are known before the GPU needs down.
        is_on() && Config::get().program_postfetch.mode == PostFetchMode::Down
    }

    fn routed(&self, routed: &Routed<'_>) {
        let Some(mut state) = current() else {
            return;
        };
        let Some(plan) = &state.plan else {
            return;
        };
        let is_of =
            |layer: &Layer| (layer.model, layer.number) == (routed.model.number, routed.layer);
        if let Some(at) = plan.layers.iter().position(is_of) {
            state.known(routed.model.ggml, at, &routed.ids);
        }
    }

    fn graph_allocated(&self, scheduler: &Scheduler, graph: &Allocated, keeps: bool) {
        let Some(mut state) = state_of(scheduler) else {
            return;
        };
        state.retire();
        if keeps {
            state.find_cache(scheduler.ggml(), graph);
        }
        // Without slots, the CPU is faster than a copy for each token.
        let usable = state.order != Order::Other;
        let slots = state.cache.as_ref().map_or(0, Cache::slots);
        // SAFETY: the graph is live.
        let ids = unsafe { most_ids(scheduler.ggml(), &graph.reads) };
        let fits = keeps && usable && (1..=slots).contains(&ids);
        let cache = state.cache.as_mut().filter(|_| fits);
        state.method = cache.map(|cache| (ids, cache.method(ids)));
        let has_slots = usable && state.method.is_none_or(|(_, of)| of != Method::NoSlots);
        SLOTS_OF_GRAPH.set(if has_slots { slots } else { 0 });
    }

    fn graph_dropped(&self, scheduler: &Scheduler) {
        if let Some(mut state) = state_of(scheduler) {
            state.retire();
        }
    }

    fn evaluation_begun(&self, scheduler: &Scheduler) {
        let Some(mut state) = state_of(scheduler) else {
            return;
        };
        if state.plan.is_some() {
            state.begin();
        }
        // The graph of the first evaluation has no slots yet.
        let has_slots = state.plan.as_ref().is_some_and(Plan::has_slots);
        let is_as_chosen = |(_, of)| has_slots != (of == Method::NoSlots);
        let counts = state.order == Order::Expected && state.method.is_some_and(is_as_chosen);
        state.began = counts.then(Instant::now);
    }

    fn evaluation_ended(&self, scheduler: &Scheduler) {
        let Some(mut state) = state_of(scheduler) else {
            return;
        };
        let state = &mut *state;
        if let Some(began) = state.began.take()
            && let Some((ids, method)) = state.method
            && let Some(cache) = &mut state.cache
        {
            let unused = u64::from(method == Method::NoSlots);
            FIGURES.cache_unused.fetch_add(unused, Ordering::Relaxed);
            if cache.evaluated(ids, method, began.elapsed()) {
                scheduler.rebuild();
            }
        }
        state.end();
    }

    fn evaluation_failed(&self, scheduler: &Scheduler) {
        if let Some(mut state) = state_of(scheduler) {
            state.begun = false;
            state.began = None;
            state.drain();
            // Copies that were issued may have failed with it.
            state.clear_cache();
        }
    }

    fn model_complete(&self, model: &Arc<Model>) {
        if self.is_enabled() {
            experts::note(model, &EFFECT);
        }
    }

    fn model_freed(&self, model: &Model) {
        for state in states() {
            let mut state = state.lock();
            let of_model = |plan: &Plan| plan.layers.iter().any(|of| of.model == model.number);
            if state.plan.as_ref().is_some_and(of_model) {
                state.retire();
            }
            state.clear_cache();
        }
        FIGURES.drop_cache_layers(model.number);
    }

    fn tensors_freed(&self, addresses: &Range<usize>) {
        // Threads of a backend free tensors, too: they must not wait for a thread that evaluates,
        // which may wait for them.
        for (state, copies) in STATES
            .iter()
            .zip(&COPIES)
            .filter(|(_, of)| of.overlaps(addresses))
        {
            let mut state = state.lock();
            if copies.overlaps(addresses) {
                state.retire();
            }
        }
    }

    fn backend_freed(&self, backend: usize) {
        for state in states() {
            let mut state = state.lock();
            let uses = |plan: &Plan| plan.layers.iter().any(|of| of.backend as usize == backend);
            if state.plan.as_ref().is_some_and(uses) {
                state.retire();
            }
        }
    }

    fn scheduler_freed(&self, scheduler: &Scheduler) {
        if let Some(mut state) = state_of(scheduler) {
            state.drain();
            *state = State::new();
        }
    }

    fn finish(&self) {
        for state in states() {
            // The process ends: a thread that holds the lock may never release it.
            if let Some(state) = state.try_lock()
                && let Some(fetcher) = &state.fetcher
            {
                fetcher.stop(EXIT_TIMEOUT);
            }
        }
        if is_used() {
            journal::note(|| Event::PostFetch { figures: figures() });
        }
    }

    fn no_effect(&self) -> Vec<NoEffect> {
        let figures = figures();
        match figures.early_bytes + figures.cache_hits {
            0 => EFFECT.missing(|| format!("post-fetch: {}", summary::post_fetch(&figures))),
            _ => EFFECT.obstacles(),
        }
    }
}

/// Whether experts are copied early, or models page-locked.
pub fn is_used() -> bool {
    is_on() || page_lock::locked_bytes() > 0
}

/// Returns the figures of post-fetch in this process.
pub fn figures() -> PostFetchFigures {
    FIGURES.get(page_lock::locked_bytes())
}

/// Whether the calls of a scheduler's evaluation are reported to post-fetch.
pub fn has_plan(scheduler: &Scheduler) -> bool {
    state_of(scheduler).is_some_and(|state| state.plan.is_some())
}

/// Plans a graph that was split and allocated.
///
/// # Safety
///
/// A live scheduler of this copy of ggml and its graph, and what that read before it was split.
pub unsafe fn graph_split(
    scheduler: &Scheduler,
    sched: *mut Sched,
    graph: *mut Graph,
    reads: &GraphReads,
) {
    let Some(mut state) = state_of(scheduler) else {
        return;
    };
    let state = &mut *state;
    if state.order == Order::Other {
        return;
    }
    // SAFETY: as the caller ensures; the plan of the graph before is retired.
    let plan = unsafe {
        // The first evaluation shows what the program copies.
        let cache = state
            .cache
            .as_ref()
            .filter(|_| state.order == Order::Expected);
        let ggml = scheduler.ggml();
        let on_cpu = cache.is_some() && state.computes_misses() && !state.observed;
        let readers = on_cpu.then(|| Readers::of(ggml, graph));
        let readers = readers.as_ref();
        state.devices.plan(ggml, sched, reads, cache, readers)
    };
    if plan.is_some() {
        // SAFETY: as the caller ensures; the scheduler was waited for.
        unsafe { state.biases.plan(scheduler.ggml(), sched, reads) };
    }
    if plan.is_some() && state.fetcher.is_none() {
        state.fetcher = Fetcher::start();
    }
    state.plan = plan.filter(|_| state.fetcher.is_some());
    if let Some(plan) = &state.plan {
        state.number = scheduler.number();
        COPIES[state.number].set(plan.addresses());
        let products: usize = plan.layers.iter().map(|layer| layer.products.len()).sum();
        log::debug!(
            "post-fetch: {products} matrices of {} layers; copies before routing: {}",
            plan.layers.len(),
            plan.looks_ahead
        );
    }
}

/// Records whether the program looks at nodes of a scheduler's graphs while they are evaluated:
/// the device has other rows than the CPU in nodes before the last product of experts.
pub fn observed(scheduler: &Scheduler, observed: bool) {
    let Some(mut state) = state_of(scheduler) else {
        return;
    };
    state.observed = observed;
    let layers = state.plan.iter_mut().flat_map(|plan| &mut plan.layers);
    for slots in layers.filter_map(|layer| layer.slots.as_mut()) {
        if observed {
            slots.on_cpu = None;
        }
    }
}

/// Whether operations are to be offloaded that the program would leave on the CPU.
pub fn offloads() -> bool {
    let config = &Config::get().program_postfetch;
    is_on() && (config.mode != PostFetchMode::Offloaded || config.cache.is_some())
}

/// Whether a node is to be offloaded to the device of a backend.
///
/// # Safety
///
/// A live backend and a live node of this copy of ggml.
pub unsafe fn offloads_node(ggml: &Ggml, backend: *mut Backend, node: *const Tensor) -> bool {
    let layout = &ggml.layout;
    // SAFETY: as the caller ensures; sources of a live node are live and have names.
    unsafe {
        let device = (ggml.f.ggml_backend_get_device)(backend);
        if device.is_null() || !instance::is_usable(ggml, device) {
            return false;
        }
        let [_, used, tokens, _]: [i64; 4] = layout.read(node, layout.ne);
        let ids = used.saturating_mul(tokens);
        let fits = ids > 0 && ids <= SLOTS_OF_GRAPH.get() as i64;
        if layout.read::<i32>(node, layout.op) != ggml.ops.mul_mat_id {
            // A product on the device would wait for an addition on the CPU.
            let mode = Config::get().program_postfetch.mode;
            return (fits || mode == PostFetchMode::All) && biases::adds_biases(ggml, node);
        }
        let weight: *const Tensor = layout.read(node, layout.src);
        let name = CStr::from_ptr((ggml.f.ggml_get_name)(weight));
        let Some(name) = name.to_str().ok().and_then(ExpertName::parse) else {
            return false;
        };
        match Config::get().program_postfetch.mode {
            _ if ids == 0 => false,
            _ if fits => true,
            PostFetchMode::Off | PostFetchMode::Offloaded => false,
            PostFetchMode::Down => name.projection == Projection::Down,
            PostFetchMode::All => true,
        }
    }
}

/// Returns the state of the scheduler whose parts this thread evaluates, if it has a plan.
fn current() -> Option<MutexGuard<'static, State>> {
    state_of(parts::current()?).filter(|state| state.plan.is_some())
}

/// Records that the scheduler requested bytes of a tensor.
///
/// # Safety
///
/// The arguments of `ggml_backend_tensor_get_async`.
pub unsafe fn bytes_requested(
    backend: *mut Backend,
    tensor: *const Tensor,
    data: *const c_void,
    size: usize,
) {
    let Some(mut state) = current() else {
        return;
    };
    let computes_misses = state.computes_misses();
    let Some(plan) = &mut state.plan else {
        return;
    };
    let is_of = |layer: &Layer| !layer.known && layer.ids.contains(&tensor.cast_mut());
    if let Some(layer) = plan.layers.iter().position(is_of) {
        let of_layer = &mut plan.layers[layer];
        let is_same = of_layer.backend == backend && computes_misses;
        if let Some(slots) = of_layer.slots.as_mut().filter(|_| is_same)
            && let Some(on_cpu) = &mut slots.on_cpu
        {
            // SAFETY: the backend of the products, which computed the input before the ids.
            unsafe { on_cpu.request_input(backend) };
        }
        REQUESTED.set(Some(Requested {
            layer,
            ids: tensor,
            data: data.cast(),
            size,
        }));
    }
}

/// Records that the scheduler has waited for a backend: the ids that it requested are known.
///
/// # Safety
///
/// Called right after the wait, on the thread of the request.
pub unsafe fn waited(ggml: &'static Ggml) {
    let Some(requested) = REQUESTED.take() else {
        return;
    };
    if let Some(mut state) = current() {
        // SAFETY: the scheduler has just received the bytes of the tensor at this address.
        let ids = unsafe { routing::ids_at(ggml, requested.ids, requested.data) };
        if let Some(ids) = ids.filter(|ids| ids.bytes.len() <= requested.size) {
            state.known(ggml, requested.layer, &ids);
        }
    }
}

/// Returns whether a copy of the scheduler is left out: its bytes are copied early.
///
/// # Safety
///
/// The arguments of `ggml_backend_tensor_set_async`.
pub unsafe fn is_copied(
    ggml: &Ggml,
    backend: *mut Backend,
    tensor: *mut Tensor,
    data: *const c_void,
    bytes: Range<usize>,
) -> bool {
    let Some(mut state) = current() else {
        return false;
    };
    let state = &mut *state;
    let (Some(plan), Some(fetcher)) = (&mut state.plan, &state.fetcher) else {
        return false;
    };
    let Some((layer, product)) = plan.find(tensor) else {
        return false;
    };
    let layer = &mut plan.layers[layer];
    let product = &mut layer.products[product];
    // SAFETY: the matrix is live as long as the graph.
    let start: usize = unsafe { ggml.layout.read(product.weight, ggml.layout.data) };
    let expected = layer.known && backend == layer.backend && start + bytes.start == data as usize;
    product.host_copied = true;
    if !expected {
        state.stand_back();
        return false;
    }
    let has_slots = layer.slots.as_ref().is_some_and(|slots| slots.ready);
    let transfer = &product.transfer;
    let requested = transfer.progress() != Progress::Idle;
    let covered = !has_slots && requested && covers(&transfer.request(), start, &bytes);
    let missed = covered && !Config::get().postfetch.block_on_miss && fetcher.take_back(transfer);
    if has_slots || covered && !missed {
        let left_out = bytes.len() as u64;
        FIGURES
            .left_out_bytes
            .fetch_add(left_out, Ordering::Relaxed);
        return true;
    }
    let reason = match (state.order, requested) {
        _ if missed => Reason::Missed,
        (Order::Unknown, _) => Reason::FirstEvaluation,
        (_, false) if !Config::get().postfetch.block_on_miss => Reason::Missed,
        _ => Reason::NotRequested,
    };
    FIGURES.host_copied(bytes.len(), reason);
    false
}

/// Returns whether a copy of the scheduler is left out: the device has the biases already.
pub fn is_bias_copied(from: *const Tensor, to: *const Tensor) -> bool {
    let copied = |mut state: MutexGuard<'_, State>| {
        state.biases.is_copied(from, to) && state.order == Order::Expected
    };
    current().is_some_and(copied)
}

/// Whether a copy of a whole matrix at `start` has a range of its bytes.
fn covers(request: &Request, start: usize, bytes: &Range<usize>) -> bool {
    let has = |piece: &Piece| {
        piece.to.start <= bytes.start
            && bytes.end <= piece.to.end
            && piece.from == start + piece.to.start
    };
    request.pieces.iter().any(has)
}

/// How a part of a graph is evaluated.
pub enum Evaluation {
    /// As a whole.
    Whole,
    /// In two pieces, with the CPU's experts of a layer between them.
    Divided {
        /// The number of the layer in its plan.
        layer: usize,
        /// The number of nodes in the first piece.
        nodes: c_int,
    },
    /// Not at all: the part has another form than in the evaluation before.
    Refused,
}

/// Makes a backend wait for the early copies that a part of a graph reads, which it is about to
/// evaluate.
///
/// # Safety
///
/// A live part of a graph and a live backend of this copy.
pub unsafe fn part_begins(
    ggml: &'static Ggml,
    backend: *mut Backend,
    part: *mut Graph,
) -> Evaluation {
    let Some(mut state) = current() else {
        return Evaluation::Whole;
    };
    let state = &mut *state;
    let computes_misses = state.computes_misses();
    if std::mem::take(&mut state.at_start) {
        // Not before: the inputs of the graph are copied first, and would wait behind experts.
        state.look_ahead(ggml, 0);
    }
    let (Some(plan), Some(fetcher)) = (&mut state.plan, &state.fetcher) else {
        return Evaluation::Whole;
    };
    let layout = &ggml.layout;
    let mut expected = true;
    let mut evaluation = Evaluation::Whole;
    // SAFETY: nodes of a live graph and their sources are live.
    let nodes = unsafe { (ggml.f.ggml_graph_n_nodes)(part) };
    for at in 0..nodes {
        // SAFETY: as above.
        let (node, source) = unsafe {
            let node = (ggml.f.ggml_graph_node)(part, at);
            let extents: [i64; 4] = layout.read(node, layout.ne);
            // Without a token, nothing is copied.
            if layout.read::<i32>(node, layout.op) != ggml.ops.mul_mat_id || extents[2] == 0 {
                continue;
            }
            (node, layout.read(node, layout.src))
        };
        let Some((number, role)) = plan.find(source) else {
            continue;
        };
        let layer = &mut plan.layers[number];
        let product = &layer.products[role];
        let has_loads = |slots: &LayerSlots| {
            let cache = state.cache.as_mut();
            slots.ready && cache.is_some_and(|cache| cache.layer(slots.at).has_loads())
        };
        let waits = layer.slots.as_ref().is_none_or(|slots| slots.waits);
        let requested = product.transfer.progress() != Progress::Idle;
        if waits && (requested || layer.slots.as_ref().is_some_and(has_loads)) {
            // SAFETY: the backend of the product, on the thread that uses it.
            unsafe { fetcher.acquire(&product.transfer, backend) };
        }
        state.seen |= product.host_copied;
        expected &= product.host_copied && layer.backend == backend;
        if let Some(slots) = &mut layer.slots
            && let Some(cache) = &mut state.cache
            && slots.ready
        {
            // SAFETY: as above, and the tensors of the slots and the ids live as long as the plan.
            unsafe {
                if !std::mem::replace(&mut slots.written, true) {
                    cache.layer(slots.at).write_ids(ggml, backend, slots.ids);
                }
                let tensor = cache.tensor(slots.at, role);
                let changed = Changed::new(ggml, node, product.copy, tensor, slots.ids);
                state.changed.push(changed);
            }
        }
        if let Some(slots) = &mut layer.slots
            && let Some(on_cpu) = &mut slots.on_cpu
        {
            // SAFETY: as above.
            let is_input =
                |at| unsafe { (ggml.f.ggml_graph_node)(part, at) }.cast_const() == on_cpu.input;
            let is_early = backend == layer.backend && !(0..at).any(is_input);
            let is_last = node == on_cpu.output;
            let is_first = matches!(evaluation, Evaluation::Whole);
            if is_early && is_last && is_first {
                // A layer is divided in the same way whether or not it misses experts.
                if computes_misses || !on_cpu.missed.is_empty() {
                    let (layer, nodes) = (number, at + 1);
                    evaluation = Evaluation::Divided { layer, nodes };
                }
            } else if !is_early || is_last {
                if !on_cpu.missed.is_empty() {
                    evaluation = Evaluation::Refused;
                }
                slots.on_cpu = None;
            }
        }
    }
    if !expected {
        state.stand_back();
    }
    evaluation
}

/// Computes the experts of a layer that have no slot. Returns ggml's status.
///
/// # Safety
///
/// The backend of the layer, to which its nodes up to down were submitted.
pub unsafe fn compute_missed(backend: *mut Backend, layer: usize) -> u32 {
    // Nothing is locked while the program's abort callback may be called.
    let taken = current().and_then(|mut state| {
        let slots = state.slots(layer)?;
        Some((slots.on_cpu.take()?, slots.in_order))
    });
    let Some((mut on_cpu, in_order)) = taken else {
        return STATUS_FAILED as u32;
    };
    on_cpu.checked = true;
    // SAFETY: as the caller ensures.
    let status = unsafe { on_cpu.compute(backend, in_order) };
    if let Some(mut state) = current()
        && let Some(slots) = state.slots(layer)
    {
        slots.on_cpu = Some(on_cpu);
    }
    status
}

/// The end of a part that was submitted: its products are as the scheduler made them.
pub struct PartEnds;

impl Drop for PartEnds {
    fn drop(&mut self) {
        if let Some(mut state) = current() {
            // The last change of a tensor is undone first.
            while let Some(changed) = state.changed.pop() {
                drop(changed);
            }
        }
    }
}

impl State {
    /// Looks for memory for experts that stay on the device of a graph, once.
    fn find_cache(&mut self, ggml: &'static Ggml, graph: &Allocated) {
        let Some(size) = Config::get().program_postfetch.cache else {
            return;
        };
        let is_usable = |device: &&*mut Device| {
            // SAFETY: a device of a live scheduler.
            !device.is_null() && unsafe { instance::is_usable(ggml, **device) }
        };
        let device = graph.backends.devices.iter().find(is_usable);
        let has_experts = graph.reads.weights.iter().any(|of| !of.ids.is_null());
        if let Some(device) = device.filter(|_| has_experts && !self.cache_tried) {
            self.cache_tried = true;
            if own_cache::exists() {
                cache::note_obstacle(OWN_CACHE_WORKS.into());
                return;
            }
            // What is put into slots now has the bytes of this generation.
            self.generation = barrier::generation();
            // SAFETY: the graph is not split, and its devices are live.
            self.cache = unsafe { Cache::new(ggml, *device, &graph.reads, size) };
        }
    }

    /// Whether the CPU computes experts of the graph that have no slot.
    fn computes_misses(&self) -> bool {
        self.method.is_some_and(|(_, of)| of == Method::OnCpu)
    }

    /// Returns the slots of a layer of the plan.
    fn slots(&mut self, layer: usize) -> Option<&mut LayerSlots> {
        self.plan.as_mut()?.layers.get_mut(layer)?.slots.as_mut()
    }

    /// Forgets which bytes stay on devices.
    fn clear_cache(&mut self) {
        self.biases.clear();
        if let Some(cache) = &mut self.cache {
            cache.clear();
        }
    }

    /// Begins an evaluation.
    fn begin(&mut self) {
        self.end();
        let generation = barrier::generation();
        if std::mem::replace(&mut self.generation, generation) != generation {
            self.clear_cache();
        }
        let Some(plan) = &mut self.plan else {
            return;
        };
        self.begun = true;
        for layer in &mut plan.layers {
            layer.known = false;
            layer.ahead = false;
            if let Some(slots) = &mut layer.slots {
                (slots.ready, slots.written, slots.waits) = (false, false, true);
                if let Some(on_cpu) = &mut slots.on_cpu {
                    on_cpu.begin();
                }
            }
            for product in &mut layer.products {
                product.host_copied = false;
                product.transfer.forget();
            }
        }
        self.at_start = true;
        self.looked_up = None;
    }

    /// Ends an evaluation that did not fail. A program may begin the next one before it waits.
    fn end(&mut self) {
        self.drain();
        if Config::get().postfetch.debug {
            let layers = self.plan.iter_mut().flat_map(|plan| &mut plan.layers);
            layers.for_each(Layer::log_ended);
        }
        if !std::mem::take(&mut self.begun) || self.order != Order::Unknown {
            return;
        }
        match self.seen {
            true => self.order = Order::Expected,
            // The calls of the scheduler do not go through the dynamic loader.
            false => self.stand_back(),
        }
    }

    /// Ends the use of the plan: its graph is dropped.
    fn retire(&mut self) {
        self.biases.forget_graph();
        if self.plan.is_some() {
            COPIES[self.number].set(0..0);
            self.drain();
        }
        if let Some(plan) = self.plan.take() {
            self.devices.retire(plan);
        }
    }

    /// Drops requests that are not begun, and waits for the others and for those of later
    /// evaluations.
    fn drain(&mut self) {
        let Some(fetcher) = &self.fetcher else {
            return;
        };
        if std::mem::take(&mut self.uploads) {
            fetcher.finish();
            let layers = self.plan.iter().flat_map(|plan| &plan.layers);
            for product in layers.flat_map(|layer| &layer.products) {
                product.transfer.wait();
            }
        }
        if !fetcher.drain() {
            // Slots are taken, and their experts are not there.
            self.clear_cache();
        }
    }

    /// Leaves all copies to the program from now on.
    fn stand_back(&mut self) {
        if self.order != Order::Other {
            self.order = Order::Other;
            FIGURES.note_obstacle(
                "the program copies experts itself: its scheduler's calls come in an order that is not known, or cannot be seen; report it with the version of llama.cpp".into(),
            );
        }
    }

    /// Requests the experts of a layer whose ids are known, and all of the next layer if nearly
    /// all of this one are used.
    fn known(&mut self, ggml: &'static Ggml, at: usize, ids: &Ids<'_>) {
        let Some(plan) = &mut self.plan else {
            return;
        };
        let layer = &mut plan.layers[at];
        if std::mem::replace(&mut layer.known, true) || self.order != Order::Expected {
            return;
        }
        if let Some(slots) = &mut layer.slots {
            let Some(cache) = &mut self.cache else {
                return;
            };
            let on_cpu = slots.on_cpu.as_mut().filter(|of| of.is_ready());
            // As long as the layer before took, the link has time for this one.
            let since = self.looked_up.replace(Instant::now());
            let time = since.map_or(Duration::ZERO, |since| since.elapsed());
            let is_idle = || self.fetcher.as_ref().is_some_and(Fetcher::is_idle);
            let most = match Config::get().program_postfetch.cache_uploads {
                0 if on_cpu.is_some() && is_idle() => cache.copied_in(slots.at, time),
                most => most,
            };
            let of_layer = cache.layer(slots.at);
            slots.waits = on_cpu.is_none();
            slots.ready = match on_cpu {
                Some(on_cpu) => {
                    let ready = of_layer.look_up_now(ids, most, &mut on_cpu.missed);
                    on_cpu.gather(ids);
                    ready
                }
                None => of_layer.look_up(ids),
            };
            if slots.ready && of_layer.has_loads() {
                self.uploads |= !slots.waits;
                self.request(ggml, at);
            }
            return;
        }
        if let Some(cache) = &mut self.cache {
            cache.note(layer.model, layer.number, ids);
        }
        // The program ends itself at an id that is not valid.
        let Some(used) = self.used.mark(ids, layer.experts) else {
            return;
        };
        self.nearly_all = used * 100 >= layer.experts as usize * NEARLY_ALL;
        if !own_cache::mark_slots(layer.products[0].weight, &mut self.in_own_cache) {
            return;
        }
        if !layer.ahead {
            FIGURES.layers.fetch_add(1, Ordering::Relaxed);
            self.request(ggml, at);
        }
        self.look_ahead(ggml, at + 1);
    }

    /// Requests all experts of a layer if nearly all will be used.
    fn look_ahead(&mut self, ggml: &'static Ggml, at: usize) {
        let Some(plan) = &mut self.plan else {
            return;
        };
        let looks_ahead = self.nearly_all && plan.looks_ahead && self.order == Order::Expected;
        // The program would copy experts from there to the same place meanwhile.
        let looks_ahead = looks_ahead && !own_cache::exists();
        let may_look_ahead = |layer: &&mut Layer| layer.may_use_all && layer.slots.is_none();
        let layer = plan.layers.get_mut(at).filter(may_look_ahead);
        if let Some(layer) = layer.filter(|_| looks_ahead) {
            layer.ahead = true;
            FIGURES.layers_ahead.fetch_add(1, Ordering::Relaxed);
            self.used.mark_all(layer.experts);
            self.request(ggml, at);
        }
    }

    /// Requests the marked experts of a layer, or those that are to be loaded into its slots.
    fn request(&mut self, ggml: &'static Ggml, at: usize) {
        let (Some(plan), Some(fetcher)) = (&mut self.plan, &self.fetcher) else {
            return;
        };
        let layer = &mut plan.layers[at];
        let logs = Config::get().postfetch.debug;
        let mut matrices = Vec::new();
        // Recorded in the evaluation before, and complete: ids that were computed later are known.
        // ggml's Vulkan backend reuses events that were waited for, and the wait must be on the
        // thread that uses their backend.
        layer.free.wait();
        // SAFETY: the backend of the layer, on the thread that evaluates.
        unsafe { layer.free.record(layer.backend) };
        for (role, product) in layer.products.iter().enumerate() {
            let layout = &ggml.layout;
            // SAFETY: the matrix is live as long as the graph.
            let (from, strides): (usize, [usize; 4]) = unsafe {
                (
                    layout.read(product.weight, layout.data),
                    layout.read(product.weight, layout.nb),
                )
            };
            let mut request = product.transfer.next_request();
            request.after = Some(layer.free.clone());
            match (&layer.slots, &mut self.cache) {
                (Some(slots), Some(cache)) => {
                    let of_layer = cache.layer(slots.at);
                    of_layer.pieces(role, from, &mut request.pieces);
                }
                _ => {
                    let without = &self.in_own_cache;
                    self.used
                        .pieces(from, strides[2], without, &mut request.pieces);
                }
            }
            drop(request);
            fetcher.queue(&product.transfer);
            if logs {
                matrices.push((from, strides[2]));
            }
        }
        if logs {
            layer.requested = Some(Instant::now());
            layer.log_requested(&matrices);
        }
    }
}

/// Returns the most routed ids that a product of a graph has.
///
/// # Safety
///
/// A live graph of this copy.
unsafe fn most_ids(ggml: &Ggml, reads: &GraphReads) -> usize {
    let count = |(_, ids): (*mut Tensor, *mut Tensor)| {
        // SAFETY: as the caller ensures.
        let [used, tokens, ..]: [i64; 4] = unsafe { ggml.layout.read(ids, ggml.layout.ne) };
        usize::try_from(used.saturating_mul(tokens)).unwrap_or(usize::MAX)
    };
    reads.routed().map(count).max().unwrap_or(0)
}

/// A set of experts.
struct Marked(Vec<bool>);

impl Marked {
    /// Marks the experts of a layer that were routed to, and no others. Returns their number;
    /// `None` if an id is not one of an expert.
    fn mark(&mut self, ids: &Ids<'_>, experts: u32) -> Option<usize> {
        self.0.clear();
        self.0.resize(experts as usize, false);
        let mut count = 0;
        for token in 0..ids.tokens {
            for used in 0..ids.used {
                let id = usize::try_from(ids.get(token, used)?).ok()?;
                let marked = self.0.get_mut(id)?;
                count += usize::from(!std::mem::replace(marked, true));
            }
        }
        Some(count)
    }

    /// Marks all experts of a layer.
    fn mark_all(&mut self, experts: u32) {
        self.0.clear();
        self.0.resize(experts as usize, true);
    }

    /// Writes the bytes of the marked experts of a matrix at an address, neighbours together, without
    /// those of the experts that are marked in `without`. These are the ranges that libllama copies.
    fn pieces(&self, from: usize, expert_bytes: usize, without: &[bool], pieces: &mut Vec<Piece>) {
        pieces.clear();
        let mut add = |to: Range<usize>| {
            if !to.is_empty() {
                let from = from + to.start;
                pieces.push(Piece { from, to });
            }
        };
        let experts = self.0.len();
        let mut expert = 0;
        while expert < experts {
            let marked = self.0[expert..].iter().take_while(|marked| **marked);
            let end = expert + marked.count();
            if end > expert {
                let left_out = |at: &usize| without.get(*at).is_some_and(|is_out| *is_out);
                for at in (expert..end).filter(left_out) {
                    add(expert * expert_bytes..at * expert_bytes);
                    expert = at + 1;
                }
                let padding = match end < experts {
                    true => expert_bytes.min(PADDING),
                    false => 0,
                };
                add(expert * expert_bytes..end * expert_bytes + padding);
            }
            expert = end + 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_are_the_ranges_that_libllama_copies() {
        let ranges = |marked: &str, without: &str| {
            let set = |text: &str| text.chars().map(|of| of == 'x').collect::<Vec<bool>>();
            let mut pieces = Vec::new();
            Marked(set(marked)).pieces(7000, 1000, &set(without), &mut pieces);
            assert!(
                pieces
                    .iter()
                    .all(|piece| piece.from == 7000 + piece.to.start)
            );
            let range = |piece: Piece| (piece.to.start, piece.to.end);
            pieces.into_iter().map(range).collect::<Vec<_>>()
        };
        assert_eq!(ranges("..xx.x", ""), [(2000, 4512), (5000, 6000)]);
        assert_eq!(ranges("xxxx..", ".x...."), [(0, 1000), (2000, 4512)]);
        assert_eq!(ranges("xxxxxx", "x....x"), [(1000, 5000)]);
        // What is behind an expert may be read, wherever the expert comes from.
        assert_eq!(ranges(".x....", ".x...."), [(2000, 2512)]);
        assert_eq!(ranges("......", "xxxxxx"), []);
    }
}
