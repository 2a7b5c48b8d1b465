//! The tables of variables and of metrics in the documentation, generated from the tables in
//! `core/src/config` and `core/src/protocol`.

use std::fmt::Write;

use anyhow::{Context, Result, ensure};
use sidecar_core::config::{VARIABLES, Variable, table};
use sidecar_core::protocol::Metric;

use crate::run::root;

/// A page, the name in the comments around its tables, and the tables.
type Page = (&'static str, &'static str, fn() -> String);

const PAGES: [Page; 2] = [
    ("docs/variables.md", "variables", tables),
    ("docs/protocol.md", "metrics", Metric::table),
];
/// The sections of the page, with the beginnings of the names.
const SECTIONS: [(&str, &[&str]); 5] = [
    (
        "Hot-swap and general settings",
        &["LLAMA_HOTSWAP_", "LLAMA_SIDECAR_"],
    ),
    ("Expert trace", &["LLAMA_EXPERT_TRACE_"]),
    ("Masks of experts", &["LLAMA_EXPERT_MASKS"]),
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

/// Returns a page as it is, and with the present tables.
fn page(path: &'static str, name: &str, tables: fn() -> String) -> Result<(String, String)> {
    let (begin, end) = (
        format!("<!-- {name}:begin -->\n"),
        format!("<!-- {name}:end -->"),
    );
    let page = std::fs::read_to_string(root().join(path)).context(path)?;
    let parts = page.split_once(&begin).and_then(|(before, rest)| {
        let (_, after) = rest.split_once(&end)?;
        Some(format!("{before}{begin}{}{end}{after}", tables()))
    });
    let current =
        parts.with_context(|| format!("{path} has no lines '{}' and '{end}'", begin.trim()))?;
    Ok((page, current))
}

/// Writes the tables.
pub fn write() -> Result<()> {
    for (path, name, tables) in PAGES {
        let (_, current) = page(path, name, tables)?;
        std::fs::write(root().join(path), current).context(path)?;
    }
    Ok(())
}

/// Fails when a page has other tables than would be written.
pub fn check() -> Result<()> {
    for (path, name, tables) in PAGES {
        let (page, current) = page(path, name, tables)?;
        ensure!(
            page == current,
            "the tables of {name} in {path} are stale: run 'cargo xtask docs'"
        );
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_tables_are_current() {
        check().expect("the tables");
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
