//! A view that calls a function when it is evaluated.
//!
//! A view has no work to do: its operation is skipped. In ik_llama.cpp, tensors of another shape
//! count as views, too. With the operation and the parameters
//! of `ggml_map_custom1_inplace`, the CPU backend calls a function in its place, at the moment
//! when the viewed data is complete. Data, memory and the other nodes of the graph stay as they
//! are. The numbers of the operation and the positions of its parameters are read from a node
//! that ggml made.

use std::ffi::{c_int, c_void};

use super::sys::{Callback, Tensor};
use super::{FusedOps, Ggml, InitParams};

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
    fn learn(ggml: &Ggml) -> Option<Custom> {
        const I32: c_int = 26;
        let (f, layout) = (&ggml.f, &ggml.layout);
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
}

impl Ggml {
    /// Returns the offset of the parameters of operations in a tensor, and their bytes.
    pub fn parameters(&self) -> Option<(usize, usize)> {
        let custom = self.custom.get_or_init(|| Custom::learn(self));
        Some((custom.as_ref()?.at, PARAMETERS))
    }

    /// Turns a view into a node that calls a function, on one thread; returns whether the tensor
    /// is a view, or was turned before.
    ///
    /// # Safety
    ///
    /// A node of a live graph that the CPU backend evaluates, and that no thread evaluates now.
    /// The function and its data live as long as the graph.
    pub unsafe fn call_at_view(
        &self,
        node: *mut Tensor,
        function: Callback,
        data: *const c_void,
    ) -> bool {
        let Some(custom) = self.custom.get_or_init(|| Custom::learn(self)) else {
            return false;
        };
        let layout = &self.layout;
        // SAFETY: as the caller ensures; the parameters are those of the operation, and a tensor
        // has space for them.
        unsafe {
            let op: i32 = layout.read(node, layout.op);
            let parameters = node.cast::<u8>().add(custom.at);
            let called: usize = parameters.cast::<usize>().read_unaligned();
            let ours = op == custom.op && called == function as usize;
            let reshapes = |fused: FusedOps| op == fused.reshape;
            if op != self.ops.view && !self.ops.fused.is_some_and(reshapes) && !ours {
                return false;
            }
            let template = custom.parameters.as_ptr();
            template.copy_to_nonoverlapping(parameters, custom.parameters.len());
            parameters
                .cast::<usize>()
                .write_unaligned(function as usize);
            let user_data = parameters.add(custom.user_data);
            user_data.cast::<usize>().write_unaligned(data as usize);
            layout.write(node, layout.op, custom.op);
        }
        true
    }
}
