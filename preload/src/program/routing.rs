//! The moment at which the routed experts of a layer are known.
//!
//! In llama.cpp's graphs, the routed ids are a view of the sorted scores: `src[2]` of each
//! `GGML_OP_MUL_MAT_ID`. After a graph is allocated, that view is made to call a function
//! ([`Ggml::call_at_view`]); in ik_llama.cpp, a node after it ([`UsedWeight::after_ids`](crate::program::graph::UsedWeight::after_ids)). The CPU
//! backend calls the function when the ids are complete and before any expert of the layer is
//! read, also when the program uses the graph again.
//!
//! Where a GPU computes the router, and the CPU the experts, the scheduler copies the ids to the
//! CPU before it lets the CPU evaluate its part of the graph. At that moment the ids are complete
//! ([`split_begins`]).
//!
//! Each node has a record, with what the ids are for ([`Watched`](crate::program::watched)).

use std::borrow::Cow;
use std::ffi::{CStr, c_int, c_void};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use sidecar_core::config::Config;
use sidecar_core::experts::ExpertName;
use sidecar_core::stream::{Matrices, Ranking};
use sidecar_core::trace::Ids;

use crate::ggml::{Callback, F32, Ggml, Graph, Sched, Tensor};
use crate::program::graph::{Backends, GraphReads, OP_NONE};
use crate::program::models::{self, Model, TensorPointer};
use crate::program::sched::Scheduler;
use crate::program::watched::{Place, Record};

/// The experts that a layer was routed to, before any of them is read.
pub struct Routed<'a> {
    /// The model.
    pub model: &'a Arc<Model>,
    /// The number of the layer.
    pub layer: u32,
    /// Matrices that are in the mapping of their file.
    pub mapped: Matrices,
    /// The ids.
    pub ids: Ids<'a>,
}

/// The experts of a layer in the order of their scores, of which the first are about to be used.
pub struct Ranked<'a> {
    /// The model.
    pub model: &'a Arc<Model>,
    /// The number of the layer.
    pub layer: u32,
    /// Matrices that are in the mapping of their file.
    pub mapped: Matrices,
    /// The ranking; what is used is chosen by its order after the call.
    pub ranking: Ranking<'a>,
}

/// Whether parts of the graph of a scheduler are evaluated on other devices than the CPU.
pub fn is_mixed(scheduler: &Scheduler) -> bool {
    scheduler.watched.is_mixed()
}

/// Whether a graph had ids in a form that is not understood.
static UNKNOWN: AtomicBool = AtomicBool::new(false);

/// Whether a graph had ids in a form that is not understood.
pub fn is_unknown() -> bool {
    UNKNOWN.load(Ordering::Relaxed)
}

/// Makes a graph that was allocated call `function` when the ids of a layer are complete.
/// `function` passes its arguments to [`known`].
///
/// # Safety
///
/// A scheduler and a graph of this copy, both live; the graph was just allocated.
pub unsafe fn watch(
    scheduler: &Scheduler,
    sched: *mut Sched,
    reads: &GraphReads,
    backends: &Backends,
    function: Callback,
) {
    let ggml = scheduler.ggml();
    let on_cpu = backends.on_cpu;
    let Some(&cpu) = backends.devices.last() else {
        return;
    };
    scheduler.watched.set_mixed(!on_cpu);
    let mut places = scheduler.watched.places.lock();
    let mut used = 0;
    let experts = reads.weights.iter().filter(|weight| !weight.ids.is_null());
    for weight in experts {
        let Some((model, name, mapped)) = expert(weight.tensor) else {
            continue;
        };
        let matrix = (name.projection, TensorPointer(weight.tensor), mapped);
        // The matrices of a layer follow each other.
        let known = places[..used].iter().rev().find_map(|place| {
            let mut record = place.lock();
            let record = record.as_mut()?;
            (record.ids.0 == weight.ids).then(|| record.matrices.push(matrix))
        });
        if known.is_some() {
            continue;
        }
        if used == places.len() {
            places.push(Box::leak(Box::default()));
        }
        let place = places[used];
        // SAFETY: as the caller ensures; the place is never freed.
        unsafe {
            let data = std::ptr::from_ref(place).cast();
            let node = weight.after_ids;
            if !on_cpu && !node.is_null() && !is_on_cpu(ggml, sched, node) {
                continue;
            }
            if node.is_null() || !ggml.call_at_view(cpu, node, function, data) {
                note_unknown(ggml, name.layer, weight.ids);
                continue;
            }
        }
        let is_ranked = Config::get().preference().is_some() && weight.after_ids == weight.ids;
        // SAFETY: as the caller ensures.
        let ranked_by_logits = is_ranked
            .then(|| unsafe { ranking_of(ggml, sched, weight.ids, on_cpu) })
            .flatten();
        *place.lock() = Some(Record {
            ids: TensorPointer(weight.ids),
            node: weight.after_ids as usize,
            layer: name.layer,
            matrices: vec![matrix],
            ranked_by_logits,
            model,
        });
        used += 1;
    }
    for place in &places[used..] {
        *place.lock() = None;
    }
}

/// Forgets the graph of a scheduler.
pub fn forget(scheduler: &Scheduler) {
    scheduler.watched.forget();
}

/// Returns the model and the name of an expert tensor that was loaded in the mapping of its file,
/// and its address there.
fn expert(tensor: *mut Tensor) -> Option<(Arc<Model>, ExpertName, usize)> {
    let (model, at) = models::find(tensor)?;
    let name = ExpertName::parse(model.name(at).to_str().ok()?)?;
    let instances = &model.tensors[at].instances;
    let instance = instances
        .iter()
        .find(|instance| instance.tensor.0 == tensor)?;
    let address = instance.mapped.then_some(instance.original.data as usize)?;
    Some((model, name, address))
}

/// Whether ids are the first ones of each row of sorted scores in memory of the CPU, and these scores are logits; `None` if
/// that is not known.
///
/// # Safety
///
/// As for [`watch`].
unsafe fn ranking_of(
    ggml: &Ggml,
    sched: *mut Sched,
    ids: *mut Tensor,
    on_cpu: bool,
) -> Option<bool> {
    // SAFETY: sources of a live node are live.
    unsafe {
        let sorted = ggml.layout.source(ids, 0);
        if sorted.is_null() || op_name(ggml, sorted) != "ARGSORT" {
            return None;
        }
        let scores = ggml.layout.source(sorted, 0);
        let in_memory = |tensor| on_cpu || is_on_cpu(ggml, sched, tensor);
        if scores.is_null() || !in_memory(sorted) || !in_memory(scores) {
            return None;
        }
        let mut from = scores;
        loop {
            match &*op_name(ggml, from) {
                "MUL_MAT" => return Some(true),
                "SOFT_MAX" | "UNARY" | "SQRT" | "SET_ROWS" => return Some(false),
                // A bias, a mask, or another shape.
                "ADD" | "RESHAPE" => from = ggml.layout.source(from, 0),
                _ => return None,
            }
            if from.is_null() {
                return None;
            }
        }
    }
}

/// Returns the name of the operation of a tensor.
///
/// # Safety
///
/// A live tensor of this copy.
unsafe fn op_name<'a>(ggml: &Ggml, tensor: *const Tensor) -> Cow<'a, str> {
    // SAFETY: as the caller ensures; ggml names each of its operations, in static memory.
    unsafe {
        CStr::from_ptr((ggml.f.ggml_op_name)(
            ggml.layout.read(tensor, ggml.layout.op),
        ))
    }
    .to_string_lossy()
}

/// Whether the CPU evaluates a node.
///
/// # Safety
///
/// As for [`watch`].
unsafe fn is_on_cpu(ggml: &Ggml, sched: *mut Sched, node: *mut Tensor) -> bool {
    // SAFETY: as the caller ensures.
    unsafe {
        let backend = (ggml.f.ggml_backend_sched_get_tensor_backend)(sched, node);
        !backend.is_null() && ggml.is_cpu((ggml.f.ggml_backend_get_device)(backend))
    }
}

fn note_unknown(ggml: &Ggml, layer: u32, ids: *mut Tensor) {
    if !UNKNOWN.swap(true, Ordering::Relaxed) {
        // SAFETY: the ids are a live tensor.
        let op = unsafe { op_name(ggml, ids) };
        log::warn!(
            "layer {layer}: the routed ids come from the operation {op}, where a VIEW is expected that the CPU can replace; the experts of such layers are read as without streaming"
        );
    }
}

/// Calls `rank` with the ranking of a node whose ids are complete, if it has one, and `report` with its experts.
///
/// # Safety
///
/// The arguments of a call that [`watch`] requested.
pub unsafe fn known(
    node: *mut Tensor,
    thread: c_int,
    place: *mut c_void,
    rank: impl FnOnce(&mut Ranked<'_>),
    report: impl FnOnce(&Routed<'_>),
) {
    if thread != 0 {
        return;
    }
    // SAFETY: a place, which is never freed.
    let place = unsafe { &*place.cast::<Place>() };
    let Some(record) = place.try_lock() else {
        return;
    };
    let Some(record) = record
        .as_ref()
        .filter(|record| record.node == node as usize)
    else {
        return;
    };
    let ggml = record.model.ggml;
    let mut mapped = Matrices::default();
    for (projection, tensor, address) in &record.matrices {
        // SAFETY: the graph reads the tensor, which is live.
        if unsafe { is_at(ggml, tensor.0, *address) } {
            mapped.insert(*projection);
        }
    }
    if let Some(logits) = record.ranked_by_logits
        // SAFETY: the node is being evaluated, and what it views was computed just before.
        && let Some(ranking) = unsafe { ranking(ggml, record.ids.0, logits) }
    {
        rank(&mut Ranked {
            model: &record.model,
            layer: record.layer,
            mapped,
            ranking,
        });
    }
    // SAFETY: the node is being evaluated: its data is complete, and has the bytes of its
    // extents.
    unsafe {
        let Some(ids) = ids_of(ggml, record.ids.0) else {
            return;
        };
        report(&Routed {
            model: &record.model,
            layer: record.layer,
            mapped,
            ids,
        });
    }
}

/// Returns the ranking of which ids are the first ones.
///
/// # Safety
///
/// [`ranking_of`] knows it. What the ids view is complete, nothing else uses it for `'a`, and nothing writes to the
/// scores.
unsafe fn ranking<'a>(ggml: &Ggml, ids: *mut Tensor, logits: bool) -> Option<Ranking<'a>> {
    let layout = &ggml.layout;
    // SAFETY: as the caller ensures; the elements of both are 32 bits wide, and the rows follow each other.
    unsafe {
        let sorted = layout.source(ids, 0);
        let scores = layout.source(sorted, 0);
        let extents = |of: *mut Tensor| layout.read::<[i64; 4]>(of, layout.ne);
        let strides = |of: *mut Tensor| layout.read::<[usize; 4]>(of, layout.nb);
        let data = |of: *mut Tensor| layout.read::<*mut u8>(of, layout.data);
        let [experts, tokens, 1, 1] = extents(sorted) else {
            return None;
        };
        let [used, of_ids, 1, 1] = extents(ids) else {
            return None;
        };
        let len = usize::try_from(experts.checked_mul(tokens)?).ok()?;
        let row = usize::try_from(experts).ok()? * 4;
        let is_packed = |of| strides(of)[..2] == [4, row] && extents(of) == extents(sorted);
        let is_known = is_packed(sorted)
            && is_packed(scores)
            && of_ids == tokens
            && strides(ids)[..2] == [4, row]
            && data(ids) == data(sorted)
            && layout.read::<i32>(scores, layout.ty) == F32;
        let (order, scores) = (data(sorted).cast::<i32>(), data(scores).cast::<f32>());
        let is_usable = is_known && order.is_aligned() && scores.is_aligned();
        (is_usable && !order.is_null() && !scores.is_null()).then(|| Ranking {
            scores: std::slice::from_raw_parts(scores, len),
            order: std::slice::from_raw_parts_mut(order, len),
            experts: row / 4,
            used: used.max(0) as usize,
            logits,
        })
    }
}

/// Calls `report` with the experts of the layers that a part of a graph reads, as far as their
/// ids were computed by another part.
///
/// # Safety
///
/// A live part of a graph of this copy, which the CPU is about to evaluate.
pub unsafe fn split_begins(ggml: &Ggml, split: *mut Graph, report: impl Fn(&Routed<'_>)) {
    let (f, layout) = (&ggml.f, &ggml.layout);
    let mut layer: Option<(*mut Tensor, Arc<Model>, u32, Matrices)> = None;
    let finish = |layer: Option<(*mut Tensor, Arc<Model>, u32, Matrices)>| {
        let Some((ids, model, layer, mapped)) = layer else {
            return;
        };
        // SAFETY: the ids are in memory of the CPU, which reads them, and were copied before.
        if let Some(ids) = unsafe { ids_of(ggml, ids) } {
            report(&Routed {
                model: &model,
                layer,
                mapped,
                ids,
            });
        }
    };
    // SAFETY: nodes of a live graph and their sources are live tensors.
    let count = unsafe { (f.ggml_graph_n_nodes)(split) };
    for at in 0..count {
        // SAFETY: as above.
        let (ids, sources) = unsafe {
            let node = (f.ggml_graph_node)(split, at);
            let used = ggml.ops.use_of(layout.read(node, layout.op));
            let Some(ids) = used.ids.map(|at| layout.source(node, at)) else {
                continue;
            };
            // What this part computes has an operation.
            if ids.is_null() || layout.read::<i32>(ids, layout.op) != OP_NONE {
                continue;
            }
            (ids, layout.sources(node))
        };
        for weight in sources {
            let Some((model, name, address)) = expert(weight) else {
                continue;
            };
            if layer.as_ref().is_none_or(|of| of.0 != ids) {
                finish(layer.replace((ids, model, name.layer, Matrices::default())));
            }
            // SAFETY: as above.
            let in_place = unsafe { is_at(ggml, weight, address) };
            if let Some((.., mapped)) = layer.as_mut().filter(|_| in_place) {
                mapped.insert(name.projection);
            }
        }
    }
    finish(layer);
}

/// Whether the data of a tensor is at an address.
///
/// # Safety
///
/// A live tensor of this copy.
unsafe fn is_at(ggml: &Ggml, tensor: *const Tensor, address: usize) -> bool {
    // SAFETY: as the caller ensures.
    let now: usize = unsafe { ggml.layout.read(tensor, ggml.layout.data) };
    now == address
}

/// Returns the ids of a tensor; `None` if there are none.
///
/// # Safety
///
/// A live tensor of integers in host memory whose data is complete, and stays for `'a`.
unsafe fn ids_of<'a>(ggml: &Ggml, tensor: *const Tensor) -> Option<Ids<'a>> {
    // SAFETY: as the caller ensures.
    unsafe {
        let data = ggml.layout.read(tensor, ggml.layout.data);
        ids_at(ggml, tensor, (data, (ggml.f.ggml_nbytes)(tensor)))
    }
}

/// Returns the ids of a tensor whose first `size` bytes are at `data`; `None` if there are none, or if
/// they span more bytes.
///
/// # Safety
///
/// A live tensor of integers. Its bytes stay at `data` for `'a`.
pub unsafe fn ids_at<'a>(
    ggml: &Ggml,
    tensor: *const Tensor,
    (data, size): (*const u8, usize),
) -> Option<Ids<'a>> {
    let layout = &ggml.layout;
    // SAFETY: as the caller ensures.
    unsafe {
        let ne: [i64; 4] = layout.read(tensor, layout.ne);
        let nb: [usize; 4] = layout.read(tensor, layout.nb);
        let (used, tokens) = (ne[0].max(0) as usize, ne[1].max(0) as usize);
        let len = Ids::byte_len(used, tokens, nb[0], nb[1])?;
        (len > 0 && len <= size && !data.is_null()).then(|| Ids {
            bytes: std::slice::from_raw_parts(data, len),
            used,
            tokens,
            used_stride: nb[0],
            token_stride: nb[1],
        })
    }
}
