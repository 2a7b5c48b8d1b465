//! Hot-swap of every tensor of a model, to other bytes and to other types, and back.

use std::path::Path;

use anyhow::{Context, Result, ensure};
use ggml_quantize::Ggml;
use serde_json::Value;
use testkit::host::DropIn;

use super::model::{Change, Model};
use testkit::architectures::{Device, Process, Reference, overlay, revert};

/// What a swap did.
pub struct Swap {
    pub tensor: String,
    pub change: Change,
    pub outcome: Outcome,
}

/// The outcome of a swap.
pub enum Outcome {
    /// All logits are those of a fresh load of the changed file. `read` is false where they are
    /// also those of the first file: no evaluation reads the tensor.
    Equal { read: bool },
    /// Refused by name. Whether a fresh load of the changed file evaluates.
    Refused { reason: String, loads: bool },
    /// Something else.
    Wrong(String),
}

/// The end of the names of vectors that no graph reads beside weights in f32.
const UNREAD: &str = ".input_scale";

/// Swaps each of these tensors of a model and back in one process. `folder` has place for a changed
/// file.
pub fn swap_each(
    model: &Model,
    tensors: &[usize],
    ggml: &Ggml,
    reference: &mut Reference,
    folder: &Path,
) -> Result<Vec<Swap>> {
    let original = evaluated(reference.evaluate(&model.path), "a fresh load")?;
    let changed = folder.join("changed.gguf");
    let start = |device| -> Result<Process> {
        let mut variables = vec![("LLAMA_SIDECAR_LOG", "warn".into())];
        if device == Device::Simulated {
            variables.push(("LLAMA_POSTFETCH_CACHE_MB", "256".into()));
        }
        let mut process = Process::start(device, &DropIn::On(variables));
        ensure!(
            process.load(&model.path),
            "the process with the drop-in does not load it"
        );
        let found = evaluated(process.evaluate(), "with the drop-in")?;
        ensure!(
            found == original,
            "logits before any swap are not those without the drop-in"
        );
        Ok(process)
    };
    let mut process = start(reference.device)?;
    let mut swaps = Vec::new();
    for &tensor in tensors {
        for change in model.changes(tensor) {
            let name = model.tensor(tensor);
            model.write(ggml, tensor, change, &changed)?;
            let fresh = reference.evaluate(&changed);
            let outcome = swap_one(&mut process, &name, &changed, &original, fresh);
            if matches!(outcome, Outcome::Wrong(_)) {
                process = start(reference.device)?;
            }
            swaps.push(Swap {
                tensor: name,
                change,
                outcome,
            });
        }
    }
    process.end();
    Ok(swaps)
}

fn evaluated(found: Result<String, String>, whose: &str) -> Result<String> {
    found.map_err(anyhow::Error::msg).context(whose.to_owned())
}

fn swap_one(
    process: &mut Process,
    tensor: &str,
    changed: &Path,
    original: &str,
    fresh: Result<String, String>,
) -> Outcome {
    let answer = process.request(&overlay(tensor, changed));
    let report = &answer["reports"][0];
    if report["swapped"] != 1 || answer["ok"] != true {
        let Some(reason) = refusal(&answer, tensor) else {
            return Outcome::Wrong(format!("neither swapped nor refused by name: {answer}"));
        };
        if tensor.ends_with(UNREAD) && reason.contains("that reads it") {
            return Outcome::Wrong(format!("no graph reads it, but refused: {reason}"));
        }
        return match process.evaluate() {
            Ok(found) if found == original => Outcome::Refused {
                reason,
                loads: fresh.is_ok(),
            },
            found => Outcome::Wrong(format!("refused, but {found:?} instead of {original}")),
        };
    }
    let found = process.evaluate();
    if found != fresh {
        return Outcome::Wrong(format!(
            "swapped: {found:?}, a fresh load {fresh:?}, before {original}"
        ));
    }
    let answer = process.request(&revert());
    if answer["reports"][0]["returned"] != 1 {
        return Outcome::Wrong(format!("not returned: {answer}"));
    }
    match process.evaluate() {
        Ok(back) if back == original => Outcome::Equal {
            read: found.as_deref() != Ok(original),
        },
        back => Outcome::Wrong(format!("returned: {back:?} instead of {original}")),
    }
}

/// Returns why a tensor was refused, if the answer has its name; the name is left out.
fn refusal(answer: &Value, tensor: &str) -> Option<String> {
    let error = answer["reports"][0]["error"].as_str()?;
    let quoted = format!("{tensor:?}: ");
    let at = error.find(&quoted)?;
    Some(error[at + quoted.len()..].to_owned())
}
