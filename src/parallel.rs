//! Work spread over a few threads.

use parking_lot::Mutex;

/// More threads than this do not make copying memory faster.
const MAX_THREADS: usize = 8;

/// How many threads are worth it on this machine.
pub fn threads() -> usize {
    std::thread::available_parallelism()
        .map_or(1, usize::from)
        .min(MAX_THREADS)
}

/// Calls `work` once for each item, on several threads; items are taken in order.
///
/// `work` returns whether to go on; once it returned `false` no further item is
/// taken. `beside` runs on the calling thread after each item that thread handled,
/// and can stop the work in the same way. Returns whether all items were handled.
pub fn for_each<T: Send>(
    items: Vec<T>,
    work: impl Fn(T) -> bool + Sync,
    mut beside: impl FnMut() -> bool,
) -> bool {
    let threads = threads().min(items.len());
    let queue = Mutex::new(Some(items.into_iter()));
    let next = || queue.lock().as_mut()?.next();
    let stop = || *queue.lock() = None;
    let help = || {
        while let Some(item) = next() {
            if !work(item) {
                stop();
            }
        }
    };
    std::thread::scope(|scope| {
        // A thread that cannot be had is done without. Joining each waits until it
        // is gone and not only done: a host may unload this library next.
        let helpers: Vec<_> = (1..threads)
            .filter_map(|_| std::thread::Builder::new().spawn_scoped(scope, help).ok())
            .collect();
        while let Some(item) = next() {
            if !work(item) || !beside() {
                stop();
            }
        }
        for helper in helpers {
            if let Err(panic) = helper.join() {
                std::panic::resume_unwind(panic);
            }
        }
    });
    queue.into_inner().is_some()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicU64, Ordering};

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
}
