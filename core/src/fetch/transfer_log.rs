//! The log lines of `LLAMA_POSTFETCH_DEBUG=1`, the same in both modes. They are logged at any level.

use std::time::Duration;

use crate::logger::REQUESTED;
use crate::protocol::overlap;

/// Logs that copies of so many experts of a layer are requested.
pub fn requested(layer: u32, experts: u64, bytes: u64) {
    log::debug!(target: REQUESTED, "[PF] Layer {layer}: Transferring {experts} experts, total {} MB", bytes >> 20);
}

/// Logs the copy of one expert of a matrix to an offset of its memory on the device.
pub fn expert(id: u64, bytes: u64, offset: u64) {
    log::debug!(target: REQUESTED, "[PF]   Expert {id}: {bytes} bytes @ offset {offset}");
}

/// Times of copies.
#[derive(Debug, Clone, Copy, Default)]
pub struct Times {
    /// Of all copies.
    pub transfer: Duration,
    /// For which computing waited for copies.
    pub waited: Duration,
    /// Of copies that were not used.
    pub unused: Duration,
}

/// Logs the times of the copies of a layer, and the time from their request to their end and to that of
/// the layer. Without copies, nothing had to overlap.
pub fn ended(layer: u32, times: Times, total: Duration) {
    let overlap = overlap(times.transfer, times.waited, times.unused).unwrap_or(1.0);
    let ms = |time: Duration| time.as_secs_f64() * 1e3;
    log::debug!(target: REQUESTED, "[PF] Layer {layer}: Transfer: {:.2} ms, Total: {:.2} ms, Overlap: {:.1}%",
        ms(times.transfer), ms(total), overlap * 100.0);
}
