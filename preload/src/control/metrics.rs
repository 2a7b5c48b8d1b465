//! Figures for operators, in the text format of Prometheus (version 0.0.4).

use std::fmt::Write;

use sidecar_core::protocol::{
    CacheLayer, Figure, Metric, OwnExpertCache, PostFetchFigures, ProcessFigures, StreamFigures,
};
use sidecar_core::reload::Pauses;
use sidecar_core::text;

use crate::hotswap::reloader;
use crate::postfetch;
use crate::program::barrier::{self, Obstacle};
use crate::program::models::Model;
use crate::program::{models, own_cache, sched};
use crate::streaming;
use crate::trace::counts;

/// Returns all figures.
pub fn text() -> String {
    let mut out = Page::default();
    let models = models::models();
    let number = |model: &Model| vec![model.number.to_string()];
    out.metric(
        &Metric::INFO,
        [(vec![env!("CARGO_PKG_VERSION").into()], 1.0)],
    );
    out.figures(ProcessFigures::METRICS, &[(vec![], process())]);
    let failures = reloader::counts().failures();
    out.metric(
        &Metric::FAILURES,
        failures.map(|(cause, count)| (vec![cause.name().into()], count as f64)),
    );
    pauses(&mut out);
    let waiting = barrier::pending();
    let obstacles = [Obstacle::Evaluation, Obstacle::KeptGraph].map(|obstacle| {
        let seconds = match waiting {
            Some((Some(now), since)) if now == obstacle => since.as_secs_f64(),
            _ => 0.0,
        };
        (vec![obstacle.name().into()], seconds)
    });
    out.metric(&Metric::WAITING, obstacles);
    let blocked = models.iter().map(|model| {
        let blocked = model.blocked.lock().clone();
        let seconds = blocked.map_or(0.0, |blocked| blocked.since.elapsed().as_secs_f64());
        (number(model), seconds)
    });
    out.metric(&Metric::BLOCKED, blocked);
    for (metric, bytes) in [
        (&Metric::LOADED, Model::loaded_by_type as fn(&Model) -> _),
        (&Metric::PRIVATE, Model::private_by_type),
    ] {
        let of_models = models.iter().flat_map(|model| {
            let by_place = bytes(model).into_iter();
            by_place.map(|(place, bytes)| (vec![model.number.to_string(), place], bytes as f64))
        });
        out.metric(metric, of_models);
    }
    let streams = models
        .iter()
        .filter_map(|model| Some((number(model), streaming::figures(model)?)));
    out.figures(StreamFigures::METRICS, &streams.collect::<Vec<_>>());
    let post_fetch = postfetch::figures();
    let layers = post_fetch.cache_layers.iter().cloned().map(|figures| {
        let labels = vec![figures.model.to_string(), figures.layer.to_string()];
        (labels, figures)
    });
    let layers: Vec<_> = layers.collect();
    out.figures(PostFetchFigures::METRICS, &[(vec![], post_fetch)]);
    out.figures(CacheLayer::METRICS, &layers);
    if let Some(figures) = own_cache::figures() {
        out.figures(OwnExpertCache::METRICS, &[(vec![], figures)]);
    }
    let activations = counts::activations().into_iter().map(|count| count as f64);
    out.metric(&Metric::ACTIVATIONS, by_trace(activations));
    let uncounted = counts::uncounted_layers()
        .into_iter()
        .map(|count| count as f64);
    out.metric(&Metric::UNCOUNTED, by_trace(uncounted));
    out.0
}

fn process() -> ProcessFigures {
    let counts = reloader::counts();
    ProcessFigures {
        generation: barrier::generation(),
        evaluations: sched::count(),
        graphs_renewed: sched::rebuilt(),
        tensors_swapped: counts.swapped,
        tensors_returned: counts.returned,
        staged_bytes: counts.staged_bytes,
        frozen: reloader::is_frozen(),
    }
}

/// Returns the values with the numbers of their traces, from 1.
fn by_trace(values: impl Iterator<Item = f64>) -> impl Iterator<Item = (Vec<String>, f64)> {
    (1..)
        .zip(values)
        .map(|(trace, value): (u64, f64)| (vec![trace.to_string()], value))
}

fn pauses(out: &mut Page) {
    let pauses = barrier::pauses();
    let name = Metric::PAUSES.name;
    out.head(&Metric::PAUSES);
    let bucket = format!("{name}_bucket");
    let mut sum = 0;
    for (bound, count) in Pauses::BOUNDS.iter().zip(pauses.by_bound) {
        sum += count;
        let bound = bound.as_secs_f64().to_string();
        out.value(&bucket, Metric::PAUSES.labels, &[bound], sum as f64);
    }
    let all = pauses.count as f64;
    out.value(&bucket, Metric::PAUSES.labels, &["+Inf".into()], all);
    out.value(&format!("{name}_sum"), &[], &[], pauses.total.as_secs_f64());
    out.value(&format!("{name}_count"), &[], &[], all);
}

/// A page that is being written.
#[derive(Default)]
struct Page(String);

impl Page {
    /// Writes the metrics of figures, which have values of their labels.
    fn figures<T>(&mut self, metrics: &[Figure<T>], figures: &[(Vec<String>, T)]) {
        for (metric, value) in metrics {
            let values = figures.iter();
            self.metric(
                metric,
                values.map(|(labels, figures)| (labels.clone(), value(figures))),
            );
        }
    }

    /// Writes a metric with the values of its labels, and its value, for each of them.
    fn metric(&mut self, metric: &Metric, values: impl IntoIterator<Item = (Vec<String>, f64)>) {
        self.head(metric);
        for (labels, value) in values {
            self.value(metric.name, metric.labels, &labels, value);
        }
    }

    fn head(&mut self, metric: &Metric) {
        let (name, kind) = (metric.name, metric.kind.name());
        let _ = writeln!(self.0, "# HELP llama_sidecar_{name} {}", metric.help.trim());
        let _ = writeln!(self.0, "# TYPE llama_sidecar_{name} {kind}");
    }

    fn value(&mut self, name: &str, labels: &[&str], texts: &[String], value: f64) {
        let _ = write!(self.0, "llama_sidecar_{name}");
        for (at, (label, text)) in labels.iter().zip(texts).enumerate() {
            let open = if at == 0 { '{' } else { ',' };
            let _ = write!(self.0, "{open}{label}=\"{}\"", text::label(text));
        }
        let close = if texts.is_empty() { "" } else { "}" };
        let _ = writeln!(self.0, "{close} {value}");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn labels_are_escaped_and_every_figure_has_a_type() {
        let mut page = Page::default();
        let metric = Metric {
            help: "Bytes.",
            ..Metric::PRIVATE
        };
        page.metric(&metric, [(vec!["1".into(), "a\"b\\c\n".into()], 5.0)]);
        let expected = "# HELP llama_sidecar_private_bytes Bytes.\n\
             # TYPE llama_sidecar_private_bytes gauge\n\
             llama_sidecar_private_bytes{model=\"1\",buffer=\"a\\\"b\\\\c\\\\n\"} 5\n";
        assert_eq!(page.0, expected);
    }

    #[test]
    fn every_figure_is_in_the_documentation() {
        let page = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/protocol.md");
        let page = std::fs::read_to_string(page).expect("the page of the metrics");
        for line in text().lines() {
            if let Some(rest) = line.strip_prefix("# HELP llama_sidecar_") {
                let (name, _) = rest.split_once(' ').expect("a help text");
                assert!(page.contains(&format!("`{name}`")), "{name}");
            }
        }
    }
}
