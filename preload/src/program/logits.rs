//! A hash of the output of an evaluation.
//!
//! At debug level every evaluation of a model logs a hash of its output tensor: two
//! processes that log the same hashes computed bit-identical results.

use std::ffi::CStr;

use sidecar_core::reload::hash_bytes;

use crate::ggml::{Ggml, Graph, Tensor};
use crate::program::barrier;

/// Names of the tensor that libllama reads logits or embeddings from.
const OUTPUTS: [&CStr; 2] = [c"result_output", c"result_embd_pooled"];
/// The output is among the last nodes of a graph.
const LAST_NODES: i32 = 64;

/// Logs the hash of the output of a graph that was evaluated to its end.
///
/// # Safety
///
/// A live graph of this copy of ggml whose backends are done.
pub unsafe fn log_hash(ggml: &Ggml, graph: *mut Graph) {
    let f = &ggml.f;
    // SAFETY: nodes of a live graph are live; the bytes of an output are kept.
    unsafe {
        let count = (f.ggml_graph_n_nodes)(graph);
        let named =
            |node: &*mut Tensor| OUTPUTS.contains(&CStr::from_ptr((f.ggml_get_name)(*node)));
        let last = (0..count.min(LAST_NODES)).map(|i| (f.ggml_graph_node)(graph, count - 1 - i));
        let Some(output) = last.into_iter().find(named) else {
            return;
        };
        let mut bytes = vec![0u8; (f.ggml_nbytes)(output)];
        (f.ggml_backend_tensor_get)(output, bytes.as_mut_ptr().cast(), 0, bytes.len());
        let ne: [i64; 4] = ggml.layout.read(output, ggml.layout.ne);
        log::debug!(
            "output generation {} rows {} hash {:032x}",
            barrier::generation(),
            ne[1],
            hash_bytes(&bytes)
        );
    }
}
