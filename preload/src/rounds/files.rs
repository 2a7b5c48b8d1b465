//! Rounds driven through two files, as GGUF-Tool-Suite drives its own build of llama-perplexity.
//!
//! The driver writes a command and a number to the control file: `reload 7` takes the tensors of
//! changed files and evaluates, `compute 8` evaluates, `exit 9` ends the program. The line ends
//! with a newline. The control file is removed once it is read. A number that is not larger than
//! the last one is ignored, and so is a file of another user.
//!
//! The status file has a state, the number of rounds and the number of the last command:
//! `computing 1 0`, `done 1 0`, `reload_failed 1 7`, `exiting 1 9`. It is written beside its path
//! and renamed.
//!
//! The driver reads from the log which tensors were swapped, and which were refused.

use std::fs;
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::time::Duration;

use parking_lot::Mutex;
use sidecar_core::config::{Config, OwnPath};
use sidecar_core::files::{self, Replace};
use sidecar_core::logger::REQUESTED;
use sidecar_core::protocol::NoEffect;
use sidecar_core::reload::{Outcome, Report};
use sidecar_core::text;

use crate::hotswap::reloader;
use crate::process::thread;
use crate::program::capability::{Capability, Effect};
use crate::rounds::perplexity::{self, Phase};

/// Interval between looks at the control file.
const INTERVAL: Duration = Duration::from_millis(50);
/// The longest content of a control file.
const LONGEST: u64 = 4096;
/// The longest command.
const LONGEST_COMMAND: usize = 80;
/// The largest difference between the numbers of two commands. A larger number is a mistake, and
/// no number would be left for the commands after it.
const LARGEST_STEP: u64 = 1 << 62;
/// How long the end of the process waits for a status that is being written.
const END_TIMEOUT: Duration = Duration::from_secs(1);

/// The last state.
const ENDS: &str = "exiting";
/// Whether a command was read.
static EFFECT: Effect = Effect::of(NoEffect::CONTROL_FILE);

/// Rounds driven through files, as a capability.
pub struct RoundFiles;

impl Capability for RoundFiles {
    fn is_enabled(&self) -> bool {
        Config::get().control_file.is_some()
    }

    fn start(&self) {
        let config = Config::get();
        let Some(control) = config.control_file.as_ref().and_then(absolute) else {
            return;
        };
        if !perplexity::drive() {
            return;
        }
        let mut status = STATUS.lock();
        status.path = config.status_file.as_ref().and_then(absolute);
        status.set("computing");
        drop(status);
        thread::spawn("llama-sidecar-f", move || serve(&control));
    }

    fn finish(&self) {
        if let Some(mut status) = STATUS.try_lock_for(END_TIMEOUT)
            && status.iteration > 0
        {
            status.set(ENDS);
        }
    }

    fn no_effect(&self) -> Vec<NoEffect> {
        // Without rounds, there is nothing to control.
        let Some(path) = Config::get().control_file.as_ref() else {
            return Vec::new();
        };
        if perplexity::phase() == Phase::None {
            return Vec::new();
        }
        EFFECT.missing(|| {
            format!(
                "no command was read from {}: write a command, a number and a newline to another file, such as 'compute 1', and rename it to that path",
                text::path(&path.now())
            )
        })
    }
}

/// Returns a path that stays the same when the program changes its folder.
fn absolute(path: &OwnPath) -> Option<PathBuf> {
    std::path::absolute(path.now()).ok()
}

/// What the status file is to contain.
struct Status {
    path: Option<PathBuf>,
    state: &'static str,
    iteration: u64,
    sequence: u64,
    /// Whether the file has it.
    written: bool,
    /// Whether a failed write was logged.
    failed: bool,
}

static STATUS: Mutex<Status> = Mutex::new(Status {
    path: None,
    state: "",
    iteration: 0,
    sequence: 0,
    written: true,
    failed: false,
});

impl Status {
    /// Sets the state. The end stays: it is also set while a signal ends the process.
    fn set(&mut self, state: &'static str) {
        if self.state == ENDS {
            return;
        }
        self.iteration = self.iteration.max(1);
        self.state = state;
        self.written = false;
        self.write();
    }

    /// Writes what is not written yet. A disk may be full now and not later.
    fn write(&mut self) {
        let Some(path) = self.path.as_ref().filter(|_| !self.written) else {
            return;
        };
        let line = format!("{} {} {}\n", self.state, self.iteration, self.sequence);
        match files::write(path, line.as_bytes(), Replace::Own) {
            Ok(()) => (self.written, self.failed) = (true, false),
            Err(error) if !self.failed => {
                self.failed = true;
                log::error!(
                    "LLAMA_HOTSWAP_STATUS_FILE={}: cannot write the status: {error}; make it writable, it is tried again",
                    text::path(path)
                );
            }
            Err(_) => {}
        }
    }
}

/// A command of the driver.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Command {
    Reload,
    Compute,
    Exit,
}

/// Reads a line of the control file: a command and its number.
fn parse(line: &str) -> Option<(Command, u64)> {
    let mut words = line.split_ascii_whitespace();
    let command = match words.next()? {
        "reload" => Command::Reload,
        "compute" => Command::Compute,
        "exit" | "quit" | "stop" => Command::Exit,
        _ => return None,
    };
    let number = words.next()?.parse().ok()?;
    words.next().is_none().then_some((command, number))
}

/// Carries out commands between rounds until the program ends; for a thread of its own.
fn serve(control: &Path) {
    let mut control = Control {
        path: control,
        warning: String::new(),
    };
    while perplexity::wait(|| true).is_ok() {
        STATUS.lock().set("done");
        if !control.wait_for_round() {
            return;
        }
        let mut status = STATUS.lock();
        status.iteration += 1;
        status.set("computing");
        drop(status);
        // A client of the control socket may have started it.
        let _ = perplexity::evaluate(|| true);
    }
}

/// The control file.
struct Control<'a> {
    path: &'a Path,
    /// The last warning: each is logged once until a command is read.
    warning: String,
}

impl Control<'_> {
    /// Waits for a command that starts a round, and carries out what comes before the round;
    /// false when the program ends.
    fn wait_for_round(&mut self) -> bool {
        while perplexity::phase() != Phase::Ended {
            match self.next() {
                None => {
                    STATUS.lock().write();
                    std::thread::sleep(INTERVAL);
                }
                Some(Command::Exit) => {
                    perplexity::end();
                    return false;
                }
                Some(Command::Reload) if !reload() => STATUS.lock().set("reload_failed"),
                Some(_) => return true,
            }
        }
        false
    }

    /// Takes a command from the file, if there is a new one.
    fn next(&mut self) -> Option<Command> {
        let line = match read(self.path) {
            Ok(line) => line?,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return None,
            Err(error) => {
                self.warn(&format!("cannot read it: {error}"));
                return None;
            }
        };
        let removed = fs::remove_file(self.path);
        let Some((command, number)) = parse(&line) else {
            let text = "write reload, compute or exit, a number and a newline";
            self.warn(&format!("{line:?} is not a command: {text}"));
            return None;
        };
        let mut status = STATUS.lock();
        let last = status.sequence;
        if number <= last || number - last > LARGEST_STEP {
            if removed.is_ok() {
                self.warn(&format!(
                    "command {number} ignored: the last one was {last}, and the next is larger by at most {LARGEST_STEP}"
                ));
            }
            return None;
        }
        status.sequence = number;
        EFFECT.note();
        drop(status);
        self.warning.clear();
        if let Err(error) = removed {
            self.warn(&format!("cannot remove it: {error}"));
        }
        Some(command)
    }

    fn warn(&mut self, text: &str) {
        if self.warning != text {
            log::warn!(
                "LLAMA_HOTSWAP_CONTROL_FILE={}: {text}",
                text::path(self.path)
            );
            self.warning = text.to_owned();
        }
    }
}

/// Returns the first line of a control file; `None` while its end is missing.
fn read(path: &Path) -> io::Result<Option<String>> {
    let file = files::open_trusted(path)?;
    let mut bytes = Vec::new();
    file.take(LONGEST).read_to_end(&mut bytes)?;
    let end = bytes.iter().position(|byte| *byte == b'\n');
    if end.is_none() && (bytes.len() as u64) < LONGEST {
        return Ok(None);
    }
    let line = &bytes[..end.unwrap_or(LONGEST_COMMAND).min(LONGEST_COMMAND)];
    Ok(Some(String::from_utf8_lossy(line).into_owned()))
}

/// Reloads all models; returns whether tensors changed and none was refused. Logs both in the
/// words that the driver looks for.
fn reload() -> bool {
    let (mut changed, mut failed) = (false, false);
    for report in reloader::reload_models() {
        // A failure is logged there.
        let Ok(report) = report else {
            failed = true;
            continue;
        };
        changed |= report.changed();
        failed |= report.failure.is_some();
        failed |= report.files.iter().any(|file| file.ignored.is_some());
        failed |= log_tensors(&report);
    }
    changed && !failed
}

/// Logs the tensors that changed or were to change, in the words that the driver looks for;
/// returns whether any was refused.
pub fn log_tensors(report: &Report) -> bool {
    let mut refused = false;
    for tensor in &report.tensors {
        let name = tensor.name.to_string_lossy();
        match tensor.outcome {
            Outcome::Swapped | Outcome::Returned => {
                log::info!(target: REQUESTED, "hotswap: reloaded tensor '{name}'");
            }
            Outcome::Refused | Outcome::InPlace => {
                refused = true;
                let file = report.files.iter().find(|file| file.file == tensor.file);
                let of_file = file.map_or("", |file| file.reason());
                let reason = match tensor.reason.as_str() {
                    "" if of_file.is_empty() => {
                        "its file was written in place: rename a new file over it"
                    }
                    "" => of_file,
                    reason => reason,
                };
                log::error!(target: REQUESTED, "hotswap: tensor '{name}' cannot be hot-swapped: {reason}");
            }
            Outcome::Unchanged | Outcome::Moved => {}
        }
    }
    refused
}

#[cfg(test)]
mod tests {
    use std::ffi::CString;
    use std::os::unix::ffi::OsStrExt;

    use super::*;

    #[test]
    fn a_command_is_a_word_and_a_number() {
        for (line, command) in [
            ("reload 7", Some((Command::Reload, 7))),
            ("  compute\t8 ", Some((Command::Compute, 8))),
            ("exit 9", Some((Command::Exit, 9))),
            ("quit 9", Some((Command::Exit, 9))),
            ("stop 9", Some((Command::Exit, 9))),
            ("", None),
            ("reload", None),
            ("reload x", None),
            ("reload -1", None),
            ("reload 1 2", None),
            ("reload 18446744073709551616", None),
            ("Reload 1", None),
        ] {
            assert_eq!(parse(line), command, "{line}");
        }
    }

    #[test]
    fn a_line_is_read_once_it_is_complete() {
        let folder = std::env::temp_dir().join(format!("round-files-{}", std::process::id()));
        fs::create_dir(&folder).expect("a folder");
        let path = folder.join("control");
        assert!(read(&path).is_err() && read(&folder).is_err());
        let pipe = folder.join("pipe");
        let name = CString::new(pipe.as_os_str().as_bytes()).expect("a path");
        // SAFETY: a path that ends with a zero.
        assert_eq!(unsafe { libc::mkfifo(name.as_ptr(), 0o600) }, 0);
        assert!(read(&pipe).is_err());
        let content = |bytes: &[u8]| {
            fs::write(&path, bytes).expect("free space");
            read(&path).expect("a file")
        };
        assert_eq!(content(b""), None);
        assert_eq!(content(b"reload 1"), None);
        assert_eq!(content(b"reload 1\nexit 2\n").as_deref(), Some("reload 1"));
        assert_eq!(content(b"\n").as_deref(), Some(""));
        assert!(content(&[0xff; 2 * LONGEST as usize]).is_some());
        fs::remove_dir_all(&folder).expect("removed");
    }
}
