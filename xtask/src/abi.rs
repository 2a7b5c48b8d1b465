//! What the shared library exports.

use std::collections::BTreeSet;
use std::path::Path;

use anyhow::{Context, Result, bail};

use crate::fixtures;
use crate::install::{DebugInfo, install, preload, target_folder};
use crate::machine::Machine;
use crate::run::root;

/// The one name that another library may export, too: a program compiled against
/// ik_llama.cpp links against us unchanged.
const SHARED_ON_PURPOSE: &str = "llama_reload_changed_tensors";
/// A function of upstream's from b11481 on, which the fixture's libraries do not have.
const NEWER: &str = "ggml_backend_sched_set_copy_callback";

/// Fails unless the exports are the functions of the header, and none of them is
/// exported by upstream's libraries.
pub fn check() -> Result<()> {
    let stage = target_folder()?.join("stage");
    install(&stage, Machine::HERE, DebugInfo::Separate)?;
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
    // Headers of released versions, which there may be none of.
    for entry in std::fs::read_dir(root().join("tests/abi"))
        .into_iter()
        .flatten()
    {
        let released = entry?.path();
        let promised = declared(&std::fs::read_to_string(&released)?);
        let missing: Vec<_> = promised.difference(&ours).collect();
        if !missing.is_empty() {
            bail!("functions of {released:?} are not exported any more: {missing:?}");
        }
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
    let library = preload(Machine::HERE)?;
    let exported = exports(&library)?;
    let unknown: Vec<_> = exported
        .difference(upstream)
        .filter(|name| ![SHARED_ON_PURPOSE, NEWER].contains(&name.as_str()))
        .collect();
    if !unknown.is_empty() || exported.len() < 10 {
        bail!(
            "the drop-in exports {} functions; not exported by upstream: {unknown:?}",
            exported.len()
        );
    }
    let foreign = |name: &String| ["ggml", "gguf", "llama"].iter().any(|of| name.contains(of));
    if let Some(name) = symbols(&library, true)?.into_iter().find(foreign) {
        bail!("undefined in the drop-in: {name}");
    }
    println!(
        "{} functions interposed, and no other exported",
        exported.len()
    );
    Ok(())
}

fn exports(library: &Path) -> Result<BTreeSet<String>> {
    symbols(library, false)
}

/// The dynamic symbols that a library needs, or those that it exports.
fn symbols(library: &Path, undefined: bool) -> Result<BTreeSet<String>> {
    let bytes = std::fs::read(library)?;
    let elf = goblin::elf::Elf::parse(&bytes)
        .with_context(|| format!("cannot read {}", library.display()))?;
    Ok(elf
        .dynsyms
        .iter()
        .filter(|symbol| symbol.is_import() == undefined && symbol.st_name != 0)
        .filter_map(|symbol| elf.dynstrtab.get_at(symbol.st_name))
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
