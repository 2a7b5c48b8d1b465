//! How long copies took, and what is logged about them.

use std::time::{Duration, Instant};

use super::Shared;
use super::board::Cell;
use super::gpu::Gpu;
use super::plan::PlannedLayer;
use super::stats::{add, overlap};
use crate::logger::REQUESTED;

/// For the log of a layer.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct LayerTimes {
    began: Option<Instant>,
    transfer: Duration,
    pub waited: Duration,
}

impl Shared {
    /// Adds up how long transfers took. The caller holds the clock.
    pub(super) fn take_times(&self, gpu: &Gpu) {
        loop {
            let mut board = self.board.lock();
            let mut all = board.transfers.iter_mut().enumerate();
            let Some((index, transfer)) = all.find(|(_, transfer)| transfer.untimed) else {
                return;
            };
            transfer.untimed = false;
            let cell = transfer.cell;
            drop(board);
            let marks = &gpu.marks[index];
            match gpu.device.elapsed(marks.start.event, marks.ready.event) {
                Ok(took) => {
                    add(&self.counters.transfer_ns, took.as_nanos() as u64);
                    if self.options.config.debug {
                        let layers = &self.plan.layers;
                        let at = layers.partition_point(|layer| layer.first_cell <= cell) - 1;
                        self.times.lock()[at].transfer += took;
                    }
                }
                Err(error) => self.note(&error),
            }
        }
    }

    pub(super) fn log_schedule(
        &self,
        planned: &PlannedLayer,
        ids: &[i32],
        experts: u64,
        bytes: u64,
    ) {
        self.layer_times(planned, |times| times.began = Some(Instant::now()));
        log::debug!(target: REQUESTED, "[PF] Layer {}: Transferring {experts} experts, total {} MB",
                planned.layer,
                bytes >> 20);
        for &id in ids {
            let cell = planned.first_cell.wrapping_add(id as usize);
            let board = self.board.lock();
            let Some(&Cell::Held { transfer, row, .. }) = board.cells.get(cell) else {
                continue;
            };
            let transfer = &board.transfers[transfer];
            let nbytes = transfer.slice.as_ref().map_or(0, |slice| slice.nbytes);
            let offset = transfer.place + u64::from(row) * transfer.pitch;
            drop(board);
            log::debug!(target: REQUESTED, "[PF]   Expert {id}: {nbytes} bytes @ offset {offset}");
        }
    }

    pub(super) fn log_layer(&self, gpu: &Gpu, planned: &PlannedLayer) {
        {
            let _clock = self.clock.lock();
            self.take_times(gpu);
        }
        let times = self.layer_times(planned, std::mem::take);
        let Some(began) = times.began else {
            return;
        };
        let overlap = overlap(times.transfer, times.waited).unwrap_or(0.0);
        log::debug!(target: REQUESTED, "[PF] Layer {}: Transfer: {:.2} ms, Total: {:.2} ms, Overlap: {:.1}%",
                planned.layer,
                times.transfer.as_secs_f64() * 1e3,
                began.elapsed().as_secs_f64() * 1e3,
                overlap * 100.0);
    }

    pub(super) fn layer_times<T>(
        &self,
        planned: &PlannedLayer,
        with: impl FnOnce(&mut LayerTimes) -> T,
    ) -> T {
        let layers = &self.plan.layers;
        let at = layers.partition_point(|layer| layer.layer < planned.layer);
        with(&mut self.times.lock()[at])
    }
}
