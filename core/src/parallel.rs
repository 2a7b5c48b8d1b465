//! Work on a list of items on several threads.

use parking_lot::{Condvar, Mutex};

/// The number of threads above which copying memory does not get faster.
const MAX_THREADS: usize = 8;

/// Calls `start` with all signals of this thread blocked: a thread that it starts handles none of
/// the program's signals, from its first instruction on.
pub fn without_signals<T>(start: impl FnOnce() -> T) -> T {
    let mut all = std::mem::MaybeUninit::<libc::sigset_t>::uninit();
    let mut before = std::mem::MaybeUninit::<libc::sigset_t>::uninit();
    // SAFETY: valid sets, of which the first is filled here and the second by the first call.
    unsafe {
        libc::sigfillset(all.as_mut_ptr());
        libc::pthread_sigmask(libc::SIG_SETMASK, all.as_ptr(), before.as_mut_ptr());
        let started = start();
        libc::pthread_sigmask(libc::SIG_SETMASK, before.as_ptr(), std::ptr::null_mut());
        started
    }
}

/// Returns the number of threads that speed up copying on this machine.
pub fn threads() -> usize {
    std::thread::available_parallelism()
        .map_or(1, usize::from)
        .min(MAX_THREADS)
}

/// Calls `work` once for each item, in order, on several threads.
///
/// `work` returns whether to go on; after `false`, no further item is handled. `beside` runs on
/// the calling thread after items were handled on any thread, and for the last time after all
/// items were. `beside` can stop the work in the same way, and is not called after the work is
/// stopped. Returns whether all items were handled and the work was not stopped.
pub fn for_each<T: Send>(
    items: Vec<T>,
    work: impl Fn(T) -> bool + Sync,
    beside: impl FnMut() -> bool,
) -> bool {
    for_each_on(threads().min(items.len()), items, work, beside)
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
            state.waiting.is_some() && state.handled == known && state.handled < state.taken
        });
        (state.waiting.is_some() && state.handled > known).then_some(state.handled)
    }
}

struct Counted<'a, T>(&'a Queue<T>);

impl<T> Drop for Counted<'_, T> {
    fn drop(&mut self) {
        self.0.state.lock().handled += 1;
        self.0.handled.notify_all();
    }
}

fn for_each_on<T: Send>(
    threads: usize,
    items: Vec<T>,
    work: impl Fn(T) -> bool + Sync,
    mut beside: impl FnMut() -> bool,
) -> bool {
    let queue = Queue {
        state: Mutex::new(State {
            waiting: Some(items.into_iter()),
            taken: 0,
            handled: 0,
        }),
        handled: Condvar::new(),
    };
    std::thread::scope(|scope| {
        // Fewer threads do the work if one cannot be started. Joining a thread waits until it
        // has exited, because a program may unload this library next.
        let help = || while queue.handle_next(&work) {};
        let helpers: Vec<_> = (1..threads)
            .filter_map(|_| {
                let builder = std::thread::Builder::new();
                without_signals(|| builder.spawn_scoped(scope, help)).ok()
            })
            .collect();
        let mut known = 0;
        loop {
            queue.handle_next(&work);
            let Some(handled) = queue.more_than(known) else {
                break;
            };
            known = handled;
            if !beside() {
                queue.stop();
            }
        }
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
        assert!(!for_each(vec![1; 100], |_| false, || true));
        assert!(!for_each(vec![1], |_| true, || false));
        assert!(for_each(Vec::<u8>::new(), |_| false, || false));
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
            2,
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
                2,
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
