//! Places where tensor bytes can live, behind one seam.
//!
//! A [`Device`] gives out [`Buffer`]s. A buffer is filled while one owner holds it
//! and is only read once it is shared, so nobody ever sees half of a tensor.

mod host;

use std::fmt;
use std::sync::Arc;

pub use host::HostDevice;

/// Alignment of a buffer and of every tensor in it, in bytes: ggml needs 32, CUDA
/// gives 256.
pub const ALIGNMENT: u64 = 256;

/// What kind of memory a device is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DeviceKind {
    /// Memory of the process.
    Host,
}

/// How much memory a device has and what we hold of it, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Memory {
    /// All of it.
    pub total: u64,
    /// What can still be allocated.
    pub free: u64,
    /// What our live buffers hold.
    pub used: u64,
    /// The most they ever held.
    pub peak: u64,
    /// How many buffers were ever allocated.
    pub allocations: u64,
}

/// Why a device refused.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum DeviceError {
    /// An allocation did not fit.
    #[error("device '{device}' cannot allocate {requested} bytes, {free} are free")]
    OutOfMemory {
        /// Name of the device.
        device: String,
        /// Bytes asked for.
        requested: u64,
        /// Bytes it had.
        free: u64,
    },
    /// A copy failed.
    #[error("device '{device}' cannot {action}: {reason}")]
    Copy {
        /// Name of the device.
        device: String,
        /// What was tried.
        action: &'static str,
        /// What the driver said.
        reason: String,
    },
}

/// A place that holds tensor bytes. Safe to use from several threads.
pub trait Device: Send + Sync + fmt::Debug {
    /// Name for people, unique within a process.
    fn name(&self) -> &str;

    /// What kind of memory it is.
    fn kind(&self) -> DeviceKind;

    /// How much memory there is.
    fn memory(&self) -> Memory;

    /// A new buffer of `len` bytes, aligned to [`ALIGNMENT`]; its bytes are
    /// unspecified. Freed when dropped.
    fn allocate(self: Arc<Self>, len: u64) -> Result<Box<dyn Buffer>, DeviceError>;
}

/// Memory on a device.
pub trait Buffer: Send + Sync + fmt::Debug {
    /// Size in bytes.
    fn len(&self) -> u64;

    /// Whether it has no bytes.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Address of the first byte, in the address space of the device.
    fn address(&self) -> u64;

    /// The bytes, where the process can read them directly.
    fn host(&self) -> Option<&[u8]>;

    /// The bytes to fill, where the process can write them directly.
    fn host_mut(&mut self) -> Option<&mut [u8]>;

    /// Copies `bytes` to `offset`. Panics when they do not fit.
    fn write(&mut self, offset: u64, bytes: &[u8]) -> Result<(), DeviceError>;

    /// Copies from `offset` into `bytes`. Panics when it is out of range.
    fn read(&self, offset: u64, bytes: &mut [u8]) -> Result<(), DeviceError>;
}
