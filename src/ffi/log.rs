//! Log messages for C callers, and the message about a preload of this library.

use std::ffi::{CStr, CString, c_char, c_void};
use std::io::Write;
use std::sync::Arc;

use super::handle;
use super::status::{llama_sidecar_status, status};
use sidecar_core::logger;
use sidecar_core::signals::without_write_signals;

/// Runs when the library is loaded.
#[used]
#[unsafe(link_section = ".init_array")]
static LOADED: extern "C" fn() = loaded;

/// Reports a preload of this library, which changes nothing in a program: the drop-in does.
extern "C" fn loaded() {
    // SAFETY: reads the environment before any other thread of the program can exist.
    let preload = unsafe { libc::getenv(c"LD_PRELOAD".as_ptr()) };
    if preload.is_null() {
        return;
    }
    // SAFETY: a string of the environment, which this thread does not change meanwhile.
    let preload = unsafe { CStr::from_ptr(preload) }.to_bytes();
    if has_this_library(preload) {
        let message = b"llama-sidecar: warning: LD_PRELOAD has libllama_sidecar.so, which only programs that link it use: preload libllama_sidecar_preload.so instead, or start the program with 'llama-sidecar run'\n";
        let _ = without_write_signals(|| std::io::stderr().write_all(message));
    }
}

/// Returns whether a value of LD_PRELOAD has this library.
fn has_this_library(preload: &[u8]) -> bool {
    let mut paths = preload.split(|byte| matches!(byte, b' ' | b':'));
    paths.any(|path| {
        let name = path.rsplit(|&byte| byte == b'/').next();
        let end = name.and_then(|name| name.strip_prefix(b"libllama_sidecar.so"));
        end.is_some_and(|version| version.is_empty() || version[0] == b'.')
    })
}

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

#[cfg(test)]
mod tests {
    use super::has_this_library;

    #[test]
    fn a_preload_of_this_library_is_told_from_one_of_the_drop_in() {
        for preload in [
            "libllama_sidecar.so",
            "/a/b.so:/lib/libllama_sidecar.so.0",
            "x /l/libllama_sidecar.so",
        ] {
            assert!(has_this_library(preload.as_bytes()), "{preload}");
        }
        for preload in [
            "",
            "/lib/libllama_sidecar_preload.so",
            "libllama_sidecar.so/other.so",
        ] {
            assert!(!has_this_library(preload.as_bytes()), "{preload}");
        }
    }
}
