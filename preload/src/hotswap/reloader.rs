//! Hot-swap: reloads of the program's models, and their results.
//!
//! A reload starts at an interval, by a command of the control socket, and when the program
//! calls `llama_reload_changed_tensors`. After `revert`, reloads are off until `unfreeze`.
//!
//! All reloads run on one thread, which lives as long as the process. malloc keeps the memory that a
//! thread frees for that thread and the few that share its arena (mallopt(3)): with a reload on the
//! thread of each client, every arena of the process would keep the buffers of a swap.

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use parking_lot::{Mutex, MutexGuard};
use sidecar_core::config::Config;
use sidecar_core::error::{Error, Result};
use sidecar_core::protocol::{Event, NoEffect};
use sidecar_core::reload::{Cause, Hash, Outcome, OverlaySource, Report, Trigger};
use sidecar_core::text;

use crate::ggml;
use crate::hotswap::store;
use crate::process::{journal, thread};
use crate::program::capability::{Capability, Effect, Ended};
use crate::program::models::{self, Blocked, Model};
use crate::program::{barrier, sched};

/// Whether reloads are frozen.
static FROZEN: AtomicBool = AtomicBool::new(false);
/// Why a frozen reload fails.
const FROZEN_REASON: &str =
    "reloads are frozen since 'undo' or 'ctl freeze': run 'llama-sidecar ctl unfreeze' first";
/// Held while a model is reloaded; the end of the process waits for it.
static RELOADING: Mutex<()> = Mutex::new(());

/// Work for the thread of reloads.
type Work = Box<dyn FnOnce() + Send>;
/// Where the thread of reloads gets its work from, once it runs.
static THREAD: OnceLock<Sender<Work>> = OnceLock::new();

static COUNTS: Mutex<Counts> = Mutex::new(Counts {
    swapped: 0,
    returned: 0,
    staged_bytes: 0,
    failures: [0; Cause::ALL.len()],
});

/// How long a program that frees a model waits for a reload of the model to end: as long as
/// reading one tensor may take.
const MODEL_FREE_TIMEOUT: Duration = Duration::from_secs(10);

/// How long buffers of replaced tensors are kept for the next swap.
const KEPT_FOR: Duration = Duration::from_secs(60);

/// The shortest time between two looks at the files.
const MIN_INTERVAL: Duration = Duration::from_millis(1);

/// Why tensors of models that are freed could not be swapped.
static EFFECT: Effect = Effect::of(NoEffect::HOT_SWAP);
/// Overlays of models that are freed.
static ENDED: Ended = Ended::of(NoEffect::HOT_SWAP);
/// The numbers of models that were freed with swapped tensors.
static FREED: Mutex<Vec<u64>> = Mutex::new(Vec::new());

/// Hot-swap, as a capability.
pub struct HotSwap;

impl Capability for HotSwap {
    fn is_enabled(&self) -> bool {
        Config::get().hotswap
    }

    fn start(&self) {
        let (sender, work) = channel();
        if thread::spawn("llama-sidecar", move || serve(&work)) {
            let _ = THREAD.set(sender);
        }
    }

    /// A program that ends frees its models, too, and loads no other.
    fn model_complete(&self, model: &Arc<Model>) {
        for model in FREED.lock().drain(..) {
            journal::note(|| Event::Freed { model });
        }
        ENDED.loaded(model);
    }

    /// Frees the buffers of swapped tensors. That cannot wait until the last reference to the
    /// model goes: the program may unload its backends next. A running reload stops before
    /// its next tensor, and frees what it staged.
    fn model_freed(&self, model: &Model) {
        note_obstacle(model);
        barrier::notify();
        let _no_reload = model.reloading.try_lock_for(MODEL_FREE_TIMEOUT);
        if model.swapped() > 0 {
            FREED.lock().push(model.number);
        }
        let overlays = model.engine.changed();
        let overlays = overlays.iter().filter(|of| of.overlay.is_some()).count();
        let what = || format!("{overlays} overlay(s)");
        ENDED.note(model, (overlays > 0).then(what));
        for instance in model.tensors.iter().flat_map(|tensor| &tensor.instances) {
            *instance.private.lock() = None;
        }
        model.pool.clear();
        // The buffers of other models wait on: evaluations may run.
        if models::models().is_empty() {
            ggml::free_remote();
        }
    }

    fn no_effect(&self) -> Vec<NoEffect> {
        models::models()
            .iter()
            .for_each(|model| note_obstacle(model));
        let mut missing = EFFECT.obstacles();
        missing.extend(ENDED.reports());
        missing
    }
}

/// Notes why no tensor of a model can be swapped, if so.
fn note_obstacle(model: &Model) {
    if let Some(obstacle) = HotSwap.is_enabled().then(|| model.obstacle()).flatten() {
        let path = text::path(model.files[0].gguf.source.path());
        EFFECT.note_obstacle(format!(
            "hot-swap: {path}: no tensor can be swapped: {obstacle}"
        ));
    }
}

/// What reloads did so far.
#[derive(Clone, Copy)]
pub struct Counts {
    /// Tensors that got new bytes.
    pub swapped: u64,
    /// Tensors that went back to their original bytes.
    pub returned: u64,
    /// Bytes that were read into new buffers.
    pub staged_bytes: u64,
    /// By position in [`Cause::ALL`].
    failures: [u64; Cause::ALL.len()],
}

impl Counts {
    /// Returns the reloads and versions of files that were not applied, for each cause.
    pub fn failures(self) -> impl Iterator<Item = (Cause, u64)> {
        Cause::ALL.into_iter().zip(self.failures)
    }

    fn add(&mut self, result: &Result<Report>) {
        match result {
            Ok(report) => {
                self.swapped += report.count(Outcome::Swapped) as u64;
                self.returned += report.count(Outcome::Returned) as u64;
                self.staged_bytes += report.bytes_staged;
                let ignored = report.files.iter().filter_map(|file| file.ignored.as_ref());
                let ignored = ignored.filter(|ignored| ignored.first);
                let causes = ignored.map(|ignored| ignored.cause).chain(report.cause);
                causes.for_each(|cause| self.add_failure(cause));
            }
            Err(error) => self.add_failure(Cause::of(error)),
        }
    }

    fn add_failure(&mut self, cause: Cause) {
        if let Some(at) = Cause::ALL.iter().position(|&other| other == cause) {
            self.failures[at] += 1;
        }
    }
}

/// Returns what reloads did so far.
pub fn counts() -> Counts {
    *COUNTS.lock()
}

/// Whether reloads are frozen.
pub fn is_frozen() -> bool {
    FROZEN.load(Ordering::SeqCst)
}

/// Allows reloads again.
pub fn unfreeze() {
    FROZEN.store(false, Ordering::SeqCst);
}

/// Waits until no reload runs, but not longer than this.
pub fn wait_for_end(longest: Duration) {
    drop(RELOADING.try_lock_for(longest));
    for model in models::models() {
        drop(model.reloading.try_lock_for(longest));
    }
}

/// Carries out work on the thread of reloads, and waits for its result; on this thread if that one
/// could not be started.
pub fn on_thread<R: Send + 'static>(work: impl FnOnce() -> R + Send + 'static) -> R {
    let Some(thread) = THREAD.get() else {
        return work();
    };
    let (sender, result) = channel();
    let work = move || {
        // The client may have lost its thread.
        let _ = sender.send(catch_unwind(AssertUnwindSafe(work)));
    };
    let sent = thread.send(Box::new(work));
    sent.expect("the thread of reloads takes work as long as the process lives");
    match result.recv().expect("work that is taken has a result") {
        Ok(result) => result,
        Err(panic) => resume_unwind(panic),
    }
}

/// The thread of reloads: does the work that it gets, reloads changed files at an interval, and frees
/// kept buffers once no swap has replaced a tensor for a while.
fn serve(work: &Receiver<Work>) {
    let interval = Config::get().poll;
    let mut next_poll = interval.map(|interval| Instant::now() + interval);
    loop {
        let next = match barrier::is_shut() {
            true => None,
            false => [next_poll, kept_until()].into_iter().flatten().min(),
        };
        let received = match next {
            Some(at) => work.recv_timeout(at.saturating_duration_since(Instant::now())),
            None => work.recv().map_err(RecvTimeoutError::from),
        };
        match received {
            Ok(work) => work(),
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => return,
        }
        let now = Instant::now();
        if let Some(interval) = interval.filter(|_| next_poll <= Some(now)) {
            let sooner = poll_files().unwrap_or(interval);
            next_poll = Some(Instant::now() + sooner.clamp(MIN_INTERVAL, interval));
        }
        for model in models::models() {
            model.pool.clear_after(KEPT_FOR);
        }
    }
}

/// Returns when the first of the kept buffers is to be freed.
fn kept_until() -> Option<Instant> {
    let models = models::models();
    let since = models.iter().filter_map(|model| model.pool.since()).min();
    since.map(|since| since + KEPT_FOR)
}

/// Reloads changed files of all models; returns when to look again, if that is before the interval
/// is over.
fn poll_files() -> Option<Duration> {
    let quiet = Config::get().quiet;
    let mut next = None;
    for model in models::models() {
        if !is_frozen()
            && let Ok(report) = reload(&model, Trigger::Watch { quiet })
        {
            next = next.into_iter().chain(report.look_again).min();
        }
    }
    next
}

/// Reloads all models, at a call of the program; returns whether any tensor changed since the last
/// call. `seen` gets the report of each model.
pub fn reload_all(seen: impl Fn(&Report)) -> bool {
    /// The generation at the last call.
    static LAST: AtomicU64 = AtomicU64::new(0);
    let mut changed = false;
    for report in reload_models().iter().flatten() {
        changed |= report.changed();
        seen(report);
    }
    let now = barrier::generation();
    changed | (LAST.swap(now, Ordering::Relaxed) != now)
}

/// Reloads all models on the thread of reloads; returns the result of each.
pub fn reload_models() -> Vec<Result<Report>> {
    let reload = |model: &Arc<Model>| reload(model, Trigger::Command);
    on_thread(move || models::models().iter().map(reload).collect())
}

/// Whether hot-swap is on, and can swap tensors of any model.
pub fn swaps_any() -> bool {
    let can_swap = |model: &Arc<Model>| model.obstacle().is_none();
    Config::get().hotswap && models::models().iter().any(can_swap)
}

/// Fails if hot-swap is off, or if the bytes that the program has loaded are not known.
fn check(model: &Model) -> Result<()> {
    match model.obstacle() {
        _ if !Config::get().hotswap => Err(Error::HotSwapOff),
        Some(why) if model.is_replaced => Err(Error::Invalid(why)),
        _ => Ok(()),
    }
}

/// Reloads the changed tensors of one model.
pub fn reload(model: &Arc<Model>, trigger: Trigger) -> Result<Report> {
    check(model)?;
    let result = unless_frozen(model, || store::reload(model, trigger));
    if !was_frozen(&result) {
        note(model, &result);
    }
    result
}

/// Reverts overlays of one model and sets others. The result goes to the client alone: a refused
/// request is no failure of the model's files.
pub fn swap(
    model: &Arc<Model>,
    revert: &[usize],
    set: &[(usize, &OverlaySource)],
) -> Result<Report> {
    check(model)?;
    let result = unless_frozen(model, || store::overlay(model, revert, set));
    if !was_frozen(&result) {
        if !(revert.is_empty() && set.is_empty()) {
            ENDED.set_again(model);
        }
        COUNTS.lock().add(&result);
        result
            .iter()
            .for_each(|report| note_in_journal(model, report));
    }
    result
}

/// Returns all tensors of a model to their originals.
pub fn revert(model: &Arc<Model>) -> Result<Report> {
    check(model)?;
    let result = exclusively(model, || store::revert(model));
    ENDED.set_again(model);
    note(model, &result);
    result
}

/// Returns a hash of all tensors in use, after reading those that were not hashed yet; `None`
/// when one cannot be read, or once `goes_on` returns false.
pub fn read_content_hash(model: &Arc<Model>, goes_on: impl Fn() -> bool) -> Option<Hash> {
    let mut next = 0;
    loop {
        let model_stays = model.reloading.lock();
        if model.is_replaced || !model.is_alive() || barrier::is_shut() || !goes_on() {
            return None;
        }
        if next == model.tensors.len() {
            return model.engine.content_hash(true);
        }
        if !store::hash_some(model, &mut next) {
            return None;
        }
        // A waiting reload or revert runs now.
        MutexGuard::unlock_fair(model_stays);
    }
}

/// Freezes reloads; running ones end first.
pub fn freeze() {
    FROZEN.store(true, Ordering::SeqCst);
}

/// Reloads unless reloads are frozen. That is checked once the lock is held, because a 'revert'
/// may have run before.
fn unless_frozen(model: &Arc<Model>, work: impl FnOnce() -> Result<Report>) -> Result<Report> {
    exclusively(model, || match is_frozen() {
        true => Err(Error::Busy(FROZEN_REASON)),
        false => work(),
    })
}

fn was_frozen(result: &Result<Report>) -> bool {
    matches!(result, Err(Error::Busy(reason)) if *reason == FROZEN_REASON)
}

fn exclusively(model: &Arc<Model>, work: impl FnOnce() -> Result<Report>) -> Result<Report> {
    let _one_at_a_time = RELOADING.lock();
    let _model_stays = model.reloading.lock();
    if barrier::is_shut() || !model.is_alive() {
        return Ok(Report::default());
    }
    let result = work();
    sched::free_remote();
    result
}

/// Writes a reload that changed tensors or failed to the journal.
fn note_in_journal(model: &Model, report: &Report) {
    if report.changed() || report.failure.is_some() {
        let count = |outcome| report.count(outcome) as u64;
        journal::note(|| Event::Reload {
            model: model.number,
            differ: model.swapped(),
            swapped: count(Outcome::Swapped),
            returned: count(Outcome::Returned),
            refused: count(Outcome::Refused),
            failure: report.failure.clone(),
        });
    }
}

/// Counts a reload, writes it to the journal, and logs a failure once until a reload
/// succeeds.
fn note(model: &Model, result: &Result<Report>) {
    COUNTS.lock().add(result);
    let mut blocked = model.blocked.lock();
    let known = blocked.as_ref().map(|known| &known.error);
    let failed = match result {
        Ok(report) => {
            if report.changed() || report.failure.as_ref() != known {
                note_in_journal(model, report);
            }
            if report.failure.is_none() && !report.postponed {
                *blocked = None;
            }
            report.failure.clone().zip(report.cause)
        }
        Err(error) => Some((error.to_string(), Cause::of(error))),
    };
    // A freed model has no entry.
    let Some((error, cause)) = failed.filter(|_| model.is_alive()) else {
        return;
    };
    match &mut *blocked {
        Some(known) if known.error == error => known.attempts += 1,
        _ => {
            log::warn!("reload: {error}");
            *blocked = Some(Blocked {
                cause,
                error,
                since: Instant::now(),
                attempts: 1,
            });
        }
    }
}
