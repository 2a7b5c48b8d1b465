//! The plan as text and JSON.

use std::fmt::Write;

use anyhow::Result;
use serde_json::{Value, json};
use sidecar_core::{summary, text};

use super::changes::Facts;
use super::rounds::{Candidate, Faster, Measured, Results, Weighed};
use crate::sizes::{Table, size_text};

/// A plan.
pub struct Plan {
    pub facts: Facts,
    /// What limits the memory.
    pub free_of: &'static str,
    pub tokens: Weighed,
    pub results: Results,
}

impl Plan {
    fn typed(&self) -> &Candidate {
        &self.results.candidates[0]
    }

    /// Returns the commands that were measured, the fastest one first, and how many times as fast as the one that was typed
    /// each is.
    fn measured(&self) -> Vec<(&Candidate, Measured, Option<Faster>)> {
        let mut all: Vec<_> = self
            .results
            .candidates
            .iter()
            .enumerate()
            .filter_map(|(at, of)| {
                let faster = of.faster_than(self.typed(), self.tokens);
                Some((at, of, of.mean()?, faster))
            })
            .collect();
        all.sort_by(|a, b| {
            let key = |of: &(usize, &Candidate, Measured, Option<Faster>)| {
                let faster = of.3.as_ref().map_or(0.0, |of| of.mean);
                (self.results.best == Some(of.0), faster, of.2.answer)
            };
            let (a, b) = (key(a), key(b));
            let faster = b.1.total_cmp(&a.1).then(b.2.total_cmp(&a.2));
            b.0.cmp(&a.0).then(faster)
        });
        all.into_iter()
            .map(|(_, of, mean, faster)| (of, mean, faster))
            .collect()
    }

    pub fn json(&self) -> Result<String> {
        let choices = self.measured();
        let choices = choices.iter().map(|(of, mean, faster)| {
            json!({
                "command": of.command,
                "words": of.words.iter().map(|word| word.to_string_lossy()).collect::<Vec<_>>(),
                "runs": of.runs.len(),
                "prompt_tokens_s": mean.prompt,
                "answer_tokens_s": mean.answer,
                "start_seconds": mean.start_seconds,
                "read_bytes": mean.read_bytes,
                "faster": faster.as_ref().map(|of| of.mean),
                "faster_error": faster.as_ref().and_then(|of| of.ratio).map(|of| of.error),
            })
        });
        let left_out = self.left_out();
        let left_out = left_out
            .iter()
            .map(|(of, why)| json!({"command": of.command, "why": why}));
        let plan = json!({
            "model": self.facts.sizes.sentence(),
            "free_bytes": self.facts.free,
            "free_of": self.free_of,
            "gpu_free_bytes": self.facts.gpu_free,
            "cores": self.facts.cores,
            "threads": self.facts.threads,
            "prompt_tokens": self.tokens.prompt,
            "answer_tokens": self.tokens.answer,
            "typed": self.typed().command,
            "rounds": self.results.rounds,
            "spread": self.results.spread,
            "stopped": self.results.stopped,
            "choices": choices.collect::<Vec<Value>>(),
            "left_out": left_out.collect::<Vec<Value>>(),
        });
        Ok(serde_json::to_string_pretty(&plan)? + "\n")
    }

    /// Returns the commands without a figure, and why they have none.
    fn left_out(&self) -> Vec<(&Candidate, &str)> {
        let late = self.results.stopped.unwrap_or("it was not run");
        let candidates = self.results.candidates.iter();
        let without = candidates.filter(|of| of.runs.is_empty());
        without
            .map(|of| (of, of.obstacle.as_deref().unwrap_or(late)))
            .collect()
    }

    /// Returns the plan as text. At least one command has run.
    pub fn text(&self) -> String {
        let mut out = String::new();
        let mut line = |name: &str, value: String| {
            let _ = writeln!(out, "{name:<9} {}", text::line(&value));
        };
        let facts = &self.facts;
        line("model", facts.sizes.sentence());
        line(
            "machine",
            format!(
                "{} threads on {} cores; {} leaves {} for a model",
                facts.threads,
                facts.cores,
                self.free_of,
                size_text(facts.free as f64)
            ),
        );
        if let Some(free) = facts.gpu_free {
            line("gpu", format!("{} free", size_text(free as f64)));
        }
        let measured = self.measured();
        if let Some(of) = self.typed().mean() {
            let start = match of.start_seconds > 0.0 {
                true => format!("; ready after {:.1} s", of.start_seconds),
                false => String::new(),
            };
            line(
                "as typed",
                format!(
                    "prompts {:.1}, answers {:.1} tokens/s{start}",
                    of.prompt, of.answer
                ),
            );
        }
        let streamed = measured
            .iter()
            .find_map(|(_, of, _)| summary::memory(of.streamed.as_ref()?));
        if let Some(memory) = streamed {
            line("memory", memory);
        }
        let (best, _, faster) = &measured[0];
        let _ = writeln!(out, "\nType this:\n\n  {}\n", text::line(&best.command));
        let _ = writeln!(out, "{}\n", self.sentence(best, faster.as_ref()));
        out += &self.table(&measured).as_text();
        for (of, why) in self.left_out() {
            let _ = writeln!(
                out,
                "Left out: {}: {}",
                text::line(&of.command),
                text::line(why)
            );
        }
        out
    }

    /// Returns what is known about the best command.
    fn sentence(&self, best: &Candidate, faster: Option<&Faster>) -> String {
        let Results {
            rounds,
            spread,
            stopped,
            ..
        } = &self.results;
        let is_typed = std::ptr::eq(best, self.typed());
        let weighed = format!(
            "for {:.0} tokens of prompt and {:.0} of answer",
            self.tokens.prompt, self.tokens.answer
        );
        let what = match (is_typed, faster) {
            (true, _) if self.measured().len() == 1 => {
                "It is the command that was typed: no other one was measured".into()
            }
            (true, _) => format!(
                "It is the command that was typed: none of the others is known to be faster, {weighed}"
            ),
            (false, Some(faster)) => format!(
                "It is {} as fast as the command that was typed, {weighed}",
                faster_text(faster)
            ),
            (false, None) => {
                let why = self
                    .typed()
                    .obstacle
                    .as_deref()
                    .unwrap_or("it has no figures");
                format!(
                    "The command that was typed has no figures: {}",
                    text::line(why)
                )
            }
        };
        let known = match (faster.map_or(best.runs.len(), |of| of.rounds), spread) {
            (1, Some(spread)) => format!(
                "one run of each, and two of the typed command differed by {:.0} %",
                100.0 * spread
            ),
            (1, None) => "one run of each".into(),
            (runs, _) => format!("{runs} runs of each, in turn"),
        };
        let why = match stopped {
            Some(why) if *rounds == 0 => format!(", in a round that is not complete: {why}"),
            Some(why) => format!(", {rounds} rounds: {why}"),
            None => String::new(),
        };
        format!("{what} ({known}{why}).")
    }

    fn table(&self, measured: &[(&Candidate, Measured, Option<Faster>)]) -> Table {
        let mut table = Table::new([
            "",
            "prompt t/s",
            "answer t/s",
            "against typed",
            "runs",
            "read",
            "why not",
            "command",
        ]);
        let (_, best, _) = &measured[0];
        for (at, (of, mean, faster)) in measured.iter().enumerate() {
            let is_typed = std::ptr::eq(*of, self.typed());
            let name = match is_typed {
                true => format!("{} (as typed)", at + 1),
                false => (at + 1).to_string(),
            };
            table.rows.push(vec![
                name,
                format!("{:.2}", mean.prompt),
                format!("{:.2}", mean.answer),
                faster
                    .as_ref()
                    .filter(|_| !is_typed)
                    .map_or("-".into(), faster_text),
                of.runs.len().to_string(),
                size_text(mean.read_bytes as f64),
                if at == 0 {
                    String::new()
                } else {
                    self.why_not(mean, best)
                },
                of.command.clone(),
            ]);
        }
        table
    }

    /// Returns what takes most of the time that a command needs more than the best one.
    fn why_not(&self, of: &Measured, best: &Measured) -> String {
        let longer = |name, tokens: f64, rate: f64, best: f64| {
            (tokens / rate - tokens / best, name, best / rate - 1.0)
        };
        let prompts = longer("prompts", self.tokens.prompt, of.prompt, best.prompt);
        let answers = longer("answers", self.tokens.answer, of.answer, best.answer);
        let (most, name, share) = if prompts.0 > answers.0 {
            prompts
        } else {
            answers
        };
        match most > 0.0 && share >= 0.01 {
            true => format!("{name} take {:.0} % longer", 100.0 * share),
            false => "equal, with more changes".into(),
        }
    }
}

/// Returns how many times as fast a command is, with the error of several rounds.
fn faster_text(of: &Faster) -> String {
    match of.ratio {
        Some(ratio) => ratio.text(),
        None => format!("{:.2}x", of.mean),
    }
}
