//! Man pages and shell completions.

use std::fs;
use std::path::Path;

use anyhow::{Context, Result};
use clap::Command;
use clap_complete::Shell;
use sidecar_core::text;

/// Writes man pages and completions of a command to their standard folders below a prefix.
pub fn run(mut command: Command, prefix: &Path) -> Result<()> {
    let man = prefix.join("share/man/man1");
    fs::create_dir_all(&man).with_context(|| text::path(&man))?;
    clap_mangen::generate_to(command.clone(), &man)?;
    for (shell, folder) in [
        (Shell::Bash, "share/bash-completion/completions"),
        (Shell::Zsh, "share/zsh/site-functions"),
        (Shell::Fish, "share/fish/vendor_completions.d"),
    ] {
        let folder = prefix.join(folder);
        fs::create_dir_all(&folder).with_context(|| text::path(&folder))?;
        let name = command.get_name().to_owned();
        let written = clap_complete::generate_to(shell, &mut command, &name, &folder)?;
        if shell == Shell::Bash {
            // Bash looks for a file with the name of the command.
            fs::rename(written, folder.join(name))?;
        }
    }
    Ok(())
}
