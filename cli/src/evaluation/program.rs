//! llama-perplexity: once for the base logits, and as a process that evaluates again and again.

use std::ffi::{OsStr, OsString};
use std::fs::{self, File};
use std::io::{Read, Seek, SeekFrom};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, anyhow, bail, ensure};
use rustix::process::{Signal, set_parent_process_death_signal};
use serde::de::DeserializeOwned;
use sidecar_core::descriptors::processors;
use sidecar_core::files::{self, Replace};
use sidecar_core::protocol::{LayerMask, Overlay, Reply, Request, Round, Status, StreamFigures};
use sidecar_core::text;

use super::base::{self, Base, TOO_SHORT};
use super::statistics::{self, Statistics};
use crate::control::{self, Limit, sockets};
use crate::inherited;
use crate::interruption;
use crate::launch::executable::{Executable, ld_preload, preload_library};
use crate::launch::journal::{JOURNAL, Journal};
use crate::output::progress;
use crate::temporary::Temporary;

/// Variables of a program that masks experts.
pub const MASKS: [(&str, &str); 1] = [("LLAMA_EXPERT_MASKS", "1")];
/// No further variables.
pub const NO_VARIABLES: [(&str, &str); 0] = [];
/// Divergences that are smaller are those of rounded base logits.
const LEAST: f64 = 2e-6;
/// The program that evaluates, unless the user names another one.
const PERPLEXITY: &str = "llama-perplexity";
/// Tokens of a chunk of [`TRIAL`].
const TRIAL_CONTEXT: &str = "32";
/// A text for a model that is tried, which is repeated.
const TRIAL: &str = "The quick brown fox jumps over the lazy dog, and then it sleeps.\n";
/// What the program prints before the perplexity of a text.
const PERPLEXITY_OF_TEXT: &str = "Final estimate: PPL = ";
/// The most characters of a line of a log in a message.
const LONGEST_LINE: usize = 200;
/// The name of the socket in its folder.
const SOCKET: &str = "socket";

/// How a text is evaluated.
#[derive(clap::Args)]
pub struct EvaluationOptions {
    /// Tokens of a chunk of the text; with base logits, those of their chunks.
    #[arg(long, value_name = "N", default_value_t = 512, hide_short_help = true, value_parser = clap::value_parser!(u32).range(16..))]
    ctx: u32,
    /// Number of chunks to evaluate; by default all, and 4 for 'ctl margins'.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub chunks: Option<u32>,
    /// Threads that quantise and evaluate; as many as there are processors by default.
    #[arg(long, value_name = "N", hide_short_help = true, value_parser = clap::value_parser!(u32).range(1..=1024))]
    threads: Option<u32>,
    /// The program that evaluates.
    #[arg(long, value_name = "PROGRAM", default_value = PERPLEXITY, hide_short_help = true)]
    program: OsString,
    /// Further arguments of the program, after `--`.
    #[arg(last = true)]
    arguments: Vec<String>,
}

impl EvaluationOptions {
    /// Returns them as the last options of another command.
    pub fn words(&self) -> Vec<OsString> {
        let mut words: Vec<OsString> = vec!["--ctx".into(), self.ctx.to_string().into()];
        words.extend(["--program".into(), self.program.clone()]);
        for (name, number) in [("--chunks", self.chunks), ("--threads", self.threads)] {
            words.extend(
                number
                    .into_iter()
                    .flat_map(|of| [name.into(), of.to_string().into()]),
            );
        }
        words.push("--".into());
        words.extend(self.arguments.iter().map(OsString::from));
        words
    }

    /// Returns whether the program that evaluates is the default one.
    pub fn is_default(&self) -> bool {
        self.program == PERPLEXITY
    }

    /// Returns the program, with tokens of a chunk in place of those of the options.
    pub fn program(&self, context: Option<u32>) -> Result<Program> {
        let of_model = |word: &&String| ["-m", "--model"].contains(&word.as_str());
        if let Some(word) = self.arguments.iter().find(of_model) {
            bail!("'{word}' after -- names another model: the command has one already");
        }
        Ok(Program {
            executable: Executable::find(&self.program)
                .context("pass the path of llama.cpp's llama-perplexity with --program")?,
            context: context.unwrap_or(self.ctx),
            threads: self
                .threads
                .map_or_else(processors, |threads| threads as usize),
            arguments: self.arguments.clone(),
            variables: Vec::new(),
        })
    }
}

/// How a program evaluates.
pub struct Program {
    pub executable: Executable,
    /// Tokens of a chunk.
    pub context: u32,
    pub threads: usize,
    /// Further arguments.
    pub arguments: Vec<String>,
    /// Variables of the drop-in in all evaluations. Without any, the base logits are made without it.
    pub variables: Vec<(&'static str, String)>,
}

/// A running program. It ends when this is dropped, and when this process ends.
pub struct Running {
    child: Child,
    log: PathBuf,
    /// The size of the log before the evaluation.
    read: u64,
    /// The divergence of each chunk in the last evaluation.
    chunks: Vec<f64>,
    socket: PathBuf,
    _folder: Temporary,
}

impl Program {
    fn command(&self, model: &Path, log: &File) -> Result<Command> {
        let mut command = Command::new(&self.executable.path);
        command
            .arg("--model")
            .arg(model)
            .args(["--ctx-size", &self.context.to_string()])
            .args(["--threads", &self.threads.to_string()])
            .args(&self.arguments)
            // The keys of a terminal are for this process, which ends the program.
            .process_group(0)
            .stdin(Stdio::null())
            .stdout(log.try_clone()?)
            .stderr(log.try_clone()?);
        inherited::restore_in(&mut command);
        // SAFETY: one system call between fork and exec.
        unsafe {
            command.pre_exec(|| Ok(set_parent_process_death_signal(Some(Signal::KILL))?));
        }
        Ok(command)
    }

    /// Fails if one of the texts cannot be evaluated, if the drop-in is not there or cannot be loaded into the program, or if
    /// no socket can be made.
    pub fn check(&self, texts: &[&Path]) -> Result<()> {
        for text in texts {
            self.check_text(text)
                .with_context(|| format!("cannot use the text {}", text::path(text)))?;
        }
        self.drop_in()?;
        socket_folder().map(drop)
    }

    /// Fails if a text cannot be evaluated. A token has at least one byte.
    fn check_text(&self, text: &Path) -> Result<()> {
        let found = files::open(text)?.metadata()?;
        ensure!(
            found.is_file(),
            "it is not a regular file, and more than one process reads it"
        );
        ensure!(found.len() >= 2 * u64::from(self.context), "{TOO_SHORT}");
        Ok(())
    }

    /// Returns the path of the drop-in. Fails if it cannot be loaded into the program.
    fn drop_in(&self) -> Result<PathBuf> {
        let preload = preload_library()?;
        match self.executable.obstacle(&preload) {
            Some(obstacle) => bail!("{obstacle}"),
            None => Ok(preload),
        }
    }

    /// Returns a value of `--flash-attn` that differs from that of the arguments or of the environment; the last one counts.
    /// Without one, llama.cpp uses flash attention where it can.
    pub fn other_flash_attention(&self) -> &'static str {
        let names = ["-fa", "--flash-attn"];
        let mut pairs = self.arguments.windows(2);
        let set = pairs.rfind(|pair| names.contains(&&*pair[0]));
        let set = set.map(|pair| pair[1].clone());
        let set = set.or_else(|| std::env::var("LLAMA_ARG_FLASH_ATTN").ok());
        let is_off = |set: String| ["off", "disabled", "false", "0"].contains(&&*set);
        match set.is_some_and(is_off) {
            true => "on",
            false => "off",
        }
    }

    /// Writes base logits, and returns their sizes.
    pub fn write_base(
        &self,
        model: &Path,
        text: &Path,
        chunks: Option<u32>,
        base: &Path,
        log: &Path,
    ) -> Result<Base> {
        let mut command = self.command(model, &new_log(log)?)?;
        command.arg("--file").arg(text);
        if let Some(chunks) = chunks {
            command.args(["--chunks", &chunks.to_string()]);
        }
        command.arg("--kl-divergence-base").arg(base);
        if !self.variables.is_empty() {
            self.load_drop_in(&mut command)?;
        }
        let mut child = command.spawn()?;
        interruption::follow(&child);
        let status = child.wait()?;
        interruption::end_left();
        ensure!(
            status.success(),
            "{} made no base logits ({status}): {}",
            text::path(&self.executable.path),
            last_lines(log)
        );
        // The reason comes first.
        Base::read_complete(base).map_err(|error| anyhow!("{error:#}; {}", last_lines(log)))
    }

    /// Fails if a text has too few tokens for this model.
    pub fn try_text(&self, model: &Path, text: &Path) -> Result<()> {
        let folder = Temporary::new().context("cannot create a temporary folder")?;
        let [base, log] = ["base", "log"].map(|name| folder.path().join(name));
        let chunks = base::fewest_chunks(self.context);
        let written = self.write_base(model, text, Some(chunks), &base, &log);
        written
            .map(drop)
            .with_context(|| format!("cannot use the text {}", text::path(text)))
    }

    /// Fails unless the program loads a model and computes numbers with it.
    pub fn try_model(&self, model: &Path) -> Result<()> {
        let folder = Temporary::new().context("cannot create a temporary folder")?;
        let [text, log] = ["text", "log"].map(|name| folder.path().join(name));
        fs::write(&text, TRIAL.repeat(20))?;
        let mut command = self.command(model, &new_log(&log)?)?;
        // The last value counts.
        command.args(["--ctx-size", TRIAL_CONTEXT, "--chunks", "1"]);
        let mut child = command.arg("--file").arg(&text).spawn()?;
        interruption::follow(&child);
        let status = child.wait()?;
        interruption::end_left();
        let printed = String::from_utf8_lossy(&fs::read(&log)?).into_owned();
        let perplexity = printed
            .split(PERPLEXITY_OF_TEXT)
            .nth(1)
            .and_then(|rest| rest.split_whitespace().next()?.parse().ok());
        ensure!(
            status.success() && perplexity.is_some_and(f64::is_finite),
            "{} cannot use the new model ({status}), which was not kept: {}",
            text::path(&self.executable.path),
            last_lines(&log)
        );
        Ok(())
    }

    /// Loads the drop-in into the program.
    fn load_drop_in(&self, command: &mut Command) -> Result<()> {
        let preload = self.drop_in()?;
        let variables = self.variables.iter().map(|(name, value)| (name, value));
        command
            .env("LD_PRELOAD", ld_preload(&preload))
            .envs(variables);
        Ok(())
    }

    /// Evaluates a model once, with further arguments.
    pub fn evaluate(
        &self,
        model: &Path,
        base: &Path,
        log: &Path,
        more: &[&str],
    ) -> Result<Statistics> {
        let mut running = self.start(model, base, log, &NO_VARIABLES, more)?;
        let statistics = running.first()?;
        running.end()?;
        Ok(statistics)
    }

    /// Evaluates a model with the other setting of flash attention: its results differ by rounding alone. Returns what
    /// it was set to, and the statistics; `None` if the program cannot do it.
    pub fn evaluate_rounding(
        &self,
        model: &Path,
        base: &Path,
        log: &Path,
    ) -> Result<Option<(&'static str, Statistics)>> {
        let set = self.other_flash_attention();
        progress(&format!(
            "evaluating it with flash attention {set}: the difference is rounding alone"
        ));
        match self.evaluate(model, base, log, &["--flash-attn", set]) {
            // Also in base logits, numbers are rounded.
            Ok(statistics) if statistics.kld.mean < LEAST => {
                progress(
                    "the size of rounding is not known: the program computes the same with both settings",
                );
                Ok(None)
            }
            Ok(statistics) => Ok(Some((set, statistics))),
            Err(error) if interruption::signal().is_some() => Err(error),
            Err(error) => {
                progress(&format!("the size of rounding is not known: {error:#}"));
                Ok(None)
            }
        }
    }

    /// Starts the program with the drop-in, these variables and further arguments. Its first evaluation begins.
    pub fn start(
        &self,
        model: &Path,
        base: &Path,
        log: &Path,
        variables: &[(&str, impl AsRef<OsStr>)],
        more: &[&str],
    ) -> Result<Running> {
        let folder = socket_folder()?;
        let socket = folder.path().join(SOCKET);
        let journal = Journal::in_folder(folder.path())?;
        let mut command = self.command(model, &new_log(log)?)?;
        self.load_drop_in(&mut command)?;
        command
            .arg("--kl-divergence")
            .arg("--kl-divergence-base")
            .arg(base)
            .args(more)
            .env(JOURNAL, journal.path())
            .env("LLAMA_SIDECAR_CONTROL", &socket)
            .env("LLAMA_SIDECAR_ROUNDS", "1")
            .env_remove("LLAMA_HOTSWAP_CONTROL_FILE")
            .env_remove("LLAMA_HOTSWAP_STATUS_FILE")
            .env("LLAMA_SIDECAR_HOTSWAP", "1")
            .env("LLAMA_HOTSWAP_POLL_MS", "0")
            .envs(variables.iter().map(|(name, value)| (name, value)));
        let mut running = Running {
            child: command.spawn()?,
            log: log.to_owned(),
            read: 0,
            chunks: Vec::new(),
            socket,
            _folder: folder,
        };
        interruption::follow(&running.child);
        // The drop-in listens from its first evaluation on.
        while UnixStream::connect(&running.socket).is_err() {
            if let Some(status) = running.child.try_wait()? {
                let why = journal.read().obstacle(Some(status));
                let why = why.unwrap_or_else(|| format!("the program ended ({status})"));
                bail!("{why}: {}", last_lines(log));
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        Ok(running)
    }
}

impl Running {
    /// Waits for the end of the first evaluation.
    pub fn first(&mut self) -> Result<Statistics> {
        self.round(false)
    }

    /// Puts the tensors of an earlier call back, and uses these.
    pub fn swap(&self, overlays: &[Overlay]) -> Result<()> {
        let reply: Reply = self.ask(&Request::Swap {
            revert: Some(".*".into()),
            overlays: overlays.to_vec(),
        })?;
        ensure!(
            reply.ok,
            "the program did not use the tensors: {}",
            reply.error.as_deref().unwrap_or("see its log")
        );
        Ok(())
    }

    /// Masks experts in place of those of an earlier call.
    pub fn mask(&self, masks: &[LayerMask]) -> Result<()> {
        let reply: Reply = self.ask(&Request::Mask {
            masks: masks.to_vec(),
            clear: true,
        })?;
        match reply.error {
            Some(error) => bail!("the program does not mask experts: {error}"),
            None => Ok(()),
        }
    }

    /// Sets the margin within which experts in memory are preferred.
    pub fn set_margin(&self, margin: f32) -> Result<()> {
        let reply: Reply = self.ask(&Request::Prefer { margin })?;
        match reply.error {
            Some(error) => bail!("{error}"),
            None => Ok(()),
        }
    }

    /// Returns the figures of the experts from disk.
    pub fn streamed(&self) -> Result<StreamFigures> {
        let status: Status = self.ask(&Request::Status)?;
        let streamed = status.models.into_iter().find_map(|model| model.stream);
        streamed.context("no experts of the model are read from disk")
    }

    /// Evaluates again.
    pub fn evaluate(&mut self) -> Result<Statistics> {
        self.round(true)
    }

    /// Waits for the end of the present evaluation, or of a new one.
    fn round(&mut self, start: bool) -> Result<Statistics> {
        let reply: Round = self.ask(&Request::Round { start })?;
        ensure!(
            reply.ok && reply.exit == 0,
            "an evaluation failed ({}); {}",
            reply
                .error
                .unwrap_or_else(|| format!("exit status {}", reply.exit)),
            last_lines(&self.log)
        );
        let mut file = File::open(&self.log)?;
        file.seek(SeekFrom::Start(self.read))?;
        let mut output = Vec::new();
        self.read += file.read_to_end(&mut output)? as u64;
        let output = String::from_utf8_lossy(&output);
        self.chunks = statistics::of_chunks(&output);
        Statistics::parse(&output).with_context(|| last_lines(&self.log))
    }

    /// Returns the divergence of each chunk in the last evaluation.
    pub fn chunks(&self) -> &[f64] {
        &self.chunks
    }

    /// Sends a request and waits for its reply.
    fn ask<T: DeserializeOwned>(&self, request: &Request) -> Result<T> {
        let limit = Limit::default();
        let answer =
            control::ask(&self.socket, request, limit).and_then(|reply| control::parsed(&reply));
        answer.with_context(|| {
            format!(
                "the program ended or does not answer; {}",
                last_lines(&self.log)
            )
        })
    }

    /// Lets the program end.
    pub fn end(mut self) -> Result<()> {
        self.ask::<Reply>(&Request::RoundEnd)?;
        self.child.wait()?;
        Ok(())
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        // After its end, this does nothing.
        let _ = self.child.kill();
        let _ = self.child.wait();
        interruption::end_left();
    }
}

/// Makes a folder for a socket.
fn socket_folder() -> Result<Temporary> {
    let parent = std::env::temp_dir();
    let folder = Temporary::new().with_context(|| {
        format!(
            "cannot write to {}: set TMPDIR to another folder",
            text::path(&parent)
        )
    })?;
    let length = folder.path().join(SOCKET).as_os_str().len();
    ensure!(
        length <= sockets::LONGEST,
        "the path of a socket in {} has {length} bytes, and unix(7) permits {}: set TMPDIR to a folder with a shorter path",
        text::path(&parent),
        sockets::LONGEST
    );
    Ok(folder)
}

fn new_log(path: &Path) -> Result<File> {
    let make = || files::write(path, &[], Replace::Any).and_then(|()| files::append(path));
    let file = interruption::undisturbed(make);
    file.with_context(|| format!("cannot write {}", text::path(path)))
}

/// Returns the end of a log.
fn last_lines(log: &Path) -> String {
    let text = fs::read(log).unwrap_or_default();
    let text = String::from_utf8_lossy(&text[text.len().saturating_sub(4096)..]);
    let lines = text.lines().filter(|line| !line.trim().is_empty());
    // A line of perplexities has no end.
    let lines: Vec<String> = lines
        .map(|line| line.chars().take(LONGEST_LINE).collect())
        .collect();
    let last = lines[lines.len().saturating_sub(3)..].join(" / ");
    format!("its log {} ends with: {last}", text::path(log))
}
