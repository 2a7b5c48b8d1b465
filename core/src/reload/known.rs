//! The overlays of tensors, and what requests for overlays have read.

use std::collections::HashMap;
use std::path::PathBuf;

use super::content::Content;
use crate::gguf::{FileId, GgufFile, TensorInfo};

/// What a user names as the source of an overlay.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Origin {
    /// A file, or any shard of a model.
    pub path: PathBuf,
    /// The type that its tensors were quantised to, if they were.
    pub as_type: Option<String>,
    /// The importance matrix that they were quantised with.
    pub imatrix: Option<String>,
}

/// Where the bytes of an overlay come from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Overlay {
    pub from: Origin,
    /// The version of the file, and the offset of the tensor in it.
    pub version: (FileId, u64),
}

/// The content of versions of tensors that were read.
#[derive(Debug, Default)]
pub(super) struct KnownContents(HashMap<ContentKey, (FileId, Content)>);

/// Device and inode of a file; offset, size and type of a tensor in it.
type ContentKey = (u64, u64, u64, u64, u32);

impl KnownContents {
    /// The most versions to keep.
    const MOST: usize = 1 << 16;

    fn key(file: &GgufFile, info: &TensorInfo) -> (FileId, ContentKey) {
        let id = file.source.id();
        let key = (id.dev, id.ino, info.offset, info.nbytes, info.ty.id);
        (id, key)
    }

    pub fn get(&self, file: &GgufFile, info: &TensorInfo) -> Option<Content> {
        let (id, key) = KnownContents::key(file, info);
        let (of, content) = self.0.get(&key)?;
        (*of == id).then_some(*content)
    }

    pub fn insert(&mut self, file: &GgufFile, info: &TensorInfo, content: Content) {
        let (id, key) = KnownContents::key(file, info);
        self.0.insert(key, (id, content));
    }

    /// Forgets all versions if there is no space for so many more.
    pub fn make_space(&mut self, more: usize) {
        if self.0.len() + more > KnownContents::MOST {
            self.0.clear();
        }
    }
}
