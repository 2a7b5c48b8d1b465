//! The tables of variables in the documentation, generated from the table in `src/config`.

use anyhow::{Context, Result, bail};
use llama_sidecar::config::{VARIABLES, Variable, table};

use crate::run::root;

const BEGIN: &str = "<!-- variables:begin -->\n";
const END: &str = "<!-- variables:end -->";
const POSTFETCH: &str = "LLAMA_POSTFETCH_";
/// Follows the table of the README: the variables of the other page, and the grammar.
const FURTHER: &str = "\
| `LLAMA_POSTFETCH_*` | | post-fetch: [docs/post-fetch.md](docs/post-fetch.md#variables) |

Of a switch, `0`, `off`, `no` and `false` are off, and every other value is on. An unset or empty variable has its default.
";

/// Returns the pages that have a table, and their tables.
fn pages() -> [(&'static str, String); 2] {
    let is_postfetch = |variable: &&Variable| variable.name.starts_with(POSTFETCH);
    let (postfetch, others): (Vec<&Variable>, Vec<_>) = VARIABLES.iter().partition(is_postfetch);
    [
        ("README.md", table(others) + FURTHER),
        ("docs/post-fetch.md", table(postfetch)),
    ]
}

/// Puts a table between the markers of a page.
fn with_table(page: &str, table: &str) -> Option<String> {
    let (before, rest) = page.split_once(BEGIN)?;
    let (_, after) = rest.split_once(END)?;
    Some(format!("{before}{BEGIN}{table}{END}{after}"))
}

/// Calls `act` with the path, the text and the current text of each page.
fn for_each_page(act: impl Fn(&str, &str, String) -> Result<()>) -> Result<()> {
    for (path, table) in pages() {
        let page = std::fs::read_to_string(root().join(path)).context(path)?;
        let current = with_table(&page, &table)
            .with_context(|| format!("{path} has no lines '{}' and '{END}'", BEGIN.trim()))?;
        act(path, &page, current)?;
    }
    Ok(())
}

/// Writes the tables.
pub fn write() -> Result<()> {
    for_each_page(|path, _, current| {
        std::fs::write(root().join(path), current).context(path.to_owned())
    })
}

/// Fails when a page has another table than would be written.
pub fn check() -> Result<()> {
    for_each_page(|path, page, current| match page == current {
        true => Ok(()),
        false => bail!("the table of variables in {path} is stale: run 'cargo xtask docs'"),
    })
}

#[cfg(test)]
mod tests {
    #[test]
    fn the_tables_of_variables_are_current() {
        super::check().expect("the tables of src/config");
    }
}
