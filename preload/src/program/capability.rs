//! What a capability is informed of.

use std::collections::BTreeMap;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Once, OnceLock};

use parking_lot::Mutex;
use sidecar_core::config::Config;
use sidecar_core::protocol::NoEffect;
use sidecar_core::text;
use sidecar_core::trace::Ids;

use crate::ggml::Ggml;
use crate::program::barrier;
use crate::program::models::Model;
use crate::program::routing::Routed;
use crate::program::sched::{Allocated, Scheduler};
use crate::program::weight_copies::WeightCopy;

/// What starts once there is something to do, whether there is, and what starts it.
static BEGIN: OnceLock<fn()> = OnceLock::new();
static IS_NEEDED: AtomicBool = AtomicBool::new(false);
static HAS_BEGUN: Once = Once::new();

/// Sets what [`begin`] calls, and calls it if that was called before.
pub fn set_begin(call: fn()) {
    let _ = BEGIN.set(call);
    if IS_NEEDED.load(Ordering::SeqCst) {
        begin();
    }
}

/// Starts the threads that all capabilities share, once. Some programs enter a sandbox after the first evaluation, which a
/// process with threads cannot: where nothing is to be done, there is none.
pub fn begin() {
    IS_NEEDED.store(true, Ordering::SeqCst);
    if let Some(call) = BEGIN.get() {
        HAS_BEGUN.call_once(call);
    }
}

/// A capability of the drop-in, like hot-swap or the expert trace.
///
/// Its methods run on the thread of the program that makes the call which is reported, and
/// delay that thread. What is reported for each evaluation must neither allocate nor take a
/// lock that another thread holds for long.
pub trait Capability: Sync {
    /// Whether the environment enables it.
    fn is_enabled(&self) -> bool;

    /// Whether there may be nothing for it to do after [`Capability::start`] either: it calls [`begin`] when there is.
    fn begins_later(&self) -> bool {
        false
    }

    /// Starts its threads, once, when the first model is complete. Called if it is enabled.
    fn start(&self) {}

    /// A model is complete: a graph reads its tensors for the first time.
    fn model_complete(&self, _model: &Arc<Model>) {}

    /// The program is about to free a model, which is no longer registered.
    fn model_freed(&self, _model: &Model) {}

    /// The program is about to free the memory of tensors.
    fn tensors_freed(&self, _addresses: &Range<usize>) {}

    /// A scheduler is about to split and allocate a graph, and keeps it for evaluations if
    /// `keeps` is true.
    fn graph_allocated(&self, _scheduler: &Scheduler, _graph: &Allocated, _keeps: bool) {}

    /// A scheduler has reserved memory with a graph, which is not evaluated and by which these models are complete. The thread
    /// of the program is in no function of ggml.
    fn memory_reserved(&self, _complete: &[Arc<Model>]) {}

    /// The program is about to drop the graph that a scheduler keeps.
    fn graph_dropped(&self, _scheduler: &Scheduler) {}

    /// Whether it is to be informed of routed experts.
    fn uses_routing(&self) -> bool {
        false
    }

    /// The experts of a layer are known, and none of them is read yet. Delays an evaluation in
    /// its middle.
    fn routed(&self, _routed: &Routed<'_>) {}

    /// Whether it is to be informed of weights that a scheduler copies to a device.
    fn uses_copies(&self) -> bool {
        false
    }

    /// A scheduler is about to copy a weight. Delays an evaluation in its middle.
    ///
    /// # Safety
    ///
    /// During the call of the scheduler, on the thread that evaluates.
    unsafe fn weight_copied(&self, _of: &WeightCopy) {}

    /// A scheduler without a copy callback copies bytes at an address between parts of a graph, perhaps
    /// those of experts whose ids [were requested](crate::program::weight_copies::requested_ids).
    ///
    /// # Safety
    ///
    /// During the call of the scheduler, on the thread that evaluates.
    unsafe fn bytes_copied(&self, _ggml: &Ggml, _from: usize) {}

    /// The program is about to copy experts into slots of its own cache: these, all matrices of the
    /// layer that has bytes at an address. Delays an evaluation in its middle.
    fn experts_missed(&self, _from: usize, _ids: &Ids<'_>) {}

    /// An evaluation begins.
    fn evaluation_begun(&self, _scheduler: &Scheduler) {}

    /// An evaluation has ended, and its graph is still there.
    fn evaluation_ended(&self, _scheduler: &Scheduler) {}

    /// An evaluation has failed or was aborted.
    fn evaluation_failed(&self, _scheduler: &Scheduler) {}

    /// A backend is about to be freed: evaluations on it can no longer be waited for.
    fn backend_freed(&self, _backend: usize) {}

    /// A scheduler is about to be freed; its graph and its backends may be gone.
    fn scheduler_freed(&self, _scheduler: &Scheduler) {}

    /// An internal error has turned the drop-in off: no event is reported any more.
    fn disabled(&self) {}

    /// This process is about to fork.
    fn before_fork(&self) {}

    /// This process has forked, and is the parent.
    fn after_fork(&self) {}

    /// Writes what is to be kept when the process ends.
    fn finish(&self) {}

    /// Returns what it was enabled for and has not done so far. Called at requests and at the end
    /// of the process, after a model is complete, if it is enabled.
    fn no_effect(&self) -> Vec<NoEffect> {
        Vec::new()
    }
}

/// What requests have set on models, and ended when the program freed these: a model that is loaded again is as its files are.
pub struct Ended {
    requested: &'static str,
    /// By the path of the model, whether it was loaded again, and what ended.
    of: Mutex<BTreeMap<PathBuf, (bool, String)>>,
}

impl Ended {
    /// Of a capability, nothing yet.
    pub const fn of(requested: &'static str) -> Ended {
        Ended {
            requested,
            of: Mutex::new(BTreeMap::new()),
        }
    }

    /// Notes what ends with a model; of an earlier load, what was not requested again stays noted.
    pub fn note(&self, model: &Model, what: Option<String>) {
        let mut of = self.of.lock();
        match (what, of.get_mut(&model.path)) {
            (Some(what), _) => drop(of.insert(model.path.clone(), (false, what))),
            (None, Some((is_loaded, _))) => *is_loaded = false,
            (None, None) => {}
        }
    }

    /// Logs what a model that is complete had before it was freed.
    pub fn loaded(&self, model: &Model) {
        if let Some((is_loaded, what)) = self.of.lock().get_mut(&model.path) {
            *is_loaded = true;
            log::warn!("{}", Ended::sentence(&model.path, true, what));
        }
    }

    /// Forgets what ended with an earlier load of a model: a request has set it again.
    pub fn set_again(&self, model: &Model) {
        self.of.lock().remove(&model.path);
    }

    /// Returns what models do not have any more.
    pub fn reports(&self) -> Vec<NoEffect> {
        // The process may end while another thread holds the lock.
        let of = self.of.try_lock();
        let all = of.iter().flat_map(|of| of.iter());
        // A program frees its models before it ends. With a profile, they get it again.
        let is_over = barrier::is_shut() || Config::get().profile.is_some();
        let of_use = all.filter(|(_, (is_loaded, _))| *is_loaded || !is_over);
        let report = |(path, (is_loaded, what)): (&PathBuf, &(bool, String))| NoEffect {
            requested: self.requested.into(),
            sentence: Ended::sentence(path, *is_loaded, what),
            so_far: false,
        };
        of_use.map(report).collect()
    }

    fn sentence(path: &Path, is_loaded: bool, what: &str) -> String {
        let path = text::path(path);
        match is_loaded {
            true if Config::get().profile.is_some() => format!(
                "{path}: the program freed the model and loaded it again: it gets what the profile has, in place of {what}"
            ),
            true => format!(
                "{path}: the program freed the model and loaded it again, without {what}: request them again"
            ),
            false => format!(
                "{path}: the program freed the model (asleep, or unloaded), and with it {what}: request them after the next load"
            ),
        }
    }
}

/// Whether a capability had an effect, and what hindered it.
pub struct Effect {
    requested: &'static str,
    seen: AtomicBool,
    obstacles: Mutex<Vec<String>>,
}

impl Effect {
    /// Obstacles that are kept: a program may load any number of models.
    const MOST: usize = 16;

    /// Of a capability that did nothing yet.
    pub const fn of(requested: &'static str) -> Effect {
        Effect {
            requested,
            seen: AtomicBool::new(false),
            obstacles: Mutex::new(Vec::new()),
        }
    }

    /// Notes that it had an effect.
    pub fn note(&self) {
        self.seen.store(true, Ordering::Relaxed);
    }

    /// Whether it had an effect.
    pub fn is_seen(&self) -> bool {
        self.seen.load(Ordering::Relaxed)
    }

    /// Notes in a sentence what has no effect, why, and the next step. Each sentence is kept once;
    /// returns whether it is new.
    pub fn note_obstacle(&self, sentence: String) -> bool {
        let mut obstacles = self.obstacles.lock();
        let is_new = obstacles.len() < Effect::MOST && !obstacles.contains(&sentence);
        if is_new {
            obstacles.push(sentence);
        }
        is_new
    }

    /// Notes an obstacle, and logs it if it is new.
    pub fn log_obstacle(&self, sentence: String) {
        if self.note_obstacle(sentence.clone()) {
            log::error!("{sentence}");
        }
    }

    /// Returns the obstacles; without any and without an effect, `otherwise`.
    pub fn missing(&self, otherwise: impl FnOnce() -> String) -> Vec<NoEffect> {
        let obstacles = self.obstacles();
        match obstacles.is_empty() && !self.is_seen() {
            true => vec![self.report(otherwise(), true)],
            false => obstacles,
        }
    }

    /// Returns the obstacles.
    pub fn obstacles(&self) -> Vec<NoEffect> {
        // The process may end while another thread holds the lock.
        let obstacles = self.obstacles.try_lock().map(|of| of.clone());
        let reports = obstacles.unwrap_or_default().into_iter();
        reports
            .map(|sentence| self.report(sentence, false))
            .collect()
    }

    /// Returns a report about the capability.
    pub fn report(&self, sentence: String, so_far: bool) -> NoEffect {
        NoEffect {
            requested: self.requested.into(),
            sentence,
            so_far,
        }
    }
}
