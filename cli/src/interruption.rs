//! Keys and signals that end a command that measures.

use std::fs;
use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::process::Child;
use std::sync::atomic::{AtomicI32, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use anyhow::Result;
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::Signals;
use signal_hook::low_level::emulate_default_handler;

/// The signal that came; 0 before.
static SIGNAL: AtomicI32 = AtomicI32::new(0);

/// What does not outlive this process.
static OWNED: Mutex<Owned> = Mutex::new(Owned {
    process: None,
    paths: Vec::new(),
});

struct Owned {
    /// The program that evaluates. Not its number, which another process may get.
    process: Option<OwnedFd>,
    /// Files and folders.
    paths: Vec<PathBuf>,
}

impl Owned {
    fn end_process(&self) {
        if let Some(process) = &self.process {
            // One that has ended gets no signal.
            let _ = pidfd_send_signal(process, Signal::KILL);
        }
    }
}

fn owned() -> MutexGuard<'static, Owned> {
    OWNED.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Returns a function that returns which signals this process ignores.
pub fn ignored_signals() -> impl Fn(i32) -> bool {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    let mask = mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok());
    move |signal| mask.unwrap_or(0) >> (signal - 1) & 1 == 1
}

/// Calls a function in a thread of its own for each signal that ends a process and is not ignored.
pub fn on_signals(mut call: impl FnMut(i32) + Send + 'static) -> Result<()> {
    let is_ignored = ignored_signals();
    let signals = [SIGHUP, SIGINT, SIGTERM].into_iter();
    let mut signals = Signals::new(signals.filter(|signal| !is_ignored(*signal)))?;
    let thread = std::thread::Builder::new().name("signals".into());
    thread.spawn(move || signals.forever().for_each(&mut call))?;
    Ok(())
}

/// From now on, the first signal ends the program that evaluates, and a second one this process.
pub fn watch() -> Result<()> {
    on_signals(|signal| match SIGNAL.swap(signal, Ordering::SeqCst) {
        0 => {
            eprintln!("");
            eprintln!("llama-sidecar: interrupted; a second signal ends at once");
            owned().end_process();
        }
        _ => end_now(signal),
    })
}

/// The program that evaluates is this one. It ends at once if a signal has come.
pub fn follow(child: &Child) {
    // Kernels before 5.3 have no such descriptors: the program goes on to its end there.
    let process = pidfd_open(Pid::from_child(child), PidfdFlags::empty()).ok();
    let mut owned = owned();
    owned.process = process;
    if signal().is_some() {
        owned.end_process();
    }
}

/// Makes a file or a folder that takes only space after this process. No signal comes between.
pub fn make_temporary<T>(
    make: impl FnOnce() -> io::Result<T>,
    path: impl FnOnce(&T) -> &Path,
) -> io::Result<T> {
    let mut owned = owned();
    let made = make()?;
    owned.paths.push(path(&made).to_owned());
    Ok(made)
}

/// Makes something while no signal ends this process.
pub fn undisturbed<T>(make: impl FnOnce() -> T) -> T {
    let _owned = owned();
    make()
}

/// Returns the signal that came.
pub fn signal() -> Option<i32> {
    Some(SIGNAL.load(Ordering::SeqCst)).filter(|signal| *signal != 0)
}

/// Ends the program that evaluates, and then this process by a signal. Nothing is left.
pub fn end_now(signal: i32) {
    let owned = owned();
    owned.end_process();
    for path in &owned.paths {
        // Most are gone already.
        let _ = fs::remove_file(path).or_else(|_| fs::remove_dir_all(path));
    }
    let _ = emulate_default_handler(signal);
}

/// Ends this process by the signal that came, if one came.
pub fn end_by_signal() {
    if let Some(signal) = signal() {
        end_now(signal);
    }
}
