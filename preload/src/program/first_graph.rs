//! One thread at a time completes models, as others that evaluate the same model wait.
//!
//! The first graph of a model completes it: the model is registered, and capabilities prepare for it. A graph of another
//! thread that reads the model meanwhile would be evaluated without them: it would be missing in traces, and have none of
//! what a profile sets.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use parking_lot::{Mutex, MutexGuard};

use crate::program::loads;

/// How long a graph waits: as long as a switch.
const LONGEST_WAIT: Duration = Duration::from_secs(60);

/// Held while a graph is read that may be the first one of a model, and until the model is complete.
static FIRST: Mutex<()> = Mutex::new(());
/// Whether a thread has left a function of ggml without returning (`longjmp`), with the lock.
static IS_LOST: AtomicBool = AtomicBool::new(false);

/// Waits until no other thread completes a model. Returns what lets others wait, if this graph may complete one. Called
/// before the scheduler of the graph is entered, so that a switch does not wait for this thread.
pub fn enter() -> Option<MutexGuard<'static, ()>> {
    // In this order: a model that is no longer loading was taken by a thread that has the lock.
    let may_be_first = loads::is_loading() || FIRST.is_locked();
    if !may_be_first || IS_LOST.load(Ordering::Relaxed) {
        return None;
    }
    let first = FIRST.try_lock_for(LONGEST_WAIT);
    IS_LOST.store(first.is_none(), Ordering::Relaxed);
    first
}
