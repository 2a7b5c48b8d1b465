//! Switches of tensors between evaluations: [`interleavings::barrier`].

use std::sync::Arc;
use std::time::Duration;

use interleavings::barrier::{self, MODEL_FREED, ModelSet, Replaced, Slot, SlotGraph};
use interleavings::sync::{AtomicBool, Ordering, explore};
use loom::cell::UnsafeCell;
use loom::thread;

/// A wait that is shorter than each limit, so that a few waits do not reach it.
const WAIT: Duration = Duration::from_millis(60);

/// What a switch replaces; loom finds a read during a write.
#[derive(Default)]
struct Weights([UnsafeCell<u64>; 2]);

// SAFETY: loom's threads take turns on one thread.
unsafe impl Sync for Weights {}

impl Weights {
    /// Reads them as an evaluation does, and checks that they are those of one switch.
    fn read(&self) -> u64 {
        // SAFETY: loom checks that no thread writes them.
        let [first, second] = self.0.each_ref().map(|at| at.with(|at| unsafe { *at }));
        assert_eq!(first, second, "tensors of one switch change together");
        first
    }

    fn replace(&self) {
        for at in &self.0 {
            // SAFETY: loom checks that no thread reads them.
            at.with_mut(|at| unsafe { *at += 1 });
        }
    }
}

fn model() -> ModelSet {
    ModelSet::of(1)
}

fn replaced() -> Replaced {
    Replaced {
        models: model(),
        viewed: Box::new(|| false),
    }
}

/// Returns a slot of a scheduler whose graph stays valid after a switch, or is not known to.
fn slot(stays_valid: bool) -> &'static Slot {
    let slot: &Slot = Box::leak(Box::new(Slot::free()));
    slot.link(|| ());
    // Each part of it exists before the other threads begin.
    slot.leave();
    slot.release();
    slot.claim(std::ptr::from_ref(slot) as usize);
    slot.set_graph(&SlotGraph {
        is_kept: false,
        stays_valid,
        survives_if_no_views: stays_valid,
        reads: model(),
    });
    slot
}

/// Makes the parts of the barrier, weights, and whether their model is alive, on the thread that all others begin
/// after.
fn begin() -> (Arc<Weights>, Arc<AtomicBool>) {
    barrier::note_pause(Duration::ZERO);
    assert_eq!((barrier::generation(), barrier::viewed_in()), (0, 0));
    assert!(!barrier::is_shut() && !barrier::is_pending() && !barrier::is_busy());
    assert!(barrier::pending().is_none());
    let alive = Arc::new(AtomicBool::new(true));
    alive.load(Ordering::Relaxed);
    (Arc::default(), alive)
}

/// Begins an evaluation of a slot on a thread of its own.
fn evaluate(
    slot: &'static Slot,
    weights: &Arc<Weights>,
    work: impl FnOnce(&Slot, &Weights) + 'static,
) -> thread::JoinHandle<()> {
    let weights = weights.clone();
    thread::spawn(move || work(slot, &weights))
}

fn switch(weights: &Arc<Weights>, alive: &Arc<AtomicBool>) -> Result<u64, &'static str> {
    let (of_work, of_wait) = (alive.clone(), alive.clone());
    let weights = weights.clone();
    let wanted = move || of_wait.load(Ordering::SeqCst);
    let switched = barrier::switch(replaced(), wanted, move || {
        if !of_work.load(Ordering::SeqCst) {
            return Err(MODEL_FREED);
        }
        weights.replace();
        Ok(())
    });
    switched.map(|switched| switched.generation)
}

#[test]
fn evaluations_read_the_tensors_of_one_switch_and_none_of_a_freed_model() {
    explore(Some(2), WAIT, || {
        let (weights, alive) = begin();
        let evaluations = [slot(true), slot(true)].map(|slot| {
            evaluate(slot, &weights, |slot, weights| {
                slot.enter();
                assert_eq!(weights.read(), barrier::generation());
                slot.leave_ended();
            })
        });
        let switched = {
            let (weights, alive) = (weights.clone(), alive.clone());
            thread::spawn(move || switch(&weights, &alive))
        };
        let [first, second] = evaluations;
        first.join().expect("no panic");
        second.join().expect("no panic");
        // The program frees the model.
        {
            let _no_switch = barrier::hold();
            alive.store(false, Ordering::SeqCst);
        }
        let freed_after = weights.read();
        weights.replace();
        let switched = switched.join().expect("no panic");
        match freed_after {
            0 => assert_eq!(switched, Err(MODEL_FREED)),
            _ => assert_eq!(switched, Ok(1)),
        }
    });
}

#[test]
fn an_evaluation_that_its_backend_goes_on_with_keeps_switches_away() {
    explore(Some(6), WAIT, || {
        let (weights, alive) = begin();
        let evaluated = evaluate(slot(false), &weights, |slot, weights| {
            // Building the graph and allocating it.
            slot.begin(|| ());
            let built_in = weights.read();
            slot.enter();
            assert_eq!(weights.read(), built_in, "none within a decode");
            slot.leave();
            slot.enter_compute();
            assert_eq!(weights.read(), built_in, "none within a decode");
            slot.leave_running();
            // The backend reads them until it was waited for.
            assert_eq!(weights.read(), built_in, "none while a backend runs");
            slot.backends_are_done();
            slot.rest();
        });
        switch(&weights, &alive).expect("the evaluation ends");
        evaluated.join().expect("no panic");
        assert_eq!(weights.read(), 1);
    });
}

#[test]
fn an_evaluation_whose_graph_stays_valid_lets_a_switch_go_first() {
    explore(Some(4), WAIT, || {
        let (weights, alive) = begin();
        let evaluated = evaluate(slot(true), &weights, |slot, weights| {
            slot.enter_compute();
            assert_eq!(weights.read(), barrier::generation());
            slot.leave_ended();
        });
        switch(&weights, &alive).expect("the evaluation ends");
        switch(&weights, &alive).expect("the evaluation ends");
        evaluated.join().expect("no panic");
    });
}

/// A decode that was begun long ago does not count; a switch then runs before it goes on.
#[test]
fn a_decode_that_goes_on_after_all_reads_the_tensors_of_one_switch() {
    explore(Some(5), Duration::from_millis(400), || {
        let (weights, alive) = begin();
        let evaluated = evaluate(slot(false), &weights, |slot, weights| {
            slot.begin(|| ());
            slot.enter();
            weights.read();
            slot.leave();
            slot.enter_compute();
            let computed_with = weights.read();
            slot.leave_running();
            assert_eq!(weights.read(), computed_with, "none while a backend runs");
            slot.backends_are_done();
            slot.rest();
        });
        switch(&weights, &alive).expect("it is abandoned or ends");
        evaluated.join().expect("no panic");
    });
}
