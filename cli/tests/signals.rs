//! What is left of a command that a signal ends, and what its exit status is.

use std::fs;
use std::io::Read;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use libc::{SIGHUP, SIGINT, SIGKILL, SIGQUIT, SIGTERM, c_int};
use tempfile::TempDir;
use testkit::process::{lead_session, terminal};
use testkit::writer::{F32, Gguf, Kv};

const PROGRAM: &str = env!("CARGO_BIN_EXE_llama-sidecar");

/// A command with the default action for signals, whatever this process ignores, and without core files.
fn command(folder: &Path) -> Command {
    let mut command = Command::new(PROGRAM);
    command.env("TMPDIR", folder).stderr(Stdio::piped());
    // SAFETY: system calls that may be made between fork and exec.
    unsafe {
        command.pre_exec(|| {
            for signal in [SIGHUP, SIGINT, SIGQUIT, SIGTERM] {
                libc::signal(signal, libc::SIG_DFL);
            }
            let none = libc::rlimit {
                rlim_cur: 0,
                rlim_max: 0,
            };
            libc::setrlimit(libc::RLIMIT_CORE, &raw const none);
            Ok(())
        });
    }
    command
}

fn send(child: &Child, signal: c_int) {
    // SAFETY: a system call without memory; the child was not waited for.
    unsafe { libc::kill(child.id() as libc::pid_t, signal) };
}

fn wait_until(what: &str, mut holds: impl FnMut() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(60);
    while !holds() {
        assert!(Instant::now() < deadline, "not in a minute: {what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Names of what is in a folder.
fn names(folder: &Path) -> Vec<String> {
    let entries = fs::read_dir(folder).expect("a folder");
    let name = |entry: std::io::Result<fs::DirEntry>| entry.expect("an entry").file_name();
    let mut names: Vec<_> = entries
        .map(|entry| name(entry).to_string_lossy().into_owned())
        .collect();
    names.sort();
    names
}

/// A mixture, a list of experts to leave out, and a script in place of llama-perplexity.
struct Pruning {
    folder: TempDir,
    temporary: TempDir,
}

impl Pruning {
    fn new(script: &str) -> Pruning {
        let it = Pruning {
            folder: tempfile::tempdir().expect("a folder"),
            temporary: tempfile::tempdir().expect("a folder"),
        };
        let mut model = Gguf::default()
            .kv("llama.expert_count", Kv::U32(4))
            .kv("llama.expert_used_count", Kv::U32(1))
            .tensor("blk.0.ffn_gate_inp.weight", &[64, 4], F32, 1);
        for name in ["gate", "up", "down"] {
            let name = format!("blk.0.ffn_{name}_exps.weight");
            model = model.tensor(&name, &[64, 64, 4], F32, 2);
        }
        model.write(&it.at("mixture")).expect("a model");
        fs::write(it.at("list"), r#"[{"layer": 0, "experts": [3]}]"#).expect("free space");
        fs::write(it.at("program"), format!("#!/bin/bash\n{script}\n")).expect("free space");
        let mode = fs::Permissions::from_mode(0o755);
        fs::set_permissions(it.at("program"), mode).expect("a mode");
        it
    }

    fn at(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn command(&self) -> Command {
        let mut command = command(self.temporary.path());
        command.arg("prune").arg(self.at("mixture"));
        command.arg("--experts").arg(self.at("list"));
        command.arg("--program").arg(self.at("program"));
        command.arg("-o").arg(self.at("pruned"));
        command
    }

    fn run(&self) -> Output {
        self.command().output().expect("it starts")
    }

    /// What is left beside the inputs.
    fn left(&self) -> Vec<String> {
        let mut left = names(self.folder.path());
        left.retain(|name| !["list", "mixture", "program"].contains(&name.as_str()));
        left.extend(names(self.temporary.path()));
        left
    }
}

/// What llama-perplexity prints at its end.
const GOOD: &str = "echo 'Final estimate: PPL = 12.5 +/- 0.1'";

#[test]
fn a_pruned_model_gets_its_name_when_it_was_evaluated() {
    for (script, reason) in [
        ("kill -ABRT $$", "signal: 6"),
        ("echo 'Final estimate: PPL = nan +/- nan'", "exit status: 0"),
        (
            "echo 'Unexpected negative standard deviation'",
            "Unexpected",
        ),
    ] {
        let it = Pruning::new(script);
        let output = it.run();
        let error = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{error}");
        assert!(
            error.contains("cannot use the new model") && error.contains(reason),
            "{error}"
        );
        assert_eq!(it.left(), [""; 0]);
    }
    // The file has the name that shards of it have.
    let it = Pruning::new(&format!(
        "[ \"$(basename \"$2\")\" = pruned ] || exit 3; {GOOD}"
    ));
    let output = it.run();
    assert!(output.status.success(), "{output:?}");
    assert_eq!(it.left(), ["pruned"]);
    // A program that the user names has to be there.
    fs::remove_file(it.at("pruned")).expect("a model");
    fs::remove_file(it.at("program")).expect("a program");
    assert_eq!(it.run().status.code(), Some(1));
    assert_eq!(it.left(), [""; 0]);
}

#[test]
fn a_process_that_a_program_leaves_is_ended() {
    let it = Pruning::new(&format!(
        "(setsid bash -c 'echo $$ > \"$0\"; sleep 1000' \"$(dirname \"$0\")/stray\" &) ; until [ -s \"$(dirname \"$0\")/stray\" ]; do sleep 0.01; done; {GOOD}"
    ));
    let output = it.run();
    assert!(output.status.success(), "{output:?}");
    let stray = fs::read_to_string(it.at("stray")).expect("a process");
    let stray = PathBuf::from("/proc").join(stray.trim());
    wait_until("the end of the process", || !stray.exists());
}

#[test]
fn a_signal_leaves_nothing_and_is_the_exit_status() {
    for signal in [SIGHUP, SIGINT, SIGQUIT, SIGTERM] {
        let it = Pruning::new("setsid sleep 1000 & echo $! > \"$(dirname \"$0\")/ready\"; wait");
        let mut child = it.command().spawn().expect("it starts");
        let ready = || fs::read_to_string(it.at("ready")).is_ok_and(|text| text.ends_with('\n'));
        wait_until("the start of the program", ready);
        assert!(it.left().len() > 2, "{:?}", it.left());
        send(&child, signal);
        let status = child.wait().expect("it ends");
        assert_eq!(status.signal(), Some(signal), "{status:?}");
        assert_eq!(it.left(), ["ready"]);
        let process = fs::read_to_string(it.at("ready")).expect("a process");
        let process = PathBuf::from("/proc").join(process.trim());
        wait_until("the end of the process", || !process.exists());
    }
}

#[test]
fn what_a_killed_command_leaves_goes_with_the_next_one() {
    let it = Pruning::new("touch \"$(dirname \"$0\")/ready\"; exec sleep 1000");
    let mut child = it.command().spawn().expect("it starts");
    wait_until("the start of the program", || it.at("ready").exists());
    send(&child, SIGKILL);
    child.wait().expect("it ends");
    assert!(it.left().len() > 2, "{:?}", it.left());
    fs::write(it.at("program"), format!("#!/bin/bash\n{GOOD}\n")).expect("free space");
    let output = it.run();
    assert!(output.status.success(), "{output:?}");
    assert_eq!(it.left(), ["pruned", "ready"]);
}

#[test]
fn a_comparison_ends_by_the_signal() {
    // The command starts nothing without it.
    testkit::host::preload_library();
    for signal in [SIGINT, SIGTERM, SIGHUP] {
        let folder = tempfile::tempdir().expect("a folder");
        let ready = folder.path().join("ready");
        let script = format!("touch {}; exec sleep 1000", ready.to_string_lossy());
        let mut command = command(folder.path());
        command.args(["compare", "--", "sh", "-c", &script]);
        let mut child = command
            .current_dir(folder.path())
            .spawn()
            .expect("it starts");
        wait_until("the start of the program", || ready.exists());
        send(&child, signal);
        assert_eq!(child.wait().expect("it ends").signal(), Some(signal));
        // What was measured so far is written.
        let left = ["compare.html", "compare.json", "ready"];
        assert_eq!(names(folder.path()), left);
    }
}

/// The local modes of a terminal.
fn modes(terminal: &OwnedFd) -> libc::tcflag_t {
    // SAFETY: a struct of numbers, which the call fills in.
    unsafe {
        let mut modes: libc::termios = std::mem::zeroed();
        assert_eq!(libc::tcgetattr(terminal.as_raw_fd(), &raw mut modes), 0);
        modes.c_lflag
    }
}

#[test]
fn a_signal_restores_the_terminal() {
    for signal in [SIGHUP, SIGINT, SIGQUIT, SIGTERM] {
        let folder = tempfile::tempdir().expect("a folder");
        let (mut keys, terminal) = terminal();
        let before = modes(&terminal);
        let side = || Stdio::from(terminal.try_clone().expect("a descriptor"));
        let mut command = command(folder.path());
        command.args(["top", "--socket", "/nowhere"]);
        command.stdin(side()).stdout(side());
        let mut child = command.spawn().expect("it starts");
        let mut shown = Vec::new();
        let mut read = |until: &str| {
            while !String::from_utf8_lossy(&shown).contains(until) {
                let mut bytes = [0; 4096];
                let count = keys.read(&mut bytes).expect("the terminal is open");
                shown.extend(&bytes[..count]);
            }
        };
        read("/nowhere");
        assert_ne!(modes(&terminal), before);
        send(&child, signal);
        // The other screen is left, and the cursor shown.
        read("\u{1b}[?1049l");
        read("\u{1b}[?25h");
        assert_eq!(child.wait().expect("it ends").signal(), Some(signal));
        assert_eq!(modes(&terminal), before);
    }
}

#[test]
fn a_terminal_that_goes_ends_top() {
    let folder = tempfile::tempdir().expect("a folder");
    let (mut keys, terminal) = terminal();
    let mut command = command(folder.path());
    command.args(["top", "--socket", "/nowhere"]);
    let side = || Stdio::from(terminal.try_clone().expect("a descriptor"));
    command.stdin(side()).stdout(side()).stderr(side());
    lead_session(&mut command, terminal);
    let mut child = command.spawn().expect("it starts");
    drop(command);
    keys.read_exact(&mut [0; 100]).expect("what it shows");
    drop(keys);
    let status = child.wait().expect("it ends");
    // By the signal, or because nothing can be shown any more, whatever it sees first.
    let ended = (status.signal(), status.code());
    assert!(
        [(Some(SIGHUP), None), (None, Some(1))].contains(&ended),
        "{ended:?}"
    );
}
