//! Man pages and shell completions.

use std::fs;
use std::path::Path;

use anyhow::{Context, Result};
use clap::Command;
use clap_complete::Shell;
use sidecar_core::files::{self, Replace};
use sidecar_core::text;

use crate::candidates::OPTIONS;

/// Calls the command for values, else the completions that are generated. Readline quotes names of files that it inserts, and
/// values can have any text of a model.
const BASH: &str = r#"_llama-sidecar_values() {
    mapfile -t COMPREPLY < <(llama-sidecar candidates -- "${COMP_WORDS[@]:0:COMP_CWORD+1}" 2>/dev/null)
    if ((${#COMPREPLY[@]})); then
        compopt -o filenames 2>/dev/null
    else
        _llama__sidecar "$@"
    fi
}

"#;

/// The same for zsh, which quotes what it inserts.
const ZSH: &str = r#"_llama-sidecar() {
    local -a values
    values=("${(@f)$(llama-sidecar candidates -- "${(@)words[1,CURRENT]}" 2>/dev/null)}")
    if [[ -n $values[1] ]]; then
        compset -P '--*='
        compadd -U -i "$IPREFIX" -a values
    else
        _llama-sidecar_options "$@"
    fi
}

"#;

/// The same for fish, which adds the values to those of an option.
const FISH: &str = r#"function __llama_sidecar_candidates
    set -l word (commandline -ct)
    llama-sidecar candidates -- (string escape -- (commandline -opc)) "$word" 2>/dev/null
end
"#;

/// Writes man pages and completions of a command to their standard folders below a prefix.
pub fn run(mut command: Command, prefix: &Path) -> Result<()> {
    let man = prefix.join("share/man/man1");
    fs::create_dir_all(&man).with_context(|| text::path(&man))?;
    clap_mangen::generate_to(command.clone(), &man)?;
    for (shell, file) in [
        (
            Shell::Bash,
            "share/bash-completion/completions/llama-sidecar",
        ),
        (Shell::Zsh, "share/zsh/site-functions/_llama-sidecar"),
        (
            Shell::Fish,
            "share/fish/vendor_completions.d/llama-sidecar.fish",
        ),
    ] {
        let file = prefix.join(file);
        let folder = file.parent().expect("a folder");
        fs::create_dir_all(folder).with_context(|| text::path(folder))?;
        let completions = completions(shell, &mut command);
        files::write(&file, completions.as_bytes(), Replace::Any)
            .with_context(|| text::path(&file))?;
    }
    Ok(())
}

/// Returns the completions of a shell, with values that the command knows.
fn completions(shell: Shell, command: &mut Command) -> String {
    let mut text = Vec::new();
    clap_complete::generate(shell, command, "llama-sidecar", &mut text);
    let text = String::from_utf8(text).expect("completions are UTF-8");
    match shell {
        // The labels of commands have another name than the variable, because the name of the command has a hyphen. Readline
        // completes files where no value is known, also with spaces in their names.
        Shell::Bash => {
            let text = text.replace("llama__subcmd__sidecar", "llama__sidecar");
            let text = text.replace("$(compgen -f \"${cur}\")", "");
            BASH.to_owned() + &text.replace("-F _llama__sidecar ", "-F _llama-sidecar_values ")
        }
        Shell::Zsh => {
            let text = text.replace("\n_llama-sidecar() {", "\n_llama-sidecar_options() {");
            text.replacen(
                "\nif [ \"$funcstack[1]\"",
                &format!("\n{ZSH}if [ \"$funcstack[1]\""),
                1,
            )
        }
        _ => {
            let has_values = |line: &str| {
                OPTIONS
                    .iter()
                    .any(|name| line.contains(&format!(" -l {name} ")))
            };
            let lines = text.lines().map(|line| match has_values(line) {
                true => format!("{line} -a '(__llama_sidecar_candidates)'\n"),
                false => format!("{line}\n"),
            });
            FISH.to_owned() + &lines.collect::<String>()
        }
    }
}
