//! Running other programs, in folders of the repository.

use std::ffi::OsStr;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::OnceLock;

use anyhow::{Context, Result, bail};

/// Root of the repository.
pub fn root() -> PathBuf {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).parent();
    folder
        .expect("xtask is a folder of the repository")
        .to_owned()
}

/// The file in which tests report what they skip, while all checks run.
pub static SKIPPED: OnceLock<PathBuf> = OnceLock::new();

/// A command, with its working folder.
pub fn command(program: impl AsRef<OsStr>, folder: &Path) -> Command {
    let mut command = Command::new(program);
    command.current_dir(folder).stdin(Stdio::null());
    if let Some(file) = SKIPPED.get() {
        command.env(testkit::SKIPPED, file);
    }
    command
}

/// Runs a command to its end; an error when it fails.
pub fn run(command: &mut Command) -> Result<()> {
    let status = command
        .status()
        .with_context(|| format!("cannot start {:?}", command.get_program()))?;
    if !status.success() {
        bail!("{:?} ended with {status}", command.get_program());
    }
    Ok(())
}

/// Runs a command and returns what it printed.
pub fn output(command: &mut Command) -> Result<String> {
    let out = command
        .stderr(Stdio::inherit())
        .output()
        .with_context(|| format!("cannot start {:?}", command.get_program()))?;
    if !out.status.success() {
        bail!("{:?} ended with {}", command.get_program(), out.status);
    }
    Ok(String::from_utf8(out.stdout)?)
}

/// A program that ends with this value.
pub struct Running(pub Child);

impl Running {
    /// Starts a command, and returns the first line that it prints.
    pub fn start(command: &mut Command) -> Result<(Running, String)> {
        let mut started = Running(command.stdout(Stdio::piped()).spawn()?);
        let printed = started.0.stdout.take().context("a pipe")?;
        let mut line = String::new();
        BufReader::new(printed).read_line(&mut line)?;
        Ok((started, line.trim_end().to_owned()))
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Whether a program can be started.
pub fn exists(program: &str) -> bool {
    Command::new(program)
        .arg("--version")
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .status()
        .is_ok_and(|status| status.success())
}
