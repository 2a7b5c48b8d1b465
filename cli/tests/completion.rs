//! The completions that `llama-sidecar generate` writes, in bash.

use std::os::unix::net::UnixListener;
use std::path::Path;
use std::process::Command;

use testkit::writer::{F32, Gguf};

/// Prints what the function of the completions returns for the words of a line.
const SCRIPT: &str = r#"
source "$1"; shift
function=$(complete -p llama-sidecar); function=${function#*-F }; function=${function%% *}
COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1))
"$function" llama-sidecar "${!#}" "${COMP_WORDS[COMP_CWORD - 1]}"
printf '%s\n' "${COMPREPLY[@]}"
"#;

/// Writes the completions to a new folder.
fn generated() -> tempfile::TempDir {
    let folder = tempfile::tempdir().expect("a folder");
    let mut command = Command::new(env!("CARGO_BIN_EXE_llama-sidecar"));
    let status = command.arg("generate").arg(folder.path()).status();
    assert!(status.expect("it starts").success());
    folder
}

fn complete(folder: &Path, words: &[&str]) -> Vec<String> {
    let program = Path::new(env!("CARGO_BIN_EXE_llama-sidecar"));
    let path = std::env::var_os("PATH").expect("a path");
    let programs = [program.parent().expect("a folder").into()];
    let path = programs.into_iter().chain(std::env::split_paths(&path));
    let path = std::env::join_paths(path).expect("no colons");
    let output = Command::new("bash")
        .args(["--norc", "-c", SCRIPT, "bash"])
        .arg(folder.join("share/bash-completion/completions/llama-sidecar"))
        .arg("llama-sidecar")
        .args(words)
        .current_dir(folder)
        .env("PATH", path)
        .env("XDG_RUNTIME_DIR", folder)
        .output()
        .expect("bash starts");
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && error.is_empty(), "{error}");
    let text = String::from_utf8(output.stdout).expect("UTF-8");
    text.lines().map(str::to_owned).collect()
}

#[test]
fn bash_completes_sockets_tensors_and_types() {
    let folder = generated();
    let folder = folder.path();
    Gguf::default()
        .tensor("blk.0.ffn_down.weight", &[4], F32, 1)
        .tensor("$(touch hostile)*", &[4], F32, 2)
        .write(&folder.join("a model.gguf"))
        .expect("a file");
    std::fs::create_dir(folder.join("llama-sidecar")).expect("a folder");
    let socket = folder.join("llama-sidecar/llama-server-7.sock");
    let _listener = UnixListener::bind(&socket).expect("a socket");

    let socket = socket.to_string_lossy().into_owned();
    for words in [
        &["status", "-s", ""][..],
        &["ctl", "reload", "--socket", "/"],
    ] {
        assert_eq!(complete(folder, words), [socket.as_str()], "{words:?}");
    }
    let names = [r"blk\.0\.ffn_down\.weight", r"\$\(touch hostile\)\*"];
    for model in [r"a\ model.gguf", "'a model.gguf'"] {
        assert_eq!(complete(folder, &["swap", model, "--tensor", ""]), names);
    }
    let separate = [
        "swap",
        "--from",
        "=",
        "'a model.gguf'",
        "--tensor",
        "=",
        "'blk.0",
    ];
    assert_eq!(complete(folder, &separate), names[..1]);
    assert!(!folder.join("hostile").exists());
    assert_eq!(
        complete(folder, &["tune", "m.gguf", "--types", "q6"]),
        ["q6_K"]
    );
    // What has no values of its own is an option, a command or a file, which readline completes.
    assert_eq!(complete(folder, &["sw"]), ["swap"]);
    assert_eq!(complete(folder, &["swap", "m", "--dr"]), ["--dry-run"]);
    assert_eq!(complete(folder, &["swap", "--from", "a"]), [""]);
}

/// The lines that are added to the generated completions are in them.
#[test]
fn zsh_and_fish_call_the_command() {
    let folder = generated();
    let text = |path: &str| std::fs::read_to_string(folder.path().join(path)).expect("a file");
    let zsh = text("share/zsh/site-functions/_llama-sidecar");
    assert_eq!(zsh.matches("\n_llama-sidecar() {").count(), 1);
    assert_eq!(zsh.matches("\n_llama-sidecar_options() {").count(), 1);
    let fish = text("share/fish/vendor_completions.d/llama-sidecar.fish");
    let values = fish
        .lines()
        .filter(|line| line.ends_with(" -a '(__llama_sidecar_candidates)'"));
    let names = ["socket", "tensor", "as", "types"].map(|name| format!(" -l {name} "));
    for name in names {
        assert!(values.clone().any(|line| line.contains(&name)), "{name}");
    }
}
