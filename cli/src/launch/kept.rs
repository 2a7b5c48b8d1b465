//! Lists of entries that are kept for the user, in files of the user's data folder.

use std::fs;
use std::io::BufReader;
use std::path::PathBuf;

use anyhow::{Context, Result};
use rustix::system::uname;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use sidecar_core::files::{self, Replace};
use sidecar_core::text;

/// Entries that a list has at most; the oldest are forgotten.
const MOST: usize = 1000;

/// A list of entries in a file.
pub struct Kept {
    /// The name of the file, without its ending.
    pub name: &'static str,
}

#[derive(Serialize, Deserialize)]
struct Content<T> {
    llama_sidecar: String,
    entries: Vec<T>,
}

impl Kept {
    /// Returns the path of the file; `None` without a folder of the user.
    pub fn path(&self) -> Option<PathBuf> {
        let folder = |name: &str| {
            let folder = std::env::var_os(name).filter(|folder| !folder.is_empty());
            folder.map(PathBuf::from)
        };
        self.path_in(folder("XDG_DATA_HOME"), folder("HOME"))
    }

    fn path_in(&self, data: Option<PathBuf>, home: Option<PathBuf>) -> Option<PathBuf> {
        // The specification of XDG: a relative path is ignored.
        let data = data.filter(|data| data.is_absolute());
        // Accounts of services have a home that is not there, which root could create.
        let home = home.filter(|home| home.is_dir());
        let data = data.or_else(|| Some(home?.join(".local/share")))?;
        Some(data.join(format!("llama-sidecar/{}.json", self.name)))
    }

    /// Returns the entries. A file that cannot be read has none; a file of another user may not choose
    /// options.
    pub fn entries<T: DeserializeOwned>(&self) -> Vec<T> {
        let read = || {
            let file = files::open_trusted(&self.path()?).ok()?;
            let content: Content<T> = serde_json::from_reader(BufReader::new(file)).ok()?;
            (content.llama_sidecar == self.name).then_some(content.entries)
        };
        read().unwrap_or_default()
    }

    /// Writes the entries. Returns the path of the file; `None` without a folder of the user.
    pub fn write<T: Serialize>(&self, mut entries: Vec<T>) -> Result<Option<PathBuf>> {
        let Some(path) = self.path() else {
            return Ok(None);
        };
        let first = entries.len().saturating_sub(MOST);
        let content = Content {
            llama_sidecar: self.name.into(),
            entries: entries.split_off(first),
        };
        let folder = files::folder_of(&path);
        fs::create_dir_all(folder)
            .with_context(|| format!("cannot create {}", text::path(folder)))?;
        let text = serde_json::to_string(&content)?;
        files::write(&path, text.as_bytes(), Replace::Own)
            .with_context(|| format!("cannot write {}", text::path(&path)))?;
        Ok(Some(path))
    }
}

/// Returns the name of this machine: entries of others do not count.
pub fn machine() -> String {
    uname().nodename().to_string_lossy().into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_home_that_is_not_there_has_no_list() {
        let kept = Kept { name: "test" };
        let there = tempfile::tempdir().expect("a folder");
        let path =
            |data: Option<&str>, home: PathBuf| kept.path_in(data.map(PathBuf::from), Some(home));
        let expected = there.path().join(".local/share/llama-sidecar/test.json");
        assert_eq!(path(None, there.path().into()), Some(expected));
        assert_eq!(path(None, there.path().join("none")), None);
        let of_data = Some("/data/llama-sidecar/test.json".into());
        assert_eq!(path(Some("/data"), there.path().join("none")), of_data);
        assert_eq!(path(Some("data"), there.path().join("none")), None);
    }
}
