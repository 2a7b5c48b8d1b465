//! Metadata of the model whose experts are counted.

use std::collections::BTreeMap;

use super::counters::ExpertLayout;
use crate::experts::{ExpertIndex, Projection, Routing};
use crate::gguf::{GgufFile, Value};
use crate::text;

/// Name, architecture and files of a traced model.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ModelMeta {
    /// `general.name`.
    pub name: String,
    /// `general.architecture`.
    pub architecture: String,
    /// The files of the model.
    pub files: Vec<FileMeta>,
    /// Experts per token, of several numbers the largest; 0 when not known.
    pub experts_used: u64,
    /// Bytes of one expert of each layer, as the files have it; of different ones, the largest.
    pub expert_bytes: BTreeMap<u32, u64>,
}

/// A file of a traced model.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct FileMeta {
    /// Path of the file, with the escapes of [`text::path`].
    pub path: String,
    /// Size in bytes.
    pub size: u64,
    /// Modification time, in seconds since 1970.
    pub mtime: i64,
}

impl ModelMeta {
    /// Reads the metadata from the first of a model's files.
    pub fn of<'a>(files: impl IntoIterator<Item = &'a GgufFile>) -> ModelMeta {
        let files: Vec<&GgufFile> = files.into_iter().collect();
        let Some(first) = files.first() else {
            return ModelMeta::default();
        };
        let text = |key: &str| {
            let key = first.header.key(key.as_bytes());
            match key.and_then(|key| first.value(key).ok()) {
                Some(Value::Text(text)) => String::from_utf8_lossy(&text).into_owned(),
                _ => String::new(),
            }
        };
        let routing = Routing::of(files.iter().copied());
        ModelMeta {
            name: text("general.name"),
            experts_used: routing.most_used(),
            architecture: routing.architecture,
            expert_bytes: expert_bytes(&ExpertIndex::of(files.iter().copied())),
            files: files
                .iter()
                .map(|file| FileMeta {
                    path: text::path(file.source.path()),
                    size: file.source.id().size,
                    mtime: file.source.id().mtime,
                })
                .collect(),
        }
    }
}

/// Returns the bytes of one expert of each layer: the sum of its matrices.
fn expert_bytes(experts: &ExpertIndex) -> BTreeMap<u32, u64> {
    let of_expert = |layer, expert| {
        let matrices = Projection::ALL.into_iter();
        let slices = matrices.filter_map(|matrix| experts.slice(layer, matrix, expert));
        slices.map(|slice| slice.nbytes).sum::<u64>()
    };
    let largest = |(layer, count)| {
        let bytes = (0..count).map(|expert| of_expert(layer, expert)).max();
        (layer, bytes.unwrap_or(0))
    };
    experts.layers().map(largest).collect()
}

impl ExpertLayout {
    /// Returns the layers of a model that have routed experts.
    pub fn of(experts: &ExpertIndex) -> ExpertLayout {
        ExpertLayout::new(experts.layers())
    }
}
