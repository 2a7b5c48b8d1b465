//! `llama-sidecar compare`: a program with and without the drop-in, until the difference is known.
//!
//! | module | contents |
//! |---|---|
//! | [`report`] | the comparison as text, JSON and a page |
//! | [`results`] | differences with their errors, equal logits, and what follows |

mod report;
pub mod results;

use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use report::Report;
use results::{Computed, Logits, Way};
use sidecar_core::protocol::{Event, NoEffect};
use sidecar_core::text;

use crate::launch::gains;
use crate::launch::journal::Events;
use crate::launch::run::{Prepared, RunOptions};
use crate::output::{Outputs, progress};
use crate::sizes::time;
use crate::temporary::Temporary;
use crate::trial::{Interrupted, Kind, Program, prompts};

/// What can change the speed of a program, each alone.
const CAPABILITIES: [&str; 4] = [
    "--stream-experts",
    "--post-fetch",
    "--expert-cache",
    "--page-lock",
];
/// The option of llama.cpp's programs that turns off kernels for repacked weights.
const NO_REPACK: &str = "--no-repack";

/// A program, and how it is compared.
#[derive(clap::Args)]
pub struct CompareOptions {
    /// Options of 'run' to compare, as one word: --with '--stream-experts --stream-memory 4000'.
    /// Can be repeated. Without it, each capability that changes speeds is tried alone.
    #[arg(long, value_name = "OPTIONS", allow_hyphen_values = true)]
    with: Vec<String>,
    /// A file with prompts for a server, one in each line.
    #[arg(long, value_name = "FILE")]
    prompts: Option<PathBuf>,
    /// Tokens of each answer of a server.
    #[arg(long, value_name = "N", default_value_t = 48, value_parser = clap::value_parser!(u32).range(1..=65536))]
    tokens: u32,
    /// Begin no further round after this time.
    #[arg(long, value_name = "TIME", default_value = "15m", value_parser = time)]
    time: Duration,
    /// Measure until differences have errors of at most so many percent.
    #[arg(long, value_name = "PERCENT", default_value_t = 3.0)]
    precision: f64,
    /// Longest time of one run of the program.
    #[arg(long, value_name = "TIME", default_value = "10m", value_parser = time)]
    run_time: Duration,
    /// Where to write the comparison as JSON; a page with the same name and .html is beside it.
    #[arg(short, long, value_name = "FILE", default_value = "compare.json")]
    output: PathBuf,
    #[command(flatten)]
    outputs: Outputs,
    /// Print JSON.
    #[arg(long)]
    json: bool,
    /// The program and its arguments; `--` before them is optional. llama-server gets
    /// requests; any other program must end by itself.
    #[arg(required = true, trailing_var_arg = true)]
    command: Vec<OsString>,
}

/// Compares, and writes the report. What was measured before an interruption is written, too.
pub fn run(options: &CompareOptions) -> Result<()> {
    ensure!(
        options.precision > 0.0 && options.precision < 100.0,
        "--precision: expected a share above 0 and below 100, found {}",
        options.precision
    );
    let page = options.output.with_extension("html");
    ensure!(
        page != options.output,
        "{}: the page would have the same path: name a file with the extension .json",
        text::path(&page)
    );
    // Not after the measurements.
    options.outputs.check(&options.output, report::START)?;
    options
        .outputs
        .check(&page, &crate::page::start(report::TITLE))?;
    let mut comparison = Comparison::new(options)?;
    let ended = comparison.measure();
    let report = &mut comparison.report;
    let failed = match ended {
        // Nothing is known before the first round.
        Err(error) if !error.is::<Interrupted>() && report.stock.runs.is_empty() => {
            return Err(error);
        }
        Err(error) => {
            report.stopped = Some(format!("{error:#}"));
            Some(error.context("the comparison is not complete"))
        }
        Ok(stopped) => {
            report.stopped = stopped;
            None
        }
    };
    report.finish();
    match options.json {
        true => print!("{}", report.json()?),
        false => print!("{}", report.text()),
    }
    // A full disk takes away the files alone.
    options.outputs.write(&options.output, &report.json()?)?;
    options.outputs.write(&page, &report.page())?;
    let noted = note_gain(report, &options.command)?;
    if !options.json {
        println!(
            "written: {}, {}",
            text::path(&options.output),
            text::path(&page)
        );
        if let Some(noted) = noted {
            println!("{noted}");
        }
    }
    failed.map_or(Ok(()), Err)
}

/// Notes what `run` is to use for the command, if the comparison is complete. Returns a sentence if that has
/// changed.
fn note_gain(report: &Report, words: &[OsString]) -> Result<Option<String>> {
    if report.stopped.is_some() {
        return Ok(None);
    }
    let found = report.gain();
    let what = match &found {
        Some((flags, _)) => format!("uses {}", flags.join(" ")),
        None => "uses nothing of this".into(),
    };
    let measured: Vec<&[String]> = report.ways.iter().map(|way| &way.flags[..]).collect();
    let path = gains::note(words, &measured, found)?;
    Ok(path.map(|path| {
        format!(
            "from now on, 'llama-sidecar run' {what} for this command ({})",
            text::path(&path)
        )
    }))
}

/// A comparison so far.
struct Comparison {
    program: Program,
    precision: f64,
    /// When the last round begins at the latest.
    deadline: Instant,
    /// For files with hashes.
    folder: Temporary,
    /// Whether prompts are those of this command.
    has_own_prompts: bool,
    report: Report,
}

impl Comparison {
    fn new(options: &CompareOptions) -> Result<Comparison> {
        let words = &options.command;
        let requests = match &options.prompts {
            Some(path) => prompts::read(path, options.tokens)?,
            None => prompts::long_and_short(prompts::LONGEST, options.tokens),
        };
        let longest = options.run_time;
        let program = Program::new(words, requests, longest)?;
        let kind = program.kind;
        ensure!(
            options.prompts.is_none() || kind == Kind::Server,
            "--prompts has no effect: {} gets its prompts from its command line",
            text::path(Path::new(&words[0]))
        );
        let ways: Vec<Vec<String>> = match options.with.is_empty() {
            true => CAPABILITIES.iter().map(|of| vec![(*of).into()]).collect(),
            false => {
                let words = |of: &String| of.split_whitespace().map(str::to_owned).collect();
                options.with.iter().map(words).collect()
            }
        };
        for flags in &ways {
            ensure!(!flags.is_empty(), "--with names no option of 'run'");
            let prepared = Prepared::new(&RunOptions::with(flags, words)?)?;
            ensure!(
                prepared.config.logits_hashes.is_none(),
                "--with has --logits-hashes, which compare uses itself: leave it out"
            );
            let check = prepared.check_measured();
            check.with_context(|| format!("cannot compare {}", flags.join(" ")))?;
        }
        Ok(Comparison {
            program,
            precision: options.precision / 100.0,
            deadline: Instant::now() + options.time,
            folder: Temporary::new().context("cannot create a temporary folder")?,
            has_own_prompts: options.prompts.is_none(),
            report: Report::new(kind, words, ways.into_iter().map(Way::new).collect()),
        })
    }

    /// Checks what each way computes, then measures all ways in turn. Returns why it stopped before
    /// the differences were known, if so.
    fn measure(&mut self) -> Result<Option<String>> {
        let stock = self.check_stock()?;
        for at in 0..self.report.ways.len() {
            let found = self.check(&self.report.ways[at].flags, &stock)?;
            let way = &mut self.report.ways[at];
            progress(&match &found {
                Ok(logits) => format!("{}: logits {}", way.name(), logits.text()),
                Err(obstacle) => format!("{}: no effect: {obstacle}", way.name()),
            });
            match found {
                Ok(logits) => way.logits = Some(logits),
                Err(obstacle) => way.obstacle = Some(obstacle),
            }
        }
        if !self.report.ways.iter().any(Way::is_measured) {
            return Ok(None);
        }
        loop {
            let began = Instant::now();
            self.round()?;
            let report = &self.report;
            if results::is_known(&report.ways, &report.stock, self.precision) {
                return Ok(None);
            }
            if Instant::now() + began.elapsed() > self.deadline {
                return Ok(Some(
                    "the time was over before all differences were known: pass a longer --time"
                        .into(),
                ));
            }
        }
    }

    /// Runs the program alone and each way once. Every second round has the reverse order, so that
    /// what changes in time changes all of them alike.
    fn round(&mut self) -> Result<()> {
        let number = self.report.stock.runs.len();
        let ways = 0..self.report.ways.len();
        let mut order: Vec<Option<usize>> = std::iter::once(None).chain(ways.map(Some)).collect();
        if number % 2 == 1 {
            order.reverse();
        }
        let mut runs = Vec::new();
        for at in order {
            let way = at.map(|at| &self.report.ways[at]);
            if way.is_some_and(|way| !way.is_measured()) {
                continue;
            }
            let (run, _) = self.program.run(way.map(|way| &way.flags[..]), false)?;
            let name = way.map_or("the program alone".into(), Way::name);
            progress(&format!(
                "round {}: {name}: {}",
                number + 1,
                report::speeds(&run)
            ));
            runs.push((at, run));
        }
        // A round counts as a whole.
        for (at, run) in runs {
            match at {
                Some(at) => self.report.ways[at].runs.push(run),
                None => self.report.stock.runs.push(run),
            }
        }
        Ok(())
    }

    /// Returns what the program computes alone.
    fn check_stock(&mut self) -> Result<Computed> {
        progress("the program alone, for its results");
        let alone = self.program.first_run(self.has_own_prompts, true)?;
        let (observed, events) = self.observed(&[], &[])?;
        if let Some(obstacle) = events.obstacle(None) {
            bail!("{obstacle}");
        }
        ensure!(
            !observed.hashes.is_empty(),
            "no evaluation of the program had logits: let it generate a token"
        );
        self.report.describe(&alone, &events);
        let mut output = Some(alone.output);
        if observed.output != output {
            let (again, _) = self.program.run(None::<&[OsString]>, true)?;
            // It may have times, for example. The hashes remain.
            output = output.filter(|output| *output == again.output);
        }
        let hashes = observed.hashes;
        Ok(Computed { hashes, output })
    }

    /// Returns whether the logits with flags of `run` are equal, or why the flags have no effect.
    fn check(&self, flags: &[String], stock: &Computed) -> Result<Result<Logits, String>> {
        let (mut way, events) = self.observed(flags, &[])?;
        let reason = events.iter().find_map(|event| match event {
            Event::NoEffect { found } => Some(found.sentence.clone()),
            _ => None,
        });
        if let Some(obstacle) = reason.or_else(|| events.obstacle(None)) {
            return Ok(Err(obstacle));
        }
        let logits = Logits::compare(&way, stock);
        if logits.is_equal() {
            return Ok(Ok(logits));
        }
        let (again, _) = self.observed(&[], &[])?;
        if again.hashes != stock.hashes {
            let why = "two runs of the program alone compute different logits: give it a fixed seed, and --temp 0";
            return Ok(Ok(Logits::Unknown { why: why.into() }));
        }
        // Two processes of one command may print in any order.
        let (way_again, _) = self.observed(flags, &[])?;
        if again.output != stock.output || way_again.output != way.output {
            way.output = None;
        }
        let logits = Logits::compare(&way, stock);
        if logits.is_equal() {
            return Ok(Ok(logits));
        }
        // Streamed experts are not repacked.
        if let Ok((plain, _)) = self.observed(&[], &[NO_REPACK])
            && let Logits::Equal { evaluations } = Logits::compare(&way, &plain)
        {
            let option = NO_REPACK.into();
            return Ok(Ok(Logits::EqualWith {
                evaluations,
                option,
            }));
        }
        Ok(Ok(logits))
    }

    /// Runs the program with flags of `run` and further arguments. Returns what it computed, and the events.
    fn observed(&self, flags: &[String], arguments: &[&str]) -> Result<(Computed, Events)> {
        let folder = tempfile::tempdir_in(self.folder.path())?;
        let path = folder.path().join("%p").into();
        let mut flags: Vec<OsString> = flags.iter().map(OsString::from).collect();
        flags.extend(["--logits-hashes".into(), path]);
        let (run, events) = self.program.with(arguments).run(Some(&flags), true)?;
        // A file that is not complete is not compared.
        let lost = events.iter().find_map(|event| match event {
            Event::NoEffect { found } if found.requested == NoEffect::LOGITS => {
                Some(&found.sentence)
            }
            _ => None,
        });
        if let Some(lost) = lost.filter(|lost| lost.contains(": cannot write ")) {
            bail!("{lost}");
        }
        let files = fs::read_dir(folder.path())?;
        let texts = files.map(|file| Ok(fs::read_to_string(file?.path())?));
        let mut texts: Vec<String> = texts.collect::<Result<_>>()?;
        // Processes of one command end in any order.
        texts.sort_unstable();
        let lines = texts.iter().flat_map(|text| text.lines());
        let hashes = lines.filter(|line| !line.starts_with('#'));
        let computed = Computed {
            hashes: hashes.map(str::to_owned).collect(),
            output: Some(run.output),
        };
        Ok((computed, events))
    }
}
