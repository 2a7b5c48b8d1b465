//! `llama-sidecar run`: a command with the drop-in.

use std::ffi::{OsStr, OsString};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};

/// What the drop-in is to do; each is a variable of the same meaning.
#[derive(clap::Args)]
pub struct Options {
    /// Swap tensors when the model's files change (LLAMA_HOTSWAP_ENABLED).
    #[arg(long)]
    hotswap: bool,
    /// How often files are looked at, in ms; 0: only when asked (LLAMA_HOTSWAP_POLL_MS).
    #[arg(long, value_name = "MS")]
    poll_ms: Option<u64>,
    /// What becomes of cached context after a swap (LLAMA_HOTSWAP_KV).
    #[arg(long, value_parser = ["keep", "clear"])]
    kv: Option<String>,
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
    /// What is logged (LLAMA_SIDECAR_LOG).
    #[arg(long, value_parser = ["off", "error", "warn", "info", "debug"])]
    log: Option<String>,
    /// Print the variables and the command, and do not run it.
    #[arg(long)]
    dry_run: bool,
    /// The program and its arguments, after `--`.
    #[arg(required = true, last = true)]
    command: Vec<OsString>,
}

/// Becomes the command: its signals and its exit code are its own. Returns only if that is
/// not possible.
pub fn run(options: &Options) -> Result<()> {
    let variables = variables(options, &preload_library()?);
    let (program, arguments) = options
        .command
        .split_first()
        .context("expected a command")?;
    if options.dry_run {
        for (name, value) in &variables {
            println!("export {name}={}", quoted(value));
        }
        let words: Vec<String> = options.command.iter().map(|word| quoted(word)).collect();
        println!("{}", words.join(" "));
        return Ok(());
    }
    let error = Command::new(program).args(arguments).envs(variables).exec();
    Err(error).with_context(|| format!("cannot run {}", program.display()))
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
    value("LLAMA_HOTSWAP_KV", text(&options.kv));
    value("LLAMA_SIDECAR_CONTROL", path(&options.socket));
    value(
        "LLAMA_EXPERT_TRACE_OUTPUT",
        path(&options.expert_trace_output),
    );
    value("LLAMA_SIDECAR_LOG", text(&options.log));
    all
}

/// The drop-in library, beside this program: installed, or in the build tree.
fn preload_library() -> Result<PathBuf> {
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
