//! The plan as text and JSON.

use std::collections::BTreeSet;
use std::ffi::{OsStr, OsString};
use std::fmt::Write;
use std::path::PathBuf;

use anyhow::Result;
use serde::Serialize;
use sidecar_core::{summary, text};

use super::model::Time;
use super::options::Known;
use super::runs::Baseline;
use super::search::{Candidate, EQUAL, Facts, FileSpeeds, Memory, Runs, Setting};
use super::shape::Bytes;
use crate::launch::child::quoted;
use crate::sizes::{Table, size_text};

/// Errors of predictions, as shares: without and with reads from a disk, and with a GPU. They are those of
/// the comparisons in `docs/plan.md`.
const ERROR: f64 = 0.15;
const ERROR_OF_DISK: f64 = 0.3;
const ERROR_OF_GPU: f64 = 0.3;

/// Where figures are from.
pub struct Source {
    /// What limits the memory.
    pub whose: &'static str,
    pub is_kept: bool,
    /// The share of the processors that other programs took during the measurement, if that was too much.
    pub disturbed: Option<f64>,
    pub path: Option<PathBuf>,
    pub cores: u32,
    pub threads: u32,
}

/// A command with its prediction.
#[derive(Serialize)]
struct Choice {
    command: String,
    words: Vec<String>,
    #[serde(flatten)]
    candidate: Candidate,
    prompt_tokens_s: f64,
    answer_tokens_s: f64,
    error: f64,
    /// Why it is not the first one.
    #[serde(skip_serializing_if = "String::is_empty")]
    why_not: String,
}

/// What cannot run.
#[derive(Serialize)]
struct Refused {
    command: String,
    why: String,
}

/// A plan.
#[derive(Serialize)]
pub struct Plan {
    layers: u32,
    expert_layers: u32,
    experts: u64,
    experts_used: u64,
    bytes: Bytes,
    free_bytes: u64,
    free_of: &'static str,
    cores: u32,
    threads: u32,
    /// Numbers of threads, and bytes of weights per second that they multiply a single token with.
    weights_per_second: Vec<(u32, f64)>,
    gpus: Vec<String>,
    file: Option<FileSpeeds>,
    measured: Option<Baseline>,
    calibration: Runs,
    kept_in: Option<PathBuf>,
    is_kept: bool,
    disturbed: Option<f64>,
    prompt_tokens: f64,
    answer_tokens: f64,
    /// The settings, best first.
    choices: Vec<Choice>,
    /// As it was typed.
    typed: String,
    refused: Vec<Refused>,
}

impl Plan {
    pub fn new(
        facts: &Facts,
        known: &Known,
        words: &[OsString],
        candidates: Vec<Candidate>,
        refused: Vec<(Setting, String)>,
        measured: Option<Baseline>,
        source: Source,
    ) -> Plan {
        let words_of = |setting: &Setting| words_of(setting, &facts.typed, words, known);
        let command = |setting: &Setting| text_of(&words_of(setting));
        let mut choices: Vec<Choice> = Vec::new();
        for candidate in candidates {
            let command = command(&candidate.setting);
            if choices.iter().any(|known| known.command == command) {
                continue;
            }
            let best = choices.first().map(|of| &of.candidate);
            let why_not = best.map(|best| why_not(&candidate, best, facts.tokens));
            choices.push(Choice {
                command,
                words: words_of(&candidate.setting),
                prompt_tokens_s: candidate.prompt.rate(),
                answer_tokens_s: candidate.token.rate(),
                error: error(&candidate),
                why_not: why_not.unwrap_or_default(),
                candidate,
            });
        }
        let mut without: Vec<Refused> = Vec::new();
        for (setting, why) in refused {
            let command = command(&setting);
            if !without.iter().any(|known| known.command == command) {
                without.push(Refused { command, why });
            }
        }
        let shape = &facts.shape;
        Plan {
            layers: shape.layers,
            expert_layers: shape.expert_layers,
            experts: shape.experts,
            experts_used: shape.used,
            bytes: shape.bytes(),
            free_bytes: facts.free,
            free_of: source.whose,
            cores: source.cores,
            threads: source.threads,
            weights_per_second: facts.weights_per_second(),
            gpus: facts.measured.devices.iter().map(gpu_text).collect(),
            file: facts.file.clone(),
            measured,
            calibration: facts.runs.clone(),
            kept_in: source.path,
            is_kept: source.is_kept,
            disturbed: source.disturbed,
            prompt_tokens: facts.tokens.0,
            answer_tokens: facts.tokens.1,
            choices,
            typed: command(&facts.typed),
            refused: without,
        }
    }

    pub fn json(&self) -> Result<String> {
        Ok(serde_json::to_string_pretty(self)? + "\n")
    }

    /// Returns the plan with the best settings.
    pub fn text(&self, most: usize) -> String {
        let mut text = String::new();
        let best = &self.choices[0];
        let typed = self.choices.iter().find(|of| of.command == self.typed);
        let mut line = |name: &str, value: String| {
            let _ = writeln!(text, "{name:<11} {}", text::line(&value));
        };
        line("model", self.model_text());
        line("machine", self.machine_text());
        line("weights", self.weights_text());
        for gpu in &self.gpus {
            line("gpu", gpu.clone());
        }
        if let Some(file) = &self.file {
            line("disk", disk_text(file));
        }
        if let Some(path) = &self.kept_in {
            let when = if self.is_kept {
                "of an earlier run, "
            } else {
                ""
            };
            line("measured", format!("{when}kept in {}", text::path(path)));
        }
        if let Some(share) = self.disturbed {
            line(
                "disturbed",
                format!(
                    "other programs used {:.0} % of the processors: these predictions are worth little; run plan again when they have ended",
                    100.0 * share
                ),
            );
        }
        if let Some(of) = &self.measured {
            let start = match of.start_seconds > 0.0 {
                true => format!("; ready after {:.1} s", of.start_seconds),
                false => String::new(),
            };
            line(
                "as typed",
                format!(
                    "prompts {:.1} tokens/s, answers {:.1} tokens/s, measured{start}",
                    of.prompt, of.token
                ),
            );
        }
        if let Some(memory) = summary::memory(&self.calibration.memory) {
            line("memory", memory);
        }
        let _ = writeln!(text, "\nType this:\n\n  {}\n", best.command);
        match typed {
            Some(typed) if typed.command != best.command => {
                let faster = typed.candidate.seconds / best.candidate.seconds;
                let _ = writeln!(
                    text,
                    "It is predicted to be {faster:.2} times as fast as the command that was typed, for {:.0} tokens of prompt and {:.0} of answer.\n",
                    self.prompt_tokens, self.answer_tokens
                );
            }
            Some(_) => text.push_str(
                "It is the command that was typed: nothing is predicted to be faster.\n\n",
            ),
            None => {
                let why = self.refused.iter().find(|of| of.command == self.typed);
                let why = why.map_or("", |of| &of.why);
                let _ = writeln!(text, "The command that was typed cannot run here: {why}.\n");
            }
        }
        text += &places(&best.candidate.memory).as_text();
        text.push('\n');
        text += &self.table(most).as_text();
        let _ = writeln!(
            text,
            "\nPredictions, with errors as in docs/plan.md; 'llama-sidecar compare -- COMMAND' measures."
        );
        for of in self.refused.iter().take(3) {
            let _ = writeln!(text, "Left out: {}: {}", of.command, of.why);
        }
        text
    }

    fn table(&self, most: usize) -> Table {
        let mut table = Table::new([
            "",
            "prompt t/s",
            "answer t/s",
            "answers wait for",
            "why not",
            "command",
        ]);
        let typed = self.choices.iter().position(|of| of.command == self.typed);
        // Of those that differ in threads of prompts alone, the first.
        let setting = |at: usize| &self.choices[at].candidate.setting;
        let all = 0..self.choices.len();
        let differing = all.filter(|&at| !(0..at).any(|of| setting(of).is_like(setting(at))));
        let shown: BTreeSet<usize> = differing.take(most).chain(typed).collect();
        for at in shown {
            let of = &self.choices[at];
            let rate = |rate: f64| format!("{rate:.2} ±{:.0}%", 100.0 * of.error);
            let name = match typed == Some(at) {
                true => format!("{} (as typed)", at + 1),
                false => (at + 1).to_string(),
            };
            table.rows.push(vec![
                name,
                rate(of.prompt_tokens_s),
                rate(of.answer_tokens_s),
                of.candidate.token.limit().into(),
                of.why_not.clone(),
                of.command.clone(),
            ]);
        }
        table
    }

    fn model_text(&self) -> String {
        let Bytes {
            routed,
            others,
            rest,
        } = self.bytes;
        let size = |bytes: u64| size_text(bytes as f64);
        let experts = match self.expert_layers {
            0 => String::new(),
            layers => format!(
                ", {layers} with {} experts ({} for a token): {} of experts",
                self.experts,
                self.experts_used,
                size(routed)
            ),
        };
        format!(
            "{} layers{experts}, {} of other matrices, {} of the rest",
            self.layers,
            size(others),
            size(rest)
        )
    }

    fn weights_text(&self) -> String {
        let of = self.weights_per_second.iter();
        let of: Vec<String> = of
            .map(|(threads, speed)| format!("{:.1} GB/s with {threads}", speed / 1e9))
            .collect();
        format!("multiplied with a token at {} threads", of.join(", "))
    }

    fn machine_text(&self) -> String {
        format!(
            "{} threads on {} cores; {} leaves {} for a model",
            self.threads,
            self.cores,
            self.free_of,
            size_text(self.free_bytes as f64)
        )
    }
}

/// Returns what goes where with a setting.
fn places(memory: &Memory) -> Table {
    let mut table = Table::new(["with this command", "GPU", "memory", "disk"]);
    let size = |bytes: u64| match bytes {
        0 => "-".into(),
        bytes => size_text(bytes as f64),
    };
    for (name, of) in [
        ("routed experts", memory.experts),
        ("other tensors", memory.others),
        ("context", memory.context),
    ] {
        let cells = [of.gpu, of.memory, of.disk].map(size);
        table
            .rows
            .push(std::iter::once(name.into()).chain(cells).collect());
    }
    table
}

fn disk_text(of: &FileSpeeds) -> String {
    let faults = of.faults.iter();
    let faults: Vec<String> = faults
        .map(|(threads, speed)| format!("{:.0} with {threads}", speed / 1e6))
        .collect();
    format!(
        "{:.0} MB/s with several direct reads at a time; of experts by page faults, MB/s: {} threads",
        of.direct / 1e6,
        faults.join(", ")
    )
}

fn gpu_text(of: &sidecar_core::protocol::OnDevice) -> String {
    let speeds = match &of.obstacle {
        Some(obstacle) => format!("not planned for: {obstacle}"),
        None => format!(
            "copies {:.1} GB/s, page-locked {:.1} GB/s; beside copies the processor keeps {:.0} % of its speed",
            of.pageable / 1e9,
            of.locked / 1e9,
            100.0 * of.processor_left
        ),
    };
    format!(
        "{} ({}), {} of {} free; {speeds}",
        of.name,
        of.description,
        size_text(of.free as f64),
        size_text(of.total as f64)
    )
}

/// Returns the words of the command for a setting.
fn words_of(setting: &Setting, typed: &Setting, words: &[OsString], known: &Known) -> Vec<String> {
    let flags = setting.flags();
    let run: &[&str] = if flags.is_empty() {
        &[]
    } else {
        &["llama-sidecar", "run"]
    };
    let end: &[&str] = if flags.is_empty() { &[] } else { &["--"] };
    let with = run
        .iter()
        .chain(&flags)
        .chain(end)
        .map(|word| (*word).to_owned());
    let program = setting.words(typed, words, known);
    with.chain(
        program
            .iter()
            .map(|word| word.to_string_lossy().into_owned()),
    )
    .collect()
}

fn text_of(words: &[String]) -> String {
    let words: Vec<String> = words.iter().map(|word| quoted(OsStr::new(word))).collect();
    words.join(" ")
}

fn error(of: &Candidate) -> f64 {
    match (of.token.disk > 0.0, of.setting.gpu.is_some()) {
        (true, _) => ERROR_OF_DISK,
        (false, true) => ERROR_OF_GPU,
        (false, false) => ERROR,
    }
}

/// Returns what makes a setting slower than the best one.
fn why_not(of: &Candidate, best: &Candidate, tokens: (f64, f64)) -> String {
    let slower = of.seconds / best.seconds - 1.0;
    if slower < EQUAL {
        return "equal".into();
    }
    let parts = |time: &Time| [time.processor, time.gpu, time.link, time.disk, time.rest];
    let names = [
        "the processor",
        "the GPU",
        "copies",
        "the disk",
        "what is no product",
    ];
    let mut most = (0.0, String::new());
    for (kind, of, best, count) in [
        ("prompts", &of.prompt, &best.prompt, tokens.0),
        ("answers", &of.token, &best.token, tokens.1),
    ] {
        for ((name, here), there) in names.iter().zip(parts(of)).zip(parts(best)) {
            let more = (here - there) * count;
            if more > most.0 {
                most = (more, format!("{kind} wait for {name}"));
            }
        }
    }
    format!("+{:.0} %: {}", 100.0 * slower, most.1)
}
