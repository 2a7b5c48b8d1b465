//! What was measured, the recipe that follows, and uniform types for comparison.

use std::collections::BTreeMap;
use std::ffi::CString;

use anyhow::{Context, Result, ensure};
use sidecar_core::gguf::{companions, padded};

use super::groups::Group;
use super::mix::{Mix, Part};
use super::model;
use super::recipe::{self, Choice};
use super::sweep::{Change, Chosen, Plan, Sweep};
use super::write;
use crate::evaluation::statistics::{Figure, Statistics};
use crate::sizes::size_text;

/// The limit for a recipe.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Goal {
    /// Bytes of the file.
    Size(u64),
    /// Bits of the tensors over the number of weights.
    BitsPerWeight(f64),
}

/// The recipe.
pub struct Recipe<'a> {
    pub mix: Mix<'a>,
    /// The divergence, if the divergences of the groups add up.
    pub expected: f64,
    pub statistics: Statistics,
}

/// All tensors with one candidate.
pub struct Uniform<'a> {
    pub candidate: usize,
    pub mix: Mix<'a>,
    pub statistics: Statistics,
}

/// All measurements.
pub struct Results<'a> {
    pub plan: &'a Plan<'a>,
    pub groups: Vec<Group>,
    pub goal: Option<Goal>,
    pub baseline: Statistics,
    /// The model as it is with another rounding, if the program can do that.
    pub rounding: Option<Statistics>,
    /// For each group and each candidate.
    pub measured: Vec<Vec<Statistics>>,
    /// For each cut.
    pub cuts: Vec<Statistics>,
    pub recipe: Option<Recipe<'a>>,
    pub uniform: Vec<Uniform<'a>>,
}

/// What a recipe can choose from beside a cut.
struct Selection {
    cut: Option<usize>,
    /// For each group its candidates, then the group as it is.
    choices: Vec<Vec<Choice>>,
    /// Bytes that all groups can have.
    budget: u64,
}

impl<'a> Results<'a> {
    /// Returns results without measurements. Fails if no mix fits the goal.
    pub fn new(plan: &'a Plan<'a>, groups: Vec<Group>, goal: Option<Goal>) -> Result<Results<'a>> {
        // Figures of no model, until there are measurements.
        let zero = Figure {
            mean: 0.0,
            error: 0.0,
        };
        let zero = Statistics {
            kld: zero,
            same_top: zero,
            ppl: zero,
        };
        let results = Results {
            baseline: zero,
            rounding: None,
            measured: vec![vec![zero; plan.candidates.len()]; groups.len()],
            cuts: vec![zero; plan.cuts.len()],
            plan,
            groups,
            goal,
            recipe: None,
            uniform: Vec::new(),
        };
        if let Some((limit, _)) = results.limit()? {
            results.selections(limit)?;
        }
        Ok(results)
    }

    /// Measures what is not known yet.
    pub fn measure(self, sweep: &mut Sweep<'a>) -> Result<Results<'a>> {
        let mut results = self;
        let plan = results.plan;
        results.rounding = sweep.rounding()?;
        results.baseline = sweep.baseline()?;
        // Type by type, so that the first figures do not wait for the last type.
        for (candidate, of) in plan.candidates.iter().enumerate() {
            for group in 0..results.groups.len() {
                let what = format!("{} as {}", results.groups[group].name, of.name);
                let mut choices = vec![None; results.groups.len()];
                choices[group] = Some(candidate);
                let change = results.change(&choices, None);
                results.measured[group][candidate] = sweep.measure(&what, change)?;
            }
        }
        for (cut, of) in plan.cuts.iter().enumerate() {
            let what = format!("without the experts of the list '{}'", of.name);
            let change = results.change(&[], Some(cut));
            results.cuts[cut] = sweep.measure(&what, change)?;
        }
        if results.goal.is_some() {
            results.recipe = Some(results.choose(sweep)?);
            for (candidate, of) in plan.candidates.iter().enumerate() {
                let choices = vec![Some(candidate); results.groups.len()];
                let what = format!("all as {}", of.name);
                let statistics = sweep.measure(&what, results.change(&choices, None))?;
                results.uniform.push(Uniform {
                    candidate,
                    mix: results.mix(choices, None)?,
                    statistics,
                });
            }
        }
        Ok(results)
    }

    /// Returns the model as it is.
    pub fn as_it_is(&self) -> Result<Mix<'a>> {
        self.without(None)
    }

    /// Returns the model with all tensors as they are, and a cut.
    pub fn without(&self, cut: Option<usize>) -> Result<Mix<'a>> {
        self.mix(vec![None; self.groups.len()], cut)
    }

    /// Returns the bytes of the file that the goal permits, if there is one, and of its header.
    pub fn limit(&self) -> Result<Option<(u64, u64)>> {
        let now = self.as_it_is()?;
        let tensors: u64 = now.parts.iter().map(|part| in_file(part.bytes)).sum();
        let header = now.bytes - tensors;
        let weights = self.plan.model.elements() as f64;
        Ok(self.goal.map(|goal| match goal {
            Goal::Size(bytes) => (bytes, header),
            Goal::BitsPerWeight(bits) => {
                let bytes = (bits * weights / 8.0) as u64;
                (header.saturating_add(bytes), header)
            }
        }))
    }

    /// Returns what a recipe can choose from with each cut, and with none, as far as that permits a mix. Fails if nothing
    /// does.
    fn selections(&self, limit: u64) -> Result<Vec<Selection>> {
        let (_, header) = self.limit()?.context("no goal")?;
        let weights = self.plan.model.elements() as f64;
        let mut found = Vec::new();
        let mut smallest = u64::MAX;
        for cut in std::iter::once(None).chain((0..self.plan.cuts.len()).map(Some)) {
            let groups = (0..self.groups.len()).map(|group| self.choices(group, cut));
            let choices: Vec<Vec<Choice>> = groups.collect::<Result<_>>()?;
            let sum = |bytes: fn(&[Choice]) -> u64| choices.iter().map(|of| bytes(of)).sum::<u64>();
            // The last choice of a group is to stay as it is.
            let now = sum(|of| of.last().map_or(0, |choice| choice.bytes));
            let fixed = self.without(cut)?.bytes - now;
            let least = fixed + sum(|of| of.iter().map(|choice| choice.bytes).min().unwrap_or(0));
            smallest = smallest.min(least);
            if least <= limit {
                found.push(Selection {
                    cut,
                    choices,
                    budget: limit - fixed,
                });
            }
        }
        ensure!(
            !found.is_empty(),
            "no mix of these types is as small as the limit: the smallest has {smallest} bytes ({}, {:.3} bits a weight); raise the limit, or add a smaller type to --types",
            size_text(smallest as f64),
            smallest.saturating_sub(header) as f64 * 8.0 / weights
        );
        Ok(found)
    }

    fn choose(&self, sweep: &mut Sweep<'a>) -> Result<Recipe<'a>> {
        let (limit, _) = self.limit()?.context("no goal")?;
        let (expected, mix) = self.best(limit)?;
        let statistics = sweep.measure("the recipe", self.change(&mix.choices, mix.cut))?;
        Ok(Recipe {
            mix,
            expected,
            statistics,
        })
    }

    /// Returns the mix for a size that is expected to diverge least, and by how much.
    pub fn best(&self, limit: u64) -> Result<(f64, Mix<'a>)> {
        let mut best: Option<(f64, Option<usize>, Vec<usize>)> = None;
        for Selection {
            cut,
            choices,
            budget,
        } in self.selections(limit)?
        {
            let found = recipe::allocate(&choices, budget).context("no mix fits the limit")?;
            let chosen = choices.iter().zip(&found);
            let cost: f64 = chosen.map(|(of, at)| of[*at].cost).sum();
            let cost = cost + cut.map_or(0.0, |cut| self.beyond(&self.cuts[cut]));
            if best.as_ref().is_none_or(|(least, ..)| cost < *least) {
                best = Some((cost, cut, found));
            }
        }
        let (cost, cut, found) = best.context("no mix fits the limit")?;
        let candidates = found
            .iter()
            .map(|at| (*at < self.plan.candidates.len()).then_some(*at));
        let expected = match cost > 0.0 {
            true => self.floor().mean + cost,
            false => self.baseline.kld.mean + cost,
        };
        Ok((expected, self.mix(candidates.collect(), cut)?))
    }

    /// Returns the choices for a group beside a cut: each candidate, then the group as it is.
    fn choices(&self, group: usize, cut: Option<usize>) -> Result<Vec<Choice>> {
        let of = &self.groups[group];
        let sum = |bytes: &dyn Fn(usize) -> u64| -> Result<u64> {
            let tensors = of.tensors.iter();
            let left = tensors.map(|at| self.plan.left(cut, &self.plan.tensors[*at], bytes(*at)));
            left.map(|bytes| bytes.map(in_file)).sum()
        };
        let candidates = (0..self.plan.candidates.len()).map(|candidate| {
            Ok(Choice {
                bytes: sum(&|at| self.plan.outcomes[candidate][at].bytes)?,
                cost: self.added(group, candidate),
            })
        });
        let as_it_is =
            sum(&|at| self.plan.tensors[at].info.nbytes).map(|bytes| Choice { bytes, cost: 0.0 });
        candidates.chain([as_it_is]).collect()
    }

    /// Returns what a candidate for a group adds to the divergence. Less than nothing, which only a
    /// better reference makes possible, is zero within the errors.
    pub fn added(&self, group: usize, candidate: usize) -> f64 {
        self.beyond(&self.measured[group][candidate])
    }

    /// Returns the divergence that any change has: each group was measured with that of rounding, which a mix has once.
    fn floor(&self) -> Figure {
        let baseline = self.baseline.kld;
        let rounding = self.rounding.map_or(baseline, |of| of.kld);
        match rounding.mean > baseline.mean {
            true => rounding,
            false => baseline,
        }
    }

    /// Returns how far a divergence is beyond that of the model as it is, or of rounding.
    fn beyond(&self, statistics: &Statistics) -> f64 {
        let (now, before) = (statistics.kld, self.baseline.kld);
        let added = now.mean - before.mean;
        if added >= 0.0 {
            // Of two changes that are both within rounding, the one with the smaller divergence is better.
            return (now.mean - self.floor().mean).max(added / 1000.0);
        }
        match added < 0.0 && now.is_equal_to(&before) {
            true => 0.0,
            false => added,
        }
    }

    /// Returns the bytes of a group with a candidate.
    pub fn group_bytes(&self, group: usize, candidate: usize) -> u64 {
        let tensors = self.groups[group].tensors.iter();
        tensors
            .map(|at| self.plan.outcomes[candidate][*at].bytes)
            .sum()
    }

    /// Returns the smallest candidate for a group whose divergence is the same within the errors:
    /// `Err` if that is no change at all.
    pub fn equal_to(&self, group: usize, candidate: usize) -> Option<Result<usize, ()>> {
        let kld = self.measured[group][candidate].kld;
        let (floor, baseline) = (self.floor(), self.baseline.kld);
        let is_rounding = (baseline.mean..=floor.mean).contains(&kld.mean);
        if is_rounding || kld.is_equal_to(&floor) || kld.is_equal_to(&baseline) {
            return Some(Err(()));
        }
        let bytes = self.group_bytes(group, candidate);
        let mut others: Vec<usize> = (0..self.plan.candidates.len())
            .filter(|other| self.group_bytes(group, *other) < bytes)
            .filter(|other| self.measured[group][*other].kld.is_equal_to(&kld))
            .collect();
        others.sort_by_key(|other| self.group_bytes(group, *other));
        others.first().map(|other| Ok(*other))
    }

    /// Returns the types that a candidate has in a group.
    pub fn types(&self, group: usize, candidate: usize) -> Vec<&'static str> {
        let tensors = self.groups[group].tensors.iter();
        let mut names: Vec<_> = tensors
            .map(|at| self.plan.outcomes[candidate][*at].ty.name())
            .collect();
        names.sort_unstable();
        names.dedup();
        names
    }

    fn chosen(&self, choices: &[Option<usize>]) -> Vec<Chosen> {
        let groups = self.groups.iter().zip(choices);
        let of = groups.filter_map(|(group, choice)| Some((group, (*choice)?)));
        of.flat_map(|(group, candidate)| {
            group
                .tensors
                .iter()
                .map(move |&tensor| Chosen { tensor, candidate })
        })
        .collect()
    }

    fn change(&self, choices: &[Option<usize>], cut: Option<usize>) -> Change {
        Change {
            chosen: self.chosen(choices),
            cut,
        }
    }

    fn mix(&self, choices: Vec<Option<usize>>, cut: Option<usize>) -> Result<Mix<'a>> {
        let plan = self.plan;
        let chosen: BTreeMap<&str, Chosen> = self
            .chosen(&choices)
            .into_iter()
            .map(|of| (plan.tensors[of.tensor].name, of))
            .collect();
        // Its companions come from where a weight comes from.
        let companions: BTreeMap<CString, usize> = chosen
            .values()
            .flat_map(|of| {
                let tensor = &plan.sources[of.tensor];
                let name = tensor.file.header.name(tensor.info);
                let names = companions(name, |name| plan.model.has(name)).into_iter();
                names.map(|name| (name, of.candidate))
            })
            .collect();
        let mut elements = 0;
        let parts = plan.model.tensors().into_iter().map(|tensor| {
            let candidate = chosen.get(tensor.name);
            let outcome = candidate.map(|of| plan.outcomes[of.candidate][of.tensor]);
            let bytes = outcome.map_or(tensor.info.nbytes, |outcome| outcome.bytes);
            elements += plan.left(cut, &tensor, model::elements(tensor.info))?;
            Ok(Part {
                ty: outcome.map_or(tensor.info.ty, |outcome| outcome.ty),
                bytes: plan.left(cut, &tensor, bytes)?,
                candidate: match candidate {
                    Some(of) => Some(of.candidate),
                    None => companions
                        .get(tensor.file.header.name(tensor.info))
                        .copied(),
                },
                tensor,
            })
        });
        let parts = parts.collect::<Result<_>>()?;
        let mut mix = Mix {
            choices,
            cut,
            parts,
            bytes: 0,
            bits_per_weight: 0.0,
        };
        let tensors: u64 = mix.parts.iter().map(|part| in_file(part.bytes)).sum();
        mix.bytes = tensors + write::header(plan, &mix)?.len() as u64;
        let bits = mix
            .parts
            .iter()
            .map(|part| part.bytes as f64 * 8.0)
            .sum::<f64>();
        mix.bits_per_weight = bits / elements.max(1) as f64;
        Ok(mix)
    }
}

/// Returns the size of a tensor with its padding.
fn in_file(bytes: u64) -> u64 {
    padded(bytes, 32).unwrap_or(bytes)
}
