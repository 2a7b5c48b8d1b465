//! The values of an environment.

use std::ffi::{CString, OsStr, OsString};
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;
use std::time::Duration;

use super::settings::{CacheSize, ExpertStream, Misses, OwnPath, PostFetchMode};
use super::variables::{self, DefaultValue, Variable, is_on};

/// The values of an environment, in the grammar of [`VARIABLES`].
pub struct Values<F> {
    pub environment: F,
    pub rejected: Vec<String>,
    /// Those that are set to another value than their default.
    pub changed: Vec<&'static Variable>,
}

impl<F: Fn(&str) -> Option<OsString>> Values<F> {
    /// Returns the parsed value of a variable, or its default if that is a value.
    pub fn get<T>(&mut self, name: &str, parse: impl Fn(&OsStr) -> Result<T, String>) -> Option<T> {
        if let Some(value) = self.set(name) {
            match parse(&value) {
                Ok(parsed) => {
                    let variable = Variable::named(name);
                    if !variable.is_default(&value) {
                        self.changed.push(variable);
                    }
                    return Some(parsed);
                }
                Err(reason) => self.reject(name, &value, &reason, "using the default"),
            }
        }
        match Variable::named(name).default {
            DefaultValue::Value(value) => parse(OsStr::new(value)).ok(),
            DefaultValue::Described(_) => None,
        }
    }

    pub fn set(&self, name: &str) -> Option<OsString> {
        (self.environment)(name).filter(|value| !value.is_empty())
    }

    pub fn reject(&mut self, name: &str, value: &OsStr, reason: &str, effect: &str) {
        let sentence = format!("{name}={value:?}: {reason}; {effect}");
        self.rejected.push(sentence);
    }

    pub fn switch(&mut self, name: &str) -> bool {
        self.get(name, |value| Ok(is_on(value))).unwrap_or(false)
    }

    pub fn number(&mut self, name: &str) -> Option<u64> {
        let variable = Variable::named(name);
        self.get(name, |value| variable.number(value))
    }

    pub fn mib(&mut self, name: &str) -> Option<u64> {
        self.number(name).map(|mib| mib << 20)
    }

    /// Returns a time in a unit; `None` for 0.
    pub fn interval(&mut self, name: &str, unit: fn(u64) -> Duration) -> Option<Duration> {
        self.number(name).filter(|&number| number > 0).map(unit)
    }

    pub fn path(&mut self, name: &str) -> Option<PathBuf> {
        self.get(name, |value| Ok(value.into()))
    }

    pub fn own_path(&mut self, name: &str) -> Option<OwnPath> {
        self.get(name, |value| Ok(OwnPath(value.into())))
    }

    /// Returns `Auto` where the variable is not set and `implied` by another one.
    pub fn expert_stream(&mut self, implied: bool) -> ExpertStream {
        let name = "LLAMA_EXPERT_STREAM";
        if implied && self.set(name).is_none() {
            return ExpertStream::Auto;
        }
        let words = [
            ("on", ExpertStream::On),
            ("auto", ExpertStream::Auto),
            ("needed", ExpertStream::Needed),
        ];
        self.choice(name, words, ExpertStream::Off)
    }

    /// Returns `Offloaded` where the variable is not set and `LLAMA_POSTFETCH_ENABLE` is set and on.
    pub fn postfetch_mode(&mut self) -> PostFetchMode {
        let name = "LLAMA_POSTFETCH_MODE";
        let enabled = self.set("LLAMA_POSTFETCH_ENABLE");
        if enabled.is_some_and(|value| is_on(&value)) && self.set(name).is_none() {
            return PostFetchMode::Offloaded;
        }
        let words = [
            ("on", PostFetchMode::Offloaded),
            ("down", PostFetchMode::Down),
            ("all", PostFetchMode::All),
        ];
        self.choice(name, words, PostFetchMode::Off)
    }

    pub fn misses(&mut self) -> Misses {
        let words = [("cpu", Misses::Cpu), ("fetch", Misses::Fetch)];
        self.choice("LLAMA_POSTFETCH_CACHE_MISSES", words, Misses::Auto)
    }

    /// Returns `Auto` where the variable is not set and there is a trace.
    pub fn cache(&mut self, has_trace: bool) -> Option<CacheSize> {
        let name = "LLAMA_POSTFETCH_CACHE_MB";
        if has_trace && self.set(name).is_none() {
            return Some(CacheSize::Auto);
        }
        match self.get(name, variables::memory)? {
            None => Some(CacheSize::Auto),
            Some(0) => None,
            Some(bytes) => Some(CacheSize::Bytes(bytes)),
        }
    }

    /// Returns what a word of a variable stands for; `otherwise` for its other words.
    pub fn choice<T: Copy, const N: usize>(
        &mut self,
        name: &str,
        words: [(&str, T); N],
        otherwise: T,
    ) -> T {
        let variable = Variable::named(name);
        let parse = |value: &OsStr| {
            variable.check(value)?;
            let known = words.iter().find(|(word, _)| value == *word);
            Ok(known.map_or(otherwise, |(_, stands_for)| *stands_for))
        };
        self.get(name, parse).unwrap_or(otherwise)
    }

    /// Returns text that is checked and kept as it is.
    pub fn text(&mut self, name: &str) -> Option<CString> {
        let variable = Variable::named(name);
        self.get(name, |value| {
            variable.check(value)?;
            CString::new(value.as_bytes()).map_err(|error| error.to_string())
        })
    }
}
