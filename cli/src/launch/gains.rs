//! What comparisons on this machine have shown to make programs faster.
//!
//! `compare` notes the options of `run` with which a command is faster and computes the same logits.
//! `run` uses them when the same command has no options.

use std::ffi::OsString;
use std::path::PathBuf;

use anyhow::Result;
use serde::{Deserialize, Serialize};

use crate::launch::kept::{Kept, machine};

/// The list of gains.
const KEPT: Kept = Kept { name: "gains" };
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

/// Returns what makes a command faster on this machine.
pub fn of(words: &[OsString]) -> Option<Gain> {
    let (command, machine) = (deciding(words), machine());
    let mut known = KEPT.entries::<Gain>().into_iter();
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
    let before: Vec<Gain> = KEPT.entries();
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
    KEPT.write(gains)
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
