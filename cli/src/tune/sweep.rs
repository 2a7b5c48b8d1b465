//! Measurements: from the work folder if they are known, else in the running program.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::Instant;

use anyhow::{Context, Result, ensure};
use indicatif::{ProgressBar, ProgressStyle};
use sidecar_core::protocol::{LayerMask, Overlay};
use sidecar_core::reload::hash_bytes;
use sidecar_core::text;

use super::candidate::{Candidate, Origin, Outcome};
use super::kept::Quantizer;
use super::model::{Model, Tensor, elements};
use super::record::{BASE_LOGITS, Measurement, Record};
use crate::control::mask;
use crate::evaluation::base::Base;
use crate::evaluation::program::{MASKS, Program, Running};
use crate::evaluation::session::check_files;
use crate::evaluation::statistics::Statistics;
use crate::pruned::{Mixture, Pruned};
use crate::space::{Need, used_in};

/// The key of the measurement without overlays.
const BASELINE: &str = "baseline";
/// The key of the model as it is with another rounding.
const ROUNDING: &str = "rounding";

/// What is measured, and with what.
pub struct Plan<'a> {
    /// The model that the program loads.
    pub model: &'a Model,
    /// Its tensors that get other types.
    pub tensors: Vec<Tensor<'a>>,
    /// The same tensors of the source.
    pub sources: Vec<Tensor<'a>>,
    pub candidates: Vec<Candidate>,
    /// What each tensor becomes, for each candidate.
    pub outcomes: Vec<Vec<Outcome>>,
    /// Hashes of the candidates that are files.
    pub contents: Vec<String>,
    /// Experts that the model may do without.
    pub cuts: Vec<Cut<'a>>,
    pub quantizer: Quantizer<'a>,
    pub program: &'a Program,
    pub folder: PathBuf,
}

/// Experts that the model may do without.
pub struct Cut<'a> {
    /// The name of the list, without its extension.
    pub name: String,
    pub masks: Vec<LayerMask>,
    pub pruned: Pruned<'a>,
}

impl<'a> Cut<'a> {
    /// Reads a list of experts.
    pub fn read(path: &Path, model: &'a Model, mixture: &'a Mixture) -> Result<Cut<'a>> {
        let masks = mask::read(path)?;
        let pruned = Pruned::of(&model.files, mixture, &masks)
            .with_context(|| format!("--experts {}", text::path(path)))?;
        let name = path.file_stem().unwrap_or_default().to_string_lossy();
        Ok(Cut {
            name: name.into_owned(),
            masks: mixture.masks_of_computed(&masks),
            pruned,
        })
    }
}

/// What is measured: the model with changes.
#[derive(Debug, Clone, Default)]
pub struct Change {
    /// Tensors that have a candidate.
    pub chosen: Vec<Chosen>,
    /// The cut, by position.
    pub cut: Option<usize>,
}

/// Measures, and keeps what was measured.
pub struct Sweep<'a> {
    plan: &'a Plan<'a>,
    /// The base logits.
    base: PathBuf,
    record: Record,
    running: Option<Running>,
    /// The file of each candidate.
    files: Vec<Option<PathBuf>>,
    bar: ProgressBar,
    done: usize,
    total: usize,
}

/// A candidate for a tensor, both by position.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Chosen {
    pub tensor: usize,
    pub candidate: usize,
}

impl Plan<'_> {
    /// Returns the bytes of quantised tensors in the work folder.
    pub fn quantised_bytes(&self) -> u64 {
        let all = self.candidates.iter().zip(&self.outcomes);
        let quantised = all.filter(|(of, _)| matches!(of.origin, Origin::Type(_)));
        let outcomes = quantised.flat_map(|(_, outcomes)| outcomes);
        outcomes.map(|outcome| outcome.bytes).sum()
    }

    /// Fails if there is too little space for the work folder, or for a new model of at most so many bytes: before the
    /// measurements.
    pub fn check_space(&self, output: Option<(&Path, u64)>) -> Result<()> {
        let tensors = self.folder.join("tensors");
        let left = self.quantised_bytes().saturating_sub(used_in(&tensors));
        let needs = Need::of(output.into_iter().chain([(&*tensors, left)]))?;
        needs.iter().try_for_each(Need::check)
    }

    /// Returns how many chunks of the text are evaluated.
    pub fn chunks(&self) -> Result<Option<u32>> {
        Base::read(&self.folder.join(BASE_LOGITS)).map(|base| Some(base.chunks))
    }

    /// Returns whether a candidate leaves a tensor as it is in the model.
    fn is_unchanged(&self, chosen: Chosen) -> bool {
        let (now, source) = (&self.tensors[chosen.tensor], &self.sources[chosen.tensor]);
        let outcome = self.outcomes[chosen.candidate][chosen.tensor];
        let is_type = matches!(self.candidates[chosen.candidate].origin, Origin::Type(_));
        is_type && std::ptr::eq(now.file, source.file) && std::ptr::eq(now.info.ty, outcome.ty)
    }

    /// Returns what a cut leaves of so many elements of a tensor, or of its bytes in any type.
    pub fn left(&self, cut: Option<usize>, tensor: &Tensor<'_>, whole: u64) -> Result<u64> {
        match cut {
            Some(cut) => {
                let pruned = &self.cuts[cut].pruned;
                pruned.left_of(tensor.file, tensor.info, whole)
            }
            None => Ok(whole),
        }
    }

    /// Identifies a change, independently of other tensors, candidates and cuts.
    fn key(&self, change: &Change) -> String {
        let masks = change.cut.map_or(&[][..], |cut| &self.cuts[cut].masks);
        if change.chosen.is_empty() && masks.is_empty() {
            return BASELINE.into();
        }
        let mut parts: Vec<String> = change
            .chosen
            .iter()
            .map(|of| {
                let outcome = self.outcomes[of.candidate][of.tensor];
                let content = &self.contents[of.candidate];
                let name = self.tensors[of.tensor].name;
                format!("{name} {} {content}\n", outcome.ty.name())
            })
            .collect();
        let masks = masks
            .iter()
            .map(|mask| format!("layer {} without {:?}\n", mask.layer, mask.experts));
        parts.extend(masks);
        parts.sort();
        format!("{:032x}", hash_bytes(parts.concat().as_bytes()))
    }
}

impl<'a> Sweep<'a> {
    /// `total` is the number of measurements, known ones included.
    pub fn new(
        plan: &'a Plan<'a>,
        base: PathBuf,
        record: Record,
        total: usize,
    ) -> Result<Sweep<'a>> {
        let bar = ProgressBar::new(total as u64);
        bar.set_style(ProgressStyle::with_template(
            "{pos} of {len} {wide_bar} {eta_precise} left, {msg}",
        )?);
        Ok(Sweep {
            plan,
            base,
            record,
            running: None,
            files: vec![None; plan.candidates.len()],
            bar,
            done: 0,
            total,
        })
    }

    /// Returns the statistics of the model as it is.
    pub fn baseline(&mut self) -> Result<Statistics> {
        self.measure("the model as it is", Change::default())
    }

    /// Returns the statistics of the model as it is with another rounding, before all others: a process of its own evaluates
    /// it. `None` if the program cannot do it.
    pub fn rounding(&mut self) -> Result<Option<Statistics>> {
        self.done += 1;
        if let Some(known) = self.record.find(ROUNDING) {
            return Ok(Some(known.statistics));
        }
        let (plan, began) = (self.plan, Instant::now());
        let log = plan.folder.join("perplexity.log");
        let found = plan
            .program
            .evaluate_rounding(&plan.model.path, &self.base, &log)?;
        check_files(&plan.model.files)?;
        let Some((_, statistics)) = found else {
            return Ok(None);
        };
        let seconds = began.elapsed().as_secs_f64();
        self.add(ROUNDING.into(), "rounding alone", seconds, statistics)?;
        Ok(Some(statistics))
    }

    /// Returns the statistics with a change.
    pub fn measure(&mut self, what: &str, mut change: Change) -> Result<Statistics> {
        change
            .chosen
            .retain(|candidate| !self.plan.is_unchanged(*candidate));
        let key = self.plan.key(&change);
        self.done += 1;
        self.bar.set_message(text::line(what).into_owned());
        if let Some(known) = self.record.find(&key) {
            let statistics = known.statistics;
            // Known measurements take no time, which an estimate must not use.
            self.total -= 1;
            self.done -= 1;
            self.bar.set_length(self.total as u64);
            return Ok(statistics);
        }
        let overlays = self.overlays(&change.chosen)?;
        let is_first = self.running.is_none();
        self.start()?;
        // The first evaluation was that of the model as it is.
        if let Some(known) = self.record.find(&key).filter(|_| is_first) {
            return Ok(known.statistics);
        }
        let running = self.running.as_mut().context("no program runs")?;
        let began = Instant::now();
        let cuts = &self.plan.cuts;
        let statistics = running
            .swap(&overlays)
            .and_then(|()| match cuts.is_empty() {
                true => Ok(()),
                false => running.mask(change.cut.map_or(&[], |cut| &cuts[cut].masks)),
            })
            .and_then(|()| running.evaluate())
            .with_context(|| format!("cannot measure {what}"))?;
        self.add(key, what, began.elapsed().as_secs_f64(), statistics)?;
        Ok(statistics)
    }

    /// Returns the file with the tensors of a candidate. Quantises them if no file has them.
    pub fn file(&mut self, candidate: usize) -> Result<PathBuf> {
        if let Some(known) = &self.files[candidate] {
            return Ok(known.clone());
        }
        let plan = self.plan;
        let of = &plan.candidates[candidate];
        let path = match &of.origin {
            Origin::Files(model) => model.path.clone(),
            Origin::Type(_) => {
                let total = plan
                    .sources
                    .iter()
                    .map(|tensor| elements(tensor.info))
                    .sum();
                let bar = ProgressBar::new(total);
                bar.set_style(ProgressStyle::with_template(
                    "quantising to {msg} {wide_bar} {percent} %, {eta} left",
                )?);
                bar.set_message(text::line(&of.name).into_owned());
                let outcomes = &plan.outcomes[candidate];
                let made = plan
                    .quantizer
                    .make(&of.name, &plan.sources, outcomes, &bar)?;
                bar.finish_and_clear();
                made
            }
        };
        Ok(self.files[candidate].insert(path).clone())
    }

    /// Ends the program.
    pub fn end(&mut self) -> Result<()> {
        self.bar.finish_and_clear();
        match self.running.take() {
            Some(running) => running.end(),
            None => Ok(()),
        }
    }

    /// Starts the program, if it does not run, and compares its first evaluation with an earlier
    /// one.
    fn start(&mut self) -> Result<()> {
        if self.running.is_some() {
            return Ok(());
        }
        let plan = self.plan;
        let log = plan.folder.join("perplexity.log");
        let began = Instant::now();
        let variables = &MASKS[..plan.cuts.len().min(1)];
        let mut running = plan
            .program
            .start(&plan.model.path, &self.base, &log, variables, &[])?;
        let found = running.first()?;
        // From now on the process has this file, whatever the path leads to.
        check_files(&plan.model.files)?;
        match self.record.find(BASELINE) {
            Some(known) => ensure!(
                known.statistics == found,
                "the model as it is has other figures than in an earlier run with the same parameters (KLD {} now, {} then): check that the program is deterministic, or name another folder with --work",
                found.kld.mean,
                known.statistics.kld.mean
            ),
            None => self.add(
                BASELINE.into(),
                "the model as it is",
                began.elapsed().as_secs_f64(),
                found,
            )?,
        }
        self.running = Some(running);
        Ok(())
    }

    fn add(&mut self, key: String, what: &str, seconds: f64, statistics: Statistics) -> Result<()> {
        self.record.add(Measurement {
            key,
            what: what.to_owned(),
            seconds,
            statistics,
        })?;
        self.bar.set_position(self.done as u64);
        if self.bar.is_hidden() {
            eprintln!(
                "llama-sidecar: {} of {}, {what}: KLD {:.6} ± {:.6}, {seconds:.1} s; about {:.0} s left",
                self.done,
                self.total,
                statistics.kld.mean,
                statistics.kld.error,
                seconds * self.total.saturating_sub(self.done) as f64
            );
        }
        Ok(())
    }

    fn overlays(&mut self, chosen: &[Chosen]) -> Result<Vec<Overlay>> {
        let mut names: BTreeMap<usize, Vec<String>> = BTreeMap::new();
        for of in chosen {
            let name = regex::escape(self.plan.tensors[of.tensor].name);
            names.entry(of.candidate).or_default().push(name);
        }
        names
            .into_iter()
            .map(|(candidate, names)| {
                Ok(Overlay {
                    tensor: names.join("|"),
                    from: path_text(&self.file(candidate)?)?,
                    ..Overlay::default()
                })
            })
            .collect()
    }
}

/// Returns a path for a request, which has text only.
fn path_text(path: &Path) -> Result<String> {
    let text = path.to_str().with_context(|| {
        format!(
            "the path {} is not UTF-8: name another folder with --work, or rename the file",
            text::path(path)
        )
    })?;
    Ok(text.to_owned())
}

/// Returns the ggml library among the libraries of a program, if it is there.
pub fn ggml_library(libraries: impl IntoIterator<Item = PathBuf>) -> Option<PathBuf> {
    let is_base = |path: &PathBuf| {
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        // Of an older ggml, all functions are in libggml.so.
        name.starts_with("libggml-base.so") || name.starts_with("libggml.so")
    };
    libraries.into_iter().filter(is_base).min()
}
