//! `llama-sidecar shrink`: a smaller model whose cost is known. What [`prune`](crate::prune) and [`tune`](crate::tune) do in
//! turn by hand: experts that contribute least, and types, are chosen together for a size.

use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use serde::Serialize;
use sidecar_core::experts::ExpertIndex;
use sidecar_core::gguf::{Access, GgufFile, open_model};
use sidecar_core::reload::hash_bytes;
use sidecar_core::text;

use crate::evaluation::program::EvaluationOptions;
use crate::evaluation::session::{Session, check_files};
use crate::evaluation::statistics::Statistics;
use crate::output::{Outputs, beside, check_distinct, progress};
use crate::prune::{self, search};
use crate::pruned::Mixture;
use crate::sizes::{Table, size, size_text, time};
use crate::tune;
use crate::tune::results::{Results, Uniform};

/// A perplexity that is so many times as high is that of a ruined model.
const RUINED: f64 = 2.0;
/// Chunks of the text by which experts are ordered.
const CHUNKS: u32 = 32;
/// Parts of the size whose cost is estimated, too.
const SMALLER: [f64; 3] = [0.9, 0.8, 0.7];

/// The model, the size, and what may be left out.
#[derive(clap::Args)]
pub struct ShrinkOptions {
    /// The model: a GGUF file, or any shard of one. It stays as it is.
    model: PathBuf,
    /// The size of the new file at most: 5G is 5 GiB, 5GB are 5 x 10^9 bytes.
    #[arg(long, value_name = "SIZE", value_parser = size)]
    size: u64,
    /// The text to evaluate.
    #[arg(long, value_name = "FILE")]
    text: PathBuf,
    /// Another text, to evaluate the new model with: it was chosen for the first one.
    #[arg(long, value_name = "FILE")]
    check: Option<PathBuf>,
    /// Write the new model.
    #[arg(short, long, value_name = "FILE")]
    output: PathBuf,
    #[command(flatten)]
    outputs: Outputs,
    /// Types that tensors may get.
    #[arg(long, value_name = "TYPE", default_value = "q8_0,q6_K,q5_K,q4_K,q3_K")]
    types: String,
    /// An importance matrix of llama-imatrix, for quantising.
    #[arg(long, value_name = "FILE")]
    imatrix: Option<PathBuf>,
    /// Evaluate as much of the text as fits into this time.
    #[arg(long, value_name = "TIME", default_value = "1h", value_parser = time, conflicts_with = "chunks")]
    time: Duration,
    /// Also keep a model whose perplexity is twice as high.
    #[arg(long)]
    accept: bool,
    /// Print JSON.
    #[arg(long)]
    json: bool,
    /// The folder for measurements and quantised tensors.
    ///
    /// The same command continues there after an interruption. Default: MODEL.shrink.
    #[arg(long, value_name = "DIR")]
    work: Option<PathBuf>,
    #[command(flatten)]
    evaluation: EvaluationOptions,
}

impl ShrinkOptions {
    fn texts(&self) -> impl Iterator<Item = &Path> {
        let all = [Some(&self.text), self.check.as_ref()];
        all.into_iter().flatten().map(PathBuf::as_path)
    }
}

/// A model in the table: its size, experts in each layer, and figures of both texts as far as they are known.
#[derive(Serialize)]
struct Row {
    what: String,
    bytes: Option<u64>,
    experts: Option<u64>,
    /// The divergence that is expected of a model that was not measured.
    expected: Option<f64>,
    text: Option<Statistics>,
    check: Option<Statistics>,
}

/// What a text shows: of the model as it is, with other rounding, and of the new model.
#[derive(Clone, Copy)]
struct Checked {
    before: Statistics,
    rounding: Option<Statistics>,
    after: Statistics,
}

/// The options, and what was measured for them.
struct Shrinking<'a> {
    options: &'a ShrinkOptions,
    files: &'a [GgufFile],
    /// The experts of a mixture.
    experts: Option<u64>,
    /// The new file with the first text, and what the other one shows.
    written: Option<Statistics>,
    checked: Option<Checked>,
}

/// Chooses experts and types for a size, measures them, and writes the model.
pub fn run(options: &ShrinkOptions) -> Result<()> {
    let files = open_model(&options.model, Access::Read)
        .with_context(|| format!("cannot read the model {}", text::path(&options.model)))?;
    // Not after the measurements.
    options.outputs.check(&options.output, "GGUF")?;
    let read = options.texts().chain(options.imatrix.as_deref());
    check_distinct(&[&options.output], read)?;
    let program = options.evaluation.program(None)?;
    program.check(&options.texts().collect::<Vec<_>>())?;
    let bytes: u64 = files.iter().map(|file| file.source.id().size).sum();
    ensure!(
        options.size < bytes,
        "{} has {}, which is not more than --size: there is nothing to do",
        text::path(&options.model),
        size_text(bytes as f64)
    );
    if let Some(check) = &options.check {
        program.try_text(&options.model, check)?;
    }
    let work = options.work.clone();
    let work = work.unwrap_or_else(|| beside(&options.model, ".shrink"));
    fs::create_dir_all(&work)
        .and_then(|()| sidecar_core::files::check_owner(&fs::metadata(&work)?))
        .with_context(|| format!("cannot use the work folder {}", text::path(&work)))?;
    let is_mixture = ExpertIndex::of(&files).layers().next().is_some();
    let mixture = is_mixture.then(|| Mixture::of(&files)).transpose()?;
    let lists = match &mixture {
        Some(mixture) => lists(options, &files, mixture, &work)?,
        None => Vec::new(),
    };
    let mut words: Vec<OsString> = vec![options.model.clone().into()];
    let mut add = |name: &str, value: OsString| words.extend([name.into(), value]);
    add("--types", options.types.clone().into());
    add("--text", options.text.clone().into());
    add("--size", options.size.to_string().into());
    add("--output", options.output.clone().into());
    add("--work", work.join("tune").into());
    for list in lists {
        add("--experts", list.into());
    }
    if let Some(matrix) = &options.imatrix {
        add("--imatrix", matrix.clone().into());
    }
    if options.evaluation.chunks.is_none() {
        add(
            "--time",
            format!("{}s", options.time.as_secs().max(1)).into(),
        );
    }
    words.extend(options.outputs.words().map(OsString::from));
    words.extend(options.evaluation.words());
    let mut shrinking = Shrinking {
        options,
        files: &files,
        experts: mixture.map(|mixture| mixture.routing.experts),
        written: None,
        checked: None,
    };
    tune::measure(words, &mut shrinking).inspect_err(|_| {
        // Only one that is empty.
        let _ = fs::remove_dir(&work);
    })
}

/// Returns files of experts to leave out, which are made unless they are there for these files and this text.
fn lists(
    options: &ShrinkOptions,
    files: &[GgufFile],
    mixture: &Mixture,
    work: &Path,
) -> Result<Vec<PathBuf>> {
    let counts = search::counts(mixture);
    let sample = sidecar_core::files::read(&options.text)
        .with_context(|| format!("cannot read {}", text::path(&options.text)))?;
    let ids: Vec<_> = files.iter().map(|file| file.source.id()).collect();
    let of = format!("{ids:?} {:032x}", hash_bytes(&sample));
    let folder = work.join(format!("experts-{:032x}", hash_bytes(of.as_bytes())));
    let paths = counts
        .iter()
        .map(|count| folder.join(format!("{count}-experts.json")));
    let paths: Vec<PathBuf> = paths.collect();
    if paths.iter().all(|path| path.exists()) {
        return Ok(paths);
    }
    fs::create_dir_all(&folder)
        .with_context(|| format!("cannot use the work folder {}", text::path(work)))?;
    tune::on_interruption(work)?;
    let chunks = options
        .evaluation
        .chunks
        .map_or(CHUNKS, |chunks| chunks.min(CHUNKS));
    let mut session = Session::new(
        options.evaluation.program(None)?,
        (&options.model, files),
        &[&options.text],
        Some(chunks),
        None,
    )?;
    let lists = search::least(&options.text, mixture, &counts, &mut session);
    let written = lists.and_then(|lists| {
        check_files(files)?;
        paths
            .iter()
            .zip(&lists)
            .try_for_each(|(path, experts)| Outputs::default().write(path, &prune::list(experts)?))
    });
    session.end(written, Ok(()))?;
    Ok(paths)
}

impl tune::Caller for Shrinking<'_> {
    fn check(&mut self, results: &Results<'_>, model: &Path) -> Result<()> {
        self.measure(results, model)?;
        for (text, of) in self.of_texts(results) {
            if self.options.accept || of.after.ppl.mean < RUINED * of.before.ppl.mean {
                continue;
            }
            self.show(results);
            bail!(
                "the new model was not kept: its perplexity is {:.2} with {}, and that of the model as it is {:.2}: raise --size, or pass --accept",
                of.after.ppl.mean,
                text::path(text),
                of.before.ppl.mean
            );
        }
        Ok(())
    }

    fn print(&mut self, results: &Results<'_>, folder: &Path) {
        self.show(results);
        if !self.options.json {
            println!("page: {}", text::path(&folder.join("report.html")));
            println!("{}", tune::of_folder(folder));
            println!("done: {}", text::path(&self.options.output));
        }
    }
}

impl Shrinking<'_> {
    /// Evaluates the new file with both texts.
    fn measure(&mut self, results: &Results<'_>, model: &Path) -> Result<()> {
        let (program, folder) = (results.plan.program, &results.plan.folder);
        let base = folder.join(tune::BASE_LOGITS);
        progress("evaluating the new model");
        self.written = Some(program.evaluate(model, &base, &folder.join("new.log"), &[])?);
        let Some(other) = &self.options.check else {
            return Ok(());
        };
        let mut session = Session::new(
            self.options.evaluation.program(None)?,
            (&self.options.model, self.files),
            &[other],
            results.plan.chunks()?,
            None,
        )?;
        let mut measure = || {
            session.use_text(other)?;
            self.checked = Some(Checked {
                before: session.evaluate(&self.options.model)?,
                rounding: session
                    .evaluate_rounding()?
                    .map(|(_, statistics)| statistics),
                after: session.evaluate(model)?,
            });
            check_files(self.files)
        };
        let measured = measure();
        session.end(measured, Ok(()))
    }

    fn show(&self, results: &Results<'_>) {
        let rows = self.rows(results);
        let sentences = self.sentences(results);
        if self.options.json {
            let all = serde_json::json!({"models": rows, "sentences": sentences});
            return println!("{all:#}");
        }
        println!("{}", self.table(&rows).as_text());
        for sentence in sentences {
            println!("{sentence}");
        }
    }

    /// Returns what was measured, and what is expected of smaller models.
    fn rows(&self, results: &Results<'_>) -> Vec<Row> {
        let checked = self.checked.as_ref();
        let plan = results.plan;
        let left =
            |cut: Option<usize>| cut.map_or(self.experts, |cut| Some(plan.cuts[cut].pruned.left));
        let row = |what: &str, bytes: Option<u64>, cut, text| Row {
            what: what.to_owned(),
            bytes,
            experts: left(cut),
            expected: None,
            text,
            check: None,
        };
        let bytes = results.as_it_is().ok().map(|mix| mix.bytes);
        let mut rows = vec![
            Row {
                check: checked.map(|of| of.before),
                ..row("as it is", bytes, None, Some(results.baseline))
            },
            Row {
                check: checked.and_then(|of| of.rounding),
                ..row("rounding alone", bytes, None, results.rounding)
            },
        ];
        for (at, statistics) in results.cuts.iter().enumerate() {
            let bytes = results.without(Some(at)).ok().map(|mix| mix.bytes);
            rows.push(row("fewer experts", bytes, Some(at), Some(*statistics)));
        }
        let is_smaller = |of: &&Uniform<'_>| Some(of.mix.bytes) < bytes;
        for of in results.uniform.iter().filter(is_smaller) {
            let what = format!("all as {}", plan.candidates[of.candidate].name);
            rows.push(row(&what, Some(of.mix.bytes), None, Some(of.statistics)));
        }
        if let Some(recipe) = &results.recipe {
            let mix = &recipe.mix;
            rows.push(Row {
                check: checked.map(|of| of.after),
                ..row(
                    "the new model",
                    Some(mix.bytes),
                    mix.cut,
                    Some(self.written.unwrap_or(recipe.statistics)),
                )
            });
        }
        let smaller = SMALLER.map(|part| (self.options.size as f64 * part) as u64);
        let mut last = rows.last().and_then(|row| row.bytes);
        for (expected, mix) in smaller.iter().filter_map(|size| results.best(*size).ok()) {
            if last
                .replace(mix.bytes)
                .is_some_and(|last| mix.bytes >= last)
            {
                continue;
            }
            rows.push(Row {
                expected: Some(expected),
                ..row("smaller", Some(mix.bytes), mix.cut, None)
            });
        }
        rows
    }

    fn table(&self, rows: &[Row]) -> Table {
        let name = |path: &Path| {
            text::line(&path.file_name().unwrap_or_default().to_string_lossy()).into_owned()
        };
        let mut head = vec!["model".to_owned(), "size".into(), "experts".into()];
        for path in self.options.texts() {
            let figures = ["KL divergence", "same top", "perplexity"];
            head.extend(figures.map(|of| format!("{of}, {}", name(path))));
        }
        let mut table = Table::new(head.iter().map(String::as_str));
        for row in rows {
            let mut cells = vec![
                row.what.clone(),
                row.bytes
                    .map_or("-".into(), |bytes| size_text(bytes as f64)),
                row.experts
                    .map_or("-".into(), |experts| experts.to_string()),
            ];
            let none = || ["-"; 3].map(str::to_owned);
            let text = row.text.map_or_else(none, |of| of.cells());
            cells.extend(match row.expected {
                Some(expected) => [format!("{expected:.6} expected"), "-".into(), "-".into()],
                None => text,
            });
            if self.options.check.is_some() {
                cells.extend(row.check.map_or_else(none, |of| of.cells()));
            }
            table.rows.push(cells);
        }
        table
    }

    /// Returns each text with what it shows.
    fn of_texts(&self, results: &Results<'_>) -> Vec<(&Path, Checked)> {
        let first = self.written.map(|after| Checked {
            before: results.baseline,
            rounding: results.rounding,
            after,
        });
        let all = first.into_iter().chain(self.checked);
        self.options.texts().zip(all).collect()
    }

    /// Returns what the new model costs, for each text.
    fn sentences(&self, results: &Results<'_>) -> Vec<String> {
        let sentence = |(path, of): (&Path, Checked)| {
            let floor = of.rounding.unwrap_or(of.before).kld;
            let beyond = match of.after.kld.is_within(&floor) {
                true => "is no worse than rounding, as far as this text shows".to_owned(),
                false => format!(
                    "is worse than rounding by a KL divergence of {:.6}",
                    of.after.kld.mean - floor.mean
                ),
            };
            format!(
                "{}: the new model {beyond}; its perplexity is {:+.2} %",
                text::path(path),
                100.0 * (of.after.ppl.mean / of.before.ppl.mean - 1.0)
            )
        };
        self.of_texts(results).into_iter().map(sentence).collect()
    }
}
