//! The state that callers and the fetching thread share.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use parking_lot::{Mutex, MutexGuard};
use sidecar_core::config;
use sidecar_core::fetch::Work;
use sidecar_core::fetch::transfer_log::Times;

use super::cache::Cache;
use super::device_state::DeviceState;
use super::plan::Plan;
use super::policy::Reason;
use super::stats::Stats;
use super::transfer::TransferId;
use super::transfer_table::{Consumed, TransferTable};
use crate::device::{AsyncDevice, DeviceError, Event};
use crate::model::Model;

/// Failures in a row after which the device is not used any more.
const MAX_FAILURES: u32 = 3;
/// Why a device is not used any more after [`config::PostFetch::timeout`].
pub(super) const LATE: &str =
    "a copy took longer than the timeout (patience_us, LLAMA_POSTFETCH_TIMEOUT_MS)";
/// Wait at the end for a device that is not used any more.
const LAST_TIMEOUT: Duration = Duration::from_millis(200);

/// Settings of a scheduler.
#[derive(Debug, Clone)]
pub struct Options {
    /// The settings that have variables.
    pub config: config::PostFetch,
    /// Experts per token; 0 for the number in the model's file.
    pub active: u32,
}

impl Options {
    /// Returns the settings of the `LLAMA_POSTFETCH_*` variables.
    pub fn from_environment() -> Options {
        Options {
            config: config::Config::get().postfetch.clone(),
            active: 0,
        }
    }
}

/// Times of a layer since its last line in the log.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct LayerTimes {
    /// When it was scheduled.
    pub began: Option<Instant>,
    pub times: Times,
}

/// A scheduler without its thread.
#[derive(Debug)]
pub(super) struct Shared {
    pub model: Arc<Model>,
    pub plan: Plan,
    pub options: Options,
    pub table: Mutex<TransferTable>,
    pub gpu: Option<DeviceState>,
    /// The reason of all answers while the device is not used.
    pub initial_fallback: Reason,
    /// Locked after the table and before the times, if both are.
    pub stats: Mutex<Stats>,
    /// Held while times of transfers are read.
    pub timing: Mutex<()>,
    /// Times of each layer, for the log.
    pub times: Mutex<Vec<LayerTimes>>,
    /// Held from the record of [`DeviceState::join_event`] until another stream waits for it.
    pub joining: Mutex<()>,
    /// Wakes the fetching thread.
    pub work: Work,
    off: AtomicBool,
    /// Device and setup, or the reason why there is none.
    mode: Mutex<String>,
}

impl Shared {
    /// Plans a model and opens the device, if the options want one.
    pub fn new(
        model: Arc<Model>,
        options: Options,
        open: impl FnOnce() -> Result<Arc<dyn AsyncDevice>, DeviceError>,
    ) -> Shared {
        let plan = Plan::of(&model, options.active);
        let config = &options.config;
        let (initial_fallback, opened) = if !config.enable {
            (Reason::Disabled, Err("LLAMA_POSTFETCH_ENABLE=0".into()))
        } else if config.force_cpu {
            (Reason::ForcedCpu, Err("LLAMA_POSTFETCH_FORCE_CPU=1".into()))
        } else {
            let opened = DeviceState::open(&model, &plan, config, open);
            (Reason::NoDevice, opened)
        };
        let (gpu, table, mode) = match opened {
            Ok((gpu, cache, mode)) => {
                let scratchpad = gpu.memory.len() - cache.bytes();
                let table = TransferTable::new(plan.slots, scratchpad, cache, gpu.events.len());
                (Some(gpu), table, mode)
            }
            Err(why) => {
                let mode = format!("post-fetch is off, every expert is computed on the CPU: {why}");
                (None, TransferTable::new(0, 0, Cache::default(), 0), mode)
            }
        };
        log::info!("{mode}");
        Shared {
            stats: Mutex::default(),
            timing: Mutex::default(),
            times: Mutex::new(vec![LayerTimes::default(); plan.layers.len()]),
            table: Mutex::new(table),
            work: Work::default(),
            off: AtomicBool::new(gpu.is_none()),
            initial_fallback,
            gpu,
            mode: Mutex::new(mode),
            joining: Mutex::new(()),
            model,
            plan,
            options,
        }
    }

    /// Returns whether the device is not used, or not used any more.
    pub fn is_off(&self) -> bool {
        self.off.load(Ordering::Relaxed)
    }

    /// Returns device and setup, or the reason why there is none.
    pub fn mode(&self) -> String {
        self.mode.lock().clone()
    }

    /// Releases experts.
    pub fn release(&self, gpu: &DeviceState, slots: Range<usize>) {
        let mut table = self.table.lock();
        for slot in slots {
            let Some(released) = table.release(slot) else {
                continue;
            };
            let (id, stream) = (released.id, released.stream);
            let consumed = gpu.events[id.index].consumed;
            let record = || {
                if released.event_in_use {
                    // The next record then stands for both uses.
                    gpu.device.stream_wait(stream, consumed)?;
                }
                gpu.device.record(consumed, stream)
            };
            let recorded = MutexGuard::unlocked(&mut table, || self.retry_once(record));
            table.consumed(id, recorded.is_ok());
            if recorded.is_err() {
                self.disable("cannot record when a stream has used the experts");
            }
        }
    }

    /// Counts and logs an error of the driver.
    pub fn note_error(&self, error: &DeviceError) {
        self.stats.lock().errors += 1;
        log::debug!("post-fetch: {error}");
    }

    /// Calls the driver, and after an error once more.
    pub fn retry_once<T>(&self, call: impl Fn() -> Result<T, DeviceError>) -> Result<T, Reason> {
        let noted = |error| self.note_error(&error);
        let first = call().map_err(noted);
        let last = first.or_else(|()| call().map_err(noted));
        last.map_err(|()| Reason::DeviceFailed)
    }

    /// Notes that the state of a copy in flight cannot be read.
    pub fn copy_failed(&self, id: TransferId, error: &DeviceError) {
        self.note_error(error);
        let failures = self.table.lock().fail(id, Reason::DeviceFailed, true);
        self.after_failure(failures, error);
    }

    /// Stops to use the device after too many failures in a row.
    pub fn after_failure(&self, failures: u32, error: &DeviceError) {
        if failures >= MAX_FAILURES {
            self.disable(&error.to_string());
        }
    }

    /// Stops to use the device.
    pub fn disable(&self, why: &str) {
        if self.off.swap(true, Ordering::Relaxed) {
            return;
        }
        let mode =
            format!("post-fetch stopped using its device, experts are computed on the CPU: {why}");
        log::warn!("{mode}");
        *self.mode.lock() = mode;
        self.work.notify();
    }

    /// Releases all experts and waits until the device does not use its memory any more.
    /// Returns false when that is unknown.
    pub fn wait_until_idle(&self, gpu: &DeviceState) -> bool {
        self.release(gpu, 0..self.plan.slots);
        let (waits, leaked) = {
            let table = self.table.lock();
            (table.waits.clone(), table.leaked)
        };
        let consumed = |wait: &Consumed| gpu.events[wait.index].consumed;
        let mut events: Vec<Event> = waits.iter().map(consumed).collect();
        for (event, stream) in [(gpu.idle, gpu.fetch), (gpu.join_event, gpu.compute)] {
            let recorded = self.retry_once(|| gpu.device.record(event, stream));
            if recorded.is_err() {
                return false;
            }
            events.push(event);
        }
        let timeout = match self.is_off() {
            true => LAST_TIMEOUT,
            false => self.options.config.timeout,
        };
        let backoff = Backoff::new();
        let is_over = |&event: &Event| loop {
            match self.retry_once(|| gpu.device.is_done(event)) {
                Ok(false) if backoff.elapsed() < timeout => backoff.pause(),
                done => return done == Ok(true),
            }
        };
        !leaked && events.iter().all(is_over)
    }
}

/// A wait for a device: spins at first, then sleeps.
pub(super) struct Backoff {
    since: Instant,
}

impl Backoff {
    /// How long to spin: some times the error of a sleep.
    const SPIN: Duration = Duration::from_micros(200);
    /// Length of one sleep.
    pub const SLEEP: Duration = Duration::from_micros(30);

    pub fn new() -> Backoff {
        Backoff {
            since: Instant::now(),
        }
    }

    /// Returns the time since the wait began.
    pub fn elapsed(&self) -> Duration {
        self.since.elapsed()
    }

    /// Waits a little.
    pub fn pause(&self) {
        match self.elapsed() < Backoff::SPIN {
            true => std::thread::yield_now(),
            false => std::thread::sleep(Backoff::SLEEP),
        }
    }
}
