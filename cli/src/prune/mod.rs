//! `llama-sidecar prune`: what a mixture of experts can do without, and the model without it.
//!
//! | module | contents |
//! |---|---|
//! | [`search`] | experts to leave out, by measurements |
//! | [`duplicates`] | experts with the same matrices |

mod duplicates;
pub mod search;

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail, ensure};
use sidecar_core::gguf::{Access, GgufFile, new_paths, open_model};
use sidecar_core::protocol::LayerMask;
use sidecar_core::text;

use crate::control::mask;
use crate::evaluation::session::Session;
use crate::interruption;
use crate::output::{Outputs, check_distinct, progress};
use crate::page;
use crate::prune::search::{Found, Plan, SearchOptions};
use crate::pruned::{Mixture, Pruned};
use crate::sizes::{Table, size_text};

/// The title of the page.
const TITLE: &str = "Pruning";
/// How a list of experts starts; readers ignore the name.
const LIST: &str = r#"[{"schema":"llama-sidecar/experts/1""#;

/// The model, and what it does without.
#[derive(clap::Args)]
#[command(group = clap::ArgGroup::new("which").required(true).args(["experts", "leave_out"]))]
pub struct PruneOptions {
    /// The model: a GGUF file, or any shard of one.
    model: PathBuf,
    /// The experts to leave out, as JSON: [{"layer": 3, "experts": [3, 17]}, ...].
    ///
    /// llama.cpp has one number of experts for all layers: the same number in each. With --text, what they cost is measured.
    #[arg(long, value_name = "FILE")]
    experts: Option<PathBuf>,
    #[command(flatten)]
    search: SearchOptions,
    /// Print JSON.
    #[arg(long, requires = "text")]
    json: bool,
    /// Write the measurements as a self-contained HTML page.
    #[arg(long, value_name = "FILE", requires = "text")]
    report: Option<PathBuf>,
    /// Write the list of the experts that were chosen.
    #[arg(
        long,
        value_name = "FILE",
        requires = "text",
        conflicts_with = "experts"
    )]
    save: Option<PathBuf>,
    /// The folder for base logits and the log.
    ///
    /// The base logits are removed at the end, and the log stays after a failure. By default that of temporary files. The base logits of 100 chunks of 512 tokens take 7.8 GB for a vocabulary of 152 thousand.
    #[arg(long, value_name = "DIR", requires = "text")]
    work: Option<PathBuf>,
    /// Write the pruned model.
    ///
    /// It gets its path when llama-perplexity has loaded and evaluated it. That of a model in shards has as many: name the first one (NAME-00001-of-00003.gguf), or NAME.gguf.
    #[arg(short, long, value_name = "FILE")]
    output: Option<PathBuf>,
    #[command(flatten)]
    replace: Outputs,
}

/// Finds the experts to leave out, or takes those of a file, and writes the model without them.
pub fn run(options: &PruneOptions) -> Result<()> {
    let files = open_model(&options.model, Access::Read)
        .with_context(|| format!("cannot read the model {}", text::path(&options.model)))?;
    let mixture = Mixture::of(&files)?;
    let outputs = match &options.output {
        Some(path) => new_paths(path, files.len() as u64).context("cannot write the model")?,
        None => Vec::new(),
    };
    let page = page::start(TITLE);
    let models = outputs.iter().map(|path| (path, "GGUF"));
    let others = [(&options.save, LIST), (&options.report, &page)];
    let others = others
        .iter()
        .filter_map(|(path, start)| Some((path.as_ref()?, *start)));
    let all: Vec<(&PathBuf, &str)> = models.chain(others).collect();
    for (path, start) in &all {
        // Not after the measurements.
        options.replace.check(path, start)?;
        if *start == "GGUF" && path.metadata().is_ok_and(|found| !found.is_file()) {
            bail!(
                "cannot write {}: it is not a regular file, as a model is",
                text::path(path)
            );
        }
    }
    let written: Vec<&Path> = all.iter().map(|(path, _)| path.as_path()).collect();
    let inputs = options.search.inputs().chain(&options.experts);
    check_distinct(&written, inputs.map(PathBuf::as_path))?;
    let model = Model {
        path: &options.model,
        files: &files,
        mixture: &mixture,
        outputs,
        replace: options.replace,
    };
    let not_computed = &mixture.routing.predicting;
    if mixture
        .layers
        .iter()
        .any(|layer| not_computed.contains(layer))
    {
        progress(&format!(
            "layers from {} on predict further tokens (MTP), and are not measured: without a list of theirs, they leave out the last experts of each group, which changes what is drafted and no result",
            not_computed.start
        ));
    }
    let given = options.experts.as_deref().map(mask::read).transpose()?;
    match (given, &options.search.text) {
        (Some(masks), None) => {
            ensure!(
                !model.outputs.is_empty(),
                "pass -o GGUF to write the new model, or --text FILE to measure what the list costs"
            );
            interruption::adopt()?;
            interruption::end_at_signals()?;
            let program = options.search.program()?;
            model.write(&masks, |path| match &program {
                Some(program) => program.try_model(path),
                None => {
                    progress("the new model was not loaded before it got its name: there is no llama-perplexity in PATH, and no --program");
                    Ok(())
                }
            })
        }
        (given, _) => search(options, &model, given),
    }
}

/// A mixture of experts, its files, and those of the new model.
struct Model<'a> {
    path: &'a Path,
    files: &'a [GgufFile],
    mixture: &'a Mixture,
    outputs: Vec<PathBuf>,
    replace: Outputs,
}

impl Model<'_> {
    fn without(&self, masks: &[LayerMask]) -> Result<Pruned<'_>> {
        Pruned::of(self.files, self.mixture, masks)
    }

    /// Writes the model without these experts.
    /// `check` is called with the first file before it gets its path.
    fn write(&self, masks: &[LayerMask], check: impl FnOnce(&Path) -> Result<()>) -> Result<()> {
        let pruned = self.without(masks)?;
        let size = pruned.write(&self.outputs, self.replace, check)?;
        let before: u64 = self.files.iter().map(|file| file.source.id().size).sum();
        progress(&format!(
            "{} has {} of {} experts in each of {} layers: {} of {}",
            text::path(&self.outputs[0]),
            pruned.left,
            self.mixture.routing.experts,
            self.mixture.layers.len(),
            size_text(size as f64),
            size_text(before as f64)
        ));
        Ok(())
    }
}

/// Returns a list of experts as the content of a file.
pub fn list(experts: &[LayerMask]) -> Result<String> {
    let list = serde_json::to_string(experts)?;
    Ok(list.replacen("[{", &format!("{LIST},"), 1) + "\n")
}

/// Searches, or measures what was given, prints and writes what was found, and writes the model.
fn search(options: &PruneOptions, model: &Model<'_>, given: Option<Vec<LayerMask>>) -> Result<()> {
    let plan = options.search.plan(model.mixture, given)?;
    // Any experts of the same number take as much space.
    model.without(&plan.any_experts())?.check(&model.outputs)?;
    interruption::watch()?;
    let mut session =
        options
            .search
            .session(&options.model, model.files, options.work.as_deref())?;
    let mut found = Found::default();
    let result = measure(&plan, model, &mut session, &mut found);
    // Whatever failed: the evaluations may have taken hours.
    let shown = show(options, &session, &found, result.is_ok());
    session.end(result, shown)
}

fn measure(
    plan: &Plan<'_>,
    model: &Model<'_>,
    session: &mut Session<'_>,
    found: &mut Found,
) -> Result<()> {
    let duplicates = || {
        duplicates::of(model.files, model.mixture)
            .with_context(|| format!("cannot read {}", text::path(model.path)))
    };
    search::run(plan, session, duplicates, found)?;
    if !model.outputs.is_empty() {
        let experts = plan.with_given(&found.experts);
        model.write(&experts, |path| {
            progress("evaluating the new model");
            let statistics = session.evaluate(path)?;
            ensure!(
                statistics.kld.mean.is_finite(),
                "the program computes no numbers with the new model"
            );
            found.add("the new model", &statistics);
            Ok(())
        })?;
    }
    Ok(())
}

/// Prints what was measured, and writes the list and the page.
fn show(
    options: &PruneOptions,
    session: &Session<'_>,
    found: &Found,
    is_complete: bool,
) -> Result<()> {
    if found.is_empty() {
        progress(
            "nothing was measured: the contributions of experts do not count before the first table",
        );
        return Ok(());
    }
    let note = found.note().filter(|_| is_complete);
    match options.json {
        true => println!("{:#}", serde_json::to_value(found)?),
        false => print!("{}", found.table().as_text()),
    }
    if let Some(note) = &note {
        progress(note);
    }
    let saved = match &options.save {
        Some(path) if !found.experts.is_empty() => {
            options.replace.write(path, &list(&found.experts)?)
        }
        _ => Ok(()),
    };
    // Also if the list cannot be written.
    let reported = match &options.report {
        Some(path) => {
            let sentences = [
                Some("What the model can do without, against the model as it is."),
                page::incomplete(is_complete),
                note.as_deref(),
            ];
            let layers = found
                .experts
                .iter()
                .map(|mask| vec![mask.layer.to_string(), mask::text(&mask.experts)]);
            let mut chosen = Table::new(["layer", "experts to leave out"]);
            chosen.rows = layers.collect();
            let tables = [(None, found.table()), (Some("Experts"), chosen)];
            let (model, facts) = (&options.model, session.facts());
            options.replace.write(
                path,
                &page::measurements(TITLE, model, &sentences, &facts, tables),
            )
        }
        None => Ok(()),
    };
    saved.and(reported)?;
    let list = options.save.as_ref().filter(|_| !found.experts.is_empty());
    if let (false, Some(path)) = (is_complete, list) {
        progress(&format!(
            "the experts so far are in {}, and no model is written: continue with --experts {0}",
            text::path(path)
        ));
    }
    Ok(())
}
