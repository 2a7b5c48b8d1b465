//! Overlays: the tensors that a request names in the models of the program.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use llama_sidecar::gguf::NamePattern;
use llama_sidecar::protocol::Overlay;
use llama_sidecar::reload::OverlaySource;

use crate::models::{self, Model};

/// A request, with its tensors in each model.
pub struct Overlays {
    /// By path.
    sources: BTreeMap<String, OverlaySource>,
    /// By the number of the model.
    models: BTreeMap<u64, OfModel>,
}

/// The tensors of a model that a request names.
#[derive(Default)]
struct OfModel {
    /// Tensors whose overlay is reverted, if they have one.
    revert: Vec<usize>,
    /// Each tensor and the path of its source.
    set: Vec<(usize, String)>,
}

/// An overlay of a request.
struct Wanted<'a> {
    overlay: &'a Overlay,
    pattern: NamePattern,
    /// Whether it names a tensor of any model.
    matches: bool,
    /// Whether it can be set in any model.
    fits: bool,
    /// Why it cannot be set in a model.
    misfit: Option<String>,
}

impl Overlays {
    /// Opens the sources and looks up the tensors. The last overlay that names a tensor counts.
    /// Fails if an overlay can be set in no model; models in which it cannot be set are left
    /// alone otherwise.
    pub fn find(revert: Option<&str>, overlays: &[Overlay]) -> Result<Overlays, String> {
        let revert = revert.map(NamePattern::parse).transpose()?;
        let mut sources = BTreeMap::new();
        let mut wanted = Vec::new();
        for overlay in overlays {
            if !sources.contains_key(&overlay.from) {
                sources.insert(overlay.from.clone(), open(&overlay.from)?);
            }
            wanted.push(Wanted {
                overlay,
                pattern: NamePattern::parse(&overlay.tensor)?,
                matches: false,
                fits: false,
                misfit: None,
            });
        }
        let models = models::models();
        let found = models.iter().map(|model| {
            let mut of_model = find_in_model(model, &mut wanted, &sources);
            if let Some(pattern) = &revert {
                let tensors = 0..model.tensors.len();
                of_model.revert = tensors
                    .filter(|at| pattern.matches(model.name(*at)))
                    .collect();
            }
            (model.number, of_model)
        });
        let found = found.collect();
        for wanted in wanted {
            if !wanted.matches {
                return Err(no_match(&wanted.overlay.tensor, &models));
            }
            if let Some(misfit) = wanted.misfit.filter(|_| !wanted.fits) {
                return Err(misfit);
            }
        }
        Ok(Overlays {
            sources,
            models: found,
        })
    }

    /// Returns the tensors of a model whose overlays are reverted, and those that get one.
    pub fn of(&self, model: &Model) -> (&[usize], Vec<(usize, &OverlaySource)>) {
        let Some(found) = self.models.get(&model.number) else {
            return (&[], Vec::new());
        };
        let set = found.set.iter();
        let set = set.map(|(tensor, from)| (*tensor, &self.sources[from]));
        (&found.revert, set.collect())
    }
}

fn open(from: &str) -> Result<OverlaySource, String> {
    let path = Path::new(from);
    if !path.is_absolute() {
        return Err(format!(
            "'{from}' is not an absolute path: the program has another working directory"
        ));
    }
    OverlaySource::open(path).map_err(|error| error.to_string())
}

/// Looks up the tensors of one model. An overlay that does not fit all its tensors is left out.
fn find_in_model(
    model: &Model,
    wanted: &mut [Wanted<'_>],
    sources: &BTreeMap<String, OverlaySource>,
) -> OfModel {
    let mut tensors = vec![Vec::new(); wanted.len()];
    for tensor in 0..model.tensors.len() {
        let name = model.name(tensor);
        let mut last = None;
        for (at, wanted) in wanted.iter_mut().enumerate() {
            if wanted.pattern.matches(name) {
                wanted.matches = true;
                last = Some(at);
            }
        }
        if let Some(at) = last {
            tensors[at].push(tensor);
        }
    }
    let mut found = OfModel::default();
    for (wanted, tensors) in wanted.iter_mut().zip(tensors) {
        let from = &wanted.overlay.from;
        let misfit = |&tensor: &usize| sources[from].misfit(model.name(tensor), model.ne(tensor));
        match tensors.iter().find_map(misfit) {
            Some(misfit) => wanted.misfit = Some(misfit),
            None => {
                wanted.fits |= !tensors.is_empty();
                found
                    .set
                    .extend(tensors.into_iter().map(|tensor| (tensor, from.clone())));
            }
        }
    }
    found
}

/// Returns why an overlay names no tensor.
fn no_match(pattern: &str, models: &[Arc<Model>]) -> String {
    let Some(model) = models.first() else {
        return "the program has no model yet: request overlays after its first evaluation".into();
    };
    let names = (0..model.tensors.len().min(3)).map(|at| model.name(at).to_string_lossy());
    format!(
        "no tensor's whole name matches '{pattern}': names have the form {}; run 'llama-sidecar inspect' to list them",
        names.collect::<Vec<_>>().join(", ")
    )
}
