//! Text of files, paths, programs and sockets: no command prints it so that a terminal obeys it, or so that it begins a line.

use std::collections::BTreeSet;
use std::ffi::OsString;
use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::unix::ffi::OsStringExt;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use serde_json::{Value, json};
use sidecar_core::text::is_hidden;
use sidecar_core::trace::{RouteLayout, RouteWriter};
use testkit::writer::{F32, Gguf, Kv};

/// A colour, a bell, a title, an escape of one character, reversed text, a byte order mark, and a line of its own.
const HOSTILE: &str =
    "\u{1b}[31mred\u{7}\u{1b}]0;t\u{7}\u{9b}2J\u{202e}\u{feff}<b>\"\nforged: all is well\r\n";
/// A name of a tensor, which is short.
const TENSOR: &str = "blk.0.\u{1b}[2J<b>\u{9b}\u{202e}\nforged.weight";
/// A part of both, once it is text: as it is escaped, and as a shell reads it.
const PLAIN: [&str; 3] = ["u009b", "\\xc2\\x9b", "\\xC2\\x9B"];

/// Words of each command. A word in capitals stands for a hostile file; a command that prints none of its text is marked.
const ROWS: &[(&str, &str)] = &[
    ("inspect", "MODEL"),
    ("inspect", "--json MODEL"),
    ("inspect", "TRACE"),
    ("run", "MISSING"),
    (
        "run",
        "--dry-run --set LLAMA_EXPERT_TRACE_OUTPUT=HOSTILE PROGRAM",
    ),
    ("run", "--expert-trace-output MISSING/x PROGRAM"),
    ("doctor", "PROGRAM"),
    ("compare", "-o OUT.json MISSING"),
    ("plan", "MODEL"),
    ("swap", "MODEL --tensor (?s).* --from OTHER --dry-run"),
    ("swap", "MODEL --tensor (?s).* --from OTHER"),
    ("undo", "MODEL"),
    ("undo", "-s SOCKET"),
    ("undo", "--json -s SOCKET"),
    ("swap", "--live -s SOCKET --tensor .* --from OTHER"),
    (
        "shrink",
        "MODEL --text TRACE --size 1K -o OUT.gguf --program MISSING",
    ),
    ("tune", "MODEL --text TRACE --types q4_0 --program MISSING"),
    ("prune", "MODEL --experts LIST -o OUT.gguf"),
    ("prune", "MODEL --experts MASKS -o OUT.gguf"),
    ("ctl", "margins MODEL --text TRACE --program MISSING"),
    ("status", "--socket SOCKET"),
    ("status", "--hash --socket SOCKET"),
    ("status", "--json --socket SOCKET"),
    ("status", "--socket SOCKET --save OUT.json"),
    ("ask", "--prompts PROMPTS SERVER"),
    ("ask", "--prompts PROMPTS -s REFUSES"),
    ("ask", "--prompts PROMPTS --against ANSWERS"),
    ("status", "--socket REFUSES"),
    ("status", "--socket GARBAGE"),
    ("ctl", "freeze --socket SOCKET"),
    ("ctl", "unfreeze --socket REFUSES"),
    ("top", "--samples 2 --interval 0.1 --socket SOCKET"),
    ("top", "--samples 1 --socket GARBAGE"),
    ("ctl", "metrics --socket SOCKET"),
    ("ctl", "metrics --json --socket SOCKET"),
    ("ctl", "reload --socket SOCKET"),
    ("ctl", "reload --json --socket SOCKET"),
    ("ctl", "ping --socket SOCKET"),
    ("trace", "--socket SOCKET"),
    ("ctl", "mask --socket REFUSES --layer 0:1"),
    ("ctl", "mask --socket SOCKET --experts LIST"),
    ("ctl", "prefer --socket REFUSES --margin 0.1"),
    ("ctl", "mark --socket SOCKET HOSTILE"),
    ("ctl", "round --socket REFUSES --start"),
    ("report", "TRACE"),
    ("report", "--format csv MISSING"),
    ("report", "--compare TRACE OTHER.json"),
    ("report", "--compare ROUTES"),
    ("report", "--memory 1G MISSING"),
    ("report", "-o OUT.html TRACE"),
    ("report", "-o OUT.html --compare ROUTES TRACE"),
    ("report", "--pin 50% --model MODEL -o OUT.csv TRACE"),
    ("report", "MODEL"),
    ("report", "-o OUT.html -s SOCKET"),
    ("inspect", "--load MISSING"),
    // An argument that clap refuses.
    ("inspect", "--HOSTILE"),
];
/// Forms that print no text from outside: their own texts are constant.
const SILENT: &[&str] = &["ctl help"];

struct Place {
    folder: tempfile::TempDir,
    /// The address of a server.
    server: String,
}

impl Place {
    fn new() -> Place {
        let place = Place {
            folder: tempfile::tempdir().expect("a folder"),
            server: serve(),
        };
        // A place of its own for the command, with a drop-in that no program loads.
        for folder in ["bin", "lib"] {
            fs::create_dir(place.root().join(folder)).expect("free space");
        }
        let command = env!("CARGO_BIN_EXE_llama-sidecar");
        fs::copy(command, place.command()).expect("free space");
        let drop_in = place.root().join("lib/libllama_sidecar_preload.so");
        fs::write(drop_in, "").expect("free space");

        let model = Gguf::default()
            .kv("general.name", Kv::Text(HOSTILE.into()))
            .kv("general.description", Kv::Text(HOSTILE.into()))
            .kv(HOSTILE, Kv::Texts(vec![HOSTILE.into()]))
            .kv("llama.expert_count", Kv::U32(2))
            .kv("llama.expert_used_count", Kv::U32(1))
            .tensor(TENSOR, &[32, 2], F32, 1)
            .tensor("blk.0.ffn_gate_inp.weight", &[32, 2], F32, 2)
            .tensor("blk.0.ffn_down_exps.weight", &[32, 32, 2], F32, 3);
        model.write(&place.path("MODEL")).expect("free space");
        let mut other = model.clone();
        other.tensors[0].data.reverse();
        other.write(&place.path("OTHER")).expect("free space");
        fs::write(place.path("TRACE"), trace().to_string()).expect("free space");
        fs::write(place.path("OTHER.json"), trace().to_string()).expect("free space");
        fs::write(place.path("LIST"), format!("[{HOSTILE}]")).expect("free space");
        fs::write(place.path("MASKS"), "[{\"layer\":0,\"experts\":[0]}]").expect("free space");
        let prompt = HOSTILE.lines().next().expect("a line");
        fs::write(place.path("PROMPTS"), prompt).expect("free space");
        let asked = json!({"prompt": "", "content": "", "tokens": []});
        let answers = json!({"llama_sidecar": "answers", "tokens": 1, "answers": [asked]});
        fs::write(place.path("ANSWERS"), answers.to_string()).expect("free space");
        let script = "#!/bin/sh\nexit 3\n";
        fs::write(place.path("PROGRAM"), script).expect("free space");
        let mode = fs::Permissions::from_mode(0o755);
        fs::set_permissions(place.path("PROGRAM"), mode).expect("a mode");
        let layout = RouteLayout::new(HOSTILE, &[(0, 2)], 1, false).expect("a layout");
        let mut routes = RouteWriter::create(&place.path("ROUTES"), layout).expect("free space");
        for mark in [HOSTILE, "another"] {
            routes.mark(mark).expect("free space");
            routes.rows(0, &[0, 1], &[]).expect("free space");
        }
        listen(&place.path("SOCKET"), format!("{}\n", answer()));
        let refusal = json!({"ok": false, "error": HOSTILE});
        listen(&place.path("REFUSES"), format!("{refusal}\n"));
        listen(&place.path("GARBAGE"), HOSTILE.into());
        place
    }

    fn root(&self) -> &Path {
        self.folder.path()
    }

    fn command(&self) -> PathBuf {
        self.root().join("bin/llama-sidecar")
    }

    /// Returns the path of a file whose name is hostile, and no UTF-8 where the socket's address permits it.
    fn path(&self, name: &str) -> PathBuf {
        let (name, ending) = name.split_once('.').unwrap_or((name, ""));
        let ending = match (ending, name) {
            ("", "MODEL" | "OTHER") => ".gguf".into(),
            ("", "ROUTES") => ".routes".into(),
            ("", _) => String::new(),
            (ending, _) => format!(".{ending}"),
        };
        let name = name.to_lowercase();
        // A pattern of sockets is text.
        let is_text = ["socket", "refuses", "garbage"].contains(&&*name);
        let bytes = [
            name.as_bytes(),
            "\u{1b}[31mred\u{7}\u{9b}\u{202e}\nforged".as_bytes(),
            if is_text { b"" } else { b"\xff" },
            ending.as_bytes(),
        ];
        self.root().join(OsString::from_vec(bytes.concat()))
    }

    fn word(&self, word: &str) -> OsString {
        if let Some(dashes) = word.strip_suffix("HOSTILE") {
            return format!("{dashes}{HOSTILE}").into();
        }
        if word == "SERVER" {
            return self.server.clone().into();
        }
        match (
            word.starts_with(|letter: char| letter.is_ascii_uppercase()),
            word.split_once('/'),
        ) {
            (false, _) => word.into(),
            (true, Some((folder, name))) => self.path(folder).join(name).into(),
            (true, None) => self.path(word).into(),
        }
    }

    /// Runs a command; returns what it printed and wrote.
    fn run(&self, command: &str, words: &str) -> Vec<u8> {
        let mut process = Command::new(self.command());
        process.arg(command);
        process.args(words.split_whitespace().map(|word| self.word(word)));
        process.current_dir(self.root()).stdin(Stdio::null());
        process
            .env("XDG_DATA_HOME", self.root())
            .env("TMPDIR", self.root());
        let output = process.output().expect("it starts");
        let mut all = [output.stdout, output.stderr].concat();
        for ending in ["html", "csv"] {
            let path = self.path(&format!("OUT.{ending}"));
            if let Ok(text) = fs::read(&path) {
                all.extend(text);
                fs::remove_file(path).expect("a file");
            }
        }
        all
    }
}

/// Answers requests for completions, to the end of this process. Returns the address.
fn serve() -> String {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let address = listener.local_addr().expect("an address").to_string();
    std::thread::spawn(move || {
        for mut client in listener.incoming().flatten() {
            let mut read = [0; 1 << 16];
            let _ = client.read(&mut read);
            let answer = json!({"content": HOSTILE, "completion_probabilities": []}).to_string();
            let length = answer.len();
            let head = format!("HTTP/1.1 200 OK\r\nContent-Length: {length}\r\n\r\n");
            let _ = client.write_all((head + &answer).as_bytes());
        }
    });
    address
}

fn trace() -> Value {
    json!({
        "schema": "llama-sidecar/expert-trace/1",
        "model": {"name": HOSTILE, "architecture": HOSTILE, "files": [{"path": HOSTILE, "size": 1, "mtime": 1}]},
        "experts_used": 1, "tokens": 3, "activations": 3, "rejected": 0, "seconds": 1.0,
        "layers": [{"layer": 0, "tokens": 3, "counts": [2, 1], "expert_bytes": 4096,
            "locality": {"first": 2, "lru": [1, 0], "lfu": [1, 0],
                "window": {"tokens": 3, "first": 2, "lru": [1, 0], "best": [1, 0]}}}],
    })
}

/// An answer to every request, hostile in each text.
fn answer() -> Value {
    let tensor = json!({"name": HOSTILE, "states": [], "old_type": HOSTILE, "new_type": HOSTILE, "from": HOSTILE});
    json!({
        "ok": true, "pid": 7, "version": HOSTILE, "state": HOSTILE,
        "waiting": {"obstacle": HOSTILE, "seconds": 1.0},
        "failures": {HOSTILE: 3},
        "no_effect": [{"requested": HOSTILE, "sentence": HOSTILE, "so_far": false}],
        "models": [{
            "model": 1, "files": [HOSTILE], "changed": [tensor],
            "overlays": [{"tensor": "x", "from": HOSTILE}, {"tensor": HOSTILE, "from": HOSTILE}],
            "loaded_bytes": {HOSTILE: 1}, "content_hash": HOSTILE, "obstacle": HOSTILE, "hotswaps": HOSTILE,
            "blocked": {"cause": HOSTILE, "error": HOSTILE, "seconds": 1.0, "attempts": 2},
            "uncounted": {"path": HOSTILE, "layers": [1], "evaluations": 2, "reason": HOSTILE},
        }],
        "reports": [
            {"model": 1, "error": HOSTILE},
            {"model": 1, "failure": HOSTILE, "files": [{"path": HOSTILE, "event": "ignored", "reason": HOSTILE}],
             "tensors": [{"name": HOSTILE, "outcome": HOSTILE, "old_type": HOSTILE, "new_type": HOSTILE,
                          "place": HOSTILE, "reason": HOSTILE}]},
        ],
        "text": format!("# HELP llama_sidecar_a \u{1b}[31m\u{9b}\n# TYPE llama_sidecar_a gauge\n\
            llama_sidecar_a{{model=\"\u{1b}[31mred\u{9b}\"}} 1\nllama_sidecar_b 2\n"),
        "traces": [trace()],
    })
}

/// Listens at a socket, and answers each line with a text.
fn listen(path: &Path, text: String) {
    let listener = UnixListener::bind(path).expect("a short path");
    std::thread::spawn(move || {
        for client in listener.incoming() {
            let mut client = client.expect("a client");
            let mut request = String::new();
            let _ = BufReader::new(&client).read_line(&mut request);
            let _ = client.write_all(text.as_bytes());
        }
    });
}

/// Returns the text of an output; fails if it has a hidden character, or a line that text from outside began, or nothing of
/// the hostile text.
fn check(output: &[u8]) -> Result<String, String> {
    let text = String::from_utf8(output.to_vec()).map_err(|error| error.to_string())?;
    for line in text.lines() {
        if line.contains(|character| is_hidden(character) && character != '\t') {
            return Err(format!("a hidden character in {line:?}"));
        }
        // In a page, an end of a line is a space.
        if line.starts_with("forged") && !text.contains("<html") {
            return Err(format!("a line was forged: {text:?}"));
        }
    }
    // A label of a metric escapes a backslash once more.
    let once = text.replace("\\\\", "\\");
    match PLAIN.iter().any(|plain| once.contains(plain)) {
        true => Ok(text),
        false => Err(format!("nothing hostile was printed: {text}")),
    }
}

/// Returns the commands that the command names in its help, and in that of `ctl`.
fn commands(place: &Place) -> BTreeSet<String> {
    let of = |words: &[&str]| -> Vec<String> {
        let help = Command::new(place.command()).args(words).arg("-h").output();
        let help = String::from_utf8(help.expect("it starts").stdout).expect("text");
        let indented = help.lines().filter_map(|line| line.strip_prefix("  "));
        let names = indented.filter(|line| line.starts_with(|of: char| of.is_ascii_lowercase()));
        names
            .filter_map(|line| line.split_whitespace().next().map(str::to_owned))
            .collect()
    };
    let requests = of(&["ctl"]).into_iter().map(|name| format!("ctl {name}"));
    let first = of(&[]).into_iter().filter(|name| name != "ctl");
    first.chain(requests).collect()
}

#[test]
fn every_command_prints_plain_text() {
    let place = Place::new();
    let tried: BTreeSet<String> = ROWS
        .iter()
        .map(|(command, words)| match *command {
            "ctl" => format!("ctl {}", words.split(' ').next().unwrap_or_default()),
            name => name.to_owned(),
        })
        .collect();
    let silent = SILENT.iter().map(|name| (*name).to_owned());
    let tried: BTreeSet<String> = tried.into_iter().chain(silent).collect();
    assert_eq!(commands(&place), tried, "each command has a row");
    let failed = ROWS.iter().filter_map(|(command, words)| {
        let what = format!("{command} {words}");
        let text = check(&place.run(command, words));
        let error = text.err();
        error.map(|error| format!("{what}: {error}"))
    });
    let failed: Vec<String> = failed.collect();
    assert!(
        failed.is_empty(),
        "{} of {}:\n{}",
        failed.len(),
        ROWS.len(),
        failed.join("\n")
    );
}

/// Returns what a server that the command starts answers to a request.
fn served(place: &Place, words: &[&str], request: impl Fn(&str) -> String) -> Vec<u8> {
    // The brackets of an escape would be a class of characters.
    let socket = match words[0] {
        "ctl" => place.root().join("socket*"),
        _ => place.path("SOCKET"),
    };
    let mut child = Command::new(place.command())
        .args(words)
        .arg("--socket")
        .arg(socket)
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("it starts");
    let (out, errors) = (child.stdout.take(), child.stderr.take());
    let mut printed: Box<dyn BufRead> = match words[0] {
        "top" => Box::new(BufReader::new(out.expect("a pipe"))),
        _ => Box::new(BufReader::new(errors.expect("a pipe"))),
    };
    let mut line = String::new();
    printed.read_line(&mut line).expect("an address");
    let at = line.find("127.0.0.1:").expect("an address");
    let address = line[at..].split(['/', '\n']).next().expect("an address");
    let mut page = Vec::new();
    for _ in 0..2 {
        let mut client = TcpStream::connect(address).expect("it listens");
        client
            .write_all(request(line.trim_end()).as_bytes())
            .expect("a request");
        page.clear();
        client.read_to_end(&mut page).expect("an answer");
        if String::from_utf8_lossy(&page).contains("u009b2J") {
            break;
        }
        std::thread::sleep(std::time::Duration::from_millis(500));
    }
    child.kill().expect("a process");
    child.wait().expect("it ends");
    let text = String::from_utf8_lossy(&page).replace("\r\n", "\n");
    text.into_bytes()
}

#[test]
fn every_page_that_is_served_is_plain_text() {
    let place = Place::new();
    let get = |path: &str, token: &str| {
        format!(
            "GET {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {token}\r\nConnection: close\r\n\r\n"
        )
    };
    let metrics = served(
        &place,
        &["ctl", "metrics", "--listen", "127.0.0.1:0"],
        |_| get("/metrics", ""),
    );
    let text = check(&metrics).expect("metrics --listen");
    assert!(
        text.contains("} 1\n") && !text.contains("llama_sidecar_a{"),
        "{text}"
    );
    let samples = served(&place, &["top", "--web", "127.0.0.1:0"], |line| {
        let token = line.rsplit('#').next().expect("a token");
        get("/samples", token)
    });
    check(&samples).expect("top --web");
}
