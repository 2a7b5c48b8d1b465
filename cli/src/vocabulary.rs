//! Tests of all commands: their help fits a screen, and a flag has one meaning.

use clap::{Command, CommandFactory};

use crate::{Arguments, help};

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
