//! Options of llama.cpp's programs in a command.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, ensure};
use sidecar_core::text;

use crate::launch::executable::{Executable, is_ours};

/// An option of llama.cpp, under the names of its programs and versions.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Name {
    names: &'static [&'static str],
    has_value: bool,
}

const fn valued(names: &'static [&'static str]) -> Name {
    Name {
        names,
        has_value: true,
    }
}

const fn bare(names: &'static [&'static str]) -> Name {
    Name {
        names,
        has_value: false,
    }
}

pub const MODEL: Name = valued(&["--model", "-m"]);
pub const THREADS: Name = valued(&["--threads", "-t"]);
pub const BATCH_THREADS: Name = valued(&["--threads-batch", "-tb"]);
pub const BATCH: Name = valued(&["--ubatch-size", "-ub"]);
pub const LOGICAL_BATCH: Name = valued(&["--batch-size", "-b"]);
pub const NO_REPACK: Name = bare(&["--no-repack", "-nr"]);
/// llama-bench has a value for it.
pub const REPACK: Name = valued(&["--repack"]);
pub const NO_MMAP: Name = bare(&["--no-mmap"]);
pub const LOAD_MODE: Name = valued(&["--load-mode", "-lm"]);
pub const GPU_LAYERS: Name = valued(&["--gpu-layers", "--n-gpu-layers", "-ngl"]);
pub const HOST_LAYERS: Name = valued(&["--n-cpu-moe", "-ncmoe"]);
pub const ALL_HOST: Name = bare(&["--cpu-moe", "-cmoe"]);
pub const MOE_CACHE: Name = valued(&["--moe-cache-mib"]);

/// Prints the GPUs, and ends the program.
const LIST_DEVICES: Name = bare(&["--list-devices"]);

/// The options that a program has.
pub struct Known {
    program: PathBuf,
    help: String,
}

impl Known {
    /// Reads the help of a program.
    pub fn of(words: &[OsString]) -> Result<Known> {
        let program = Executable::find(&words[0])?.path;
        let name = program.file_name().unwrap_or_default().to_string_lossy();
        ensure!(
            !is_ours(&words[0]),
            "'plan' tries 'llama-sidecar run' itself: pass the program and its arguments alone"
        );
        ensure!(
            name.contains("llama-"),
            "{name} is none of llama.cpp's programs, whose options are known: pass llama-server, llama-completion, llama-cli or llama-bench with the model, and use what it prints; 'llama-sidecar compare' measures any program"
        );
        let help = printed(&program, "--help")?;
        let known = Known { program, help };
        ensure!(
            known.has(THREADS),
            "{} --help does not list --threads: it is no program of llama.cpp, or does not start",
            text::path(&known.program)
        );
        Ok(known)
    }

    /// Returns the free memory of the GPUs that the program lists; `None` without one.
    pub fn free_memory_of_gpus(&self) -> Result<Option<u64>> {
        Ok(match self.name(LIST_DEVICES) {
            Some(option) => free_memory(&printed(&self.program, option)?),
            None => None,
        })
    }

    /// Returns the first name of an option that the program has.
    fn name(&self, of: Name) -> Option<&'static str> {
        let words = || {
            self.help
                .split(|c: char| c.is_whitespace() || matches!(c, ',' | '|' | '[' | ']'))
        };
        of.names
            .iter()
            .copied()
            .find(|name| words().any(|word| word == *name))
    }

    pub fn has(&self, of: Name) -> bool {
        self.name(of).is_some()
    }

    /// Replaces an option in a command, if the program has it and the value differs from the one that it has.
    pub fn set(&self, words: &mut Vec<OsString>, of: Name, value: &str) {
        let Some(name) = self.name(of) else {
            return;
        };
        if value_in(words, of).is_some_and(|known| known == value) {
            return;
        }
        remove(words, of);
        words.extend([name, value].map(OsString::from));
    }

    /// Adds an option without a value, if the program has it.
    pub fn add(&self, words: &mut Vec<OsString>, of: Name) {
        if let Some(name) = self.name(of) {
            remove(words, of);
            words.push(name.into());
        }
    }
}

/// Returns what a program prints with an option with which it ends at once.
fn printed(program: &Path, option: &str) -> Result<String> {
    let output = Command::new(program)
        .arg(option)
        .stdin(Stdio::null())
        .output()
        .with_context(|| format!("cannot run {}", text::path(program)))?;
    let both = [output.stdout, output.stderr].concat();
    Ok(String::from_utf8_lossy(&both).into_owned())
}

/// Sums the last numbers of lines such as `CUDA0: name (24564 MiB, 23000 MiB free)`.
fn free_memory(list: &str) -> Option<u64> {
    let free = list.lines().filter_map(|line| {
        let number = line
            .trim_end()
            .strip_suffix(" MiB free)")?
            .rsplit(' ')
            .next()?;
        number.parse::<u64>().ok()?.checked_shl(20)
    });
    free.reduce(u64::saturating_add)
}

/// Returns the indices of the uses of an option, and the values that are in the same word.
fn uses(
    words: &[OsString],
    of: Name,
) -> impl DoubleEndedIterator<Item = (usize, Option<OsString>)> {
    let found = move |(at, word): (usize, &OsString)| {
        let word = word.as_bytes();
        let name = |name: &[u8]| of.names.iter().any(|known| known.as_bytes() == name);
        if name(word) {
            return Some((at, None));
        }
        let equals = word.iter().position(|&byte| byte == b'=')?;
        let value = OsStr::from_bytes(&word[equals + 1..]);
        let is = of.has_value && name(&word[..equals]);
        is.then(|| (at, Some(value.to_owned())))
    };
    words.iter().enumerate().skip(1).filter_map(found)
}

/// Returns the last use of an option.
fn find(words: &[OsString], of: Name) -> Option<(usize, Option<OsString>)> {
    uses(words, of).next_back()
}

/// Whether a command has an option.
pub fn is_in(words: &[OsString], of: Name) -> bool {
    find(words, of).is_some()
}

/// Returns the value of an option in a command; the last one counts.
pub fn value_in(words: &[OsString], of: Name) -> Option<OsString> {
    let (at, value) = find(words, of)?;
    value.or_else(|| words.get(at + 1).cloned())
}

/// Returns the number that an option has in a command.
pub fn number_in(words: &[OsString], of: Name) -> Option<u64> {
    value_in(words, of)?.to_str()?.parse().ok()
}

/// Removes an option from a command.
pub fn remove(words: &mut Vec<OsString>, of: Name) {
    while let Some((at, value)) = find(words, of) {
        words.remove(at);
        if of.has_value && value.is_none() && at < words.len() {
            words.remove(at);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(text: &str) -> Vec<OsString> {
        text.split(' ').map(OsString::from).collect()
    }

    fn text(words: &[OsString]) -> String {
        let words: Vec<_> = words.iter().map(|word| word.to_string_lossy()).collect();
        words.join(" ")
    }

    #[test]
    fn options_are_replaced_under_all_their_names() {
        let known = Known {
            program: PathBuf::new(),
            help:
                "-t,    --threads N   threads\n-tb, --threads-batch N\n--repack, -nr, --no-repack"
                    .into(),
        };
        let mut command = words("llama-server -m x -t 4 --threads=8 -c 512");
        assert_eq!(number_in(&command, THREADS), Some(8));
        known.set(&mut command, THREADS, "2");
        known.set(&mut command, BATCH, "512");
        known.add(&mut command, NO_REPACK);
        assert_eq!(
            text(&command),
            "llama-server -m x -c 512 --threads 2 --no-repack"
        );
        let before = command.clone();
        known.set(&mut command, THREADS, "2");
        assert_eq!(command, before);
        remove(&mut command, THREADS);
        assert!(!is_in(&command, THREADS) && is_in(&command, MODEL));
        assert_eq!(value_in(&words("p -m"), MODEL), None);
    }

    #[test]
    fn free_memory_of_all_gpus_is_summed() {
        let list = "Available devices:\n  CUDA0: NVIDIA (x) (24564 MiB, 23000 MiB free)\n  CUDA1: y (8 MiB, 7 MiB free)\n";
        assert_eq!(free_memory(list), Some(23007 << 20));
        assert_eq!(free_memory("Available devices:\n  (none)\n"), None);
    }
}
