//! Graphs that a stream captures and replays, by the rules of ggml's CUDA backend
//! (`ggml_backend_cuda_graph_compute`).
//!
//! A graph is known by its first node. When it comes for the second time with nothing changed it is captured: what is
//! replayed from then on has the addresses and types of that moment. Whether something has changed is not asked if the
//! graph has the identifier that it had before; else nodes are compared byte by byte, and of their sources the
//! address and the shape, but not the type.

use std::collections::HashMap;
use std::ffi::c_void;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use crate::ggml::{Graph, Tensor};
use crate::kernel::Snapshot;
use crate::sim::sim;

/// The graphs of a stream.
#[derive(Default)]
pub struct Captures(HashMap<*mut Tensor, Kept>);

// SAFETY: the pointers are compared and never followed.
unsafe impl Send for Captures {}

/// A graph that may be replayed.
#[derive(Default)]
struct Kept {
    /// The host's identifier of the graph; 0 if it has none.
    identifier: u64,
    nodes: Vec<Compared>,
    /// Whether nothing had changed when it came last.
    stable: bool,
    captured: Option<Arc<Snapshot>>,
}

/// What of a node is compared.
#[derive(PartialEq)]
struct Compared {
    node: [u8; size_of::<Tensor>()],
    sources: [Option<Source>; 10],
}

/// What of a source is compared.
#[derive(PartialEq)]
struct Source {
    data: *mut c_void,
    ne: [i64; 4],
    nb: [usize; 4],
}

impl Compared {
    /// # Safety
    ///
    /// The node of a valid graph.
    unsafe fn of(node: *mut Tensor) -> Compared {
        // SAFETY: the caller's promise.
        unsafe {
            Compared {
                node: node.cast::<[u8; size_of::<Tensor>()]>().read(),
                sources: (*node).src.map(|source| {
                    source
                        .as_ref()
                        .map(|&Tensor { data, ne, nb, .. }| Source { data, ne, nb })
                }),
            }
        }
    }
}

impl Captures {
    /// Returns what runs for a graph.
    ///
    /// # Safety
    ///
    /// The graph is valid.
    pub unsafe fn of(&mut self, graph: *mut Graph) -> Arc<Snapshot> {
        let nodes = sim().ggml.nodes(graph);
        // SAFETY: the caller's promise.
        let fresh = || Arc::new(unsafe { Snapshot::of(&nodes) });
        let Some(first) = nodes.first().filter(|_| sim().settings.captures) else {
            return fresh();
        };
        let kept = self.0.entry(*first).or_default();
        let identifier = sim().ggml.graph_identifier(graph);
        if identifier == 0 || identifier != kept.identifier {
            kept.identifier = identifier;
            // SAFETY: the caller's promise.
            let now: Vec<Compared> = nodes
                .iter()
                .map(|&node| unsafe { Compared::of(node) })
                .collect();
            if now != kept.nodes {
                kept.nodes = now;
                kept.stable = false;
                return fresh();
            }
        }
        if !kept.stable {
            kept.stable = true;
            kept.captured = None;
        }
        match &kept.captured {
            Some(captured) => {
                sim().replays.fetch_add(1, Ordering::Relaxed);
                captured.clone()
            }
            None => kept.captured.insert(fresh()).clone(),
        }
    }
}
