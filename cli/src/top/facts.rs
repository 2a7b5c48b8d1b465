//! What is known of a program after two samples, as lines.

use std::path::Path;

use serde::Serialize;
use sidecar_core::protocol::{ModelStatus, PostFetchFigures, StreamFigures};
use sidecar_core::text;

use crate::sizes::{percent, size_text};
use crate::top::sample::Program;

/// The share of the time for which evaluations wait, from which what they wait for limits them.
const LIMITS: f64 = 0.25;

/// A line.
#[derive(Debug, PartialEq, Eq, Serialize)]
pub struct Fact {
    /// The line.
    pub text: String,
    /// Whether something is wrong.
    pub is_alarm: bool,
}

fn fact(text: String) -> Fact {
    Fact {
        text: text::line(&text).into_owned(),
        is_alarm: false,
    }
}

fn alarm(text: String) -> Fact {
    Fact {
        is_alarm: true,
        ..fact(text)
    }
}

/// Returns what is known of a program.
pub fn of(program: &Program) -> Vec<Fact> {
    let sample = match &program.now {
        Ok(sample) => sample,
        Err(error) => return vec![alarm(error.clone())],
    };
    let status = &sample.status;
    let mut facts = vec![fact(format!(
        "process {}: {} evaluations{}{}",
        status.pid,
        status.evaluations,
        a_second(", ", evaluations_per_second(program), "/s"),
        a_second(", ", tokens_per_second(program), " tokens/s"),
    ))];
    if status.generation > 0 {
        facts.push(fact(format!(
            "{} swap{}, pause at most {} us",
            status.generation,
            if status.generation == 1 { "" } else { "s" },
            status.longest_pause_us
        )));
    }
    if let Some(waiting) = &status.waiting {
        let obstacle = waiting.obstacle.as_deref().unwrap_or("its turn");
        let seconds = waiting.seconds;
        facts.push(alarm(format!(
            "a swap waits for {seconds:.0} s: {obstacle}"
        )));
    }
    if status.frozen {
        facts.push(fact("reloads are frozen after a revert".into()));
    }
    for (at, model) in status.models.iter().enumerate() {
        facts.extend(of_model(program, at, model));
    }
    if let Some(figures) = status
        .post_fetch
        .as_ref()
        .filter(|figures| !figures.is_empty())
    {
        facts.push(post_fetch(program, figures));
    }
    if let Some(own) = &status.own_expert_cache {
        let bytes = size_text(own.bytes as f64);
        let layers = own.layers;
        facts.push(fact(format!(
            "llama.cpp's own expert cache: {bytes} for {layers} layers"
        )));
    }
    facts.extend(
        status
            .no_effect
            .iter()
            .map(|none| alarm(none.sentence.clone())),
    );
    for (cause, count) in &status.failures {
        facts.push(alarm(format!(
            "{count} files or reloads not taken: {cause}"
        )));
    }
    facts
}

fn a_second(before: &str, rate: Option<f64>, unit: &str) -> String {
    rate.map_or(String::new(), |rate| format!("{before}{rate:.1}{unit}"))
}

/// Evaluations a second between the last two samples.
pub fn evaluations_per_second(program: &Program) -> Option<f64> {
    program.rate(|sample| Some(sample.status.evaluations as f64))
}

/// Tokens a second between the last two samples, where experts are counted.
pub fn tokens_per_second(program: &Program) -> Option<f64> {
    program.rate(|sample| {
        let layers = sample.uses.iter().flatten();
        layers
            .map(|layer| layer.tokens)
            .max()
            .map(|tokens| tokens as f64)
    })
}

fn of_model(program: &Program, at: usize, model: &ModelStatus) -> Vec<Fact> {
    let file = model.files.first().map_or("", String::as_str);
    let name = Path::new(file).file_name().unwrap_or_default();
    let mut text = format!("{}: {} tensors", text::path(Path::new(name)), model.tensors);
    if !model.changed.is_empty() {
        let bytes = size_text(model.private_bytes as f64);
        text += &format!(", {} swapped ({bytes} more)", model.changed.len());
    }
    let mut facts = vec![fact(text)];
    let memory = model.loaded_bytes.iter();
    let memory: Vec<_> = memory
        .map(|(buffer, bytes)| format!("{buffer} {}", size_text(*bytes as f64)))
        .collect();
    if !memory.is_empty() {
        facts.push(fact(format!("in {}", memory.join(", "))));
    }
    if !model.masks.is_empty() {
        let experts: usize = model.masks.iter().map(|mask| mask.experts.len()).sum();
        let layers = model.masks.len();
        facts.push(fact(format!(
            "{experts} experts of {layers} layers are masked"
        )));
    }
    if let Some(blocked) = &model.blocked {
        let (attempts, error) = (blocked.attempts, &blocked.error);
        facts.push(alarm(format!(
            "not reloaded after {attempts} attempts: {error}"
        )));
    }
    facts.extend(
        model
            .obstacle
            .iter()
            .map(|obstacle| alarm(obstacle.clone())),
    );
    if let Some(stream) = &model.stream {
        facts.push(streaming(program, at, stream));
    }
    facts
}

fn streaming(program: &Program, at: usize, stream: &StreamFigures) -> Fact {
    if stream.resting {
        return fact("experts from disk: all are in memory".into());
    }
    let rate = |figure: fn(&StreamFigures) -> f64| {
        program.rate(|sample| sample.status.models.get(at)?.stream.as_ref().map(figure))
    };
    let checked = rate(|stream| stream.checked_bytes as f64);
    let resident = rate(|stream| stream.resident_bytes as f64);
    let read = rate(|stream| (stream.read_bytes + stream.ahead_bytes) as f64);
    let waited = rate(|stream| stream.waited_seconds);
    let chosen = rate(|stream| stream.chosen as f64);
    let replaced = rate(|stream| stream.replaced as f64);
    let in_memory = checked.zip(resident).filter(|(checked, _)| *checked > 0.0);
    let held = (stream.held_bytes > 0).then_some(stream.held_bytes as f64);
    let parts = [
        read.map(|read| format!("{}/s read", size_text(read))),
        in_memory
            .map(|(checked, resident)| format!("{} were in memory", percent(resident / checked))),
        waiting(waited, "disk"),
        chosen
            .zip(replaced)
            .filter(|(chosen, _)| *chosen > 0.0)
            .map(|(chosen, replaced)| {
                format!(
                    "{} replaced by others in memory",
                    percent(replaced / chosen)
                )
            }),
        held.map(|held| format!("{} held", size_text(held))),
    ];
    listed("experts from disk", parts.into_iter().flatten())
}

fn post_fetch(program: &Program, figures: &PostFetchFigures) -> Fact {
    let rate = |figure: fn(&PostFetchFigures) -> f64| {
        program.rate(|sample| sample.status.post_fetch.as_ref().map(figure))
    };
    let early = rate(|of| of.early_bytes as f64);
    let waited = rate(|of| of.wait_seconds);
    let hits = rate(|of| of.cache_hits as f64);
    let misses = rate(|of| of.cache_misses as f64);
    let there = hits
        .zip(misses)
        .filter(|(hits, misses)| hits + misses > 0.0);
    let scratch = (figures.scratch_bytes > 0).then_some(figures.scratch_bytes as f64);
    let kept = (figures.cache_bytes > 0).then_some(figures.cache_bytes as f64);
    let parts = [
        early.map(|early| format!("{}/s early", size_text(early))),
        there.map(|(hits, misses)| format!("{} were there", percent(hits / (hits + misses)))),
        waiting(waited, "link"),
        scratch.map(|scratch| format!("{} on devices for copies", size_text(scratch))),
        kept.map(|kept| format!("{} for experts that stay", size_text(kept))),
    ];
    listed("experts to a GPU", parts.into_iter().flatten())
}

/// Returns the share of the time for which evaluations wait, and whether that limits them.
fn waiting(seconds: Option<f64>, what: &str) -> Option<String> {
    let share = seconds.filter(|share| *share > 0.0)?.min(1.0);
    let limits = match share >= LIMITS {
        true => format!(": the {what} limits"),
        false => String::new(),
    };
    Some(format!(
        "evaluations wait {} of the time{limits}",
        percent(share)
    ))
}

/// Returns a line of a heading and its parts.
fn listed(heading: &str, parts: impl Iterator<Item = String>) -> Fact {
    let parts: Vec<String> = parts.collect();
    fact(format!("{heading}: {}", parts.join(", ")))
}
