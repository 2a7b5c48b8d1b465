//! Slots on the device in which the bytes of experts stay after a release.
//!
//! Each layer has slots of its own, as large as its largest expert. A slot names the generation
//! of the tensor that its bytes are from, so a tensor that was swapped has no bytes in a slot.

use std::fmt;

use super::transfer::TransferId;
use sidecar_core::fetch::{ExpertCache, LayerBudget, share};

/// The slots of one layer.
#[derive(Debug, Clone, Copy)]
struct LayerSlots {
    /// Number of experts.
    experts: u32,
    /// Bytes of a slot; 0 if the experts are not in host memory.
    pitch: u64,
    /// Number of slots.
    slots: u32,
}

/// The slots of all layers with experts, in the order of the layers.
#[derive(Debug, Default)]
pub(super) struct CacheLayout {
    layers: Vec<LayerSlots>,
    bytes: u64,
    /// The bytes of the setting.
    budget: u64,
}

impl CacheLayout {
    /// Divides device memory among layers, given their experts and the bytes of a slot. Without a
    /// slot, there are no layers.
    pub fn new(layers: impl Iterator<Item = (u32, u64)>, budget: u64) -> CacheLayout {
        let layer = |(experts, pitch)| LayerSlots {
            experts,
            pitch,
            slots: 0,
        };
        let mut layers: Vec<_> = layers.map(layer).collect();
        let budget_of = |layer: &LayerSlots| LayerBudget {
            slot_bytes: layer.pitch,
            experts: if layer.pitch > 0 { layer.experts } else { 0 },
            gains: None,
        };
        let budgets: Vec<_> = layers.iter().map(budget_of).collect();
        let shares = share(budget, 0, &budgets).unwrap_or_default();
        for (layer, slots) in layers.iter_mut().zip(shares) {
            layer.slots = slots;
        }
        let bytes = |layer: &LayerSlots| u64::from(layer.slots) * layer.pitch;
        let bytes = layers.iter().map(bytes).sum();
        if bytes == 0 {
            layers.clear();
        }
        CacheLayout {
            layers,
            bytes,
            budget,
        }
    }

    /// Returns the bytes of all slots.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Returns the number of slots of the layer with the most.
    pub fn most_slots(&self) -> u32 {
        let slots = self.layers.iter().map(|layer| layer.slots);
        slots.max().unwrap_or(0)
    }
}

impl fmt::Display for CacheLayout {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let CacheLayout { bytes, budget, .. } = self;
        match (*bytes, *budget) {
            (0, 0) => Ok(()),
            (0, _) => write!(f, "no cache: {budget} bytes are less than an expert; "),
            _ => {
                let sum = |count: fn(&LayerSlots) -> u32| -> u64 {
                    self.layers
                        .iter()
                        .map(|layer| u64::from(count(layer)))
                        .sum()
                };
                let (slots, experts) = (sum(|layer| layer.slots), sum(|layer| layer.experts));
                write!(
                    f,
                    "cache of {bytes} bytes for {slots} of {experts} experts; "
                )
            }
        }
    }
}

/// A slot of a layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct SlotId {
    layer: usize,
    slot: usize,
}

/// Device memory for one expert.
#[derive(Debug, Clone, Copy, Default)]
struct Slot {
    expert: u32,
    /// The generation of the expert's tensor.
    generation: u64,
    /// The transfer that filled the slot.
    copy: TransferId,
    /// Scheduled and not released, or read by a stream up to an event that is not recorded yet.
    in_use: bool,
}

#[derive(Debug)]
struct Layer {
    policy: ExpertCache,
    /// Offset of the first slot in the device memory of the scheduler.
    offset: u64,
    /// Bytes of a slot.
    pitch: u64,
    slots: Vec<Slot>,
}

/// The slots of all layers.
#[derive(Debug, Default)]
pub(super) struct Cache {
    layers: Vec<Layer>,
}

impl Cache {
    /// Makes empty slots, one behind the other from an offset.
    pub fn new(layout: &CacheLayout, mut offset: u64, half_life: u32) -> Cache {
        let layer = |layer: &LayerSlots| {
            let begins = offset;
            offset += u64::from(layer.slots) * layer.pitch;
            Layer {
                policy: ExpertCache::new(layer.experts, layer.slots, half_life),
                offset: begins,
                pitch: layer.pitch,
                slots: vec![Slot::default(); layer.slots as usize],
            }
        };
        Cache {
            layers: layout.layers.iter().map(layer).collect(),
        }
    }

    /// Returns the number of slots of a layer.
    pub fn slots(&self, layer: usize) -> usize {
        self.layers.get(layer).map_or(0, |layer| layer.slots.len())
    }

    /// Notes a use of an expert.
    pub fn touch(&mut self, layer: usize, expert: u32) {
        if let Some(layer) = self.layers.get_mut(layer) {
            layer.policy.touch(expert);
        }
    }

    /// Returns whether an expert has a slot.
    pub fn has(&self, layer: usize, expert: u32) -> bool {
        let layer = self.layers.get(layer);
        layer.is_some_and(|layer| layer.policy.slot(expert).is_some())
    }

    /// Returns the slot that has the bytes of an expert, or will have them after a copy. Bytes of
    /// another generation are forgotten.
    pub fn find(&mut self, layer: usize, expert: u32, generation: u64) -> Option<SlotId> {
        let found = self.layers.get_mut(layer)?;
        let slot = found.policy.slot(expert)? as usize;
        if found.slots[slot].generation != generation {
            found.policy.forget(expert);
            return None;
        }
        Some(SlotId { layer, slot })
    }

    /// Gives an expert a free slot or, if it `replaces` another, the slot of one that is not in use.
    /// Returns the slot, and whether an expert lost it; `None` if there is no such slot.
    pub fn load(
        &mut self,
        layer: usize,
        expert: u32,
        replaces: impl Fn(u32) -> bool,
    ) -> Option<(SlotId, bool)> {
        let Layer { policy, slots, .. } = self.layers.get_mut(layer)?;
        let in_use = |slot: u32, held: Option<u32>| {
            slots[slot as usize].in_use || held.is_some_and(|held| !replaces(held))
        };
        let (slot, before) = policy.load(expert, in_use)?;
        let slot = slot as usize;
        Some((SlotId { layer, slot }, before.is_some()))
    }

    /// Notes what a transfer copies to a slot, which is now in use.
    pub fn fill(&mut self, id: SlotId, expert: u32, generation: u64, copy: TransferId) {
        *self.slot(id) = Slot {
            expert,
            generation,
            copy,
            in_use: true,
        };
    }

    /// Forgets what a transfer copied to a slot, unless another transfer has filled it since.
    pub fn forget(&mut self, id: SlotId, copy: TransferId) {
        let slot = *self.slot(id);
        let policy = &mut self.layers[id.layer].policy;
        if slot.copy == copy && policy.slot(slot.expert) == Some(id.slot as u32) {
            policy.forget(slot.expert);
        }
    }

    /// Notes whether a slot is in use.
    pub fn set_in_use(&mut self, id: SlotId, in_use: bool) {
        self.slot(id).in_use = in_use;
    }

    /// Returns whether a slot is in use.
    pub fn is_in_use(&self, id: SlotId) -> bool {
        self.layers[id.layer].slots[id.slot].in_use
    }

    /// Returns the transfer that filled a slot.
    pub fn copy(&self, id: SlotId) -> TransferId {
        self.layers[id.layer].slots[id.slot].copy
    }

    /// Returns the bytes of a slot of a layer.
    pub fn pitch(&self, layer: usize) -> u64 {
        self.layers.get(layer).map_or(0, |layer| layer.pitch)
    }

    /// Returns the offset and the size of a slot in the device memory of the scheduler.
    pub fn place(&self, id: SlotId) -> (u64, u64) {
        let layer = &self.layers[id.layer];
        (layer.offset + id.slot as u64 * layer.pitch, layer.pitch)
    }

    fn slot(&mut self, id: SlotId) -> &mut Slot {
        &mut self.layers[id.layer].slots[id.slot]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_layer_that_is_not_in_host_memory_has_no_slots() {
        let divided = |bytes| {
            let layout = CacheLayout::new([(16, 512), (8, 0)].into_iter(), bytes);
            let slots = layout.layers.iter().map(|layer| layer.slots);
            (slots.collect::<Vec<_>>(), layout.bytes)
        };
        assert_eq!(divided(511), (vec![], 0));
        assert_eq!(divided(u64::MAX), (vec![16, 0], 16 * 512));
    }

    #[test]
    fn a_slot_has_the_last_copy_of_its_generation() {
        let layout = CacheLayout::new([(4, 256)].into_iter(), 511);
        assert_eq!(
            layout.to_string(),
            "cache of 256 bytes for 1 of 4 experts; "
        );
        let mut cache = Cache::new(&layout, 1024, 1);
        let copy = |number| TransferId { index: 0, number };
        let (slot, evicts) = cache.load(0, 2, |_| true).expect("a free slot");
        cache.fill(slot, 2, 7, copy(1));
        assert_eq!(
            (evicts, cache.place(slot), cache.slots(0)),
            (false, (1024, 256), 1)
        );
        assert_eq!(cache.find(0, 2, 7), Some(slot));
        assert_eq!(cache.load(0, 3, |_| true), None, "in use");
        assert!(cache.is_in_use(slot));
        cache.set_in_use(slot, false);
        assert_eq!(cache.load(0, 3, |expert| expert != 2), None, "wanted");
        assert_eq!(cache.load(0, 3, |_| true), Some((slot, true)));
        cache.fill(slot, 3, 0, copy(2));
        // The failure of an earlier copy does not matter.
        cache.forget(slot, copy(1));
        assert!(cache.has(0, 3) && !cache.has(0, 2));
        assert_eq!(cache.find(0, 3, 1), None, "another generation");
        assert!(!cache.has(0, 3));
        assert_eq!(
            (cache.slots(1), cache.find(1, 0, 0), cache.has(1, 0)),
            (0, None, false)
        );
    }
}
