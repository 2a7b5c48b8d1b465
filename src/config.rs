//! Every `LLAMA_*` variable that the library reads, parsed once.
//!
//! | variable | default | meaning |
//! |---|---|---|
//! | `LLAMA_HOTSWAP_ENABLED` | off | register the files of tensors at load and allow reloads; on when set and neither empty nor `0` |
//! | `LLAMA_HOTSWAP_POLL_MS` | `1000` | drop-in: how often files are looked at, in ms; `0` = only when asked |
//! | `LLAMA_HOTSWAP_QUIET_MS` | `2000` | how long a changed file that was found by watching must stay the same before it is used, in ms |
//! | `LLAMA_HOTSWAP_CHECK` | `1` | refuse a file in which tensors hold rows of zeros or non-finite scales that the tensors in use do not; `0`: use it |
//! | `LLAMA_HOTSWAP_KV` | `keep` | drop-in: what happens to cached context after a swap; only `keep` is accepted |
//! | `LLAMA_SIDECAR_CONTROL` | none | drop-in: path of the control socket |
//! | `LLAMA_EXPERT_TRACE_STATS` | off | drop-in: count which experts are used; a summary at the end |
//! | `LLAMA_EXPERT_TRACE_NAMES` | off | drop-in, with one of the others: log the name of each expert that an evaluation uses |
//! | `LLAMA_EXPERT_TRACE_PER_LAYER` | off | drop-in: the summary also layer by layer |
//! | `LLAMA_EXPERT_TRACE_OUTPUT` | none | drop-in: count, and write the counts there at the end: JSON, or CSV by extension |
//! | `LLAMA_EXPERT_TRACE_EVERY_S` | `0` | drop-in: write the output also every so many seconds; 0 = at the end only |
//! | `LLAMA_POSTFETCH_ENABLE` | `1` | `0`: experts are never fetched |
//! | `LLAMA_POSTFETCH_FORCE_CPU` | `0` | `1`: every answer is "compute on the CPU", and no device is touched |
//! | `LLAMA_POSTFETCH_BLOCK_ON_MISS` | `1` | wait for a copy that is under way; `0`: fall back to the CPU |
//! | `LLAMA_POSTFETCH_MAX_TRANSFERS` | `8` | copies under way at a time, 1 to 1024 |
//! | `LLAMA_POSTFETCH_SCRATCHPAD_MB` | `0` | device memory for experts, in MiB; 0: what the active experts of the largest layer need |
//! | `LLAMA_POSTFETCH_USE_DEDICATED_STREAMS` | `1` | copies and kernels in streams of their own; `0`: in one |
//! | `LLAMA_POSTFETCH_CPU_LIMIT` | physical cores | of a layer's experts, how many have gate and up computed on the CPU; advice for the host |
//! | `LLAMA_POSTFETCH_PAGE_LOCK` | `1` | page-lock the model's down-projections where they are; `0`: copy through page-locked buffers |
//! | `LLAMA_POSTFETCH_SPIN_US` | `2000`, or `0` | how long the fetching thread looks out for work before it sleeps, in microseconds; by default not at all where there are no more hardware threads than cores |
//! | `LLAMA_POSTFETCH_DEBUG` | `0` | log every transfer |
//! | `LLAMA_SIDECAR_SPLIT` | none | cut matrices over the devices after the first, in these proportions: `3,1,1` |
//! | `LLAMA_SIDECAR_CPU_MOE` | off | keep routed experts in host memory; on when set and neither empty nor `0` |
//! | `LLAMA_SIDECAR_OVERRIDE_TENSOR` | none | tensors whose name matches go to a device, whole: `ffn_.*_exps=0;attn=2` |
//! | `LLAMA_SIDECAR_STAGING_MB` | `0` | the most that a reload stages before it switches, in MiB; 0 for no limit |
//! | `LLAMA_SIDECAR_MEMORY_MB` | what is free | the most that swapped tensors may hold beside the model, what a reload stages included, in MiB; by default what the machine and the control group can still give |
//! | `LLAMA_SIDECAR_JOURNAL` | none | drop-in: path of a file to which `llama-sidecar run` and `doctor` have their events appended |
//! | `LLAMA_SIDECAR_LOG` | `warn` | what goes to the log: `off`, `error`, `warn`, `info`, `debug` |
//!
//! In the paths of the control socket and of the trace, `%p` stands for the process id: programs
//! that start others of their kind need paths of their own for each.
//!
//! A value that does not parse is logged with what is allowed, counted, and the
//! default is used. A set-uid process reads none of them: its environment belongs
//! to somebody else.

use std::ffi::{CString, OsStr, OsString};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::PathBuf;
use std::time::Duration;

use log::LevelFilter;
use once_cell::sync::Lazy;
use regex::Regex;

/// What the `LLAMA_POSTFETCH_*` variables say.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PostFetch {
    /// `LLAMA_POSTFETCH_ENABLE`.
    pub enable: bool,
    /// `LLAMA_POSTFETCH_FORCE_CPU`.
    pub force_cpu: bool,
    /// `LLAMA_POSTFETCH_BLOCK_ON_MISS`.
    pub block_on_miss: bool,
    /// `LLAMA_POSTFETCH_MAX_TRANSFERS`.
    pub max_transfers: u32,
    /// `LLAMA_POSTFETCH_SCRATCHPAD_MB`, in bytes; 0 for automatic.
    pub scratchpad_bytes: u64,
    /// `LLAMA_POSTFETCH_USE_DEDICATED_STREAMS`.
    pub dedicated_streams: bool,
    /// `LLAMA_POSTFETCH_CPU_LIMIT`.
    pub cpu_limit: u32,
    /// `LLAMA_POSTFETCH_PAGE_LOCK`.
    pub page_lock: bool,
    /// `LLAMA_POSTFETCH_SPIN_US`.
    pub spin: Duration,
    /// `LLAMA_POSTFETCH_DEBUG`.
    pub debug: bool,
}

/// The settings in force.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Config {
    /// `LLAMA_HOTSWAP_ENABLED`.
    pub hotswap: bool,
    /// `LLAMA_HOTSWAP_POLL_MS`; `None` when files are looked at only when asked.
    pub poll: Option<Duration>,
    /// `LLAMA_HOTSWAP_QUIET_MS`.
    pub quiet: Duration,
    /// `LLAMA_HOTSWAP_CHECK`.
    pub check_blocks: bool,
    /// `LLAMA_SIDECAR_CONTROL`.
    pub control: Option<PathBuf>,
    /// `LLAMA_EXPERT_TRACE_STATS`.
    pub trace_summary: bool,
    /// `LLAMA_EXPERT_TRACE_NAMES`.
    pub trace_names: bool,
    /// `LLAMA_EXPERT_TRACE_PER_LAYER`.
    pub trace_per_layer: bool,
    /// `LLAMA_EXPERT_TRACE_OUTPUT`.
    pub trace_output: Option<PathBuf>,
    /// `LLAMA_EXPERT_TRACE_EVERY_S`; `None` when it is written at the end only.
    pub trace_every: Option<Duration>,
    /// `LLAMA_POSTFETCH_*`.
    pub postfetch: PostFetch,
    /// `LLAMA_SIDECAR_SPLIT`, as it is: checked, but kept as text.
    pub split: Option<CString>,
    /// `LLAMA_SIDECAR_CPU_MOE`.
    pub cpu_moe: bool,
    /// `LLAMA_SIDECAR_OVERRIDE_TENSOR`, as it is: checked, but kept as text.
    pub override_tensor: Option<CString>,
    /// `LLAMA_SIDECAR_STAGING_MB`, in bytes.
    pub staging_bytes: u64,
    /// `LLAMA_SIDECAR_MEMORY_MB`, in bytes; `None` for what is free.
    pub memory_bytes: Option<u64>,
    /// `LLAMA_SIDECAR_JOURNAL`.
    pub journal: Option<PathBuf>,
    /// `LLAMA_SIDECAR_LOG`.
    pub log: LevelFilter,
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
        let rejected = std::cell::RefCell::new(Vec::new());
        let set = |name: &str| variable(name).filter(|value| !value.is_empty());
        let on = |name: &str| set(name).is_some_and(|value| value != "0");
        // The value, if `accept` does not say what is wrong with it.
        let checked = |name: &str, accept: &dyn Fn(&str) -> Result<(), String>| {
            let value = set(name)?;
            let accepted = match value.to_str() {
                Some(text) => accept(text),
                None => Err("expected UTF-8".into()),
            };
            if let Err(why) = accepted {
                let sentence = format!("{name}={value:?}: {why}; using the default");
                rejected.borrow_mut().push(sentence);
                return None;
            }
            value.into_string().ok()
        };
        let owned = |text: String| CString::new(text).ok();
        let path = |name: &str| set(name).map(|value| with_process_id(&value));

        let log = checked("LLAMA_SIDECAR_LOG", &|text| {
            let found = level(text).map(|_| ());
            found.ok_or_else(|| "expected off, error, warn, info or debug".into())
        });
        let split_text = checked("LLAMA_SIDECAR_SPLIT", &|text| split(text).map(|_| ()));
        let override_tensor = checked("LLAMA_SIDECAR_OVERRIDE_TENSOR", &|text| {
            overrides(text).map(|_| ())
        });
        let mib = |text: &str| text.parse::<u64>().ok()?.checked_mul(1 << 20);
        let staging = checked("LLAMA_SIDECAR_STAGING_MB", &|text| {
            mib(text)
                .map(|_| ())
                .ok_or_else(|| "expected a number of MiB".into())
        });
        let poll = checked("LLAMA_HOTSWAP_POLL_MS", &|text| {
            let found = text.parse::<u64>().map(|_| ());
            found.map_err(|_| "expected a number of milliseconds, or 0".into())
        });
        let poll_ms = poll.and_then(|text| text.parse().ok()).unwrap_or(1000);
        let every = checked("LLAMA_EXPERT_TRACE_EVERY_S", &|text| {
            let found = text.parse::<u32>().map(|_| ());
            found.map_err(|_| "expected a number of seconds, or 0".into())
        });
        let every = every.and_then(|text| text.parse().ok()).unwrap_or(0);
        checked("LLAMA_HOTSWAP_KV", &|text| {
            match text {
            "keep" => Ok(()),
            "clear" => Err("programs such as llama-server keep a record of their own of what is cached, and would go on without their prompt: send requests with cache_prompt=false, or use 'llama-sidecar reload --server URL'".into()),
            _ => Err("expected keep".into()),
        }
        });
        let quiet = checked("LLAMA_HOTSWAP_QUIET_MS", &|text| {
            let found = text.parse::<u32>().map(|_| ());
            found.map_err(|_| "expected a number of milliseconds, or 0".into())
        });
        let quiet_ms = quiet.and_then(|text| text.parse().ok()).unwrap_or(2000);
        let memory = checked("LLAMA_SIDECAR_MEMORY_MB", &|text| {
            let found = mib(text).map(|_| ());
            found.ok_or_else(|| "expected a number of MiB".into())
        });
        let flag = |name: &str, default: bool| {
            let found = checked(name, &|text| match text {
                "0" | "1" => Ok(()),
                _ => Err("expected 0 or 1".into()),
            });
            found.map_or(default, |text| text == "1")
        };
        let number = |name: &str, most: u32, default: u32| {
            let parse = |text: &str| text.parse().ok().filter(|n| (1..=most).contains(n));
            let found = checked(name, &|text| {
                let found = parse(text).map(|_| ());
                found.ok_or_else(|| format!("expected a number from 1 to {most}"))
            });
            found.as_deref().and_then(parse).unwrap_or(default)
        };
        let scratchpad = checked("LLAMA_POSTFETCH_SCRATCHPAD_MB", &|text| {
            let found = mib(text).map(|_| ());
            found.ok_or_else(|| "expected a number of MiB".into())
        });
        let spin = checked("LLAMA_POSTFETCH_SPIN_US", &|text| {
            let found = text.parse::<u32>().map(|_| ());
            found.map_err(|_| "expected a number of microseconds, or 0".into())
        });
        let (cores, threads) = cores_and_threads();
        let default_spin = if threads > cores { 2000 } else { 0 };
        let spin = spin.and_then(|text| text.parse().ok());
        let postfetch = PostFetch {
            spin: Duration::from_micros(spin.unwrap_or(default_spin)),
            enable: flag("LLAMA_POSTFETCH_ENABLE", true),
            force_cpu: flag("LLAMA_POSTFETCH_FORCE_CPU", false),
            block_on_miss: flag("LLAMA_POSTFETCH_BLOCK_ON_MISS", true),
            max_transfers: number("LLAMA_POSTFETCH_MAX_TRANSFERS", 1024, 8),
            scratchpad_bytes: scratchpad.as_deref().and_then(mib).unwrap_or(0),
            dedicated_streams: flag("LLAMA_POSTFETCH_USE_DEDICATED_STREAMS", true),
            cpu_limit: number("LLAMA_POSTFETCH_CPU_LIMIT", 1 << 16, cores),
            page_lock: flag("LLAMA_POSTFETCH_PAGE_LOCK", true),
            debug: flag("LLAMA_POSTFETCH_DEBUG", false),
        };
        Config {
            postfetch,
            hotswap: on("LLAMA_HOTSWAP_ENABLED"),
            poll: (poll_ms > 0).then(|| Duration::from_millis(poll_ms)),
            quiet: Duration::from_millis(quiet_ms),
            check_blocks: flag("LLAMA_HOTSWAP_CHECK", true),
            memory_bytes: memory.as_deref().and_then(mib),
            control: path("LLAMA_SIDECAR_CONTROL"),
            trace_summary: on("LLAMA_EXPERT_TRACE_STATS"),
            trace_names: on("LLAMA_EXPERT_TRACE_NAMES"),
            trace_per_layer: on("LLAMA_EXPERT_TRACE_PER_LAYER"),
            trace_every: (every > 0).then(|| Duration::from_secs(every)),
            journal: set("LLAMA_SIDECAR_JOURNAL").map(PathBuf::from),
            trace_output: path("LLAMA_EXPERT_TRACE_OUTPUT"),
            split: split_text.and_then(owned),
            cpu_moe: on("LLAMA_SIDECAR_CPU_MOE"),
            override_tensor: override_tensor.and_then(owned),
            staging_bytes: staging.as_deref().and_then(mib).unwrap_or(0),
            log: log.as_deref().and_then(level).unwrap_or(LevelFilter::Warn),
            rejected: rejected.into_inner(),
        }
    }

    /// Whether experts are counted.
    pub fn traces(&self) -> bool {
        self.trace_summary || self.trace_output.is_some()
    }
}

/// Returns the level with this name; no message has the level `trace`.
fn level(name: &str) -> Option<LevelFilter> {
    let level = name.parse().ok();
    level.filter(|&level| level != LevelFilter::Trace)
}

/// A path with the process id in place of each `%p`.
fn with_process_id(value: &OsStr) -> PathBuf {
    let mut out = Vec::new();
    let mut rest = value.as_bytes();
    while let Some(at) = rest.windows(2).position(|pair| pair == b"%p") {
        out.extend(&rest[..at]);
        out.extend(std::process::id().to_string().as_bytes());
        rest = &rest[at + 2..];
    }
    out.extend(rest);
    PathBuf::from(OsString::from_vec(out))
}

/// Cores that are not siblings of each other, as many as threads where the kernel does not
/// say; and hardware threads.
fn cores_and_threads() -> (u32, u32) {
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    let core = |cpu: usize| {
        let topology = format!("/sys/devices/system/cpu/cpu{cpu}/topology");
        let read = |name: &str| std::fs::read_to_string(format!("{topology}/{name}")).ok();
        Some((read("physical_package_id")?, read("core_id")?))
    };
    let cores: std::collections::HashSet<_> = (0..threads).map_while(core).collect();
    let cores = if cores.is_empty() {
        threads
    } else {
        cores.len()
    };
    (cores as u32, threads as u32)
}

/// Reads proportions such as `3,1,1`.
pub fn split(text: &str) -> Result<Vec<f64>, String> {
    let proportion = |part: &str| {
        let number: f64 = part.trim().parse().ok()?;
        (number.is_finite() && number >= 0.0).then_some(number)
    };
    let all: Option<Vec<f64>> = text.split(',').map(proportion).collect();
    all.filter(|all| all.iter().sum::<f64>() > 0.0).ok_or_else(|| {
        format!(
            "split '{text}': expected numbers with commas between them, for example 3,1,1, and not all of them 0"
        )
    })
}

/// Reads rules such as `ffn_.*_exps=0;attn=2`: a regular expression for tensor names
/// and the index of a device.
pub fn overrides(text: &str) -> Result<Vec<(Regex, usize)>, String> {
    let rules = text.split(';').filter(|rule| !rule.trim().is_empty());
    rules
        .map(|rule| {
            let (pattern, device) = rule
                .rsplit_once('=')
                .ok_or_else(|| format!("override '{rule}': expected PATTERN=DEVICE"))?;
            let device = device.trim().parse().map_err(|_| {
                format!("override '{rule}': expected the number of a device after '='")
            })?;
            let pattern = Regex::new(pattern.trim())
                .map_err(|error| format!("override '{rule}': {error}"))?;
            Ok((pattern, device))
        })
        .collect()
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
        assert_eq!((config.hotswap, config.log), (false, LevelFilter::Warn));
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
    fn placement_variables_are_checked_and_kept() {
        let config = parse(&[
            ("LLAMA_SIDECAR_SPLIT", "3,1"),
            ("LLAMA_SIDECAR_CPU_MOE", "1"),
            ("LLAMA_SIDECAR_OVERRIDE_TENSOR", "attn=1"),
            ("LLAMA_SIDECAR_STAGING_MB", "2"),
        ]);
        assert_eq!(config.rejected, [""; 0]);
        assert_eq!(config.split.as_deref(), Some(c"3,1"));
        assert_eq!(config.override_tensor.as_deref(), Some(c"attn=1"));
        assert_eq!((config.cpu_moe, config.staging_bytes), (true, 2 << 20));
    }

    #[test]
    fn drop_in_variables() {
        let config = parse(&[]);
        assert_eq!(config.poll, Some(Duration::from_secs(1)));
        assert_eq!(
            (config.quiet, &config.control),
            (Duration::from_secs(2), &None)
        );
        assert_eq!((config.check_blocks, config.memory_bytes), (true, None));
        assert!(!config.traces());
        assert!(parse(&[("LLAMA_EXPERT_TRACE_STATS", "1")]).traces());
        assert!(parse(&[("LLAMA_EXPERT_TRACE_OUTPUT", "a.csv")]).traces());
        let config = parse(&[
            ("LLAMA_HOTSWAP_POLL_MS", "0"),
            ("LLAMA_HOTSWAP_QUIET_MS", "0"),
            ("LLAMA_HOTSWAP_CHECK", "0"),
            ("LLAMA_SIDECAR_MEMORY_MB", "3"),
            ("LLAMA_SIDECAR_CONTROL", "/tmp/socket"),
        ]);
        assert_eq!((config.poll, config.quiet), (None, Duration::ZERO));
        assert_eq!(
            (config.check_blocks, config.memory_bytes),
            (false, Some(3 << 20))
        );
        assert_eq!(config.control, Some("/tmp/socket".into()));
        let config = parse(&[
            ("LLAMA_HOTSWAP_POLL_MS", "soon"),
            ("LLAMA_HOTSWAP_KV", "clear"),
            ("LLAMA_HOTSWAP_QUIET_MS", "long"),
            ("LLAMA_HOTSWAP_CHECK", "maybe"),
            ("LLAMA_SIDECAR_MEMORY_MB", "-1"),
        ]);
        assert_eq!(config.rejected.len(), 5);
        assert!(
            config
                .rejected
                .iter()
                .any(|line| line.contains("cache_prompt=false"))
        );
    }

    #[test]
    fn paths_take_the_process_id() {
        let control = |path: &str| parse(&[("LLAMA_SIDECAR_CONTROL", path)]).control;
        let id = std::process::id();
        assert_eq!(
            control("/run/%p-%p.sock"),
            Some(format!("/run/{id}-{id}.sock").into())
        );
        assert_eq!(control("/run/100%"), Some("/run/100%".into()));
    }

    #[test]
    fn postfetch_variables() {
        let defaults = parse(&[]).postfetch;
        assert!(defaults.enable && defaults.block_on_miss && defaults.dedicated_streams);
        assert!(defaults.page_lock && !defaults.force_cpu && !defaults.debug);
        assert_eq!((defaults.max_transfers, defaults.scratchpad_bytes), (8, 0));
        assert!(defaults.cpu_limit >= 1);
        let all = [
            ("LLAMA_POSTFETCH_ENABLE", "0"),
            ("LLAMA_POSTFETCH_FORCE_CPU", "1"),
            ("LLAMA_POSTFETCH_BLOCK_ON_MISS", "0"),
            ("LLAMA_POSTFETCH_MAX_TRANSFERS", "3"),
            ("LLAMA_POSTFETCH_SCRATCHPAD_MB", "5"),
            ("LLAMA_POSTFETCH_USE_DEDICATED_STREAMS", "0"),
            ("LLAMA_POSTFETCH_CPU_LIMIT", "6"),
            ("LLAMA_POSTFETCH_PAGE_LOCK", "0"),
            ("LLAMA_POSTFETCH_SPIN_US", "7"),
            ("LLAMA_POSTFETCH_DEBUG", "1"),
        ];
        let set = PostFetch {
            enable: false,
            force_cpu: true,
            block_on_miss: false,
            max_transfers: 3,
            scratchpad_bytes: 5 << 20,
            dedicated_streams: false,
            cpu_limit: 6,
            page_lock: false,
            spin: Duration::from_micros(7),
            debug: true,
        };
        assert_eq!(parse(&all).postfetch, set);
        let nonsense = all.map(|(name, _)| (name, "-1"));
        let config = parse(&nonsense);
        assert_eq!((config.rejected.len(), config.postfetch), (10, defaults));
    }

    #[test]
    fn a_bad_value_is_named_and_the_default_used() {
        let config = parse(&[("LLAMA_SIDECAR_LOG", "loud")]);
        assert_eq!(config.log, LevelFilter::Warn);
        assert_eq!(config.rejected.len(), 1);
        assert!(config.rejected[0].contains("LLAMA_SIDECAR_LOG=\"loud\""));
        let config = parse(&[
            ("LLAMA_SIDECAR_SPLIT", "1,x"),
            ("LLAMA_SIDECAR_OVERRIDE_TENSOR", "(=1"),
            ("LLAMA_SIDECAR_STAGING_MB", "-1"),
        ]);
        assert_eq!(config.rejected.len(), 3);
        assert_eq!(
            (config.split, config.override_tensor, config.staging_bytes),
            (None, None, 0)
        );
        assert_eq!(
            parse(&[("LLAMA_SIDECAR_LOG", "debug")]).log,
            LevelFilter::Debug
        );
    }
}
