//! The `LLAMA_*` variables that the library reads, parsed once. [`VARIABLES`] is their table.
//!
//! An unset or empty variable has its default. A switch is off with `0` and on with every
//! other value. In the paths of the control socket and of the trace, `%p` stands for the
//! process id: each process of a program that starts others needs paths of its own.
//!
//! A value that does not parse is logged with what is allowed, counted, and replaced by the
//! default. A set-uid process reads none of the variables, because its environment belongs to
//! another user.
//!
//! Modules, top to bottom:
//!
//! | module | contents |
//! |---|---|
//! | `needs` | variables that have an effect only beside another one |
//! | `values` | the values of an environment |
//! | `settings`, `variables` | the settings of a process; the table of the variables |

mod needs;
mod settings;
#[cfg(test)]
mod tests;
mod values;
mod variables;

pub use needs::CAPABILITIES;
pub use settings::{
    CacheSize, Config, ExpertStream, Misses, OwnPath, PostFetch, PostFetchMode, ProgramPostFetch,
};
pub use variables::{DefaultValue, Kind, VARIABLES, Variable, margin, overrides, split, table};

use std::ffi::OsString;
use std::time::Duration;

use log::LevelFilter;
use once_cell::sync::Lazy;

use crate::descriptors;
use crate::files::{self, Replace};
use crate::text;
use values::Values;
use variables::{is_on, level, utf8};

impl Config {
    /// Returns the settings of this process, read from its environment on first use.
    pub fn get() -> &'static Config {
        static CONFIG: Lazy<Config> = Lazy::new(|| {
            // SAFETY: getauxval only reads a value that the kernel left at start.
            let secure = unsafe { libc::getauxval(libc::AT_SECURE) } != 0;
            Config::parse(|name| std::env::var_os(name).filter(|_| !secure))
        });
        &CONFIG
    }

    /// Parses the settings from an environment.
    pub fn parse(environment: impl Fn(&str) -> Option<OsString>) -> Config {
        let mut values = Values {
            environment,
            rejected: Vec::new(),
            changed: Vec::new(),
        };
        let (cores, threads) = cores_and_threads();
        let default_spin = if threads > cores { 2000 } else { 0 };
        let cache_trace = values.path("LLAMA_POSTFETCH_CACHE_TRACE");
        let (mode, cache) = (values.postfetch_mode(), values.cache(cache_trace.is_some()));
        let postfetch = PostFetch {
            enable: values
                .get("LLAMA_POSTFETCH_ENABLE", |value| Ok(is_on(value)))
                .unwrap_or(true),
            force_cpu: values.switch("LLAMA_POSTFETCH_FORCE_CPU"),
            block_on_miss: values.switch("LLAMA_POSTFETCH_BLOCK_ON_MISS"),
            max_transfers: values.number("LLAMA_POSTFETCH_MAX_TRANSFERS").unwrap_or(8) as u32,
            scratchpad_bytes: values.mib("LLAMA_POSTFETCH_SCRATCHPAD_MB").unwrap_or(0),
            dedicated_streams: values.switch("LLAMA_POSTFETCH_USE_DEDICATED_STREAMS"),
            cpu_limit: values
                .number("LLAMA_POSTFETCH_CPU_LIMIT")
                .map_or(cores, |limit| limit as u32),
            page_lock: values.switch("LLAMA_POSTFETCH_PAGE_LOCK"),
            cache_bytes: match cache {
                Some(CacheSize::Bytes(bytes)) => bytes,
                None | Some(CacheSize::Auto) => 0,
            },
            cache_half_life: values
                .number("LLAMA_POSTFETCH_CACHE_HALF_LIFE")
                .unwrap_or(1) as u32,
            spin: Duration::from_micros(
                values
                    .number("LLAMA_POSTFETCH_SPIN_US")
                    .unwrap_or(default_spin),
            ),
            timeout: Duration::from_millis(
                values.number("LLAMA_POSTFETCH_TIMEOUT_MS").unwrap_or(5000),
            ),
            debug: values.switch("LLAMA_POSTFETCH_DEBUG"),
        };
        let uses_device = postfetch.enable && !postfetch.force_cpu && postfetch.dedicated_streams;
        let program_postfetch = ProgramPostFetch {
            mode: match mode {
                _ if !uses_device => PostFetchMode::Off,
                // Early copies are what a cache does with a miss.
                PostFetchMode::Off if cache.is_some() => PostFetchMode::Offloaded,
                mode => mode,
            },
            cache: cache.filter(|_| uses_device),
            cache_trace,
            cache_misses: values.misses(),
            cache_uploads: values.number("LLAMA_POSTFETCH_CACHE_UPLOADS").unwrap_or(0) as usize,
            look_ahead: values.switch("LLAMA_POSTFETCH_LOOK_AHEAD"),
            page_lock: values.switch("LLAMA_SIDECAR_PAGE_LOCK"),
        };
        let expert_stream_trace = values.path("LLAMA_EXPERT_STREAM_TRACE");
        let expert_stream_prefer = values.get("LLAMA_EXPERT_STREAM_PREFER", |value| {
            utf8(value).and_then(margin)
        });
        let expert_stream_memory = values.mib("LLAMA_EXPERT_STREAM_MEMORY_MB");
        let trace_per_layer = values.switch("LLAMA_EXPERT_TRACE_PER_LAYER");
        let control_file = values.own_path("LLAMA_HOTSWAP_CONTROL_FILE");
        let rounds = values.switch("LLAMA_SIDECAR_ROUNDS") || control_file.is_some();
        let own_hotswap = values.get("LLAMA_SIDECAR_HOTSWAP", |value| Ok(is_on(value)));
        let poll = values.interval("LLAMA_HOTSWAP_POLL_MS", Duration::from_millis);
        let mut config = Config {
            postfetch,
            program_postfetch,
            hotswap: own_hotswap.unwrap_or_else(|| values.switch("LLAMA_HOTSWAP_ENABLED")),
            // All evaluations of a round have the same weights.
            poll: poll.filter(|_| !rounds),
            quiet: values
                .interval("LLAMA_HOTSWAP_QUIET_MS", Duration::from_millis)
                .unwrap_or_default(),
            check_blocks: values.switch("LLAMA_HOTSWAP_CHECK"),
            strict: values.switch("LLAMA_SIDECAR_STRICT"),
            rounds,
            control_file,
            status_file: values.own_path("LLAMA_HOTSWAP_STATUS_FILE"),
            control: values.own_path("LLAMA_SIDECAR_CONTROL"),
            stream_socket: values.own_path("LLAMA_SIDECAR_STREAM_SOCKET"),
            trace_summary: values.switch("LLAMA_EXPERT_TRACE_STATS")
                || trace_per_layer && values.set("LLAMA_EXPERT_TRACE_STATS").is_none(),
            trace_names: values.switch("LLAMA_EXPERT_TRACE_NAMES"),
            trace_per_layer,
            trace_top: values
                .number("LLAMA_EXPERT_TRACE_TOP")
                .filter(|&most| most > 0)
                .map(|most| most as usize),
            trace_output: values.own_path("LLAMA_EXPERT_TRACE_OUTPUT"),
            trace_every: values.interval("LLAMA_EXPERT_TRACE_EVERY_S", Duration::from_secs),
            trace_routes: values.own_path("LLAMA_EXPERT_TRACE_ROUTES"),
            trace_weights: values.switch("LLAMA_EXPERT_TRACE_WEIGHTS"),
            trace_saliency: values.own_path("LLAMA_EXPERT_TRACE_SALIENCY"),
            expert_masks: values.switch("LLAMA_EXPERT_MASKS"),
            expert_stream: values.expert_stream(
                expert_stream_trace.is_some()
                    || expert_stream_prefer.is_some()
                    || expert_stream_memory.is_some(),
            ),
            expert_stream_trace,
            expert_stream_prefer,
            accepts_changed_results: values.switch("LLAMA_EXPERT_STREAM_ACCEPT_CHANGES"),
            expert_stream_memory,
            split: values.text("LLAMA_SIDECAR_SPLIT"),
            cpu_moe: values.switch("LLAMA_SIDECAR_CPU_MOE"),
            override_tensor: values.text("LLAMA_SIDECAR_OVERRIDE_TENSOR"),
            staging_bytes: values.mib("LLAMA_SIDECAR_STAGING_MB").unwrap_or(0),
            memory_bytes: values.mib("LLAMA_SIDECAR_MEMORY_MB"),
            logits_hashes: values.own_path("LLAMA_SIDECAR_LOGITS_HASHES"),
            profile: values.path("LLAMA_SIDECAR_PROFILE"),
            journal: values.path("LLAMA_SIDECAR_JOURNAL"),
            log: values
                .get("LLAMA_SIDECAR_LOG", |value| utf8(value).and_then(level))
                .unwrap_or(LevelFilter::Warn),
            rejected: Vec::new(),
            without_effect: Vec::new(),
        };
        config.without_effect = needs::unmet(&config, &values.changed);
        config.rejected = values.rejected;
        config
    }

    /// Returns a sentence for each output that cannot be written, because its folder does not
    /// exist or belongs to others.
    pub fn unwritable(&self) -> Vec<String> {
        let outputs = [
            ("LLAMA_EXPERT_TRACE_OUTPUT", &self.trace_output),
            ("LLAMA_EXPERT_TRACE_ROUTES", &self.trace_routes),
            ("LLAMA_EXPERT_TRACE_SALIENCY", &self.trace_saliency),
            ("LLAMA_SIDECAR_LOGITS_HASHES", &self.logits_hashes),
            ("LLAMA_SIDECAR_CONTROL", &self.control),
            ("LLAMA_HOTSWAP_STATUS_FILE", &self.status_file),
        ];
        let sentence = |(name, path): (&str, &Option<OwnPath>)| {
            let path = path.as_ref()?.now();
            let why = files::check(&path, b"", Replace::Own).err()?;
            let (title, path) = (Variable::title_of(name), text::path(&path));
            Some(format!("{title}: cannot write {path}: {why}"))
        };
        outputs.into_iter().filter_map(sentence).collect()
    }
}

/// Returns the number of physical cores and of hardware threads. Where the kernel does not
/// report cores, there are as many as threads.
pub fn cores_and_threads() -> (u32, u32) {
    let threads = descriptors::processors();
    let core = |cpu: usize| {
        let topology = format!("/sys/devices/system/cpu/cpu{cpu}/topology");
        let read = |name: &str| descriptors::read_to_string(format!("{topology}/{name}")).ok();
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
