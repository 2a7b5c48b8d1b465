//! The times of copies, and the log lines of `LLAMA_POSTFETCH_DEBUG=1`.

use std::time::{Duration, Instant};

use parking_lot::{Mutex, MutexGuard};

use super::device_state::DeviceState;
use super::plan::{Plan, PlannedLayer};
use super::stats::{Counters, add};
use super::transfer_table::TransferTable;
use sidecar_core::fetch::transfer_log;

/// Times of the transfers and of each layer.
#[derive(Debug)]
pub(super) struct CopyTimes {
    /// Held while events of transfers are recorded, or their times are read.
    events: Mutex<()>,
    /// Only for the log.
    layers: Mutex<Vec<LayerTimes>>,
}

/// Times of a layer since its last line in the log.
#[derive(Debug, Clone, Copy, Default)]
struct LayerTimes {
    began: Option<Instant>,
    transfer: Duration,
    waited: Duration,
}

impl CopyTimes {
    pub fn new(plan: &Plan) -> CopyTimes {
        CopyTimes {
            events: Mutex::new(()),
            layers: Mutex::new(vec![LayerTimes::default(); plan.layers.len()]),
        }
    }

    /// Adds up the times of all transfers that are done. Until the returned lock is dropped, no
    /// other thread reads times: events can be recorded.
    pub fn collect(
        &self,
        gpu: &DeviceState,
        table: &Mutex<TransferTable>,
        plan: &Plan,
        counters: &Counters,
    ) -> MutexGuard<'_, ()> {
        let events = self.events.lock();
        // In two statements: the lock of the table ends before the driver is called.
        loop {
            let untimed = table.lock().take_untimed();
            let Some((id, slot)) = untimed else {
                return events;
            };
            let transfer = &gpu.events[id.index];
            match gpu
                .device
                .elapsed(transfer.start.event, transfer.ready.event)
            {
                Ok(took) => {
                    add(&counters.transfer_ns, took.as_nanos() as u64);
                    let layer = plan.layer_of_slot(slot);
                    self.layers.lock()[layer.position].transfer += took;
                }
                Err(error) => counters.note_error(&error),
            }
        }
    }

    /// Adds the time of a wait for an expert of a layer.
    pub fn waited(&self, planned: &PlannedLayer, took: Duration) {
        self.layers.lock()[planned.position].waited += took;
    }

    /// Logs what a call of schedule transfers.
    pub fn log_schedule(
        &self,
        planned: &PlannedLayer,
        ids: &[i32],
        (experts, bytes): (u64, u64),
        table: &Mutex<TransferTable>,
    ) {
        self.layers.lock()[planned.position].began = Some(Instant::now());
        transfer_log::requested(planned.layer, experts, bytes);
        for &id in ids {
            let slot = u32::try_from(id).ok().and_then(|id| planned.slot(id));
            let held = slot.and_then(|slot| {
                let table = table.lock();
                let held = table.held(slot)?;
                Some((held.weights.nbytes, held.offset))
            });
            if let Some((nbytes, offset)) = held {
                transfer_log::expert(id as u64, nbytes, offset);
            }
        }
    }

    /// Logs the times of a layer that is released, if it was scheduled.
    pub fn log_layer(&self, planned: &PlannedLayer) {
        let times = std::mem::take(&mut self.layers.lock()[planned.position]);
        let Some(began) = times.began else {
            return;
        };
        transfer_log::ended(planned.layer, times.transfer, began.elapsed(), times.waited);
    }
}
