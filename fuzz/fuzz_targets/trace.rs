//! Reads any bytes as an expert trace in JSON, and makes each text and figure of it.
#![cfg_attr(fuzzing, no_main)]

use sidecar_core::files::kind_of;
use sidecar_core::trace::{
    LayerStats, coverage, divergence, experts_for, from_json, hits, hottest, overlap, ranking,
    to_activations, to_csv, to_json, to_logical_count, to_ranked_csv, to_rankings, to_text,
};

#[cfg(fuzzing)]
libfuzzer_sys::fuzz_target!(|bytes: &[u8]| check(bytes));

/// Panics where the library contradicts itself.
pub fn check(bytes: &[u8]) {
    kind_of(bytes);
    let Ok(json) = serde_json::from_slice(bytes) else {
        return;
    };
    let Ok((about, counts)) = from_json(&json) else {
        return;
    };
    let written = to_json(&about, &counts);
    assert!(kind_of(written.to_string().as_bytes()).is_some());
    let (again, read) = from_json(&written).expect("it was written");
    assert_eq!((&again, &read.layers), (&about, &counts.layers));
    to_text(&about, &counts, true, Some(3));
    let lines: usize = counts.layers.iter().map(|layer| layer.experts.len()).sum();
    assert_eq!(to_csv(&counts).lines().count(), lines + 1);
    let _ = to_logical_count(&counts);
    to_rankings(&counts);
    to_ranked_csv(&counts);
    to_activations(&counts);
    for share in [0.0, 0.5, 1.0] {
        assert!(experts_for(&counts, share) <= lines);
    }
    for layer in &counts.layers {
        LayerStats::of(layer, about.experts_used);
        coverage(&layer.experts);
        assert_eq!(ranking(layer).len(), layer.experts.len());
        assert!(hottest(layer).count() <= layer.experts.len());
        overlap(layer, layer, layer.experts.len() / 4);
        divergence(layer, layer);
        if let Some(locality) = &layer.locality {
            for size in [0, 1, locality.lru.len(), usize::MAX] {
                hits(&locality.lru, size);
            }
        }
    }
}
