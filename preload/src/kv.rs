//! Dropping the context that a host cached, after a switch.
//!
//! Cached keys and values were computed with the weights as they were. Kept, they are
//! what a model would have that learnt new weights in the middle of a text; some
//! measurements want that and some do not (`LLAMA_HOTSWAP_KV`).

use std::collections::HashMap;
use std::ffi::c_void;
use std::sync::Once;

use llama_sidecar::log::{Level, log};
use parking_lot::Mutex;

use crate::gate;
use crate::origin::Origin;

/// The generation with which each context of the host evaluated last.
static LAST: Mutex<Option<HashMap<usize, u64>>> = Mutex::new(None);

/// A context is about to decode: drops what it cached before the last switch.
pub fn clear_after_switch(origin: &Origin, context: usize) {
    if gate::is_waiting() {
        gate::give_way(|| ());
    }
    let now = gate::generation();
    let before = LAST.lock().get_or_insert_default().insert(context, now);
    if before.is_some_and(|before| before != now) {
        clear(origin, context as *mut c_void);
    }
}

fn clear(origin: &Origin, context: *mut c_void) {
    type Get = unsafe extern "C-unwind" fn(*mut c_void) -> *mut c_void;
    type Clear = unsafe extern "C-unwind" fn(*mut c_void, bool);
    let get = origin.symbol(c"llama_get_memory");
    let clear = origin.symbol(c"llama_memory_clear");
    if get.is_null() || clear.is_null() {
        static ONCE: Once = Once::new();
        ONCE.call_once(|| {
            log(
                Level::Warn,
                format_args!(
                    "LLAMA_HOTSWAP_KV=clear: this program has no llama_memory_clear; cached context is kept"
                ),
            );
        });
        return;
    }
    // SAFETY: llama.h gives both functions these types; the context is the one that
    // the host is about to decode with, on this thread.
    unsafe {
        let get = std::mem::transmute::<*mut c_void, Get>(get);
        let clear = std::mem::transmute::<*mut c_void, Clear>(clear);
        let memory = get(context);
        if !memory.is_null() {
            clear(memory, true);
        }
    }
}
