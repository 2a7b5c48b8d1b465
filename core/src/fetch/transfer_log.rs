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

/// Logs how long the copies of a layer took, how long ago they were requested, and how long computing
/// waited for them.
pub fn ended(layer: u32, transfer: Duration, total: Duration, waited: Duration) {
    let overlap = overlap(transfer.as_secs_f64(), waited.as_secs_f64()).unwrap_or(0.0);
    log::debug!(target: REQUESTED, "[PF] Layer {layer}: Transfer: {:.2} ms, Total: {:.2} ms, Overlap: {:.1}%",
        transfer.as_secs_f64() * 1e3,
        total.as_secs_f64() * 1e3,
        overlap * 100.0);
}
