//! Hashes of models, kept beside the time stamps of their files, so that an unchanged model of
//! many gigabytes is read once.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use serde_json::Value;
use sidecar_core::gguf::{Access, FileId, Source};
use sidecar_core::reload::hash_source;
use sidecar_core::text;

use super::model::Model;
use super::record::write_atomically;

/// The hashes that a work folder keeps.
pub struct Identities {
    path: PathBuf,
    known: BTreeMap<String, Value>,
}

impl Identities {
    /// Reads the hashes of a work folder. A missing or damaged file has none.
    pub fn load(folder: &Path) -> Identities {
        let path = folder.join("identities.json");
        let text = fs::read_to_string(&path).unwrap_or_default();
        Identities {
            path,
            known: serde_json::from_str(&text).unwrap_or_default(),
        }
    }

    /// Returns the hash of a model's files.
    pub fn of_model(&mut self, model: &Model) -> Result<String> {
        let ids = model.files.iter().map(|file| file.source.id());
        let stamps: Vec<String> = ids.map(|id| stamp(&id)).collect();
        self.find(&model.path, &stamps.join(" "), || {
            Ok(format!("{:032x}", model.hash()?))
        })
    }

    /// Returns the hash of a file.
    pub fn of_file(&mut self, path: &Path) -> Result<String> {
        let explain = || format!("cannot read {}", text::path(path));
        let source = Source::open(path, Access::Read)?;
        self.find(path, &stamp(&source.id()), || {
            let hash = hash_source(&source, 0, source.id().size).with_context(explain)?;
            Ok(format!("{hash:032x}"))
        })
    }

    fn find(
        &mut self,
        path: &Path,
        stamp: &str,
        read: impl FnOnce() -> Result<String>,
    ) -> Result<String> {
        let key = text::path(path);
        let known = self.known.get(&key).filter(|known| known["stamp"] == stamp);
        if let Some(hash) = known.and_then(|known| known["hash"].as_str()) {
            return Ok(hash.to_owned());
        }
        let hash = read()?;
        let entry = serde_json::json!({ "stamp": stamp, "hash": hash });
        self.known.insert(key, entry);
        write_atomically(
            &self.path,
            serde_json::to_string_pretty(&self.known)?.as_bytes(),
        )?;
        Ok(hash)
    }
}

/// Returns values that change with every change of a file.
fn stamp(id: &FileId) -> String {
    let times = (id.mtime, id.mtime_ns, id.ctime, id.ctime_ns);
    format!("{:?}", (id.dev, id.ino, id.size, times))
}
