//! A program in a session of its own, without a terminal: what it uses, and its end.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, ExitStatus};

use anyhow::Result;
use rustix::process::{Pid, Signal, kill_process, set_parent_process_death_signal, setsid};
use serde::Serialize;

use super::child;
use crate::inherited;
use crate::interruption;
pub use crate::interruption::stat_fields;

/// What processes used.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize)]
pub struct Usage {
    /// The most memory at a time, with pages of mapped files.
    pub memory_bytes: u64,
    /// The most memory at a time without those.
    pub private_bytes: u64,
    /// Bytes that were read from disks.
    pub read_bytes: u64,
}

/// A program and the processes that it started. They end when this is dropped.
///
/// The program has no terminal: what reads a password there fails, and the keys of a terminal
/// are for this process.
pub struct Session {
    child: Child,
    ended: Option<ExitStatus>,
    used: BTreeMap<i32, Usage>,
}

impl Session {
    /// Starts a program.
    pub fn start(command: &mut Command) -> Result<Session> {
        inherited::restore_in(command);
        // SAFETY: two system calls between fork and exec.
        unsafe {
            command.pre_exec(|| {
                setsid()?;
                Ok(set_parent_process_death_signal(Some(Signal::KILL))?)
            });
        }
        Ok(Session {
            child: command.spawn()?,
            ended: None,
            used: BTreeMap::new(),
        })
    }

    /// Looks at what its processes use. Returns its status if it has ended by itself.
    pub fn look(&mut self) -> Result<Option<ExitStatus>> {
        if self.ended.is_none() {
            for process in self.processes() {
                let used = self.used.entry(process).or_default();
                used.add_peak(&Usage::of(process));
            }
            // The kernel counts those that it has waited for, too: they are known by themselves.
            if self.used.len() <= 1
                && let Some(memory) = peak_at_end(&self.child)
            {
                let used = self.used.entry(self.child.id() as i32).or_default();
                used.memory_bytes = used.memory_bytes.max(memory);
            }
            self.ended = self.child.try_wait()?;
        }
        Ok(self.ended)
    }

    /// Returns what the processes used so far, in all.
    pub fn usage(&self) -> Usage {
        let mut sum = Usage::default();
        for used in self.used.values() {
            sum.memory_bytes += used.memory_bytes;
            sum.private_bytes += used.private_bytes;
            sum.read_bytes += used.read_bytes;
        }
        sum
    }

    /// Ends all its processes.
    pub fn end(&mut self) -> Result<()> {
        if self.look()?.is_none() {
            child::end_group(&mut self.child)?;
            self.ended = self.child.try_wait()?;
        }
        // Those that left the group of the program.
        for process in self.processes() {
            if let Some(process) = Pid::from_raw(process) {
                let _ = kill_process(process, Signal::KILL);
            }
        }
        // Those that left its session.
        interruption::end_left();
        Ok(())
    }

    /// Returns the processes of the session.
    fn processes(&self) -> Vec<i32> {
        let session = self.child.id() as i32;
        let entries = fs::read_dir("/proc").into_iter().flatten().flatten();
        let numbers = entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok());
        numbers
            .filter(|process| session_of(*process) == Some(session))
            .collect()
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        let _ = self.end();
    }
}

impl Usage {
    /// Reads what a process uses; zeros if it has ended.
    fn of(process: i32) -> Usage {
        let read = |name: &str| {
            let text = fs::read_to_string(format!("/proc/{process}/{name}"));
            text.unwrap_or_default()
        };
        let (status, io) = (read("status"), read("io"));
        Usage {
            memory_bytes: field(&status, "VmHWM:") << 10,
            private_bytes: (field(&status, "RssAnon:") + field(&status, "RssShmem:")) << 10,
            read_bytes: field(&io, "read_bytes:"),
        }
    }

    fn add_peak(&mut self, other: &Usage) {
        self.memory_bytes = self.memory_bytes.max(other.memory_bytes);
        self.private_bytes = self.private_bytes.max(other.private_bytes);
        self.read_bytes = self.read_bytes.max(other.read_bytes);
    }
}

/// Returns the most memory that a child has used at a time if it has ended; its status is left to wait for. It may
/// have grown since the last look.
fn peak_at_end(child: &Child) -> Option<u64> {
    // SAFETY: structs of numbers, for which zeros are valid.
    let (mut about, mut used): (libc::siginfo_t, libc::rusage) = unsafe { std::mem::zeroed() };
    let options = libc::WEXITED | libc::WNOHANG | libc::WNOWAIT;
    // SAFETY: a child that was not waited for; waitid(2) has a fifth argument in the kernel.
    let result = unsafe {
        libc::syscall(
            libc::SYS_waitid,
            libc::P_PID,
            child.id(),
            &raw mut about,
            options,
            &raw mut used,
        )
    };
    // Without a child that has ended, it writes no process.
    // SAFETY: the kernel has filled the fields of a child.
    let has_ended = result == 0 && unsafe { about.si_pid() } != 0;
    has_ended.then_some((used.ru_maxrss as u64) << 10)
}

/// Returns the number after a name at the start of a line; 0 without that line.
pub fn field(text: &str, name: &str) -> u64 {
    let line = text.lines().find_map(|line| line.strip_prefix(name));
    let number = line.and_then(|line| line.split_whitespace().next()?.parse().ok());
    number.unwrap_or(0)
}

/// Returns the session of a process.
fn session_of(process: i32) -> Option<i32> {
    let stat = fs::read_to_string(format!("/proc/{process}/stat")).ok()?;
    stat_fields(&stat)?.nth(3)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::{Duration, Instant};

    #[test]
    fn no_process_of_a_session_is_left() {
        // The inner one leaves the group of the outer one, and ignores SIGTERM.
        let script = "trap '' TERM; (set -m; sleep 1000 & echo $! > \"$0\"; wait) & sleep 1000";
        let file = tempfile::NamedTempFile::new().expect("a file");
        let mut command = Command::new("bash");
        command.args(["-c", script]).arg(file.path());
        let mut session = Session::start(&mut command).expect("a shell");
        let deadline = Instant::now() + Duration::from_secs(10);
        let inner = loop {
            let text = fs::read_to_string(file.path()).expect("a file");
            match text.trim().parse::<i32>() {
                Ok(process) => break process,
                Err(_) => assert!(Instant::now() < deadline, "no process: '{text}'"),
            }
            std::thread::sleep(Duration::from_millis(10));
        };
        assert!(session.look().expect("it runs").is_none());
        assert!(session.usage().memory_bytes > 0);
        session.end().expect("an end");
        let is_left = || session_of(inner) == Some(session.child.id() as i32) && lives(inner);
        while is_left() {
            assert!(Instant::now() < deadline, "process {inner} is left");
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    fn lives(process: i32) -> bool {
        let stat = fs::read_to_string(format!("/proc/{process}/stat")).unwrap_or_default();
        stat_fields(&stat).is_some_and(|mut fields| fields.next() != Some("Z"))
    }
}
