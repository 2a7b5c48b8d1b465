//! A host that runs, and what it computes.

use std::fs::File;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use testkit::host::{DropIn, Host, request};
use testkit::server::{Request, Server};

/// How long a host may take for one step, on a busy machine.
const PATIENCE: Duration = Duration::from_secs(120);
/// Tokens of an evaluated text.
pub const TOKENS: usize = 6;
/// The text that hosts continue.
pub const PROMPT: &str = "The capital of France is";
/// What the drop-in logs for each evaluation at debug level.
const HASH: &str = "output generation";

/// What a host computed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Evaluation {
    /// Its place among the evaluations of hosts that evaluate by themselves; 0 in others.
    pub number: usize,
    /// Tokens, log-probabilities, hashes of logits: what depends on the weights.
    pub result: String,
}

/// A host with a model in memory.
pub trait Running {
    /// Returns an evaluation from an empty context that began after the call; with a number, that
    /// one.
    fn evaluate(&mut self, number: Option<usize>) -> Evaluation;

    /// Path of the control socket.
    fn socket(&self) -> &Path;

    /// Sends a request to the drop-in.
    fn request(&self, sent: &Value) -> Value {
        request(self.socket(), sent)
    }
}

impl Running for Host {
    fn evaluate(&mut self, _: Option<usize>) -> Evaluation {
        let has_hashes = self.socket().exists();
        let result = match has_hashes {
            true => {
                let text = self.text(TOKENS);
                assert_eq!(text.hashes.len(), TOKENS, "a hash for each token");
                format!("{} {}", text.ids, text.hashes.join(" "))
            }
            false => self.ask(&format!("text {TOKENS}")),
        };
        Evaluation { number: 0, result }
    }

    fn socket(&self) -> &Path {
        self.socket()
    }
}

impl Running for Server {
    fn evaluate(&mut self, _: Option<usize>) -> Evaluation {
        let request = Request {
            cache_prompt: false,
            ..Request::new(PROMPT, TOKENS)
        };
        let answer = self.complete(&request);
        Evaluation {
            number: 0,
            result: format!("{} {}", answer.text, answer.probabilities),
        }
    }

    fn socket(&self) -> &Path {
        self.socket()
    }
}

/// A program of llama.cpp that takes its work from the command line.
pub struct Program {
    child: Child,
    folder: tempfile::TempDir,
    socket: PathBuf,
    /// For a program that waits for a prompt.
    input: Option<ChildStdin>,
    has_drop_in: bool,
}

impl Program {
    /// Starts a program and waits until it has a model. One that `waits` reads its text from standard
    /// input.
    pub fn start(mut command: Command, drop_in: &DropIn, waits: bool) -> Program {
        let folder = tempfile::tempdir().expect("a folder");
        let socket = folder.path().join("socket");
        drop_in.prepare(&mut command, &socket);
        let file = |name: &str| File::create(folder.path().join(name)).expect("free space");
        let mut child = command
            // ik_llama.cpp's programs write a log there.
            .current_dir(folder.path())
            .stdin(if waits { Stdio::piped() } else { Stdio::null() })
            .stdout(file("output"))
            .stderr(file("log"))
            .spawn()
            .expect("the program starts");
        let has_drop_in = matches!(drop_in, DropIn::On(_));
        let mut started = Program {
            input: child.stdin.take(),
            child,
            folder,
            socket,
            has_drop_in,
        };
        if has_drop_in {
            started.wait("has no model", |program| {
                UnixStream::connect(&program.socket).is_ok()
                    && program.request(&json!({"cmd": "status"}))["models"]
                        .as_array()
                        .is_some_and(|models| !models.is_empty())
            });
        }
        started
    }

    /// Waits until something holds while the program runs.
    fn wait(&mut self, otherwise: &str, holds: impl Fn(&Program) -> bool) {
        let deadline = Instant::now() + PATIENCE;
        while !holds(self) {
            let ended = self.child.try_wait().expect("a child");
            // What it wrote last may have been looked for too early.
            let is_late = Instant::now() > deadline;
            assert!(
                ended.is_none() && !is_late || holds(self),
                "the program {otherwise} ({ended:?}): {}",
                self.lines("log").join("\n")
            );
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    fn lines(&self, name: &str) -> Vec<String> {
        let file = File::open(self.folder.path().join(name)).expect("its file");
        let lines = BufReader::new(file).split(b'\n').map_while(Result::ok);
        lines
            .map(|line| String::from_utf8_lossy(&line).into_owned())
            .collect()
    }

    fn hashes(&self) -> Vec<String> {
        let mut lines = self.lines("log");
        lines.retain(|line| line.contains(HASH));
        let hash = |line: &String| line.rsplit(' ').next().unwrap_or_default().to_owned();
        lines.iter().map(hash).collect()
    }

    /// The output of a program that ends by itself, without speeds and times.
    fn output(&mut self) -> String {
        let deadline = Instant::now() + PATIENCE;
        while self.child.try_wait().expect("a child").is_none() {
            assert!(Instant::now() < deadline, "the program does not end");
            std::thread::sleep(Duration::from_millis(5));
        }
        let mut lines = self.lines("output");
        lines.retain(|line| !line.contains(" minutes"));
        let without_speed = |line: &String| match line.split_once(" ±") {
            Some((before, _)) => before.rsplit_once('|').expect("a table").0.to_owned(),
            None => line.clone(),
        };
        let lines: Vec<_> = lines.iter().map(without_speed).collect();
        lines.join("\n")
    }
}

impl Running for Program {
    fn evaluate(&mut self, number: Option<usize>) -> Evaluation {
        if !self.has_drop_in {
            let result = self.output();
            return Evaluation { number: 0, result };
        }
        if let Some(input) = &mut self.input {
            // It evaluates once: the context keeps the text.
            writeln!(input, "{PROMPT}").expect("the program lives");
            self.wait("does not evaluate", |program| {
                program.hashes().len() >= TOKENS
            });
            let result = self.hashes()[..TOKENS].join(" ");
            return Evaluation { number: 0, result };
        }
        // The next one may have begun.
        let number = number.unwrap_or_else(|| self.hashes().len() + 1);
        self.wait("does not evaluate", |program| {
            program.hashes().len() > number
        });
        let result = self.hashes().swap_remove(number);
        Evaluation { number, result }
    }

    fn socket(&self) -> &Path {
        &self.socket
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
