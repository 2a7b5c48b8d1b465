//! The folder of a model that is swapped: on a small file system of its own, if that can be
//! had, so that it can be full without harm to others.

use std::fs::{self, File};
use std::io::{self, ErrorKind, Read};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::SystemTime;

use anyhow::{Context, Result, bail};

use crate::run::{command, root};

/// Space for four versions of the model: that in use, that mapped since the start, a new one
/// beside, and originals.
const ROOM_MIB: u64 = 420;

/// Lets mounts of this thread, and of the processes and threads that it starts, be seen by them
/// alone. They are gone with the last of these, however it ends.
fn leave_mounts_of_others() -> io::Result<()> {
    let done = |result: libc::c_int| match result {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    };
    let (none, root) = (std::ptr::null(), c"/".as_ptr());
    // SAFETY: both calls get strings that end with zero, or none.
    unsafe {
        done(libc::unshare(libc::CLONE_NEWNS))?;
        let private = libc::MS_REC | libc::MS_PRIVATE;
        done(libc::mount(none, root, none, private, none.cast()))
    }
}

fn mount(folder: &Path) -> io::Result<()> {
    let output = command("mount", &root())
        .args(["-t", "tmpfs", "-o", &format!("size={ROOM_MIB}m"), "tmpfs"])
        .arg(folder)
        .output()?;
    match output.status.success() {
        true => Ok(()),
        false => Err(io::Error::other(
            String::from_utf8_lossy(&output.stderr).trim().to_owned(),
        )),
    }
}

/// A folder with a model.
pub struct Place {
    folder: tempfile::TempDir,
    /// Why it has no file system of its own, if so.
    pub shared: Option<String>,
}

impl Place {
    /// Makes an empty folder.
    pub fn new() -> Result<Place> {
        let folder = tempfile::tempdir()?;
        let mounted = leave_mounts_of_others().and_then(|()| mount(folder.path()));
        let shared = mounted.err().map(|error| error.to_string());
        Ok(Place { folder, shared })
    }

    /// Path of the model.
    pub fn model(&self) -> PathBuf {
        self.folder.path().join("model.gguf")
    }

    /// Replaces the model by a copy of a file, written beside it and renamed.
    pub fn put(&self, by: &Path) -> Result<()> {
        self.put_written(|beside| fs::copy(by, beside).map(drop))
    }

    /// The same with the first bytes of a file alone.
    pub fn put_cut(&self, by: &Path, bytes: u64) -> Result<()> {
        self.put_written(|beside| {
            let mut from = File::open(by)?.take(bytes);
            io::copy(&mut from, &mut File::create(beside)?).map(drop)
        })
    }

    /// The same, and zeros in place of what is left out.
    pub fn put_preallocated(&self, by: &Path, bytes: u64) -> Result<()> {
        self.put_written(|beside| {
            let from = File::open(by)?;
            let mut to = File::create(beside)?;
            let size = from.metadata()?.len();
            io::copy(&mut from.take(bytes), &mut to)?;
            to.set_len(size)
        })
    }

    fn put_written(&self, write: impl FnOnce(&Path) -> io::Result<()>) -> Result<()> {
        let beside = self.folder.path().join("beside.gguf");
        write(&beside).with_context(|| beside.display().to_string())?;
        Ok(fs::rename(beside, self.model())?)
    }

    /// Gives the model another time, and leaves its bytes alone.
    pub fn touch(&self) -> Result<()> {
        let file = File::options().append(true).open(self.model())?;
        Ok(file.set_modified(SystemTime::now())?)
    }

    /// Fills the file system, runs an action, and frees the space again.
    pub fn when_full<T>(&self, work: impl FnOnce() -> T) -> Result<T> {
        if self.shared.is_some() {
            bail!("others use this file system, too");
        }
        let filler = self.folder.path().join("filler");
        let zeros = &mut io::repeat(0).take(ROOM_MIB << 20);
        let full = io::copy(zeros, &mut File::create(&filler)?);
        let done = match full {
            Err(error) if error.kind() == ErrorKind::StorageFull => Ok(work()),
            Err(error) => Err(error.into()),
            Ok(_) => bail!("{ROOM_MIB} MiB more fit on a file system of {ROOM_MIB} MiB"),
        };
        fs::remove_file(filler)?;
        done
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        if self.shared.is_none() {
            let _ = Command::new("umount").arg(self.folder.path()).status();
        }
    }
}
