//! The graph whose parts this thread evaluates.
//!
//! A scheduler splits a graph into parts of one backend each. While it evaluates them one after
//! the other, its calls of ggml's functions are reported.

use std::cell::Cell;

use crate::ggml::Tensor;
use crate::program::sched::Scheduler;

thread_local! {
    static CURRENT: Cell<Option<&'static Scheduler>> = const { Cell::new(None) };
    /// Whether a part of the graph was submitted.
    static SUBMITTED: Cell<bool> = const { Cell::new(false) };
    /// What was requested last from a device, between the parts of the graph.
    static REQUESTED: Cell<Option<Requested>> = const { Cell::new(None) };
}

/// Bytes of a tensor that a scheduler requested from a device.
#[derive(Clone, Copy)]
pub struct Requested {
    /// The tensor.
    pub tensor: *const Tensor,
    /// Where its first bytes go.
    pub data: *const u8,
    /// How many they are.
    pub size: usize,
}

/// While this value lives, calls of this thread belong to the parts of a graph. An exception of
/// the program ends it, too.
pub struct Parts(());

impl Parts {
    /// Marks this thread; `None` reports nothing.
    pub fn enter(scheduler: Option<&'static Scheduler>) -> Parts {
        CURRENT.set(scheduler);
        SUBMITTED.set(false);
        REQUESTED.set(None);
        Parts(())
    }
}

impl Drop for Parts {
    fn drop(&mut self) {
        CURRENT.set(None);
    }
}

/// Returns the scheduler whose parts this thread evaluates, if they are reported.
pub fn current() -> Option<&'static Scheduler> {
    CURRENT.get()
}

/// Records that a part of the graph is submitted.
pub fn submitted() {
    SUBMITTED.set(true);
}

/// Whether it was recorded that a part of the graph is submitted. A scheduler that calls its own
/// functions without the dynamic loader never is.
pub fn are_seen() -> bool {
    SUBMITTED.get()
}

/// Records what the scheduler requests from a device.
pub fn note_requested(requested: Requested) {
    REQUESTED.set(Some(requested));
}

/// Forgets what was requested before.
pub fn forget_requested() {
    REQUESTED.set(None);
}

/// Returns what the scheduler requested last for this graph.
pub fn requested() -> Option<Requested> {
    REQUESTED.get()
}

/// Calls `work` without reporting what this thread calls meanwhile.
pub fn aside<R>(work: impl FnOnce() -> R) -> R {
    let current = CURRENT.take();
    let result = work();
    CURRENT.set(current);
    result
}
