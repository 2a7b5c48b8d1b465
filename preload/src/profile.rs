//! A profile: what is set on each model before its first evaluation.
//!
//! libllama reserves memory with a graph of each new context before it evaluates. That graph completes the model. When the
//! reservation has ended, the thread of the program sets the overlays and masks of the profile.

use std::sync::{Arc, OnceLock};

use sidecar_core::config::Config;
use sidecar_core::files;
use sidecar_core::protocol::{NoEffect, Profile};
use sidecar_core::text;

use crate::hotswap::overlays::Overlays;
use crate::hotswap::reloader;
use crate::masking;
use crate::program::capability::{Capability, Effect};
use crate::program::models::Model;
use crate::program::sched::{Allocated, Scheduler};

static EFFECT: Effect = Effect::of(NoEffect::PROFILE);

const NOT_RESERVED: &str = "the program evaluates it without reserving memory first: set overlays and masks with 'swap --live' and 'ctl mask'";
const NO_MODEL: &str = "--profile: no model was loaded, so that nothing was set";

/// The profile, as a capability.
pub struct AtLoad;

impl Capability for AtLoad {
    fn is_enabled(&self) -> bool {
        Config::get().profile.is_some()
    }

    fn graph_allocated(&self, _: &Scheduler, graph: &Allocated, keeps: bool) {
        if keeps && self.is_enabled() {
            for model in &graph.complete {
                refuse(model, NOT_RESERVED);
            }
        }
    }

    fn memory_reserved(&self, complete: &[Arc<Model>]) {
        for model in complete.iter().filter(|_| self.is_enabled()) {
            match apply(model) {
                Ok(()) => EFFECT.note(),
                Err(reason) => refuse(model, &reason),
            }
        }
    }

    fn no_effect(&self) -> Vec<NoEffect> {
        EFFECT.missing(|| NO_MODEL.into())
    }
}

/// Reports that the profile is not in use in a model. One that takes none of it beside another that has, as a draft model,
/// is as it should be.
fn refuse(model: &Model, reason: &str) {
    let saved = profile().ok().and_then(|of| of.files.first());
    let saved = saved.map(|file| format!(", which was saved for {file}"));
    let sentence = format!(
        "--profile: {}: {reason}; the program runs without the profile{}",
        text::path(&model.path),
        saved.unwrap_or_default()
    );
    match EFFECT.is_seen() {
        true => log::warn!("{sentence}"),
        false => EFFECT.log_obstacle(sentence),
    }
}

/// Returns the profile, which is read once.
fn profile() -> Result<&'static Profile, String> {
    static PROFILE: OnceLock<Result<Profile, String>> = OnceLock::new();
    let read = || {
        let path = Config::get().profile.as_deref().ok_or("no profile")?;
        let read = files::read_text(path).map_err(|error| error.to_string());
        let parsed = read.and_then(|content| Profile::parse(&content));
        parsed.map_err(|why| format!("cannot read {}: {why}", text::path(path)))
    };
    PROFILE.get_or_init(read).as_ref().map_err(Clone::clone)
}

fn apply(model: &Arc<Model>) -> Result<(), String> {
    let Profile {
        overlays, masks, ..
    } = profile()?;
    if !overlays.is_empty() {
        let of = model.clone();
        let swap = move || {
            let found = Overlays::find(std::slice::from_ref(&of), None, overlays)?;
            let (revert, set) = found.of(&of);
            let report = reloader::swap(&of, revert, &set).map_err(|error| error.to_string())?;
            report.failure.map_or(Ok(()), Err)
        };
        reloader::on_thread(swap)?;
    }
    match masks.is_empty() {
        true => Ok(()),
        false => masking::set(std::slice::from_ref(model), masks, false),
    }
}
