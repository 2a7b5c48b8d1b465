//! Rounds in an unmodified llama-perplexity: each round prints what a new program prints with a
//! file that has the same tensors, and the model is loaded once. Requests come over the control
//! socket, or through the files of GGUF-Tool-Suite.

use std::cell::RefCell;
use std::fs::{self, File};
use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::{chown, symlink};
use std::os::unix::net::UnixStream;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use sidecar_core::gguf::{Access, GgufFile};
use tempfile::TempDir;
use testkit::fixtures::fixture;
use testkit::host::{built, preload_library, replace};
use testkit::server::{llama, llama_cpp};
use testkit::skipped;

/// How long a program may take for what is waited for, on a busy machine.
const PATIENCE: Duration = Duration::from_secs(300);
/// Text with more tokens than the chunks of a round.
const TEXT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/docs/hot-swap.md");
const BASE: &str = "--kl-divergence-base";
/// The model, and the same with eight other tensors.
const MODEL: &str = "smollm2.gguf";
const MIXED: &str = "smollm2-mixed.gguf";

/// Waits for a condition.
fn eventually<R>(what: &str, found: impl Fn() -> Option<R>) -> R {
    let deadline = Instant::now() + PATIENCE;
    loop {
        if let Some(found) = found() {
            return found;
        }
        assert!(Instant::now() < deadline, "not in time: {what}");
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// llama-perplexity with a model, without variables of llama-sidecar.
fn perplexity(model: &Path, arguments: &[&str]) -> Command {
    let mut command = llama("llama-perplexity");
    command
        .arg("--model")
        .arg(model)
        .args(["--file", TEXT])
        .args(["--ctx-size", "64", "--chunks", "4", "--batch-size", "64"])
        .args(["--threads", "2"])
        .args(arguments)
        .stdin(Stdio::null());
    command
}

/// What a program measured: all of its standard output but the time that is left, and the
/// estimate, which is in its log.
fn results(output: &str, log: &str) -> Vec<String> {
    let estimate = log.lines().filter_map(|line| {
        let at = line.find("Final estimate:")?;
        Some(line[at..].to_owned())
    });
    let lines = output.lines().filter(|line| !line.ends_with(" minutes"));
    let lines = lines.map(str::trim).filter(|line| !line.is_empty());
    lines.map(str::to_owned).chain(estimate).collect()
}

/// What a new program without the drop-in measures.
fn fresh(model: &Path, arguments: &[&str]) -> Vec<String> {
    let output = perplexity(model, arguments).output().expect("it starts");
    assert!(output.status.success(), "{output:?}");
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    results(&text(&output.stdout), &text(&output.stderr))
}

/// The results of new programs with the two models, and the base logits of the first one.
struct Expected {
    base: PathBuf,
    /// Perplexity, then divergence.
    model: [Vec<String>; 2],
    mixed: [Vec<String>; 2],
    _folder: TempDir,
}

impl Expected {
    fn get() -> &'static Expected {
        static EXPECTED: OnceLock<Expected> = OnceLock::new();
        EXPECTED.get_or_init(|| {
            let folder = tempfile::tempdir().expect("a folder");
            let base = folder.path().join("base");
            let path = base.to_str().expect("UTF-8");
            fresh(&fixture(MODEL), &[BASE, path]);
            let both = |file: &str| {
                let divergence = ["--kl-divergence", BASE, path];
                [&[][..], &divergence].map(|arguments| fresh(&fixture(file), arguments))
            };
            let expected = Expected {
                model: both(MODEL),
                mixed: both(MIXED),
                base,
                _folder: folder,
            };
            assert_ne!(expected.model, expected.mixed, "the variant shows");
            let mut lines = expected.mixed[1].iter();
            assert!(
                lines.any(|line| line.starts_with("Mean    KLD:")),
                "statistics"
            );
            expected
        })
    }

    fn divergence(&self) -> [&str; 3] {
        let base = self.base.to_str().expect("UTF-8");
        ["--kl-divergence", BASE, base]
    }
}

/// A running llama-perplexity with rounds. It is killed when dropped.
struct Rounds {
    child: Child,
    folder: TempDir,
    /// Sizes of output and log at the end of the last round that was read.
    read: [usize; 2],
}

impl Rounds {
    /// Starts a program with a copy of a model, and waits until it listens.
    fn start(arguments: &[&str], variables: &[(&str, &str)]) -> Rounds {
        let folder = tempfile::tempdir().expect("a folder");
        let model = folder.path().join("model.gguf");
        replace(&model, &fixture(MODEL));
        let rounds = Rounds::start_in(folder, &model, arguments, variables);
        // The path is there a moment before the program listens.
        eventually("a socket", || UnixStream::connect(rounds.socket()).ok());
        rounds
    }

    fn start_in(
        folder: TempDir,
        model: &Path,
        arguments: &[&str],
        variables: &[(&str, &str)],
    ) -> Rounds {
        let create = |name: &str| File::create(folder.path().join(name)).expect("free space");
        create("journal");
        let mut command = perplexity(model, arguments);
        command
            .current_dir(folder.path())
            .env("LD_PRELOAD", preload_library())
            .env("LLAMA_SIDECAR_ROUNDS", "1")
            .env("LLAMA_HOTSWAP_ENABLED", "1")
            .env("LLAMA_SIDECAR_LOG", "info")
            .env("LLAMA_SIDECAR_CONTROL", folder.path().join("socket"))
            .env("LLAMA_SIDECAR_JOURNAL", folder.path().join("journal"))
            .envs(variables.iter().copied())
            .stdout(create("output"))
            .stderr(create("log"));
        // SAFETY: two system calls between fork and exec.
        unsafe {
            command.pre_exec(|| {
                // A killed test runs no destructor: the program ends with the thread that starts it.
                libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL);
                // A shell that runs the tests in the background ignores it.
                libc::signal(libc::SIGINT, libc::SIG_DFL);
                Ok(())
            });
        }
        Rounds {
            child: command.spawn().expect("it starts"),
            folder,
            read: [0, 0],
        }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn socket(&self) -> PathBuf {
        self.path("socket")
    }

    fn text(&self, name: &str) -> String {
        let bytes = fs::read(self.path(name)).expect("a file");
        String::from_utf8_lossy(&bytes).into_owned()
    }

    fn connect(&self) -> UnixStream {
        let stream = UnixStream::connect(self.socket()).expect("a socket");
        stream.set_read_timeout(Some(PATIENCE)).expect("a socket");
        stream
    }

    fn ask(&self, request: &Value) -> Value {
        let mut stream = self.connect();
        writeln!(stream, "{request}").expect("it listens");
        let mut reply = String::new();
        BufReader::new(stream)
            .read_line(&mut reply)
            .expect("a reply");
        serde_json::from_str(&reply).expect("JSON")
    }

    /// Waits for the round with this number, which is started unless it is the first.
    fn round(&mut self, number: u64) -> Vec<String> {
        let reply = self.ask(&json!({"cmd": "round", "start": number > 1}));
        let expected = json!({"ok": true, "round": number, "exit": 0, "state": "waiting"});
        assert_eq!(reply, expected, "{}", self.text("log"));
        self.next_results()
    }

    /// The results that were written since the last ones were read.
    fn next_results(&mut self) -> Vec<String> {
        let (output, log) = (self.text("output"), self.text("log"));
        let results = results(&output[self.read[0]..], &log[self.read[1]..]);
        self.read = [output.len(), log.len()];
        results
    }

    /// Replaces the model and lets the program reload it.
    fn replace_model(&self, by: &str) {
        replace(&self.path("model.gguf"), &fixture(by));
        let reply = self.ask(&json!({"cmd": "reload"}));
        assert_eq!(reply["ok"], true, "{reply}");
    }

    /// How often a model was loaded and freed.
    fn loads(&self) -> [usize; 2] {
        let log = self.text("log");
        ["watching 272 tensors", "freed the model"].map(|text| log.matches(text).count())
    }

    fn end(&mut self) -> ExitStatus {
        assert_eq!(self.ask(&json!({"cmd": "round-end"})), json!({"ok": true}));
        self.wait()
    }

    fn wait(&mut self) -> ExitStatus {
        let deadline = Instant::now() + PATIENCE;
        loop {
            if let Some(status) = self.child.try_wait().expect("a child") {
                return status;
            }
            assert!(Instant::now() < deadline, "the program does not end");
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    fn signal(&self, signal: libc::c_int) {
        // SAFETY: a child of this process that was not waited for.
        unsafe { libc::kill(self.child.id() as libc::pid_t, signal) };
    }
}

impl Drop for Rounds {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Swaps tensors between rounds, and back.
fn rounds_are_new_programs(arguments: &[&str], model: &[String], mixed: &[String]) {
    let mut rounds = Rounds::start(arguments, &[]);
    assert_eq!(rounds.round(1), model);
    assert_eq!(rounds.round(2), model);
    rounds.replace_model(MIXED);
    assert_eq!(rounds.round(3), mixed);
    assert_eq!(rounds.round(4), mixed);
    rounds.replace_model(MODEL);
    assert_eq!(rounds.round(5), model);
    assert_eq!(rounds.loads(), [1, 0]);
    assert_eq!(rounds.end().code(), Some(0));
    assert_eq!(rounds.loads(), [1, 1]);
    assert!(!rounds.socket().exists());
}

#[test]
fn divergence_of_each_round_is_that_of_a_new_program() {
    let expected = Expected::get();
    let [_, model] = &expected.model;
    let [_, mixed] = &expected.mixed;
    rounds_are_new_programs(&expected.divergence(), model, mixed);
}

#[test]
fn perplexity_of_each_round_is_that_of_a_new_program() {
    let expected = Expected::get();
    rounds_are_new_programs(&[], &expected.model[0], &expected.mixed[0]);
}

/// By default the program loads the model without memory first, to look at sizes.
#[test]
fn the_model_is_loaded_once_with_and_without_fit() {
    for fit in ["on", "off"] {
        let mut rounds = Rounds::start(&["--fit", fit], &[]);
        let first = rounds.round(1);
        assert_eq!(rounds.round(2), first);
        assert_eq!(rounds.loads(), [1, 0], "--fit {fit}");
    }
}

#[test]
fn one_of_two_clients_starts_a_round() {
    let mut rounds = Rounds::start(&[], &[]);
    let first = rounds.round(1);
    let replies = std::thread::scope(|scope| {
        let start = || rounds.ask(&json!({"cmd": "round", "start": true}));
        let clients = [0, 1].map(|_| scope.spawn(start));
        clients.map(|client| client.join().expect("a reply"))
    });
    let (done, refused): (Vec<_>, Vec<_>) = replies.iter().partition(|reply| reply["ok"] == true);
    for (at, reply) in done.iter().enumerate() {
        assert!(
            reply["round"] == 2 || reply["round"] == 3 && at == done.len() - 1,
            "{reply}"
        );
    }
    for reply in &refused {
        let error = reply["error"].as_str().expect("a reason");
        assert!(error.contains("is being evaluated"), "{error}");
    }
    let results = rounds.next_results();
    assert_eq!(results, vec![first; done.len()].concat());
    assert_eq!(rounds.end().code(), Some(0));
}

#[test]
fn a_client_that_goes_away_ends_nothing() {
    let mut rounds = Rounds::start(&[], &[]);
    let first = rounds.round(1);
    for request in [
        "{\"cmd\":\"round\",\"start\":true}\n",
        "{\"cmd\":\"ro",
        "\n",
    ] {
        let mut stream = rounds.connect();
        stream.write_all(request.as_bytes()).expect("it listens");
    }
    eventually("the round that was started", || {
        let reply = rounds.ask(&json!({"cmd": "round"}));
        (reply["round"] == 2).then_some(())
    });
    assert_eq!(rounds.next_results(), first);
    assert_eq!(rounds.round(3), first);
    // The end is requested in the middle of a round.
    let mut stream = rounds.connect();
    writeln!(stream, "{}", json!({"cmd": "round", "start": true})).expect("it listens");
    eventually("a fourth round", || {
        rounds.text("log")[rounds.read[1]..]
            .contains("calculating")
            .then_some(())
    });
    assert_eq!(rounds.end().code(), Some(0));
    assert_eq!(rounds.next_results(), first);
}

/// Clients that wait for a round take all connections; once they are gone, others are answered
/// before the round ends.
#[test]
fn clients_that_went_away_free_their_connections() {
    let folder = tempfile::tempdir().expect("a folder");
    let text = folder.path().join("text");
    let chapter = fs::read_to_string(TEXT).expect("a text");
    fs::write(&text, chapter.repeat(20)).expect("free space");
    let text = text.to_str().expect("UTF-8");
    let rounds = Rounds::start(&["--file", text, "--chunks", "-1"], &[]);
    let is_answered = || {
        let mut stream = rounds.connect();
        // A connection that is refused is closed.
        let _ = stream.write_all(b"{\"cmd\":\"status\"}\n");
        let mut reply = String::new();
        let _ = BufReader::new(stream).read_line(&mut reply);
        reply.contains("\"ok\":true")
    };
    assert!(is_answered());
    let waiting = || {
        let mut stream = rounds.connect();
        let _ = stream.write_all(b"{\"cmd\":\"round\"}\n");
        stream
    };
    // A client whose line is not read yet may lose its place to the next one.
    let clients = RefCell::new(Vec::new());
    eventually("no connection is free", || {
        clients.borrow_mut().push(waiting());
        (!is_answered()).then_some(())
    });
    drop(clients);
    eventually("an answer", || is_answered().then_some(()));
    let log = rounds.text("log");
    assert!(!log.contains("Final estimate"), "the round has ended");
}

#[test]
fn a_signal_ends_a_program_that_waits_or_evaluates() {
    for signal in [libc::SIGINT, libc::SIGTERM] {
        let mut rounds = Rounds::start(&[], &[]);
        rounds.round(1);
        rounds.signal(signal);
        assert_eq!(rounds.wait().signal(), Some(signal));
    }
    let mut rounds = Rounds::start(&[], &[]);
    rounds.signal(libc::SIGKILL);
    assert_eq!(rounds.wait().signal(), Some(libc::SIGKILL));
}

#[test]
fn a_signal_states_the_end_in_the_status_file() {
    for signal in [libc::SIGINT, libc::SIGTERM] {
        let files = [
            ("LLAMA_HOTSWAP_CONTROL_FILE", "control"),
            ("LLAMA_HOTSWAP_STATUS_FILE", "status"),
        ];
        let mut rounds = Rounds::start(&[], &files);
        let status = || fs::read_to_string(rounds.path("status")).unwrap_or_default();
        eventually("a round", || (status() == "done 1 0\n").then_some(()));
        rounds.signal(signal);
        assert_eq!(rounds.wait().signal(), Some(signal));
        assert_eq!(rounds.text("status"), "exiting 1 0\n");
        assert!(!rounds.socket().exists());
        let journal = rounds.text("journal");
        assert!(journal.contains("\"event\":\"end\""), "{journal}");
    }
}

/// Base logits that are missing are an error that the program prints; for text that is missing
/// it also returns 1. The model's file is not needed after the first round.
#[test]
fn files_of_the_program_vanish_between_rounds() {
    let expected = Expected::get();
    let folder = tempfile::tempdir().expect("a folder");
    let (base, text) = (folder.path().join("base"), folder.path().join("text"));
    fs::copy(&expected.base, &base).expect("free space");
    fs::copy(TEXT, &text).expect("free space");
    let arguments = [
        "--kl-divergence",
        BASE,
        base.to_str().expect("UTF-8"),
        "--file",
        text.to_str().expect("UTF-8"),
    ];
    let mut rounds = Rounds::start(&arguments, &[]);
    let first = rounds.round(1);
    assert_eq!(first, expected.model[1]);
    fs::remove_file(rounds.path("model.gguf")).expect("a file");
    assert_eq!(rounds.ask(&json!({"cmd": "reload"}))["ok"], false);
    assert_eq!(rounds.round(2), first);
    fs::remove_file(&base).expect("a file");
    assert_eq!(rounds.round(3), [""; 0]);
    fs::copy(&expected.base, &base).expect("free space");
    assert_eq!(rounds.round(4), first);
    fs::remove_file(&text).expect("a file");
    let reply = rounds.ask(&json!({"cmd": "round", "start": true}));
    assert_eq!((&reply["round"], &reply["exit"]), (&json!(5), &json!(1)));
    assert_eq!(rounds.end().code(), Some(1), "that of the last round");
}

/// A program that nothing can request a round of ends like the same program without the drop-in.
#[test]
fn without_requests_there_is_one_round() {
    let folder = || tempfile::tempdir().expect("a folder");
    let model = fixture(MODEL);
    let none = [("LLAMA_SIDECAR_CONTROL", "")];
    let mut rounds = Rounds::start_in(folder(), &model, &[], &none);
    assert_eq!(rounds.wait().code(), Some(0));
    assert_eq!(rounds.next_results(), Expected::get().model[0]);
    let mut rounds = Rounds::start_in(folder(), Path::new("missing.gguf"), &[], &[]);
    assert_eq!(rounds.wait().code(), Some(1));
    // The place of the socket is taken.
    let taken = folder();
    fs::write(taken.path().join("socket"), "").expect("free space");
    let mut rounds = Rounds::start_in(taken, &model, &[], &[]);
    assert_eq!(rounds.wait().code(), Some(0));
    let mut rounds = Rounds::start_in(folder(), &model, &["--version"], &[]);
    assert_eq!(rounds.wait().code(), Some(0));
}

#[test]
fn another_program_is_named_as_none_with_rounds() {
    let run = |rounds: bool| {
        let mut command = Command::new(llama_cpp("llama-completion"));
        command
            .arg("--model")
            .arg(fixture(MODEL))
            .args([
                "--prompt",
                "Once upon a time",
                "--predict",
                "4",
                "--temp",
                "0",
            ])
            .args(["-no-cnv", "--threads", "2"])
            .stdin(Stdio::null());
        if rounds {
            command
                .env("LD_PRELOAD", preload_library())
                .env("LLAMA_SIDECAR_ROUNDS", "1");
        }
        let output = command.output().expect("it starts");
        assert!(output.status.success(), "{output:?}");
        output
    };
    let (stock, with) = (run(false), run(true));
    assert_eq!(with.stdout, stock.stdout);
    let log = String::from_utf8_lossy(&with.stderr).into_owned();
    assert_eq!(
        log.matches("rounds need llama-perplexity").count(),
        1,
        "{log}"
    );
}

#[test]
fn the_command_waits_for_rounds() {
    let mut rounds = Rounds::start(&[], &[]);
    let round = |arguments: &[&str]| {
        let output = Command::new(built("release/llama-sidecar"))
            .args(["ctl", "round"])
            .arg("--socket")
            .arg(rounds.socket())
            .args(arguments)
            .output()
            .expect("it starts");
        assert!(output.status.success(), "{output:?}");
        String::from_utf8_lossy(&output.stdout).into_owned()
    };
    assert_eq!(round(&[]), "round 1 has ended with 0\n");
    assert_eq!(round(&["--start"]), "round 2 has ended with 0\n");
    assert_eq!(round(&["--end"]), "the program ends\n");
    assert_eq!(rounds.wait().code(), Some(0));
}

/// A driver that follows the protocol of GGUF-Tool-Suite, with a model of one tensor a shard.
struct Driver {
    rounds: Rounds,
    sequence: u64,
}

/// Variables of the driver. Paths are relative to the folder of the program.
const FILES: [(&str, &str); 4] = [
    ("LLAMA_HOTSWAP_CONTROL_FILE", "control"),
    ("LLAMA_HOTSWAP_STATUS_FILE", "status"),
    ("LLAMA_SIDECAR_ROUNDS", ""),
    ("LLAMA_SIDECAR_CONTROL", ""),
];

/// The shards of the model, by name.
fn shards() -> Vec<(String, PathBuf)> {
    let entries = fs::read_dir(fixture("smollm2-tensor-shards")).expect("a fixture");
    let entries = entries.map(|entry| {
        let path = entry.expect("a file").path();
        let name = path.file_name().expect("a name").to_string_lossy();
        (name.into_owned(), path)
    });
    let mut shards: Vec<_> = entries.collect();
    shards.sort();
    shards
}

/// A folder with the shards.
fn with_shards() -> TempDir {
    let folder = tempfile::tempdir().expect("a folder");
    for (name, path) in shards() {
        fs::copy(path, folder.path().join(name)).expect("free space");
    }
    folder
}

/// The shards whose tensors differ between the two models, with those of the other one.
fn changed_shards() -> (TempDir, Vec<String>) {
    let folder = with_shards();
    let output = Command::new(built("release/llama-sidecar"))
        .arg("swap")
        .arg(folder.path().join(&shards()[0].0))
        .args(["--tensor", ".*", "--from"])
        .arg(fixture(MIXED))
        .output()
        .expect("it starts");
    assert!(output.status.success(), "{output:?}");
    let changed = shards().into_iter().filter(|(name, original)| {
        fs::read(original).expect("a file") != fs::read(folder.path().join(name)).expect("a file")
    });
    let changed: Vec<_> = changed.map(|(name, _)| name).collect();
    (folder, changed)
}

impl Driver {
    fn start(variables: &[(&str, &str)]) -> Driver {
        let all = [&FILES, variables].concat();
        let first = &shards()[0].0;
        let rounds = Rounds::start_in(with_shards(), Path::new(first), &[], &all);
        Driver {
            rounds,
            sequence: 0,
        }
    }

    /// Waits for a status; the driver looks as often.
    fn wait_for(&self, status: &str) {
        let status = format!("{status}\n");
        let path = self.rounds.path("status");
        eventually(&status, || {
            let found = fs::read_to_string(&path).unwrap_or_default();
            assert!(found.is_empty() || found.ends_with('\n'), "{found:?}");
            (found == status).then_some(())
        });
    }

    /// Sends a command, and waits until it is read.
    fn send(&mut self, command: &str) {
        self.sequence += 1;
        self.send_line(&format!("{command} {}\n", self.sequence));
    }

    fn send_line(&self, line: &str) {
        let control = self.rounds.path("control");
        fs::write(&control, line).expect("free space");
        eventually("the control file is read", || {
            (!control.exists()).then_some(())
        });
    }

    /// Moves a shard aside and another one into its place.
    fn swap(&self, name: &str, by: &Path) {
        let path = self.rounds.path(name);
        fs::rename(&path, path.with_extension("bak")).expect("a file");
        let beside = path.with_extension("new");
        fs::copy(by, &beside).expect("free space");
        fs::rename(beside, &path).expect("a file");
        touch(&path);
    }

    /// Moves a shard back.
    fn restore(&self, name: &str) {
        let path = self.rounds.path(name);
        fs::rename(path.with_extension("bak"), &path).expect("a file");
        touch(&path);
    }

    /// Sends a command that evaluates; returns the log and the results of the round.
    fn round(&mut self, command: &str, iteration: u64) -> (String, Vec<String>) {
        let before = self.rounds.read[1];
        self.send(command);
        self.wait_for(&format!("done {iteration} {}", self.sequence));
        let results = self.rounds.next_results();
        (self.rounds.text("log")[before..].to_owned(), results)
    }
}

/// Writes a model in two shards, as GGUF-Tool-Suite has them: the first one has no tensors.
fn write_two_shards(model: &Path, folder: &Path) -> [PathBuf; 2] {
    let bytes = fs::read(model).expect("a model");
    let header = GgufFile::open(model, Access::Read).expect("a model").header;
    let offsets = header.tensors.iter().map(|tensor| tensor.offset);
    let data = offsets.min().expect("tensors") as usize;
    let key = |name: &str, ty: u32, value: &[u8]| {
        let length = (name.len() as u64).to_le_bytes();
        [&length, name.as_bytes(), &ty.to_le_bytes(), value].concat()
    };
    let (u16_type, i32_type) = (2, 5);
    [0u16, 1].map(|number| {
        let total = header.tensors.len() as i32;
        let mut keys = [
            key("split.no", u16_type, &number.to_le_bytes()),
            key("split.count", u16_type, &2u16.to_le_bytes()),
            key("split.tensors.count", i32_type, &total.to_le_bytes()),
        ]
        .concat();
        // The data of the tensors stays aligned.
        let rest = (keys.len() + key("", u16_type, &[0; 2]).len()) % 32;
        keys.extend(key(&"x".repeat(32 - rest), u16_type, &[0; 2]));
        let (tensors, end) = match number {
            0 => (0, data),
            _ => (header.tensors.len() as u64, bytes.len()),
        };
        let entries = u64::from_le_bytes(bytes[16..24].try_into().expect("8 bytes")) + 4;
        let head = [&bytes[..8], &tensors.to_le_bytes(), &entries.to_le_bytes()].concat();
        let path = folder.join(format!("model-{:05}-of-00002.gguf", number + 1));
        fs::write(&path, [&head, &keys, &bytes[24..end]].concat()).expect("free space");
        path
    })
}

/// The program names the first shard when it loads the model.
#[test]
fn a_model_whose_first_shard_has_no_tensors_is_loaded_once() {
    let expected = Expected::get();
    let [folder, other] = [MODEL, MIXED].map(|model| {
        let folder = tempfile::tempdir().expect("a folder");
        (write_two_shards(&fixture(model), folder.path()), folder)
    });
    let ([first, second], folder) = folder;
    let name = second.file_name().expect("a name").to_string_lossy();
    let rounds = Rounds::start_in(
        folder,
        Path::new(first.file_name().expect("a name")),
        &[],
        &FILES,
    );
    let mut driver = Driver {
        rounds,
        sequence: 0,
    };
    driver.wait_for("done 1 0");
    assert_eq!(driver.rounds.next_results(), expected.model[0]);
    assert_eq!(driver.round("compute", 2).1, expected.model[0]);
    driver.swap(&name, &other.0[1]);
    assert_eq!(driver.round("reload", 3).1, expected.mixed[0]);
    driver.restore(&name);
    assert_eq!(driver.round("reload", 4).1, expected.model[0]);
    assert_eq!(driver.rounds.loads(), [1, 0]);
    driver.send("exit");
    assert_eq!(driver.rounds.wait().code(), Some(0));
}

fn touch(path: &Path) {
    let file = File::options().append(true).open(path).expect("a file");
    file.set_modified(std::time::SystemTime::now())
        .expect("a time");
}

#[test]
fn rounds_are_driven_through_files() {
    let expected = Expected::get();
    let (other, changed) = changed_shards();
    assert_eq!(changed.len(), 8);
    let mut driver = Driver::start(&[]);
    driver.wait_for("computing 1 0");
    driver.wait_for("done 1 0");
    assert_eq!(driver.rounds.next_results(), expected.model[0]);

    for name in &changed {
        driver.swap(name, &other.path().join(name));
    }
    let (log, results) = driver.round("reload", 2);
    assert_eq!(results, expected.mixed[0]);
    let tensors = |log: &str| {
        let lines = log.lines().filter_map(|line| {
            let (_, name) = line.split_once("reloaded tensor '")?;
            Some(name.strip_suffix('\'')?.to_owned())
        });
        lines.collect::<Vec<_>>()
    };
    let swapped = tensors(&log);
    assert_eq!(swapped.len(), 8, "{log}");
    for name in &changed {
        driver.restore(name);
    }
    let (log, results) = driver.round("reload", 3);
    assert_eq!(results, expected.model[0]);
    assert_eq!(tensors(&log), swapped);
    let (log, results) = driver.round("compute", 4);
    assert_eq!(
        (results, tensors(&log)),
        (expected.model[0].clone(), vec![])
    );

    // The same type with other bytes: the last half-byte of the last block.
    let (name, original) = &shards()[100];
    let mut bytes = fs::read(original).expect("a file");
    *bytes.last_mut().expect("a byte") ^= 0xff;
    let same_type = driver.rounds.path("same-type");
    fs::write(&same_type, bytes).expect("free space");
    driver.swap(name, &same_type);
    let (log, results) = driver.round("reload", 5);
    assert_eq!(tensors(&log).len(), 1, "{log}");
    let first = driver.rounds.path(&shards()[0].0);
    assert_eq!(results, fresh(&first, &[]));
    driver.restore(name);
    let (log, results) = driver.round("reload", 6);
    assert_eq!(tensors(&log).len(), 1, "{log}");
    assert_eq!(results, expected.model[0]);

    driver.send("stop");
    assert_eq!(driver.rounds.wait().code(), Some(0));
    driver.wait_for(&format!("exiting 6 {}", driver.sequence));
    assert_eq!(
        driver
            .rounds
            .text("log")
            .matches("watching 272 tensors")
            .count(),
        1
    );
}

#[test]
fn bad_commands_and_files_evaluate_nothing() {
    let mut driver = Driver::start(&[]);
    driver.wait_for("done 1 0");
    let first = driver.rounds.next_results();
    let rounds = |driver: &Driver| driver.rounds.text("log").matches("Final estimate").count();

    // Nothing changed.
    let is_matrix = |path: &Path| fs::metadata(path).expect("a file").len() > 300_000;
    let (name, original) = &shards()[100..]
        .iter()
        .find(|(_, path)| is_matrix(path))
        .cloned()
        .expect("a matrix");
    driver.send("reload");
    driver.wait_for("reload_failed 1 1");
    // A tensor of zeros.
    let mut zeros = fs::read(original).expect("a file");
    let half = zeros.len() / 2;
    zeros[half..].fill(0);
    let damaged = driver.rounds.path("damaged");
    fs::write(&damaged, zeros).expect("free space");
    driver.swap(name, &damaged);
    driver.send("reload");
    driver.wait_for("reload_failed 1 2");
    let log = driver.rounds.text("log");
    assert_eq!(log.matches("' cannot be hot-swapped: ").count(), 1, "{log}");
    // A shard of another tensor.
    driver.restore(name);
    driver.swap(name, &shards()[200].1);
    driver.send("reload");
    driver.wait_for("reload_failed 1 3");
    driver.restore(name);
    // No file.
    fs::rename(driver.rounds.path(name), driver.rounds.path("away")).expect("a file");
    driver.send("reload");
    driver.wait_for("reload_failed 1 4");
    fs::rename(driver.rounds.path("away"), driver.rounds.path(name)).expect("a file");

    for line in [
        "",
        "x",
        "compute",
        "compute 5 6",
        "compute 4",
        "compute -1",
        "\0\u{feff}",
    ] {
        driver.send_line(&format!("{line}\n"));
    }
    driver.send_line(&"compute 5 ".repeat(1000));
    driver.wait_for("reload_failed 1 4");
    assert_eq!(rounds(&driver), 1);
    let control = driver.rounds.path("control");
    fs::create_dir(&control).expect("free space");
    let logged = |driver: &Driver, text: &str| driver.rounds.text("log").matches(text).count();
    eventually("a warning", || {
        (logged(&driver, "not a regular file") > 0).then_some(())
    });
    fs::remove_dir(&control).expect("an empty folder");

    // A number after which none is left, and a file of another user.
    driver.send_line(&format!("compute {}\n", u64::MAX));
    eventually("a warning", || {
        (logged(&driver, "the last one was 4, and the next is larger") > 0).then_some(())
    });
    let other = driver.rounds.path("other");
    fs::write(&other, "compute 6\n").expect("free space");
    match chown(&other, Some(65534), None) {
        Ok(()) => {
            fs::rename(&other, &control).expect("renamed");
            eventually("a warning", || {
                (logged(&driver, "belongs to user 65534") > 0).then_some(())
            });
            fs::remove_file(&control).expect("it is not taken");
        }
        Err(error) => skipped(&format!("no file of another user without root: {error}")),
    }
    assert_eq!(rounds(&driver), 1);

    // A command is read once its line is complete.
    let mut file = File::create(&control).expect("free space");
    write!(file, "compute 7").expect("free space");
    writeln!(file).expect("free space");
    driver.sequence = 7;
    driver.wait_for("done 2 7");
    assert_eq!(driver.rounds.next_results(), first);
    assert_eq!(logged(&driver, "not a regular file"), 1);
    driver.send("quit");
    assert_eq!(driver.rounds.wait().code(), Some(0));
    driver.wait_for("exiting 2 8");
}

/// The status cannot be written at first, as on a full disk.
#[test]
fn a_status_that_cannot_be_written_is_tried_again() {
    let folder = with_shards();
    let at = folder.path().join("status");
    fs::create_dir(&at).expect("free space");
    // A link of another user at a name that can be guessed.
    let precious = folder.path().join("precious");
    fs::write(&precious, "1").expect("free space");
    symlink(&precious, folder.path().join("status.tmp")).expect("a link");
    let first = &shards()[0].0;
    let rounds = Rounds::start_in(folder, Path::new(first), &[], &FILES);
    let mut driver = Driver {
        rounds,
        sequence: 0,
    };
    let failures = |driver: &Driver| {
        let log = driver.rounds.text("log");
        log.matches("cannot write the status").count()
    };
    eventually("the first round", || {
        let log = driver.rounds.text("log");
        log.contains("Final estimate").then_some(())
    });
    assert_eq!(failures(&driver), 1);
    fs::remove_dir(&at).expect("an empty folder");
    driver.wait_for("done 1 0");
    assert_eq!(fs::read(&precious).expect("a file"), b"1");
    assert_eq!(failures(&driver), 1);
    driver.send("exit");
    assert_eq!(driver.rounds.wait().code(), Some(0));
}
