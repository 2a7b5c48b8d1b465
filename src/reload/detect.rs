//! Which files changed, and whether what they now hold can be used.

use std::time::{Duration, Instant, SystemTime};

use super::{Cause, ChangedFile, Registry, SETTLE, Trigger, Watched, report::Report};
use crate::gguf::{Access, FileId, GgufFile, OpenError};

/// Looks at every file, one `stat` each, and opens those that are not as they were and that
/// the trigger lets be tried now.
pub(super) fn changed_files(
    registry: &mut Registry,
    trigger: Trigger,
    activity: u64,
    report: &mut Report,
) -> Vec<ChangedFile> {
    let mut changed = Vec::new();
    for file in 0..registry.files.len() {
        report.files_checked += 1;
        let watched = &registry.files[file];
        let found = FileId::of_path(&watched.path);
        if !watched.mixed && matches!(&found, Ok(id) if *id == watched.id) {
            // As before; a version in between that was ignored is gone.
            registry.files[file].forget_attempts();
            continue;
        }
        let found = match found {
            Ok(id) => id,
            Err(error) => {
                let reason = format!("cannot stat it: {error}");
                registry.ignore(file, None, Cause::Unreadable, reason, report);
                continue;
            }
        };
        if let Some((Some(id), cause, reason)) = &watched.ignored
            && *id == found
        {
            let (cause, reason) = (*cause, reason.clone());
            registry.ignore(file, Some(found), cause, reason, report);
            continue;
        }
        if let Trigger::Watch { quiet } = trigger {
            let watched = &mut registry.files[file];
            if let Some(left) = watched.noise_left(found, quiet) {
                let sooner = report.look_again.map_or(left, |other| other.min(left));
                report.look_again = Some(sooner);
                continue;
            }
            let failed = watched.failed.as_ref().filter(|failed| failed.id == found);
            if failed.is_some_and(|failed| !failed.may_retry(activity)) {
                report.postponed = true;
                continue;
            }
        }
        let watched = &registry.files[file];
        match open(&watched.path, found) {
            Ok(gguf) => changed.push(ChangedFile { file, gguf }),
            Err(error) => {
                let (id, cause, reason) = explain(error, found);
                registry.ignore(file, id, cause, reason, report);
            }
        }
    }
    changed
}

impl Watched {
    /// How much longer a version must stay the same until it has been quiet for so long;
    /// `None` when it has.
    fn noise_left(&mut self, found: FileId, quiet: Duration) -> Option<Duration> {
        let since = match self.seen {
            Some((known, since)) if known == found => since,
            _ => Instant::now(),
        };
        self.seen = Some((found, since));
        quiet
            .checked_sub(since.elapsed())
            .filter(|left| !left.is_zero())
    }
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
fn explain(error: OpenError, found: FileId) -> (Option<FileId>, Cause, String) {
    match error {
        OpenError::Malformed { error: defect, .. } if defect.is_short() => (
            Some(found),
            Cause::Incomplete,
            format!("{defect}; waiting for its writer to finish"),
        ),
        OpenError::Malformed { error: defect, .. } => {
            (Some(found), Cause::Malformed, defect.to_string())
        }
        OpenError::NotAFile { found, .. } => (
            None,
            Cause::Unreadable,
            format!("expected a regular file, found {found}"),
        ),
        OpenError::Io { action, source, .. } => (
            None,
            Cause::Unreadable,
            format!("cannot {action}: {source}"),
        ),
        OpenError::Changing { .. } => {
            (None, Cause::Changing, "it changed while it was read".into())
        }
        OpenError::Shard { reason, .. } => (Some(found), Cause::Malformed, reason),
    }
}
