//! Values of options for the completions of a shell: sockets, tensors of a model, types.

use std::path::{Path, PathBuf};
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use clap::{Arg, Command};
use sidecar_core::gguf::{Access, open_model};
use sidecar_core::text;

use crate::control::sockets;

/// The name of the hidden command.
pub const NAME: &str = "candidates";
/// The options that have candidates.
pub const OPTIONS: [&str; 4] = ["socket", "tensor", "as", "types"];
/// The most that are printed.
const MOST: usize = 2_000;
/// How long they may take: the shell waits, and a file can be of any size, on any disk.
const PATIENCE: Duration = Duration::from_secs(2);

/// Prints the candidates for the last of the words of a command line, one in each line.
pub fn run(command: Command, words: Vec<String>) {
    let (sender, found) = mpsc::channel();
    // The end of the process ends a thread that takes longer.
    thread::spawn(move || sender.send(of_words(&command, &words)));
    for candidate in found.recv_timeout(PATIENCE).unwrap_or_default() {
        println!("{candidate}");
    }
}

/// Returns the candidates for the last of the words, which are quoted as in a shell.
fn of_words(command: &Command, words: &[String]) -> Vec<String> {
    let words = words.iter().map(|word| unquoted(word));
    let mut words: Vec<String> = words.flat_map(|word| option_and_value(&word)).collect();
    // Bash makes three words of --option=value.
    if words.last().is_some_and(|word| word == "=") {
        words.push(String::new());
    }
    words.retain(|word| word != "=");
    let Some((current, words)) = words.split_last() else {
        return Vec::new();
    };
    let mut words = words.iter().skip(1).map(String::as_str);
    let (mut command, mut from, mut model) = (command, None, None);
    while let Some(word) = words.next() {
        if let Some(inner) = command.find_subcommand(word) {
            command = inner;
        } else if word == "--" || command.get_arguments().any(Arg::is_trailing_var_arg_set) {
            // The words after it are those of a program.
            return Vec::new();
        } else if let Some(option) = option(command, word) {
            let name = option.get_long().unwrap_or_default();
            match words.next() {
                Some(value) if name == "from" => from = Some(value),
                Some(_) => {}
                None => {
                    let model = from.or(model).map(at_home);
                    return of_option(name, model.as_deref(), current);
                }
            }
        } else if !word.starts_with('-') {
            model = model.or(Some(word));
        }
    }
    Vec::new()
}

/// Returns a word, or the two of --option=value.
fn option_and_value(word: &str) -> Vec<String> {
    let parts = word.split_once('=').filter(|_| word.starts_with("--"));
    let parts = parts.map(|(option, value)| vec![option.into(), value.into()]);
    parts.unwrap_or_else(|| vec![word.into()])
}

/// Returns the option that takes the word after this one.
fn option<'a>(command: &'a Command, word: &str) -> Option<&'a Arg> {
    let mut options = command.get_opts();
    match word.strip_prefix("--") {
        Some(long) => options.find(|of| of.get_long() == Some(long)),
        None => {
            let short = word.strip_prefix('-')?;
            options.find(|of| of.get_short().is_some_and(|of| short == of.to_string()))
        }
    }
    .filter(|of| of.get_action().takes_values())
}

/// Returns the candidates for an option, of a model that the command line names.
fn of_option(name: &str, model: Option<&Path>, current: &str) -> Vec<String> {
    // A list of types, whose last one is completed.
    let (before, last) = current.split_at(current.rfind(',').map_or(0, |comma| comma + 1));
    let found: Vec<String> = match name {
        "socket" => {
            let sockets = sockets::running().into_iter();
            let sockets = sockets.filter_map(|path| path.into_os_string().into_string().ok());
            sockets.filter(|path| path.starts_with(current)).collect()
        }
        "tensor" => tensors(model, current),
        "as" | "types" => {
            let types = ggml_quantize::TARGETS.iter();
            let types = types.filter(|name| name.starts_with(last));
            types.map(|name| format!("{before}{name}")).collect()
        }
        _ => Vec::new(),
    };
    let plain = found.into_iter();
    let plain = plain.filter(|candidate| !candidate.contains(text::is_hidden));
    plain.take(MOST).collect()
}

/// Returns regular expressions for the tensors whose names begin so, escaped or not.
fn tensors(model: Option<&Path>, current: &str) -> Vec<String> {
    let files = model.and_then(|model| open_model(model, Access::Read).ok());
    let mut found = Vec::new();
    for file in files.iter().flatten() {
        let tensors = file.header.tensors.iter();
        let names = tensors.filter_map(|tensor| file.header.name(tensor).to_str().ok());
        found.extend(names.filter_map(|name| {
            let escaped = regex::escape(name);
            let begins = name.starts_with(current) || escaped.starts_with(current);
            begins.then_some(escaped)
        }));
    }
    found
}

/// Returns a word as the shell passes it, without expansions. A quote may have no end.
fn unquoted(word: &str) -> String {
    let (mut plain, mut quote) = (String::new(), None);
    let mut characters = word.chars();
    while let Some(c) = characters.next() {
        match (c, quote) {
            ('\'' | '"', None) => quote = Some(c),
            (c, Some(end)) if c == end => quote = None,
            ('\\', None | Some('"')) => plain.extend(characters.next()),
            (c, _) => plain.push(c),
        }
    }
    plain
}

/// Returns a path with the user's folder in place of `~`.
fn at_home(path: &str) -> PathBuf {
    match (path.strip_prefix("~/"), std::env::home_dir()) {
        (Some(rest), Some(home)) => home.join(rest),
        _ => path.into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::ArgAction;
    use testkit::writer::{F32, Gguf};

    fn command() -> Command {
        let option = |name: &'static str| Arg::new(name).long(name);
        let options = ["tensor", "from", "as", "types", "timeout"].map(option);
        let flag = option("dry-run").action(ArgAction::SetTrue);
        let swap = Command::new("swap").arg(Arg::new("model")).args(options);
        let program = Arg::new("program").trailing_var_arg(true).num_args(1..);
        let socket = option("socket").short('s');
        let run = Command::new("run").arg(socket).arg(program);
        Command::new("llama-sidecar").subcommands([swap.arg(flag), run])
    }

    fn of_line(words: &[&str]) -> Vec<String> {
        let words: Vec<String> = words.iter().map(|word| word.to_string()).collect();
        of_words(&command(), &words)
    }

    #[test]
    fn tensors_are_those_of_the_model_of_the_line() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = |name: &str| folder.path().join(name).to_string_lossy().into_owned();
        let model = |name: &str, tensors: &[&str]| {
            let with = |gguf: Gguf, name: &&str| gguf.tensor(name, &[4], F32, 1);
            let model = tensors.iter().fold(Gguf::default(), with);
            model.write(path(name).as_ref()).expect("a file");
        };
        let hostile = ["blk.1.a;b", "blk.1.\u{1b}[31m", "blk.1.new\nline"];
        model("a b.gguf", &[&["blk.0.x", "output"], &hostile[..]].concat());
        model("from.gguf", &["blk.9.x"]);
        let quoted = format!("'{}'", path("a b.gguf"));
        let line = |rest: &[&str]| of_line(&[&["llama-sidecar", "swap", &quoted], rest].concat());
        let expected = [r"blk\.0\.x", "output", r"blk\.1\.a;b"];
        assert_eq!(line(&["--dry-run", "--tensor", ""]), expected);
        for current in ["blk.0", r"blk\\.0", r"'blk\.0"] {
            assert_eq!(line(&["--tensor", current]), [r"blk\.0\.x"], "{current}");
        }
        let from = path("from.gguf");
        let separate = ["--from", from.as_str(), "--tensor", "="];
        assert_eq!(line(&separate), [r"blk\.9\.x"]);
        let joined = [&format!("--from={from}"), "--tensor=blk"];
        assert_eq!(line(&joined), [r"blk\.9\.x"]);
        for rest in [&["--timeout", "--tensor", ""][..], &["--", "--tensor", ""]] {
            assert!(line(rest).is_empty(), "{rest:?}");
        }
        std::fs::write(path("bad.gguf"), "GGUF").expect("free space");
        for bad in ["bad.gguf", "none.gguf", "."] {
            assert!(of_line(&["llama-sidecar", "swap", &path(bad), "--tensor", ""]).is_empty());
        }
        let many: Vec<String> = (0..MOST + 9).map(|at| format!("{at}")).collect();
        model(
            "many.gguf",
            &many.iter().map(String::as_str).collect::<Vec<_>>(),
        );
        let many = of_line(&["llama-sidecar", "swap", &path("many.gguf"), "--tensor", ""]);
        assert_eq!(many.len(), MOST);
    }

    #[test]
    fn types_are_those_that_can_be_quantised_to() {
        let line = ["llama-sidecar", "swap", "m.gguf", "--types", "q6_K,q5_"];
        assert_eq!(of_line(&line), ["q6_K,q5_0", "q6_K,q5_1", "q6_K,q5_K"]);
        let all = of_line(&["llama-sidecar", "swap", "--as", ""]);
        assert!(all.contains(&"bf16".into()) && !all.contains(&"q8_1".into()));
        for options in [
            &["run", "--", "x", "--as", ""][..],
            &["run", "x", "-s", ""],
            &["swap"],
            &[],
        ] {
            assert!(of_line(&[&["llama-sidecar"], options].concat()).is_empty());
        }
    }
}
