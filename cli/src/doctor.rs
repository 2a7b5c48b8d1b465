//! `llama-sidecar doctor`: what the drop-in would do in a program, found by trying.

use std::collections::BTreeSet;
use std::ffi::OsString;
use std::io::{Read, Seek};
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Result, bail};

use crate::child;
use crate::executable::Executable;
use crate::hooks;
use crate::journal::{Events, Journal};
use crate::run::preload_library;

/// What to look at.
#[derive(clap::Args)]
pub struct DoctorOptions {
    /// How long to wait until the program has evaluated its model for the first time.
    #[arg(long, value_name = "N", default_value_t = 60)]
    seconds: u64,
    /// The program and its arguments, after `--`: so that it loads a model and writes a
    /// token, or is a server that warms up.
    #[arg(required = true, last = true)]
    command: Vec<OsString>,
}

/// How long a program has to end once it is asked to.
const LAST_WAIT: Duration = Duration::from_secs(5);

/// Runs the program until it has evaluated, and tells what was seen.
pub fn run(options: &DoctorOptions) -> Result<()> {
    let preload = preload_library()?;
    let program = Executable::find(&options.command[0])?;
    line(
        "program",
        &format!("{}: {}", program.path.display(), program.kind.describe()),
    );
    line("drop-in", &preload.display().to_string());
    if let Some(obstacle) = program.obstacle(&preload) {
        bail!("{obstacle}");
    }
    let journal = Journal::new()?;
    let mut errors = tempfile::tempfile()?;
    let mut started = child::spawn(
        Command::new(&program.path)
            .args(&options.command[1..])
            .process_group(0)
            .env("LD_PRELOAD", &preload)
            .env("LLAMA_SIDECAR_JOURNAL", journal.path())
            .env("LLAMA_HOTSWAP_ENABLED", "1")
            .env("LLAMA_HOTSWAP_POLL_MS", "0")
            .env("LLAMA_EXPERT_TRACE_STATS", "1")
            .env("LLAMA_SIDECAR_LOG", "error")
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(errors.try_clone()?),
    )?;
    let mut mapped = BTreeSet::new();
    let patience = Duration::from_secs(options.seconds);
    let ended = watch(&mut started, &journal, patience, &mut mapped)?;
    let events = journal.read();
    for found in hooks::describe(&preload, &mapped) {
        line("hooks", &found);
    }
    findings(&events);
    if let Some(status) = ended.filter(|status| !status.success()) {
        let mut text = String::new();
        errors.rewind()?;
        let _ = errors.by_ref().take(1 << 20).read_to_string(&mut text);
        let last = text.lines().rev().find(|line| !line.trim().is_empty());
        line(
            "ended",
            &format!("{status}; it last said: {}", last.unwrap_or("nothing")),
        );
    }
    match events.obstacle() {
        Some(obstacle) => bail!("{obstacle}"),
        None => Ok(()),
    }
}

/// Waits until the program has evaluated, or ended, or its time is over; ends it then. The
/// status only if it ended by itself. Adds the files that the command's processes run.
fn watch(
    child: &mut Child,
    journal: &Journal,
    patience: Duration,
    mapped: &mut BTreeSet<PathBuf>,
) -> Result<Option<ExitStatus>> {
    let began = Instant::now();
    loop {
        if let Some(status) = child.try_wait()? {
            return Ok(Some(status));
        }
        let events = journal.read();
        mapped.extend(events.processes().into_iter().flat_map(hooks::mapped));
        if events.any("model") || events.any("passive") || began.elapsed() > patience {
            break;
        }
        std::thread::sleep(Duration::from_millis(50));
    }
    // It may be a script, and what it started is to end too.
    let group = -(child.id() as libc::pid_t);
    let signal = |signal| {
        // SAFETY: a system call; the group is the child's own, which was not waited for yet.
        unsafe { libc::kill(group, signal) };
    };
    signal(libc::SIGTERM);
    let asked = Instant::now();
    while child.try_wait()?.is_none() {
        if asked.elapsed() > LAST_WAIT {
            signal(libc::SIGKILL);
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    Ok(None)
}

fn findings(events: &Events) {
    let yes_no = |yes| if yes { "yes" } else { "no" };
    line("loaded", yes_no(events.any("loaded")));
    for ggml in events.of("ggml") {
        let version = ggml["version"]
            .as_str()
            .filter(|version| !version.is_empty());
        let path = ggml["path"].as_str().unwrap_or_default();
        let version = version.unwrap_or("of unknown version (it has no ggml_version)");
        line("ggml", &format!("{path}, {version}"));
        line("layout", "understood");
    }
    if let Some(reason) = events.text("passive", "reason") {
        line("layout", reason);
    }
    let Some(model) = events.of("model").next() else {
        for opened in events.of("opened") {
            line("opened", opened["path"].as_str().unwrap_or_default());
        }
        return;
    };
    let path = model["path"].as_str().unwrap_or_default();
    line(
        "model",
        &format!(
            "{path}, {} tensors in {} file(s)",
            model["tensors"], model["files"]
        ),
    );
    line("hot-swap", "works");
    match model["expert_layers"].as_u64() {
        Some(0) | None => line("experts", "this model has no routed experts to trace"),
        Some(layers) => line(
            "experts",
            &format!("trace works: {layers} layers with routed experts"),
        ),
    }
    line("post-fetch", "in link mode only (docs/post-fetch.md)");
}

fn line(what: &str, found: &str) {
    println!("{what:11} {found}");
}
