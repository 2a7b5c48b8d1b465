//! Files to replace: their real paths, a lock against other swaps, and their versions when they
//! were locked.

use std::fs::{self, File, Metadata, TryLockError};
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use sidecar_core::text;

/// A file to replace, locked until this is dropped.
pub struct Target {
    /// The path from the command line or from the model.
    named: PathBuf,
    /// The file behind all symbolic links.
    pub path: PathBuf,
    /// The file, with the lock on its inode. A swap also locks the new file before the rename,
    /// so the path stays locked until the swap ends.
    pub file: File,
    before: Metadata,
}

/// A file that another swap has locked.
struct Busy(File);

impl Target {
    /// Locks all files of a model. Waits while another swap has one of them.
    pub fn lock_all(paths: &[PathBuf]) -> Result<Vec<Target>> {
        loop {
            let (busy, path) = match try_lock_all(paths)? {
                Ok(targets) => return Ok(targets),
                Err(busy) => busy,
            };
            eprintln!(
                "llama-sidecar: another swap has locked {}: waiting for its end",
                text::path(&path)
            );
            // This process holds no locks now, so two swaps never wait for each other.
            busy.0
                .lock()
                .with_context(|| format!("cannot lock {}", text::path(&path)))?;
        }
    }

    /// Fails for a file that is named by the hash of its content: programs take it for what they have downloaded.
    pub fn check_name(&self) -> Result<()> {
        let folder = self.path.parent().and_then(Path::file_name);
        let name = self
            .path
            .file_name()
            .and_then(|name| name.to_str())
            .unwrap_or_default();
        let hash = name.strip_prefix("sha256-").unwrap_or(name);
        let is_hash =
            matches!(hash.len(), 40 | 64) && hash.bytes().all(|of| of.is_ascii_hexdigit());
        ensure!(
            !is_hash || folder.is_none_or(|folder| folder != "blobs"),
            "{} is {}, a file that is named by the hash of its content: each program that shares the cache would take the changed file for the original; copy the model and swap in the copy, or pass --force",
            text::path(&self.named),
            text::path(&self.path)
        );
        Ok(())
    }

    /// Fails if the path names another file than the locked one, or if the file has changed.
    pub fn look_again(&self) -> Result<()> {
        for path in [&self.named, &self.path] {
            let now = fs::metadata(path);
            ensure!(
                now.is_ok_and(|now| version(&now) == version(&self.before)),
                "another program changed {} during the swap; its version was kept: try again when that program has ended",
                text::path(&self.named)
            );
        }
        Ok(())
    }
}

/// Returns values that change with every change of a file. Programs cannot set the time of the
/// last change of the inode.
fn version(found: &Metadata) -> [i128; 7] {
    [
        found.dev().into(),
        found.ino().into(),
        found.size().into(),
        found.mtime().into(),
        found.mtime_nsec().into(),
        found.ctime().into(),
        found.ctime_nsec().into(),
    ]
}

fn try_lock_all(paths: &[PathBuf]) -> Result<std::result::Result<Vec<Target>, (Busy, PathBuf)>> {
    let mut targets = Vec::new();
    for path in paths {
        let explain = || format!("cannot lock {}", text::path(path));
        match try_lock(path).with_context(explain)? {
            Ok(target) => targets.push(target),
            Err(busy) => return Ok(Err((busy, path.clone()))),
        }
    }
    Ok(Ok(targets))
}

fn try_lock(named: &Path) -> io::Result<std::result::Result<Target, Busy>> {
    loop {
        let path = fs::canonicalize(named)?;
        let file = File::open(&path)?;
        let file = match file.try_lock() {
            Ok(()) => file,
            Err(TryLockError::WouldBlock) => return Ok(Err(Busy(file))),
            // NFS locks only what is open for writing.
            Err(TryLockError::Error(error)) => {
                let writable = File::options().read(true).write(true).open(&path);
                match writable.map(|file| (file.try_lock(), file)) {
                    Ok((Ok(()), file)) => file,
                    Ok((Err(TryLockError::WouldBlock), file)) => return Ok(Err(Busy(file))),
                    _ => {
                        eprintln!(
                            "llama-sidecar: cannot lock {} ({error}): run no other swap of this file at the same time",
                            text::path(named)
                        );
                        file
                    }
                }
            }
        };
        // The swap that held the lock may have replaced the file.
        let (before, there) = (file.metadata()?, fs::metadata(&path)?);
        if (before.dev(), before.ino()) == (there.dev(), there.ino()) {
            return Ok(Ok(Target {
                named: named.to_owned(),
                path,
                file,
                before,
            }));
        }
    }
}
