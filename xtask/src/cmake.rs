//! The C and C++ examples: built against an installed tree, run by CTest.

use std::path::{Path, PathBuf};

use anyhow::Result;

use crate::fixtures;
use crate::install::{install, target_folder};
use crate::root;
use crate::run::{command, run};

/// Installs into the target folder and configures and builds the examples there;
/// returns the build folder.
pub fn build(name: &str, c_flags: &str) -> Result<PathBuf> {
    let fixtures_at = fixtures::make()?;
    let tools = tools()?;
    let target = target_folder()?;
    let stage = target.join("stage");
    install(&stage)?;
    let build = target.join(name);
    run(command(tools.join("cmake"), &root())
        .args([
            "-S",
            "c_examples",
            "-G",
            "Ninja",
            "-DCMAKE_BUILD_TYPE=RelWithDebInfo",
            "-B",
        ])
        .arg(&build)
        .arg(define("CMAKE_MAKE_PROGRAM", &tools.join("ninja")))
        .arg(define("CMAKE_PREFIX_PATH", &stage))
        .arg(define("MODEL", &fixtures_at.join("smollm2.gguf")))
        .arg(define("VARIANT", &fixtures_at.join("smollm2-mixed.gguf")))
        .arg(format!("-DCMAKE_C_FLAGS={c_flags}"))
        .arg(format!("-DCMAKE_CXX_FLAGS={c_flags}"))
        .arg("--log-level=WARNING"))?;
    run(command(tools.join("cmake"), &root())
        .arg("--build")
        .arg(&build)
        .arg("--")
        .arg("--quiet"))?;
    Ok(build)
}

/// Builds and runs the examples.
pub fn test() -> Result<()> {
    ctest(&build("c_examples", "")?, &[])
}

/// Runs the examples of a build folder.
pub fn ctest(build: &Path, arguments: &[&str]) -> Result<()> {
    run(command(tools()?.join("ctest"), &root())
        .arg("--test-dir")
        .arg(build)
        .args(["--output-on-failure", "--no-tests=error"])
        .args(arguments))
}

fn tools() -> Result<PathBuf> {
    let python = fixtures::python()?;
    Ok(python.parent().expect("a folder").to_owned())
}

fn define(variable: &str, value: &Path) -> String {
    format!("-D{variable}={}", value.display())
}
