//! Experts to leave out, by measurements in one running llama-perplexity.
//!
//! A first evaluation measures how much each expert contributes. Parts of the experts that contribute least are masked, a
//! step after the other, and each step is evaluated. What is left of the budget goes into exchanges. The first ones mask
//! experts that have the matrices of another one, in all layers at once or layer by layer. The others exchange, in one
//! layer, the expert that contributes most of those that are masked for the one that contributes least of the others. An
//! exchange stays if the divergence is smaller by more than two errors of the difference; and, if there is another text, if
//! it is not larger there.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::time::Instant;

use anyhow::{Context, Result, ensure};
use clap::ValueEnum;
use serde::Serialize;
use serde_json::Value;
use sidecar_core::gguf::GgufFile;
use sidecar_core::protocol::LayerMask;
use sidecar_core::text;
use sidecar_core::trace;

use crate::evaluation::program::{EvaluationOptions, MASKS, Program, Running};
use crate::evaluation::session::Session;
use crate::evaluation::statistics::{Statistics, is_smaller};
use crate::output::progress;
use crate::prune::duplicates::Duplicates;
use crate::pruned::Mixture;
use crate::sizes::{Table, share};

/// Parts of the way to the share that are evaluated.
const STEPS: u64 = 4;

/// The model as it is, in tables.
const NONE: &str = "none";

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
    #[arg(long, value_name = "FILE")]
    pub text: Option<PathBuf>,
    /// Another text, to evaluate with the experts that were found.
    ///
    /// They fit the first one. Exchanges that diverge more there are undone.
    #[arg(long, value_name = "FILE", requires = "text")]
    check: Option<PathBuf>,
    /// The order in which experts are tried.
    #[arg(
        long,
        value_enum,
        default_value = "saliency",
        conflicts_with = "experts"
    )]
    by: By,
    /// The order of the counts in an expert trace of an earlier run (JSON), in place of --by.
    #[arg(
        long,
        value_name = "FILE",
        conflicts_with_all = ["by", "experts"]
    )]
    trace: Option<PathBuf>,
    /// Evaluations of the text with masks, at most.
    #[arg(long, value_name = "N", default_value_t = 16, conflicts_with = "experts", value_parser = clap::value_parser!(u32).range(1..=100_000))]
    evaluations: u32,
    #[command(flatten)]
    evaluation: EvaluationOptions,
}

impl SearchOptions {
    /// The files that are read.
    pub fn inputs(&self) -> impl Iterator<Item = &PathBuf> {
        [&self.text, &self.check, &self.trace].into_iter().flatten()
    }
}

/// Experts of each layer, those that contribute least first.
type Order = BTreeMap<u32, Vec<u32>>;

/// What was found so far.
#[derive(Default, Serialize)]
pub struct Found {
    /// The experts to leave out.
    pub experts: Vec<LayerMask>,
    /// What was measured on the way.
    steps: Vec<Step>,
    /// The text that is evaluated now.
    #[serde(skip)]
    text: String,
}

/// A measurement.
#[derive(Serialize)]
struct Step {
    /// The name of the text.
    text: String,
    /// How many experts of a layer are masked.
    what: String,
    #[serde(flatten)]
    statistics: Statistics,
    /// Whether experts are left out.
    #[serde(skip)]
    is_cut: bool,
}

impl Found {
    /// Returns whether nothing was measured.
    pub fn is_empty(&self) -> bool {
        self.steps.is_empty()
    }

    /// Adds a measurement without some experts.
    pub fn add(&mut self, what: &str, statistics: &Statistics) {
        self.push(what, statistics, true);
    }

    fn push(&mut self, what: &str, statistics: &Statistics, is_cut: bool) {
        self.steps.push(Step {
            text: self.text.clone(),
            what: what.to_owned(),
            statistics: *statistics,
            is_cut,
        });
    }

    /// Returns the measurements as a table.
    pub fn table(&self) -> Table {
        let mut table = Table::new([
            "text",
            "left out of a layer",
            "KL divergence",
            "same top",
            "perplexity",
        ]);
        let rows = self.steps.iter().map(|step| {
            let mut row = vec![step.text.clone(), step.what.clone()];
            row.extend(step.statistics.cells());
            row
        });
        table.rows = rows.collect();
        table
    }

    /// Returns a sentence where the last cut costs no more than rounding, as far as its text shows.
    pub fn note(&self) -> Option<String> {
        let cut = self.steps.last().filter(|step| step.is_cut)?;
        let mut of_text = self.steps.iter().filter(|step| step.text == cut.text);
        let rounding = of_text.rfind(|step| !step.is_cut && step.what != NONE)?;
        let [rounding, kld] = [rounding, cut].map(|step| &step.statistics.kld);
        kld.is_within(rounding).then(|| {
            "The divergence of the last line is within the errors of that of rounding alone: the evaluated tokens show no cost.".into()
        })
    }
}

/// Which experts are left out, and how they are found.
pub struct Plan<'a> {
    options: &'a SearchOptions,
    mixture: &'a Mixture,
    text: &'a Path,
    /// Experts to leave out of each layer.
    count: u64,
    source: Source,
}

/// Where the experts come from.
enum Source {
    Measured,
    Traced(Order),
    Given(Vec<LayerMask>),
}

impl SearchOptions {
    /// Fails if so many experts cannot be left out.
    pub fn plan<'a>(
        &'a self,
        mixture: &'a Mixture,
        given: Option<Vec<LayerMask>>,
    ) -> Result<Plan<'a>> {
        let text = self.text.as_deref().context("--text is needed")?;
        let plan = |count, source| Plan {
            options: self,
            mixture,
            text,
            count,
            source,
        };
        if let Some(masks) = given {
            let count = masks.first().map_or(0, |mask| mask.experts.len());
            return Ok(plan(count as u64, Source::Given(masks)));
        }
        let share = self.leave_out.context("--leave-out is needed")?;
        let source = match &self.trace {
            None => Source::Measured,
            Some(path) => {
                let order = traced(path).and_then(|counts| order(counts, mixture));
                Source::Traced(order.with_context(|| {
                    format!(
                        "--trace {}: pass a trace of this model, see docs/expert-trace.md",
                        text::path(path)
                    )
                })?)
            }
        };
        Ok(plan(count(share, mixture)?, source))
    }

    /// Returns the program that evaluates; `None` if it is not available, and the options name no other one.
    pub fn program(&self) -> Result<Option<Program>> {
        match self.evaluation.program(None) {
            Err(_) if self.evaluation.is_default() => Ok(None),
            found => found.map(Some),
        }
    }

    /// Prepares the evaluations.
    pub fn session<'a>(
        &self,
        model: &'a Path,
        files: &'a [GgufFile],
        work: Option<&Path>,
    ) -> Result<Session<'a>> {
        let texts: Vec<&Path> = [&self.text, &self.check]
            .into_iter()
            .flatten()
            .map(|text| &**text)
            .collect();
        let program = self.evaluation.program(None)?;
        Session::new(
            program,
            (model, files),
            &texts,
            self.evaluation.chunks,
            work,
        )
    }
}

/// Returns the experts of each group, and how many of them can be left out.
fn of_group(mixture: &Mixture) -> (u64, u64) {
    let routing = &mixture.routing;
    let each = routing.experts / routing.groups;
    let groups = routing.groups_used.min(routing.groups);
    // With fewer in each group, a token would have too few to choose from, or a group none.
    let least = if routing.groups > 1 { 2 } else { 1 };
    let used = routing.most_used().div_ceil(groups);
    (each, each.saturating_sub(used.max(least)))
}

/// Returns how many experts a share of a layer is: the same number of each group.
fn count(share: f64, mixture: &Mixture) -> Result<u64> {
    let routing = &mixture.routing;
    let used = routing.most_used();
    let (each, most) = of_group(mixture);
    ensure!(
        most > 0,
        "a token uses {used} of the {} experts that it may choose from: none can be left out",
        each * routing.groups_used.min(routing.groups)
    );
    let of_group = (share * each as f64).round() as u64;
    let percent = |of: u64| of as f64 / each as f64 * 100.0;
    ensure!(
        (1..=most).contains(&of_group),
        "{} % of {} experts are {}: pass --leave-out {}% to {}%, since a token uses {used}",
        share * 100.0,
        routing.experts,
        of_group * routing.groups,
        percent(1),
        percent(most)
    );
    let count = of_group * routing.groups;
    progress(&format!(
        "leaving out {count} of {} experts in each of {} layers ({:.1} %)",
        routing.experts,
        mixture.layers.len(),
        percent(of_group)
    ));
    Ok(count)
}

impl Plan<'_> {
    /// Returns the experts of all layers: those that were found, and those that are given of layers that are not measured.
    pub fn with_given(&self, found: &[LayerMask]) -> Vec<LayerMask> {
        let mut all = found.to_vec();
        if let Source::Given(masks) = &self.source {
            let found = |mask: &&LayerMask| found.iter().any(|of| of.layer == mask.layer);
            all.extend(masks.iter().filter(|mask| !found(mask)).cloned());
        }
        all
    }

    /// As many experts of each layer as are left out, or those that are given.
    pub fn any_experts(&self) -> Vec<LayerMask> {
        if let Source::Given(masks) = &self.source {
            return masks.clone();
        }
        let layers = self.mixture.computed();
        let all = (0..self.mixture.routing.experts as u32).collect();
        let order: Order = layers.map(|layer| (layer, Vec::clone(&all))).collect();
        first(self.mixture, &order, self.count)
    }
}

/// Returns the numbers of experts that an eighth to a half of each layer are, as far as a token needs fewer.
pub fn counts(mixture: &Mixture) -> Vec<u64> {
    let (each, most) = of_group(mixture);
    let mut counts: Vec<u64> = (1..=4).map(|eighths| each * eighths / 8).collect();
    counts.dedup();
    counts.retain(|count| (1..=most).contains(count));
    let groups = mixture.routing.groups;
    counts.into_iter().map(|count| count * groups).collect()
}

/// Returns, for each of these numbers, the experts of each layer that contribute least to a text.
pub fn least(
    text: &Path,
    mixture: &Mixture,
    counts: &[u64],
    session: &mut Session<'_>,
) -> Result<Vec<Vec<LayerMask>>> {
    session.use_text(text)?;
    let order = measured_order(By::Saliency, mixture, session)?;
    let lists = counts.iter().map(|count| first(mixture, &order, *count));
    Ok(lists.collect())
}

/// Measures experts to leave out, and what they cost.
pub fn run(
    plan: &Plan<'_>,
    session: &mut Session<'_>,
    duplicates: impl FnOnce() -> Result<Duplicates>,
    found: &mut Found,
) -> Result<()> {
    session.use_text(plan.text)?;
    found.text = name(plan.text);
    let order = match &plan.source {
        Source::Measured => Some(measured_order(plan.options.by, plan.mixture, session)?),
        Source::Traced(order) => Some(order.clone()),
        Source::Given(_) => None,
    };
    let mut running = start(session, found)?;
    let before = match order {
        Some(order) => {
            let mut search = Search {
                mixture: plan.mixture,
                running: &mut running,
                left: plan.options.evaluations,
                found,
            };
            search.find(order, &duplicates()?, plan.count)?
        }
        None => {
            let given = plan.mixture.masks_of_computed(&plan.any_experts());
            running.mask(&given)?;
            found.add(&plan.count.to_string(), &running.evaluate()?);
            found.experts.clone_from(&given);
            given
        }
    };
    running.end()?;
    match &plan.options.check {
        Some(text) => check(text, plan.count, &before, session, found),
        None => Ok(()),
    }
}

/// Starts a program that masks experts, and adds the model as it is, also with other rounding.
fn start(session: &mut Session<'_>, found: &mut Found) -> Result<Running> {
    let rounding = session.evaluate_rounding()?;
    let mut running = session.start(&MASKS)?;
    found.push(NONE, &running.first()?, false);
    if let Some((set, statistics)) = rounding {
        found.push(&format!("none, flash attention {set}"), &statistics, false);
    }
    Ok(running)
}

/// Evaluates another text: without the exchanges, which fit the first one, and with them. Those stay if they diverge less
/// here, too.
fn check(
    text: &Path,
    count: u64,
    before: &[LayerMask],
    session: &mut Session<'_>,
    found: &mut Found,
) -> Result<()> {
    session.use_text(text)?;
    found.text = name(text);
    let mut running = start(session, found)?;
    running.mask(before)?;
    let first = running.evaluate()?;
    found.add(&count.to_string(), &first);
    if found.experts != before {
        running.mask(&found.experts)?;
        let exchanged = running.evaluate()?;
        found.add(&format!("{count}, with exchanges"), &exchanged);
        if exchanged.kld.mean > first.kld.mean {
            progress("the exchanges fit the first text alone, and are undone");
            found.experts = before.to_vec();
        }
    }
    running.end()
}

/// Measures how much each expert contributes.
fn measured_order(by: By, mixture: &Mixture, session: &Session<'_>) -> Result<Order> {
    progress("measuring how much each expert contributes");
    let saliency = session.path("saliency.json");
    let mut running = session.start(&[("LLAMA_EXPERT_TRACE_SALIENCY", &saliency)])?;
    running.first()?;
    running.end()?;
    let text = std::fs::read_to_string(&saliency)?;
    order(measured(&text, by)?, mixture)
}

/// The name of a text in tables.
fn name(text: &Path) -> String {
    text.file_name()
        .unwrap_or_default()
        .to_string_lossy()
        .into()
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
fn order(mut contributions: Contributions, mixture: &Mixture) -> Result<Order> {
    contributions.retain(|layer, _| !mixture.routing.predicting.contains(layer));
    ensure!(
        contributions.keys().copied().eq(mixture.computed()),
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

/// The first experts of an order, the same number in each group.
fn first(mixture: &Mixture, order: &Order, count: u64) -> Vec<LayerMask> {
    let groups = mixture.routing.groups;
    let masks = order.iter().map(|(layer, experts)| {
        let of_group = |number| {
            let experts = experts.iter().copied();
            let of_group = experts.filter(move |expert| group(mixture, *expert) == number);
            of_group.take((count / groups) as usize)
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

/// The group of an expert.
fn group(mixture: &Mixture, expert: u32) -> u64 {
    u64::from(expert) / (mixture.routing.experts / mixture.routing.groups)
}

/// The masks with the smallest divergence so far.
struct Best {
    masks: Vec<LayerMask>,
    /// The divergence of each chunk.
    chunks: Vec<f64>,
    count: u64,
    /// Exchanges that were measured, and those that stayed.
    tried: u32,
    stayed: u32,
}

struct Search<'a> {
    mixture: &'a Mixture,
    running: &'a mut Running,
    /// Evaluations that may follow.
    left: u32,
    found: &'a mut Found,
}

impl Search<'_> {
    /// Returns the experts to leave out before the exchanges.
    fn find(
        &mut self,
        order: Order,
        duplicates: &Duplicates,
        count: u64,
    ) -> Result<Vec<LayerMask>> {
        let mut best = self.steps(&order, count)?;
        let before = best.masks.clone();
        self.found.experts.clone_from(&before);
        let order = self.exchange_duplicates(&mut best, order, duplicates)?;
        self.exchange_at_border(&mut best, &order)?;
        if best.tried > 0 {
            progress(&format!(
                "{} of {} exchanges diverge less by more than two errors of the difference",
                best.stayed, best.tried
            ));
        }
        Ok(before)
    }

    /// Measures parts of the way. Returns the last one, which counts if the budget is small.
    fn steps(&mut self, order: &Order, count: u64) -> Result<Best> {
        let groups = self.mixture.routing.groups;
        let steps = (1..=STEPS).map(|step| count / groups * step / STEPS * groups);
        let mut steps: Vec<u64> = steps.filter(|part| *part > 0).collect();
        steps.dedup();
        let skipped = steps.len().saturating_sub(self.left as usize);
        let mut best = None;
        for part in &steps[skipped..] {
            let masks = first(self.mixture, order, *part);
            let statistics = self.measure(&masks)?;
            self.found.add(&part.to_string(), &statistics);
            best = Some(Best {
                masks,
                chunks: self.running.chunks().to_vec(),
                count,
                tried: 0,
                stayed: 0,
            });
        }
        best.context("no evaluation was permitted")
    }

    /// Masks duplicates in place of what contributes least: all of them, and each one where that is worse. Returns the
    /// order that led to the masks.
    fn exchange_duplicates(
        &mut self,
        best: &mut Best,
        mut order: Order,
        duplicates: &Duplicates,
    ) -> Result<Order> {
        let other_order = duplicates_first(&order, duplicates);
        let other = first(self.mixture, &other_order, best.count);
        let differing: Vec<usize> = (0..other.len())
            .filter(|&at| other[at] != best.masks[at])
            .collect();
        let all = std::iter::once(&*differing);
        let each = differing.chunks(1).filter(|_| differing.len() > 1);
        for part in all.chain(each) {
            let mut next = best.masks.clone();
            for &at in part {
                next[at] = other[at].clone();
            }
            if next != best.masks && self.left > 0 && self.exchange(best, next)? {
                for &at in part {
                    let layer = other[at].layer;
                    order.insert(layer, other_order[&layer].clone());
                }
            }
        }
        Ok(order)
    }

    /// Exchanges experts at the border between those that are masked and the others, one layer after the other. Each pass
    /// looks one place further on both sides.
    fn exchange_at_border(&mut self, best: &mut Best, order: &Order) -> Result<()> {
        for distance in 0.. {
            let mut any = false;
            for layer in order.keys() {
                if self.left == 0 {
                    return Ok(());
                }
                if let Some(next) = self.exchanged(&best.masks, order, *layer, distance) {
                    any = true;
                    self.exchange(best, next)?;
                }
            }
            if !any {
                break;
            }
        }
        Ok(())
    }

    /// Measures masks, which are the best ones if their divergence is smaller by more than two errors of the difference;
    /// returns whether it is.
    fn exchange(&mut self, best: &mut Best, next: Vec<LayerMask>) -> Result<bool> {
        let statistics = self.measure(&next)?;
        best.tried += 1;
        let stays = is_smaller(self.running.chunks(), &best.chunks);
        if stays {
            best.stayed += 1;
            best.chunks = self.running.chunks().to_vec();
            self.found.experts.clone_from(&next);
            best.masks = next;
            let exchanges = if best.stayed == 1 {
                "exchange"
            } else {
                "exchanges"
            };
            let what = format!("{}, with {} {exchanges}", best.count, best.stayed);
            if best.stayed > 1 {
                self.found.steps.pop();
            }
            self.found.add(&what, &statistics);
        }
        Ok(stays)
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
        let same_group = |expert: &&u32| group(self.mixture, **expert) == group(self.mixture, out);
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
            "divergence {:.6} ({:.1} s; {} more may follow)",
            statistics.kld.mean.max(0.0),
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
    fn a_token_keeps_as_many_experts_as_it_uses() {
        let mixture = |experts, groups, used, groups_used| {
            let mut mixture = Mixture::for_tests(experts, groups);
            mixture.routing.used = vec![used];
            mixture.routing.groups_used = groups_used;
            mixture
        };
        let of = |share, mixture| count(share, &mixture).ok();
        assert_eq!(of(0.25, mixture(8, 1, 2, 1)), Some(2));
        assert_eq!(of(0.33, mixture(8, 1, 2, 1)), Some(3));
        assert_eq!(of(0.75, mixture(8, 1, 2, 1)), Some(6));
        assert_eq!(of(0.9, mixture(8, 1, 2, 1)), None);
        assert_eq!(of(0.01, mixture(8, 1, 2, 1)), None);
        // Three of four groups: each keeps at least two of eight.
        assert_eq!(of(0.75, mixture(32, 4, 6, 3)), Some(24));
        assert_eq!(of(0.75, mixture(32, 4, 7, 3)), None);
        // A group with one expert is never chosen.
        assert_eq!(of(0.5, mixture(32, 8, 2, 4)), Some(16));
        assert_eq!(of(0.75, mixture(32, 8, 2, 4)), None);
        assert_eq!(of(0.5, mixture(16, 8, 2, 4)), None);
        // A file may state anything.
        assert_eq!(of(0.5, mixture(8, 2, 9, 1 << 40)), None);
        assert_eq!(of(0.5, mixture(8, 1, 8, 1)), None);
    }

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
