//! Evaluations that the program does not wait for, such as the last one of a draft model.
//!
//! A switch has to know when such an evaluation has ended, and no call of the program shows it. Where a program has
//! more than one scheduler, an event of each device is recorded after each evaluation; a pending switch waits for these.

use parking_lot::Mutex;

use crate::ggml::{Backend, Device, Event, Ggml};
use crate::program::graph::Backends;

/// The events of a scheduler. They are kept for the next scheduler in its place: devices may be gone when one is freed.
pub struct Completion(Mutex<Vec<OfDevice>>);

struct OfDevice {
    device: *mut Device,
    /// Null if the device has none.
    event: *mut Event,
    /// The backend of the graph; null if the graph has none of the device, or needs no event.
    backend: *mut Backend,
}

// SAFETY: events are not bound to threads, and the mutex lets one thread at a time use them.
unsafe impl Send for OfDevice {}

impl Completion {
    /// Without events.
    pub const fn new() -> Completion {
        Completion(Mutex::new(Vec::new()))
    }

    /// Prepares events for evaluations of a graph by these backends, if `wanted`.
    ///
    /// # Safety
    ///
    /// The backends are live and of this copy.
    pub unsafe fn prepare(&self, ggml: &Ggml, backends: &Backends, wanted: bool) {
        let mut events = self.0.lock();
        for of in events.iter_mut() {
            of.backend = std::ptr::null_mut();
        }
        let backends = backends.addresses.iter().zip(&backends.devices);
        for (&backend, &device) in backends.filter(|_| wanted) {
            // SAFETY: as the caller ensures.
            if unsafe { ggml.is_cpu(device) } {
                continue;
            }
            let backend = backend as *mut Backend;
            match events.iter_mut().find(|of| of.device == device) {
                Some(of) => of.backend = backend,
                None => events.push(OfDevice {
                    device,
                    // SAFETY: as the caller ensures.
                    event: unsafe { (ggml.f.ggml_backend_event_new)(device) },
                    backend,
                }),
            }
        }
    }

    /// Records the events of an evaluation on the thread that began it, and `leave`s it.
    pub fn record(&self, ggml: &Ggml, leave: impl FnOnce()) {
        let events = self.0.lock();
        for of in events.iter() {
            if !of.backend.is_null() && !of.event.is_null() {
                // SAFETY: the program has just used the backend, and the event is of its device.
                unsafe { (ggml.f.ggml_backend_event_record)(of.event, of.backend) };
            }
        }
        leave();
    }

    /// Waits for the last evaluation and calls `ended`; does nothing if a device has no event.
    pub fn wait(&self, ggml: &Ggml, ended: impl FnOnce()) {
        let events = self.0.lock();
        let used = || events.iter().filter(|of| !of.backend.is_null());
        if used().next().is_none() || used().any(|of| of.event.is_null()) {
            return;
        }
        for of in used() {
            // SAFETY: a live event, recorded since the backend is known.
            unsafe { (ggml.f.ggml_backend_event_synchronize)(of.event) };
        }
        ended();
    }
}
