//! Sums of the counters at one moment.

use std::time::Duration;

use super::locality::Locality;

/// Counts at one moment.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Snapshot {
    /// Layers by ascending number.
    pub layers: Vec<LayerCounts>,
    /// Ids that are no experts of their layer.
    pub rejected: u64,
    /// Time since the trace was made or reset.
    pub time: Duration,
}

/// Counts of one layer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LayerCounts {
    /// Number of the layer.
    pub layer: u32,
    /// Tokens that were routed.
    pub tokens: u64,
    /// Activations of each expert.
    pub experts: Vec<u64>,
    /// Locality, if it was recorded.
    pub locality: Option<Locality>,
}

impl LayerCounts {
    /// Returns the activations of all experts.
    pub fn activations(&self) -> u64 {
        self.experts.iter().sum()
    }
}

impl Snapshot {
    /// Returns the activations of all layers.
    pub fn activations(&self) -> u64 {
        self.layers.iter().map(LayerCounts::activations).sum()
    }

    /// Returns the tokens of the layer that routed most. Layers differ: of a prompt, the last
    /// layers compute only the tokens whose logits are used.
    pub fn tokens(&self) -> u64 {
        let tokens = self.layers.iter().map(|layer| layer.tokens);
        tokens.max().unwrap_or(0)
    }

    /// Returns the activations of each expert in all layers.
    pub fn by_expert(&self) -> Vec<u64> {
        let mut sums = Vec::new();
        for layer in &self.layers {
            sums.resize(sums.len().max(layer.experts.len()), 0);
            for (sum, count) in sums.iter_mut().zip(&layer.experts) {
                *sum += count;
            }
        }
        sums
    }

    /// Adds the counts of another run of the same model.
    pub fn merge(&mut self, other: &Snapshot) {
        for layer in &other.layers {
            match self.layers.binary_search_by_key(&layer.layer, |l| l.layer) {
                Err(at) => self.layers.insert(at, layer.clone()),
                Ok(at) => {
                    let mine = &mut self.layers[at];
                    mine.tokens += layer.tokens;
                    let len = mine.experts.len().max(layer.experts.len());
                    mine.experts.resize(len, 0);
                    for (mine, other) in mine.experts.iter_mut().zip(&layer.experts) {
                        *mine += other;
                    }
                    // A sum with a part that is not known is not known.
                    mine.locality = match (mine.locality.take(), &layer.locality) {
                        (Some(mut mine), Some(other)) => {
                            mine.merge(other);
                            Some(mine)
                        }
                        _ => None,
                    };
                }
            }
        }
        self.rejected += other.rejected;
        self.time += other.time;
    }
}
