//! What post-fetch has for a scheduler, from one evaluation to the next.

use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

use parking_lot::{Mutex, MutexGuard, RwLock};
use sidecar_core::config::{Config, PostFetchMode};

use super::biases::Biases;
use super::cache::{self, Cache, Changed};
use super::choice::Method;
use super::figures::FIGURES;
use super::instance;
use super::marked::Marked;
use super::plan::{Devices, LayerSlots, Plan};
use super::transfer::Fetcher;
use crate::ggml::{Device, Ggml};
use crate::program::sched::{Allocated, SLOTS, Scheduler};
use crate::program::{barrier, own_cache, parts};

/// Why there are no slots beside those of the program.
const OWN_CACHE_WORKS: &str = "llama.cpp's own expert cache works and this one is off: start the program without --moe-cache-mib to use this one";

/// Why nothing is planned for a scheduler with several copies of its inputs: a matrix would have as many
/// copies, and the scheduler takes them by turns.
pub const PARALLEL: &str =
    "the program copies experts itself: it evaluates several batches at a time";

/// What is known of the copies that the program makes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Order {
    /// No evaluation had experts to copy, and there is no copy callback.
    Unknown,
    /// The scheduler's copy callback reports them, or an evaluation had the order that post-fetch
    /// needs.
    Expected,
    /// A call came out of this order.
    Other,
}

/// What post-fetch has for a scheduler.
pub struct State {
    /// The number of the scheduler, once there is a plan.
    pub number: usize,
    /// The matrices of its graph that the program copies.
    pub plan: Option<Plan>,
    /// Memory and instances on its devices.
    pub devices: Devices,
    /// Expert biases on its devices.
    pub biases: Biases,
    /// What issues copies, once there is a plan.
    pub fetcher: Option<Fetcher>,
    /// What is known of the program's copies.
    pub order: Order,
    /// Whether an evaluation has copied experts in the expected order.
    pub seen: bool,
    /// Whether an evaluation of the plan was begun, and has not failed.
    pub begun: bool,
    /// Whether nearly all experts of the last layer were used.
    pub nearly_all: bool,
    /// Whether the first part of the evaluation is still to come.
    pub at_start: bool,
    /// Experts that are requested next.
    pub used: Marked,
    /// Experts of the layer that the program copies from its own expert cache.
    pub in_own_cache: Vec<bool>,
    /// Experts that stay on a device.
    pub cache: Option<Cache>,
    /// Whether memory for them was looked for.
    pub cache_tried: bool,
    /// The generation whose bytes they have.
    pub generation: u64,
    /// Products of the part that is being submitted.
    pub changed: Vec<Changed>,
    /// Whether experts are being copied for later evaluations.
    pub uploads: bool,
    /// When experts were last looked up in this evaluation.
    pub looked_up: Option<Instant>,
    /// Whether the program looks at nodes while they are evaluated.
    pub observed: bool,
    /// The ids of a layer in the graph, and what computes those without a slot, if they fit slots.
    pub method: Option<(usize, Method)>,
    /// When an evaluation of such a graph began.
    pub began: Option<Instant>,
}

impl State {
    /// Returns the state of a scheduler without a graph.
    pub const fn new() -> State {
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
            used: Marked::new(),
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
pub static STATES: [Mutex<State>; SLOTS] = [const { Mutex::new(State::new()) }; SLOTS];

/// The addresses of the scheduler's copies in a plan.
pub struct Copies {
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

    /// Sets the addresses.
    pub fn set(&self, addresses: Range<usize>) {
        self.start.store(addresses.start, Ordering::Relaxed);
        self.end.store(addresses.end, Ordering::Relaxed);
    }

    /// Whether one of the addresses is among these.
    pub fn overlaps(&self, addresses: &Range<usize>) -> bool {
        let (start, end) = (&self.start, &self.end);
        start.load(Ordering::Relaxed) < addresses.end
            && addresses.start < end.load(Ordering::Relaxed)
    }
}

/// By the number of the scheduler. A program frees a graph that is evaluated on the same thread,
/// or orders both itself.
pub static COPIES: [Copies; SLOTS] = [const { Copies::none() }; SLOTS];

/// Returns the states of all schedulers; none while post-fetch is off.
pub fn states() -> impl Iterator<Item = &'static Mutex<State>> {
    STATES.iter().filter(|_| is_on())
}

/// Returns the state of a scheduler; `None` while post-fetch is off, or unsafe in its copy of ggml.
pub fn state_of(scheduler: &Scheduler) -> Option<MutexGuard<'static, State>> {
    let is_safe = is_on()
        && !UNSAFE
            .read()
            .contains(&std::ptr::from_ref(scheduler.ggml()).addr());
    is_safe.then(|| STATES[scheduler.number()].lock())
}

/// Copies of ggml in which calls do not arrive that post-fetch needs.
static UNSAFE: RwLock<Vec<usize>> = RwLock::new(Vec::new());

/// Turns post-fetch off in a copy of ggml.
pub fn refuse(ggml: &Ggml) {
    UNSAFE.write().push(std::ptr::from_ref(ggml).addr());
}

/// Whether post-fetch is enabled.
pub fn is_on() -> bool {
    Config::get().program_postfetch.mode != PostFetchMode::Off
}

/// Returns the state of the scheduler whose parts this thread evaluates, if it has a plan.
pub fn current() -> Option<MutexGuard<'static, State>> {
    state_of(parts::current()?).filter(|state| state.plan.is_some())
}

impl State {
    /// Looks for memory for experts that stay on the device of a graph, once.
    pub fn find_cache(&mut self, scheduler: &Scheduler, graph: &Allocated) {
        let ggml = scheduler.ggml();
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
            if scheduler.is_parallel() {
                cache::note_obstacle(PARALLEL.into());
                return;
            }
            // What is put into slots now has the bytes of this generation.
            self.generation = barrier::generation();
            // SAFETY: the graph is not split, and its devices are live.
            self.cache = unsafe { Cache::new(ggml, *device, &graph.reads, size) };
        }
    }

    /// Whether the CPU computes experts of the graph that have no slot.
    pub fn computes_misses(&self) -> bool {
        self.method.is_some_and(|(_, of)| of == Method::OnCpu)
    }

    /// Returns the slots of a layer of the plan.
    pub fn slots(&mut self, layer: usize) -> Option<&mut LayerSlots> {
        self.plan.as_mut()?.layers.get_mut(layer)?.slots.as_mut()
    }

    /// Forgets which bytes stay on devices.
    pub fn clear_cache(&mut self) {
        self.biases.clear();
        if let Some(cache) = &mut self.cache {
            cache.clear();
        }
    }

    /// Frees the slots, unless an evaluation may use them. The next graph may get slots again. Returns whether there are
    /// none any more.
    pub fn free_cache(&mut self, ggml: &Ggml) -> bool {
        if self.begun {
            return false;
        }
        self.drain();
        if self.is_lost() {
            return false;
        }
        if let Some(plan) = &mut self.plan {
            plan.begin();
            // SAFETY: the graph of a plan is live, and an evaluation that begins waits for the lock of this state.
            unsafe { plan.restore(ggml) };
        }
        self.retire();
        (self.cache, self.method) = (None, None);
        self.cache_tried = false;
        true
    }

    /// Begins an evaluation.
    pub fn begin(&mut self, ggml: &Ggml) {
        self.end();
        let generation = barrier::generation();
        if std::mem::replace(&mut self.generation, generation) != generation {
            self.clear_cache();
        }
        let Some(plan) = &mut self.plan else {
            return;
        };
        self.begun = true;
        plan.begin();
        self.at_start = true;
        self.looked_up = None;
        if self.is_lost() {
            self.leave(ggml);
        }
    }

    /// Ends an evaluation that did not fail. A program may begin the next one before it waits.
    pub fn end(&mut self) {
        self.drain();
        for layer in self.plan.iter_mut().flat_map(|plan| &mut plan.layers) {
            // Experts in slots stay there for later evaluations.
            if layer.slots.is_none() {
                let transfers = layer.products.iter().map(|product| &product.transfer);
                transfers.for_each(|transfer| transfer.count_unused());
            }
            if Config::get().postfetch.debug {
                layer.log_ended();
            }
        }
        if !std::mem::take(&mut self.begun) || self.order != Order::Unknown {
            return;
        }
        match self.seen {
            true => self.order = Order::Expected,
            // The calls of the scheduler do not go through the dynamic loader.
            false => self.leave_copies_to_program(),
        }
    }

    /// Ends the use of the plan: its graph is dropped.
    pub fn retire(&mut self) {
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
    pub fn drain(&mut self) {
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

    /// Whether the thread that issues copies is lost: it may read weights and write to memory for
    /// experts at any later time.
    pub fn is_lost(&self) -> bool {
        self.fetcher.as_ref().is_some_and(Fetcher::is_lost)
    }

    /// Leaves all copies to the program from now on, in memory of its own.
    pub fn leave(&mut self, ggml: &Ggml) {
        self.order = Order::Other;
        if let Some(plan) = &self.plan {
            // SAFETY: on the thread that evaluates the graph of the plan.
            unsafe { plan.restore(ggml) };
        }
    }

    /// The program makes all copies from now on.
    pub fn leave_copies_to_program(&mut self) {
        if self.order != Order::Other {
            self.order = Order::Other;
            FIGURES.note_obstacle(
                "the program copies experts itself: its scheduler's calls come in an order that is not known, or cannot be seen; report it with the version of llama.cpp".into(),
            );
        }
    }
}
