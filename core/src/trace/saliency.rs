//! Saliency of experts for pruning: gate weight times norm of the expert's output, on average.
//!
//! The measure is that of REAP: for each expert, the mean over the tokens that are routed to it
//! of the gate weight times the L2 norm of the expert's output. The experts with the least
//! saliency contribute least to the output of their layer.

use parking_lot::Mutex;
use serde_json::{Value, json};

use super::{ExpertLayout, Ids, ModelMeta};

/// Schema of the JSON.
pub const SALIENCY_SCHEMA: &str = "llama-sidecar/expert-saliency/1";

/// Sums of one model. Any number of threads can record at the same time.
///
/// ```
/// use sidecar_core::trace::{ExpertLayout, Ids, ModelMeta, Saliency};
///
/// let saliency = Saliency::new(&ExpertLayout::new([(0, 4)]));
/// // Two tokens, one expert per token.
/// let bytes = [2i32, 2].map(i32::to_ne_bytes).concat();
/// let ids = Ids::packed(&bytes, 1);
/// saliency.record(0, &ids, &[0.5, 1.0], &[2.0, 4.0]);
/// let json = saliency.to_json(&ModelMeta::default());
/// assert_eq!(json["layers"][0]["saliency"][2], 2.5);
/// assert_eq!(json["layers"][0]["counts"][2], 2);
/// ```
#[derive(Debug)]
pub struct Saliency {
    layers: Vec<(u32, Mutex<Vec<Sums>>)>,
}

/// Sums of one expert.
#[derive(Debug, Clone, Copy, Default)]
struct Sums {
    tokens: u64,
    norm: f64,
    weighted: f64,
}

impl Saliency {
    /// Makes sums for these layers, all zero.
    pub fn new(layout: &ExpertLayout) -> Saliency {
        let sums = |&(layer, experts): &(u32, u32)| {
            (layer, Mutex::new(vec![Sums::default(); experts as usize]))
        };
        Saliency {
            layers: layout.layers().iter().map(sums).collect(),
        }
    }

    /// Adds the experts of tokens: their ids, and the gate weight and the norm of the output for
    /// each expert of each token in turn. `layer` is a position in the layout. Ids that are no
    /// experts of the layer are ignored.
    pub fn record(&self, layer: usize, ids: &Ids<'_>, gates: &[f32], norms: &[f32]) {
        let Some((_, sums)) = self.layers.get(layer) else {
            return;
        };
        let mut sums = sums.lock();
        let places = (0..ids.tokens).flat_map(|token| (0..ids.used).map(move |used| (token, used)));
        for ((token, used), (gate, norm)) in places.zip(gates.iter().zip(norms)) {
            let expert = ids.get(token, used).and_then(|id| usize::try_from(id).ok());
            if let Some(sums) = expert.and_then(|expert| sums.get_mut(expert)) {
                sums.tokens += 1;
                sums.norm += f64::from(*norm);
                sums.weighted += f64::from(*gate) * f64::from(*norm);
            }
        }
    }

    /// Returns, for each layer and expert, the tokens, the saliency and the mean norm of the
    /// output. Both are 0 for an expert without tokens.
    pub fn to_json(&self, meta: &ModelMeta) -> Value {
        let layers = self.layers.iter().map(|(layer, sums)| {
            let sums = sums.lock();
            let mean = |sum: fn(&Sums) -> f64| -> Vec<f64> {
                let of = |sums: &Sums| sum(sums) / sums.tokens.max(1) as f64;
                sums.iter().map(of).collect()
            };
            let counts: Vec<u64> = sums.iter().map(|sums| sums.tokens).collect();
            json!({
                "layer": layer,
                "counts": counts,
                "saliency": mean(|sums| sums.weighted),
                "norm": mean(|sums| sums.norm),
            })
        });
        json!({
            "schema": SALIENCY_SCHEMA,
            "version": env!("CARGO_PKG_VERSION"),
            "model": {"name": meta.name, "architecture": meta.architecture},
            "experts_used": meta.experts_used,
            "layers": layers.collect::<Vec<_>>(),
        })
    }
}

/// Returns the L2 norm of 32-bit floats in native byte order.
pub fn norm(floats: &[u8]) -> f32 {
    // Sums side by side, which the compiler computes at once.
    const LANES: usize = 8;
    let mut sums = [0f32; LANES];
    let (groups, rest) = floats.as_chunks::<{ 4 * LANES }>();
    for group in groups {
        for (sum, float) in sums.iter_mut().zip(group.as_chunks().0) {
            let float = f32::from_ne_bytes(*float);
            *sum += float * float;
        }
    }
    for (sum, float) in sums.iter_mut().zip(rest.as_chunks().0) {
        let float = f32::from_ne_bytes(*float);
        *sum += float * float;
    }
    sums.iter().sum::<f32>().sqrt()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn norms_have_all_floats() {
        for count in [0, 1, 7, 8, 9, 100] {
            let floats: Vec<f32> = (0..count).map(|n| n as f32).collect();
            let bytes: Vec<u8> = floats.iter().flat_map(|f| f.to_ne_bytes()).collect();
            let expected = floats.iter().map(|f| f * f).sum::<f32>().sqrt();
            assert!(
                (norm(&bytes) - expected).abs() <= expected * 1e-6,
                "{count}"
            );
        }
    }

    #[test]
    fn ids_that_are_no_experts_are_ignored() {
        let saliency = Saliency::new(&ExpertLayout::new([(3, 2)]));
        let bytes = [0i32, -1, 2, 1].map(i32::to_ne_bytes).concat();
        let ids = Ids::packed(&bytes, 2);
        saliency.record(0, &ids, &[1.0, 1.0, 1.0, 0.25], &[3.0, 9.0, 9.0, 8.0]);
        saliency.record(1, &ids, &[1.0; 4], &[1.0; 4]);
        let layer = &saliency.to_json(&ModelMeta::default())["layers"][0];
        assert_eq!(layer["saliency"], json!([3.0, 2.0]));
        assert_eq!(layer["norm"], json!([3.0, 8.0]));
        assert_eq!(layer["counts"], json!([1, 1]));
    }
}
