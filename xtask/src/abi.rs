//! What the shared library exports.

use std::collections::BTreeSet;
use std::path::Path;

use anyhow::{Result, bail};

use crate::install::{install, preload, target_folder};
use crate::run::{command, output};
use crate::{fixtures, root};

/// The one name that another library may export, too: a program compiled against
/// ik_llama.cpp links against us unchanged.
const SHARED_ON_PURPOSE: &str = "llama_reload_changed_tensors";

/// Fails unless the exports are the functions of the header, and none of them is
/// exported by upstream's libraries.
pub fn check() -> Result<()> {
    let stage = target_folder()?.join("stage");
    install(&stage)?;
    let ours = exports(&stage.join("lib/libllama_sidecar.so"))?;
    let in_header = declared(&std::fs::read_to_string(
        root().join("include/llama_sidecar.h"),
    )?);
    if ours != in_header {
        bail!(
            "exported and not in the header: {:?}; in the header and not exported: {:?}",
            ours.difference(&in_header).collect::<Vec<_>>(),
            in_header.difference(&ours).collect::<Vec<_>>()
        );
    }
    let promised = std::fs::read_to_string(root().join("tests/abi/llama_sidecar-0.1.h"))?;
    let missing: Vec<_> = declared(&promised).difference(&ours).cloned().collect();
    if !missing.is_empty() {
        bail!("functions of the header of 0.1 are not exported any more: {missing:?}");
    }
    let mut upstream = BTreeSet::new();
    for entry in std::fs::read_dir(fixtures::make()?.join("upstream"))? {
        let path = entry?.path();
        if path.extension().is_some_and(|extension| extension == "so") {
            upstream.append(&mut exports(&path)?);
        }
    }
    if upstream.len() < 2000 || !upstream.contains("llama_decode") {
        bail!(
            "upstream exports {} names only: the comparison would mean nothing",
            upstream.len()
        );
    }
    let taken: Vec<_> = ours
        .intersection(&upstream)
        .filter(|name| *name != SHARED_ON_PURPOSE)
        .collect();
    if !taken.is_empty() {
        bail!("upstream's libraries export these names, too: {taken:?}");
    }
    println!(
        "{} functions exported, none of upstream's {}",
        ours.len(),
        upstream.len()
    );
    check_preload(&upstream)
}

/// Fails unless all exports of the drop-in are functions of upstream's libraries, and nothing
/// of ggml's or llama.cpp's is undefined in it: a program without them could not start.
fn check_preload(upstream: &BTreeSet<String>) -> Result<()> {
    let library = preload()?;
    let exported = exports(&library)?;
    let unknown: Vec<_> = exported
        .difference(upstream)
        .filter(|name| *name != SHARED_ON_PURPOSE)
        .collect();
    if !unknown.is_empty() || exported.len() < 10 {
        bail!(
            "the drop-in exports {} functions; not exported by upstream: {unknown:?}",
            exported.len()
        );
    }
    let undefined = output(
        command("nm", &root())
            .args(["-D", "--undefined-only"])
            .arg(&library),
    )?;
    let foreign = |line: &&str| ["ggml", "gguf", "llama"].iter().any(|of| line.contains(of));
    if let Some(symbol) = undefined.lines().find(foreign) {
        bail!("undefined in the drop-in: {symbol}");
    }
    println!(
        "{} functions interposed, and no other exported",
        exported.len()
    );
    Ok(())
}

fn exports(library: &Path) -> Result<BTreeSet<String>> {
    let symbols = output(
        command("nm", &root())
            .args(["-D", "--defined-only"])
            .arg(library),
    )?;
    Ok(symbols
        .lines()
        .filter_map(|line| line.split_whitespace().nth(2))
        .map(str::to_owned)
        .collect())
}

/// Names in front of a parenthesis, outside of comments and typedefs.
fn declared(header: &str) -> BTreeSet<String> {
    header
        .lines()
        .filter(|line| {
            !["//", " *", "typedef"]
                .iter()
                .any(|start| line.starts_with(start))
        })
        .filter_map(|line| line.split_once('('))
        .filter_map(|(before, _)| before.split([' ', '*']).next_back())
        .filter(|name| name.starts_with("llama_"))
        .map(str::to_owned)
        .collect()
}
