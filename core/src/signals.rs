//! Signals that this library keeps from the program.

use std::mem::MaybeUninit;
use std::time::{Duration, Instant};

/// The signals of writes: to a pipe without a reader, and above the limit of file sizes.
const OF_WRITES: [libc::c_int; 2] = [libc::SIGPIPE, libc::SIGXFSZ];

/// How often a lock is tried again around a fork.
const FORK_PERIOD: Duration = Duration::from_micros(50);

/// Blocks signals of this thread until it is dropped. It has those that were blocked before.
#[derive(Debug)]
pub struct Blocked(libc::sigset_t);

impl Blocked {
    /// Blocks all signals. With those of a lock, no handler runs on a thread that has it.
    pub fn all() -> Blocked {
        let mut all = MaybeUninit::uninit();
        // SAFETY: the call fills the set.
        let all = unsafe {
            libc::sigfillset(all.as_mut_ptr());
            all.assume_init()
        };
        Blocked::new(&all)
    }

    /// Blocks signals, in addition to those that are blocked.
    fn new(signals: &libc::sigset_t) -> Blocked {
        let mut before = MaybeUninit::uninit();
        // SAFETY: the call fills the set.
        unsafe {
            libc::pthread_sigmask(libc::SIG_BLOCK, signals, before.as_mut_ptr());
            Blocked(before.assume_init())
        }
    }
}

impl Drop for Blocked {
    fn drop(&mut self) {
        // SAFETY: a valid set.
        unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, &self.0, std::ptr::null_mut()) };
    }
}

/// Calls `start` with all signals of this thread blocked: a thread that it starts handles none of
/// the program's signals, from its first instruction on.
pub fn without_signals<T>(start: impl FnOnce() -> T) -> T {
    let _blocked = Blocked::all();
    start()
}

/// Tries to get a lock around a fork, for a time at most. The handler of a signal may fork: a thread that the signal
/// interrupted in the queue of another lock must not enter a queue, as waiting for a lock does.
pub fn lock_around_fork<T>(limit: Duration, attempt: impl Fn() -> Option<T>) -> Option<T> {
    let begun = Instant::now();
    loop {
        match attempt() {
            None if begun.elapsed() < limit => std::thread::sleep(FORK_PERIOD),
            locked => return locked,
        }
    }
}

/// Calls `write`, whose writes only fail where they would end the program by a signal.
pub fn without_write_signals<T>(write: impl FnOnce() -> T) -> T {
    let _blocked = Blocked::new(&set(&OF_WRITES));
    let before = pending();
    let written = write();
    let now = pending();
    for signal in OF_WRITES {
        // SAFETY: valid sets; the call takes what is pending, and does not wait.
        unsafe {
            if libc::sigismember(&now, signal) == 1 && libc::sigismember(&before, signal) != 1 {
                let (mut info, at_once) = (std::mem::zeroed(), std::mem::zeroed());
                let taken = libc::sigtimedwait(&set(&[signal]), &mut info, &at_once);
                // The kernel names this process for a signal of a write. One that another process sent meanwhile is the
                // program's.
                let process = libc::getpid();
                if taken == signal && libc::siginfo_t::si_pid(&info) != process {
                    libc::kill(process, signal);
                }
            }
        }
    }
    written
}

fn set(signals: &[libc::c_int]) -> libc::sigset_t {
    let mut set = MaybeUninit::uninit();
    // SAFETY: the first call fills the set.
    unsafe {
        libc::sigemptyset(set.as_mut_ptr());
        for signal in signals {
            libc::sigaddset(set.as_mut_ptr(), *signal);
        }
        set.assume_init()
    }
}

/// Returns the signals that are pending for this thread or the process.
fn pending() -> libc::sigset_t {
    let mut pending = set(&[]);
    // SAFETY: fills the set.
    unsafe { libc::sigpending(&mut pending) };
    pending
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;

    #[test]
    fn a_signal_that_another_process_sends_meanwhile_is_the_programs() {
        static SEEN: AtomicUsize = AtomicUsize::new(0);
        extern "C" fn seen(_: libc::c_int) {
            SEEN.fetch_add(1, Ordering::SeqCst);
        }
        // SAFETY: the handler counts; the child makes two system calls, and is waited for.
        unsafe {
            let handler = seen as extern "C" fn(libc::c_int);
            libc::signal(libc::SIGXFSZ, handler as libc::sighandler_t);
            let (process, thread) = (libc::getpid(), libc::gettid());
            without_write_signals(|| {
                let child = libc::fork();
                if child == 0 {
                    libc::syscall(libc::SYS_tgkill, process, thread, libc::SIGXFSZ);
                    libc::_exit(0);
                }
                libc::waitpid(child, std::ptr::null_mut(), 0);
            });
        }
        let began = std::time::Instant::now();
        while SEEN.load(Ordering::SeqCst) == 0 {
            assert!(began.elapsed().as_secs() < 10, "it is lost");
            std::thread::yield_now();
        }
    }

    #[test]
    fn a_signal_of_a_write_is_taken_and_one_of_the_program_stays() {
        // Rust's programs ignore the signal, and it would not become pending.
        // SAFETY: a signal that nothing else in this process raises.
        let before = unsafe { libc::signal(libc::SIGPIPE, libc::SIG_DFL) };
        let (reader, mut writer) = std::io::pipe().expect("a pipe");
        drop(reader);
        let written = without_write_signals(|| writer.write_all(b"text"));
        let error = written.expect_err("no reader");
        assert_eq!(error.kind(), std::io::ErrorKind::BrokenPipe);
        {
            let _blocked = Blocked::new(&set(&OF_WRITES));
            // SAFETY: plain system calls.
            unsafe { libc::raise(libc::SIGPIPE) };
            without_write_signals(|| writer.write_all(b"text")).expect_err("no reader");
            // SAFETY: a valid set.
            assert_eq!(unsafe { libc::sigismember(&pending(), libc::SIGPIPE) }, 1);
            // SAFETY: an ignored signal is removed.
            unsafe { libc::signal(libc::SIGPIPE, libc::SIG_IGN) };
        }
        // SAFETY: as above.
        unsafe { libc::signal(libc::SIGPIPE, before) };
    }
}
