//! Switches of tensors between evaluations.
//!
//! A switch replaces the descriptors of tensors while no evaluation reads them. Two threads
//! can execute it: the thread that requested it, when no evaluation runs, or a thread of the
//! program that is about to begin an evaluation. Beginning an evaluation costs two atomic
//! operations; a lock is taken only while a switch is pending.
//!
//! Each scheduler has a [`Slot`], which its thread writes and a switch reads. Each side
//! publishes its own state before it reads the other's: an evaluation stores its state and
//! then loads `pending`, a switch stores `pending` and then loads the states, all
//! sequentially consistent. At least one of them sees the other. `tests/interleavings` executes
//! this module with each order of these accesses.

use std::cell::Cell;
use std::time::Duration;

use once_cell::sync::{Lazy, OnceCell};
use sidecar_core::reload::{Pauses, Switched};
use sidecar_core::signals;

use crate::sync::{
    AtomicBool, AtomicPtr, AtomicU32, AtomicU64, AtomicUsize, Condvar, Instant, Mutex, MutexGuard,
    Ordering,
};

/// How long a switch waits for evaluations to end. Evaluations of large models on slow
/// machines take minutes; after this time the reload fails and starts again later.
const SWITCH_TIMEOUT: Duration = Duration::from_secs(60);
/// How long a switch waits while only a kept graph blocks it: the program is idle, and
/// builds another graph with its next evaluation.
const KEPT_GRAPH_TIMEOUT: Duration = Duration::from_secs(10);
/// The longest time that one evaluation is delayed so that others can end.
const MAX_YIELD: Duration = Duration::from_millis(100);
/// How often a pending switch reads the slots again: states also change without a
/// notification.
const RECHECK_INTERVAL: Duration = Duration::from_millis(2);
/// After this time, a decode that was begun and did not evaluate counts as abandoned.
/// Building a graph takes milliseconds.
const BEGIN_TIMEOUT: Duration = Duration::from_secs(1);
/// How long a fork waits for a switch.
const LONGEST_FORK_WAIT: Duration = Duration::from_secs(1);
/// The time between two looks at the slots above which the process was stopped in between.
const LONGEST_LOOK: Duration = Duration::from_millis(500);

/// Why a switch does not happen any more.
const SHUT_DOWN: &str = "the process ends";

/// Why a switch of a freed model does not happen.
pub const MODEL_FREED: &str = "the model was freed meanwhile";

/// What blocks a switch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Obstacle {
    /// An evaluation runs or was begun.
    Evaluation,
    /// A graph is kept that was built for the current tensors, and there is no certain
    /// way to have it rebuilt. It goes when the program builds another graph.
    KeptGraph,
}

impl Obstacle {
    /// Returns its name, in lower case.
    pub fn name(self) -> &'static str {
        match self {
            Obstacle::Evaluation => "evaluation",
            Obstacle::KeptGraph => "kept_graph",
        }
    }
}

/// A set of models. It may report more members than were put in.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct ModelSet(u64);

impl ModelSet {
    /// Returns the set of one model. Models whose numbers differ by a multiple of 64 count
    /// as one.
    pub fn of(number: u64) -> ModelSet {
        ModelSet(1 << (number % 64))
    }

    /// Adds the members of another set.
    pub fn extend(&mut self, other: ModelSet) {
        self.0 |= other.0;
    }

    /// Whether both sets have a model in common.
    fn overlaps(self, other: ModelSet) -> bool {
        self.0 & other.0 != 0
    }
}

/// State of a slot: nothing runs.
const IDLE: u32 = 0;
/// State of a slot: a decode has begun; its graph is being built or is kept.
const BEGUN: u32 = 1;
/// State of a slot: a function of ggml runs.
const RUNNING: u32 = 2;
/// State of a slot: a backend may still run the evaluation, or the decode may go on with
/// another part of its batch.
const RETURNED: u32 = 3;

/// The barrier of the process: its slots, and the switch that is pending.
struct Barrier {
    /// The slot that was linked last; each leads to the one before. Slots stay linked for ever.
    linked: AtomicPtr<Slot>,
    /// Why nothing can be switched any more.
    refused: OnceCell<&'static str>,
    /// Waits for evaluations that the program left and does not wait for.
    finish_abandoned: OnceCell<fn()>,
    /// How often a slot became idle or was freed.
    rests: AtomicU64,
    /// Whether a switch is pending or runs.
    pending: AtomicBool,
    /// Whether switches are over for good.
    shut: AtomicBool,
    /// Counts switches.
    generation: AtomicU64,
    /// The generation of the last switch of weights that graphs have views of.
    viewed_in: AtomicU64,
    /// Milliseconds for which the process was stopped while a switch was pending (SIGSTOP, a frozen
    /// control group). A decode that was begun before is not abandoned because of them.
    stopped_ms: AtomicU64,
    /// Held by the thread that requests a switch: one at a time.
    turn: Mutex<()>,
    /// Held while a switch runs.
    switch: Mutex<Switch>,
    /// Notified when `switch` or a slot changes.
    changed: Condvar,
}

/// The pending switch, and what switches cost so far.
struct Switch {
    pending: Option<Pending>,
    pauses: Pauses,
    /// When the slots were last read for the pending switch.
    last_look: Option<Instant>,
}

static BARRIER: Barrier = Barrier {
    linked: AtomicPtr::new(std::ptr::null_mut()),
    refused: OnceCell::new(),
    finish_abandoned: OnceCell::new(),
    rests: AtomicU64::new(0),
    pending: AtomicBool::new(false),
    shut: AtomicBool::new(false),
    generation: AtomicU64::new(0),
    viewed_in: AtomicU64::new(0),
    stopped_ms: AtomicU64::new(0),
    turn: Mutex::new(()),
    switch: Mutex::new(Switch {
        pending: None,
        pauses: Pauses::new(),
        last_look: None,
    }),
    changed: Condvar::new(),
};

/// What a switch has to know of one scheduler. Written by the thread that evaluates.
pub struct Slot {
    /// Address of the scheduler, or of the backend that is used without one; 0 when the
    /// slot is free.
    key: AtomicUsize,
    state: AtomicU32,
    /// When the state was last set to [`BEGUN`] or [`RETURNED`], in milliseconds of the process.
    since: AtomicU64,
    /// Whether a backend may still run the last evaluation.
    in_flight: AtomicBool,
    /// The buffer of libllama's results whose size is read as a decode begins; 0 while
    /// it is unknown, and with it the moment when a decode begins.
    output: AtomicUsize,
    /// Whether the scheduler keeps a graph.
    keeps_graph: AtomicBool,
    /// Whether a kept graph stays valid after a switch.
    stays_valid: AtomicBool,
    /// Whether it stays valid after a switch of weights that no graph has views of.
    survives_if_no_views: AtomicBool,
    /// Whether the program can be made to rebuild a kept graph.
    can_rebuild: AtomicBool,
    /// The models whose weights the graph reads.
    reads: AtomicU64,
    /// The slot that was linked before.
    before: AtomicPtr<Slot>,
}

/// What a switch has to know of a graph that a scheduler allocates.
pub struct SlotGraph {
    /// Whether the scheduler keeps it.
    pub is_kept: bool,
    /// Whether it stays valid after a switch.
    pub stays_valid: bool,
    /// Whether it stays valid after a switch of weights that no graph has views of.
    pub survives_if_no_views: bool,
    /// The models whose weights it reads.
    pub reads: ModelSet,
}

impl Slot {
    /// Returns a slot that is free and not linked.
    pub const fn free() -> Slot {
        Slot {
            key: AtomicUsize::new(0),
            state: AtomicU32::new(IDLE),
            since: AtomicU64::new(0),
            in_flight: AtomicBool::new(false),
            output: AtomicUsize::new(0),
            keeps_graph: AtomicBool::new(false),
            stays_valid: AtomicBool::new(true),
            survives_if_no_views: AtomicBool::new(true),
            can_rebuild: AtomicBool::new(false),
            reads: AtomicU64::new(0),
            before: AtomicPtr::new(std::ptr::null_mut()),
        }
    }

    /// Makes switches read the slot, from its first use on. Called once, by one thread at a time.
    /// `finish_abandoned` waits for evaluations that were left and did not go on since.
    pub fn link(&'static self, finish_abandoned: fn()) {
        let _ = BARRIER.finish_abandoned.set(finish_abandoned);
        let before = BARRIER.linked.load(Ordering::SeqCst);
        self.before.store(before, Ordering::SeqCst);
        BARRIER
            .linked
            .store(std::ptr::from_ref(self).cast_mut(), Ordering::SeqCst);
    }

    /// Claims the slot, which is linked and free, for a scheduler.
    pub fn claim(&self, key: usize) {
        self.key.store(key, Ordering::SeqCst);
    }

    /// Returns the address that the slot was claimed for; 0 when it is free.
    pub fn key(&self) -> usize {
        self.key.load(Ordering::Relaxed)
    }

    /// Whether the graph reads weights of any of these models.
    pub fn reads(&self, models: ModelSet) -> bool {
        ModelSet(self.reads.load(Ordering::SeqCst)).overlaps(models)
    }

    /// Records the graph that is about to be allocated.
    pub fn set_graph(&self, graph: &SlotGraph) {
        let order = Ordering::SeqCst;
        self.stays_valid.store(graph.stays_valid, order);
        let if_no_views = graph.survives_if_no_views;
        self.survives_if_no_views.store(if_no_views, order);
        self.reads.store(graph.reads.0, order);
        self.keeps_graph.store(graph.is_kept, order);
    }

    /// Records that the graph is dropped.
    pub fn drop_graph(&self) {
        self.keeps_graph.store(false, Ordering::SeqCst);
    }

    /// Whether the scheduler keeps a graph.
    pub fn keeps_graph(&self) -> bool {
        self.keeps_graph.load(Ordering::Relaxed)
    }

    /// Whether the graph stays valid after a switch.
    pub fn stays_valid(&self) -> bool {
        self.stays_valid.load(Ordering::Relaxed)
    }

    /// Whether it stays valid after a switch of weights that no graph has views of.
    pub fn survives_if_no_views(&self) -> bool {
        self.survives_if_no_views.load(Ordering::Relaxed)
    }

    /// Records whether the program can be made to rebuild a kept graph.
    pub fn set_can_rebuild(&self, can: bool) {
        self.can_rebuild.store(can, Ordering::SeqCst);
    }

    /// Records the buffer of libllama's results whose size is read as a decode begins.
    pub fn set_output(&self, buffer: usize) {
        self.output.store(buffer, Ordering::Relaxed);
    }

    /// Whether this is the buffer of its results.
    pub fn has_output(&self, buffer: usize) -> bool {
        self.output.load(Ordering::Relaxed) == buffer
    }

    /// Forgets a buffer of results, if it is its own.
    pub fn forget_output(&self, buffer: usize) {
        let order = Ordering::Relaxed;
        let _ = self.output.compare_exchange(buffer, 0, order, order);
    }

    /// Records that no backend runs the last evaluation any more.
    pub fn backends_are_done(&self) {
        self.in_flight.store(false, Ordering::SeqCst);
    }

    /// Begins a decode; a pending switch can go first. `synchronize` waits for backends.
    pub fn begin(&self, synchronize: impl FnOnce()) {
        self.since.store(now_ms(), Ordering::SeqCst);
        let before = self.state.swap(BEGUN, Ordering::SeqCst);
        if before != RUNNING && is_pending() {
            if self.in_flight.load(Ordering::SeqCst) {
                synchronize();
            }
            self.yield_to_switch(BEGUN);
        }
    }

    /// Enters a function of ggml that reads tensors, in the course of a decode.
    pub fn enter(&self) {
        self.state.swap(RUNNING, Ordering::SeqCst);
        if is_pending() {
            wait_for_switch();
        }
    }

    /// The same if a decode has begun, which the result states.
    pub fn enter_if_begun(&self) -> bool {
        let order = Ordering::SeqCst;
        let is_begun = self.state.compare_exchange(BEGUN, RUNNING, order, order);
        if is_begun.is_ok() && is_pending() {
            wait_for_switch();
        }
        is_begun.is_ok()
    }

    /// Enters the evaluation; a pending switch can go first if the graph stays valid and
    /// it is not known that the decode began.
    pub fn enter_compute(&self) {
        let before = self.state.swap(RUNNING, Ordering::SeqCst);
        if is_pending() {
            match before == IDLE && self.stays_valid.load(Ordering::Relaxed) {
                true => self.yield_to_switch(RUNNING),
                false => wait_for_switch(),
            }
        }
    }

    /// Leaves a function of ggml; the decode goes on.
    pub fn leave(&self) {
        self.since.store(now_ms(), Ordering::SeqCst);
        self.state.store(BEGUN, Ordering::SeqCst);
    }

    /// Leaves an evaluation that a backend may still run.
    pub fn leave_running(&self) {
        self.in_flight.store(true, Ordering::SeqCst);
        self.since.store(now_ms(), Ordering::SeqCst);
        self.settle(RETURNED);
    }

    /// Leaves an evaluation that has ended.
    pub fn leave_ended(&self) {
        self.in_flight.store(false, Ordering::SeqCst);
        self.rest();
    }

    /// Whether an evaluation was left that a backend may still run.
    pub fn has_returned(&self) -> bool {
        self.state.load(Ordering::SeqCst) == RETURNED
    }

    /// Whether an evaluation was left that a backend may still run, and the decode did not go on since.
    pub fn is_returned_and_abandoned(&self) -> bool {
        self.has_returned() && self.is_abandoned()
    }

    /// Records that an evaluation that was left has ended. Nothing else leaves one meanwhile.
    pub fn end_if_returned(&self) {
        let order = Ordering::SeqCst;
        let ended = self.state.compare_exchange(RETURNED, IDLE, order, order);
        if ended.is_ok() {
            self.in_flight.store(false, order);
            BARRIER.rests.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Leaves a function of ggml after which nothing runs.
    pub fn rest(&self) {
        self.settle(IDLE);
    }

    fn settle(&self, state: u32) {
        self.state.store(state, Ordering::SeqCst);
        BARRIER
            .rests
            .fetch_add(u64::from(state == IDLE), Ordering::Relaxed);
        if is_pending() {
            notify();
        }
    }

    fn yield_to_switch(&self, then: u32) {
        self.state.store(IDLE, Ordering::SeqCst);
        yield_to_switch(|| self.state.store(then, Ordering::SeqCst));
    }

    fn is_abandoned(&self) -> bool {
        let age = now_ms().saturating_sub(self.since.load(Ordering::SeqCst));
        age > BEGIN_TIMEOUT.as_millis() as u64
    }

    /// Frees the slot. [`hold`] keeps switches away meanwhile.
    pub fn release(&self) {
        self.state.store(IDLE, Ordering::SeqCst);
        self.output.store(0, Ordering::Relaxed);
        self.keeps_graph.store(false, Ordering::SeqCst);
        self.stays_valid.store(true, Ordering::SeqCst);
        self.survives_if_no_views.store(true, Ordering::SeqCst);
        self.can_rebuild.store(false, Ordering::SeqCst);
        self.reads.store(0, Ordering::SeqCst);
        self.in_flight.store(false, Ordering::SeqCst);
        BARRIER.rests.fetch_add(1, Ordering::Relaxed);
        self.key.store(0, Ordering::SeqCst);
    }

    fn obstacle(&self, replaced: &Replaced) -> Option<Obstacle> {
        if self.key.load(Ordering::SeqCst) == 0 {
            return None;
        }
        let flag = |flag: &AtomicBool| flag.load(Ordering::SeqCst);
        match self.state.load(Ordering::SeqCst) {
            IDLE => {}
            BEGUN if self.is_abandoned() && !flag(&self.in_flight) => {}
            _ => return Some(Obstacle::Evaluation),
        }
        // Without the output buffer it is unknown when a decode begins.
        let begin_is_seen = self.output.load(Ordering::SeqCst) != 0;
        let survives = flag(&self.stays_valid)
            || (flag(&self.survives_if_no_views) && !(replaced.viewed)())
            || (flag(&self.can_rebuild) && begin_is_seen);
        let is_read = self.reads(replaced.models);
        (flag(&self.keeps_graph) && !survives && is_read).then_some(Obstacle::KeptGraph)
    }
}

/// Returns the slots that were ever used.
fn slots() -> impl Iterator<Item = &'static Slot> {
    // SAFETY: only references that live for ever are linked.
    let slot = |linked: &AtomicPtr<Slot>| unsafe { linked.load(Ordering::SeqCst).as_ref() };
    std::iter::successors(slot(&BARRIER.linked), move |after| slot(&after.before))
}

/// Refuses all switches from now on. Returns whether none was refused before.
pub fn refuse(reason: &'static str) -> bool {
    BARRIER.refused.set(reason).is_ok()
}

/// How often a slot became idle.
pub fn rests() -> u64 {
    BARRIER.rests.load(Ordering::Relaxed)
}

/// Whether an evaluation runs, or one began within the last second.
pub fn is_busy() -> bool {
    let now = now_ms();
    slots().any(|slot| {
        slot.key() != 0
            && (slot.state.load(Ordering::Relaxed) != IDLE
                || now.saturating_sub(slot.since.load(Ordering::Relaxed)) < 1000)
    })
}

/// Returns what blocks a switch of these tensors.
fn obstacle(replaced: &Replaced) -> Option<Obstacle> {
    if BARRIER.refused.get().is_some() {
        return Some(Obstacle::Evaluation);
    }
    let mut kept = None;
    for slot in slots() {
        match slot.obstacle(replaced) {
            Some(Obstacle::Evaluation) => return Some(Obstacle::Evaluation),
            Some(Obstacle::KeptGraph) => kept = Some(Obstacle::KeptGraph),
            None => {}
        }
    }
    kept
}

/// Returns the milliseconds that the process ran, without those for which it is known to have
/// been stopped.
fn now_ms() -> u64 {
    static START: Lazy<Instant> = Lazy::new(Instant::now);
    let stopped = BARRIER.stopped_ms.load(Ordering::SeqCst);
    (START.elapsed().as_millis() as u64).saturating_sub(stopped)
}

/// Keeps switches away from the fork that follows: a child would have tensors that are replaced in
/// part. A switch that does not end soon is not waited for.
pub fn hold_for_fork() {
    let held = signals::lock_around_fork(LONGEST_FORK_WAIT, || BARRIER.switch.try_lock());
    HOLDS.set(held.is_some());
    std::mem::forget(held);
}

/// Ends [`hold_for_fork`] in the process that forked. The child has no switches.
pub fn release_after_fork() {
    if HOLDS.replace(false) {
        // SAFETY: this thread locked it before the fork, and forgot the guard.
        unsafe { BARRIER.switch.force_unlock() };
    }
}

thread_local! {
    /// Whether this thread holds the lock for a fork.
    static HOLDS: Cell<bool> = const { Cell::new(false) };
}

/// The tensors that a switch replaces.
pub struct Replaced {
    /// Their models.
    pub models: ModelSet,
    /// Whether graphs have views of any of them: by now, because the program may have built a
    /// graph since the switch was requested.
    pub viewed: Box<dyn Fn() -> bool + Send>,
}

type Work = Box<dyn FnMut() -> Result<(), &'static str> + Send>;

/// A switch that was requested.
struct Pending {
    replaced: Replaced,
    /// Replaces them, or returns why it replaced none.
    work: Work,
    /// How many switches the work is: 0 if it changes no tensor.
    counts: u64,
    since: Instant,
    result: Option<Result<Switched, &'static str>>,
}

/// Returns the number of switches so far.
pub fn generation() -> u64 {
    BARRIER.generation.load(Ordering::SeqCst)
}

/// Returns the generation of the last switch of weights that graphs have views of.
pub fn viewed_in() -> u64 {
    BARRIER.viewed_in.load(Ordering::SeqCst)
}

/// Returns how long switches kept evaluations out so far.
pub fn pauses() -> Pauses {
    BARRIER.switch.lock().pauses
}

/// Records that an evaluation was delayed by the last switch.
pub fn note_pause(pause: Duration) {
    BARRIER.switch.lock().pauses.add(pause);
}

/// Whether a switch is pending: evaluations then go through [`yield_to_switch`] or
/// [`wait_for_switch`].
pub fn is_pending() -> bool {
    BARRIER.pending.load(Ordering::SeqCst)
}

/// Returns what blocks the pending switch, and how long it has been pending.
pub fn pending() -> Option<(Option<Obstacle>, Duration)> {
    let switch = BARRIER.switch.lock();
    let pending = switch.pending.as_ref()?;
    Some((obstacle(&pending.replaced), pending.since.elapsed()))
}

/// Runs `work`, which replaces these tensors, between evaluations, on this thread
/// or on a thread of the program. `work` returns an error if it replaced nothing. The switch is
/// given up when `wanted` returns false.
///
/// One switch runs at a time: the reload engine of a model orders the switches of that
/// model, and the lock here those of several models.
pub fn switch(
    replaced: Replaced,
    wanted: impl Fn() -> bool,
    work: impl FnMut() -> Result<(), &'static str> + Send + 'static,
) -> Result<Switched, &'static str> {
    wait(replaced, wanted, Box::new(work), 1)
}

/// Runs `work`, which changes no tensor, between evaluations, when every kept graph of these models
/// can be rebuilt.
pub fn between_evaluations(
    models: ModelSet,
    wanted: impl Fn() -> bool,
    mut work: impl FnMut() + Send + 'static,
) -> Result<(), &'static str> {
    let models = Replaced {
        models,
        viewed: Box::new(|| false),
    };
    let work = move || {
        work();
        Ok(())
    };
    wait(models, wanted, Box::new(work), 0).map(|_| ())
}

fn wait(
    replaced: Replaced,
    wanted: impl Fn() -> bool,
    work: Work,
    counts: u64,
) -> Result<Switched, &'static str> {
    let _turn = BARRIER.turn.lock();
    let began = Instant::now();
    let mut switch = BARRIER.switch.lock();
    switch.last_look = None;
    switch.pending = Some(Pending {
        replaced,
        work,
        counts,
        since: began,
        result: None,
    });
    BARRIER.pending.store(true, Ordering::SeqCst);
    let result = loop {
        let done = switch.pending.as_ref().is_some_and(|p| p.result.is_some());
        let obstacle = advance(&mut switch);
        if let Some(result) = switch.pending.as_mut().and_then(|p| p.result.take()) {
            // An evaluation that executed the switch has counted its wait.
            if let (false, 1.., Ok(switched)) = (done, counts, &result) {
                switch.pauses.add(switched.switch);
            }
            break result;
        }
        let (timeout, refusal) = match obstacle {
            Some(Obstacle::KeptGraph) => (
                KEPT_GRAPH_TIMEOUT,
                "swap postponed: the idle program holds a graph built for the current tensors; reload again and let the program evaluate within ten seconds",
            ),
            _ => (
                SWITCH_TIMEOUT,
                "swap postponed: an evaluation did not end within a minute; nothing changed, reload again",
            ),
        };
        if is_shut() {
            break Err(SHUT_DOWN);
        }
        if let Some(reason) = BARRIER.refused.get() {
            break Err(*reason);
        }
        if !wanted() {
            break Err(MODEL_FREED);
        }
        if began.elapsed() > timeout {
            break Err(refusal);
        }
        BARRIER.changed.wait_for(&mut switch, RECHECK_INTERVAL);
        if let Some(finish) = BARRIER.finish_abandoned.get() {
            MutexGuard::unlocked(&mut switch, finish);
        }
    };
    switch.pending = None;
    BARRIER.pending.store(false, Ordering::SeqCst);
    BARRIER.changed.notify_all();
    result
}

/// Executes the pending switch if nothing blocks it; returns what does.
fn advance(switch: &mut Switch) -> Option<Obstacle> {
    let pending = switch.pending.as_mut()?;
    if pending.result.is_some() {
        return None;
    }
    let now = Instant::now();
    let pause = switch.last_look.replace(now).map(|last| now - last);
    if let Some(stopped) = pause.filter(|pause| *pause > LONGEST_LOOK) {
        BARRIER
            .stopped_ms
            .fetch_add(stopped.as_millis() as u64, Ordering::SeqCst);
    }
    if is_shut() {
        // What an evaluation has to do after a switch is not done any more.
        pending.result = Some(Err(SHUT_DOWN));
        return None;
    }
    let obstacle = obstacle(&pending.replaced);
    if obstacle.is_none() {
        let began = Instant::now();
        let done = (pending.work)();
        let took = began.elapsed();
        pending.result = Some(done.map(|()| {
            let counts = pending.counts;
            let generation = BARRIER.generation.fetch_add(counts, Ordering::SeqCst) + counts;
            if (pending.replaced.viewed)() {
                BARRIER.viewed_in.store(generation, Ordering::SeqCst);
            }
            Switched {
                wait: began - pending.since,
                switch: took,
                generation,
            }
        }));
        BARRIER.changed.notify_all();
    }
    obstacle
}

/// Executes the pending switch on a thread of the program whose own slot is idle. While
/// other evaluations run, waits for them up to [`MAX_YIELD`]. `resume` runs before another
/// switch can begin.
fn yield_to_switch(resume: impl FnOnce()) {
    let began = Instant::now();
    let mut switch = BARRIER.switch.lock();
    while advance(&mut switch) == Some(Obstacle::Evaluation) && began.elapsed() < MAX_YIELD {
        BARRIER.changed.wait_for(&mut switch, RECHECK_INTERVAL);
    }
    switch.pauses.add(began.elapsed());
    resume();
}

/// Waits until no switch runs; a pending one stays pending.
fn wait_for_switch() {
    drop(BARRIER.switch.lock());
}

/// Makes a pending switch read the slots again.
pub fn notify() {
    BARRIER.changed.notify_all();
}

/// Ends switches for good: the process ends or the drop-in was disabled.
pub fn shut() {
    BARRIER.shut.store(true, Ordering::SeqCst);
}

/// Whether switches are over for good.
pub fn is_shut() -> bool {
    BARRIER.shut.load(Ordering::SeqCst)
}

/// Keeps switches away while the result is held.
pub fn hold() -> impl Sized {
    BARRIER.switch.lock()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tensors_of(model: u64, viewed: bool) -> Replaced {
        Replaced {
            models: ModelSet::of(model),
            viewed: Box::new(move || viewed),
        }
    }

    #[test]
    fn evaluations_and_kept_graphs_of_the_same_models_block_a_switch() {
        let (one, other) = (&tensors_of(1, false), &tensors_of(2, false));
        let viewed = &tensors_of(1, true);
        static SLOT: Slot = Slot::free();
        let slot = &SLOT;
        slot.link(|| ());
        slot.claim(0x1000);
        let set_graph = |stays_valid, survives_if_no_views| {
            slot.set_graph(&SlotGraph {
                is_kept: true,
                stays_valid,
                survives_if_no_views,
                reads: one.models,
            });
        };
        assert_eq!(obstacle(one), None);
        slot.enter();
        assert_eq!(obstacle(one), Some(Obstacle::Evaluation));
        assert_eq!(obstacle(other), Some(Obstacle::Evaluation));
        set_graph(true, true);
        slot.rest();
        assert_eq!(obstacle(one), None, "the graph stays valid");
        set_graph(false, true);
        assert_eq!(obstacle(one), None, "the graph has no views of them");
        assert_eq!(obstacle(viewed), Some(Obstacle::KeptGraph));
        set_graph(false, false);
        assert_eq!(obstacle(one), Some(Obstacle::KeptGraph));
        assert_eq!(obstacle(other), None);
        slot.set_can_rebuild(true);
        assert_eq!(obstacle(one), Some(Obstacle::KeptGraph));
        slot.set_output(0x2000);
        assert_eq!(obstacle(one), None, "it is rebuilt when a decode begins");
        slot.begin(|| ());
        assert_eq!(obstacle(one), Some(Obstacle::Evaluation));
        slot.leave_running();
        assert_eq!(obstacle(one), Some(Obstacle::Evaluation));
        slot.leave_ended();
        assert_eq!(obstacle(one), None);
        slot.release();
        assert_eq!(slot.key(), 0);
    }

    #[test]
    fn no_switch_runs_during_a_fork() {
        hold_for_fork();
        assert!(BARRIER.switch.is_locked());
        std::thread::scope(|scope| {
            let switched = scope.spawn(|| switch(tensors_of(9, false), || true, || Ok(())));
            release_after_fork();
            switched.join().expect("no panic").expect("no obstacle");
        });
        // A parent that did not get the lock does not unlock it.
        let switch = BARRIER.switch.lock();
        release_after_fork();
        assert!(BARRIER.switch.is_locked());
        drop(switch);
    }

    #[test]
    fn a_switch_runs_its_work_once() {
        let (before, paused) = (generation(), pauses().count);
        let switched = switch(tensors_of(9, false), || true, || Ok(())).expect("no obstacle");
        assert_eq!(switched.generation, before + 1);
        assert_eq!(pauses().count, paused + 1, "each switch is a pause");
        assert_eq!(viewed_in(), 0);
        switch(tensors_of(9, true), || true, || Ok(())).expect("no obstacle");
        assert_eq!(viewed_in(), generation());
        assert_eq!(
            switch(tensors_of(9, false), || true, || Err(MODEL_FREED)).map(|_| ()),
            Err(MODEL_FREED)
        );
    }
}
