//! Answers of the drop-in.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::figures::{OwnExpertCache, PostFetchFigures, StreamFigures};
use super::requests::{LayerMask, Overlay};

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
    /// The margin of the start within which experts in memory are preferred, if they are.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub margin: Option<f32>,
    /// Why there are no models, if there are none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub no_model: Option<String>,
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
    pub const PREFERENCE: &str = "preference of experts in memory";
    pub const POST_FETCH: &str = "post-fetch";
    pub const PAGE_LOCK: &str = "page lock";
    pub const MASKS: &str = "expert masks";
    pub const LOGITS: &str = "hashes of logits";
    pub const ROUNDS: &str = "rounds";
    pub const CONTROL_FILE: &str = "control file";
    pub const SOCKET: &str = "control socket";
    pub const PROFILE: &str = "profile";
    /// Of the trace, in a process without a mixture.
    pub const NO_EXPERTS: &str = "nothing was counted: no evaluated model has routed experts";
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
    /// Bytes of the tensors as they were loaded, by buffer type, which names the device.
    pub loaded_bytes: BTreeMap<String, u64>,
    /// Memory of swapped tensors.
    pub private_bytes: u64,
    /// Memory of replaced tensors, which the next swap uses.
    pub kept_bytes: u64,
    /// The failure of the last reload.
    pub blocked: Option<Blocked>,
    /// Files whose last version was ignored, or needs a new start of the program.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub noted: Vec<FileStatus>,
    /// Hash of the tensors in use, where all hashes are known.
    pub content_hash: Option<String>,
    /// Experts that are masked.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub masks: Vec<LayerMask>,
    /// Figures of expert streaming, if experts of the model are streamed.
    pub stream: Option<StreamFigures>,
    /// Why hot-swap is on and can swap none of its tensors, if so.
    pub obstacle: Option<String>,
    /// Layers whose experts are not counted, if experts are counted.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub uncounted: Option<Uncounted>,
    /// Which hot-swap works, if a variable turned on the program's own and the drop-in's.
    pub hotswaps: Option<String>,
    /// Whether a file at one of the paths is another one than the program knows, or was written.
    pub differs: bool,
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
    /// Layers whose masks of experts were removed.
    pub unmasked: u64,
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
    /// Why not, or what of the file needs a new start of the program; else empty.
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

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{from_str, json, to_value};

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
}
