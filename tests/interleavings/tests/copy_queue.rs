//! The thread that issues copies, and evaluations that queue them and wait: [`interleavings::copy_queue`].

use std::sync::Arc;
use std::time::Duration;

use interleavings::copy_queue::{CopyQueue, Step, Work};
use interleavings::sync::{Condvar, Mutex, explore};
use loom::cell::UnsafeCell;
use loom::thread;

/// How many copies evaluations queue.
const COPIES: usize = 2;

/// What is queued, under way and complete.
#[derive(Default)]
struct Table {
    queued: Vec<usize>,
    under_way: Vec<usize>,
    complete: [bool; COPIES],
    ends: bool,
}

/// A table, what reports work in it and completed copies, and the bytes of each copy; loom finds a use of bytes
/// that are being copied.
#[derive(Default)]
struct Device {
    table: Mutex<Table>,
    work: Work,
    completed: Condvar,
    bytes: [UnsafeCell<u32>; COPIES],
}

// SAFETY: loom's threads take turns on one thread.
unsafe impl Sync for Device {}
// SAFETY: as above.
unsafe impl Send for Device {}

impl Device {
    fn new() -> Arc<Device> {
        let device = Device::default();
        // Each part of it exists before the other threads begin.
        drop(device.table.lock());
        device.work.notify();
        device.completed.notify_all();
        Arc::new(device)
    }

    /// Queues a copy, waits for it and uses its bytes.
    fn evaluate(&self, copy: usize) {
        self.table.lock().queued.push(copy);
        self.work.notify();
        let mut table = self.table.lock();
        while !table.complete[copy] {
            self.completed.wait(&mut table);
        }
        drop(table);
        // SAFETY: loom checks that no other thread writes them.
        assert_eq!(self.bytes[copy].with(|bytes| unsafe { *bytes }), 1);
    }

    fn end(&self) {
        self.table.lock().ends = true;
        self.work.notify();
    }
}

/// The thread that issues copies.
struct Copies(Arc<Device>);

impl CopyQueue for Copies {
    type Table = Table;
    type Copy = usize;
    type Watched = usize;

    fn table(&self) -> (&Mutex<Table>, &Work) {
        (&self.0.table, &self.0.work)
    }

    fn next(&self, table: &mut Table) -> Step<usize, usize> {
        if let Some(copy) = table.queued.pop() {
            table.under_way.push(copy);
            return Step::Issue(copy);
        }
        match table.under_way.first() {
            Some(&copy) => Step::Watch(copy),
            None if table.ends => Step::Stop,
            None => Step::Wait,
        }
    }

    fn issue(&mut self, copy: usize) {
        // SAFETY: loom checks that no other thread uses them.
        self.0.bytes[copy].with_mut(|bytes| unsafe { *bytes += 1 });
    }

    fn watch(&mut self, copy: usize) {
        let mut table = self.0.table.lock();
        table.under_way.retain(|of| *of != copy);
        table.complete[copy] = true;
        self.0.completed.notify_all();
    }
}

/// Two evaluations and the end, for a thread that sleeps at once or spins: a report that it misses ends the test.
fn copies_are_complete(spin: Duration) {
    explore(Some(3), Duration::ZERO, move || {
        let device = Device::new();
        let thread = {
            let device = device.clone();
            thread::spawn(move || Copies(device).run(spin))
        };
        let other = {
            let device = device.clone();
            thread::spawn(move || device.evaluate(1))
        };
        device.evaluate(0);
        other.join().expect("no panic");
        device.end();
        thread.join().expect("it ends");
        assert_eq!(device.table.lock().complete, [true; COPIES]);
    });
}

#[test]
fn two_evaluations_wake_a_thread_that_sleeps() {
    copies_are_complete(Duration::ZERO);
}

#[test]
fn two_evaluations_wake_a_thread_that_spins() {
    copies_are_complete(Duration::from_secs(1));
}
