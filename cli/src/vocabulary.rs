//! Tests of all commands: their help fits a screen, and a flag has one meaning.

use std::collections::BTreeMap;

use clap::{Arg, Command, CommandFactory};

use crate::{Arguments, candidates, help};

/// The columns and rows of a screen.
const SCREEN: (usize, usize) = (80, 40);

/// Calls a function with each command that the help shows, and its name.
fn each(command: &mut Command, name: &str, visit: &mut impl FnMut(&str, &mut Command)) {
    visit(name, command);
    let inner = command.get_subcommands_mut();
    for inner in inner.filter(|of| !of.is_hide_set() && of.get_name() != "help") {
        let name = format!("{name} {}", inner.get_name());
        each(inner, name.trim(), visit);
    }
}

fn all() -> Command {
    let mut command = help::arrange(Arguments::command()).term_width(SCREEN.0);
    command.build();
    command
}

#[test]
fn the_short_help_of_each_command_fits_a_screen() {
    let mut found = Vec::new();
    each(&mut all(), "", &mut |name, command| {
        let text = command.render_help().to_string();
        let rows = text.lines().map(|line| line.chars().count().max(1));
        let rows: usize = rows.map(|columns| columns.div_ceil(SCREEN.0)).sum();
        if rows > SCREEN.1 {
            found.push(format!("'{name} -h' has {rows} rows"));
        }
    });
    assert!(
        found.is_empty(),
        "{found:?}: hide_short_help, or a blank line after the first sentence"
    );
}

#[test]
fn options_with_candidates_exist() {
    let mut missing = candidates::OPTIONS.to_vec();
    each(&mut all(), "", &mut |_, command| {
        let has = |name: &str| command.get_opts().any(|of| of.get_long() == Some(name));
        missing.retain(|name| !has(name));
    });
    assert!(missing.is_empty(), "{missing:?}");
}

#[test]
fn the_first_screen_names_each_command_once() {
    let mut command = all();
    let text = command.render_help().to_string();
    for of in command
        .get_subcommands()
        .filter(|of| of.get_name() != "help")
    {
        let line = format!("\n  {:9}", of.get_name());
        assert_eq!(
            text.matches(&line).count(),
            usize::from(!of.is_hide_set()),
            "{line}: {text}"
        );
    }
    for line in text.lines().filter_map(|line| line.strip_prefix("  $ ")) {
        // What is not given must not be missing either.
        let parsed = command.try_get_matches_from_mut(line.replace('\'', "").split(' '));
        assert!(parsed.is_ok(), "{line}: {}", parsed.expect_err("an error"));
    }
}

#[test]
fn names_that_commands_had_lead_to_commands() {
    let command = all();
    for (old, new) in help::RENAMED {
        assert!(command.find_subcommand(old).is_none(), "{old} is a command");
        let mut at = &command;
        for word in new.split(' ').filter(|word| !word.starts_with('-')) {
            at = at
                .find_subcommand(word)
                .unwrap_or_else(|| panic!("{new} is no command"));
        }
        let error = all().try_get_matches_from(["llama-sidecar", old, "--socket", "/s"]);
        let text = help::renamed(&error.expect_err("no command")).expect("a name");
        assert!(
            text.contains(&format!("'{old}' is now 'llama-sidecar {new}'")),
            "{text}"
        );
    }
    let error = all().try_get_matches_from(["llama-sidecar", "swap", "m.gguf", "--restore"]);
    let text = help::renamed(&error.expect_err("no option")).expect("a name");
    assert!(text.contains("'llama-sidecar undo MODEL'"), "{text}");
}

/// An option as a user types it: its letter, and the name of its value. One whose value can be left out has none.
fn form(option: &Arg) -> String {
    let letter = option.get_short().map(|letter| format!("-{letter} "));
    let is_optional = option
        .get_num_args()
        .is_some_and(|range| range.min_values() == 0);
    let value = option.get_value_names().filter(|_| !is_optional);
    let value = value
        .and_then(|names| names.first())
        .map(|name| format!(" {name}"));
    let name = option.get_long().unwrap_or_default();
    format!(
        "{}--{name}{}",
        letter.unwrap_or_default(),
        value.unwrap_or_default()
    )
}

/// Returns the options that break the vocabulary: the table in CONTRIBUTING.md.
fn faults(command: &mut Command) -> Vec<String> {
    let text = include_str!("../../CONTRIBUTING.md");
    let (_, table) = text.split_once("| option | meaning |\n").expect("a table");
    let rows = table
        .lines()
        .skip(1)
        .map_while(|row| row.strip_prefix("| `"));
    let listed: Vec<&str> = rows.filter_map(|row| row.split('`').next()).collect();
    let mut used: BTreeMap<String, BTreeMap<String, Vec<String>>> = BTreeMap::new();
    each(command, "", &mut |name, command| {
        let options = command.get_arguments().filter(|of| {
            of.get_long()
                .is_some_and(|name| name != "help" && name != "version")
        });
        for option in options {
            let forms = used
                .entry(option.get_long().unwrap_or_default().into())
                .or_default();
            forms.entry(form(option)).or_default().push(name.into());
        }
    });
    let is_listed = |form: &str| listed.contains(&form);
    let mut faults = Vec::new();
    for (option, forms) in &used {
        let times: usize = forms.values().map(Vec::len).sum();
        let has_row = listed.iter().any(|row| {
            let words = row.split(' ');
            words
                .clone()
                .any(|word| word.strip_prefix("--") == Some(option))
        });
        match forms.keys().find(|form| !is_listed(form)) {
            Some(_) if forms.len() > 1 => {
                faults.push(format!("--{option} has several forms: {forms:?}"))
            }
            Some(form) if has_row => {
                faults.push(format!("'{form}' is not the form of the table: {forms:?}"))
            }
            Some(form) if times > 1 => {
                faults.push(format!("'{form}' is not in the table: {forms:?}"))
            }
            _ => {}
        }
    }
    let names: Vec<String> = used.into_values().flat_map(BTreeMap::into_keys).collect();
    let unused = listed
        .iter()
        .filter(|row| !names.iter().any(|form| form == *row));
    faults.extend(unused.map(|row| format!("no command has '{row}' of the table")));
    faults
}

#[test]
fn an_option_has_one_form_in_all_commands() {
    let found = faults(&mut all());
    assert!(found.is_empty(), "{}", found.join("\n"));
}

#[test]
fn an_option_that_breaks_the_vocabulary_is_found() {
    let mut broken = all();
    for (name, option) in [
        ("one", Arg::new("s").long("socket").value_name("ADDRESS")),
        ("two", Arg::new("l").long("layer").value_name("NUMBER")),
        (
            "three",
            Arg::new("o").short('w').long("output").value_name("FILE"),
        ),
    ] {
        broken = broken.subcommand(Command::new(name).arg(option));
    }
    broken.build();
    let found = faults(&mut broken).join("\n");
    for option in [
        "--socket has several",
        "--layer has several",
        "--output has several",
    ] {
        assert!(found.contains(option), "{option}: {found}");
    }
}
