//! Statistics of a scheduler.

use std::fmt::Write;
use std::time::Duration;

use serde_json::{Value, json};
use sidecar_core::protocol::overlap;

use super::policy::{REASONS, Reason};

/// Name and version of the JSON format.
pub const SCHEMA: &str = "llama-sidecar/post-fetch/1";

/// Statistics of a scheduler since it was made.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Stats {
    /// Calls of schedule.
    pub calls: u64,
    /// Experts that were put into transfers.
    pub experts: u64,
    /// Experts that share a copy with a neighbour before them.
    pub coalesced: u64,
    /// Ids of experts that were scheduled already.
    pub duplicates: u64,
    /// Ids that are no experts of their layer.
    pub rejected: u64,
    /// Copies that were issued.
    pub copies: u64,
    /// Copies through page-locked buffers.
    pub staged_copies: u64,
    /// Bytes of all copies.
    pub bytes: u64,
    /// Experts that were acquired for the device.
    pub hits: u64,
    /// Hits for which a stream of the caller waits instead of the caller.
    pub stream_hits: u64,
    /// Acquisitions whose caller waited.
    pub waits: u64,
    /// Total time of those waits, by the clock of the host.
    pub wait: Duration,
    /// Copies that a stream of the caller waited for.
    pub stream_waits: u64,
    /// Total time of those waits, by the clock of the device.
    pub stream_wait: Duration,
    /// Total time of the copies, by the clock of the device.
    pub transfer: Duration,
    /// Copies that had ended when their first expert was acquired for the device.
    pub early_copies: u64,
    /// Copies to the scratchpad that ended, and of which no expert was acquired for the device.
    pub unused_copies: u64,
    /// Total time of those copies.
    pub unused: Duration,
    /// Errors of the driver.
    pub errors: u64,
    /// Experts that were acquired for the CPU, by reason.
    pub fallbacks: [u64; REASONS.len()],
    /// Size of the scratchpad on the device, in bytes.
    pub scratchpad_bytes: u64,
    /// The most bytes of the scratchpad that were in use at a time.
    pub scratchpad_peak: u64,
    /// Bytes of the model that are page-locked in place.
    pub locked_bytes: u64,
    /// Scheduled experts whose bytes were in a slot of the cache, or on their way there.
    pub cache_hits: u64,
    /// Scheduled experts of layers with slots whose bytes were in none.
    pub cache_misses: u64,
    /// Experts that lost their slot to another.
    pub evictions: u64,
    /// Device memory of all slots of the cache, in bytes.
    pub cache_bytes: u64,
}

impl Stats {
    /// Returns the [`overlap`]; `None` before a copy was timed.
    pub fn overlap(&self) -> Option<f64> {
        overlap(self.transfer, self.wait + self.stream_wait, self.unused)
    }

    /// Returns the share of acquisitions for the CPU, 0 to 1; `None` before one was made.
    pub fn fallback_rate(&self) -> Option<f64> {
        let all = self.hits + self.all_fallbacks();
        (all > 0).then(|| self.all_fallbacks() as f64 / all as f64)
    }

    /// Returns the experts that were acquired for the CPU, for all reasons.
    pub fn all_fallbacks(&self) -> u64 {
        self.fallbacks.iter().sum()
    }

    /// Counts an answer: a reason to use the CPU, or the device.
    pub(super) fn answered(&mut self, reason: Reason) {
        match reason {
            Reason::None => self.hits += 1,
            _ => self.fallbacks[reason as usize] += 1,
        }
    }

    fn reasons(&self) -> impl Iterator<Item = (&'static str, u64)> {
        let counts = REASONS.iter().zip(self.fallbacks);
        let counts = counts.map(|((_, name), count)| (*name, count));
        counts.filter(|(_, count)| *count > 0)
    }

    /// Returns the statistics as JSON. `mode` describes the device and its setup.
    pub fn to_json(&self, mode: &str) -> Value {
        json!({
            "schema": SCHEMA,
            "mode": mode,
            "schedule_calls": self.calls,
            "experts": self.experts,
            "coalesced": self.coalesced,
            "duplicates": self.duplicates,
            "rejected": self.rejected,
            "copies": self.copies,
            "staged_copies": self.staged_copies,
            "bytes": self.bytes,
            "hits": self.hits,
            "stream_hits": self.stream_hits,
            "waits": self.waits,
            "wait_us": self.wait.as_micros() as u64,
            "stream_waits": self.stream_waits,
            "stream_wait_us": self.stream_wait.as_micros() as u64,
            "transfer_us": self.transfer.as_micros() as u64,
            "early_copies": self.early_copies,
            "unused_copies": self.unused_copies,
            "unused_us": self.unused.as_micros() as u64,
            "overlap": self.overlap(),
            "driver_errors": self.errors,
            "cpu": self.all_fallbacks(),
            "fallback_rate": self.fallback_rate(),
            "cpu_by_reason": self.reasons().collect::<std::collections::BTreeMap<_, _>>(),
            "scratchpad_bytes": self.scratchpad_bytes,
            "scratchpad_peak": self.scratchpad_peak,
            "page_locked_bytes": self.locked_bytes,
            "cache_bytes": self.cache_bytes,
            "cache_hits": self.cache_hits,
            "cache_misses": self.cache_misses,
            "cache_evictions": self.evictions,
        })
    }

    /// Returns the statistics as text. `mode` describes the device and its setup.
    pub fn to_text(&self, mode: &str) -> String {
        let mib = |bytes: u64| bytes as f64 / (1 << 20) as f64;
        let mut text = format!(
            "{mode}\n{} experts in {} copies ({} through buffers), {:.1} MiB\n{} answers on the device, {} on the CPU ({:.1}%)\n",
            self.experts,
            self.copies,
            self.staged_copies,
            mib(self.bytes),
            self.hits,
            self.all_fallbacks(),
            self.fallback_rate().unwrap_or(0.0) * 100.0
        );
        for (reason, count) in self.reasons() {
            let _ = writeln!(text, "  CPU, {reason}: {count}");
        }
        if let Some(overlap) = self.overlap() {
            let _ = writeln!(
                text,
                "Transfer: {:.2} ms, Waited: {:.2} ms, streams {:.2} ms, Unused: {:.2} ms, Overlap: {:.1}%",
                self.transfer.as_secs_f64() * 1e3,
                self.wait.as_secs_f64() * 1e3,
                self.stream_wait.as_secs_f64() * 1e3,
                self.unused.as_secs_f64() * 1e3,
                overlap * 100.0
            );
        }
        let _ = writeln!(
            text,
            "scratchpad: {:.1} of {:.1} MiB used at most; {} driver errors",
            mib(self.scratchpad_peak),
            mib(self.scratchpad_bytes),
            self.errors
        );
        if self.cache_bytes > 0 {
            let _ = writeln!(
                text,
                "cache of {:.1} MiB: {} hits, {} misses, {} evictions",
                mib(self.cache_bytes),
                self.cache_hits,
                self.cache_misses,
                self.evictions
            );
        }
        text
    }
}
