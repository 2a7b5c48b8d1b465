//! Destination of the messages of the [`log`] macros: standard error, or a callback.
//!
//! Programs that use the Rust API may install a logger of their own instead; the C API and
//! the drop-in call [`init`].

use std::io::Write;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Once};

use log::{Level, LevelFilter, Log, Metadata, Record};
use parking_lot::RwLock;

use crate::config::Config;
use crate::signals::without_write_signals;
use crate::text;

/// Target of messages that a variable of their own requests, for example
/// `LLAMA_POSTFETCH_DEBUG`: written at every value of `LLAMA_SIDECAR_LOG`.
pub const REQUESTED: &str = "llama_sidecar::requested";

/// Receives messages without their newline, on any thread.
pub type Sink = dyn Fn(Level, &str) + Send + Sync;

static SINK: RwLock<Option<Arc<Sink>>> = RwLock::new(None);

/// Installs the logger, once, and reports the variables whose values were rejected.
/// Has no effect in a program that has installed another logger.
pub fn init() {
    static ONCE: Once = Once::new();
    let mut first = false;
    ONCE.call_once(|| {
        first = true;
        if log::set_logger(&Messages).is_ok() {
            log::set_max_level(LevelFilter::Debug);
        }
    });
    // Not inside the call above: a sink may use the C API, which comes back here.
    if first {
        for message in &Config::get().rejected {
            log::error!("{message}");
        }
    }
}

/// Sends messages to `sink`, or to standard error again with `None`.
pub fn set_sink(sink: Option<Arc<Sink>>) {
    *SINK.write() = sink;
}

/// Whether standard error was closed when the program started: its number is that of another file now.
static IS_CLOSED: AtomicBool = AtomicBool::new(false);
/// Whether the reader of standard error did not read when it was last waited for.
static IS_STUCK: AtomicBool = AtomicBool::new(false);

/// Finds out whether there is a standard error, before the program opens a file. Allocates nothing.
pub fn find_standard_error() {
    // SAFETY: a plain system call.
    let found = unsafe { libc::fcntl(libc::STDERR_FILENO, libc::F_GETFD) };
    IS_CLOSED.store(found < 0, Ordering::Relaxed);
}

/// Writes whole lines to standard error. A host may have closed it, or the pipe that it is: a failed write is
/// ignored. What a reader does not take for five seconds is left out.
pub fn print(lines: &str) {
    if IS_CLOSED.load(Ordering::Relaxed) {
        return;
    }
    let lines = text::lines(lines);
    let mut rest = lines.as_bytes();
    without_write_signals(|| {
        while !rest.is_empty() {
            let (part, after) = rest.split_at(part_of(rest));
            if !is_read() || std::io::stderr().write_all(part).is_err() {
                break;
            }
            rest = after;
        }
    });
}

/// Returns how many bytes are written at once: whole lines, as many as a pipe takes when it takes anything, so that those of
/// other threads come between lines. A longer line is cut.
fn part_of(lines: &[u8]) -> usize {
    const MOST: usize = libc::PIPE_BUF;
    let end = |of: &[u8]| of.iter().rposition(|byte| *byte == b'\n');
    match lines.len() <= MOST {
        true => lines.len(),
        false => end(&lines[..MOST]).map_or(MOST, |end| end + 1),
    }
}

/// Whether a write to standard error does not wait, after some time.
fn is_read() -> bool {
    let patience = match IS_STUCK.load(Ordering::Relaxed) {
        true => 0,
        false => 5000,
    };
    let mut writable = libc::pollfd {
        fd: libc::STDERR_FILENO,
        events: libc::POLLOUT,
        revents: 0,
    };
    // SAFETY: one valid entry.
    let is_stuck = unsafe { libc::poll(&raw mut writable, 1, patience) } == 0;
    IS_STUCK.store(is_stuck, Ordering::Relaxed);
    !is_stuck
}

struct Messages;

impl Log for Messages {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        metadata.target() == REQUESTED || metadata.level() <= Config::get().log
    }

    fn log(&self, record: &Record<'_>) {
        if !self.enabled(record.metadata()) {
            return;
        }
        // The lock is not held while the sink runs: a sink may log or replace itself.
        let sink = SINK.read().clone();
        let message = record.args().to_string();
        let message = text::line(&message);
        match sink {
            Some(sink) => sink(record.level(), &message),
            None => {
                // One write for the whole line: the host writes to the same descriptor.
                let level = match record.level() {
                    Level::Error => "error",
                    Level::Warn => "warn",
                    Level::Info => "info",
                    Level::Debug | Level::Trace => "debug",
                };
                print(&format!("llama-sidecar: {level}: {message}\n"));
            }
        }
    }

    fn flush(&self) {}
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{Read, Seek};
    use std::os::fd::AsRawFd;
    use std::process::Stdio;
    use testkit::process::in_own_process;

    #[test]
    fn what_is_written_at_once_ends_with_a_line() {
        let lines = "a line of 20 bytes.\n".repeat(1000);
        let mut rest = lines.as_bytes();
        while !rest.is_empty() {
            let part = part_of(rest);
            assert!(part <= libc::PIPE_BUF && rest[part - 1] == b'\n', "{part}");
            rest = &rest[part..];
        }
        assert_eq!(part_of(&[b'a'; 10_000]), libc::PIPE_BUF);
        assert_eq!(part_of(b"a"), 1);
    }

    #[test]
    fn a_file_with_the_number_of_standard_error_gets_no_message() {
        let name = "logger::tests::a_file_with_the_number_of_standard_error_gets_no_message";
        if let Some(status) = in_own_process(name, Stdio::null()) {
            return assert!(status.success());
        }
        // SAFETY: nothing in this process needs it any more.
        unsafe { libc::close(libc::STDERR_FILENO) };
        find_standard_error();
        let mut file = tempfile::tempfile().expect("a file");
        assert_eq!(file.as_raw_fd(), libc::STDERR_FILENO);
        print("a message\n");
        let mut text = String::new();
        file.rewind().expect("a file");
        file.read_to_string(&mut text).expect("text");
        assert_eq!(text, "");
    }

    #[test]
    fn a_reader_that_does_not_read_is_not_waited_for() {
        let (_reader, writer) = std::io::pipe().expect("a pipe");
        let name = "logger::tests::a_reader_that_does_not_read_is_not_waited_for";
        match in_own_process(name, writer.into()) {
            Some(status) => assert!(status.success()),
            None => (0..4).for_each(|_| print(&"more than a pipe takes\n".repeat(1 << 12))),
        }
    }
}
