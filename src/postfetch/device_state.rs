//! The resources of a scheduler on its device, which are freed on drop.

use std::sync::Arc;

use super::cache::Cache;
use super::pages::PageLocks;
use super::plan::{Plan, padded};
use crate::device::{ALIGNMENT, AsyncDevice, Buffer, DeviceError, Event, Stream};
use crate::model::Model;
use sidecar_core::config;

/// Most transfers at a time, for experts of any size.
const MAX_TRANSFERS: u64 = 1024;
/// Scratchpads of transfers that can be under way, one after the other: a caller whose streams
/// wait is ahead of them.
const SCRATCHPADS_IN_FLIGHT: u64 = 4;
/// Bytes of a page-locked buffer: large enough for a copy at full speed, small enough to begin
/// early.
pub(super) const CHUNK: usize = 1 << 20;
/// Number of page-locked buffers: while one is filled, the others are copied.
pub(super) const CHUNKS: usize = 8;

/// A device, with the memory, streams and events of a scheduler.
#[derive(Debug)]
pub(super) struct DeviceState {
    pub device: Arc<dyn AsyncDevice>,
    /// The scratchpad, and after it the slots of the cache.
    pub memory: Box<dyn Buffer>,
    /// The stream of the copies.
    pub fetch: Stream,
    /// The stream for the caller's kernels; that of the copies when they share one.
    pub compute: Stream,
    /// The events of each transfer.
    pub events: Vec<TransferEvents>,
    /// The work in the compute stream that another stream waits for.
    pub join_event: Event,
    /// The end of all work in the fetch stream.
    pub idle: Event,
    /// The model's memory that can be copied in place.
    pub pages: Option<Arc<PageLocks>>,
    /// The event that follows the last copy from each page-locked buffer.
    pub copied: Vec<Event>,
    owned: Owned,
}

/// The events of a transfer.
#[derive(Debug)]
pub(super) struct TransferEvents {
    /// The copy begins.
    pub start: Event,
    /// The copy is done.
    pub ready: Event,
    /// The caller's stream needs the bytes.
    pub needed: Event,
    /// The caller's stream has used the bytes.
    pub consumed: Event,
}

impl DeviceState {
    /// Opens the device and allocates on it: the scratchpad and after it the slots of the cache, or
    /// no slots if the device refuses them. Returns the state, the cache and a description, or the
    /// reason why the device is not used.
    pub fn open(
        model: &Arc<Model>,
        plan: &Plan,
        config: &config::PostFetch,
        open: impl FnOnce() -> Result<Arc<dyn AsyncDevice>, DeviceError>,
    ) -> Result<(DeviceState, Cache, String), String> {
        let (largest, smallest) = plan.sizes(model);
        if largest == 0 {
            return Err(
                "the model has no routed experts (tensors such as blk.0.ffn_down_exps.weight)"
                    .into(),
            );
        }
        let device = open().map_err(|error| error.to_string())?;
        let most = config.most_scratch(device.memory().total);
        let (bytes, size) = match config.scratchpad_bytes {
            0 if largest <= most => (largest, "the active experts of the largest layer"),
            0 if padded(smallest) <= most => (
                most - most % ALIGNMENT,
                "10 % of the device; set LLAMA_POSTFETCH_SCRATCHPAD_MB for all active experts",
            ),
            0 => {
                return Err(format!(
                    "an expert of {smallest} bytes is larger than 10 % of the memory of {}: set LLAMA_POSTFETCH_SCRATCHPAD_MB",
                    device.name()
                ));
            }
            bytes => (padded(bytes), "LLAMA_POSTFETCH_SCRATCHPAD_MB"),
        };
        let sizes = plan.slot_sizes(model);
        let half_life = config.cache_half_life;
        let (mut cache, mut cached) = Cache::new(&sizes, config.cache_bytes, bytes, half_life);
        let allocate = |cache: &Cache| {
            let all = bytes.saturating_add(cache.bytes());
            device.clone().allocate(all)
        };
        let memory = match allocate(&cache) {
            Err(error) if !cache.slots.is_empty() => {
                cached = format!("no cache: {error}; ");
                cache = Cache::default();
                allocate(&cache)
            }
            allocated => allocated,
        };
        let memory = memory.map_err(|error| error.to_string())?;
        let at_a_time = bytes / padded(smallest).max(1) + cache.most_slots() as u64;
        let transfers = (at_a_time * SCRATCHPADS_IN_FLIGHT).clamp(1, MAX_TRANSFERS) as usize;
        let locked = match config.page_lock {
            true => PageLocks::get(&device, model),
            false => Err("LLAMA_POSTFETCH_PAGE_LOCK=0".into()),
        };
        let (pages, source) = match locked {
            Ok(pages) => {
                let source = format!("from {} bytes page-locked in place", pages.bytes());
                (Some(pages), source)
            }
            Err(why) => (None, format!("through page-locked buffers ({why})")),
        };
        let name = device.name().to_owned();
        let state = DeviceState::new(device, memory, transfers, pages, config.dedicated_streams);
        let state = state.map_err(|error| error.to_string())?;
        let mode = format!(
            "post-fetch to {name}: {} layers with experts, {} active; scratchpad of {bytes} bytes ({size}); {cached}{source}",
            plan.layers.len(),
            plan.active,
        );
        Ok((state, cache, mode))
    }

    fn new(
        device: Arc<dyn AsyncDevice>,
        memory: Box<dyn Buffer>,
        transfers: usize,
        pages: Option<Arc<PageLocks>>,
        dedicated_streams: bool,
    ) -> Result<DeviceState, DeviceError> {
        let mut owned = Owned {
            streams: Vec::new(),
            events: Vec::new(),
            buffers: device.allocate_pinned(CHUNK * CHUNKS)?,
            device: device.clone(),
        };
        let fetch = owned.stream()?;
        let mut event = || owned.event();
        let events = |_| {
            Ok(TransferEvents {
                start: event()?,
                ready: event()?,
                needed: event()?,
                consumed: event()?,
            })
        };
        let events: Vec<_> = (0..transfers)
            .map(events)
            .collect::<Result<_, DeviceError>>()?;
        Ok(DeviceState {
            memory,
            compute: match dedicated_streams {
                true => owned.stream()?,
                false => fetch,
            },
            fetch,
            events,
            join_event: owned.event()?,
            idle: owned.event()?,
            copied: (0..CHUNKS)
                .map(|_| owned.event())
                .collect::<Result<_, _>>()?,
            pages,
            device,
            owned,
        })
    }

    /// Returns a page-locked buffer to fill.
    ///
    /// # Safety
    ///
    /// No other thread uses the buffer, and the last copy from the buffer is done.
    #[allow(clippy::mut_from_ref, reason = "the contract is exclusive use")]
    pub unsafe fn buffer(&self, chunk: usize) -> &mut [u8] {
        assert!(chunk < CHUNKS);
        let start = self.owned.buffers.wrapping_add(chunk * CHUNK);
        // SAFETY: inside the allocation, whose bytes are initialised; exclusive by contract.
        unsafe { std::slice::from_raw_parts_mut(start, CHUNK) }
    }
}

/// Streams, events and page-locked buffers, which are freed on drop. Only the fetching thread uses
/// the buffers: it fills and copies them in turn.
#[derive(Debug)]
struct Owned {
    device: Arc<dyn AsyncDevice>,
    streams: Vec<Stream>,
    events: Vec<Event>,
    buffers: *mut u8,
}

// SAFETY: the memory belongs to the struct, and the contract of `buffer` is one thread at a time.
unsafe impl Send for Owned {}
// SAFETY: as above.
unsafe impl Sync for Owned {}

impl Owned {
    fn stream(&mut self) -> Result<Stream, DeviceError> {
        let stream = self.device.create_stream()?;
        self.streams.push(stream);
        Ok(stream)
    }

    fn event(&mut self) -> Result<Event, DeviceError> {
        let event = self.device.create_event()?;
        self.events.push(event);
        Ok(event)
    }
}

impl Drop for Owned {
    fn drop(&mut self) {
        // An error leaves nothing to undo.
        for stream in &self.streams {
            let _ = self.device.destroy_stream(*stream);
        }
        for event in &self.events {
            let _ = self.device.destroy_event(*event);
        }
        // SAFETY: allocated by the same device, and dropped when its stream is idle.
        let _ = unsafe { self.device.free_pinned(self.buffers) };
    }
}
