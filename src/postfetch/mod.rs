//! Post-fetch: the down-projections of routed experts go to a GPU while gate and up compute.
//!
//! Routing names the experts of a layer before any of them is computed, and the
//! down-projection of each is needed last. [`PostFetch::schedule`] starts to copy those
//! down-projections and returns at once. [`PostFetch::acquire`] then chooses device or CPU for
//! each expert. With [`cache_bytes`](sidecar_core::config::PostFetch::cache_bytes), recently used experts
//! stay on the device after their release, and are not copied again. Nothing is predicted. A
//! failure is never an error: the expert is computed on the CPU, with a counter and a [`Reason`].
//!
//! Modules, top to bottom. A module imports only modules below it.
//!
//! | module | contents |
//! |---|---|
//! | `fetcher`, `acquire` | the thread that issues copies; the choice for one expert |
//! | `times` | times of copies, and the log |
//! | `shared` | the state of a scheduler |
//! | `device_state` | streams, events and memory on the device |
//! | `transfer_table` | transfers and their experts |
//! | `pages`, `plan` | page locks on the model; layers and weights |
//! | `cache`, `stats` | slots in which experts stay on the device; counters |
//! | `transfer`, `scratchpad`, `policy` | identity of a transfer; an allocator for device memory; reasons |
//!
//! A call of schedule only changes the transfer table, because the calling thread has experts
//! to compute. One lock guards the table, for some hundred nanoseconds at a time and never
//! during a call of the driver, which is behind [`AsyncDevice`].

mod acquire;
mod cache;
mod device_state;
mod fetcher;
mod pages;
mod plan;
mod policy;
mod scratchpad;
mod shared;
mod stats;
mod times;
mod transfer;
mod transfer_table;

use std::ops::Range;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Instant;

use crate::device::{AsyncDevice, DeviceError, Stream};
use crate::model::Model;
use sidecar_core::signals::without_signals;
use sidecar_core::trace::{Snapshot, hottest};

pub use acquire::{Acquired, ExpertBytes};
pub use policy::{REASONS, Reason, State};
pub use shared::Options;
pub use stats::{SCHEMA, Stats};

use acquire::{Access, acquire};
use plan::PlannedLayer;
use shared::{Backoff, Shared};

/// Fetches the experts of a model for one evaluation at a time. Evaluations that run at the same
/// time need one scheduler each. All methods can be called from several threads.
///
/// A device is optional. Without one, every expert is computed on the CPU, with the reason:
///
/// ```
/// use std::sync::Arc;
///
/// use llama_sidecar::device::DeviceError;
/// use llama_sidecar::model::{Model, Options as ModelOptions};
/// use llama_sidecar::postfetch::{Options, PostFetch, Reason};
/// # use testkit::writer::{Gguf, Q4_0};
/// # let folder = tempfile::tempdir()?;
/// # let path = folder.path().join("model.gguf");
/// # Gguf::default().tensor("blk.0.ffn_down_exps.weight", &[64, 32, 8], Q4_0, 1).write(&path)?;
///
/// let model = Arc::new(Model::open(&path, ModelOptions::host())?);
/// let postfetch = PostFetch::new(model, Options::from_environment(), || {
///     Err(DeviceError::Failed {
///         device: "cuda0".into(),
///         action: "open",
///         reason: "this example has no device".into(),
///     })
/// });
///
/// // Routing chose experts 3 and 5 of layer 0.
/// postfetch.schedule(0, &[3, 5]);
/// for expert in [3, 5] {
///     let acquired = postfetch.acquire(0, expert);
///     assert_eq!(acquired.reason, Reason::NoDevice);
///     assert_eq!(acquired.device_address, 0);
///     // Compute on the CPU, with the bytes in the model's mapping.
///     let weights = acquired.expert.expect("the model has the expert");
///     assert!(weights.host.is_some());
/// }
/// postfetch.release_layer(0);
///
/// assert_eq!(postfetch.stats().fallbacks[Reason::NoDevice as usize], 2);
/// assert!(postfetch.mode().contains("this example has no device"));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct PostFetch {
    shared: Arc<Shared>,
    fetcher: Option<JoinHandle<()>>,
    /// The process in which thread and device can be used.
    process: u32,
}

impl PostFetch {
    /// Makes a scheduler for a model. `open` opens the device; it is not called when the options
    /// exclude the device. A failure is no error: the scheduler then always chooses the CPU.
    pub fn new(
        model: Arc<Model>,
        options: Options,
        open: impl FnOnce() -> Result<Arc<dyn AsyncDevice>, DeviceError>,
    ) -> PostFetch {
        let shared = Arc::new(Shared::new(model, options, open));
        let fetcher = shared.gpu.as_ref().and_then(|_| {
            let shared = shared.clone();
            let thread = std::thread::Builder::new().name("llama-postfetch".into());
            without_signals(|| thread.spawn(move || fetcher::run(&shared))).ok()
        });
        if shared.gpu.is_some() && fetcher.is_none() {
            shared.disable("cannot start a thread");
        }
        PostFetch {
            shared,
            fetcher,
            process: std::process::id(),
        }
    }

    /// Starts to copy the down-projections of these experts of a layer, in this order, and
    /// returns at once. Ids can repeat. Experts that are scheduled already are left as they are,
    /// and experts in the cache are on the device at once.
    pub fn schedule(&self, layer: u32, ids: &[i32]) {
        let shared = &*self.shared;
        shared.stats.lock().calls += 1;
        let (false, Some(planned)) = (shared.is_off(), shared.plan.layer(layer)) else {
            return;
        };
        let (experts, bytes) = {
            let (mut table, mut stats) = (shared.table.lock(), shared.stats.lock());
            let before = stats.experts;
            let bytes = table.schedule(&shared.model, planned, ids, &mut stats);
            // Before a copy begins.
            let began = &mut shared.times.lock()[planned.position].began;
            began.get_or_insert_with(Instant::now);
            (stats.experts - before, bytes)
        };
        shared.work.notify();
        if shared.options.config.debug {
            shared.log_schedule(planned, ids, experts, bytes);
        }
    }

    /// Copies the most used experts of each layer of a trace to the cache, and waits for the copies.
    /// Call it before the first evaluation. Returns the number of experts that are in the cache.
    pub fn fill_cache(&self, trace: &Snapshot) -> u64 {
        let mut filled = 0;
        for counts in &trace.layers {
            let Some(planned) = self.shared.plan.layer(counts.layer) else {
                continue;
            };
            let slots = self.shared.table.lock().cache_slots(planned);
            let hottest = hottest(counts).filter(|expert| *expert < planned.experts);
            let hottest: Vec<u32> = hottest.take(slots).collect();
            // The last one is replaced last.
            for expert in hottest.into_iter().rev() {
                self.schedule(counts.layer, &[expert as i32]);
                filled += u64::from(self.wait_for(counts.layer, expert));
                self.release(counts.layer, expert);
            }
        }
        filled
    }

    /// Waits for the copy of an expert. Returns whether the expert is on the device.
    fn wait_for(&self, layer: u32, expert: u32) -> bool {
        let backoff = Backoff::new();
        loop {
            match self.query(layer, expert).state {
                State::GpuReady => return true,
                State::CopyInFlight if backoff.elapsed() < self.shared.options.config.timeout => {
                    backoff.pause();
                }
                State::CopyInFlight | State::CpuOnly => return false,
            }
        }
    }

    /// Returns where an expert is now. Never waits, counts nothing.
    pub fn query(&self, layer: u32, expert: u32) -> Acquired {
        acquire(&self.shared, layer, expert, Access::Query)
    }

    /// Chooses device or CPU for an expert. Waits for a copy that is under way, unless
    /// `LLAMA_POSTFETCH_BLOCK_ON_MISS=0`. The address on the device is valid until the expert is
    /// released.
    pub fn acquire(&self, layer: u32, expert: u32) -> Acquired {
        acquire(&self.shared, layer, expert, Access::Host)
    }

    /// Does [`PostFetch::acquire`] for work in a stream of the device: the stream waits for the
    /// bytes, the caller does not. After the release, the memory is used again only when the work
    /// that was in the stream at the release is done. One stream can acquire an expert.
    ///
    /// # Safety
    ///
    /// The stream belongs to the same device, and exists until the expert is released.
    pub unsafe fn acquire_on(&self, layer: u32, expert: u32, stream: Stream) -> Acquired {
        acquire(&self.shared, layer, expert, Access::Stream(stream))
    }

    /// Releases an expert. To use the expert again, schedule it again.
    pub fn release(&self, layer: u32, expert: u32) {
        self.release_some(layer, |planned| {
            planned.slot(expert).map(|slot| slot..slot + 1)
        });
    }

    /// Releases all experts of a layer.
    pub fn release_layer(&self, layer: u32) {
        self.release_some(layer, |planned| {
            let first = planned.first_slot;
            Some(first..first + planned.experts as usize)
        });
    }

    fn release_some(&self, layer: u32, slots: impl FnOnce(&PlannedLayer) -> Option<Range<usize>>) {
        let shared = &*self.shared;
        if let (Some(planned), Some(gpu)) = (shared.plan.layer(layer), &shared.gpu)
            && let Some(slots) = slots(planned)
        {
            shared.release(gpu, slots);
            shared.log_ended(gpu);
            if shared.options.config.debug {
                // The fetching thread watches the copies that are still under way.
                shared.work.notify();
            }
        }
    }

    /// Returns a stream for the caller's kernels, which waits for no other stream; `None` without
    /// a device. With `LLAMA_POSTFETCH_USE_DEDICATED_STREAMS=0` it is also the stream of the
    /// copies.
    pub fn compute_stream(&self) -> Option<Stream> {
        Some(self.shared.gpu.as_ref()?.compute)
    }

    /// Makes a stream of the caller wait for all work that is now in
    /// [`PostFetch::compute_stream`].
    ///
    /// # Safety
    ///
    /// The stream exists and belongs to the same device.
    pub unsafe fn hand_back(&self, stream: Stream) -> Result<(), DeviceError> {
        let Some(gpu) = &self.shared.gpu else {
            return Ok(());
        };
        let _alone = self.shared.joining.lock();
        let done = gpu.join_event;
        gpu.device.record(done, gpu.compute)?;
        gpu.device.stream_wait(stream, done)
    }

    /// Copies an expert back from the device; `None` unless the expert is there and was acquired, and
    /// stays there meanwhile.
    pub fn download(&self, layer: u32, expert: u32) -> Option<Result<Vec<u8>, DeviceError>> {
        let gpu = self.shared.gpu.as_ref()?;
        let slot = self.shared.plan.layer(layer)?.slot(expert)?;
        let before = self.shared.table.lock().lookup(slot).1.ok()?.id;
        let found = self.query(layer, expert);
        let weights = found.expert?;
        if found.device_address == 0 {
            return None;
        }
        let offset = found.device_address - gpu.memory.address();
        let mut bytes = vec![0; weights.nbytes as usize];
        // While the table is locked, its memory goes to no other expert.
        let table = self.shared.table.lock();
        if table.lookup(slot).1.ok()?.id != before {
            return None;
        }
        Some(gpu.memory.read(offset, &mut bytes).map(|()| bytes))
    }

    /// Returns the layer whose down-projections a tensor of the model holds. Only base weights
    /// have a layer: a tensor of a LoRA adapter is in no model, and is not fetched.
    pub fn layer_of(&self, tensor: usize) -> Option<u32> {
        let experts = self.shared.model.experts();
        let mut all = experts.tensors().iter();
        plan::layer_of(experts, all.find(|found| found.tensor == tensor)?)
    }

    /// Does [`PostFetch::layer_of`] for the tensor whose bytes were at an address in the process when the scheduler was
    /// made. Takes no lock.
    pub fn layer_at(&self, address: usize) -> Option<u32> {
        self.shared.plan.layer_at(address)
    }

    /// Returns the model that the experts are fetched from.
    pub fn model(&self) -> &Arc<Model> {
        &self.shared.model
    }

    /// Returns device and setup, or the reason why no device is used, as a sentence.
    pub fn mode(&self) -> String {
        self.shared.mode()
    }

    /// Returns the statistics so far.
    pub fn stats(&self) -> Stats {
        let shared = &*self.shared;
        if let Some(gpu) = &shared.gpu {
            shared.collect_times(gpu);
        }
        let mut stats = *shared.stats.lock();
        shared.table.lock().note_sizes(&mut stats);
        let pages = shared.gpu.as_ref().and_then(|gpu| gpu.pages.as_ref());
        stats.locked_bytes = pages.map_or(0, |pages| pages.bytes());
        stats
    }
}

impl Drop for PostFetch {
    fn drop(&mut self) {
        if std::process::id() != self.process {
            // A forked child has no such thread, and can use neither the locks nor the device.
            std::mem::forget((self.shared.clone(), self.fetcher.take()));
            return;
        }
        self.shared.table.lock().stop();
        self.shared.work.notify();
        if let Some(fetcher) = self.fetcher.take() {
            // The thread has handled its own panic.
            let _ = fetcher.join();
        }
        let Some(gpu) = &self.shared.gpu else {
            return;
        };
        if !self.shared.wait_until_idle(gpu) {
            log::warn!(
                "post-fetch: {} may still use its memory, which is therefore not freed",
                gpu.device.name()
            );
            std::mem::forget(self.shared.clone());
        }
    }
}
