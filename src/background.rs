//! Work that must not slow the host down.

use parking_lot::Mutex;

/// Calls `work` once for each item on threads of low priority, and waits for them; items are
/// taken in order. `work` returns whether to go on; returns whether all items were handled.
///
/// A thread runs at nice 10 and reads at the lowest best-effort priority (ioprio_set(2)).
pub fn for_each<T: Send>(threads: usize, items: Vec<T>, work: impl Fn(T) -> bool + Sync) -> bool {
    let threads = threads.clamp(1, items.len().max(1));
    let items = Mutex::new((items.into_iter(), true));
    let run = || {
        lower_priority();
        loop {
            let item = {
                let mut items = items.lock();
                match items.1 {
                    true => items.0.next(),
                    false => None,
                }
            };
            let Some(item) = item else { return };
            if !work(item) {
                items.lock().1 = false;
            }
        }
    };
    std::thread::scope(|scope| {
        let mut started = 0;
        for _ in 0..threads {
            let builder = std::thread::Builder::new().name("llama-sidecar-h".into());
            started += usize::from(builder.spawn_scoped(scope, run).is_ok());
        }
        // Out of threads: the work is done all the same, at the caller's priority.
        if started == 0 {
            let mut items = items.lock();
            while let Some(item) = items.0.next() {
                if !work(item) {
                    items.1 = false;
                    break;
                }
            }
        }
    });
    let items = items.into_inner();
    items.1 && items.0.len() == 0
}

/// Lowers the priority of this thread for processors and disks. Failing costs speed only.
fn lower_priority() {
    const IOPRIO_WHO_PROCESS: libc::c_int = 1;
    const LOWEST_BEST_EFFORT: libc::c_int = (2 << 13) | 7;
    const NICE: libc::c_int = 10;
    // SAFETY: plain system calls, which on Linux act on the calling thread for 0.
    unsafe {
        libc::setpriority(libc::PRIO_PROCESS, 0, NICE);
        libc::syscall(
            libc::SYS_ioprio_set,
            IOPRIO_WHO_PROCESS,
            0,
            LOWEST_BEST_EFFORT,
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_item_is_handled_once_at_low_priority() {
        let sum = Mutex::new(0u64);
        let all = for_each(3, (1..=100).collect(), |item: u64| {
            *sum.lock() += item;
            // SAFETY: a plain system call.
            unsafe { libc::getpriority(libc::PRIO_PROCESS, 0) == 10 }
        });
        assert!(all, "each ran at nice 10");
        assert_eq!(*sum.lock(), 5050);
    }

    #[test]
    fn work_that_says_stop_stops() {
        let handled = Mutex::new(Vec::new());
        let all = for_each(1, vec![1, 2, 3], |item| {
            handled.lock().push(item);
            item < 2
        });
        assert!(!all);
        assert_eq!(*handled.lock(), [1, 2]);
    }
}
