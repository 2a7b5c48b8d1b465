//! What comparisons on this machine have shown to make programs faster.
//!
//! `compare` notes the options of `run` with which a command is faster and computes the same logits.
//! `run` uses them when the same command has no options.

use std::ffi::OsString;
use std::fs;
use std::path::PathBuf;

use anyhow::{Context, Result};
use rustix::system::uname;
use serde::{Deserialize, Serialize};
use sidecar_core::files;

/// The name of the file in the folder for data of the user.
const FILE: &str = "llama-sidecar/gains.json";
/// The start of the file.
const START: &str = "{\"llama_sidecar_gains\":1";
/// Commands that are kept.
const MOST: usize = 1000;
/// Options that change neither speed nor results, with a value each.
const OTHERS: [&str; 8] = [
    "--port",
    "--host",
    "--api-key",
    "--alias",
    "-a",
    "-p",
    "--prompt",
    "--log-file",
];

/// What makes a command faster.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Gain {
    machine: String,
    command: Vec<String>,
    /// Options of `run`.
    pub flags: Vec<String>,
    /// How many times as fast the command is with them.
    pub faster: f64,
}

#[derive(Serialize, Deserialize)]
struct Gains {
    llama_sidecar_gains: u32,
    gains: Vec<Gain>,
}

/// Returns the words of a command that decide about its speed.
fn deciding(words: &[OsString]) -> Vec<String> {
    let mut is_value = false;
    let mut deciding = Vec::new();
    for word in words {
        let word = word.to_string_lossy();
        let is_other = OTHERS.contains(&&*word);
        if !std::mem::replace(&mut is_value, is_other) && !is_other {
            deciding.push(word.into_owned());
        }
    }
    deciding
}

fn machine() -> String {
    uname().nodename().to_string_lossy().into_owned()
}

/// Returns the path of the file; `None` without a folder of the user.
fn path() -> Option<PathBuf> {
    let folder = |name: &str| {
        let folder = std::env::var_os(name).filter(|folder| !folder.is_empty());
        folder.map(PathBuf::from)
    };
    let data = folder("XDG_DATA_HOME").or_else(|| Some(folder("HOME")?.join(".local/share")))?;
    Some(data.join(FILE))
}

/// Returns what is known. A file that cannot be read has nothing; a file of another user may not choose
/// options.
fn known() -> Vec<Gain> {
    let read = || {
        let file = files::open_trusted(&path()?).ok()?;
        let gains: Gains = serde_json::from_reader(std::io::BufReader::new(file)).ok()?;
        Some(gains.gains)
    };
    read().unwrap_or_default()
}

/// Returns what makes a command faster on this machine.
pub fn of(words: &[OsString]) -> Option<Gain> {
    let (command, machine) = (deciding(words), machine());
    let mut known = known().into_iter();
    known.find(|gain| gain.command == command && gain.machine == machine)
}

/// Notes what makes a command faster on this machine. `measured` are the options that were compared: those
/// among them that were noted before and are not found again are forgotten. Returns the path of the file if it
/// changed.
pub fn note(
    words: &[OsString],
    measured: &[&[String]],
    found: Option<(Vec<String>, f64)>,
) -> Result<Option<PathBuf>> {
    let Some(path) = path() else {
        return Ok(None);
    };
    let before = known();
    let (command, machine) = (deciding(words), machine());
    let mut gains = before.clone();
    gains.retain(|gain| {
        let is_same = gain.command == command && gain.machine == machine;
        !is_same || found.is_none() && !measured.contains(&&gain.flags[..])
    });
    gains.extend(found.map(|(flags, faster)| Gain {
        machine,
        command,
        flags,
        faster,
    }));
    if gains == before {
        return Ok(None);
    }
    let first = gains.len().saturating_sub(MOST);
    let gains = Gains {
        llama_sidecar_gains: 1,
        gains: gains.split_off(first),
    };
    let folder = files::folder_of(&path);
    fs::create_dir_all(folder).with_context(|| format!("cannot create {}", folder.display()))?;
    let text = serde_json::to_string(&gains)?;
    files::write(&path, text.as_bytes(), |start| {
        start.starts_with(START.as_bytes())
    })
    .with_context(|| format!("cannot write {}", path.display()))?;
    Ok(Some(path))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_port_does_not_decide_about_the_speed() {
        let words = |text: &str| text.split(' ').map(OsString::from).collect::<Vec<_>>();
        let one = deciding(&words("server -m x --port 8080 -c 512"));
        assert_eq!(one, ["server", "-m", "x", "-c", "512"]);
        assert_eq!(
            one,
            deciding(&words("server --host h -m x -c 512 --port 1"))
        );
        assert_ne!(one, deciding(&words("server -m x -c 1024")));
    }
}
