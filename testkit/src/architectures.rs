//! Models of many architectures, which llama.cpp's `test-llama-archs` writes, and processes that
//! evaluate them: one without the drop-in, which loads one after the other, and those with the drop-in.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use serde_json::{Value, json};

use crate::graph;
use crate::host::{DropIn, Host, Program};
use crate::server::llama_cpp;
use crate::sim_ggml::SimGgml;

/// The program that writes models as llama.cpp tests them: two experts, which are both used.
pub const WRITER: &str = "test-llama-archs";

/// The start of its random numbers.
const RANDOM: &str = "1";

/// Models of the daily test: MLA with merged gate and up, expert biases, shared experts beside
/// linear attention, recurrent layers, hybrid layers, per-layer embeddings, and a model without a
/// cache.
pub const DAILY: [&str; 7] = [
    "deepseek2-moe",
    "gpt-oss-moe",
    "qwen3next-moe",
    "mamba-dense",
    "jamba-dense",
    "qwen4exp-moe",
    "llada-dense",
];

/// Writes models whose architectures match into a folder, unless they are there, and lists them.
/// Panics with the command that builds the program when that is not there.
pub fn written(program: &str, architectures: &str, kept: &Path) -> Vec<PathBuf> {
    if !kept.exists() {
        let beside = kept.parent().expect("a folder in the cache");
        let folder = tempfile::tempdir_in(beside).expect("free space");
        let program = llama_cpp(program);
        let status = Command::new(&program)
            .args(["-s", RANDOM, "-a", architectures, "-o"])
            .arg(folder.path())
            .current_dir(folder.path())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .status();
        assert!(
            status.is_ok_and(|status| status.success()),
            "{} fails: run 'cargo xtask hosts --build'",
            program.display()
        );
        std::fs::rename(folder.keep(), kept).expect("the same file system");
    }
    let entries = std::fs::read_dir(kept).expect("a folder");
    let mut paths: Vec<PathBuf> = entries
        .map(|entry| entry.expect("an entry").path())
        .collect();
    paths.sort();
    paths
}

/// Returns the models of the daily test that a program writes.
pub fn daily(program: &str, folder: &Path) -> Vec<PathBuf> {
    let names = DAILY.map(|name| name.rsplit_once('-').map_or(name, |(name, _)| name));
    let filter = format!("^({})$", names.join("|"));
    let mut paths = written(program, &filter, &folder.with_extension("daily"));
    paths.retain(|path| {
        DAILY
            .iter()
            .any(|name| path.file_stem() == Some(name.as_ref()))
    });
    assert_eq!(
        paths.len(),
        DAILY.len(),
        "{program} writes other models: {paths:?}"
    );
    paths
}

/// Returns the folder of the models as llama.cpp tests them, beside the programs that write them.
pub fn folder() -> PathBuf {
    llama_cpp("").with_file_name("architectures")
}

/// Where models are evaluated.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Device {
    /// The CPU.
    Cpu,
    /// The simulated GPU, with routed experts in host memory.
    Simulated,
}

impl fmt::Display for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Device::Cpu => "CPU",
            Device::Simulated => "simulated GPU",
        })
    }
}

/// How often each expert of each layer was used.
pub type Counts = BTreeMap<(u64, u64), u64>;

/// The experts of a model in a program without the drop-in.
pub struct Routed {
    /// How often each expert was used.
    pub counts: Counts,
    /// The operation that makes scores of the router's product, by ggml's name.
    pub scores: String,
    /// Weights, each with a tensor that scales or biases its product or its input.
    pub companions: BTreeSet<(String, String)>,
}

/// All logits of an evaluation.
pub struct Logits {
    /// A hash of them.
    pub hash: String,
    /// Each of them, token by token.
    pub values: Vec<f32>,
}

/// A process with one model at a time.
pub struct Process {
    /// The program.
    pub host: Host,
    simulation: Option<SimGgml>,
}

impl Process {
    /// Starts a process without a model.
    pub fn start(device: Device, drop_in: &DropIn) -> Process {
        Process::start_with(device, drop_in, |_| {})
    }

    fn start_with(device: Device, drop_in: &DropIn, more: fn(&mut Command)) -> Process {
        let simulation = (device == Device::Simulated)
            .then(|| SimGgml::new(&[("GGML_OP_OFFLOAD_MIN_BATCH", "1")]));
        let set = |command: &mut Command| {
            // A program that aborts starts no debugger.
            command.env("GGML_NO_BACKTRACE", "1");
            if let Some(simulation) = &simulation {
                command.env("HOST_EXPERTS_ON_CPU", "1");
                simulation.prepare(command);
            }
            more(command);
        };
        let host = Host::start_with(Program::Architectures, Path::new(""), drop_in, set);
        Process { host, simulation }
    }

    /// Loads a model; whether the process still runs and has it.
    pub fn load(&mut self, model: &Path) -> bool {
        let answer = self.host.ask_or_end(&format!("load {}", model.display()));
        answer.as_deref() == Some("loaded")
    }

    /// Returns the hash of all logits; `Err` has why there is none.
    pub fn evaluate(&mut self) -> Result<String, String> {
        self.evaluated("evaluate")
    }

    /// Returns all logits, which the process writes to a file.
    pub fn logits(&mut self, path: &Path) -> Result<Logits, String> {
        let hash = self.evaluated(&format!("evaluate {}", path.display()))?;
        let bytes = std::fs::read(path).map_err(|error| error.to_string())?;
        let values = bytes.as_chunks().0.iter();
        Ok(Logits {
            hash,
            values: values.map(|bytes| f32::from_le_bytes(*bytes)).collect(),
        })
    }

    fn evaluated(&mut self, command: &str) -> Result<String, String> {
        let Some(answer) = self.host.ask_or_end(command) else {
            let log = self.host.log();
            let last = log.iter().rev().find(|line| !line.trim().is_empty());
            return Err(format!(
                "the process ended: {}",
                last.map_or("no message", |line| line.as_str())
            ));
        };
        match answer.split_once(' ') {
            Some(("failed", step)) => Err(format!("llama_decode failed in step {step}")),
            Some((hash, "0")) => Ok(hash.to_owned()),
            _ => Err(format!("logits are no numbers: {answer}")),
        }
    }

    /// Sends a request to the drop-in.
    pub fn request(&self, request: &Value) -> Value {
        self.host.request(request)
    }

    /// Ends the process; panics if it does not end well, or if the simulated GPU found an access
    /// that nothing orders.
    pub fn end(self) {
        assert_eq!(self.host.end(), Some(0));
        if let Some(simulation) = self.simulation {
            simulation.report().assert_ordered();
        }
    }
}

/// A process without the drop-in, which starts again after it ended.
pub struct Reference {
    /// Where it evaluates.
    pub device: Device,
    process: Process,
}

impl Reference {
    /// Starts the process.
    pub fn start(device: Device) -> Reference {
        Reference {
            device,
            process: Process::start(device, &DropIn::Absent),
        }
    }

    /// Loads a model and returns the hash of its logits.
    pub fn evaluate(&mut self, model: &Path) -> Result<String, String> {
        self.with(model, Process::evaluate)
    }

    /// Loads a model and returns its logits, which the process writes to a file.
    pub fn logits(&mut self, model: &Path, path: &Path) -> Result<Logits, String> {
        self.with(model, |process| process.logits(path))
    }

    fn with<T>(
        &mut self,
        model: &Path,
        evaluate: impl FnOnce(&mut Process) -> Result<T, String>,
    ) -> Result<T, String> {
        let found = match self.process.load(model) {
            true => evaluate(&mut self.process),
            false => Err("the program cannot load it".into()),
        };
        if found.is_err() {
            self.process = Process::start(self.device, &DropIn::Absent);
        }
        found
    }
}

/// Returns how often each expert of a model is used, by the program's own count, how experts get their scores, and
/// which tensors belong to a weight, by the program's own graphs.
pub fn routed(model: &Path) -> Result<Routed, String> {
    let count = |command: &mut Command| {
        command.env("HOST_COUNT", "1");
    };
    let mut process = Process::start_with(Device::Cpu, &DropIn::Absent, count);
    if !process.load(model) {
        return Err("the program cannot load it".into());
    }
    let graph = tempfile::NamedTempFile::new().map_err(|error| error.to_string())?;
    let written = process
        .host
        .ask(&format!("graph {}", graph.path().display()));
    assert_eq!(written, "writes");
    process.evaluate()?;
    let answer: Value = serde_json::from_str(&process.host.ask("counts")).expect("JSON");
    let scores = process.host.ask("scores");
    process.end();
    let counts = answer.as_object().expect("an object").iter();
    let number = |text: &str| text.parse::<u64>().expect("a number");
    let counts = counts.map(|(key, count)| {
        let (layer, expert) = key.split_once(',').expect("a layer and an expert");
        let count = count.as_u64().expect("a count");
        ((number(layer), number(expert)), count)
    });
    let graph = std::fs::read_to_string(graph.path()).map_err(|error| error.to_string())?;
    Ok(Routed {
        counts: counts.collect(),
        scores,
        companions: graph::companions(&graph),
    })
}

/// Returns the counts of the only model in the answer to a request for traces.
pub fn traced(answer: &Value) -> Counts {
    let mut counts = Counts::new();
    let layers = answer["traces"][0]["layers"].as_array();
    for layer in layers.into_iter().flatten() {
        let experts = layer["counts"].as_array().into_iter().flatten();
        for (expert, count) in experts.enumerate() {
            let count = count.as_u64().expect("a count");
            if count > 0 {
                let layer = layer["layer"].as_u64().expect("a number");
                counts.insert((layer, expert as u64), count);
            }
        }
    }
    counts
}

/// The request that takes one tensor from another file.
pub fn overlay(tensor: &str, from: &Path) -> Value {
    let pattern = tensor.replace('.', "\\.");
    json!({"cmd": "swap", "overlays": [{"tensor": pattern, "from": from}]})
}

/// The request that returns all tensors.
pub fn revert() -> Value {
    json!({"cmd": "swap", "revert": ".*", "overlays": []})
}
