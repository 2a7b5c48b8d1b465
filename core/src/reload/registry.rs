//! What the engine knows of files and tensors between reloads.

use std::ffi::CString;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::content::{Content, Defects};
use super::hash::{Hash, of_bytes};
use super::known::{KnownContents, Origin, Overlay};
use super::report::{Cause, FileReport, Ignored, Outcome, Report, TensorReport};
use super::same_model::LoadedModel;
use super::tracked::TrackedFile;
use crate::gguf::{FileId, TypeInfo};
use crate::text;

/// The state of the engine.
#[derive(Debug)]
pub(super) struct Registry {
    pub files: Vec<Watched>,
    /// What a new version of a file is compared with.
    pub loaded: Arc<LoadedModel>,
    pub tensors: Vec<Registered>,
    /// The most bytes to stage before a switch; 0 for no limit.
    pub staging_bytes: u64,
    /// What requests for overlays have read.
    pub read: KnownContents,
}

/// A file that is checked for changes.
#[derive(Debug)]
pub(super) struct Watched {
    pub path: PathBuf,
    /// The version in use.
    pub id: FileId,
    /// The version at registration.
    pub first_id: FileId,
    /// Whether only some of its tensors were switched to another version, because a later step
    /// failed. Then no version of the file is the one in use.
    pub mixed: bool,
    pub tensors: Vec<usize>,
    /// What of the version in use needs a new start of the program, in words.
    pub needs_start: Option<String>,
    /// The last version that was ignored, and why.
    pub ignored: Option<(Option<FileId>, Cause, String)>,
    /// The version that was found last, and since when the file has not changed.
    pub seen: Option<(FileId, Instant)>,
    /// The content of a version that is not in use yet: a further attempt reads no bytes twice.
    pub contents: Option<(FileId, Contents)>,
    /// The version whose reload failed last for a reason that may pass.
    pub failed: Option<Failed>,
}

/// The tensors that follow a file: each tensor, its position in the header of a version of the
/// file, and its content there.
pub(super) type Contents = Vec<(usize, usize, Content)>;

/// A failed reload of a version of a file.
#[derive(Debug)]
pub(super) struct Failed {
    pub id: FileId,
    times: u32,
    at: Instant,
    /// The activity of the store, when evaluations prevented the switch.
    activity: Option<u64>,
}

/// A tensor that follows its file.
#[derive(Debug)]
pub(super) struct Registered {
    pub name: CString,
    /// Index of its file.
    pub file: usize,
    /// The type of the bytes in use.
    pub ty: &'static TypeInfo,
    /// The shape, which never changes.
    pub ne: [u64; 4],
    /// The type at registration.
    pub original_type: &'static TypeInfo,
    pub original_bytes: OriginalBytes,
    /// Hash of the bytes in use, once it was needed.
    pub live_hash: Option<Hash>,
    /// Defects of the bytes in use, once they were needed.
    pub live_defects: Option<Defects>,
    /// Whether the file of the original bytes was written in place.
    pub written_in_place: bool,
    /// The file that its bytes come from, in place of its own file.
    pub overlay: Option<Overlay>,
}

/// A tensor that left its original bytes, or that has an overlay.
#[derive(Debug, Clone)]
pub struct Changed {
    /// The tensor.
    pub tensor: usize,
    /// The type at registration.
    pub original_type: &'static TypeInfo,
    /// The type of the bytes in use.
    pub ty: &'static TypeInfo,
    /// The source of its overlay, and the hash of the bytes in use.
    pub overlay: Option<(Origin, Option<Hash>)>,
}

/// What is known of the bytes that a tensor had at registration. They are hashed when a swap
/// replaces them: a model that is never swapped is never read for it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum OriginalBytes {
    /// The original bytes are in use.
    InUse,
    /// The tensor has other bytes now; the original bytes have this hash.
    Left(Hash),
    /// The original bytes were overwritten before they were hashed.
    Lost,
}

impl Failed {
    /// The longest time between two attempts that are made without a command.
    const LONGEST_DELAY: Duration = Duration::from_secs(300);

    /// Returns the time until the next attempt: it doubles from one second on.
    fn delay(&self) -> Duration {
        let doubled = Duration::from_secs(1).saturating_mul(1 << (self.times - 1).min(16));
        doubled.min(Self::LONGEST_DELAY)
    }

    /// Returns whether the next attempt can be made. While the program is idle, it keeps the
    /// graphs that prevented the switch.
    pub fn may_retry(&self, activity: u64) -> bool {
        self.at.elapsed() >= self.delay() && self.activity != Some(activity)
    }
}

impl Watched {
    /// Records a failed attempt to use a version, for a reason that may pass.
    pub fn note_failure(&mut self, id: FileId, activity: Option<u64>) {
        let before = self.failed.take().filter(|failed| failed.id == id);
        self.failed = Some(Failed {
            id,
            times: before.map_or(1, |failed| failed.times.saturating_add(1)),
            at: Instant::now(),
            activity,
        });
    }

    /// Forgets what was recorded about versions that are not in use.
    pub fn forget_attempts(&mut self) {
        self.ignored = None;
        self.seen = None;
        self.contents = None;
        self.failed = None;
    }

    /// Returns the content of a version that was read.
    pub fn contents_of(&self, id: FileId) -> Contents {
        let read = self.contents.iter().find(|(of, _)| *of == id);
        read.map_or(Contents::new(), |(_, contents)| contents.clone())
    }
}

impl Registered {
    /// Returns a report of a tensor that keeps its type.
    pub fn report(&self, tensor: usize, outcome: Outcome) -> TensorReport {
        TensorReport {
            tensor,
            name: self.name.clone(),
            outcome,
            old_type: self.ty,
            new_type: self.ty,
            nbytes: 0,
            file: self.file,
            placement: String::new(),
            reason: String::new(),
        }
    }

    /// Returns a report of a refused tensor.
    pub fn refused(&self, tensor: usize, reason: String) -> TensorReport {
        TensorReport {
            reason,
            ..self.report(tensor, Outcome::Refused)
        }
    }
}

impl Registry {
    /// Registers files and tensors as they are.
    pub fn new(
        files: &[TrackedFile],
        loaded: Arc<LoadedModel>,
        tensors: impl Iterator<Item = (usize, usize)>,
        staging_bytes: u64,
    ) -> Registry {
        let mut watched: Vec<Watched> = files
            .iter()
            .map(|file| &file.gguf.source)
            .map(|source| Watched {
                path: source.path().to_owned(),
                id: source.id(),
                first_id: source.id(),
                mixed: false,
                tensors: Vec::new(),
                needs_start: None,
                ignored: None,
                seen: None,
                contents: None,
                failed: None,
            })
            .collect();
        let mut registered = Vec::new();
        for (index, (file, info)) in tensors.enumerate() {
            let header = &files[file].gguf.header;
            let info = &header.tensors[info];
            watched[file].tensors.push(index);
            registered.push(Registered {
                name: header.name(info).to_owned(),
                file,
                ty: info.ty,
                ne: info.ne,
                original_type: info.ty,
                original_bytes: OriginalBytes::InUse,
                live_hash: None,
                live_defects: None,
                written_in_place: false,
                overlay: None,
            });
        }
        Registry {
            files: watched,
            loaded,
            tensors: registered,
            staging_bytes,
            read: KnownContents::default(),
        }
    }

    /// Hashes the description and the bytes of all tensors; `None` when a hash is missing.
    pub fn content_hash(&self) -> Option<Hash> {
        let mut tensors: Vec<&Registered> = self.tensors.iter().collect();
        tensors.sort_by(|a, b| a.name.cmp(&b.name));
        let mut description = Vec::new();
        for tensor in tensors {
            description.extend(tensor.name.as_bytes_with_nul());
            description.extend(tensor.ty.id.to_le_bytes());
            description.extend(tensor.ne.iter().flat_map(|extent| extent.to_le_bytes()));
            description.extend(tensor.live_hash?.to_le_bytes());
        }
        Some(of_bytes(&description))
    }

    /// Returns the files whose last version was ignored, or needs a new start of the program.
    pub fn noted_files(&self) -> Vec<FileReport> {
        let files = self.files.iter().enumerate();
        let reports = files.map(|(file, watched)| FileReport {
            file,
            path: watched.path.clone(),
            ignored: watched.ignored.clone().map(|(_, cause, reason)| Ignored {
                cause,
                reason,
                first: false,
            }),
            needs_start: watched.needs_start.clone(),
        });
        reports.filter(|file| !file.reason().is_empty()).collect()
    }

    /// Leaves a changed file out of this reload. Logs that once for each version of the file;
    /// of a file that is being written, once until it is complete.
    pub fn ignore(
        &mut self,
        file: usize,
        id: Option<FileId>,
        cause: Cause,
        reason: String,
        report: &mut Report,
    ) {
        let watched = &mut self.files[file];
        let written = |cause| matches!(cause, Cause::Incomplete | Cause::Changing);
        let before = watched.ignored.as_ref();
        let still_written = written(cause) && before.is_some_and(|&(_, cause, _)| written(cause));
        let known = matches!(&watched.ignored, Some((of, _, why)) if *of == id && *why == reason);
        let first = !known && !still_written;
        if first {
            report.news = true;
            log::warn!("{}: ignored: {reason}", text::path(&watched.path));
        }
        report.files.push(FileReport {
            file,
            path: watched.path.clone(),
            ignored: Some(Ignored {
                cause,
                reason: reason.clone(),
                first,
            }),
            needs_start: None,
        });
        watched.ignored = Some((id, cause, reason));
    }
}
