//! States of matrices that are read into memory, and waits for them.
//!
//! A matrix that is absent is queued by the layer that needs it, or ahead of it; the one thread that changes its
//! state to *being read* reads it, and ends the read once. A thread that waits publishes what it waits for
//! before it looks at the state, and a read publishes its end before it looks for waiting threads, so that no
//! wait misses the end. `tests/interleavings` executes this module with each order of these accesses.

use std::time::Duration;

use crate::sync::{AtomicU8, AtomicUsize, Condvar, Mutex, Ordering};

/// How long a wait lasts before it checks that threads are there.
const CHECK_PERIOD: Duration = Duration::from_millis(200);

/// Value of `awaited`: wake for any matrix.
const ANY: usize = usize::MAX;

const ABSENT: u8 = 0;
const QUEUED: u8 = 1;
const READING: u8 = 2;
const HERE: u8 = 3;

/// Why a matrix is read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reason {
    /// A layer was routed to its expert.
    Routed,
    /// A layer will probably be routed to it.
    Ahead,
}

/// The state of a matrix.
#[derive(Debug)]
pub struct State(AtomicU8);

impl Default for State {
    fn default() -> State {
        State(AtomicU8::new(ABSENT))
    }
}

impl State {
    /// Queues it if it is absent, which the result states.
    pub fn queue(&self) -> bool {
        self.change(ABSENT, QUEUED)
    }

    fn change(&self, from: u8, to: u8) -> bool {
        let order = Ordering::SeqCst;
        self.0.compare_exchange(from, to, order, order).is_ok()
    }

    /// Makes one that was here absent.
    pub fn leave(&self) {
        self.0.store(ABSENT, Ordering::SeqCst);
    }

    /// Whether it is neither here nor on its way.
    pub fn is_absent(&self) -> bool {
        self.0.load(Ordering::Relaxed) == ABSENT
    }

    /// Whether it is here.
    pub fn is_here(&self) -> bool {
        self.0.load(Ordering::SeqCst) == HERE
    }

    /// Whether it is on its way.
    pub fn is_coming(&self) -> bool {
        matches!(self.0.load(Ordering::SeqCst), QUEUED | READING)
    }
}

/// Waits for matrices, and ends of reads.
#[derive(Debug)]
pub struct Arrivals {
    waiters: AtomicUsize,
    /// The matrix that the waiting thread waits for, or [`ANY`].
    awaited: AtomicUsize,
    lock: Mutex<()>,
    read: Condvar,
}

impl Default for Arrivals {
    fn default() -> Arrivals {
        Arrivals {
            waiters: AtomicUsize::new(0),
            awaited: AtomicUsize::new(ANY),
            lock: Mutex::default(),
            read: Condvar::new(),
        }
    }
}

impl Arrivals {
    /// Waits while a matrix, by its number, is on its way, as long as `goes_on`.
    pub fn wait(&self, piece: usize, state: &State, goes_on: impl Fn() -> bool) {
        let mut lock = self.lock.lock();
        let others = self.waiters.fetch_add(1, Ordering::SeqCst);
        let awaited = if others == 0 { piece } else { ANY };
        self.awaited.store(awaited, Ordering::SeqCst);
        while state.is_coming() && goes_on() {
            self.read.wait_for(&mut lock, CHECK_PERIOD);
        }
        self.awaited.store(ANY, Ordering::SeqCst);
        self.waiters.fetch_sub(1, Ordering::SeqCst);
    }

    /// Begins to read a matrix. Returns `None` if another thread reads it, or if it is read ahead and has been
    /// queued.
    pub fn begin<'a>(&'a self, piece: usize, state: &'a State, reason: Reason) -> Option<Read<'a>> {
        let before = match reason {
            Reason::Routed => QUEUED,
            Reason::Ahead => ABSENT,
        };
        state.change(before, READING).then(|| Read {
            arrivals: self,
            piece,
            state,
            end: ABSENT,
        })
    }
}

/// A matrix that is being read; it is absent if the read does not succeed.
#[derive(Debug)]
pub struct Read<'a> {
    arrivals: &'a Arrivals,
    piece: usize,
    state: &'a State,
    end: u8,
}

impl Read<'_> {
    /// Ends the read of a matrix that is here now.
    pub fn succeed(mut self) {
        self.end = HERE;
    }
}

impl Drop for Read<'_> {
    /// Ends the read, and wakes the thread that waits for it. The matrix can leave at once and be read again.
    fn drop(&mut self) {
        self.state.0.store(self.end, Ordering::SeqCst);
        let awaited = self.arrivals.awaited.load(Ordering::SeqCst);
        let is_awaited = awaited == self.piece || awaited == ANY;
        if is_awaited && self.arrivals.waiters.load(Ordering::SeqCst) > 0 {
            drop(self.arrivals.lock.lock());
            self.arrivals.read.notify_all();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_read_that_does_not_begin_ends_no_other() {
        let (arrivals, state) = (Arrivals::default(), State::default());
        let begin = |reason| arrivals.begin(0, &state, reason);
        assert!(state.queue());
        assert!(begin(Reason::Ahead).is_none());
        assert!(state.is_coming());
        let read = begin(Reason::Routed).expect("it is queued");
        for reason in [Reason::Ahead, Reason::Routed] {
            assert!(begin(reason).is_none());
            assert!(state.is_coming());
        }
        read.succeed();
        assert!(begin(Reason::Routed).is_none());
        assert!(state.is_here());
    }
}
