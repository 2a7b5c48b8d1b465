//! Post-fetch in an unmodified program: experts in host memory that a GPU multiplies are copied
//! to it early.
//!
//! llama.cpp copies experts itself, for batches from a limit on, strictly by turns: it waits for
//! the GPU, reads the ids, copies the used experts of one matrix, and multiplies. Here the copies
//! of all matrices of a layer begin when its ids are known, in a queue of their own, and those of
//! the next layer if nearly all experts are used. The program's own copies are left out where
//! they would copy the same bytes. On any failure, the program makes its own copies.
//!
//! | moment | here |
//! |---|---|
//! | a graph is about to be split | [`placement`] of its operations |
//! | it was split and allocated | [`plan`]: each copy gets memory of its own |
//! | the ids of a layer are known | [`known`]: copies are requested |
//! | the program copies experts | left out if requested |
//! | a part is submitted | [`part`]: the GPU waits for the copies, or the CPU computes what is not on the GPU |
//!
//! The scheduler's [`copy_callback`] reports when ids are known and what the program copies; where it has
//! none, they are [`inferred`] from its calls.
//!
//! Modules, top to bottom:
//!
//! | module | contents |
//! |---|---|
//! | [`copy_callback`], [`inferred`] | ids and copies of a scheduler: reported by its copy callback, or inferred from its calls |
//! | [`part`] | the evaluation of parts with products of experts |
//! | [`placement`] | which operations go to a device |
//! | [`known`] | what is requested when ids are known, and left out of the program's copies |
//! | [`state`] | what post-fetch has for a scheduler |
//! | [`plan`] | the matrices that a graph reads on a GPU although they are in host memory |
//! | [`on_cpu`], [`cache`] | experts without a slot, computed by the CPU; experts that stay on a device |
//! | [`choice`], [`marked`] | what computes experts without a slot, by the time of evaluations; sets of experts |
//! | [`transfer`] | copies to a device, and the thread that issues them |
//! | [`biases`] | expert biases that stay on a device |
//! | [`instance`] | a second instance of a backend of the program |
//! | [`figures`] | figures of post-fetch in this process |
//! | [`speeds`], [`experts`], [`page_lock`] | speeds of link and memory; where experts are, for the command; page locks on mappings |

mod biases;
mod cache;
mod choice;
pub mod copy_callback;
mod experts;
mod figures;
pub mod inferred;
mod instance;
mod known;
mod marked;
mod on_cpu;
pub mod page_lock;
pub mod part;
pub mod placement;
mod plan;
mod speeds;
mod state;
mod transfer;

use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

use sidecar_core::config::{Config, PostFetchMode};
use sidecar_core::protocol::{CacheLayer, Event, NoEffect, PostFetchFigures};
use sidecar_core::summary;

use crate::ggml::{Device, Ggml, Graph, Sched};
use crate::process::journal;
use crate::program::capability::{Capability, Effect};
use crate::program::graph::GraphReads;
use crate::program::models::Model;
use crate::program::routing::Routed;
use crate::program::sched::{Allocated, Scheduler};
use cache::Cache;
use choice::Method;
use figures::FIGURES;
use on_cpu::Readers;
use plan::{Layer, Plan};
pub use state::is_on;
use state::{COPIES, Order, PARALLEL, STATES, State, current, state_of, states};
use transfer::Fetcher;

/// Why no experts of models can be copied early.
static EFFECT: Effect = Effect::of(NoEffect::POST_FETCH);

/// Post-fetch, as a capability.
pub struct PostFetch;

/// How long the end of the process waits for a copy.
const EXIT_TIMEOUT: Duration = Duration::from_secs(2);

impl Capability for PostFetch {
    fn is_enabled(&self) -> bool {
        is_on()
    }

    fn uses_routing(&self) -> bool {
        // The CPU computes gate and up: the ids are known before the GPU needs down.
        is_on() && Config::get().program_postfetch.mode == PostFetchMode::Down
    }

    fn uses_copies(&self) -> bool {
        is_on()
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
        let devices = &graph.backends.devices;
        for device in devices.iter().filter(|_| !keeps) {
            make_room(scheduler.ggml(), *device, 0);
        }
        let Some(mut state) = state_of(scheduler) else {
            return;
        };
        state.retire();
        if keeps {
            state.find_cache(scheduler, graph);
        }
        // Without slots, the CPU is faster than a copy for each token.
        let usable = state.order != Order::Other;
        let slots = state.cache.as_ref().map_or(0, Cache::slots);
        // SAFETY: the graph is live.
        let ids = unsafe { placement::most_ids(scheduler.ggml(), &graph.reads) };
        let fits = keeps && usable && (1..=slots).contains(&ids);
        let cache = state.cache.as_mut().filter(|_| fits);
        state.method = cache.map(|cache| (ids, cache.method(ids)));
        let has_slots = usable && state.method.is_none_or(|(_, of)| of != Method::NoSlots);
        placement::set_slots(if has_slots { slots } else { 0 });
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
            state.begin(scheduler.ggml());
        }
        // Without a copy callback, the graph of the first evaluation has no slots yet.
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
            FIGURES.lock().cache_unused += unused;
            if cache.evaluated(ids, method, began.elapsed()) {
                scheduler.rebuild();
            }
        }
        state.end();
        if state.is_lost() && state.plan.as_ref().is_some_and(Plan::has_slots) {
            scheduler.rebuild();
        }
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
            if model.unreached.post_fetch.is_some() {
                state::refuse(model.ggml);
            }
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
            if let Some(fetcher) = state.fetcher.as_ref().filter(|of| of.is_lost()) {
                fetcher.wait_until_idle();
            }
            state.clear_cache();
        }
        let is_of_another = |of: &CacheLayer| of.model != model.number;
        FIGURES.lock().cache_layers.retain(is_of_another);
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
            let freed = std::mem::replace(&mut *state, State::new());
            if freed.is_lost() {
                std::mem::forget(freed);
            }
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
    PostFetchFigures {
        locked_bytes: page_lock::locked_bytes(),
        ..FIGURES.lock().clone()
    }
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
    if scheduler.is_parallel() {
        FIGURES.note_obstacle(PARALLEL.into());
        return;
    }
    // SAFETY: as the caller ensures; the plan of the graph before is retired.
    let plan = unsafe {
        // Without a copy callback, the first evaluation shows what the program copies.
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

/// Gives the memory of slots back where the program is about to allocate so much on a device, and more: another context
/// or model.
pub fn make_room(ggml: &Ggml, device: *mut Device, bytes: u64) {
    /// The compute buffers of a context. Their size is not known before.
    const BESIDE: u64 = 2 << 30;
    /// How long an evaluation is waited for.
    const LONGEST_WAIT: Duration = Duration::from_secs(2);
    let is_little = || {
        let free = ggml.free_memory(device);
        free.is_some_and(|free| free < bytes.saturating_add(BESIDE))
    };
    let began = Instant::now();
    for scheduler in Scheduler::all() {
        while let Some(mut state) = state_of(scheduler)
            && let Some(cache) = state.cache.as_ref().filter(|of| of.is_on(device))
            && is_little()
        {
            let freed = cache.bytes();
            if state.free_cache(ggml) {
                FIGURES.note_freed(freed);
                scheduler.rebuild();
            } else if began.elapsed() < LONGEST_WAIT {
                drop(state);
                std::thread::sleep(Duration::from_millis(1));
            } else {
                break;
            }
        }
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
