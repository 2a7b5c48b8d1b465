//! Whose experts are counted.

use super::counters::Layout;
use crate::experts::ExpertIndex;
use crate::gguf::{GgufFile, Value};

/// Whose experts were counted.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct About {
    /// `general.name`.
    pub name: String,
    /// `general.architecture`.
    pub architecture: String,
    /// The files of the model.
    pub files: Vec<AboutFile>,
    /// Experts per token; 0 when not known.
    pub experts_used: u64,
}

/// A file of the model whose experts were counted.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct AboutFile {
    /// Where it was.
    pub path: String,
    /// Its size in bytes.
    pub size: u64,
    /// Its modification time, seconds since 1970.
    pub mtime: i64,
}

impl About {
    /// What the files of a model say about it; the first has the metadata.
    pub fn of<'a>(files: impl IntoIterator<Item = &'a GgufFile>) -> About {
        let files: Vec<&GgufFile> = files.into_iter().collect();
        let Some(first) = files.first() else {
            return About::default();
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
        About {
            name: text("general.name"),
            experts_used: used.and_then(|key| key.as_u64()).unwrap_or(0),
            architecture,
            files: files
                .iter()
                .map(|file| AboutFile {
                    path: file.source.path().display().to_string(),
                    size: file.source.id().size,
                    mtime: file.source.id().mtime,
                })
                .collect(),
        }
    }
}

impl Layout {
    /// Returns the layers of a model that have routed experts.
    pub fn of(experts: &ExpertIndex) -> Layout {
        Layout::new(experts.layers())
    }
}
