//! Copies of weights in host memory that a scheduler is about to make.
//!
//! llama.cpp from b11481 on copies routed experts in a function that it gives to the scheduler
//! (`ggml_backend_sched_set_copy_callback`). The scheduler asks it before each copy of a weight in host
//! memory, right before it submits the part of the graph that reads the copy; false makes the
//! scheduler copy the whole weight. The drop-in's function stands before it.

use std::ffi::c_void;

use parking_lot::Mutex;
use sidecar_core::trace::Ids;

use super::routing;
use super::sched::{SLOTS, Scheduler};
use crate::ggml::{Backend, CopyCallback, Ggml, Graph, Tensor};

/// The program's function of a scheduler, and its last argument.
#[derive(Clone, Copy)]
struct ProgramCallback {
    function: Option<CopyCallback>,
    data: *mut c_void,
}

// SAFETY: the program's data is passed to its function, on the thread that evaluates.
unsafe impl Send for ProgramCallback {}

/// By the number of the scheduler; `None` where the drop-in's function was not set.
static CALLBACKS: [Mutex<Option<ProgramCallback>>; SLOTS] = [const { Mutex::new(None) }; SLOTS];

/// Keeps the program's function of a scheduler, which reports its copies to the drop-in from now on.
pub fn set(scheduler: &Scheduler, function: Option<CopyCallback>, data: *mut c_void) {
    *CALLBACKS[scheduler.number()].lock() = Some(ProgramCallback { function, data });
}

/// Forgets a scheduler that is about to be freed.
pub fn forget(scheduler: &Scheduler) {
    *CALLBACKS[scheduler.number()].lock() = None;
}

/// Whether a scheduler reports its copies.
pub fn are_reported(scheduler: &Scheduler) -> bool {
    CALLBACKS[scheduler.number()].lock().is_some()
}

/// Returns the program's function of a scheduler, and its last argument; `None` if the program set none.
pub fn of_program(scheduler: &Scheduler) -> Option<(CopyCallback, *mut c_void)> {
    let callback = (*CALLBACKS[scheduler.number()].lock())?;
    Some((callback.function?, callback.data))
}

/// A copy that a scheduler is about to make.
#[derive(Clone, Copy)]
pub struct WeightCopy {
    /// The ggml of the scheduler.
    pub ggml: &'static Ggml,
    /// The backend that reads the copy.
    pub backend: *mut Backend,
    /// The weight in host memory.
    pub weight: *const Tensor,
    /// The scheduler's copy.
    pub copy: *mut Tensor,
    /// The ids of the product with which the part begins, if it reads the copy. They are computed before
    /// the part.
    pub ids: Option<*mut Tensor>,
}

impl WeightCopy {
    /// Reads the arguments that a scheduler passes to its function.
    ///
    /// # Safety
    ///
    /// The arguments, during the call.
    pub unsafe fn new(
        ggml: &'static Ggml,
        backend: *mut Backend,
        weight: *const Tensor,
        copy: *mut Tensor,
        part: *mut Graph,
    ) -> WeightCopy {
        let (f, layout) = (&ggml.f, &ggml.layout);
        // SAFETY: as the caller ensures; nodes of a live graph and their sources are live.
        let ids = unsafe {
            match (f.ggml_graph_n_nodes)(part) {
                0 => None,
                _ => {
                    let node = (f.ggml_graph_node)(part, 0);
                    let [matrix, _, ids]: [*mut Tensor; 3] = layout.read(node, layout.src);
                    let op: i32 = layout.read(node, layout.op);
                    (op == ggml.ops.mul_mat_id && matrix == copy).then_some(ids)
                }
            }
        };
        WeightCopy {
            ggml,
            backend,
            weight,
            copy,
            ids,
        }
    }

    /// Waits for the ids and reads their bytes. Returns them; `None` without ids, or where their form is
    /// not known.
    ///
    /// # Safety
    ///
    /// During the call of the scheduler, on its thread, with nothing locked that another thread of the
    /// backend needs.
    pub unsafe fn read_ids<'a>(&self, bytes: &'a mut Vec<u8>) -> Option<Ids<'a>> {
        let (ggml, ids) = (self.ggml, self.ids?);
        // SAFETY: as the caller ensures; the ids are a live tensor.
        let ids = unsafe {
            bytes.resize((ggml.f.ggml_nbytes)(ids), 0);
            let to = bytes.as_mut_ptr().cast();
            (ggml.f.ggml_backend_tensor_get_async)(self.backend, ids, to, 0, bytes.len());
            (ggml.f.ggml_backend_synchronize)(self.backend);
            routing::ids_at(ggml, ids, bytes.as_ptr())
        };
        ids.filter(|of| of.bytes.len() <= bytes.len())
    }
}
