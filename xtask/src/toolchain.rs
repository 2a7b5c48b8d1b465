//! Rust toolchains and programs that checks install for themselves.

use std::path::PathBuf;

use anyhow::{Context, Result, ensure};
use testkit::fixtures::cache;

use crate::run::{command, exists, root, run};

/// Installs a toolchain with these components through rustup unless it is there.
pub fn rust(name: &str, components: &[&str]) -> Result<()> {
    ensure!(exists("rustup"), "Rust {name} needs rustup");
    let components_of = command("rustup", &root())
        .args(["component", "list", "--installed", "--toolchain", name])
        .output()?;
    let installed = String::from_utf8_lossy(&components_of.stdout);
    let there = |wanted: &&str| installed.lines().any(|line| line.starts_with(*wanted));
    if components_of.status.success() && components.iter().all(there) {
        return Ok(());
    }
    let install = ["toolchain", "install", name, "--profile", "minimal"];
    let components = components
        .iter()
        .flat_map(|component| ["--component", component]);
    run(command("rustup", &root())
        .args(install)
        .args(components)
        .arg("--no-self-update"))
    .with_context(|| format!("cannot install Rust {name}"))
}

/// Builds a program of crates.io, with options of `cargo install`, into the cache unless it is there; returns its path.
pub fn program(name: &str, version: &str, options: &[&str]) -> Result<PathBuf> {
    let folder = cache().join(format!("{name}-{version}"));
    let program = folder.join("bin").join(name);
    if !program.exists() {
        println!("building {name} {version}");
        // The first check needs a program before anything is in an empty cache.
        std::fs::create_dir_all(cache())?;
        run(command("cargo", &cache())
            .args([
                "install",
                "--quiet",
                "--locked",
                name,
                "--version",
                version,
                "--root",
            ])
            .arg(&folder)
            .args(options))
        .with_context(|| format!("cannot build {name} {version}"))?;
    }
    Ok(program)
}
