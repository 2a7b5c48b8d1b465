//! Programs, and what they answer.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use sidecar_core::experts::{MAX_EXPERTS, MAX_LAYERS};
use sidecar_core::protocol::{Request, Status, Traces};
use sidecar_core::trace::{LayerCounts, from_json};

use crate::control;

/// How long a program may take to answer.
const PATIENCE: Duration = Duration::from_secs(2);
/// The most models of a program.
const MOST_MODELS: usize = 64;

/// A program, and its last two samples.
#[derive(Clone)]
pub struct Program {
    /// Its socket.
    pub socket: PathBuf,
    /// The last sample, or why there is none.
    pub now: Result<Arc<Sample>, String>,
    before: Option<Arc<Sample>>,
}

/// What a program answered at a moment.
pub struct Sample {
    /// When.
    pub at: Instant,
    /// Its status.
    pub status: Status,
    /// Uses of experts by model and layer since counting began; empty if they are not counted.
    pub uses: Vec<Vec<LayerCounts>>,
}

impl Program {
    /// A program that was not asked yet.
    pub fn new(socket: PathBuf) -> Program {
        Program {
            socket,
            now: Err("waiting for an answer".into()),
            before: None,
        }
    }

    /// Takes a sample.
    pub fn update(&mut self) {
        let next = self.ask().map(Arc::new);
        let next = next.map_err(|error| format!("{error:#}"));
        let last = std::mem::replace(&mut self.now, next);
        self.before = last.ok();
    }

    fn ask(&self) -> Result<Sample> {
        let ask = |request: &Request| control::ask_within(&self.socket, request, PATIENCE);
        let answer = ask(&Request::Status)?;
        let models = answer["models"].as_array().map_or(0, Vec::len);
        ensure!(
            models <= MOST_MODELS,
            "it answers for {models} models: at most {MOST_MODELS} are shown"
        );
        let status: Status = control::parsed(&answer)?;
        // A program that counts no experts refuses the request.
        let traces = ask(&Request::Trace).and_then(|answer| control::parsed(&answer));
        let traces: Traces = traces.unwrap_or_default();
        Ok(Sample {
            at: Instant::now(),
            status,
            uses: traces
                .traces
                .iter()
                .filter_map(|trace| from_json(trace).ok())
                .map(|(_, counts)| counts.layers)
                .filter(|layers| {
                    let mut experts = layers.iter().map(|layer| layer.experts.len());
                    layers.len() <= MAX_LAYERS as usize
                        && experts.all(|count| count <= MAX_EXPERTS as usize)
                })
                .collect(),
        })
    }

    /// Returns by how much a number has grown a second between the last two samples; `None` without two.
    pub fn rate(&self, number: impl Fn(&Sample) -> Option<f64>) -> Option<f64> {
        let (now, before) = (self.now.as_ref().ok()?, self.before.as_ref()?);
        let seconds = (now.at - before.at).as_secs_f64();
        let grown = number(now)? - number(before)?;
        // A program that was started again counts from zero.
        (grown >= 0.0 && seconds > 0.0).then(|| grown / seconds)
    }

    /// Returns the uses of experts of a model between the last two samples.
    pub fn recent(&self, model: usize) -> Vec<LayerCounts> {
        let uses = |sample: Option<&Arc<Sample>>| {
            sample.and_then(|sample| sample.uses.get(model).cloned())
        };
        let mut now = uses(self.now.as_ref().ok()).unwrap_or_default();
        let before = uses(self.before.as_ref()).unwrap_or_default();
        for (layer, before) in now.iter_mut().zip(&before) {
            for (count, before) in layer.experts.iter_mut().zip(&before.experts) {
                *count = count.saturating_sub(*before);
            }
        }
        now
    }
}
