//! The project's own commands.
//!
//! ```text
//! cargo xtask demo       the first journey, on a real model, told step by step
//! cargo xtask test       everything that CI checks
//! cargo xtask bench      every bench, and docs/benchmarks.md anew
//! cargo xtask bench load | swap | dropin | trace | postfetch
//! cargo xtask fixtures   download and make the models the tests use
//! cargo xtask hosts      build the drop-in and the programs it is tested with
//! cargo xtask prose      check the words of documentation, comments and messages
//! cargo xtask header     write include/llama_sidecar.h
//! cargo xtask docs       write the tables of variables in README.md and docs/post-fetch.md
//! cargo xtask install --prefix DIR [--destdir DIR]
//! cargo xtask check --abi | --package | --report | --asan | --valgrind | --fuzz MINUTES | --miri | --tsan | --soak MINUTES
//! ```

mod abi;
mod bench;
mod c_api_page;
mod cmake;
mod fixtures;
mod header;
mod install;
mod llama_cpp;
mod older;
mod packaging;
mod prose;
mod report;
mod run;
mod sanitize;
mod soak;
mod suite;
mod tsan;
mod variables;

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
        ["bench"] => bench::all(),
        ["bench", name] => bench::one(name),
        ["fixtures"] => fixtures::make().map(|_| ()),
        ["hosts"] => {
            if let Err(reason) = fixtures::vulkan() {
                println!("no software Vulkan device: {reason:#}");
            }
            fixtures::ik_llama()?;
            cmake::build_loader()?;
            cmake::build_hosts()?;
            llama_cpp::make().map(|_| ())
        }
        ["prose"] => prose::check(),
        ["header"] => header::write(),
        ["header", "--check"] => header::check(),
        ["docs"] => variables::write(),
        ["docs", "--check"] => variables::check(),
        ["install", "--prefix", prefix] => install::install(&std::path::absolute(prefix)?),
        ["install", "--prefix", prefix, "--destdir", folder] => {
            let folder = std::path::absolute(folder)?;
            install::install_to(&std::path::absolute(prefix)?, Some(&folder))
        }
        ["check", "--package"] => packaging::check(),
        ["check", "--report"] => report::check(),
        ["check", "--abi"] => abi::check().and_then(|()| older::check()),
        ["check", "--asan"] => sanitize::asan(),
        ["check", "--valgrind"] => sanitize::valgrind(),
        ["check", "--miri"] => sanitize::miri(),
        ["check", "--tsan"] => tsan::check(),
        ["check", "--soak", minutes] => soak::run(minutes.parse()?),
        ["check", "--fuzz", minutes] => sanitize::fuzz(minutes.parse()?),
        _ => bail!(
            "usage: cargo xtask demo | test | bench [NAME] | fixtures | hosts | prose | header [--check] | docs [--check] | install --prefix DIR [--destdir DIR] | check --abi|--package|--report|--asan|--valgrind|--fuzz MINUTES|--miri|--tsan|--soak MINUTES"
        ),
    }
}
