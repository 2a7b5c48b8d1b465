//! A second instance of a GPU backend of the program, with memory and events on its device.
//!
//! An instance has a queue of its own, so that copies in it run beside the products in the queue
//! of the program's instance.

use std::ffi::CStr;

use super::figures::FIGURES;
use crate::ggml::{
    Backend, Buffer, BufferType, DEVICE_GPU, DEVICE_IGPU, Device, Event, Ggml, OwnContext, Tensor,
    USAGE_COMPUTE,
};

/// Backends that are left alone: those of SYCL's instances share one queue, and RPC sends each
/// copy over the network.
const LEFT_ALONE: [&CStr; 2] = [c"SYCL", c"RPC"];

/// Whether experts are copied early to a device: to a GPU, whose copies and products can overlap.
/// A device that stands for several is none.
///
/// # Safety
///
/// A live device of this copy.
pub unsafe fn is_usable(ggml: &Ggml, device: *mut Device) -> bool {
    let f = &ggml.f;
    // SAFETY: as the caller ensures; the name of a registration is a static string.
    unsafe {
        let ty = (f.ggml_backend_dev_type)(device);
        [DEVICE_GPU, DEVICE_IGPU].contains(&ty) && !LEFT_ALONE.contains(&ggml.backend_name(device))
    }
}

/// A backend of which this drop-in is the only user.
pub struct Instance {
    ggml: &'static Ggml,
    device: *mut Device,
    backend: *mut Backend,
    /// Whether its events cover copies.
    events_cover_copies: bool,
}

// SAFETY: one thread at a time issues copies in the instance, and it is freed without a user.
unsafe impl Send for Instance {}
// SAFETY: as above.
unsafe impl Sync for Instance {}

impl Instance {
    /// Makes an instance of a device's backend; `None` when the backend refuses.
    pub fn open(ggml: &'static Ggml, device: *mut Device) -> Option<Instance> {
        let f = &ggml.f;
        // SAFETY: a live device.
        unsafe {
            let backend = (f.ggml_backend_dev_init)(device, c"".as_ptr());
            (!backend.is_null()).then(|| Instance {
                ggml,
                device,
                backend,
                // ggml's Vulkan backend records an event in the queue of the products, and
                // copies have another one.
                events_cover_copies: ggml.backend_name(device) != c"Vulkan",
            })
        }
    }

    /// Returns the backend.
    pub fn backend(&self) -> *mut Backend {
        self.backend
    }

    /// Whether copies to a tensor and products run in the order in which they were submitted to a
    /// backend of the device.
    pub fn is_in_order(&self) -> bool {
        self.events_cover_copies
    }

    /// Makes an event; `None` where the backend has none.
    pub fn event(&self) -> Option<OwnEvent> {
        // SAFETY: a live device.
        let event = unsafe { (self.ggml.f.ggml_backend_event_new)(self.device) };
        (!event.is_null()).then_some(OwnEvent {
            ggml: self.ggml,
            event,
        })
    }

    /// Records an event after the copies that were issued. Waits for them first where events do
    /// not cover copies.
    pub fn record(&self, event: &OwnEvent) {
        let f = &self.ggml.f;
        // SAFETY: a live backend, and a live event of its device.
        unsafe {
            if !self.events_cover_copies {
                (f.ggml_backend_synchronize)(self.backend);
            }
            (f.ggml_backend_event_record)(event.event, self.backend);
        }
    }
}

impl Drop for Instance {
    fn drop(&mut self) {
        // SAFETY: made here, freed once, and nothing uses it any more.
        unsafe { (self.ggml.f.ggml_backend_free)(self.backend) }
    }
}

/// An event that is freed when dropped.
pub struct OwnEvent {
    ggml: &'static Ggml,
    event: *mut Event,
}

// SAFETY: events are not tied to a thread.
unsafe impl Send for OwnEvent {}
// SAFETY: one thread records an event, others wait for it.
unsafe impl Sync for OwnEvent {}

impl OwnEvent {
    /// Records the event after the work that was submitted to a backend.
    ///
    /// # Safety
    ///
    /// A live backend of the device of the event, on the thread that uses the backend.
    pub unsafe fn record(&self, backend: *mut Backend) {
        // SAFETY: as the caller ensures.
        unsafe { (self.ggml.f.ggml_backend_event_record)(self.event, backend) }
    }

    /// Makes later work of a backend wait for the event.
    ///
    /// # Safety
    ///
    /// As for [`OwnEvent::record`].
    pub unsafe fn hold(&self, backend: *mut Backend) {
        // SAFETY: as the caller ensures.
        unsafe { (self.ggml.f.ggml_backend_event_wait)(backend, self.event) }
    }

    /// Waits for the event.
    pub fn wait(&self) {
        // SAFETY: a live event.
        unsafe { (self.ggml.f.ggml_backend_event_synchronize)(self.event) }
    }
}

impl Drop for OwnEvent {
    fn drop(&mut self) {
        // SAFETY: made here, freed once, and nothing uses it any more.
        unsafe { (self.ggml.f.ggml_backend_event_free)(self.event) }
    }
}

/// Memory on a device for one expert matrix at a time.
pub struct Scratch {
    ggml: &'static Ggml,
    buffer: *mut Buffer,
    size: usize,
}

// SAFETY: ggml ties no buffer to a thread.
unsafe impl Send for Scratch {}

impl Scratch {
    /// Allocates memory of a buffer type; `None` when there is none left.
    pub fn allocate(ggml: &'static Ggml, buft: *mut BufferType, size: usize) -> Option<Scratch> {
        // SAFETY: a live buffer type.
        unsafe {
            let buffer = (ggml.f.ggml_backend_buft_alloc_buffer)(buft, size);
            if buffer.is_null() {
                return None;
            }
            // As the scheduler's own copies: backends clear what is behind a matrix themselves.
            (ggml.f.ggml_backend_buffer_set_usage)(buffer, USAGE_COMPUTE);
            FIGURES.lock().scratch_bytes += size as u64;
            Some(Scratch { ggml, buffer, size })
        }
    }

    /// Returns its size in bytes.
    pub fn size(&self) -> usize {
        self.size
    }

    /// Makes a tensor of a type and shape at the start of the memory; `None` when the backend
    /// refuses. The tensor lives as long as the context.
    pub fn tensor(&self, ty: i32, ne: &[i64; 4]) -> Option<(OwnContext, *mut Tensor)> {
        let context = self.ggml.context(1)?;
        let tensor = context.tensor(ty, ne);
        let f = &self.ggml.f;
        // SAFETY: a new tensor, which fits the memory: the caller allocated the size that the
        // buffer type returns for it.
        let placed = unsafe {
            (f.ggml_set_name)(tensor, c"post-fetch".as_ptr());
            let base = (f.ggml_backend_buffer_get_base)(self.buffer);
            (f.ggml_backend_tensor_alloc)(self.buffer, tensor, base)
        };
        (placed == 0).then_some((context, tensor))
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        FIGURES.lock().scratch_bytes -= self.size as u64;
        // SAFETY: allocated here, freed once, and no tensor uses it any more.
        unsafe { (self.ggml.f.ggml_backend_buffer_free)(self.buffer) }
    }
}
