//! Events of the journal.

use serde::{Deserialize, Serialize};

use super::answers::NoEffect;
use super::figures::{PostFetchFigures, StreamFigures};

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
    /// ggml is linked into the program. Functions whose calls are to be seen, and why those of some are not.
    Linked {
        functions: Vec<(String, Option<String>)>,
    },
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
        /// The first layer of those that predict further tokens, if there are any.
        #[serde(default)]
        predicting: Option<u32>,
        /// Experts that a token uses in each layer that was evaluated.
        #[serde(default)]
        experts_used: Vec<(u32, u64)>,
    },
    /// A reload changed tensors or failed. `differ` tensors of the model differ from the loaded
    /// ones after it.
    Reload {
        model: u64,
        differ: usize,
        swapped: u64,
        returned: u64,
        refused: u64,
        failure: Option<String>,
    },
    /// The program has freed a model with tensors that differ from the loaded ones, and loaded another one, or the same
    /// again.
    Freed { model: u64 },
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
        /// The figures then.
        #[serde(default)]
        figures: StreamFigures,
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
    fn an_event_is_one_object() {
        let event = Event::Opened {
            path: "model.gguf".into(),
        };
        let entry = Entry { pid: 3, event };
        let json = json!({"pid": 3, "event": "opened", "path": "model.gguf"});
        assert_eq!(to_value(&entry).expect("JSON"), json);
        assert_eq!(from_str::<Entry>(&json.to_string()).expect("entry"), entry);
    }
}
