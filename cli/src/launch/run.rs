//! `llama-sidecar run`: a command with the drop-in, and a summary of its work.

use std::collections::BTreeMap;
use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus};

use anyhow::{Context, Result, bail, ensure};
use clap::builder::{OsStringValueParser, TypedValueParser, ValueParser};
use clap::{Arg, ArgAction, ArgMatches, CommandFactory, FromArgMatches, Parser};
use sidecar_core::config::{
    CAPABILITIES, CacheSize, Config, ExpertStream, Kind, VARIABLES, Variable,
};
use sidecar_core::protocol::{Event, NoEffect};
use sidecar_core::{summary, text, trace};

use crate::control::{self, sockets};
use crate::help;
use crate::launch::child::{self, Group, NoThread};
use crate::launch::crashes::Start;
use crate::launch::executable::{Executable, is_ours, ld_preload, preload_library};
use crate::launch::journal::{Events, JOURNAL, Journal};
use crate::launch::limit::MemoryLimit;
use crate::launch::{gains, own_cache, proof};
use crate::sizes::{microseconds, number_and_unit, size};
use crate::temporary::Temporary;
use crate::words::{quoted, quoted_words};

/// A command and the settings of the drop-in in it.
#[derive(clap::Args)]
pub struct RunOptions {
    #[command(flatten)]
    settings: Settings,
    /// Set a variable, also one without an option of its own.
    #[arg(long, value_name = "NAME=VALUE", value_parser = OsStringValueParser::new().try_map(setting))]
    set: Vec<Setting>,
    /// Run with this much memory, for example 4G.
    ///
    /// As on a smaller machine: the program runs in a control group of its own, without swap space. What it reads into the page cache counts, too;
    /// pages that other programs have read already do not.
    #[arg(long, value_name = "SIZE", value_parser = size)]
    memory_limit: Option<u64>,
    /// Set overlays and masks from 'status --save'.
    ///
    /// Before the first evaluation; also when the program loads a model again. Tensors that were quantised are quantised again. If a file has other bytes
    /// since, the profile is refused as a whole.
    #[arg(long, value_name = "FILE")]
    profile: Option<PathBuf>,
    /// Print the variables and the command, and do not run it.
    #[arg(long)]
    dry_run: bool,
    /// Turn nothing on that no option or variable turns on.
    #[arg(long)]
    none: bool,
    /// Print no summary at the end.
    #[arg(short, long)]
    quiet: bool,
    /// The program and its arguments; `--` before them is optional.
    #[arg(required = true, trailing_var_arg = true)]
    command: Vec<OsString>,
}

/// What to do where nothing that is on by default has an effect.
const COMPARE: &str =
    "'llama-sidecar compare -- COMMAND' measures what else makes the program faster";

/// The variable for experts from disk.
const STREAM: &str = "LLAMA_EXPERT_STREAM";

/// The variable for the socket of a program of which nothing is on but streaming where it is needed.
const STREAM_SOCKET: &str = "LLAMA_SIDECAR_STREAM_SOCKET";

/// The variable for the control socket.
const CONTROL: &str = "LLAMA_SIDECAR_CONTROL";

/// A variable and its value.
type Setting = (&'static str, OsString);

/// The flags that set a variable each, from the table of variables.
#[derive(Default)]
struct Settings(Vec<Setting>);

/// The flags that `run -h` shows, with their help there. `--help` has all of them, with the help of their variables.
const FIRST: [(&str, &str); 9] = [
    ("hotswap", "Let tensors be replaced in the running program"),
    ("expert-masks", "Let experts be masked on request"),
    (
        "expert-trace-stats",
        "Count expert use, for a summary at the end",
    ),
    (
        "expert-trace-output",
        "Count expert use, and write JSON or CSV",
    ),
    (
        "stream-experts",
        "Read experts from disk when they are known",
    ),
    ("stream-memory", "Memory for experts from disk: 800M, 5G"),
    ("post-fetch", "Copy experts to a GPU when they are known"),
    ("expert-cache", "Keep recently used experts on a GPU"),
    ("socket", "Control socket; by default commands find it"),
];

/// Returns the capability that a variable belongs to, as a heading of the help.
fn capability(variable: &str) -> &'static str {
    let begins = |with: &[&str]| with.iter().any(|start| variable.starts_with(start));
    match variable {
        "LLAMA_EXPERT_MASKS" | "LLAMA_SIDECAR_ROUNDS" | "LLAMA_SIDECAR_MEMORY_MB" => {
            "Hot-swap, masks and rounds"
        }
        _ if begins(&["LLAMA_HOTSWAP", "LLAMA_SIDECAR_HOTSWAP"]) => "Hot-swap, masks and rounds",
        _ if begins(&["LLAMA_EXPERT_TRACE"]) => "Expert trace",
        _ if begins(&["LLAMA_EXPERT_STREAM"]) => "Experts from disk",
        _ if begins(&["LLAMA_POSTFETCH", "LLAMA_SIDECAR_PAGE_LOCK"]) => "Experts on a GPU",
        _ => "Control and log",
    }
}

/// Returns the variables that have a flag.
fn flags() -> impl Iterator<Item = (&'static str, &'static Variable)> {
    VARIABLES.iter().filter_map(|of| Some((of.flag?, of)))
}

fn argument(flag: &'static str, variable: &'static Variable) -> Arg {
    let help = without_links(variable.help.trim_start_matches("drop-in: ")).replace('`', "'");
    let (first, rest) = help.split_at(1);
    let help = format!("{}{rest} ({})", first.to_uppercase(), variable.name);
    let first = FIRST.iter().find(|(name, _)| *name == flag);
    let argument = Arg::new(flag)
        .long(flag)
        .help(first.map_or(help.clone(), |(_, short)| (*short).into()))
        .long_help(help)
        .hide_short_help(first.is_none())
        .help_heading(capability(variable.name));
    let argument = match flag {
        "socket" => argument.short('s'),
        _ => argument,
    };
    let value = |name: &'static str| argument.clone().value_name(name);
    match variable.kind {
        Kind::Switch => argument.action(ArgAction::SetTrue),
        Kind::Path if flag == "socket" => value("SOCKET").value_parser(ValueParser::os_string()),
        Kind::Path => value("PATH").value_parser(ValueParser::os_string()),
        Kind::Choice { values, bare_flag } => value("WHEN")
            .num_args(0..=1)
            .require_equals(true)
            .default_missing_value(bare_flag)
            .value_parser(values.to_vec()),
        Kind::Memory => value("SIZE")
            .num_args(0..=1)
            .require_equals(true)
            .default_missing_value("auto")
            .value_parser(move |text: &str| checked(variable, text)),
        Kind::Level => value("LEVEL").value_parser(["off", "error", "warn", "info", "debug"]),
        Kind::Number { .. } | Kind::Text(_) => {
            let name = match unit_of(variable) {
                MIB => "SIZE",
                unit if microseconds(unit).is_some() => "TIME",
                _ => "N",
            };
            value(name).value_parser(move |text: &str| checked(variable, text))
        }
    }
}

/// Returns Markdown with the texts of its links alone.
fn without_links(markdown: &str) -> String {
    let mut text = String::new();
    let mut rest = markdown;
    while let Some((before, link)) = rest.split_once('[')
        && let Some((words, target)) = link.split_once("](")
        && let Some((_, after)) = target.split_once(')')
    {
        text += before;
        text += words;
        rest = after;
    }
    text + rest
}

/// The unit of sizes in the table of variables.
const MIB: &str = "MiB";

/// Returns the unit of a variable, which is empty for what has none.
fn unit_of(variable: &Variable) -> &'static str {
    match variable.kind {
        Kind::Memory => MIB,
        Kind::Number { unit, .. } => unit,
        _ => "",
    }
}

/// Returns a value that the variable accepts. Sizes and times have their unit, or that of the variable.
fn checked(variable: &Variable, text: &str) -> Result<String, String> {
    let (number, unit) = number_and_unit(text);
    let of = unit_of(variable);
    let in_unit = match of {
        _ if number.is_empty() || unit.is_empty() => None,
        MIB => Some(size(text)? as f64 / 1048576.0),
        of => microseconds(of).and_then(|of| {
            let number: f64 = number.parse().ok()?;
            Some(number * microseconds(unit)? / of)
        }),
    };
    let value = match in_unit {
        Some(value) if value.fract() != 0.0 => {
            return Err(format!("expected a whole number of {of}, found {value}"));
        }
        Some(value) => value.to_string(),
        None => text.to_owned(),
    };
    variable.check(OsStr::new(&value))?;
    Ok(value)
}

impl clap::Args for Settings {
    fn augment_args(command: clap::Command) -> clap::Command {
        command.args(flags().map(|(flag, variable)| argument(flag, variable)))
    }

    fn augment_args_for_update(command: clap::Command) -> clap::Command {
        Settings::augment_args(command)
    }
}

impl FromArgMatches for Settings {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Settings, clap::Error> {
        let set = flags().filter_map(|(flag, variable)| {
            let value = match variable.kind {
                Kind::Switch => matches.get_flag(flag).then(|| "1".into()),
                Kind::Path => matches.get_one::<OsString>(flag).cloned(),
                _ => matches.get_one::<String>(flag).map(OsString::from),
            };
            Some((variable.name, value?))
        });
        Ok(Settings(set.collect()))
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), clap::Error> {
        *self = Settings::from_arg_matches(matches)?;
        Ok(())
    }
}

/// A command that is to run with the drop-in.
pub struct Prepared {
    pub config: Config,
    words: Vec<OsString>,
    variables: Vec<Setting>,
    preload: PathBuf,
}

/// The options of `run`, and a command.
#[derive(Parser)]
struct CommandLine {
    #[command(flatten)]
    options: RunOptions,
}

impl RunOptions {
    /// Returns the options that `run` has with some flags for a command.
    pub fn with(flags: &[impl AsRef<OsStr>], command: &[OsString]) -> Result<RunOptions> {
        let words = ["run", "--quiet"].map(OsString::from).into_iter();
        let words = words.chain(flags.iter().map(OsString::from));
        let words = words.chain(["--".into()]).chain(command.iter().cloned());
        let mut options = help::parsed::<CommandLine>(words)?.options;
        // What is measured has these flags alone.
        options.none = true;
        ensure!(
            options.command == command
                && !options.dry_run
                && options.memory_limit.is_none()
                && options.profile.is_none(),
            "expected options of 'run' for a program that runs, found '{}'",
            quoted_words(flags)
        );
        Ok(options)
    }

    /// Returns the profile that is named.
    pub fn profile(&self) -> Option<&Path> {
        self.profile.as_deref()
    }

    /// Whether nothing is run.
    pub fn is_dry(&self) -> bool {
        self.dry_run
    }

    /// Returns the first word of the command.
    pub fn program_word(&self) -> &OsStr {
        &self.command[0]
    }

    /// Sets the variables for a profile whose tensors need no quantising.
    pub fn use_profile(&mut self, path: &Path, overlays: bool, masks: bool) {
        let switches = [
            ("LLAMA_SIDECAR_HOTSWAP", overlays),
            ("LLAMA_EXPERT_MASKS", masks),
        ];
        let on = switches.into_iter().filter(|(_, is_on)| *is_on);
        let set = &mut self.settings.0;
        set.extend(on.map(|(name, _)| (name, "1".into())));
        set.push(("LLAMA_SIDECAR_PROFILE", path.into()));
    }
}

impl Prepared {
    /// Applies the options to the command.
    pub fn new(options: &RunOptions) -> Result<Prepared> {
        let preload = preload_library()?;
        let mut variables = variables(options, &preload);
        let mut command = options.command.clone();
        // The settings as the program has them.
        let config = Config::parse(|name| value_of(&variables, name));
        let cache = config.program_postfetch.cache;
        if cache.is_some() {
            variables.push((own_cache::VARIABLE, "0".into()));
        }
        if let Some(mib) = cache.and_then(|_| own_cache::remove(&mut command)) {
            if cache == Some(CacheSize::Auto) {
                variables.push(("LLAMA_POSTFETCH_CACHE_MB", mib.to_string().into()));
            }
            if !options.quiet {
                eprintln!(
                    "llama-sidecar: the program runs without its own expert cache of {mib} MiB: --expert-cache works in its place"
                );
            }
        }
        Ok(Prepared {
            config,
            words: command,
            variables,
            preload,
        })
    }

    /// Fails if something that the options name cannot be used: before the program starts.
    pub fn check(&self) -> Result<()> {
        let config = &self.config;
        ensure!(
            config.expert_stream_prefer.is_none() || config.preference().is_some(),
            "{} was not started: --stream-prefer changes results: also pass --accept-changed-results, after 'llama-sidecar ctl margins' has measured by how much",
            text::path(Path::new(&self.words[0]))
        );
        if let Some(sentence) = config.unwritable().into_iter().next() {
            bail!("{sentence}");
        }
        match &config.control {
            Some(socket) => control::check_unused(&socket.now()),
            None => Ok(()),
        }
    }

    /// Fails as [`Prepared::check`] does, and if a trace cannot be read: `run` starts a program without it, but what is
    /// measured without it is not what was requested.
    pub fn check_measured(&self) -> Result<()> {
        let cache = &self.config.program_postfetch.cache_trace;
        let stream = &self.config.expert_stream_trace;
        for path in [cache, stream].into_iter().flatten() {
            trace::read(path).context("write a trace with --expert-trace-output trace.json")?;
        }
        self.check()
    }

    /// Finds the program.
    pub fn program(&self) -> Result<Executable> {
        Executable::find(&self.words[0])
    }

    /// Returns the command, which writes events to the journal, if there is one.
    pub fn command(&self, program: &Executable, journal: Option<&Journal>) -> Command {
        let mut command = Command::new(&program.path);
        command
            .args(&self.words[1..])
            .envs(self.variables.iter().map(|(name, value)| (name, value)))
            .envs(journal.map(|journal| (JOURNAL, journal.path())));
        command
    }

    /// Returns what is kept of this start if a fault ends the program.
    fn start(&self, program: &Executable) -> Start {
        let words = self.words.iter().skip(1).map(|word| word.to_string_lossy());
        let path = text::path(&program.path);
        let variable = |(name, value): &Setting| format!("{name}={}", quoted(value));
        Start::new(
            std::iter::once(path)
                .chain(words.map(|word| word.into_owned()))
                .collect(),
            self.variables.iter().map(variable).collect(),
        )
    }

    /// Returns why the drop-in cannot be loaded into the program.
    pub fn obstacle(&self, program: &Executable) -> Option<String> {
        program.obstacle(&self.preload)
    }

    /// Returns the lines of the summary.
    pub fn summary(
        &self,
        program: &Executable,
        events: &Events,
        status: ExitStatus,
    ) -> Vec<String> {
        if !self.config.is_used() {
            if is_ours(&self.words[0]) {
                return Vec::new();
            }
            return vec![format!(
                "nothing enabled: leave out --none, or pass {CAPABILITIES}"
            )];
        }
        let obstacle = self.obstacle(program);
        let obstacle = obstacle.or_else(|| events.obstacle(Some(status)));
        match obstacle {
            Some(obstacle) => {
                let misplaced = misplaced(&self.words).filter(|_| !status.success());
                let lines = [format!("the drop-in did nothing: {obstacle}")].into_iter();
                lines.chain(misplaced).collect()
            }
            None => summary(&self.config, events, status),
        }
    }
}

/// Runs the command, prints a summary of the drop-in's work, and ends as the command ended.
/// Returns only if the command cannot be run. `held` is dropped when the command has ended.
pub fn run(options: &RunOptions, held: Option<Temporary>) -> Result<()> {
    let prepared = Prepared::new(options)?;
    if options.dry_run {
        for (name, value) in &prepared.variables {
            println!("export {name}={}", quoted(value));
        }
        println!("{}", quoted_words(&prepared.words));
        if let Some(bytes) = options.memory_limit {
            println!("# in a control group with a limit of {bytes} bytes");
        }
        return Ok(());
    }
    let program = prepared.program()?;
    let config = &prepared.config;
    prepared.check()?;
    let journal = match proof::failure(&prepared.preload) {
        Some(failure) => {
            eprintln!(
                "llama-sidecar: {} runs without the drop-in: {failure}",
                text::path(&program.path)
            );
            None
        }
        None => Some(journal(options.quiet)),
    };
    let start = (journal.is_some() && config.is_used()).then(|| prepared.start(&program));
    let earlier = start.as_ref().and_then(Start::earlier_crash);
    if let Some(sentence) = earlier.filter(|_| !options.quiet) {
        eprintln!("llama-sidecar: {sentence}");
    }
    let limit = options.memory_limit.map(MemoryLimit::new).transpose()?;
    let is_loadable = journal.is_some();
    let command = |journal: Option<&Journal>| -> Result<Command> {
        let mut command = match is_loadable {
            true => prepared.command(&program, journal),
            false => {
                let mut command = Command::new(&program.path);
                command.args(&options.command[1..]);
                command
            }
        };
        if let Some(limit) = &limit {
            limit.apply(&mut command)?;
        }
        Ok(command)
    };
    let journal = journal.flatten();
    let spawned = child::spawn(&mut command(journal.as_ref())?, Group::Shared);
    if let Some(error) = spawned.as_ref().err().filter(|of| of.is::<NoThread>()) {
        eprintln!("llama-sidecar: there will be no summary: {error:#}");
        drop(journal);
        return Err(child::replace(command(None)?));
    }
    let mut child = spawned.with_context(|| {
        let obstacle = prepared.obstacle(&program);
        obstacle.unwrap_or_else(|| format!("cannot run {}", text::path(&program.path)))
    })?;
    let status = child::wait(&mut child)?;
    let events = journal.as_ref().map(Journal::read);
    if let Some(start) = start {
        let models = events.as_ref().map(Events::models).unwrap_or_default();
        start.end(status, models.into_iter().map(str::to_owned).collect());
    }
    if let Some(events) = events.filter(|_| !options.quiet) {
        let lines = prepared.summary(&program, &events, status);
        for line in lines.iter().chain(&config.without_effect) {
            eprintln!("llama-sidecar: {line}");
        }
    }
    // The process ends below without running destructors.
    drop((journal, limit, held));
    child::end_like(status)
}

/// Makes a journal. A program runs without one, too.
fn journal(quiet: bool) -> Option<Journal> {
    let made = Journal::new();
    if let Some(error) = made.as_ref().err().filter(|_| !quiet) {
        eprintln!("llama-sidecar: there will be no summary: {error:#}");
    }
    made.ok()
}

/// Returns the lines about what the drop-in did.
fn summary(config: &Config, events: &Events, status: ExitStatus) -> Vec<String> {
    let models = events.models().join(", ");
    let mut total = Totals::default();
    let mut failures = Vec::new();
    // A trace may be written many times; the last result counts.
    let mut traces = BTreeMap::new();
    let mut routes = BTreeMap::new();
    let mut streamed = Vec::new();
    let mut fetched = Vec::new();
    for event in events.iter() {
        match event {
            Event::Stream { figures, .. } if figures.layers > 0 => {
                streamed.extend(summary::streaming(figures));
            }
            Event::PostFetch { figures } if !figures.is_empty() => {
                fetched.push(format!("post-fetch: {}", summary::post_fetch(figures)));
            }
            Event::Reload {
                swapped,
                returned,
                refused,
                failure,
                ..
            } => {
                total.reloads += 1;
                total.swapped += swapped;
                total.returned += returned;
                total.refused += refused;
                failures.extend(
                    failure
                        .as_ref()
                        .map(|why| format!("a reload failed: {why}")),
                );
            }
            Event::Trace { path, error } => {
                traces.insert(path, error);
            }
            Event::StreamStart {
                path,
                obstacle: Some(obstacle),
                ..
            } if config.expert_stream == ExpertStream::Needed => {
                streamed.push(format!("{path}: {obstacle}; {COMPARE}"));
            }
            Event::Routes {
                path,
                tokens,
                dropped,
                error,
            } => {
                let failed = error.as_ref().map(|error| format!(": {error}"));
                let line = format!(
                    "routes of {tokens} tokens written to {path}, {dropped} tokens dropped{}",
                    failed.unwrap_or_default()
                );
                routes.insert(path, line);
            }
            Event::End {
                evaluations,
                longest_pause_us,
                ..
            } => {
                total.ends += 1;
                total.evaluations += evaluations;
                total.longest_pause_us = total.longest_pause_us.max(*longest_pause_us);
            }
            _ => {}
        }
    }
    let mut lines = vec![match total.ends {
        0 => {
            format!("{models}: the process ended before it could count its evaluations ({status})")
        }
        _ if !config.hotswap => format!("{} evaluations of {models}", total.evaluations),
        _ => format!(
            "{} evaluations of {models}; reloads: {}, with {} tensors swapped, {} returned, {} refused; {} tensors differ from the loaded model at the end; longest pause {} us",
            total.evaluations,
            total.reloads,
            total.swapped,
            total.returned,
            total.refused,
            events.differing(),
            total.longest_pause_us,
        ),
    }];
    lines.extend(failures);
    lines.extend(streamed);
    lines.extend(fetched);
    lines.extend(routes.into_values());
    lines.extend(traces.into_iter().map(|(path, error)| match error {
        None => format!("trace written to {path}; run 'llama-sidecar report {path}' to see it"),
        Some(error) => format!("cannot write the trace to {path}: {error}"),
    }));
    // Another process of the command may have counted experts.
    let counted = events.iter().any(|event| {
        matches!(
            event,
            Event::Model {
                expert_layers: 1..,
                ..
            }
        )
    });
    // Last, because the figures above are wrong or missing then.
    for (found, models) in events.no_effect_by_process() {
        if counted && found.sentence == NoEffect::NO_EXPERTS {
            continue;
        }
        let of = models.map(|models| format!(" (in the process of {models})"));
        let line = summary::no_effect(found) + &of.unwrap_or_default();
        if !lines.contains(&line) {
            lines.push(line);
        }
    }
    lines
}

/// Sums over the processes of a command.
#[derive(Default)]
struct Totals {
    reloads: u64,
    swapped: u64,
    returned: u64,
    refused: u64,
    ends: u64,
    evaluations: u64,
    longest_pause_us: u64,
}

/// Returns the value of a variable in the command: the last one that is set, as in its environment.
fn value_of(set: &[Setting], name: &str) -> Option<OsString> {
    let set = set.iter().rfind(|(variable, _)| *variable == name);
    set.map(|(_, value)| value.clone())
        .or_else(|| std::env::var_os(name))
}

/// Returns the variables of the command.
fn variables(options: &RunOptions, preload: &Path) -> Vec<Setting> {
    let mut all = vec![("LD_PRELOAD", ld_preload(preload))];
    all.extend(options.settings.0.iter().cloned());
    all.extend(options.set.iter().cloned());
    let parse = |all: &[Setting]| Config::parse(|name| value_of(all, name));
    if !options.none && !is_ours(&options.command[0]) && value_of(&all, STREAM).is_none() {
        let config = parse(&all);
        if !config.is_used() {
            all.extend(defaults(options));
        } else if !config.program_postfetch.is_used() {
            // A model that fits into memory is loaded and evaluated as without it. Pages that are locked are not streamed.
            all.push((STREAM, "needed".into()));
        }
    }
    let config = parse(&all);
    let is_controlled = config.hotswap
        || config.traces()
        || config.rounds
        || config.expert_masks
        || matches!(config.expert_stream, ExpertStream::Auto | ExpertStream::On);
    if (is_controlled || config.expert_stream.streams())
        && value_of(&all, CONTROL).is_none()
        && let Some(socket) = sockets::path_for(Path::new(&options.command[0]))
    {
        let name = match is_controlled {
            true => CONTROL,
            false => STREAM_SOCKET,
        };
        all.push((name, socket.into()));
    }
    if config.program_postfetch.page_lock {
        // Without it, ggml's CUDA backend refuses to lock memory.
        all.push(("GGML_CUDA_REGISTER_HOST", "1".into()));
    }
    all
}

/// Returns a line about the first option of `run` among those of the program.
fn misplaced(words: &[OsString]) -> Option<String> {
    let ours = CommandLine::command();
    let name = |word: &OsString| {
        let name = word.to_str()?.strip_prefix("--")?;
        Some(name.split_once('=').map_or(name, |of| of.0).to_owned())
    };
    let mut names = words[1..].iter().filter_map(name);
    let name = names.find(|name| ours.get_opts().any(|of| of.get_long() == Some(name)))?;
    Some(format!(
        "--{name} is an option of 'run' as well: put it before the program"
    ))
}

/// Returns what is on where no option or variable turns anything on: what a comparison of the command has
/// shown to make it faster, or what cannot harm.
fn defaults(options: &RunOptions) -> Vec<Setting> {
    let gain = gains::of(&options.command);
    let of_gain =
        gain.and_then(|gain| Some((RunOptions::with(&gain.flags, &options.command).ok()?, gain)));
    match of_gain {
        Some((with, gain)) => {
            if !options.quiet {
                eprintln!(
                    "llama-sidecar: {} is on: a comparison of this command has shown it to be {:.2} times as fast; --none turns it off",
                    gain.flags.join(" "),
                    gain.faster
                );
            }
            [with.settings.0, with.set].concat()
        }
        // A model that fits into memory is loaded and evaluated as without it.
        None => vec![(STREAM, "needed".into())],
    }
}

/// Parses a variable and its value.
fn setting(word: OsString) -> Result<Setting, String> {
    let bytes = word.as_bytes();
    let end = bytes.iter().position(|&byte| byte == b'=');
    let end = end.ok_or("expected NAME=VALUE, as in LLAMA_HOTSWAP_CHECK=0")?;
    let (name, value) = (&bytes[..end], OsStr::from_bytes(&bytes[end + 1..]));
    let mut variables = VARIABLES.iter();
    let variable = variables.find(|variable| variable.name.as_bytes() == name);
    let variable = variable.ok_or_else(|| {
        let names: Vec<&str> = VARIABLES.iter().map(|variable| variable.name).collect();
        format!("expected one of {} before '='", names.join(", "))
    })?;
    if variable.name == JOURNAL {
        return Err("'run' sets it to a file of its own, for its summary: without 'run', set LD_PRELOAD and the variable yourself".into());
    }
    variable.check(value)?;
    Ok((variable.name, value.to_owned()))
}

#[cfg(test)]
mod tests {
    use sidecar_core::protocol::Entry;

    use super::*;

    fn model(path: &str, expert_layers: usize) -> Event {
        Event::Model {
            path: path.into(),
            files: 1,
            tensors: 1,
            expert_layers,
            predicting: None,
            experts_used: Vec::new(),
        }
    }

    #[test]
    fn sizes_and_times_have_a_unit() {
        let set = |flag: &str, text: &str| {
            let variable = flags().find(|(name, _)| *name == flag).expect("a flag").1;
            checked(variable, text)
        };
        for (flag, text, value) in [
            ("stream-memory", "800M", "800"),
            ("stream-memory", "1.5G", "1536"),
            ("stream-memory", "7", "7"),
            ("expert-cache", "6G", "6144"),
            ("expert-cache", "auto", "auto"),
            ("poll-ms", "2s", "2000"),
            ("poll-ms", "0.5s", "500"),
            ("expert-trace-every-s", "5m", "300"),
            ("expert-trace-every-s", "9", "9"),
        ] {
            assert_eq!(set(flag, text).as_deref(), Ok(value), "{flag} {text}");
        }
        let refused = |flag, text| set(flag, text).expect_err("refused");
        assert!(refused("stream-memory", "1K").contains("a whole number of MiB"));
        assert!(refused("stream-memory", "8X").contains("a size such as"));
        assert!(refused("expert-trace-every-s", "5ms").contains("a whole number of seconds"));
        assert!(refused("poll-ms", "2x").contains("milliseconds"));
    }

    #[test]
    fn a_dense_model_beside_a_mixture_has_nothing_to_count() {
        let found = NoEffect {
            requested: NoEffect::TRACE.into(),
            sentence: NoEffect::NO_EXPERTS.into(),
            so_far: false,
        };
        let nothing = Event::NoEffect { found };
        let config = Config::parse(|_| None);
        let last =
            |events: &[Event]| summary(&config, &Events::of(events), ExitStatus::default()).pop();
        let alone = last(&[model("model", 0), nothing.clone()]).expect("a line");
        assert!(alone.contains("nothing was counted"), "{alone}");
        let beside = last(&[model("model", 0), nothing, model("model", 2)]).expect("a line");
        assert!(!beside.contains("nothing was counted"), "{beside}");
    }

    #[test]
    fn what_has_no_effect_in_one_of_two_processes_names_its_model() {
        let of = |pid, path: &str| {
            let found = NoEffect {
                requested: NoEffect::HOT_SWAP.into(),
                sentence: format!("nothing was swapped in {pid}"),
                so_far: true,
            };
            let noted = Event::NoEffect { found };
            [model(path, 0), noted].map(|event| Entry { pid, event })
        };
        let lines = |entries: Vec<Entry>| {
            let config = Config::parse(|_| None);
            let lines = summary(&config, &Events::from(entries), ExitStatus::default());
            lines[1..].join("; ")
        };
        let (one, two) = (of(1, "one"), of(2, "two"));
        assert_eq!(lines(one.to_vec()), "warning: nothing was swapped in 1");
        assert_eq!(
            lines([one, two].concat()),
            "warning: nothing was swapped in 1 (in the process of one); \
             warning: nothing was swapped in 2 (in the process of two)"
        );
    }

    #[test]
    fn a_variable_that_run_sets_itself_is_refused_by_name() {
        let reason = setting("LLAMA_SIDECAR_JOURNAL=/tmp/journal".into()).expect_err("a refusal");
        assert!(reason.starts_with("'run' sets it"), "{reason}");
        assert!(setting("LLAMA_HOTSWAP_CHECK=0".into()).is_ok());
    }
}
