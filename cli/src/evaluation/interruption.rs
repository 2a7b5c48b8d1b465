//! Keys and signals that end a command that measures.

use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::process::Child;
use std::sync::atomic::{AtomicI32, Ordering};
use std::sync::{Mutex, PoisonError};

use anyhow::Result;
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::Signals;
use signal_hook::low_level::emulate_default_handler;

use crate::launch::child;

/// The signal that came; 0 before.
static SIGNAL: AtomicI32 = AtomicI32::new(0);

/// The program that evaluates.
static PROGRAM: Mutex<Option<Followed>> = Mutex::new(None);

struct Followed {
    /// Not its number, which another process may get.
    process: OwnedFd,
    /// The folder of its socket.
    folder: Option<PathBuf>,
}

/// Calls a function in a thread of its own for each signal that ends a process and is not ignored.
pub fn on_signals(mut call: impl FnMut(i32) + Send + 'static) -> Result<()> {
    let is_ignored = child::ignored_signals();
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
            eprintln!("\nllama-sidecar: interrupted; a second signal ends at once");
            with_program(Followed::end);
        }
        _ => end_now(signal),
    })
}

impl Followed {
    fn end(&self) {
        let _ = pidfd_send_signal(&self.process, Signal::KILL);
    }
}

fn with_program(act: impl FnOnce(&Followed)) {
    let program = PROGRAM.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(program) = &*program {
        act(program);
    }
}

/// The program that evaluates is this one. It ends at once if a signal has come.
pub fn follow(child: &Child, folder: Option<&Path>) {
    // Kernels before 5.3 have no such descriptors: the program goes on to its end there.
    let process = pidfd_open(Pid::from_child(child), PidfdFlags::empty()).ok();
    let program = process.map(|process| Followed {
        process,
        folder: folder.map(Path::to_owned),
    });
    *PROGRAM.lock().unwrap_or_else(PoisonError::into_inner) = program;
    if signal().is_some() {
        with_program(Followed::end);
    }
}

/// Returns the signal that came.
pub fn signal() -> Option<i32> {
    Some(SIGNAL.load(Ordering::SeqCst)).filter(|signal| *signal != 0)
}

/// Ends the program that evaluates, and then this process by a signal.
pub fn end_now(signal: i32) {
    with_program(|program| {
        program.end();
        if let Some(folder) = &program.folder {
            // It only takes space.
            let _ = std::fs::remove_dir_all(folder);
        }
    });
    let _ = emulate_default_handler(signal);
}

/// Ends this process by the signal that came, if one came.
pub fn end_by_signal() {
    if let Some(signal) = signal() {
        end_now(signal);
    }
}
