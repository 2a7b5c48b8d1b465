//! Parameters for opening a model.

use super::status::{Failure, llama_sidecar_status, status};
use super::{Flag, SizedStruct, fill, parameters};
use crate::device::{Device, DeviceError, HostDevice};
use crate::model::{Options, Placement};
use sidecar_core::config::{self, Config};
use sidecar_core::error::Error;
use sidecar_core::gguf::Access;
use std::ffi::{CString, c_char};
use std::sync::Arc;

/// Parameters of llama_model_load. Initialise with llama_sidecar_default_params.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct llama_sidecar_params {
    /// Set by the caller to sizeof(struct llama_sidecar_params).
    pub struct_size: usize,
    /// Allow reloads to replace tensors. Default: LLAMA_HOTSWAP_ENABLED.
    pub hotswap: Flag,
    /// Map files into memory, so that tensors can be used in place. If a file cannot be mapped, it
    /// is read instead. Default: true.
    pub use_mmap: Flag,
    /// Keep routed experts in host memory (device 0). Default: LLAMA_SIDECAR_CPU_MOE.
    pub cpu_moe: Flag,
    /// Use the CUDA devices of the machine as devices 1, 2, ...; n_devices and device_bytes are
    /// then ignored. Default: false.
    pub use_cuda: Flag,
    /// Number of devices in host memory, 1 to 64. Device 0 is the memory of the process; the others
    /// simulate GPUs. Default: 1.
    pub n_devices: u32,
    /// Device of tensors for which no other rule applies. Default: 0.
    pub device: u32,
    /// Memory limit per device in bytes, except device 0; 0 for no limit. Default: 0.
    pub device_bytes: u64,
    /// Maximum number of bytes that a reload stages before it switches; 0 for no limit. A larger
    /// reload is done in several consistent steps. Default: LLAMA_SIDECAR_STAGING_MB.
    pub staging_bytes: u64,
    /// Split matrices over devices 1, 2, ... in these proportions, for example "3,1,1"; NULL or
    /// empty for no split. Default: LLAMA_SIDECAR_SPLIT.
    pub split: *const c_char,
    /// Rules REGEX=DEVICE, separated by semicolons, for example "ffn_.*_exps=0;attn=2". A tensor
    /// whose name matches is placed unsplit on that device; the first match applies. NULL or empty
    /// for no rules. Default: LLAMA_SIDECAR_OVERRIDE_TENSOR.
    pub override_tensor: *const c_char,
}

parameters!(
    llama_sidecar_params,
    56,
    struct_size,
    hotswap,
    use_mmap,
    cpu_moe,
    use_cuda,
    n_devices,
    device,
    device_bytes,
    staging_bytes,
    split,
    override_tensor
);

impl llama_sidecar_params {
    pub(super) fn defaults() -> llama_sidecar_params {
        let config = Config::get();
        sidecar_core::logger::init();
        llama_sidecar_params {
            struct_size: size_of::<llama_sidecar_params>(),
            hotswap: config.hotswap.into(),
            use_mmap: true.into(),
            cpu_moe: config.cpu_moe.into(),
            use_cuda: false.into(),
            n_devices: 1,
            device: 0,
            device_bytes: 0,
            staging_bytes: config.staging_bytes,
            split: c_text(&config.split),
            override_tensor: c_text(&config.override_tensor),
        }
    }

    /// # Safety
    ///
    /// The strings are null or NUL-terminated.
    pub(super) unsafe fn options(&self) -> Result<Options, Failure> {
        if !(1..=64).contains(&self.n_devices) {
            return Err(Failure::argument(format!(
                "n_devices is {}, expected 1 to 64",
                self.n_devices
            )));
        }
        // SAFETY: as the caller guarantees.
        let (split, overrides) = unsafe {
            (
                utf8(self.split, "split")?,
                utf8(self.override_tensor, "override_tensor")?,
            )
        };
        let placement = Placement {
            device: self.device as usize,
            split: match split {
                "" => Vec::new(),
                split => config::split(split).map_err(Failure::argument)?,
            },
            cpu_moe: self.cpu_moe.into(),
            overrides: config::overrides(overrides).map_err(Failure::argument)?,
        };
        let device = |i| -> Arc<dyn Device> {
            let capacity = match (i, self.device_bytes) {
                (0, _) | (_, 0) => u64::MAX,
                (_, bytes) => bytes,
            };
            HostDevice::with_capacity(format!("host{i}"), capacity)
        };
        let mut devices: Vec<Arc<dyn Device>> = Vec::new();
        match self.use_cuda.into() {
            true => {
                devices.push(device(0));
                devices.extend(cuda_devices().map_err(Error::from)?);
            }
            false => devices.extend((0..self.n_devices).map(device)),
        }
        Ok(Options {
            access: if self.use_mmap.into() {
                Access::Map
            } else {
                Access::Read
            },
            hotswap: self.hotswap.into(),
            devices,
            placement,
            staging_bytes: self.staging_bytes,
        })
    }
}

#[cfg(feature = "cuda")]
fn cuda_devices() -> Result<Vec<Arc<dyn Device>>, DeviceError> {
    use crate::device::cuda::{CudaDevice, device_count};
    let open = |index| Ok(CudaDevice::open(index)? as Arc<dyn Device>);
    (0..device_count()?).map(open).collect()
}

#[cfg(not(feature = "cuda"))]
fn cuda_devices() -> Result<Vec<Arc<dyn Device>>, DeviceError> {
    Err(crate::device::without_cuda())
}

fn c_text(text: &'static Option<CString>) -> *const c_char {
    text.as_ref().map_or(std::ptr::null(), |text| text.as_ptr())
}

/// # Safety
///
/// `text` is null or a NUL-terminated string that lives as long as the result.
unsafe fn utf8<'a>(text: *const c_char, what: &str) -> Result<&'a str, Failure> {
    if text.is_null() {
        return Ok("");
    }
    // SAFETY: as the caller guarantees.
    let text = unsafe { super::text(text, what) }?;
    text.to_str()
        .map_err(|_| Failure::argument(format!("{what} is not UTF-8")))
}

/// Fills `params` with the defaults, which depend on the LLAMA_* environment variables.
///
/// # Safety
///
/// `params` is null or points to a llama_sidecar_params whose struct_size is set.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn llama_sidecar_default_params(
    params: *mut llama_sidecar_params,
) -> llama_sidecar_status {
    // SAFETY: as the caller guarantees.
    status(|| unsafe { fill(params, &llama_sidecar_params::defaults()) })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::mem::offset_of;

    #[test]
    fn every_byte_can_be_in_a_field() {
        let pointers = offset_of!(llama_sidecar_params, split)..size_of::<llama_sidecar_params>();
        let mut refused = 0;
        super::super::tests::use_with_every_byte(
            llama_sidecar_params::defaults(),
            pointers,
            |of| {
                // SAFETY: the strings are those of the defaults.
                refused += usize::from(unsafe { of.options() }.is_err());
            },
        );
        // Numbers of devices are, and CUDA where there is no driver.
        assert!(refused >= 3 * 255);
    }
}
