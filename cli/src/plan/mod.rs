//! `llama-sidecar plan`: which options make a model fastest on this machine, by runs of the program.
//!
//! | module | contents |
//! |---|---|
//! | [`report`] | the plan as text and JSON |
//! | [`rounds`] | the commands run in turn, until the fastest is known |
//! | [`changes`] | what can be changed in a command |
//! | [`options`] | options of llama.cpp's programs |
//! | [`others`] | what other programs take of the processors |

mod changes;
mod options;
mod others;
mod report;
mod rounds;

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use changes::{Change, Facts};
use options::Known;
use report::Plan;
use rounds::{Candidate, Weighed};
use sidecar_core::config;
use sidecar_core::memory::free_memory;
use sidecar_core::protocol::Event;
use sidecar_core::text;

use crate::output::progress;
use crate::report::stream::Sizes;
use crate::sizes::time;
use crate::trial::{Interrupted, Program, prompts};
use crate::words::quoted_words;

/// Tokens of the answer of a run, at most.
const ANSWER: u32 = 64;
/// The most commands that are tried.
const MOST: usize = 16;

/// What is planned for.
#[derive(clap::Args)]
pub struct PlanOptions {
    /// Tokens of a prompt that is weighed.
    #[arg(long, value_name = "N", default_value_t = 512, value_parser = clap::value_parser!(u32).range(1..=10_000_000))]
    prompt_tokens: u32,
    /// Tokens of an answer that is weighed.
    #[arg(long, value_name = "N", default_value_t = 128, value_parser = clap::value_parser!(u32).range(1..=10_000_000))]
    answer_tokens: u32,
    /// Begin no further run after this time.
    #[arg(long, value_name = "TIME", default_value = "5m", value_parser = time)]
    time: Duration,
    /// Longest time of the first run of the program as it was typed.
    #[arg(long, value_name = "TIME", default_value = "10m", value_parser = time)]
    run_time: Duration,
    /// Print the commands that would be run, the likely best first, and run nothing.
    #[arg(long)]
    dry_run: bool,
    /// Print JSON.
    #[arg(long, conflicts_with = "dry_run")]
    json: bool,
    /// The program and its arguments, with the model; `--` before them is optional.
    #[arg(required = true, trailing_var_arg = true)]
    command: Vec<OsString>,
}

/// Measures, and prints what to type.
pub fn run(options: &PlanOptions) -> Result<()> {
    let words = &options.command;
    let requests =
        prompts::long_and_short(options.prompt_tokens, options.answer_tokens.min(ANSWER));
    let longest = options.run_time;
    let program = Program::new(words, requests, longest)?;
    let known = Known::of(words)?;
    let path = match options::value_in(words, options::MODEL) {
        Some(path) => PathBuf::from(path),
        None => model_of(&program)?,
    };
    let (free, free_of) = free_memory().context("cannot read the free memory in /proc")?;
    let facts = facts(words, &known, &path, free)?;
    let with = |changes: &[Change]| {
        let mut words = words.clone();
        for change in changes {
            change.apply(&mut words, &known);
        }
        let program = program.of(words.clone());
        let all = with_run(changes, words);
        Candidate::new(changes.to_vec(), quoted_words(&all), all, program)
    };
    let mut candidates = vec![with(&[])];
    for change in facts.changes(words, &known) {
        let candidate = with(&[change]);
        let is_known = candidates.iter().any(|of| of.command == candidate.command);
        if !is_known && candidates.len() < MOST {
            candidates.push(candidate);
        }
    }
    if options.dry_run {
        for candidate in &candidates {
            println!("{}", text::line(&candidate.command));
        }
        return Ok(());
    }
    progress(&format!(
        "running {} commands in turn, for {:.1} minutes at most",
        candidates.len(),
        options.time.as_secs_f64() / 60.0
    ));
    let tokens = Weighed {
        prompt: f64::from(options.prompt_tokens),
        answer: f64::from(options.answer_tokens),
    };
    let results = rounds::measure(candidates, tokens, options.time, with, facts.typed_threads)?;
    if results.best.is_none() {
        let why = results.candidates[0].obstacle.as_deref();
        bail!(
            "none of the commands runs here; the one that was typed: {}",
            why.unwrap_or_default()
        );
    }
    let plan = Plan {
        facts,
        free_of,
        tokens,
        results,
    };
    match options.json {
        true => print!("{}", plan.json()?),
        false => print!("{}", plan.text()),
    }
    Ok(())
}

/// Returns what is known about a model and the machine.
fn facts(words: &[OsString], known: &Known, path: &Path, free: u64) -> Result<Facts> {
    let sizes =
        Sizes::read(path).with_context(|| format!("cannot read the model {}", text::path(path)))?;
    let (cores, threads) = config::cores_and_threads();
    let number = |of| options::number_in(words, of).map(|of| of as u32);
    let answers = number(options::THREADS).unwrap_or(cores);
    Ok(Facts {
        sizes,
        free,
        gpu_free: known.free_memory_of_gpus()?,
        cores,
        threads,
        typed_threads: (answers, number(options::BATCH_THREADS).unwrap_or(answers)),
    })
}

/// Returns the model that a program opens: variables, a name of a download or a list may name it.
fn model_of(program: &Program) -> Result<PathBuf> {
    progress("running the program for the path of its model, which the command does not name");
    let named = "the command names no model: pass -m MODEL.gguf";
    let (_, events) = match program.run(Some(&["--none"]), false) {
        Err(error) if !error.is::<Interrupted>() => return Err(error.context(named)),
        result => result?,
    };
    let path = events.iter().find_map(|event| match event {
        Event::Opened { path } => Some(text::path_of(path)),
        _ => None,
    });
    path.context(named)
}

/// Returns a command with the options of `run` that its changes need.
fn with_run(changes: &[Change], words: Vec<OsString>) -> Vec<OsString> {
    let flags: Vec<&str> = changes.iter().filter_map(|of| of.flag()).collect();
    if flags.is_empty() {
        return words;
    }
    let run = ["llama-sidecar", "run"]
        .into_iter()
        .chain(flags)
        .chain(["--"]);
    run.map(OsString::from).chain(words).collect()
}
