//! Builds programs of ik_llama.cpp from source, once.
//!
//! Its package on PyPI is older than its loader with several threads and its own hot-swap. The source
//! comes from a clone named by a variable, or from GitHub.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};
use testkit::ik_llama_cpp::{COMMIT, ik_llama_cpp, ik_llama_cpp_vulkan, short_commit};

use crate::cmake::tools;
use crate::fixtures::{DEBIAN_LIBRARIES, scratch, vulkan_headers};
use crate::llama_cpp::{keep_build, run_with_progress};
use crate::run::{command, run};

/// What is built.
const PROGRAMS: [&str; 3] = ["llama-server", "llama-perplexity", "llama-cli"];
/// What is built with Vulkan.
const ON_VULKAN: [&str; 1] = ["llama-server"];
/// The work tree of the commit, or a clone that has it.
const SOURCE: &str = "SIDECAR_IK_LLAMA_SOURCE";
/// What a work tree has.
const SCRIPT: &str = "CMakeLists.txt";
const REPOSITORY: &str = "https://github.com/ikawrakow/ik_llama.cpp";
/// As for llama.cpp: fixed instructions, and threads that sleep while they wait. Kernels of attention
/// for further types of the cache take long to compile.
const FLAGS: [&str; 14] = [
    "-DCMAKE_BUILD_TYPE=Release",
    "-DBUILD_SHARED_LIBS=ON",
    "-DCMAKE_INSTALL_RPATH=$ORIGIN",
    "-DCMAKE_BUILD_WITH_INSTALL_RPATH=ON",
    "-DGGML_NATIVE=OFF",
    "-DGGML_AVX=ON",
    "-DGGML_AVX2=ON",
    "-DGGML_FMA=ON",
    "-DGGML_F16C=ON",
    "-DGGML_OPENMP=OFF",
    "-DGGML_CCACHE=OFF",
    "-DGGML_IQK_FA_ALL_QUANTS=OFF",
    "-DLLAMA_CURL=OFF",
    "-DLLAMA_BUILD_TESTS=OFF",
];

/// Why a program is missing, if so.
pub fn missing() -> Option<String> {
    first_missing(&PROGRAMS.map(ik_llama_cpp), "ik-llama-server")
}

/// Why a program with Vulkan is missing, if so.
pub fn missing_vulkan() -> Option<String> {
    first_missing(
        &ON_VULKAN.map(ik_llama_cpp_vulkan),
        "ik-llama-server-vulkan",
    )
}

fn first_missing(paths: &[PathBuf], host: &str) -> Option<String> {
    let path = paths.iter().find(|path| !path.exists())?;
    Some(format!(
        "{} is not built: run 'cargo xtask hosts {host}'",
        path.display()
    ))
}

/// Builds what is missing.
pub fn make() -> Result<()> {
    match missing() {
        None => Ok(()),
        Some(_) => build_kept(&PROGRAMS, &[], Path::new(""), &ik_llama_cpp("")),
    }
}

/// Builds what is missing with Vulkan. Its shaders take longest.
pub fn make_vulkan() -> Result<()> {
    if missing_vulkan().is_none() {
        return Ok(());
    }
    let vulkan = vulkan_headers()?.join("usr");
    let libraries = vulkan.join("..").join(DEBIAN_LIBRARIES);
    let flags = [
        ("GGML_VULKAN", "ON".into()),
        ("Vulkan_INCLUDE_DIR", vulkan.join("include")),
        ("Vulkan_LIBRARY", libraries.join("libvulkan.so.1")),
        ("Vulkan_GLSLC_EXECUTABLE", vulkan.join("bin/glslc")),
    ];
    let flags = flags.map(|(name, value): (_, PathBuf)| format!("-D{name}={}", value.display()));
    build_kept(&ON_VULKAN, &flags, &libraries, &ik_llama_cpp_vulkan(""))
}

/// Gets the sources, builds programs beside them, and keeps the programs alone.
fn build_kept(programs: &[&str], flags: &[String], libraries: &Path, kept: &Path) -> Result<()> {
    let folder = scratch(&format!("ik-llama-cpp-{}", short_commit()))?;
    let source = source(&folder).with_context(|| format!("ik_llama.cpp {}", short_commit()))?;
    let at = folder.join("build");
    build(&source, &at, programs, flags, libraries)?;
    keep_build(&source, &at, programs, kept)?;
    Ok(fs::remove_dir_all(folder)?)
}

/// Returns where the sources are.
fn source(folder: &Path) -> Result<PathBuf> {
    let clone = match std::env::var_os(SOURCE) {
        Some(clone) => PathBuf::from(clone),
        None => fetched(folder)?,
    };
    if clone.join(SCRIPT).exists() {
        return Ok(clone);
    }
    let source = folder.join("source");
    fs::create_dir_all(&source)?;
    let archive = folder.join("source.tar");
    run(git(&clone)
        .args(["archive", "--output"])
        .arg(&archive)
        .arg(COMMIT))?;
    run(command("tar", &source).arg("xf").arg(&archive))?;
    ensure!(
        source.join(SCRIPT).exists(),
        "expected the sources in {}",
        clone.display()
    );
    Ok(source)
}

/// Gets the commit, without its history.
fn fetched(folder: &Path) -> Result<PathBuf> {
    println!("downloading ik_llama.cpp {}", short_commit());
    let clone = folder.join("clone");
    run(command("git", folder)
        .args(["init", "--quiet", "--bare"])
        .arg(&clone))?;
    run(git(&clone).args(["fetch", "--quiet", "--depth=1", REPOSITORY, COMMIT]))?;
    Ok(clone)
}

fn git(clone: &Path) -> Command {
    let mut git = command("git", clone);
    git.arg("-C").arg(clone);
    git
}

/// `libraries`: where the compiler of shaders finds those that it needs.
fn build(
    source: &Path,
    build: &Path,
    programs: &[&str],
    flags: &[String],
    libraries: &Path,
) -> Result<()> {
    println!(
        "building {} of ik_llama.cpp {}; this takes long, once",
        programs.join(", "),
        short_commit()
    );
    let (cmake, ninja) = (tools()?.join("cmake"), tools()?.join("ninja"));
    run(command(&cmake, source)
        .env("LD_LIBRARY_PATH", libraries)
        .arg("-S")
        .arg(source)
        .arg("-B")
        .arg(build)
        .args(["-G", "Ninja", "--log-level=WARNING"])
        .arg(format!("-DCMAKE_MAKE_PROGRAM={}", ninja.display()))
        // Beside the programs.
        .arg(format!(
            "-DCMAKE_LIBRARY_OUTPUT_DIRECTORY={}/bin",
            build.display()
        ))
        .args(FLAGS)
        .args(flags))?;
    run_with_progress(
        command(&ninja, build)
            .env("LD_LIBRARY_PATH", libraries)
            .args(programs),
    )
}
