//! The work folder: its lock, the parameters of its measurements, and the measurements.
//!
//! A measurement is a line of `measurements.jsonl`, on disk before the next one begins. An end at
//! any moment loses at most the measurement in progress: an incomplete last line is removed.

use std::collections::BTreeMap;
use std::fs::{self, File, TryLockError};
use std::io::{self, ErrorKind, Read, Seek, SeekFrom, Write};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail, ensure};
use serde::{Deserialize, Serialize};
use sidecar_core::files::{self, Replace, folder_of};
use sidecar_core::protocol;
use sidecar_core::text;

use crate::evaluation::statistics::Statistics;

/// The base logits in a work folder.
pub const BASE_LOGITS: &str = "base.logits";

/// A measurement of a set of overlays.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Measurement {
    /// Identifies tensors and their sources.
    pub key: String,
    /// What was measured, for people.
    pub what: String,
    /// Time of the swap and of the evaluation, in seconds.
    pub seconds: f64,
    #[serde(flatten)]
    pub statistics: Statistics,
}

/// The measurements of a work folder. No other process uses the folder at the same time.
pub struct Record {
    file: File,
    known: BTreeMap<String, Measurement>,
    _lock: Lock,
}

impl Record {
    /// Locks a work folder and reads its measurements.
    pub fn open(folder: &Path) -> Result<Record> {
        let lock = lock(folder)?;
        let path = folder.join("measurements.jsonl");
        let explain = || format!("cannot use {}", text::path(&path));
        let mut file = files::append(&path).with_context(explain)?;
        let mut text = Vec::new();
        file.read_to_end(&mut text).with_context(explain)?;
        let complete = text
            .iter()
            .rposition(|byte| *byte == b'\n')
            .map_or(0, |at| at + 1);
        if complete < text.len() {
            file.set_len(complete as u64).with_context(explain)?;
            file.seek(SeekFrom::End(0)).with_context(explain)?;
        }
        let mut known = BTreeMap::new();
        for (at, line) in text[..complete].split(|byte| *byte == b'\n').enumerate() {
            if line.is_empty() {
                continue;
            }
            let found: Measurement = serde_json::from_slice(line).with_context(|| {
                format!(
                    "line {} of {} is damaged: remove this line; its measurement is then made again",
                    at + 1,
                    text::path(&path)
                )
            })?;
            known.insert(found.key.clone(), found);
        }
        Ok(Record {
            file,
            known,
            _lock: lock,
        })
    }

    /// Fails if the measurements in a work folder were made with other parameters. Without
    /// measurements, forgets what was made with them.
    pub fn check(&self, folder: &Path, parameters: &BTreeMap<&str, String>) -> Result<()> {
        let path = folder.join("parameters.json");
        let checked = check_parameters(&path, parameters);
        if checked.is_ok() || !self.known.is_empty() {
            return checked;
        }
        for made in [folder.join(BASE_LOGITS), path.clone()] {
            match fs::remove_file(&made) {
                Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                    return Err(error)
                        .with_context(|| format!("cannot remove {}", text::path(&made)));
                }
                _ => {}
            }
        }
        check_parameters(&path, parameters)
    }

    /// Returns an earlier measurement.
    pub fn find(&self, key: &str) -> Option<&Measurement> {
        self.known.get(key)
    }

    /// Adds a measurement, on disk.
    pub fn add(&mut self, measurement: Measurement) -> Result<()> {
        self.file
            .write_all(protocol::line(&measurement).as_bytes())
            .and_then(|()| self.file.sync_data())
            .context("cannot write a measurement to the work folder: free some space, and run the same command again")?;
        self.known.insert(measurement.key.clone(), measurement);
        Ok(())
    }
}

const LOCK: &str = "lock";

/// The lock of a work folder.
struct Lock(File);

impl Drop for Lock {
    /// Releases the lock, also for a child that was forked meanwhile: it has the descriptor until it
    /// executes its program.
    fn drop(&mut self) {
        let _ = self.0.unlock();
    }
}

fn lock(folder: &Path) -> Result<Lock> {
    let path = folder.join(LOCK);
    let explain = || format!("cannot lock {}", text::path(&path));
    let file = files::append(&path).with_context(explain)?;
    match file.try_lock() {
        Ok(()) => Ok(Lock(file)),
        Err(TryLockError::WouldBlock) => bail!(
            "another command uses {}: wait for its end, or name another folder with --work",
            text::path(folder)
        ),
        Err(TryLockError::Error(error)) => Err(error).with_context(explain),
    }
}

/// Compares the parameters with those of the earlier measurements; keeps them if there are none.
fn check_parameters(path: &Path, parameters: &BTreeMap<&str, String>) -> Result<()> {
    let text = match fs::read_to_string(path) {
        Err(error) if error.kind() == ErrorKind::NotFound => {
            return write_atomically(path, serde_json::to_string_pretty(parameters)?.as_bytes());
        }
        text => text.with_context(|| format!("cannot read {}", text::path(path)))?,
    };
    let earlier: BTreeMap<String, String> = serde_json::from_str(&text)
        .with_context(|| format!("{} is damaged: remove its folder", text::path(path)))?;
    for (name, value) in parameters {
        let before = earlier.get(*name).map_or("none", String::as_str);
        ensure!(
            before == value,
            "the measurements in {} were made with another {name} ({before}), now it is {value}: use the same {name}, or name another folder with --work",
            text::path(folder_of(path))
        );
    }
    Ok(())
}

/// Writes a file so that its path has the old or the new content at any moment.
pub fn write_atomically(path: &Path, content: &[u8]) -> Result<()> {
    let written = files::beside(path).and_then(|mut file| {
        file.write_all(content)?;
        files::persist(file, path, Replace::Any)
    });
    written.with_context(|| format!("cannot write {}", text::path(path)))?;
    Ok(())
}

/// Makes a folder and returns its absolute path. No other user may write in it.
pub fn make_folder(path: &Path) -> Result<PathBuf> {
    let made = fs::create_dir_all(path).and_then(|()| {
        let found = fs::metadata(path)?;
        files::check_owner(&found)?;
        if found.permissions().mode() & 0o002 != 0 {
            return Err(io::Error::other("all users can write in it"));
        }
        // Its files are replaced. The lock is the first one.
        match fs::read_dir(path)?.next().is_none() || path.join(LOCK).exists() {
            true => path.canonicalize(),
            false => Err(io::Error::other("it has other files")),
        }
    });
    made.with_context(|| {
        format!(
            "cannot use the work folder {}: name another one with --work",
            text::path(path)
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::evaluation::statistics::Figure;

    fn measurement(key: &str) -> Measurement {
        let figure = Figure {
            mean: 0.1,
            error: 1e-17,
        };
        Measurement {
            key: key.into(),
            what: "x".into(),
            seconds: 1.5,
            statistics: Statistics {
                kld: figure,
                same_top: figure,
                ppl: figure,
            },
        }
    }

    #[test]
    fn a_torn_line_is_removed_and_others_stay() {
        let folder = tempfile::tempdir().expect("a folder");
        let open = || Record::open(folder.path());
        let mut record = open().expect("a record");
        assert!(open().is_err_and(|error| error.to_string().contains("another command uses")));
        record.add(measurement("a")).expect("written");
        record.add(measurement("b")).expect("written");
        drop(record);
        let path = folder.path().join("measurements.jsonl");
        let text = fs::read_to_string(&path).expect("text");
        let second = text.find('\n').expect("a line") + 1;
        for end in second..text.len() {
            fs::write(&path, &text[..end]).expect("written");
            let mut record = open().expect("a record");
            assert_eq!(record.find("a"), Some(&measurement("a")));
            assert_eq!(record.find("b"), None);
            record.add(measurement("b")).expect("written");
            drop(record);
            assert_eq!(fs::read_to_string(&path).expect("text"), text);
        }
    }

    #[test]
    fn other_parameters_are_refused_by_name() {
        let folder = tempfile::tempdir().expect("a folder");
        let with = |text: &str| BTreeMap::from([("chunks", "1".into()), ("text", text.to_owned())]);
        let mut record = Record::open(folder.path()).expect("a record");
        // Without measurements, other parameters take the place of the first.
        record.check(folder.path(), &with("b")).expect("the first");
        record.check(folder.path(), &with("a")).expect("others");
        record.add(measurement("a")).expect("written");
        record.check(folder.path(), &with("a")).expect("the same");
        let error = record.check(folder.path(), &with("b")).unwrap_err();
        assert!(
            error.to_string().contains("another text (a), now it is b"),
            "{error}"
        );
    }
}
