//! Threads of the host. Each is a participant with a clock and a virtual time of its own.

use std::cell::Cell;
use std::sync::{Arc, Mutex};

use crate::order::Who;
use crate::sim::{Moment, sim};

/// A thread of the host that called this backend.
pub struct HostThread {
    /// Its number as a participant.
    pub who: Who,
    /// Its name in the report.
    pub name: Arc<str>,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    number: u64,
    moment: Moment,
    waited: u64,
}

/// All of them, in the order of their first calls.
pub static THREADS: Mutex<Vec<Arc<HostThread>>> = Mutex::new(Vec::new());

thread_local! {
    static THIS: Arc<HostThread> = HostThread::new();
    /// The virtual time of this thread.
    static TIME: Cell<u64> = const { Cell::new(0) };
}

/// Returns the virtual time of the calling thread, in nanoseconds.
pub fn time() -> u64 {
    TIME.get()
}

impl HostThread {
    fn new() -> Arc<HostThread> {
        let (who, name) = sim().participate("thread");
        let thread = Arc::new(HostThread {
            who,
            name,
            state: Mutex::default(),
        });
        THREADS.lock().expect("no panic").push(thread.clone());
        thread
    }

    /// The calling thread.
    pub fn this() -> Arc<HostThread> {
        THIS.with(Arc::clone)
    }

    /// Begins a piece of work; returns its number, and what it comes after.
    pub fn begin(&self) -> (u64, Moment) {
        let ended = sim().ended.lock().expect("no panic").clone();
        let mut state = self.state.lock().expect("no panic");
        state.number += 1;
        let number = state.number;
        state.moment.clock.note(self.who, number);
        state.moment.clock.join(&ended);
        (number, state.moment.clone())
    }

    /// Ends a piece of work that the thread did itself.
    pub fn end(&self, number: u64, time: u64) {
        sim().ended.lock().expect("no panic").note(self.who, number);
        self.wait_until(time);
    }

    /// Comes after a state of a stream.
    pub fn join(&self, moment: &Moment) {
        sim().arrive(&moment.clock);
        let mut state = self.state.lock().expect("no panic");
        state.moment.clock.join(&moment.clock);
        drop(state);
        self.wait_until(moment.time);
    }

    /// Spends time on its own work.
    pub fn spend(&self, time: u64) {
        let mut state = self.state.lock().expect("no panic");
        state.moment.time += time;
        TIME.set(state.moment.time);
    }

    /// Waits, in virtual time, without coming after anything.
    pub fn wait_until(&self, time: u64) {
        let mut state = self.state.lock().expect("no panic");
        state.waited += time.saturating_sub(state.moment.time);
        state.moment.time = time.max(state.moment.time);
        TIME.set(state.moment.time);
    }

    /// Returns its time, and how much of it was spent waiting.
    pub fn times(&self) -> (u64, u64) {
        let state = self.state.lock().expect("no panic");
        (state.moment.time, state.waited)
    }
}
