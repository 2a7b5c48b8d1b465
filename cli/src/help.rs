//! The help of the commands, and names that commands had.

use std::ffi::OsString;
use std::fmt::Write;
use std::process::exit;

use anyhow::{Result, anyhow};
use clap::builder::StyledStr;
use clap::error::{ContextKind, ContextValue, ErrorKind};
use clap::{Command, Parser};

/// The widest line of a help that is written to no terminal, or to a wide one.
const WIDEST: usize = 100;

/// What commands are for, the commands in the order of the help, and an example.
const PURPOSES: [(&str, &[&str], &str); 5] = [
    (
        "Speed up a program",
        &["doctor", "run", "compare", "plan"],
        "compare -- llama-server -m model.gguf",
    ),
    (
        "Try other tensors, and return",
        &["swap", "undo", "ask", "status", "top"],
        "swap --live --tensor 'blk.7.*' --from model.gguf --as q4_K",
    ),
    (
        "See which experts are used",
        &["trace", "report"],
        "report trace.json -o page.html",
    ),
    (
        "Make a model smaller",
        &["shrink", "tune", "prune"],
        "shrink model.gguf --size 5G --text sample.txt -o small.gguf",
    ),
    (
        "Look into a model, or control a program",
        &["inspect", "ctl"],
        "ctl reload",
    ),
];

/// Names that commands had, and those that they have now.
pub const RENAMED: [(&str, &str); 12] = [
    ("freeze", "ctl freeze"),
    ("load", "inspect --load"),
    ("margins", "ctl margins"),
    ("mark", "ctl mark"),
    ("mask", "ctl mask"),
    ("metrics", "ctl metrics"),
    ("ping", "ctl ping"),
    ("prefer", "ctl prefer"),
    ("reload", "ctl reload"),
    ("revert", "undo"),
    ("round", "ctl round"),
    ("unfreeze", "ctl unfreeze"),
];

/// Options that commands had, and what takes their place.
const REPLACED: [(&str, &str); 5] = [
    (
        "--restore",
        "'llama-sidecar undo MODEL' or 'llama-sidecar undo -s SOCKET'",
    ),
    ("--cut", "--experts"),
    ("--minutes", "--time, such as 5m"),
    ("--seconds", "--run-time, such as 90s"),
    ("--write", "-o"),
];

/// Returns a command with its help by purpose.
pub fn arrange(command: Command) -> Command {
    let command = command.max_term_width(WIDEST);
    let text = by_purpose(&command);
    command.override_help(text)
}

/// Returns the first screen of the help.
fn by_purpose(command: &Command) -> StyledStr {
    let mut text = format!(
        "{}\n\nUsage: {} <COMMAND> [OPTIONS]\n",
        command.get_about().cloned().unwrap_or_default(),
        command.get_name()
    );
    for (purpose, names, example) in PURPOSES {
        let _ = write!(text, "\n{purpose}:\n");
        let known = names
            .iter()
            .filter_map(|name| command.find_subcommand(name));
        for of in known {
            let about = of.get_about().cloned().unwrap_or_default();
            let _ = writeln!(text, "  {:9}{about}", of.get_name());
        }
        let _ = writeln!(text, "  $ {} {example}", command.get_name());
    }
    text += "\nCOMMAND -h shows the options that are used most, COMMAND --help all of them.\n";
    text.into()
}

/// Parses the command line. Prints help and errors, and ends the process for them.
pub fn parse<P: Parser>() -> P {
    let mut command = arrange(P::command());
    let matches = command.try_get_matches_from_mut(std::env::args_os());
    let parsed = matches.and_then(|mut matches| P::from_arg_matches_mut(&mut matches));
    parsed.unwrap_or_else(|error| match error.kind() {
        ErrorKind::DisplayHelp
        | ErrorKind::DisplayVersion
        | ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand => error.exit(),
        // An argument may be the name of any file.
        _ => {
            let mut error = error;
            if error.kind() == ErrorKind::UnknownArgument {
                point_to_others(&mut error, &command);
            }
            let error = error.format(&mut command);
            let text = renamed(&error).unwrap_or_else(|| error.to_string());
            eprintln!("{}", text.trim_end());
            exit(error.exit_code())
        }
    })
}

/// Parses words that this program has made, or that are options of another command. The error is its first line.
pub fn parsed<P: Parser>(words: impl IntoIterator<Item = OsString>) -> Result<P> {
    P::try_parse_from(words).map_err(|error| {
        let text = error.to_string();
        anyhow!("{}", text.lines().next().unwrap_or_default())
    })
}

/// Names the commands that have an option which another one lacks.
fn point_to_others(error: &mut clap::Error, all: &Command) {
    let Some(ContextValue::String(typed)) = error.get(ContextKind::InvalidArg) else {
        return;
    };
    let name = typed.trim_start_matches('-').to_owned();
    let has =
        |of: &&Command| !of.is_hide_set() && of.get_opts().any(|of| of.get_long() == Some(&name));
    let shown = |of: &Command| format!("'{} {}'", all.get_name(), of.get_name());
    let mut names: Vec<_> = all.get_subcommands().filter(has).map(shown).collect();
    if all
        .get_subcommands()
        .flat_map(Command::get_subcommands)
        .any(|of| has(&of))
    {
        names.push(format!("'{} ctl'", all.get_name()));
    }
    if name == "memory-limit" {
        let word = all.get_name();
        names.push(format!(
            "such as '{word} run --memory-limit 4G -- {word} doctor -- COMMAND'"
        ));
    }
    // In place of the advice to pass the option as a value.
    let tips = match names.is_empty() {
        true => ContextValue::None,
        false => ContextValue::StyledStrs(vec![
            format!("--{name} is an option of {}", names.join(", ")).into(),
        ]),
    };
    error.insert(ContextKind::Suggested, tips);
}

/// Returns the message for a name that a command or an option had.
pub fn renamed(error: &clap::Error) -> Option<String> {
    let typed = |kind| match error.get(kind) {
        Some(ContextValue::String(typed)) => Some(typed.as_str()),
        _ => None,
    };
    let command = typed(ContextKind::InvalidSubcommand);
    let option = typed(ContextKind::InvalidArg);
    let command = RENAMED.iter().find(|(old, _)| Some(*old) == command);
    let option = REPLACED.iter().find(|(old, _)| Some(*old) == option);
    match (command, option) {
        (Some((old, new)), _) => Some(format!(
            "error: '{old}' is now 'llama-sidecar {new}': run 'llama-sidecar {new} --help'"
        )),
        (_, Some((old, new))) => Some(format!("error: '{old}' is now {new}")),
        _ => None,
    }
}
