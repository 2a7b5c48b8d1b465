//! Types and constants of ggml's C API as far as it is used.
//!
//! Names and values are those of ggml.h, ggml-backend.h and gguf.h.

use std::ffi::{c_int, c_void};

/// Opaque types of ggml.
macro_rules! opaque {
    ($($(#[$doc:meta])* $name:ident)*) => {
        $($(#[$doc])* #[repr(C)] pub struct $name { _opaque: [u8; 0] })*
    };
}

opaque! {
    /// `struct ggml_tensor`.
    Tensor
    /// `struct ggml_context`.
    Context
    /// `struct ggml_cgraph`.
    Graph
    /// `struct ggml_backend_sched`.
    Sched
    /// `struct ggml_backend`.
    Backend
    /// `struct ggml_backend_buffer`.
    Buffer
    /// `struct ggml_backend_buffer_type`.
    BufferType
    /// `struct ggml_backend_device`.
    Device
    /// `struct ggml_backend_reg`.
    Registration
    /// `struct ggml_backend_event`.
    Event
}

/// `struct ggml_init_params`.
#[repr(C)]
pub struct InitParams {
    /// Bytes of the context.
    pub mem_size: usize,
    /// Its memory; ggml allocates it when this is null.
    pub mem_buffer: *mut c_void,
    /// Whether tensors get no memory for data.
    pub no_alloc: bool,
}

/// `struct ggml_cgraph`, which is private to ggml, as a value: its size is at most this.
#[repr(C)]
pub struct GraphValue([usize; 64]);

/// `ggml_graph_view`: some nodes of a graph, with all that the graph has noted about them. A part
/// of a scheduler's graph is such a view, too. No public header declares the function.
pub type GraphView = unsafe extern "C-unwind" fn(*mut Graph, c_int, c_int) -> GraphValue;

/// `ggml_custom1_op_t`: result, operand, number of the thread, number of threads, user data.
pub type Callback = unsafe extern "C" fn(*mut Tensor, *const Tensor, c_int, c_int, *mut c_void);

/// `ggml_backend_sched_copy_callback`: backend, weight, its copy, part of the graph, user data.
pub type CopyCallback = unsafe extern "C-unwind" fn(
    *mut Backend,
    *const Tensor,
    *mut Tensor,
    *mut Graph,
    *mut c_void,
) -> bool;

/// `GGML_TYPE_F32`.
pub const F32: c_int = 0;
/// `GGML_TYPE_I32`.
pub const I32: c_int = 26;
/// `GGML_BACKEND_DEVICE_TYPE_CPU`.
pub const DEVICE_CPU: c_int = 0;
/// `ggml_backend_dev_by_type`, which a ggml without devices does not have.
pub type DeviceByType = unsafe extern "C-unwind" fn(c_int) -> *mut Device;
/// `GGML_BACKEND_DEVICE_TYPE_GPU`.
pub const DEVICE_GPU: c_int = 1;
/// `GGML_BACKEND_DEVICE_TYPE_IGPU`.
pub const DEVICE_IGPU: c_int = 2;
/// `GGML_BACKEND_DEVICE_TYPE_ACCEL`, after the CPU and two kinds of GPU. The type after it
/// (`META`) is one device for several.
pub const DEVICE_ACCEL: c_int = 3;
/// `GGML_BACKEND_BUFFER_USAGE_WEIGHTS`.
pub const USAGE_WEIGHTS: c_int = 1;
/// `GGML_BACKEND_BUFFER_USAGE_COMPUTE`.
pub const USAGE_COMPUTE: c_int = 2;
/// `GGML_STATUS_SUCCESS`.
pub const STATUS_SUCCESS: u32 = 0;
/// `GGML_STATUS_FAILED`, as a register returns it.
pub const STATUS_FAILED: usize = -1i32 as u32 as usize;
