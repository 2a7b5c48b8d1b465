//! A child process: it gets the signals of this process, and this process ends as it ends.

use std::os::unix::process::ExitStatusExt;
use std::process::{Child, Command, ExitStatus};
use std::sync::{Mutex, PoisonError};

use anyhow::{Context, Result};
use rustix::io::retry_on_intr;
use rustix::process::{
    Pid, Resource, Rlimit, Signal, WaitId, WaitIdOptions, kill_process, setrlimit, waitid,
};
use signal_hook::consts::{SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGUSR1, SIGUSR2};
use signal_hook::iterator::SignalsInfo;
use signal_hook::iterator::exfiltrator::origin::WithOrigin;
use signal_hook::low_level::emulate_default_handler;
use signal_hook::low_level::siginfo::Cause;

/// Signals with which users control a program.
const PASSED_ON: [i32; 6] = [SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGUSR1, SIGUSR2];

/// The child that gets the signals.
static CHILD: Mutex<Option<Pid>> = Mutex::new(None);

fn set_child(child: Option<Pid>) {
    *CHILD.lock().unwrap_or_else(PoisonError::into_inner) = child;
}

/// Starts a command that gets the signals that are sent to this process.
pub fn spawn(command: &mut Command) -> Result<Child> {
    // The child ignores the signals that the parent of this process ignores (nohup).
    let ignored = ignored_signals();
    let passed_on = PASSED_ON.into_iter().filter(|signal| !ignored(*signal));
    // From here on signals wait for the thread. In the child, exec restores the default.
    let mut signals = SignalsInfo::<WithOrigin>::new(passed_on)?;
    let (started, child_started) = std::sync::mpsc::channel::<()>();
    let pass_on = move || {
        let _ = child_started.recv();
        for origin in &mut signals {
            // The kernel sends the signal of a key to the whole group, the child included.
            let from_key = matches!(origin.cause, Cause::Kernel);
            let signal = Signal::from_named_raw(origin.signal).filter(|_| !from_key);
            let child = CHILD.lock().unwrap_or_else(PoisonError::into_inner);
            if let (Some(child), Some(signal)) = (*child, signal) {
                let _ = kill_process(child, signal);
            }
        }
    };
    let thread = std::thread::Builder::new().name("signals".into());
    thread.spawn(pass_on).context("cannot start a thread")?;
    let child = command.spawn()?;
    set_child(Some(Pid::from_child(&child)));
    // The thread goes on when its channel is closed.
    drop(started);
    Ok(child)
}

/// Waits for the end of a child.
pub fn wait(child: &mut Child) -> Result<ExitStatus> {
    // Until the child is reaped, no other process gets its number.
    let end = WaitIdOptions::EXITED | WaitIdOptions::NOWAIT;
    retry_on_intr(|| waitid(WaitId::Pid(Pid::from_child(child)), end))?;
    set_child(None);
    Ok(child.wait()?)
}

/// Ends this process as another one ended.
pub fn end_like(status: ExitStatus) -> ! {
    if let Some(signal) = status.signal() {
        // The child has written its core file, if it writes one.
        let none = Rlimit {
            current: Some(0),
            maximum: Some(0),
        };
        let _ = setrlimit(Resource::Core, none);
        let _ = emulate_default_handler(signal);
        // The signal has no known default.
        std::process::exit(128 + signal);
    }
    std::process::exit(status.code().unwrap_or(1));
}

/// Returns a function that returns which signals this process ignores.
fn ignored_signals() -> impl Fn(i32) -> bool {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    let mask = mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok());
    move |signal| mask.unwrap_or(0) >> (signal - 1) & 1 == 1
}
