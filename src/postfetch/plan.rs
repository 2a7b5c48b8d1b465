//! What there is to fetch: the down-projections of the routed experts.

use crate::device::ALIGNMENT;
use crate::experts::{ExpertIndex, Projection};
use crate::model::{HOST, Layout, Model, TensorView};
use crate::trace::ModelMeta;

/// Experts per token where the file does not say.
const USUAL_ACTIVE: u64 = 8;
/// More than any layer has experts.
const MOST_ACTIVE: u64 = 1 << 16;

/// The layers of a model that have routed experts.
#[derive(Debug, Default)]
pub(super) struct Plan {
    pub layers: Vec<PlannedLayer>,
    /// Experts of all layers.
    pub cells: usize,
    /// Experts of a layer that are active for a token.
    pub active: u64,
}

/// A layer with routed experts.
#[derive(Debug)]
pub(super) struct PlannedLayer {
    /// Its number in the names of tensors.
    pub layer: u32,
    /// The place of its first expert among those of all layers.
    pub first_cell: usize,
    pub experts: u32,
}

/// The down-projection of an expert, at one moment.
#[derive(Debug, Clone)]
pub(super) struct Slice {
    pub tensor: usize,
    /// Keeps the bytes as they are.
    pub view: TensorView,
    /// Where in the tensor it begins.
    pub offset: u64,
    pub nbytes: u64,
    /// Experts in the tensor, one after the other.
    pub parts: u32,
}

impl Plan {
    /// Reads the names of a model's tensors. `active` is how many experts a token uses, 0
    /// for what the file says.
    pub fn of(model: &Model, active: u32) -> Plan {
        let mut plan = Plan {
            active: match active {
                0 => ModelMeta::of(model.gguf_files()).experts_used,
                active => u64::from(active),
            },
            ..Plan::default()
        };
        if plan.active == 0 {
            plan.active = USUAL_ACTIVE;
        }
        plan.active = plan.active.min(MOST_ACTIVE);
        for (layer, experts) in model.experts().layers_with(Projection::Down) {
            plan.layers.push(PlannedLayer {
                layer,
                first_cell: plan.cells,
                experts,
            });
            plan.cells += experts as usize;
        }
        plan
    }

    /// A layer by its number in the names.
    pub fn layer(&self, layer: u32) -> Option<&PlannedLayer> {
        let at = self.layers.binary_search_by_key(&layer, |l| l.layer).ok()?;
        Some(&self.layers[at])
    }

    /// Returns the device memory that the active experts of the largest layer need, and the
    /// bytes of the smallest expert.
    pub fn sizes(&self, model: &Model) -> (u64, u64) {
        let (mut largest, mut smallest) = (0, u64::MAX);
        for layer in &self.layers {
            let slices = (0..layer.experts).filter_map(|expert| layer.slice(model, expert));
            let mut sizes: Vec<u64> = slices.map(|slice| slice.nbytes).collect();
            sizes.sort_unstable_by(|a, b| b.cmp(a));
            sizes.truncate(self.active as usize);
            smallest = smallest.min(sizes.last().copied().unwrap_or(u64::MAX));
            largest = largest.max(sizes.iter().map(|&size| padded(size)).sum());
        }
        (largest, smallest)
    }
}

/// Returns the layer whose down-projections a tensor holds.
pub(super) fn layer_of(experts: &ExpertIndex, tensor: usize) -> Option<u32> {
    let mut all = experts.tensors().iter();
    let name = all.find(|found| found.tensor == tensor)?.name;
    let expert = name.expert.unwrap_or(0);
    let slice = experts.slice(name.layer, Projection::Down, expert)?;
    (slice.tensor == tensor).then_some(name.layer)
}

impl PlannedLayer {
    /// Returns the current weights of an expert.
    pub fn slice(&self, model: &Model, expert: u32) -> Option<Slice> {
        let place = model
            .experts()
            .slice(self.layer, Projection::Down, expert)?;
        let view = model.tensor(place.tensor);
        let bytes = place.within(view.nbytes());
        Some(Slice {
            tensor: place.tensor,
            offset: bytes.start,
            nbytes: bytes.end - bytes.start,
            parts: place.parts,
            view,
        })
    }
}

impl Slice {
    /// Where the bytes of an expert are in the process, if they can be read there: of this
    /// one, or of one so many rows behind it.
    pub fn host(&self, model: &Model, row: u32) -> Option<*const u8> {
        let offset = self.offset + u64::from(row) * self.nbytes;
        let whole = model.host_bytes(&self.view)?;
        Some(whole.cast::<u8>().wrapping_add(offset as usize))
    }

    /// Whether its bytes are in the memory of the process, or in a file.
    pub fn is_on_host(&self) -> bool {
        matches!(self.view.layout(), None | Some(Layout::Whole(HOST)))
    }
}

/// Bytes that an expert takes in the scratchpad.
pub(super) fn padded(nbytes: u64) -> u64 {
    nbytes.div_ceil(ALIGNMENT).saturating_mul(ALIGNMENT)
}
