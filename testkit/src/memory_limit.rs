//! A limit of the memory of a process and of what it reads into the page cache: a control group.

use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::os::fd::AsRawFd;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicU64, Ordering};

/// Where control groups are mounted.
const GROUPS: &str = "/sys/fs/cgroup";

/// A control group with a limit; dropping it removes it.
#[derive(Debug)]
pub struct MemoryLimit {
    folder: PathBuf,
    /// The name of the setting.
    limit: &'static str,
}

impl MemoryLimit {
    /// Makes a group whose processes may use so many bytes. The error states why that is not
    /// possible on this machine.
    pub fn new(bytes: u64) -> Result<MemoryLimit, String> {
        static MADE: AtomicU64 = AtomicU64::new(0);
        let (parent, limit) = parent()?;
        let number = MADE.fetch_add(1, Ordering::Relaxed);
        let name = format!("llama-sidecar-{}-{number}", std::process::id());
        let folder = parent.join(name);
        let failed = |error: io::Error| format!("no memory limit in {}: {error}", folder.display());
        std::fs::create_dir(&folder).map_err(failed)?;
        let group = MemoryLimit {
            folder: folder.clone(),
            limit,
        };
        group.set(bytes).map_err(failed)?;
        Ok(group)
    }

    /// Changes the limit. The kernel drops pages for a lower one.
    pub fn set(&self, bytes: u64) -> io::Result<()> {
        std::fs::write(self.folder.join(self.limit), bytes.to_string())
    }

    /// Returns the bytes that the group uses.
    pub fn used(&self) -> u64 {
        let names = ["memory.usage_in_bytes", "memory.current"];
        let used = names.map(|name| std::fs::read_to_string(self.folder.join(name)).ok());
        let used = used
            .into_iter()
            .flatten()
            .next()
            .expect("a group states what it uses");
        used.trim().parse().expect("a number")
    }

    /// Puts a program that is about to be started into the group.
    pub fn apply(&self, command: &mut Command) {
        let members = self.folder.join("cgroup.procs");
        let members = OpenOptions::new().write(true).open(members);
        let mut members = members.expect("a group has a list of processes");
        // SAFETY: one system call, with what was opened before. 0 is the process that writes.
        unsafe { command.pre_exec(move || members.write_all(b"0")) };
    }
}

impl Drop for MemoryLimit {
    fn drop(&mut self) {
        // Version 1 only: what the group still has in the page cache.
        let _ = std::fs::write(self.folder.join("memory.force_empty"), "0");
        let _ = std::fs::remove_dir(&self.folder);
    }
}

/// The group to make others in, and the name of the setting.
fn parent() -> Result<(PathBuf, &'static str), String> {
    let first = Path::new(GROUPS).join("memory");
    if first.join("memory.limit_in_bytes").exists() {
        return Ok((first, "memory.limit_in_bytes"));
    }
    let controllers = Path::new(GROUPS).join("cgroup.subtree_control");
    match std::fs::read_to_string(&controllers) {
        Ok(names) if names.split_whitespace().any(|name| name == "memory") => {
            Ok((GROUPS.into(), "memory.max"))
        }
        Ok(_) => Err(format!("{} does not list memory", controllers.display())),
        Err(error) => Err(format!("{}: {error}", controllers.display())),
    }
}

/// Drops a file from the page cache, except for pages that a process has mapped.
pub fn drop_cache(file: &File) -> io::Result<()> {
    // SAFETY: an open file.
    match unsafe { libc::posix_fadvise(file.as_raw_fd(), 0, 0, libc::POSIX_FADV_DONTNEED) } {
        0 => Ok(()),
        code => Err(io::Error::from_raw_os_error(code)),
    }
}
