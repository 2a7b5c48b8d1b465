//! Work before a signal ends a process that has no handler of its own.
//!
//! `exit` runs the handlers of atexit(3), a signal does not. Programs that handle a signal
//! themselves (servers), or ignore it, are not changed.

use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::sync::atomic::{AtomicI32, Ordering};

use crate::process::thread;

/// The signals with which users end a program.
const SIGNALS: [libc::c_int; 2] = [libc::SIGTERM, libc::SIGINT];

/// The write end of the pipe that wakes the thread.
static WAKE: AtomicI32 = AtomicI32::new(-1);
/// The process of the thread. A forked child has the handler and not the thread.
static PROCESS: AtomicI32 = AtomicI32::new(0);

/// Runs `finish` when one of [`SIGNALS`] is about to end the process.
pub fn finish_on_signals(finish: fn()) {
    let fatal: Vec<_> = SIGNALS
        .into_iter()
        .filter(|signal| is_default(*signal))
        .collect();
    if fatal.is_empty() {
        return;
    }
    let mut ends = [-1; 2];
    // SAFETY: plain system calls; the handler only calls functions that are safe in a handler.
    unsafe {
        if libc::pipe2(ends.as_mut_ptr(), libc::O_CLOEXEC) != 0 {
            return;
        }
        let (read, write) = (OwnedFd::from_raw_fd(ends[0]), OwnedFd::from_raw_fd(ends[1]));
        WAKE.store(write.as_raw_fd(), Ordering::SeqCst);
        PROCESS.store(libc::getpid(), Ordering::SeqCst);
        let started = thread::spawn("llama-sidecar-e", move || {
            let _open = write;
            wait_and_end(&read, finish);
        });
        if !started {
            return;
        }
        for signal in fatal {
            let mut ours: libc::sigaction = std::mem::zeroed();
            ours.sa_sigaction = on_signal as extern "C" fn(libc::c_int) as usize;
            ours.sa_flags = libc::SA_RESTART;
            libc::sigaction(signal, &ours, std::ptr::null_mut());
        }
    }
}

/// Whether a signal has its default effect.
fn is_default(signal: libc::c_int) -> bool {
    // SAFETY: `found` is filled before it is read.
    unsafe {
        let mut found: libc::sigaction = std::mem::zeroed();
        libc::sigaction(signal, std::ptr::null(), &mut found) == 0
            && found.sa_sigaction == libc::SIG_DFL
    }
}

extern "C" fn on_signal(signal: libc::c_int) {
    // SAFETY: all of these are safe in a handler (signal-safety(7)); errno is restored.
    unsafe {
        if libc::getpid() != PROCESS.load(Ordering::SeqCst) {
            libc::signal(signal, libc::SIG_DFL);
            libc::raise(signal);
            return;
        }
        let before = *libc::__errno_location();
        // The number of a signal fits into a byte.
        let byte = signal as u8;
        libc::write(WAKE.load(Ordering::SeqCst), (&raw const byte).cast(), 1);
        *libc::__errno_location() = before;
    }
}

fn wait_and_end(read: &OwnedFd, finish: fn()) {
    let mut byte = 0u8;
    // SAFETY: one byte to read into; then the signal has its default effect.
    unsafe {
        while libc::read(read.as_raw_fd(), (&raw mut byte).cast(), 1) < 0 {}
        finish();
        let signal = libc::c_int::from(byte);
        libc::signal(signal, libc::SIG_DFL);
        libc::kill(libc::getpid(), signal);
    }
}
