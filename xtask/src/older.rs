//! Programs that were built with the headers of earlier versions.

use std::fmt::Write;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};

use crate::cmake;
use crate::install::{DebugInfo, install, link, target_folder};
use crate::run::{command, root, run};

/// Runs such programs with the present library, and with one in which every struct has one
/// more field: that of a later version.
pub fn check() -> Result<()> {
    let stage = target_folder()?.join("stage");
    install(&stage, DebugInfo::Separate)?;
    let build = cmake::build_older(&stage.join("lib"), &grown_library()?)?;
    cmake::ctest(&build, &[])
}

/// Builds the library from a copy of the source with larger structs, and returns the folder
/// for the loader's path.
fn grown_library() -> Result<PathBuf> {
    let folder = target_folder()?.join("abi-grown");
    let source = folder.join("source");
    let _ = std::fs::remove_dir_all(&source);
    mirror(&root(), &source, &["src", "target", ".git"])?;
    mirror(&root().join("src"), &source.join("src"), &["ffi"])?;
    let ffi = source.join("src/ffi");
    std::fs::create_dir_all(&ffi)?;
    let mut structs = 0;
    for entry in std::fs::read_dir(root().join("src/ffi"))? {
        let entry = entry?;
        let (text, found) = grown(&std::fs::read_to_string(entry.path())?);
        structs += found;
        let at = ffi.join(entry.file_name());
        std::fs::write(&at, text)?;
        // Otherwise cargo would rebuild it each time.
        let file = std::fs::File::options().write(true).open(&at)?;
        file.set_modified(entry.metadata()?.modified()?)?;
    }
    ensure!(structs > 10, "src/ffi has only {structs} structs to grow");

    let target = folder.join("target");
    run(command("cargo", &source)
        .args(["rustc", "--quiet", "--lib", "--crate-type", "cdylib"])
        .arg("--target-dir")
        .arg(&target))?;
    let (major, _) = env!("CARGO_PKG_VERSION")
        .split_once('.')
        .context("a version has dots")?;
    link(
        "libllama_sidecar.so",
        &target.join(format!("debug/libllama_sidecar.so.{major}")),
    )?;
    Ok(target.join("debug"))
}

/// Makes a folder of links to the entries of another, except some names.
fn mirror(from: &Path, to: &Path, but: &[&str]) -> Result<()> {
    std::fs::create_dir_all(to)?;
    for entry in std::fs::read_dir(from)? {
        let entry = entry?;
        let name = entry.file_name();
        if !but.iter().any(|other| name == **other) {
            std::os::unix::fs::symlink(entry.path(), to.join(name))?;
        }
    }
    Ok(())
}

/// Source in which every struct that begins with its size ends with one more field, and how
/// many such structs there are.
fn grown(source: &str) -> (String, usize) {
    let mut out = String::new();
    let (mut structs, mut in_struct) = (0, false);
    for line in source.lines() {
        if line == "    pub struct_size: usize," {
            in_struct = true;
        }
        if line == "}" && in_struct {
            out.push_str("    /// A field of a later version.\n    pub grown: u64,\n");
            in_struct = false;
            structs += 1;
        }
        let _ = writeln!(out, "{line}");
        if line.trim_start().starts_with("struct_size: size_of::<") {
            // As in tests/abi/program_0_1.c.
            out.push_str("grown: 0x5ac3_a53c_96f0_0f69,\n");
        }
    }
    (out, structs)
}
