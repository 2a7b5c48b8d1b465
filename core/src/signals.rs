//! Signals that this library keeps from the program.

use std::mem::MaybeUninit;

/// The signals of writes: to a pipe without a reader, and above the limit of file sizes.
const OF_WRITES: [libc::c_int; 2] = [libc::SIGPIPE, libc::SIGXFSZ];

/// The signals of this thread that were blocked before.
struct Blocked(libc::sigset_t);

impl Blocked {
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
    let mut all = MaybeUninit::uninit();
    // SAFETY: the call fills the set.
    let all = unsafe {
        libc::sigfillset(all.as_mut_ptr());
        all.assume_init()
    };
    let _blocked = Blocked::new(&all);
    start()
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
                let at_once = std::mem::zeroed();
                libc::sigtimedwait(&set(&[signal]), std::ptr::null_mut(), &at_once);
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

    use super::*;

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
