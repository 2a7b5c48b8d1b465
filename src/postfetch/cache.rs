//! Slots on the device in which the bytes of experts stay after a release.
//!
//! Each layer has slots of its own, as large as its largest expert. A slot names the generation
//! of the tensor that its bytes are from, so a tensor that was swapped has no bytes in a slot.

use super::transfer::TransferId;
use sidecar_core::fetch::{ExpertCache, LayerBudget, share};

/// Device memory for one expert.
#[derive(Debug, Clone, Copy)]
pub(super) struct Slot {
    /// Position of the layer.
    layer: usize,
    /// Offset in the device memory of the scheduler.
    pub offset: u64,
    pub bytes: u64,
    expert: u32,
    /// The generation of the expert's tensor.
    generation: u64,
    /// The transfer that filled the slot.
    pub copy: TransferId,
    /// Scheduled and not released, or read by a stream up to an event that is not recorded yet.
    pub in_use: bool,
}

#[derive(Debug)]
struct Layer {
    policy: ExpertCache,
    /// Position of the first slot; the others follow.
    first: usize,
}

/// The slots of all layers with experts, in the order of the layers.
#[derive(Debug, Default)]
pub(super) struct Cache {
    layers: Vec<Layer>,
    pub slots: Vec<Slot>,
}

impl Cache {
    /// Divides `budget` bytes among layers, given their experts and the bytes of a slot, 0 if the
    /// experts are not in host memory. Makes empty slots, one behind the other from an offset.
    /// Without a slot, there are no layers. Returns a description, too.
    pub fn new(
        layers: &[(u32, u64)],
        budget: u64,
        mut offset: u64,
        half_life: u32,
    ) -> (Cache, String) {
        let budget_of = |&(experts, slot_bytes): &(u32, u64)| LayerBudget {
            slot_bytes,
            experts: if slot_bytes > 0 { experts } else { 0 },
            gains: None,
        };
        let budgets: Vec<_> = layers.iter().map(budget_of).collect();
        let shares = share(budget, 0, &budgets).unwrap_or_default();
        let mut cache = Cache::default();
        for (layer, (&(experts, bytes), slots)) in layers.iter().zip(shares).enumerate() {
            cache.layers.push(Layer {
                policy: ExpertCache::new(experts, slots, half_life),
                first: cache.slots.len(),
            });
            for _ in 0..slots {
                cache.slots.push(Slot {
                    layer,
                    offset,
                    bytes,
                    expert: 0,
                    generation: 0,
                    copy: TransferId::default(),
                    in_use: false,
                });
                offset += bytes;
            }
        }
        let experts: u64 = layers.iter().map(|layer| u64::from(layer.0)).sum();
        let (bytes, slots) = (cache.bytes(), cache.slots.len());
        let text = match (slots, budget) {
            (0, 0) => String::new(),
            (0, _) => format!("no cache: {budget} bytes are less than an expert; "),
            _ => format!("cache of {bytes} bytes for {slots} of {experts} experts; "),
        };
        if slots == 0 {
            cache.layers.clear();
        }
        (cache, text)
    }

    /// Returns the bytes of all slots.
    pub fn bytes(&self) -> u64 {
        self.slots.iter().map(|slot| slot.bytes).sum()
    }

    /// Returns the number of slots of the layer with the most.
    pub fn most_slots(&self) -> usize {
        let slots = self.layers.iter().map(|layer| layer.policy.slots());
        slots.max().unwrap_or(0)
    }

    /// Returns the number of slots of a layer.
    pub fn slots_of(&self, layer: usize) -> usize {
        let layer = self.layers.get(layer);
        layer.map_or(0, |layer| layer.policy.slots())
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
    pub fn find(&mut self, layer: usize, expert: u32, generation: u64) -> Option<usize> {
        let Layer { policy, first } = self.layers.get_mut(layer)?;
        let slot = *first + policy.slot(expert)? as usize;
        if self.slots[slot].generation != generation {
            policy.forget(expert);
            return None;
        }
        Some(slot)
    }

    /// Gives an expert of so many bytes a free slot or, if it `replaces` another, the slot of one
    /// that is not in use. Returns the slot, and whether an expert lost it; `None` if there is no
    /// such slot.
    pub fn load(
        &mut self,
        layer: usize,
        expert: u32,
        bytes: u64,
        replaces: impl Fn(u32) -> bool,
    ) -> Option<(usize, bool)> {
        let Layer { policy, first } = self.layers.get_mut(layer)?;
        let slots = &self.slots[*first..];
        let in_use = |slot: u32, held: Option<u32>| {
            let slot = slots[slot as usize];
            slot.in_use || slot.bytes < bytes || held.is_some_and(|held| !replaces(held))
        };
        let (slot, before) = policy.load(expert, in_use)?;
        Some((*first + slot as usize, before.is_some()))
    }

    /// Notes what a transfer copies to a slot, which is now in use.
    pub fn fill(&mut self, slot: usize, expert: u32, generation: u64, copy: TransferId) {
        self.slots[slot] = Slot {
            expert,
            generation,
            copy,
            in_use: true,
            ..self.slots[slot]
        };
    }

    /// Forgets what a transfer copied to a slot, unless another transfer has filled it since.
    pub fn forget(&mut self, slot: usize, copy: TransferId) {
        let found = self.slots[slot];
        let Layer { policy, first } = &mut self.layers[found.layer];
        if found.copy == copy && policy.slot(found.expert) == Some((slot - *first) as u32) {
            policy.forget(found.expert);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_layer_that_is_not_in_host_memory_has_no_slots() {
        let divided = |bytes| {
            let (cache, _) = Cache::new(&[(16, 512), (8, 0)], bytes, 0, 1);
            let slots = cache.layers.iter().map(|layer| layer.policy.slots());
            (slots.collect::<Vec<_>>(), cache.bytes())
        };
        assert_eq!(divided(511), (vec![], 0));
        assert_eq!(divided(u64::MAX), (vec![16, 0], 16 * 512));
    }

    #[test]
    fn a_slot_has_the_last_copy_of_its_generation() {
        let (mut cache, text) = Cache::new(&[(4, 256)], 511, 1024, 1);
        assert_eq!(text, "cache of 256 bytes for 1 of 4 experts; ");
        let copy = |number| TransferId { index: 0, number };
        let (slot, evicts) = cache.load(0, 2, 256, |_| true).expect("a free slot");
        cache.fill(slot, 2, 7, copy(1));
        assert_eq!(
            (evicts, cache.slots[slot].offset, cache.slots_of(0)),
            (false, 1024, 1)
        );
        assert_eq!(cache.find(0, 2, 7), Some(slot));
        assert_eq!(cache.load(0, 3, 256, |_| true), None, "in use");
        cache.slots[slot].in_use = false;
        assert_eq!(cache.load(0, 3, 257, |_| true), None, "too large");
        assert_eq!(cache.load(0, 3, 256, |expert| expert != 2), None, "wanted");
        assert_eq!(cache.load(0, 3, 256, |_| true), Some((slot, true)));
        cache.fill(slot, 3, 0, copy(2));
        // The failure of an earlier copy does not matter.
        cache.forget(slot, copy(1));
        assert!(cache.has(0, 3) && !cache.has(0, 2));
        assert_eq!(cache.find(0, 3, 1), None, "another generation");
        assert!(!cache.has(0, 3));
        assert_eq!(
            (cache.slots_of(1), cache.find(1, 0, 0), cache.has(1, 0)),
            (0, None, false)
        );
    }
}
