//! A view that calls a function when it is evaluated.
//!
//! A view has no work to do: its operation is skipped. In ik_llama.cpp, tensors of another shape
//! count as views, too. With the operation and the parameters
//! of `ggml_map_custom1_inplace`, the CPU backend calls a function in its place, at the moment
//! when the viewed data is complete. Data, memory and the other nodes of the graph stay as they
//! are. The numbers of the operation and the positions of its parameters are read from a node
//! that ggml made.

use std::ffi::{c_int, c_void};

use super::layout::{FusedOps, Ops, TensorLayout};
use super::sys::Functions;
use super::types::{Callback, Device, InitParams, Tensor};

/// The most bytes of parameters (`GGML_MAX_OP_PARAMS`).
const PARAMETERS: usize = 64;
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

impl Custom {
    /// Reads the operation from a node that ggml makes.
    pub fn learn(f: &Functions, layout: &TensorLayout) -> Option<Custom> {
        const I32: c_int = 26;
        // SAFETY: the functions get the arguments of their headers. The node is followed by
        // another tensor, so that `overhead` bytes from its start are in the memory, which has a
        // value everywhere. The context is freed before its memory.
        unsafe {
            let overhead = (f.ggml_tensor_overhead)();
            let mut memory = vec![0u128; (overhead * 4).div_ceil(16)];
            let context = (f.ggml_init)(InitParams {
                mem_size: overhead * 4,
                mem_buffer: memory.as_mut_ptr().cast(),
                no_alloc: true,
            });
            if context.is_null() {
                return None;
            }
            let new = || (f.ggml_new_tensor)(context, I32, 1, [4i64].as_ptr());
            let ids = new();
            let user_data = USER_DATA as *mut c_void;
            let node = (f.ggml_map_custom1_inplace)(context, ids, nothing, 1, user_data);
            let end = new();
            let size = (end as usize).wrapping_sub(node as usize).min(overhead);
            let op = layout.read(node, layout.op);
            let bytes = std::slice::from_raw_parts(node.cast::<u8>(), size).to_vec();
            (f.ggml_free)(context);
            let find = |value: usize| {
                let mut words = bytes.windows(8);
                words.position(|word| word == value.to_ne_bytes())
            };
            let at = find(nothing as Callback as usize)?;
            let end = find(USER_DATA)? + 8;
            let parameters = bytes.get(at..end)?.to_vec();
            (parameters.len() <= PARAMETERS).then_some(Custom {
                op,
                at,
                user_data: parameters.len() - 8,
                parameters,
            })
        }
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
