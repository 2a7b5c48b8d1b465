//! Devices: memory for tensor data, behind one trait.
//!
//! A [`Device`] allocates [`Buffer`]s. A buffer is filled by its only owner and is read-only once
//! it is shared, so a partly filled tensor is never visible.
//!
//! Modules, top to bottom:
//!
//! | module | contents |
//! |---|---|
//! | `cuda`, `host`, `borrowed` | NVIDIA GPUs; host memory as a device; memory of the program |

mod borrowed;
#[cfg(feature = "cuda")]
pub mod cuda;
mod host;

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

pub use borrowed::BorrowedBuffer;
pub use host::HostDevice;
pub use sidecar_core::error::DeviceError;

/// Alignment in bytes of a buffer and of every tensor in it: ggml requires 32, CUDA allocates with
/// 256.
pub const ALIGNMENT: u64 = 256;

/// Kind of memory of a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DeviceKind {
    /// Memory of the process.
    Host,
    /// Memory of an NVIDIA GPU.
    Cuda,
}

/// Memory of a device and its use, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Memory {
    /// Total memory.
    pub total: u64,
    /// Free memory.
    pub free: u64,
    /// Bytes in live buffers.
    pub used: u64,
    /// Maximum of `used` so far.
    pub peak: u64,
    /// Number of buffers allocated so far.
    pub allocations: u64,
}

/// Returns the error of a library that was built without the feature `cuda`.
#[cfg(not(feature = "cuda"))]
pub fn without_cuda() -> DeviceError {
    DeviceError::Failed {
        device: "cuda".into(),
        action: "be used",
        reason: "the library was built without CUDA".into(),
    }
}

/// Memory for tensor data. Can be used from any thread.
pub trait Device: Send + Sync + fmt::Debug {
    /// Returns the display name, unique within a process.
    fn name(&self) -> &str;

    /// Returns the kind of memory.
    fn kind(&self) -> DeviceKind;

    /// Returns the memory and its use.
    fn memory(&self) -> Memory;

    /// Allocates a buffer of `len` bytes, aligned to [`ALIGNMENT`], with unspecified content.
    /// Dropping the buffer frees it.
    fn allocate(self: Arc<Self>, len: u64) -> Result<Box<dyn Buffer>, DeviceError>;
}

/// Memory on a device.
pub trait Buffer: Send + Sync + fmt::Debug {
    /// Returns the size in bytes.
    fn len(&self) -> u64;

    /// Returns whether the size is 0.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns the address of the first byte in the address space of the device.
    fn address(&self) -> u64;

    /// Returns the bytes of a buffer in host memory, or `None`.
    fn host(&self) -> Option<&[u8]>;

    /// Returns the writable bytes of a buffer in host memory, or `None`.
    fn host_mut(&mut self) -> Option<&mut [u8]>;

    /// Copies `bytes` to `offset`. Panics when the range is outside the buffer.
    fn write(&mut self, offset: u64, bytes: &[u8]) -> Result<(), DeviceError>;

    /// Copies from `offset` to `bytes`. Panics when the range is outside the buffer.
    fn read(&self, offset: u64, bytes: &mut [u8]) -> Result<(), DeviceError>;
}

/// Handle of a stream: an ordered queue of work on a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Stream(pub u64);

/// Handle of an event: a position in a stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Event(pub u64);

/// A device with asynchronous copies: the interface between the post-fetch scheduler and a driver.
///
/// Streams and events are plain handles, as in the driver APIs. The creator destroys them, after
/// their last use. All methods can be called from any thread and keep its current device.
pub trait AsyncDevice: Device {
    /// Creates a stream that does not synchronise with other streams.
    fn create_stream(&self) -> Result<Stream, DeviceError>;

    /// Destroys a stream. Its submitted work continues.
    fn destroy_stream(&self, stream: Stream) -> Result<(), DeviceError>;

    /// Creates an event. Until it is recorded, it counts as complete.
    fn create_event(&self) -> Result<Event, DeviceError>;

    /// Destroys an event.
    fn destroy_event(&self, event: Event) -> Result<(), DeviceError>;

    /// Records the event after all work submitted to the stream so far.
    fn record(&self, event: Event, stream: Stream) -> Result<(), DeviceError>;

    /// Returns whether the work before the event is complete. Never waits.
    fn is_done(&self, event: Event) -> Result<bool, DeviceError>;

    /// Makes later work of the stream wait for the event. The call itself never waits.
    fn stream_wait(&self, stream: Stream, event: Event) -> Result<(), DeviceError>;

    /// Returns the time on the device between two complete events.
    fn elapsed(&self, from: Event, to: Event) -> Result<Duration, DeviceError>;

    /// Submits a copy of `rows` rows of `width` bytes, `from_pitch` bytes apart in host memory and
    /// `to_pitch` bytes apart on the device.
    ///
    /// # Safety
    ///
    /// Until the copy is complete, the bytes at `from` are readable and do not change, and the
    /// range at `to` is in a live buffer.
    unsafe fn copy_in(&self, stream: Stream, copy: Copy2d) -> Result<(), DeviceError>;

    /// Allocates page-locked host memory. [`AsyncDevice::copy_in`] copies from it without blocking
    /// the caller.
    fn allocate_pinned(&self, len: usize) -> Result<*mut u8, DeviceError>;

    /// Frees page-locked memory.
    ///
    /// # Safety
    ///
    /// The memory is from [`AsyncDevice::allocate_pinned`] and is not used any more.
    unsafe fn free_pinned(&self, memory: *mut u8) -> Result<(), DeviceError>;

    /// Page-locks existing memory that the process only reads.
    ///
    /// # Safety
    ///
    /// The pages stay mapped until [`AsyncDevice::unlock_pages`].
    unsafe fn lock_pages(&self, start: *const u8, len: usize) -> Result<(), DeviceError>;

    /// Undoes [`AsyncDevice::lock_pages`].
    ///
    /// # Safety
    ///
    /// No copy from these pages is in flight.
    unsafe fn unlock_pages(&self, start: *const u8) -> Result<(), DeviceError>;
}

/// A copy from host memory to a device, in rows.
#[derive(Debug, Clone, Copy)]
pub struct Copy2d {
    /// Address on the device.
    pub to: u64,
    /// Bytes between the starts of two rows there.
    pub to_pitch: usize,
    /// Address in the process.
    pub from: *const u8,
    /// Bytes between the starts of two rows there.
    pub from_pitch: usize,
    /// Bytes of a row.
    pub width: usize,
    /// Number of rows.
    pub rows: usize,
}
