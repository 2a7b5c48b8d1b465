//! Experts that are never chosen, on request.

use std::sync::Arc;

use sidecar_core::config::Config;
use sidecar_core::experts::Routing;
use sidecar_core::protocol::{LayerMask, NoEffect};
use sidecar_core::text;

use crate::program::barrier::{self, ModelSet};
use crate::program::capability::{Capability, Effect, Ended};
use crate::program::masks::{self, Mask};
use crate::program::models::{self, Model};
use crate::program::sched::{Allocated, Scheduler};

static EFFECT: Effect = Effect::of(NoEffect::MASKS);
static ENDED: Ended = Ended::of(NoEffect::MASKS);

const NO_MASKS: &str =
    "the graphs of this program have no masks: start it with --expert-masks (LLAMA_EXPERT_MASKS=1)";
const NO_ROUTERS: &str = "no router of this program can be masked: no layer of experts was evaluated, its matrices are divided over devices or on another machine, or its llama.cpp calls ggml's functions directly (ik_llama.cpp, static builds)";

/// Masks of experts, as a capability.
pub struct ExpertMasks;

impl Capability for ExpertMasks {
    fn is_enabled(&self) -> bool {
        Config::get().expert_masks
    }

    fn model_complete(&self, model: &Arc<Model>) {
        if !masks::of_model(model).is_empty() {
            EFFECT.note();
        }
        ENDED.loaded(model);
    }

    fn model_freed(&self, model: &Model) {
        let masked = of_model(model).len();
        let masks = || format!("the masks of {masked} layer(s)");
        ENDED.note(model, (masked > 0).then(masks));
        masks::model_freed(model);
    }

    fn graph_allocated(&self, _: &Scheduler, _: &Allocated, _keeps: bool) {
        if models::take_more_experts_used() {
            for sentence in too_few() {
                log::error!("{sentence}");
            }
        }
    }

    fn no_effect(&self) -> Vec<NoEffect> {
        let mut missing = EFFECT.missing(|| format!("--expert-masks: {NO_ROUTERS}"));
        let too_few = too_few().into_iter();
        missing.extend(too_few.map(|sentence| EFFECT.report(sentence, false)));
        missing.extend(ENDED.reports());
        missing
    }
}

/// Returns the experts of a model that are masked.
pub fn of_model(model: &Model) -> Vec<LayerMask> {
    let masks = masks::of_model(model).into_iter();
    let masked = masks.map(|mask| LayerMask {
        layer: mask.layer,
        experts: mask.masked(),
    });
    masked.filter(|mask| !mask.experts.is_empty()).collect()
}

/// Masks experts of the one of these models that has masks, in place of those that its layers had; with `clear`, other layers have none any more.
pub fn set(models: &[Arc<Model>], requested: &[LayerMask], clear: bool) -> Result<(), String> {
    if !Config::get().expert_masks {
        return Err(NO_MASKS.into());
    }
    if requested.is_empty() && !clear {
        return Err("the request names no layer, so no mask changes: name layers with their experts, or pass clear".into());
    }
    let with_masks = models.iter().map(|model| (model, masks::of_model(model)));
    let with_masks: Vec<_> = with_masks.filter(|(_, masks)| !masks.is_empty()).collect();
    let [(model, masks)] = with_masks.as_slice() else {
        return Err(match with_masks.len() {
            0 => NO_ROUTERS.into(),
            count => format!(
                "{count} models with experts are loaded, and masks are for one: load one model"
            ),
        });
    };
    let routing = Routing::of(model.files.iter().map(|file| &file.gguf));
    let in_force = model.experts_used();
    let mut next = Vec::new();
    if clear {
        next.extend(masks.iter().map(|mask| (mask.clone(), Vec::new())));
    }
    for LayerMask { layer, experts } in requested {
        let mask = masks
            .iter()
            .find(|mask| mask.layer == *layer)
            .ok_or_else(|| {
                let known: Vec<String> = masks.iter().map(|mask| mask.layer.to_string()).collect();
                format!(
                    "layer {layer} has no router that can be masked: use {}",
                    known.join(", ")
                )
            })?;
        let mut experts = experts.clone();
        experts.sort_unstable();
        experts.dedup();
        if let Some(expert) = experts.iter().find(|expert| **expert >= mask.experts) {
            let last = mask.experts - 1;
            return Err(format!(
                "layer {layer} has no expert {expert}: use 0 to {last}"
            ));
        }
        let used = in_force.get(layer).copied();
        let used = used.ok_or_else(|| {
            format!("no graph of the program reads the experts of layer {layer}: mask them after an evaluation with that layer")
        })?;
        check(&routing, used, mask, &experts)?;
        next.push((mask.clone(), experts));
    }
    set_between(model, next)?;
    ENDED.set_again(model);
    Ok(())
}

/// Masks no expert of any model. Returns how many layers had masks.
pub fn clear() -> Result<u64, String> {
    let mut cleared = 0;
    for model in models::models() {
        let masks = masks::of_model(&model).into_iter();
        let masked = masks.filter(|mask| !mask.masked().is_empty());
        let next: Vec<_> = masked.map(|mask| (mask, Vec::new())).collect();
        cleared += next.len() as u64;
        if !next.is_empty() {
            set_between(&model, next)?;
        }
        ENDED.set_again(&model);
    }
    Ok(cleared)
}

/// Sets masks between two evaluations; the last one for a router counts.
fn set_between(model: &Arc<Model>, next: Vec<(Arc<Mask>, Vec<u32>)>) -> Result<(), String> {
    let of_model = model.clone();
    let work = move || {
        if of_model.is_alive() {
            for (mask, experts) in &next {
                mask.set(experts.clone());
            }
        }
    };
    // Kept graphs stay valid: no model is named.
    barrier::between_evaluations(ModelSet::default(), || model.is_alive(), work)
        .map_err(str::to_owned)
}

/// Returns for each model why its masks do not hold any more, if so: the program uses more experts than when
/// they were set.
fn too_few() -> Vec<String> {
    let models = models::models().into_iter();
    let sentence = |model: Arc<Model>| {
        let routing = Routing::of(model.files.iter().map(|file| &file.gguf));
        let in_force = model.experts_used();
        let why = masks::of_model(&model).into_iter().find_map(|mask| {
            let (masked, used) = (mask.masked(), in_force.get(&mask.layer).copied());
            let is_masked = used.is_some() && !masked.is_empty();
            check(&routing, used.filter(|_| is_masked)?, &mask, &masked).err()
        });
        let path = text::path(&model.path);
        why.map(|why| {
            format!("{path}: a token uses more experts than when experts were masked, and masked ones are chosen: {why}")
        })
    };
    models.filter_map(sentence).collect()
}

/// Fails unless experts are chosen by their scores, and as many as a token `uses` are left, whichever groups are chosen.
fn check(routing: &Routing, used: u64, mask: &Mask, masked: &[u32]) -> Result<(), String> {
    let layer = mask.layer;
    routing.check_layer(layer)?;
    routing.check_without(layer, used, mask.experts.into(), masked.iter().copied())
}
