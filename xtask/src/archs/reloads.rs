//! Reloads of a file of a model in which the value of a key differs, or that lacks a tensor.

use std::collections::BTreeSet;
use std::path::Path;

use anyhow::{Context, Result, ensure};
use serde_json::json;
use testkit::architectures::{Device, Process};
use testkit::host::DropIn;

use super::model::{Model, generic};

/// A change of a file, and what a reload does with it.
pub struct Kind {
    pub title: &'static str,
    pub outcome: &'static str,
    /// The key that changes, without the architecture; each tensor if there is none.
    key: Option<&'static str>,
    /// What the report has of the file.
    event: &'static str,
}

/// All kinds.
pub const KINDS: [Kind; 4] = [
    Kind {
        title: "a key that is computed with, `attention.layer_norm_rms_epsilon`",
        outcome: "refused by the key",
        key: Some(".attention.layer_norm_rms_epsilon"),
        event: "ignored",
    },
    Kind {
        title: "a key that is read at the start, `tokenizer.ggml.add_bos_token`",
        outcome: "\"needs a new start to be used\", with the key",
        key: Some("tokenizer.ggml.add_bos_token"),
        event: "taken",
    },
    Kind {
        title: "a key that is never read, `general.uuid`",
        outcome: "taken",
        key: Some(UNREAD),
        event: "taken",
    },
    Kind {
        title: "a tensor has another name, one of each name",
        outcome: "refused by the name",
        key: None,
        event: "ignored",
    },
];

/// A key that nothing reads, in place of another one.
const UNREAD: &str = "general.uuid";
const NAME: &str = "general.name";

/// Reloads a model with each change. Returns how many changes of each kind were treated as they must be, with
/// the logits from before.
pub fn reload_each(model: &Model, folder: &Path) -> Result<[usize; KINDS.len()]> {
    let path = folder.join("reloaded.gguf");
    let base = model.with_name(NAME, UNREAD)?;
    let replace = |bytes: &[u8]| -> Result<()> {
        let beside = path.with_extension("new");
        std::fs::write(&beside, bytes)?;
        Ok(std::fs::rename(beside, &path)?)
    };
    replace(&base)?;
    let mut process = Process::start(Device::Cpu, &DropIn::with(&[("LLAMA_SIDECAR_LOG", "warn")]));
    ensure!(process.load(&path), "the program cannot load it");
    let evaluate = |process: &mut Process| process.evaluate().map_err(anyhow::Error::msg);
    let before = evaluate(&mut process)?;
    let mut counts = [0; KINDS.len()];
    for (kind, count) in KINDS.iter().zip(&mut counts) {
        let changes = match kind.key {
            Some(UNREAD) => vec![(UNREAD.to_owned(), model.with_value(&base, NAME)?)],
            Some(key) => vec![(key.to_owned(), model.with_value(&base, key)?)],
            None => {
                let mut names = BTreeSet::new();
                let tensors = (0..model.tensors()).map(|tensor| model.tensor(tensor));
                let one_of_each = tensors.filter(|name| names.insert(generic(name)));
                let changed = one_of_each.map(|name| {
                    let end = name.len() - 1;
                    let bytes = model.with_name(&name, &format!("{}_", &name[..end]))?;
                    Ok((name, bytes))
                });
                changed.collect::<Result<_>>()?
            }
        };
        for (name, bytes) in changes {
            replace(&bytes)?;
            let answer = process.request(&json!({"cmd": "reload"}));
            let file = &answer["reports"][0]["files"][0];
            let reason = file["reason"].as_str().context("a reason")?;
            let has_name = reason.contains(name.trim_start_matches('.'));
            ensure!(
                file["event"] == kind.event && has_name != (name == UNREAD),
                "{name}: not {}: {answer}",
                kind.outcome
            );
            *count += 1;
            replace(&base)?;
            process.request(&json!({"cmd": "reload"}));
        }
        ensure!(
            evaluate(&mut process)? == before,
            "{}: other logits",
            kind.title
        );
    }
    process.end();
    Ok(counts)
}
