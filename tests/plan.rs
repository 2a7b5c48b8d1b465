//! `llama-sidecar plan` with real programs, and with one whose speeds are constant.

use std::ffi::OsStr;
use std::fs::Permissions;
use std::io::{BufRead, BufReader, Read};
use std::net::TcpListener;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus, Stdio};

use serde_json::Value;
use testkit::fixtures::{cache, fixture};
use testkit::host::{built, plain_command};
use testkit::memory_limit::MemoryLimit;
use testkit::process::with_variable;
use testkit::server::llama;
use testkit::sim_ggml::SimGgml;
use testkit::slow_disk::{SlowDisk, Speed};

/// A command without the variables of llama-sidecar.
fn plan(folder: &Path) -> Command {
    let mut command = plain_command(built("release/llama-sidecar"));
    command.arg("plan").env("XDG_DATA_HOME", folder);
    let temporary = folder.join(OsStr::from_bytes(b"no UTF-8: \xE9"));
    std::fs::create_dir_all(&temporary).expect("a folder");
    command.env("TMPDIR", temporary);
    command
}

/// Adds llama-server with a model.
fn server(command: &mut Command, model: &Path) {
    command.arg("--").arg(llama("llama-server").get_program());
    command.arg("-m").arg(model);
    command.args(["-c", "512", "-t", "1", "--no-webui"]);
}

/// A program whose speeds are those that a shell script sets for its options.
fn fake(folder: &Path, script: &str) -> PathBuf {
    let path = folder.join("llama-fake");
    let text = format!(
        "#!/bin/sh\n\
         prompt=100 answer=100\n\
         case \" $* \" in *' --help '*) echo '--model -m --threads -t --threads-batch -tb --load-mode -lm --no-repack'; exit;; esac\n\
         {script}\n\
         echo \"prompt eval time = $prompt ms / 100 tokens\" >&2\n\
         echo \"eval time = $answer ms / 100 runs\" >&2\n"
    );
    std::fs::write(&path, text).expect("a script");
    std::fs::set_permissions(&path, Permissions::from_mode(0o755)).expect("a script");
    path
}

/// A plan of that program, which was typed with more threads than any machine has.
fn plan_of_fake(folder: &Path, script: &str, options: &[&str]) -> Command {
    let mut command = plan(folder);
    command.args(options).arg("--").arg(fake(folder, script));
    command.arg("-m").arg(fixture("small-moe.gguf"));
    command.args(["-t", "1000"]);
    command
}

fn ended(command: &mut Command) -> (String, String, ExitStatus) {
    let output = command.output().expect("it starts");
    let [text, log] =
        [output.stdout, output.stderr].map(|text| String::from_utf8_lossy(&text).into_owned());
    (text, log, output.status)
}

fn json(command: &mut Command) -> Value {
    let (text, log, status) = ended(command);
    assert!(status.success(), "{text}{log}");
    serde_json::from_str(&text).expect("JSON")
}

fn choices(plan: &Value) -> &Vec<Value> {
    plan["choices"].as_array().expect("choices")
}

fn command(of: &Value) -> &str {
    of["command"].as_str().expect("a command")
}

#[test]
fn a_server_is_measured_beside_another_one() {
    let folder = tempfile::tempdir().expect("a folder");
    let mut planned = plan(folder.path());
    planned.args(["--json", "--time", "1m"]);
    server(&mut planned, &fixture("small-moe.gguf"));
    // The port of a server that runs.
    let used = TcpListener::bind("127.0.0.1:0").expect("a port");
    let port = used.local_addr().expect("a port").port().to_string();
    let found = json(planned.args(["--port", &port]));
    let ran = choices(&found);
    assert!(!ran.is_empty(), "{found}");
    let typed = ran.iter().find(|of| of["command"] == found["typed"]);
    let typed = typed.expect("the command that was typed has run");
    for of in ran {
        for name in ["prompt_tokens_s", "answer_tokens_s", "start_seconds"] {
            assert!(of[name].as_f64() > Some(0.0), "{name}: {of}");
        }
    }
    let ratio = |of: &Value| of["faster"].as_f64().expect("a ratio");
    assert_eq!(ratio(typed), 1.0);
    let others = &ran[1..];
    assert!(
        others
            .windows(2)
            .all(|pair| ratio(&pair[0]) >= ratio(&pair[1])),
        "{found}"
    );
}

#[test]
fn the_fastest_of_each_are_found_and_measured_together() {
    let folder = tempfile::tempdir().expect("a folder");
    // Fewer threads are faster for answers, and slower for prompts.
    let script = "case \" $* \" in *' 1000 '*) ;; *) prompt=200;; esac\n\
        case \" $* \" in *' --threads '*) answer=50;; esac\n\
        case \" $* \" in *' --load-mode none '*) answer=$((answer * 8 / 10)) prompt=$((prompt * 8 / 10));; esac\n\
        case \" $* \" in *' --no-repack '*) answer=$((answer * 2));; esac";
    let (text, log, status) = ended(&mut plan_of_fake(folder.path(), script, &[]));
    assert!(status.success(), "{text}{log}");
    let best = text.lines().nth(6).expect("a command");
    let rest = best.split_once("small-moe.gguf ").expect("a model").1;
    assert!(rest.starts_with("--load-mode none --threads "), "{text}");
    assert!(rest.ends_with(" --threads-batch 1000"), "{text}");
    // 512 / 1000 + 128 / 1000 s, and 512 / 1250 + 128 / 2500 s.
    let part = "It is 1.39x ±0.00 as fast as the command that was typed, for 512 tokens of prompt and 128 of answer";
    assert!(text.contains(part), "{text}");
    assert!(
        text.contains("answers take ") && text.contains("prompts take "),
        "{text}"
    );
    assert!(text.contains("(as typed)"), "{text}");
}

#[test]
fn a_command_that_does_not_run_is_left_out_with_the_reason() {
    let folder = tempfile::tempdir().expect("a folder");
    let plan = |script: &str| plan_of_fake(folder.path(), script, &[]);
    let fails = |option| {
        format!("case \" $* \" in *' {option} '*) echo error: no memory >&2; exit 1;; esac")
    };
    let (text, log, _) = ended(&mut plan(&fails("--no-repack")));
    let out = text.lines().last().expect("a line");
    assert!(
        out.starts_with("Left out: ") && out.ends_with("no memory"),
        "{text}{log}"
    );
    assert!(
        text.contains("It is the command that was typed: none of the others is known to be faster"),
        "{text}"
    );

    let (text, log, _) = ended(&mut plan(&fails("-t 1000")));
    assert!(text.contains("The command that was typed has no figures: the program ended (exit status: 1); it printed: error: no memory"), "{text}{log}");
    assert!(
        text.lines()
            .nth(5)
            .is_some_and(|best| best.contains("--threads ")),
        "{text}"
    );

    let (text, log, status) = ended(&mut plan("echo error: no memory >&2; exit 1"));
    assert_eq!((status.code(), text.as_str()), (Some(1), ""));
    assert!(
        log.contains("none of the commands runs here; the one that was typed: the program ended"),
        "{log}"
    );
}

#[test]
fn only_what_a_program_has_is_tried() {
    let folder = tempfile::tempdir().expect("a folder");
    let (text, log, status) = ended(&mut plan_of_fake(folder.path(), "exit 1", &["--dry-run"]));
    assert!(status.success(), "{log}");
    let first = text.lines().next().expect("a command");
    assert!(first.ends_with("small-moe.gguf -t 1000"), "{text}");
    for (part, is_there) in [
        ("--threads ", true),
        ("--load-mode none", true),
        ("--no-repack", true),
        ("--gpu-layers", false),
        ("--stream-experts", false),
        ("--ubatch-size", false),
    ] {
        assert_eq!(text.contains(part), is_there, "{part}: {text}");
    }
}

#[test]
fn places_on_a_gpu_are_tried() {
    let folder = tempfile::tempdir().expect("a folder");
    let sim = SimGgml::new(&[]);
    let mut command = plan(folder.path());
    sim.prepare(&mut command);
    command.arg("--dry-run");
    server(&mut command, &fixture("small-moe.gguf"));
    let (text, log, status) = ended(&mut command);
    assert!(status.success(), "{text}{log}");
    for part in ["--gpu-layers 999", "--gpu-layers 0", "--ubatch-size 2048"] {
        assert!(text.contains(part), "{part}: {text}{log}");
    }
}

#[test]
fn experts_are_streamed_where_they_do_not_fit() {
    let folder = tempfile::tempdir().expect("a folder");
    let disk = SlowDisk::mount(&fixture("moe.gguf"), Speed::new(300, 1000)).expect("FUSE");
    disk.read_ahead_kb(128).expect("a mounted disk");
    let limit = MemoryLimit::new(250 << 20).expect("a control group");
    let mut planned = plan(folder.path());
    planned.args([
        "--json",
        "--time",
        "1m",
        "--prompt-tokens",
        "32",
        "--answer-tokens",
        "16",
    ]);
    server(&mut planned, &disk.path());
    limit.apply(&mut planned);
    let found = json(&mut planned);
    let all = || {
        choices(&found)
            .iter()
            .chain(found["left_out"].as_array().expect("a list"))
    };
    assert!(
        !all().any(|of| command(of).contains("--load-mode none")),
        "it would not fit: {found}"
    );
    let is_streamed =
        |of: &&Value| command(of).starts_with("llama-sidecar run --stream-experts -- ");
    assert!(all().any(|of| is_streamed(&of)), "{found}");
    // The typed command may take all of the time.
    let streamed = choices(&found).iter().find(is_streamed);
    assert!(
        streamed.is_some() || found["stopped"].is_string(),
        "{found}"
    );
}

#[test]
fn what_cannot_be_planned_is_an_error_with_the_reason() {
    let folder = tempfile::tempdir().expect("a folder");
    let refused = |words: &[&str]| {
        let (text, log, status) = ended(plan(folder.path()).arg("--").args(words));
        assert_eq!(status.code(), Some(1), "{text}{log}");
        log.lines().last().unwrap_or_default().to_owned()
    };
    let python = cache().join("llama-cpp-python/bin/python");
    let python = python.display().to_string();
    let program = llama("llama-server");
    let program = program.get_program().to_str().expect("UTF-8");
    let other = fixture("small.gguf").with_file_name("absent.gguf");
    let other = other.display().to_string();
    for (words, why) in [
        (&[&*python, "x.py"][..], "is none of llama.cpp's programs"),
        (
            &["/nowhere/llama-server", "-m", "x"],
            "/nowhere/llama-server",
        ),
        (&[program, "-c", "512"], "names no model"),
        (&[program, "-m", &other], "cannot read the model"),
        (&[program, "-m", program], "cannot read the model"),
    ] {
        let sentence = refused(words);
        assert!(sentence.contains(why), "{words:?}: {sentence}");
    }
}

/// What is known by then is printed, and no process is left.
#[test]
fn an_interruption_prints_the_best_so_far() {
    let folder = tempfile::tempdir().expect("a folder");
    let interrupted_at = |part: &str, script: &str| {
        let mut command = plan_of_fake(folder.path(), script, &[]);
        let value = format!("{}-{part}", std::process::id());
        command.env("PLANNED_BY", &value);
        command.stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().expect("it starts");
        let errors = BufReader::new(child.stderr.take().expect("a pipe"));
        let mut lines = errors.lines().map(|line| line.expect("a line"));
        assert!(lines.any(|line| line.contains(part)));
        // SAFETY: a child that was not waited for.
        unsafe { libc::kill(child.id() as libc::pid_t, libc::SIGTERM) };
        let log: Vec<String> = lines.collect();
        let status = child.wait().expect("a child");
        assert_eq!(status.signal(), Some(libc::SIGTERM), "{log:?}");
        assert_eq!(
            with_variable(&format!("PLANNED_BY={value}")),
            Vec::<u32>::new()
        );
        let mut text = String::new();
        let mut output = child.stdout.take().expect("a pipe");
        output.read_to_string(&mut text).expect("UTF-8");
        (text, log.join("\n"))
    };
    let (text, log) = interrupted_at("as it was typed", "sleep 600");
    assert!(
        text.is_empty() && log.contains("interrupted"),
        "{text}{log}"
    );
    let waits =
        "case \" $* \" in *' --no-repack '*) sleep 600;; *' --load-mode '*) answer=10;; esac";
    let (text, log) = interrupted_at(" --no-repack", waits);
    assert!(
        text.contains("Type this:") && text.contains(" --load-mode none\n"),
        "{text}{log}"
    );
    assert!(text.contains(": it was interrupted)"), "{text}{log}");
}
