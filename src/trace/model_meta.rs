//! Metadata of the model whose experts are counted.

use super::counters::ExpertLayout;
use crate::experts::ExpertIndex;
use crate::gguf::{GgufFile, Value};

/// Name, architecture and files of a traced model.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ModelMeta {
    /// `general.name`.
    pub name: String,
    /// `general.architecture`.
    pub architecture: String,
    /// The files of the model.
    pub files: Vec<FileMeta>,
    /// Experts per token; 0 when not known.
    pub experts_used: u64,
}

/// A file of a traced model.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct FileMeta {
    /// Path of the file.
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
        let architecture = text("general.architecture");
        let used = format!("{architecture}.expert_used_count");
        let used = first.header.key(used.as_bytes());
        ModelMeta {
            name: text("general.name"),
            experts_used: used.and_then(|key| key.as_u64()).unwrap_or(0),
            architecture,
            files: files
                .iter()
                .map(|file| FileMeta {
                    path: file.source.path().display().to_string(),
                    size: file.source.id().size,
                    mtime: file.source.id().mtime,
                })
                .collect(),
        }
    }
}

impl ExpertLayout {
    /// Returns the layers of a model that have routed experts.
    pub fn of(experts: &ExpertIndex) -> ExpertLayout {
        ExpertLayout::new(experts.layers())
    }
}
