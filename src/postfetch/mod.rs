//! Post-fetch: routed experts' down-projections go to a GPU while gate and up compute.
//!
//! Routing says which experts a layer uses before any of them is computed. Of each, the
//! down-projection is needed last. [`PostFetch::schedule`] starts to copy just those, and
//! returns at once; when they are needed, [`PostFetch::acquire`] tells for each whether to
//! use the device or the CPU. Nothing is cached, nothing is guessed, and whatever fails is
//! an answer "compute on the CPU", a counter and a reason, never an error.
//!
//! | room | what it is for |
//! |---|---|
//! | [`plan`] | what there is to fetch |
//! | [`policy`] | device or CPU |
//! | [`answer`] | what to do about an expert, and waiting for it |
//! | [`board`] | which expert is in which transfer, and how far each is |
//! | [`scratchpad`] | which device memory is taken |
//! | [`gpu`], [`pages`] | what is held on the device; page-locking the model in place |
//! | [`fetcher`] | the thread that issues copies |
//! | [`stats`], [`times`] | what it did, in numbers; how long copies took |
//!
//! A call of schedule only notes what is wanted: a driver takes microseconds for each copy
//! and each event, and the thread that asks has experts to compute. One lock guards the
//! board, for some hundred nanoseconds at a time and never across a call of the driver.
//!
//! The driver is behind [`AsyncDevice`]: how bytes move is its affair.

mod answer;
mod board;
mod fetcher;
mod gpu;
mod pages;
mod plan;
mod policy;
mod scratchpad;
mod stats;
mod times;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex, MutexGuard};

use crate::config;
use crate::device::{AsyncDevice, DeviceError, Stream};
use crate::model::Model;

pub use answer::{Answer, ExpertBytes};
pub use policy::{Reason, State};
pub use stats::{SCHEMA, Stats};

use answer::Use;
use board::{Board, Phase};
use fetcher::fetch;
use gpu::Gpu;
use pages::PageLocks;
use plan::{Plan, PlannedLayer};
use stats::{Counters, add};
use times::LayerTimes;

/// Transfers that can be out at a time, for whatever sizes experts have.
const MOST_TRANSFERS: u64 = 1024;
/// A host that lets its streams wait is ahead of them: so many scratchpads of transfers
/// can be under way, one after the other.
const AHEAD: u64 = 4;

/// How to fetch.
#[derive(Debug, Clone)]
pub struct Options {
    /// What the variables say.
    pub config: config::PostFetch,
    /// Experts per token; 0 for what the model's file says.
    pub active: u32,
    /// How long a copy may take before the device is given up.
    pub patience: Duration,
}

impl Options {
    /// What the environment says.
    pub fn from_environment() -> Options {
        Options {
            config: config::Config::get().postfetch.clone(),
            active: 0,
            patience: Duration::from_secs(5),
        }
    }
}

/// Fetches the experts of a model for one evaluation at a time: two evaluations that run
/// at the same time need two. All methods can be called from several threads.
#[derive(Debug)]
pub struct PostFetch {
    shared: Arc<Shared>,
    fetcher: Option<JoinHandle<()>>,
}

/// What callers and the fetching thread share.
#[derive(Debug)]
struct Shared {
    model: Arc<Model>,
    plan: Plan,
    options: Options,
    board: Mutex<Board>,
    /// There is something to fetch, for a thread that sleeps and for one that looks out.
    work: Condvar,
    kicks: AtomicU64,
    gpu: Option<Gpu>,
    /// Why no device was used from the start.
    never: Reason,
    off: AtomicBool,
    /// What is used, or why nothing is.
    mode: Mutex<String>,
    counters: Counters,
    /// Held while events of transfers are recorded, or asked for their times.
    clock: Mutex<()>,
    /// Held from recording what the compute stream did until another waits for it.
    hand_back: Mutex<()>,
    times: Mutex<Vec<LayerTimes>>,
}

impl PostFetch {
    /// Makes a scheduler for a model. `open` opens the device; it is not called when the
    /// options want none. Whatever is missing, the result works: it then answers "CPU".
    pub fn new(
        model: Arc<Model>,
        options: Options,
        open: impl FnOnce() -> Result<Arc<dyn AsyncDevice>, DeviceError>,
    ) -> PostFetch {
        let plan = Plan::of(&model, options.active);
        let never = match &options.config {
            config if !config.enable => Reason::Disabled,
            config if config.force_cpu => Reason::Forced,
            _ => Reason::NoDevice,
        };
        let prepared = match never {
            Reason::Disabled => Err("LLAMA_POSTFETCH_ENABLE=0".into()),
            Reason::Forced => Err("LLAMA_POSTFETCH_FORCE_CPU=1".into()),
            _ => prepare(&model, &plan, &options, open),
        };
        let (gpu, mode, transfers) = match prepared {
            Ok((gpu, mode)) => {
                let transfers = gpu.marks.len();
                (Some(gpu), mode, transfers)
            }
            Err(why) => {
                let mode = format!("post-fetch is off, every expert is computed on the CPU: {why}");
                (None, mode, 0)
            }
        };
        log::info!("{mode}");
        let bytes = gpu.as_ref().map_or(0, |gpu| gpu.scratchpad.len());
        let cells = gpu.as_ref().map_or(0, |_| plan.cells);
        let shared = Arc::new(Shared {
            times: Mutex::new(vec![LayerTimes::default(); plan.layers.len()]),
            board: Mutex::new(Board::new(cells, bytes, transfers)),
            work: Condvar::new(),
            kicks: AtomicU64::new(0),
            off: AtomicBool::new(gpu.is_none()),
            never,
            gpu,
            mode: Mutex::new(mode),
            counters: Counters::default(),
            clock: Mutex::new(()),
            hand_back: Mutex::new(()),
            model,
            plan,
            options,
        });
        let fetcher = shared.gpu.as_ref().and_then(|_| {
            let shared = shared.clone();
            let name = std::thread::Builder::new().name("llama-postfetch".into());
            let fetch = move || {
                let run = std::panic::AssertUnwindSafe(|| fetch(&shared));
                if std::panic::catch_unwind(run).is_err() {
                    shared.give_up("a defect of llama-sidecar, please report it");
                }
            };
            name.spawn(fetch).ok()
        });
        if shared.gpu.is_some() && fetcher.is_none() {
            shared.give_up("no thread could be started");
        }
        PostFetch { shared, fetcher }
    }

    /// Starts to copy the down-projections of these experts of a layer, in this order, and
    /// returns at once. Ids can repeat; experts that are scheduled already stay as they are.
    pub fn schedule(&self, layer: u32, ids: &[i32]) {
        let shared = &*self.shared;
        add(&shared.counters.calls, 1);
        let (false, Some(planned)) = (shared.is_off(), shared.plan.layer(layer)) else {
            return;
        };
        let done = shared.board.lock().schedule(&shared.model, planned, ids);
        shared.kick();
        let counters = &shared.counters;
        add(&counters.experts, done.experts);
        add(&counters.coalesced, done.coalesced);
        add(&counters.duplicates, done.duplicates);
        add(&counters.rejected, done.rejected);
        if shared.options.config.debug {
            shared.log_schedule(planned, ids, done.experts, done.bytes);
        }
    }

    /// Where an expert is now. Never waits, counts nothing.
    pub fn query(&self, layer: u32, expert: u32) -> Answer {
        self.shared.answer(layer, expert, Use::Look)
    }

    /// Whether to use the device or the CPU for an expert, by the policy: a copy that is
    /// under way is waited for, unless `LLAMA_POSTFETCH_BLOCK_ON_MISS=0`. An answer for the
    /// device holds until the expert is released.
    pub fn acquire(&self, layer: u32, expert: u32) -> Answer {
        self.shared.answer(layer, expert, Use::Host)
    }

    /// [`PostFetch::acquire`] for work in a stream of the device: the stream waits for the
    /// bytes, the caller does not. When the expert is released, its memory is used again
    /// only after the work that was in the stream by then. An expert is for one stream.
    ///
    /// # Safety
    ///
    /// The stream belongs to the same device, and exists until the expert is released.
    pub unsafe fn acquire_on(&self, layer: u32, expert: u32, stream: Stream) -> Answer {
        self.shared.answer(layer, expert, Use::Stream(stream))
    }

    /// Lets go of an expert: it will not be used before it is scheduled again.
    pub fn release(&self, layer: u32, expert: u32) {
        if let Some((planned, cell)) = self.shared.cell(layer, expert) {
            self.shared.release(planned, cell..cell + 1);
        }
    }

    /// Lets go of all experts of a layer.
    pub fn release_layer(&self, layer: u32) {
        let shared = &*self.shared;
        let (Some(planned), Some(_)) = (shared.plan.layer(layer), &shared.gpu) else {
            return;
        };
        let cells = planned.first_cell..planned.first_cell + planned.experts as usize;
        shared.release(planned, cells);
    }

    /// A stream for the host's kernels, ordered after no other; `None` without a device.
    /// With `LLAMA_POSTFETCH_USE_DEDICATED_STREAMS=0` copies run in it, too.
    pub fn compute_stream(&self) -> Option<Stream> {
        Some(self.shared.gpu.as_ref()?.compute())
    }

    /// Makes a stream of the host wait for all work that is in
    /// [`PostFetch::compute_stream`] now.
    ///
    /// # Safety
    ///
    /// The stream exists and belongs to the same device.
    pub unsafe fn hand_back(&self, stream: Stream) -> Result<(), DeviceError> {
        let Some(gpu) = &self.shared.gpu else {
            return Ok(());
        };
        let _alone = self.shared.hand_back.lock();
        let done = gpu.hand_back.event;
        gpu.device.record(done, gpu.compute())?;
        gpu.device.stream_wait(stream, done)
    }

    /// Copies an expert back from the device; `None` unless it is there, and was acquired.
    pub fn download(&self, layer: u32, expert: u32) -> Option<Result<Vec<u8>, DeviceError>> {
        let answer = self.query(layer, expert);
        let (gpu, bytes) = (self.shared.gpu.as_ref()?, answer.expert?);
        if answer.device_address == 0 {
            return None;
        }
        let place = answer.device_address - gpu.scratchpad.address();
        let mut found = vec![0; bytes.nbytes as usize];
        Some(gpu.scratchpad.read(place, &mut found).map(|()| found))
    }

    /// The layer whose down-projections a tensor of the model holds: of base weights only.
    /// A tensor that a LoRA adapter or anybody else made is in no model, and is not fetched.
    pub fn layer_of(&self, tensor: usize) -> Option<u32> {
        plan::layer_of(self.shared.model.experts(), tensor)
    }

    /// The model that it fetches from.
    pub fn model(&self) -> &Arc<Model> {
        &self.shared.model
    }

    /// What it works with and why, a sentence.
    pub fn mode(&self) -> String {
        self.shared.mode.lock().clone()
    }

    /// What it did so far.
    pub fn stats(&self) -> Stats {
        let shared = &*self.shared;
        if let Some(gpu) = &shared.gpu {
            let _clock = shared.clock.lock();
            shared.take_times(gpu);
        }
        let mut stats = shared.counters.snapshot();
        stats.scratchpad_peak = shared.board.lock().pad.peak();
        if let Some(gpu) = &shared.gpu {
            stats.scratchpad_bytes = gpu.scratchpad.len();
            stats.locked_bytes = gpu.pages.as_ref().map_or(0, |pages| pages.bytes());
        }
        stats
    }
}

/// Opens the device and makes room on it; or says why not.
fn prepare(
    model: &Arc<Model>,
    plan: &Plan,
    options: &Options,
    open: impl FnOnce() -> Result<Arc<dyn AsyncDevice>, DeviceError>,
) -> Result<(Gpu, String), String> {
    let (largest, smallest) = plan.sizes(model);
    if largest == 0 {
        return Err(
            "the model has no routed experts (tensors such as blk.0.ffn_down_exps.weight)".into(),
        );
    }
    let device = open().map_err(|error| error.to_string())?;
    let bytes = match options.config.scratchpad_bytes {
        0 => largest,
        bytes => bytes,
    };
    let at_a_time = bytes / plan::padded(smallest).max(1);
    let transfers = (at_a_time * AHEAD).clamp(1, MOST_TRANSFERS) as usize;
    let (pages, source) = match options.config.page_lock {
        false => (
            None,
            "through page-locked buffers (LLAMA_POSTFETCH_PAGE_LOCK=0)".into(),
        ),
        true => match PageLocks::get(&device, model) {
            Ok(pages) => {
                let source = format!("from {} bytes page-locked in place", pages.bytes());
                (Some(pages), source)
            }
            Err(why) => (None, format!("through page-locked buffers ({why})")),
        },
    };
    let name = device.name().to_owned();
    let gpu = Gpu::new(device, bytes, transfers, pages, options);
    let gpu = gpu.map_err(|error| error.to_string())?;
    let mode = format!(
        "post-fetch to {name}: {} layers with experts, {} active; scratchpad of {bytes} bytes ({}); {source}",
        plan.layers.len(),
        plan.active,
        match options.config.scratchpad_bytes {
            0 => "what the active experts of the largest layer need",
            _ => "LLAMA_POSTFETCH_SCRATCHPAD_MB",
        },
    );
    Ok((gpu, mode))
}

impl Shared {
    /// Tells the fetching thread that the board has changed.
    fn kick(&self) {
        self.kicks.fetch_add(1, Ordering::Release);
        self.work.notify_one();
    }

    fn is_off(&self) -> bool {
        self.off.load(Ordering::Relaxed)
    }

    fn cell(&self, layer: u32, expert: u32) -> Option<(&PlannedLayer, usize)> {
        self.gpu.as_ref()?;
        let planned = self.plan.layer(layer)?;
        (expert < planned.experts).then(|| (planned, planned.first_cell + expert as usize))
    }

    fn release(&self, planned: &PlannedLayer, cells: std::ops::Range<usize>) {
        let Some(gpu) = &self.gpu else {
            return;
        };
        let mut board = self.board.lock();
        for cell in cells {
            self.release_cell(gpu, &mut board, cell);
        }
        drop(board);
        if self.options.config.debug {
            self.log_layer(gpu, planned);
        }
    }

    fn release_cell(&self, gpu: &Gpu, board: &mut MutexGuard<'_, Board>, cell: usize) {
        let Some((index, stream)) = board.release(cell) else {
            return;
        };
        let consumed = gpu.marks[index].consumed.event;
        let recorded =
            MutexGuard::unlocked(board, || self.twice(|| gpu.device.record(consumed, stream)));
        board.close(index, recorded.ok().map(|()| consumed));
        if recorded.is_err() {
            self.give_up("it cannot be known when a stream has used what was fetched");
        }
    }

    /// Tries again once: an error need not last.
    fn twice<T>(&self, call: impl Fn() -> Result<T, DeviceError>) -> Result<T, Reason> {
        call()
            .or_else(|error| {
                self.note(&error);
                call()
            })
            .map_err(|error| {
                self.note(&error);
                Reason::DeviceFailed
            })
    }

    /// Counts an error of the driver.
    fn note(&self, error: &DeviceError) {
        add(&self.counters.errors, 1);
        log::debug!("post-fetch: {error}");
    }

    /// A copy that was under way failed.
    fn failed(&self, index: usize, number: u64, error: &DeviceError) {
        self.note(error);
        let mut board = self.board.lock();
        let transfer = &board.transfers[index];
        if transfer.number == number && transfer.phase == Phase::InFlight {
            board.fail(index, Reason::DeviceFailed, true);
        }
        let failures = board.failures;
        drop(board);
        self.after_failure(failures, error);
    }

    fn after_failure(&self, failures: u32, error: &DeviceError) {
        /// So many failures in a row are no accident.
        const ENOUGH: u32 = 3;
        if failures >= ENOUGH {
            self.give_up(&error.to_string());
        }
    }

    /// Uses the device no more.
    fn give_up(&self, why: &str) {
        if self.off.swap(true, Ordering::Relaxed) {
            return;
        }
        let mode =
            format!("post-fetch has given up its device, experts are computed on the CPU: {why}");
        log::warn!("{mode}");
        *self.mode.lock() = mode;
        self.kick();
    }

    /// Whether nothing uses the device's memory any more.
    fn is_quiet(&self, gpu: &Gpu) -> bool {
        let mut board = self.board.lock();
        for cell in 0..board.cells.len() {
            self.release_cell(gpu, &mut board, cell);
        }
        let mut events = std::mem::take(&mut board.waits);
        let doubtful = board.doubtful;
        drop(board);
        for (event, stream) in [
            (gpu.quiet.event, gpu.fetch.stream),
            (gpu.hand_back.event, gpu.compute()),
        ] {
            if self.twice(|| gpu.device.record(event, stream)).is_err() {
                return false;
            }
            events.push(event);
        }
        let backoff = Backoff::new();
        let patience = match self.is_off() {
            true => Duration::from_millis(200),
            false => self.options.patience,
        };
        !doubtful
            && events.iter().all(|&event| {
                loop {
                    match self.twice(|| gpu.device.is_done(event)) {
                        Ok(true) => return true,
                        Ok(false) if backoff.elapsed() < patience => backoff.pause(),
                        Ok(false) | Err(_) => return false,
                    }
                }
            })
    }
}

impl Drop for PostFetch {
    fn drop(&mut self) {
        self.shared.board.lock().stop = true;
        self.shared.kick();
        if let Some(fetcher) = self.fetcher.take() {
            // A panic there has been reported by its own hook.
            let _ = fetcher.join();
        }
        let Some(gpu) = &self.shared.gpu else {
            return;
        };
        if !self.shared.is_quiet(gpu) {
            log::warn!(
                "post-fetch: {} may still use its memory, which is therefore never freed",
                gpu.device.name()
            );
            std::mem::forget(self.shared.clone());
        }
    }
}

/// Waiting for a device: watching at first, then sleeping.
struct Backoff {
    since: Instant,
}

impl Backoff {
    /// A sleep costs about this much more than it was asked for.
    const WATCH: Duration = Duration::from_micros(200);
    const SLEEP: Duration = Duration::from_micros(30);

    fn new() -> Backoff {
        Backoff {
            since: Instant::now(),
        }
    }

    fn elapsed(&self) -> Duration {
        self.since.elapsed()
    }

    fn pause(&self) {
        match self.elapsed() < Backoff::WATCH {
            true => std::thread::yield_now(),
            false => std::thread::sleep(Backoff::SLEEP),
        }
    }
}
