//! A file of a model, and the version of it whose bytes the model was loaded from.

use parking_lot::{Mutex, MutexGuard};

use crate::gguf::{FileId, GgufFile};

/// A file of a model, as it was when the model was opened.
///
/// Stays open, so that its bytes can be read after another file took its name.
#[derive(Debug)]
pub struct TrackedFile {
    /// The file.
    pub gguf: GgufFile,
    /// The identity under which the bytes of the file are those that the model knows: the one
    /// that the file was opened with, or the one of a write in place that a reload has seen.
    trusted: Mutex<FileId>,
}

impl TrackedFile {
    /// Trusts a file as it was opened.
    pub fn new(gguf: GgufFile) -> TrackedFile {
        TrackedFile {
            trusted: Mutex::new(gguf.source.id()),
            gguf,
        }
    }

    /// Returns the identity under which the bytes of the file are trusted.
    pub fn trusted(&self) -> FileId {
        *self.trusted.lock()
    }

    /// Keeps the trusted identity as it is while the guard is held.
    pub fn lock_trusted(&self) -> MutexGuard<'_, FileId> {
        self.trusted.lock()
    }

    /// Trusts the bytes of the file under another identity; does nothing when `id` is the
    /// identity of another file.
    pub fn trust(&self, id: FileId) {
        if self.gguf.source.id().same_inode(&id) {
            *self.trusted.lock() = id;
        }
    }

    /// Returns whether the file has the size and modification time of the trusted identity.
    pub fn is_trusted(&self) -> bool {
        self.gguf.source.has_stamp_of(&self.trusted())
    }

    /// Returns whether `id` is this file after a write in place that is not trusted yet.
    pub fn is_write_in_place(&self, id: &FileId) -> bool {
        let trusted = self.trusted();
        trusted.same_inode(id) && !id.unwritten_since(&trusted)
    }

    /// Returns whether the file still holds the bytes in use.
    ///
    /// Bytes that were copied out of the file (`copied`) do not follow a write in place, so
    /// for them the time of change counts, too.
    pub fn holds_bytes_in_use(&self, copied: bool) -> bool {
        match copied {
            true => self.gguf.source.is_unwritten_since(&self.trusted()),
            false => self.is_trusted(),
        }
    }
}
