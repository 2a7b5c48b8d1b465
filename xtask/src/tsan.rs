//! ThreadSanitizer. It instruments the project's own code, its crates, and the generics of the
//! standard library that are compiled with them. It does not instrument the precompiled part of
//! the standard library, nor llama.cpp; it intercepts only their calls of the C library.
//! `tests/tsan/suppressions` lists the false reports that follow.
//!
//! The library runs its tests of reloads, among them eight threads that evaluate while tensors
//! are swapped, and of expert streaming. The drop-in runs in the C host with experts from disk, the trace, routes and
//! saliency, its watching thread, clients of the control socket, and swaps while the host evaluates.
//! Not covered: post-fetch, whose simulated GPU runs in hosts that are not instrumented.

use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use testkit::host::{DropIn, Host, Program, control, replace};

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

fn library() -> Result<()> {
    run(command("cargo", &root())
        .args(["test", "--quiet", "--target", TARGET])
        .args(["--test", "reload", "--test", "stream"])
        .env("CARGO_TARGET_DIR", target_folder()?.join("tsan"))
        // The flag belongs to nightly compilers; this lets the installed one accept it.
        .env("RUSTC_BOOTSTRAP", "1")
        .env("RUSTFLAGS", FLAGS)
        .env("PROPTEST_CASES", "8")
        .env("TSAN_OPTIONS", options()))
}

fn drop_in() -> Result<()> {
    let target = target_folder()?.join("tsan/preload");
    run(command("cargo", &root().join("preload"))
        .args(["build", "--quiet", "--release", "--target", TARGET])
        .arg("--target-dir")
        .arg(&target)
        .env("RUSTC_BOOTSTRAP", "1")
        .env("RUSTFLAGS", FLAGS))?;
    let preload = target
        .join(TARGET)
        .join("release/libllama_sidecar_preload.so");
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
    let folder = tempfile::tempdir()?;
    let output = |name: &str| folder.path().join(name).display().to_string();
    let variables = vec![
        ("LD_PRELOAD", libraries),
        ("TSAN_OPTIONS", options()),
        ("LLAMA_HOTSWAP_POLL_MS", "20".into()),
        ("LLAMA_EXPERT_TRACE_OUTPUT", output("t.json")),
        ("LLAMA_EXPERT_TRACE_EVERY_S", "1".into()),
        ("LLAMA_EXPERT_TRACE_ROUTES", output("r.routes")),
        ("LLAMA_EXPERT_TRACE_SALIENCY", output("s.json")),
        ("LLAMA_EXPERT_STREAM", "on".into()),
    ];
    let fixtures = fixtures::make()?;
    let files = ["small-moe-mixed.gguf", "small-moe.gguf"].map(|name| fixtures.join(name));
    let path = folder.path().join("model.gguf");
    replace(&path, &files[1]);
    let mut host = Host::start(Program::CThreadSanitizer, &path, &DropIn::On(variables));
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
    let layers = &status["models"][0]["stream"]["layers"];
    println!(
        "{switches} switches and {layers} streamed layers in the host under ThreadSanitizer, without a finding"
    );
    Ok(())
}
