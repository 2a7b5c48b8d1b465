//! Measures what it gains and costs to prefer experts in memory (`llama-sidecar ctl margins`), on emulated disks.
//!
//! Run it with `cargo xtask bench margins`; `cargo bench --bench margins -- --quick` has one disk and each margin once,
//! and `--margins=0,0.05` are the margins.

use std::collections::BTreeMap;
use std::process::Command;

use serde_json::Value;
use testkit::fixtures::fixture;
use testkit::host::{built, preload_library};
use testkit::median;
use testkit::memory_limit::MemoryLimit;
use testkit::server::llama_cpp;
use testkit::slow_disk::{SlowDisk, Speed};

const TEXT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/docs/hot-swap.md");
const MARGINS: &str = "0,0.02,0.05,0.1,0.2";
/// The evaluation without a margin that differs by rounding alone.
const ROUNDING: &str = "rounding";
const CONTEXT: &str = "128";
const CHUNKS: &str = "2";
const THREADS: &str = "1";
/// Memory of the program, for a model of 447 MB.
const MEMORY: u64 = 400 << 20;
const DISKS: [Speed; 2] = [Speed::new(1000, 500), Speed::new(100, 1000)];

/// Measures a disk, with the margins in turn so many times. Returns the measurements by margin.
fn measure(
    margins: &str,
    speed: Speed,
    times: usize,
    limit: &MemoryLimit,
) -> BTreeMap<String, Vec<Value>> {
    let disk = SlowDisk::mount(&fixture("moe-parts.gguf"), speed).expect("an emulated disk");
    disk.read_ahead_kb(128).expect("a disk has read-ahead");
    let mut command = Command::new(built("release/llama-sidecar"));
    command
        .args(["ctl", "margins"])
        .arg(disk.path())
        .args(["--text", TEXT, "--ctx", CONTEXT, "--chunks", CHUNKS])
        .args(["--threads", THREADS, "--margins"])
        .arg(vec![margins; times].join(","))
        .arg("--program")
        .arg(llama_cpp("llama-perplexity"))
        .arg("--json")
        .env("LLAMA_SIDECAR_PRELOAD", preload_library());
    limit.apply(&mut command);
    let output = command.output().expect("it starts");
    assert!(output.status.success(), "{output:?}");
    let measured: Value = serde_json::from_slice(&output.stdout).expect("JSON");
    let mut by_margin: BTreeMap<String, Vec<Value>> = BTreeMap::new();
    for of in measured["margins"].as_array().expect("margins") {
        let margin = of["margin"].as_f64().expect("a margin") as f32;
        by_margin
            .entry(margin.to_string())
            .or_default()
            .push(of.clone());
    }
    let rounding = &measured["rounding"];
    // None if the program computes the same with both settings.
    if !rounding.is_null() {
        by_margin.insert(ROUNDING.into(), vec![rounding.clone()]);
    }
    by_margin
}

fn main() {
    let is_quick = std::env::args().any(|argument| argument == "--quick");
    let mut named =
        std::env::args().filter_map(|of| Some(of.strip_prefix("--margins=")?.to_owned()));
    let margins = named.next().unwrap_or_else(|| MARGINS.to_owned());
    let (disks, times) = match is_quick {
        true => (&DISKS[..1], 1),
        false => (&DISKS[..], 3),
    };
    let limit = MemoryLimit::new(MEMORY).expect("a control group");
    println!(
        "A mixture of 30 layers of 8 experts that differ, 2 per token, 447 MB, made from SmolLM2-135M, in llama-perplexity with {} MiB of memory: {CHUNKS} chunks of {CONTEXT} tokens, one token at a time, {THREADS} thread. Medians of {times}, the margins in turn; ratio to the margin 0. Limit: the margin 0 changes nothing, and has a divergence of 0.\n",
        MEMORY >> 20
    );
    println!(
        "| disk | margin | KL divergence | perplexity | replaced | MB to read/token | tokens/s | ratio |"
    );
    println!("|---|---|---|---|---|---|---|---|");
    for speed in disks {
        let mut first = None;
        let disk = format!(
            "{:.1} ms, {:.1} GB/s",
            speed.latency.as_secs_f64() * 1e3,
            speed.bandwidth as f64 / 1e9
        );
        let mut measured = measure(&margins, *speed, times, &limit);
        for rounding in measured.remove(ROUNDING).into_iter().flatten() {
            let of = |pointer: &str| rounding.pointer(pointer).and_then(Value::as_f64);
            println!(
                "| {disk} | 0, flash attention {} | {:.6} | {:.4} | | | | |",
                rounding["flash_attention"].as_str().expect("a setting"),
                of("/kld/mean").expect("a figure"),
                of("/ppl/mean").expect("a figure")
            );
        }
        for (margin, measured) in measured {
            let of = |pointer: &str| {
                let values = measured.iter().map(|of| of.pointer(pointer)?.as_f64());
                let mut values: Vec<f64> = values.map(|of| of.expect("a figure")).collect();
                median(&mut values)
            };
            let tokens = of("/speed");
            println!(
                "| {disk} | {margin} | {:.6} | {:.4} | {:.1} % | {:.2} | {tokens:.2} | {:.2} |",
                // Rounding makes it a little smaller than zero.
                of("/kld/mean").max(0.0),
                of("/ppl/mean"),
                of("/replaced") * 100.0,
                of("/read_bytes") / 1e6,
                tokens / *first.get_or_insert(tokens)
            );
        }
    }
}
