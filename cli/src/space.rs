//! Free space for new files next to old ones.

use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use rustix::fs::statvfs;
use sidecar_core::files::folder_of;
use sidecar_core::text;

/// Space that new files need on one file system.
pub struct Need {
    device: u64,
    /// A folder on the file system.
    pub folder: PathBuf,
    pub bytes: u64,
}

impl Need {
    /// Sums the sizes of files by file system.
    pub fn of<'a>(files: impl IntoIterator<Item = (&'a Path, u64)>) -> Result<Vec<Need>> {
        let mut needs: Vec<Need> = Vec::new();
        for (path, bytes) in files {
            let folder = folder_of(path);
            let found = fs::metadata(folder).with_context(|| text::path(folder))?;
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

    /// Fails if the file system has less free space than needed.
    pub fn check(&self) -> Result<()> {
        let free = free_in(&self.folder).with_context(|| {
            format!("cannot find the free space in {}", text::path(&self.folder))
        })?;
        ensure!(
            self.bytes <= free,
            "the new files need {} bytes in {}, and {free} are free: free some space; nothing was changed",
            self.bytes,
            text::path(&self.folder)
        );
        Ok(())
    }
}

/// Returns the bytes of the files in a folder, without those of inner folders.
pub fn used_in(folder: &Path) -> u64 {
    let entries = folder.read_dir().into_iter().flatten().flatten();
    let sizes = entries.filter_map(|entry| entry.metadata().ok());
    let files = sizes.filter(|found| found.is_file());
    files.map(|found| found.len()).sum()
}

/// Returns the space needed on the file system of `path`.
pub fn needed_at(needs: &[Need], path: &Path) -> Result<u64> {
    let device = fs::metadata(folder_of(path))?.dev();
    let need = needs.iter().find(|need| need.device == device);
    Ok(need.map_or(0, |need| need.bytes))
}

/// Returns whether an error means that no space is left: on the disk, in a quota, or below the
/// size limit of a file.
pub fn is_out_of_space(error: &anyhow::Error) -> bool {
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

fn free_in(folder: &Path) -> io::Result<u64> {
    let found = statvfs(folder)?;
    Ok(found.f_bavail.saturating_mul(found.f_frsize))
}
