//! A llama-server of llama.cpp, driven through HTTP by a test.

use std::ffi::OsStr;
use std::fs::File;
use std::io::{BufRead, BufReader};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use ureq::Body;
use ureq::http::Response;

use crate::host::{DropIn, control, plain_command};
pub use crate::llama_cpp::{LlamaCpp, llama_cpp, llama_cpp_dl, llama_cpp_linked, older_llama_cpp};

/// The program that lends a machine's devices through RPC.
pub const RPC_SERVER: &str = "ggml-rpc-server";
/// How long a server may take to end, and to start and to answer unless a test knows better, on a busy machine.
const PATIENCE: Duration = Duration::from_secs(300);
/// What a server may answer at most.
const LONGEST_ANSWER: u64 = 64 << 20;

/// A program of llama.cpp that is about to be started, without variables of llama-sidecar.
///
/// Panics with the command that makes it when it is not there.
pub fn llama(program: &str) -> Command {
    let path = llama_cpp(program);
    assert!(
        path.exists(),
        "{} is missing: run 'cargo xtask hosts --build' first",
        path.display()
    );
    plain_command(path)
}

/// Quantises a whole model with llama-quantize.
pub fn quantize(from: &Path, to: &Path, file_type: &str, arguments: &[&str]) {
    let mut command = llama("llama-quantize");
    command.arg("--allow-requantize").args(arguments);
    command.args([from, to]).arg(file_type);
    let output = command.output().expect("it starts");
    assert!(output.status.success(), "{command:?}: {output:?}");
}

/// How a server is started.
#[derive(Debug, Clone)]
pub struct Options {
    /// Where programs are: [`llama_cpp`] or [`llama_cpp_dl`].
    pub build: fn(&str) -> PathBuf,
    /// Where it listens; `None` for a port that it chooses, as llama.cpp's can.
    pub port: Option<u16>,
    /// Requests that it evaluates at a time.
    pub slots: usize,
    /// Tokens of context of each slot.
    pub context: usize,
    /// Threads that evaluate.
    pub threads: usize,
    /// Whether it keeps prompts in memory beside its slots (`--cache-ram`).
    pub prompt_cache: bool,
    /// Whether its slots can be emptied (`--slot-save-path`).
    pub slot_actions: bool,
    /// What its clients have to know.
    pub api_key: Option<&'static str>,
    /// Further arguments.
    pub arguments: Vec<String>,
    /// Further variables of the process.
    pub variables: Vec<(String, String)>,
    /// How long it may take to start and to answer.
    pub patience: Duration,
    /// How the drop-in takes part.
    pub drop_in: DropIn,
}

/// A running server. It is killed when dropped.
pub struct Server {
    child: Child,
    url: String,
    api_key: &'static str,
    patience: Duration,
    log: PathBuf,
    socket: PathBuf,
    folder: tempfile::TempDir,
}

/// A request for text, without randomness.
#[derive(Debug, Clone)]
pub struct Request {
    /// The text to continue.
    pub prompt: String,
    /// Tokens to write.
    pub tokens: usize,
    /// Whether keys and values of a common prefix are taken from the slot.
    pub cache_prompt: bool,
    /// The slot to use; `None` for any.
    pub slot: Option<usize>,
}

/// What a server answered to a [`Request`].
#[derive(Debug, Clone, PartialEq)]
pub struct Answer {
    /// The text.
    pub text: String,
    /// For each token its number and its log-probability, and those of the next best.
    pub probabilities: Value,
    /// Tokens of the prompt that were not evaluated for this answer; 0 from ik_llama.cpp's server,
    /// which does not state it.
    pub cached: u64,
    /// Tokens of the prompt that were evaluated for this answer.
    pub evaluated: u64,
}

impl Options {
    /// A server with so many slots, the drop-in looking at files when asked.
    pub fn new(slots: usize) -> Options {
        Options {
            build: llama_cpp,
            port: None,
            slots,
            context: 512,
            threads: 1,
            prompt_cache: false,
            slot_actions: true,
            api_key: None,
            arguments: Vec::new(),
            variables: Vec::new(),
            patience: PATIENCE,
            drop_in: DropIn::On(Vec::new()),
        }
    }
}

impl Server {
    /// Starts a server and waits until it has loaded its model.
    pub fn start(model: &Path, options: &Options) -> Server {
        Server::launch(&["--model".as_ref(), model.as_os_str()], options, |_| ())
            .expect("it starts")
    }

    /// The same with further settings of the process; the log of a server that does not start.
    pub fn start_or_end(
        model: &Path,
        options: &Options,
        set: impl FnOnce(&mut Command),
    ) -> Result<Server, String> {
        Server::launch(&["--model".as_ref(), model.as_os_str()], options, set)
    }

    /// Starts a server that starts a server of its own for each model of a folder, with the first
    /// request for that model.
    pub fn start_router(models: &Path, options: &Options) -> Server {
        let models = ["--models-dir".as_ref(), models.as_os_str()];
        Server::launch(&models, options, |_| ()).expect("it starts")
    }

    fn launch(
        models: &[&OsStr],
        options: &Options,
        set: impl FnOnce(&mut Command),
    ) -> Result<Server, String> {
        let program = (options.build)("llama-server");
        assert!(
            program.exists(),
            "{} is missing: run 'cargo xtask hosts --build' first",
            program.display()
        );
        let folder = tempfile::tempdir().expect("a folder");
        let socket = folder.path().join("socket");
        let mut command = Command::new(program);
        command
            .args(models)
            .args(["--host", "127.0.0.1", "--port"])
            .arg(options.port.unwrap_or(0).to_string())
            .args(["--parallel", &options.slots.to_string()])
            .args(["--ctx-size", &(options.slots * options.context).to_string()])
            .args(["--threads", &options.threads.to_string()])
            .args(["--batch-size", "128"])
            .args(&options.arguments);
        match options.port {
            None => command.arg("--offline"),
            // ik_llama.cpp's writes a log there.
            Some(_) => command.current_dir(folder.path()),
        };
        if options.slot_actions {
            command.arg("--slot-save-path").arg(folder.path());
        }
        if let Some(key) = options.api_key {
            command.args(["--api-key", key]);
        }
        if !options.prompt_cache {
            command.args(["--cache-ram", "0"]);
        }
        options.drop_in.prepare(&mut command, &socket);
        command.envs(options.variables.iter().cloned());
        set(&mut command);
        let url = options.port.map(|port| format!("http://127.0.0.1:{port}"));
        Server::spawn(command, folder, url.unwrap_or_default(), options)
    }

    /// Starts a command that ends with a llama-server and its options, and waits until the server has loaded its
    /// model. [`Server::end`] ends it: a wrapper passes the signal on.
    pub fn of_command(mut command: Command) -> Server {
        let folder = tempfile::tempdir().expect("a folder");
        command.args(["--host", "127.0.0.1", "--port", "0", "--offline"]);
        Server::spawn(command, folder, String::new(), &Options::new(1)).expect("it starts")
    }

    fn spawn(
        mut command: Command,
        folder: tempfile::TempDir,
        url: String,
        options: &Options,
    ) -> Result<Server, String> {
        let socket = folder.path().join("socket");
        let log = folder.path().join("log");
        let output = File::create(&log).expect("free space");
        // SAFETY: one system call between fork and exec.
        unsafe {
            command.pre_exec(|| {
                // A killed test runs no destructor: the server ends with the thread that starts it.
                libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL);
                Ok(())
            });
        }
        let child = command
            .stdin(Stdio::null())
            .stdout(output.try_clone().expect("a descriptor"))
            .stderr(output)
            .spawn()
            .expect("the server starts");
        let mut server = Server {
            child,
            url,
            api_key: options.api_key.unwrap_or_default(),
            patience: options.patience,
            log,
            socket,
            folder,
        };
        server.wait_until_loaded()?;
        Ok(server)
    }

    fn wait_until_loaded(&mut self) -> Result<(), String> {
        let deadline = Instant::now() + self.patience;
        loop {
            let listening = self.logged("listening on http://");
            let url = listening
                .first()
                .and_then(|line| line.split_once("http://"));
            if let Some((_, address)) = url {
                self.url = format!("http://{}", address.trim());
            }
            if !self.url.is_empty() {
                let health = self.get("/health");
                if health.is_ok_and(|answer| answer.status() == 200) {
                    return Ok(());
                }
            }
            let ended = self.child.try_wait().expect("a child");
            if ended.is_some() || Instant::now() > deadline {
                let log = self.log().join("\n");
                return Err(format!(
                    "the server does not start ({ended:?}); its log:\n{log}"
                ));
            }
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// Its process id.
    pub fn id(&self) -> u32 {
        self.child.id()
    }

    /// Its address, without a slash at the end.
    pub fn url(&self) -> &str {
        &self.url
    }

    /// Path of its control socket.
    pub fn socket(&self) -> &Path {
        &self.socket
    }

    /// Sends a request to the control socket and returns the answer.
    pub fn control(&self, command: &str) -> Value {
        control(&self.socket, command)
    }

    /// Everything it wrote.
    pub fn log(&self) -> Vec<String> {
        let lines = BufReader::new(File::open(&self.log).expect("its log"));
        lines
            .split(b'\n')
            .map(|line| String::from_utf8_lossy(&line.expect("a file")).into_owned())
            .collect()
    }

    /// Lines of the log that contain a text.
    pub fn logged(&self, text: &str) -> Vec<String> {
        let mut lines = self.log();
        lines.retain(|line| line.contains(text));
        lines
    }

    /// A client that closes its connection after each request and treats no status as an error.
    fn agent(&self) -> ureq::Agent {
        ureq::Agent::config_builder()
            .http_status_as_error(false)
            .max_idle_connections(0)
            .timeout_global(Some(self.patience))
            .build()
            .into()
    }

    /// Sends a GET request.
    pub fn get(&self, path: &str) -> Result<Response<Body>, ureq::Error> {
        self.agent().get(format!("{}{path}", self.url)).call()
    }

    /// Sends a POST request with a body of JSON. Dropping the answer before its end cancels the
    /// request.
    pub fn post(&self, path: &str, body: &Value) -> Result<Response<Body>, ureq::Error> {
        self.agent()
            .post(format!("{}{path}", self.url))
            .header("Content-Type", "application/json")
            .header("Authorization", format!("Bearer {}", self.api_key))
            .send(body.to_string())
    }

    /// The answer to a POST request, which has to succeed.
    pub fn ask(&self, path: &str, body: &Value) -> Value {
        self.expect_json(path, self.post(path, body))
    }

    /// The answer to a GET request, which has to succeed.
    pub fn look(&self, path: &str) -> Value {
        self.expect_json(path, self.get(path))
    }

    /// What a router states of a model: `value` is `unloaded` once its process has ended.
    pub fn model_status(&self, name: &str) -> Value {
        let mut models = self.look("/models");
        let models = models["data"].as_array_mut().expect("a list");
        let found = models.iter_mut().find(|model| model["id"] == name);
        found.expect("the model")["status"].take()
    }

    fn expect_json(&self, path: &str, answer: Result<Response<Body>, ureq::Error>) -> Value {
        let mut answer = answer.expect("an answer");
        let text = answer.body_mut().read_to_string().expect("text");
        let log = || self.log().join("\n");
        assert_eq!(
            answer.status(),
            200,
            "{path}: {text}; the server's log:\n{}",
            log()
        );
        serde_json::from_str(&text).expect("JSON")
    }

    /// Requests text and waits for all of it.
    pub fn try_complete(&self, request: &Request) -> Result<Answer, String> {
        let error = |error: ureq::Error| error.to_string();
        let mut answer = self
            .post("/completion", &request.body(false))
            .map_err(error)?;
        let status = answer.status();
        // As bytes, so that what is no UTF-8 is an error and no replacement character.
        let body = answer
            .body_mut()
            .with_config()
            .limit(LONGEST_ANSWER)
            .read_to_vec()
            .map_err(error)?;
        let body = String::from_utf8(body).map_err(|error| error.to_string())?;
        if status != 200 {
            return Err(format!("{status}: {body}"));
        }
        let body: Value = serde_json::from_str(&body).map_err(|error| error.to_string())?;
        Answer::read(&body)
    }

    /// The same; panics when it fails.
    pub fn complete(&self, request: &Request) -> Answer {
        self.try_complete(request).unwrap_or_else(|error| {
            panic!(
                "no answer to {request:?}: {error}; the server's log:\n{}",
                self.log().join("\n")
            )
        })
    }

    /// Requests text piece by piece, and closes the connection after some pieces.
    pub fn cancel_after(&self, request: &Request, pieces: usize) -> Result<(), String> {
        let error = |error: ureq::Error| error.to_string();
        let mut answer = self
            .post("/completion", &request.body(true))
            .map_err(error)?;
        if answer.status() != 200 {
            return Err(answer.status().to_string());
        }
        let lines = BufReader::new(answer.body_mut().as_reader()).lines();
        let data = lines.map_while(Result::ok);
        let seen = data.filter(|line| line.starts_with("data:")).take(pieces);
        match seen.count() == pieces {
            true => Ok(()),
            false => Err("the stream ended early".into()),
        }
    }

    /// Empties a slot.
    pub fn erase(&self, slot: usize) {
        self.ask(&format!("/slots/{slot}?action=erase"), &json!({}));
    }

    /// Stops it, with all its threads, until `go_on`.
    pub fn stop(&self) {
        self.signal(libc::SIGSTOP);
    }

    /// Continues it.
    pub fn go_on(&self) {
        self.signal(libc::SIGCONT);
    }

    fn signal(&self, signal: libc::c_int) {
        // SAFETY: a child of this process that was not waited for.
        unsafe { libc::kill(self.id() as libc::pid_t, signal) };
    }

    /// Whether it still runs.
    pub fn lives(&mut self) -> bool {
        self.child.try_wait().expect("a child").is_none()
    }

    /// Terminates it; returns its exit status and its log.
    pub fn end(mut self) -> (ExitStatus, Vec<String>) {
        if self.lives() {
            self.signal(libc::SIGTERM);
        }
        self.wait()
    }

    /// Waits until it ends of its own accord; returns its exit status and its log.
    pub fn wait(mut self) -> (ExitStatus, Vec<String>) {
        let deadline = Instant::now() + PATIENCE;
        loop {
            if let Some(status) = self.child.try_wait().expect("a child") {
                return (status, self.log());
            }
            assert!(Instant::now() < deadline, "the server does not end");
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    /// The folder with its log and socket, which is removed with it.
    pub fn folder(&self) -> &Path {
        self.folder.path()
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Request {
    /// A request to any slot that uses what is cached.
    pub fn new(prompt: &str, tokens: usize) -> Request {
        Request {
            prompt: prompt.to_owned(),
            tokens,
            cache_prompt: true,
            slot: None,
        }
    }

    /// The same to one slot.
    pub fn at(mut self, slot: usize) -> Request {
        self.slot = Some(slot);
        self
    }

    fn body(&self, stream: bool) -> Value {
        json!({
            "prompt": self.prompt,
            "n_predict": self.tokens,
            "temperature": 0,
            "seed": 1,
            "ignore_eos": true,
            "n_probs": 3,
            "cache_prompt": self.cache_prompt,
            "id_slot": self.slot.map_or(-1, |slot| slot as i64),
            "stream": stream,
        })
    }
}

impl Answer {
    /// Reads an answer; an error when it is none, or has a probability that is no number.
    fn read(body: &Value) -> Result<Answer, String> {
        let text = body["content"].as_str();
        let text = text.ok_or_else(|| format!("expected a text, found {body}"))?;
        let probabilities = body["completion_probabilities"].clone();
        for token in probabilities.as_array().into_iter().flatten() {
            // What is not finite is null in JSON. ik_llama.cpp's server states probabilities.
            let best = &token["probs"][0]["prob"];
            if !token["logprob"].is_number() && !best.is_number() {
                return Err(format!("expected a log-probability, found {token}"));
            }
        }
        let timing = |name: &str| {
            let count = body["timings"][name].as_u64();
            count.ok_or_else(|| format!("expected timings, found {body}"))
        };

        Ok(Answer {
            text: text.to_owned(),
            probabilities,
            cached: timing("cache_n").unwrap_or_default(),
            evaluated: timing("prompt_n")?,
        })
    }
}
