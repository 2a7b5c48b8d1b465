//! What happens to the model's file and to the server while it answers.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Output;
use std::time::{Duration, Instant};

use anyhow::{Result, bail, ensure};
use serde_json::Value;
use testkit::memory_limit::MemoryLimit;
use testkit::server::Server;

use super::failures::Failures;
use super::load::Load;
use super::place::Place;
use crate::run::{command, root};

/// How long the clients have a state of things for themselves.
const DWELL: Duration = Duration::from_secs(2);
/// How long the server is stopped.
const STOPPED: Duration = Duration::from_millis(1500);
/// How long a file that was found by watching may take to be in use: it has to be quiet first.
const PATIENCE: Duration = Duration::from_secs(60);
/// The limit of the server's memory between the steps that lower it, in bytes.
pub const WIDE: u64 = 16 << 30;
/// By how much the lowered limit is above what is in use, in bytes.
const SPARE: u64 = 32 << 20;
/// Rounds of a storm of swaps.
const STORM: usize = 3;
/// The tensors that differ between the models.
const DIFFERENT: &str = r"blk\..*";

/// Runs cycles of steps, and counts.
pub struct Steps<'a> {
    /// The models, and one more.
    files: [&'a PathBuf; 3],
    cli: &'a Path,
    place: &'a Place,
    /// The limit of the server's memory, or why there is none.
    limit: &'a Result<MemoryLimit, String>,
    server: &'a Server,
    load: &'a Load,
    failures: &'a Failures,
    /// The model that the server has.
    now: usize,
    watched: u64,
    commanded: u64,
    returned: u64,
    touched: u64,
    stopped: u64,
    full: u64,
    reverted: u64,
    masked: u64,
    limited: u64,
    cut_short: Refused,
    preallocated: Refused,
}

/// Files of a kind that were refused, and one reason.
#[derive(Default)]
struct Refused {
    files: u64,
    reason: String,
}

impl<'a> Steps<'a> {
    /// No step yet, on a server that has the first model.
    pub fn new(
        files: [&'a PathBuf; 3],
        cli: &'a Path,
        place: &'a Place,
        limit: &'a Result<MemoryLimit, String>,
        server: &'a Server,
        load: &'a Load,
        failures: &'a Failures,
    ) -> Steps<'a> {
        Steps {
            files,
            cli,
            place,
            limit,
            server,
            load,
            failures,
            now: 0,
            watched: 0,
            commanded: 0,
            returned: 0,
            touched: 0,
            stopped: 0,
            full: 0,
            reverted: 0,
            masked: 0,
            limited: 0,
            cut_short: Refused::default(),
            preallocated: Refused::default(),
        }
    }

    /// Runs all steps once, from the first model to the first model.
    pub fn cycle(&mut self) -> Result<()> {
        if self
            .load
            .answered
            .load(std::sync::atomic::Ordering::Relaxed)
            == 0
        {
            self.dwell();
        }
        self.swap_by_watching()?;
        self.bad_files()?;
        self.touch()?;
        self.swap_while_stopped()?;
        self.full_disk()?;
        self.swap_by_command()?;
        self.storm()?;
        self.limit_memory()?;
        self.mask()?;
        self.revert()
    }

    /// What was done, for the table.
    pub fn figures(&self) -> Vec<(String, String)> {
        let refused = |refused: &Refused| match refused.reason.as_str() {
            "" => refused.files.to_string(),
            reason => format!("{} ({reason})", refused.files),
        };
        let full = match &self.place.shared {
            None => self.full.to_string(),
            Some(why) => format!("skipped: no file system of its own ({why})"),
        };
        let limited = match self.limit {
            Ok(_) => self.limited.to_string(),
            Err(why) => format!("skipped: {why}"),
        };
        let figures = [
            ("swaps by watching", self.watched.to_string()),
            ("swaps by command", self.commanded.to_string()),
            ("returns", self.returned.to_string()),
            ("files refused, truncated", refused(&self.cut_short)),
            ("files refused, preallocated", refused(&self.preallocated)),
            ("files touched in place", self.touched.to_string()),
            ("stops and continuations", self.stopped.to_string()),
            ("swaps on a full disk that failed", full),
            ("reverts to the originals", self.reverted.to_string()),
            ("masks of experts, removed again", self.masked.to_string()),
            ("limits of memory, lowered and lifted", limited),
        ];
        figures.map(|(name, value)| (name.into(), value)).into()
    }

    fn dwell(&self) {
        let deadline = Instant::now() + DWELL;
        while Instant::now() < deadline && !self.load.is_over() {
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    fn generation(&self) -> Value {
        self.server.control("status")["generation"].clone()
    }

    /// Waits until the server has a model, and has nothing cached of another.
    fn confirm(&mut self, model: usize) -> Result<()> {
        self.wait_for(model)?;
        self.load.tell(Some(model), false);
        self.dwell();
        self.erase()?;
        self.load.tell(Some(model), true);
        self.dwell();
        Ok(())
    }

    fn wait_for(&mut self, model: usize) -> Result<()> {
        let deadline = Instant::now() + PATIENCE;
        loop {
            let status = self.server.control("status");
            let changed = status["models"][0]["changed"].as_array();
            if changed.is_some_and(|changed| changed.is_empty() == (model == 0)) {
                break;
            }
            if Instant::now() >= deadline {
                bail!("after {PATIENCE:?} the server does not have model {model}: {status}");
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        self.now = model;
        self.returned += u64::from(model == 0);
        Ok(())
    }

    fn command(&self, arguments: &[&str]) -> Result<Output> {
        Ok(command(self.cli, &root()).args(arguments).output()?)
    }

    /// Empties the slots of the server, through the command that users have.
    fn erase(&self) -> Result<()> {
        let socket = self.server.socket().to_string_lossy();
        let reload = [
            "ctl",
            "reload",
            "--socket",
            &*socket,
            "--server",
            self.server.url(),
        ];
        let output = self.command(&reload)?;
        ensure!(
            output.status.success(),
            "llama-sidecar ctl reload: {output:?}"
        );
        Ok(())
    }

    fn swap_by_watching(&mut self) -> Result<()> {
        self.load.tell(None, false);
        self.place.put(self.files[1])?;
        self.watched += 1;
        self.confirm(1)
    }

    /// Files that must not be taken; the server goes on with what it has.
    fn bad_files(&mut self) -> Result<()> {
        let (place, other) = (self.place, self.files[1 - self.now]);
        let size = fs::metadata(other)?.len();
        // The header has about 2 MiB; what follows is complete, half there, or missing.
        for (part, cut) in [
            (size / 2, true),
            (size - 1, true),
            (size / 20, false),
            (size / 2, false),
        ] {
            match cut {
                true => place.put_cut(other, part)?,
                false => place.put_preallocated(other, part)?,
            }
            let before = self.generation();
            let answer = self.server.control("reload");
            self.dwell();
            if answer["ok"] == true || before != self.generation() {
                let kind = if cut { "truncated" } else { "preallocated" };
                let kind = format!("files {kind} that were taken");
                self.failures.add(&kind, answer.to_string());
                // It now holds the tensors of no file.
                self.load.tell(None, false);
                self.place.put(self.files[self.now])?;
                let answer = self.server.control("reload");
                ensure!(answer["ok"] == true, "a good file is not taken: {answer}");
                self.confirm(self.now)?;
                continue;
            }
            let refused = match cut {
                true => &mut self.cut_short,
                false => &mut self.preallocated,
            };
            refused.files += 1;
            refused.reason = reason(&answer);
            self.same_again()?;
        }
        Ok(())
    }

    /// Puts the model that the server has in place again, which changes nothing.
    fn same_again(&mut self) -> Result<()> {
        let before = self.generation();
        self.place.put(self.files[self.now])?;
        let answer = self.server.control("reload");
        ensure!(answer["ok"] == true, "a good file is not taken: {answer}");
        self.unchanged_since(&before, "switches by a copy of the same file");
        Ok(())
    }

    fn unchanged_since(&self, before: &Value, kind: &str) {
        let now = self.generation();
        if *before != now {
            let what = format!("expected generation {before}, found {now}");
            self.failures.add(kind, what);
        }
    }

    fn touch(&mut self) -> Result<()> {
        let before = self.generation();
        self.place.touch()?;
        let answer = self.server.control("reload");
        ensure!(
            answer["ok"] == true,
            "a touched file is not taken: {answer}"
        );
        self.unchanged_since(&before, "switches by a file that was touched");
        self.touched += 1;
        self.dwell();
        Ok(())
    }

    fn swap_while_stopped(&mut self) -> Result<()> {
        let other = 1 - self.now;
        self.load.tell(None, false);
        self.server.stop();
        let put = self.place.put(self.files[other]);
        std::thread::sleep(STOPPED);
        self.server.go_on();
        put?;
        self.stopped += 1;
        self.watched += 1;
        self.confirm(other)
    }

    /// A swap without disk space for the new file fails, and leaves the old one.
    fn full_disk(&mut self) -> Result<()> {
        if self.place.shared.is_some() {
            return Ok(());
        }
        let before = self.generation();
        let output = self.place.when_full(|| self.swap("swap"))??;
        self.dwell();
        if output.status.success() {
            self.failures
                .add("swaps on a full disk that succeeded", format!("{output:?}"));
        }
        self.unchanged_since(&before, "switches by a swap that failed");
        self.full += 1;
        Ok(())
    }

    fn swap(&self, name: &str) -> Result<Output> {
        let (model, from) = (self.place.model(), self.files[1]);
        let (model, from) = (model.to_string_lossy(), from.to_string_lossy());
        match name {
            "undo" => self.command(&[name, &*model]),
            _ => self.command(&[name, &*model, "--tensor", DIFFERENT, "--from", &*from]),
        }
    }

    fn swap_by_command(&mut self) -> Result<()> {
        for (model, name) in [(1, "swap"), (0, "undo")] {
            self.load.tell(None, false);
            let output = self.swap(name)?;
            ensure!(output.status.success(), "llama-sidecar {name}: {output:?}");
            // Nothing is between the rename and the command but the watching thread.
            self.erase()?;
            self.wait_for(model)?;
            self.commanded += 1;
            self.load.tell(Some(model), true);
            self.dwell();
        }
        Ok(())
    }

    /// Swaps one right after the other, also to tensors of other types.
    fn storm(&mut self) -> Result<()> {
        self.load.tell(None, false);
        for _ in 0..STORM {
            for file in [2, 1, 0] {
                self.place.put(self.files[file])?;
                let answer = self.server.control("reload");
                ensure!(answer["ok"] == true, "a good file is not taken: {answer}");
                self.commanded += 1;
            }
        }
        self.confirm(0)
    }
}

impl Steps<'_> {
    /// Lowers the limit of the server's memory and lifts it. The answers stay those of the model.
    fn limit_memory(&mut self) -> Result<()> {
        if let Ok(limit) = self.limit {
            limit.set(limit.used() + SPARE)?;
            self.dwell();
            limit.set(WIDE)?;
            self.limited += 1;
        }
        Ok(())
    }

    /// Masks experts of a layer for some time. Afterwards the server has its model again.
    fn mask(&mut self) -> Result<()> {
        let socket = self.server.socket().to_string_lossy().into_owned();
        let masks = || self.server.control("status")["models"][0]["masks"].clone();
        for (options, layers) in [(&["--layer", "0:0-2"][..], 1), (&["--clear"], 0)] {
            self.load.tell(None, false);
            let said = self.command(&[&["ctl", "mask", "--socket", &socket], options].concat())?;
            ensure!(said.status.success(), "llama-sidecar ctl mask: {said:?}");
            let found = masks().as_array().map_or(0, Vec::len);
            if found != layers {
                let what = format!("expected {layers} layers, found {found}");
                self.failures.add("masks", what);
            }
            self.dwell();
        }
        self.masked += 1;
        self.confirm(0)
    }

    /// Swaps, returns everything by command, and lets files be reloaded again.
    fn revert(&mut self) -> Result<()> {
        self.load.tell(None, false);
        self.place.put(self.files[1])?;
        self.server.control("reload");
        self.wait_for(1)?;
        let socket = self.server.socket().to_string_lossy().into_owned();
        let said = self.command(&["ctl", "freeze", "--socket", &socket])?;
        ensure!(said.status.success(), "llama-sidecar ctl freeze: {said:?}");
        self.wait_for(0)?;
        let private = self.server.control("status")["models"][0]["private_bytes"].clone();
        if private != 0 {
            let what = format!("expected 0 bytes, found {private}");
            self.failures.add("memory held after a revert", what);
        }
        self.place.put(self.files[0])?;
        let said = self.command(&["ctl", "unfreeze", "--socket", &socket])?;
        ensure!(
            said.status.success(),
            "llama-sidecar ctl unfreeze: {said:?}"
        );
        self.reverted += 1;
        self.confirm(0)
    }
}

/// Why something was not taken, by the first reason of an answer.
fn reason(answer: &Value) -> String {
    let report = &answer["reports"][0];
    let all = [&report["files"], &report["tensors"]].map(Value::as_array);
    let mut reasons = all
        .into_iter()
        .flatten()
        .flatten()
        .map(|one| &one["reason"]);
    let first = reasons.find_map(|reason| reason.as_str().filter(|text| !text.is_empty()));
    first.unwrap_or_default().to_owned()
}
