//! Experts to leave out, by measurements in one running llama-perplexity.
//!
//! A first evaluation measures how much each expert contributes. Parts of the experts that contribute least are masked, a
//! step after the other, and each step is evaluated. What is left of the budget goes into exchanges. The first ones mask
//! experts that have the matrices of another one, in all layers at once or layer by layer. The others exchange, in one
//! layer, the expert that contributes most of those that are masked for the one that contributes least of the others. An
//! exchange stays if the divergence is smaller.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::time::Instant;

use anyhow::{Context, Result, bail, ensure};
use clap::ValueEnum;
use serde::Serialize;
use serde_json::Value;
use sidecar_core::protocol::LayerMask;
use sidecar_core::trace;

use crate::output::progress;
use crate::prune::duplicates::Duplicates;
use crate::pruned::Mixture;
use crate::sizes::{Table, share};
use crate::tune::program::{EvaluationOptions, Running};
use crate::tune::statistics::Statistics;

/// Parts of the way to the share that are evaluated.
const STEPS: u64 = 4;

/// What a list of experts is ordered by.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum By {
    /// Mean of gate weight times norm of the output, over the tokens of an expert (REAP).
    Saliency,
    /// Number of tokens.
    Count,
}

/// How the experts are found.
#[derive(clap::Args)]
pub struct SearchOptions {
    /// Find the experts to leave out: this share of each layer, for example 25%.
    #[arg(long, value_name = "SHARE", value_parser = share, requires = "text")]
    leave_out: Option<f64>,
    /// The text to evaluate.
    #[arg(long, value_name = "FILE", requires = "leave_out")]
    text: Option<PathBuf>,
    /// Another text, to evaluate once with the experts that were found: they fit the first one.
    #[arg(long, value_name = "FILE", requires = "leave_out")]
    check: Option<PathBuf>,
    /// The order in which experts are tried.
    #[arg(long, value_enum, default_value = "saliency")]
    by: By,
    /// The order of the counts in an expert trace of an earlier run (JSON), in place of --by.
    #[arg(
        long,
        value_name = "FILE",
        conflicts_with = "by",
        requires = "leave_out"
    )]
    trace: Option<PathBuf>,
    /// Evaluations of the text with masks, at most.
    #[arg(long, value_name = "N", default_value_t = 16, value_parser = clap::value_parser!(u32).range(1..=100_000))]
    rounds: u32,
    #[command(flatten)]
    evaluation: EvaluationOptions,
}

/// Experts of each layer, those that contribute least first.
type Order = BTreeMap<u32, Vec<u32>>;

/// What was found.
#[derive(Serialize)]
pub struct Found {
    /// The experts to leave out.
    pub experts: Vec<LayerMask>,
    /// What was measured on the way.
    steps: Vec<Step>,
}

/// A measurement.
#[derive(Serialize)]
struct Step {
    /// How many experts of a layer are masked.
    what: String,
    #[serde(flatten)]
    statistics: Statistics,
}

impl Found {
    /// Returns the measurements as a table.
    pub fn table(&self) -> Table {
        let mut table = Table::new([
            "left out of a layer",
            "KL divergence",
            "same top",
            "perplexity",
        ]);
        let rows = self.steps.iter().map(|Step { what, statistics }| {
            let mut row = vec![what.clone()];
            row.extend(statistics.cells());
            row
        });
        table.rows = rows.collect();
        table
    }
}

/// Returns experts to leave out, and what they cost.
pub fn run(
    options: &SearchOptions,
    model: &Path,
    mixture: &Mixture,
    duplicates: &Duplicates,
) -> Result<Found> {
    let (Some(share), Some(text)) = (options.leave_out, &options.text) else {
        bail!("--leave-out and --text are needed");
    };
    let routing = &mixture.routing;
    let each = routing.experts / routing.groups;
    let of_group = (share * each as f64).round() as u64;
    let count = of_group * routing.groups;
    ensure!(
        count > 0 && (each - of_group) * routing.groups_used >= routing.used,
        "{:.1} % of {} experts are {count}: leave out at least {}, and keep the {} that a token uses",
        share * 100.0,
        mixture.routing.experts,
        mixture.routing.groups,
        mixture.routing.used
    );
    let order_of_trace = options
        .trace
        .as_deref()
        .map(|path| {
            traced(path)
                .and_then(|counts| order(counts, mixture))
                .with_context(|| format!("--trace {}", path.display()))
        })
        .transpose()?;
    let program = options.evaluation.program(None)?;
    let chunks = options.evaluation.chunks;
    let folder = tempfile::tempdir()?;
    let (base, log) = (folder.path().join("base"), folder.path().join("log"));
    progress("evaluating the text with the model as it is");
    program.write_base(model, text, chunks, &base, &log)?;
    let order = match order_of_trace {
        Some(order) => order,
        None => {
            progress("measuring how much each expert contributes");
            let saliency = folder.path().join("saliency.json");
            let path = saliency
                .to_str()
                .context("the temporary folder has a name in UTF-8")?;
            let variables = [("LLAMA_EXPERT_TRACE_SALIENCY", path)];
            let mut running = program.start(model, &base, &log, &variables)?;
            running.first()?;
            running.end()?;
            order(
                measured(&std::fs::read_to_string(&saliency)?, options.by)?,
                mixture,
            )?
        }
    };
    let mut running = program.start(model, &base, &log, &[("LLAMA_EXPERT_MASKS", "1")])?;
    let as_it_is = running.first()?;
    let mut search = Search {
        mixture,
        running: &mut running,
        left: options.rounds,
        steps: vec![step("none", &as_it_is)],
    };
    let found = search.find(order, duplicates, count)?;
    let mut steps = search.steps;
    running.end()?;
    if let Some(check) = &options.check {
        progress("evaluating the other text");
        program.write_base(model, check, chunks, &base, &log)?;
        let mut running = program.start(model, &base, &log, &[("LLAMA_EXPERT_MASKS", "1")])?;
        running.first()?;
        running.mask(&found)?;
        let statistics = running.evaluate()?;
        steps.push(step("the other text", &statistics));
        running.end()?;
    }
    Ok(Found {
        experts: found,
        steps,
    })
}

/// What each expert of each layer contributes.
type Contributions = BTreeMap<u32, Vec<f64>>;

/// Reads what was measured.
fn measured(text: &str, by: By) -> Result<Contributions> {
    let measured: Value =
        serde_json::from_str(text).context("the drop-in wrote no contributions")?;
    let name = match by {
        By::Saliency => "saliency",
        By::Count => "counts",
    };
    let layers = measured["layers"].as_array().context("layers")?.iter();
    let layers = layers.map(|layer| {
        let number = layer["layer"].as_u64().context("a layer has a number")?;
        let values = layer[name].as_array().map_or(&[][..], Vec::as_slice);
        let values = values.iter().map(|value| value.as_f64().unwrap_or(0.0));
        Ok((number as u32, values.collect()))
    });
    layers.collect()
}

/// Reads how many tokens used each expert from an expert trace.
fn traced(path: &Path) -> Result<Contributions> {
    let (_, trace) = trace::read(path)?;
    let layers = trace.layers.into_iter().map(|layer| {
        let counts = layer.experts.into_iter().map(|count| count as f64);
        (layer.layer, counts.collect())
    });
    Ok(layers.collect())
}

/// Orders the experts of each layer, those that contribute least first.
fn order(contributions: Contributions, mixture: &Mixture) -> Result<Order> {
    ensure!(
        contributions.keys().eq(&mixture.layers),
        "contributions are known of the layers {:?}, and these have experts: {:?}",
        contributions.keys(),
        mixture.layers
    );
    let layers = contributions.into_iter().map(|(layer, worth)| {
        ensure!(
            worth.iter().any(|worth| *worth > 0.0),
            "layer {layer} has no contributions: use --by count, --trace or another program, or report its architecture"
        );
        ensure!(
            worth.len() as u64 == mixture.routing.experts,
            "the contributions of layer {layer} are those of {} experts, and the model has {}",
            worth.len(),
            mixture.routing.experts
        );
        let mut experts: Vec<u32> = (0..worth.len() as u32).collect();
        experts.sort_by(|one, two| worth[*one as usize].total_cmp(&worth[*two as usize]));
        Ok((layer, experts))
    });
    layers.collect()
}

fn step(what: &str, statistics: &Statistics) -> Step {
    Step {
        what: what.to_owned(),
        statistics: *statistics,
    }
}

/// Returns an order in which experts come first that have a duplicate that contributes more.
fn duplicates_first(order: &Order, duplicates: &Duplicates) -> Order {
    let layers = order.iter().map(|(layer, experts)| {
        let mut first: BTreeSet<u32> = BTreeSet::new();
        for set in duplicates.get(layer).into_iter().flatten() {
            let most = experts.iter().rfind(|expert| set.contains(expert));
            first.extend(set.iter().filter(|expert| Some(*expert) != most));
        }
        let (mut experts, others): (Vec<u32>, Vec<u32>) =
            experts.iter().partition(|expert| first.contains(expert));
        experts.extend(others);
        (*layer, experts)
    });
    layers.collect()
}

/// The masks with the smallest divergence so far.
struct Best {
    masks: Vec<LayerMask>,
    statistics: Statistics,
    /// Exchanges that were measured, and those that stayed.
    tried: u32,
    stayed: u32,
}

struct Search<'a> {
    mixture: &'a Mixture,
    running: &'a mut Running,
    /// Evaluations that may follow.
    left: u32,
    steps: Vec<Step>,
}

impl Search<'_> {
    fn find(
        &mut self,
        mut order: Order,
        duplicates: &Duplicates,
        count: u64,
    ) -> Result<Vec<LayerMask>> {
        let groups = self.mixture.routing.groups;
        let steps = (1..=STEPS).map(|step| count / groups * step / STEPS * groups);
        let mut steps: Vec<u64> = steps.filter(|part| *part > 0).collect();
        steps.dedup();
        // With a small budget, the last step counts.
        let skipped = steps.len().saturating_sub(self.left as usize);
        let mut best = None;
        for part in &steps[skipped..] {
            let masks = self.first(&order, *part);
            let statistics = self.measure(&masks)?;
            self.steps.push(step(&part.to_string(), &statistics));
            best = Some(Best {
                masks,
                statistics,
                tried: 0,
                stayed: 0,
            });
        }
        let mut best = best.context("no evaluation was permitted")?;
        let other_order = duplicates_first(&order, duplicates);
        let other = self.first(&other_order, count);
        let differing: Vec<usize> = (0..other.len())
            .filter(|&at| other[at] != best.masks[at])
            .collect();
        // All of them, and each one where that is worse.
        let all = std::iter::once(&*differing);
        let each = differing.chunks(1).filter(|_| differing.len() > 1);
        for part in all.chain(each) {
            let mut next = best.masks.clone();
            for &at in part {
                next[at] = other[at].clone();
            }
            if next != best.masks && self.left > 0 && self.exchange(&mut best, next)? {
                for &at in part {
                    let layer = other[at].layer;
                    order.insert(layer, other_order[&layer].clone());
                }
            }
        }
        let layers: Vec<u32> = order.keys().copied().collect();
        // Each pass looks one place further on both sides of the border.
        for distance in 0.. {
            let mut any = false;
            for layer in &layers {
                if self.left == 0 {
                    break;
                }
                let Some(next) = self.exchanged(&best.masks, &order, *layer, distance) else {
                    continue;
                };
                any = true;
                self.exchange(&mut best, next)?;
            }
            if !any {
                break;
            }
        }
        if best.tried > 0 {
            let what = format!("{count}, {} of {} exchanges", best.stayed, best.tried);
            self.steps.push(step(&what, &best.statistics));
        }
        Ok(best.masks)
    }

    /// Measures masks, which are the best ones if their divergence is smaller; returns whether it is.
    fn exchange(&mut self, best: &mut Best, next: Vec<LayerMask>) -> Result<bool> {
        let statistics = self.measure(&next)?;
        best.tried += 1;
        let stays = statistics.kld.mean < best.statistics.kld.mean;
        if stays {
            best.masks = next;
            best.statistics = statistics;
            best.stayed += 1;
        }
        Ok(stays)
    }

    /// The first experts of an order, the same number in each group.
    fn first(&self, order: &Order, count: u64) -> Vec<LayerMask> {
        let groups = self.mixture.routing.groups;
        let masks = order.iter().map(|(layer, experts)| {
            let of_group = |group| {
                let mut experts = experts.iter().copied();
                let of_group = experts
                    .by_ref()
                    .filter(move |expert| self.group(*expert) == group);
                of_group
                    .take((count / groups) as usize)
                    .collect::<Vec<u32>>()
            };
            let mut experts: Vec<u32> = (0..groups).flat_map(of_group).collect();
            experts.sort_unstable();
            LayerMask {
                layer: *layer,
                experts,
            }
        });
        masks.collect()
    }

    fn group(&self, expert: u32) -> u64 {
        u64::from(expert) / (self.mixture.routing.experts / self.mixture.routing.groups)
    }

    /// Exchanges an expert of a layer for another one of its group, so many places from the border; `None` where there
    /// are none.
    fn exchanged(
        &self,
        masks: &[LayerMask],
        order: &Order,
        layer: u32,
        distance: usize,
    ) -> Option<Vec<LayerMask>> {
        let at = masks.iter().position(|mask| mask.layer == layer)?;
        let masked = |expert: &u32| masks[at].experts.contains(expert);
        let order = &order[&layer];
        let out = *order
            .iter()
            .rev()
            .filter(|expert| masked(expert))
            .nth(distance)?;
        let same_group = |expert: &&u32| self.group(**expert) == self.group(out);
        let mut others = order
            .iter()
            .filter(|expert| !masked(expert))
            .filter(same_group);
        let new = *others.nth(distance)?;
        let mut next = masks.to_vec();
        let experts = &mut next[at].experts;
        experts.retain(|expert| *expert != out);
        experts.push(new);
        experts.sort_unstable();
        Some(next)
    }

    fn measure(&mut self, masks: &[LayerMask]) -> Result<Statistics> {
        self.left -= 1;
        let began = Instant::now();
        self.running.mask(masks)?;
        let statistics = self.running.evaluate()?;
        progress(&format!(
            "divergence {:.6} ({:.1} s; {} evaluations may follow)",
            statistics.kld.mean,
            began.elapsed().as_secs_f64(),
            self.left
        ));
        Ok(statistics)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn of_duplicates_the_one_that_contributes_most_comes_later() {
        let order = Order::from([(0, vec![4, 0, 3, 1, 2]), (1, vec![1, 0])]);
        let duplicates = Duplicates::from([(0, vec![vec![0, 1, 2]])]);
        let expected = Order::from([(0, vec![0, 1, 4, 3, 2]), (1, vec![1, 0])]);
        assert_eq!(duplicates_first(&order, &duplicates), expected);
    }

    #[test]
    fn the_order_is_that_of_the_contributions() {
        let mixture = Mixture::for_tests(4, 1);
        let text =
            r#"{"layers": [{"layer": 0, "counts": [5, 1, 0, 9], "saliency": [0.5, 0.9, 0, 0.1]}]}"#;
        let of = |text, by| order(measured(text, by).expect("contributions"), &mixture);
        assert_eq!(of(text, By::Saliency).expect("an order")[&0], [2, 3, 0, 1]);
        assert_eq!(of(text, By::Count).expect("an order")[&0], [2, 1, 0, 3]);
        for bad in [
            r#"{"layers": []}"#,
            r#"{"layers": [{"layer": 0, "counts": [0, 0, 0, 0]}]}"#,
            r#"{"layers": [{"layer": 0, "counts": [1, 2, 3]}]}"#,
            r#"{"layers": [{"layer": 1, "counts": [1, 2, 3, 4]}]}"#,
        ] {
            assert!(of(bad, By::Count).is_err(), "{bad}");
        }
    }
}
