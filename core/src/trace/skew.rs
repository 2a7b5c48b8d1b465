//! Statistics of how unevenly experts are used.

use super::formats::ranking;
use super::snapshot::{LayerCounts, Snapshot};

/// Statistics of one layer.
#[derive(Debug, Clone, PartialEq)]
pub struct LayerStats {
    /// Entropy of the activations, divided by the entropy of even use: 1 is even use, 0 is
    /// use of a single expert. 1 for a layer of one expert.
    pub evenness: f64,
    /// Share of the activations that fall on the `used` most used experts, where `used` is
    /// the number of experts per token. Even use gives `used / experts`.
    pub top_share: f64,
    /// Experts that were never used.
    pub unused: usize,
}

impl LayerStats {
    /// Computes the statistics of a layer that uses `used` experts per token.
    pub fn of(layer: &LayerCounts, used: u64) -> LayerStats {
        let all = layer.activations() as f64;
        let shares = layer.experts.iter().filter(|&&count| count > 0);
        let entropy: f64 = shares
            .map(|&count| {
                let share = count as f64 / all;
                -share * share.ln()
            })
            .sum();
        let even = (layer.experts.len() as f64).ln();
        LayerStats {
            evenness: if even > 0.0 { entropy / even } else { 1.0 },
            top_share: coverage(&layer.experts)
                .get((used as usize).max(1) - 1)
                .copied()
                .unwrap_or(0.0),
            unused: layer.experts.iter().filter(|&&count| count == 0).count(),
        }
    }
}

/// Returns the share of the activations that fall on the 1, 2, 3, … most used experts; zeros
/// without activations.
pub fn coverage(counts: &[u64]) -> Vec<f64> {
    let mut counts = counts.to_vec();
    counts.sort_unstable_by(|a, b| b.cmp(a));
    let all = counts.iter().sum::<u64>().max(1) as f64;
    let mut sum = 0;
    let share = |&count: &u64| {
        sum += count;
        sum as f64 / all
    };
    counts.iter().map(share).collect()
}

/// Returns how many (layer, expert) pairs cover a share of the activations of every layer,
/// the most used experts first: the size of a cache with that hit rate.
pub fn experts_for(snapshot: &Snapshot, share: f64) -> usize {
    let needed = |layer: &LayerCounts| match layer.activations() {
        0 => 0,
        _ => {
            let covered = coverage(&layer.experts);
            1 + covered
                .iter()
                .take_while(|&&sum| sum < share - 1e-12)
                .count()
        }
    };
    snapshot.layers.iter().map(needed).sum()
}

/// Returns the share of the `hot` most used experts of one layer that are also among the `hot` most
/// used of another.
pub fn overlap(a: &LayerCounts, b: &LayerCounts, hot: usize) -> f64 {
    let (a, b) = (ranking(a), ranking(b));
    let hot = hot.clamp(1, a.len().min(b.len()).max(1));
    let (a, b) = (&a[..hot.min(a.len())], &b[..hot.min(b.len())]);
    a.iter().filter(|expert| b.contains(expert)).count() as f64 / hot as f64
}

/// Returns the Jensen-Shannon divergence of the use of two layers, to base 2: 0 for equal shares, 1
/// for use of different experts; 0 if a layer was not used.
pub fn divergence(a: &LayerCounts, b: &LayerCounts) -> f64 {
    let (all_a, all_b) = (a.activations() as f64, b.activations() as f64);
    if all_a == 0.0 || all_b == 0.0 {
        return 0.0;
    }
    let share = |layer: &LayerCounts, all: f64, expert: usize| {
        layer
            .experts
            .get(expert)
            .map_or(0.0, |&count| count as f64 / all)
    };
    let bits = |share: f64, mean: f64| match share {
        0.0 => 0.0,
        share => share * (share / mean).log2(),
    };
    let of_expert = |expert| {
        let (a, b) = (share(a, all_a, expert), share(b, all_b, expert));
        let mean = (a + b) / 2.0;
        (bits(a, mean) + bits(b, mean)) / 2.0
    };
    let experts = a.experts.len().max(b.experts.len());
    (0..experts).map(of_expert).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn layer(experts: &[u64]) -> LayerCounts {
        LayerCounts {
            layer: 0,
            tokens: 1,
            experts: experts.to_vec(),
            locality: None,
        }
    }

    #[test]
    fn even_use_and_a_single_expert() {
        let even = LayerStats::of(&layer(&[5; 8]), 2);
        assert!((even.evenness - 1.0).abs() < 1e-12);
        assert!((even.top_share - 0.25).abs() < 1e-12);
        let single = LayerStats::of(&layer(&[0, 9, 0, 0]), 1);
        assert_eq!(
            (single.evenness, single.top_share, single.unused),
            (0.0, 1.0, 3)
        );
        let nothing = LayerStats::of(&layer(&[0, 0]), 1);
        assert_eq!((nothing.evenness, nothing.top_share), (0.0, 0.0));
    }

    #[test]
    fn coverage_counts_the_most_used_first() {
        assert_eq!(coverage(&[1, 6, 0, 3]), [0.6, 0.9, 1.0, 1.0]);
        let snapshot = Snapshot {
            layers: vec![layer(&[1, 6, 0, 3]), layer(&[0, 0, 0, 0])],
            ..Snapshot::default()
        };
        let needed = [0.5, 0.9, 0.99].map(|share| experts_for(&snapshot, share));
        assert_eq!(needed, [1, 2, 3]);
    }

    #[test]
    fn equal_and_different_use() {
        let (a, b) = (layer(&[6, 2, 0, 0]), layer(&[3, 1, 0, 0]));
        assert_eq!((overlap(&a, &b, 2), divergence(&a, &b)), (1.0, 0.0));
        let other = layer(&[0, 0, 5, 5]);
        assert_eq!((overlap(&a, &other, 2), divergence(&a, &other)), (0.0, 1.0));
        assert_eq!(overlap(&a, &layer(&[1, 0, 9, 0]), 2), 0.5);
        // Half of one and all of the other, by hand.
        let (even, single) = (layer(&[1, 1]), layer(&[7, 0]));
        let expected =
            (0.5 * (0.5f64 / 0.75).log2() + 0.5 * 2f64.log2() + (1.0f64 / 0.75).log2()) / 2.0;
        assert!((divergence(&even, &single) - expected).abs() < 1e-12);
        assert_eq!(divergence(&even, &layer(&[0, 0])), 0.0);
        assert_eq!(overlap(&layer(&[]), &even, 3), 0.0);
    }
}
