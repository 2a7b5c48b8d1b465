//! What the drop-in wrote down about the processes of a command.

use std::collections::BTreeSet;
use std::path::Path;

use anyhow::{Context, Result};
use serde_json::Value;
use tempfile::NamedTempFile;

/// A file that the drop-in appends events to.
pub struct Journal(NamedTempFile);

/// What happened so far.
pub struct Events(Vec<Value>);

impl Journal {
    pub fn new() -> Result<Journal> {
        let file = NamedTempFile::with_prefix("llama-sidecar-");
        Ok(Journal(file.context(
            "cannot make a temporary file (set TMPDIR to a folder with room)",
        )?))
    }

    pub fn path(&self) -> &Path {
        self.0.path()
    }

    pub fn read(&self) -> Events {
        let text = std::fs::read_to_string(self.path()).unwrap_or_default();
        let parsed = text.lines().map(serde_json::from_str);
        Events(parsed.filter_map(Result::ok).collect())
    }
}

impl Events {
    /// Events of a kind, in the order in which they happened.
    pub fn of<'a>(&'a self, kind: &'a str) -> impl Iterator<Item = &'a Value> + Clone {
        self.0.iter().filter(move |event| event["event"] == kind)
    }

    pub fn any(&self, kind: &str) -> bool {
        self.of(kind).next().is_some()
    }

    /// The processes that have written down anything.
    pub fn processes(&self) -> BTreeSet<u64> {
        let ids = self.0.iter().filter_map(|event| event["pid"].as_u64());
        ids.collect()
    }

    /// A field of the first event of a kind.
    pub fn text<'a>(&'a self, kind: &'a str, field: &str) -> Option<&'a str> {
        self.of(kind).next()?[field].as_str()
    }

    /// The sum of a field over all events of a kind.
    pub fn sum(&self, kind: &str, field: &str) -> u64 {
        self.of(kind)
            .filter_map(|event| event[field].as_u64())
            .sum()
    }

    /// Why nothing of what was asked for could be done, if so, and what to do.
    pub fn obstacle(&self) -> Option<String> {
        if let Some(reason) = self.text("passive", "reason") {
            return Some(format!("{reason}; please report which llama.cpp this is"));
        }
        if self.any("model") {
            return None;
        }
        Some(match (self.any("loaded"), self.text("opened", "path")) {
            (false, _) => "the loader did not take the drop-in: is the program linked statically, or does it clear LD_PRELOAD? 'llama-sidecar doctor -- COMMAND' looks into it".into(),
            (true, None) => "the program opened no model through a shared libggml-base.so: it loaded none, or ggml is linked into the program itself (then use a build with shared libraries, cmake -DBUILD_SHARED_LIBS=ON)".into(),
            (true, Some(path)) => format!("{path} was opened, and not evaluated: let the program write a token first"),
        })
    }
}
