//! Switches tensors while no evaluation runs.
//!
//! Any number of evaluations run at a time; a switch runs alone. While a switch waits for the
//! running evaluations, new evaluations wait for the switch, or a busy program would never be
//! switched. A switch copies and allocates nothing, so the pause of an evaluation does not grow
//! with the size of the tensors.
//!
//! An evaluation may never end, so both waits have a limit. After [`Limits::hold`], new
//! evaluations begin although the switch still waits. After [`Limits::timeout`], the switch
//! fails.

use std::thread::ThreadId;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};

use sidecar_core::error::{Error, Result};
use sidecar_core::reload::{Pauses, Switched};

/// How long evaluations and switches wait for each other.
#[derive(Debug, Clone, Copy)]
pub(super) struct Limits {
    /// How long new evaluations wait for a switch that has not begun.
    pub hold: Duration,
    /// How long a switch waits. Evaluations of large models on slow machines take tens of
    /// seconds.
    pub timeout: Duration,
}

impl Default for Limits {
    fn default() -> Limits {
        Limits {
            hold: Duration::from_secs(5),
            timeout: Duration::from_secs(60),
        }
    }
}

/// Keeps evaluations and switches of one model apart.
#[derive(Debug, Default)]
pub(super) struct EvalBarrier {
    limits: Limits,
    state: Mutex<BarrierState>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct BarrierState {
    /// The thread that began each running evaluation.
    running: Vec<ThreadId>,
    switcher: Option<Switcher>,
    pauses: Pauses,
}

/// A switch that runs or waits.
#[derive(Debug)]
struct Switcher {
    thread: ThreadId,
    /// Whether new evaluations wait for the switch.
    holds: bool,
}

/// A running evaluation. No reload changes a tensor before the evaluation ends.
#[derive(Debug)]
#[must_use]
pub struct Evaluation {
    began_by: ThreadId,
}

impl BarrierState {
    /// Begins an evaluation; `None` while a switch holds new evaluations.
    ///
    /// A thread that already evaluates this model is never held: the switch waits for the
    /// evaluation of that thread, so the thread would wait for itself.
    fn begin(&mut self) -> Result<Option<Evaluation>> {
        let me = std::thread::current().id();
        if let Some(switcher) = &self.switcher {
            if switcher.thread == me {
                return Err(Error::Busy(
                    "an evaluation cannot begin inside the stale-graph callback, because the switch is not over: return from the callback first",
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

impl EvalBarrier {
    #[cfg(test)]
    pub fn with(limits: Limits) -> EvalBarrier {
        EvalBarrier {
            limits,
            ..EvalBarrier::default()
        }
    }

    /// Begins an evaluation; `None` if it has to wait for a switch.
    pub fn try_begin(&self) -> Result<Option<Evaluation>> {
        self.state.lock().begin()
    }

    /// Begins an evaluation, after the switch that holds new evaluations.
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

    /// Ends an evaluation, on any thread.
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

    /// Returns an error when a switch on this thread would wait for the thread itself.
    ///
    /// An evaluation is known by the thread that began it. If another thread took the
    /// evaluation over and switches, the switch fails after its timeout.
    pub fn check_can_switch(&self) -> Result<()> {
        let me = std::thread::current().id();
        let state = self.state.lock();
        let switches = |switcher: &Switcher| switcher.thread == me;
        if state.running.contains(&me) || state.switcher.as_ref().is_some_and(switches) {
            return Err(Error::Busy(
                "a reload cannot run inside an evaluation of the same thread: end the evaluation, then reload",
            ));
        }
        Ok(())
    }

    /// Runs `switch` while no evaluation runs. Fails when a running evaluation does not end in
    /// time. `switch` returns the generation that it made, or why it changed nothing.
    pub fn switch(&self, switch: impl FnOnce() -> Result<u64>) -> Result<Switched> {
        let thread = std::thread::current().id();
        let asked = Instant::now();
        let until = asked + self.limits.timeout;
        let evaluates = |state: &mut BarrierState| !state.running.is_empty();
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
        // Also when `switch` panics.
        let _release = Release(self);
        let wait = asked.elapsed();
        let began = Instant::now();
        let generation = switch()?;
        Ok(Switched {
            wait,
            switch: began.elapsed(),
            generation,
        })
    }

    /// Returns how long evaluations waited for switches so far.
    pub fn pauses(&self) -> Pauses {
        self.state.lock().pauses
    }
}

/// Lets evaluations begin again when dropped.
struct Release<'a>(&'a EvalBarrier);

impl Drop for Release<'_> {
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
        let barrier = EvalBarrier::default();
        let (switching, evaluating, switches) =
            (AtomicBool::new(false), AtomicU64::new(0), AtomicU64::new(0));
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for _ in 0..2000 {
                        let evaluation = barrier.begin().unwrap();
                        evaluating.fetch_add(1, Ordering::SeqCst);
                        assert!(!switching.load(Ordering::SeqCst));
                        evaluating.fetch_sub(1, Ordering::SeqCst);
                        barrier.end(evaluation);
                    }
                });
            }
            for _ in 0..2 {
                scope.spawn(|| {
                    for _ in 0..500 {
                        barrier
                            .switch(|| {
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
        let barrier = EvalBarrier::default();
        let outer = barrier.begin().unwrap();
        assert!(barrier.check_can_switch().is_err());
        std::thread::scope(|scope| {
            let switch = scope.spawn(|| barrier.switch(|| Ok(1)).unwrap());
            while barrier.state.lock().switcher.is_none() {
                std::thread::yield_now();
            }
            let nested = barrier.begin().unwrap();
            barrier.end(nested);
            barrier.end(outer);
            switch.join().unwrap();
        });
        barrier
            .switch(|| {
                assert!(barrier.begin().is_err());
                Ok(1)
            })
            .unwrap();
        assert!(barrier.check_can_switch().is_ok());
    }

    const NO_TIME: Duration = Duration::ZERO;
    const NO_LIMIT: Duration = Duration::from_secs(1 << 30);

    #[test]
    fn a_switch_gives_up_when_an_evaluation_does_not_end() {
        let barrier = EvalBarrier::with(Limits {
            hold: NO_TIME,
            timeout: NO_TIME,
        });
        std::thread::scope(|scope| {
            let endless = scope.spawn(|| barrier.begin().unwrap()).join().unwrap();
            let error = barrier.switch(|| panic!("an evaluation runs")).unwrap_err();
            assert!(error.to_string().contains("did not end"), "{error}");
            // Nothing is left behind: evaluations begin, and the next switch is done.
            let evaluation = barrier.try_begin().unwrap().expect("nothing holds it");
            barrier.end(evaluation);
            barrier.end(endless);
            barrier.switch(|| Ok(1)).unwrap();
        });
    }

    #[test]
    fn a_switch_that_waits_for_long_lets_new_evaluations_begin() {
        let barrier = EvalBarrier::with(Limits {
            hold: NO_TIME,
            timeout: NO_LIMIT,
        });
        let endless = barrier.begin().unwrap();
        std::thread::scope(|scope| {
            let switch = scope.spawn(|| barrier.switch(|| Ok(1)).unwrap());
            while barrier.state.lock().switcher.is_none() {
                std::thread::yield_now();
            }
            let another = scope.spawn(|| barrier.begin().unwrap()).join().unwrap();
            barrier.end(endless);
            barrier.end(another);
            switch.join().unwrap();
        });
    }

    #[test]
    fn an_evaluation_that_was_handed_over_ends_on_its_new_thread() {
        let barrier = EvalBarrier::with(Limits {
            hold: NO_TIME,
            timeout: NO_TIME,
        });
        let handed_over = std::thread::scope(|scope| {
            let begun = scope.spawn(|| barrier.begin().unwrap());
            begun.join().unwrap()
        });
        // The barrier does not know that this thread evaluates: the switch gives up after its timeout.
        assert!(barrier.check_can_switch().is_ok());
        assert!(barrier.switch(|| Ok(1)).is_err());
        barrier.end(handed_over);
        barrier.switch(|| Ok(1)).unwrap();
    }
}
