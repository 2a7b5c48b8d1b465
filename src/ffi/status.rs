//! Status codes, the last error of each thread, and the boundary that catches panics.

use sidecar_core::text;
use std::cell::RefCell;
use std::ffi::{CStr, CString, c_char};
use std::panic::{AssertUnwindSafe, catch_unwind};

use crate::device::DeviceError;
use sidecar_core::error::Error;
use sidecar_core::gguf::OpenError;

/// Result of a call. The meaning of a value never changes.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum llama_sidecar_status {
    /// The call succeeded.
    Ok = 0,
    /// An argument is NULL, out of range, or of the wrong size.
    BadArgument = 1,
    /// A handle is NULL, freed, of another type, or not a handle of this library.
    BadHandle = 2,
    /// The file, tensor, key, layer, or device does not exist.
    NotFound = 3,
    /// The operating system failed to open, read, or write a file.
    Io = 4,
    /// A file is not a valid GGUF file, or is a shard that does not belong to the model.
    Malformed = 5,
    /// A device does not have enough free memory.
    OutOfMemory = 6,
    /// A device reported another error.
    Device = 7,
    /// A callback returned false, so the call stopped.
    Cancelled = 8,
    /// The call is not possible now: for example, a reload during an evaluation of the same thread.
    Busy = 9,
    /// A file was modified in place after it was opened, or while it was read.
    FileChanged = 10,
    /// The feature is disabled for this model.
    Disabled = 11,
    /// Internal error. Nothing was changed. Report the message as a bug of llama-sidecar.
    Internal = 12,
}

/// A status and its message.
#[derive(Debug)]
pub(super) struct Failure {
    pub status: llama_sidecar_status,
    pub message: String,
}

impl Failure {
    pub fn new(status: llama_sidecar_status, message: impl Into<String>) -> Failure {
        Failure {
            status,
            message: message.into(),
        }
    }

    pub fn argument(message: impl Into<String>) -> Failure {
        Failure::new(llama_sidecar_status::BadArgument, message)
    }

    pub fn null(what: &str) -> Failure {
        Failure::argument(format!("{what} is NULL"))
    }
}

impl From<Error> for Failure {
    fn from(error: Error) -> Failure {
        use llama_sidecar_status as S;
        let status = match &error {
            Error::Open(OpenError::Io { source, .. }) => match source.kind() {
                std::io::ErrorKind::NotFound => S::NotFound,
                _ => S::Io,
            },
            Error::Open(OpenError::Changing { .. }) | Error::WrittenInPlace { .. } => {
                S::FileChanged
            }
            Error::Open(_) => S::Malformed,
            Error::Device(DeviceError::OutOfMemory { .. }) => S::OutOfMemory,
            Error::Device(DeviceError::Failed { .. }) => S::Device,
            Error::Read { .. } => S::Io,
            Error::NotFound { .. } => S::NotFound,
            Error::Cancelled => S::Cancelled,
            Error::HotSwapOff => S::Disabled,
            Error::Busy(_) => S::Busy,
            Error::NoMemory(_) => S::OutOfMemory,
            Error::Invalid(_) => S::BadArgument,
        };
        Failure::new(status, error.to_string())
    }
}

thread_local! {
    static LAST: RefCell<(llama_sidecar_status, CString)> =
        RefCell::new((llama_sidecar_status::Ok, CString::default()));
}

fn remember(failure: &Failure) {
    let message = CString::new(&*text::line(&failure.message)).expect("no NUL is left");
    // A thread that is ending may have destroyed its last error.
    let _ = LAST.try_with(|last| *last.borrow_mut() = (failure.status, message));
}

/// Runs the body of a call. Converts a failure or a panic into a status and records it as the last
/// error.
pub(super) fn call<T>(
    body: impl FnOnce() -> Result<T, Failure>,
) -> Result<T, llama_sidecar_status> {
    // Unwind safety: state that a panic leaves half-changed is behind the library's
    // own locks and guards, which restore it.
    let result = catch_unwind(AssertUnwindSafe(body)).unwrap_or_else(|panic| {
        let what = panic
            .downcast_ref::<String>()
            .map(String::as_str)
            .or_else(|| panic.downcast_ref::<&str>().copied())
            .unwrap_or("a panic without a message");
        Err(Failure::new(
            llama_sidecar_status::Internal,
            format!("internal error: {what}"),
        ))
    });
    result.map_err(|failure| {
        remember(&failure);
        failure.status
    })
}

/// Runs the body of a function that returns a status only; see [`call`].
pub(super) fn status(body: impl FnOnce() -> Result<(), Failure>) -> llama_sidecar_status {
    match call(body) {
        Ok(()) => llama_sidecar_status::Ok,
        Err(status) => status,
    }
}

/// Returns the version of the library, for example "0.1.0". LLAMA_SIDECAR_VERSION is the version of
/// the header.
///
/// @return A static string.
#[unsafe(no_mangle)]
pub extern "C" fn llama_sidecar_version() -> *const c_char {
    const VERSION: &str = concat!(env!("CARGO_PKG_VERSION"), "\0");
    VERSION.as_ptr().cast()
}

/// Returns the message of the last failed call of this thread: what failed, why, and what to do.
///
/// @return A string of the library, empty if no call has failed. Valid until the next failed call
/// of the same thread.
#[unsafe(no_mangle)]
pub extern "C" fn llama_sidecar_last_error() -> *const c_char {
    let last = LAST.try_with(|last| last.borrow().1.as_ptr());
    last.unwrap_or(c"".as_ptr())
}

/// Returns the status of the last failed call of this thread. Use it after a call that returns NULL
/// or false on failure.
#[unsafe(no_mangle)]
pub extern "C" fn llama_sidecar_last_status() -> llama_sidecar_status {
    LAST.try_with(|last| last.borrow().0)
        .unwrap_or(llama_sidecar_status::Ok)
}

/// Returns the name of a status, for example "out of memory".
///
/// @return A static string; "unknown status" for a number that is not a status.
#[unsafe(no_mangle)]
pub extern "C" fn llama_sidecar_status_name(status: u32) -> *const c_char {
    const NAMES: [&CStr; llama_sidecar_status::Internal as usize + 1] = [
        c"ok",
        c"bad argument",
        c"bad handle",
        c"not found",
        c"input/output error",
        c"malformed file",
        c"out of memory",
        c"device error",
        c"cancelled",
        c"busy",
        c"file changed",
        c"disabled",
        c"internal error",
    ];
    let name = NAMES.get(status as usize).unwrap_or(&c"unknown status");
    name.as_ptr()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_panic_becomes_a_status() {
        let hook = std::panic::take_hook();
        std::panic::set_hook(Box::new(|_| ()));
        let result = status(|| panic!("on purpose: {}", 42));
        std::panic::set_hook(hook);
        assert_eq!(result, llama_sidecar_status::Internal);
        // SAFETY: the pointer is valid until the next failing call of this thread.
        let message = unsafe { CStr::from_ptr(llama_sidecar_last_error()) };
        assert_eq!(message.to_str(), Ok("internal error: on purpose: 42"));
        assert_eq!(llama_sidecar_last_status(), llama_sidecar_status::Internal);
    }
}
