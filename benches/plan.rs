//! Runs all commands of a `llama-sidecar plan` again: how far is the printed one from the fastest? llama-server with
//! models in memory, and with one on an emulated disk, on the processor.
//!
//! Run it with `cargo xtask bench plan`; `cargo bench --bench plan -- --quick` measures each command once.
//! `--only=LABEL` leaves out models whose labels do not contain it.

use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::{Value, json};
use testkit::fixtures::{fixture, large_model};
use testkit::host::{built, plain_command, preload_library};
use testkit::median;
use testkit::memory_limit::MemoryLimit;
use testkit::server::{Server, llama, quantize};
use testkit::slow_disk::{SlowDisk, Speed};

/// A text of prompts, which is not that of the plan's own run.
const TEXT: &str = include_str!("../docs/streaming.md");

/// A model, and where it is.
struct Case {
    label: &'static str,
    model: PathBuf,
    limit: Option<MemoryLimit>,
    disk: Option<SlowDisk>,
    prompt: usize,
    answer: usize,
}

/// A command, its figures in the plan and those of now, in tokens per second.
struct Choice {
    words: Vec<String>,
    planned: [f64; 2],
    measured: [Vec<f64>; 2],
}

impl Case {
    fn command(&self, program: &Path) -> Command {
        let mut command = plain_command(program);
        command.env("LLAMA_SIDECAR_PRELOAD", preload_library());
        if let Some(limit) = &self.limit {
            limit.apply(&mut command);
        }
        command
    }

    fn drop_cache(&self) {
        if let Some(disk) = &self.disk {
            disk.drop_cache().expect("a file");
        }
    }

    /// Returns the commands of a plan. `folder` is that of the user's data.
    fn plan(&self, folder: &Path) -> Vec<Choice> {
        self.drop_cache();
        let server = llama("llama-server").get_program().to_owned();
        let mut command = self.command(&built("release/llama-sidecar"));
        command
            .args([
                "plan",
                "--json",
                "--prompt-tokens",
                &self.prompt.to_string(),
            ])
            .args(["--answer-tokens", &self.answer.to_string(), "--"])
            .arg(server)
            .arg("-m")
            .arg(&self.model)
            .args(["-c", "1024", "--no-webui"])
            .env("XDG_DATA_HOME", folder);
        let output = command.output().expect("it starts");
        assert!(output.status.success(), "{output:?}");
        let plan: Value = serde_json::from_slice(&output.stdout).expect("JSON");
        let choices = plan["choices"].as_array().expect("choices");
        let choices = choices.iter().map(|of| Choice {
            words: serde_json::from_value(of["words"].clone()).expect("words"),
            planned: ["prompt_tokens_s", "answer_tokens_s"]
                .map(|of_| of[of_].as_f64().expect("a speed")),
            measured: Default::default(),
        });
        choices.collect()
    }

    /// Runs a command once. Returns tokens per second of the prompt and of the answer.
    fn measure(&self, words: &[String]) -> [f64; 2] {
        self.drop_cache();
        let program = match words[0].as_str() {
            "llama-sidecar" => built("release/llama-sidecar"),
            path => path.into(),
        };
        let mut command = self.command(&program);
        command.args(&words[1..]);
        let server = Server::of_command(command);
        let all = server.ask("/tokenize", &json!({ "content": TEXT }));
        let all = all["tokens"].as_array().expect("tokens");
        let ask = |prompt: usize, answer: usize| {
            let request = json!({
                "prompt": all[..prompt],
                "n_predict": answer,
                "temperature": 0,
                "ignore_eos": true,
                "cache_prompt": false,
            });
            server.ask("/completion", &request)["timings"].clone()
        };
        let speed = |timings: Value, name: &str| timings[name].as_f64().expect("a speed");
        let found = [
            speed(ask(self.prompt, 1), "prompt_per_second"),
            speed(ask(24, self.answer), "predicted_per_second"),
        ];
        server.end();
        found
    }

    /// Returns the time of the prompt and the answer at these speeds.
    fn seconds(&self, speeds: [f64; 2]) -> f64 {
        self.prompt as f64 / speeds[0] + self.answer as f64 / speeds[1]
    }

    fn run(&self, rounds: usize) {
        let folder = tempfile::tempdir().expect("a folder");
        let mut choices = self.plan(folder.path());
        for round in 0..rounds {
            let count = choices.len();
            for at in 0..count {
                let at = if round % 2 == 1 { count - 1 - at } else { at };
                let choice = &mut choices[at];
                let found = self.measure(&choice.words);
                for (of, found) in choice.measured.iter_mut().zip(found) {
                    of.push(found);
                }
            }
        }
        self.print(&mut choices);
    }

    fn print(&self, choices: &mut [Choice]) {
        println!(
            "### {}\n\nPrompts of {} tokens, answers of {} tokens.\n",
            self.label, self.prompt, self.answer
        );
        println!("| options | prompt t/s: in the plan | now | answer t/s: in the plan | now |");
        println!("|---|---|---|---|---|");
        let mut times = Vec::new();
        for of in choices {
            let measured = of.measured.each_mut().map(|of| median(of));
            times.push(self.seconds(measured));
            let start = of
                .words
                .iter()
                .position(|word| word == "-c")
                .map_or(0, |at| at + 3);
            let run = of
                .words
                .iter()
                .take_while(|word| *word != "--" && of.words[0] == "llama-sidecar");
            let words: Vec<&str> = run.chain(&of.words[start..]).map(String::as_str).collect();
            let words = match words.is_empty() {
                true => "no option".into(),
                false => format!("`{}`", words.join(" ")),
            };
            println!(
                "| {words} | {:.1} | {:.1} | {:.1} | {:.1} |",
                of.planned[0], measured[0], of.planned[1], measured[1]
            );
        }
        let best = times.iter().copied().fold(f64::INFINITY, f64::min);
        println!(
            "\nThe command that is printed takes {:.3} times the time of the fastest one.\n",
            times[0] / best
        );
    }
}

fn main() {
    let arguments: Vec<String> = std::env::args().collect();
    let quick = arguments.iter().any(|of| of == "--quick");
    let only = arguments.iter().find_map(|of| of.strip_prefix("--only="));
    let folder = tempfile::tempdir().expect("a folder");
    let quantised = |name: &str, to: &str| {
        let path = folder.path().join(format!("{to}-{name}"));
        if only.is_none_or(|only| to.contains(only)) {
            quantize(&fixture(name), &path, to, &[]);
        }
        path
    };
    let in_memory = |label, model| Case {
        label,
        model,
        limit: None,
        disk: None,
        prompt: 256,
        answer: 64,
    };
    let mut cases = vec![
        in_memory("dense, 135 M, Q4_0", quantised("smollm2.gguf", "Q4_0")),
        in_memory("8 experts, Q4_K_M", quantised("moe-q8_0.gguf", "Q4_K_M")),
        in_memory("8 experts, Q4_1", fixture("moe.gguf")),
    ];
    let model = large_model();
    cases.push(in_memory("64 experts, 3.2 GB", model.clone()));
    let disk = SlowDisk::mount(&model, Speed::new(1000, 1000)).expect("FUSE");
    disk.read_ahead_kb(128).expect("a mounted disk");
    let size = std::fs::metadata(&model).expect("a model").len();
    cases.push(Case {
        label: "64 experts on a disk of 1 ms and 1 GB/s, memory for a quarter",
        model: disk.path(),
        limit: Some(MemoryLimit::new(size / 4 + (200 << 20)).expect("a control group")),
        disk: Some(disk),
        prompt: 384,
        answer: 16,
    });
    for case in &cases {
        if only.is_none_or(|only| case.label.contains(only)) {
            case.run(if quick { 1 } else { 3 });
        }
    }
}
