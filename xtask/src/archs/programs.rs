//! The programs that write and evaluate the models.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::Result;
use testkit::architectures::{self, DAILY, WRITER};
use testkit::server::llama_cpp;

use super::models::{DAILY_MORE, Form, Models, folder};
use crate::cmake;
use crate::run::{command, root, run};

/// llama.cpp's program that writes models, and the same with 8 experts, of which 3 are used.
const WRITERS: [&str; 2] = [WRITER, "test-llama-archs-8-experts"];

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
pub fn models(form: Form, chosen: &Models) -> Vec<PathBuf> {
    let program = WRITERS[form as usize];
    let mut paths = match chosen {
        Models::Matching(_) => architectures::written(program, ".*", &folder(form)),
        Models::Daily => architectures::daily(program, &folder(form)),
    };
    paths.retain(|path| {
        let name = path.file_stem().unwrap_or_default().to_string_lossy();
        let is_chosen = match chosen {
            Models::Matching(pattern) => pattern.is_match(&name),
            Models::Daily if form == Form::MoreExperts => DAILY[..DAILY_MORE].contains(&&*name),
            Models::Daily => true,
        };
        is_chosen && (form == Form::Upstream || name.ends_with("-moe"))
    });
    paths
}
