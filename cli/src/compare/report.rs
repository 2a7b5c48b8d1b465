//! A comparison as text, JSON and a page.

use std::collections::BTreeSet;
use std::ffi::OsString;
use std::fmt::Write;
use std::fs;

use anyhow::Result;
use serde::Serialize;
use sidecar_core::descriptors::processors;
use sidecar_core::memory::free_memory;
use sidecar_core::protocol::Event;
use sidecar_core::text::{self, html};

use super::results::{self, Difference, Logits, Way, mean_and_error};
use crate::launch::child::without_secrets;
use crate::launch::journal::Events;
use crate::launch::session;
use crate::page;
use crate::sizes::{Table, size_text};
use crate::trial::speeds::Speed;
use crate::trial::{Kind, Run};

/// The version of the file.
const FORMAT: u32 = 1;
/// How the file starts, by which an earlier one is known.
pub const START: &str = "{ \"llama_sidecar_compare\":";
/// The title of the page.
pub const TITLE: &str = "Comparison";
/// Starts of the lines in which ggml names devices.
const DEVICES: [&str; 2] = ["  Device ", "ggml_vulkan: "];

/// What the comparison shows so far.
#[derive(Debug, Serialize)]
pub struct Report {
    llama_sidecar_compare: u32,
    version: String,
    /// Seconds since 1970.
    time: u64,
    machine: Machine,
    kind: Kind,
    command: String,
    ggml: BTreeSet<String>,
    models: Vec<String>,
    /// Why the measurement stopped before all differences were known, if it did.
    pub stopped: Option<String>,
    /// The program alone.
    pub stock: Way,
    pub ways: Vec<Way>,
    /// The difference of each way, and what follows.
    differences: Vec<Difference>,
    sentences: Vec<String>,
    advice: String,
}

/// The machine.
#[derive(Debug, Default, Serialize)]
struct Machine {
    processor: String,
    threads: usize,
    memory_bytes: u64,
    free_memory_bytes: u64,
    kernel: String,
    /// As ggml names them.
    devices: Vec<String>,
}

impl Machine {
    fn this() -> Machine {
        let read = |path: &str| fs::read_to_string(path).unwrap_or_default();
        let (info, memory) = (read("/proc/cpuinfo"), read("/proc/meminfo"));
        let name = info
            .lines()
            .find_map(|line| line.strip_prefix("model name"));
        let name = name.map(|rest| rest.trim_start_matches([' ', '\t', ':']));
        Machine {
            processor: name.unwrap_or("unknown").to_owned(),
            threads: processors(),
            memory_bytes: session::field(&memory, "MemTotal:") << 10,
            free_memory_bytes: free_memory().map_or(0, |(free, _)| free),
            kernel: read("/proc/sys/kernel/osrelease").trim().to_owned(),
            devices: Vec::new(),
        }
    }

    fn sentence(&self) -> String {
        let devices = match self.devices.is_empty() {
            true => String::new(),
            false => format!("; {}", self.devices.join(", ")),
        };
        format!(
            "{}, {} threads, {} of {} free, Linux {}{devices}",
            self.processor,
            self.threads,
            size_text(self.free_memory_bytes as f64),
            size_text(self.memory_bytes as f64),
            self.kernel,
        )
    }
}

impl Report {
    pub fn new(kind: Kind, words: &[OsString], ways: Vec<Way>) -> Report {
        let time = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
        Report {
            llama_sidecar_compare: FORMAT,
            version: env!("CARGO_PKG_VERSION").into(),
            time: time.map_or(0, |time| time.as_secs()),
            machine: Machine::this(),
            kind,
            command: without_secrets(words),
            ggml: BTreeSet::new(),
            models: Vec::new(),
            stopped: None,
            stock: Way::new(Vec::new()),
            ways,
            differences: Vec::new(),
            sentences: Vec::new(),
            advice: String::new(),
        }
    }

    /// Notes what a run of the program shows about program, models and machine.
    pub fn describe(&mut self, run: &Run, events: &Events) {
        let lines = run.log.lines();
        let of_device = |line: &&str| DEVICES.iter().any(|start| line.starts_with(start));
        let devices: BTreeSet<&str> = lines.filter(of_device).map(str::trim).collect();
        self.machine.devices = devices.into_iter().take(16).map(str::to_owned).collect();
        let file = |path: &str| path.rsplit('/').next().unwrap_or(path).to_owned();
        for event in events.iter() {
            match event {
                Event::Ggml { version, .. } => drop(self.ggml.insert(version.clone())),
                Event::Model {
                    path,
                    tensors,
                    expert_layers,
                    ..
                } => self.models.push(format!(
                    "{}: {tensors} tensors, {expert_layers} layers with routed experts",
                    file(path)
                )),
                _ => {}
            }
        }
    }

    /// Draws the conclusions.
    pub fn finish(&mut self) {
        let stock = &self.stock;
        self.differences = self.ways.iter().map(|way| way.difference(stock)).collect();
        self.sentences = self.ways.iter().map(|way| way.sentence(stock)).collect();
        self.advice = match results::best(&self.ways, stock) {
            Some(way) => format!(
                "Use it: llama-sidecar run {} -- {}",
                way.name(),
                self.command
            ),
            None if self.stopped.is_some() && self.stock.runs.is_empty() => {
                "Nothing was measured.".into()
            }
            None if self.ways.iter().any(|way| way.may_differ(stock)) => {
                "Not known yet: pass a longer --time, or leave the machine to the program.".into()
            }
            None if self.ways.iter().any(|way| !way.runs.is_empty()) => {
                "Leave it: nothing here makes this program faster.".into()
            }
            None => "Leave it: nothing here has an effect on this program.".into(),
        };
        if let Some(why) = &self.stopped {
            let advice = self.advice.trim_end_matches('.');
            self.advice = format!("{advice}. Not complete: {why}.");
        }
    }

    /// Returns the options with which the program is fastest and computes the same logits, and how many times
    /// as fast it is.
    pub fn gain(&self) -> Option<(Vec<String>, f64)> {
        let best = results::best(&self.ways, &self.stock)?;
        let is_equal = matches!(best.logits, Some(Logits::Equal { .. }));
        let work = best.difference(&self.stock).work?;
        is_equal.then(|| (best.flags.clone(), work.mean))
    }

    /// Returns the file. Its first line names what it is.
    pub fn json(&self) -> Result<String> {
        let text = serde_json::to_string_pretty(self)?;
        Ok(format!("{}\n", text.replacen("{\n  ", "{ ", 1)))
    }

    fn table(&self) -> Table {
        let mut table = Table::new([
            "",
            "prompt t/s",
            "",
            "answer t/s",
            "",
            "work",
            "memory with mapped pages",
            "read",
            "rounds",
            "logits",
        ]);
        let none = || "-".to_owned();
        for (at, way) in std::iter::once(&self.stock).chain(&self.ways).enumerate() {
            let difference = at.checked_sub(1).and_then(|at| self.differences.get(at));
            let ratio = |of: fn(&Difference) -> Option<results::Ratio>| {
                let ratio = difference.and_then(of);
                ratio.map_or(String::new(), |ratio| ratio.text())
            };
            let most = |of: fn(&Run) -> u64| {
                let most = way.runs.iter().map(of).max();
                most.map_or(none(), |bytes| size_text(bytes as f64))
            };
            table.rows.push(vec![
                way.name(),
                rate(way, |run| &run.speeds.prompt),
                ratio(|of| of.prompt),
                rate(way, |run| &run.speeds.answer),
                ratio(|of| of.answer),
                ratio(|of| of.work),
                most(|run| run.usage.memory_bytes),
                most(|run| run.usage.read_bytes),
                way.runs.len().to_string(),
                match &way.obstacle {
                    Some(_) => "no effect".into(),
                    None => way
                        .logits
                        .as_ref()
                        .map_or(String::new(), |logits| logits.text()),
                },
            ]);
        }
        table
    }

    fn about(&self) -> Vec<(&'static str, String)> {
        let ggml: Vec<&str> = self.ggml.iter().map(String::as_str).collect();
        vec![
            ("command", self.command.clone()),
            ("ggml", ggml.join(", ")),
            ("model", self.models.join("; ")),
            ("machine", self.machine.sentence()),
        ]
    }

    pub fn text(&self) -> String {
        let mut text = String::new();
        for (what, found) in self.about() {
            let _ = writeln!(text, "{what:8} {}", text::line(&found));
        }
        let _ = write!(text, "\n{}\n", self.table().as_text());
        for sentence in &self.sentences {
            let _ = writeln!(text, "{sentence}");
        }
        let _ = writeln!(text, "{}", self.advice);
        text
    }

    pub fn page(&self) -> String {
        let mut body = format!("<section><h1>{}</h1><dl>", html(&self.advice));
        for (what, found) in self.about() {
            let _ = write!(body, "<div><dt>{what}<dd class=note>{}</div>", html(&found));
        }
        let _ = write!(
            body,
            "</dl><h2>Speeds</h2><div class=wide>{}</div>",
            self.table().as_html()
        );
        for (way, sentence) in self.ways.iter().zip(&self.sentences) {
            let _ = write!(body, "<h2>{}</h2><p>{}", html(&way.name()), html(sentence));
            for line in way.runs.last().into_iter().flat_map(|run| &run.summary) {
                let _ = write!(body, "<p class=note>{}", html(line));
            }
        }
        let _ = write!(
            body,
            "<p class=note>llama-sidecar {}. Errors are confidence intervals of 95 %. Work is the time of the same tokens, prompts and answers. Logits are compared bit for bit; the number is that of evaluations.</section>",
            self.version
        );
        page::document(TITLE, &body)
    }
}

/// Returns the speeds of a run as text.
pub fn speeds(run: &Run) -> String {
    let rate = |of: &Speed| of.rate().map_or("-".into(), |rate| format!("{rate:.2}"));
    match run.speeds.is_known() {
        true => format!(
            "prompts {} t/s, answers {} t/s",
            rate(&run.speeds.prompt),
            rate(&run.speeds.answer)
        ),
        false => format!("{:.2} s", run.seconds),
    }
}

/// Returns the mean speed of the runs of a way with its error.
fn rate(way: &Way, of: fn(&Run) -> &Speed) -> String {
    let rates: Vec<f64> = way.runs.iter().filter_map(|run| of(run).rate()).collect();
    match (mean_and_error(&rates), rates.first()) {
        (Some((mean, error)), _) => format!("{mean:.2} ±{error:.2}"),
        (None, Some(rate)) => format!("{rate:.2}"),
        (None, None) => "-".into(),
    }
}
