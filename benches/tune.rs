//! Measures a sweep of `llama-sidecar tune` against llama-quantize and a new llama-perplexity for
//! each tensor and type, and the time of a round beyond the evaluation itself.
//!
//! Run it with `cargo xtask bench tune`; `cargo bench --bench tune -- --quick` has one layer.
//! Both sides alternate: one type at a time.

use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Instant;

use serde_json::Value;
use testkit::fixtures::fixture;
use testkit::host::built;
use testkit::median;
use testkit::server::llama_cpp;

const TEXT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/docs/hot-swap.md");
const CONTEXT: &str = "128";
const CHUNKS: &str = "4";
const THREADS: &str = "2";
const ROLES: [&str; 3] = ["attn_q", "ffn_gate", "ffn_down"];
const TYPES: [&str; 3] = ["q8_0", "q5_0", "q4_0"];

fn timed(command: &mut Command) -> f64 {
    let began = Instant::now();
    let command = command.stdin(Stdio::null()).stderr(Stdio::null());
    let output = command.output().expect("it starts");
    assert!(output.status.success(), "{command:?}");
    began.elapsed().as_secs_f64()
}

fn quantize(from: &Path, to: &Path, file_type: &str, types: &[&str]) -> f64 {
    let mut command = Command::new(llama_cpp("llama-quantize"));
    command.args(["--allow-requantize", "--pure"]);
    command.args(types.iter().flat_map(|of| ["--tensor-type", of]));
    timed(command.args([from, to]).args([file_type, THREADS]))
}

fn perplexity(model: &Path, base: &Path, arguments: &[&str]) -> f64 {
    let mut command = Command::new(llama_cpp("llama-perplexity"));
    command.arg("--model").arg(model);
    command.args(["--ctx-size", CONTEXT, "--threads", THREADS]);
    command.arg("--kl-divergence-base").arg(base);
    timed(command.args(arguments))
}

/// The time at which a line of the log was written: minutes, seconds, ms and us, with points.
fn stamp(line: &str) -> Option<f64> {
    let (stamp, _) = line.split_once(' ')?;
    let parts: Vec<f64> = stamp
        .split('.')
        .map_while(|part| part.parse().ok())
        .collect();
    let [minutes, seconds, milliseconds, microseconds] = parts[..] else {
        return None;
    };
    Some(minutes * 60.0 + seconds + milliseconds / 1e3 + microseconds / 1e6)
}

/// The time of each round, and the time of its evaluation, in seconds.
fn rounds(work: &Path) -> Vec<(f64, f64)> {
    let text = fs::read_to_string(work.join("measurements.jsonl")).expect("measurements");
    let parse = |line| serde_json::from_str::<Value>(line).expect("JSON");
    let seconds = text
        .lines()
        .map(parse)
        .map(|of| of["seconds"].as_f64().expect("seconds"));
    let log = fs::read(work.join("perplexity.log")).expect("a log");
    let log = String::from_utf8_lossy(&log).into_owned();
    let stamps = |part: &str| -> Vec<f64> {
        let lines = log.lines().filter(|line| line.contains(part));
        lines.filter_map(stamp).collect()
    };
    let (from, to) = (stamps("kl_divergence: computing"), stamps(" total time ="));
    let total = from.iter().zip(to).map(|(from, to)| to - from);
    // The first evaluation includes the start of the program.
    seconds.zip(total).skip(1).collect()
}

fn main() {
    let is_quick = std::env::args().any(|argument| argument == "--quick");
    let layers: Vec<u32> = match is_quick {
        true => vec![14],
        false => (0..30).step_by(3).collect(),
    };
    let folder = tempfile::tempdir().expect("a folder");
    let path = |name: &str| folder.path().join(name);
    let model = path("model.gguf");
    quantize(&fixture("smollm2.gguf"), &model, "F16", &[]);
    let base = path("base");
    let written = perplexity(&model, &base, &["--file", TEXT, "--chunks", CHUNKS]);
    assert!(written > 0.0);
    let names: Vec<String> = layers
        .iter()
        .flat_map(|layer| ROLES.map(|role| format!("blk\\.{layer}\\.{role}\\.weight")))
        .collect();
    println!(
        "SmolLM2-135M in F16, {} tensors, {CHUNKS} chunks of {CONTEXT} tokens, {THREADS} threads. The limit is the time of the evaluations.\n",
        names.len()
    );
    println!(
        "| type | tune, s | llama-quantize + llama-perplexity, s | ratio | round beyond the evaluation |"
    );
    println!("|---|---|---|---|---|");
    for ty in TYPES {
        let work = path(ty);
        let mut tune = Command::new(built("release/llama-sidecar"));
        tune.arg("tune")
            .arg(&model)
            .args(["--types", ty, "--by", "tensor"]);
        tune.args([
            "--only",
            &names.join("|"),
            "--ctx",
            CONTEXT,
            "--threads",
            THREADS,
        ]);
        tune.arg("--base").arg(&base).arg("--work").arg(&work);
        tune.arg("--program").arg(llama_cpp("llama-perplexity"));
        // The program then logs the end of an evaluation.
        let mine = timed(tune.args(["--", "--perf", "-lv", "5"]));
        let other: f64 = names
            .iter()
            .map(|name| {
                let file = path("one.gguf");
                // Other tensors stay as they are.
                let types = [&*format!("{name}={ty}"), ".*=f16"];
                let quantized = quantize(&model, &file, "Q8_0", &types);
                quantized + perplexity(&file, &base, &["--kl-divergence"])
            })
            .sum();
        let rounds = rounds(&work);
        let mut beyond: Vec<f64> = rounds.iter().map(|(all, of)| (all - of) * 1e3).collect();
        let mut shares: Vec<f64> = rounds
            .iter()
            .map(|(all, of)| (all / of - 1.0) * 100.0)
            .collect();
        println!(
            "| {ty} | {mine:.1} | {other:.1} | {:.2} | {:.0} ms, {:.1} % |",
            other / mine,
            median(&mut beyond),
            median(&mut shares)
        );
    }
}
