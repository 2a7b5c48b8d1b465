//! Tensors that are placed together: the routed experts of a layer.
//!
//! A layer whose gate is in the memory of one device and whose down is in that of another one is
//! evaluated in more parts, each with copies. Where a device has no memory for one of them, all are in
//! host memory until it has.

use std::collections::BTreeMap;

use parking_lot::Mutex;
use sidecar_core::experts::ExpertName;

/// The groups of a model's tensors.
#[derive(Debug, Default)]
pub struct Groups {
    /// The group of each tensor: the index of its first member.
    of: Vec<usize>,
    /// Tensors that are in host memory because their device had none.
    displaced: Mutex<BTreeMap<usize, Bytes>>,
}

/// Which bytes a displaced tensor has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Bytes {
    /// Those that the program loaded, which its device has still.
    Original,
    /// Others.
    New,
}

impl Groups {
    /// Returns the groups of tensors with these names, in the order of their indices.
    pub fn of<'a>(names: impl Iterator<Item = &'a str>) -> Groups {
        let mut first = BTreeMap::new();
        let of = names.enumerate().map(|(index, name)| match layer(name) {
            Some(layer) => *first.entry(layer).or_insert(index),
            None => index,
        });
        Groups {
            of: of.collect(),
            displaced: Mutex::default(),
        }
    }

    /// Returns the group of a tensor.
    pub fn of_tensor(&self, tensor: usize) -> usize {
        self.of[tensor]
    }

    /// Returns the tensors of a group.
    pub fn members(&self, group: usize) -> impl Iterator<Item = usize> {
        let all = self.of.iter().enumerate();
        all.filter(move |(_, of)| **of == group)
            .map(|(tensor, _)| tensor)
    }

    /// Returns the tensors that are in host memory because their device had none.
    pub fn displaced(&self) -> BTreeMap<usize, Bytes> {
        self.displaced.lock().clone()
    }

    /// Returns which bytes a tensor has, if it is one of them.
    pub fn displaced_bytes(&self, tensor: usize) -> Option<Bytes> {
        self.displaced.lock().get(&tensor).copied()
    }

    /// Notes that a tensor is one of them, or is no longer.
    pub fn displace(&self, tensor: usize, bytes: Option<Bytes>) {
        let mut displaced = self.displaced.lock();
        match bytes {
            Some(bytes) => displaced.insert(tensor, bytes),
            None => displaced.remove(&tensor),
        };
    }
}

/// Returns the layer whose routed experts a tensor belongs to: matrices, biases and scales.
fn layer(name: &str) -> Option<u32> {
    if let Some(name) = ExpertName::parse(name) {
        return Some(name.layer);
    }
    let (layer, rest) = name.strip_prefix("blk.")?.split_once('.')?;
    let is_of_experts = rest.starts_with("ffn_") && rest.contains("_exps.");
    layer.parse().ok().filter(|_| is_of_experts)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn experts_of_a_layer_are_a_group() {
        let groups = Groups::of(
            [
                "token_embd.weight",
                "blk.0.ffn_gate_exps.weight",
                "blk.0.ffn_gate_inp.weight",
                "blk.0.ffn_down_exps.bias",
                "blk.1.ffn_down_exps.weight",
                "blk.0.ffn_down.3.weight",
                "blk.0.ffn_down_shexp.weight",
            ]
            .into_iter(),
        );
        assert_eq!(groups.of, [0, 1, 2, 1, 4, 1, 6]);
        assert_eq!(groups.members(1).collect::<Vec<_>>(), [1, 3, 5]);
        groups.displace(3, Some(Bytes::Original));
        assert_eq!(groups.displaced_bytes(3), Some(Bytes::Original));
        groups.displace(3, None);
        assert!(groups.displaced().is_empty());
    }
}
