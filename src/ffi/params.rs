//! How to open a model, as C says it.

use super::status::{Failure, llama_sidecar_status, status};
use super::{SizedStruct, fill};
use crate::config::Config;
use crate::device::{Device, HostDevice};
use crate::gguf::Access;
use crate::model::Options;
use std::sync::Arc;

/// How to open a model. Fill it with llama_sidecar_default_params first.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct llama_sidecar_params {
    /// sizeof(struct llama_sidecar_params), set by the caller.
    pub struct_size: usize,
    /// Whether llama_reload_changed_tensors can replace tensors. Default: LLAMA_HOTSWAP_ENABLED.
    pub hotswap: bool,
    /// Map files, so that tensors can be used in place. Where mapping is refused, files are read.
    /// Default: true.
    pub use_mmap: bool,
    /// How many host devices the model has, 1 to 64; they stand for GPUs in tests. Default: 1.
    pub n_devices: u32,
    /// The device that tensors are loaded to. Default: 0.
    pub device: u32,
    /// The most bytes each device gives out at a time, 0 for all there are. Default: 0.
    pub device_bytes: u64,
}

// SAFETY: repr(C), starts with struct_size, plain fields.
unsafe impl SizedStruct for llama_sidecar_params {
    const NAME: &'static str = "llama_sidecar_params";
    const FIRST: usize = size_of::<llama_sidecar_params>();
}

impl llama_sidecar_params {
    pub(super) fn defaults() -> llama_sidecar_params {
        llama_sidecar_params {
            struct_size: size_of::<llama_sidecar_params>(),
            hotswap: Config::get().hotswap,
            use_mmap: true,
            n_devices: 1,
            device: 0,
            device_bytes: 0,
        }
    }

    pub(super) fn options(&self) -> Result<Options, Failure> {
        if !(1..=64).contains(&self.n_devices) {
            return Err(Failure::argument(format!(
                "n_devices is {}, expected 1 to 64",
                self.n_devices
            )));
        }
        let capacity = match self.device_bytes {
            0 => u64::MAX,
            bytes => bytes,
        };
        let device =
            |i| -> Arc<dyn Device> { HostDevice::with_capacity(format!("host{i}"), capacity) };
        Ok(Options {
            access: if self.use_mmap {
                Access::Map
            } else {
                Access::Read
            },
            hotswap: self.hotswap,
            devices: (0..self.n_devices).map(device).collect(),
            device: self.device as usize,
        })
    }
}

/// Fills `params` with the defaults, which follow from the LLAMA_* variables. Set struct_size before.
///
/// # Safety
///
/// `params` is null or points to a llama_sidecar_params whose struct_size is set.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn llama_sidecar_default_params(
    params: *mut llama_sidecar_params,
) -> llama_sidecar_status {
    // SAFETY: as the caller vouches.
    status(|| unsafe { fill(params, &llama_sidecar_params::defaults()) })
}
