//! Requests to programs that are damaged or stopped, as a user makes them.

use std::os::unix::net::UnixListener;
use std::path::Path;
use std::process::{Command, Output};

const PROGRAM: &str = env!("CARGO_BIN_EXE_llama-sidecar");

/// All commands with one request.
const REQUESTS: [&[&str]; 13] = [
    &["ctl", "ping"],
    &["status"],
    &["status", "--hash"],
    &["ctl", "metrics"],
    &["ctl", "reload"],
    &["ctl", "freeze"],
    &["ctl", "unfreeze"],
    &["trace"],
    &["trace", "--reset"],
    &["ctl", "mask", "--clear"],
    &["ctl", "mark", "a"],
    &["ctl", "round"],
    &["undo"],
];

/// Runs a command at a socket.
fn at(socket: &Path, words: &[&str], more: &[&str]) -> Output {
    let mut command = Command::new(PROGRAM);
    command.args(words).args(more).arg("--socket").arg(socket);
    command.output().expect("it starts")
}

fn fails(output: &Output, with: &str) {
    let text = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{text}");
    assert!(output.stdout.is_empty() && text.contains(with), "{text}");
}

#[test]
fn a_program_that_closes_its_end_is_a_failure() {
    let folder = tempfile::tempdir().expect("a folder");
    let socket = folder.path().join("socket");
    let listener = UnixListener::bind(&socket).expect("a new socket");
    // Closed before, while or after the request is written.
    std::thread::spawn(move || listener.incoming().for_each(drop));
    for words in REQUESTS.iter().cycle().take(120) {
        fails(
            &at(&socket, words, &[]),
            "was closed without a complete reply",
        );
    }
}

#[test]
fn a_stopped_program_does_not_hold_a_command() {
    let folder = tempfile::tempdir().expect("a folder");
    let socket = folder.path().join("socket");
    // The kernel accepts connections for it.
    let _listener = UnixListener::bind(&socket).expect("a new socket");
    for words in REQUESTS {
        let output = at(&socket, words, &["--timeout", "0.1"]);
        fails(&output, "does not answer in time");
        fails(&output, "pass a longer --timeout");
    }
    // A health check needs no option.
    fails(
        &at(&socket, &["ctl", "ping"], &[]),
        "does not answer in time",
    );
    for text in ["0", "-1", "nan", "inf", "1e300", "a"] {
        let output = at(&socket, &["ctl", "ping"], &[&format!("--timeout={text}")]);
        let error = String::from_utf8_lossy(&output.stderr);
        assert!(error.contains("expected a time such as 2s"), "{error}");
    }
}
