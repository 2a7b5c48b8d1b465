//! The tables of variables in the documentation, generated from the table in `core/src/config`.

use std::fmt::Write;

use anyhow::{Context, Result, ensure};
use sidecar_core::config::{VARIABLES, Variable, table};

use crate::run::root;

const PAGE: &str = "docs/variables.md";
const BEGIN: &str = "<!-- variables:begin -->\n";
const END: &str = "<!-- variables:end -->";
/// The sections of the page, with the beginnings of the names.
const SECTIONS: [(&str, &[&str]); 4] = [
    (
        "Hot-swap and general settings",
        &["LLAMA_HOTSWAP_", "LLAMA_SIDECAR_"],
    ),
    ("Expert trace", &["LLAMA_EXPERT_TRACE_"]),
    ("Experts from disk", &["LLAMA_EXPERT_STREAM"]),
    ("Post-fetch", &["LLAMA_POSTFETCH_"]),
];

/// Returns the tables, each below its heading.
fn tables() -> String {
    let mut text = String::new();
    for (heading, prefixes) in SECTIONS {
        let belongs = |variable: &&Variable| {
            let mut prefixes = prefixes.iter();
            prefixes.any(|prefix| variable.name.starts_with(prefix))
        };
        let table = table(VARIABLES.iter().filter(belongs));
        // The links of the source are relative to the root.
        let table = table.replace("](docs/", "](");
        let _ = write!(text, "## {heading}\n\n{table}\n");
    }
    text
}

/// Returns the page as it is, and with the present tables.
fn pages() -> Result<(String, String)> {
    let page = std::fs::read_to_string(root().join(PAGE)).context(PAGE)?;
    let parts = page.split_once(BEGIN).and_then(|(before, rest)| {
        let (_, after) = rest.split_once(END)?;
        Some(format!("{before}{BEGIN}{}{END}{after}", tables()))
    });
    let current =
        parts.with_context(|| format!("{PAGE} has no lines '{}' and '{END}'", BEGIN.trim()))?;
    Ok((page, current))
}

/// Writes the tables.
pub fn write() -> Result<()> {
    let (_, current) = pages()?;
    std::fs::write(root().join(PAGE), current).context(PAGE)
}

/// Fails when the page has other tables than would be written.
pub fn check() -> Result<()> {
    let (page, current) = pages()?;
    ensure!(
        page == current,
        "the tables of variables in {PAGE} are stale: run 'cargo xtask docs'"
    );
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_tables_of_variables_are_current() {
        check().expect("the tables of core/src/config");
    }

    #[test]
    fn each_variable_is_in_one_section() {
        let tables = tables();
        for variable in VARIABLES {
            let row = format!("\n| `{}` |", variable.name);
            assert_eq!(tables.matches(&row).count(), 1, "{row}");
        }
    }
}
