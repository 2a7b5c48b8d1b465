//! Every `LLAMA_*` variable that the library reads, parsed once.
//!
//! | variable | default | meaning |
//! |---|---|---|
//! | `LLAMA_HOTSWAP_ENABLED` | off | register the files of tensors at load and allow reloads; on when set and neither empty nor `0` |
//! | `LLAMA_SIDECAR_LOG` | `warn` | what goes to the log: `off`, `error`, `warn`, `info`, `debug` |
//!
//! A value that does not parse is logged with what is allowed, counted, and the
//! default is used. A set-uid process reads none of them: its environment belongs
//! to somebody else.

use std::ffi::OsString;

use once_cell::sync::Lazy;

use crate::log::Level;

/// The settings in force.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Config {
    /// `LLAMA_HOTSWAP_ENABLED`.
    pub hotswap: bool,
    /// `LLAMA_SIDECAR_LOG`.
    pub log: Level,
    /// One sentence for each variable whose value was not understood.
    pub rejected: Vec<String>,
}

impl Config {
    /// The settings of this process, read from its environment on first use.
    pub fn get() -> &'static Config {
        static CONFIG: Lazy<Config> = Lazy::new(|| {
            // SAFETY: getauxval only reads a value that the kernel left at start.
            let secure = unsafe { libc::getauxval(libc::AT_SECURE) } != 0;
            Config::parse(|name| std::env::var_os(name).filter(|_| !secure))
        });
        &CONFIG
    }

    fn parse(variable: impl Fn(&str) -> Option<OsString>) -> Config {
        let mut rejected = Vec::new();
        let set = |name: &str| variable(name).filter(|value| !value.is_empty());
        let hotswap = set("LLAMA_HOTSWAP_ENABLED").is_some_and(|value| value != "0");
        let log = set("LLAMA_SIDECAR_LOG").map_or(Level::Warn, |value| {
            let level = value.to_str().and_then(Level::from_name);
            level.unwrap_or_else(|| {
                rejected.push(format!(
                    "LLAMA_SIDECAR_LOG={value:?}: expected off, error, warn, info or debug; using warn"
                ));
                Level::Warn
            })
        });
        Config {
            hotswap,
            log,
            rejected,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(variables: &[(&str, &str)]) -> Config {
        Config::parse(|name| {
            let found = variables.iter().find(|(key, _)| *key == name)?;
            Some(found.1.into())
        })
    }

    #[test]
    fn defaults_without_variables() {
        let config = parse(&[]);
        assert_eq!((config.hotswap, config.log), (false, Level::Warn));
        assert!(config.rejected.is_empty());
    }

    #[test]
    fn hotswap_is_on_when_set_and_not_zero() {
        for (value, on) in [("1", true), ("yes", true), ("0", false), ("", false)] {
            assert_eq!(
                parse(&[("LLAMA_HOTSWAP_ENABLED", value)]).hotswap,
                on,
                "{value}"
            );
        }
    }

    #[test]
    fn a_bad_value_is_named_and_the_default_used() {
        let config = parse(&[("LLAMA_SIDECAR_LOG", "loud")]);
        assert_eq!(config.log, Level::Warn);
        assert_eq!(config.rejected.len(), 1);
        assert!(config.rejected[0].contains("LLAMA_SIDECAR_LOG=\"loud\""));
        assert_eq!(parse(&[("LLAMA_SIDECAR_LOG", "debug")]).log, Level::Debug);
    }
}
