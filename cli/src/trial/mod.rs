//! A run of a program, with or without the drop-in, and its speeds.
//!
//! | module | contents |
//! |---|---|
//! | [`server`] | requests to llama-server |
//! | [`prompts`] | what is requested of a server |
//! | [`speeds`] | the speeds that programs print |

pub mod prompts;
pub mod server;
pub mod speeds;

use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io::{Read, Seek};
use std::path::Path;
use std::process::{Command, ExitStatus, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, bail};
use prompts::Request;
use serde::Serialize;
use server::Client;
use sidecar_core::text;
use speeds::Speeds;

use crate::interruption;
use crate::launch::child;
use crate::launch::executable::Executable;
use crate::launch::journal::{Events, Journal};
use crate::launch::run::{Prepared, RunOptions};
use crate::launch::session::{Session, Usage};
use crate::temporary;

/// Time between two looks at a running program.
const PERIOD: Duration = Duration::from_millis(50);
/// How long one answer to a request for the state of a server may take.
const HEALTH_TIMEOUT: Duration = Duration::from_secs(2);
/// The most of a program's output that is read.
const MOST_OUTPUT: u64 = 64 << 20;

/// How a program is made to work, and where it reports its speeds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Kind {
    /// llama-server: answers requests, with speeds.
    Server,
    /// llama-bench: prints its tests as JSON.
    Bench,
    /// Any other program that ends by itself: libllama prints speeds at its end.
    Other,
}

/// A program that is run several times.
pub struct Program {
    pub kind: Kind,
    pub words: Vec<OsString>,
    /// What is requested of a server.
    pub requests: Vec<Request>,
    /// How long a run may take.
    pub longest: Duration,
}

/// What a run showed.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct Run {
    #[serde(flatten)]
    pub speeds: Speeds,
    /// Of each request to a server.
    #[serde(skip)]
    pub requests: Vec<Speeds>,
    /// Time from the start to the first request; of a program without requests, 0.
    pub start_seconds: f64,
    /// Time from the start to the end.
    pub seconds: f64,
    #[serde(flatten)]
    pub usage: Usage,
    /// What the drop-in did, in sentences.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub summary: Vec<String>,
    /// What the program computed, as far as its output shows that.
    #[serde(skip)]
    pub output: String,
    /// What the program printed on standard error.
    #[serde(skip)]
    pub log: String,
}

/// The user has ended the command.
#[derive(Debug, thiserror::Error)]
#[error("interrupted")]
pub struct Interrupted;

impl Kind {
    /// Returns the kind of a command, by the name of its program.
    pub fn of(words: &[OsString]) -> Kind {
        let name = Path::new(&words[0]).file_name().unwrap_or_default();
        match name.to_string_lossy() {
            name if name.contains("llama-server") => Kind::Server,
            name if name.contains("llama-bench") => Kind::Bench,
            _ => Kind::Other,
        }
    }
}

impl Run {
    /// Returns the time of the work: of all tokens, or of the whole run where that is not known.
    pub fn work_seconds(&self) -> f64 {
        match self.speeds.is_known() {
            true => self.speeds.seconds(),
            false => self.seconds,
        }
    }
}

impl Program {
    /// Returns the program with further arguments.
    pub fn with(&self, arguments: &[&str]) -> Program {
        let words = self.words.iter().cloned();
        self.of(words.chain(arguments.iter().map(OsString::from)).collect())
    }

    /// Returns the program with another command.
    pub fn of(&self, words: Vec<OsString>) -> Program {
        Program {
            words,
            requests: self.requests.clone(),
            ..*self
        }
    }

    /// Returns a program. The first signal that would end this process is noted from now on.
    pub fn new(words: &[OsString], requests: Vec<Request>, longest: Duration) -> Result<Program> {
        interruption::watch()?;
        Ok(Program {
            kind: Kind::of(words),
            words: words.to_vec(),
            requests,
            longest,
        })
    }

    /// Runs the program alone for the first time. The first request is made shorter if the context is too short
    /// for it, and `can_shorten` is true.
    pub fn first_run(&mut self, can_shorten: bool, compares: bool) -> Result<Run> {
        loop {
            let result = self.run(None::<&[OsString]>, compares);
            let longest = &mut self.requests[0];
            let is_too_long = |error: &anyhow::Error| {
                can_shorten && longest.can_be_shorter() && error.to_string().contains("context")
            };
            match result {
                Err(error) if is_too_long(&error) => *longest = longest.shorter(),
                result => return result.map(|(run, _)| run),
            }
        }
    }

    /// Runs the program; with flags, as `run` does with them. `compares` is whether more is requested of a
    /// server than its speeds. Returns the events, too.
    pub fn run(
        &self,
        flags: Option<&[impl AsRef<OsStr>]>,
        compares: bool,
    ) -> Result<(Run, Events)> {
        let mut words = self.words.clone();
        let mut port = None;
        match self.kind {
            Kind::Server => port = Some(server::listen_elsewhere(&mut words)?),
            Kind::Bench => words.extend(["-o", "json"].map(OsString::from)),
            Kind::Other => {}
        }
        let journal = Journal::new()?;
        let executable = Executable::find(&words[0])?;
        let prepared = match flags {
            Some(flags) => Some(Prepared::new(&RunOptions::with(flags, &words)?)?),
            None => None,
        };
        let mut command = match &prepared {
            Some(prepared) => {
                if let Some(obstacle) = prepared.obstacle(&executable) {
                    bail!("{obstacle}");
                }
                prepared.command(&executable, Some(&journal))
            }
            None => {
                let mut command = Command::new(&executable.path);
                command.args(&words[1..]);
                command
            }
        };
        let (mut output, mut errors) = (temporary::log()?, temporary::log()?);
        command
            .stdin(Stdio::null())
            .stdout(output.try_clone()?)
            .stderr(errors.try_clone()?);
        let began = Instant::now();
        let session = Session::start(&mut command);
        let mut session =
            session.with_context(|| format!("cannot run {}", text::path(&executable.path)))?;
        let mut run = Run::default();
        let watched = match port {
            Some(port) => {
                let url = format!("http://127.0.0.1:{port}");
                let client = |timeout| Client::new(url.clone(), self.api_key(), timeout);
                self.serve(&mut session, client, began, compares, &mut run)
            }
            None => self.wait(&mut session, began, "has not ended", || false),
        };
        run.seconds = began.elapsed().as_secs_f64();
        run.usage = session.usage();
        run.log = text_of(&mut errors)?;
        let printed = text_of(&mut output)?;
        let printed_last = || last_words(&run.log, &printed);
        let status = watched.map_err(|error| match error.is::<Interrupted>() {
            true => error,
            false => anyhow!("{error:#}; {}", printed_last()),
        })?;
        let status = status.unwrap_or_default();
        if !status.success() {
            bail!("{}; {}", ended(status), printed_last());
        }
        match self.kind {
            Kind::Server => {}
            Kind::Bench => run.speeds = Speeds::of_bench(&printed),
            Kind::Other => {
                run.speeds = Speeds::in_log(&run.log);
                run.output = printed;
            }
        }
        let events = journal.read();
        if let Some(prepared) = &prepared {
            run.summary = prepared.summary(&executable, &events, status);
        }
        Ok((run, events))
    }

    /// Waits until a condition holds or the program has ended, and returns its status then. Fails if that
    /// takes too long, or is interrupted; `what` is what has not happened.
    fn wait(
        &self,
        session: &mut Session,
        began: Instant,
        what: &str,
        holds: impl Fn() -> bool,
    ) -> Result<Option<ExitStatus>> {
        let late = || {
            let next = match self.kind {
                Kind::Server => "",
                _ => "add -n 64 or the like, so that it ends by itself, or ",
            };
            let seconds = self.longest.as_secs();
            format!("the program {what} after {seconds} s: {next}pass a longer --run-time")
        };
        self.wait_until(session, began + self.longest, late, holds)
    }

    /// Waits until a condition holds or a program has ended, and returns its status then. Fails with
    /// `late` at a time, or if the user ends the command.
    fn wait_until(
        &self,
        session: &mut Session,
        deadline: Instant,
        late: impl FnOnce() -> String,
        holds: impl Fn() -> bool,
    ) -> Result<Option<ExitStatus>> {
        while !holds() {
            if let Some(status) = session.look()? {
                return Ok(Some(status));
            }
            if interruption::signal().is_some() {
                bail!(Interrupted);
            }
            if Instant::now() > deadline {
                bail!("{}", late());
            }
            thread::sleep(PERIOD);
        }
        Ok(None)
    }

    /// Waits for the server, and sends all requests. Ends it; a server that was ended has done its work,
    /// whatever its status is.
    fn serve(
        &self,
        session: &mut Session,
        client: impl Fn(Duration) -> Client,
        began: Instant,
        compares: bool,
        run: &mut Run,
    ) -> Result<Option<ExitStatus>> {
        let asks = client(HEALTH_TIMEOUT);
        let early = self.wait(session, began, "is not ready", || asks.is_ready())?;
        if let Some(status) = early {
            bail!("{} before it had loaded its model", ended(status));
        }
        run.start_seconds = began.elapsed().as_secs_f64();
        let client = client(self.longest);
        let requests = self.requests.clone();
        let sender = thread::spawn(move || {
            let mut speeds = Vec::new();
            let mut seen = String::new();
            for request in &requests {
                let (text, of) = client.complete(request, compares)?;
                seen += &text;
                speeds.push(of);
            }
            Ok::<_, anyhow::Error>((speeds, seen))
        });
        let missing = "has not answered all requests";
        let early = self.wait(session, began, missing, || sender.is_finished())?;
        if let Some(status) = early {
            bail!("{} during a request", ended(status));
        }
        let sent = sender.join();
        (run.requests, run.output) =
            sent.unwrap_or_else(|_| bail!("an internal error, whose message is above"))?;
        for of in &run.requests {
            run.speeds.add(of);
        }
        session.end()?;
        Ok(None)
    }

    /// Returns the API key in the command or in the environment.
    fn api_key(&self) -> Option<String> {
        let at = self.words.iter().position(|word| word == "--api-key");
        let word = at.and_then(|at| self.words.get(at + 1));
        let text = |word: &OsStr| word.to_string_lossy().into_owned();
        let variable = || std::env::var("LLAMA_API_KEY").ok();
        // The option may have several keys.
        let keys = word.map(|word| text(word)).or_else(variable)?;
        keys.split(',').next().map(str::to_owned)
    }
}

/// Returns what a program printed about a failure.
fn last_words(log: &str, output: &str) -> String {
    match child::cause(log).or(child::cause(output)) {
        Some(line) => format!("it printed: {}", line.trim()),
        None => "it printed nothing".into(),
    }
}

fn ended(status: ExitStatus) -> String {
    format!("the program ended ({status})")
}

/// Returns what a file has, as text.
fn text_of(file: &mut File) -> Result<String> {
    let mut bytes = Vec::new();
    file.rewind()?;
    file.take(MOST_OUTPUT).read_to_end(&mut bytes)?;
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}
