//! Handles, checked against a table of those that are alive.
//!
//! A handle is a number in the clothes of a pointer. The numbers lie where no
//! address can be (not canonical on x86-64, beyond the address space on AArch64),
//! so a pointer of another library is never mistaken for one; they are never used
//! twice, so neither is one that was freed.

use std::collections::HashMap;
use std::sync::Arc;

use once_cell::sync::Lazy;
use parking_lot::RwLock;

use super::status::{Failure, llama_sidecar_status};
use crate::model::Context;

/// "ls", in the top bits of every handle.
const TAG: u64 = 0x6c73 << 48;

/// What a handle can stand for.
#[derive(Clone)]
pub(super) enum Object {
    Model(Arc<super::model::OpenModel>),
    Context(Arc<Context>),
    Report(Arc<super::reload::OwnedReport>),
    Trace(Arc<super::trace::OwnedTrace>),
    PostFetch(Arc<crate::postfetch::PostFetch>),
}

#[derive(Default)]
struct Table {
    alive: HashMap<u64, Object>,
    made: u64,
}

static TABLE: Lazy<RwLock<Table>> = Lazy::new(RwLock::default);

/// Types that C sees as pointers to an opaque struct.
pub(super) trait Handle {
    /// What is behind it.
    type Object;
    /// Its name, for messages.
    const NAME: &'static str;

    fn wrap(object: Arc<Self::Object>) -> Object;
    fn unwrap(object: &Object) -> Option<Arc<Self::Object>>;
}

/// An open model. Not the llama_model of llama.cpp: neither library accepts the other's.
pub struct llama_model {
    _opaque: [u8; 0],
}

/// Somebody who evaluates a model. Not the llama_context of llama.cpp: neither library accepts the
/// other's.
pub struct llama_context {
    _opaque: [u8; 0],
}

/// What a reload did.
pub struct llama_sidecar_report {
    _opaque: [u8; 0],
}

/// Counts of the experts of a model.
pub struct llama_expert_trace {
    _opaque: [u8; 0],
}

/// Fetches experts to a GPU.
pub struct llama_postfetch {
    _opaque: [u8; 0],
}

macro_rules! handle {
    ($name:ident, $variant:ident, $object:ty) => {
        impl Handle for $name {
            type Object = $object;
            const NAME: &'static str = stringify!($name);

            fn wrap(object: Arc<$object>) -> Object {
                Object::$variant(object)
            }

            fn unwrap(object: &Object) -> Option<Arc<$object>> {
                match object {
                    Object::$variant(object) => Some(object.clone()),
                    _ => None,
                }
            }
        }
    };
}

handle!(llama_model, Model, super::model::OpenModel);
handle!(llama_context, Context, Context);
handle!(llama_sidecar_report, Report, super::reload::OwnedReport);
handle!(llama_expert_trace, Trace, super::trace::OwnedTrace);
handle!(llama_postfetch, PostFetch, crate::postfetch::PostFetch);

/// Puts an object into the table.
pub(super) fn new<H: Handle>(object: H::Object) -> *mut H {
    let mut table = TABLE.write();
    table.made += 1;
    let handle = TAG | table.made << 4;
    table.alive.insert(handle, H::wrap(Arc::new(object)));
    handle as *mut H
}

/// The object behind a handle. It lives at least as long as the result, also when
/// another thread frees the handle.
pub(super) fn get<H: Handle>(handle: *const H) -> Result<Arc<H::Object>, Failure> {
    let table = TABLE.read();
    let object = table.alive.get(&(handle as u64));
    object
        .and_then(H::unwrap)
        .ok_or_else(|| bad(handle, object))
}

/// Takes an object out of the table. NULL is no error.
pub(super) fn free<H: Handle>(handle: *mut H) -> Result<(), Failure> {
    if handle.is_null() {
        return Ok(());
    }
    get(handle)?;
    // Dropped after the lock is released: the last owner may take a while.
    let object = TABLE.write().alive.remove(&(handle as u64));
    drop(object);
    Ok(())
}

fn bad<H: Handle>(handle: *const H, found: Option<&Object>) -> Failure {
    let problem = if handle.is_null() {
        "is NULL"
    } else if found.is_some() {
        "is a handle of another kind"
    } else if handle as u64 >> 48 == TAG >> 48 {
        "was freed"
    } else {
        "is not a handle of llama-sidecar (one of llama.cpp, perhaps)"
    };
    Failure::new(
        llama_sidecar_status::BadHandle,
        format!(
            "expected a live {} handle, found {handle:?}, which {problem}",
            H::NAME
        ),
    )
}
