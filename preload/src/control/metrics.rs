//! Figures for operators, in the text format of Prometheus (version 0.0.4).

use std::collections::BTreeMap;
use std::fmt::Write;

use sidecar_core::protocol::{CacheLayer, PostFetchFigures, StreamFigures};
use sidecar_core::reload::Pauses;

use crate::hotswap::reloader;
use crate::postfetch;
use crate::program::barrier::{self, Obstacle};
use crate::program::{models, own_cache, sched};
use crate::streaming;
use crate::trace::counts;

/// Returns all figures.
pub fn text() -> String {
    let mut out = Page::default();
    let version = env!("CARGO_PKG_VERSION");
    out.head("info", "gauge", "Version of the drop-in.");
    out.value("info", &[("version", version)], 1.0);
    let counts = reloader::counts();
    out.single(
        "generation",
        "counter",
        "Swaps committed.",
        barrier::generation() as f64,
    );
    out.single(
        "evaluations_total",
        "counter",
        "Graphs that the program evaluated.",
        sched::count() as f64,
    );
    out.single(
        "graphs_renewed_total",
        "counter",
        "Graphs that the program was made to rebuild.",
        sched::rebuilt() as f64,
    );
    out.single(
        "tensors_swapped_total",
        "counter",
        "Tensors that got new bytes.",
        counts.swapped as f64,
    );
    out.single(
        "tensors_returned_total",
        "counter",
        "Tensors that went back to their original bytes.",
        counts.returned as f64,
    );
    out.single(
        "staged_bytes_total",
        "counter",
        "Bytes read into new buffers.",
        counts.staged_bytes as f64,
    );
    out.head(
        "failures_total",
        "counter",
        "Versions of files, and reloads, that were not applied, by cause.",
    );
    for (cause, count) in counts.failures {
        out.value("failures_total", &[("cause", cause.name())], count as f64);
    }
    pauses(&mut out);
    let waiting = barrier::pending();
    out.head(
        "waiting_seconds",
        "gauge",
        "How long a swap has been waiting, by what blocks it; 0 when none waits.",
    );
    for obstacle in [Obstacle::Evaluation, Obstacle::KeptGraph] {
        let seconds = match waiting {
            Some((Some(now), since)) if now == obstacle => since.as_secs_f64(),
            _ => 0.0,
        };
        out.value("waiting_seconds", &[("obstacle", obstacle.name())], seconds);
    }
    out.head(
        "blocked_seconds",
        "gauge",
        "Time since reloads of a model began to fail; 0 when the last one succeeded.",
    );
    for model in models::models() {
        let blocked = model.blocked.lock().clone();
        let seconds = blocked.map_or(0.0, |blocked| blocked.since.elapsed().as_secs_f64());
        out.value(
            "blocked_seconds",
            &[("model", &model.number.to_string())],
            seconds,
        );
    }
    out.single(
        "frozen",
        "gauge",
        "1 after 'revert', until 'unfreeze'.",
        f64::from(u8::from(reloader::is_frozen())),
    );
    private_bytes(&mut out);
    streams(&mut out);
    post_fetch(&mut out);
    own_expert_cache(&mut out);
    out.head(
        "expert_activations_total",
        "counter",
        "Experts that evaluations routed to, by model.",
    );
    for (model, activations) in counts::activations().into_iter().enumerate() {
        let model = (model + 1).to_string();
        out.value(
            "expert_activations_total",
            &[("trace", &model)],
            activations as f64,
        );
    }
    out.head(
        "expert_layers_uncounted",
        "gauge",
        "Layers that were evaluated and whose experts were not counted, by model; 0 in a correct trace.",
    );
    for (model, layers) in counts::uncounted_layers().into_iter().enumerate() {
        let model = (model + 1).to_string();
        out.value(
            "expert_layers_uncounted",
            &[("trace", &model)],
            layers as f64,
        );
    }
    out.0
}

fn pauses(out: &mut Page) {
    let pauses = barrier::pauses();
    out.head(
        "pause_seconds",
        "histogram",
        "How long swaps kept evaluations out: of each swap, or of the evaluation that waited for it.",
    );
    let mut sum = 0;
    for (bound, count) in Pauses::BOUNDS.iter().zip(pauses.by_bound) {
        sum += count;
        let bound = format!("{}", bound.as_secs_f64());
        out.value("pause_seconds_bucket", &[("le", &bound)], sum as f64);
    }
    out.value(
        "pause_seconds_bucket",
        &[("le", "+Inf")],
        pauses.count as f64,
    );
    out.value("pause_seconds_sum", &[], pauses.total.as_secs_f64());
    out.value("pause_seconds_count", &[], pauses.count as f64);
}

fn own_expert_cache(out: &mut Page) {
    let Some(figures) = own_cache::figures() else {
        return;
    };
    out.single(
        "own_expert_cache_bytes",
        "gauge",
        "Slots of the expert cache that llama.cpp has of its own.",
        figures.bytes as f64,
    );
    out.single(
        "own_expert_cache_written_bytes_total",
        "counter",
        "Experts that swaps wrote into these slots.",
        figures.written_bytes as f64,
    );
}

fn private_bytes(out: &mut Page) {
    out.head(
        "private_bytes",
        "gauge",
        "Bytes that swapped tensors hold beside the model, by model and buffer type.",
    );
    for model in models::models() {
        let number = model.number.to_string();
        let mut by_place: BTreeMap<String, u64> = BTreeMap::new();
        for instance in model.tensors.iter().flat_map(|tensor| &tensor.instances) {
            if let Some(buffer) = &*instance.private.lock() {
                *by_place.entry(buffer.place()).or_default() += buffer.size();
            }
        }
        for (place, bytes) in by_place {
            let labels = [("model", number.as_str()), ("buffer", place.as_str())];
            out.value("private_bytes", &labels, bytes as f64);
        }
    }
}

/// A figure: name, kind, help and value.
type Figure<T> = (&'static str, &'static str, &'static str, fn(&T) -> f64);

const STREAM_FIGURES: [Figure<StreamFigures>; 8] = [
    (
        "stream_checked_bytes_total",
        "counter",
        "Bytes of routed experts whose residency was checked.",
        |of| of.checked_bytes as f64,
    ),
    (
        "stream_resident_bytes_total",
        "counter",
        "Bytes of routed experts that were in memory or on their way.",
        |of| of.resident_bytes as f64,
    ),
    (
        "stream_read_bytes_total",
        "counter",
        "Bytes that were read ahead because of routing.",
        |of| of.read_bytes as f64,
    ),
    (
        "stream_guessed_bytes_total",
        "counter",
        "Bytes that were read ahead of routing: the next layer of a batch, and guesses.",
        |of| of.guessed_bytes as f64,
    ),
    (
        "stream_guesses_total",
        "counter",
        "Experts that were guessed.",
        |of| of.guesses as f64,
    ),
    (
        "stream_hits_total",
        "counter",
        "Experts that were guessed and routed.",
        |of| of.hits as f64,
    ),
    (
        "stream_major_faults_total",
        "counter",
        "Page faults of the process that waited for a disk.",
        |of| of.major_faults as f64,
    ),
    (
        "stream_resting",
        "gauge",
        "1 while all experts are in memory, so that streaming rests.",
        |of| f64::from(u8::from(of.resting)),
    ),
];

fn streams(out: &mut Page) {
    let models = models::models();
    let figures: Vec<_> = models
        .iter()
        .filter_map(|model| Some((model.number.to_string(), streaming::figures(model)?)))
        .collect();
    for (name, kind, help, value) in STREAM_FIGURES {
        out.head(name, kind, help);
        for (model, figures) in &figures {
            out.value(name, &[("model", model)], value(figures));
        }
    }
}

const POST_FETCH_FIGURES: [Figure<PostFetchFigures>; 9] = [
    (
        "post_fetch_early_bytes_total",
        "counter",
        "Bytes of experts that were copied to a device early.",
        |of| of.early_bytes as f64,
    ),
    (
        "post_fetch_host_bytes_total",
        "counter",
        "Bytes of experts that the program copied itself.",
        |of| of.host_bytes as f64,
    ),
    (
        "post_fetch_layers_total",
        "counter",
        "Layers whose experts were copied once they were routed.",
        |of| of.layers as f64,
    ),
    (
        "post_fetch_layers_ahead_total",
        "counter",
        "Layers whose experts were copied before they were routed.",
        |of| of.layers_ahead as f64,
    ),
    (
        "post_fetch_copy_seconds_total",
        "counter",
        "Time of the early copies.",
        |of| of.copy_seconds,
    ),
    (
        "post_fetch_wait_seconds_total",
        "counter",
        "Time for which computing waited for early copies.",
        |of| of.wait_seconds,
    ),
    (
        "post_fetch_scratch_bytes",
        "gauge",
        "Memory on devices for early copies.",
        |of| of.scratch_bytes as f64,
    ),
    (
        "expert_cache_bytes",
        "gauge",
        "Memory on devices for experts that stay there.",
        |of| of.cache_bytes as f64,
    ),
    (
        "page_locked_bytes",
        "gauge",
        "Bytes of models that are page-locked.",
        |of| of.locked_bytes as f64,
    ),
];

const CACHE_FIGURES: [Figure<CacheLayer>; 5] = [
    (
        "expert_cache_slots",
        "gauge",
        "Experts of a layer that stay on a device.",
        |of| of.slots as f64,
    ),
    (
        "expert_cache_hits_total",
        "counter",
        "Routed experts that were on the device.",
        |of| of.hits as f64,
    ),
    (
        "expert_cache_misses_total",
        "counter",
        "Routed experts that were not on the device.",
        |of| of.misses as f64,
    ),
    (
        "expert_cache_on_cpu_total",
        "counter",
        "Routed experts that the CPU computed.",
        |of| of.on_cpu as f64,
    ),
    (
        "expert_cache_evictions_total",
        "counter",
        "Experts that were replaced by others.",
        |of| of.evictions as f64,
    ),
];

fn post_fetch(out: &mut Page) {
    let figures = postfetch::figures();
    for (name, kind, help, value) in POST_FETCH_FIGURES {
        out.single(name, kind, help, value(&figures));
    }
    for (name, kind, help, value) in CACHE_FIGURES {
        out.head(name, kind, help);
        for of_layer in &figures.cache_layers {
            let (model, layer) = (of_layer.model.to_string(), of_layer.layer.to_string());
            let labels = [("model", model.as_str()), ("layer", layer.as_str())];
            out.value(name, &labels, value(of_layer));
        }
    }
}

/// A page that is being written.
#[derive(Default)]
struct Page(String);

impl Page {
    fn head(&mut self, name: &str, kind: &str, help: &str) {
        let _ = writeln!(self.0, "# HELP llama_sidecar_{name} {help}");
        let _ = writeln!(self.0, "# TYPE llama_sidecar_{name} {kind}");
    }

    fn value(&mut self, name: &str, labels: &[(&str, &str)], value: f64) {
        let _ = write!(self.0, "llama_sidecar_{name}");
        for (at, (label, text)) in labels.iter().enumerate() {
            let open = if at == 0 { '{' } else { ',' };
            let text = text
                .replace('\\', "\\\\")
                .replace('"', "\\\"")
                .replace('\n', "\\n");
            let _ = write!(self.0, "{open}{label}=\"{text}\"");
        }
        let close = if labels.is_empty() { "" } else { "}" };
        let _ = writeln!(self.0, "{close} {value}");
    }

    fn single(&mut self, name: &str, kind: &str, help: &str, value: f64) {
        self.head(name, kind, help);
        self.value(name, &[], value);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn labels_are_escaped_and_every_figure_has_a_type() {
        let mut page = Page::default();
        page.head("private_bytes", "gauge", "Bytes.");
        page.value(
            "private_bytes",
            &[("model", "1"), ("buffer", "a\"b\\c\n")],
            5.0,
        );
        let expected = "# HELP llama_sidecar_private_bytes Bytes.\n\
             # TYPE llama_sidecar_private_bytes gauge\n\
             llama_sidecar_private_bytes{model=\"1\",buffer=\"a\\\"b\\\\c\\n\"} 5\n";
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
