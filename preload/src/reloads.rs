//! Reloads of the host's models: what starts them, and what came of them.
//!
//! Files are looked at every so often, when a command asks, and when the host itself calls
//! `llama_reload_changed_tensors`. After `revert` nothing is reloaded before `unfreeze`.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use llama_sidecar::config::Config;
use llama_sidecar::error::{Error, Result};
use llama_sidecar::protocol::Event;
use llama_sidecar::reload::{Cause, Hash, Outcome, Report, Trigger};
use parking_lot::Mutex;

use crate::registry::{self, Model};
use crate::{gate, journal, metrics, store};

/// Whether nothing is reloaded.
static FROZEN: AtomicBool = AtomicBool::new(false);
/// Why nothing is reloaded then.
const FROZEN_REASON: &str = "reloads are frozen since 'revert': run 'llama-sidecar unfreeze' first";
/// Held while a model is reloaded; the end of the process waits for it.
static RELOADING: Mutex<()> = Mutex::new(());
/// The last failure of each model, by its number, until a reload of it succeeds.
static BLOCKED: Mutex<BTreeMap<u64, Blocked>> = Mutex::new(BTreeMap::new());

/// A reload that failed, and since when.
#[derive(Debug, Clone)]
pub struct Blocked {
    /// Why, in one word.
    pub cause: Cause,
    /// Why, in a sentence.
    pub error: String,
    /// When it failed first.
    pub since: Instant,
    /// How often it was tried.
    pub attempts: u64,
}

/// What stops reloads of a model, if the last one failed.
pub fn blocked(model: &Model) -> Option<Blocked> {
    BLOCKED.lock().get(&model.number).cloned()
}

/// Whether reloads are frozen.
pub fn is_frozen() -> bool {
    FROZEN.load(Ordering::SeqCst)
}

/// Lets files be reloaded again.
pub fn unfreeze() {
    FROZEN.store(false, Ordering::SeqCst);
}

/// Waits until no reload runs, but not longer than this.
pub fn wait_for_end(longest: Duration) {
    drop(RELOADING.try_lock_for(longest));
    for model in registry::models() {
        drop(model.reloading.try_lock_for(longest));
    }
}

/// Looks at the files of all models every so often while `go_on` says so; for a thread of
/// its own.
pub fn watch(poll: Duration, go_on: impl Fn() -> bool) {
    let quiet = Config::get().quiet;
    let mut next = poll;
    while go_on() {
        std::thread::sleep(next);
        next = poll;
        if is_frozen() {
            continue;
        }
        for model in registry::models() {
            if let Ok(report) = reload(&model, Trigger::Watch { quiet })
                && let Some(sooner) = report.look_again
            {
                next = next.min(sooner.max(Duration::from_millis(1)));
            }
        }
    }
}

/// Brings all models up to date, as the host asks; whether any tensor changed.
pub fn reload_all() -> bool {
    let mut changed = false;
    for model in registry::models() {
        changed |= reload(&model, Trigger::Command).is_ok_and(|report| report.changed());
    }
    changed
}

/// Brings one model up to date.
pub fn reload(model: &Arc<Model>, trigger: Trigger) -> Result<Report> {
    if !Config::get().hotswap {
        return Err(Error::HotSwapOff);
    }
    // Asked once it has its turn: it may have waited behind a 'revert'.
    let result = exclusively(model, || match is_frozen() {
        true => Err(Error::Busy(FROZEN_REASON)),
        false => store::reload(model, trigger),
    });
    if !matches!(&result, Err(Error::Busy(reason)) if *reason == FROZEN_REASON) {
        note(model, &result);
    }
    result
}

/// Returns all tensors of a model to their originals; nothing is reloaded from here on.
pub fn revert(model: &Arc<Model>) -> Result<Report> {
    if !Config::get().hotswap {
        return Err(Error::HotSwapOff);
    }
    let result = exclusively(model, || store::revert(model));
    note(model, &result);
    result
}

/// Hash of what a model evaluates with, after reading what was not hashed yet; `None` when
/// that cannot be read.
pub fn read_content_hash(model: &Arc<Model>) -> Option<Hash> {
    let _model_stays = model.reloading.lock();
    let there = model.is_alive() && !gate::is_shut();
    there.then(|| store::content_hash(model, true)).flatten()
}

/// Freezes reloads: those that run end first.
pub fn freeze() {
    FROZEN.store(true, Ordering::SeqCst);
}

fn exclusively(model: &Arc<Model>, work: impl FnOnce() -> Result<Report>) -> Result<Report> {
    let _one_at_a_time = RELOADING.lock();
    let _model_stays = model.reloading.lock();
    if gate::is_shut() || !model.is_alive() {
        return Ok(Report::default());
    }
    work()
}

/// Counts a reload, tells a wrapper, and logs a failure once until a reload succeeds.
fn note(model: &Model, result: &Result<Report>) {
    metrics::count_reload(result);
    let mut blocked = BLOCKED.lock();
    let failed = match result {
        Ok(report) => {
            if report.changed() || report.failure.is_some() {
                let count = |outcome| report.count(outcome) as u64;
                journal::note(|| Event::Reload {
                    swapped: count(Outcome::Swapped),
                    returned: count(Outcome::Returned),
                    refused: count(Outcome::Refused),
                    failure: report.failure.clone(),
                });
            }
            if report.failure.is_none() && !report.postponed {
                blocked.remove(&model.number);
            }
            report.failure.clone().zip(report.cause)
        }
        Err(error) => Some((error.to_string(), Cause::of(error))),
    };
    let Some((error, cause)) = failed else {
        return;
    };
    match blocked.get_mut(&model.number) {
        Some(known) if known.error == error => known.attempts += 1,
        _ => {
            log::warn!("reload: {error}");
            let failure = Blocked {
                cause,
                error,
                since: Instant::now(),
                attempts: 1,
            };
            blocked.insert(model.number, failure);
        }
    }
}
