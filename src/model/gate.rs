//! Keeps evaluations and switches apart.
//!
//! Any number of evaluations run at a time; a switch runs alone. While a switch
//! waits for the running evaluations, new ones wait for it, or a busy host would
//! never be switched. Nothing is copied or allocated during a switch, so what an
//! evaluation waits for does not grow with the size of the tensors.

use std::thread::ThreadId;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};

use crate::error::{Error, Result};

#[derive(Debug, Default)]
pub(super) struct Gate {
    state: Mutex<GateState>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct GateState {
    /// The thread that began each running evaluation.
    running: Vec<ThreadId>,
    /// The thread that switches or waits to.
    switcher: Option<ThreadId>,
    pauses: Pauses,
}

/// How long evaluations had to wait for switches before they began.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Pauses {
    /// How many had to wait at all.
    pub count: u64,
    /// The longest wait.
    pub longest: Duration,
}

/// A running evaluation. While it lasts, no reload changes a tensor.
#[derive(Debug)]
#[must_use]
pub struct Evaluation {
    began_by: ThreadId,
}

/// What a switch cost.
#[derive(Debug, Clone, Copy)]
pub(super) struct Switched {
    /// Waiting for running evaluations to end.
    pub wait: Duration,
    /// The switch itself, during which nothing could run.
    pub switch: Duration,
}

impl Gate {
    /// Begins an evaluation, after the switch that is waiting, if any.
    ///
    /// A thread that already evaluates on this model is let in at once: the switch
    /// waits for that evaluation anyway, and holding up its thread would be waiting
    /// for oneself.
    pub fn begin(&self) -> Result<Evaluation> {
        let me = std::thread::current().id();
        let mut state = self.state.lock();
        if state.switcher == Some(me) {
            return Err(Error::Busy(
                "an evaluation cannot begin inside the stale-graph callback: the switch it belongs to is not over",
            ));
        }
        if state.switcher.is_some() && !state.running.contains(&me) {
            let waiting_since = Instant::now();
            self.changed
                .wait_while(&mut state, |state| state.switcher.is_some());
            state.pauses.count += 1;
            state.pauses.longest = state.pauses.longest.max(waiting_since.elapsed());
        }
        state.running.push(me);
        Ok(Evaluation { began_by: me })
    }

    /// Ends an evaluation, on whatever thread.
    pub fn end(&self, evaluation: Evaluation) {
        let mut state = self.state.lock();
        let at = state
            .running
            .iter()
            .position(|&thread| thread == evaluation.began_by)
            .expect("an evaluation is ended once");
        state.running.swap_remove(at);
        drop(state);
        self.changed.notify_all();
    }

    /// An error when a switch on this thread would wait for the thread itself.
    pub fn check_can_switch(&self) -> Result<()> {
        let me = std::thread::current().id();
        let state = self.state.lock();
        if state.running.contains(&me) || state.switcher == Some(me) {
            return Err(Error::Busy(
                "a reload commits between evaluations: end the evaluation of this thread before asking for one",
            ));
        }
        Ok(())
    }

    /// Runs `switch` while no evaluation runs.
    pub fn switch(&self, switch: impl FnOnce()) -> Switched {
        let me = std::thread::current().id();
        let asked = Instant::now();
        let mut state = self.state.lock();
        self.changed
            .wait_while(&mut state, |state| state.switcher.is_some());
        state.switcher = Some(me);
        self.changed
            .wait_while(&mut state, |state| !state.running.is_empty());
        drop(state);
        // Opens the gate again also when `switch` panics.
        let _open = OpenAgain(self);
        let wait = asked.elapsed();
        let began = Instant::now();
        switch();
        Switched {
            wait,
            switch: began.elapsed(),
        }
    }

    pub fn pauses(&self) -> Pauses {
        self.state.lock().pauses
    }
}

struct OpenAgain<'a>(&'a Gate);

impl Drop for OpenAgain<'_> {
    fn drop(&mut self) {
        self.0.state.lock().switcher = None;
        self.0.changed.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

    #[test]
    fn switches_and_evaluations_never_overlap() {
        let gate = Gate::default();
        let (switching, evaluating, switches) =
            (AtomicBool::new(false), AtomicU64::new(0), AtomicU64::new(0));
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for _ in 0..2000 {
                        let evaluation = gate.begin().unwrap();
                        evaluating.fetch_add(1, Ordering::SeqCst);
                        assert!(!switching.load(Ordering::SeqCst));
                        evaluating.fetch_sub(1, Ordering::SeqCst);
                        gate.end(evaluation);
                    }
                });
            }
            for _ in 0..2 {
                scope.spawn(|| {
                    for _ in 0..500 {
                        gate.switch(|| {
                            assert!(!switching.swap(true, Ordering::SeqCst));
                            assert_eq!(evaluating.load(Ordering::SeqCst), 0);
                            switches.fetch_add(1, Ordering::SeqCst);
                            switching.store(false, Ordering::SeqCst);
                        });
                    }
                });
            }
        });
        assert_eq!(switches.into_inner(), 1000);
    }

    #[test]
    fn a_thread_never_waits_for_itself() {
        let gate = Gate::default();
        let outer = gate.begin().unwrap();
        assert!(gate.check_can_switch().is_err());
        std::thread::scope(|scope| {
            let switch = scope.spawn(|| gate.switch(|| ()));
            while gate.state.lock().switcher.is_none() {
                std::thread::yield_now();
            }
            let nested = gate.begin().unwrap();
            gate.end(nested);
            gate.end(outer);
            switch.join().unwrap();
        });
        gate.switch(|| assert!(gate.begin().is_err()));
        assert!(gate.check_can_switch().is_ok());
    }
}
