//! Events that the drop-in wrote about the processes of a command.

use std::collections::{BTreeMap, BTreeSet};
use std::os::unix::fs::FileExt;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::ExitStatus;

use anyhow::{Context, Result};
use rustix::fs::{FallocateFlags, fallocate};
use rustix::io::Errno;
use sidecar_core::protocol::{Entry, Event, NoEffect, StreamFigures};
use sidecar_core::signals::without_write_signals;
use tempfile::NamedTempFile;

use crate::temporary;

/// The variable that names the file of a [`Journal`].
pub const JOURNAL: &str = "LLAMA_SIDECAR_JOURNAL";

/// A file to which the drop-in appends events.
pub struct Journal(NamedTempFile);

/// The events so far.
pub struct Events(Vec<Entry>);

/// Why it is not known whether experts are streamed.
pub const UNKNOWN_YET: &str =
    "not known, because the first evaluation did not end: pass a longer --run-time";

/// Whether a program ended with an error of its own: users end programs that live with a signal.
fn has_failed(status: ExitStatus) -> bool {
    let by_user = [libc::SIGHUP, libc::SIGINT, libc::SIGTERM].map(Some);
    !status.success() && !by_user.contains(&status.signal())
}

impl Journal {
    /// Makes a file in the folder for temporary files. Where that is read-only: in the folder of the
    /// user's session, or in memory. Later temporary files of this process are there, too.
    pub fn new() -> Result<Journal> {
        let other = || {
            let session = std::env::var_os("XDG_RUNTIME_DIR").map(PathBuf::from);
            let folders = session.into_iter().chain([PathBuf::from("/dev/shm")]);
            let mut journals = folders.filter_map(|folder| {
                let journal = Journal::in_folder(&folder).ok()?;
                let _ = tempfile::env::override_temp_dir(&folder);
                Some(journal)
            });
            journals.next()
        };
        let first = Journal::in_folder(&tempfile::env::temp_dir());
        first.or_else(|error| other().ok_or(error))
    }

    /// Makes a file that has space for events, so that one without events means that there were none.
    pub fn in_folder(folder: &Path) -> Result<Journal> {
        const SPACE: u64 = 64 << 10;
        /// What the names of journals start with.
        const PREFIX: &str = "llama-sidecar-events-";
        let made = temporary::file(folder, PREFIX).and_then(|file| {
            without_write_signals(|| {
                match fallocate(file.as_file(), FallocateFlags::KEEP_SIZE, 0, SPACE) {
                    Ok(()) | Err(Errno::OPNOTSUPP | Errno::NOSYS) => {}
                    Err(error) => return Err(error.into()),
                }
                // There can be a limit of file sizes, too.
                file.as_file().write_all_at(b"{", SPACE - 1)?;
                file.as_file().set_len(0)
            })?;
            Ok(file)
        });
        Ok(Journal(made.context(temporary::NOT_CREATED)?))
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

    /// Returns the functions at which calls of a program are seen, if ggml is linked into it; see [`Event::Linked`].
    pub fn linked(&self) -> Option<&[(String, Option<String>)]> {
        self.iter().find_map(|event| match event {
            Event::Linked { functions } => Some(functions.as_slice()),
            _ => None,
        })
    }

    /// Returns the paths of the evaluated models.
    pub fn models(&self) -> Vec<&str> {
        self.models_of(|_| true)
    }

    fn models_of(&self, is_process: impl Fn(u32) -> bool) -> Vec<&str> {
        let entries = self.0.iter().filter(|entry| is_process(entry.pid));
        let paths = entries.filter_map(|entry| match &entry.event {
            Event::Model { path, .. } => Some(path.as_str()),
            _ => None,
        });
        paths.collect()
    }

    /// Returns the number of tensors that differ from the loaded ones: of each model after its last
    /// reload, also if the program has freed the model at its end.
    pub fn differing(&self) -> usize {
        let mut last = BTreeMap::new();
        for entry in &self.0 {
            match &entry.event {
                Event::Reload { model, differ, .. } => last.insert((entry.pid, model), differ),
                Event::Freed { model } => last.remove(&(entry.pid, model)),
                _ => None,
            };
        }
        last.into_values().sum()
    }

    /// Returns the first figures of a model whose experts are streamed, or why they are not; `None` when
    /// there is no answer yet.
    pub fn streams(&self, model: &str) -> Option<Result<&StreamFigures, &str>> {
        self.iter().find_map(|event| match event {
            Event::StreamStart {
                path,
                obstacle,
                figures,
            } if path == model => Some(obstacle.as_deref().map_or(Ok(figures), Err)),
            _ => None,
        })
    }

    /// Returns the figures at the end of the first model whose experts were streamed.
    pub fn streamed(&self) -> Option<&StreamFigures> {
        self.iter().find_map(|event| match event {
            Event::Stream { figures, .. } => Some(figures),
            _ => None,
        })
    }

    /// Returns whether the experts of a model can be copied to a GPU, or why they cannot; `None`
    /// when there is no answer.
    pub fn post_fetches(&self, model: &str) -> Option<Result<(), &str>> {
        self.iter().find_map(|event| match event {
            Event::PostFetchStart { path, obstacle } if path == model => {
                Some(obstacle.as_deref().map_or(Ok(()), Err))
            }
            _ => None,
        })
    }

    /// Returns why no tensor of a model can be swapped, if so.
    pub fn hotswap_obstacle(&self) -> Option<&str> {
        self.iter().find_map(|event| match event {
            Event::HotSwapObstacle { obstacle, .. } => Some(obstacle.as_str()),
            _ => None,
        })
    }

    /// Returns what is known of experts that stay on a device.
    pub fn expert_cache(&self) -> Option<&Event> {
        self.iter()
            .find(|event| matches!(event, Event::ExpertCache { .. }))
    }

    /// Whether experts could stay on a device, and nothing is known of that yet.
    pub fn expects_expert_cache(&self) -> bool {
        let can = |event: &Event| matches!(event, Event::PostFetchStart { obstacle: None, .. });
        self.iter().any(can) && self.expert_cache().is_none()
    }

    /// Returns what was requested and had no effect, as far as further evaluations change nothing.
    pub fn no_effect(&self) -> impl Iterator<Item = &NoEffect> {
        self.iter().filter_map(|event| match event {
            Event::NoEffect { found } if !found.so_far => Some(found),
            _ => None,
        })
    }

    /// Returns what was requested and had no effect in the end, and the models of that process where another process has others.
    pub fn no_effect_by_process(&self) -> impl Iterator<Item = (&NoEffect, Option<String>)> {
        let all = self.models().len();
        self.0.iter().filter_map(move |entry| {
            let Event::NoEffect { found } = &entry.event else {
                return None;
            };
            let models = self.models_of(|pid| pid == entry.pid);
            let is_part = !models.is_empty() && models.len() < all;
            Some((found, is_part.then(|| models.join(", "))))
        })
    }

    /// Returns why the experts of a model are not streamed, or not known to be.
    pub fn stream_obstacle(&self) -> Option<String> {
        let mut streamed = false;
        for event in self.iter() {
            if let Event::Model {
                path,
                expert_layers: 1..,
                ..
            } = event
            {
                match self.streams(path) {
                    Some(Ok(_)) => streamed = true,
                    Some(Err(why)) => return Some(format!("{path}: {why}")),
                    None => {
                        return Some(format!(
                            "{path}: whether its experts are streamed is {UNKNOWN_YET}"
                        ));
                    }
                }
            }
        }
        (!streamed).then(|| "no model has routed experts to stream".into())
    }

    /// Returns why nothing could be done, and the next step. `ended` is the end of the program, if
    /// it ended by itself or by a signal of the user.
    pub fn obstacle(&self, ended: Option<ExitStatus>) -> Option<String> {
        if !self.models().is_empty() {
            return None;
        }
        if let Some(reason) = self.passive_reason() {
            return Some(reason.to_owned());
        }
        let opened = self.iter().find_map(|event| match event {
            Event::Opened { path } => Some(path),
            _ => None,
        });
        if let Some(status) = ended.filter(|status| has_failed(*status)) {
            let of_kill = match status.signal() {
                Some(libc::SIGKILL) => {
                    "if its memory was too small, the kernel has ended it: pass a larger --memory-limit, or leave out other programs of its control group; otherwise "
                }
                _ => "",
            };
            let Some(path) = opened else {
                return Some(format!(
                    "the program ended before it opened a model that the drop-in sees ({status}): {of_kill}correct the error that it printed; if it has used a model, see which of its functions 'llama-sidecar doctor -- COMMAND' finds"
                ));
            };
            return Some(format!(
                "the program ended before {path} was evaluated ({status}): {of_kill}correct the error that it printed, then try again"
            ));
        }
        Some(match (self.is_loaded(), opened) {
            (false, _) => "the loader did not load the drop-in: the program is linked statically or clears LD_PRELOAD; run 'llama-sidecar doctor -- COMMAND' for details".into(),
            (true, None) => "the program opened no model through a shared libggml-base.so: load a model, or, if ggml is linked into the program itself, use a program that is not stripped, or a build with shared libraries (cmake -DBUILD_SHARED_LIBS=ON)".into(),
            (true, Some(path)) => format!("{path} was opened but not evaluated: let the program generate a token first"),
        })
    }
}

#[cfg(test)]
impl From<Vec<Entry>> for Events {
    fn from(entries: Vec<Entry>) -> Events {
        Events(entries)
    }
}

#[cfg(test)]
impl Events {
    /// Events of one process.
    pub fn of(events: &[Event]) -> Events {
        let entries = events.iter().cloned();
        Events(entries.map(|event| Entry { pid: 1, event }).collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tensors_of_a_model_that_was_loaded_again_do_not_differ() {
        let reload = |model, differ| Event::Reload {
            model,
            differ,
            swapped: 1,
            returned: 0,
            refused: 0,
            failure: None,
        };
        let differing = |events: &[Event]| Events::of(events).differing();
        let mut events = vec![reload(1, 2), reload(2, 1), reload(1, 3)];
        assert_eq!(differing(&events), 4);
        events.push(Event::Freed { model: 1 });
        assert_eq!(differing(&events), 1);
    }

    #[test]
    fn experts_are_streamed_if_those_of_all_models_are() {
        let model = |path: &str, expert_layers| Event::Model {
            path: path.into(),
            files: 1,
            tensors: 1,
            expert_layers,
            predicting: None,
            experts_used: Vec::new(),
        };
        let start = |path: &str, obstacle: Option<&str>| Event::StreamStart {
            path: path.into(),
            obstacle: obstacle.map(str::to_owned),
            figures: StreamFigures::default(),
        };
        let obstacle = |events: &[Event]| Events::of(events).stream_obstacle();
        let (dense, moe) = (model("dense", 0), model("moe", 2));
        let none = obstacle(std::slice::from_ref(&dense)).expect("no experts");
        assert!(none.starts_with("no model has routed experts"), "{none}");
        let unknown = obstacle(std::slice::from_ref(&moe)).expect("not known");
        assert!(unknown.starts_with("moe: whether its experts"), "{unknown}");
        let works = [dense, moe.clone(), start("moe", None)];
        assert_eq!(obstacle(&works), None);
        let why = [moe, start("moe", Some("its experts are locked"))];
        assert_eq!(
            obstacle(&why).as_deref(),
            Some("moe: its experts are locked")
        );
    }
}
