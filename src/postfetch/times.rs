//! The times of copies and of waits for them, and the log lines of `LLAMA_POSTFETCH_DEBUG=1`.

use std::ops::Range;
use std::time::Duration;

use super::device_state::{DeviceState, TransferEvents};
use super::plan::PlannedLayer;
use super::shared::{LayerTimes, Shared};
use super::transfer_table::Untimed;
use crate::device::DeviceError;
use sidecar_core::fetch::transfer_log;

impl Shared {
    /// Adds up the times of copies that are done, except those that a stream has not come to.
    pub fn collect_times(&self, gpu: &DeviceState) {
        self.collect(gpu, 0..gpu.events.len(), false);
    }

    /// Adds up the times of the last copy of a transfer that is about to be used again. No thread reads
    /// its events afterwards.
    pub fn collect_last(&self, gpu: &DeviceState, index: usize) {
        self.collect(gpu, index..index + 1, true);
    }

    fn collect(&self, gpu: &DeviceState, mut range: Range<usize>, is_reused: bool) {
        let _alone = self.timing.lock();
        loop {
            // The lock of the table ends before the driver is called.
            let untimed = self.table.lock().untimed(range.clone());
            let Some(untimed) = untimed else {
                return;
            };
            range.start = untimed.id.index + 1;
            match times(gpu, &gpu.events[untimed.id.index], untimed.held_stream) {
                Ok((time, Some(waited))) => self.add_times(untimed, time, waited),
                // The copy was complete before the stream needed it.
                Ok((time, None)) if is_reused => self.add_times(untimed, time, Duration::ZERO),
                Ok((_, None)) => {}
                Err(error) => {
                    self.note_error(&error);
                    self.add_times(untimed, Duration::ZERO, Duration::ZERO);
                }
            }
        }
    }

    fn add_times(&self, untimed: Untimed, time: Duration, waited: Duration) {
        let mut table = self.table.lock();
        let is_unused = table.timed(untimed.id, time);
        let unused = if is_unused { time } else { Duration::ZERO };
        let mut stats = self.stats.lock();
        stats.transfer += time;
        stats.stream_waits += u64::from(waited > Duration::ZERO);
        stats.stream_wait += waited;
        stats.unused_copies += u64::from(is_unused);
        stats.unused += unused;
        let layer = self.plan.layer_of_slot(untimed.slot);
        let of_layer = &mut self.times.lock()[layer.position].times;
        of_layer.transfer += time;
        of_layer.waited += waited;
        of_layer.unused += unused;
    }

    /// Logs what a call of schedule transfers.
    pub fn log_schedule(&self, planned: &PlannedLayer, ids: &[i32], experts: u64, bytes: u64) {
        transfer_log::requested(planned.layer, experts, bytes);
        for &id in ids {
            let slot = u32::try_from(id).ok().and_then(|id| planned.slot(id));
            let table = self.table.lock();
            if let Some(Ok(held)) = slot.map(|slot| table.lookup(slot).1) {
                transfer_log::expert(id as u64, held.weights.nbytes, held.offset);
            }
        }
    }

    /// Logs the times of layers whose experts are released, and whose copies and waits have ended.
    pub fn log_ended(&self, gpu: &DeviceState) {
        if !self.options.config.debug {
            return;
        }
        self.collect_times(gpu);
        for planned in &self.plan.layers {
            let slots = planned.first_slot..planned.first_slot + planned.experts as usize;
            let ended = {
                let table = self.table.lock();
                let of_layer = &mut self.times.lock()[planned.position];
                let has_ended = of_layer.began.is_some() && !table.is_busy(&slots);
                has_ended.then(|| std::mem::take(of_layer))
            };
            if let Some(LayerTimes { began, times }) = ended
                && let Some(began) = began
            {
                transfer_log::ended(planned.layer, times, began.elapsed());
            }
        }
    }
}

/// Returns the time of a copy that is done, and how long a stream waited for it; `None` while the stream
/// has not come so far.
fn times(
    gpu: &DeviceState,
    events: &TransferEvents,
    held_stream: bool,
) -> Result<(Duration, Option<Duration>), DeviceError> {
    let time = gpu.device.elapsed(events.start, events.ready)?;
    if !held_stream {
        return Ok((time, Some(Duration::ZERO)));
    }
    let waited = match gpu.device.is_done(events.needed)? {
        true => Some(gpu.device.elapsed(events.needed, events.ready)?),
        false => None,
    };
    Ok((time, waited))
}
