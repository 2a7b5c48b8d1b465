//! The two commands of the README.

use std::path::Path;
use std::time::Instant;

use anyhow::{Result, bail, ensure};
use testkit::host::{DropIn, Host, Program, Transcript, preload_library, replace};

use crate::install::{install, target_folder};
use crate::run::{command, exists, run};
use crate::{
    abi, cmake, fixtures, header, llama_cpp, older, packaging, prose, report, root, sanitize,
};

/// How long CI fuzzes.
const FUZZ_MINUTES: u64 = 1;

/// A part of the test suite.
struct Check {
    name: &'static str,
    run: fn() -> Result<()>,
    /// Why it cannot run here, if so.
    missing: fn() -> Option<String>,
}

const CHECKS: &[Check] = &[
    Check::new("format", || {
        run(command("cargo", &root()).args(["fmt", "--all", "--check"]))?;
        run(command("cargo", &root().join("fuzz")).args(["fmt", "--check"]))
    }),
    Check::new("clippy", || {
        run(command("cargo", &root()).args([
            "clippy",
            "--quiet",
            "--workspace",
            "--all-targets",
            "--",
            "-D",
            "warnings",
        ]))
    }),
    Check::new("prose", prose::check),
    Check::new("header is current", header::check),
    Check::new("fixtures", || fixtures::make().map(|_| ())),
    Check::new("rust tests", || {
        run(command("cargo", &root()).args(["test", "--quiet", "--workspace"]))
    }),
    Check::new("post-fetch on a simulated CUDA driver", postfetch_tests),
    Check::new("drop-in library: format, clippy, tests", dropin_library),
    Check::new("C host, CTest", || {
        cmake::ctest(&cmake::build_hosts()?, &[])
    }),
    Check::new("drop-in in real hosts", || dropin_tests("dropin")),
    Check::new(
        "drop-in with files that are not to be used, and the way back",
        || dropin_tests("dropin_files"),
    ),
    Check::new(
        "drop-in with graphs that no real host makes on demand",
        || dropin_tests("dropin_graphs"),
    ),
    Check::new("drop-in with nothing switched on", || {
        fixtures::ik_llama()?;
        cmake::build_loader()?;
        dropin_tests("idle")
    }),
    Check::new("the command with real hosts", || {
        cmake::build_loader()?;
        dropin_tests("command")
    }),
    Check {
        name: "drop-in in llama-server from source",
        run: || dropin_tests("llama_server"),
        missing: llama_cpp::missing,
    },
    Check {
        name: "drop-in in a host with Vulkan",
        run: || dropin_tests("dropin_vulkan"),
        missing: || match fixtures::vulkan() {
            Ok(_) => None,
            Err(error) => Some(format!("no software Vulkan device: {error:#}")),
        },
    },
    Check {
        name: "report of an expert trace in a browser",
        run: report::check,
        missing: report::missing,
    },
    Check::new("C examples, top-level CMake", cmake::test_top_level),
    Check::new("exported symbols", abi::check),
    Check::new("programs built with earlier headers, CTest", older::check),
    Check::new(
        "installed tree: DESTDIR, pkg-config, find_package",
        packaging::check,
    ),
    Check::new(
        "C examples, find_package, address sanitizer",
        sanitize::asan,
    ),
    Check {
        name: "C examples but swap_under_load and the simulated driver, valgrind",
        run: sanitize::valgrind,
        missing: || (!exists("valgrind")).then(|| "valgrind is not installed".into()),
    },
    Check {
        name: "unit tests of pure Rust, miri",
        run: sanitize::miri,
        missing: || sanitize::miri_missing().map(|how| format!("miri is not installed ({how})")),
    },
    Check::new("fuzzing, short", || sanitize::fuzz(FUZZ_MINUTES)),
];

impl Check {
    const fn new(name: &'static str, run: fn() -> Result<()>) -> Check {
        Check {
            name,
            run,
            missing: || None,
        }
    }
}

/// The drop-in is a workspace of its own.
fn dropin_library() -> Result<()> {
    let folder = root().join("preload");
    let target = target_folder()?.join("preload");
    run(command("cargo", &folder).args(["fmt", "--check"]))?;
    run(command("cargo", &folder)
        .args(["clippy", "--quiet", "--all-targets", "--target-dir"])
        .arg(&target)
        .args(["--", "-D", "warnings"]))?;
    run(command("cargo", &folder)
        .args(["test", "--quiet", "--target-dir"])
        .arg(&target))
}

/// A process has one CUDA driver: one test at a time.
fn postfetch_tests() -> Result<()> {
    run(command("cargo", &root())
        .args(["test", "--quiet", "--test", "postfetch"])
        .args(["--", "--test-threads=1", "--nocapture"])
        .env("LD_LIBRARY_PATH", cmake::sim_cuda()?))
}

/// Tests with real hosts: one at a time, each has threads enough.
fn dropin_tests(name: &str) -> Result<()> {
    cmake::build_hosts()?;
    run(command("cargo", &root())
        .args(["test", "--quiet", "--test", name])
        .args(["--", "--test-threads=1", "--nocapture"]))
}

/// Runs every check, also after one failed, and sums up.
pub fn test() -> Result<()> {
    let mut summary = Vec::new();
    let (mut passed, mut failed, mut skipped) = (0, 0, 0);
    for check in CHECKS {
        println!("\n== {}", check.name);
        if let Some(reason) = (check.missing)() {
            skipped += 1;
            summary.push(format!("skipped  {} ({reason})", check.name));
            continue;
        }
        let began = Instant::now();
        let result = (check.run)();
        let seconds = began.elapsed().as_secs_f64();
        match result {
            Ok(()) => {
                passed += 1;
                summary.push(format!("passed   {} ({seconds:.0} s)", check.name));
            }
            Err(error) => {
                failed += 1;
                summary.push(format!(
                    "FAILED   {} ({seconds:.0} s): {error:#}",
                    check.name
                ));
            }
        }
    }
    println!("\n== summary");
    for line in summary {
        println!("{line}");
    }
    println!("{passed} passed, {failed} failed, {skipped} skipped");
    if failed > 0 {
        bail!("{failed} of {} checks failed", CHECKS.len());
    }
    Ok(())
}

/// The first journey: look at a model, load it lazily, swap tensors under it.
pub fn demo() -> Result<()> {
    let fixtures = fixtures::make()?;
    let stage = target_folder()?.join("stage");
    install(&stage)?;
    let examples = cmake::build("c_examples", &[])?;
    let model = fixtures.join("smollm2.gguf");
    let variant = fixtures.join("smollm2-mixed.gguf");

    tell("A real model, SmolLM2-135M. Its header is read, and nothing else.");
    run(command("sh", &root())
        .args(["-c", "\"$1\" inspect \"$2\" | head -n 20", "sh"])
        .arg(stage.join("bin/llama-sidecar"))
        .arg(&model))?;
    tell("A C program opens it lazily: it touches three tensors and has no more in memory.");
    run(command(examples.join("lazy_load"), &root()).arg(&model))?;
    tell(
        "Another has it loaded while the file changes: eight tensors get another quantisation, and go back.",
    );
    run(command(examples.join("hot_swap"), &target_folder()?)
        .arg(&model)
        .arg(&variant))?;
    tell("A layer of experts, cut over three devices, goes through three quantisations and back.");
    run(command(examples.join("moe_walk"), &target_folder()?)
        .args(["moe.gguf", "moe-q8_0.gguf", "moe-mixed.gguf"].map(|name| fixtures.join(name))))?;
    tell("Everything at once: at most nine allocations, at the speed of memory.");
    run(command(stage.join("bin/llama-sidecar"), &root())
        .arg("load")
        .arg(&model))?;
    tell("The programs are lazy_load.c, hot_swap.c and moe_walk.c in c_examples.");
    live_swap(&model, &variant)
}

/// The second journey: a program that nobody changed, with the drop-in.
fn live_swap(model: &Path, variant: &Path) -> Result<()> {
    const TOKENS: usize = 16;
    cmake::build_hosts()?;
    tell("And now a program that knows nothing of all this: node-llama-cpp, as npm delivers it.");
    let preload = preload_library();
    println!(
        "LD_PRELOAD={} LLAMA_HOTSWAP_ENABLED=1 node host.mjs model.gguf",
        preload.display()
    );
    let folder = tempfile::tempdir()?;
    let path = folder.path().join("model.gguf");
    replace(&path, model);
    let on = DropIn::On(Vec::new());
    let mut host = Host::start(Program::Node, &path, &on);
    let mut fresh = Host::start(Program::Node, variant, &on);

    let before = host.text(TOKENS);
    let first = |text: &Transcript| text.hashes.first().cloned().unwrap_or_default();
    println!("before the swap  {}", host.ask("read"));
    println!("                 first logits {}", first(&before));
    for (to, heading) in [(variant, "after the swap"), (model, "and back")] {
        replace(&path, to);
        let began = Instant::now();
        let report = &host.control("reload")["reports"][0];
        println!(
            "                 {} tensors swapped, {} returned, in {:.1} ms; evaluations held for {:.1} us",
            report["swapped"],
            report["returned"],
            began.elapsed().as_secs_f64() * 1e3,
            report["ms"]["switch"].as_f64().unwrap_or(0.0) * 1e3,
        );
        let text = host.text(TOKENS);
        println!("{heading:16} {}", host.ask("read"));
        println!("                 first logits {}", first(&text));
        let (reference, whose) = match to == variant {
            true => (fresh.text(TOKENS), "a new process with the new file"),
            false => (before.clone(), "before the swap"),
        };
        ensure!(
            text == reference,
            "{text:?} is not what {whose} writes: {reference:?}"
        );
        println!("                 the same as {whose}, to the last bit of {TOKENS} x logits");
    }
    Ok(())
}

fn tell(text: &str) {
    println!("\n>> {text}\n");
}
