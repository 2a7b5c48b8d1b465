//! The programs that write and evaluate the models.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Stdio;

use anyhow::{Result, ensure};
use testkit::server::llama_cpp;

use super::models::{DAILY, DAILY_MORE, Form, Models, folder};
use crate::cmake;
use crate::fixtures::scratch;
use crate::run::{command, root, run};

/// llama.cpp's program that writes models, and the same with 8 experts, of which 3 are used.
const WRITERS: [&str; 2] = ["test-llama-archs", "test-llama-archs-8-experts"];
/// The start of its random numbers.
const RANDOM: &str = "1";

/// Whether a program that writes models is not built.
pub fn unbuilt() -> bool {
    WRITERS.iter().any(|program| !llama_cpp(program).exists())
}

/// Why no models can be written, if so.
pub fn missing() -> Option<String> {
    let reason = || {
        format!(
            "{} is not built: run 'cargo xtask hosts --build'",
            llama_cpp(WRITERS[0]).display()
        )
    };
    unbuilt().then(reason)
}

/// Builds the programs that write models from llama.cpp's sources, with its libraries that are
/// built.
pub fn build(source: &Path) -> Result<()> {
    let made = cmake::build_architectures(Some(source))?;
    for program in WRITERS {
        fs::copy(made.join(program), llama_cpp(program))?;
    }
    Ok(())
}

/// Builds the program that evaluates models, and the command that prunes them.
pub fn build_host() -> Result<()> {
    let build = ["build", "--quiet", "--release", "-p", "llama-sidecar-cli"];
    run(command("cargo", &root()).args(build))?;
    cmake::sim_ggml()?;
    cmake::build_architectures(None).map(|_| ())
}

/// Writes the models of a form, if they are not there. Returns those that are tested.
pub fn models(form: Form, chosen: &Models) -> Result<Vec<PathBuf>> {
    let mut paths = match chosen {
        Models::Matching(_) => written(form, ".*", &folder(form))?,
        Models::Daily => {
            let names = DAILY.map(|name| name.rsplit_once('-').map_or(name, |(name, _)| name));
            let filter = format!("^({})$", names.join("|"));
            written(form, &filter, &folder(form).with_extension("daily"))?
        }
    };
    if let Models::Daily = chosen {
        let has = |name: &str| {
            paths
                .iter()
                .any(|path| path.file_stem() == Some(name.as_ref()))
        };
        let absent: Vec<_> = DAILY.iter().filter(|name| !has(name)).collect();
        ensure!(absent.is_empty(), "test-llama-archs writes no {absent:?}");
    }
    paths.retain(|path| {
        let name = path.file_stem().unwrap_or_default().to_string_lossy();
        let is_chosen = match chosen {
            Models::Matching(pattern) => pattern.is_match(&name),
            Models::Daily if form == Form::MoreExperts => DAILY[..DAILY_MORE].contains(&&*name),
            Models::Daily => DAILY.contains(&&*name),
        };
        is_chosen && (form == Form::Upstream || name.ends_with("-moe"))
    });
    Ok(paths)
}

/// Writes models into a folder, unless they are there, and lists them.
fn written(form: Form, filter: &str, kept: &Path) -> Result<Vec<PathBuf>> {
    if !kept.exists() {
        let name = kept.file_name().unwrap_or_default().to_string_lossy();
        let folder = scratch(&name)?;
        let program = llama_cpp(WRITERS[form as usize]);
        run(command(&program, &folder)
            .args(["-s", RANDOM, "-a", filter, "-o"])
            .arg(&folder)
            .stderr(Stdio::null()))?;
        fs::rename(folder, kept)?;
    }
    let paths = fs::read_dir(kept)?.map(|entry| Ok(entry?.path()));
    let mut paths = paths.collect::<Result<Vec<_>>>()?;
    paths.sort();
    Ok(paths)
}
