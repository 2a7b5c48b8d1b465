//! Ids and copies of a scheduler, reported by its copy callback.
//!
//! llama.cpp from b11481 on copies experts in a function that it gives to the scheduler
//! (`ggml_backend_sched_set_copy_callback`). The scheduler asks it before each copy of a weight in host
//! memory, right before it submits the part of the graph that reads the copy; false makes the
//! scheduler copy the whole weight. The drop-in answers first. For what it does not leave out, the answer
//! is that of the program's function, so that the program copies as without the drop-in.
//!
//! | copy | left out |
//! |---|---|
//! | of experts | if they are in slots, or were requested: at the first matrix of a layer, its ids are read |
//! | of expert biases | if the device has them |
//! | of a slot map of the program's own expert cache, of other weights | never |
//!
//! For a layer of which the program's own expert cache has experts, the program's function copies these
//! on the device; its other copies are left out one by one, as in [`inferred`](super::inferred).

use std::ffi::c_void;

use super::known::leaves_out;
use super::state::{Order, ProgramCallback, State, state_of};
use crate::ggml::{Backend, CopyCallback, Ggml, Graph, Tensor};
use crate::program::parts;
use crate::program::sched::Scheduler;

/// Keeps the program's callback of a scheduler, which reports its copies from now on.
pub fn set(scheduler: &Scheduler, function: Option<CopyCallback>, data: *mut c_void) {
    if let Some(mut state) = state_of(scheduler) {
        state.callback = Some(ProgramCallback { function, data });
        state.order = Order::Expected;
    }
}

/// Returns the program's callback of a scheduler, and its last argument; `None` if the program set none.
pub fn of_program(scheduler: &Scheduler) -> Option<(CopyCallback, *mut c_void)> {
    let callback = state_of(scheduler)?.callback?;
    Some((callback.function?, callback.data))
}

/// Returns whether a copy that a scheduler is about to make for a part is left out.
///
/// # Safety
///
/// The arguments that the scheduler passes to its callback, on the thread that evaluates.
pub unsafe fn is_copied(
    scheduler: &Scheduler,
    backend: *mut Backend,
    weight: *const Tensor,
    copy: *mut Tensor,
    part: *mut Graph,
) -> bool {
    let ggml = scheduler.ggml();
    // SAFETY: as the caller ensures.
    let ids = unsafe { ids_of_first(ggml, part, copy) };
    // The part that computed ids comes before. If it was not seen, this one cannot wait either.
    let are_parts_seen = parts::are_seen();
    if let Some(ids) = ids.filter(|_| are_parts_seen) {
        // SAFETY: as the caller ensures; what the first node of a part reads is computed.
        unsafe { read_ids(scheduler, backend, copy, ids) };
    }
    let Some(mut state) = state_of(scheduler) else {
        return false;
    };
    if are_parts_seen && state.biases.is_copied(weight, copy) {
        return true;
    }
    let State { plan, fetcher, .. } = &mut *state;
    let (Some(plan), Some(fetcher)) = (plan, fetcher) else {
        return false;
    };
    let Some((layer, product)) = plan.reach(copy) else {
        return false;
    };
    if !are_parts_seen || backend != layer.backend || weight != product.weight.cast_const() {
        state.stand_back();
        return false;
    }
    let is_same = |ids| layer.known && layer.ids.contains(&ids);
    if !layer.ahead && !ids.is_some_and(is_same) {
        return false;
    }
    let bytes = product.used_bytes;
    leaves_out(fetcher, layer, product, bytes, |_| layer.is_whole)
}

/// Returns the ids of the product that a part begins with, if it reads this copy. They are computed
/// before the part.
///
/// # Safety
///
/// A live part of a graph.
unsafe fn ids_of_first(ggml: &Ggml, part: *mut Graph, copy: *mut Tensor) -> Option<*mut Tensor> {
    let (f, layout) = (&ggml.f, &ggml.layout);
    // SAFETY: as the caller ensures; nodes of a live graph and their sources are live.
    unsafe {
        if (f.ggml_graph_n_nodes)(part) == 0 {
            return None;
        }
        let node = (f.ggml_graph_node)(part, 0);
        let [matrix, _, ids]: [*mut Tensor; 3] = layout.read(node, layout.src);
        let op: i32 = layout.read(node, layout.op);
        (op == ggml.ops.mul_mat_id && matrix == copy).then_some(ids)
    }
}

/// Reads the ids of a layer that are not known in this evaluation.
///
/// # Safety
///
/// The arguments that the scheduler passes to its callback, on the thread that evaluates; the backend
/// has the ids or will have them once it is waited for.
unsafe fn read_ids(
    scheduler: &Scheduler,
    backend: *mut Backend,
    copy: *mut Tensor,
    ids: *mut Tensor,
) {
    let Some(mut state) = state_of(scheduler) else {
        return;
    };
    let ggml = scheduler.ggml();
    let Some(plan) = &state.plan else {
        return;
    };
    let Some((at, _)) = plan.find(copy) else {
        return;
    };
    let layer = &plan.layers[at];
    if layer.known || layer.backend != backend || !layer.ids.contains(&ids) {
        return;
    }
    let mut bytes = std::mem::take(&mut state.ids);
    // SAFETY: as the caller ensures; the ids are a live tensor.
    unsafe {
        state.request_input(at, backend);
        // Nothing is locked while the device is waited for.
        drop(state);
        bytes.resize((ggml.f.ggml_nbytes)(ids), 0);
        let to = bytes.as_mut_ptr().cast();
        (ggml.f.ggml_backend_tensor_get_async)(backend, ids, to, 0, bytes.len());
        (ggml.f.ggml_backend_synchronize)(backend);
    }
    let Some(mut state) = state_of(scheduler) else {
        return;
    };
    // SAFETY: the bytes of the tensor were just read.
    unsafe { state.read(ggml, at, ids, (bytes.as_ptr(), bytes.len())) };
    state.ids = bytes;
}
