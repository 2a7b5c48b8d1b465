//! Contexts: evaluations and the stale-graph callback.

use std::ffi::c_void;
use std::sync::Arc;

use super::handle::{self, llama_context, llama_model};
use super::status::{call, llama_sidecar_status, status};
use crate::model::Context;

/// Told that a reload changed tensors, with the model's new generation: graphs that were built
/// before no longer fit.
///
/// Called on the thread that reloads, after the switch and before the next evaluation can begin. It
/// must not begin an evaluation or reload.
pub type llama_sidecar_stale =
    Option<unsafe extern "C" fn(generation: u64, user_data: *mut c_void)>;

/// Attaches a context to a model. Use one for each thread that evaluates. Returns NULL on failure.
/// Free the result with llama_sidecar_context_free; until then it keeps the model alive.
#[unsafe(no_mangle)]
pub extern "C" fn llama_sidecar_context_new(model: *const llama_model) -> *mut llama_context {
    let made = call(|| {
        let open = handle::get(model)?;
        Ok(handle::new(Context::new(open.model.clone())))
    });
    made.unwrap_or(std::ptr::null_mut())
}

/// Frees a context; an evaluation that it began ends.
#[unsafe(no_mangle)]
pub extern "C" fn llama_sidecar_context_free(context: *mut llama_context) -> llama_sidecar_status {
    status(|| handle::free(context))
}

/// Begins an evaluation: until it ends, no tensor of the model changes. Waits for a switch that is
/// under way, and up to 5 seconds for one that itself waits for running evaluations.
///
/// `generation` can be NULL; it gets the model's generation. When it differs from that of the last
/// evaluation, graphs must be built again.
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
            // SAFETY: not null, and valid as the caller vouches.
            unsafe { generation.write(now) };
        }
        Ok(())
    })
}

/// Ends the evaluation of a context.
///
/// Can be called on another thread than the one that began the evaluation. The evaluation counts for
/// the thread that began it: only there a reload fails at once with LLAMA_SIDECAR_STATUS_BUSY. A thread
/// that took an evaluation over must end it before it reloads; otherwise the reload waits for its own
/// thread and fails with LLAMA_SIDECAR_STATUS_BUSY after 60 seconds.
#[unsafe(no_mangle)]
pub extern "C" fn llama_sidecar_eval_end(context: *const llama_context) -> llama_sidecar_status {
    status(|| Ok(handle::get(context)?.end()?))
}

/// Sets what is called when graphs have become stale; NULL for nothing.
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
                // SAFETY: the caller vouched for calls on any thread.
                unsafe { callback(generation, user_data as *mut c_void) }
            }) as Arc<dyn Fn(u64) + Send + Sync>
        });
        handle::get(context)?.on_stale(callback);
        Ok(())
    })
}
