//! Detects changed files and parses their headers.

use std::time::{Duration, Instant, SystemTime};

use super::registry::{Registry, Watched};
use super::report::{Cause, Report};
use crate::gguf::{Access, FileId, GgufFile, OpenError};

/// What starts a reload.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Trigger {
    /// A command: every changed file is tried now.
    Command,
    /// A periodic check: a changed file is tried once it has not changed for `quiet`, and after
    /// a failure at growing intervals.
    Watch {
        /// How long a file must not have changed.
        quiet: Duration,
    },
}

/// How old a modification time must be so that a later write changes it.
///
/// File systems stamp writes with a clock that ticks every 1 to 10 ms: two writes within a tick
/// have the same time. A file with a more recent time is read only after this delay, so that a
/// write during the read changes its time.
const SETTLE: Duration = Duration::from_millis(20);

/// A changed file that was opened.
pub(super) struct ChangedFile {
    /// Index of the file.
    pub file: usize,
    pub gguf: GgufFile,
}

/// Checks every file, with one `stat` each. Opens the changed files that the trigger allows to be
/// tried now.
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
            // The version in use. A version in between that was ignored is gone.
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
            if let Some(left) = watched.quiet_time_left(found, quiet) {
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
    /// Returns how much longer the file must not change; `None` when it has not changed for
    /// `quiet`.
    fn quiet_time_left(&mut self, found: FileId, quiet: Duration) -> Option<Duration> {
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

/// Opens a changed file once its modification time is old enough.
///
/// The file is read and never mapped, because its writer may cut it short at any moment.
pub(super) fn open(path: &std::path::Path, found: FileId) -> Result<GgufFile, OpenError> {
    settle(&found);
    let gguf = GgufFile::open(path, Access::Read)?;
    // Otherwise the file was written during the delay.
    match gguf.source.id() == found {
        true => Ok(gguf),
        false => Err(OpenError::Changing {
            path: path.to_owned(),
        }),
    }
}

/// Waits until the modification time of a file is old enough for a later write to change it.
/// Returns whether that took any time.
pub(super) fn settle(found: &FileId) -> bool {
    let stamped = SystemTime::UNIX_EPOCH
        + Duration::new(found.mtime.max(0) as u64, found.mtime_ns.max(0) as u32);
    let age = stamped.elapsed().unwrap_or(SETTLE);
    let left = SETTLE.saturating_sub(age);
    std::thread::sleep(left);
    !left.is_zero()
}

/// Returns the reason to ignore a file, and its identity if the same bytes would give the same
/// error again.
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
