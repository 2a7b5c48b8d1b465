//! Work before a signal ends a process that has no handler of its own.
//!
//! `exit` runs the handlers of atexit(3), a signal does not. Programs that handle a signal
//! themselves (servers), or ignore it, are not changed.

use std::sync::atomic::{AtomicI32, AtomicPtr, Ordering};

use crate::process::thread;

/// The signals with which users end a program.
const SIGNALS: [libc::c_int; 2] = [libc::SIGTERM, libc::SIGINT];

/// Wakes the thread. A semaphore and not a pipe: a program may close each descriptor, and use its number
/// for another file.
static WAKE: AtomicPtr<libc::sem_t> = AtomicPtr::new(std::ptr::null_mut());
/// The signal that came first.
static SIGNAL: AtomicI32 = AtomicI32::new(0);
/// The process of the thread. A forked child has the handler and not the thread.
static PROCESS: AtomicI32 = AtomicI32::new(0);

/// Runs `finish` when one of [`SIGNALS`] is about to end the process.
pub fn finish_on_signals(finish: fn()) {
    let fatal: Vec<_> = SIGNALS
        .into_iter()
        .filter(|signal| action(*signal) == Some(libc::SIG_DFL))
        .collect();
    // The first process of a container survives signals without a handler (pid_namespaces(7)).
    if fatal.is_empty() || std::process::id() == 1 {
        return;
    }
    // SAFETY: a semaphore that is never freed, initialised before its first use; the handler only calls
    // functions that are safe in a handler.
    unsafe {
        let wake = Box::into_raw(Box::new(std::mem::zeroed::<libc::sem_t>()));
        libc::sem_init(wake, 0, 0);
        WAKE.store(wake, Ordering::SeqCst);
        PROCESS.store(libc::getpid(), Ordering::SeqCst);
        if !thread::spawn("llama-sidecar-e", move || wait_and_end(finish)) {
            return;
        }
        for signal in fatal {
            let mut ours: libc::sigaction = std::mem::zeroed();
            ours.sa_sigaction = OURS as usize;
            ours.sa_flags = libc::SA_RESTART;
            let mut before: libc::sigaction = std::mem::zeroed();
            libc::sigaction(signal, &ours, &mut before);
            // The program has installed a handler meanwhile.
            if before.sa_sigaction != libc::SIG_DFL {
                libc::sigaction(signal, &before, std::ptr::null_mut());
            }
        }
    }
}

/// Returns the handler of a signal.
fn action(signal: libc::c_int) -> Option<libc::sighandler_t> {
    // SAFETY: `found` is filled before it is read.
    unsafe {
        let mut found: libc::sigaction = std::mem::zeroed();
        let filled = libc::sigaction(signal, std::ptr::null(), &mut found) == 0;
        filled.then_some(found.sa_sigaction)
    }
}

const OURS: extern "C" fn(libc::c_int) = on_signal;

extern "C" fn on_signal(signal: libc::c_int) {
    // A handler of the program, which was installed later, calls this one: the program does not end by the signal.
    if action(signal) != Some(OURS as usize) {
        return;
    }
    // SAFETY: all of these are safe in a handler (signal-safety(7)); errno is restored.
    unsafe {
        if libc::getpid() != PROCESS.load(Ordering::SeqCst) {
            libc::signal(signal, libc::SIG_DFL);
            libc::raise(signal);
            return;
        }
        let before = *libc::__errno_location();
        let _ = SIGNAL.compare_exchange(0, signal, Ordering::SeqCst, Ordering::SeqCst);
        libc::sem_post(WAKE.load(Ordering::SeqCst));
        *libc::__errno_location() = before;
    }
}

fn wait_and_end(finish: fn()) {
    // SAFETY: the semaphore is never freed; after `finish`, the signal has its default effect.
    unsafe {
        while libc::sem_wait(WAKE.load(Ordering::SeqCst)) != 0 {}
        finish();
        let signal = SIGNAL.load(Ordering::SeqCst);
        libc::signal(signal, libc::SIG_DFL);
        libc::kill(libc::getpid(), signal);
    }
}
