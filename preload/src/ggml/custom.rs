//! A view that calls a function when it is evaluated.
//!
//! A view has no work to do: its operation is skipped. In ik_llama.cpp, tensors of another shape
//! count as views, too. With the operation and the parameters
//! of `ggml_map_custom1_inplace`, the CPU backend calls a function in its place, at the moment
//! when the viewed data is complete. Data, memory and the other nodes of the graph stay as they
//! are. The numbers of the operation and the positions of its parameters are read from a node
//! that ggml made. In a program whose linker left that function out, they are those of ggml's
//! headers, and count if the CPU calls a function of such a node.

use std::ffi::{CStr, c_int, c_void};
use std::sync::atomic::{AtomicUsize, Ordering};

use parking_lot::Mutex;

use super::layout::{FusedOps, Ops, TensorLayout, in_context};
use super::sys::Functions;
use super::types::{Callback, Context, DEVICE_CPU, Device, DeviceByType, InitParams, Tensor};

/// `GGML_TYPE_I32`.
const I32: c_int = 26;
/// The most bytes of parameters (`GGML_MAX_OP_PARAMS`).
const PARAMETERS: usize = 64;
/// Space for the tensors of a trial.
const TENSORS: usize = 4;
/// Recognisable user data.
const USER_DATA: usize = 0x5aa5_1234_8765_a55a;

/// The operation that calls a function.
#[derive(Debug)]
pub struct Custom {
    /// `GGML_OP_MAP_CUSTOM1`.
    op: i32,
    /// The offset of the parameters in a tensor.
    at: usize,
    /// The parameters, with one task.
    parameters: Vec<u8>,
    /// The offset of the user data among them; the function is at their start.
    user_data: usize,
}

unsafe extern "C" fn nothing(_: *mut Tensor, _: *const Tensor, _: c_int, _: c_int, _: *mut c_void) {
}

/// `ggml_map_custom1_inplace`.
type Make = unsafe extern "C-unwind" fn(
    *mut Context,
    *mut Tensor,
    Callback,
    c_int,
    *mut c_void,
) -> *mut Tensor;

/// How often a node called [`count`] with [`USER_DATA`].
static CALLED: AtomicUsize = AtomicUsize::new(0);

unsafe extern "C" fn count(
    _: *mut Tensor,
    _: *const Tensor,
    _: c_int,
    _: c_int,
    data: *mut c_void,
) {
    CALLED.fetch_add(usize::from(data as usize == USER_DATA), Ordering::SeqCst);
}

/// What shows the operation of a copy.
pub enum Origin {
    /// Nodes that this function makes.
    Made(Make),
    /// ggml's headers; tried on the CPU, which this function finds.
    Header(Option<DeviceByType>),
}

impl Origin {
    /// Returns what a copy has whose functions `symbol` finds.
    pub fn of(symbol: &dyn Fn(&CStr) -> *mut c_void) -> Origin {
        let make = symbol(c"ggml_map_custom1_inplace");
        let by_type = symbol(c"ggml_backend_dev_by_type");
        // SAFETY: ggml's headers give the functions of these names these types.
        unsafe {
            match std::mem::transmute::<*mut c_void, Option<Make>>(make) {
                Some(make) => Origin::Made(make),
                None => Origin::Header(std::mem::transmute::<*mut c_void, Option<DeviceByType>>(
                    by_type,
                )),
            }
        }
    }
}

impl Custom {
    /// Finds the operation of a copy, or returns nothing where it is not understood.
    pub fn learn(
        origin: &Origin,
        (f, layout, ops): (&Functions, &TensorLayout, &Ops),
    ) -> Option<Custom> {
        match origin {
            Origin::Made(make) => Custom::of(*make, f, layout),
            Origin::Header(by_type) => {
                // SAFETY: takes a type of devices.
                let cpu = unsafe { (*by_type)?(DEVICE_CPU) };
                let found = Custom::by_header(f, layout).filter(|_| !cpu.is_null())?;
                found.is_called((f, layout, ops), cpu).then_some(found)
            }
        }
    }

    /// Returns the operation of ggml's headers.
    fn by_header(f: &Functions, layout: &TensorLayout) -> Option<Custom> {
        /// Elements of 32 bits, without memory; a view begins at the offset.
        const MANY: i64 = 1 << 50;
        const OFFSET: usize = 0x000a_5123_4876_55a8;
        // A view has its offset there.
        let at = layout.op + size_of::<c_int>();
        // SAFETY: the functions get the arguments of their headers. ggml has this operation, and the numbers before
        // it have names. The view is followed by another tensor.
        let (op, has_offset) = in_context(f, TENSORS, |context| unsafe {
            let name = |op: &i32| CStr::from_ptr((f.ggml_op_name)(*op)) == c"MAP_CUSTOM1";
            let op = (0..).find(name);
            let all = (f.ggml_new_tensor)(context, I32, 1, [MANY].as_ptr());
            let view = (f.ggml_view_1d)(context, all, 1, OFFSET);
            (f.ggml_new_tensor)(context, I32, 1, [1].as_ptr());
            (op, layout.read::<usize>(view, at) == OFFSET)
        })?;
        // The function, one task, and the user data.
        let words = [nothing as Callback as usize, 1, USER_DATA];
        has_offset.then_some(Custom {
            op: op?,
            at,
            parameters: words.into_iter().flat_map(usize::to_ne_bytes).collect(),
            user_data: 16,
        })
    }

    /// Whether the CPU calls the function of a node once, with its data.
    fn is_called(
        &self,
        (f, layout, ops): (&Functions, &TensorLayout, &Ops),
        cpu: *mut Device,
    ) -> bool {
        const NODES: usize = 8;
        static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());
        let _turn = ONE_AT_A_TIME.lock();
        // SAFETY: the functions get the arguments of their headers; context and backend are freed once, after the
        // graph was evaluated.
        unsafe {
            let context = (f.ggml_init)(InitParams {
                mem_size: 8 * (f.ggml_tensor_overhead)()
                    + (f.ggml_graph_overhead_custom)(NODES, false)
                    + 4096,
                mem_buffer: std::ptr::null_mut(),
                no_alloc: false,
            });
            if context.is_null() {
                return false;
            }
            let ids = (f.ggml_new_tensor)(context, I32, 1, [4].as_ptr());
            let view = (f.ggml_view_1d)(context, ids, 4, 0);
            let data = USER_DATA as *const c_void;
            let before = CALLED.load(Ordering::SeqCst);
            if self.call_at_view((f, layout, ops), cpu, view, count, data) {
                let graph = (f.ggml_new_graph_custom)(context, NODES, false);
                (f.ggml_build_forward_expand)(graph, view);
                let backend = (f.ggml_backend_dev_init)(cpu, std::ptr::null());
                if !backend.is_null() {
                    (f.ggml_backend_graph_compute_async)(backend, graph);
                    (f.ggml_backend_synchronize)(backend);
                    (f.ggml_backend_free)(backend);
                }
            }
            (f.ggml_free)(context);
            CALLED.load(Ordering::SeqCst) == before + 1
        }
    }

    /// Reads the operation from a node that ggml makes.
    fn of(make: Make, f: &Functions, layout: &TensorLayout) -> Option<Custom> {
        // Read once: a function can have several addresses in one program.
        let function: Callback = std::hint::black_box(nothing);
        // SAFETY: the functions get the arguments of their headers. The node is followed by
        // another tensor, so that `overhead` bytes from its start are in the memory.
        let (op, bytes) = in_context(f, TENSORS, |context| unsafe {
            let overhead = (f.ggml_tensor_overhead)();
            let new = || (f.ggml_new_tensor)(context, I32, 1, [4i64].as_ptr());
            let ids = new();
            let user_data = USER_DATA as *mut c_void;
            let node = make(context, ids, function, 1, user_data);
            let end = new();
            let size = (end as usize).wrapping_sub(node as usize).min(overhead);
            let op = layout.read(node, layout.op);
            let bytes = std::slice::from_raw_parts(node.cast::<u8>(), size).to_vec();
            (op, bytes)
        })?;
        let find = |value: usize| {
            let mut words = bytes.windows(8);
            words.position(|word| word == value.to_ne_bytes())
        };
        let at = find(function as usize)?;
        let end = find(USER_DATA)? + 8;
        let parameters = bytes.get(at..end)?.to_vec();
        (parameters.len() <= PARAMETERS).then_some(Custom {
            op,
            at,
            user_data: parameters.len() - 8,
            parameters,
        })
    }

    /// Returns the offset of the parameters of operations in a tensor, and their bytes.
    pub fn parameters(&self) -> (usize, usize) {
        (self.at, PARAMETERS)
    }

    /// Turns a view into a node that calls a function; see [`Ggml::call_at_view`].
    ///
    /// # Safety
    ///
    /// As there, with layout, operations and functions of the same copy of ggml.
    ///
    /// [`Ggml::call_at_view`]: super::Ggml::call_at_view
    pub unsafe fn call_at_view(
        &self,
        (f, layout, ops): (&Functions, &TensorLayout, &Ops),
        cpu: *mut Device,
        node: *mut Tensor,
        function: Callback,
        data: *const c_void,
    ) -> bool {
        // SAFETY: as the caller ensures; the parameters are those of the operation, and a tensor
        // has space for them.
        unsafe {
            let op: i32 = layout.read(node, layout.op);
            let parameters = node.cast::<u8>().add(self.at);
            let called: usize = parameters.cast::<usize>().read_unaligned();
            let ours = op == self.op && called == function as usize;
            let reshapes = |fused: FusedOps| op == fused.reshape;
            if op != ops.view && !ops.fused.is_some_and(reshapes) && !ours {
                return false;
            }
            let mut before = vec![0u8; self.parameters.len()];
            parameters.copy_to_nonoverlapping(before.as_mut_ptr(), before.len());
            let template = self.parameters.as_ptr();
            template.copy_to_nonoverlapping(parameters, self.parameters.len());
            parameters
                .cast::<usize>()
                .write_unaligned(function as usize);
            let user_data = parameters.add(self.user_data);
            user_data.cast::<usize>().write_unaligned(data as usize);
            layout.write(node, layout.op, self.op);
            // The scheduler asserts that a backend evaluates each node, if it splits the graph again.
            let supported = (f.ggml_backend_dev_supports_op)(cpu, node);
            if !supported {
                before
                    .as_ptr()
                    .copy_to_nonoverlapping(parameters, before.len());
                layout.write(node, layout.op, op);
            }
            supported
        }
    }
}
