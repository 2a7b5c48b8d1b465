//! Devices of a model.

use std::ffi::{CString, c_char};

use super::handle;
use super::model::llama_model;
use super::status::{Failure, llama_sidecar_status, status};
use super::{SizedStruct, fill};
use crate::device::DeviceKind;

/// Kind of memory of a device.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum llama_sidecar_device_kind {
    /// Memory of the process.
    Host = 0,
    /// Memory of an NVIDIA GPU.
    Cuda = 1,
}

impl From<DeviceKind> for llama_sidecar_device_kind {
    fn from(kind: DeviceKind) -> llama_sidecar_device_kind {
        match kind {
            DeviceKind::Host => llama_sidecar_device_kind::Host,
            DeviceKind::Cuda => llama_sidecar_device_kind::Cuda,
        }
    }
}

/// A device and its memory use.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct llama_sidecar_device_info {
    /// Set by the caller to sizeof(struct llama_sidecar_device_info).
    pub struct_size: usize,
    /// Name of the device, truncated to fit, NUL-terminated.
    pub name: [c_char; 64],
    /// Kind of memory.
    pub kind: llama_sidecar_device_kind,
    /// Total memory in bytes.
    pub total: u64,
    /// Free memory in bytes.
    pub free: u64,
    /// Bytes in live buffers of this model.
    pub used: u64,
    /// Maximum of `used` so far.
    pub peak: u64,
    /// Number of buffers allocated so far.
    pub allocations: u64,
}

// SAFETY: repr(C), starts with struct_size, plain fields.
unsafe impl SizedStruct for llama_sidecar_device_info {
    const NAME: &'static str = "llama_sidecar_device_info";
    const FIRST: usize = 120;
}

/// Fills `info` with the name and the memory of a device.
///
/// @param device Index of the device, less than n_devices of llama_sidecar_model_info.
///
/// # Safety
///
/// `info` is null or points to a struct whose struct_size is set.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn llama_sidecar_device_get_info(
    model: *const llama_model,
    device: u32,
    info: *mut llama_sidecar_device_info,
) -> llama_sidecar_status {
    status(|| {
        let open = handle::get(model)?;
        let devices = open.model.devices();
        let device = devices.get(device as usize).ok_or_else(|| {
            Failure::new(
                llama_sidecar_status::NotFound,
                format!(
                    "device {device} does not exist: there are {}",
                    devices.len()
                ),
            )
        })?;
        let memory = device.memory();
        let mut name = [0; 64];
        let text = CString::new(device.name()).unwrap_or_default();
        for (to, &from) in name[..63].iter_mut().zip(text.as_bytes()) {
            *to = from as c_char;
        }
        let value = llama_sidecar_device_info {
            struct_size: size_of::<llama_sidecar_device_info>(),
            name,
            kind: device.kind().into(),
            total: memory.total,
            free: memory.free,
            used: memory.used,
            peak: memory.peak,
            allocations: memory.allocations,
        };
        // SAFETY: as the caller guarantees.
        unsafe { fill(info, &value) }
    })
}
