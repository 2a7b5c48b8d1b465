//! Assigns tensors to devices.

use regex_lite::Regex;

use super::split::{Axis, SplitUnits, common_granularity, split_bounds};
use crate::device::Device;
use sidecar_core::error::{Error, Result};
use sidecar_core::experts::{ExpertName, Projection};
use sidecar_core::gguf::TypeInfo;
use std::sync::Arc;

/// Index of the device that is the memory of the process: experts stay there on request, and
/// tensors fall back to it when another device is out of memory.
pub const HOST: usize = 0;

/// Rules that assign tensors to devices.
#[derive(Debug, Clone, Default)]
pub struct Placement {
    /// Device of tensors that no other rule assigns.
    pub device: usize,
    /// Split matrices over the devices after the first, in these proportions; empty for no
    /// split. Tensors that cannot be split go to `device`.
    pub split: Vec<f64>,
    /// Keep the routed experts in host memory, as llama.cpp's `--cpu-moe` does.
    pub cpu_moe: bool,
    /// Assign tensors whose name matches to one device; the first match counts, as with
    /// llama.cpp's `--override-tensor`.
    pub overrides: Vec<(Regex, usize)>,
}

/// The assignment of one tensor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Assignment {
    Device(usize),
    Split(Axis),
}

/// The devices that hold the parts of a tensor. Tensors of equal layouts need no copy.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Layout {
    /// One part, on this device.
    Whole(usize),
    /// Split along an axis: part *i*, on device *i* + 1, holds units
    /// `bounds[i]..bounds[i + 1]`.
    Split {
        /// The axis.
        axis: Axis,
        /// First unit of each part, and the number of units at the end.
        bounds: Vec<u64>,
    },
}

impl Placement {
    /// Assigns every tensor to one device.
    pub fn on(device: usize) -> Placement {
        Placement {
            device,
            ..Placement::default()
        }
    }

    /// Checks that all devices that rules name exist.
    pub(super) fn check(&self, devices: &[Arc<dyn Device>]) -> Result<()> {
        let named = self.overrides.iter().map(|rule| rule.1);
        let split_over = (!self.split.is_empty()).then_some(self.split.len());
        let highest = named
            .chain([self.device])
            .chain(split_over)
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

    /// Returns the assignment of a tensor.
    pub(super) fn assignment(
        &self,
        name: &str,
        expert: Option<ExpertName>,
        ne: &[u64; 4],
    ) -> Assignment {
        if let Some(rule) = self.overrides.iter().find(|rule| rule.0.is_match(name)) {
            return Assignment::Device(rule.1);
        }
        if expert.is_some() && self.cpu_moe {
            return Assignment::Device(HOST);
        }
        if self.split.is_empty() || ne[1] < 2 {
            return Assignment::Device(self.device);
        }
        Assignment::Split(match expert {
            Some(ExpertName {
                projection: Projection::Down,
                ..
            }) => Axis::Columns,
            _ => Axis::Rows,
        })
    }

    /// Returns the layouts of the tensors of a group, which are split at the same bounds.
    pub(super) fn layouts(&self, members: &[GroupMember<'_>]) -> Vec<Layout> {
        let units = members.iter().filter_map(GroupMember::split_units);
        let granularity = units
            .clone()
            .fold(1, |g, of| common_granularity(g, of.granularity));
        let units = units.map(|of| of.units).max().unwrap_or(0);
        let bounds = split_bounds(units, granularity, &self.split);
        let layout = |member: &GroupMember<'_>| match member.assignment {
            Assignment::Device(device) => Layout::Whole(device),
            Assignment::Split(axis) => Layout::Split {
                axis,
                bounds: bounds.clone(),
            },
        };
        members.iter().map(layout).collect()
    }
}

/// A tensor of a group: the properties that layouts depend on.
#[derive(Debug, Clone, Copy)]
pub(super) struct GroupMember<'a> {
    pub assignment: Assignment,
    pub ty: &'static TypeInfo,
    pub ne: &'a [u64; 4],
    /// Rows of one slice.
    pub rows: u64,
}

impl GroupMember<'_> {
    fn split_units(&self) -> Option<SplitUnits> {
        match self.assignment {
            Assignment::Device(_) => None,
            Assignment::Split(axis) => Some(SplitUnits::new(self.ty, self.ne, self.rows, axis)),
        }
    }
}

/// Tensors that are laid out together: the routed experts of a layer, or a single tensor.
#[derive(Debug)]
pub(super) struct Group {
    pub tensors: Vec<usize>,
}

/// Returns the rows of one slice of a tensor: gate and up in one tensor are two slices.
pub(super) fn slice_rows(expert: Option<ExpertName>, ne: &[u64; 4]) -> u64 {
    match expert {
        Some(ExpertName {
            projection: Projection::GateUp,
            ..
        }) if ne[1].is_multiple_of(2) => ne[1] / 2,
        _ => ne[1],
    }
}

/// Groups tensors by their expert names and shapes: the routed experts of a layer whose hidden
/// layers have the same size are a group. Returns the groups, and the group of each tensor.
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
