//! Log messages for C callers.

use std::ffi::{CString, c_char, c_void};
use std::sync::Arc;

use super::handle;
use super::status::{llama_sidecar_status, status};
use sidecar_core::logger;

/// Receives a log message. Can be called from any thread, inside of any call, while the library holds
/// locks. Calls that take a handle fail with LLAMA_SIDECAR_STATUS_BUSY in it; it must not wait for
/// another thread that makes such a call.
///
/// @param level 1 error, 2 warning, 3 information, 4 debugging.
/// @param text Message without a newline. Valid during the call only.
pub type llama_sidecar_log_callback =
    Option<unsafe extern "C" fn(level: u32, text: *const c_char, user_data: *mut c_void)>;

/// Sends log messages to `callback` instead of standard error. The variable LLAMA_SIDECAR_LOG sets
/// the lowest level that is logged.
///
/// @param callback NULL restores standard error.
/// @param user_data Passed to `callback`. It must stay valid until the callback is replaced and the
/// calls of the library that other threads have begun before have ended.
///
/// # Safety
///
/// `callback` can be called with `user_data`, on any thread, until it is replaced.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn llama_sidecar_log_set(
    callback: llama_sidecar_log_callback,
    user_data: *mut c_void,
) -> llama_sidecar_status {
    let user_data = user_data as usize;
    status(|| {
        logger::set_sink(callback.map(|callback| {
            Arc::new(move |level: log::Level, text: &str| {
                let text = CString::new(text.replace('\0', " ")).unwrap_or_default();
                handle::without_handles(|| {
                    // SAFETY: the caller guarantees calls on any thread.
                    unsafe { callback(level as u32, text.as_ptr(), user_data as *mut c_void) }
                });
            }) as Arc<logger::Sink>
        }));
        Ok(())
    })
}
