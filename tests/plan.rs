//! `llama-sidecar plan` with real programs.

use std::ffi::OsStr;
use std::fs::Permissions;
use std::io::{BufRead, BufReader};
use std::net::TcpListener;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{Command, ExitStatus, Stdio};

use serde_json::Value;
use testkit::fixtures::{cache, fixture};
use testkit::host::{built, plain_command};
use testkit::memory_limit::MemoryLimit;
use testkit::process::with_variable;
use testkit::server::llama;
use testkit::sim_ggml::SimGgml;
use testkit::slow_disk::{SlowDisk, Speed};

/// A command without the variables of llama-sidecar, and with a folder for data.
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

#[test]
fn threads_are_chosen_and_measurements_are_kept() {
    let folder = tempfile::tempdir().expect("a folder");
    let model = fixture("small-moe.gguf");
    let mut first = plan(folder.path());
    server(&mut first, &model);
    // The port of a server that runs: a plan is made beside it.
    let used = TcpListener::bind("127.0.0.1:0").expect("a port");
    let port = used.local_addr().expect("a port").port().to_string();
    let (text, log, status) = ended(first.args(["--port", &port]));
    assert!(status.success(), "{text}{log}");
    for part in [
        "with 8 experts (2 for a token)",
        "as typed    prompts ",
        "Type this:",
        "--threads 2",
        "(as typed)",
        "answers wait for",
        "GB/s with 1, ",
        "routed experts",
    ] {
        assert!(text.contains(part), "{part}: {text}");
    }
    assert!(!text.contains("of an earlier run"), "{text}");
    // What was measured while others used the processors is measured again.
    let is_kept = !text.contains("disturbed");
    assert_eq!(text.contains("kept in"), is_kept, "{text}");

    let mut second = plan(folder.path());
    second.arg("--json");
    server(&mut second, &model);
    let found = json(&mut second);
    assert_eq!(found["is_kept"], is_kept);
    assert!(found["measured"]["token"].as_f64() > Some(1.0), "{found}");
    // The run as it was typed is the base of all predictions.
    let is_typed = |of: &&Value| of["command"] == found["typed"];
    let typed = choices(&found).iter().find(is_typed).expect("as typed");
    let [predicted, measured] =
        [&typed["answer_tokens_s"], &found["measured"]["token"]].map(|of| of.as_f64());
    let error = predicted.expect("a speed") / measured.expect("a speed") - 1.0;
    assert!(error.abs() < 0.01, "{typed}");
    for of in choices(&found) {
        let parts = ["processor", "gpu", "link", "disk", "rest"];
        let parts: f64 = parts
            .iter()
            .filter_map(|part| of["token"][part].as_f64())
            .sum();
        let seconds = of["token"]["seconds"].as_f64().expect("seconds");
        assert!((parts - seconds).abs() < 1e-6 + 0.01 * seconds, "{of}");
    }
}

#[test]
fn a_gpu_is_planned_for() {
    let folder = tempfile::tempdir().expect("a folder");
    let sim = SimGgml::new(&[]);
    let mut command = plan(folder.path());
    sim.prepare(&mut command);
    command.args(["--json", "--no-run"]);
    server(&mut command, &fixture("small-moe.gguf"));
    let found = json(&mut command);
    let gpu = found["gpus"][0].as_str().expect("a GPU");
    assert!(gpu.contains("SIM0") && gpu.contains("GB/s"), "{gpu}");
    let on_gpu: Vec<&Value> = choices(&found)
        .iter()
        .filter(|of| of["setting"]["gpu"].is_object())
        .collect();
    let has = |part: &str| {
        on_gpu.iter().any(|of| {
            of["command"]
                .as_str()
                .is_some_and(|text| text.contains(part))
        })
    };
    for part in [
        "--gpu-layers 999",
        "--n-cpu-moe",
        "--post-fetch",
        "--expert-cache",
        "--moe-cache-mib",
    ] {
        assert!(has(part), "{part}: {found:#}");
    }
    for of in on_gpu {
        assert!(
            of["memory"]["others"]["gpu"].as_u64() > Some(1 << 20),
            "{of}"
        );
        assert!(of["token"]["gpu"].as_f64() > Some(0.0), "{of}");
    }
}

#[test]
fn experts_are_streamed_where_they_do_not_fit() {
    let folder = tempfile::tempdir().expect("a folder");
    let disk = SlowDisk::mount(&fixture("moe.gguf"), Speed::new(1000, 400)).expect("FUSE");
    disk.read_ahead_kb(128).expect("a mounted disk");
    disk.drop_cache().expect("a file");
    let limit = MemoryLimit::new(250 << 20).expect("a control group");
    let mut command = plan(folder.path());
    command.args(["--json", "--no-run"]);
    server(&mut command, &disk.path());
    limit.apply(&mut command);
    let found = json(&mut command);
    let file = &found["file"];
    assert!(file["direct"].as_f64() > file["faults"].as_f64(), "{file}");
    let best = &choices(&found)[0];
    let command = best["command"].as_str().expect("a command");
    assert!(
        command.starts_with("llama-sidecar run --stream-experts -- "),
        "{command}"
    );
    assert!(
        best["memory"]["experts"]["disk"].as_u64() > Some(50 << 20),
        "{best}"
    );
    let refused = found["refused"].to_string();
    assert!(
        refused.contains("without a mapping, all of it must fit"),
        "{refused}"
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
    let mixture = fixture("small-moe.gguf").display().to_string();
    let nine = "llama.expert_used_count=int:9";
    for (words, why) in [
        (&[&*python, "x.py"][..], "is none of llama.cpp's programs"),
        (
            &["/nowhere/llama-server", "-m", "x"],
            "/nowhere/llama-server",
        ),
        (&[program, "-c", "512"], "names no model"),
        (&[program, "-m", &other], "cannot read the model"),
        (&[program, "-m", program], "cannot read the model"),
        (
            &[program, "-m", &mixture, "--override-kv", nine],
            "a token uses 9 of the 8 experts of layer 0",
        ),
    ] {
        let sentence = refused(words);
        assert!(sentence.contains(why), "{words:?}: {sentence}");
    }
    let mut with_trace = plan(folder.path());
    with_trace.args(["--trace", "/nowhere/trace.json", "--"]);
    let (_, log, _) = ended(with_trace.args([program, "-m", &mixture]));
    assert!(log.contains("cannot read /nowhere/trace.json"), "{log}");
    assert_eq!(log.lines().count(), 1, "nothing was measured: {log}");
}

#[test]
fn an_option_that_a_program_does_not_have_is_not_predicted() {
    let folder = tempfile::tempdir().expect("a folder");
    let program = llama("llama-server");
    let program = program.get_program().display();
    // The same program, whose help lists fewer options.
    let fewer = folder.path().join("llama-fewer");
    let script = format!(
        "#!/bin/sh\nif [ \"$1\" = --help ]; then {program} --help | grep -v -e --load-mode -e --no-mmap -e --threads-batch; exit; fi\nexec {program} \"$@\"\n"
    );
    std::fs::write(&fewer, script).expect("a script");
    std::fs::set_permissions(&fewer, Permissions::from_mode(0o755)).expect("a script");
    let commands = |program: &dyn Fn(&mut Command)| {
        let mut command = plan(folder.path());
        program(command.args(["--json", "--no-run"]));
        let found = json(&mut command);
        let commands = choices(&found).iter().map(|of| of["command"].to_string());
        commands.collect::<Vec<_>>()
    };
    let model = fixture("small-moe.gguf");
    let all = commands(&|command| server(command, &model));
    let without = commands(&|command| {
        command.arg("--").arg(&fewer).arg("-m").arg(&model);
        command.args(["-t", "1"]);
    });
    assert!(without.len() >= 2, "{without:?}");
    for part in ["--load-mode", "--threads-batch"] {
        let has = |of: &[String]| of.iter().any(|command| command.contains(part));
        assert!(has(&all), "{part}: {all:?}");
        assert!(!has(&without), "{part}: {without:?}");
    }
}

#[test]
fn an_interruption_leaves_no_process() {
    let folder = tempfile::tempdir().expect("a folder");
    let mut command = plan(folder.path());
    let value = format!("{}-plan", std::process::id());
    command.env("PLANNED_BY", &value).stderr(Stdio::piped());
    server(&mut command, &fixture("moe.gguf"));
    let mut child = command.spawn().expect("it starts");
    let errors = BufReader::new(child.stderr.take().expect("a pipe"));
    let mut lines = errors.lines().map(|line| line.expect("a line"));
    assert!(lines.any(|line| line.contains("measuring products")));
    std::thread::sleep(std::time::Duration::from_millis(500));
    // SAFETY: a child that was not waited for.
    unsafe { libc::kill(child.id() as libc::pid_t, libc::SIGTERM) };
    let rest: Vec<String> = lines.collect();
    let status = child.wait().expect("a child");
    assert_eq!(status.signal(), Some(libc::SIGTERM), "{rest:?}");
    assert!(rest.concat().contains("interrupted"), "{rest:?}");
    assert_eq!(
        with_variable(&format!("PLANNED_BY={value}")),
        Vec::<u32>::new()
    );
}
