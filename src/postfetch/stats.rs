//! What a scheduler did, in numbers.

use std::fmt::Write;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use serde_json::{Value, json};

use super::policy::Reason;

/// Version of the JSON.
pub const SCHEMA: &str = "llama-sidecar/post-fetch/1";

/// Counters that threads add to.
#[derive(Debug, Default)]
pub(super) struct Counters {
    pub calls: AtomicU64,
    pub experts: AtomicU64,
    pub coalesced: AtomicU64,
    pub duplicates: AtomicU64,
    pub rejected: AtomicU64,
    pub copies: AtomicU64,
    pub staged_copies: AtomicU64,
    pub bytes: AtomicU64,
    pub hits: AtomicU64,
    pub stream_hits: AtomicU64,
    pub waits: AtomicU64,
    pub wait_ns: AtomicU64,
    pub transfer_ns: AtomicU64,
    pub errors: AtomicU64,
    pub fallbacks: [AtomicU64; Reason::ALL.len()],
}

pub(super) fn add(counter: &AtomicU64, more: u64) {
    counter.fetch_add(more, Ordering::Relaxed);
}

/// What a scheduler did since it was made.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Stats {
    /// Calls of schedule.
    pub calls: u64,
    /// Experts that were put into transfers.
    pub experts: u64,
    /// Those of them that were copied together with a neighbour before them.
    pub coalesced: u64,
    /// Ids that were scheduled already.
    pub duplicates: u64,
    /// Ids that are no experts of their layer.
    pub rejected: u64,
    /// Copies that were issued.
    pub copies: u64,
    /// Those of them that went through page-locked buffers.
    pub staged_copies: u64,
    /// Their bytes.
    pub bytes: u64,
    /// Answers "use the device".
    pub hits: u64,
    /// Those of them for which the host's stream waits, and not the host.
    pub stream_hits: u64,
    /// Answers for which the host waited.
    pub waits: u64,
    /// How long it waited.
    pub wait: Duration,
    /// How long copies took on the device.
    pub transfer: Duration,
    /// Errors of the driver.
    pub errors: u64,
    /// Answers "compute on the CPU", by reason.
    pub fallbacks: [u64; Reason::ALL.len()],
    /// Device memory for experts, in bytes.
    pub scratchpad_bytes: u64,
    /// The most of it that was in use.
    pub scratchpad_peak: u64,
    /// Memory of the model that is page-locked in place, in bytes.
    pub locked_bytes: u64,
}

impl Counters {
    pub fn snapshot(&self) -> Stats {
        let get = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        Stats {
            calls: get(&self.calls),
            experts: get(&self.experts),
            coalesced: get(&self.coalesced),
            duplicates: get(&self.duplicates),
            rejected: get(&self.rejected),
            copies: get(&self.copies),
            staged_copies: get(&self.staged_copies),
            bytes: get(&self.bytes),
            hits: get(&self.hits),
            stream_hits: get(&self.stream_hits),
            waits: get(&self.waits),
            wait: Duration::from_nanos(get(&self.wait_ns)),
            transfer: Duration::from_nanos(get(&self.transfer_ns)),
            errors: get(&self.errors),
            fallbacks: self.fallbacks.each_ref().map(get),
            ..Stats::default()
        }
    }
}

/// How much of the copies' time nobody waited for; `None` when they took none.
pub(super) fn overlap(transfer: Duration, wait: Duration) -> Option<f64> {
    let transfer = transfer.as_secs_f64();
    (transfer > 0.0).then(|| (1.0 - wait.as_secs_f64() / transfer).max(0.0))
}

impl Stats {
    /// How much of the copies' time the host did not wait for, 0 to 1; `None` before a copy
    /// was timed.
    pub fn overlap(&self) -> Option<f64> {
        overlap(self.transfer, self.wait)
    }

    /// All answers "compute on the CPU".
    pub fn all_fallbacks(&self) -> u64 {
        self.fallbacks.iter().sum()
    }

    fn reasons(&self) -> impl Iterator<Item = (&'static str, u64)> {
        let counts = Reason::ALL.iter().zip(self.fallbacks);
        counts
            .filter(|(_, count)| *count > 0)
            .map(|(reason, count)| (reason.name(), count))
    }

    /// As JSON. `mode` says in words what the scheduler works with.
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
            "transfer_us": self.transfer.as_micros() as u64,
            "overlap": self.overlap(),
            "driver_errors": self.errors,
            "cpu": self.all_fallbacks(),
            "cpu_by_reason": self.reasons().collect::<std::collections::BTreeMap<_, _>>(),
            "scratchpad_bytes": self.scratchpad_bytes,
            "scratchpad_peak": self.scratchpad_peak,
            "page_locked_bytes": self.locked_bytes,
        })
    }

    /// For people.
    pub fn to_text(&self, mode: &str) -> String {
        let mib = |bytes: u64| bytes as f64 / (1 << 20) as f64;
        let mut text = format!("{mode}\n");
        let _ = writeln!(
            text,
            "{} experts in {} copies ({} through buffers), {:.1} MiB",
            self.experts,
            self.copies,
            self.staged_copies,
            mib(self.bytes),
        );
        let _ = writeln!(
            text,
            "{} answers on the device, {} on the CPU",
            self.hits,
            self.all_fallbacks()
        );
        for (reason, count) in self.reasons() {
            let _ = writeln!(text, "  CPU, {reason}: {count}");
        }
        if let Some(overlap) = self.overlap() {
            let _ = writeln!(
                text,
                "Transfer: {:.2} ms, Waited: {:.2} ms, Overlap: {:.1}%",
                self.transfer.as_secs_f64() * 1e3,
                self.wait.as_secs_f64() * 1e3,
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
        text
    }
}
