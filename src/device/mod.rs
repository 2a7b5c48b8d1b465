//! Places where tensor bytes can live, behind one seam.
//!
//! A [`Device`] gives out [`Buffer`]s. A buffer is filled while one owner holds it
//! and is only read once it is shared, so nobody ever sees half of a tensor.

#[cfg(feature = "cuda")]
pub mod cuda;
mod host;

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

pub use host::{HostDevice, system_memory};

/// Alignment of a buffer and of every tensor in it, in bytes: ggml needs 32, CUDA
/// gives 256.
pub const ALIGNMENT: u64 = 256;

/// What kind of memory a device is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DeviceKind {
    /// Memory of the process.
    Host,
    /// Memory of an NVIDIA GPU.
    Cuda,
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
    /// Something else failed.
    #[error("device '{device}' cannot {action}: {reason}")]
    Failed {
        /// Name of the device.
        device: String,
        /// What was tried.
        action: &'static str,
        /// What the driver said.
        reason: String,
    },
}

impl DeviceError {
    /// The answer of a library that was built without the feature `cuda`.
    pub fn without_cuda() -> DeviceError {
        DeviceError::Failed {
            device: "cuda".into(),
            action: "be used",
            reason: "the library was built without CUDA".into(),
        }
    }
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

/// A queue of work on a device, in order. What the driver calls it by.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Stream(pub u64);

/// A mark in a stream. What the driver calls it by.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Event(pub u64);

/// A device that copies in the background: all that the post-fetch scheduler knows of
/// a driver.
///
/// Streams and events are plain values, as in the drivers themselves: whoever creates
/// one destroys it, and nobody else uses it then. All methods can be called from any
/// thread and leave its current device as it was.
pub trait AsyncDevice: Device {
    /// A new stream that waits for no other.
    fn create_stream(&self) -> Result<Stream, DeviceError>;

    /// Gives a stream back; its work goes on.
    fn destroy_stream(&self, stream: Stream) -> Result<(), DeviceError>;

    /// A new event, which counts as reached until it is recorded.
    fn create_event(&self) -> Result<Event, DeviceError>;

    /// Gives an event back.
    fn destroy_event(&self, event: Event) -> Result<(), DeviceError>;

    /// Puts the event behind all work that is in the stream now.
    fn record(&self, event: Event, stream: Stream) -> Result<(), DeviceError>;

    /// Whether the work before the event is done. Never waits.
    fn is_done(&self, event: Event) -> Result<bool, DeviceError>;

    /// Holds up later work of the stream until the event is reached. Never waits itself.
    fn stream_wait(&self, stream: Stream, event: Event) -> Result<(), DeviceError>;

    /// Time on the device from one event to another, both reached.
    fn elapsed(&self, from: Event, to: Event) -> Result<Duration, DeviceError>;

    /// Queues a copy of `rows` rows of `width` bytes, `from_pitch` bytes apart in host
    /// memory and `to_pitch` bytes apart at `to`.
    ///
    /// # Safety
    ///
    /// The bytes at `from` can be read, and nobody changes them, until the stream has
    /// done the copy; so has the range at `to` a live buffer.
    unsafe fn copy_in(&self, stream: Stream, copy: Copy2d) -> Result<(), DeviceError>;

    /// Page-locked memory of the process, for [`AsyncDevice::copy_in`] to copy from without
    /// holding up its caller.
    fn allocate_pinned(&self, len: usize) -> Result<*mut u8, DeviceError>;

    /// Frees page-locked memory.
    ///
    /// # Safety
    ///
    /// It is from [`AsyncDevice::allocate_pinned`], and nobody uses it any more.
    unsafe fn free_pinned(&self, memory: *mut u8) -> Result<(), DeviceError>;

    /// Page-locks memory that the process has already and only reads.
    ///
    /// # Safety
    ///
    /// The pages stay mapped until [`AsyncDevice::unlock_pages`].
    unsafe fn lock_pages(&self, start: *const u8, len: usize) -> Result<(), DeviceError>;

    /// Undoes [`AsyncDevice::lock_pages`].
    ///
    /// # Safety
    ///
    /// No copy from these pages is under way.
    unsafe fn unlock_pages(&self, start: *const u8) -> Result<(), DeviceError>;
}

/// A copy from host memory to a device, in rows.
#[derive(Debug, Clone, Copy)]
pub struct Copy2d {
    /// Address on the device.
    pub to: u64,
    /// Bytes from row to row there.
    pub to_pitch: usize,
    /// Address in the process.
    pub from: *const u8,
    /// Bytes from row to row there.
    pub from_pitch: usize,
    /// Bytes of a row.
    pub width: usize,
    /// How many rows.
    pub rows: usize,
}
