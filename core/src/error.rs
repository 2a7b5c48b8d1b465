//! Errors of the library. Each message states what failed, why, and the next step.

use std::io;
use std::path::PathBuf;

use crate::gguf::OpenError;
use crate::text;

/// Errors of a device.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum DeviceError {
    /// An allocation did not fit.
    #[error("device '{device}' cannot allocate {requested} bytes, {free} are free")]
    OutOfMemory {
        /// Name of the device.
        device: String,
        /// Requested bytes.
        requested: u64,
        /// Free bytes.
        free: u64,
    },
    /// Another operation failed.
    #[error("device '{device}' cannot {action}: {reason}")]
    Failed {
        /// Name of the device.
        device: String,
        /// The operation.
        action: &'static str,
        /// Error of the driver.
        reason: String,
    },
}

/// An error of the library.
#[derive(Debug, thiserror::Error)]
#[allow(
    missing_docs,
    reason = "the message of each variant describes its fields"
)]
pub enum Error {
    #[error(transparent)]
    Open(#[from] OpenError),
    #[error(transparent)]
    Device(#[from] DeviceError),
    #[error("{path}: cannot read {what} at offset {offset}: {source}", path = text::path(path))]
    Read {
        path: PathBuf,
        what: String,
        offset: u64,
        source: io::Error,
    },
    #[error(
        "{path}: cannot use {what}, because the file was modified in place after it was opened: reload or reopen the model, and replace files by rename", path = text::path(path)
    )]
    WrittenInPlace { path: PathBuf, what: String },
    #[error("{what} {wanted} does not exist: {available}")]
    NotFound {
        what: &'static str,
        wanted: String,
        available: String,
    },
    #[error("cancelled by the progress callback; nothing was kept")]
    Cancelled,
    #[error(
        "hot-swap is off: start the program with 'llama-sidecar run --hotswap' (LLAMA_SIDECAR_HOTSWAP=1); in a program that links the library, set LLAMA_HOTSWAP_ENABLED=1 or the parameter 'hotswap' before the model is loaded"
    )]
    HotSwapOff,
    #[error("{0}")]
    Busy(&'static str),
    #[error("{0}")]
    NoMemory(String),
    #[error("{0}")]
    Invalid(String),
}

/// Result of the library's operations.
pub type Result<T, E = Error> = std::result::Result<T, E>;
