//! Standard output and standard error. All text is plain: see [`text`].
//!
//! The macros take the place of those of the standard library in the whole command. Text for [`print!`] and [`println!`] can
//! have several lines: names in it are made parts of a line before. What [`eprintln!`] writes is one message.

use std::fmt::Arguments;
use std::io::{self, ErrorKind, StdoutLock, Write};
use std::sync::OnceLock;

use anyhow::{Result, bail};
use sidecar_core::signals::without_write_signals;
use sidecar_core::text;

macro_rules! print {
    ($($argument:tt)*) => { $crate::print::output(format_args!($($argument)*)) };
}

macro_rules! println {
    ($($argument:tt)*) => { $crate::print::output(format_args!("{}\n", format_args!($($argument)*))) };
}

macro_rules! eprintln {
    ($($argument:tt)*) => { $crate::print::message(format_args!($($argument)*)) };
}

/// The first error of [`output`].
static LOST: OnceLock<io::Error> = OnceLock::new();

/// Prints text on standard output. What fails is an error when the command has done its work: [`finish`].
pub fn output(text: Arguments<'_>) {
    let text = text::lines(&text.to_string()).into_owned();
    note(|| io::stdout().write_all(text.as_bytes()));
}

fn note(write: impl FnOnce() -> io::Result<()>) {
    if let Err(error) = without_write_signals(write) {
        let _ = LOST.set(error);
    }
}

/// Writes what is left of the output. Fails if some of it is lost, except where its reader has closed its end.
pub fn finish() -> Result<()> {
    note(|| io::stdout().flush());
    match LOST.get() {
        Some(error) if error.kind() != ErrorKind::BrokenPipe => {
            bail!("cannot write to standard output: {error}")
        }
        _ => Ok(()),
    }
}

/// Prints a message on standard error. Its further lines are indented: none looks like a message of its own. A message
/// that cannot be written ends nothing.
pub fn message(text: Arguments<'_>) {
    let text = text::lines(&text.to_string()).replace('\n', "\n  ") + "\n";
    let _ = without_write_signals(|| io::stderr().write_all(text.as_bytes()));
}

/// Returns standard output for plain text, where a reader that closes its end is an error.
pub fn stdout() -> Plain<StdoutLock<'static>> {
    Plain(io::stdout().lock())
}

/// Writes plain text.
pub struct Plain<W>(pub W);

impl<W: Write> Write for Plain<W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let text = String::from_utf8_lossy(bytes);
        self.0
            .write_all(text::lines(&text).as_bytes())
            .map_err(closed)?;
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        self.0.flush().map_err(closed)
    }
}

/// The reader of standard output has closed its end, as `head` does.
#[derive(Debug, thiserror::Error)]
#[error("the reader of the output has closed its end")]
struct Closed;

fn closed(error: io::Error) -> io::Error {
    match error.kind() {
        ErrorKind::BrokenPipe => io::Error::new(ErrorKind::BrokenPipe, Closed),
        _ => error,
    }
}

/// Returns whether a command failed because the reader of its output has closed its end. An error of another file or of a
/// socket is never taken for that.
pub fn is_closed(error: &anyhow::Error) -> bool {
    let io = error
        .downcast_ref::<io::Error>()
        .and_then(io::Error::get_ref);
    io.is_some_and(|cause| cause.is::<Closed>())
}
