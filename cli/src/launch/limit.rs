//! A limit of a program's memory, as a smaller machine has it: a control group of its own (cgroups(7)).

use std::fs::{self, OpenOptions};
use std::io::{self, ErrorKind, Write};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};
use sidecar_core::memory::control_groups;
use sidecar_core::text;

/// What the names of groups start with; the number of this process follows, and letters that processes of other containers
/// with the same number do not have.
const PREFIX: &str = "llama-sidecar-";
/// The settings of version 2 and of version 1, each with that for memory and swap space.
const SETTINGS: [(&str, &str); 2] = [
    ("memory.max", "memory.swap.max"),
    ("memory.limit_in_bytes", "memory.memsw.limit_in_bytes"),
];

/// A group with a limit. It is removed when this is dropped.
pub struct MemoryLimit {
    folder: PathBuf,
}

impl MemoryLimit {
    /// Makes a group whose processes use at most so many bytes, with what they read into the page cache, and no swap space.
    pub fn new(bytes: u64) -> Result<MemoryLimit> {
        if bytes < 1 << 20 {
            bail!(
                "--memory-limit: no program starts with {bytes} bytes: add a unit, for example 320M"
            );
        }
        let made = groups(&control_groups_of_this()?, bytes);
        made.with_context(|| {
            let size = bytes.div_ceil(1 << 20);
            format!("--memory-limit: cannot make a control group: run as root, or in a group that is yours: 'systemd-run --user --scope -p MemoryMax={size}M -p MemorySwapMax=0 llama-sidecar run ...'; see docs/streaming.md#a-smaller-machine")
        })
    }

    /// Puts a program that is about to be started into the group.
    pub fn apply(&self, command: &mut Command) -> Result<()> {
        let members = self.folder.join("cgroup.procs");
        let opened = OpenOptions::new().write(true).open(&members);
        let mut opened = opened.with_context(|| format!("cannot open {}", text::path(&members)))?;
        // SAFETY: one system call, with what was opened before. 0 is the process that writes.
        unsafe { command.pre_exec(move || opened.write_all(b"0")) };
        Ok(())
    }
}

impl Drop for MemoryLimit {
    fn drop(&mut self) {
        if let Err(error) = remove(&self.folder) {
            eprintln!(
                "llama-sidecar: cannot remove the control group {}: {error}: end what the program has left there, then remove the folder",
                text::path(&self.folder)
            );
        }
    }
}

fn control_groups_of_this() -> Result<Vec<PathBuf>> {
    let of_this = fs::read_to_string("/proc/self/cgroup").context("/proc/self/cgroup")?;
    Ok(control_groups(&of_this))
}

/// Makes a group with a limit in the first of these that permits it.
fn groups(parents: &[PathBuf], bytes: u64) -> Result<MemoryLimit> {
    let mut reasons = Vec::new();
    for parent in parents {
        let Some((limit, with_swap)) = settings(parent) else {
            continue;
        };
        remove_left(parent);
        let made = tempfile::Builder::new()
            .prefix(&format!("{PREFIX}{}-", std::process::id()))
            .tempdir_in(parent);
        let made = made.and_then(|made| {
            let group = MemoryLimit {
                folder: made.keep(),
            };
            let folder = &group.folder;
            fs::write(folder.join(limit), bytes.to_string())?;
            let most = if with_swap.starts_with("memory.swap") {
                0
            } else {
                bytes
            };
            match fs::write(folder.join(with_swap), most.to_string()) {
                // The kernel does not count swap space.
                Err(error) if error.kind() == ErrorKind::NotFound => Ok(group),
                written => written.map(|()| group),
            }
        });
        match made {
            Ok(group) => return Ok(group),
            Err(error) => reasons.push(format!("{}: {error}", text::path(parent))),
        }
    }
    match reasons.first() {
        Some(reason) => bail!("{reason}"),
        None => {
            bail!("no control group above this process has the memory controller for groups in it")
        }
    }
}

/// Returns the settings that groups in a group have, if they have a limit of memory.
fn settings(parent: &Path) -> Option<(&'static str, &'static str)> {
    let [second, first] = SETTINGS;
    let passed_on = fs::read_to_string(parent.join("cgroup.subtree_control"));
    let has_memory = |names: String| names.split_whitespace().any(|name| name == "memory");
    match passed_on.is_ok_and(has_memory) {
        true => Some(second),
        false => parent.join(first.0).exists().then_some(first),
    }
}

/// Removes the groups of killed commands.
fn remove_left(parent: &Path) {
    for entry in fs::read_dir(parent).into_iter().flatten().flatten() {
        let name = entry.file_name();
        let process = name.to_str().and_then(|name| name.strip_prefix(PREFIX));
        let process = process.and_then(|rest| rest.split_once('-')?.0.parse::<u32>().ok());
        if process.is_some_and(|process| !Path::new(&format!("/proc/{process}")).exists()) {
            // One with processes stays.
            let _ = remove(&entry.path());
        }
    }
}

/// Removes a group, with those that killed commands have left in it. Fails if a process is in one of them.
fn remove(folder: &Path) -> io::Result<()> {
    if fs::read(folder.join("cgroup.procs")).is_ok_and(|of| !of.is_empty()) {
        return Err(ErrorKind::ResourceBusy.into());
    }
    for entry in fs::read_dir(folder)?.flatten() {
        if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            remove(&entry.path())?;
        }
    }
    // Version 1 only: what the group still has in the page cache.
    let emptied = OpenOptions::new()
        .write(true)
        .open(folder.join("memory.force_empty"));
    let _ = emptied.and_then(|mut file| file.write_all(b"0"));
    fs::remove_dir(folder)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_group_without_rights_is_refused_with_the_reason() {
        let parent = tempfile::tempdir().expect("a folder");
        let of = || groups(&[parent.path().to_owned()], 1 << 20);
        let reason = |made: Result<MemoryLimit>| format!("{:#}", made.err().expect("no group"));
        assert!(reason(of()).contains("no control group above"));
    }

    #[test]
    fn groups_of_killed_commands_are_removed() {
        let parent = tempfile::tempdir().expect("a folder");
        let numbers = [4_194_305, std::process::id()];
        let folders = numbers.map(|number| parent.path().join(format!("{PREFIX}{number}-abc")));
        folders
            .iter()
            .for_each(|folder| fs::create_dir_all(folder.join("inner")).expect("free space"));
        remove_left(parent.path());
        assert_eq!(folders.map(|folder| folder.exists()), [false, true]);
    }
}
