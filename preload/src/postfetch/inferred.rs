//! Ids and copies of a scheduler without a copy callback, inferred from its calls.
//!
//! Builds of llama.cpp before b11481 copy experts in the scheduler itself:
//!
//! | call of the scheduler | here |
//! |---|---|
//! | `ggml_backend_tensor_get_async` of ids, `ggml_backend_synchronize` | the ids of a layer are known |
//! | `ggml_backend_tensor_set_async` of experts, `ggml_backend_tensor_copy` of biases | left out if their bytes are copied early |
//!
//! The first evaluation of a scheduler only checks that the calls come in this order. The program's
//! copy callback copies experts by the same call, so ranges are left out there, too.

use std::cell::Cell;
use std::ffi::c_void;
use std::ops::Range;

use parking_lot::MutexGuard;
use sidecar_core::config::Config;

use super::figures::{FIGURES, Reason};
use super::known::leaves_out;
use super::plan::Layer;
use super::state::{Order, State, current};
use super::transfer::{Piece, Progress, Request};
use crate::ggml::{Backend, Ggml, Tensor};
use crate::program::{parts, routing, weight_copies};

/// Ids that the scheduler has requested: the layer, the tensor, and where its bytes go.
#[derive(Clone, Copy)]
struct Requested {
    layer: usize,
    ids: *const Tensor,
    data: *const u8,
    size: usize,
}

thread_local! {
    /// The ids for which this thread waits next.
    static REQUESTED: Cell<Option<Requested>> = const { Cell::new(None) };
}

/// Returns the state of the scheduler whose parts this thread evaluates, if it has a plan and no
/// copy callback.
fn without_callback() -> Option<MutexGuard<'static, State>> {
    parts::current().filter(|of| !weight_copies::are_reported(of))?;
    current()
}

/// Records that the scheduler requested bytes of a tensor.
///
/// # Safety
///
/// The arguments of `ggml_backend_tensor_get_async`.
pub unsafe fn bytes_requested(
    backend: *mut Backend,
    tensor: *const Tensor,
    data: *const c_void,
    size: usize,
) {
    let Some(mut state) = without_callback() else {
        return;
    };
    let is_of = |layer: &Layer| !layer.known && layer.ids.contains(&tensor.cast_mut());
    let layers = state.plan.as_ref().map_or(&[][..], |plan| &plan.layers);
    if let Some(layer) = layers.iter().position(is_of) {
        // SAFETY: the backend from which the scheduler requested the ids.
        unsafe { state.request_input(layer, backend) };
        REQUESTED.set(Some(Requested {
            layer,
            ids: tensor,
            data: data.cast(),
            size,
        }));
    }
}

/// Records that the scheduler has waited for a backend: the ids that it requested are known.
///
/// # Safety
///
/// Called right after the wait, on the thread of the request.
pub unsafe fn waited(ggml: &'static Ggml) {
    let Some(requested) = REQUESTED.take() else {
        return;
    };
    if let Some(mut state) = current() {
        // SAFETY: the scheduler has just received the bytes of the tensor at this address; ids that
        // span more bytes are not used.
        let ids = unsafe { routing::ids_at(ggml, requested.ids, requested.data) };
        if let Some(ids) = ids.filter(|of| of.bytes.len() <= requested.size) {
            state.known(ggml, requested.layer, &ids);
        }
    }
}

/// Returns whether a copy of the scheduler is left out: its bytes are copied early.
///
/// # Safety
///
/// The arguments of `ggml_backend_tensor_set_async`.
pub unsafe fn is_copied(
    ggml: &Ggml,
    backend: *mut Backend,
    tensor: *mut Tensor,
    data: *const c_void,
    bytes: Range<usize>,
) -> bool {
    let Some(mut state) = current() else {
        return false;
    };
    let state = &mut *state;
    let (Some(plan), Some(fetcher)) = (&mut state.plan, &state.fetcher) else {
        return false;
    };
    let Some((layer, product)) = plan.reach(tensor) else {
        return false;
    };
    // SAFETY: the matrix is live as long as the graph.
    let start: usize = unsafe { ggml.layout.read(product.weight, ggml.layout.data) };
    let expected = layer.known && backend == layer.backend && start + bytes.start == data as usize;
    if !expected {
        state.stand_back();
        return false;
    }
    if leaves_out(fetcher, layer, product, bytes.len(), |request| {
        covers(request, start, &bytes)
    }) {
        return true;
    }
    let requested = product.transfer.progress() != Progress::Idle;
    let reason = match state.order {
        Order::Unknown => Reason::FirstEvaluation,
        _ if requested || Config::get().postfetch.block_on_miss => Reason::NotRequested,
        _ => Reason::Missed,
    };
    FIGURES.host_copied(bytes.len(), reason);
    false
}

/// Returns whether a copy of the scheduler is left out: the device has the biases already.
pub fn is_bias_copied(from: *const Tensor, to: *const Tensor) -> bool {
    let copied = |mut state: MutexGuard<'_, State>| {
        state.biases.is_copied(from, to) && state.order == Order::Expected
    };
    without_callback().is_some_and(copied)
}

/// Whether a copy of a whole matrix at `start` has a range of its bytes.
fn covers(request: &Request, start: usize, bytes: &Range<usize>) -> bool {
    let has = |piece: &Piece| {
        piece.to.start <= bytes.start
            && bytes.end <= piece.to.end
            && piece.from == start + piece.to.start
    };
    request.pieces.iter().any(has)
}
