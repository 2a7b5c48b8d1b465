//! Which operations go to a device although their weights are in host memory.

use std::cell::Cell;
use std::ffi::CStr;

use sidecar_core::config::{Config, PostFetchMode};
use sidecar_core::experts::{ExpertName, Projection};

use super::state::is_on;
use super::{biases, instance};
use crate::ggml::{Backend, Ggml, Tensor};
use crate::program::graph::GraphReads;

thread_local! {
    /// The number of slots of a layer, for the graph that this thread splits.
    static SLOTS_OF_GRAPH: Cell<usize> = const { Cell::new(0) };
}

/// Sets the number of slots of a layer for the graph that this thread is about to split.
pub fn set_slots(slots: usize) {
    SLOTS_OF_GRAPH.set(slots);
}

/// Whether operations are to be offloaded that the program would leave on the CPU.
pub fn offloads() -> bool {
    let config = &Config::get().program_postfetch;
    is_on() && (config.mode != PostFetchMode::Offloaded || config.cache.is_some())
}

/// Whether a node is to be offloaded to the device of a backend.
///
/// # Safety
///
/// A live backend and a live node of this copy of ggml.
pub unsafe fn offloads_node(ggml: &Ggml, backend: *mut Backend, node: *const Tensor) -> bool {
    let layout = &ggml.layout;
    // SAFETY: as the caller ensures; sources of a live node are live and have names.
    unsafe {
        let device = (ggml.f.ggml_backend_get_device)(backend);
        if device.is_null() || !instance::is_usable(ggml, device) {
            return false;
        }
        let [_, used, tokens, _]: [i64; 4] = layout.read(node, layout.ne);
        let ids = used.saturating_mul(tokens);
        let fits = ids > 0 && ids <= SLOTS_OF_GRAPH.get() as i64;
        if layout.read::<i32>(node, layout.op) != ggml.ops.mul_mat_id {
            // A product on the device would wait for an addition on the CPU.
            let mode = Config::get().program_postfetch.mode;
            return (fits || mode == PostFetchMode::All) && biases::adds_biases(ggml, node);
        }
        let weight: *const Tensor = layout.read(node, layout.src);
        let name = CStr::from_ptr((ggml.f.ggml_get_name)(weight));
        let Some(name) = name.to_str().ok().and_then(ExpertName::parse) else {
            return false;
        };
        match Config::get().program_postfetch.mode {
            _ if ids == 0 => false,
            _ if fits => true,
            PostFetchMode::Off | PostFetchMode::Offloaded => false,
            PostFetchMode::Down => name.projection == Projection::Down,
            PostFetchMode::All => true,
        }
    }
}

/// Returns the most routed ids that a product of a graph has.
///
/// # Safety
///
/// A live graph of this copy.
pub unsafe fn most_ids(ggml: &Ggml, reads: &GraphReads) -> usize {
    let count = |(_, ids): (*mut Tensor, *mut Tensor)| {
        // SAFETY: as the caller ensures.
        let [used, tokens, ..]: [i64; 4] = unsafe { ggml.layout.read(ids, ggml.layout.ne) };
        usize::try_from(used.saturating_mul(tokens)).unwrap_or(usize::MAX)
    };
    reads.routed().map(count).max().unwrap_or(0)
}
