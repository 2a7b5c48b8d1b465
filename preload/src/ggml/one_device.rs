//! Functions for devices in a ggml that has none (ik_llama.cpp).
//!
//! Such a ggml has backends and buffer types only. Here the backend of the CPU and buffer types
//! of host memory belong to one device, the CPU. All others belong to one accelerator: hot-swap
//! writes to the memory of a GPU through the functions of buffers, and no other capability uses it.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::sync::OnceLock;

use super::types::{
    Backend, BufferType, DEVICE_ACCEL, DEVICE_CPU, Device, Event, Registration, Tensor,
};

/// Functions of ggml that tell the CPU from the rest. Each copy of ggml has them, and they work
/// with objects of every copy.
struct Known {
    backend_is_cpu: unsafe extern "C-unwind" fn(*mut Backend) -> bool,
    buffer_type_is_host: unsafe extern "C-unwind" fn(*mut BufferType) -> bool,
}

static KNOWN: OnceLock<Known> = OnceLock::new();

/// The addresses of the two devices.
static DEVICES: [u8; 2] = [0; 2];

/// Finds what the functions need; returns the name of a function that is missing.
pub fn prepare(symbol: &dyn Fn(&CStr) -> *mut c_void) -> Result<(), &'static str> {
    let backend_is_cpu = symbol(c"ggml_backend_is_cpu");
    let buffer_type_is_host = symbol(c"ggml_backend_buft_is_host");
    if backend_is_cpu.is_null() {
        return Err("ggml_backend_is_cpu");
    }
    if buffer_type_is_host.is_null() {
        return Err("ggml_backend_buft_is_host");
    }
    // SAFETY: ggml-backend.h gives the functions of these names these types.
    KNOWN.get_or_init(|| unsafe {
        Known {
            backend_is_cpu: std::mem::transmute::<
                *mut c_void,
                unsafe extern "C-unwind" fn(*mut Backend) -> bool,
            >(backend_is_cpu),
            buffer_type_is_host: std::mem::transmute::<
                *mut c_void,
                unsafe extern "C-unwind" fn(*mut BufferType) -> bool,
            >(buffer_type_is_host),
        }
    });
    Ok(())
}

/// Whether a device stands for all that are not the CPU.
pub fn is_other(device: *mut Device) -> bool {
    device == device_at(1)
}

fn device_at(place: usize) -> *mut Device {
    std::ptr::from_ref(&DEVICES[place]).cast_mut().cast()
}

fn device(is_cpu: impl FnOnce(&Known) -> bool) -> *mut Device {
    device_at(usize::from(!KNOWN.get().is_some_and(is_cpu)))
}

pub unsafe extern "C-unwind" fn get_device(backend: *mut Backend) -> *mut Device {
    // SAFETY: the argument of the call.
    device(|known| unsafe { (known.backend_is_cpu)(backend) })
}

pub unsafe extern "C-unwind" fn buft_get_device(buft: *mut BufferType) -> *mut Device {
    // SAFETY: the argument of the call.
    device(|known| unsafe { (known.buffer_type_is_host)(buft) })
}

pub unsafe extern "C-unwind" fn dev_type(device: *mut Device) -> c_int {
    match is_other(device) {
        true => DEVICE_ACCEL,
        false => DEVICE_CPU,
    }
}

/// Supports all operations: libllama chooses the buffer type of a weight by the layer alone, and the
/// scheduler gives what another backend does not support to the CPU.
pub unsafe extern "C-unwind" fn dev_supports_op(_: *mut Device, _: *const Tensor) -> bool {
    true
}

/// Reports no figures.
pub unsafe extern "C-unwind" fn dev_memory(_: *mut Device, _: *mut usize, _: *mut usize) {}

pub unsafe extern "C-unwind" fn dev_buffer_type(_: *mut Device) -> *mut BufferType {
    std::ptr::null_mut()
}

pub unsafe extern "C-unwind" fn dev_backend_reg(_: *mut Device) -> *mut Registration {
    std::ptr::null_mut()
}

pub unsafe extern "C-unwind" fn reg_get_proc_address(
    _: *mut Registration,
    _: *const c_char,
) -> *mut c_void {
    std::ptr::null_mut()
}

pub unsafe extern "C-unwind" fn reg_name(_: *mut Registration) -> *const c_char {
    c"none".as_ptr()
}

pub unsafe extern "C-unwind" fn dev_init(_: *mut Device, _: *const c_char) -> *mut Backend {
    std::ptr::null_mut()
}

/// Makes no event: the function of this name takes a backend there.
pub unsafe extern "C-unwind" fn event_new(_: *mut Device) -> *mut Event {
    std::ptr::null_mut()
}

/// Records nothing: the function of this name takes the event alone there.
pub unsafe extern "C-unwind" fn event_record(_: *mut Event, _: *mut Backend) {}

#[cfg(test)]
mod tests {
    use super::*;

    unsafe extern "C-unwind" fn is_first(object: *mut c_void) -> bool {
        object.addr() == 1
    }

    #[test]
    fn what_is_not_the_cpu_is_one_accelerator() {
        assert_eq!(
            prepare(&|_| std::ptr::null_mut()),
            Err("ggml_backend_is_cpu")
        );
        assert_eq!(prepare(&|_| is_first as *mut c_void), Ok(()));
        let at = |address: usize| std::ptr::without_provenance_mut::<c_void>(address);
        // SAFETY: the functions above read nothing.
        unsafe {
            let [cpu, gpu] = [1, 2].map(|address| get_device(at(address).cast()));
            let [host, other] = [1, 2].map(|address| buft_get_device(at(address).cast()));
            assert_eq!((cpu, gpu), (host, other));
            assert_eq!(
                [cpu, gpu].map(|of| dev_type(of)),
                [DEVICE_CPU, DEVICE_ACCEL]
            );
            assert!([cpu, gpu].map(|device| dev_supports_op(device, at(1).cast())) == [true; 2]);
            assert_eq!((is_other(cpu), is_other(gpu)), (false, true));
        }
    }
}
