//! Which device a tensor belongs on: the plan that a model is loaded by.

use regex::Regex;

use super::cut::{Axis, Cut, common_granule, share};
use crate::device::Device;
use crate::error::{Error, Result};
use crate::experts::{ExpertName, Projection};
use crate::gguf::TypeInfo;
use std::sync::Arc;

/// The device that is the memory of the process: where experts stay on request, and
/// where a layer goes that does not fit elsewhere.
pub const HOST: usize = 0;

/// Where tensors belong.
#[derive(Debug, Clone, Default)]
pub struct Placement {
    /// Device of tensors that nothing else is said about.
    pub device: usize,
    /// Cut matrices over the devices after the first, in these proportions; empty
    /// for no cutting. What cannot be cut goes to `device`.
    pub split: Vec<f64>,
    /// Keep the routed experts in host memory, as llama.cpp's `--cpu-moe` does.
    pub cpu_moe: bool,
    /// Tensors whose name matches go to a device, whole; the first match counts, as
    /// with llama.cpp's `--override-tensor`.
    pub overrides: Vec<(Regex, usize)>,
}

/// Where one tensor belongs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Target {
    Device(usize),
    Split(Axis),
}

/// Where the parts of a tensor are. Equal layouts need no copy between them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Layout {
    /// In one piece on a device.
    Whole(usize),
    /// Cut along an axis: part *i*, on device *i* + 1, has units
    /// `bounds[i]..bounds[i + 1]`.
    Split {
        /// Where it is cut.
        axis: Axis,
        /// Units before each part, and their number at the end.
        bounds: Vec<u64>,
    },
}

impl Placement {
    /// Everything on one device.
    pub fn on(device: usize) -> Placement {
        Placement {
            device,
            ..Placement::default()
        }
    }

    /// Checks that every device that is named exists.
    pub(super) fn check(&self, devices: &[Arc<dyn Device>]) -> Result<()> {
        let named = self.overrides.iter().map(|rule| rule.1);
        let cut_over = (!self.split.is_empty()).then_some(self.split.len());
        let highest = named
            .chain([self.device])
            .chain(cut_over)
            .max()
            .unwrap_or(0);
        if highest < devices.len() {
            return Ok(());
        }
        Err(Error::NotFound {
            what: "device",
            wanted: highest.to_string(),
            available: format!("there are {}, counted from 0", devices.len()),
        })
    }

    pub(super) fn target(&self, name: &str, expert: Option<ExpertName>, ne: &[u64; 4]) -> Target {
        if let Some(rule) = self.overrides.iter().find(|rule| rule.0.is_match(name)) {
            return Target::Device(rule.1);
        }
        if expert.is_some() && self.cpu_moe {
            return Target::Device(HOST);
        }
        if self.split.is_empty() || ne[1] < 2 {
            return Target::Device(self.device);
        }
        Target::Split(match expert {
            Some(ExpertName {
                projection: Projection::Down,
                ..
            }) => Axis::Columns,
            _ => Axis::Rows,
        })
    }

    /// Layouts of tensors that are cut alike, given their types.
    pub(super) fn layouts(&self, members: &[Member<'_>]) -> Vec<Layout> {
        let cuts = members.iter().filter_map(Member::cut);
        let granule = cuts
            .clone()
            .fold(1, |g, cut| common_granule(g, cut.granule));
        let units = cuts.map(|cut| cut.units).max().unwrap_or(0);
        let bounds = share(units, granule, &self.split);
        let layout = |member: &Member<'_>| match member.target {
            Target::Device(device) => Layout::Whole(device),
            Target::Split(axis) => Layout::Split {
                axis,
                bounds: bounds.clone(),
            },
        };
        members.iter().map(layout).collect()
    }
}

/// A tensor of a group, as far as layouts depend on it.
#[derive(Debug, Clone, Copy)]
pub(super) struct Member<'a> {
    pub target: Target,
    pub ty: &'static TypeInfo,
    pub ne: &'a [u64; 4],
    /// Rows of one slice.
    pub rows: u64,
}

impl Member<'_> {
    fn cut(&self) -> Option<Cut> {
        match self.target {
            Target::Device(_) => None,
            Target::Split(axis) => Some(Cut::new(self.ty, self.ne, self.rows, axis)),
        }
    }
}

/// Tensors that must be laid out together: the routed experts of a layer, or a
/// single tensor.
#[derive(Debug)]
pub(super) struct Group {
    pub tensors: Vec<usize>,
}

/// Rows of one slice of a tensor: gate and up in one tensor are two slices.
pub(super) fn slice_rows(expert: Option<ExpertName>, ne: &[u64; 4]) -> u64 {
    match expert {
        Some(ExpertName {
            projection: Projection::GateUp,
            ..
        }) if ne[1].is_multiple_of(2) => ne[1] / 2,
        _ => ne[1],
    }
}

/// Groups of tensors, given what their names say and their shapes: the routed experts
/// of a layer whose hidden layers have the same size. Returns the groups and the group
/// of each tensor.
pub(super) fn groups(
    tensors: impl Iterator<Item = (Option<ExpertName>, [u64; 4])>,
) -> (Vec<Group>, Vec<u32>) {
    let mut groups: Vec<Group> = Vec::new();
    let mut of_tensor = Vec::new();
    let mut of_layer = std::collections::HashMap::new();
    for (index, (expert, ne)) in tensors.enumerate() {
        let layer = expert.map(|name| match name.projection {
            Projection::Down => (name.layer, ne[0]),
            _ => (name.layer, slice_rows(expert, &ne)),
        });
        let group = match layer {
            Some(layer) => *of_layer.entry(layer).or_insert(groups.len()),
            None => groups.len(),
        };
        if group == groups.len() {
            groups.push(Group {
                tensors: Vec::new(),
            });
        }
        groups[group].tensors.push(index);
        of_tensor.push(group as u32);
    }
    (groups, of_tensor)
}
