//! Contexts: evaluations and the callback for stale graphs.

use std::ffi::c_void;
use std::sync::Arc;

use super::handle::{self, Handle};
use super::model::llama_model;
use super::status::{call, llama_sidecar_status, status};
use crate::model::Context;

/// An evaluation context of a model. This is not the llama_context of llama.cpp; see llama_model.
pub struct llama_context {
    _opaque: [u8; 0],
}

impl Handle for llama_context {
    type Object = Context;
    const NAME: &'static str = "llama_context";
}

/// Receives the new generation of the model after a reload that changed tensors. Graphs that were
/// built before are stale.
///
/// Called on the thread that reloads, after the switch and before the next evaluation can begin.
/// The callback must not begin an evaluation or start a reload.
pub type llama_sidecar_stale =
    Option<unsafe extern "C" fn(generation: u64, user_data: *mut c_void)>;

/// Creates an evaluation context of a model. Use one context per evaluating thread. The context
/// keeps the model alive.
///
/// @return The context, or NULL on failure. Free it with llama_sidecar_context_free.
#[unsafe(no_mangle)]
pub extern "C" fn llama_sidecar_context_new(model: *const llama_model) -> *mut llama_context {
    let made = call(|| {
        let open = handle::get(model)?;
        Ok(handle::new(Context::new(open.model.clone())))
    });
    made.unwrap_or(std::ptr::null_mut())
}

/// Frees a context and ends its evaluation, if one is running.
#[unsafe(no_mangle)]
pub extern "C" fn llama_sidecar_context_free(context: *mut llama_context) -> llama_sidecar_status {
    status(|| handle::free(context))
}

/// Begins an evaluation. Until the evaluation ends, no tensor of the model changes. Waits while a
/// reload switches tensors, and up to 5 seconds for a reload that waits for running evaluations.
///
/// @param generation Receives the generation of the model; can be NULL. If the value differs from
/// the last evaluation, rebuild graphs.
///
/// # Safety
///
/// `generation` is null or valid for a write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn llama_sidecar_eval_begin(
    context: *const llama_context,
    generation: *mut u64,
) -> llama_sidecar_status {
    status(|| {
        let now = handle::get(context)?.begin()?;
        if !generation.is_null() {
            // SAFETY: not null, and valid as the caller guarantees.
            unsafe { generation.write(now) };
        }
        Ok(())
    })
}

/// Ends the evaluation of a context.
///
/// The call can be made on another thread than llama_sidecar_eval_begin. The evaluation still
/// belongs to the thread that began it: a reload on that thread fails at once with
/// LLAMA_SIDECAR_STATUS_BUSY. A thread that took over an evaluation must end it before it reloads;
/// otherwise the reload waits for its own thread and fails with LLAMA_SIDECAR_STATUS_BUSY after 60
/// seconds.
#[unsafe(no_mangle)]
pub extern "C" fn llama_sidecar_eval_end(context: *const llama_context) -> llama_sidecar_status {
    status(|| Ok(handle::get(context)?.end()?))
}

/// Sets the callback for stale graphs. NULL removes it.
///
/// @param user_data Passed to `callback`. Must stay valid until the callback is replaced or the
/// context is freed, and until a reload that is running then returns.
///
/// # Safety
///
/// `callback` can be called with `user_data`, on any thread, until it is replaced or the context is
/// freed, and once more if a reload is under way then.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn llama_sidecar_on_stale(
    context: *const llama_context,
    callback: llama_sidecar_stale,
    user_data: *mut c_void,
) -> llama_sidecar_status {
    let user_data = user_data as usize;
    status(|| {
        let callback = callback.map(|callback| {
            Arc::new(move |generation| {
                // SAFETY: the caller guarantees calls on any thread.
                unsafe { callback(generation, user_data as *mut c_void) }
            }) as Arc<dyn Fn(u64) + Send + Sync>
        });
        handle::get(context)?.on_stale(callback);
        Ok(())
    })
}
