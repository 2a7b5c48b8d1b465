//! `llama-sidecar prune`: what a mixture of experts can do without, and the model without it.
//!
//! | module | contents |
//! |---|---|
//! | [`search`] | experts to leave out, by measurements |
//! | [`duplicates`] | experts with the same matrices |

mod duplicates;
mod search;

use std::path::PathBuf;

use anyhow::{Context, Result};
use sidecar_core::gguf::{Access, new_paths, open_model};
use sidecar_core::protocol::LayerMask;

use crate::control::mask;
use crate::output::{check_writable, progress, write_text};
use crate::page;
use crate::prune::search::{Found, SearchOptions};
use crate::pruned::{Mixture, Pruned};
use crate::sizes::{Table, size_text};

/// The model, and what it does without.
#[derive(clap::Args)]
#[command(group = clap::ArgGroup::new("which").required(true).args(["experts", "leave_out"]))]
pub struct PruneOptions {
    /// The model: a GGUF file, or any shard of one.
    model: PathBuf,
    /// The experts to leave out, as JSON: [{"layer": 3, "experts": [3, 17]}, ...]. llama.cpp has one number of
    /// experts for all layers: the same number in each.
    #[arg(long, value_name = "FILE")]
    experts: Option<PathBuf>,
    #[command(flatten)]
    search: SearchOptions,
    /// Print JSON.
    #[arg(long, requires = "leave_out")]
    json: bool,
    /// Write the measurements as a self-contained HTML page.
    #[arg(long, value_name = "FILE", requires = "leave_out")]
    report: Option<PathBuf>,
    /// Write the list of the experts that were chosen.
    #[arg(long, value_name = "FILE", requires = "leave_out")]
    save: Option<PathBuf>,
    /// Write the pruned model. That of a model in shards has as many: name the first one (NAME-00001-of-00003.gguf), or
    /// NAME.gguf.
    #[arg(
        short,
        long,
        value_name = "GGUF",
        required_unless_present = "leave_out"
    )]
    output: Option<PathBuf>,
}

/// Finds the experts to leave out, or takes those of a file, and writes the model without them.
pub fn run(options: &PruneOptions) -> Result<()> {
    let model = open_model(&options.model, Access::Read)
        .with_context(|| format!("cannot read the model {}", options.model.display()))?;
    let mixture = Mixture::of(&model)?;
    let outputs = match &options.output {
        Some(path) => new_paths(path, model.len() as u64).context("cannot write the model")?,
        None => Vec::new(),
    };
    let others = [&options.save, &options.report];
    for path in outputs.iter().chain(others.into_iter().flatten()) {
        // Not after the measurements.
        check_writable(path)?;
    }
    let masks: Vec<LayerMask> = match &options.experts {
        Some(path) => mask::read(path)?,
        None => {
            let duplicates = duplicates::of(&model, &mixture)
                .with_context(|| format!("cannot read {}", options.model.display()))?;
            let found = search::run(&options.search, &options.model, &mixture, &duplicates)?;
            show(options, &found)?;
            found.experts
        }
    };
    let pruned = Pruned::of(&model, &mixture, &masks)?;
    if let Some(path) = &options.save {
        write_text(path, &format!("{}\n", serde_json::to_string(&masks)?))?;
    }
    if let Some(first) = outputs.first().cloned() {
        let size = pruned.write(outputs)?;
        let before: u64 = model.iter().map(|file| file.source.id().size).sum();
        progress(&format!(
            "{} has {} of {} experts in each of {} layers: {} of {}",
            first.display(),
            pruned.left,
            mixture.routing.experts,
            mixture.layers.len(),
            size_text(size as f64),
            size_text(before as f64)
        ));
    }
    Ok(())
}

/// Prints what was measured, and writes it as a page.
fn show(options: &PruneOptions, found: &Found) -> Result<()> {
    if let Some(path) = &options.report {
        let layers = found
            .experts
            .iter()
            .map(|mask| vec![mask.layer.to_string(), mask::text(&mask.experts)]);
        let mut chosen = Table::new(["layer", "experts to leave out"]);
        chosen.rows = layers.collect();
        let note = "What the model can do without, against the model as it is.";
        let tables = [(None, found.table()), (Some("Experts"), chosen)];
        let page = page::measurements("Pruning", &options.model, note, tables);
        write_text(path, &page)?;
    }
    match options.json {
        true => println!("{:#}", serde_json::to_value(found)?),
        false => print!("{}", found.table().as_text()),
    }
    Ok(())
}
