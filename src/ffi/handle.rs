//! Handles, and the table of live handles that every call checks.
//!
//! A handle is an integer id cast to a pointer. Ids are not valid addresses (non-canonical on
//! x86-64, outside the address space on AArch64), so an id never equals a pointer of another
//! library. An id is never reused, so a freed handle is never taken for a live one.

use std::any::Any;
use std::cell::Cell;
use std::collections::HashMap;
use std::sync::Arc;

use once_cell::sync::Lazy;
use parking_lot::RwLock;

use super::status::{Failure, llama_sidecar_status};

/// The top 16 bits of every handle: "ls" in ASCII.
const TAG: u64 = 0x6c73 << 48;

type Object = Arc<dyn Any + Send + Sync>;

#[derive(Default)]
struct Table {
    alive: HashMap<u64, Object>,
    made: u64,
}

static TABLE: Lazy<RwLock<Table>> = Lazy::new(RwLock::default);

thread_local! {
    /// Whether a callback runs on this thread while the library holds locks.
    static IS_REFUSED: Cell<bool> = const { Cell::new(false) };
}

/// Runs a callback that may come while this thread holds locks of objects: calls with handles fail in
/// it, because they would wait for the thread itself.
pub(super) fn without_handles(callback: impl FnOnce()) {
    // A thread that is ending has no variable any more.
    let before = IS_REFUSED.try_with(|is_refused| is_refused.replace(true));
    callback();
    let _ = IS_REFUSED.try_with(|is_refused| is_refused.set(before.unwrap_or(false)));
}

/// A type that C uses through a pointer to an opaque struct.
pub(super) trait Handle {
    /// The object of the handle. Each handle type has an object type of its own.
    type Object: Send + Sync + 'static;
    /// Name of the C type, for messages.
    const NAME: &'static str;
}

/// Adds an object to the table and returns its handle.
pub(super) fn new<H: Handle>(object: H::Object) -> *mut H {
    let mut table = TABLE.write();
    table.made += 1;
    let handle = TAG | table.made << 4;
    table.alive.insert(handle, Arc::new(object));
    handle as *mut H
}

/// Returns the object of a handle. The result keeps the object alive, also when another thread
/// frees the handle.
pub(super) fn get<H: Handle>(handle: *const H) -> Result<Arc<H::Object>, Failure> {
    if IS_REFUSED.try_with(Cell::get).unwrap_or(false) {
        return Err(Failure::new(
            llama_sidecar_status::Busy,
            "a log callback cannot make calls with handles: make them after it has returned",
        ));
    }
    let table = TABLE.read();
    let object = table.alive.get(&(handle as u64)).cloned();
    let found = object.is_some();
    let object = object.and_then(|object| object.downcast().ok());
    object.ok_or_else(|| bad(handle, found))
}

/// Returns the objects of all live handles of a type; none while another thread changes the table,
/// which at the end of the process may last for ever.
pub(super) fn all<H: Handle>() -> Vec<Arc<H::Object>> {
    let table = TABLE.try_read();
    let objects = table.iter().flat_map(|table| table.alive.values());
    objects
        .filter_map(|object| object.clone().downcast().ok())
        .collect()
}

/// Removes an object from the table. NULL is not an error.
pub(super) fn free<H: Handle>(handle: *mut H) -> Result<(), Failure> {
    if handle.is_null() {
        return Ok(());
    }
    get(handle)?;
    // Dropped after the lock is released, because dropping the last owner can take long.
    let object = TABLE.write().alive.remove(&(handle as u64));
    drop(object);
    Ok(())
}

fn bad<H: Handle>(handle: *const H, found: bool) -> Failure {
    let problem = if handle.is_null() {
        "is NULL"
    } else if found {
        "is a handle of another kind"
    } else if handle as u64 >> 48 == TAG >> 48 {
        "was freed"
    } else {
        "is not a handle of llama-sidecar (a handle of llama.cpp cannot be used here)"
    };
    Failure::new(
        llama_sidecar_status::BadHandle,
        format!(
            "expected a live {} handle, found {handle:?}, which {problem}",
            H::NAME
        ),
    )
}
