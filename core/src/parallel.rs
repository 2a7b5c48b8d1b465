//! Work on a list of items on several threads, which may run at low priority.

use parking_lot::{Condvar, Mutex};

use crate::descriptors::processors;
use crate::memory::take_for_thread;
use crate::priority::lower_priority;
use crate::signals::without_signals;

/// The number of threads above which copying memory does not get faster.
const MAX_THREADS: usize = 8;

/// The threads that divide work.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Threads {
    /// As many as speed up copying on this machine, the calling one among them, at its priority.
    All,
    /// This many beside the calling one, which waits, at low priority: a nice value 10 above the
    /// caller's, and the lowest best-effort priority for reads (ioprio_set(2)).
    LowPriority(usize),
}

impl Threads {
    /// One thread at low priority, beside a program that evaluates.
    pub const BESIDE_THE_PROGRAM: Threads = Threads::LowPriority(1);

    /// Returns how many items are handled at a time.
    pub fn count(self) -> usize {
        match self {
            Threads::All => fastest(),
            Threads::LowPriority(threads) => threads.max(1),
        }
    }
}

/// Returns the number of threads that speed up copying on this machine.
fn fastest() -> usize {
    processors().min(MAX_THREADS)
}

/// Calls `work` once for each item, in order, and waits for the threads. They block all signals,
/// which the program handles.
///
/// `work` returns whether to go on; after `false`, no further item is handled. `beside` runs on
/// the calling thread after items were handled on any thread, and for the last time after all
/// items were. `beside` can stop the work in the same way, and is not called after the work is
/// stopped. Returns whether all items were handled and the work was not stopped.
pub fn for_each<T: Send>(
    threads: Threads,
    items: Vec<T>,
    work: impl Fn(T) -> bool + Sync,
    beside: impl FnMut() -> bool,
) -> bool {
    let count = threads.count();
    match threads {
        Threads::All => for_each_on(count - 1, None, items, work, beside),
        Threads::LowPriority(_) => for_each_on(count, Some(lower_priority), items, work, beside),
    }
}

/// The items that wait, and the numbers of items taken and handled.
struct Queue<T> {
    state: Mutex<State<T>>,
    /// Signals that an item was handled, or abandoned by a panic.
    handled: Condvar,
}

struct State<T> {
    /// `None` once the work is stopped.
    waiting: Option<std::vec::IntoIter<T>>,
    taken: usize,
    handled: usize,
}

impl<T> Queue<T> {
    /// Handles the next item; returns whether there was one.
    fn handle_next(&self, work: impl Fn(T) -> bool) -> bool {
        let item = {
            let mut state = self.state.lock();
            let Some(item) = state.waiting.as_mut().and_then(Iterator::next) else {
                return false;
            };
            state.taken += 1;
            item
        };
        // Also when `work` panics, or the calling thread would wait without end.
        let _counted = Counted(self);
        if !work(item) {
            self.stop();
        }
        true
    }

    fn stop(&self) {
        self.state.lock().waiting = None;
    }

    /// Waits until more than `known` items are handled and returns their number; `None` when no
    /// more items will be handled.
    fn more_than(&self, known: usize) -> Option<usize> {
        let mut state = self.state.lock();
        self.handled.wait_while(&mut state, |state| {
            let open =
                |waiting: &std::vec::IntoIter<T>| waiting.len() > 0 || state.handled < state.taken;
            state.handled == known && state.waiting.as_ref().is_some_and(open)
        });
        (state.waiting.is_some() && state.handled > known).then_some(state.handled)
    }
}

struct Counted<'a, T>(&'a Queue<T>);

impl<T> Drop for Counted<'_, T> {
    fn drop(&mut self) {
        let mut state = self.0.state.lock();
        state.handled += 1;
        if std::thread::panicking() {
            state.waiting = None;
        }
        self.0.handled.notify_all();
    }
}

/// Divides items among `helpers` new threads, which call `prepare` first, and the calling thread;
/// with `prepare`, the calling thread does not handle items if any helper does.
fn for_each_on<T: Send>(
    helpers: usize,
    prepare: Option<fn()>,
    items: Vec<T>,
    work: impl Fn(T) -> bool + Sync,
    mut beside: impl FnMut() -> bool,
) -> bool {
    let helpers = helpers.min(items.len());
    let queue = Queue {
        state: Mutex::new(State {
            waiting: Some(items.into_iter()),
            taken: 0,
            handled: 0,
        }),
        handled: Condvar::new(),
    };
    std::thread::scope(|scope| {
        let help = || {
            prepare.inspect(|prepare| prepare());
            while queue.handle_next(&work) {}
        };
        // Fewer threads do the work if one cannot be started.
        let helpers: Vec<_> = (0..helpers)
            .filter_map(|_| {
                let taken = take_for_thread().ok()?;
                let help = move || {
                    let _taken = taken;
                    help();
                };
                let builder = std::thread::Builder::new().name("llama-sidecar-h".into());
                without_signals(|| builder.spawn_scoped(scope, help)).ok()
            })
            .collect();
        let only_waits = prepare.is_some() && !helpers.is_empty();
        let mut known = 0;
        loop {
            if !only_waits {
                queue.handle_next(&work);
            }
            let Some(handled) = queue.more_than(known) else {
                break;
            };
            known = handled;
            if !beside() {
                queue.stop();
            }
        }
        // Joining a thread waits until it has exited, because a program may unload this library
        // next.
        for helper in helpers {
            if let Err(panic) = helper.join() {
                std::panic::resume_unwind(panic);
            }
        }
    });
    queue.state.into_inner().waiting.is_some()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicU64, Ordering};
    use std::sync::{Barrier, mpsc};

    #[test]
    fn every_item_is_handled_once() {
        let sum = AtomicU64::new(0);
        let all = for_each(
            Threads::All,
            (1..=1000u64).collect(),
            |n| {
                sum.fetch_add(n, Ordering::Relaxed);
                true
            },
            || true,
        );
        assert!(all);
        assert_eq!(sum.into_inner(), 500_500);
    }

    #[test]
    fn either_side_can_stop_it() {
        assert!(!for_each(Threads::All, vec![1; 100], |_| false, || true));
        assert!(!for_each(Threads::All, vec![1], |_| true, || false));
        assert!(for_each(
            Threads::All,
            Vec::<u8>::new(),
            |_| false,
            || false
        ));
    }

    #[test]
    fn every_item_is_handled_once_at_low_priority() {
        let sum = AtomicU64::new(0);
        // SAFETY: a system call without pointers.
        let priority = || unsafe { libc::getpriority(libc::PRIO_PROCESS, 0) };
        let lowered = (priority() + 10).min(19);
        let mut seen = Vec::new();
        let work = |item: u64| {
            sum.fetch_add(item, Ordering::Relaxed);
            priority() == lowered
        };
        let all = for_each(Threads::LowPriority(3), (1..=100).collect(), work, || {
            seen.push(sum.load(Ordering::Relaxed));
            true
        });
        assert!(all, "each ran nicer by 10");
        assert_eq!(sum.into_inner(), 5050);
        assert_eq!(
            seen.last(),
            Some(&5050),
            "all were handled at the last call"
        );
    }

    #[test]
    fn work_that_says_stop_stops() {
        let handled = Mutex::new(Vec::new());
        let work = |item| {
            handled.lock().push(item);
            item < 2
        };
        assert!(!for_each(
            Threads::LowPriority(1),
            vec![1, 2, 3],
            work,
            || true
        ));
        assert_eq!(*handled.lock(), [1, 2]);
    }

    #[test]
    fn a_panic_at_low_priority_reaches_the_caller() {
        let work = |_| -> bool { panic!("on purpose") };
        let result = std::panic::catch_unwind(|| {
            for_each(Threads::LowPriority(1), vec![1, 2, 3], work, || true)
        });
        assert!(result.is_err());
    }

    /// Handles two items on two threads, the one of the helper last, and returns what
    /// `beside` saw each time, and the result.
    fn helper_is_last(go_on_at_end: bool) -> (Vec<u64>, bool) {
        let caller = std::thread::current().id();
        let (both, done) = (Barrier::new(2), AtomicU64::new(0));
        let (told, asked) = mpsc::channel();
        let asked = Mutex::new(asked);
        let mut seen = Vec::new();
        let all = for_each_on(
            1,
            None,
            vec![(), ()],
            |()| {
                both.wait();
                if std::thread::current().id() != caller {
                    asked.lock().recv().unwrap();
                }
                done.fetch_add(1, Ordering::Relaxed);
                true
            },
            || {
                let now = done.load(Ordering::Relaxed);
                seen.push(now);
                told.send(()).unwrap();
                now < 2 || go_on_at_end
            },
        );
        (seen, all)
    }

    #[test]
    fn the_end_is_reported_also_when_a_helper_is_last() {
        assert_eq!(helper_is_last(true), (vec![1, 2], true));
    }

    #[test]
    fn a_stop_is_honoured_also_when_a_helper_is_last() {
        assert_eq!(helper_is_last(false), (vec![1, 2], false));
    }

    #[test]
    fn a_panic_of_a_helper_reaches_the_caller() {
        let caller = std::thread::current().id();
        let both = Barrier::new(2);
        let result = std::panic::catch_unwind(|| {
            for_each_on(
                1,
                None,
                vec![(), ()],
                |()| {
                    both.wait();
                    assert!(std::thread::current().id() == caller, "on purpose");
                    true
                },
                || true,
            )
        });
        assert!(result.is_err());
    }
}
