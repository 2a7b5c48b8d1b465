//! The layers that can be fetched, and the weights of their experts.

use crate::device::ALIGNMENT;
use crate::model::{HOST, Layout, Model, TensorView};
use sidecar_core::experts::{ExpertIndex, ExpertTensor, MAX_EXPERTS, Projection};
use sidecar_core::trace::ModelMeta;

/// Experts per token if the file does not have the number.
const DEFAULT_ACTIVE: u64 = 8;

/// The layers of a model that have routed experts.
#[derive(Debug, Default)]
pub(super) struct Plan {
    /// Ascending by number.
    pub layers: Vec<PlannedLayer>,
    /// Experts of all layers: each has a slot.
    pub slots: usize,
    /// Experts per token.
    pub active: u64,
    /// Addresses in the process of the tensors of down-projections as they were at first, ascending, each with its layer.
    addresses: Vec<(usize, u32)>,
}

/// A layer with routed experts.
#[derive(Debug)]
pub(super) struct PlannedLayer {
    /// Position in the plan.
    pub position: usize,
    /// Number in the names of tensors.
    pub layer: u32,
    /// Slot of the first expert; the others follow.
    pub first_slot: usize,
    /// Number of experts.
    pub experts: u32,
}

/// The current down-projection of an expert.
#[derive(Debug, Clone)]
pub(super) struct ExpertWeights {
    pub tensor: usize,
    /// Keeps the bytes alive and unchanged.
    pub view: TensorView,
    /// First byte in the tensor.
    pub offset: u64,
    pub nbytes: u64,
    /// Number of experts in the tensor, one after the other.
    pub parts: u32,
}

impl Plan {
    /// Plans the layers of a model. `active` is the number of experts per token; 0 for the
    /// number in the file.
    pub fn of(model: &Model, active: u32) -> Plan {
        let active = match active {
            0 => ModelMeta::of(model.gguf_files()).experts_used,
            active => u64::from(active),
        };
        let mut plan = Plan {
            active: match active {
                0 => DEFAULT_ACTIVE,
                active => active.min(u64::from(MAX_EXPERTS)),
            },
            ..Plan::default()
        };
        for (layer, experts) in model.experts().layers_with(Projection::Down) {
            plan.layers.push(PlannedLayer {
                position: plan.layers.len(),
                layer,
                first_slot: plan.slots,
                experts,
            });
            plan.slots += experts as usize;
        }
        for found in model.experts().tensors() {
            let view = model.tensor(found.tensor);
            if let (Some(layer), Some(bytes)) =
                (layer_of(model.experts(), found), model.host_bytes(&view))
            {
                plan.addresses.push((bytes.cast::<u8>() as usize, layer));
            }
        }
        plan.addresses.sort_unstable();
        plan
    }

    /// Returns the layer whose down-projections were at an address when the plan was made.
    pub fn layer_at(&self, address: usize) -> Option<u32> {
        let key = |found: &(usize, u32)| found.0;
        let at = self.addresses.binary_search_by_key(&address, key).ok()?;
        Some(self.addresses[at].1)
    }

    /// Returns a layer by its number.
    pub fn layer(&self, layer: u32) -> Option<&PlannedLayer> {
        let at = self.layers.binary_search_by_key(&layer, |l| l.layer).ok()?;
        Some(&self.layers[at])
    }

    /// Returns the layer of a slot. Panics when there is no such slot.
    pub fn layer_of_slot(&self, slot: usize) -> &PlannedLayer {
        let after = self.layers.partition_point(|l| l.first_slot <= slot);
        &self.layers[after - 1]
    }

    /// Returns the device memory that the active experts of the largest layer need, and the
    /// bytes of the smallest expert.
    pub fn sizes(&self, model: &Model) -> (u64, u64) {
        let (mut largest, mut smallest) = (0, u64::MAX);
        for layer in &self.layers {
            let experts = (0..layer.experts).filter_map(|expert| layer.weights(model, expert));
            let mut sizes: Vec<u64> = experts.map(|weights| weights.nbytes).collect();
            sizes.sort_unstable_by(|a, b| b.cmp(a));
            sizes.truncate(self.active as usize);
            smallest = smallest.min(sizes.last().copied().unwrap_or(u64::MAX));
            largest = largest.max(sizes.iter().map(|&size| padded(size)).sum());
        }
        (largest, smallest)
    }

    /// Returns the experts of each layer, and the device memory that the largest of them needs; 0
    /// if they are not in host memory.
    pub fn slot_sizes(&self, model: &Model) -> Vec<(u32, u64)> {
        let size = |layer: &PlannedLayer| {
            let experts = (0..layer.experts).filter_map(|expert| layer.weights(model, expert));
            let fetched = experts.filter(ExpertWeights::is_on_host);
            let largest = fetched.map(|weights| weights.nbytes).max();
            (layer.experts, padded(largest.unwrap_or(0)))
        };
        self.layers.iter().map(size).collect()
    }
}

/// Returns the layer whose down-projections a tensor holds.
pub(super) fn layer_of(experts: &ExpertIndex, found: &ExpertTensor) -> Option<u32> {
    let (layer, expert) = (found.name.layer, found.range().start);
    let slice = experts.slice(layer, Projection::Down, expert)?;
    (slice.tensor == found.tensor).then_some(layer)
}

impl PlannedLayer {
    /// Returns the slot of an expert; `None` when the layer does not have the expert.
    pub fn slot(&self, expert: u32) -> Option<usize> {
        (expert < self.experts).then(|| self.first_slot + expert as usize)
    }

    /// Returns the current weights of an expert.
    pub fn weights(&self, model: &Model, expert: u32) -> Option<ExpertWeights> {
        let experts = model.experts();
        let slice = experts.slice(self.layer, Projection::Down, expert)?;
        let view = model.tensor(slice.tensor);
        let bytes = slice.within(view.nbytes());
        Some(ExpertWeights {
            tensor: slice.tensor,
            offset: bytes.start,
            nbytes: bytes.end - bytes.start,
            parts: slice.parts,
            view,
        })
    }
}

impl ExpertWeights {
    /// Returns the address in the process of the expert that is `row` experts further in the
    /// same tensor; `None` when the bytes cannot be read there without a copy.
    pub fn host(&self, model: &Model, row: u32) -> Option<*const u8> {
        let offset = self.offset + u64::from(row) * self.nbytes;
        let whole = model.host_bytes(&self.view)?;
        Some(whole.cast::<u8>().wrapping_add(offset as usize))
    }

    /// Returns whether the bytes are in the memory of the process, or in a file.
    pub fn is_on_host(&self) -> bool {
        matches!(self.view.layout(), None | Some(Layout::Whole(HOST)))
    }
}

/// Returns the bytes that an expert takes in the scratchpad.
pub(super) fn padded(nbytes: u64) -> u64 {
    nbytes.div_ceil(ALIGNMENT).saturating_mul(ALIGNMENT)
}
