//! Which experts to keep in fast memory: whole layers for a GPU, single experts for mlock.

use std::cmp::Reverse;
use std::fmt::Write;

use sidecar_core::experts::{ExpertIndex, Projection};
use sidecar_core::gguf::GgufFile;
use sidecar_core::text;
use sidecar_core::trace::{LayerCounts, coverage, hits};

use crate::report::traces::TraceReport;
use crate::sizes::{percent, size_text};

/// The name of an expert tensor behind the number of its layer, as a regular expression.
const TENSORS: &str = r"\.ffn_(gate|up|gate_up|down)_exps\.";

/// Experts of a model that have a share of the bytes.
pub struct Pinned {
    /// The bytes of all experts.
    all_bytes: u64,
    share: f64,
    /// Layers, ascending, and the bytes of their experts.
    layers: Vec<u32>,
    layer_bytes: u64,
    /// The other layers with experts, ascending.
    other_layers: Vec<u32>,
    /// Layer and expert, ascending.
    experts: Vec<(u32, u32)>,
    all_experts: usize,
    /// The share of the activations that these experts have.
    activations: f64,
}

impl Pinned {
    /// Chooses layers and experts of at most a share of the bytes; `None` if the bytes of experts
    /// are not known.
    pub fn choose(traced: &TraceReport, share: f64) -> Option<Pinned> {
        let layers = &traced.counts.layers;
        let bytes = |layer: &LayerCounts| traced.about.expert_bytes.get(&layer.layer).copied();
        let of_layer = |layer: &LayerCounts| Some(bytes(layer)? * layer.experts.len() as u64);
        let all_bytes: u64 = layers.iter().map(of_layer).sum::<Option<_>>()?;
        let budget = (all_bytes as f64 * share) as u64;

        // What a cache would miss for each byte of the layer: both grow with the bytes of an expert.
        let mut by_misses: Vec<&LayerCounts> = layers.iter().collect();
        by_misses.sort_by_key(|layer| {
            let misses = misses(layer, share) as u128 * 1_000_000;
            Reverse(misses / layer.experts.len().max(1) as u128)
        });
        let mut pinned = Pinned {
            all_bytes,
            share,
            layers: Vec::new(),
            layer_bytes: 0,
            other_layers: Vec::new(),
            experts: Vec::new(),
            all_experts: layers.iter().map(|layer| layer.experts.len()).sum(),
            activations: 0.0,
        };
        for layer in by_misses {
            let bytes = of_layer(layer)?;
            if pinned.layer_bytes + bytes <= budget {
                pinned.layer_bytes += bytes;
                pinned.layers.push(layer.layer);
            } else {
                pinned.other_layers.push(layer.layer);
            }
        }
        pinned.layers.sort_unstable();
        pinned.other_layers.sort_unstable();

        let mut by_use: Vec<(f64, u64, u64, u32, u32)> = Vec::new();
        for layer in layers {
            let bytes = bytes(layer)?;
            for (expert, &count) in layer.experts.iter().enumerate().filter(|of| *of.1 > 0) {
                let worth = count as f64 / bytes.max(1) as f64;
                by_use.push((worth, count, bytes, layer.layer, expert as u32));
            }
        }
        by_use.sort_by(|a, b| b.0.total_cmp(&a.0));
        let (mut taken, mut used) = (0, 0);
        for (_, count, bytes, layer, expert) in by_use {
            if taken + bytes <= budget {
                taken += bytes;
                used += count;
                pinned.experts.push((layer, expert));
            }
        }
        pinned.experts.sort_unstable();
        pinned.activations = used as f64 / traced.counts.activations() as f64;
        Some(pinned)
    }

    /// Returns the choice as text.
    pub fn as_text(&self) -> String {
        let mut text = format!(
            "{} of {} of experts\n\nwhole layers, those that a cache of {0} of a layer would miss most: {} of {} layers, {}\n",
            percent(self.share),
            size_text(self.all_bytes as f64),
            self.layers.len(),
            self.layers.len() + self.other_layers.len(),
            size_text(self.layer_bytes as f64),
        );
        if !self.layers.is_empty() {
            let _ = writeln!(text, "  their tensors: {}", pattern(&self.layers));
        }
        if !self.other_layers.is_empty() {
            let others = pattern(&self.other_layers);
            let _ = writeln!(
                text,
                "  the other layers on the CPU: --override-tensor '{others}=CPU'"
            );
        }
        let _ = writeln!(
            text,
            "\nsingle experts, those used most: {} of {}, {} of the activations",
            self.experts.len(),
            self.all_experts,
            percent(self.activations),
        );
        text
    }

    /// Returns the byte ranges of the single experts in the files of the model, as CSV.
    pub fn as_ranges(&self, files: &[GgufFile]) -> String {
        let index = ExpertIndex::of(files);
        let slices = self.experts.iter().flat_map(|&(layer, expert)| {
            let matrices = Projection::ALL.into_iter();
            let slices = matrices.filter_map(|matrix| index.slice(layer, matrix, expert));
            slices
                .map(move |slice| (slice.file, slice.offset, slice.nbytes, layer, expert))
                .collect::<Vec<_>>()
        });
        let mut slices: Vec<_> = slices.collect();
        slices.sort_unstable();
        let mut text = String::from("offset,bytes,layer,expert,file\n");
        for (file, offset, bytes, layer, expert) in slices {
            let path = text::csv(&files[file].source.path().to_string_lossy());
            let _ = writeln!(text, "{offset},{bytes},{layer},{expert},{path}");
        }
        text
    }
}

/// Returns the uses that an LRU of a share of the experts misses; without locality, the activations
/// of the other experts.
fn misses(layer: &LayerCounts, share: f64) -> u64 {
    let size = (layer.experts.len() as f64 * share) as usize;
    match &layer.locality {
        Some(locality) => locality.uses() - hits(&locality.lru, size),
        None => {
            let covered = size
                .checked_sub(1)
                .map_or(0.0, |at| coverage(&layer.experts)[at]);
            (layer.activations() as f64 * (1.0 - covered)) as u64
        }
    }
}

/// Returns a regular expression for the expert tensors of some layers.
fn pattern(layers: &[u32]) -> String {
    let numbers: Vec<String> = layers.iter().map(u32::to_string).collect();
    format!(r"^blk\.({}){TENSORS}", numbers.join("|"))
}

#[cfg(test)]
mod tests {
    use regex::Regex;

    use super::*;
    use crate::report::traces::sample_routes;

    #[test]
    fn the_pattern_matches_the_experts_of_its_layers_only() {
        let pattern = Regex::new(&pattern(&[1, 12])).expect("valid");
        for name in ["blk.1.ffn_gate_up_exps.weight", "blk.12.ffn_down_exps.bias"] {
            assert!(pattern.is_match(name), "{name}");
        }
        for name in [
            "blk.2.ffn_up_exps.weight",
            "blk.11.ffn_up_exps.weight",
            "blk.121.ffn_up_exps.weight",
            "blk.1.ffn_up_shexp.weight",
            "blk.1.attn_q.weight",
        ] {
            assert!(!pattern.is_match(name), "{name}");
        }
    }

    #[test]
    fn layers_that_miss_and_experts_that_are_used_are_chosen() {
        // Layer 1 always uses the same two of four experts; layer 2 all of them in turn.
        let mut traced = sample_routes(4, &[(1, 100), (2, 100)], &[[0, 1]; 6]);
        let other = sample_routes(4, &[(1, 100), (2, 100)], &[[0, 1], [2, 3], [0, 1], [2, 3]]);
        traced.counts.layers[1] = other.counts.layers[1].clone();
        let pinned = Pinned::choose(&traced, 0.5).expect("bytes are known");
        assert_eq!(
            (&pinned.layers[..], &pinned.other_layers[..]),
            (&[2][..], &[1][..])
        );
        assert_eq!(pinned.layer_bytes, 400);
        assert_eq!(pinned.experts, [(1, 0), (1, 1), (2, 0), (2, 1)]);
        assert_eq!(pinned.activations, 16.0 / 20.0);
        let text = pinned.as_text();
        let option = r"--override-tensor '^blk\.(1)\.ffn_(gate|up|gate_up|down)_exps\.=CPU'";
        assert!(text.contains(option), "{text}");
        // Without locality: the two most used experts of layer 1 cover all its activations.
        for layer in &mut traced.counts.layers {
            layer.locality = None;
        }
        assert_eq!(Pinned::choose(&traced, 0.5).expect("bytes").layers, [2]);
        traced.about.expert_bytes.clear();
        assert!(Pinned::choose(&traced, 0.5).is_none());
    }
}
