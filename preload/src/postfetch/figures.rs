//! Figures of post-fetch in this process.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use parking_lot::Mutex;
use sidecar_core::protocol::{CacheLayer, PostFetchFigures};

use super::speeds::Speeds;

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
    cache_evictions: AtomicU64::new(0),
    cache_on_cpu: AtomicU64::new(0),
    cache_unused: AtomicU64::new(0),
    cache_bytes: AtomicU64::new(0),
    cache_slots: AtomicU64::new(0),
    cache_layers: Mutex::new(Vec::new()),
    speeds: Mutex::new(None),
    obstacles: Mutex::new(Vec::new()),
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
    pub cache_unused: AtomicU64,
    host_bytes: AtomicU64,
    host_copies: [AtomicU64; REASONS.len()],
    copy_ns: AtomicU64,
    wait_ns: AtomicU64,
    cache_hits: AtomicU64,
    cache_misses: AtomicU64,
    cache_evictions: AtomicU64,
    cache_on_cpu: AtomicU64,
    cache_bytes: AtomicU64,
    cache_slots: AtomicU64,
    cache_layers: Mutex<Vec<Arc<LayerFigures>>>,
    speeds: Mutex<Option<Speeds>>,
    /// One of each wording, the last one last.
    obstacles: Mutex<Vec<String>>,
}

/// Counters of a layer whose experts stay on a device; [`CacheLayer`] describes each.
#[allow(missing_docs, reason = "CacheLayer describes each")]
pub struct LayerFigures {
    pub model: u64,
    pub layer: u32,
    slots: AtomicU64,
    hits: AtomicU64,
    misses: AtomicU64,
    evictions: AtomicU64,
    on_cpu: AtomicU64,
}

impl LayerFigures {
    /// Returns zeros.
    pub fn new(model: u64, layer: u32) -> LayerFigures {
        LayerFigures {
            model,
            layer,
            slots: AtomicU64::new(0),
            hits: AtomicU64::new(0),
            misses: AtomicU64::new(0),
            evictions: AtomicU64::new(0),
            on_cpu: AtomicU64::new(0),
        }
    }

    /// Counts a look-up.
    pub fn count(&self, hits: usize, misses: usize, evictions: u64, on_cpu: usize) {
        for (of_layer, of_all, count) in [
            (&self.hits, &FIGURES.cache_hits, hits as u64),
            (&self.misses, &FIGURES.cache_misses, misses as u64),
            (&self.evictions, &FIGURES.cache_evictions, evictions),
            (&self.on_cpu, &FIGURES.cache_on_cpu, on_cpu as u64),
        ] {
            of_layer.fetch_add(count, Ordering::Relaxed);
            of_all.fetch_add(count, Ordering::Relaxed);
        }
    }
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

    /// Returns the counters of a layer of a model, which all schedulers share.
    pub fn cache_layer(&self, model: u64, layer: u32, slots: usize) -> Arc<LayerFigures> {
        let mut layers = self.cache_layers.lock();
        let known = layers
            .iter()
            .find(|of| (of.model, of.layer) == (model, layer));
        let of_layer = known.cloned().unwrap_or_else(|| {
            let new = Arc::new(LayerFigures::new(model, layer));
            layers.push(new.clone());
            new
        });
        of_layer.slots.store(slots as u64, Ordering::Relaxed);
        of_layer
    }

    /// Drops the counters of the layers of a model.
    pub fn drop_cache_layers(&self, model: u64) {
        self.cache_layers.lock().retain(|of| of.model != model);
    }

    /// Notes the memory of experts that stay on a device, and the slots of a layer, at least.
    pub fn note_cache(&self, bytes: u64, slots: usize) {
        log::info!(
            "post-fetch: {slots} experts of each layer or more stay on the device, in {} MiB",
            bytes >> 20
        );
        self.cache_bytes.store(bytes, Ordering::Relaxed);
        self.cache_slots.store(slots as u64, Ordering::Relaxed);
    }

    /// Notes the speeds that decide whether experts on a device are faster than the CPU.
    pub fn note_speeds(&self, speeds: Speeds) {
        *self.speeds.lock() = Some(speeds);
    }

    /// Notes why something is not copied early or not computed, and logs each wording once.
    pub fn note_obstacle(&self, obstacle: String) {
        let mut known = self.obstacles.lock();
        // Numbers in it may change from graph to graph, and layers may have different obstacles.
        let words = |text: &str| text.replace(|c: char| c.is_ascii_digit(), "");
        let is_known = |other: &String| words(other) == words(&obstacle);
        match known.iter().position(is_known) {
            Some(at) => drop(known.remove(at)),
            None => log::warn!("post-fetch: {obstacle}"),
        }
        known.push(obstacle);
    }

    /// Returns the figures at this moment.
    pub fn get(&self, locked_bytes: u64) -> PostFetchFigures {
        let get = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let seconds = |counter| get(counter) as f64 / 1e9;
        let layer = |of: &Arc<LayerFigures>| CacheLayer {
            model: of.model,
            layer: of.layer,
            slots: get(&of.slots),
            hits: get(&of.hits),
            misses: get(&of.misses),
            evictions: get(&of.evictions),
            on_cpu: get(&of.on_cpu),
        };
        let speeds = *self.speeds.lock();
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
            cache_evictions: get(&self.cache_evictions),
            cache_on_cpu: get(&self.cache_on_cpu),
            cache_unused: get(&self.cache_unused),
            cache_bytes: get(&self.cache_bytes),
            cache_slots: get(&self.cache_slots),
            link_speed: speeds.map(|of| of.link),
            memory_speed: speeds.map(|of| of.memory),
            cache_layers: self.cache_layers.lock().iter().map(layer).collect(),
            locked_bytes,
            obstacle: self.obstacles.lock().last().cloned(),
        }
    }
}
