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
use crate::program::{parts, weight_copies};

/// Returns the state of the scheduler whose parts this thread evaluates, if it has a plan and no
/// copy callback.
fn without_callback() -> Option<MutexGuard<'static, State>> {
    weight_copies::unreported()?;
    current()
}

/// Returns the position of the layer that has a tensor of ids, unless they are known.
fn unknown_layer(state: &State, ids: *const Tensor) -> Option<usize> {
    let is_of = |layer: &Layer| !layer.known && layer.ids.contains(&ids.cast_mut());
    state.plan.as_ref()?.layers.iter().position(is_of)
}

/// Requests what the CPU needs beside ids that the scheduler requested.
///
/// # Safety
///
/// The arguments of `ggml_backend_tensor_get_async`.
pub unsafe fn bytes_requested(backend: *mut Backend, tensor: *const Tensor) {
    if let Some(mut state) = without_callback()
        && let Some(layer) = unknown_layer(&state, tensor)
    {
        // SAFETY: the backend from which the scheduler requested the ids.
        unsafe { state.request_input(layer, backend) };
    }
}

/// Records that the scheduler has waited for a backend: the ids that it requested are known.
///
/// # Safety
///
/// Called right after the wait, on the thread of the request.
pub unsafe fn waited(ggml: &'static Ggml) {
    if let Some(requested) = parts::requested()
        && let Some(mut state) = without_callback()
        && let Some(layer) = unknown_layer(&state, requested.tensor)
        // SAFETY: the scheduler has just received the bytes of the tensor.
        && let Some(ids) = unsafe { weight_copies::requested_ids(ggml) }
    {
        state.known(ggml, layer, &ids);
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
        state.leave_copies_to_program();
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
