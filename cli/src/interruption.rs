//! Keys and signals that end a command that measures.

use std::fs;
use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::process::Child;
use std::sync::atomic::{AtomicBool, AtomicI32, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use anyhow::Result;
use rustix::process::{
    Pid, PidfdFlags, Signal, WaitOptions, getpid, kill_process, pidfd_open, pidfd_send_signal,
    set_child_subreaper, waitpid,
};
use signal_hook::consts::{SIGHUP, SIGINT, SIGQUIT, SIGTERM};
use signal_hook::iterator::Signals;
use signal_hook::low_level::emulate_default_handler;

use crate::inherited;

/// How long processes may take to end that programs have left.
const LAST_WAIT: Duration = Duration::from_secs(5);

/// The signal that came; 0 before.
static SIGNAL: AtomicI32 = AtomicI32::new(0);

/// Whether processes whose parents have ended are children of this process.
static ADOPTS: AtomicBool = AtomicBool::new(false);

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

/// Calls a function in a thread of its own for each signal that ends a process and is not ignored.
pub fn on_signals(mut call: impl FnMut(i32) + Send + 'static) -> Result<()> {
    let signals = [SIGHUP, SIGINT, SIGQUIT, SIGTERM].into_iter();
    let mut signals = Signals::new(signals.filter(|signal| !inherited::is_ignored(*signal)))?;
    let thread = std::thread::Builder::new().name("signals".into());
    thread.spawn(move || signals.forever().for_each(&mut call))?;
    Ok(())
}

/// From now on, a signal ends this process and what it owns.
pub fn end_at_signals() -> Result<()> {
    on_signals(end_now)
}

/// From now on, the first signal ends the program that evaluates, and a second one this process. No process that a program
/// starts is left, whatever its session.
pub fn watch() -> Result<()> {
    adopt()?;
    on_signals(|signal| match note(signal) {
        true => {
            eprintln!("");
            eprintln!("llama-sidecar: interrupted; a second signal ends at once");
            owned().end_process();
        }
        false => end_now(signal),
    })
}

/// Notes a signal by which this process is to end, and returns whether it is the first one.
pub fn note(signal: i32) -> bool {
    SIGNAL.swap(signal, Ordering::SeqCst) == 0
}

/// From now on, processes whose parents have ended are children of this process, until [`end_left`].
pub fn adopt() -> Result<()> {
    set_child_subreaper(Some(getpid()))?;
    ADOPTS.store(true, Ordering::SeqCst);
    Ok(())
}

/// Ends the processes that programs have left. This process has waited for the programs themselves.
pub fn end_left() {
    end_children(true);
}

/// Ends all children, if those of others are adopted. `reaps` also waits for them, which no other thread may do then.
fn end_children(reaps: bool) {
    let since = Instant::now();
    while ADOPTS.load(Ordering::SeqCst) && since.elapsed() < LAST_WAIT {
        let left = children().into_iter();
        let left = left.filter(|(_, has_ended)| reaps || !has_ended);
        let ended = left.map(|(process, _)| {
            // Its own children have another parent then: this process.
            let _ = kill_process(process, Signal::KILL);
            if reaps {
                let _ = waitpid(Some(process), WaitOptions::NOHANG);
            }
        });
        if ended.count() == 0 {
            return;
        }
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Returns the children of this process, and whether each has ended.
fn children() -> Vec<(Pid, bool)> {
    let own = getpid().as_raw_nonzero().to_string();
    let entries = fs::read_dir("/proc").into_iter().flatten().flatten();
    let found = entries.filter_map(|entry| {
        let process = Pid::from_raw(entry.file_name().to_str()?.parse().ok()?)?;
        let stat = fs::read_to_string(entry.path().join("stat")).ok()?;
        let mut fields = stat_fields(&stat)?;
        let has_ended = fields.next()? == "Z";
        (fields.next()? == own).then_some((process, has_ended))
    });
    found.collect()
}

/// Returns the fields of proc_pid_stat(5), from the third on: the name before them may have spaces.
pub fn stat_fields(text: &str) -> Option<impl Iterator<Item = &str>> {
    let (_, fields) = text.rsplit_once(") ")?;
    Some(fields.split_whitespace())
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
    // The thread that waits for the program ends by the signal, too.
    note(signal);
    let owned = owned();
    owned.end_process();
    // Another thread may wait for a child.
    end_children(false);
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
