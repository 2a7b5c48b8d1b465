//! Free space for new files beside old ones.

use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use rustix::fs::statvfs;

/// What new files need on one file system.
pub struct Need {
    device: u64,
    /// A folder there.
    pub folder: PathBuf,
    pub bytes: u64,
}

impl Need {
    /// Adds up what files of these sizes need, by file system.
    pub fn of<'a>(files: impl IntoIterator<Item = (&'a Path, u64)>) -> Result<Vec<Need>> {
        let mut needs: Vec<Need> = Vec::new();
        for (path, bytes) in files {
            let folder = folder_of(path);
            let found = fs::metadata(folder).with_context(|| folder.display().to_string())?;
            match needs.iter_mut().find(|need| need.device == found.dev()) {
                Some(need) => need.bytes = need.bytes.saturating_add(bytes),
                None => needs.push(Need {
                    device: found.dev(),
                    folder: folder.to_owned(),
                    bytes,
                }),
            }
        }
        Ok(needs)
    }

    /// Fails when there is less room than needed.
    pub fn check(&self) -> Result<()> {
        let free = free_in(&self.folder)
            .with_context(|| format!("cannot find the free space in {}", self.folder.display()))?;
        ensure!(
            self.bytes <= free,
            "the new files need {} bytes in {}, and {free} are free: make room there; nothing was changed",
            self.bytes,
            self.folder.display()
        );
        Ok(())
    }
}

/// Finds what is needed where `path` is.
pub fn needed_at(needs: &[Need], path: &Path) -> Result<u64> {
    let device = fs::metadata(folder_of(path))?.dev();
    let need = needs.iter().find(|need| need.device == device);
    Ok(need.map_or(0, |need| need.bytes))
}

/// Says whether an error means that there is no room: on the disk, in a quota, or below the
/// limit for a file.
pub fn is_no_room(error: &anyhow::Error) -> bool {
    let io = error
        .chain()
        .find_map(|cause| cause.downcast_ref::<io::Error>());
    matches!(
        io.map(io::Error::kind),
        Some(
            io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded | io::ErrorKind::FileTooLarge
        )
    )
}

/// The folder that a file is in.
pub fn folder_of(path: &Path) -> &Path {
    match path.parent() {
        Some(folder) if folder != Path::new("") => folder,
        _ => Path::new("."),
    }
}

fn free_in(folder: &Path) -> io::Result<u64> {
    let found = statvfs(folder)?;
    Ok(found.f_bavail.saturating_mul(found.f_frsize))
}
