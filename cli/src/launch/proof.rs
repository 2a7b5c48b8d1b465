//! A trial of the drop-in in a process of this command, before a program is started with it: a damaged
//! library, or one that does not fit the system, would end the program.
//!
//! Trials that succeeded are kept for the user, by the version of the library and of the system.

use std::ffi::CStr;
use std::io::Read;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use rustix::system::uname;
use sidecar_core::gguf::FileId;
use sidecar_core::text;

use crate::launch::child;
use crate::launch::executable::ld_preload;
use crate::launch::journal::{JOURNAL, Journal};
use crate::launch::kept::{Kept, machine};

/// The command line word of a process that ends at once.
pub const TRIAL: &str = "trial";

/// How long a trial may take.
const LONGEST: Duration = Duration::from_secs(10);

/// Trials that succeeded.
const SUCCEEDED: Kept = Kept { name: "trials" };

/// Returns why programs cannot run with the drop-in; `None` if a process ran with it.
pub fn failure(drop_in: &Path) -> Option<String> {
    // ld.so(8): it separates and expands them.
    if let Some(of) = drop_in
        .to_string_lossy()
        .chars()
        .find(|of| " :$".contains(*of))
    {
        return Some(format!(
            "LD_PRELOAD cannot have a path with '{of}', as {} has: install llama-sidecar in another folder",
            text::path(drop_in)
        ));
    }
    let subject = subject(drop_in).unwrap_or_default();
    let mut known: Vec<String> = SUCCEEDED.entries();
    if !subject.is_empty() && known.contains(&subject) {
        return None;
    }
    if let Err(error) = run(drop_in) {
        return Some(format!("{error:#}"));
    }
    let of_library = format!("{} ", text::path(drop_in));
    known.retain(|known| !known.starts_with(&of_library));
    known.push(subject);
    // Without the list, the next start makes the trial again.
    let _ = SUCCEEDED.write(known);
    None
}

/// Returns what a trial is valid for: the version of the library, and the system.
fn subject(drop_in: &Path) -> Result<String> {
    let library = FileId::of_path(drop_in)?;
    let kernel = uname();
    // SAFETY: returns a constant string.
    let libc = unsafe { CStr::from_ptr(libc::gnu_get_libc_version()) };
    Ok(format!(
        "{} {library:?}, {} {:?}, glibc {libc:?}",
        text::path(drop_in),
        machine(),
        kernel.release()
    ))
}

/// Runs a process with the drop-in that ends at once.
fn run(drop_in: &Path) -> Result<()> {
    let next = "install llama-sidecar again, or report this";
    let journal = Journal::new().ok();
    let mut process = Command::new(std::env::current_exe()?)
        .arg(TRIAL)
        .env("LD_PRELOAD", ld_preload(drop_in))
        .envs(journal.as_ref().map(|journal| (JOURNAL, journal.path())))
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .context("cannot start a process to try it")?;
    let deadline = Instant::now() + LONGEST;
    let status = loop {
        if let Some(status) = process.try_wait()? {
            break status;
        }
        if Instant::now() > deadline {
            process.kill()?;
            process.wait()?;
            bail!("a process with it did not end in {LONGEST:?}: {next}");
        }
        std::thread::sleep(Duration::from_millis(1));
    };
    let mut printed = String::new();
    if let Some(errors) = &mut process.stderr {
        let _ = errors.take(1 << 16).read_to_string(&mut printed);
    }
    let cause = child::cause(&printed).unwrap_or("it printed no error");
    ensure!(
        status.success(),
        "a process with it ended with {status}; {cause}: {next}"
    );
    let is_loaded = journal.is_none_or(|journal| journal.read().is_loaded());
    ensure!(is_loaded, "the loader did not load it; {cause}: {next}");
    Ok(())
}
