//! Switches between evaluations.
//!
//! A switch replaces the descriptors of tensors while no evaluation reads them. It
//! is done by whoever comes first: the thread that asks for it, when every
//! evaluation rests, or a thread of the host that is about to begin one. Beginning
//! costs two atomic operations; a lock is taken only while a switch is waiting.
//!
//! Each side announces itself before it looks at the other: an evaluation stores its
//! state and then loads [`WAITING`], a switch stores `WAITING` and then loads the
//! states, all sequentially consistent. At least one of them sees the other.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use llama_sidecar::reload::{Pauses, Switched};
use parking_lot::{Condvar, Mutex};

use crate::models::ModelSet;
use crate::sched;

/// How long a switch is tried. Evaluations of large models on slow machines take
/// minutes; after this the files are looked at again and the switch staged anew.
const PATIENCE: Duration = Duration::from_secs(60);
/// How long it is tried while only a kept graph is in the way: the host rests, and
/// will build another when it goes on.
const PATIENCE_AT_REST: Duration = Duration::from_secs(10);
/// The longest that one evaluation is held up so that others can end theirs.
const COURTESY: Duration = Duration::from_millis(100);
/// How often a waiting switch looks again: states also change without a word.
const LOOK_AGAIN: Duration = Duration::from_millis(2);

/// Why a switch of a model that the host frees does not happen.
const MODEL_FREED: &str = "the model was freed meanwhile";

/// What stands in the way of a switch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Obstacle {
    /// An evaluation runs or was begun.
    Evaluation,
    /// A graph is kept that was built for the tensors as they are, and there is no
    /// certain way to have it built again. It goes when the host builds another.
    KeptGraph,
}

impl Obstacle {
    /// Its name, in lower case.
    pub fn name(self) -> &'static str {
        match self {
            Obstacle::Evaluation => "evaluation",
            Obstacle::KeptGraph => "kept_graph",
        }
    }
}

/// Whether a switch waits or runs.
static WAITING: AtomicBool = AtomicBool::new(false);
/// Whether nothing is switched any more.
static SHUT: AtomicBool = AtomicBool::new(false);
/// How many switches there have been.
static GENERATION: AtomicU64 = AtomicU64::new(0);
static GATE: Mutex<Gate> = Mutex::new(Gate {
    waiting: None,
    pauses: Pauses::new(),
});
static CHANGED: Condvar = Condvar::new();

struct Gate {
    waiting: Option<Waiting>,
    pauses: Pauses,
}

struct Waiting {
    /// The models whose tensors it replaces.
    models: ModelSet,
    /// Does it; false when it is not to be done any more.
    work: Box<dyn FnMut() -> bool + Send>,
    since: Instant,
    result: Option<Result<Switched, &'static str>>,
}

/// How many switches there have been.
pub fn generation() -> u64 {
    GENERATION.load(Ordering::SeqCst)
}

/// How long evaluations were held up so far.
pub fn pauses() -> Pauses {
    GATE.lock().pauses
}

/// Whether a switch waits: evaluations then go through [`give_way`] or [`join`].
pub fn is_waiting() -> bool {
    WAITING.load(Ordering::SeqCst)
}

/// What stands in the way of the switch that waits, and since when it waits.
pub fn waiting_for() -> Option<(Option<Obstacle>, Duration)> {
    let gate = GATE.lock();
    let waiting = gate.waiting.as_ref()?;
    Some((sched::obstacle(waiting.models), waiting.since.elapsed()))
}

/// Runs `work`, which replaces tensors of these models, between evaluations, here or on a
/// thread of the host. It returns whether it did anything; when it did not, nothing was
/// switched. Gives up once `wanted` says no.
///
/// One switch at a time: the reload engine of a model sees to that for its own, and
/// the caller for those of several models.
pub fn switch(
    models: ModelSet,
    wanted: impl Fn() -> bool,
    work: impl FnMut() -> bool + Send + 'static,
) -> Result<Switched, &'static str> {
    static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());
    let _turn = ONE_AT_A_TIME.lock();
    let began = Instant::now();
    let mut gate = GATE.lock();
    gate.waiting = Some(Waiting {
        models,
        work: Box::new(work),
        since: began,
        result: None,
    });
    WAITING.store(true, Ordering::SeqCst);
    let result = loop {
        let obstacle = advance(&mut gate);
        if let Some(result) = gate.waiting.as_mut().and_then(|w| w.result.take()) {
            break result;
        }
        let (patience, refusal) = match obstacle {
            Some(Obstacle::KeptGraph) => (
                PATIENCE_AT_REST,
                "swap postponed: the idle program holds a graph built for the current tensors; run one evaluation, then reload again",
            ),
            _ => (
                PATIENCE,
                "swap postponed: an evaluation did not end within a minute; nothing changed, reload again",
            ),
        };
        if is_shut() {
            break Err("the process ends");
        }
        if !wanted() {
            break Err(MODEL_FREED);
        }
        if began.elapsed() > patience {
            break Err(refusal);
        }
        CHANGED.wait_for(&mut gate, LOOK_AGAIN);
    };
    gate.waiting = None;
    WAITING.store(false, Ordering::SeqCst);
    CHANGED.notify_all();
    result
}

/// Does the switch that waits, if nothing stands in its way.
fn advance(gate: &mut Gate) -> Option<Obstacle> {
    let waiting = gate.waiting.as_mut()?;
    if waiting.result.is_some() {
        return None;
    }
    let obstacle = sched::obstacle(waiting.models);
    if obstacle.is_none() {
        let began = Instant::now();
        let done = (waiting.work)();
        let switch = began.elapsed();
        waiting.result = Some(match done {
            true => Ok(Switched {
                wait: began - waiting.since,
                switch,
                generation: GENERATION.fetch_add(1, Ordering::SeqCst) + 1,
            }),
            false => Err(MODEL_FREED),
        });
        CHANGED.notify_all();
    }
    obstacle
}

/// Lets the switch that waits go first. Called by a thread of the host whose own
/// evaluation rests; when others do not, it waits a little for them. `resume` runs
/// before anybody can switch again.
pub fn give_way(resume: impl FnOnce()) {
    let began = Instant::now();
    let mut gate = GATE.lock();
    while advance(&mut gate) == Some(Obstacle::Evaluation) && began.elapsed() < COURTESY {
        CHANGED.wait_for(&mut gate, LOOK_AGAIN);
    }
    gate.pauses.add(began.elapsed());
    resume();
}

/// Waits until no switch runs; one that waits goes on waiting.
pub fn join() {
    drop(GATE.lock());
}

/// Tells a switch that waits to look again.
pub fn changed() {
    CHANGED.notify_all();
}

/// Keeps switches away for good: the process ends.
pub fn shut() {
    SHUT.store(true, Ordering::SeqCst);
}

/// Whether nothing is switched any more.
pub fn is_shut() -> bool {
    SHUT.load(Ordering::SeqCst)
}

/// Keeps switches away while the result is held.
pub fn closed() -> impl Sized {
    GATE.lock()
}
