//! Capabilities that change no result: each in a process of its own, for each model.

use serde_json::{Value, json};
use testkit::host::DropIn;

use super::model::Model;
use testkit::architectures::{Counts, Device, Process, traced};

/// A way to run a program with the drop-in.
pub struct Mode {
    pub title: &'static str,
    pub device: Device,
    /// Whether dense models are run, too.
    dense: bool,
    /// Variables; without them the drop-in is idle.
    variables: &'static [(&'static str, &'static str)],
    /// Whether the capability did something: the status and the traces of the drop-in, and what the
    /// program counted itself. An error has why it did nothing, or what is wrong.
    acted: fn(&Answers, &Counts) -> Result<(), String>,
}

/// What the drop-in answers.
struct Answers {
    status: Value,
    traces: Value,
}

/// All modes.
pub const MODES: [Mode; 7] = [
    Mode {
        title: "idle",
        device: Device::Cpu,
        dense: true,
        variables: &[],
        acted: |_, _| Ok(()),
    },
    Mode {
        title: "expert trace",
        device: Device::Cpu,
        dense: true,
        variables: &[("LLAMA_EXPERT_TRACE_STATS", "1")],
        acted: |answers, counted| match traced(&answers.traces) {
            found if found == *counted => Ok(()),
            found => Err(format!("counts {found:?} instead of {counted:?}")),
        },
    },
    Mode {
        title: "experts from disk",
        device: Device::Cpu,
        dense: true,
        variables: &[("LLAMA_EXPERT_STREAM", "on")],
        acted: |answers, counted| {
            let figures = &answers.status["models"][0]["stream"];
            let scheduled = figures["layers"].as_u64() > Some(0);
            match scheduled != counted.is_empty() {
                true => Ok(()),
                false => Err(format!("not as expected: {figures}")),
            }
        },
    },
    Mode {
        title: "idle on a GPU",
        device: Device::Simulated,
        dense: true,
        variables: &[],
        acted: |_, _| Ok(()),
    },
    Mode {
        title: "early copies",
        device: Device::Simulated,
        dense: false,
        variables: &[
            ("LLAMA_POSTFETCH_MODE", "on"),
            ("LLAMA_EXPERT_TRACE_STATS", "1"),
        ],
        acted: |answers, _| used(answers, "early_bytes"),
    },
    Mode {
        title: "early copies of all matrices",
        device: Device::Simulated,
        dense: false,
        variables: &[("LLAMA_POSTFETCH_MODE", "all")],
        acted: |answers, _| used(answers, "early_bytes"),
    },
    Mode {
        title: "experts that stay on the device",
        device: Device::Simulated,
        dense: false,
        variables: &[
            ("LLAMA_POSTFETCH_CACHE_MB", "256"),
            ("LLAMA_POSTFETCH_CACHE_MISSES", "fetch"),
        ],
        acted: |answers, _| used(answers, "cache_hits"),
    },
];

/// Whether post-fetch has a figure that is not zero.
fn used(answers: &Answers, figure: &str) -> Result<(), String> {
    let figures = &answers.status["post_fetch"];
    if figures[figure].as_u64() > Some(0) {
        return Ok(());
    }
    let why = figures["obstacle"].as_str();
    Err(why.map_or_else(|| format!("{figure} is 0: {figures}"), str::to_owned))
}

impl Mode {
    /// Whether a model is run in this mode.
    pub fn takes(&self, model: &Model) -> bool {
        self.dense || model.has_experts()
    }

    /// Runs a model. `expected` is the hash of its logits without the drop-in, on the same device.
    pub fn run(&self, model: &Model, expected: &str, counted: &Counts) -> Result<(), String> {
        let drop_in = match self.variables {
            [] => DropIn::Idle,
            variables => {
                let quiet = ("LLAMA_SIDECAR_LOG", "warn".to_owned());
                let variables = variables
                    .iter()
                    .map(|(name, value)| (*name, (*value).into()));
                DropIn::On(variables.chain([quiet]).collect())
            }
        };
        let mut process = Process::start(self.device, &drop_in);
        if !process.load(&model.path) {
            return Err("the program cannot load it".into());
        }
        let found = process.evaluate()?;
        if found != expected {
            return Err(format!("logits {found} instead of {expected}"));
        }
        let answers = match self.variables {
            [] => None,
            _ => Some(Answers {
                status: process.request(&json!({"cmd": "status"})),
                traces: process.request(&json!({"cmd": "trace"})),
            }),
        };
        process.end();
        answers.map_or(Ok(()), |answers| (self.acted)(&answers, counted))
    }
}
