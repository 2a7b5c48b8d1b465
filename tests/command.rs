//! `llama-sidecar run`, `doctor` and `swap` with real hosts.

mod hosts;

use std::ffi::{CString, OsStr};
use std::fs::File;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::os::fd::AsRawFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use hosts::{TOKENS, on};
use serde_json::{Value, json};
use sidecar_core::experts::Routing;
use sidecar_core::gguf::{Access, GgufFile};
use testkit::fixtures::{fixture, upstream_libraries};
use testkit::host::{DropIn, Host, Program, built, plain_command, preload_library};
use testkit::llama_cpp::llama_cpp;
use testkit::process::{before_exec, lead_session, limit, terminal};
use testkit::server::llama;
use testkit::sim_ggml::SimGgml;

/// What is in the wrong place names its place.
#[test]
fn a_command_line_in_the_wrong_order_is_explained() {
    let model = fixture("small.gguf").display().to_string();
    let says = |arguments: &[&str], expected: &str| {
        let mut command = Command::new(built("release/llama-sidecar"));
        let output = command.args(arguments).output().expect("it starts");
        let text = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success(), "{arguments:?}");
        assert!(text.contains(expected), "{arguments:?}: {text}");
        assert!(!text.contains("as a value"), "{text}");
    };
    let is_model = "is a model: put the program before it, as in llama-server -m ";
    for command in ["run", "doctor", "plan", "compare"] {
        says(&[command, &model], is_model);
    }
    let exit = ["run", "sh", "-c", "exit 3", "--stream-experts"];
    says(
        &exit,
        "--stream-experts is an option of 'run' as well: put it before the program",
    );
    let of_compare = "--with is an option of 'llama-sidecar compare'";
    says(
        &["run", "--with", "--stream-experts", "--", "true"],
        of_compare,
    );
    says(
        &["run", "--no-such-option", "true"],
        "unexpected argument '--no-such-option'",
    );
    // It is not opened, which would wait for a writer.
    let folder = tempfile::tempdir().expect("a folder");
    let fifo = folder.path().join("fifo").display().to_string();
    let made = Command::new("mkfifo").arg(&fifo).status();
    assert!(made.expect("it starts").success());
    says(&["run", &fifo], "is not executable");
}

/// A program gets ignored signals and the limit of open files as `run` has them, and its status is that of `run`.
#[test]
fn a_program_starts_as_without_the_command() {
    let script = "grep SigIgn: /proc/self/status; ulimit -Sn; ulimit -Hn; exit 3";
    let started = |wrapper: &[&OsStr]| {
        let words = [wrapper, &["sh", "-c", script].map(OsStr::new)].concat();
        let mut command = Command::new(words[0]);
        command.args(&words[1..]).stderr(Stdio::null());
        before_exec(&mut command, || {
            let mut files = libc::rlimit {
                rlim_cur: 0,
                rlim_max: 0,
            };
            // SAFETY: system calls between fork and exec; the first one fills the limit.
            unsafe {
                libc::getrlimit(libc::RLIMIT_NOFILE, &mut files);
                files.rlim_cur = 200;
                libc::signal(libc::SIGPIPE, libc::SIG_IGN);
                libc::signal(libc::SIGCHLD, libc::SIG_IGN);
                libc::setrlimit(libc::RLIMIT_NOFILE, &files) == 0
            }
        });
        let output = command.output().expect("it starts");
        (
            output.status.code(),
            String::from_utf8_lossy(&output.stdout).into_owned(),
        )
    };
    let plain = started(&[]);
    assert_eq!(plain.0, Some(3), "{plain:?}");
    let cli = built("release/llama-sidecar");
    for option in ["--none", "--quiet"] {
        let wrapper = [
            cli.as_os_str(),
            "run".as_ref(),
            option.as_ref(),
            "--".as_ref(),
        ];
        assert_eq!(started(&wrapper), plain, "{option}");
    }
}

/// Our command in the program's place chooses what is on in the programs that it starts.
#[test]
fn a_command_of_ours_runs_with_nothing_on() {
    let cli = built("release/llama-sidecar");
    let mut command = Command::new(&cli);
    command
        .args(["run", "--"])
        .arg(&cli)
        .args(["run", "--", "env"]);
    let output = command.output().expect("it starts");
    let text = String::from_utf8_lossy(&output.stdout);
    assert_eq!(
        text.matches("LLAMA_EXPERT_STREAM=needed").count(),
        1,
        "{text}"
    );
    let mut command = Command::new(&cli);
    command
        .args(["run", "--"])
        .arg(&cli)
        .args(["run", "--none", "--", "env"]);
    let output = command.output().expect("it starts");
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(!text.contains("LLAMA_EXPERT_STREAM"), "{text}");
}

#[test]
fn the_wrapper_runs_a_command_with_the_drop_in() {
    let cli = testkit::host::built("release/llama-sidecar");
    let run = |arguments: &[&str]| {
        let output = Command::new(&cli).arg("run").args(arguments).output();
        output.expect("it starts")
    };
    let shell = [
        "--hotswap",
        "--poll-ms",
        "5",
        "--",
        "sh",
        "-c",
        "echo $LLAMA_HOTSWAP_POLL_MS$LD_PRELOAD; exit 5",
    ];
    let output = run(&shell);
    assert_eq!(output.status.code(), Some(5));
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(
        text.starts_with('5') && text.contains("libllama_sidecar_preload.so"),
        "{text}"
    );
    let output = run(&[
        "--expert-trace-output",
        "my trace.csv",
        "--dry-run",
        "--",
        "true",
        "it's",
    ]);
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(
        text.contains("export LLAMA_EXPERT_TRACE_OUTPUT='my trace.csv'\n"),
        "{text}"
    );
    assert!(text.ends_with("true 'it'\\''s'\n"), "{text}");
    let output = run(&["--", "/no/such/program"]);
    assert_eq!(output.status.code(), Some(1));
}

/// As without the command, where the user kills the program itself.
#[test]
fn a_program_ends_with_a_command_that_is_killed() {
    let mut command = plain_command(built("release/llama-sidecar"));
    command.args([
        "run",
        "--none",
        "--quiet",
        "--",
        "sh",
        "-c",
        "echo $$; exec sleep 600",
    ]);
    let mut run = command.stdout(Stdio::piped()).spawn().expect("it starts");
    let mut line = String::new();
    let mut output = BufReader::new(run.stdout.take().expect("a pipe"));
    output.read_line(&mut line).expect("a line");
    run.kill().expect("a child");
    run.wait().expect("a child");
    // The program has the other end of the pipe.
    assert_eq!(output.read_line(&mut line).expect("the end"), 0);
    let program = format!("/proc/{}/stat", line.trim());
    // The pipe closes before the kernel has ended the process.
    let deadline = Instant::now() + Duration::from_secs(60);
    loop {
        let state = std::fs::read_to_string(&program).unwrap_or_default();
        if state.is_empty() || state.contains(") Z ") {
            break;
        }
        assert!(Instant::now() < deadline, "{state}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// The loader of musl would end a program that it cannot load the drop-in into.
#[test]
fn other_loaders_do_not_find_the_drop_in() {
    let script = "echo \"$LD_PRELOAD\"; grep -c libllama_sidecar_preload /proc/self/maps";
    let arguments = ["run", "--hotswap", "--quiet", "--", "sh", "-c", script];
    let (text, status) = command_line(&arguments, "");
    assert!(status.success(), "{text}");
    let (path, mappings) = text.trim_end().split_once('\n').expect("two lines");
    assert!(!Path::new(path).exists(), "{path}");
    let path = path.replace("$LIB", "lib");
    assert!(Path::new(&path).exists(), "{path}");
    assert_ne!(mappings, "0", "{text}");
}

/// Runs a command with the drop-in that is beside a copy of the wrapper, for a user without settings.
fn installed_in(
    folder: &Path,
    drop_in: &[u8],
) -> (String, Option<i32>, Option<std::time::SystemTime>) {
    std::fs::write(folder.join("libllama_sidecar_preload.so"), drop_in).expect("a library");
    let output = Command::new(folder.join("llama-sidecar"))
        .args(["run", "--", "sh", "-c", "echo $LD_PRELOAD; exit 5"])
        .env("XDG_DATA_HOME", folder.join("data"))
        .env_remove("LD_PRELOAD")
        .output()
        .expect("it starts");
    let trials = std::fs::metadata(folder.join("data/llama-sidecar/trials.json"));
    let text = [output.stdout, output.stderr].concat();
    (
        String::from_utf8_lossy(&text).into_owned(),
        output.status.code(),
        trials.and_then(|found| found.modified()).ok(),
    )
}

#[test]
fn a_program_runs_without_a_drop_in_that_fails() {
    let folder = tempfile::tempdir().expect("a folder");
    let cli = testkit::host::built("release/llama-sidecar");
    std::fs::copy(cli, folder.path().join("llama-sidecar")).expect("a copy");
    let whole = std::fs::read(testkit::host::preload_library()).expect("a library");
    // A copy that was interrupted.
    for bytes in [1 << 16, 100, 0] {
        let (text, code, trials) = installed_in(folder.path(), &whole[..bytes]);
        assert!(
            text.starts_with('\n') && text.contains("/sh runs without the drop-in: "),
            "{bytes}: {text}"
        );
        assert_eq!((code, trials), (Some(5), None), "{bytes}: {text}");
    }
    let (text, code, first) = installed_in(folder.path(), &whole);
    assert!(text.starts_with('/') && !text.contains("without"), "{text}");
    assert_eq!(code, Some(5));
    assert!(first.is_some());
    let spaced = folder.path().join("a folder");
    std::fs::create_dir(&spaced).expect("free space");
    let moved = |name: &str| spaced.join(name);
    std::fs::rename(folder.path().join("llama-sidecar"), moved("llama-sidecar")).expect("a folder");
    let (text, code, _) = installed_in(&spaced, &whole);
    assert!(
        text.contains("install llama-sidecar in another folder"),
        "{text}"
    );
    assert_eq!(code, Some(5), "{text}");
}

#[test]
fn a_trial_that_succeeded_is_kept() {
    let folder = tempfile::tempdir().expect("a folder");
    let run = || {
        let mut command = Command::new(testkit::host::built("release/llama-sidecar"));
        command
            .args(["run", "--", "true"])
            .env("XDG_DATA_HOME", folder.path());
        assert!(command.output().expect("it starts").status.success());
        let trials = folder.path().join("llama-sidecar/trials.json");
        let found = std::fs::metadata(trials).expect("a list");
        (found.ino(), found.modified().expect("a time"))
    };
    assert_eq!(run(), run());
}

#[test]
fn a_program_runs_where_no_file_can_be_made() {
    let cli = testkit::host::built("release/llama-sidecar");
    let run = |folders: &str| {
        let script = format!("{folders} \"$0\" run -- sh -c 'exit 5'");
        let mut command = Command::new("unshare");
        command.args(["--mount", "sh", "-c", &script]).arg(&cli);
        let output = command.output().expect("util-linux is installed");
        let text = String::from_utf8_lossy(&output.stderr).into_owned();
        (output.status.code(), text)
    };
    // A read-only root.
    let (code, text) = run("mount -o remount,ro,bind / || exit 9;");
    if code != Some(5) && text.contains("unshare") || code == Some(9) {
        testkit::skipped("this process may not change its mounts");
        return;
    }
    assert_eq!(code, Some(5), "{text}");
    assert!(text.contains("the drop-in did nothing"), "{text}");
    // No memory file system either.
    let (code, text) = run(
        "mount -o remount,ro,bind / && mount -o remount,ro,bind /dev/shm || exit 9; XDG_RUNTIME_DIR=",
    );
    assert_eq!(code, Some(5), "{text}");
    assert!(
        text.contains("there will be no summary: cannot create"),
        "{text}"
    );
    assert_eq!(text.lines().count(), 1, "{text}");
}

/// Runs a program that ends with 5, with some standard error and a limit of file sizes, for a user without settings.
/// Returns its status.
fn status_with(errors: Stdio, most: u64) -> Option<i32> {
    let folder = tempfile::tempdir().expect("a folder");
    let mut command = Command::new(built("release/llama-sidecar"));
    command
        .args(["run", "--hotswap", "--", "sh", "-c", "exit 5"])
        .env("XDG_DATA_HOME", folder.path())
        .stderr(errors);
    before_exec(&mut command, move || limit(libc::RLIMIT_FSIZE, most));
    command.status().expect("it starts").code()
}

#[test]
fn what_has_no_end_is_refused() {
    let folder = tempfile::tempdir().expect("a folder");
    let model = fixture("small.gguf").display().to_string();
    let quantise = [
        "swap",
        &model,
        "--tensor",
        "blk.0.attn_q.weight",
        "--from",
        &model,
    ];
    let ggml = fixture("upstream").join("libggml-base.so");
    let ggml = ggml.display().to_string();
    let matrix = ["--as", "q4_K", "--ggml", &ggml, "--imatrix", "/dev/zero"];
    let socket = folder.path().join("socket");
    let _silent = UnixListener::bind(&socket).expect("it listens");
    let socket = socket.display().to_string();
    let most = u64::MAX.to_string();
    let moe = fixture("small-moe.gguf").display().to_string();
    let sparse = folder.path().join("sparse.json");
    let made = File::create(&sparse).and_then(|file| file.set_len(4 << 30));
    made.expect("a sparse file");
    let sparse = sparse.display().to_string();
    let prune = ["prune", &moe, "--leave-out", "25%", "--program", "true"];
    for (arguments, expected) in [
        (
            &[&quantise[..], &matrix].concat()[..],
            "it is not a regular file",
        ),
        (&["report", &sparse], "it is larger than 256 MiB"),
        (&["report", "/dev/zero"], "it is not a regular file"),
        (
            &[&prune[..], &["--text", "/dev/zero"]].concat(),
            "it is not a regular file",
        ),
        (
            &["compare", "--time", &most, "--", "true"],
            "expected a time such as",
        ),
        (
            &["compare", "--run-time", &most, "--", "true"],
            "expected a time such as",
        ),
        (
            &["ctl", "ping", "--timeout", "1e-9", "--socket", &socket],
            "does not answer in time",
        ),
    ] {
        let (text, status) = command_line(arguments, "");
        assert!([Some(1), Some(2)].contains(&status.code()), "{text}");
        assert!(text.contains(expected), "{text}");
    }
}

#[test]
fn a_model_is_loaded_to_a_device() {
    let model = fixture("small.gguf");
    let driver = built("sim-cuda/libcuda.so.1");
    let load = |device: &str| {
        let mut command = Command::new(built("release/llama-sidecar"));
        command
            .args(["inspect", "--load", "--device", device])
            .arg(&model);
        command.env("LD_LIBRARY_PATH", driver.parent().expect("a folder"));
        let output = command.output().expect("it starts");
        let text = [output.stdout, output.stderr].concat();
        (
            output.status.code(),
            String::from_utf8_lossy(&text).into_owned(),
        )
    };
    let (code, text) = load("0");
    assert_eq!(code, Some(0), "{text}");
    assert!(text.contains("free, cuda0 (simulated GPU)"), "{text}");
    let allocations = text
        .lines()
        .find_map(|line| line.strip_prefix("allocations"));
    assert_eq!(allocations.map(str::trim), Some("1"), "{text}");
    let (code, text) = load("1");
    assert_eq!(code, Some(1), "{text}");
    assert!(text.contains("there are 1 CUDA devices"), "{text}");
}

#[test]
fn messages_that_cannot_be_written_end_no_program() {
    let unlimited = libc::RLIM_INFINITY;
    let full = || File::options().write(true).open("/dev/full");
    assert_eq!(
        status_with(full().expect("it is there").into(), unlimited),
        Some(5)
    );
    let (reader, writer) = std::io::pipe().expect("a pipe");
    drop(reader);
    assert_eq!(status_with(writer.into(), unlimited), Some(5));
    let log = tempfile::tempfile().expect("a file");
    assert_eq!(status_with(log.into(), 0), Some(5));
    // Output is what the command is for.
    let model = fixture("small.gguf");
    let load = |output: Stdio| {
        let mut command = Command::new(built("release/llama-sidecar"));
        command
            .args(["inspect", "--load"])
            .arg(&model)
            .stdout(output);
        let output = command.output().expect("it starts");
        let errors = String::from_utf8_lossy(&output.stderr).into_owned();
        (output.status.code(), errors)
    };
    let (code, errors) = load(full().expect("it is there").into());
    assert_eq!(code, Some(1));
    assert!(
        errors.contains("cannot write to standard output: No space left"),
        "{errors}"
    );
    let (reader, writer) = std::io::pipe().expect("a pipe");
    drop(reader);
    assert_eq!(load(writer.into()), (Some(0), String::new()));
}

/// No event can be noted, which is no reason to run a program without the drop-in.
#[test]
fn a_limit_of_file_sizes_is_no_failed_trial() {
    let folder = tempfile::tempdir().expect("a folder");
    let mut command = plain_command(built("release/llama-sidecar"));
    command
        .args(["run", "--hotswap", "--", "sh", "-c", "echo $LD_PRELOAD"])
        .env("XDG_DATA_HOME", folder.path());
    before_exec(&mut command, || limit(libc::RLIMIT_FSIZE, 0));
    let output = command.output().expect("it starts");
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(
        errors.starts_with("llama-sidecar: there will be no summary"),
        "{errors}"
    );
    assert!(output.stdout.starts_with(b"/"), "{errors}");
}

/// What a program prints into a file can be more than a limit, which ends it.
#[test]
fn a_program_is_not_tried_where_it_would_end_by_a_limit_of_file_sizes() {
    for (command, most) in [("doctor", 1 << 20), ("compare", 1 << 20), ("doctor", 4096)] {
        let mut tried = plain_command(built("release/llama-sidecar"));
        tried.args([command, "--"]);
        tried.arg(llama_cpp("llama-completion"));
        tried.args(["-m", "/none", "-n", "4"]);
        before_exec(&mut tried, move || limit(libc::RLIMIT_FSIZE, most));
        let output = tried.output().expect("it starts");
        let errors = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{errors}");
        let why = match most {
            4096 => "File too large",
            _ => "a file may have 1048576 bytes (ulimit -f)",
        };
        assert!(errors.contains(why), "{errors}");
    }
}

#[test]
fn a_terminal_that_goes_ends_the_program() {
    let folder = tempfile::tempdir().expect("a folder");
    let mut command = plain_command(built("release/llama-sidecar"));
    command.args(["run", "--", "sh", "-c", "echo started; exec sleep 1000"]);
    command.env("TMPDIR", folder.path()).stdout(Stdio::piped());
    let keys = with_terminal(&mut command);
    let mut child = command.spawn().expect("it starts");
    drop(command);
    let mut output = child.stdout.take().expect("a pipe");
    output.read_exact(&mut [0; 8]).expect("it has started");
    drop(keys);
    assert_eq!(child.wait().expect("it ends").signal(), Some(libc::SIGHUP));
}

/// Of a command that is killed, the next one removes what it has left.
#[test]
fn events_of_a_killed_command_are_removed() {
    let folder = tempfile::tempdir().expect("a folder");
    let started = folder.path().join("started");
    let run = |script: &str| {
        let mut command = plain_command(built("release/llama-sidecar"));
        command.args(["run", "--quiet", "--", "sh", "-c", script]);
        command.env("TMPDIR", folder.path());
        command.spawn().expect("it starts")
    };
    let mut killed = run(&format!("touch {}; exec sleep 5", started.display()));
    while !started.exists() {
        std::thread::sleep(Duration::from_millis(5));
    }
    killed.kill().expect("it lives");
    killed.wait().expect("it ends");
    let left = || std::fs::read_dir(folder.path()).expect("a folder").count();
    assert_eq!(left(), 2, "events, and that it was started");
    assert!(run("true").wait().expect("it ends").success());
    assert_eq!(left(), 1);
}

/// Starts the command with pipes.
fn piped(arguments: &[&str]) -> std::process::Child {
    Command::new(testkit::host::built("release/llama-sidecar"))
        .args(arguments)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("it starts")
}

/// The command, what it printed, and how it ended.
fn command_line(arguments: &[&str], input: &str) -> (String, std::process::ExitStatus) {
    let mut child = piped(arguments);
    let mut stdin = child.stdin.take().expect("a pipe");
    let _ = stdin.write_all(input.as_bytes());
    drop(stdin);
    let output = child.wait_with_output().expect("it ends");
    let text = [output.stdout, output.stderr].concat();
    (String::from_utf8_lossy(&text).into_owned(), output.status)
}

/// The C host as words of a command.
fn c_host(model: &str) -> Vec<String> {
    let libraries = fixture("upstream");
    [
        testkit::host::built("hosts-c/host"),
        libraries,
        fixture(model),
    ]
    .map(|path| path.display().to_string())
    .to_vec()
}

#[test]
fn the_wrapper_reports_evaluations_and_reloads_at_the_end() {
    let folder = tempfile::tempdir().expect("a folder");
    let trace = folder.path().join("trace.json").display().to_string();
    let host = c_host("moe.gguf");
    let host: Vec<&str> = host.iter().map(String::as_str).collect();
    let asked = ["run", "--hotswap", "--expert-trace-output", &trace, "--"];
    let (text, status) = command_line(&[&asked, host.as_slice()].concat(), "text 3\nend\n");
    assert!(status.success(), "{text}");
    for part in [
        "3 evaluations of",
        "moe.gguf; reloads: 0",
        "trace written to",
    ] {
        assert!(text.contains(part), "{part}: {text}");
    }
    let last = |arguments: &[&str]| {
        let (text, status) = command_line(arguments, "");
        (text.lines().last().unwrap_or_default().to_owned(), status)
    };
    let (line, status) = last(&["run", "--hotswap", "--", "sh", "-c", "kill -TERM $$"]);
    assert_eq!(status.signal(), Some(libc::SIGTERM));
    assert!(
        line.contains("opened no model through a shared libggml-base.so"),
        "{line}"
    );
    let (line, status) = last(&["run", "--stream-experts", "--", "sh", "-c", "exit 3"]);
    assert_eq!(status.code(), Some(3));
    let failed =
        "the program ended before it opened a model that the drop-in sees (exit status: 3)";
    assert!(line.contains(failed) && !line.contains("ggml"), "{line}");
    let (line, _) = last(&["run", "--none", "--", "true"]);
    assert!(line.contains("nothing enabled"), "{line}");
    let (line, _) = last(&["run", "--", "true"]);
    assert!(line.contains("opened no model"), "{line}");
    let (line, _) = last(&["run", "--quiet", "--", "true"]);
    assert_eq!(line, "");
    let (line, _) = last(&[
        "run",
        "--set",
        "LLAMA_POSTFETCH_MAX_TRANSFERS=3",
        "--dry-run",
        "--",
        "true",
    ]);
    assert_eq!(line, "true");
    // The last value of a variable counts, as in the environment of the program.
    let off = "LLAMA_SIDECAR_HOTSWAP=0";
    let (line, _) = last(&["run", "--none", "--hotswap", "--set", off, "--", "true"]);
    assert!(line.contains("nothing enabled"), "{line}");
    for wrong in ["LLAMA_NONSENSE=3", "LLAMA_POSTFETCH_MAX_TRANSFERS=x"] {
        let (_, status) = last(&["run", "--set", wrong, "--", "true"]);
        assert_eq!(status.code(), Some(2), "{wrong}");
    }
}

#[test]
fn what_is_no_socket_is_explained() {
    for (words, reason) in [
        (
            &["top", "--samples", "1", "--socket", "/nowhere"][..],
            "no program answers",
        ),
        (&["status", "--socket", "/dev/null"], "it is no socket"),
        (
            &["ctl", "metrics", "--socket", "/nowhere/*"],
            "'ctl metrics --listen' alone",
        ),
        (
            &[
                "ctl",
                "reload",
                "--socket",
                "/nowhere",
                "--server",
                "127.0.0.1:1",
            ],
            "http://127.0.0.1:1",
        ),
        (
            &[
                "ctl",
                "reload",
                "--socket",
                "/nowhere",
                "--server",
                "127.0.0.1:99999",
            ],
            "is no address of a server",
        ),
    ] {
        let (text, status) = command_line(words, "");
        assert_eq!(status.code(), Some(1), "{text}");
        assert!(text.contains(reason), "{reason}: {text}");
    }
}

#[test]
fn without_options_run_uses_what_a_comparison_has_found() {
    let folder = tempfile::tempdir().expect("a folder");
    let data = folder.path().join("llama-sidecar");
    std::fs::create_dir(&data).expect("a folder");
    let machine = std::fs::read_to_string("/proc/sys/kernel/hostname").expect("Linux");
    let gain = serde_json::json!({
        "machine": machine.trim(),
        "command": ["true", "-m", "x"],
        "flags": ["--stream-experts", "--stream-memory", "7"],
        "faster": 2.5,
    });
    let gains = serde_json::json!({"llama_sidecar": "gains", "entries": [gain]});
    std::fs::write(data.join("gains.json"), gains.to_string()).expect("free space");
    let run = |arguments: &[&str]| {
        let mut command = Command::new(testkit::host::built("release/llama-sidecar"));
        command.args(["run", "--dry-run"]).args(arguments);
        testkit::host::without_settings(&mut command);
        command.env("XDG_DATA_HOME", folder.path());
        let output = command.output().expect("it starts");
        let texts = [output.stdout, output.stderr];
        texts
            .map(|text| String::from_utf8_lossy(&text).into_owned())
            .concat()
    };
    let found = run(&["--", "true", "-m", "x", "--port", "80"]);
    assert!(found.contains("export LLAMA_EXPERT_STREAM=auto"), "{found}");
    assert!(
        found.contains("export LLAMA_EXPERT_STREAM_MEMORY_MB=7"),
        "{found}"
    );
    assert!(
        found.contains("--stream-experts --stream-memory 7 is on"),
        "{found}"
    );
    assert!(found.contains("2.50 times as fast"), "{found}");
    // Another command, other options, and none.
    let needed = "export LLAMA_EXPERT_STREAM=needed";
    let found = run(&["--", "true", "-m", "y"]);
    assert!(
        found.contains(needed) && !found.contains("MEMORY_MB"),
        "{found}"
    );
    let found = run(&["--hotswap", "--", "true", "-m", "x"]);
    assert!(
        found.contains(needed) && !found.contains("2.50 times"),
        "{found}"
    );
    for option in ["--none", "--page-lock"] {
        let found = run(&[option, "--", "true", "-m", "x"]);
        assert!(!found.contains("LLAMA_EXPERT_STREAM"), "{found}");
    }
    // A damaged file is no file.
    std::fs::write(data.join("gains.json"), "{").expect("free space");
    assert!(run(&["--", "true", "-m", "x"]).contains(needed));
}

#[test]
fn the_wrapper_reports_what_is_swapped_at_the_end() {
    let folder = tempfile::tempdir().expect("a folder");
    let socket = folder.path().join("socket").display().to_string();
    let from = fixture("smollm2-mixed.gguf").display().to_string();
    let host = c_host("smollm2.gguf");
    let host: Vec<&str> = host.iter().map(String::as_str).collect();
    let run = ["run", "--hotswap", "--socket", &socket, "--"];
    let mut child = piped(&[&run, host.as_slice()].concat());
    let mut stdin = child.stdin.take().expect("a pipe");
    stdin.write_all(b"text 1\n").expect("it reads");
    while UnixStream::connect(&socket).is_err() {
        let ended = child.try_wait().expect("a child");
        assert!(ended.is_none(), "{ended:?}");
        std::thread::sleep(Duration::from_millis(10));
    }
    let set = [
        "swap", "--live", "-s", &socket, "--tensor", "blk.*", "--from", &from,
    ];
    for arguments in [&set[..], &["undo", "-s", &socket], &set[..]] {
        let (text, status) = command_line(arguments, "");
        assert!(status.success(), "{text}");
    }
    stdin.write_all(b"end\n").expect("it reads");
    let output = child.wait_with_output().expect("it ends");
    let text = String::from_utf8_lossy(&output.stderr);
    let expected = "reloads: 3, with 16 tensors swapped, 8 returned, 0 refused; 8 tensors differ from the loaded model at the end; longest pause ";
    assert!(text.contains(expected), "{text}");
}

#[test]
fn the_wrapper_passes_signals_on() {
    let cli = testkit::host::built("release/llama-sidecar");
    let script = "trap 'echo got it; exit 9' USR1; echo ready; while :; do sleep 0.05; done";
    let mut child = Command::new(cli)
        .args(["run", "--quiet", "--", "sh", "-c", script])
        .stdout(Stdio::piped())
        .spawn()
        .expect("it starts");
    let mut lines = BufReader::new(child.stdout.take().expect("a pipe")).lines();
    assert_eq!(lines.next().expect("a line").expect("text"), "ready");
    // SAFETY: a system call, to a child that was not waited for.
    unsafe { libc::kill(child.id() as libc::pid_t, libc::SIGUSR1) };
    assert_eq!(lines.next().expect("a line").expect("text"), "got it");
    assert_eq!(child.wait().expect("it ends").code(), Some(9));
}

/// A script without job control starts commands in the background with SIGINT and SIGQUIT ignored.
#[test]
fn a_signal_that_the_wrapper_was_started_to_ignore_reaches_the_program() {
    let cli = testkit::host::built("release/llama-sidecar");
    let script = "\"$@\" <&3 & echo $!; wait $!; exit $?";
    let mut child = Command::new("sh")
        .args(["-c", &format!("exec 3<&0; {script}"), "sh"])
        .arg(&cli)
        .args(["run", "--quiet", "--"])
        .arg(&cli)
        .arg("witness")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .expect("it starts");
    let mut lines = BufReader::new(child.stdout.take().expect("a pipe")).lines();
    let mut line = || lines.next().expect("a line").expect("text");
    let wrapper: libc::pid_t = line().parse().expect("a number");
    assert_eq!(line(), "ready");
    // With a handler, as llama-server has one.
    for signal in [libc::SIGINT, libc::SIGTERM] {
        // SAFETY: a system call, to a process that its parent waits for.
        assert_eq!(unsafe { libc::kill(wrapper, signal) }, 0);
        // Signals that are sent at once arrive in any order.
        assert_eq!(line(), signal.to_string());
    }
    drop(child.stdin.take());
    assert_eq!(child.wait().expect("it ends").code(), Some(0));

    // Without one, the signal stays ignored, as without the wrapper.
    let mut command = Command::new(&cli);
    command
        .args(["run", "--quiet", "--", "sh", "-c", "echo ready; exec cat"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped());
    // SAFETY: a system call that may be made between fork and exec.
    unsafe {
        command.pre_exec(|| {
            libc::signal(libc::SIGINT, libc::SIG_IGN);
            Ok(())
        });
    }
    let mut child = command.spawn().expect("it starts");
    let mut lines = BufReader::new(child.stdout.take().expect("a pipe")).lines();
    let mut stdin = child.stdin.take().expect("a pipe");
    assert_eq!(lines.next().expect("a line").expect("text"), "ready");
    // SAFETY: a system call, to a child that was not waited for.
    unsafe { libc::kill(child.id() as libc::pid_t, libc::SIGINT) };
    writeln!(stdin, "alive").expect("it reads");
    assert_eq!(lines.next().expect("a line").expect("text"), "alive");
    drop(stdin);
    assert_eq!(child.wait().expect("it ends").code(), Some(0));
}

#[test]
fn a_command_needs_no_dashes_before_it() {
    let (text, status) = command_line(&["run", "--dry-run", "true", "--hotswap", "-m", "x"], "");
    assert!(status.success(), "{text}");
    assert!(text.ends_with("\ntrue --hotswap -m x\n"), "{text}");
    let (text, status) = command_line(&["run", "--hotswp", "true"], "");
    assert_eq!(status.code(), Some(2), "{text}");
    let (text, _) = command_line(&["doctor", "sh", "-c", "exit 3"], "");
    assert!(text.contains("ended       exit status: 3"), "{text}");
}

#[test]
fn an_output_that_cannot_be_written_is_reported_before_the_program_starts() {
    for flag in ["--expert-trace-output", "--expert-trace-routes", "--socket"] {
        let asked = [
            "run",
            "--hotswap",
            flag,
            "/no/such/folder/it",
            "--",
            "echo",
            "started",
        ];
        let (text, status) = command_line(&asked, "");
        assert_eq!(status.code(), Some(1), "{text}");
        assert!(text.contains(&format!("{flag} (LLAMA_")), "{text}");
        assert!(
            text.contains("its folder: No such file or directory"),
            "{text}"
        );
        assert!(!text.contains("started"), "{text}");
    }
}

#[test]
fn a_socket_that_is_in_use_is_reported_before_the_program_starts() {
    let folder = tempfile::tempdir().expect("a folder");
    let socket = folder.path().join("socket");
    let path = socket.display().to_string();
    let run_with = |path: &str| {
        let asked = ["run", "--hotswap", "--socket", path, "--"];
        command_line(&[&asked[..], &["echo", "started"]].concat(), "")
    };
    let run = || run_with(&path);
    let listener = UnixListener::bind(&socket).expect("a socket");
    let (text, status) = run();
    assert_eq!(status.code(), Some(1), "{text}");
    let process = std::process::id();
    for part in [
        format!("--socket (LLAMA_SIDECAR_CONTROL): process {process} ("),
        format!(") listens at {path} already: end that process, or choose another path"),
    ] {
        assert!(text.contains(&part), "{part}: {text}");
    }
    assert!(!text.contains("started"), "{text}");
    let (text, status) = run_with(&(path.clone() + &"t".repeat(100)));
    assert_eq!(status.code(), Some(1), "{text}");
    assert!(
        text.contains("more than 107 bytes") && !text.contains("started"),
        "{text}"
    );
    // The socket of a process that has ended is replaced.
    drop(listener);
    let (text, status) = run();
    assert!(status.success() && text.starts_with("started\n"), "{text}");
}

#[test]
fn a_setting_without_effect_is_reported() {
    let sentence = "--expert-trace-every-s (LLAMA_EXPERT_TRACE_EVERY_S) has no effect: also set LLAMA_EXPERT_TRACE_OUTPUT (--expert-trace-output)";
    let asked = [
        "run",
        "--hotswap",
        "--expert-trace-every-s",
        "5",
        "--",
        "true",
    ];
    let (text, status) = command_line(&asked, "");
    assert!(status.success(), "{text}");
    assert_eq!(text.matches(sentence).count(), 1, "{text}");
    let variables = [("LLAMA_EXPERT_TRACE_EVERY_S", "5")];
    let mut host = Host::start(
        Program::C,
        &fixture("smollm2.gguf"),
        &DropIn::with(&variables),
    );
    host.text(1);
    assert_eq!(host.logged(sentence).len(), 1);
    assert_eq!(host.end(), Some(0));
}

#[test]
fn a_rejected_value_is_reported_where_nothing_else_is_set() {
    let mut command = llama("llama-completion");
    command.arg("-m").arg(fixture("small.gguf"));
    command.args(["-p", "a", "-n", "1", "-no-cnv", "-t", "1"]);
    command.env("LD_PRELOAD", preload_library());
    command.env("LLAMA_EXPERT_STREAM", "1");
    let output = command.output().expect("it starts");
    let text = String::from_utf8_lossy(&output.stderr);
    let expected =
        "LLAMA_EXPERT_STREAM=\"1\": expected one of off, needed, auto, on; using the default";
    assert!(output.status.success(), "{text}");
    assert_eq!(text.matches(expected).count(), 1, "{text}");
}

#[test]
fn help_has_no_markup_and_all_forms() {
    let (text, _) = command_line(&["run", "--help"], "");
    assert!(
        !text.contains("](") && text.contains("evaluate again and again"),
        "{text}"
    );
    let (text, status) = command_line(&["swap"], "");
    assert_eq!(status.code(), Some(2));
    for form in ["MODEL --tensor", "--live [-s SOCKET] --tensor"] {
        assert!(text.contains(form), "{text}");
    }
}

#[test]
fn a_socket_of_another_user_is_reported_with_its_owner() {
    // SAFETY: a system call without arguments.
    let is_root = unsafe { libc::geteuid() } == 0;
    let folder = tempfile::tempdir().expect("a folder");
    let socket = folder.path().join("socket");
    let _listener = std::os::unix::net::UnixListener::bind(&socket).expect("a socket");
    let cli = folder.path().join("llama-sidecar");
    std::fs::copy(testkit::host::built("release/llama-sidecar"), &cli).expect("free space");
    let mode = |path: &Path, mode| {
        let mode = std::os::unix::fs::PermissionsExt::from_mode(mode);
        std::fs::set_permissions(path, mode).expect("a mode");
    };
    mode(folder.path(), 0o755);
    mode(&socket, if is_root { 0o600 } else { 0 });
    let mut command = Command::new(&cli);
    command.args(["status", "--socket"]).arg(&socket);
    if is_root {
        command.uid(65534).gid(65534);
    }
    let output = command.output().expect("it starts");
    let text = String::from_utf8_lossy(&output.stderr);
    assert!(
        text.contains("Permission denied (os error 13); the socket belongs to "),
        "{text}"
    );
    assert!(text.contains("run this command as that user"), "{text}");
}

/// Sets the default effect of signals in a command: a shell starts commands in the background with
/// SIGINT and SIGQUIT ignored, and nohup with SIGHUP.
fn with_default_signals(command: &mut Command) -> &mut Command {
    // SAFETY: system calls that may be made between fork and exec.
    unsafe {
        command.pre_exec(|| {
            for signal in [libc::SIGHUP, libc::SIGINT, libc::SIGQUIT] {
                libc::signal(signal, libc::SIG_DFL);
            }
            Ok(())
        })
    }
}

/// The program writes the number of each signal.
#[test]
fn a_signal_of_the_process_group_reaches_the_program_once() {
    let cli = testkit::host::built("release/llama-sidecar");
    let mut child = Command::new(&cli)
        .args(["run", "--quiet", "--"])
        .arg(&cli)
        .arg("witness")
        .process_group(0)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .expect("it starts");
    let group = child.id() as libc::pid_t;
    let mut lines = BufReader::new(child.stdout.take().expect("a pipe")).lines();
    let mut line = || lines.next().expect("a line").expect("text");
    assert_eq!(line(), "ready");
    // SAFETY: a system call, to a child that was not waited for or to its group.
    let kill = |to, signal| assert_eq!(unsafe { libc::kill(to, signal) }, 0);
    // The command handles the signal after the program did: equal signals may become one.
    kill(group, libc::SIGSTOP);
    kill(-group, libc::SIGUSR1);
    assert_eq!(line(), libc::SIGUSR1.to_string());
    kill(group, libc::SIGCONT);
    kill(group, libc::SIGTERM);
    assert_eq!(line(), libc::SIGTERM.to_string());
    drop(child.stdin.take());
    assert_eq!(child.wait().expect("it ends").code(), Some(0));
}

/// Makes a pseudo terminal the terminal of a command; returns the side with the keys.
fn with_terminal(command: &mut Command) -> File {
    let (keys, terminal) = terminal();
    lead_session(with_default_signals(command), terminal);
    keys
}

#[test]
fn a_key_reaches_the_program_once() {
    let cli = testkit::host::built("release/llama-sidecar");
    let mut command = Command::new(cli);
    let script = "trap 'echo got it' INT; trap 'echo last; exit 9' QUIT; echo ready; while :; do sleep 0.05; done";
    command
        .args(["run", "--quiet", "--", "sh", "-c", script])
        .stdout(Stdio::piped());
    let mut keys = with_terminal(&mut command);
    let mut child = command.spawn().expect("it starts");
    let mut lines = BufReader::new(child.stdout.take().expect("a pipe")).lines();
    let mut line = || lines.next().expect("a line").expect("text");
    assert_eq!(line(), "ready");
    keys.write_all(b"\x03").expect("a terminal");
    assert_eq!(line(), "got it");
    keys.write_all(b"\x1c").expect("a terminal");
    assert_eq!(line(), "last");
    assert_eq!(child.wait().expect("it ends").code(), Some(9));
}

#[test]
fn top_shows_a_program_as_lines_and_in_a_terminal() {
    let cli = testkit::host::built("release/llama-sidecar");
    let mut host = Host::start(Program::C, &fixture("smollm2.gguf"), &on());
    host.text(TOKENS);
    let top = |more: &[&str]| {
        let mut words = vec![cli.display().to_string(), "top".into(), "--socket".into()];
        words.push(host.socket().display().to_string());
        words.extend(more.iter().map(|&word| word.to_owned()));
        words
    };
    let words = top(&["--samples", "2", "--interval", "0.1"]);
    let output = Command::new(&words[0]).args(&words[1..]).output();
    let lines = String::from_utf8(output.expect("it starts").stdout).expect("text");
    let of_process = format!("{}: process {}: ", host.socket().display(), host.id());
    assert_eq!(lines.matches(&of_process).count(), 2, "{lines}");
    assert!(lines.contains("smollm2.gguf: 272 tensors"), "{lines}");
    assert!(lines.contains(": in CPU_"), "{lines}");

    let mut command = Command::new("sh");
    let in_terminal = "exec \"$@\" <>/dev/tty >&0 2>&1";
    command.args(["-c", in_terminal, "sh"]).args(top(&[]));
    let mut keys = with_terminal(&mut command);
    let size = libc::winsize {
        ws_row: 24,
        ws_col: 100,
        ws_xpixel: 0,
        ws_ypixel: 0,
    };
    // SAFETY: a terminal, and the struct that the request takes.
    let set = unsafe { libc::ioctl(keys.as_raw_fd(), libc::TIOCSWINSZ, &raw const size) };
    assert_eq!(set, 0, "a terminal has a size");
    let mut child = command.spawn().expect("it starts");
    let mut shown = String::new();
    // Spaces are not written.
    for (text, key) in [("smollm2.gguf:", b"R"), ("done", b"q")] {
        let deadline = Instant::now() + Duration::from_secs(60);
        while !shown.contains(text) {
            // The screen is drawn again each second.
            assert!(Instant::now() < deadline, "no {text:?} in {shown}");
            let mut bytes = [0; 4096];
            let read = keys.read(&mut bytes).expect("the command runs");
            shown += &String::from_utf8_lossy(&bytes[..read]);
        }
        keys.write_all(key).expect("a terminal");
    }
    assert_eq!(child.wait().expect("it ends").code(), Some(0));
    assert_eq!(host.end(), Some(0));
}

/// Listens at a socket as a program that is damaged, or hostile: answers each request with a text, slowly if `drips`.
fn hostile(socket: PathBuf, text: String, drips: bool) {
    let listener = UnixListener::bind(socket).expect("a new socket");
    std::thread::spawn(move || {
        for client in listener.incoming() {
            let (mut client, text) = (client.expect("a client"), text.clone());
            std::thread::spawn(move || {
                let mut request = String::new();
                let _ = BufReader::new(&client).read_line(&mut request);
                while drips && client.write_all(b" ").is_ok() {
                    std::thread::sleep(Duration::from_millis(50));
                }
                let _ = client.write_all(text.as_bytes());
            });
        }
    });
}

#[test]
fn ask_waits_no_longer_than_it_is_told() {
    let silent = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
    let prompts = tempfile::NamedTempFile::new().expect("a folder");
    std::fs::write(&prompts, "The capital of France is\n").expect("free space");
    let output = Command::new(testkit::host::built("release/llama-sidecar"))
        .arg("ask")
        .arg(format!("http://{}", silent.local_addr().expect("a port")))
        .args(["--timeout", "300ms", "--prompts"])
        .arg(prompts.path())
        .output()
        .expect("it starts");
    let error = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{error}");
    assert!(error.contains("timeout"), "{error}");
}

#[test]
fn top_and_metrics_of_hostile_programs() {
    let folder = tempfile::tempdir().expect("a folder");
    let control = "\u{1b}]0;title\u{7}\u{9b}";
    let own = json!({"ok": true, "pid": 9, "models": [], "text":
        "# TYPE llama_sidecar_a gauge\nllama_sidecar_a 1\n# TYPE llama_sidecar_up gauge\nllama_sidecar_up 7\nnone\n"});
    let models = format!("{{\"ok\":true,\"models\":[{}{{}}]}}", "{},".repeat(300_000));
    let named =
        json!({"ok": true, "pid": 7, "models": [{"files": [control], "obstacle": control}]});
    let endless = "x".repeat(20 << 20);
    for (name, text, drips) in [
        ("own", own.to_string(), false),
        ("drips", String::new(), true),
        ("models", models, false),
        ("named", named.to_string(), false),
        (
            "busy",
            json!({"ok": false, "busy": true, "error": "too many"}).to_string(),
            false,
        ),
        ("endless", endless, false),
    ] {
        hostile(folder.path().join(name), text + "\n", drips);
    }
    let cli = testkit::host::built("release/llama-sidecar");
    let mut top = Command::new(&cli);
    top.args(["top", "--samples", "1"]);
    for name in ["own", "drips", "models", "named", "busy", "endless"] {
        top.arg("--socket").arg(folder.path().join(name));
    }
    let output = top.output().expect("it starts");
    let lines = String::from_utf8(output.stdout).expect("text");
    assert_eq!(output.status.code(), Some(0), "{lines}");
    assert!(
        !lines.chars().any(|of| of.is_control() && of != '\n'),
        "{lines:?}"
    );
    for text in [
        "own: process 9",
        "drips: ",
        "does not answer in time",
        "models: it answers for 300001 models: at most 64 are shown",
        "named: \\u001b]0;title\\u0007\\u009b",
        "busy: too many",
        "endless: ",
    ] {
        assert!(lines.contains(text), "{text}: {lines}");
    }
    let mut metrics = Command::new(&cli)
        .args(["ctl", "metrics", "--listen", "127.0.0.1:0", "--socket"])
        .arg(folder.path().join("*"))
        .stderr(Stdio::piped())
        .spawn()
        .expect("it starts");
    let mut line = String::new();
    let mut errors = BufReader::new(metrics.stderr.take().expect("a pipe"));
    errors.read_line(&mut line).expect("an address");
    let address = line.trim_end().rsplit(' ').next().expect("an address");
    let address = address.trim_end_matches("/metrics");
    let mut client = TcpStream::connect(address).expect("it listens");
    client
        .write_all(b"GET /metrics HTTP/1.0\r\n\r\n")
        .expect("a request");
    let mut page = String::new();
    client.read_to_string(&mut page).expect("a page");
    let label = format!("socket=\"{}\"", folder.path().join("own").display());
    for sample in ["llama_sidecar_a", "llama_sidecar_up"] {
        assert!(page.contains(&format!("{sample}{{{label}}} 1\n")), "{page}");
    }
    assert!(
        page.contains("/drips\"} 0\n") && !page.contains("none"),
        "{page}"
    );
    metrics.kill().expect("a process");
    metrics.wait().expect("it ends");
}

/// The reason that a program has given is that of the command, also where a repeated request is late.
#[test]
fn a_program_that_was_busy_and_is_late_is_busy() {
    let folder = tempfile::tempdir().expect("a folder");
    let socket = folder.path().join("socket");
    let listener = UnixListener::bind(&socket).expect("a new socket");
    std::thread::spawn(move || {
        let mut clients = listener.incoming().map(|client| client.expect("a client"));
        let mut first = clients.next().expect("a client");
        let _ = first.read(&mut [0; 64]);
        let _ = first.write_all(b"{\"ok\": false, \"busy\": true, \"error\": \"too many\"}\n");
        drop(first);
        // Others get no answer.
        clients.for_each(std::mem::forget);
    });
    let path = socket.display().to_string();
    let (text, status) = command_line(&["status", "--socket", &path, "--timeout", "1"], "");
    assert_eq!(status.code(), Some(1), "{text}");
    assert!(text.contains("too many"), "{text}");
}

/// What is read is limited, and is not parsed as far as it came.
#[test]
fn a_reply_without_end_takes_little_memory() {
    let folder = tempfile::tempdir().expect("a folder");
    let socket = folder.path().join("socket");
    hostile(socket.clone(), "[[],".repeat(20 << 20), false);
    let mut status = plain_command(built("release/llama-sidecar"));
    status.arg("status").arg("--socket").arg(&socket);
    before_exec(&mut status, || limit(libc::RLIMIT_AS, 400 << 20));
    let output = status.output().expect("it starts");
    let text = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{text}");
    assert!(
        text.contains("answers with 67108864 bytes or more"),
        "{text}"
    );
}

/// The program is in a process group of its own.
#[test]
fn a_key_ends_the_program_that_doctor_tries() {
    let folder = tempfile::tempdir().expect("a folder");
    let ready = folder.path().join("ready");
    let path = CString::new(ready.as_os_str().as_encoded_bytes()).expect("no NUL");
    // SAFETY: a path that ends with NUL.
    assert_eq!(unsafe { libc::mkfifo(path.as_ptr(), 0o600) }, 0);
    let script = format!("echo ready > {}; exec sleep 60", ready.display());
    let mut command = Command::new(testkit::host::built("release/llama-sidecar"));
    command
        .args(["doctor", "--", "sh", "-c", &script])
        .stdout(Stdio::piped());
    let mut keys = with_terminal(&mut command);
    let child = command.spawn().expect("it starts");
    assert_eq!(std::fs::read(&ready).expect("a pipe"), b"ready\n");
    keys.write_all(b"\x03").expect("a terminal");
    let output = child.wait_with_output().expect("it ends");
    assert_eq!(output.status.signal(), Some(libc::SIGINT));
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(text.contains("ended       signal: 2 (SIGINT)"), "{text}");
}

/// The program has no handler of its own for these signals.
#[test]
fn the_wrapper_reports_streaming_after_a_signal() {
    let cli = testkit::host::built("release/llama-sidecar");
    let host = c_host("moe.gguf");
    for signal in [libc::SIGTERM, libc::SIGINT] {
        let mut command = Command::new(&cli);
        command
            .args(["run", "--stream-experts", "--"])
            .args(&host)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        let mut child = with_default_signals(&mut command)
            .spawn()
            .expect("it starts");
        let mut lines = BufReader::new(child.stdout.take().expect("a pipe")).lines();
        let mut stdin = child.stdin.take().expect("a pipe");
        assert_eq!(lines.next().expect("a line").expect("text"), "ready");
        writeln!(stdin, "text 2").expect("it reads");
        lines.next().expect("a line").expect("text");
        // SAFETY: a system call, to a child that was not waited for.
        unsafe { libc::kill(child.id() as libc::pid_t, signal) };
        let output = child.wait_with_output().expect("it ends");
        assert_eq!(output.status.signal(), Some(signal));
        let text = String::from_utf8_lossy(&output.stderr);
        assert!(text.contains("llama-sidecar: 2 evaluations of"), "{text}");
        assert!(!text.contains("reloads"), "{text}");
        assert!(text.contains("llama-sidecar: experts: "), "{text}");
    }
}

#[test]
fn the_wrapper_reports_why_nothing_is_streamed() {
    let host = c_host("smollm2.gguf");
    let host: Vec<&str> = host.iter().map(String::as_str).collect();
    let asked = ["run", "--stream-experts", "--"];
    let (text, status) = command_line(&[&asked, host.as_slice()].concat(), "text 1\nend\n");
    assert!(status.success(), "{text}");
    // At the start, and again at the end.
    let early = "smollm2.gguf: it has no routed experts, so nothing of it is streamed\n";
    assert_eq!(text.matches(early).count(), 1, "{text}");
    let last = text.lines().last();
    let expected =
        "llama-sidecar: warning: nothing was streamed: no evaluated model has routed experts";
    assert_eq!(last, Some(expected), "{text}");
}

/// What was requested and had no effect is the last line of the wrapper, and in `status`.
#[test]
fn what_had_no_effect_is_named() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = |name: &str| folder.path().join(name).display().to_string();
    let (routes, saliency) = (path("a.routes"), path("saliency.json"));
    // Longer than the path of a socket may be.
    let (socket, long) = (path("socket"), path(&"s".repeat(120)));
    let (dense, moe) = ("smollm2.gguf", "moe.gguf");
    let tokens = "text 2\nend\n";
    for (model, flags, input, expected) in [
        (
            dense,
            &["--rounds", "--socket", &socket][..],
            tokens,
            "error: rounds need llama-perplexity",
        ),
        (
            dense,
            &["--expert-trace-stats"],
            tokens,
            "error: nothing was counted: no evaluated model has routed experts",
        ),
        (
            moe,
            &["--expert-trace-stats"],
            "end\n",
            "warning: nothing was counted: no evaluation has ended besides warm-ups",
        ),
        (
            dense,
            &["--expert-trace-routes", &routes],
            tokens,
            "warning: no route was written: ",
        ),
        (
            dense,
            &["--expert-trace-saliency", &saliency],
            tokens,
            "warning: no saliency was recorded: ",
        ),
        (
            moe,
            &["--stream-experts"],
            "end\n",
            "warning: nothing was streamed: ",
        ),
        (
            moe,
            &["--page-lock"],
            tokens,
            "its pages are not locked: no backend of this program can lock memory",
        ),
    ] {
        let host = c_host(model);
        let host: Vec<&str> = host.iter().map(String::as_str).collect();
        let words = [&["run"], flags, &["--"], host.as_slice()].concat();
        let (text, status) = command_line(&words, input);
        assert!(status.success(), "{text}");
        let last = text.lines().last().unwrap_or_default();
        assert!(last.contains(expected), "{flags:?}: {text}");
    }

    let with = DropIn::with(&[
        ("LLAMA_SIDECAR_ROUNDS", "1"),
        ("LLAMA_EXPERT_TRACE_ROUTES", &routes),
    ]);
    let host = Host::start(Program::C, &fixture(dense), &with);
    let status = host.control("status");
    let named = |requested: &str| {
        let found = status["no_effect"].as_array().into_iter().flatten();
        let mut found = found.filter(|of| of["requested"] == requested);
        found.next().map(|of| of["so_far"].clone())
    };
    assert_eq!(named("rounds"), Some(Value::Bool(false)), "{status}");
    assert_eq!(named("routes"), Some(Value::Bool(true)), "{status}");
    assert_eq!(named("hot-swap"), None, "{status}");
    assert_eq!(host.end(), Some(0));

    let without = DropIn::with(&[("LLAMA_SIDECAR_CONTROL", &long)]);
    let mut host = Host::start(Program::C, &fixture(dense), &without);
    host.text(1);
    assert_eq!(host.logged("cannot create the control socket").len(), 1);
    assert_eq!(host.end(), Some(0));
}

/// `doctor` fails if something that its environment requests has no effect.
#[test]
fn doctor_fails_where_a_request_has_no_effect() {
    let script = format!(
        "printf 'text 1\\nend\\n' | {}",
        c_host("smollm2.gguf").join(" ")
    );
    for (variable, fails) in [
        ("LLAMA_SIDECAR_ROUNDS", Some("rounds need llama-perplexity")),
        ("LLAMA_EXPERT_TRACE_STATS", Some("nothing was counted: ")),
        ("LLAMA_SIDECAR_HOTSWAP", None),
    ] {
        let output = Command::new(testkit::host::built("release/llama-sidecar"))
            .args(["doctor", "--", "sh", "-c", &script])
            .env(variable, "1")
            .output()
            .expect("it starts");
        let text = String::from_utf8_lossy(&output.stderr);
        assert_eq!(
            output.status.code(),
            Some(i32::from(fails.is_some())),
            "{text}"
        );
        assert!(text.contains(fails.unwrap_or_default()), "{text}");
    }
}

/// `run` makes a socket where one is useful, and commands without a path find it.
#[test]
fn a_program_without_a_path_for_its_socket_is_found() {
    let session = tempfile::tempdir().expect("a folder");
    let folder = session.path().join("llama-sidecar");
    let command = |arguments: &[&str]| {
        let mut command = plain_command(built("release/llama-sidecar"));
        command
            .args(arguments)
            .env("XDG_RUNTIME_DIR", session.path());
        let output = command.output().expect("it starts");
        let text = [output.stdout, output.stderr].concat();
        (String::from_utf8_lossy(&text).into_owned(), output.status)
    };
    let print = "echo =$LLAMA_SIDECAR_CONTROL=";
    let set = |flag| command(&["run", flag, "--", "sh", "-c", print]).0;
    assert!(set("--none").contains("=="), "a program that is as it was");
    assert!(!folder.exists());
    let path = folder.join("sh-%p.sock").display().to_string();
    let found = set("--hotswap");
    assert!(found.contains(&format!("={path}=")), "{found}");
    assert_eq!(folder.metadata().expect("a folder").mode() & 0o777, 0o700);
    let (text, status) = command(&["status"]);
    assert!(
        !status.success() && text.contains("no program is found"),
        "{text}"
    );
    let without = Command::new(testkit::host::built("release/llama-sidecar"))
        .arg("status")
        .env_remove("XDG_RUNTIME_DIR")
        .output();
    let error = without.expect("it starts").stderr;
    let error = String::from_utf8_lossy(&error);
    assert!(error.contains("XDG_RUNTIME_DIR is not set"), "{error}");

    let with = DropIn::On(vec![("LLAMA_SIDECAR_CONTROL", path)]);
    let start = || {
        let mut host = Host::start(Program::C, &fixture("small.gguf"), &with);
        host.text(1);
        let socket = folder.join(format!("sh-{}.sock", host.id()));
        assert!(socket.exists(), "{}", socket.display());
        (host, socket)
    };
    let (first, _) = start();
    let (text, status) = command(&["status"]);
    let process = format!("process {}", first.id());
    assert!(status.success() && text.contains(&process), "{text}");
    assert!(command(&["ctl", "metrics"]).1.success());
    let model = fixture("small-mixed.gguf").display().to_string();
    let tensor = "blk.0.ffn_down.weight";
    let (text, _) = command(&["swap", "--live", "--tensor", tensor, "--from", &model]);
    assert!(
        text.contains("undo it with: llama-sidecar undo -s "),
        "{text}"
    );
    assert!(command(&["undo"]).1.success());
    let (second, left) = start();
    let (text, status) = command(&["status"]);
    let both = [first.id(), second.id()].map(|id| format!("sh-{id}.sock"));
    assert!(
        !status.success() && text.contains("several programs run"),
        "{text}"
    );
    assert!(both.iter().all(|name| text.contains(name)), "{text}");
    let (text, _) = command(&["top", "--samples", "1"]);
    assert!(both.iter().all(|name| text.contains(name)), "{text}");
    // What a killed program leaves is no program, and the next start removes it.
    assert_eq!(second.end_by(libc::SIGKILL), Some(libc::SIGKILL));
    assert!(left.exists() && command(&["status"]).1.success());
    set("--hotswap");
    assert!(!left.exists() && command(&["status"]).1.success());
    assert_eq!(first.end(), Some(0));
    // A folder of this name that another user can replace is not used.
    std::fs::remove_dir(&folder).expect("an empty folder");
    std::os::unix::fs::symlink("/tmp", &folder).expect("free space");
    assert!(set("--hotswap").contains("=="));
}

#[test]
fn a_missing_socket_is_reported_with_the_flags_that_make_one() {
    for (request, flag) in [
        (
            &["ctl", "metrics"][..],
            "where FLAG is --hotswap, --stream-experts, --post-fetch, --expert-trace-stats or",
        ),
        (
            &["ctl", "reload"],
            "run --hotswap --socket /no/such/socket --",
        ),
        (&["trace"], "run --expert-trace-stats --socket"),
    ] {
        let (text, status) =
            command_line(&[request, &["--socket", "/no/such/socket"]].concat(), "");
        assert_eq!(status.code(), Some(1));
        assert!(text.contains(flag), "{text}");
    }
}

#[test]
fn doctor_reports_what_works_and_why_not() {
    let host = c_host("moe.gguf");
    let script = format!("(echo text 2; sleep 60) | {}", host.join(" "));
    let asked = ["doctor", "--stream-experts", "--", "sh", "-c", &script];
    let (text, status) = command_line(&asked, "");
    assert!(status.success(), "{text}");
    for part in [
        "libggml-base.so",
        "understood",
        "302 tensors",
        "hot-swap    works",
        "30 layers",
        "streaming   works in this program\nsizes ",
        "sizes       30 layers of 8 experts: 398 MB of routed experts, 47 MB of other tensors",
        "a token uses 2 of them in each layer, 99.5 MB in all",
        "\nmemory      ",
        "\ndisk        ",
    ] {
        assert!(text.contains(part), "{part}: {text}");
    }
    let (text, status) = command_line(&["doctor", "--", "true"], "");
    assert_eq!(status.code(), Some(1));
    assert!(text.contains("opened no model"), "{text}");
    let fails = ["doctor", "--", "sh", "-c", "echo no such file >&2; exit 3"];
    let (text, status) = command_line(&fails, "");
    assert_eq!(status.code(), Some(1));
    for part in [
        "ended       exit status: 3; it printed: no such file\n",
        "the program ended before it opened a model that the drop-in sees (exit status: 3)",
    ] {
        assert!(text.contains(part), "{part}: {text}");
    }
    let folder = tempfile::tempdir().expect("a folder");
    let program = folder.path().join("program");
    // A program for another machine, and one without a loader.
    let mut bytes = std::fs::read("/bin/true").expect("a program");
    bytes[18] = 0xb7;
    for (offset, sentence) in [
        (None, "is built for AARCH64"),
        (Some(0), "is linked statically"),
    ] {
        if let Some(value) = offset {
            // No program headers, and so no interpreter.
            bytes[56] = value;
            bytes[18] = 0x3e;
        }
        std::fs::write(&program, &bytes).expect("a file");
        let mode = std::os::unix::fs::PermissionsExt::from_mode(0o755);
        std::fs::set_permissions(&program, mode).expect("a mode");
        let path = program.display().to_string();
        let (text, status) = command_line(&["doctor", "--", &path], "");
        assert_eq!(status.code(), Some(1));
        assert!(text.contains(sentence), "{sentence}: {text}");
    }
}

#[test]
fn doctor_counts_what_the_program_uses_of_a_file_with_any_name() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join(OsStr::from_bytes(b"caf\xe9\n.gguf"));
    std::fs::copy(fixture("small-moe.gguf"), &path).expect("free space");
    let file = GgufFile::open(&path, Access::Read).expect("a model");
    let key = format!("{}.expert_used_count", Routing::of([&file]).architecture);
    let output = Command::new(testkit::host::built("release/llama-sidecar"))
        .args(["doctor", "--"])
        .arg(testkit::host::built("hosts-c/host"))
        .arg(upstream_libraries())
        .arg(&path)
        .env("HOST_OVERRIDE", format!("{key}=4"))
        .output()
        .expect("it starts");
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(text.contains("/caf\\xE9\\x0A.gguf, "), "{text}");
    assert!(
        text.contains("a token uses 4 of them in each layer"),
        "{text}"
    );
}

#[test]
fn a_trace_and_its_model_have_any_name() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = |name: &[u8]| folder.path().join(OsStr::from_bytes(name));
    let (model, trace) = (path(b"caf\xe9\n.gguf"), path(b"trace\xe9\n.json"));
    std::fs::copy(fixture("small-moe.gguf"), &model).expect("free space");
    std::fs::write(path(b"commands"), "text 2\n").expect("free space");
    let output = Command::new(built("release/llama-sidecar"))
        .args(["run", "--expert-trace-output"])
        .arg(&trace)
        .arg("--")
        .arg(built("hosts-c/host"))
        .arg(upstream_libraries())
        .arg(&model)
        .stdin(File::open(path(b"commands")).expect("a file"))
        .output()
        .expect("it starts");
    let text = String::from_utf8_lossy(&output.stderr);
    let written = format!(
        "trace written to {}/trace\\xE9\\x0A.json",
        folder.path().display()
    );
    assert!(
        text.contains(&written) && !text.contains('\u{fffd}'),
        "{text}"
    );
    let output = Command::new(built("release/llama-sidecar"))
        .arg("report")
        .arg(&trace)
        .args(["--pin", "50%", "-o"])
        .arg(path(b"ranges.csv"))
        .output()
        .expect("it starts");
    assert!(output.status.success(), "{output:?}");
}

#[test]
fn doctor_reports_reachable_hooks() {
    let host = c_host("smollm2.gguf");
    let script = format!("(echo text 2; sleep 60) | {}", host.join(" "));
    let (text, status) = command_line(&["doctor", "--", "sh", "-c", &script], "");
    assert!(status.success(), "{text}");
    // The copy callback of schedulers is newer than this host.
    assert!(text.contains("hooks       25 of 26 reachable\n"), "{text}");
    assert!(!text.contains("none was called"), "{text}");
    let newer = "this ggml does not have: ggml_backend_sched_set_copy_callback\n";
    assert!(text.contains(newer), "{text}");
    assert!(!text.contains("not reachable"), "{text}");
    let no_experts = "experts     this model has no routed experts to trace or to stream\n";
    assert!(text.contains(no_experts), "{text}");
    assert!(!text.contains("streaming  "), "{text}");
    let asked = ["doctor", "--stream-experts", "--", "sh", "-c", &script];
    let (text, status) = command_line(&asked, "");
    assert_eq!(status.code(), Some(1));
    assert!(
        text.contains("no model has routed experts to stream"),
        "{text}"
    );

    let loader = testkit::host::built("hosts-loader/loader");
    let folder = loader.parent().expect("a folder").display().to_string();
    let loader = loader.display().to_string();
    let doctor = |library: &str| {
        let load = format!("local={folder}/{library}");
        let seconds = ["doctor", "--run-time", "3s", "--", &loader, &load, "wait"];
        command_line(&seconds, "").0
    };
    let text = doctor("libcopy1.so");
    assert!(text.contains("hooks       1 of 26 reachable\n"), "{text}");
    assert!(text.contains("ggml_free, "), "{text}");
    assert!(text.contains("hooks       none was called: "), "{text}");
    assert!(!text.contains("not reachable"), "{text}");
    let text = doctor("libplugin_symbolic.so");
    let inside = "not reachable from inside libsymbolic.so: ggml_backend_buffer_free: ";
    assert!(text.contains(inside), "{text}");
    assert!(text.contains("without -Bsymbolic"), "{text}");
    let text = doctor("libhidden.so");
    assert!(text.contains("hooks       0 of 26 reachable\n"), "{text}");
    let linked = "not reachable: ggml_backend_buffer_free: linked into libhidden.so and not";
    assert!(text.contains(linked), "{text}");
}

#[test]
fn a_swap_of_the_file_reaches_the_running_host() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("model.gguf");
    std::fs::copy(fixture("smollm2.gguf"), &path).expect("a copy");
    let mut host = Host::start(Program::C, &path, &on());
    let before = host.text(TOKENS);
    let mut fresh = Host::start(
        Program::C,
        &fixture("smollm2-mixed.gguf"),
        &DropIn::On(Vec::new()),
    );
    let after = fresh.text(TOKENS);
    let socket = host.socket().display().to_string();
    let (path, from) = (path.display().to_string(), fixture("smollm2-mixed.gguf"));
    let from = from.display().to_string();
    let swap = [
        "swap", &path, "--tensor", "blk.*", "--from", &from, "--reload", "-s", &socket,
    ];
    let (text, status) = command_line(&swap, "");
    assert!(status.success() && text.contains("8 swapped"), "{text}");
    assert_eq!(host.text(TOKENS), after);
    // A program that cannot take the new file: the file stays.
    let other = folder.path().join("other.gguf");
    std::fs::copy(fixture("smollm2.gguf"), &other).expect("a copy");
    let (name, nowhere) = (other.display().to_string(), format!("{socket}.none"));
    for (socket, reason) in [(&nowhere, "cannot connect"), (&socket, "does not use")] {
        let swap = [
            "swap", &name, "--tensor", "blk.*", "--from", &from, "--reload", "-s", socket,
        ];
        let (text, status) = command_line(&swap, "");
        assert!(
            !status.success() && text.contains("nothing was changed"),
            "{text}"
        );
        assert!(text.contains(reason), "{text}");
        let is_same = std::fs::read(&other).expect("a file")
            == std::fs::read(fixture("smollm2.gguf")).expect("a file");
        assert!(is_same, "{text}");
    }
    let (text, status) = command_line(&["undo", &path, "-s", &socket], "");
    assert!(status.success() && text.contains("8 returned"), "{text}");
    assert_eq!(host.text(TOKENS), before);
    assert_eq!(fresh.end(), Some(0));
    assert_eq!(host.end(), Some(0));
}

#[test]
fn a_program_runs_with_the_memory_of_a_smaller_machine() {
    let script = "d=$(find /sys/fs/cgroup -type d -name 'llama-sidecar-'$PPID'-*'); echo dir=$d; cat $d/memory.max $d/memory.limit_in_bytes 2> /dev/null; exit 7";
    let limit = ["run", "--none", "--quiet", "--memory-limit", "64M", "--"];
    let (text, status) = command_line(&[&limit[..], &["sh", "-c", script]].concat(), "");
    if text.contains("cannot make a control group") {
        assert!(text.contains("-p MemoryMax=64M"), "{text}");
        return testkit::skipped("no rights for control groups");
    }
    assert_eq!(status.code(), Some(7), "{text}");
    assert!(text.contains("67108864"), "{text}");
    let group = text.lines().find_map(|line| line.strip_prefix("dir="));
    assert!(!Path::new(group.expect("a group")).exists(), "{text}");

    let run = |size: &str, script: &str| {
        let words = [
            "run",
            "--hotswap",
            "--memory-limit",
            size,
            "--",
            "sh",
            "-c",
            script,
        ];
        command_line(&words, "").0
    };
    let text = run("320", "true");
    assert!(
        text.contains("no program starts with 320 bytes: add a unit"),
        "{text}"
    );
    let text = run("64M", "kill -KILL $$");
    assert!(text.contains("pass a larger --memory-limit"), "{text}");
}

/// The Python host with a mixture of experts, as words of a command.
fn python_host() -> Vec<String> {
    let host = Path::new(env!("CARGO_MANIFEST_DIR")).join("hosts/python/host.py");
    let words = [host, fixture("upstream"), fixture("small-moe.gguf")];
    let words = words.iter().map(|path| path.display().to_string());
    std::iter::once("python3".into()).chain(words).collect()
}

/// Runs the Python host with its experts in host memory under `llama-sidecar run` and these flags,
/// with a simulated GPU or without. Returns what both printed.
fn run_with_experts_on_cpu(flags: &[&str], sim: Option<&SimGgml>) -> String {
    let mut command = Command::new(testkit::host::built("release/llama-sidecar"));
    command
        .arg("run")
        .args(flags)
        .arg("--")
        .args(python_host())
        .arg("experts-on-cpu")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    if let Some(sim) = sim {
        sim.prepare(&mut command);
    }
    let mut child = command.spawn().expect("it starts");
    let mut stdin = child.stdin.take().expect("a pipe");
    let _ = stdin.write_all(b"prompt 40\nprompt 64\nhashes 2\nend\n");
    drop(stdin);
    let output = child.wait_with_output().expect("it ends");
    let text = [output.stdout, output.stderr].concat();
    let text = String::from_utf8_lossy(&text).into_owned();
    assert!(output.status.success(), "{text}");
    text
}

#[test]
fn the_wrapper_reports_post_fetch() {
    let last = |flags: &[&str], sim: Option<&SimGgml>| {
        let text = run_with_experts_on_cpu(flags, sim);
        text.lines().last().unwrap_or_default().to_owned()
    };
    let sim = SimGgml::new(&[]);
    let mut early = Vec::new();
    for flag in ["--post-fetch", "--post-fetch=down"] {
        let line = last(&[flag], Some(&sim));
        let bytes = line.strip_prefix("llama-sidecar: post-fetch: ");
        let bytes = bytes.and_then(|line| line.split_once(" MB of experts copied early, "));
        let (bytes, rest) = bytes.unwrap_or_else(|| panic!("{line}"));
        assert!(rest.contains(" % of the copies' time overlapped"), "{line}");
        assert!(!rest.contains(';'), "{line}");
        early.push(bytes.parse::<u64>().expect("a number"));
    }
    // Of prompts alone; also of single tokens.
    assert!(early[0] > 0 && early[1] > 0, "{early:?}");
    let line = last(&["--page-lock"], Some(&sim));
    assert!(line.ends_with(" MB page-locked"), "{line}");
    let line = last(&["--post-fetch"], None);
    assert!(
        line.starts_with("llama-sidecar: error: post-fetch: no experts of "),
        "{line}"
    );
    assert!(
        line.contains(" are copied: the program uses no GPU: "),
        "{line}"
    );
}

#[test]
fn the_wrapper_sets_the_variables_of_post_fetch() {
    for (flag, variables) in [
        ("--post-fetch", "export LLAMA_POSTFETCH_MODE=on\n"),
        ("--post-fetch=all", "export LLAMA_POSTFETCH_MODE=all\n"),
        (
            "--page-lock",
            "export LLAMA_SIDECAR_PAGE_LOCK=1\nexport GGML_CUDA_REGISTER_HOST=1\n",
        ),
    ] {
        let (text, status) = command_line(&["run", flag, "--dry-run", "--", "true"], "");
        assert!(status.success() && text.contains(variables), "{text}");
    }
    let (text, status) = command_line(&["run", "--post-fetch=up", "--", "true"], "");
    assert_eq!(status.code(), Some(2));
    assert!(
        text.contains("[possible values: off, on, down, all]"),
        "{text}"
    );
}

#[test]
fn doctor_reports_whether_post_fetch_can_work() {
    let findings = |options: &[&str], host: &[String], sim: Option<&SimGgml>| {
        let script = "(echo text 2; sleep 60) | \"$@\"";
        let mut command = Command::new(testkit::host::built("release/llama-sidecar"));
        command
            .arg("doctor")
            .args(options)
            .args(["--", "sh", "-c", script, "sh"])
            .args(host);
        if let Some(sim) = sim {
            sim.prepare(&mut command);
        }
        let output = command.output().expect("it starts");
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        (text, output.status.code())
    };
    let doctor = |host: &[String], sim: Option<&SimGgml>| {
        let (text, code) = findings(&[], host, sim);
        assert_eq!(code, Some(0), "{text}");
        let line = text
            .lines()
            .find_map(|line| line.strip_prefix("post-fetch  "));
        line.unwrap_or_else(|| panic!("{text}")).to_owned()
    };
    let sim = SimGgml::new(&[]);
    let mut host = python_host();
    let line = doctor(&host, None);
    assert!(
        line.starts_with("no effect: the program uses no GPU: "),
        "{line}"
    );
    let line = doctor(&host, Some(&sim));
    let on_gpu = "no effect: its routed experts are on a GPU, ";
    assert!(line.starts_with(on_gpu), "{line}");
    // An option without effect is a finding.
    let (text, code) = findings(&["--expert-cache"], &host, Some(&sim));
    assert_eq!(code, Some(1), "{text}");
    let none = "cache       unknown: no graph had experts in host memory beside a GPU\n";
    assert!(text.contains(none), "{text}");
    host.push("experts-on-cpu".into());
    let line = doctor(&host, Some(&sim));
    let works = "can work: routed experts are in host memory, beside a GPU; ";
    assert!(line.starts_with(works), "{line}");

    // With a trace of the same text, all experts fit.
    let folder = tempfile::tempdir().expect("a folder");
    let trace = folder.path().join("trace.json");
    let trace = trace.to_str().expect("UTF-8");
    let script = "echo text 9 | \"$@\"";
    let traced = [
        "run",
        "--expert-trace-output",
        trace,
        "--",
        "sh",
        "-c",
        script,
        "sh",
    ];
    let host_words: Vec<&str> = host.iter().map(String::as_str).collect();
    let (text, status) = command_line(&[&traced[..], &host_words].concat(), "");
    assert!(status.success(), "{text}");
    let (text, code) = findings(&["--expert-cache", "--trace", trace], &host, Some(&sim));
    assert_eq!(code, Some(0), "{text}");
    let mut cache = text
        .lines()
        .filter_map(|line| line.strip_prefix("cache       "));
    let fit = cache.next().unwrap_or_else(|| panic!("{text}"));
    assert!(
        fit.starts_with("8 experts of each layer fit the memory"),
        "{fit}"
    );
    let hits = cache.next().unwrap_or_else(|| panic!("{text}"));
    assert!(
        hits.contains(" % of the routed experts of trace.json would be there"),
        "{hits}"
    );

    // The same with a library beside it whose scheduler calls nothing through the loader.
    let script = "import ctypes, runpy, sys; ctypes.CDLL(sys.argv[1]); sys.argv = sys.argv[2:]; runpy.run_path(sys.argv[0])";
    let bound = testkit::host::built("hosts-c/libfake_ggml.so");
    let bound = [script.into(), bound.display().to_string()];
    host.splice(1..1, ["-c".into()].into_iter().chain(bound));
    let line = doctor(&host, Some(&sim));
    let obstacle =
        "does not work: the scheduler in libfake_ggml.so does not call ggml_backend_offload_op, ";
    assert!(line.starts_with(obstacle), "{line}");
}

/// A copy of the libraries of node-llama-cpp whose ggml states another version.
fn with_another_version() -> tempfile::TempDir {
    let folder = tempfile::tempdir().expect("a folder");
    for entry in std::fs::read_dir(fixture("upstream")).expect("a folder") {
        let path = entry.expect("an entry").path();
        let mut bytes = std::fs::read(&path).expect("a library");
        let version = b"0.25.1\0";
        let places: Vec<usize> = bytes
            .windows(version.len())
            .enumerate()
            .filter_map(|(place, found)| (found == version).then_some(place))
            .collect();
        for place in places {
            bytes[place..place + version.len()].copy_from_slice(b"9.99.9\0");
        }
        let name = path.file_name().expect("a name");
        std::fs::write(folder.path().join(name), bytes).expect("free space");
    }
    folder
}

#[test]
fn a_ggml_of_another_version_is_used_unless_strict() {
    let libraries = with_another_version();
    let python = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("hosts/python/host.py");
    let host = |libraries: &Path| {
        let words =
            [&python, libraries, &fixture("smollm2.gguf")].map(|path| path.display().to_string());
        format!("(echo text 2; sleep 60) | python3 {}", words.join(" "))
    };
    let doctor = |libraries: &Path| {
        let (text, status) = command_line(&["doctor", "--", "sh", "-c", &host(libraries)], "");
        assert!(status.success(), "{text}");
        text
    };
    let known = doctor(&fixture("upstream"));
    assert!(!known.contains("not yet tried"), "{known}");
    let other = doctor(libraries.path());
    assert!(other.contains("9.99.9"), "{other}");
    assert!(other.contains("(not yet tried)"), "{other}");
    assert!(other.contains("hot-swap    works"), "{other}");

    let run = |libraries: &Path| {
        let script = host(libraries).replace("sleep 60", "echo end");
        let asked = ["run", "--strict", "--hotswap", "--", "sh", "-c", &script];
        let (text, status) = command_line(&asked, "");
        assert!(status.success(), "{text}");
        text
    };
    let refused = "not tried with this program's ggml, of version 9.99.9";
    let strict = run(libraries.path());
    assert!(strict.contains(refused), "{strict}");
    let tried = run(&fixture("upstream"));
    assert!(tried.contains("2 evaluations of"), "{tried}");
}

#[test]
fn a_reader_that_closes_its_end_is_no_failure() {
    let mut host = Host::start(Program::C, &fixture("smollm2.gguf"), &on());
    host.text(TOKENS);
    for request in [&["status"][..], &["ctl", "reload"], &["ctl", "metrics"]] {
        let (reader, writer) = std::io::pipe().expect("a pipe");
        drop(reader);
        let output = Command::new(testkit::host::built("release/llama-sidecar"))
            .args(request)
            .arg("--socket")
            .arg(host.socket())
            .stdout(writer)
            .output()
            .expect("it starts");
        let errors = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success() && errors.is_empty(), "{errors}");
    }
    assert_eq!(host.end(), Some(0));
}

#[test]
fn a_fault_is_named_at_the_next_start_until_the_program_lives() {
    let folder = tempfile::tempdir().expect("a folder");
    let lives = folder.path().join("lives");
    let script = format!("test -e {} || kill -ABRT $$", lives.display());
    let run = |flags: &[&str], script: &str| {
        let mut command = plain_command(built("release/llama-sidecar"));
        command
            .arg("run")
            .args(flags)
            .args(["--", "sh", "-c", script]);
        let output = command.env("XDG_DATA_HOME", folder.path()).output();
        let log = output.expect("it starts").stderr;
        String::from_utf8_lossy(&log).contains("this program ended by SIGABRT")
    };
    assert!(!run(&["--hotswap"], &script), "the first start");
    assert!(run(&["--hotswap"], &script), "the second one");
    assert!(!run(&["--none"], &script), "without the drop-in");
    assert!(!run(&["--hotswap"], "exit 0"), "another command");
    std::fs::write(&lives, "").expect("free space");
    assert!(run(&["--hotswap"], &script), "before it has lived");
    assert!(!run(&["--hotswap"], &script), "it has lived");
}
