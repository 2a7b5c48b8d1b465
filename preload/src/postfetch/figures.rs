//! Figures of post-fetch in this process.

use std::collections::BTreeSet;

use once_cell::sync::Lazy;
use parking_lot::{Mutex, MutexGuard};
use sidecar_core::protocol::{CacheLayer, PostFetchFigures};

use super::speeds::Speeds;

/// Why the program copied a matrix itself.
#[derive(Debug, Clone, Copy)]
pub enum Reason {
    /// The first evaluation of a scheduler shows how the program copies.
    FirstEvaluation,
    /// The early copy had not begun (`LLAMA_POSTFETCH_BLOCK_ON_MISS=0`).
    Missed,
    /// The copy has bytes that were not requested early.
    NotRequested,
}

/// Figures of the process.
pub static FIGURES: Figures = Figures {
    now: Lazy::new(Mutex::default),
    wordings: Mutex::new(BTreeSet::new()),
};

/// Figures that any thread changes.
pub struct Figures {
    now: Lazy<Mutex<PostFetchFigures>>,
    /// Obstacles that were logged, without their numbers.
    wordings: Mutex<BTreeSet<String>>,
}

impl Figures {
    /// Returns the figures, to be read or changed.
    pub fn lock(&self) -> MutexGuard<'_, PostFetchFigures> {
        self.now.lock()
    }

    /// Counts a copy of the program.
    pub fn host_copied(&self, bytes: usize, reason: Reason) {
        let name = match reason {
            Reason::FirstEvaluation => "first_evaluation",
            Reason::Missed => "missed",
            Reason::NotRequested => "not_requested",
        };
        let mut now = self.lock();
        now.host_bytes += bytes as u64;
        match now.host_copies.get_mut(name) {
            Some(count) => *count += 1,
            None => drop(now.host_copies.insert(name.into(), 1)),
        }
    }

    /// Adds a look-up in the slots of a layer, which schedulers share.
    pub fn looked_up(&self, found: &CacheLayer) {
        let mut now = self.lock();
        now.cache_hits += found.hits;
        now.cache_misses += found.misses;
        now.cache_evictions += found.evictions;
        now.cache_on_cpu += found.on_cpu;
        if let Some(of_layer) = layer(&mut now, found) {
            of_layer.hits += found.hits;
            of_layer.misses += found.misses;
            of_layer.evictions += found.evictions;
            of_layer.on_cpu += found.on_cpu;
        }
    }

    /// Notes the number of slots of a layer.
    pub fn note_layer(&self, new: CacheLayer) {
        let mut now = self.lock();
        match layer(&mut now, &new) {
            Some(known) => known.slots = new.slots,
            None => now.cache_layers.push(new),
        }
    }

    /// Notes the memory of experts that stay on a device, and the slots of a layer, at least.
    pub fn note_cache(&self, bytes: u64, slots: usize) {
        log::info!(
            "post-fetch: {slots} experts of each layer or more stay on the device, in {} MiB",
            bytes >> 20
        );
        let mut now = self.lock();
        now.cache_bytes = bytes;
        now.cache_slots = slots as u64;
    }

    /// Notes that slots are free, for memory that the program allocates.
    pub fn note_freed(&self, bytes: u64) {
        log::info!(
            "post-fetch: {} MiB of experts on the device are free, for another context or model of the program; what it leaves is used with the next graph",
            bytes >> 20
        );
        let mut now = self.lock();
        now.cache_bytes = 0;
        now.cache_slots = 0;
        now.cache_layers.iter_mut().for_each(|of| of.slots = 0);
    }

    /// Notes the speeds that decide whether experts on a device are faster than the CPU.
    pub fn note_speeds(&self, speeds: Speeds) {
        let mut now = self.lock();
        now.link_speed = Some(speeds.link);
        now.memory_speed = Some(speeds.memory);
    }

    /// Notes why something is not copied early or not computed, and logs each wording once.
    pub fn note_obstacle(&self, obstacle: String) {
        // Numbers in it may change from graph to graph, and layers may have different obstacles.
        let wording = obstacle.replace(|c: char| c.is_ascii_digit(), "");
        if self.wordings.lock().insert(wording) {
            log::warn!("post-fetch: {obstacle}");
        }
        self.lock().obstacle = Some(obstacle);
    }
}

/// Returns the figures of the same layer of a model.
fn layer<'a>(now: &'a mut PostFetchFigures, same: &CacheLayer) -> Option<&'a mut CacheLayer> {
    let mut all = now.cache_layers.iter_mut();
    all.find(|of| (of.model, of.layer) == (same.model, same.layer))
}
