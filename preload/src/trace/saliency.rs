//! Saliency: how much each expert contributes to the output of its layer, for pruning.
//!
//! The outputs of all experts of all layers stay in memory until the evaluation has ended, and
//! their norms are computed then.

use std::path::PathBuf;
use std::sync::Arc;

use parking_lot::RwLock;
use sidecar_core::config::{Config, Variable};
use sidecar_core::files;
use sidecar_core::protocol::NoEffect;
use sidecar_core::text;
use sidecar_core::trace;
use sidecar_core::trace::{ExpertLayout, Ids, ModelMeta, norm};

use crate::ggml::Ggml;
use crate::program::capability::{Capability, Effect};
use crate::program::graph::{self, WeightedExperts};
use crate::program::sched::Allocated;

/// The start of the names of the outputs of experts, before gate weights.
const OUTPUTS: &[u8] = b"ffn_moe_down";
/// Bytes of outputs that are read at a time, or those of one token.
const READ_BYTES: usize = 4 << 20;

/// Whether contributions were recorded.
static EFFECT: Effect = Effect::of(NoEffect::SALIENCY);

/// Saliency, as a capability. Its tensors are found and read by the expert trace.
pub struct Saliency;

impl Capability for Saliency {
    fn is_enabled(&self) -> bool {
        Config::get().trace_saliency.is_some()
    }

    fn finish(&self) {
        // The process ends: a thread that holds the lock may never release it.
        let models = MODELS.try_read().map(|models| models.clone());
        for model in models.unwrap_or_default() {
            model.write();
        }
    }

    fn no_effect(&self) -> Vec<NoEffect> {
        EFFECT.missing(|| {
            "no saliency was recorded: no evaluation besides warm-ups had routed experts whose outputs are known; let a model with routed experts generate a token".into()
        })
    }
}

/// Reports that a layer has several sets of ids, whose gates and outputs are not known apart.
pub fn refuse_several(layer: u32) {
    EFFECT.log_obstacle(format!(
        "{}: layer {layer} reads several sets of experts for each token: no saliency of its model is recorded",
        Variable::title_of("LLAMA_EXPERT_TRACE_SALIENCY")
    ));
}

/// The saliency of a model's experts.
pub struct ModelSaliency {
    path: PathBuf,
    about: ModelMeta,
    layers: Vec<(u32, u32)>,
    sums: trace::Saliency,
}

/// Of all models, also of freed ones.
static MODELS: RwLock<Vec<Arc<ModelSaliency>>> = RwLock::new(Vec::new());

impl ModelSaliency {
    /// Makes the saliency of a model that is written to this path.
    pub fn new(path: PathBuf, about: &ModelMeta, layout: &ExpertLayout) -> Arc<ModelSaliency> {
        let model = Arc::new(ModelSaliency {
            path,
            about: about.clone(),
            layers: layout.layers().to_vec(),
            sums: trace::Saliency::new(layout),
        });
        MODELS.write().push(model.clone());
        model
    }

    fn write(&self) {
        let json = self.sums.to_json(&self.about);
        let text = format!("{json:#}\n");
        let written = files::at_free_name(&self.path, |path| trace::write_text(path, &text));
        if let Err(error) = written {
            log::error!(
                "{}: cannot write {}: {error}; choose another path",
                Variable::title_of("LLAMA_EXPERT_TRACE_SALIENCY"),
                text::path(&self.path)
            );
        }
    }
}

/// What the graph of a scheduler has for saliency. Used by the thread that evaluates.
pub struct GraphSaliency {
    model: Option<Arc<ModelSaliency>>,
    experts: Vec<WeightedExperts>,
    bytes: Vec<u8>,
    gates: Vec<f32>,
    norms: Vec<f32>,
}

impl GraphSaliency {
    /// Of no graph.
    pub const NONE: GraphSaliency = GraphSaliency {
        model: None,
        experts: Vec::new(),
        bytes: Vec::new(),
        gates: Vec::new(),
        norms: Vec::new(),
    };

    /// Finds what another graph has, and keeps it for after the evaluation.
    ///
    /// # Safety
    ///
    /// A live graph of this copy that is not yet allocated.
    pub unsafe fn renew(
        &mut self,
        model: Option<Arc<ModelSaliency>>,
        ggml: &Ggml,
        graph: &Allocated,
    ) {
        self.clear();
        self.model = model;
        if self.model.is_none() {
            return;
        }
        // SAFETY: as the caller ensures.
        unsafe {
            self.experts = graph::weighted_experts(ggml, graph.graph);
            self.experts
                .retain(|experts| graph::name(ggml, experts.outputs).starts_with(OUTPUTS));
            for experts in &self.experts {
                graph.outputs.keep(ggml, experts.gates);
                graph.outputs.keep(ggml, experts.outputs);
            }
        }
    }

    /// Forgets the graph.
    pub fn clear(&mut self) {
        self.model = None;
        self.experts.clear();
    }

    /// Adds the experts of a layer, by its position.
    ///
    /// # Safety
    ///
    /// The graph is live and its backends are done.
    pub unsafe fn add(&mut self, ggml: &Ggml, layer: usize, ids: &Ids<'_>) {
        let Some(model) = &self.model else {
            return;
        };
        let (number, _) = model.layers[layer];
        let Some(experts) = self.experts.iter().find(|layer| layer.layer == number) else {
            return;
        };
        // SAFETY: as the caller ensures; both were kept.
        let gates = unsafe { graph::read_matrix(ggml, experts.gates, 1, &mut self.bytes) };
        let Some(gates) =
            gates.filter(|gates| (gates.used, gates.tokens) == (ids.used, ids.tokens))
        else {
            return;
        };
        self.gates.clear();
        for token in 0..ids.tokens {
            let gate = |used| {
                gates
                    .get(token, used)
                    .map(|bits| f32::from_bits(bits as u32))
            };
            self.gates.extend((0..ids.used).filter_map(gate));
        }
        let layout = &ggml.layout;
        // SAFETY: as the caller ensures.
        let (ne, nb): ([i64; 4], [usize; 4]) = unsafe {
            (
                layout.read(experts.outputs, layout.ne),
                layout.read(experts.outputs, layout.nb),
            )
        };
        let row = ne[0].max(0) as usize * 4;
        let same = ne[1..] == [ids.used as i64, ids.tokens as i64, 1];
        if !same || nb[0] != 4 || nb[1] < row || nb[2] < nb[1] * ids.used {
            return;
        }
        self.norms.clear();
        let tokens = (READ_BYTES / nb[2]).max(1);
        for first in (0..ids.tokens).step_by(tokens) {
            let count = tokens.min(ids.tokens - first);
            let length = (count - 1) * nb[2] + (ids.used - 1) * nb[1] + row;
            self.bytes.resize(length, 0);
            // SAFETY: the outputs were kept, and have these bytes by their extents.
            unsafe {
                let to = self.bytes.as_mut_ptr().cast();
                (ggml.f.ggml_backend_tensor_get)(experts.outputs, to, first * nb[2], length);
            }
            for token in 0..count {
                let starts = (0..ids.used).map(|used| token * nb[2] + used * nb[1]);
                self.norms
                    .extend(starts.map(|start| norm(&self.bytes[start..start + row])));
            }
        }
        EFFECT.note();
        model.sums.record(layer, ids, &self.gates, &self.norms);
    }
}
