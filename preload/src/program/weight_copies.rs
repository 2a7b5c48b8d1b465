//! Copies of weights in host memory that a scheduler is about to make.
//!
//! Builds of llama.cpp before b11481 copy routed experts in the scheduler itself: it requests the ids of a
//! layer from the device, waits, and copies runs of used experts. llama.cpp from b11481 on copies routed experts in a function that it gives to the scheduler
//! (`ggml_backend_sched_set_copy_callback`). The scheduler asks it before each copy of a weight in host
//! memory, right before it submits the part of the graph that reads the copy; false makes the
//! scheduler copy the whole weight. The drop-in's function stands before it.
//!
//! With an expert cache of its own, the program's function is asked to copy the slot map of a layer, too.
//! It requests the ids, waits for them, gives slots to the experts without one, and copies these.

use std::cell::{Cell, OnceCell, RefCell};
use std::ffi::c_void;

use parking_lot::Mutex;
use sidecar_core::trace::Ids;

use super::sched::{SLOTS, Scheduler};
use super::{own_cache, parts, routing};
use crate::ggml::{Backend, CopyCallback, Ggml, Graph, I32, Tensor};

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
fn are_reported(scheduler: &Scheduler) -> bool {
    CALLBACKS[scheduler.number()].lock().is_some()
}

/// Returns the scheduler whose parts this thread evaluates, if it does not report its copies.
pub fn unreported() -> Option<&'static Scheduler> {
    parts::current().filter(|of| !are_reported(of))
}

/// Returns the program's function of a scheduler, and its last argument; `None` if the program set none.
pub fn of_program(scheduler: &Scheduler) -> Option<(CopyCallback, *mut c_void)> {
    let callback = (*CALLBACKS[scheduler.number()].lock())?;
    Some((callback.function?, callback.data))
}

thread_local! {
    /// Memory for the bytes of ids.
    static BYTES: Cell<Vec<u8>> = const { Cell::new(Vec::new()) };
}

/// A copy that a scheduler is about to make.
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
    /// The bytes of the ids, once they were read.
    bytes: OnceCell<Vec<u8>>,
}

impl Drop for WeightCopy {
    fn drop(&mut self) {
        if let Some(bytes) = self.bytes.take() {
            BYTES.set(bytes);
        }
    }
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
            bytes: OnceCell::new(),
        }
    }

    /// Returns the address of the weight.
    pub fn from(&self) -> usize {
        // SAFETY: a live weight of this copy of ggml.
        unsafe { self.ggml.layout.read(self.weight, self.ggml.layout.data) }
    }

    /// Returns the ids; `None` without ids, or where their form is not known. The first call waits for the
    /// backend.
    ///
    /// # Safety
    ///
    /// During the call of the scheduler, on its thread, with nothing locked that another thread of the
    /// backend needs.
    pub unsafe fn read_ids(&self) -> Option<Ids<'_>> {
        let (ggml, ids) = (self.ggml, self.ids?);
        let bytes = self.bytes.get_or_init(|| {
            let mut bytes = BYTES.take();
            // SAFETY: as the caller ensures; the ids are a live tensor.
            unsafe {
                bytes.resize((ggml.f.ggml_nbytes)(ids), 0);
                let to = bytes.as_mut_ptr().cast();
                (ggml.f.ggml_backend_tensor_get_async)(self.backend, ids, to, 0, bytes.len());
                (ggml.f.ggml_backend_synchronize)(self.backend);
            }
            bytes
        });
        // SAFETY: as above; the bytes were read.
        unsafe { routing::ids_at(ggml, ids, (bytes.as_ptr(), bytes.len())) }
    }
}

/// Returns the ids that a scheduler without a copy callback requested last for the graph whose parts this
/// thread evaluates.
///
/// # Safety
///
/// On that thread, when the scheduler has waited for the ids; it keeps them until it requests others.
pub unsafe fn requested_ids<'a>(ggml: &Ggml) -> Option<Ids<'a>> {
    let of = parts::requested()?;
    // SAFETY: as the caller ensures; the tensor is one of the graph.
    unsafe {
        let ty: i32 = ggml.layout.read(of.tensor, ggml.layout.ty);
        (ty == I32).then(|| routing::ids_at(ggml, of.tensor, (of.data, of.size)))?
    }
}

thread_local! {
    /// The weight that the program's function copies on this thread, until it has waited for ids.
    static WEIGHT: Cell<*const Tensor> = const { Cell::new(std::ptr::null()) };
    /// Memory for the ids of experts without a slot.
    static MISSED: RefCell<Vec<u8>> = const { RefCell::new(Vec::new()) };
}

/// Records a weight that the program's function is called for.
pub fn note(weight: *const Tensor) {
    if own_cache::exists() {
        WEIGHT.set(weight);
        parts::forget_requested();
    }
}

/// Returns the number of experts of each token in ids that were requested last. The program requests them
/// in one row, which has the shape of its source otherwise.
///
/// # Safety
///
/// As [`requested_ids`].
unsafe fn used_by_token(ggml: &Ggml) -> Option<usize> {
    let of = parts::requested()?;
    // SAFETY: as the caller ensures; sources of a live tensor are live.
    unsafe {
        let rows = ggml.layout.source(of.tensor, 0);
        let [used, ..]: [i64; 4] = match rows.is_null() {
            true => return None,
            false => ggml.layout.read(rows, ggml.layout.ne),
        };
        usize::try_from(used).ok().filter(|used| *used > 0)
    }
}

/// Passes the experts that the program's function is about to copy into slots to `report`, with the
/// address of a matrix of their layer.
///
/// # Safety
///
/// On the thread that evaluates, when the program has waited for what it requested.
pub unsafe fn report_missed(ggml: &Ggml, report: impl FnOnce(usize, &Ids<'_>)) {
    if WEIGHT.get().is_null() {
        return;
    }
    // SAFETY: as the caller ensures.
    let Some(ids) = (unsafe { requested_ids(ggml) }) else {
        return;
    };
    own_cache::visit_slots(WEIGHT.replace(std::ptr::null()), |matrix, slots| {
        MISSED.with_borrow_mut(|missed| {
            missed.clear();
            let places = (0..ids.tokens).flat_map(|token| (0..ids.used).map(move |at| (token, at)));
            let all = places.filter_map(|(token, at)| ids.get(token, at));
            // No expert has the number -1.
            let missed_id = |id: i32| match slots.get(id as usize) {
                Some(slot) if *slot < 0 => id,
                _ => -1,
            };
            missed.extend(all.flat_map(|id| missed_id(id).to_ne_bytes()));
            // SAFETY: as the caller ensures.
            let used = unsafe { used_by_token(ggml) };
            report(matrix, &Ids::packed(missed, used.unwrap_or(ids.used)));
        });
    });
}
