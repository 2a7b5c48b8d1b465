//! What there is to fetch: the down-projections of the routed experts.

use std::collections::BTreeMap;

use crate::device::ALIGNMENT;
use crate::experts::{ExpertName, Projection};
use crate::model::{HOST, Layout, Model, TensorView};
use crate::trace::About;

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
    tensors: Tensors,
}

#[derive(Debug)]
enum Tensors {
    /// All experts in one, one after the other.
    Merged(usize),
    /// A tensor for each; not every expert need have one.
    Single(Vec<Option<usize>>),
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
}

impl Plan {
    /// Reads the names of a model's tensors. `active` is how many experts a token uses, 0
    /// for what the file says.
    pub fn of(model: &Model, active: u32) -> Plan {
        let mut merged = BTreeMap::new();
        let mut single: BTreeMap<u32, Vec<Option<usize>>> = BTreeMap::new();
        for index in 0..model.tensor_count() {
            let name = model.name(index).to_string_lossy();
            let Some(name) = ExpertName::parse(&name) else {
                continue;
            };
            let count = name.count(&model.tensor(index).ne());
            match name.expert {
                _ if name.projection != Projection::Down || count == 0 => {}
                None => drop(merged.insert(name.layer, (index, count))),
                Some(expert) => {
                    let all = single.entry(name.layer).or_default();
                    all.resize(all.len().max(count as usize), None);
                    all[expert as usize] = Some(index);
                }
            }
        }
        let mut found: BTreeMap<u32, (u32, Tensors)> = single
            .into_iter()
            .map(|(layer, all)| (layer, (all.len() as u32, Tensors::Single(all))))
            .collect();
        for (layer, (index, count)) in merged {
            found.insert(layer, (count, Tensors::Merged(index)));
        }
        let mut plan = Plan {
            active: match active {
                0 => About::of(model.gguf_files()).experts_used,
                active => u64::from(active),
            },
            ..Plan::default()
        };
        if plan.active == 0 {
            plan.active = USUAL_ACTIVE;
        }
        plan.active = plan.active.min(MOST_ACTIVE);
        for (layer, (experts, tensors)) in found {
            plan.layers.push(PlannedLayer {
                layer,
                first_cell: plan.cells,
                experts,
                tensors,
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

    /// The layer whose down-projections a tensor holds.
    pub fn layer_of(&self, tensor: usize) -> Option<u32> {
        let holds = |layer: &&PlannedLayer| match &layer.tensors {
            Tensors::Merged(index) => *index == tensor,
            Tensors::Single(all) => all.contains(&Some(tensor)),
        };
        Some(self.layers.iter().find(holds)?.layer)
    }

    /// Device memory that the active experts of the largest layer need, and the smallest
    /// expert of all.
    pub fn sizes(&self, model: &Model) -> (u64, u64) {
        let (mut largest, mut smallest) = (0, u64::MAX);
        for layer in &self.layers {
            let mut sizes: Vec<u64> = match &layer.tensors {
                Tensors::Merged(_) => {
                    let size = layer.slice(model, 0).map(|slice| slice.nbytes);
                    vec![size.unwrap_or(0); layer.experts.min(self.active as u32) as usize]
                }
                Tensors::Single(_) => (0..layer.experts)
                    .filter_map(|expert| Some(layer.slice(model, expert)?.nbytes))
                    .collect(),
            };
            sizes.sort_unstable_by(|a, b| b.cmp(a));
            sizes.truncate(self.active as usize);
            smallest = smallest.min(sizes.iter().copied().min().unwrap_or(u64::MAX));
            largest = largest.max(sizes.iter().map(|&size| padded(size)).sum());
        }
        (largest, smallest)
    }

    /// Every tensor that holds down-projections.
    pub fn tensors(&self) -> impl Iterator<Item = usize> {
        self.layers.iter().flat_map(|layer| {
            let (merged, single) = match &layer.tensors {
                Tensors::Merged(index) => (Some(*index), [].as_slice()),
                Tensors::Single(all) => (None, all.as_slice()),
            };
            merged.into_iter().chain(single.iter().flatten().copied())
        })
    }
}

impl PlannedLayer {
    /// The bytes of an expert, as they are now.
    pub fn slice(&self, model: &Model, expert: u32) -> Option<Slice> {
        let index = match &self.tensors {
            Tensors::Merged(index) if expert < self.experts => *index,
            Tensors::Merged(_) => return None,
            Tensors::Single(all) => (*all.get(expert as usize)?)?,
        };
        let view = model.tensor(index);
        Some(match &self.tensors {
            Tensors::Merged(_) => {
                let nbytes = view.nbytes() / u64::from(self.experts);
                Slice {
                    tensor: index,
                    offset: u64::from(expert) * nbytes,
                    nbytes,
                    view,
                }
            }
            Tensors::Single(_) => Slice {
                tensor: index,
                offset: 0,
                nbytes: view.nbytes(),
                view,
            },
        })
    }

    /// Whether experts follow each other in memory.
    pub fn is_merged(&self) -> bool {
        matches!(self.tensors, Tensors::Merged(_))
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
