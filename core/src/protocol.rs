//! Messages of the control socket and events of the journal, for the drop-in and for the
//! command.
//!
//! A request is a JSON object on one line, and so is its reply:
//!
//! | request | reply |
//! |---|---|
//! | `{"cmd":"ping"}`, `{"cmd":"unfreeze"}`, `{"cmd":"trace-reset"}` | [`Reply`] |
//! | `{"cmd":"mark","text":"…"}` | [`Reply`] |
//! | `{"cmd":"status"}` | [`Status`] |
//! | `{"cmd":"reload"}`, `{"cmd":"revert"}` | [`Reloads`], after the switch |
//! | `{"cmd":"swap","revert":"REGEX","overlays":[{"tensor":"REGEX","from":"/PATH"}]}` | [`Reloads`], after the switch |
//! | `{"cmd":"hash"}` | [`Hashes`], after reading tensors without a hash |
//! | `{"cmd":"metrics"}` | [`Metrics`] |
//! | `{"cmd":"trace"}` | [`Traces`] |
//! | `{"cmd":"round","start":true}` | [`Round`], after the round |
//! | `{"cmd":"round-end"}` | [`Reply`], before the program ends |
//!
//! Every reply has `ok`. A request that fails as a whole has a [`Reply`] with `error`. A
//! reader ignores keys that it does not know, and a missing key has the default of its type,
//! so that a command and a drop-in of different versions understand each other.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use serde_json::Value;

/// A request to the drop-in.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "cmd", rename_all = "kebab-case")]
pub enum Request {
    /// Checks that a drop-in listens.
    Ping,
    /// Requests models, files, changed tensors and counters.
    Status,
    /// Reloads changed files.
    Reload,
    /// Returns all tensors to their originals and freezes reloads.
    Revert,
    /// Permits reloads after [`Request::Revert`].
    Unfreeze,
    /// Reverts overlays and sets others, in one switch of each model.
    Swap {
        /// A regular expression for whole names: overlays of these tensors are reverted, unless
        /// they are set.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        revert: Option<String>,
        /// Overlays to set. The last one that names a tensor counts.
        #[serde(default)]
        overlays: Vec<Overlay>,
    },
    /// Requests a content hash of each model.
    Hash,
    /// Requests metrics in the text format of Prometheus.
    Metrics,
    /// Requests the expert counts of each model.
    Trace,
    /// Sets the expert counts to zero.
    TraceReset,
    /// Notes a text at the current position of the routes.
    Mark {
        /// The text.
        text: String,
    },
    /// Waits for the end of a round of evaluations.
    Round {
        /// Whether a new round is started; else the current one is waited for.
        #[serde(default)]
        start: bool,
    },
    /// Lets a program with rounds end.
    RoundEnd,
}

/// Tensors that take type and bytes from another file than the model's.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Overlay {
    /// In a request a regular expression for whole names of tensors, in [`Status`] a name.
    pub tensor: String,
    /// Absolute path of a GGUF file, or of any shard of a model.
    pub from: String,
    /// In a request, the path that [`Status`] has in place of `from`, if that is a temporary file.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub named: Option<String>,
}

/// Whether a request was carried out.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Reply {
    /// Whether everything was done.
    pub ok: bool,
    /// Why the request was refused.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
    /// Whether the request was not read because too many clients are connected: the same request
    /// may succeed later.
    #[serde(default, skip_serializing_if = "is_false")]
    pub busy: bool,
}

fn is_false(value: &bool) -> bool {
    !value
}

impl Reply {
    /// The reply to a request that was carried out.
    pub fn done() -> Reply {
        Reply {
            ok: true,
            error: None,
            busy: false,
        }
    }

    /// The reply to a request that was refused.
    pub fn refused(error: impl Into<String>) -> Reply {
        Reply {
            ok: false,
            error: Some(error.into()),
            busy: false,
        }
    }

    /// The reply to a client that has no place, or loses it.
    pub fn busy() -> Reply {
        Reply {
            busy: true,
            ..Reply::refused("too many clients are connected: try again")
        }
    }
}

/// A round of evaluations that has ended. All its output is written.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Round {
    /// Whether the request was carried out.
    pub ok: bool,
    /// Why the request was refused.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
    /// Number of the round, from 1.
    pub round: u32,
    /// What the program returned for the round: its exit status if it were the last one.
    pub exit: i32,
    /// What the program does now: `evaluating`, `waiting` or `ended`.
    pub state: String,
}

/// Models and counters of a program.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
#[allow(missing_docs, reason = "the name of each key describes its value")]
pub struct Status {
    pub ok: bool,
    pub version: String,
    pub pid: u32,
    pub evaluations: u64,
    /// Number of switches.
    pub generation: u64,
    pub graphs_renewed: u64,
    /// Number of switches that kept evaluations out, and of evaluations that waited for one.
    pub pauses: u64,
    /// Longest of these pauses, rounded up.
    pub longest_pause_us: u64,
    /// Whether reloads are frozen by [`Request::Revert`].
    pub frozen: bool,
    /// The switch that waits, if one does.
    pub waiting: Option<Waiting>,
    /// Number of files and reloads that failed, by cause.
    pub failures: BTreeMap<String, u64>,
    /// Figures of post-fetch, if the environment enables it.
    pub post_fetch: Option<PostFetchFigures>,
    /// The expert cache that llama.cpp has of its own, if a context has one.
    pub own_expert_cache: Option<OwnExpertCache>,
    /// What was requested and had no effect.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub no_effect: Vec<NoEffect>,
    pub models: Vec<ModelStatus>,
}

/// What was requested and had no effect.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct NoEffect {
    /// Name of the capability, as in [`NoEffect::HOT_SWAP`].
    pub requested: String,
    /// What is missing, why, and the next step.
    pub sentence: String,
    /// Whether a further evaluation or request may have an effect.
    pub so_far: bool,
}

#[allow(missing_docs, reason = "names of capabilities")]
impl NoEffect {
    pub const HOT_SWAP: &str = "hot-swap";
    pub const TRACE: &str = "expert trace";
    pub const ROUTES: &str = "routes";
    pub const SALIENCY: &str = "saliency";
    pub const STREAMING: &str = "streaming";
    pub const POST_FETCH: &str = "post-fetch";
    pub const PAGE_LOCK: &str = "page lock";
    pub const ROUNDS: &str = "rounds";
    pub const CONTROL_FILE: &str = "control file";
    pub const SOCKET: &str = "control socket";

    /// Returns a line of a report.
    pub fn line(&self) -> String {
        let level = if self.so_far { "warning" } else { "error" };
        format!("{level}: {}", self.sentence)
    }
}

/// The expert cache that llama.cpp has of its own (`--moe-cache-mib`).
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct OwnExpertCache {
    /// Number of layers that have slots in it.
    pub layers: usize,
    /// Bytes of its slots.
    pub bytes: u64,
    /// Number of experts that swaps have written into their slots.
    pub written_experts: u64,
    /// Bytes of these experts.
    pub written_bytes: u64,
}

/// A switch that waits for the program.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Waiting {
    /// What the switch waits for.
    pub obstacle: Option<String>,
    /// Time since the switch began to wait.
    pub seconds: f64,
}

/// Figures of expert streaming.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct StreamFigures {
    /// Number of layers that were scheduled.
    pub layers: u64,
    /// Number of tokens in `seconds`.
    pub tokens: u64,
    /// Bytes of routed experts whose residency was checked.
    pub checked_bytes: u64,
    /// Bytes of them that were in memory or on their way.
    pub resident_bytes: u64,
    /// Bytes that were read ahead because of routing.
    pub read_bytes: u64,
    /// Bytes that were read ahead of routing: the next layer of a batch, and guesses.
    pub guessed_bytes: u64,
    /// Number of experts that were guessed.
    pub guesses: u64,
    /// Number of experts that were guessed and routed.
    pub hits: u64,
    /// Number of routed experts of layers with a guess.
    pub guessable: u64,
    /// Number of read-ahead calls that failed.
    pub failed: u64,
    /// Number of page faults of the process that waited for a disk.
    pub major_faults: u64,
    /// Time of evaluations, without pauses of the program.
    pub seconds: f64,
    /// Whether all experts are in memory, so that only samples are checked.
    pub resting: bool,
    /// Whether streaming has stopped because reading ahead had no effect.
    pub stopped: bool,
}

impl StreamFigures {
    /// Adds the figures of a later load of the same model.
    pub fn add(&mut self, later: &StreamFigures) {
        self.layers += later.layers;
        self.checked_bytes += later.checked_bytes;
        self.resident_bytes += later.resident_bytes;
        self.read_bytes += later.read_bytes;
        self.guessed_bytes += later.guessed_bytes;
        self.guesses += later.guesses;
        self.hits += later.hits;
        self.guessable += later.guessable;
        self.failed += later.failed;
        self.major_faults += later.major_faults;
        self.seconds += later.seconds;
        (self.resting, self.stopped) = (later.resting, later.stopped);
    }

    /// Returns the figures as a sentence without its full stop.
    pub fn sentence(&self) -> String {
        let mb = |bytes: u64| bytes as f64 / 1e6;
        let percent = |part: u64, whole: u64| 100.0 * part as f64 / whole.max(1) as f64;
        let speed = format!(
            "{} tokens of prompts and answers at {:.2} tokens/s",
            self.tokens,
            self.tokens as f64 / self.seconds.max(1e-3)
        );
        let read = self.read_bytes + self.guessed_bytes;
        if self.checked_bytes == 0 {
            return format!(
                "{speed}, {} layers scheduled, {} page faults waited for the disk; the kernel does not report which pages of the file are in memory",
                self.layers, self.major_faults
            );
        }
        let mut text = format!(
            "{speed}, {:.0} MB read ahead ({:.0} MB/s), {:.0} % of the routed experts' bytes were in memory, {} page faults waited for the disk",
            mb(read),
            mb(read) / self.seconds.max(1e-3),
            percent(self.resident_bytes, self.checked_bytes),
            self.major_faults,
        );
        if self.guesses > 0 {
            text += &format!(
                ", {:.0} % of {} guesses were right",
                percent(self.hits, self.guesses),
                self.guesses
            );
        }
        if self.resting {
            text += "; all experts are in memory now, so that streaming rests";
        }
        if self.stopped {
            text += "; streaming has stopped because reading ahead had no effect";
        }
        text
    }
}

/// Figures of post-fetch in an unmodified program.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct PostFetchFigures {
    /// Number of layers whose experts were copied once they were routed.
    pub layers: u64,
    /// Number of layers whose experts were copied before they were routed.
    pub layers_ahead: u64,
    /// Bytes that were copied early.
    pub early_bytes: u64,
    /// Bytes of the program's own copies that were left out.
    pub left_out_bytes: u64,
    /// Bytes of experts that the program copied itself.
    pub host_bytes: u64,
    /// Number of copies that the program made itself, by reason.
    pub host_copies: BTreeMap<String, u64>,
    /// Time of the early copies.
    pub copy_seconds: f64,
    /// Time for which computing waited for early copies.
    pub wait_seconds: f64,
    /// Number of early copies whose bytes differ from the model (`LLAMA_POSTFETCH_DEBUG=1`).
    pub mismatches: u64,
    /// Memory on devices that is used for early copies.
    pub scratch_bytes: u64,
    /// Number of routed experts that were on the device (`LLAMA_POSTFETCH_CACHE_MB`).
    pub cache_hits: u64,
    /// Number of routed experts that were not.
    pub cache_misses: u64,
    /// Number of these that the CPU computed. The others were copied first.
    pub cache_on_cpu: u64,
    /// Memory on the device for experts that stay there.
    pub cache_bytes: u64,
    /// Number of experts of a layer that stay there, at least.
    pub cache_slots: u64,
    /// Number of experts that were replaced by others.
    pub cache_evictions: u64,
    /// Bytes per second that the link copied at the start.
    pub link_speed: Option<f64>,
    /// Bytes per second that the CPU could read at the start.
    pub memory_speed: Option<f64>,
    /// The same figures by layer.
    pub cache_layers: Vec<CacheLayer>,
    /// Bytes of models that are page-locked.
    pub locked_bytes: u64,
    /// Why nothing is copied early, if that is known.
    pub obstacle: Option<String>,
}

/// Figures of the experts of a layer that stay on a device.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct CacheLayer {
    /// Number of the model in its process.
    pub model: u64,
    /// Number of the layer.
    pub layer: u32,
    /// Number of experts that stay there.
    pub slots: u64,
    /// Number of routed experts that were there.
    pub hits: u64,
    /// Number of routed experts that were not.
    pub misses: u64,
    /// Number of these that the CPU computed.
    pub on_cpu: u64,
    /// Number of experts that were replaced by others.
    pub evictions: u64,
}

impl PostFetchFigures {
    /// Returns the share of the copies' time without a wait, 0 to 1; `None` without copies.
    pub fn overlap(&self) -> Option<f64> {
        let waited = self.wait_seconds / self.copy_seconds;
        (self.copy_seconds > 0.0).then(|| (1.0 - waited).max(0.0))
    }

    /// Whether no experts were copied, and nothing is locked.
    pub fn is_empty(&self) -> bool {
        self.early_bytes + self.host_bytes + self.locked_bytes + self.cache_slots == 0
    }

    /// Returns the share of routed experts, 0 to 1, that must be on the device for it to be faster
    /// than a CPU that reads experts at the speed of memory; `None` where that was not measured.
    pub fn break_even(&self) -> Option<f64> {
        Some((1.0 - self.link_speed? / self.memory_speed?).max(0.0))
    }

    /// Returns the figures as a sentence without its full stop.
    pub fn sentence(&self) -> String {
        let mb = |bytes: u64| bytes as f64 / 1e6;
        let mut text = match self.early_bytes + self.host_bytes {
            0 if self.locked_bytes > 0 => "no experts copied early".into(),
            0 => "no experts were copied to a GPU: the program does so for batches from 32 tokens, if a GPU has the rest of the model".into(),
            _ => format!(
                "{:.0} MB of experts copied early, {:.0} MB by the program",
                mb(self.early_bytes),
                mb(self.host_bytes),
            ),
        };
        if let Some(overlap) = self.overlap() {
            text += &format!(
                ", {:.0} % of the copies' time overlapped with computing",
                100.0 * overlap
            );
        }
        if self.cache_slots > 0 {
            let looked_up = self.cache_hits + self.cache_misses;
            let most = self.cache_layers.iter().map(|layer| layer.slots).max();
            let slots = match most {
                Some(most) if most > self.cache_slots => {
                    format!("{} to {most} of each layer", self.cache_slots)
                }
                _ => format!("{} of each layer", self.cache_slots),
            };
            text += &format!(
                ", {:.1} % of {looked_up} routed experts were on the device ({slots}, {:.0} MB)",
                100.0 * self.cache_hits as f64 / looked_up.max(1) as f64,
                mb(self.cache_bytes),
            );
            if self.cache_on_cpu > 0 {
                let share = 100.0 * self.cache_on_cpu as f64 / looked_up.max(1) as f64;
                text += &format!(", {share:.1} % were computed by the CPU meanwhile");
            }
            // A miss replaces an expert once the slots are full.
            let lasting = self.cache_hits as f64 / (self.cache_hits + self.cache_evictions) as f64;
            let waits = self.cache_on_cpu == 0;
            let is_full = waits && 2 * self.cache_evictions > self.cache_misses;
            let is_slower = |share: &f64| is_full && *share > lasting;
            if let Some(share) = self.break_even().filter(is_slower) {
                text += &format!(
                    "; a CPU that reads experts at the speed of memory is faster below {:.0} %: give --expert-cache more memory, or leave it out",
                    100.0 * share
                );
            }
        }
        if self.locked_bytes > 0 {
            text += &format!(", {:.0} MB page-locked", mb(self.locked_bytes));
        }
        if let Some(obstacle) = &self.obstacle {
            text += &format!("; {obstacle}");
        }
        text
    }
}

/// State of a model.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct ModelStatus {
    /// Number of the model in its process.
    pub model: u64,
    /// Paths of its files.
    pub files: Vec<String>,
    /// Number of tensors.
    pub tensors: usize,
    /// Number of copies of the tensors in the program.
    pub instances: usize,
    /// Number of tensors with original bytes.
    pub on_original: usize,
    /// The other tensors.
    pub changed: Vec<TensorStatus>,
    /// Tensors that have an overlay.
    pub overlays: Vec<Overlay>,
    /// Memory of swapped tensors.
    pub private_bytes: u64,
    /// Memory of replaced tensors, which the next swap uses.
    pub kept_bytes: u64,
    /// The failure of the last reload.
    pub blocked: Option<Blocked>,
    /// Hash of the tensors in use, where all hashes are known.
    pub content_hash: Option<String>,
    /// Figures of expert streaming, if experts of the model are streamed.
    pub stream: Option<StreamFigures>,
    /// Why hot-swap is on and can swap none of its tensors, if so.
    pub obstacle: Option<String>,
    /// Layers whose experts are not counted, if experts are counted.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub uncounted: Option<Uncounted>,
    /// Which hot-swap works, if a variable turned on the program's own and the drop-in's.
    pub hotswaps: Option<String>,
}

/// Layers that were evaluated and whose expert counts are zero.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Uncounted {
    /// Path of the model.
    pub path: String,
    /// Numbers of the layers, ascending.
    pub layers: Vec<u32>,
    /// Number of evaluations of one of them, at least.
    pub evaluations: u64,
    /// Why they are not counted, and the next step.
    pub reason: String,
}

impl Uncounted {
    /// Returns what is missing as a sentence without its full stop.
    pub fn sentence(&self) -> String {
        let mut ranges: Vec<(u32, u32)> = Vec::new();
        for &layer in &self.layers {
            match ranges.last_mut() {
                Some((_, last)) if *last + 1 == layer => *last = layer,
                _ => ranges.push((layer, layer)),
            }
        }
        let range = |&(first, last): &(u32, u32)| match first == last {
            true => first.to_string(),
            false => format!("{first}-{last}"),
        };
        let layers: Vec<String> = ranges.iter().map(range).collect();
        format!(
            "{}: {} evaluations, and no expert of layers {} was counted: {}",
            self.path,
            self.evaluations,
            layers.join(", "),
            self.reason
        )
    }
}

/// States of a tensor.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct TensorStatus {
    /// Name of the tensor.
    pub name: String,
    /// State of each copy of the tensor in the program.
    pub states: Vec<TensorState>,
    /// Type that the program loaded.
    pub old_type: String,
    /// Type in use.
    pub new_type: String,
    /// The file of its overlay; `None` if the bytes are those of the model's own file.
    pub from: Option<String>,
}

/// Place of the bytes of a tensor.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "SCREAMING_SNAKE_CASE")]
pub enum TensorState {
    /// Where the program loaded them.
    OnOriginal,
    /// In a buffer of the drop-in on the device of the tensor.
    Detached,
    /// In host memory, although the tensor belongs on a device.
    FallbackCpu,
}

impl TensorState {
    /// Returns the name of the state in the protocol.
    pub fn name(self) -> &'static str {
        match self {
            TensorState::OnOriginal => "ON_ORIGINAL",
            TensorState::Detached => "DETACHED",
            TensorState::FallbackCpu => "FALLBACK_CPU",
        }
    }
}

/// A reload that fails again and again.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Blocked {
    /// Cause, in one word.
    pub cause: String,
    /// Cause, in a sentence.
    pub error: String,
    /// Time since the first failure.
    pub seconds: f64,
    /// Number of attempts.
    pub attempts: u64,
}

/// Reports of a reload, a revert or a swap.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Reloads {
    /// Whether all models are up to date.
    pub ok: bool,
    /// A report for each model.
    pub reports: Vec<ModelReload>,
}

/// Result of a reload of one model.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum ModelReload {
    /// Nothing changed.
    Failed {
        /// Number of the model in its process.
        model: u64,
        /// Cause, in a sentence.
        error: String,
    },
    /// The reload ended, perhaps with files that were not used.
    Done(ReloadReport),
}

/// Report of a reload of one model.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
#[allow(missing_docs, reason = "a number of tensors for each outcome")]
pub struct ReloadReport {
    /// Number of the model in its process.
    pub model: u64,
    pub swapped: usize,
    pub returned: usize,
    pub unchanged: usize,
    pub in_place: usize,
    pub refused: usize,
    /// Number of switches so far; 0 when this reload changed nothing.
    pub generation: u64,
    /// Why a reload in several steps stopped.
    pub failure: Option<String>,
    /// Time of each step.
    pub ms: Milliseconds,
    /// The changed files.
    pub files: Vec<FileStatus>,
    /// The tensors that are not unchanged.
    pub tensors: Vec<TensorChange>,
}

/// Time of each step of a reload, in milliseconds.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
#[allow(missing_docs, reason = "the name of each key is the step")]
pub struct Milliseconds {
    pub detect: f64,
    pub compare: f64,
    pub stage: f64,
    pub wait: f64,
    pub switch: f64,
    pub total: f64,
}

/// Result for a changed file.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct FileStatus {
    /// Path of the file.
    pub path: String,
    /// Whether its tensors are in use.
    pub event: FileEvent,
    /// Why not, in one word.
    #[serde(default)]
    pub cause: Option<String>,
    /// Why not, in a sentence; else empty.
    #[serde(default)]
    pub reason: String,
}

/// Whether the tensors of a changed file are in use.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FileEvent {
    /// They are.
    Taken,
    /// They are not; the tensors of the file are as before.
    Ignored,
}

impl FileEvent {
    /// Returns the name of the event in the protocol.
    pub fn name(self) -> &'static str {
        match self {
            FileEvent::Taken => "taken",
            FileEvent::Ignored => "ignored",
        }
    }
}

/// Result for a tensor.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct TensorChange {
    /// Name of the tensor.
    pub name: String,
    /// Outcome, in one word.
    pub outcome: String,
    /// Type before the reload.
    pub old_type: String,
    /// Type after the reload.
    pub new_type: String,
    /// Bytes in the file.
    pub bytes: u64,
    /// Rows of the tensor on each device, in words.
    pub place: String,
    /// Why the tensor was refused; else empty.
    pub reason: String,
}

/// Content hashes.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Hashes {
    /// Whether the request was carried out.
    pub ok: bool,
    /// The hash of each model.
    pub models: Vec<ModelHash>,
}

/// Content hash of a model.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct ModelHash {
    /// Number of the model in its process.
    pub model: u64,
    /// The hash, unless a tensor cannot be read.
    pub content_hash: Option<String>,
}

/// Figures.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Metrics {
    /// Whether the request was carried out.
    pub ok: bool,
    /// The text format of Prometheus.
    pub text: String,
}

/// Expert counts.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Traces {
    /// Whether the request was carried out.
    pub ok: bool,
    /// A trace for each model, as `trace::to_json` writes it.
    pub traces: Vec<Value>,
}

/// A line of the journal, which a wrapper reads.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Entry {
    /// The process.
    pub pid: u32,
    /// What happened in it.
    #[serde(flatten)]
    pub event: Event,
}

/// Versions of ggml, as `ggml_version` returns them, in which the drop-in was tried. The table of
/// hosts in the documentation names the programs.
pub const TRIED_GGML: [&str; 3] = ["0.25.1", "0.25.3", "0.26.0"];

/// Whether the drop-in was tried with the version of an [`Event::Ggml`].
pub fn is_tried_ggml(version: &str) -> bool {
    let number = version.split_whitespace().next();
    number.is_some_and(|number| TRIED_GGML.contains(&number))
}

/// An event in a process with the drop-in.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "event", rename_all = "snake_case")]
#[allow(missing_docs, reason = "the name of each key describes its value")]
pub enum Event {
    /// The loader loaded the drop-in.
    Loaded { program: String },
    /// A copy of ggml was found and its layout understood.
    Ggml { path: String, version: String },
    /// A copy of ggml was found and its layout not understood: hot-swap is off.
    Passive { reason: String },
    /// The program opened a GGUF file with tensors.
    Opened { path: String },
    /// The program evaluated a model for the first time.
    Model {
        path: String,
        files: usize,
        tensors: usize,
        expert_layers: usize,
    },
    /// A reload changed tensors or failed.
    Reload {
        swapped: u64,
        returned: u64,
        refused: u64,
        failure: Option<String>,
    },
    /// An expert trace was written, or not.
    Trace { path: String, error: Option<String> },
    /// What was requested had no effect, when the process ended.
    NoEffect { found: NoEffect },
    /// Routes of a model were written; the last event of a path counts.
    Routes {
        path: String,
        tokens: u64,
        dropped: u64,
        error: Option<String>,
    },
    /// The first evaluation of a model with routed experts ended, and they are streamed unless
    /// there is an obstacle. An obstacle that is known earlier is reported earlier.
    StreamStart {
        path: String,
        obstacle: Option<String>,
    },
    /// A model with routed experts was evaluated for the first time with post-fetch on. Its experts
    /// can be copied to a GPU unless there is an obstacle.
    PostFetchStart {
        path: String,
        obstacle: Option<String>,
    },
    /// Memory for experts that stay on a device was looked for.
    ExpertCache {
        /// Experts of each layer that stay there, at least; 0 where there is an obstacle.
        slots: u64,
        bytes: u64,
        /// Bytes per second that the link copies, and that the CPU reads.
        link_speed: f64,
        memory_speed: f64,
        /// Whether the CPU computes the others.
        on_cpu: bool,
        obstacle: Option<String>,
    },
    /// A graph reads experts in the expert cache that llama.cpp has of its own.
    OwnExpertCache { layers: usize, bytes: u64 },
    /// Hot-swap is on and can swap no tensor of a model.
    HotSwapObstacle { path: String, obstacle: String },
    /// Figures of post-fetch, when the process ended.
    PostFetch { figures: PostFetchFigures },
    /// Figures of expert streaming of all loads of a model, when the process ended.
    Stream { model: u64, figures: StreamFigures },
    /// The process ended.
    End {
        evaluations: u64,
        switches: u64,
        longest_pause_us: u64,
    },
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{from_str, json, to_value};

    #[test]
    fn requests_have_the_names_of_the_commands() {
        for (name, request) in [
            ("ping", Request::Ping),
            ("status", Request::Status),
            ("reload", Request::Reload),
            ("revert", Request::Revert),
            ("unfreeze", Request::Unfreeze),
            ("hash", Request::Hash),
            ("metrics", Request::Metrics),
            ("trace", Request::Trace),
            ("trace-reset", Request::TraceReset),
            ("round-end", Request::RoundEnd),
        ] {
            let json = json!({"cmd": name});
            assert_eq!(to_value(&request).expect("JSON"), json);
            let with_more = json!({"id": 7, "cmd": name}).to_string();
            assert_eq!(from_str::<Request>(&with_more).expect(name), request);
        }
        let mark = Request::Mark {
            text: "next".into(),
        };
        let overlay = Overlay {
            tensor: "output".into(),
            from: "/other.gguf".into(),
            named: None,
        };
        let swap = |revert: Option<&str>, overlays: &[Overlay]| Request::Swap {
            revert: revert.map(str::to_owned),
            overlays: overlays.to_vec(),
        };
        let set = json!([{"tensor": "output", "from": "/other.gguf"}]);
        for (request, json) in [
            (mark, json!({"cmd": "mark", "text": "next"})),
            (
                swap(None, &[overlay]),
                json!({"cmd": "swap", "overlays": set}),
            ),
            (
                swap(Some(".*"), &[]),
                json!({"cmd": "swap", "revert": ".*", "overlays": []}),
            ),
        ] {
            assert_eq!(to_value(&request).expect("JSON"), json);
            let read = from_str::<Request>(&json.to_string());
            assert_eq!(read.expect("a request"), request);
        }
        for (start, text) in [
            (false, "{\"cmd\":\"round\"}"),
            (true, "{\"cmd\":\"round\",\"start\":true}"),
        ] {
            assert_eq!(
                from_str::<Request>(text).expect("round"),
                Request::Round { start }
            );
        }
        for bad in [
            "{}",
            "{\"cmd\":\"swap\",\"overlays\":[{}]}",
            "{\"cmd\":\"mark\"}",
            "[]",
            "\"status\"",
            "{\"cmd\":\"stop\"}",
            "{\"cmd\":1}",
        ] {
            assert!(from_str::<Request>(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn replies_of_other_versions_are_read() {
        let status: Status = from_str("{\"ok\":true,\"models\":[{\"new_key\":1}]}").expect("reply");
        assert!(status.ok && status.models.len() == 1);
        let reply: Reply = from_str("{\"ok\":false,\"error\":\"reason\"}").expect("reply");
        assert_eq!(reply, Reply::refused("reason"));
        assert_eq!(to_value(Reply::done()).expect("JSON"), json!({"ok": true}));
    }

    #[test]
    fn names_are_those_of_the_json() {
        for state in [
            TensorState::OnOriginal,
            TensorState::Detached,
            TensorState::FallbackCpu,
        ] {
            assert_eq!(to_value(state).expect("JSON"), state.name());
        }
        for event in [FileEvent::Taken, FileEvent::Ignored] {
            assert_eq!(to_value(event).expect("JSON"), event.name());
        }
    }

    #[test]
    fn failed_and_ended_reloads_are_told_apart() {
        let failed = "{\"model\":1,\"error\":\"reason\"}";
        let reload: ModelReload = from_str(failed).expect("report");
        assert!(matches!(reload, ModelReload::Failed { .. }));
        let done = ModelReload::Done(ReloadReport::default());
        let text = serde_json::to_string(&done).expect("JSON");
        assert_eq!(from_str::<ModelReload>(&text).expect("report"), done);
    }

    #[test]
    fn an_event_is_one_object() {
        let event = Event::Opened {
            path: "model.gguf".into(),
        };
        let entry = Entry { pid: 3, event };
        let json = json!({"pid": 3, "event": "opened", "path": "model.gguf"});
        assert_eq!(to_value(&entry).expect("JSON"), json);
        assert_eq!(from_str::<Entry>(&json.to_string()).expect("entry"), entry);
    }

    #[test]
    fn layers_without_counts_are_listed_by_ranges() {
        let uncounted = Uncounted {
            path: "moe.gguf".into(),
            layers: vec![0, 1, 2, 5, 7, 8],
            evaluations: 9,
            reason: "a reason".into(),
        };
        assert_eq!(
            uncounted.sentence(),
            "moe.gguf: 9 evaluations, and no expert of layers 0-2, 5, 7-8 was counted: a reason"
        );
    }

    #[test]
    fn slots_that_are_slower_than_the_cpu_are_named() {
        let figures = |hits, evictions| PostFetchFigures {
            early_bytes: 1,
            cache_slots: 13,
            cache_hits: hits,
            cache_misses: 100 + evictions,
            cache_evictions: evictions,
            link_speed: Some(24e9),
            memory_speed: Some(60e9),
            ..PostFetchFigures::default()
        };
        assert_eq!(figures(0, 0).break_even(), Some(0.6));
        let says = |hits, evictions| figures(hits, evictions).sentence().contains("below 60 %");
        assert!(says(500, 500));
        assert!(!says(900, 500));
        // The slots are not yet full.
        assert!(!says(50, 80));
        let unknown = PostFetchFigures {
            memory_speed: None,
            ..figures(500, 500)
        };
        assert!(!unknown.sentence().contains("below"));
        let fast_link = PostFetchFigures {
            memory_speed: Some(20e9),
            ..figures(0, 500)
        };
        assert_eq!(fast_link.break_even(), Some(0.0));
        assert!(!fast_link.sentence().contains("below"));
    }
}
