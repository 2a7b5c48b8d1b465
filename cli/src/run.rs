//! `llama-sidecar run`: a command with the drop-in, and what that did.

use std::ffi::{OsStr, OsString};
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};

use crate::child;
use crate::journal::{Events, Journal};
use crate::program::Program;

/// What the drop-in is to do; each is a variable of the same meaning.
#[derive(clap::Args)]
pub struct Options {
    /// Swap tensors when the model's files change (LLAMA_HOTSWAP_ENABLED).
    #[arg(long)]
    hotswap: bool,
    /// How often files are looked at, in ms; 0: only when asked (LLAMA_HOTSWAP_POLL_MS).
    #[arg(long, value_name = "MS")]
    poll_ms: Option<u64>,
    /// How long a changed file must stay the same before it is used when it is found by
    /// watching, in ms (LLAMA_HOTSWAP_QUIET_MS).
    #[arg(long, value_name = "MS")]
    quiet_ms: Option<u32>,
    /// The most that swapped tensors may hold beside the model, in MiB
    /// (LLAMA_SIDECAR_MEMORY_MB).
    #[arg(long, value_name = "MIB")]
    memory_mb: Option<u32>,
    /// Path of the control socket (LLAMA_SIDECAR_CONTROL).
    #[arg(long, value_name = "PATH")]
    socket: Option<PathBuf>,
    /// Count which experts are used (LLAMA_EXPERT_TRACE_STATS).
    #[arg(long)]
    expert_trace_stats: bool,
    /// Log the names of experts as they are used (LLAMA_EXPERT_TRACE_NAMES).
    #[arg(long)]
    expert_trace_names: bool,
    /// Count, with a summary layer by layer (LLAMA_EXPERT_TRACE_PER_LAYER).
    #[arg(long)]
    expert_trace_per_layer: bool,
    /// Count, and write JSON, or CSV by extension (LLAMA_EXPERT_TRACE_OUTPUT).
    #[arg(long, value_name = "FILE")]
    expert_trace_output: Option<PathBuf>,
    /// A setting of post-fetch, for programs in link mode: NAME=VALUE sets LLAMA_POSTFETCH_NAME.
    #[arg(long, value_name = "NAME=VALUE", value_parser = postfetch)]
    postfetch: Vec<(&'static str, String)>,
    /// What is logged (LLAMA_SIDECAR_LOG).
    #[arg(long, value_parser = ["off", "error", "warn", "info", "debug"])]
    log: Option<String>,
    /// Print the variables and the command, and do not run it.
    #[arg(long)]
    dry_run: bool,
    /// Say nothing at the end.
    #[arg(short, long)]
    quiet: bool,
    /// The program and its arguments, after `--`.
    #[arg(required = true, last = true)]
    command: Vec<OsString>,
}

/// Runs the command, says what the drop-in did, and ends as the command ended. Returns only
/// if it cannot be run.
pub fn run(options: &Options) -> Result<()> {
    let preload = preload_library()?;
    let variables = variables(options, &preload);
    if options.dry_run {
        for (name, value) in &variables {
            println!("export {name}={}", quoted(value));
        }
        let words: Vec<String> = options.command.iter().map(|word| quoted(word)).collect();
        println!("{}", words.join(" "));
        return Ok(());
    }
    let program = Program::find(&options.command[0])?;
    let journal = Journal::new()?;
    let mut child = child::spawn(
        Command::new(&program.path)
            .args(&options.command[1..])
            .envs(variables)
            .env("LLAMA_SIDECAR_JOURNAL", journal.path()),
    )
    .with_context(|| {
        let obstacle = program.obstacle(&preload);
        obstacle.unwrap_or_else(|| format!("cannot run {}", program.path.display()))
    })?;
    let status = child::wait(&mut child)?;
    if !options.quiet {
        for line in summary(options, &program, &preload, &journal.read()) {
            eprintln!("llama-sidecar: {line}");
        }
    }
    // What follows drops nothing.
    drop(journal);
    child::end_like(status)
}

/// What was done, a line for each thing.
fn summary(options: &Options, program: &Program, preload: &Path, events: &Events) -> Vec<String> {
    let on = |name| std::env::var_os(name).is_some_and(|value| !value.is_empty() && value != "0");
    let asked = options.hotswap
        || options.expert_trace_output.is_some()
        || options.expert_trace_stats
        || options.expert_trace_names
        || options.expert_trace_per_layer
        || on("LLAMA_HOTSWAP_ENABLED")
        || on("LLAMA_EXPERT_TRACE_STATS")
        || on("LLAMA_EXPERT_TRACE_OUTPUT");
    if !asked {
        return vec!["nothing was asked for: give --hotswap or one of --expert-trace-…".into()];
    }
    let obstacle = program.obstacle(preload).or_else(|| events.obstacle());
    if let Some(obstacle) = obstacle {
        return vec![format!("nothing was done: {obstacle}")];
    }
    let models: Vec<_> = events
        .of("model")
        .filter_map(|model| model["path"].as_str())
        .collect();
    let pause = events
        .of("end")
        .filter_map(|end| end["longest_pause_us"].as_u64())
        .max();
    let mut lines = vec![format!(
        "{} evaluations of {}; reloads: {}, with {} tensors swapped, {} returned, {} refused; longest pause {} us",
        events.sum("end", "evaluations"),
        models.join(", "),
        events.of("reload").count(),
        events.sum("reload", "swapped"),
        events.sum("reload", "returned"),
        events.sum("reload", "refused"),
        pause.unwrap_or(0),
    )];
    if !events.any("end") {
        lines[0] = format!(
            "{} ended without a chance to say what was done",
            models.join(", ")
        );
    }
    lines.extend(events.of("reload").filter_map(|reload| {
        let failure = reload["failure"].as_str()?;
        Some(format!("a reload failed: {failure}"))
    }));
    if options.expert_trace_output.is_some() && events.sum("model", "expert_layers") == 0 {
        lines.push(format!(
            "no trace: {} has no routed experts",
            models.join(", ")
        ));
    }
    // It may be written many times, and the last time counts.
    let mut traces = std::collections::BTreeMap::new();
    for trace in events.of("trace") {
        traces.insert(
            trace["path"].as_str().unwrap_or_default(),
            trace["error"].as_str(),
        );
    }
    lines.extend(traces.into_iter().map(|(path, error)| match error {
        None => format!("trace written to {path} ('llama-sidecar report {path}' shows it)"),
        Some(error) => format!("the trace could not be written to {path}: {error}"),
    }));
    lines
}

fn variables(options: &Options, preload: &Path) -> Vec<(&'static str, OsString)> {
    let mut all: Vec<(&str, OsString)> = Vec::new();
    let mut list = preload.as_os_str().to_owned();
    if let Some(others) = std::env::var_os("LD_PRELOAD").filter(|others| !others.is_empty()) {
        list.push(":");
        list.push(others);
    }
    all.push(("LD_PRELOAD", list));
    let mut flag = |name, on: bool| {
        if on {
            all.push((name, "1".into()));
        }
    };
    let stats =
        options.expert_trace_stats || options.expert_trace_names || options.expert_trace_per_layer;
    flag("LLAMA_HOTSWAP_ENABLED", options.hotswap);
    flag("LLAMA_EXPERT_TRACE_STATS", stats);
    flag("LLAMA_EXPERT_TRACE_NAMES", options.expert_trace_names);
    flag(
        "LLAMA_EXPERT_TRACE_PER_LAYER",
        options.expert_trace_per_layer,
    );
    let mut value = |name, value: Option<OsString>| {
        all.extend(value.map(|value| (name, value)));
    };
    let text = |text: &Option<String>| text.as_ref().map(OsString::from);
    let path = |path: &Option<PathBuf>| path.as_ref().map(OsString::from);
    let poll = options.poll_ms.map(|ms| ms.to_string().into());
    value("LLAMA_HOTSWAP_POLL_MS", poll);
    let number = |number: Option<u32>| number.map(|number| number.to_string().into());
    value("LLAMA_HOTSWAP_QUIET_MS", number(options.quiet_ms));
    value("LLAMA_SIDECAR_MEMORY_MB", number(options.memory_mb));
    value("LLAMA_SIDECAR_CONTROL", path(&options.socket));
    value(
        "LLAMA_EXPERT_TRACE_OUTPUT",
        path(&options.expert_trace_output),
    );
    value("LLAMA_SIDECAR_LOG", text(&options.log));
    for (name, setting) in &options.postfetch {
        value(name, Some(setting.into()));
    }
    all
}

/// A setting of post-fetch and the variable that it is.
fn postfetch(text: &str) -> Result<(&'static str, String), String> {
    const VARIABLES: [&str; 10] = [
        "LLAMA_POSTFETCH_ENABLE",
        "LLAMA_POSTFETCH_FORCE_CPU",
        "LLAMA_POSTFETCH_BLOCK_ON_MISS",
        "LLAMA_POSTFETCH_MAX_TRANSFERS",
        "LLAMA_POSTFETCH_SCRATCHPAD_MB",
        "LLAMA_POSTFETCH_USE_DEDICATED_STREAMS",
        "LLAMA_POSTFETCH_CPU_LIMIT",
        "LLAMA_POSTFETCH_PAGE_LOCK",
        "LLAMA_POSTFETCH_SPIN_US",
        "LLAMA_POSTFETCH_DEBUG",
    ];
    const PREFIX: &str = "LLAMA_POSTFETCH_";
    let names = || {
        VARIABLES
            .map(|name| name[PREFIX.len()..].to_lowercase())
            .join(", ")
    };
    let (name, value) = text
        .split_once('=')
        .ok_or_else(|| format!("expected NAME=VALUE; names: {}", names()))?;
    let wanted = format!("{PREFIX}{}", name.to_uppercase().replace('-', "_"));
    let found = VARIABLES.into_iter().find(|variable| *variable == wanted);
    let variable = found.ok_or_else(|| format!("no such setting; names: {}", names()))?;
    Ok((variable, value.to_owned()))
}

/// The drop-in library, beside this program: installed, or in the build tree.
pub fn preload_library() -> Result<PathBuf> {
    const NAME: &str = "libllama_sidecar_preload.so";
    let program = std::env::current_exe().context("where this program is")?;
    let folder = program.parent().context("this program is in a folder")?;
    let places = ["../lib", "../preload/release", "."];
    for place in places {
        if let Ok(found) = folder.join(place).join(NAME).canonicalize() {
            return Ok(found);
        }
    }
    bail!(
        "{NAME} is not in {}: install with 'cargo xtask install --prefix DIR' and run DIR/bin/llama-sidecar",
        folder.join("../lib").display()
    )
}

/// A word as a shell reads it back.
fn quoted(word: &OsStr) -> String {
    let text = word.to_string_lossy();
    let plain = |c: char| c.is_ascii_alphanumeric() || "-_./=:,+@%".contains(c);
    match !text.is_empty() && text.chars().all(plain) {
        true => text.into_owned(),
        false => format!("'{}'", text.replace('\'', "'\\''")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_come_back_from_a_shell() {
        for word in ["plain", "two words", "it's", "", "$HOME"] {
            let script = format!("printf %s {}", quoted(OsStr::new(word)));
            let output = Command::new("sh").args(["-c", &script]).output();
            assert_eq!(output.expect("a shell").stdout, word.as_bytes());
        }
    }
}
