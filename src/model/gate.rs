//! Keeps evaluations and switches apart.
//!
//! Any number of evaluations run at a time; a switch runs alone. While a switch
//! waits for the running evaluations, new ones wait for it, or a busy host would
//! never be switched. Nothing is copied or allocated during a switch, so what an
//! evaluation waits for does not grow with the size of the tensors.
//!
//! An evaluation may never end. So both waits have a limit: after [`Limits::hold`] new
//! evaluations begin although the switch still waits, and after [`Limits::patience`] the
//! switch gives up.

use std::thread::ThreadId;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};

use crate::error::{Error, Result};
use crate::reload::{Pauses, Switched};

/// How long a switch waits for running evaluations.
#[derive(Debug, Clone, Copy)]
pub(super) struct Limits {
    /// How long new evaluations wait for a switch that has not begun.
    pub hold: Duration,
    /// How long the switch waits. Evaluations of large models on slow machines take tens
    /// of seconds.
    pub patience: Duration,
}

impl Default for Limits {
    fn default() -> Limits {
        Limits {
            hold: Duration::from_secs(5),
            patience: Duration::from_secs(60),
        }
    }
}

#[derive(Debug, Default)]
pub(super) struct Gate {
    limits: Limits,
    state: Mutex<GateState>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct GateState {
    /// The thread that began each running evaluation.
    running: Vec<ThreadId>,
    switcher: Option<Switcher>,
    pauses: Pauses,
}

/// Who switches or waits to.
#[derive(Debug)]
struct Switcher {
    thread: ThreadId,
    /// Whether new evaluations wait for the switch.
    holds: bool,
}

/// A running evaluation. While it lasts, no reload changes a tensor.
#[derive(Debug)]
#[must_use]
pub struct Evaluation {
    began_by: ThreadId,
}

impl GateState {
    /// Begins an evaluation; `None` while a switch holds new ones.
    ///
    /// A thread that already evaluates on this model is let in at once: the switch
    /// waits for that evaluation anyway, and holding up its thread would be waiting
    /// for oneself.
    fn begin(&mut self) -> Result<Option<Evaluation>> {
        let me = std::thread::current().id();
        if let Some(switcher) = &self.switcher {
            if switcher.thread == me {
                return Err(Error::Busy(
                    "an evaluation cannot begin inside the stale-graph callback: the switch it belongs to is not over",
                ));
            }
            if switcher.holds && !self.running.contains(&me) {
                return Ok(None);
            }
        }
        self.running.push(me);
        Ok(Some(Evaluation { began_by: me }))
    }
}

impl Gate {
    #[cfg(test)]
    pub fn with(limits: Limits) -> Gate {
        Gate {
            limits,
            ..Gate::default()
        }
    }

    /// Begins an evaluation unless it has to wait for a switch.
    pub fn try_begin(&self) -> Result<Option<Evaluation>> {
        self.state.lock().begin()
    }

    /// Begins an evaluation, after the switch that holds new ones, if any.
    pub fn begin(&self) -> Result<Evaluation> {
        let mut state = self.state.lock();
        if let Some(evaluation) = state.begin()? {
            return Ok(evaluation);
        }
        let waiting_since = Instant::now();
        loop {
            self.changed.wait(&mut state);
            if let Some(evaluation) = state.begin()? {
                state.pauses.add(waiting_since.elapsed());
                return Ok(evaluation);
            }
        }
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
    ///
    /// Knows evaluations by the thread that began them. One that was handed to another
    /// thread is not seen here when that thread switches: the switch then gives up.
    pub fn check_can_switch(&self) -> Result<()> {
        let me = std::thread::current().id();
        let state = self.state.lock();
        let switches = |switcher: &Switcher| switcher.thread == me;
        if state.running.contains(&me) || state.switcher.as_ref().is_some_and(switches) {
            return Err(Error::Busy(
                "a reload commits between evaluations: end the evaluation of this thread before asking for one",
            ));
        }
        Ok(())
    }

    /// Runs `switch` while no evaluation runs; an error when one that runs does not end.
    /// `switch` returns the generation that it made, or why it changed nothing.
    pub fn switch(&self, switch: impl FnOnce() -> Result<u64>) -> Result<Switched> {
        let thread = std::thread::current().id();
        let asked = Instant::now();
        let until = asked + self.limits.patience;
        let evaluates = |state: &mut GateState| !state.running.is_empty();
        let mut state = self.state.lock();
        self.changed
            .wait_while_until(&mut state, |state| state.switcher.is_some(), until);
        if state.switcher.is_some() {
            return Err(Error::Busy(
                "another switch of the model did not end for a minute, so nothing was switched: return from the stale-graph callback and reload again",
            ));
        }
        state.switcher = Some(Switcher {
            thread,
            holds: true,
        });
        self.changed
            .wait_while_until(&mut state, evaluates, asked + self.limits.hold);
        if evaluates(&mut state) {
            state.switcher = Some(Switcher {
                thread,
                holds: false,
            });
            self.changed.notify_all();
            self.changed.wait_while_until(&mut state, evaluates, until);
        }
        if evaluates(&mut state) {
            state.switcher = None;
            drop(state);
            self.changed.notify_all();
            return Err(Error::Busy(
                "an evaluation did not end for a minute, so nothing was switched: end it with llama_sidecar_eval_end and reload again",
            ));
        }
        state.switcher = Some(Switcher {
            thread,
            holds: true,
        });
        drop(state);
        // Opens the gate again also when `switch` panics.
        let _open = OpenAgain(self);
        let wait = asked.elapsed();
        let began = Instant::now();
        let generation = switch()?;
        Ok(Switched {
            wait,
            switch: began.elapsed(),
            generation,
        })
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
                            Ok(1)
                        })
                        .unwrap();
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
            let switch = scope.spawn(|| gate.switch(|| Ok(1)).unwrap());
            while gate.state.lock().switcher.is_none() {
                std::thread::yield_now();
            }
            let nested = gate.begin().unwrap();
            gate.end(nested);
            gate.end(outer);
            switch.join().unwrap();
        });
        gate.switch(|| {
            assert!(gate.begin().is_err());
            Ok(1)
        })
        .unwrap();
        assert!(gate.check_can_switch().is_ok());
    }

    const NOT_AT_ALL: Duration = Duration::ZERO;
    const FOR_EVER: Duration = Duration::from_secs(1 << 30);

    #[test]
    fn a_switch_gives_up_when_an_evaluation_does_not_end() {
        let gate = Gate::with(Limits {
            hold: NOT_AT_ALL,
            patience: NOT_AT_ALL,
        });
        std::thread::scope(|scope| {
            let endless = scope.spawn(|| gate.begin().unwrap()).join().unwrap();
            let error = gate.switch(|| panic!("an evaluation runs")).unwrap_err();
            assert!(error.to_string().contains("did not end"), "{error}");
            // Nothing is left behind: evaluations begin, and the next switch is done.
            let evaluation = gate.try_begin().unwrap().expect("nothing holds it");
            gate.end(evaluation);
            gate.end(endless);
            gate.switch(|| Ok(1)).unwrap();
        });
    }

    #[test]
    fn a_switch_that_waits_for_long_lets_new_evaluations_begin() {
        let gate = Gate::with(Limits {
            hold: NOT_AT_ALL,
            patience: FOR_EVER,
        });
        let endless = gate.begin().unwrap();
        std::thread::scope(|scope| {
            let switch = scope.spawn(|| gate.switch(|| Ok(1)).unwrap());
            while gate.state.lock().switcher.is_none() {
                std::thread::yield_now();
            }
            let another = scope.spawn(|| gate.begin().unwrap()).join().unwrap();
            gate.end(endless);
            gate.end(another);
            switch.join().unwrap();
        });
    }

    #[test]
    fn an_evaluation_that_was_handed_over_ends_on_its_new_thread() {
        let gate = Gate::with(Limits {
            hold: NOT_AT_ALL,
            patience: NOT_AT_ALL,
        });
        let handed_over = std::thread::scope(|scope| {
            let begun = scope.spawn(|| gate.begin().unwrap());
            begun.join().unwrap()
        });
        // Its new thread is not known to evaluate, and does not wait for itself for ever.
        assert!(gate.check_can_switch().is_ok());
        assert!(gate.switch(|| Ok(1)).is_err());
        gate.end(handed_over);
        gate.switch(|| Ok(1)).unwrap();
    }
}
