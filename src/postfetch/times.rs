//! The times of copies, and the log lines of `LLAMA_POSTFETCH_DEBUG=1`.

use std::time::Instant;

use parking_lot::MutexGuard;

use super::device_state::DeviceState;
use super::plan::PlannedLayer;
use super::shared::Shared;
use sidecar_core::fetch::transfer_log;

impl Shared {
    /// Adds up the times of all transfers that are done. Until the returned lock is dropped, no
    /// other thread reads times: events can be recorded.
    pub fn collect_times(&self, gpu: &DeviceState) -> MutexGuard<'_, ()> {
        let alone = self.timing.lock();
        // In two statements: the lock of the table ends before the driver is called.
        loop {
            let untimed = self.table.lock().take_untimed();
            let Some((id, slot)) = untimed else {
                return alone;
            };
            let events = &gpu.events[id.index];
            match gpu.device.elapsed(events.start, events.ready) {
                Ok(took) => {
                    self.stats.lock().transfer += took;
                    let layer = self.plan.layer_of_slot(slot);
                    self.times.lock()[layer.position].transfer += took;
                }
                Err(error) => self.note_error(&error),
            }
        }
    }

    /// Logs what a call of schedule transfers.
    pub fn log_schedule(&self, planned: &PlannedLayer, ids: &[i32], experts: u64, bytes: u64) {
        self.times.lock()[planned.position].began = Some(Instant::now());
        transfer_log::requested(planned.layer, experts, bytes);
        for &id in ids {
            let slot = u32::try_from(id).ok().and_then(|id| planned.slot(id));
            let table = self.table.lock();
            if let Some(Ok(held)) = slot.map(|slot| table.lookup(slot).1) {
                transfer_log::expert(id as u64, held.weights.nbytes, held.offset);
            }
        }
    }

    /// Logs the times of a layer that is released, if it was scheduled.
    pub fn log_layer(&self, gpu: &DeviceState, planned: &PlannedLayer) {
        drop(self.collect_times(gpu));
        let times = std::mem::take(&mut self.times.lock()[planned.position]);
        if let Some(began) = times.began {
            transfer_log::ended(planned.layer, times.transfer, began.elapsed(), times.waited);
        }
    }
}
