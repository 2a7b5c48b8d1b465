//! Expert traces as the report shows them.

use std::io::{self, Read};
use std::path::Path;

use anyhow::{Context, Result, bail, ensure};
use serde_json::Value;
use sidecar_core::experts::ExpertIndex;
use sidecar_core::files;
use sidecar_core::gguf::{Access, GgufFile, open_model};
use sidecar_core::text;
use sidecar_core::trace::{ExpertLayout, ModelMeta, RouteFormat, RouteReader, Snapshot, from_json};

/// The most workloads that are compared: each has counts and locality of its own.
const MOST_WORKLOADS: usize = 64;

/// Returns the name of a file.
fn label(path: &Path) -> String {
    let name = path.file_name().unwrap_or_default();
    name.to_string_lossy().into_owned()
}

/// One trace, or the sum of several of the same model.
#[derive(Clone)]
pub struct TraceReport {
    /// The model.
    pub about: ModelMeta,
    /// The counts.
    pub counts: Snapshot,
    /// The names of the files.
    pub label: String,
}

impl TraceReport {
    /// Reads a trace from its JSON file or a file of routes, with `separate` one for each workload
    /// of the routes.
    pub fn read(path: &Path, separate: bool) -> Result<Vec<TraceReport>> {
        let named = RouteFormat::of(path);
        if named == RouteFormat::Binary
            && let Ok(reader) = RouteReader::open(path)
        {
            let read = TraceReport::of_routes(path, reader, separate);
            return read.with_context(|| format!("cannot read the routes of {}", text::path(path)));
        }
        ensure!(
            named != RouteFormat::Npy,
            "{0} is an array of numpy: open it with numpy.load('{0}'); a report needs routes in a file FILE.routes, or a trace of --expert-trace-output",
            text::path(path)
        );
        let text = files::read_text(path).with_context(|| {
            format!(
                "cannot read {} as a trace: write one with --expert-trace-output trace.json; a model is passed with --model",
                text::path(path)
            )
        })?;
        let json: Value = serde_json::from_str(&text).with_context(|| {
            format!(
                "{} is not JSON: write a trace with --expert-trace-output trace.json",
                text::path(path)
            )
        })?;
        let of_json = |json| TraceReport::of_json(json, label(path), &text::path(path));
        match json["traces"].as_array() {
            // Of 'trace --json': one for each model.
            Some(traces) => traces.iter().map(of_json).collect(),
            None => Ok(vec![of_json(&json)?]),
        }
    }

    /// Reads a trace, which comes from a place.
    pub fn of_json(json: &Value, label: String, place: &str) -> Result<TraceReport> {
        let (about, counts) = from_json(json)
            .map_err(anyhow::Error::msg)
            .with_context(|| format!("{place} is not an expert trace"))?;
        if counts.activations() == 0 {
            bail!("{place} has no activations: evaluate with the model before the report");
        }
        Ok(TraceReport {
            about,
            counts,
            label,
        })
    }

    fn of_routes<R: Read>(
        path: &Path,
        reader: RouteReader<R>,
        separate: bool,
    ) -> Result<Vec<TraceReport>> {
        let about = ModelMeta {
            name: reader.layout().model().to_owned(),
            experts_used: reader.layout().top_k() as u64,
            ..ModelMeta::default()
        };
        let mut found: Vec<TraceReport> = Vec::new();
        let mut begins_unmarked = false;
        reader.workloads(|mark, counts| {
            begins_unmarked |= found.is_empty() && mark.is_empty();
            if let (false, Some(sum)) = (separate, found.first_mut()) {
                sum.counts.merge(&counts);
                return Ok(());
            }
            if found.len() == MOST_WORKLOADS {
                return Err(io::Error::other(format!(
                    "more than {MOST_WORKLOADS} workloads: leave out --compare, which sums them, or write a file of routes for each"
                )));
            }
            let label = match (separate, mark) {
                (false, _) | (true, "") => label(path),
                (true, mark) => format!("{}: {mark}", label(path)),
            };
            let about = about.clone();
            found.push(TraceReport { about, counts, label });
            Ok(())
        })?;
        // Workloads are between marks: what is before the first of several is none.
        if separate && begins_unmarked && found.len() > 2 {
            found.remove(0);
        }
        ensure!(
            !found.is_empty(),
            "the file has no tokens: evaluate with the model before"
        );
        Ok(found)
    }

    /// Sums traces of the same model.
    pub fn sum(traces: Vec<TraceReport>) -> Result<TraceReport> {
        let mut traces = traces.into_iter();
        let mut sum = traces.next().context("expected at least one trace")?;
        for next in traces {
            if sum.shape() != next.shape() || sum.about.name != next.about.name {
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

    /// Returns the names of the model and of the files, in one line.
    pub fn title(&self) -> String {
        match self.about.name.as_str() {
            "" => text::line(&self.label).into_owned(),
            name => text::line(&format!("{name} ({})", self.label)).into_owned(),
        }
    }

    /// Returns the layers with their numbers of experts.
    pub fn shape(&self) -> Vec<(u32, usize)> {
        let layers = self.counts.layers.iter();
        layers
            .map(|layer| (layer.layer, layer.experts.len()))
            .collect()
    }

    /// Takes the bytes of experts from the files of the model.
    pub fn set_model(&mut self, files: &[GgufFile]) -> Result<()> {
        let layout = ExpertLayout::of(&ExpertIndex::of(files));
        let layers = layout.layers().iter();
        let shape = layers.map(|&(layer, experts)| (layer, experts as usize));
        if !shape.eq(self.shape()) {
            bail!(
                "the model has other layers or experts than {}: name the model that was traced",
                self.label
            );
        }
        self.about.expert_bytes = ModelMeta::of(files).expert_bytes;
        Ok(())
    }

    /// Opens the files of the model that was traced.
    pub fn open_model(&self) -> Result<Vec<GgufFile>> {
        const NEXT: &str = "name the model with --model FILE";
        let first = self.about.files.first();
        let first =
            first.with_context(|| format!("{} has no path of a model: {NEXT}", self.label))?;
        let files = open_model(&text::path_of(&first.path), Access::Read).context(NEXT)?;
        let sizes = files.iter().map(|file| file.source.id().size);
        if !sizes.eq(self.about.files.iter().map(|file| file.size)) {
            bail!("{} is not the file that was traced: {NEXT}", first.path);
        }
        Ok(files)
    }

    /// Returns why a figure in bytes cannot be given.
    pub fn without_bytes(&self) -> String {
        format!(
            "{} has no sizes of experts: name the model with --model FILE",
            self.label
        )
    }
}

/// Returns a trace with uneven counts.
#[cfg(test)]
pub fn sample(experts: u32, layers: u32) -> TraceReport {
    use sidecar_core::trace::{ExpertLayout, Trace};
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

/// Returns a trace with locality: of a layer for each pair of number and bytes of an expert, all
/// with the same routes.
#[cfg(test)]
pub fn sample_routes(experts: u32, layers: &[(u32, u64)], routes: &[[i32; 2]]) -> TraceReport {
    use sidecar_core::trace::{ExpertLayout, Ids, Trace};
    let layout = layers.iter().map(|&(layer, _)| (layer, experts));
    let trace = Trace::with_locality(ExpertLayout::new(layout));
    let ids = routes.as_flattened().iter();
    let bytes: Vec<u8> = ids.flat_map(|id| id.to_ne_bytes()).collect();
    for layer in 0..layers.len() {
        let ids = Ids::packed(&bytes, 2);
        trace.record_batch(layer, &ids);
    }
    TraceReport {
        about: ModelMeta {
            experts_used: 2,
            expert_bytes: layers.iter().copied().collect(),
            ..ModelMeta::default()
        },
        counts: trace.snapshot_with_locality(),
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
