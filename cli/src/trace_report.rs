//! Expert traces as the report shows them.

use std::path::Path;

use anyhow::{Context, Result, bail};
use llama_sidecar::trace::{ModelMeta, Snapshot, from_json};

/// One trace, or the sum of several of the same model.
pub struct TraceReport {
    /// The model.
    pub about: ModelMeta,
    /// The counts.
    pub counts: Snapshot,
    /// The names of the files.
    pub label: String,
}

impl TraceReport {
    /// Reads a trace from its JSON file.
    pub fn read(path: &Path) -> Result<TraceReport> {
        let text =
            std::fs::read(path).with_context(|| format!("cannot read {}", path.display()))?;
        let json = serde_json::from_slice(&text).with_context(|| {
            format!(
                "{} is not JSON: write a trace with LLAMA_EXPERT_TRACE_OUTPUT=trace.json",
                path.display()
            )
        })?;
        let (about, counts) = from_json(&json)
            .map_err(anyhow::Error::msg)
            .with_context(|| format!("{} is not an expert trace", path.display()))?;
        if counts.activations() == 0 {
            bail!(
                "{} has no activations: evaluate with the model before writing the trace",
                path.display()
            );
        }
        let label = path
            .file_name()
            .unwrap_or_default()
            .to_string_lossy()
            .into_owned();
        Ok(TraceReport {
            about,
            counts,
            label,
        })
    }

    /// Sums traces of the same model.
    pub fn sum(traces: Vec<TraceReport>) -> Result<TraceReport> {
        let mut traces = traces.into_iter();
        let mut sum = traces.next().context("expected at least one trace")?;
        for next in traces {
            let shape = |traced: &TraceReport| -> Vec<(u32, usize)> {
                let layers = traced.counts.layers.iter();
                layers
                    .map(|layer| (layer.layer, layer.experts.len()))
                    .collect()
            };
            if shape(&sum) != shape(&next) || sum.about.name != next.about.name {
                bail!(
                    "{} and {} are traces of different models: use --compare",
                    sum.label,
                    next.label
                );
            }
            sum.counts.merge(&next.counts);
            sum.label = format!("{} + {}", sum.label, next.label);
        }
        Ok(sum)
    }
}

/// Returns a trace with uneven counts.
#[cfg(test)]
pub fn sample(experts: u32, layers: u32) -> TraceReport {
    use llama_sidecar::trace::{ExpertLayout, Trace};
    let trace = Trace::new(ExpertLayout::new((0..layers).map(|layer| (layer, experts))));
    for layer in 0..layers {
        for expert in 0..experts {
            for _ in 0..expert % 5 {
                trace.record(layer as usize, expert);
            }
        }
    }
    TraceReport {
        about: ModelMeta {
            name: "a <b>model</b>".into(),
            experts_used: 2,
            ..ModelMeta::default()
        },
        counts: trace.snapshot(),
        label: "trace.json".into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn traces_of_different_models_are_not_summed() {
        assert!(TraceReport::sum(vec![sample(8, 3), sample(8, 2)]).is_err());
        let sum = TraceReport::sum(vec![sample(8, 3), sample(8, 3)]).expect("the same model");
        assert_eq!(
            sum.counts.activations(),
            2 * sample(8, 3).counts.activations()
        );
    }
}
