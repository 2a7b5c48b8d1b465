//! Checks with other tools: sanitizers, valgrind, fuzzing.

use anyhow::{Result, bail};

use crate::install::target_folder;
use crate::run::{command, exists, root, run};
use crate::{cmake, toolchain};

/// Runs the C examples built with AddressSanitizer, LeakSanitizer and
/// UndefinedBehaviorSanitizer.
pub fn asan() -> Result<()> {
    let flags = "-fsanitize=address,undefined -fno-sanitize-recover -fno-omit-frame-pointer";
    let build = cmake::build(
        "c_examples-asan",
        &[
            format!("-DCMAKE_C_FLAGS={flags}"),
            format!("-DCMAKE_CXX_FLAGS={flags}"),
        ],
    )?;
    cmake::ctest(&build, &[])
}

/// Runs the C examples under valgrind's memcheck, except the one with nine busy threads and
/// those with a simulated driver: valgrind runs one thread at a time, so they would take many
/// minutes. The address sanitizer runs them.
pub fn valgrind() -> Result<()> {
    if !exists("valgrind") {
        bail!("valgrind is not installed (Debian: apt-get install valgrind)");
    }
    let launcher = "valgrind;--quiet;--error-exitcode=9;--leak-check=full;--errors-for-leak-kinds=definite,indirect";
    let build = cmake::build(
        "c_examples-valgrind",
        &[format!("-DCMAKE_TEST_LAUNCHER={launcher}")],
    )?;
    let elsewhere = "^(swap_under_load|postfetch_[^mg].*|postfetch_ggml_.*|hooks_.*)$";
    cmake::ctest(&build, &["--exclude-regex", elsewhere])
}

/// The fuzz targets.
const TARGETS: [&str; 6] = ["gguf", "http", "imatrix", "messages", "routes", "trace"];

/// Fuzzes each target for some minutes. Findings stay in `fuzz/artifacts`.
///
/// The sanitizer flags belong to nightly compilers; RUSTC_BOOTSTRAP lets the
/// installed one accept them, for this build alone.
pub fn fuzz(minutes: u64) -> Result<()> {
    let fuzz = root().join("fuzz");
    let target = target_folder()?.join("fuzz");
    run(command("cargo", &fuzz)
        .args(["build", "--release", "--quiet", "--target", "x86_64-unknown-linux-gnu"])
        .env("CARGO_TARGET_DIR", &target)
        .env("RUSTC_BOOTSTRAP", "1")
        .env(
            "RUSTFLAGS",
            "-Zsanitizer=address -Cpasses=sancov-module -Cllvm-args=-sanitizer-coverage-level=4 \
             -Cllvm-args=-sanitizer-coverage-inline-8bit-counters \
             -Cllvm-args=-sanitizer-coverage-pc-table -Cllvm-args=-sanitizer-coverage-trace-compares \
             -Ccodegen-units=1 --cfg fuzzing -Cdebug-assertions",
        ))?;

    let programs = target.join("x86_64-unknown-linux-gnu/release");
    for name in TARGETS {
        let [corpus, artifacts, regressions] = ["corpus", "artifacts", "regressions"].map(|of| {
            let folder = fuzz.join(of).join(name);
            std::fs::create_dir_all(&folder).map(|()| folder)
        });
        let (corpus, artifacts) = (corpus?, artifacts?);
        for (seed, bytes) in testkit::seeds::of(name) {
            std::fs::write(corpus.join(seed), bytes)?;
        }
        println!("{name}:");
        run(command(programs.join(name), &fuzz)
            .arg(&corpus)
            .arg(regressions?)
            .arg(format!("-max_total_time={}", minutes * 60))
            .arg(format!("-artifact_prefix={}/", artifacts.display()))
            .args([
                "-max_len=4096",
                "-rss_limit_mb=2048",
                "-timeout=10",
                "-print_final_stats=1",
                "-verbosity=0",
            ]))?;
    }
    Ok(())
}

/// Modules in Rust alone: no driver, no mapping, no C.
const PURE: [&str; 7] = [
    "gguf::types",
    "gguf::value",
    "experts::",
    "postfetch::cache",
    "postfetch::transfer_table",
    "postfetch::scratchpad",
    "postfetch::policy",
];

/// The nightly compiler with miri.
const MIRI: &str = "nightly-2026-10-30";

/// Returns why miri cannot run. Installs it where rustup can.
pub fn miri_missing() -> Option<String> {
    install_miri().err().map(|error| format!("{error:#}"))
}

fn install_miri() -> Result<()> {
    toolchain::rust(MIRI, &["miri", "rust-src"])
}

/// Runs the unit tests of these modules under miri, which finds undefined behaviour and
/// races that tests do not show.
pub fn miri() -> Result<()> {
    install_miri()?;
    run(command("rustup", &root())
        .args([
            "run",
            MIRI,
            "cargo",
            "miri",
            "test",
            "--quiet",
            "--package=llama-sidecar-core",
            "--package=llama-sidecar",
            "--lib",
        ])
        .args(["--no-default-features", "--"])
        .args(PURE)
        .env("CARGO_TARGET_DIR", target_folder()?.join("miri"))
        // Fewer cases of the property tests: miri is some hundred times slower.
        .env("PROPTEST_CASES", "4")
        .env("MIRIFLAGS", "-Zmiri-disable-isolation"))
}
