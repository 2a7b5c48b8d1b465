//! The installed tree, away from the repository: as packagers use it.

use std::path::Path;

use anyhow::{Context, Result, bail, ensure};

use crate::cmake::{build_in, ctest, tools};
use crate::fixtures;
use crate::install::{DebugInfo, install_to};
use crate::run::{command, output, root, run};

/// Files of the installed tree, below the prefix.
pub const FILES: [&str; 17] = [
    "bin/llama-sidecar",
    "include/llama_sidecar.h",
    "include/llama_sidecar_hooks.h",
    "lib/libllama_sidecar.a",
    "lib/libllama_sidecar.so",
    "lib/libllama_sidecar.so.0",
    "lib/libllama_sidecar_preload.so",
    "lib/pkgconfig/llama_sidecar.pc",
    "lib/cmake/llama_sidecar/llama_sidecar-config.cmake",
    "lib/cmake/llama_sidecar/llama_sidecar-config-version.cmake",
    "share/man/man1/llama-sidecar.1",
    "share/man/man1/llama-sidecar-run.1",
    "share/man/man1/llama-sidecar-doctor.1",
    "share/man/man1/llama-sidecar-swap.1",
    "share/bash-completion/completions/llama-sidecar",
    "share/zsh/site-functions/_llama-sidecar",
    "share/fish/vendor_completions.d/llama-sidecar.fish",
];

/// Installs with DESTDIR, moves the tree, and builds the examples against it with
/// pkg-config and with find_package.
pub fn check() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let (staged, moved) = (folder.path().join("staged"), folder.path().join("moved"));
    let prefix = Path::new("/usr/local");
    install_to(prefix, Some(&staged), DebugInfo::Separate)?;
    debug_information(&staged.join("usr/local"), DebugInfo::Separate)?;
    install_to(prefix, Some(&staged), DebugInfo::Left)?;
    debug_information(&staged.join("usr/local"), DebugInfo::Left)?;
    // No file in it contains the path where it was built or staged.
    std::fs::rename(staged.join("usr/local"), &moved)?;
    for file in FILES {
        ensure!(
            moved.join(file).exists(),
            "the installed tree has no {file}"
        );
    }
    same_promise(&moved)?;
    let completions = moved.join("share/bash-completion/completions/llama-sidecar");
    run(command("bash", &moved).arg("-n").arg(completions))?;

    let examples = folder.path().join("examples");
    run(command("cp", folder.path())
        .arg("-r")
        .arg(root().join("c_examples"))
        .arg(&examples))?;
    with_pkg_config(&moved, &examples)?;
    let build = folder.path().join("build");
    build_in(&examples, &build, &moved)?;
    ctest(
        &build,
        &[
            "--tests-regex",
            "^(inspect|inspect_static|hot_swap|raii|postfetch_moe)$",
        ],
    )?;
    println!("the installed tree works where it was moved to");
    Ok(())
}

/// Fails unless libraries and programs are small, and debug information is where it should be.
fn debug_information(prefix: &Path, debug_info: DebugInfo) -> Result<()> {
    // With debug information, libraries have ten to twenty.
    const MOST_BYTES: u64 = 7 << 20;
    let sections = |file: &Path| output(command("readelf", prefix).arg("-SW").arg(file));
    for name in [
        "lib/libllama_sidecar.so",
        "lib/libllama_sidecar_preload.so",
        "bin/llama-sidecar",
    ] {
        let file = std::fs::canonicalize(prefix.join(name))?;
        let bytes = std::fs::metadata(&file)?.len();
        ensure!(bytes < MOST_BYTES, "{name} has {bytes} bytes");
        let found = sections(&file)?;
        ensure!(!found.contains(".debug_info"), "{name} is not stripped");
        let separate = file.with_file_name(format!(
            "{}.debug",
            file.file_name().context("a file")?.to_string_lossy()
        ));
        if debug_info == DebugInfo::Separate {
            ensure!(
                found.contains(".gnu_debuglink"),
                "{name} names no .debug file"
            );
            let debug = sections(&separate)?;
            ensure!(debug.contains(".debug_line"), "{separate:?} has no lines");
        } else {
            ensure!(!separate.exists(), "{separate:?} is installed");
        }
    }
    Ok(())
}

/// Fails unless SONAME and CMake package promise the same: programs run with every later
/// version of the same major version, and with no other (docs/c-api.md, "Versions").
fn same_promise(prefix: &Path) -> Result<()> {
    let version = env!("CARGO_PKG_VERSION");
    let numbers: Vec<u32> = version
        .split('.')
        .map(str::parse)
        .collect::<Result<_, _>>()?;
    let &[major, minor, patch] = numbers.as_slice() else {
        bail!("the version {version} is not of the form MAJOR.MINOR.PATCH");
    };
    let library = prefix.join("lib/libllama_sidecar.so");
    let dynamic = output(command("readelf", prefix).arg("-d").arg(library))?;
    let soname = format!("[libllama_sidecar.so.{major}]");
    ensure!(
        dynamic.contains(&soname),
        "expected the SONAME {soname}, found {dynamic}"
    );

    let script = prefix.join("version.cmake");
    std::fs::write(
        &script,
        "include(${FILE})\nif(NOT PACKAGE_VERSION_COMPATIBLE STREQUAL EXPECTED)\n\
         message(FATAL_ERROR \"requested ${PACKAGE_FIND_VERSION}, expected ${EXPECTED}\")\nendif()\n",
    )?;
    let file = prefix.join("lib/cmake/llama_sidecar/llama_sidecar-config-version.cmake");
    for (asked, expected) in [
        (format!("{major}.0"), true),
        (format!("{major}.{minor}.{patch}"), true),
        (format!("{major}.{minor}.{}", patch + 1), false),
        (format!("{major}.{}", minor + 1), false),
        (format!("{}.0", major + 1), false),
    ] {
        let (asked_major, _) = asked.split_once('.').expect("it has a dot");
        run(command(tools()?.join("cmake"), prefix)
            .arg(format!("-DFILE={}", file.display()))
            .arg(format!("-DPACKAGE_FIND_VERSION={asked}"))
            .arg(format!("-DPACKAGE_FIND_VERSION_MAJOR={asked_major}"))
            .arg(format!(
                "-DEXPECTED={}",
                if expected { "TRUE" } else { "FALSE" }
            ))
            .arg("-P")
            .arg(&script))?;
    }
    Ok(())
}

/// Builds an example as a Makefile would.
fn with_pkg_config(prefix: &Path, examples: &Path) -> Result<()> {
    let ask = |question: &[&str]| {
        let mut command = command(tools()?.join("pkgconf"), examples);
        command.env("PKG_CONFIG_PATH", prefix.join("lib/pkgconfig"));
        output(command.args(question).arg("llama_sidecar"))
    };
    let version = ask(&["--modversion"])?;
    ensure!(
        version.trim() == env!("CARGO_PKG_VERSION"),
        "pkg-config reports version {version}"
    );
    let (shared, all) = (ask(&["--cflags", "--libs"])?, ask(&["--static", "--libs"])?);
    ensure!(
        all.contains("-lpthread") && !shared.contains("-lpthread"),
        "{shared}{all}"
    );
    run(command("gcc", examples)
        .args(["-std=gnu11", "inspect.c", "-o", "inspect"])
        .args(shared.split_whitespace()))?;
    let model = fixtures::make()?.join("smollm2.gguf");
    run(command("./inspect", examples)
        .env("LD_LIBRARY_PATH", prefix.join("lib"))
        .arg(&model)
        .stdout(std::process::Stdio::null()))?;
    // The static library, by its file: it needs what Libs.private names.
    run(command("gcc", examples)
        .args(["-std=gnu11", "inspect.c", "-o", "inspect_static", "-I"])
        .arg(prefix.join("include"))
        .arg(prefix.join("lib/libllama_sidecar.a"))
        .args(
            all.split_whitespace()
                .filter(|word| !word.contains("llama") && !word.starts_with("-L")),
        ))?;
    run(command("./inspect_static", examples)
        .arg(&model)
        .stdout(std::process::Stdio::null()))
}
