//! Measurements that the ggml of a program makes for `llama-sidecar plan`.

use serde::{Deserialize, Serialize};

/// What is to be measured, in the file that `LLAMA_SIDECAR_MEASURE` names.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Measure {
    /// Products to measure on the processor and on each device.
    pub works: Vec<Work>,
    /// Numbers of threads of the processor.
    pub threads: Vec<u32>,
}

/// Products of matrices with tokens, in the order of their evaluation.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Work {
    /// Tokens of the batch.
    pub tokens: u64,
    /// The matrices.
    pub matrices: Vec<Matrix>,
}

/// A matrix of weights, or the matrices of the experts of a layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Matrix {
    /// Number of its type in ggml.
    pub ty: u32,
    /// Weights of a row.
    pub columns: u64,
    /// Rows.
    pub rows: u64,
    /// Experts; 1 if the matrix is not routed.
    pub experts: u64,
    /// Experts that a token uses; 0 if the matrix is not routed.
    pub used: u64,
    /// Whether each of these experts has an input of its own, as the last matrix of a layer has.
    pub own_inputs: bool,
}

/// What was measured.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Measured {
    /// Products on the processor.
    pub processor: Vec<OnProcessor>,
    /// What llama.cpp stores in another order for the processor, with kernels of its own.
    pub repacked: Vec<Repacked>,
    /// GPUs.
    pub devices: Vec<OnDevice>,
}

/// Times of products on the processor.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct OnProcessor {
    /// Threads.
    pub threads: u32,
    /// Whether weights are stored in another order where the processor has such kernels.
    pub repacked: bool,
    /// Seconds of each work: medians.
    pub seconds: Vec<f64>,
}

/// Matrices that llama.cpp stores in another order.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Repacked {
    /// Number of their type in ggml.
    pub ty: u32,
    /// Whether they are those of experts.
    pub routed: bool,
}

/// A GPU, its products and its link.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct OnDevice {
    /// Its name, as in options of llama.cpp.
    pub name: String,
    /// What it is.
    pub description: String,
    /// Bytes of its memory.
    pub total: u64,
    /// Bytes that can be allocated.
    pub free: u64,
    /// Seconds of each work: medians. Empty where there is an obstacle.
    pub seconds: Vec<f64>,
    /// Bytes per second of copies to it from pageable memory.
    pub pageable: f64,
    /// The same from page-locked memory; 0 if the backend has none.
    pub locked: f64,
    /// The copies while the processor multiplies: the share of their speed that is left.
    pub link_left: f64,
    /// The processor during copies: the share of its speed that is left.
    pub processor_left: f64,
    /// Why nothing was measured.
    pub obstacle: Option<String>,
}
