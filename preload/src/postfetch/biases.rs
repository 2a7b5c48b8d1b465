//! Expert biases that stay on a device.
//!
//! Before each addition of an expert bias (`GGML_OP_ADD_ID`) that a GPU computes, the scheduler
//! copies the biases of all experts, and waits for that. Behind an early copy of a matrix on the
//! link, this wait is long. Biases are small, so each copy of the scheduler gets memory that it
//! keeps, and is copied once.

use std::ffi::CStr;

use sidecar_core::experts::ExpertName;

use super::instance;
use crate::ggml::{Buffer, Ggml, OwnBuffer, Sched, Tensor};
use crate::program::graph::GraphReads;
use crate::program::models;

/// Whether a node adds expert biases.
///
/// # Safety
///
/// A live node of this copy of ggml.
pub unsafe fn adds_biases(ggml: &Ggml, node: *const Tensor) -> bool {
    let layout = &ggml.layout;
    // SAFETY: as the caller ensures; sources of a live node are live and have names.
    unsafe {
        let bias: *const Tensor = layout.read(node, layout.src + 8);
        is_add_id(ggml, node) && is_bias(CStr::from_ptr((ggml.f.ggml_get_name)(bias)))
    }
}

/// Whether a node is `GGML_OP_ADD_ID`.
///
/// # Safety
///
/// A live node of this copy of ggml.
unsafe fn is_add_id(ggml: &Ggml, node: *const Tensor) -> bool {
    // SAFETY: as the caller ensures; ggml names each of its operations.
    unsafe {
        let op: i32 = ggml.layout.read(node, ggml.layout.op);
        CStr::from_ptr((ggml.f.ggml_op_name)(op)) == c"ADD_ID"
    }
}

fn is_bias(name: &CStr) -> bool {
    let stem = name
        .to_str()
        .ok()
        .and_then(|name| name.strip_suffix(".bias"));
    stem.is_some_and(|stem| ExpertName::parse(&format!("{stem}.weight")).is_some())
}

/// The biases of one matrix.
struct Bias {
    /// The tensor in host memory.
    weight: *mut Tensor,
    shape: (i32, [i64; 4]),
    /// The tensor on the device.
    tensor: *mut Tensor,
    _memory: OwnBuffer,
    /// The scheduler's copy in the present graph.
    copy: *mut Tensor,
    /// Whether the device has its bytes.
    loaded: bool,
}

// SAFETY: used by the thread that evaluates, while the program has the tensors.
unsafe impl Send for Bias {}

/// The biases of the graphs of a scheduler.
pub struct Biases(Vec<Bias>);

impl Biases {
    /// Returns none.
    pub const fn new() -> Biases {
        Biases(Vec::new())
    }

    /// Gives the scheduler's copies of biases in a graph memory that they keep.
    ///
    /// # Safety
    ///
    /// A scheduler and what its graph read before it was split; the graph was split and allocated
    /// since, and the scheduler was waited for.
    pub unsafe fn plan(&mut self, ggml: &'static Ggml, sched: *mut Sched, reads: &GraphReads) {
        let (f, layout) = (&ggml.f, &ggml.layout);
        self.forget_graph();
        for used in &reads.weights {
            // SAFETY: nodes of the graph, their sources and buffers are live.
            unsafe {
                let Some((model, at)) = models::find(used.tensor) else {
                    continue;
                };
                if !is_bias(model.name(at)) || !is_add_id(ggml, used.node) {
                    continue;
                }
                let copy: *mut Tensor = layout.read(used.node, layout.src + 8);
                let shape = |tensor: *mut Tensor| {
                    (
                        layout.read(tensor, layout.ty),
                        layout.read(tensor, layout.ne),
                    )
                };
                let backend = (f.ggml_backend_sched_get_tensor_backend)(sched, used.node);
                let buffer: *mut Buffer = layout.read(copy, layout.buffer);
                if copy == used.tensor
                    || backend.is_null()
                    || buffer.is_null()
                    || shape(copy) != shape(used.tensor)
                    || !instance::is_usable(ggml, (f.ggml_backend_get_device)(backend))
                {
                    continue;
                }
                let is_of = |of: &Bias| {
                    of.weight == used.tensor && of.shape == shape(copy) && of.copy.is_null()
                };
                if !self.0.iter().any(is_of) {
                    let buft = (f.ggml_backend_buffer_get_type)(buffer);
                    let (ty, ne): (i32, [i64; 4]) = shape(copy);
                    let Ok((memory, tensor)) =
                        OwnBuffer::for_tensor(ggml, buft, ty, &ne, c"expert-bias")
                    else {
                        return;
                    };
                    self.0.push(Bias {
                        weight: used.tensor,
                        shape: (ty, ne),
                        tensor,
                        _memory: memory,
                        copy: std::ptr::null_mut(),
                        loaded: false,
                    });
                }
                let Some(bias) = self.0.iter_mut().find(|of| is_of(of)) else {
                    continue;
                };
                bias.copy = copy;
                ggml.share_memory(copy, bias.tensor);
            }
        }
    }

    /// Returns whether a copy of the scheduler is left out, because the device has its bytes. If
    /// not, the scheduler makes it next.
    pub fn is_copied(&mut self, from: *const Tensor, to: *const Tensor) -> bool {
        let is_of = |of: &&mut Bias| of.copy.cast_const() == to && of.weight.cast_const() == from;
        let bias = self.0.iter_mut().find(is_of);
        bias.is_some_and(|bias| std::mem::replace(&mut bias.loaded, true))
    }

    /// Forgets which bytes the device has.
    pub fn clear(&mut self) {
        self.0.iter_mut().for_each(|bias| bias.loaded = false);
    }

    /// Forgets the copies of a graph.
    pub fn forget_graph(&mut self) {
        let none = std::ptr::null_mut();
        self.0.iter_mut().for_each(|bias| bias.copy = none);
    }
}
