//! The settings of a process.

use std::ffi::{CString, OsString};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::PathBuf;
use std::time::Duration;

use log::LevelFilter;

/// A path of each process: `%p` stands for its number.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OwnPath(pub OsString);

impl OwnPath {
    /// Returns the path of this process. Not once for all: the program may have forked since the settings were read.
    pub fn now(&self) -> PathBuf {
        let mut out = Vec::new();
        let mut rest = self.0.as_bytes();
        while let Some(at) = rest.windows(2).position(|pair| pair == b"%p") {
            out.extend(&rest[..at]);
            out.extend(std::process::id().to_string().as_bytes());
            rest = &rest[at + 2..];
        }
        out.extend(rest);
        PathBuf::from(OsString::from_vec(out))
    }
}

/// The `LLAMA_POSTFETCH_*` settings.
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
    /// `LLAMA_POSTFETCH_CACHE_MB`, in bytes; 0 for none, and for `auto`.
    pub cache_bytes: u64,
    /// `LLAMA_POSTFETCH_CACHE_HALF_LIFE`.
    pub cache_half_life: u32,
    /// `LLAMA_POSTFETCH_SPIN_US`.
    pub spin: Duration,
    /// `LLAMA_POSTFETCH_TIMEOUT_MS`.
    pub timeout: Duration,
    /// `LLAMA_POSTFETCH_DEBUG`.
    pub debug: bool,
}

impl PostFetch {
    /// Returns the most bytes for copies of experts, apart from slots, on a device with so much
    /// memory in all: the size that was set, or 10 % of the device. A device that does not report
    /// its memory has 0 bytes, and no automatic limit.
    pub fn most_scratch(&self, total: u64) -> u64 {
        match (self.scratchpad_bytes, total / 10) {
            (0, 0) => u64::MAX,
            (0, tenth) => tenth,
            (set, _) => set,
        }
    }
}

/// The settings of post-fetch in an unmodified program.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ProgramPostFetch {
    /// `LLAMA_POSTFETCH_MODE`; [`PostFetchMode::Off`] also where another `LLAMA_POSTFETCH_*` variable
    /// excludes the device.
    pub mode: PostFetchMode,
    /// `LLAMA_POSTFETCH_CACHE_MB`; `None` where experts do not stay on a device.
    pub cache: Option<CacheSize>,
    /// `LLAMA_POSTFETCH_CACHE_TRACE`.
    pub cache_trace: Option<PathBuf>,
    /// `LLAMA_POSTFETCH_CACHE_MISSES`.
    pub cache_misses: Misses,
    /// `LLAMA_POSTFETCH_CACHE_UPLOADS`; 0 for what an idle link copies.
    pub cache_uploads: usize,
    /// `LLAMA_POSTFETCH_LOOK_AHEAD`.
    pub look_ahead: bool,
    /// `LLAMA_SIDECAR_PAGE_LOCK`.
    pub page_lock: bool,
}

impl ProgramPostFetch {
    /// Returns whether experts are copied early, or page-locked.
    pub fn is_used(&self) -> bool {
        self.mode != PostFetchMode::Off || self.page_lock
    }
}

/// Device memory in which experts stay.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CacheSize {
    /// What the program leaves free.
    Auto,
    /// So many bytes.
    Bytes(u64),
}

/// What computes routed experts that are not on the device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Misses {
    /// The CPU where it reads experts faster than the link copies them, else the device.
    Auto,
    /// The CPU, while the device computes the others.
    Cpu,
    /// The device, which waits for their copies.
    Fetch,
}

/// Which routed experts are copied early in an unmodified program.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PostFetchMode {
    /// None.
    Off,
    /// Those that the program copies to a GPU.
    Offloaded,
    /// Also the down-projections of small batches.
    Down,
    /// All.
    All,
}

/// When routed experts are read from disk as soon as routing is known.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ExpertStream {
    /// Never.
    Off,
    /// Of models that do not fit into the free memory when they are loaded.
    Needed,
    /// While experts are not in memory.
    Auto,
    /// Always.
    On,
}

impl ExpertStream {
    /// Returns whether experts may be read that way.
    pub fn streams(self) -> bool {
        self != ExpertStream::Off
    }
}

/// The settings in force.
#[derive(Debug, Clone, PartialEq)]
pub struct Config {
    /// `LLAMA_SIDECAR_HOTSWAP`; where it is not set, `LLAMA_HOTSWAP_ENABLED`.
    pub hotswap: bool,
    /// `LLAMA_HOTSWAP_POLL_MS`; `None` when files are checked only on request, as with rounds.
    pub poll: Option<Duration>,
    /// `LLAMA_HOTSWAP_QUIET_MS`.
    pub quiet: Duration,
    /// `LLAMA_HOTSWAP_CHECK`.
    pub check_blocks: bool,
    /// `LLAMA_SIDECAR_STRICT`.
    pub strict: bool,
    /// `LLAMA_SIDECAR_ROUNDS`; on also with [`Config::control_file`].
    pub rounds: bool,
    /// `LLAMA_HOTSWAP_CONTROL_FILE`.
    pub control_file: Option<OwnPath>,
    /// `LLAMA_HOTSWAP_STATUS_FILE`.
    pub status_file: Option<OwnPath>,
    /// `LLAMA_SIDECAR_CONTROL`.
    pub control: Option<OwnPath>,
    /// `LLAMA_SIDECAR_STREAM_SOCKET`.
    pub stream_socket: Option<OwnPath>,
    /// `LLAMA_EXPERT_TRACE_STATS`; on also with [`Config::trace_per_layer`].
    pub trace_summary: bool,
    /// `LLAMA_EXPERT_TRACE_NAMES`.
    pub trace_names: bool,
    /// `LLAMA_EXPERT_TRACE_PER_LAYER`.
    pub trace_per_layer: bool,
    /// `LLAMA_EXPERT_TRACE_TOP`; `None` for all.
    pub trace_top: Option<usize>,
    /// `LLAMA_EXPERT_TRACE_OUTPUT`.
    pub trace_output: Option<OwnPath>,
    /// `LLAMA_EXPERT_TRACE_EVERY_S`; `None` when the trace is written only at exit.
    pub trace_every: Option<Duration>,
    /// `LLAMA_EXPERT_TRACE_ROUTES`.
    pub trace_routes: Option<OwnPath>,
    /// `LLAMA_EXPERT_TRACE_WEIGHTS`.
    pub trace_weights: bool,
    /// `LLAMA_EXPERT_TRACE_SALIENCY`.
    pub trace_saliency: Option<OwnPath>,
    /// `LLAMA_EXPERT_MASKS`.
    pub expert_masks: bool,
    /// `LLAMA_EXPERT_STREAM`.
    pub expert_stream: ExpertStream,
    /// `LLAMA_EXPERT_STREAM_TRACE`.
    pub expert_stream_trace: Option<PathBuf>,
    /// `LLAMA_EXPERT_STREAM_PREFER`, also where changed results are not accepted.
    pub expert_stream_prefer: Option<f32>,
    /// `LLAMA_EXPERT_STREAM_ACCEPT_CHANGES`.
    pub accepts_changed_results: bool,
    /// `LLAMA_EXPERT_STREAM_MEMORY_MB`, in bytes.
    pub expert_stream_memory: Option<u64>,
    /// `LLAMA_POSTFETCH_*`.
    pub postfetch: PostFetch,
    /// `LLAMA_POSTFETCH_*`, in an unmodified program.
    pub program_postfetch: ProgramPostFetch,
    /// `LLAMA_SIDECAR_SPLIT`, checked and kept as text.
    pub split: Option<CString>,
    /// `LLAMA_SIDECAR_CPU_MOE`.
    pub cpu_moe: bool,
    /// `LLAMA_SIDECAR_OVERRIDE_TENSOR`, checked and kept as text.
    pub override_tensor: Option<CString>,
    /// `LLAMA_SIDECAR_STAGING_MB`, in bytes.
    pub staging_bytes: u64,
    /// `LLAMA_SIDECAR_MEMORY_MB`, in bytes; `None` for the free memory.
    pub memory_bytes: Option<u64>,
    /// `LLAMA_SIDECAR_LOGITS_HASHES`.
    pub logits_hashes: Option<OwnPath>,
    /// `LLAMA_SIDECAR_PROFILE`.
    pub profile: Option<PathBuf>,
    /// `LLAMA_SIDECAR_JOURNAL`.
    pub journal: Option<PathBuf>,
    /// `LLAMA_SIDECAR_LOG`.
    pub log: LevelFilter,
    /// One sentence for each variable with a value that does not parse, or that has another
    /// effect than its wording suggests.
    pub rejected: Vec<String>,
    /// One sentence for each variable that needs another one to have an effect in an unmodified
    /// program.
    pub without_effect: Vec<String>,
}

impl Config {
    /// Returns whether a capability is on in an unmodified program.
    pub fn is_used(&self) -> bool {
        let streams = self.expert_stream.streams();
        self.hotswap
            || self.traces()
            || streams
            || self.program_postfetch.is_used()
            || self.rounds
            || self.expert_masks
            || self.logits_hashes.is_some()
    }

    /// Returns the margin within which experts in memory are preferred, if they are.
    pub fn preference(&self) -> Option<f32> {
        self.expert_stream_prefer
            .filter(|_| self.accepts_changed_results)
    }

    /// Returns whether expert use is counted.
    pub fn traces(&self) -> bool {
        let paths = [&self.trace_output, &self.trace_routes, &self.trace_saliency];
        self.trace_summary || self.trace_names || paths.iter().any(|path| path.is_some())
    }
}
