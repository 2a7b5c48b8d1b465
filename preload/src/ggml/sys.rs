//! The functions of ggml's C API that are used.
//!
//! Names and signatures are those of ggml.h, ggml-backend.h and gguf.h.

use std::ffi::{CStr, c_char, c_int, c_void};

use super::types::*;
use super::{left_out, one_device};

/// Functions of ik_llama.cpp that make nodes which read several weights.
pub struct FusedMakers {
    /// `ggml_fused_up_gate`: up, gate, input, kind of activation.
    pub up_gate: unsafe extern "C-unwind" fn(
        *mut Context,
        *mut Tensor,
        *mut Tensor,
        *mut Tensor,
        c_int,
    ) -> *mut Tensor,
    /// `ggml_moe_up_gate`: up, gate, input, ids, kind of activation.
    pub moe_up_gate: unsafe extern "C-unwind" fn(
        *mut Context,
        *mut Tensor,
        *mut Tensor,
        *mut Tensor,
        *mut Tensor,
        c_int,
    ) -> *mut Tensor,
    /// `ggml_mul_multi_add`: outputs of experts, gate weights.
    pub mul_multi_add:
        unsafe extern "C-unwind" fn(*mut Context, *mut Tensor, *mut Tensor) -> *mut Tensor,
}

impl FusedMakers {
    /// Finds the functions; `None` in a ggml other than ik_llama.cpp's. The error is the name of
    /// a function that is missing.
    pub fn resolve(
        symbol: &dyn Fn(&CStr) -> *mut c_void,
    ) -> Result<Option<FusedMakers>, &'static str> {
        let up_gate = symbol(c"ggml_fused_up_gate");
        let moe_up_gate = symbol(c"ggml_moe_up_gate");
        let mul_multi_add = symbol(c"ggml_mul_multi_add");
        if has_devices(symbol) || moe_up_gate.is_null() {
            return Ok(None);
        }
        if up_gate.is_null() {
            return Err("ggml_fused_up_gate");
        }
        if mul_multi_add.is_null() {
            return Err("ggml_mul_multi_add");
        }
        // SAFETY: ik_llama.cpp's ggml.h gives the functions of these names these types.
        unsafe {
            Ok(Some(FusedMakers {
                up_gate: std::mem::transmute_copy(&up_gate),
                moe_up_gate: std::mem::transmute_copy(&moe_up_gate),
                mul_multi_add: std::mem::transmute_copy(&mul_multi_add),
            }))
        }
    }
}

macro_rules! functions {
    ($($name:ident($($argument:ty),*) $(-> $result:ty)? $(= $stand_in:path)? $(, left out: $read:path)?;)*) => {
        /// Public functions of ggml, found through the object that uses it.
        #[allow(missing_docs, reason = "documented in ggml's headers")]
        pub struct Functions {
            $(pub $name: unsafe extern "C-unwind" fn($($argument),*) $(-> $result)?,)*
        }

        impl Functions {
            /// Finds all functions, or returns the name of one that is missing. A ggml without
            /// devices gets the functions of [`one_device`], one without rarely used functions those of
            /// [`left_out`].
            pub fn resolve(
                symbol: &dyn Fn(&CStr) -> *mut c_void,
            ) -> Result<Functions, &'static str> {
                let has_devices = has_devices(symbol);
                Ok(Functions {
                    $($name: {
                        type Function = unsafe extern "C-unwind" fn($($argument),*) $(-> $result)?;
                        let stand_in: &[Function] = &[$($stand_in)?];
                        match stand_in.first() {
                            Some(stand_in) if !has_devices => *stand_in,
                            _ => {
                                let name = concat!(stringify!($name), "\0");
                                let name = CStr::from_bytes_with_nul(name.as_bytes());
                                let found = symbol(name.expect("one NUL"));
                                let read: &[Function] = &[$($read)?];
                                match (found.is_null(), read.first()) {
                                    // SAFETY: ggml's headers give the function of this name this type.
                                    (false, _) => unsafe {
                                        std::mem::transmute::<*mut c_void, Function>(found)
                                    },
                                    (true, Some(read)) => {
                                        left_out::prepare(symbol)?;
                                        *read
                                    }
                                    (true, None) => return Err(stringify!($name)),
                                }
                            }
                        }
                    },)*
                })
            }
        }
    };
}

/// Whether a ggml has functions for devices, as llama.cpp's has since late 2024.
pub fn has_devices(symbol: &dyn Fn(&CStr) -> *mut c_void) -> bool {
    !symbol(c"ggml_backend_dev_type").is_null()
}

functions! {
    ggml_init(InitParams) -> *mut Context;
    ggml_free(*mut Context);
    ggml_get_mem_buffer(*const Context) -> *mut c_void, left out: left_out::mem_buffer;
    ggml_get_mem_size(*const Context) -> usize, left out: left_out::mem_size;
    ggml_tensor_overhead() -> usize;
    ggml_new_tensor(*mut Context, c_int, c_int, *const i64) -> *mut Tensor;
    ggml_view_tensor(*mut Context, *mut Tensor) -> *mut Tensor;
    ggml_view_1d(*mut Context, *mut Tensor, i64, usize) -> *mut Tensor;
    ggml_set_name(*mut Tensor, *const c_char) -> *mut Tensor;
    ggml_get_first_tensor(*const Context) -> *mut Tensor;
    ggml_get_next_tensor(*const Context, *mut Tensor) -> *mut Tensor;
    ggml_get_name(*const Tensor) -> *const c_char;
    ggml_nbytes(*const Tensor) -> usize;
    ggml_set_input(*mut Tensor);
    ggml_add(*mut Context, *mut Tensor, *mut Tensor) -> *mut Tensor;
    ggml_mul(*mut Context, *mut Tensor, *mut Tensor) -> *mut Tensor;
    ggml_mul_mat(*mut Context, *mut Tensor, *mut Tensor) -> *mut Tensor;
    ggml_mul_mat_id(*mut Context, *mut Tensor, *mut Tensor, *mut Tensor) -> *mut Tensor;
    ggml_get_rows(*mut Context, *mut Tensor, *mut Tensor) -> *mut Tensor;
    ggml_cpy(*mut Context, *mut Tensor, *mut Tensor) -> *mut Tensor;
    ggml_reshape_3d(*mut Context, *mut Tensor, i64, i64, i64) -> *mut Tensor;
    ggml_op_name(c_int) -> *const c_char;
    ggml_type_name(c_int) -> *const c_char;
    ggml_type_size(c_int) -> usize;
    ggml_blck_size(c_int) -> i64;
    ggml_row_size(c_int, i64) -> usize;
    ggml_new_graph_custom(*mut Context, usize, bool) -> *mut Graph;
    ggml_graph_overhead_custom(usize, bool) -> usize;
    ggml_build_forward_expand(*mut Graph, *mut Tensor);
    ggml_graph_n_nodes(*mut Graph) -> c_int;
    ggml_graph_node(*mut Graph, c_int) -> *mut Tensor;
    ggml_backend_alloc_ctx_tensors_from_buft(*mut Context, *mut BufferType) -> *mut Buffer;
    ggml_backend_buffer_init_tensor(*mut Buffer, *mut Tensor) -> c_int;
    ggml_backend_buffer_free(*mut Buffer);
    ggml_backend_buffer_clear(*mut Buffer, u8);
    ggml_backend_buffer_get_base(*mut Buffer) -> *mut c_void;
    ggml_backend_buffer_get_type(*mut Buffer) -> *mut BufferType;
    ggml_backend_buffer_is_host(*mut Buffer) -> bool;
    ggml_backend_buffer_set_usage(*mut Buffer, c_int);
    ggml_backend_buffer_get_usage(*mut Buffer) -> c_int;
    ggml_backend_buft_alloc_buffer(*mut BufferType, usize) -> *mut Buffer;
    ggml_backend_buft_get_alignment(*mut BufferType) -> usize;
    ggml_backend_buft_get_alloc_size(*mut BufferType, *const Tensor) -> usize;
    ggml_backend_buft_get_device(*mut BufferType) -> *mut Device = one_device::buft_get_device;
    ggml_backend_buft_is_host(*mut BufferType) -> bool;
    ggml_backend_buft_name(*mut BufferType) -> *const c_char;
    ggml_backend_cpu_buffer_type() -> *mut BufferType;
    ggml_backend_tensor_alloc(*mut Buffer, *mut Tensor, *mut c_void) -> c_int;
    ggml_backend_tensor_set(*mut Tensor, *const c_void, usize, usize);
    ggml_backend_tensor_get(*const Tensor, *mut c_void, usize, usize);
    ggml_backend_dev_type(*mut Device) -> c_int = one_device::dev_type;
    ggml_backend_dev_memory(*mut Device, *mut usize, *mut usize) = one_device::dev_memory;
    ggml_backend_dev_supports_op(*mut Device, *const Tensor) -> bool = one_device::dev_supports_op;
    ggml_backend_dev_buffer_type(*mut Device) -> *mut BufferType = one_device::dev_buffer_type;
    ggml_backend_dev_host_buffer_type(*mut Device) -> *mut BufferType = one_device::dev_buffer_type;
    ggml_backend_dev_backend_reg(*mut Device) -> *mut Registration = one_device::dev_backend_reg;
    ggml_backend_reg_get_proc_address(*mut Registration, *const c_char) -> *mut c_void = one_device::reg_get_proc_address;
    ggml_backend_get_device(*mut Backend) -> *mut Device = one_device::get_device;
    ggml_backend_reg_name(*mut Registration) -> *const c_char = one_device::reg_name;
    ggml_backend_dev_init(*mut Device, *const c_char) -> *mut Backend = one_device::dev_init;
    ggml_backend_free(*mut Backend);
    ggml_backend_synchronize(*mut Backend);
    ggml_backend_graph_compute_async(*mut Backend, *mut Graph) -> c_int;
    ggml_backend_tensor_get_async(*mut Backend, *const Tensor, *mut c_void, usize, usize);
    ggml_backend_tensor_set_async(*mut Backend, *mut Tensor, *const c_void, usize, usize);
    ggml_backend_event_new(*mut Device) -> *mut Event = one_device::event_new;
    ggml_backend_event_free(*mut Event);
    ggml_backend_event_record(*mut Event, *mut Backend) = one_device::event_record;
    ggml_backend_event_synchronize(*mut Event);
    ggml_backend_event_wait(*mut Backend, *mut Event), left out: left_out::event_wait;
    ggml_backend_sched_synchronize(*mut Sched);
    ggml_backend_sched_get_tensor_backend(*mut Sched, *mut Tensor) -> *mut Backend;
    ggml_backend_sched_get_n_backends(*mut Sched) -> c_int, left out: left_out::n_backends;
    ggml_backend_sched_get_backend(*mut Sched, c_int) -> *mut Backend, left out: left_out::backend;
    ggml_backend_sched_get_n_copies(*mut Sched) -> c_int;
}
