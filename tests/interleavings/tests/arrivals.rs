//! Matrices that are read into memory, and evaluations that wait for them: [`interleavings::arrivals`].

use std::sync::Arc;
use std::time::Duration;

use interleavings::arrivals::{Arrivals, Reason, State};
use interleavings::sync::explore;
use loom::cell::UnsafeCell;
use loom::thread;

/// A matrix, and whether it was read; loom finds two reads of it at a time.
#[derive(Default)]
struct Matrix(State, UnsafeCell<u32>);

/// Matrices, by number, and the waits for them.
struct Table([Matrix; 2], Arrivals);

// SAFETY: loom's threads take turns on one thread.
unsafe impl Sync for Table {}
// SAFETY: as above.
unsafe impl Send for Table {}

impl Table {
    fn new() -> Arc<Table> {
        let table = Table(Default::default(), Arrivals::default());
        // Each part of it exists before the other threads begin.
        for Matrix(state, _) in &table.0 {
            drop(table.1.begin(0, state, Reason::Ahead));
        }
        Arc::new(table)
    }

    /// Reads a matrix unless another thread does. A read can fail.
    fn bring(&self, number: usize, reason: Reason, succeeds: bool) {
        let Matrix(state, bytes) = &self.0[number];
        if let Some(read) = self.1.begin(number, state, reason) {
            // SAFETY: loom checks that no other thread uses it.
            bytes.with_mut(|bytes| unsafe { *bytes = u32::from(succeeds) });
            if succeeds {
                read.succeed();
            }
        }
    }

    /// Needs matrices: queues those that are absent, waits, and uses what is here.
    fn evaluate(&self, numbers: &[usize]) {
        for &number in numbers {
            let Matrix(state, bytes) = &self.0[number];
            if state.is_coming() {
                self.1.wait(number, state, || true);
            }
            if state.is_here() {
                // SAFETY: loom checks that no other thread writes it.
                assert_eq!(bytes.with(|bytes| unsafe { *bytes }), 1, "it was read");
            }
        }
    }
}

/// Only the end of a read ends a wait, so that a wait that misses it never ends.
const NO_LIMIT: Duration = Duration::ZERO;

#[test]
fn two_evaluations_wait_for_what_two_threads_read() {
    explore(Some(2), NO_LIMIT, || {
        let table = Table::new();
        for Matrix(state, _) in &table.0 {
            assert!(state.queue());
        }
        let other = {
            let table = table.clone();
            thread::spawn(move || table.evaluate(&[1]))
        };
        let readers = [0, 1].map(|number| {
            let table = table.clone();
            thread::spawn(move || table.bring(number, Reason::Routed, true))
        });
        table.evaluate(&[1, 0]);
        assert!(table.0.iter().all(|Matrix(state, _)| state.is_here()));
        other.join().expect("no panic");
        for reader in readers {
            reader.join().expect("no panic");
        }
    });
}

#[test]
fn one_thread_at_a_time_reads_a_matrix_that_is_read_ahead_and_routed_and_leaves() {
    explore(None, NO_LIMIT, || {
        let table = Table::new();
        let ahead = {
            let table = table.clone();
            thread::spawn(move || table.bring(0, Reason::Ahead, true))
        };
        let reader = {
            let table = table.clone();
            thread::spawn(move || {
                if table.0[0].0.queue() {
                    table.bring(0, Reason::Routed, false);
                }
            })
        };
        // Others need its memory, and then it is needed again.
        let state = &table.0[0].0;
        if state.is_here() {
            state.leave();
            if state.queue() {
                table.bring(0, Reason::Routed, true);
            }
        }
        ahead.join().expect("no panic");
        reader.join().expect("no panic");
        assert!(!state.is_coming());
    });
}
