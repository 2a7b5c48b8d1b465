//! Events that the drop-in wrote about the processes of a command.

use std::collections::BTreeSet;
use std::path::Path;

use anyhow::{Context, Result};
use llama_sidecar::protocol::{Entry, Event};
use tempfile::NamedTempFile;

/// A file to which the drop-in appends events.
pub struct Journal(NamedTempFile);

/// The events so far.
pub struct Events(Vec<Entry>);

impl Journal {
    pub fn new() -> Result<Journal> {
        let file = NamedTempFile::with_prefix("llama-sidecar-");
        Ok(Journal(file.context(
            "cannot create a temporary file: set TMPDIR to a folder with free space",
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
    /// Returns the events in the order in which they happened.
    pub fn iter(&self) -> impl Iterator<Item = &Event> + Clone {
        self.0.iter().map(|entry| &entry.event)
    }

    /// Returns the processes with events.
    pub fn processes(&self) -> BTreeSet<u32> {
        self.0.iter().map(|entry| entry.pid).collect()
    }

    /// Returns whether the loader loaded the drop-in.
    pub fn is_loaded(&self) -> bool {
        self.iter()
            .any(|event| matches!(event, Event::Loaded { .. }))
    }

    /// Returns why the drop-in does nothing in this program, if it found a reason.
    pub fn passive_reason(&self) -> Option<&str> {
        self.iter().find_map(|event| match event {
            Event::Passive { reason } => Some(reason.as_str()),
            _ => None,
        })
    }

    /// Returns the paths of the evaluated models.
    pub fn models<'a>(&'a self) -> Vec<&'a str> {
        let path = |event: &'a Event| match event {
            Event::Model { path, .. } => Some(path.as_str()),
            _ => None,
        };
        self.iter().filter_map(path).collect()
    }

    /// Returns whether the experts of a model are streamed, or why they are not; `None` when
    /// there is no answer yet.
    pub fn streams(&self, model: &str) -> Option<Result<(), &str>> {
        self.iter().find_map(|event| match event {
            Event::StreamStart { path, obstacle } if path == model => {
                Some(obstacle.as_deref().map_or(Ok(()), Err))
            }
            _ => None,
        })
    }

    /// Returns why nothing could be done, and the next step.
    pub fn obstacle(&self) -> Option<String> {
        if let Some(reason) = self.passive_reason() {
            return Some(format!("{reason}; please report the version of llama.cpp"));
        }
        if !self.models().is_empty() {
            return None;
        }
        let opened = self.iter().find_map(|event| match event {
            Event::Opened { path } => Some(path),
            _ => None,
        });
        Some(match (self.is_loaded(), opened) {
            (false, _) => "the loader did not load the drop-in: the program is linked statically or clears LD_PRELOAD; run 'llama-sidecar doctor -- COMMAND' for details".into(),
            (true, None) => "the program opened no model through a shared libggml-base.so: load a model, or, if ggml is linked into the program itself, use a build with shared libraries (cmake -DBUILD_SHARED_LIBS=ON)".into(),
            (true, Some(path)) => format!("{path} was opened but not evaluated: let the program generate a token first"),
        })
    }
}
