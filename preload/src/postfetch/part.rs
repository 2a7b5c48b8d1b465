//! The evaluation of a part of a graph that has products of experts.
//!
//! The products wait for early copies, or read slots while the part is submitted. Where the CPU
//! computes experts that have no slot, the part is divided.

use std::ffi::c_int;

use super::cache::Changed;
use super::marked::Marked;
use super::plan::{LayerSlots, Product};
use super::state::current;
use super::transfer::Progress;
use crate::ggml::{Backend, Ggml, Graph, STATUS_FAILED};

/// How a part of a graph is evaluated.
pub enum Evaluation {
    /// As a whole.
    Whole,
    /// In two pieces, with the CPU's experts of a layer between them.
    Divided {
        /// The number of the layer in its plan.
        layer: usize,
        /// The number of nodes in the first piece.
        nodes: c_int,
    },
    /// Not at all: the part has another form than in the evaluation before.
    Refused,
}

/// Makes a backend wait for the early copies that a part of a graph reads, which it is about to
/// evaluate.
///
/// # Safety
///
/// A live part of a graph and a live backend of this copy.
pub unsafe fn begins(ggml: &'static Ggml, backend: *mut Backend, part: *mut Graph) -> Evaluation {
    let Some(mut state) = current() else {
        return Evaluation::Whole;
    };
    let state = &mut *state;
    let computes_misses = state.computes_misses();
    if std::mem::take(&mut state.at_start) {
        // Not before: the inputs of the graph are copied first, and would wait behind experts.
        state.look_ahead(ggml, 0);
    }
    let (Some(plan), Some(fetcher)) = (&mut state.plan, &state.fetcher) else {
        return Evaluation::Whole;
    };
    let layout = &ggml.layout;
    let (mut expected, mut lost) = (true, false);
    let mut evaluation = Evaluation::Whole;
    // SAFETY: nodes of a live graph and their sources are live.
    let nodes = unsafe { (ggml.f.ggml_graph_n_nodes)(part) };
    for at in 0..nodes {
        // SAFETY: as above.
        let (node, source) = unsafe {
            let node = (ggml.f.ggml_graph_node)(part, at);
            let extents: [i64; 4] = layout.read(node, layout.ne);
            // Without a token, nothing is copied.
            if layout.read::<i32>(node, layout.op) != ggml.ops.mul_mat_id || extents[2] == 0 {
                continue;
            }
            (node, layout.read(node, layout.src))
        };
        let Some((number, role)) = plan.find(source) else {
            continue;
        };
        let layer = &mut plan.layers[number];
        let product = &layer.products[role];
        let has_loads = |slots: &LayerSlots| {
            let cache = state.cache.as_mut();
            slots.ready && cache.is_some_and(|cache| cache.layer(slots.at).has_loads())
        };
        let mut in_slots = layer.slots.as_ref().is_some_and(|slots| slots.ready);
        let waits = layer.slots.as_ref().is_none_or(|slots| slots.waits);
        let requested = product.transfer.progress() != Progress::Idle;
        if waits && (requested || layer.slots.as_ref().is_some_and(has_loads)) {
            // SAFETY: the backend of the product, on the thread that uses it.
            if !unsafe { fetcher.acquire(&product.transfer, backend) } {
                let slots = in_slots.then_some(&state.used);
                // SAFETY: as above.
                unsafe { copy_late(ggml, backend, product, slots) };
                in_slots = false;
                lost = fetcher.is_lost();
            }
        }
        state.seen |= product.is_reached;
        expected &= product.is_reached && layer.backend == backend;
        if let Some(slots) = &mut layer.slots
            && let Some(cache) = &mut state.cache
            && in_slots
        {
            // SAFETY: as above, and the tensors of the slots and the ids live as long as the plan.
            unsafe {
                if !std::mem::replace(&mut slots.written, true) {
                    cache.layer(slots.at).write_ids(ggml, backend, slots.ids);
                }
                let tensor = cache.tensor(slots.at, role);
                let changed = Changed::new(ggml, node, product.copy, tensor, slots.ids);
                state.changed.push(changed);
            }
        }
        if let Some(slots) = &mut layer.slots
            && let Some(on_cpu) = &mut slots.on_cpu
        {
            // SAFETY: as above.
            let is_input =
                |at| unsafe { (ggml.f.ggml_graph_node)(part, at) }.cast_const() == on_cpu.input;
            let is_early = backend == layer.backend && !(0..at).any(is_input);
            let is_last = node == on_cpu.output;
            let is_first = matches!(evaluation, Evaluation::Whole);
            if is_early && is_last && is_first {
                // A layer is divided in the same way whether or not it misses experts.
                if computes_misses || !on_cpu.missed.is_empty() {
                    let (layer, nodes) = (number, at + 1);
                    evaluation = Evaluation::Divided { layer, nodes };
                }
            } else if !is_early || is_last {
                if !on_cpu.missed.is_empty() {
                    evaluation = Evaluation::Refused;
                }
                slots.on_cpu = None;
            }
        }
    }
    if !expected {
        state.leave_copies_to_program();
    }
    if lost {
        state.leave(ggml);
    }
    evaluation
}

/// Makes the copy of a product that the program left out, in memory of its own: the memory for early copies
/// may be written at any time. Experts that were to be in slots are the `used` ones of the layer.
///
/// # Safety
///
/// The live backend of the product, on the thread that uses it.
unsafe fn copy_late(
    ggml: &'static Ggml,
    backend: *mut Backend,
    product: &Product,
    used: Option<&Marked>,
) {
    let mut pieces = Vec::new();
    match used {
        Some(used) => {
            // SAFETY: the matrix is live as long as the graph.
            let from = unsafe { ggml.layout.read(product.weight, ggml.layout.data) };
            used.pieces(from, product.expert_bytes, &[], &mut pieces);
        }
        None => pieces.clone_from(&product.transfer.request().pieces),
    }
    // SAFETY: as the caller ensures; the program's own copy has the same source.
    unsafe {
        product.restore(ggml);
        product.transfer.issue(backend, product.copy, &pieces);
    }
}

/// Computes the experts of a layer that have no slot. Returns ggml's status.
///
/// # Safety
///
/// The backend of the layer, to which its nodes up to down were submitted.
pub unsafe fn compute_missed(backend: *mut Backend, layer: usize) -> u32 {
    // Nothing is locked while the program's abort callback may be called.
    let taken = current().and_then(|mut state| {
        let slots = state.slots(layer)?;
        Some((slots.on_cpu.take()?, slots.in_order))
    });
    let Some((mut on_cpu, in_order)) = taken else {
        return STATUS_FAILED as u32;
    };
    on_cpu.checked = true;
    // SAFETY: as the caller ensures.
    let status = unsafe { on_cpu.compute(backend, in_order) };
    if let Some(mut state) = current()
        && let Some(slots) = state.slots(layer)
    {
        slots.on_cpu = Some(on_cpu);
    }
    status
}

/// The end of a part that was submitted: its products are as the scheduler made them.
pub struct Ends;

impl Drop for Ends {
    fn drop(&mut self) {
        if let Some(mut state) = current() {
            // The last change of a tensor is undone first.
            while let Some(changed) = state.changed.pop() {
                drop(changed);
            }
        }
    }
}
