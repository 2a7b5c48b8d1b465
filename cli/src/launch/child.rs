//! A child process: it gets the signals of this process, and this process ends as it ends.
//!
//! A child in the process group of this process gets the signals that are sent to the group, and
//! must not get them twice: a server that stops at the first SIGINT may abort at the second. The
//! kernel does not report whether a signal was sent to a process or to its group. Therefore a
//! [`witness`] in the group reports the signals that it gets.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use rustix::io::retry_on_intr;
use rustix::process::{
    Pid, Resource, Rlimit, Signal, WaitId, WaitIdOptions, kill_process, kill_process_group,
    set_parent_process_death_signal, setrlimit, test_kill_process_group, waitid,
};
use signal_hook::consts::{SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGUSR1, SIGUSR2};
use signal_hook::iterator::exfiltrator::origin::WithOrigin;
use signal_hook::iterator::{Signals, SignalsInfo};
use signal_hook::low_level::emulate_default_handler;
use signal_hook::low_level::siginfo::{Cause, Origin};

use crate::words::quoted;

use crate::inherited;
use crate::interruption;

/// Signals with which users control a program.
const PASSED_ON: [i32; 6] = [SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGUSR1, SIGUSR2];

/// Time between SIGTERM and SIGKILL.
const LAST_WAIT: Duration = Duration::from_secs(5);
/// How long the report of a witness may take.
const REPORT_TIME: Duration = Duration::from_millis(100);
/// For how long a signal of the group counts as that of this process: programs such as `timeout`
/// send both.
const SAME_SIGNAL: Duration = Duration::from_secs(1);

/// Options whose values are secrets.
const SECRETS: [&str; 4] = ["--api-key", "--hf-token", "-hft", "--api-key-file"];

/// The command line word for [`witness`].
pub const WITNESS: &str = "witness";

/// The child that gets the signals.
static CHILD: Mutex<Option<Pid>> = Mutex::new(None);

fn set_child(child: Option<Pid>) {
    *CHILD.lock().unwrap_or_else(PoisonError::into_inner) = child;
}

/// Where a child gets the signals of a terminal's keys from.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Group {
    /// It is in the process group of this process.
    Shared,
    /// It has a process group of its own.
    Own,
}

/// Signals that the process group got.
struct Witness {
    reports: Receiver<(i32, Instant)>,
    /// When each signal was reported last.
    last: BTreeMap<i32, Instant>,
}

impl Witness {
    /// Starts a process that ends with this one.
    fn start() -> Result<Witness> {
        let mut process = Command::new(std::env::current_exe()?)
            .arg(WITNESS)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()?;
        let mut lines = BufReader::new(process.stdout.take().context("a pipe")?).lines();
        lines.next().context("it ended")??;
        let (send, reports) = channel();
        std::thread::Builder::new()
            .name("witness".into())
            .spawn(move || {
                // Its input stays open as long as this thread.
                let _process = process;
                for signal in lines.map_while(|line| line.ok()?.parse().ok()) {
                    let _ = send.send((signal, Instant::now()));
                }
            })?;
        Ok(Witness {
            reports,
            last: BTreeMap::new(),
        })
    }

    /// Whether the process group got a signal that this process just got.
    fn saw(&mut self, signal: i32) -> bool {
        let deadline = Instant::now() + REPORT_TIME;
        loop {
            self.last.extend(self.reports.try_iter());
            let last = self.last.get(&signal);
            if last.is_some_and(|last| last.elapsed() < SAME_SIGNAL) {
                return true;
            }
            let left = deadline.saturating_duration_since(Instant::now());
            match self.reports.recv_timeout(left) {
                Ok(report) => self.last.extend([report]),
                Err(_) => return false,
            }
        }
    }
}

/// Writes a line when it is ready, then the number of each signal that this process gets, until its
/// input ends.
pub fn witness() -> Result<()> {
    let mut signals = Signals::new(PASSED_ON)?;
    println!("ready");
    let thread = std::thread::Builder::new().name("signals".into());
    thread.spawn(move || {
        for signal in &mut signals {
            let mut out = std::io::stdout().lock();
            let _ = writeln!(out, "{signal}").and_then(|()| out.flush());
        }
    })?;
    std::io::stdin().read_to_end(&mut Vec::new())?;
    Ok(())
}

/// The system permits this process no further thread.
#[derive(Debug, thiserror::Error)]
#[error("cannot start a thread: {0}")]
pub struct NoThread(std::io::Error);

/// Runs a command in place of this process. Returns only if it cannot be run.
pub fn replace(mut command: Command) -> anyhow::Error {
    inherited::restore_in(&mut command);
    command.exec().into()
}

/// Starts a command that gets the signals that are sent to this process. Fails with [`NoThread`] if there can be no thread
/// that passes them on.
pub fn spawn(command: &mut Command, group: Group) -> Result<Child> {
    // A program with a handler of its own gets the signals that are ignored, so all are passed on.
    inherited::restore_in(command);
    // From here on signals wait for the thread. In the child, exec restores the default.
    let mut signals = SignalsInfo::<WithOrigin>::new(PASSED_ON)?;
    let prepare = move || {
        // What ends this process without a chance to pass it on ends the child, too. This thread lives as long as the process.
        let _ = set_parent_process_death_signal(Some(Signal::KILL));
        Ok(())
    };
    // SAFETY: the function makes system calls only.
    unsafe { command.pre_exec(prepare) };
    let (started, child_started) = std::sync::mpsc::channel::<()>();
    let is_shared = group == Group::Shared;
    // Without one, the child may get a signal twice.
    let mut witness = is_shared.then(Witness::start).and_then(Result::ok);
    let mut group_got = move |origin: &Origin| {
        // The kernel sends the signal of a key to the whole group, and that of a terminal that is gone to the leader of the
        // session.
        let from_key = matches!(origin.cause, Cause::Kernel) && origin.signal != SIGHUP;
        is_shared && from_key
            || witness
                .as_mut()
                .is_some_and(|witness| witness.saw(origin.signal))
    };
    let pass_on = move || {
        let _ = child_started.recv();
        for origin in &mut signals {
            let signal = Signal::from_named_raw(origin.signal).filter(|_| !group_got(&origin));
            if ![SIGUSR1, SIGUSR2].contains(&origin.signal) {
                interruption::note(origin.signal);
            }
            let child = CHILD.lock().unwrap_or_else(PoisonError::into_inner);
            if let (Some(child), Some(signal)) = (*child, signal) {
                let _ = kill_process(child, signal);
            }
        }
    };
    let thread = std::thread::Builder::new().name("signals".into());
    thread.spawn(pass_on).map_err(NoThread)?;
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

/// Ends a child and all processes of its group. The child is the leader of the group, and was not
/// waited for yet.
pub fn end_group(child: &mut Child) -> Result<()> {
    // The program may be a script: the processes that it started end, too.
    let group = Pid::from_child(child);
    let _ = kill_process_group(group, Signal::TERM);
    let since = Instant::now();
    loop {
        let has_ended = child.try_wait()?.is_some();
        // Each process writes its last events as it ends, and the script may end first.
        if has_ended && test_kill_process_group(group).is_err() {
            return Ok(());
        }
        if since.elapsed() > LAST_WAIT {
            let _ = kill_process_group(group, Signal::KILL);
            if has_ended {
                return Ok(());
            }
        }
        std::thread::sleep(Duration::from_millis(20));
    }
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

/// Returns the line of a program's errors that has the cause: the first that reports an error, else
/// the last. What fails first makes the rest fail.
pub fn cause(errors: &str) -> Option<&str> {
    let mut lines = errors.lines().filter(|line| !line.trim().is_empty());
    let reports = |line: &&str| {
        let line = line.to_lowercase();
        ["error", "failed", "cannot", "couldn't", "no such"]
            .iter()
            .any(|word| line.contains(word))
    };
    lines.clone().find(reports).or(lines.next_back())
}

/// Returns a command for others to read: without keys, and without the user's folder.
pub fn without_secrets(words: &[OsString]) -> String {
    let home = std::env::var("HOME").unwrap_or_default();
    let mut is_secret = false;
    let words = words.iter().map(|word| {
        let text = quoted(word);
        if std::mem::replace(&mut is_secret, SECRETS.iter().any(|of| word == *of)) {
            return "...".into();
        }
        match text.strip_prefix(&home).filter(|_| !home.is_empty()) {
            Some(rest) if rest.starts_with('/') => format!("~{rest}"),
            _ => text,
        }
    });
    words.collect::<Vec<String>>().join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_report_has_no_keys() {
        let words = ["llama-server", "--api-key", "secret", "-m", "a model.gguf"];
        let words: Vec<OsString> = words.map(OsString::from).to_vec();
        assert_eq!(
            without_secrets(&words),
            "llama-server --api-key ... -m 'a model.gguf'"
        );
    }
}
