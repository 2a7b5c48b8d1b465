//! Which files changed, and whether what they now hold can be used.

use std::time::{Duration, SystemTime};

use super::{ChangedFile, INCOMPLETE, Registry, SETTLE, report::Report};
use crate::gguf::{Access, FileId, GgufFile, OpenError};

/// Looks at every file, one `stat` each, and opens those that are not as they were.
pub(super) fn changed_files(registry: &mut Registry, report: &mut Report) -> Vec<ChangedFile> {
    let mut changed = Vec::new();
    for file in 0..registry.files.len() {
        report.files_checked += 1;
        let watched = &registry.files[file];
        let found = FileId::of_path(&watched.path);
        if matches!(&found, Ok(id) if *id == watched.id) {
            // As before; a version in between that was ignored is gone.
            registry.files[file].ignored = None;
            continue;
        }
        let found = match found {
            Ok(id) => id,
            Err(error) => {
                registry.ignore(file, None, format!("cannot stat it: {error}"), report);
                continue;
            }
        };
        if let Some((Some(id), reason)) = &watched.ignored
            && *id == found
        {
            let reason = reason.clone();
            registry.ignore(file, Some(found), reason, report);
            continue;
        }
        match open(&watched.path, found) {
            Ok(gguf) => changed.push(ChangedFile { file, gguf }),
            Err(error) => {
                let (id, reason) = explain(error, found);
                registry.ignore(file, id, reason, report);
            }
        }
    }
    changed
}

/// Opens a changed file once its time stamp is old enough to tell later writes.
///
/// It is read and never mapped: its writer may cut it short at any moment.
fn open(path: &std::path::Path, found: FileId) -> Result<GgufFile, OpenError> {
    let stamped = SystemTime::UNIX_EPOCH
        + Duration::new(found.mtime.max(0) as u64, found.mtime_ns.max(0) as u32);
    let age = stamped.elapsed().unwrap_or(SETTLE);
    std::thread::sleep(SETTLE.saturating_sub(age));
    let gguf = GgufFile::open(path, Access::Read)?;
    // Otherwise it was written during the wait, and is as young as before.
    match gguf.source.id() == found {
        true => Ok(gguf),
        false => Err(OpenError::Changing {
            path: path.to_owned(),
        }),
    }
}

/// The reason to ignore a file, and its identity where looking again at the same
/// bytes would give the same answer.
fn explain(error: OpenError, found: FileId) -> (Option<FileId>, String) {
    match error {
        OpenError::Malformed { defect, .. } if defect.is_short() => {
            (Some(found), format!("{defect}; {INCOMPLETE}"))
        }
        OpenError::Malformed { defect, .. } => (Some(found), defect.to_string()),
        OpenError::NotAFile { found, .. } => {
            (None, format!("expected a regular file, found {found}"))
        }
        OpenError::Io { action, source, .. } => (None, format!("cannot {action}: {source}")),
        OpenError::Changing { .. } => (None, "it changed while it was read".into()),
        OpenError::Shard { reason, .. } => (Some(found), reason),
    }
}
