//! Work before SIGTERM ends a process that has no handler of its own.
//!
//! `exit` runs the handlers of atexit(3), a signal does not. Programs that handle SIGTERM
//! themselves (servers) are not changed.

use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::sync::atomic::{AtomicI32, Ordering};

use crate::thread;

/// The write end of the pipe that wakes the thread.
static WAKE: AtomicI32 = AtomicI32::new(-1);
/// The process of the thread. A forked child has the handler and not the thread.
static PROCESS: AtomicI32 = AtomicI32::new(0);

/// Runs `finish` when SIGTERM is about to end the process, unless the program handles it.
pub fn finish_on_sigterm(finish: fn()) {
    let mut ends = [-1; 2];
    // SAFETY: plain system calls; `before` is filled before it is read, and the handler only
    // calls functions that are safe in a handler.
    unsafe {
        let mut before: libc::sigaction = std::mem::zeroed();
        let known = libc::sigaction(libc::SIGTERM, std::ptr::null(), &mut before) == 0;
        if !known || before.sa_sigaction != libc::SIG_DFL {
            return;
        }
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
        let mut ours: libc::sigaction = std::mem::zeroed();
        ours.sa_sigaction = on_termination as extern "C" fn(libc::c_int) as usize;
        ours.sa_flags = libc::SA_RESTART;
        libc::sigaction(libc::SIGTERM, &ours, std::ptr::null_mut());
    }
}

extern "C" fn on_termination(_signal: libc::c_int) {
    // SAFETY: all of these are safe in a handler (signal-safety(7)); errno is restored.
    unsafe {
        if libc::getpid() != PROCESS.load(Ordering::SeqCst) {
            libc::signal(libc::SIGTERM, libc::SIG_DFL);
            libc::raise(libc::SIGTERM);
            return;
        }
        let before = *libc::__errno_location();
        libc::write(WAKE.load(Ordering::SeqCst), c"".as_ptr().cast(), 1);
        *libc::__errno_location() = before;
    }
}

fn wait_and_end(read: &OwnedFd, finish: fn()) {
    let mut byte = 0u8;
    // SAFETY: one byte to read into; then the signal has its default effect.
    unsafe {
        while libc::read(read.as_raw_fd(), (&raw mut byte).cast(), 1) < 0 {}
        finish();
        libc::signal(libc::SIGTERM, libc::SIG_DFL);
        libc::kill(libc::getpid(), libc::SIGTERM);
    }
}
