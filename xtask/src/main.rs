//! The project's own commands.
//!
//! ```text
//! cargo xtask demo       the first journey, on a real model, told step by step
//! cargo xtask test       everything that CI checks
//! cargo xtask bench load open, load and reload against their peers
//! cargo xtask bench swap the pause of a swap, and 10,000 swaps under load
//! cargo xtask bench dropin  what the drop-in costs a host, and what it saves
//! cargo xtask bench trace   what counting experts costs
//! cargo xtask bench postfetch  how much of the copies is hidden, and what asking costs
//! cargo xtask fixtures   download and make the models the tests use
//! cargo xtask hosts      build the drop-in and the programs it is tested with
//! cargo xtask header     write include/llama_sidecar.h
//! cargo xtask install --prefix DIR [--destdir DIR]
//! cargo xtask check abi | report | asan | valgrind | fuzz MINUTES
//! ```

mod abi;
mod cmake;
mod fixtures;
mod header;
mod install;
mod packaging;
mod report;
mod run;
mod sanitize;
mod suite;

use std::path::PathBuf;

use anyhow::{Result, bail};

/// Root of the repository.
fn root() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR"))
        .parent()
        .expect("xtask is a folder of the repository")
        .to_owned()
}

fn main() -> Result<()> {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    match words.as_slice() {
        ["demo"] => suite::demo(),
        ["test"] => suite::test(),
        [
            "bench",
            name @ ("load" | "swap" | "dropin" | "trace" | "postfetch"),
        ] => suite::bench(name),
        ["fixtures"] => fixtures::make().map(|_| ()),
        ["hosts"] => {
            if let Err(reason) = fixtures::vulkan() {
                println!("no software Vulkan device: {reason:#}");
            }
            cmake::build_hosts().map(|_| ())
        }
        ["header"] => header::write(),
        ["header", "--check"] => header::check(),
        ["install", "--prefix", prefix] => install::install(&std::path::absolute(prefix)?),
        ["install", "--prefix", prefix, "--destdir", folder] => {
            let folder = std::path::absolute(folder)?;
            install::install_to(&std::path::absolute(prefix)?, Some(&folder))
        }
        ["check", "package"] => packaging::check(),
        ["check", "report"] => report::check(),
        ["check", "abi"] => abi::check(),
        ["check", "asan"] => sanitize::asan(),
        ["check", "valgrind"] => sanitize::valgrind(),
        ["check", "fuzz", minutes] => sanitize::fuzz(minutes.parse()?),
        _ => bail!(
            "usage: cargo xtask demo | test | bench load|swap|dropin|trace|postfetch | fixtures | hosts | header [--check] | install --prefix DIR | check abi|report|asan|valgrind|fuzz MINUTES"
        ),
    }
}
