//! Memory for slots, divided among the layers of a model.

/// A layer that shares memory for slots with others.
#[derive(Debug, Clone)]
pub struct LayerBudget {
    /// Bytes of a slot.
    pub slot_bytes: u64,
    /// The number of experts.
    pub experts: u32,
    /// How many uses each further slot makes hits, if that is known.
    pub gains: Option<Vec<u64>>,
}

/// Divides memory among the layers of a model. Returns the slots of each layer: where all gains
/// are known, further slots are where they gain most; else each layer has slots for the same share
/// of its experts. What is left is for layers in turn to which a further slot fits. `None` where
/// the memory does not hold `least` slots of each layer.
///
/// ```
/// use sidecar_core::fetch::{LayerBudget, share};
///
/// let layer = |gains: &[u64]| LayerBudget { slot_bytes: 10, experts: 4, gains: Some(gains.to_vec()) };
/// let unknown = LayerBudget { gains: None, ..layer(&[]) };
/// assert_eq!(share(75, 1, &[unknown.clone(), unknown]), Some(vec![4, 3]));
/// // The first layer uses few experts, the second all of them.
/// let layers = [layer(&[90, 5, 3, 2]), layer(&[30, 25, 25, 20])];
/// assert_eq!(share(65, 1, &layers), Some(vec![2, 4]));
/// assert_eq!(share(15, 1, &layers), None);
/// ```
pub fn share(memory: u64, least: u32, layers: &[LayerBudget]) -> Option<Vec<u32>> {
    let least_of = |layer: &LayerBudget| least.min(layer.experts);
    let mut slots: Vec<u32> = layers.iter().map(least_of).collect();
    let needed = layers
        .iter()
        .zip(&slots)
        .try_fold(0u64, |sum, (layer, &slots)| {
            sum.checked_add(layer.slot_bytes.checked_mul(slots.into())?)
        })?;
    let mut left = memory.checked_sub(needed)?;
    let gains_are_known = layers.iter().all(|layer| layer.gains.is_some());
    let mut steps = Vec::new();
    for (at, layer) in layers.iter().enumerate() {
        let gains = layer.gains.as_deref().filter(|_| gains_are_known);
        let of_layer = envelope(gains.unwrap_or_default(), slots[at], layer.experts);
        steps.extend(of_layer.map(|step| (step, at)));
    }
    // Equal gains go round the layers, by the share of their experts.
    let share =
        |&(ref step, at): &(Step, usize)| f64::from(step.from) / f64::from(layers[at].experts);
    steps.sort_by(|a, b| {
        let order = b.0.gain.total_cmp(&a.0.gain);
        order.then(share(a).total_cmp(&share(b)))
    });
    for (step, at) in steps {
        let slot = layers[at].slot_bytes;
        let fit = left.checked_div(slot).unwrap_or(u64::MAX);
        let more = fit.min(step.slots.into()) as u32;
        left -= slot * u64::from(more);
        slots[at] += more;
    }
    Some(slots)
}

/// Slots of a layer that gain together.
struct Step {
    /// What each of them gains on average.
    gain: f64,
    /// The number of slots before them.
    from: u32,
    slots: u32,
}

/// Returns the slots from `least` to `experts` in steps of descending gain: slots that gain less
/// than those after them come together with them.
fn envelope(gains: &[u64], least: u32, experts: u32) -> impl Iterator<Item = Step> {
    let mut steps: Vec<Step> = Vec::new();
    for from in least..experts {
        let gain = gains.get(from as usize).copied().unwrap_or(0) as f64;
        let mut step = Step {
            gain,
            from,
            slots: 1,
        };
        while let Some(before) = steps.pop_if(|before| before.gain < step.gain) {
            let sum = before.gain * f64::from(before.slots) + step.gain * f64::from(step.slots);
            step.slots += before.slots;
            step.from = before.from;
            step.gain = sum / f64::from(step.slots);
        }
        steps.push(step);
    }
    steps.into_iter()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// No other division of the same memory has more hits with descending gains.
    #[test]
    fn memory_goes_where_it_gains_most() {
        let layers = [[9, 7, 3, 1], [8, 2, 2, 2], [5, 5, 5, 0]].map(|gains| LayerBudget {
            slot_bytes: 1,
            experts: 4,
            gains: Some(gains.to_vec()),
        });
        for memory in 3..=12u64 {
            let slots = share(memory, 1, &layers).expect("one each");
            let gain = |slots: &[u32]| -> u64 {
                let of_layer = |(layer, &slots): (&LayerBudget, &u32)| {
                    let gains = layer.gains.as_ref().expect("known");
                    gains[..slots as usize].iter().sum::<u64>()
                };
                layers.iter().zip(slots).map(of_layer).sum()
            };
            let mut best = 0;
            for all in 0..64u32 {
                let other = [all % 4 + 1, all / 4 % 4 + 1, all / 16 + 1];
                if u64::from(other.iter().sum::<u32>()) <= memory {
                    best = best.max(gain(&other));
                }
            }
            assert_eq!(gain(&slots), best, "{memory}: {slots:?}");
        }
        // A slot that gains nothing may come before others that do.
        let dips = [[9, 0, 0, 0], [9, 0, 8, 8]].map(|gains| LayerBudget {
            slot_bytes: 10,
            experts: 4,
            gains: Some(gains.to_vec()),
        });
        assert_eq!(share(60, 1, &dips), Some(vec![2, 4]));
        assert_eq!(share(50, 1, &dips), Some(vec![1, 4]));
        // Without gains, layers have equally many.
        let nothing = [(); 3].map(|()| LayerBudget {
            slot_bytes: 10,
            experts: 8,
            gains: Some(Vec::new()),
        });
        assert_eq!(share(90, 1, &nothing), Some(vec![3, 3, 3]));
        let mut small = layers;
        small[1].experts = 1;
        small[0].gains = None;
        assert_eq!(share(u64::MAX, 2, &small), Some(vec![4, 1, 4]));
        assert_eq!(share(2, 1, &small), None);
        small[0].slot_bytes = u64::MAX;
        assert_eq!(share(u64::MAX, 1, &small), None);
    }

    /// Slots of layers without gains.
    fn divided(layers: &[(u32, u64)], memory: u64) -> Vec<u32> {
        let layer = |&(experts, slot_bytes)| LayerBudget {
            slot_bytes,
            experts,
            gains: None,
        };
        let layers: Vec<LayerBudget> = layers.iter().map(layer).collect();
        share(memory, 0, &layers).expect("no slot is enough")
    }

    #[test]
    fn layers_have_slots_for_the_same_share_of_their_experts() {
        let layers = [(16, 512), (16, 256), (6, 1024)];
        let all = 16 * 512 + 16 * 256 + 6 * 1024;
        for (memory, slots) in [
            (255, [0, 0, 0]),
            (256, [0, 1, 0]),
            (512, [1, 0, 0]),
            (all / 2, [8, 8, 3]),
            (all, [16, 16, 6]),
            (u64::MAX, [16, 16, 6]),
        ] {
            assert_eq!(divided(&layers, memory), slots, "{memory}");
        }
        assert!(divided(&[], 1).is_empty());
    }

    proptest! {
        #[test]
        fn slots_fit_into_the_memory(
            layers in prop::collection::vec((0u32..9, 1u64..9), 0..6),
            memory in 0u64..400,
        ) {
            let slots = divided(&layers, memory);
            let bytes = layers.iter().zip(&slots).map(|(layer, slots)| layer.1 * u64::from(*slots));
            let left = memory.checked_sub(bytes.sum());
            prop_assert!(left.is_some());
            for (layer, slots) in layers.iter().zip(&slots) {
                prop_assert!(*slots <= layer.0);
                // No layer could have one more.
                prop_assert!(*slots == layer.0 || left < Some(layer.1));
            }
        }
    }
}
