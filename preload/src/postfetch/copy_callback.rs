//! Ids and copies of a scheduler, reported by its copy callback.
//!
//! The drop-in answers [the scheduler](crate::program::weight_copies) first. For what it does not leave out,
//! the answer is that of the program's function, so that the program copies as without the drop-in.
//!
//! | copy | left out |
//! |---|---|
//! | of experts | if they are in slots, or were requested: at the first matrix of a layer, its ids are read |
//! | of expert biases | if the device has them |
//! | of a slot map of the program's own expert cache, of other weights | never |
//!
//! For a layer of which the program's own expert cache has experts, the program's function copies these
//! on the device; its other copies are left out one by one, as in [`inferred`](super::inferred).

use super::known::leaves_out;
use super::state::{Order, State, state_of};
use crate::program::parts;
use crate::program::sched::Scheduler;
use crate::program::weight_copies::WeightCopy;

/// Notes that a scheduler reports its copies.
pub fn set(scheduler: &Scheduler) {
    if let Some(mut state) = state_of(scheduler) {
        state.order = Order::Expected;
    }
}

/// Returns whether a copy that a scheduler is about to make is left out.
///
/// # Safety
///
/// During the call of the scheduler's copy callback, on the thread that evaluates.
pub unsafe fn is_copied(scheduler: &Scheduler, of: &WeightCopy) -> bool {
    // The part that computed ids comes before. If it was not seen, this one cannot wait either.
    let are_parts_seen = parts::are_seen();
    if are_parts_seen {
        // SAFETY: as the caller ensures.
        unsafe { read_ids(scheduler, of) };
    }
    let Some(mut state) = state_of(scheduler) else {
        return false;
    };
    if are_parts_seen && state.biases.is_copied(of.weight, of.copy) {
        return true;
    }
    let State { plan, fetcher, .. } = &mut *state;
    let (Some(plan), Some(fetcher)) = (plan, fetcher) else {
        return false;
    };
    let Some((layer, product)) = plan.reach(of.copy) else {
        return false;
    };
    if !are_parts_seen || of.backend != layer.backend || of.weight != product.weight.cast_const() {
        state.leave_copies_to_program();
        return false;
    }
    let is_same = |ids| layer.known && layer.ids.contains(&ids);
    if !layer.ahead && !of.ids.is_some_and(is_same) {
        return false;
    }
    let bytes = product.used_bytes;
    leaves_out(fetcher, layer, product, bytes, |_| layer.is_whole)
}

/// Reads the ids of a layer that are not known in this evaluation.
///
/// # Safety
///
/// As for [`is_copied`].
unsafe fn read_ids(scheduler: &Scheduler, of: &WeightCopy) {
    let (Some(ids), Some(mut state)) = (of.ids, state_of(scheduler)) else {
        return;
    };
    let Some(plan) = &state.plan else {
        return;
    };
    let Some((at, _)) = plan.find(of.copy) else {
        return;
    };
    let layer = &plan.layers[at];
    if layer.known || layer.backend != of.backend || !layer.ids.contains(&ids) {
        return;
    }
    // SAFETY: as the caller ensures; nothing is locked while the device is waited for.
    let known = unsafe {
        state.request_input(at, of.backend);
        drop(state);
        of.read_ids()
    };
    if let (Some(known), Some(mut state)) = (known, state_of(scheduler)) {
        state.known(of.ggml, at, &known);
    }
}
