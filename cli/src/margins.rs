//! `llama-sidecar ctl margins`: what it costs and gains to prefer experts in memory.
//!
//! A running llama-perplexity evaluates a text once for each margin, one token at a time, as answers are computed, with
//! experts from disk.

use std::path::PathBuf;

use anyhow::{Context, Result, bail, ensure};
use serde::Serialize;
use sidecar_core::config::margin;
use sidecar_core::gguf::{Access, GgufFile, open_model};
use sidecar_core::protocol::StreamFigures;
use sidecar_core::text;

use crate::evaluation::program::{EvaluationOptions, NO_VARIABLES};
use crate::evaluation::session::Session;
use crate::evaluation::statistics::Statistics;
use crate::interruption;
use crate::output::{Outputs, progress};
use crate::page;
use crate::pruned::of_experts;
use crate::sizes::{Table, percent, size, size_text};

/// The title of the page.
const TITLE: &str = "Margins";
/// Chunks of the text, where the options state none: each token is an evaluation of its own.
const CHUNKS: u32 = 4;

/// The model, the text and the margins.
#[derive(clap::Args)]
pub struct MarginsOptions {
    /// The model: a GGUF file, or any shard of one. It does not fit into the memory.
    model: PathBuf,
    /// The text to evaluate; 4 chunks of it, if --chunks is not set.
    #[arg(long, value_name = "FILE")]
    text: PathBuf,
    /// Margins to measure, with commas between them.
    #[arg(long, value_name = "LIST", value_delimiter = ',', default_value = "0,0.01,0.02,0.05,0.1,0.2", value_parser = margin)]
    margins: Vec<f32>,
    /// Memory for experts, for example 4G, to measure what a smaller machine gains; by default what is free.
    #[arg(long, value_name = "SIZE", value_parser = size)]
    memory: Option<u64>,
    /// The folder for the base logits, which are removed at the end, and for the log, which stays after a failure. By default
    /// that of temporary files.
    #[arg(long, value_name = "DIR")]
    work: Option<PathBuf>,
    /// Print JSON.
    #[arg(long)]
    json: bool,
    /// Write the measurements as a self-contained HTML page.
    #[arg(long, value_name = "FILE")]
    report: Option<PathBuf>,
    #[command(flatten)]
    outputs: Outputs,
    #[command(flatten)]
    evaluation: EvaluationOptions,
}

/// What was measured with a margin.
#[derive(Serialize)]
struct Measured {
    margin: f32,
    #[serde(flatten)]
    statistics: Statistics,
    /// Share of the chosen experts that were replaced.
    replaced: f64,
    /// Bytes of experts that were to be read for a token.
    read_bytes: f64,
    /// Tokens per second.
    speed: f64,
}

impl Measured {
    /// From the figures before and after an evaluation.
    fn of(
        margin: f32,
        statistics: Statistics,
        before: &StreamFigures,
        after: &StreamFigures,
    ) -> Result<Measured> {
        let more = |figure: fn(&StreamFigures) -> f64| figure(after) - figure(before);
        let (tokens, seconds) = (more(|of| of.tokens as f64), more(|of| of.seconds));
        let chosen = more(|of| of.chosen as f64);
        ensure!(
            tokens > 0.0 && seconds > 0.0 && chosen > 0.0,
            "margin {margin}: no choice of the model's experts was understood: see docs/streaming.md"
        );
        Ok(Measured {
            margin,
            statistics,
            replaced: more(|of| of.replaced as f64) / chosen,
            read_bytes: more(|of| of.checked_bytes as f64 - of.resident_bytes as f64) / tokens,
            speed: tokens / seconds,
        })
    }

    fn row(&self) -> Vec<String> {
        let mut row = vec![self.margin.to_string()];
        row.extend(self.statistics.cells());
        row.extend([
            percent(self.replaced),
            size_text(self.read_bytes),
            format!("{:.2}", self.speed),
        ]);
        row
    }
}

/// What was measured so far.
#[derive(Default, Serialize)]
struct Results {
    /// The model as it is, with the other setting of flash attention.
    rounding: Option<Rounding>,
    margins: Vec<Measured>,
}

/// An evaluation that differs from the base by rounding alone.
#[derive(Serialize)]
struct Rounding {
    flash_attention: &'static str,
    #[serde(flatten)]
    statistics: Statistics,
}

impl Results {
    fn table(&self) -> Table {
        let mut table = Table::new([
            "margin",
            "KL divergence",
            "same top",
            "perplexity",
            "replaced",
            "read for a token",
            "tokens/s",
        ]);
        let rounding = self.rounding.iter().map(|rounding| {
            let mut row = vec![format!("0, flash attention {}", rounding.flash_attention)];
            row.extend(rounding.statistics.cells());
            row.extend(["", "", ""].map(str::to_owned));
            row
        });
        table.rows = rounding
            .chain(self.margins.iter().map(Measured::row))
            .collect();
        table
    }
}

/// Measures the margins one after the other.
pub fn run(options: &MarginsOptions) -> Result<()> {
    if let Some(path) = &options.report {
        // Not after the measurements.
        options.outputs.check(path, &page::start(TITLE))?;
        let real = |path: &PathBuf| path.canonicalize().ok();
        let is_text = real(path).is_some() && real(path) == real(&options.text);
        ensure!(
            !is_text,
            "--report names the text, which would be replaced: name another path"
        );
    }
    let model = open_model(&options.model, Access::Read)
        .with_context(|| format!("cannot read the model {}", text::path(&options.model)))?;
    let bytes = bytes_of_experts(&model);
    ensure!(
        bytes > 0,
        "{} has no experts: name a mixture of experts",
        text::path(&options.model)
    );
    let memory = options.memory.map(|memory| memory.div_ceil(1 << 20));
    if let Some(mib) = memory.filter(|mib| *mib >= bytes.div_ceil(1 << 20)) {
        bail!(
            "the experts take {}, and fit into {mib} MiB: pass a smaller --memory",
            size_text(bytes as f64)
        );
    }
    let mut program = options.evaluation.program(None)?;
    let one_at_a_time = ["--ubatch-size", "1"].map(str::to_owned);
    program.arguments.splice(0..0, one_at_a_time);
    program.variables = vec![
        ("LLAMA_EXPERT_STREAM_PREFER", "0".into()),
        ("LLAMA_EXPERT_STREAM_ACCEPT_CHANGES", "1".into()),
    ];
    let memory = memory.map(|mib| ("LLAMA_EXPERT_STREAM_MEMORY_MB", mib.to_string()));
    program.variables.extend(memory);
    let chunks = options.evaluation.chunks.or(Some(CHUNKS));
    interruption::watch()?;
    let mut session = Session::new(
        program,
        (&options.model, &model),
        &[&options.text],
        chunks,
        options.work.as_deref(),
    )?;
    let mut results = Results::default();
    let result = measure(options, &mut session, &mut results);
    // Whatever failed: the evaluations may have taken hours.
    let shown = show(options, &session, &results, result.is_ok());
    session.end(result, shown)
}

fn bytes_of_experts(files: &[GgufFile]) -> u64 {
    let of_file = |file: &GgufFile| {
        let tensors = file.header.tensors.iter();
        let name = |info| file.header.name(info).to_string_lossy();
        let experts = tensors.filter(|info| of_experts(&name(info)).is_some());
        experts.map(|info| info.nbytes).sum::<u64>()
    };
    files.iter().map(of_file).sum()
}

fn measure(
    options: &MarginsOptions,
    session: &mut Session<'_>,
    results: &mut Results,
) -> Result<()> {
    session.use_text(&options.text)?;
    let mut running = session.start(&NO_VARIABLES)?;
    progress("evaluating it again, which fills the memory");
    running.first()?;
    for &margin in &options.margins {
        running
            .set_margin(margin)
            .context("the experts are to exceed the memory for them: pass a smaller --memory")?;
        let before = running.streamed()?;
        let statistics = running.evaluate()?;
        let next = Measured::of(margin, statistics, &before, &running.streamed()?)?;
        progress(&format!(
            "margin {margin}: divergence {:.6}, {:.2} tokens/s",
            statistics.kld.mean, next.speed
        ));
        results.margins.push(next);
    }
    running.end()?;
    let rounding = session.evaluate_rounding()?;
    results.rounding = rounding.map(|(flash_attention, statistics)| Rounding {
        flash_attention,
        statistics,
    });
    Ok(())
}

/// Prints what was measured, and writes the page.
fn show(
    options: &MarginsOptions,
    session: &Session<'_>,
    results: &Results,
    is_complete: bool,
) -> Result<()> {
    if results.margins.is_empty() {
        return Ok(());
    }
    match options.json {
        true => println!("{:#}", serde_json::to_value(results)?),
        false => print!("{}", results.table().as_text()),
    }
    if let Some(path) = &options.report {
        let sentences = [
            Some(
                "What it costs and gains to prefer experts in memory, against the model as it is.",
            ),
            page::incomplete(is_complete),
        ];
        let tables = [(None, results.table())];
        let page = page::measurements(TITLE, &options.model, &sentences, &session.facts(), tables);
        options.outputs.write(path, &page)?;
    }
    Ok(())
}
