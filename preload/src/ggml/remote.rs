//! Buffers on other machines, which wait to be freed.
//!
//! A server of ggml's RPC backend keeps the last graph that it evaluated, and a program that
//! evaluates the same graph again sends its number alone. When a buffer is freed, the server drops
//! the graph; the next evaluation of the graph closes the connection, and the program aborts.
//! A buffer of such a server is freed at a moment that its last user chooses.

use std::ffi::CStr;

use parking_lot::Mutex;

use super::types::{Buffer, BufferType, Device};
use super::{Ggml, is_other, split};

/// The name of ggml's RPC backend.
const RPC: &CStr = c"RPC";

/// A buffer that no tensor uses any more, with its copy of ggml.
struct Unused(&'static Ggml, *mut Buffer);

// SAFETY: ggml ties no buffer to a thread.
unsafe impl Send for Unused {}

static WAITING: Mutex<Vec<Unused>> = Mutex::new(Vec::new());

/// Frees a buffer; one on another machine waits for [`free_remote`].
///
/// # Safety
///
/// A live buffer of this copy that no tensor uses.
pub unsafe fn free(ggml: &'static Ggml, buffer: *mut Buffer) {
    // SAFETY: as the caller ensures.
    unsafe {
        let buft = (ggml.f.ggml_backend_buffer_get_type)(buffer);
        match is_remote(ggml, buft) {
            true => WAITING.lock().push(Unused(ggml, buffer)),
            false => (ggml.f.ggml_backend_buffer_free)(buffer),
        }
    }
}

/// Whether buffers of a type are on another machine.
///
/// # Safety
///
/// A live buffer type of this copy.
pub unsafe fn is_remote(ggml: &Ggml, buft: *mut BufferType) -> bool {
    // SAFETY: as the caller ensures; devices are static.
    unsafe {
        let device = (ggml.f.ggml_backend_buft_get_device)(buft);
        let mut all = split::devices(device);
        all.push(device);
        let is_rpc = |&device: &*mut Device| match is_other(device) {
            // It has no registration. The names of such buffer types begin with that of the backend.
            true => ggml.buffer_type_name(buft).starts_with("RPC"),
            false => ggml.backend_name(device) == RPC,
        };
        !device.is_null() && all.iter().any(is_rpc)
    }
}

/// Whether a buffer on another machine waits to be freed.
pub fn remote_waits() -> bool {
    !WAITING.lock().is_empty()
}

/// Frees the buffers on other machines that wait. The graphs that were evaluated
/// before cannot be evaluated again; the program has to build others.
pub fn free_remote() {
    let waiting = std::mem::take(&mut *WAITING.lock());
    for Unused(ggml, buffer) in waiting {
        // SAFETY: a live buffer that no tensor uses; it was taken from the list, so this is the
        // only call.
        unsafe { (ggml.f.ggml_backend_buffer_free)(buffer) }
    }
}
