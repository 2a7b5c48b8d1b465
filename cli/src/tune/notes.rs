//! What a user must know beside the figures.

use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::Result;
use sidecar_core::text;

use super::mix::file_type;
use super::results::{Recipe, Results};
use super::sweep::Plan;
use crate::interruption;
use crate::sizes::size_text;
use crate::space::used_in;

/// Types of which a larger one is proposed.
const PROPOSED: [&str; 6] = ["q3_K", "q4_K", "q5_0", "q5_K", "q6_K", "q8_0"];

/// Returns what is known before anything is measured.
pub fn before(plan: &Plan<'_>) -> Vec<String> {
    let mut notes = fallbacks(plan);
    let source = plan.quantizer.source;
    if source.is_quantized() {
        let tensors = source.files.iter().flat_map(|file| &file.header.tensors);
        let (_, name) = file_type(tensors.map(|info| (info.ty, info.nbytes)));
        notes.push(format!(
            "{} is quantised already ({name}), so its tensors are quantised a second time: use the original model, or pass it to --reference of 'tune', for better ones",
            text::path(&source.path)
        ));
    }
    notes.push(format!(
        "{} keeps the base logits and {} of quantised tensors",
        text::path(&plan.folder),
        size_text(plan.quantised_bytes() as f64)
    ));
    notes
}

/// Returns a line for each candidate and type that tensors get in place of its type.
pub fn fallbacks(plan: &Plan<'_>) -> Vec<String> {
    let all = plan.candidates.iter().zip(&plan.outcomes);
    all.flat_map(|(candidate, outcomes)| candidate.fallbacks(outcomes))
        .collect()
}

/// Returns what to do where a recipe is much smaller than it may be.
pub fn of_unused(results: &Results<'_>, recipe: &Recipe<'_>) -> Option<String> {
    let (limit, _) = results.limit().ok()??;
    let left = limit.checked_sub(recipe.mix.bytes)?;
    if left < limit / 20 {
        return None;
    }
    let bits = |name: &str| {
        let ty = sidecar_core::gguf::TypeInfo::from_name(name)?;
        Some(ty.bytes as f64 / ty.block as f64)
    };
    let candidates = results.plan.candidates.iter();
    let largest = candidates
        .filter_map(|candidate| bits(&candidate.name))
        .fold(0.0, f64::max);
    let larger = PROPOSED
        .into_iter()
        .filter(|name| bits(name) > Some(largest));
    let larger: Vec<&str> = larger.take(2).collect();
    let next = match larger.is_empty() {
        true => "lower --size or --bpw to see what less costs".into(),
        false => format!(
            "add a larger type to --types, such as {}",
            larger.join(" or ")
        ),
    };
    Some(format!(
        "{} of the limit are left, because no larger mix of these types diverges less: {next}",
        size_text(left as f64)
    ))
}

/// Returns the size of the work folder.
pub fn of_folder(folder: &Path) -> String {
    let bytes = used_in(folder) + used_in(&folder.join("tensors"));
    format!(
        "work folder: {}, {}: remove it when you need no further recipe",
        text::path(folder),
        size_text(bytes as f64)
    )
}

/// Returns what a failed command leaves.
pub fn of_failure(folder: &Path) -> String {
    format!(
        "{} has what was measured: a further command for this model continues there; remove it if you need none",
        text::path(folder)
    )
}

/// Prints how to continue when a key or a signal ends this process, once however often it is called.
pub fn on_interruption(folder: &Path) -> Result<()> {
    static IS_SET: AtomicBool = AtomicBool::new(false);
    if IS_SET.swap(true, Ordering::SeqCst) {
        return Ok(());
    }
    let folder = text::path(folder);
    interruption::adopt()?;
    interruption::on_signals(move |signal| {
        eprintln!(
            "\nllama-sidecar: interrupted; {folder} has what was measured: run the same command again to continue"
        );
        interruption::end_now(signal);
    })
}
