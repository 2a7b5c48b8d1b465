//! Installs the library the way its users find it: shared library with SONAME,
//! static library, header, pkg-config file, CMake package, command with man pages and
//! completions.

use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

use crate::machine::Machine;
use crate::run::{command, output, root, run};

/// Whether debug information is installed, in files of its own.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DebugInfo {
    /// No.
    Left,
    /// In `NAME.debug` next to each library and program, where debuggers find it.
    Separate,
}

/// Builds in release mode and installs to `prefix`, below `destdir` if there is one.
pub fn install_to(prefix: &Path, destdir: Option<&Path>, debug_info: DebugInfo) -> Result<()> {
    println!("building in release mode, which takes some minutes");
    let Some(destdir) = destdir else {
        install(prefix, Machine::HERE, debug_info)?;
        let bin = prefix.join("bin");
        println!("installed below {}", prefix.display());
        let path = std::env::var_os("PATH").unwrap_or_default();
        if !std::env::split_paths(&path).any(|folder| folder == bin) {
            println!("{} is not in PATH: add it", bin.display());
        }
        println!("next: llama-sidecar doctor -- COMMAND");
        return Ok(());
    };
    install(
        &destdir.join(prefix.strip_prefix("/").unwrap_or(prefix)),
        Machine::HERE,
        debug_info,
    )
}

/// Builds in release mode and installs below `prefix`. No installed file contains the prefix.
pub fn install(prefix: &Path, machine: Machine, debug_info: DebugInfo) -> Result<()> {
    machine.prepare()?;
    run(machine.cargo("build").args([
        "--release",
        "-p",
        "llama-sidecar",
        "-p",
        "llama-sidecar-cli",
    ]))?;
    let built = machine.folder(&target_folder()?).join("release");
    let version = env!("CARGO_PKG_VERSION");
    let (major, _) = version.split_once('.').context("a version has dots")?;
    let file = format!("libllama_sidecar.so.{version}");
    let soname = format!("libllama_sidecar.so.{major}");
    let lib = prefix.join("lib");

    strip(
        &built.join("libllama_sidecar.so"),
        &lib.join(&file),
        machine,
        debug_info,
    )?;
    link(&file, &lib.join(&soname))?;
    link(&soname, &lib.join("libllama_sidecar.so"))?;
    strip(
        &preload(machine)?,
        &lib.join("libllama_sidecar_preload.so"),
        machine,
        debug_info,
    )?;
    strip(
        &built.join("llama-sidecar"),
        &prefix.join("bin/llama-sidecar"),
        machine,
        debug_info,
    )?;
    strip_archive(
        &built.join("libllama_sidecar.a"),
        &lib.join("libllama_sidecar.a"),
        machine,
    )?;
    for header in ["include/llama_sidecar.h", "include/llama_sidecar_hooks.h"] {
        copy(&root().join(header), &prefix.join(header))?;
    }

    run(machine
        .start(&prefix.join("bin/llama-sidecar"))
        .arg("generate")
        .arg(prefix))?;

    for (template, target) in [
        ("llama_sidecar.pc.in", "lib/pkgconfig/llama_sidecar.pc"),
        (
            "llama_sidecar-config.cmake.in",
            "lib/cmake/llama_sidecar/llama_sidecar-config.cmake",
        ),
        (
            "llama_sidecar-config-version.cmake.in",
            "lib/cmake/llama_sidecar/llama_sidecar-config-version.cmake",
        ),
    ] {
        let text = std::fs::read_to_string(root().join("packaging").join(template))?
            .replace("@VERSION@", version)
            .replace("@ABI@", major)
            .replace("@MAJOR@", major);
        let target = prefix.join(target);
        std::fs::create_dir_all(target.parent().expect("a folder"))?;
        std::fs::write(target, text)?;
    }
    Ok(())
}

/// Builds the drop-in in its own profile, as it is installed.
pub fn preload(machine: Machine) -> Result<PathBuf> {
    run(machine
        .cargo("build")
        .args(["-p", "llama-sidecar-preload", "--profile=dropin"]))?;
    let folder = machine.folder(&target_folder()?);
    Ok(folder.join("dropin/libllama_sidecar_preload.so"))
}

/// Where cargo builds to.
pub fn target_folder() -> Result<PathBuf> {
    let metadata =
        output(command("cargo", &root()).args(["metadata", "--no-deps", "--format-version=1"]))?;
    let (_, rest) = metadata
        .split_once("\"target_directory\":\"")
        .context("cargo metadata names the target folder")?;
    let (folder, _) = rest.split_once('"').context("a closing quote")?;
    Ok(folder.into())
}

/// Installs a library or program without its debug information.
fn strip(from: &Path, to: &Path, machine: Machine, debug_info: DebugInfo) -> Result<()> {
    let name = to.file_name().context("a file")?.to_string_lossy();
    let folder = to.parent().expect("a folder");
    let debug = folder.join(format!("{name}.debug"));
    std::fs::create_dir_all(folder)?;
    let _ = std::fs::remove_file(&debug);
    // A library that is in use must not be written over.
    let beside = to.with_extension("new");
    run(command(machine.tool("strip"), folder)
        .args(["--strip-unneeded", "-o"])
        .arg(&beside)
        .arg(from))
    .context("install binutils, which gcc needs, too")?;
    if debug_info == DebugInfo::Separate {
        run(command(machine.tool("objcopy"), folder)
            .arg("--only-keep-debug")
            .arg(from)
            .arg(&debug))?;
        // The link holds the name without the folder.
        run(command(machine.tool("objcopy"), folder)
            .arg(format!("--add-gnu-debuglink={name}.debug"))
            .arg(&beside))?;
    }
    Ok(std::fs::rename(beside, to)?)
}

/// Installs a static library without its debug information.
fn strip_archive(from: &Path, to: &Path, machine: Machine) -> Result<()> {
    let beside = to.with_extension("new");
    run(command(machine.tool("strip"), &root())
        .args(["--strip-debug", "-o"])
        .arg(&beside)
        .arg(from))?;
    Ok(std::fs::rename(beside, to)?)
}

/// Puts a copy of a file in place of another, or where there is none.
pub fn copy(from: &Path, to: &Path) -> Result<()> {
    std::fs::create_dir_all(to.parent().expect("a folder"))?;
    // A library that is in use must not be written over.
    let beside = to.with_extension("new");
    std::fs::copy(from, &beside)
        .with_context(|| format!("{} to {}", from.display(), beside.display()))?;
    Ok(std::fs::rename(beside, to)?)
}

/// Puts a symbolic link in place of another, or where there is none.
pub fn link(target: &str, at: &Path) -> Result<()> {
    let _ = std::fs::remove_file(at);
    Ok(symlink(target, at)?)
}
