//! The C and C++ examples: built against an installed tree, run by CTest.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use testkit::server::llama_cpp;

use crate::fixtures;
use crate::install::{DebugInfo, copy, install, link, preload, target_folder};
use crate::machine::Machine;
use crate::run::{command, root, run};

/// Installs into the target folder and builds the examples there as a project of
/// their own; returns the build folder.
pub fn build(name: &str, flags: &[String]) -> Result<PathBuf> {
    let target = target_folder()?;
    let stage = target.join("stage");
    // For the reports of sanitizers and valgrind.
    install(&stage, Machine::HERE, DebugInfo::Separate)?;
    let build = target.join(name);
    let found = define("CMAKE_PREFIX_PATH", &stage);
    configure("c_examples", &build, &[&[found], flags].concat())?;
    Ok(build)
}

/// Builds the examples that are in a folder, against an installed tree.
pub fn build_in(examples: &Path, build: &Path, prefix: &Path) -> Result<()> {
    let source = examples.to_str().context("a folder with a name in UTF-8")?;
    configure(source, build, &[define("CMAKE_PREFIX_PATH", prefix)])
}

/// Builds and runs the examples through the CMakeLists.txt of the repository, and
/// installs from there.
pub fn test_top_level() -> Result<()> {
    let build = target_folder()?.join("cmake");
    configure(".", &build, &[])?;
    ctest(&build, &[])?;
    let prefix = target_folder()?.join("cmake-installed");
    run(command(tools()?.join("cmake"), &root())
        .arg("--install")
        .arg(&build)
        .arg("--prefix")
        .arg(&prefix))?;
    for file in [
        "include/llama_sidecar.h",
        "lib/libllama_sidecar.so",
        "bin/llama-sidecar",
    ] {
        ensure!(
            prefix.join(file).exists(),
            "cmake --install left out {file}"
        );
    }
    Ok(())
}

fn configure(source: &str, build: &Path, flags: &[String]) -> Result<()> {
    let fixtures_at = fixtures::make()?;
    let llama_cpp = llama_cpp("..");
    // Without it, CTest skips the example that needs ggml.
    let ggml = match llama_cpp.join("include/ggml-cpu.h").exists() {
        true => define("GGML", &llama_cpp),
        false => "-UGGML".into(),
    };
    configure_with(
        source,
        build,
        &[
            ggml,
            define("MODEL", &fixtures_at.join("smollm2.gguf")),
            define("VARIANT", &fixtures_at.join("smollm2-mixed.gguf")),
            define("MOE", &fixtures_at.join("moe.gguf")),
            define("MOE_VARIANT", &fixtures_at.join("moe-q8_0.gguf")),
            define("MOE_OTHER_BLOCKS", &fixtures_at.join("moe-mixed.gguf")),
            define("SIM_CUDA", &sim_cuda()?),
            // No example is skipped for these models.
            "-DSKIPPED=-1".into(),
        ],
        flags,
    )
}

fn configure_with(source: &str, build: &Path, defines: &[String], flags: &[String]) -> Result<()> {
    let tools = tools()?;
    run(command(tools.join("cmake"), &root())
        .args([
            "-S",
            source,
            "-G",
            "Ninja",
            "-DCMAKE_BUILD_TYPE=RelWithDebInfo",
            "-B",
        ])
        .arg(build)
        .arg(define("CMAKE_MAKE_PROGRAM", &tools.join("ninja")))
        .args(defines)
        .args(flags)
        .args(another_clone_made(build, source).then_some("--fresh"))
        .arg("--log-level=WARNING"))?;
    run(command(tools.join("cmake"), &root())
        .arg("--build")
        .arg(build)
        .arg("--")
        .arg("--quiet"))
}

/// Whether a build folder was configured from another clone of this repository: the
/// target folder may be shared (`CARGO_TARGET_DIR`), and CMake refuses another source.
fn another_clone_made(build: &Path, source: &str) -> bool {
    let Ok(cache) = std::fs::read_to_string(build.join("CMakeCache.txt")) else {
        return false;
    };
    let source = std::fs::canonicalize(root().join(source)).unwrap_or_default();
    let made_from = cache
        .lines()
        .find_map(|line| line.strip_prefix("CMAKE_HOME_DIRECTORY:INTERNAL="));
    made_from.is_some_and(|made_from| Path::new(made_from) != source)
}

/// Builds the simulated CUDA driver and returns the folder for the loader path.
pub fn sim_cuda() -> Result<PathBuf> {
    run(command("cargo", &root()).args(["build", "--quiet", "--release", "-p", "sim-cuda"]))?;
    let (target, name) = (target_folder()?, "libcuda.so.1");
    let folder = target.join("sim-cuda");
    copy(&target.join("release/libsim_cuda.so"), &folder.join(name))?;
    // The name that the library tries first.
    link(name, &folder.join("libcuda.so"))?;
    Ok(folder)
}

/// Builds the simulated GPU that is a ggml backend.
pub fn sim_ggml() -> Result<()> {
    run(command("cargo", &root()).args(["build", "--quiet", "--release", "-p", "sim-ggml"]))?;
    let (target, name) = (target_folder()?, "libsim_ggml.so");
    copy(
        &target.join("release").join(name),
        &target.join("sim-ggml").join(name),
    )
}

/// Builds the command, the server of the emulated disk, the C host and other C programs, and
/// returns the build folder.
pub fn build_hosts() -> Result<PathBuf> {
    run(command("cargo", &root()).args([
        "build",
        "--quiet",
        "--release",
        "-p",
        "llama-sidecar-cli",
        "-p",
        "slow-disk",
    ]))?;
    build_hosts_with("hosts-c", &[])
}

/// Builds the C host with ThreadSanitizer.
pub fn build_sanitized_host() -> Result<PathBuf> {
    build_hosts_with("hosts-c-tsan", &["-DTHREAD_SANITIZER=ON".into()])
}

fn build_hosts_with(name: &str, flags: &[String]) -> Result<PathBuf> {
    let fixtures_at = fixtures::make()?;
    let build = target_folder()?.join(name);
    configure_with(
        "hosts/c",
        &build,
        &[
            define("LLAMA_LIBRARIES", &fixtures_at.join("upstream")),
            define("MODEL", &fixtures_at.join("smollm2.gguf")),
            define("PRELOAD", &preload(Machine::HERE)?),
        ],
        flags,
    )?;
    Ok(build)
}

/// Builds the C host for AArch64.
pub fn build_arm64_host() -> Result<()> {
    let (target, machine) = (target_folder()?, Machine::Aarch64);
    let defines = [
        define("LLAMA_LIBRARIES", &fixtures::arm64()?),
        define("MODEL", &fixtures::make()?.join("smollm2.gguf")),
        define("PRELOAD", &preload(machine)?),
    ];
    let build = target.join("hosts-c-arm64");
    configure_with("hosts/c", &build, &defines, &cross(machine))
}

/// Builds the examples for AArch64 against an installed tree, and returns the build folder.
pub fn build_arm64_examples(prefix: &Path) -> Result<PathBuf> {
    let build = target_folder()?.join("examples-arm64");
    let mut flags = cross(Machine::Aarch64);
    flags.push(define("CMAKE_PREFIX_PATH", prefix));
    let fixtures_at = fixtures::make()?;
    let model = |name: &str| fixtures_at.join(name);
    let defines = [
        define("MODEL", &model("smollm2.gguf")),
        define("VARIANT", &model("smollm2-mixed.gguf")),
        define("MOE", &model("moe.gguf")),
        define("MOE_VARIANT", &model("moe-q8_0.gguf")),
        define("MOE_OTHER_BLOCKS", &model("moe-mixed.gguf")),
        "-DSKIPPED=-1".into(),
    ];
    configure_with("c_examples", &build, &defines, &flags)?;
    Ok(build)
}

/// The settings of CMake for another processor.
fn cross(machine: Machine) -> Vec<String> {
    vec![
        "-DCMAKE_SYSTEM_NAME=Linux".into(),
        format!("-DCMAKE_SYSTEM_PROCESSOR={}", machine.name()),
        format!("-DCMAKE_C_COMPILER={}", machine.tool("gcc")),
        format!("-DCMAKE_CXX_COMPILER={}", machine.tool("g++")),
        format!(
            "-DCMAKE_CROSSCOMPILING_EMULATOR={}",
            machine.emulator().join(";")
        ),
    ]
}

/// Builds the programs and libraries of `hosts/loader`.
pub fn build_loader() -> Result<()> {
    let build = target_folder()?.join("hosts-loader");
    configure_with("hosts/loader", &build, &[], &[])
}

/// Builds the program for models of any architecture, and with llama.cpp's sources the programs
/// that write such models; returns the build folder.
pub fn build_architectures(source: Option<&Path>) -> Result<PathBuf> {
    let build = target_folder()?.join("hosts-architectures");
    let source = source.map_or_else(|| "-ULLAMA_SOURCE".into(), |at| define("LLAMA_SOURCE", at));
    configure_with(
        "hosts/architectures",
        &build,
        &[define("LLAMA_LIBRARIES", &llama_cpp(""))],
        &[source],
    )?;
    Ok(build)
}

/// Runs the tests of a build folder, two at a time.
pub fn ctest(build: &Path, arguments: &[&str]) -> Result<()> {
    run(command(tools()?.join("ctest"), &root())
        .arg("--test-dir")
        .arg(build)
        .args(["--output-on-failure", "--no-tests=error", "--parallel", "2"])
        .args(arguments))
}

/// Folder of the programs from PyPI.
pub fn tools() -> Result<PathBuf> {
    let python = fixtures::python()?;
    Ok(python.parent().expect("a folder").to_owned())
}

fn define(variable: &str, value: &Path) -> String {
    format!("-D{variable}={}", value.display())
}
