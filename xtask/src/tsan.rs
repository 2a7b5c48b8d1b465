//! ThreadSanitizer. It instruments the project's own code, its crates, and the generics of the
//! standard library that are compiled with them. It does not instrument the precompiled part of
//! the standard library, nor llama.cpp; it intercepts only their calls of the C library.
//! `tests/tsan/suppressions` lists the false reports that follow.
//!
//! The library runs its tests of reloads, among them eight threads that evaluate while tensors
//! are swapped, and of expert streaming. The drop-in runs in the C host with the trace, routes and
//! saliency, its watching thread, clients of the control socket, and swaps while the host evaluates:
//! once with experts from disk, once with early copies to a simulated GPU and slots there. That GPU is
//! not instrumented: it checks the order of its copies and kernels itself.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use serde_json::Value;
use testkit::host::{DropIn, Host, Program, control, replace};
use testkit::sim_ggml::SimGgml;

use crate::install::target_folder;
use crate::run::{command, exists, output, root, run};
use crate::{cmake, fixtures};

/// Where sanitized code is built for: with a target named, build scripts are not sanitized.
const TARGET: &str = "x86_64-unknown-linux-gnu";
/// The standard library is not instrumented, which must be allowed.
const FLAGS: &str = "-Zsanitizer=thread -Cunsafe-allow-abi-mismatch=sanitizer";
/// The exit code of a process with findings.
const FOUND: i32 = 66;
/// Swaps in the host; it is some ten times slower than usual.
const SWAPS: usize = 12;

/// How long a client of the control socket waits before it asks again.
const PAUSE: Duration = Duration::from_millis(50);

/// Runs what can be run under ThreadSanitizer.
pub fn check() -> Result<()> {
    if !exists("gcc") {
        bail!("gcc is not installed, whose ThreadSanitizer the host needs");
    }
    library()?;
    drop_in()
}

fn options() -> String {
    let suppressions = root().join("tests/tsan/suppressions");
    format!(
        "suppressions={} exitcode={FOUND} ignore_noninstrumented_modules=1 history_size=4 allocator_may_return_null=1",
        suppressions.display()
    )
}

/// Cargo for sanitized code.
fn cargo(arguments: &[&str], target: &Path) -> Command {
    let mut cargo = command("cargo", &root());
    cargo
        .args(arguments)
        .args(["--quiet", "--target", TARGET])
        .env("CARGO_TARGET_DIR", target)
        // The flag belongs to nightly compilers; this lets the installed one accept it.
        .env("RUSTC_BOOTSTRAP", "1")
        .env("RUSTFLAGS", FLAGS);
    cargo
}

fn library() -> Result<()> {
    let tests = ["test", "--test", "reload", "--test", "stream"];
    run(cargo(&tests, &target_folder()?.join("tsan"))
        .env("PROPTEST_CASES", "8")
        .env("TSAN_OPTIONS", options()))
}

fn drop_in() -> Result<()> {
    let target = target_folder()?.join("tsan");
    let build = ["build", "-p", "llama-sidecar-preload", "--profile=dropin"];
    run(&mut cargo(&build, &target))?;
    let preload = target
        .join(TARGET)
        .join("dropin/libllama_sidecar_preload.so");
    cmake::sim_ggml()?;
    cmake::build_sanitized_host()?;
    let runtime = output(command("gcc", &root()).arg("-print-file-name=libtsan.so"))?;
    let runtime = PathBuf::from(runtime.trim());
    ensure!(
        runtime.is_absolute(),
        "gcc has no {}: install its ThreadSanitizer (Debian: libtsan2)",
        runtime.display()
    );

    // The runtime goes first: the drop-in needs it, and does not name it.
    let libraries = format!("{}:{}", runtime.display(), preload.display());
    let from_disk = [("LLAMA_EXPERT_STREAM", "on")];
    let (switches, status) = swaps_in_host(&libraries, &from_disk, |_| {})?;
    let layers = &status["models"][0]["stream"]["layers"];
    ensure!(layers.as_u64() > Some(0), "no experts from disk: {status}");
    println!("{switches} switches and {layers} streamed layers under ThreadSanitizer, no finding");

    let sim = SimGgml::new(&[("GGML_OP_OFFLOAD_MIN_BATCH", "1")]);
    let to_gpu = [
        ("LLAMA_POSTFETCH_MODE", "on"),
        ("LLAMA_POSTFETCH_CACHE_MB", "27"),
    ];
    let (switches, status) = swaps_in_host(&libraries, &to_gpu, |host| {
        sim.prepare(host);
        host.env("HOST_EXPERTS_ON_CPU", "1");
    })?;
    let figures = &status["post_fetch"];
    let count = |figure: &str| figures[figure].as_u64().unwrap_or(0);
    let (copied, hits) = (count("early_bytes"), count("cache_hits"));
    ensure!(copied > 0 && hits > 0, "no experts on the GPU: {figures}");
    sim.report().assert_ordered();
    println!(
        "{switches} switches, {copied} bytes copied early and {hits} experts found in slots under ThreadSanitizer, no finding"
    );
    Ok(())
}

/// Swaps tensors in the host while it evaluates and clients send requests, with these variables for the
/// drop-in. Returns the number of switches, and the last status.
fn swaps_in_host(
    libraries: &str,
    variables: &[(&'static str, &str)],
    set: impl FnOnce(&mut Command),
) -> Result<(u64, Value)> {
    let folder = tempfile::tempdir()?;
    let output = |name: &str| folder.path().join(name).display().to_string();
    let mut all = vec![
        ("LD_PRELOAD", libraries.into()),
        ("TSAN_OPTIONS", options()),
        ("LLAMA_HOTSWAP_POLL_MS", "20".into()),
        ("LLAMA_EXPERT_TRACE_OUTPUT", output("t.json")),
        ("LLAMA_EXPERT_TRACE_EVERY_S", "1".into()),
        ("LLAMA_EXPERT_TRACE_ROUTES", output("r.routes")),
        ("LLAMA_EXPERT_TRACE_SALIENCY", output("s.json")),
    ];
    let variables = variables.iter();
    all.extend(variables.map(|&(name, value)| (name, value.to_owned())));
    let fixtures = fixtures::make()?;
    let files = ["small-moe-mixed.gguf", "small-moe.gguf"].map(|name| fixtures.join(name));
    let path = folder.path().join("model.gguf");
    replace(&path, &files[1]);
    let mut host = Host::start_with(Program::CThreadSanitizer, &path, &DropIn::On(all), set);
    host.ask("text 2");
    let (socket, over) = (host.socket().to_owned(), AtomicBool::new(false));
    std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                while !over.load(Ordering::Relaxed) {
                    for request in ["status", "trace", "metrics"] {
                        control(&socket, request);
                    }
                    std::thread::sleep(PAUSE);
                }
            });
        }
        for swap in 0..SWAPS {
            host.tell("text 8");
            replace(&path, &files[swap % 2]);
            control(&socket, "reload");
            host.line();
        }
        over.store(true, Ordering::Relaxed);
    });
    let status = host.control("status");
    let log = host.keep_log();
    let ended = host.end();
    let log = log.lock().expect("no panic").join("\n");
    match ended {
        Some(0) => {}
        Some(FOUND) => bail!("ThreadSanitizer found, in the host with the drop-in:\n{log}"),
        other => bail!("the host ended with {other:?}:\n{log}"),
    }
    let switches = status["generation"].as_u64().context("a generation")?;
    ensure!(switches > 0, "expected swaps; its log:\n{log}");
    Ok((switches, status))
}
