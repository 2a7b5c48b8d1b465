//! The thread that issues copies to a device.
//!
//! It issues copies while there may be more under way, and watches the oldest one otherwise: so the
//! link has the next copy before one is complete. What is queued, and where the copies go, belongs to a
//! [`CopyQueue`]:
//!
//! ```
//! use std::time::Duration;
//!
//! use parking_lot::Mutex;
//! use sidecar_core::fetch::{CopyQueue, Step, Work};
//!
//! /// Counts down, and "copies" each number.
//! struct Numbers(Mutex<u32>, Work);
//!
//! impl CopyQueue for Numbers {
//!     type Table = u32;
//!     type Copy = u32;
//!     type Watched = ();
//!
//!     fn table(&self) -> (&Mutex<u32>, &Work) {
//!         (&self.0, &self.1)
//!     }
//!     fn next(&self, left: &mut u32) -> Step<u32, ()> {
//!         *left = left.saturating_sub(1);
//!         if *left == 0 { Step::Stop } else { Step::Issue(*left) }
//!     }
//!     fn issue(&mut self, copy: u32) {
//!         assert!((1..4).contains(&copy));
//!     }
//!     fn watch(&mut self, _: ()) {}
//! }
//!
//! let mut numbers = Numbers(Mutex::new(4), Work::default());
//! numbers.run(Duration::ZERO);
//! assert_eq!(*numbers.0.lock(), 0);
//! ```

use std::time::Duration;

use crate::sync::{AtomicU64, Condvar, Instant, Mutex, MutexGuard, Ordering, spin_loop};

/// What the thread does next.
#[derive(Debug)]
pub enum Step<C, W> {
    /// Issue a copy.
    Issue(C),
    /// Watch a copy that was issued.
    Watch(W),
    /// Wait for work.
    Wait,
    /// End.
    Stop,
}

/// Wakes the thread, whether it sleeps or spins.
#[derive(Debug, Default)]
pub struct Work {
    sleeps: Condvar,
    wakes: AtomicU64,
}

impl Work {
    /// Reports work. The table holds it already, and is not locked by the caller.
    pub fn notify(&self) {
        self.wakes.fetch_add(1, Ordering::Release);
        self.sleeps.notify_one();
    }

    /// Waits for a report: spins until a moment, then sleeps. The table may be unlocked meanwhile.
    fn wait<T>(&self, table: &mut MutexGuard<'_, T>, until: Instant) {
        if Instant::now() >= until {
            self.sleeps.wait(table);
            return;
        }
        let seen = self.wakes.load(Ordering::Acquire);
        MutexGuard::unlocked(table, || {
            while self.wakes.load(Ordering::Acquire) == seen && Instant::now() < until {
                spin_loop();
            }
        });
    }
}

/// Copies that one thread issues, in the order in which they were queued.
pub trait CopyQueue {
    /// What is queued and under way. Other threads change it and report [`Work`].
    type Table;
    /// A copy that is to be issued.
    type Copy;
    /// A copy that was issued.
    type Watched;

    /// Returns the table, and what reports work in it.
    fn table(&self) -> (&Mutex<Self::Table>, &Work);

    /// Takes the next step from the table.
    fn next(&self, table: &mut Self::Table) -> Step<Self::Copy, Self::Watched>;

    /// Issues a copy.
    fn issue(&mut self, copy: Self::Copy);

    /// Watches a copy: waits until it is complete, or for a moment.
    fn watch(&mut self, watched: Self::Watched);

    /// Takes steps until the last one. Without work, spins for a time before it sleeps.
    fn run(&mut self, spin: Duration) {
        loop {
            match wait(self, spin) {
                Step::Issue(copy) => self.issue(copy),
                Step::Watch(watched) => self.watch(watched),
                Step::Wait => {}
                Step::Stop => return,
            }
        }
    }
}

/// Waits for a step other than [`Step::Wait`].
fn wait<Q: CopyQueue + ?Sized>(queue: &Q, spin: Duration) -> Step<Q::Copy, Q::Watched> {
    let until = Instant::now() + spin;
    let (table, work) = queue.table();
    let mut table = table.lock();
    loop {
        match queue.next(&mut table) {
            Step::Wait => work.wait(&mut table, until),
            step => return step,
        }
    }
}
