//! The demo of the README: `cargo xtask demo`.

use std::path::Path;
use std::time::Instant;

use anyhow::{Result, ensure};
use testkit::host::{DropIn, Host, Program, Transcript, preload_library, replace};
use testkit::memory_limit::MemoryLimit;
use testkit::slow_disk::{SlowDisk, Speed};

use crate::install::{DebugInfo, install, target_folder};
use crate::machine::Machine;
use crate::run::{command, root, run};
use crate::suite::no_slow_disk;
use crate::{cmake, fixtures};

/// Inspects a model, loads it lazily and swaps its tensors, in link mode and in a program; at last, reads experts from
/// a slow disk.
pub fn run_all() -> Result<()> {
    let fixtures = fixtures::make()?;
    let stage = target_folder()?.join("stage");
    install(&stage, Machine::HERE, DebugInfo::Separate)?;
    let examples = cmake::build("c_examples", &[])?;
    let model = fixtures.join("smollm2.gguf");
    let variant = fixtures.join("smollm2-mixed.gguf");

    tell("A real model, SmolLM2-135M. Only its header is read.");
    run(command("sh", &root())
        .args(["-c", "\"$1\" inspect \"$2\" | head -n 20", "sh"])
        .arg(stage.join("bin/llama-sidecar"))
        .arg(&model))?;
    tell("A C program opens it lazily: it reads three tensors and has no more in memory.");
    run(command(examples.join("lazy_load"), &root()).arg(&model))?;
    tell(
        "Another C program has it loaded while the file changes: eight tensors change to another quantisation, and back.",
    );
    run(command(examples.join("hot_swap"), &target_folder()?)
        .arg(&model)
        .arg(&variant))?;
    tell("A layer of experts, split over three devices, changes its quantisation twice, and back.");
    run(command(examples.join("moe_walk"), &target_folder()?)
        .args(["moe.gguf", "moe-q8_0.gguf", "moe-mixed.gguf"].map(|name| fixtures.join(name))))?;
    tell("All tensors are loaded at once: at most nine allocations, at the speed of memory.");
    run(command(stage.join("bin/llama-sidecar"), &root())
        .args(["inspect", "--load"])
        .arg(&model))?;
    tell("The programs are lazy_load.c, hot_swap.c and moe_walk.c in c_examples.");
    live_swap(&model, &variant)?;
    experts_from_disk(&fixtures.join("moe.gguf"))
}

/// Swaps tensors in an unchanged program, with the drop-in.
fn live_swap(model: &Path, variant: &Path) -> Result<()> {
    const TOKENS: usize = 16;
    cmake::build_hosts()?;
    tell("Now an unchanged program, with the drop-in: node-llama-cpp, as npm delivers it.");
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
            "                 {} tensors swapped, {} returned, in {:.1} ms; pause {:.1} us",
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
        println!("                 bit-identical to {whose}: {TOKENS} x logits");
    }
    Ok(())
}

/// A mixture of experts that does not fit into memory, on a slow disk: the program as it is, and with the drop-in.
fn experts_from_disk(model: &Path) -> Result<()> {
    const TOKENS: usize = 24;
    /// Memory of the program, for a model of 447 MB.
    const MEMORY: u64 = 240 << 20;
    tell(
        "The same program with a mixture of experts that is larger than its memory, on a slow disk.",
    );
    let limit = no_slow_disk().map_or_else(|| MemoryLimit::new(MEMORY), Err);
    let limit = match limit {
        Ok(limit) => limit,
        Err(reason) => {
            println!("this machine does not allow it: {reason}");
            return Ok(());
        }
    };
    let disk = SlowDisk::mount(model, Speed::new(100, 1000)).map_err(anyhow::Error::msg)?;
    // As disks have it.
    disk.read_ahead_kb(128)?;
    let streaming = vec![("LLAMA_EXPERT_STREAM", "needed".to_owned())];
    let ways = [
        ("as it is", DropIn::Absent),
        ("llama-sidecar run --stream-experts", DropIn::On(streaming)),
    ];
    let mut written = None;
    let mut stock = None;
    for (name, drop_in) in ways {
        disk.drop_cache()?;
        let mut host = Host::start_with(Program::Node, &disk.path(), &drop_in, |command| {
            limit.apply(command);
        });
        let began = Instant::now();
        let text = host.ask(&format!("text {TOKENS}"));
        let speed = TOKENS as f64 / began.elapsed().as_secs_f64();
        ensure!(
            written.get_or_insert_with(|| text.clone()) == &text,
            "{name}: {text} is not {written:?}"
        );
        let gain = speed / *stock.get_or_insert(speed);
        println!("{name:36} {speed:6.1} tokens/s, {gain:.1} times");
    }
    println!(
        "both wrote the same {TOKENS} tokens; 0.1 ms, 1 GB/s and {} MiB of memory are emulated",
        MEMORY >> 20
    );
    Ok(())
}

fn tell(text: &str) {
    println!("\n>> {text}\n");
}
