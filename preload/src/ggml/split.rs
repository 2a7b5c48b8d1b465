//! Devices that stand for several: ggml splits their tensors over these (`ggml_backend_meta_device`).
//!
//! A tensor's parts are found by the address of its struct, in a table of its buffer. A tensor that gets
//! another buffer is entered there with [`OwnBuffer::enter`](super::OwnBuffer::enter).

use parking_lot::Mutex;

use super::types::Device;

/// A device and those that it stands for.
static KNOWN: Mutex<Vec<(usize, Vec<usize>)>> = Mutex::new(Vec::new());

/// Notes that a device stands for others.
pub fn note(device: *mut Device, for_devices: &[*mut Device]) {
    let mut known = KNOWN.lock();
    if !known.iter().any(|of| of.0 == device as usize) {
        let others = for_devices.iter().map(|&of| of as usize);
        known.push((device as usize, others.collect()));
    }
}

/// Whether there is any such device.
pub fn is_any() -> bool {
    !KNOWN.lock().is_empty()
}

/// Whether a device stands for others, which are known.
pub fn is_known(device: *mut Device) -> bool {
    KNOWN.lock().iter().any(|of| of.0 == device as usize)
}

/// Returns the devices that a device stands for; none if that is not known, or it is a plain one.
pub fn devices(device: *mut Device) -> Vec<*mut Device> {
    let known = KNOWN.lock();
    let of = known.iter().find(|of| of.0 == device as usize);
    let devices = of.into_iter().flat_map(|of| &of.1);
    devices.map(|&of| of as *mut Device).collect()
}
