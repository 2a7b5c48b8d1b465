//! `llama-sidecar plan`: which options make a model fastest on this machine.
//!
//! | module | contents |
//! |---|---|
//! | [`report`] | the plan as text and JSON |
//! | [`runs`] | what runs of the program show |
//! | [`search`] | the settings that are predicted |
//! | [`machine`] | what is measured on this machine |
//! | [`others`] | what other programs take of the processors |
//! | [`shape`] | the matrices of a model |
//! | [`options`] | options of llama.cpp's programs |
//! | [`model`] | how long a token takes |

mod machine;
mod model;
mod options;
mod others;
#[cfg(test)]
mod published;
mod report;
mod runs;
mod search;
mod shape;

use std::collections::BTreeSet;
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use options::Known;
use report::Plan;
use search::{Candidate, EQUAL, Facts, FileSpeeds, OnGpu, Runs, Setting};
use shape::Shape;
use sidecar_core::config;
use sidecar_core::memory::free_memory;
use sidecar_core::text;

use crate::deadline::LONGEST;
use crate::output::progress;
use crate::report::cache::{Caches, Policy};
use crate::report::stream::Disk;
use crate::report::traces::TraceReport;
use crate::trial::{Program, prompts};

/// Numbers of threads that are measured at most.
const MOST_THREADS: usize = 8;
/// Tokens of the answer of a run, at most.
const ANSWER: u32 = 64;

/// What is planned for.
#[derive(clap::Args)]
pub struct PlanOptions {
    /// Tokens of a prompt that is weighed.
    #[arg(long, value_name = "N", default_value_t = 512, value_parser = clap::value_parser!(u32).range(1..=10_000_000))]
    prompt_tokens: u32,
    /// Tokens of an answer that is weighed.
    #[arg(long, value_name = "N", default_value_t = 128, value_parser = clap::value_parser!(u32).range(1..=10_000_000))]
    answer_tokens: u32,
    /// An expert trace of the model, for the hits of caches.
    #[arg(long, value_name = "FILE")]
    trace: Option<PathBuf>,
    /// Do not run the program: what is no product is estimated.
    #[arg(long)]
    no_run: bool,
    /// Measure again, although measurements of this program, model and machine are kept.
    #[arg(long)]
    measure: bool,
    /// Longest time of the run of the program, in seconds.
    #[arg(long, value_name = "N", default_value_t = 600, value_parser = clap::value_parser!(u64).range(..=LONGEST))]
    seconds: u64,
    /// How many settings to list.
    #[arg(long, value_name = "N", default_value_t = 8)]
    top: usize,
    /// Print JSON.
    #[arg(long)]
    json: bool,
    /// The program and its arguments, with the model; `--` before them is optional.
    #[arg(required = true, trailing_var_arg = true)]
    command: Vec<OsString>,
}

/// Plans, and prints what to type.
pub fn run(options: &PlanOptions) -> Result<()> {
    let plan = plan(options)?;
    match options.json {
        true => print!("{}", plan.json()?),
        false => print!("{}", plan.text(options.top.max(1))),
    }
    Ok(())
}

fn plan(options: &PlanOptions) -> Result<Plan> {
    let words = &options.command;
    let requests =
        prompts::long_and_short(options.prompt_tokens, options.answer_tokens.min(ANSWER));
    let longest = Duration::from_secs(options.seconds.max(1));
    let mut program = Program::new(words, requests, longest)?;
    let trace = options.trace.as_deref().map(hits_of_trace).transpose()?;
    let known = Known::of(words)?;
    let path = match options::value_in(words, options::MODEL) {
        Some(path) => PathBuf::from(path),
        None => machine::model_of(&program)?,
    };
    let shape = Shape::read(&path, &options::overrides(words))?;
    let (free, whose) = free_memory().context("cannot read the free memory in /proc")?;
    let works = shape.works(free);
    let (cores, threads) = config::cores_and_threads();
    let typed_threads = options::number_in(words, options::THREADS).map(|of| of as u32);
    let typed_batch = options::number_in(words, options::BATCH_THREADS).map(|of| of as u32);
    let typed = typed_threads.into_iter().chain(typed_batch);
    let numbers = numbers_of_threads(cores, threads, typed.filter(|of| (1..=1024).contains(of)));
    progress(&format!(
        "measuring products of the model's matrices with the program's ggml and {} threads",
        numbers
            .iter()
            .map(u32::to_string)
            .collect::<Vec<_>>()
            .join(", ")
    ));
    let found = machine::measure(&program, &path, &works, &numbers, options.measure)?;
    let context = options::number_in(words, options::CONTEXT).filter(|&of| of > 0);
    let repacks = !found.measured.repacked.is_empty();
    let mut facts = Facts {
        context: context.unwrap_or(shape.context),
        shape,
        works,
        measured: found.measured,
        free,
        file: None,
        tokens: (
            f64::from(options.prompt_tokens),
            f64::from(options.answer_tokens),
        ),
        hits: trace,
        typed: Setting::typed(words, cores, repacks),
        runs: Runs::default(),
    };
    facts.typed.gpu = gpu_of(words, &facts);
    let bytes = facts.shape.bytes();
    let context = match facts.typed.gpu {
        None => facts.context_bytes(),
        Some(_) => 0,
    };
    let sum = bytes.routed + bytes.others + bytes.rest + context;
    if facts.shape.expert_layers > 0 && sum > free {
        progress("measuring reads of the model's file: it does not fit into the free memory");
        facts.file = Some(speeds_of(&facts.shape, &numbers)?);
    }
    let baseline = match options.no_run {
        true => None,
        false => runs::calibrate(&mut program, &mut facts)?,
    };
    let mut candidates: Vec<Candidate> = Vec::new();
    let mut refused: Vec<(Setting, String)> = Vec::new();
    for setting in facts.settings(&known) {
        match facts.predict(&setting) {
            Ok(found) => candidates.push(found),
            Err(why) => refused.push((setting, why)),
        }
    }
    candidates.sort_by(|a, b| a.seconds.total_cmp(&b.seconds));
    // Of those that are equal to the best one, the one with the fewest changes is first.
    let best = candidates.first().map_or(0.0, |of| of.seconds);
    let equal = candidates.partition_point(|of| of.seconds < best * (1.0 + EQUAL));
    candidates[..equal].sort_by_key(|of| of.setting.changes(&facts.typed));
    ensure!(
        !candidates.is_empty(),
        "no setting lets this model run here: {}",
        refused.first().map_or("", |(_, why)| why)
    );
    Ok(Plan::new(
        &facts,
        &known,
        words,
        candidates,
        refused,
        baseline,
        report::Source {
            whose,
            is_kept: found.is_kept,
            disturbed: found.disturbed,
            path: found.path,
            cores,
            threads,
        },
    ))
}

/// Returns powers of two, three quarters of the cores, the cores and all threads; and those that were
/// typed.
fn numbers_of_threads(cores: u32, threads: u32, typed: impl Iterator<Item = u32>) -> Vec<u32> {
    let powers = (0..10).map(|of| 1 << of).filter(|&of| of < cores);
    let all = powers.chain([(cores * 3 / 4).max(1), cores, threads]);
    let all: BTreeSet<u32> = all.collect();
    // With many cores, few threads are never best.
    let skipped = all.len().saturating_sub(MOST_THREADS);
    let kept: BTreeSet<u32> = all.into_iter().skip(skipped).chain(typed).collect();
    kept.into_iter().collect()
}

/// Returns how a command uses a GPU.
fn gpu_of(words: &[OsString], facts: &Facts) -> Option<OnGpu> {
    facts.device()?;
    if options::number_in(words, options::GPU_LAYERS) == Some(0) {
        return None;
    }
    let layers = facts.shape.expert_layers;
    let own_cache_mib = options::number_in(words, options::MOE_CACHE).unwrap_or(0);
    let host = match options::is_in(words, options::ALL_HOST) {
        true => Some(layers),
        false => options::number_in(words, options::HOST_LAYERS).map(|of| (of as u32).min(layers)),
    };
    // llama.cpp moves experts to host memory until the rest fits (--fit).
    let fitted = || facts.fewest_host_layers(facts.typed.batch, own_cache_mib << 20);
    Some(OnGpu {
        host_layers: host.or_else(fitted)?,
        own_cache_mib,
        with: None,
    })
}

/// Measures reads of experts, by page faults with each of `numbers` of threads.
fn speeds_of(shape: &Shape, numbers: &[u32]) -> Result<FileSpeeds> {
    let (path, experts) = (&shape.path, &shape.experts_at);
    let read = || {
        let faults = |&threads: &u32| Ok((threads, machine::faults(path, experts, threads)?));
        let faults: Vec<(u32, f64)> = numbers.iter().map(faults).collect::<Result<_>>()?;
        anyhow::Ok(FileSpeeds {
            direct: Disk::measure(path)?.many.median(),
            batch_faults: faults.iter().map(|of| of.1).fold(0.0, f64::max),
            faults,
        })
    };
    read().with_context(|| {
        format!(
            "reads of {} that bypass memory (O_DIRECT) cannot be measured",
            text::path(path)
        )
    })
}

/// Returns the hits of caches of 0 to all experts of a layer, by a trace.
fn hits_of_trace(path: &Path) -> Result<Vec<f64>> {
    let traced = TraceReport::sum(TraceReport::read(path, false)?)?;
    let caches = Caches::of(&traced).with_context(|| {
        format!(
            "{} has no locality: write a trace with this version of llama-sidecar",
            text::path(path)
        )
    })?;
    let rates = (0..=caches.experts).map(|size| caches.rate(Policy::Lru, size));
    Ok(rates.collect())
}
