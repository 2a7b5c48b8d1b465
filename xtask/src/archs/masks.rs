//! Masks of experts, against the models that `llama-sidecar prune` writes.

use std::collections::BTreeSet;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, ensure};
use serde_json::json;
use sidecar_core::experts::{ExpertIndex, Routing};
use sidecar_core::gguf::{Access, GgufFile};
use sidecar_core::protocol::LayerMask;
use testkit::host::{DropIn, built};

use testkit::architectures::{self, Device, Process, Reference, Routed};

/// The most that a logit may differ from that of the pruned model where only the order of a sum differs, as a part of the
/// largest logit.
pub const TOLERANCE: f32 = 1e-3;

/// A number of experts that is masked in each layer.
pub struct Cut {
    /// Experts that are left in a layer.
    pub left: u64,
    pub outcome: Outcome,
}

/// How logits with masks compare with those of the pruned model.
pub enum Outcome {
    /// All are equal in every bit.
    Equal,
    /// Sums are in another order: the largest difference, as a part of the largest logit.
    Rounded(f32),
    /// The mask or the pruned model is refused, for this reason.
    Refused(String),
}

/// Masks the most used experts of a model: one, half of them, and as many as may be masked.
///
/// A bias for the choice, which is small in these models, gets numbers that exceed all scores.
pub fn cut(model: &Path, reference: &mut Reference, folder: &Path) -> Result<Vec<Cut>> {
    let file = GgufFile::open(model, Access::Read)?;
    let model = &folder.join("model.gguf");
    std::fs::write(model, with_large_biases(&file)?)?;
    let routed = &architectures::routed(model).map_err(anyhow::Error::msg)?;
    let expected = reference.evaluate(model).map_err(anyhow::Error::msg)?;
    let routing = Routing::of([&file]);
    ensure!(
        routing.groups == 1,
        "the same number of each group is needed"
    );
    let layers: BTreeSet<u32> = ExpertIndex::of([&file]).layers().map(|of| of.0).collect();
    let variables = [("LLAMA_SIDECAR_LOG", "warn"), ("LLAMA_EXPERT_MASKS", "1")];
    let variables = variables.map(|(name, value)| (name, value.to_owned()));
    let mut process = Process::start(Device::Cpu, &DropIn::On(variables.into()));
    ensure!(process.load(model), "the program cannot load it");
    let evaluate = |process: &mut Process| process.evaluate().map_err(anyhow::Error::msg);
    ensure!(
        evaluate(&mut process)? == expected,
        "masks of zeros change logits"
    );
    let most = routing.experts - routing.most_used();
    let mut cuts = Vec::new();
    for count in [1, routing.experts / 2, most] {
        let left = routing.experts - count;
        let of_layer = |layer: &u32| LayerMask {
            layer: *layer,
            experts: most_used(routed, *layer, routing.experts, count),
        };
        let experts: Vec<LayerMask> = layers.iter().map(of_layer).collect();
        // Layers that no evaluation reads have no mask.
        let is_evaluated = |mask: &&LayerMask| {
            let mut counts = routed.counts.keys();
            counts.any(|(layer, _)| *layer == u64::from(mask.layer))
        };
        let masks: Vec<&LayerMask> = experts.iter().filter(is_evaluated).collect();
        let answer = process.request(&json!({"cmd": "mask", "masks": masks, "clear": true}));
        let pruned = folder.join("pruned.gguf");
        let outcome = match answer["error"].as_str() {
            Some(reason) => Outcome::Refused(format!("the mask: {reason}")),
            None => {
                let logits = folder.join("masked");
                let masked = process.logits(&logits).map_err(anyhow::Error::msg)?;
                ensure!(
                    masked.hash != expected,
                    "{left} left: the mask does nothing"
                );
                match prune(model, &experts, &pruned)? {
                    Err(reason) => Outcome::Refused(format!("the pruned model: {reason}")),
                    Ok(()) => {
                        let logits = folder.join("of-pruned");
                        let found = reference.logits(&pruned, &logits);
                        let found = found.map_err(anyhow::Error::msg);
                        let found = found.context("the pruned model, without the drop-in")?;
                        std::fs::remove_file(&pruned)?;
                        // A softmax of all experts adds as many numbers as there are, and ggml multiplies a router
                        // whose rows are no multiple of four in another order.
                        let is_rounded = routed.scores == "SOFT_MAX" || !left.is_multiple_of(4);
                        let differs = difference(&masked.values, &found.values);
                        if is_rounded {
                            ensure!(differs <= TOLERANCE, "{left} left: {differs}");
                            Outcome::Rounded(differs)
                        } else {
                            ensure!(
                                masked.hash == found.hash,
                                "{left} left: not equal, {differs} of the largest logit"
                            );
                            Outcome::Equal
                        }
                    }
                }
            }
        };
        cuts.push(Cut { left, outcome });
    }
    process.request(&json!({"cmd": "mask", "clear": true}));
    ensure!(
        evaluate(&mut process)? == expected,
        "logits without masks are not those before"
    );
    process.end();
    Ok(cuts)
}

/// Returns a model whose biases for the choice are 0 and 10 in turn.
fn with_large_biases(file: &GgufFile) -> Result<Vec<u8>> {
    let mut bytes = std::fs::read(file.source.path())?;
    for info in &file.header.tensors {
        if file
            .header
            .name(info)
            .to_string_lossy()
            .contains("exp_probs_b")
        {
            let numbers = (0..info.nbytes / 4).map(|expert| (expert % 2) as f32 * 10.0);
            let biases: Vec<u8> = numbers.flat_map(f32::to_le_bytes).collect();
            bytes[info.offset as usize..][..biases.len()].copy_from_slice(&biases);
        }
    }
    Ok(bytes)
}

/// Returns the experts of a layer that are used most, ascending.
fn most_used(routed: &Routed, layer: u32, experts: u64, count: u64) -> Vec<u32> {
    let used = |expert: u64| routed.counts.get(&(layer.into(), expert)).unwrap_or(&0);
    let mut all: Vec<u64> = (0..experts).collect();
    all.sort_by_key(|expert| std::cmp::Reverse(used(*expert)));
    let mut all: Vec<u32> = all
        .into_iter()
        .take(count as usize)
        .map(|at| at as u32)
        .collect();
    all.sort_unstable();
    all
}

/// Writes a model without some experts; the inner error has why it is refused.
fn prune(model: &Path, experts: &[LayerMask], to: &Path) -> Result<Result<(), String>> {
    let list = tempfile::NamedTempFile::new()?;
    serde_json::to_writer(list.as_file(), experts)?;
    let output = Command::new(built("release/llama-sidecar"))
        .arg("prune")
        .arg(model)
        .arg("--experts")
        .arg(list.path())
        .arg("-o")
        .arg(to)
        .output()?;
    let error = String::from_utf8_lossy(&output.stderr);
    let reason = error.trim().trim_start_matches("llama-sidecar: ");
    Ok(match output.status.success() {
        true => Ok(()),
        false => Err(reason.to_owned()),
    })
}

/// Returns the largest difference of two numbers at the same place, as a part of the largest number.
fn difference(one: &[f32], two: &[f32]) -> f32 {
    if one.len() != two.len() {
        return f32::INFINITY;
    }
    let largest = one.iter().fold(0.0, |most: f32, x| most.max(x.abs()));
    let pairs = one.iter().zip(two);
    pairs.fold(0.0, |most: f32, (x, y)| most.max((x - y).abs())) / largest
}
