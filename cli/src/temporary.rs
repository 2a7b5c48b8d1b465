//! Folders for what takes only space after the command.
//!
//! A folder is removed at the end of its owner and by a signal. A process that is killed leaves it: the folder was locked,
//! and the next command that makes one beside it removes those without a lock. What has such a name and was made by
//! others stays: a folder has a file by which it is known, and names have [`RANDOM`] letters and digits.

use std::fs::{self, File};
use std::io::{self, ErrorKind};
use std::path::Path;

use anyhow::{Context, Result, ensure};
use rustix::process::{Resource, getrlimit};
use sidecar_core::files::{self, RANDOM};
use tempfile::{NamedTempFile, TempDir};

use crate::interruption;

/// What the names of folders start with that have files of any kind.
const PREFIX: &str = "llama-sidecar.";
/// A file in each folder, by which it is known.
const MARK: &str = ".llama-sidecar";

/// Why nothing is measured, and the next step, where no file can be made.
pub const NOT_CREATED: &str =
    "cannot create a temporary file: set TMPDIR to a folder with free space";

/// A folder that goes when this is dropped.
pub struct Temporary {
    folder: TempDir,
    // Closed after the folder is gone.
    _lock: File,
}

impl Temporary {
    /// Makes a folder where temporary files are.
    pub fn new() -> io::Result<Temporary> {
        Temporary::new_in(&std::env::temp_dir())
    }

    /// Makes a folder in another one.
    pub fn new_in(parent: &Path) -> io::Result<Temporary> {
        Temporary::named(parent, PREFIX, "")
    }

    /// Makes a folder whose name begins and ends with these. Removes those with such names that killed processes have left.
    pub fn named(parent: &Path, prefix: &str, suffix: &str) -> io::Result<Temporary> {
        remove_left(parent, prefix, suffix, true);
        let mut names = tempfile::Builder::new();
        let names = names.prefix(prefix).suffix(suffix).rand_bytes(RANDOM);
        loop {
            let made = interruption::make_temporary(|| names.tempdir_in(parent), TempDir::path)?;
            let lock = match File::open(made.path()) {
                Err(error) if error.kind() == ErrorKind::NotFound => continue,
                opened => opened?,
            };
            if files::lock_new(&lock, made.path()) {
                File::create(made.path().join(MARK))?;
                return Ok(Temporary {
                    folder: made,
                    _lock: lock,
                });
            }
        }
    }

    pub fn path(&self) -> &Path {
        self.folder.path()
    }
}

/// Makes a file that goes when it is dropped. Removes those with such names that killed processes have left.
pub fn file(parent: &Path, prefix: &str) -> io::Result<NamedTempFile> {
    remove_left(parent, prefix, "", false);
    let mut names = tempfile::Builder::new();
    let names = names.prefix(prefix).rand_bytes(RANDOM);
    loop {
        let made = names.tempfile_in(parent)?;
        if files::lock_new(made.as_file(), made.path()) {
            return Ok(made);
        }
    }
}

/// Makes a file without a name for what a program prints. Fails where a limit of file sizes would end a program that
/// prints much (setrlimit(2), `RLIMIT_FSIZE`).
pub fn log() -> Result<File> {
    const MOST: u64 = 16 << 20;
    if let Some(limit) = getrlimit(Resource::Fsize).current {
        ensure!(
            limit >= MOST,
            "a file may have {limit} bytes (ulimit -f), and a program that prints more into one is ended: allow {MOST}"
        );
    }
    tempfile::tempfile().context(NOT_CREATED)
}

/// Removes files or folders with such names that no process has locked.
pub fn remove_left(parent: &Path, prefix: &str, suffix: &str, folders: bool) {
    let entries = fs::read_dir(parent).into_iter().flatten().flatten();
    for entry in entries {
        let (name, path) = (entry.file_name(), entry.path());
        let name = name.to_string_lossy();
        let random = name
            .strip_prefix(prefix)
            .and_then(|rest| rest.strip_suffix(suffix));
        if !random
            .is_some_and(|of| of.len() == RANDOM && of.bytes().all(|of| of.is_ascii_alphanumeric()))
        {
            continue;
        }
        // Another user may have put a FIFO, or a link, there.
        let is_own = fs::symlink_metadata(&path).is_ok_and(|found| {
            let is_kind = match folders {
                true => found.is_dir() && path.join(MARK).is_file(),
                false => found.is_file(),
            };
            is_kind && files::check_owner(&found).is_ok()
        });
        let opened = is_own.then(|| File::open(&path).ok()).flatten();
        if opened.is_some_and(|there| there.try_lock().is_ok()) {
            let _ = match folders {
                true => fs::remove_dir_all(&path),
                false => fs::remove_file(&path),
            };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_killed_process_left_goes_and_what_is_in_use_or_of_others_stays() {
        let parent = tempfile::tempdir().expect("a folder");
        let make = || Temporary::named(parent.path(), ".a.", ".part").expect("a folder");
        let held = make();
        let folder = |name: &str, mark: &str| {
            let path = parent.path().join(name);
            fs::create_dir(&path).expect("a folder");
            fs::write(path.join(mark), "").expect("free space");
            path
        };
        let left = folder(".a.0123456789abcdEF.part", MARK);
        let others = [
            folder(".b.0123456789abcdEF.part", MARK),
            folder(".a.0123456789abcdEF", MARK),
            folder(".a.left.part", MARK),
            folder(".a.0123456789abcde-.part", MARK),
            folder(".a.0123456789abcdEG.part", "notes"),
        ];
        let second = make();
        assert!(!left.exists() && held.path().join(MARK).exists());
        assert!(others.iter().all(|other| other.exists()));
        let path = second.path().to_owned();
        drop(second);
        assert!(!path.exists());
    }

    #[test]
    fn files_go_by_a_whole_name_alone() {
        let parent = tempfile::tempdir().expect("a folder");
        let [left, other] = [".m.swap-0123456789abcdef", ".m.swap-backup"].map(|name| {
            let path = parent.path().join(name);
            fs::write(&path, "").expect("free space");
            path
        });
        let made = file(parent.path(), ".m.swap-").expect("a file");
        assert!(made.path().exists() && !left.exists() && other.exists());
    }
}
