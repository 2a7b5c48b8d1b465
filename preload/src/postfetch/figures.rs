//! Figures of post-fetch in this process.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use llama_sidecar::protocol::PostFetchFigures;
use parking_lot::Mutex;

/// Why the program copied a matrix itself.
#[derive(Debug, Clone, Copy)]
#[repr(usize)]
pub enum Reason {
    /// The first evaluation of a scheduler shows how the program copies.
    FirstEvaluation,
    /// The early copy had not begun (`LLAMA_POSTFETCH_BLOCK_ON_MISS=0`).
    Missed,
    /// The copy has bytes that were not requested early.
    NotRequested,
}

const REASONS: [(Reason, &str); 3] = [
    (Reason::FirstEvaluation, "first_evaluation"),
    (Reason::Missed, "missed"),
    (Reason::NotRequested, "not_requested"),
];

/// Counters of the process.
pub static FIGURES: Figures = Figures {
    layers: AtomicU64::new(0),
    layers_ahead: AtomicU64::new(0),
    early_bytes: AtomicU64::new(0),
    left_out_bytes: AtomicU64::new(0),
    host_bytes: AtomicU64::new(0),
    host_copies: [const { AtomicU64::new(0) }; REASONS.len()],
    copy_ns: AtomicU64::new(0),
    wait_ns: AtomicU64::new(0),
    mismatches: AtomicU64::new(0),
    scratch_bytes: AtomicU64::new(0),
    cache_hits: AtomicU64::new(0),
    cache_misses: AtomicU64::new(0),
    cache_bytes: AtomicU64::new(0),
    cache_slots: AtomicU64::new(0),
    obstacle: Mutex::new(None),
};

/// Counters; [`PostFetchFigures`] describes each.
#[allow(missing_docs, reason = "PostFetchFigures describes each")]
pub struct Figures {
    pub layers: AtomicU64,
    pub layers_ahead: AtomicU64,
    pub early_bytes: AtomicU64,
    pub left_out_bytes: AtomicU64,
    pub mismatches: AtomicU64,
    pub scratch_bytes: AtomicU64,
    host_bytes: AtomicU64,
    host_copies: [AtomicU64; REASONS.len()],
    copy_ns: AtomicU64,
    wait_ns: AtomicU64,
    cache_hits: AtomicU64,
    cache_misses: AtomicU64,
    cache_bytes: AtomicU64,
    cache_slots: AtomicU64,
    obstacle: Mutex<Option<String>>,
}

impl Figures {
    /// Adds the time of a copy.
    pub fn add_copy(&self, time: Duration) {
        self.copy_ns
            .fetch_add(time.as_nanos() as u64, Ordering::Relaxed);
    }

    /// Adds the time for which computing waited for a copy.
    pub fn add_wait(&self, time: Duration) {
        self.wait_ns
            .fetch_add(time.as_nanos() as u64, Ordering::Relaxed);
    }

    /// Counts a copy of the program.
    pub fn host_copied(&self, bytes: usize, reason: Reason) {
        self.host_bytes.fetch_add(bytes as u64, Ordering::Relaxed);
        self.host_copies[reason as usize].fetch_add(1, Ordering::Relaxed);
    }

    /// Counts a look-up of experts that stay on a device.
    pub fn count_cache(&self, hits: usize, misses: usize) {
        self.cache_hits.fetch_add(hits as u64, Ordering::Relaxed);
        self.cache_misses
            .fetch_add(misses as u64, Ordering::Relaxed);
    }

    /// Notes the memory of experts that stay on a device, and the slots of a layer.
    pub fn note_cache(&self, bytes: u64, slots: usize) {
        log::info!(
            "post-fetch: {slots} experts of each layer stay on the device, in {} MiB",
            bytes >> 20
        );
        self.cache_bytes.store(bytes, Ordering::Relaxed);
        self.cache_slots.store(slots as u64, Ordering::Relaxed);
    }

    /// Notes why nothing is copied early, and logs it when it is new.
    pub fn note_obstacle(&self, obstacle: String) {
        let mut known = self.obstacle.lock();
        // Numbers in it may change from graph to graph.
        let words = |text: &str| text.replace(|c: char| c.is_ascii_digit(), "");
        if known.as_deref().map(words) != Some(words(&obstacle)) {
            log::warn!("post-fetch: {obstacle}");
        }
        *known = Some(obstacle);
    }

    /// Returns the figures at this moment.
    pub fn get(&self, locked_bytes: u64) -> PostFetchFigures {
        let get = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let seconds = |counter| get(counter) as f64 / 1e9;
        let copies = REASONS.iter().map(|(reason, name)| {
            let count = get(&self.host_copies[*reason as usize]);
            (String::from(*name), count)
        });
        PostFetchFigures {
            layers: get(&self.layers),
            layers_ahead: get(&self.layers_ahead),
            early_bytes: get(&self.early_bytes),
            left_out_bytes: get(&self.left_out_bytes),
            host_bytes: get(&self.host_bytes),
            host_copies: copies.filter(|(_, count)| *count > 0).collect(),
            copy_seconds: seconds(&self.copy_ns),
            wait_seconds: seconds(&self.wait_ns),
            mismatches: get(&self.mismatches),
            scratch_bytes: get(&self.scratch_bytes),
            cache_hits: get(&self.cache_hits),
            cache_misses: get(&self.cache_misses),
            cache_bytes: get(&self.cache_bytes),
            cache_slots: get(&self.cache_slots),
            locked_bytes,
            obstacle: self.obstacle.lock().clone(),
        }
    }
}
