//! The drop-in with models of every architecture: `cargo xtask check --archs`.
//!
//! llama.cpp's `test-llama-archs` writes tiny models with random weights. Each capability of the
//! drop-in runs with each of them, every tensor is swapped and returned, files with other keys and tensors
//! are reloaded, and masks of experts are compared with pruned models. What is refused, and why, is written to docs/model-architectures.md.
//!
//! Modules, top to bottom:
//!
//! | module | contents |
//! |---|---|
//! | `page` | the page with the results |
//! | `modes`, `swaps`, `reloads`, `masks` | capabilities that change no result; hot-swap of every tensor; reloads of changed files; masks of experts |
//! | `companions` | tensors that belong to a weight |
//! | `programs` | the programs that write and evaluate the models |
//! | `model`, `models` | a model with a changed tensor; which models are tested |

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::sync::Mutex;
use std::time::Instant;

use anyhow::{Context, Result, anyhow, bail, ensure};
use ggml_quantize::Ggml;
use regex::Regex;
use testkit::architectures::{self, Device, Reference};
use testkit::server::{LlamaCpp, llama_cpp};

mod companions;
mod masks;
mod model;
mod models;
mod modes;
mod page;
mod programs;
mod reloads;
mod swaps;

use model::Model;
use models::{Form, Models};
use modes::MODES;
use page::Tested;

pub use programs::{build, missing, unbuilt};
use swaps::Outcome;

use crate::run::root;

const PAGE: &str = "docs/model-architectures.md";

/// Tests the models whose file names match a pattern, or those of the daily test for `daily`.
/// Without a pattern, tests all and writes the page.
pub fn check(pattern: &str) -> Result<()> {
    if let Some(missing) = missing() {
        bail!("{missing}");
    }
    let tested = test(&match pattern {
        "daily" => Models::Daily,
        pattern => Models::Matching(Regex::new(pattern)?),
    })?;
    if pattern.is_empty() {
        let page = page::page(&tested, &format!("b{}", LlamaCpp::tested().build));
        std::fs::write(root().join(PAGE), page)?;
    } else {
        println!("{}", page::companions(&tested));
        println!("{}", page::reloads(&tested));
    }
    Ok(())
}

/// Tests models, two at a time. An error has all that failed.
fn test(chosen: &Models) -> Result<Vec<Tested>> {
    programs::build_host()?;
    let mut models = Vec::new();
    for form in Form::ALL {
        let paths = programs::models(form, chosen);
        models.extend(paths.into_iter().map(|path| (form, path)));
    }
    ensure!(!models.is_empty(), "no model has such a name");
    let left = Mutex::new(models.iter());
    let results = Mutex::new(Vec::new());
    std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                let mut references = [Device::Cpu, Device::Simulated].map(Reference::start);
                loop {
                    let next = left.lock().expect("no panic").next();
                    let Some((form, path)) = next else { return };
                    let began = Instant::now();
                    let test =
                        AssertUnwindSafe(|| test_one(*form, path, chosen.types(), &mut references));
                    let result = catch_unwind(test).unwrap_or_else(|_| {
                        references = [Device::Cpu, Device::Simulated].map(Reference::start);
                        Err(anyhow!("a panic, which is printed above"))
                    });
                    let result = result.with_context(|| format!("{form}: {}", path.display()));
                    let outcome = if result.is_ok() { "" } else { " FAILED" };
                    let seconds = began.elapsed().as_secs_f64();
                    let name = path.file_stem().unwrap_or_default().to_string_lossy();
                    println!("{form}: {name}, {seconds:.0} s{outcome}");
                    results.lock().expect("no panic").push(result);
                }
            });
        }
    });
    let (tested, failed): (Vec<_>, Vec<_>) =
        results.into_inner()?.into_iter().partition(Result::is_ok);
    let failed: Vec<_> = failed.into_iter().filter_map(Result::err).collect();
    let failed: Vec<_> = failed.iter().map(|error| format!("{error:#}")).collect();
    ensure!(
        failed.is_empty() && tested.len() == models.len(),
        "{} of {} models failed:\n{}",
        models.len() - tested.len(),
        models.len(),
        failed.join("\n")
    );
    tested.into_iter().collect()
}

/// Tests a model in all modes, and swaps its tensors.
fn test_one(
    form: Form,
    path: &Path,
    types: &'static [&'static str],
    references: &mut [Reference; 2],
) -> Result<Tested> {
    let model = Model::open(path, types)?;
    let mut failed = Vec::new();
    let mut modes = Vec::new();
    let [on_cpu, simulated] = references;
    let evaluate = |reference: &mut Reference, device| {
        let found = reference.evaluate(path).map_err(anyhow::Error::msg);
        found.with_context(|| format!("without the drop-in, {device}"))
    };
    let expected = [
        evaluate(on_cpu, Device::Cpu)?,
        evaluate(simulated, Device::Simulated)?,
    ];
    let routed = architectures::routed(path).map_err(anyhow::Error::msg)?;
    let counted = routed.counts;
    ensure!(
        counted.is_empty() != model.has_experts(),
        "the program itself counts {counted:?}"
    );
    let (companions, other) = companions::compare(&model, &routed.companions);
    failed.extend(other);
    for (at, mode) in MODES.iter().enumerate() {
        if mode.takes(&model) {
            match mode.run(&model, &expected[mode.device as usize], &counted) {
                Ok(()) => modes.push(at),
                Err(why) => failed.push(format!("{}: {why}", mode.title)),
            }
        }
    }
    // Files are written for each swap: in memory, where that is possible.
    let folder = tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir())?;
    let ggml = Ggml::open(&llama_cpp("libggml-base.so"))?;
    let mut cuts = Vec::new();
    // Of two experts that a token uses, none can be masked.
    if form == Form::MoreExperts && model.has_experts() {
        match masks::cut(path, on_cpu, folder.path()) {
            Ok(found) => cuts = found,
            Err(why) => failed.push(format!("masks: {why:#}")),
        }
    }
    // Other tensors of the second form are those of the first one.
    let (tensors, reference) = match form {
        Form::Upstream => ((0..model.tensors()).collect(), on_cpu),
        Form::MoreExperts => (model.experts(), simulated),
    };
    let swaps = swaps::swap_each(&model, &tensors, &ggml, reference, folder.path())?;
    let reloads = (form == Form::Upstream).then(|| reloads::reload_each(&model, folder.path()));
    let reloads = reloads.transpose().unwrap_or_else(|why| {
        failed.push(format!("reloads: {why:#}"));
        None
    });
    for swap in &swaps {
        if let Outcome::Wrong(what) = &swap.outcome {
            failed.push(format!("{}, {}: {what}", swap.tensor, swap.change));
        }
    }
    ensure!(failed.is_empty(), "{}", failed.join("\n  "));
    Ok(Tested {
        form,
        name: path
            .file_stem()
            .unwrap_or_default()
            .to_string_lossy()
            .into_owned(),
        has_experts: model.has_experts(),
        companions,
        modes,
        swaps,
        reloads,
        cuts,
    })
}
