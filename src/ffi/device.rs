//! Devices of a model.

use std::ffi::{CString, c_char};

use super::handle::{self, llama_model};
use super::status::{Failure, llama_sidecar_status, status};
use super::{SizedStruct, fill};
use crate::device::DeviceKind;

/// What kind of memory a device is.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum llama_sidecar_device_kind {
    /// Memory of the process.
    Host = 0,
    /// Memory of an NVIDIA GPU.
    Cuda = 1,
}

/// A device and what we hold of it.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct llama_sidecar_device_info {
    /// sizeof(struct llama_sidecar_device_info), set by the caller.
    pub struct_size: usize,
    /// Its name, cut to fit.
    pub name: [c_char; 64],
    /// What kind of memory it is.
    pub kind: llama_sidecar_device_kind,
    /// All its memory.
    pub total: u64,
    /// What can still be allocated.
    pub free: u64,
    /// What live buffers of this model hold.
    pub used: u64,
    /// The most they ever held.
    pub peak: u64,
    /// How many buffers were ever allocated.
    pub allocations: u64,
}

// SAFETY: repr(C), starts with struct_size, plain fields.
unsafe impl SizedStruct for llama_sidecar_device_info {
    const NAME: &'static str = "llama_sidecar_device_info";
    const FIRST: usize = 120;
}

/// Tells about device `device` of a model.
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
            kind: match device.kind() {
                DeviceKind::Host => llama_sidecar_device_kind::Host,
                DeviceKind::Cuda => llama_sidecar_device_kind::Cuda,
            },
            total: memory.total,
            free: memory.free,
            used: memory.used,
            peak: memory.peak,
            allocations: memory.allocations,
        };
        // SAFETY: as the caller vouches.
        unsafe { fill(info, &value) }
    })
}
