//! `llama-sidecar doctor`: a trial run that shows what the drop-in can do in a program.

use std::collections::BTreeSet;
use std::ffi::OsString;
use std::io::{Read, Seek};
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Result, bail};
use sidecar_core::config::Config;
use sidecar_core::protocol::{Event, NoEffect, StreamFigures, is_tried_ggml};
use sidecar_core::text;

use crate::interruption;
use crate::launch::child::{self, Group};
use crate::launch::executable::{Executable, ld_preload, preload_library};
use crate::launch::hooks;
use crate::launch::journal::{Events, JOURNAL, Journal, UNKNOWN_YET};
use crate::launch::{crashes, own_cache};
use crate::report::cache::{Caches, Policy};
use crate::report::stream;
use crate::report::traces::TraceReport;
use crate::sizes::time;
use crate::temporary;

/// The program to try.
#[derive(clap::Args)]
pub struct DoctorOptions {
    /// Longest time to wait for the first evaluation.
    #[arg(long, value_name = "TIME", default_value = "1m", value_parser = time)]
    run_time: Duration,
    /// Fail if the experts of a model cannot be streamed in the program.
    #[arg(long)]
    stream_experts: bool,
    /// Try how many experts fit the memory that a GPU has left, and how fast the others are.
    #[arg(long)]
    expert_cache: bool,
    /// An expert trace (JSON): how many of its routed experts would be on the GPU.
    #[arg(long, value_name = "FILE", requires = "expert_cache")]
    trace: Option<PathBuf>,
    /// The program and its arguments; `--` before them is optional. It must load a model and make a
    /// token, or be a server with a warm-up.
    #[arg(required = true, trailing_var_arg = true)]
    command: Vec<OsString>,
}

/// What to do where experts are in host memory beside a GPU.
const POST_FETCH_WORKS: &str = "can work: routed experts are in host memory, beside a GPU; run the program with --post-fetch, send a prompt of 32 tokens or more, and read the figures of 'run'";

/// Runs the program until its first evaluation, and prints the findings.
pub fn run(options: &DoctorOptions) -> Result<()> {
    let trace = match &options.trace {
        Some(path) => TraceReport::read(path, false)?,
        None => Vec::new(),
    };
    let preload = preload_library()?;
    let program = Executable::find(&options.command[0])?;
    line(
        "program",
        &format!("{}: {}", text::path(&program.path), program.kind.describe()),
    );
    line("drop-in", &text::path(&preload));
    if let Some(obstacle) = program.obstacle(&preload) {
        bail!("{obstacle}");
    }
    let journal = Journal::new()?;
    let mut errors = temporary::log()?;
    let mut command = options.command.clone();
    let own = options
        .expert_cache
        .then(|| own_cache::remove(&mut command));
    let cache = match own {
        Some(Some(mib)) => mib.to_string(),
        Some(None) => "auto".to_owned(),
        None => "0".to_owned(),
    };
    let mut started = child::spawn(
        Command::new(&program.path)
            .args(&command[1..])
            .process_group(0)
            .env("LD_PRELOAD", ld_preload(&preload))
            .env(JOURNAL, journal.path())
            .env("LLAMA_SIDECAR_HOTSWAP", "1")
            .env("LLAMA_HOTSWAP_POLL_MS", "0")
            .env("LLAMA_EXPERT_TRACE_STATS", "1")
            .env("LLAMA_EXPERT_STREAM", "auto")
            .env("LLAMA_POSTFETCH_MODE", "on")
            .env("LLAMA_POSTFETCH_CACHE_MB", cache)
            .envs(own.map(|_| (own_cache::VARIABLE, "0")))
            .env("LLAMA_SIDECAR_LOG", "error")
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(errors.try_clone()?),
        Group::Own,
    )?;
    let mut mapped = BTreeSet::new();
    let patience = options.run_time;
    let is_done = |events: &Events| {
        is_complete(events) && !(options.expert_cache && events.expects_expert_cache())
    };
    let ended = watch(&mut started, &journal, patience, is_done, &mut mapped)?;
    let events = journal.read();
    let hooks = match events.linked() {
        Some(functions) => hooks::describe_linked(functions),
        None => hooks::describe(&preload, &mapped),
    };
    for found in &hooks {
        line("hooks", found);
    }
    let is_called = |event: &Event| matches!(event, Event::Ggml { .. } | Event::Opened { .. });
    if !hooks.is_empty() && !events.iter().any(is_called) {
        line(
            "hooks",
            "none was called: the program used no ggml until then, or opens it with RTLD_DEEPBIND",
        );
    }
    findings(&events, hooks::scheduler_obstacle(&preload, &mapped));
    if options.expert_cache {
        expert_cache(&events, &trace);
    }
    if let Some(status) = ended.filter(|status| !status.success()) {
        let mut text = String::new();
        errors.rewind()?;
        let _ = errors.by_ref().take(1 << 20).read_to_string(&mut text);
        line(
            "ended",
            &format!(
                "{status}; it printed: {}",
                child::cause(&text).unwrap_or("no error")
            ),
        );
    }
    let of_streaming = || events.stream_obstacle().filter(|_| options.stream_experts);
    // Other capabilities are on for the trial alone.
    let config = Config::parse(|name| std::env::var_os(name));
    let is_requested = |found: &&NoEffect| match found.requested.as_str() {
        NoEffect::HOT_SWAP => config.hotswap,
        NoEffect::TRACE => config.traces(),
        NoEffect::STREAMING => options.stream_experts || config.expert_stream.streams(),
        NoEffect::POST_FETCH => options.expert_cache || config.program_postfetch.is_used(),
        _ => true,
    };
    let no_effect = events.no_effect().find(is_requested);
    let no_effect = || no_effect.map(|found| found.sentence.clone());
    let fault = ended.filter(|status| crashes::fault(*status).is_some());
    let fault = fault.map(|status| {
        format!("the program ended by a fault ({status}): see whether it does without the drop-in")
    });
    match events
        .obstacle(ended)
        .or(fault)
        .or_else(of_streaming)
        .or_else(no_effect)
    {
        Some(obstacle) => bail!("{obstacle}"),
        None => Ok(()),
    }
}

/// Whether the events show what works: the first evaluation, and with it streaming.
fn is_complete(events: &Events) -> bool {
    let mut models = events.iter().filter_map(|event| match event {
        Event::Model {
            path,
            expert_layers,
            ..
        } => Some(*expert_layers == 0 || events.streams(path).is_some()),
        _ => None,
    });
    let first = models.next();
    events.passive_reason().is_some()
        || first.is_some_and(|known| known && models.all(|known| known))
}

/// Waits until `is_done`, the end of the program or the end of its time, and ends the
/// program then. Returns the status of a program that ended by itself. Collects the files that
/// the processes of the command execute.
fn watch(
    child: &mut Child,
    journal: &Journal,
    patience: Duration,
    is_done: impl Fn(&Events) -> bool,
    mapped: &mut BTreeSet<PathBuf>,
) -> Result<Option<ExitStatus>> {
    /// How long a program may take to end by a signal that it gets, too.
    const END_TIME: Duration = Duration::from_secs(1);
    let began = Instant::now();
    let mut interrupted = None;
    loop {
        if let Some(status) = child.try_wait()? {
            return Ok(Some(status));
        }
        let events = journal.read();
        mapped.extend(events.processes().into_iter().flat_map(hooks::mapped));
        if interruption::signal().is_some() {
            interrupted.get_or_insert_with(Instant::now);
        }
        let is_over = interrupted.is_some_and(|since| since.elapsed() > END_TIME);
        if is_done(&events) || began.elapsed() > patience || is_over {
            break;
        }
        std::thread::sleep(Duration::from_millis(50));
    }
    child::end_group(child)?;
    Ok(None)
}

/// Prints what the events show. `scheduler` is why calls of ggml's scheduler cannot be interposed.
fn findings(events: &Events, scheduler: Option<String>) {
    let yes_no = |yes| if yes { "yes" } else { "no" };
    line("loaded", yes_no(events.is_loaded()));
    for event in events.iter() {
        if let Event::Ggml { path, version } = event {
            let tried = match is_tried_ggml(version) {
                true => "",
                false => " (not yet tried)",
            };
            let version = match version.as_str() {
                "" => "of unknown version",
                known => known,
            };
            line("ggml", &format!("{path}, {version}{tried}"));
            line("layout", "understood");
        }
    }
    if let Some(reason) = events.passive_reason() {
        line("layout", reason);
    }
    if events.models().is_empty() {
        for event in events.iter() {
            if let Event::Opened { path } = event {
                line("opened", path);
            }
        }
        return;
    }
    for event in events.iter() {
        if let Event::Model {
            path,
            files,
            tensors,
            expert_layers,
            predicting,
            experts_used,
        } = event
        {
            line(
                "model",
                &format!("{path}, {tensors} tensors in {files} file(s)"),
            );
            if let Some(first) = predicting {
                let found = format!(
                    "from {first} on predict further tokens (MTP), and are computed with --spec-type draft-mtp alone"
                );
                line("layers", &found);
            }
            match expert_layers {
                0 => line(
                    "experts",
                    "this model has no routed experts to trace or to stream",
                ),
                layers => {
                    let mut no_effect = events.no_effect();
                    let found = match no_effect.find(|of| of.requested == NoEffect::TRACE) {
                        Some(of) => format!("trace does not work: {}", of.sentence),
                        None => format!("trace works: {layers} layers with routed experts"),
                    };
                    line("experts", &found);
                    streaming(path, experts_used, events);
                    let found = match (&scheduler, events.post_fetches(path)) {
                        (_, None) => "off: a LLAMA_POSTFETCH_* variable excludes the GPU".into(),
                        (_, Some(Err(obstacle))) => format!("no effect: {obstacle}"),
                        (Some(obstacle), _) => format!("does not work: {obstacle}"),
                        (None, Some(Ok(()))) => POST_FETCH_WORKS.into(),
                    };
                    line("post-fetch", &found);
                }
            }
        }
    }
    for event in events.iter() {
        if let Event::OwnExpertCache { layers, bytes } = event {
            let found = format!(
                "llama.cpp's own works, {layers} layers in {:.0} MB: swaps write into it, an expert matrix keeps its type, --expert-cache stays off",
                *bytes as f64 / 1e6
            );
            line("cache", &found);
        }
    }
    match events.hotswap_obstacle() {
        Some(obstacle) => line("hot-swap", &format!("does not work: {obstacle}")),
        None => line("hot-swap", "works"),
    }
}

/// Prints how many experts could stay on a GPU, and what that would do for a trace.
fn expert_cache(events: &Events, traces: &[TraceReport]) {
    let Some(Event::ExpertCache {
        slots,
        bytes,
        link_speed: link,
        memory_speed: memory,
        on_cpu,
        obstacle,
    }) = events.expert_cache()
    else {
        return line(
            "cache",
            "unknown: no graph had experts in host memory beside a GPU",
        );
    };
    if let Some(obstacle) = obstacle {
        return line("cache", obstacle);
    }
    let others = match on_cpu {
        true => "the CPU computes the others meanwhile",
        false => "the others are copied to it",
    };
    line(
        "cache",
        &format!(
            "{slots} experts of each layer fit the memory that the GPU has left ({:.0} MB); the link copies {:.1} GB/s, the CPU reads {:.1} GB/s: {others}",
            *bytes as f64 / 1e6,
            link / 1e9,
            memory / 1e9,
        ),
    );
    for trace in traces {
        let found = match Caches::of(trace) {
            None => "the trace has no locality: write a new one".into(),
            Some(caches) => {
                let size = *slots as usize;
                let hits = 100.0 * caches.rate(Policy::Lru, size);
                let speed = if *on_cpu { memory } else { link };
                match caches.moved(Policy::Lru, size) {
                    Some(moved) => format!(
                        "{hits:.1} % of the routed experts of {} would be there; the others are {:.1} MB a token, {:.2} ms at that speed",
                        trace.label,
                        moved / 1e6,
                        1e3 * moved / speed,
                    ),
                    None => format!(
                        "{hits:.1} % of the routed experts of {} would be there",
                        trace.label
                    ),
                }
            }
        };
        line("cache", &found);
    }
}

/// Prints whether the experts of a model can be streamed, and what that would do.
fn streaming(path: &str, experts_used: &[(u32, u64)], events: &Events) {
    let mut figures = &StreamFigures::default();
    match events.streams(path) {
        Some(Ok(found)) => {
            figures = found;
            line("streaming", "works in this program");
        }
        // What it would do is of no use.
        Some(Err(obstacle)) => return line("streaming", &format!("does not work: {obstacle}")),
        None => line("streaming", UNKNOWN_YET),
    }
    match stream::describe(&text::path_of(path), experts_used, figures) {
        Ok(lines) => lines.iter().for_each(|(what, found)| line(what, found)),
        Err(error) => line("sizes", &format!("cannot read the model: {error:#}")),
    }
}

fn line(what: &str, found: &str) {
    println!("{what:11} {}", text::line(found));
}
