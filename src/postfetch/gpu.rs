//! What a scheduler owns on its device. Each thing is given back when it is dropped.

use std::sync::Arc;

use super::Options;
use super::pages::PageLocks;
use crate::device::{AsyncDevice, Buffer, DeviceError, Event, Stream};

/// Bytes of a page-locked buffer: large enough for a copy to run at full speed, small
/// enough to start early.
pub(super) const CHUNK: usize = 1 << 20;
/// How many buffers there are: while one is filled, the others are copied.
pub(super) const CHUNKS: usize = 8;

/// A device and what the scheduler has there.
#[derive(Debug)]
pub(super) struct Gpu {
    pub device: Arc<dyn AsyncDevice>,
    pub scratchpad: Box<dyn Buffer>,
    /// Copies run here.
    pub fetch: OwnedStream,
    /// The host's kernels can run here; `None` when they share the stream of the copies.
    pub compute: Option<OwnedStream>,
    /// For each transfer.
    pub marks: Vec<Marks>,
    /// Tells other streams what the compute stream has done.
    pub hand_back: OwnedEvent,
    /// Tells, at the end, that the fetch stream is quiet.
    pub quiet: OwnedEvent,
    /// The model's memory that can be copied from where it is.
    pub pages: Option<Arc<PageLocks>>,
    /// Buffers for everything else.
    pub ring: Ring,
}

/// The events of a transfer.
#[derive(Debug)]
pub(super) struct Marks {
    /// The copy begins.
    pub start: OwnedEvent,
    /// The bytes are there.
    pub ready: OwnedEvent,
    /// The host's stream has used them.
    pub consumed: OwnedEvent,
}

impl Gpu {
    pub fn new(
        device: Arc<dyn AsyncDevice>,
        bytes: u64,
        transfers: usize,
        pages: Option<Arc<PageLocks>>,
        options: &Options,
    ) -> Result<Gpu, DeviceError> {
        let event = || OwnedEvent::new(&device);
        let stream = || OwnedStream::new(&device);
        let marks = |_| {
            Ok(Marks {
                start: event()?,
                ready: event()?,
                consumed: event()?,
            })
        };
        Ok(Gpu {
            scratchpad: device.clone().allocate(bytes)?,
            fetch: stream()?,
            compute: match options.config.dedicated_streams {
                true => Some(stream()?),
                false => None,
            },
            marks: (0..transfers)
                .map(marks)
                .collect::<Result<_, DeviceError>>()?,
            hand_back: event()?,
            quiet: event()?,
            ring: Ring::new(&device)?,
            pages,
            device,
        })
    }

    pub fn compute(&self) -> Stream {
        self.compute.as_ref().unwrap_or(&self.fetch).stream
    }
}

#[derive(Debug)]
pub(super) struct OwnedStream {
    device: Arc<dyn AsyncDevice>,
    pub stream: Stream,
}

impl OwnedStream {
    fn new(device: &Arc<dyn AsyncDevice>) -> Result<OwnedStream, DeviceError> {
        Ok(OwnedStream {
            stream: device.create_stream()?,
            device: device.clone(),
        })
    }
}

impl Drop for OwnedStream {
    fn drop(&mut self) {
        // Whether it fails or not, there is nothing left to do.
        let _ = self.device.destroy_stream(self.stream);
    }
}

#[derive(Debug)]
pub(super) struct OwnedEvent {
    device: Arc<dyn AsyncDevice>,
    pub event: Event,
}

impl OwnedEvent {
    fn new(device: &Arc<dyn AsyncDevice>) -> Result<OwnedEvent, DeviceError> {
        Ok(OwnedEvent {
            event: device.create_event()?,
            device: device.clone(),
        })
    }
}

impl Drop for OwnedEvent {
    fn drop(&mut self) {
        let _ = self.device.destroy_event(self.event);
    }
}

/// Page-locked buffers that are filled and copied in turn. Only the fetching thread uses
/// them.
#[derive(Debug)]
pub(super) struct Ring {
    device: Arc<dyn AsyncDevice>,
    memory: *mut u8,
    copied: Vec<OwnedEvent>,
}

// SAFETY: the memory belongs to the ring, and is used by one thread at a time, as `chunk`
// demands.
unsafe impl Send for Ring {}
// SAFETY: as above.
unsafe impl Sync for Ring {}

impl Ring {
    fn new(device: &Arc<dyn AsyncDevice>) -> Result<Ring, DeviceError> {
        let copied = (0..CHUNKS).map(|_| OwnedEvent::new(device));
        let copied = copied.collect::<Result<_, DeviceError>>()?;
        Ok(Ring {
            copied,
            memory: device.allocate_pinned(CHUNK * CHUNKS)?,
            device: device.clone(),
        })
    }

    /// The event behind the last copy from a buffer.
    pub fn copied(&self, chunk: usize) -> Event {
        self.copied[chunk].event
    }

    /// A buffer to fill.
    ///
    /// # Safety
    ///
    /// Nobody else uses it, and the last copy from it is done.
    #[allow(clippy::mut_from_ref, reason = "the caller vouches for being alone")]
    pub unsafe fn chunk(&self, chunk: usize) -> &mut [u8] {
        assert!(chunk < CHUNKS);
        // SAFETY: inside the allocation, whose bytes the driver has zeroed or somebody
        // has filled; alone, as the caller vouches.
        unsafe { std::slice::from_raw_parts_mut(self.memory.add(chunk * CHUNK), CHUNK) }
    }
}

impl Drop for Ring {
    fn drop(&mut self) {
        // SAFETY: allocated by the same device, and a ring is dropped when its stream is quiet.
        let _ = unsafe { self.device.free_pinned(self.memory) };
    }
}
