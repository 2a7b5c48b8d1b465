//! A program that runs under this one: it gets our signals, we get its end.

use std::os::unix::process::ExitStatusExt;
use std::process::{Child, Command, ExitStatus};
use std::sync::atomic::{AtomicI32, Ordering};

use anyhow::Result;

/// The child that signals are passed on to; 0 while there is none.
static CHILD: AtomicI32 = AtomicI32::new(0);
/// A signal that came before there was one.
static EARLY: AtomicI32 = AtomicI32::new(0);

/// Signals by which somebody asks a program for something.
const PASSED_ON: [libc::c_int; 6] = [
    libc::SIGHUP,
    libc::SIGINT,
    libc::SIGQUIT,
    libc::SIGTERM,
    libc::SIGUSR1,
    libc::SIGUSR2,
];

/// Starts a command that gets the signals that are sent to this process.
pub fn spawn(command: &mut Command) -> Result<Child> {
    // SAFETY: the handler does what a handler may; exec gives the child the default ones.
    unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        let handler: extern "C" fn(libc::c_int, *mut libc::siginfo_t, *mut libc::c_void) = pass_on;
        action.sa_sigaction = handler as usize;
        action.sa_flags = libc::SA_SIGINFO | libc::SA_RESTART;
        for signal in PASSED_ON {
            let mut before: libc::sigaction = std::mem::zeroed();
            libc::sigaction(signal, std::ptr::null(), &mut before);
            // What our parent had us ignore (nohup), the child ignores too.
            if before.sa_sigaction != libc::SIG_IGN {
                libc::sigaction(signal, &action, std::ptr::null_mut());
            }
        }
    }
    let child = command.spawn()?;
    CHILD.store(child.id() as i32, Ordering::SeqCst);
    let early = EARLY.swap(0, Ordering::SeqCst);
    if early != 0 {
        // SAFETY: a system call; the process is ours until it is waited for.
        unsafe { libc::kill(child.id() as libc::pid_t, early) };
    }
    Ok(child)
}

/// Waits for the end of a child.
pub fn wait(child: &mut Child) -> Result<ExitStatus> {
    let status = child.wait()?;
    CHILD.store(0, Ordering::SeqCst);
    Ok(status)
}

/// Ends this process as another one ended.
pub fn end_like(status: ExitStatus) -> ! {
    if let Some(signal) = status.signal() {
        let no_core = libc::rlimit {
            rlim_cur: 0,
            rlim_max: 0,
        };
        // SAFETY: plain system calls. The child has left its core already, if it did.
        unsafe {
            libc::setrlimit(libc::RLIMIT_CORE, &no_core);
            libc::signal(signal, libc::SIG_DFL);
            libc::raise(signal);
        }
    }
    std::process::exit(status.code().unwrap_or(1));
}

extern "C" fn pass_on(signal: libc::c_int, info: *mut libc::siginfo_t, _: *mut libc::c_void) {
    /// From the kernel, for a key: the child is in the same group and has had it.
    const SI_KERNEL: libc::c_int = 0x80;
    // SAFETY: the kernel filled the struct; kill may be called in a handler.
    unsafe {
        let child = CHILD.load(Ordering::SeqCst);
        if child == 0 {
            EARLY.store(signal, Ordering::SeqCst);
        } else if (*info).si_code != SI_KERNEL {
            libc::kill(child, signal);
        }
    }
}
