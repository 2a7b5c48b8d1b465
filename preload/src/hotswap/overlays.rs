//! Overlays: the tensors that a request names in the models of the program.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use sidecar_core::gguf::{FileId, NamePattern};
use sidecar_core::protocol::Overlay;
use sidecar_core::reload::{Hash, Origin, OverlaySource};
use sidecar_core::text;

use crate::program::models::Model;

/// The most models that a request takes tensors from: all shards of each are open.
const MOST_SOURCES: usize = 64;

/// A request, with its tensors in each model.
pub struct Overlays {
    sources: Sources,
    /// By the number of the model.
    models: BTreeMap<u64, OfModel>,
}

/// The tensors of a model that a request names.
#[derive(Default)]
struct OfModel {
    /// Tensors whose overlay is reverted, if they have one.
    revert: Vec<usize>,
    /// Each tensor and the index of its source.
    set: Vec<(usize, usize)>,
}

/// The files of a request, each opened once.
#[derive(Default)]
struct Sources {
    opened: Vec<OverlaySource>,
    /// Indices, by path as the request has it.
    by_path: HashMap<String, usize>,
}

/// An overlay of a request.
struct Wanted<'a> {
    overlay: &'a Overlay,
    /// The index of its source.
    source: usize,
    /// Whether it names a tensor of any model.
    matches: bool,
    /// Whether it can be set in any model.
    fits: bool,
    /// Why it cannot be set in a model.
    misfit: Option<String>,
}

impl Overlays {
    /// Opens the sources and looks up the tensors in models. The last overlay that names a tensor counts.
    /// Fails if an overlay can be set in no model; models in which it cannot be set are left
    /// alone otherwise.
    pub fn find(
        models: &[Arc<Model>],
        revert: Option<&str>,
        overlays: &[Overlay],
    ) -> Result<Overlays, String> {
        let revert = revert.map(NamePattern::parse).transpose()?;
        let mut sources = Sources::default();
        let mut wanted = Vec::new();
        // For each tensor of each model, the last overlay that names it. Patterns can be large,
        // and are dropped at once.
        let none = |model: &Arc<Model>| vec![None; model.tensors.len()];
        let mut last: Vec<Vec<Option<usize>>> = models.iter().map(none).collect();
        for (at, overlay) in overlays.iter().enumerate() {
            let source = sources.open(overlay)?;
            let pattern = NamePattern::parse(&overlay.tensor)?;
            let hash = overlay.hash.as_deref().map(parse_hash).transpose()?;
            let mut matches = false;
            for (model, last) in models.iter().zip(&mut last) {
                for (tensor, last) in last.iter_mut().enumerate() {
                    if pattern.matches(model.name(tensor)) {
                        matches = true;
                        *last = Some(at);
                        if let Some(hash) = hash {
                            sources.opened[source].expect(model.name(tensor), hash);
                        }
                    }
                }
            }
            wanted.push(Wanted {
                overlay,
                source,
                matches,
                fits: false,
                misfit: None,
            });
        }
        let found = models.iter().zip(&last).map(|(model, last)| {
            let mut of_model = find_in_model(model, last, &mut wanted, &sources.opened);
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
                let names = models
                    .iter()
                    .flat_map(|model| (0..model.tensors.len()).map(|at| model.name(at)));
                return Err(NamePattern::no_match(&wanted.overlay.tensor, names));
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
        let set = set.map(|(tensor, source)| (*tensor, &self.sources.opened[*source]));
        (&found.revert, set.collect())
    }
}

impl Sources {
    /// Opens a file, unless it is a file of a source that is open. Returns the index of the source.
    fn open(&mut self, overlay: &Overlay) -> Result<usize, String> {
        let from = overlay.from.as_str();
        if let Some(known) = self.by_path.get(from) {
            return Ok(*known);
        }
        let path = text::path_of(from);
        if overlay.as_type.is_some() && overlay.named.is_none() {
            return Err(format!(
                "tensors of '{from}' are to be quantised first: use 'llama-sidecar swap --as', or 'run --profile'"
            ));
        }
        if !path.is_absolute() {
            return Err(format!(
                "'{from}' is not an absolute path: the program has another working directory"
            ));
        }
        let id = FileId::of_path(&path).ok();
        let known = id.and_then(|id| self.opened.iter().position(|source| source.has_opened(&id)));
        let index = known.unwrap_or(self.opened.len());
        if index == MOST_SOURCES {
            return Err(format!(
                "the overlays take tensors from more than {MOST_SOURCES} models: send several requests"
            ));
        }
        if known.is_none() {
            let source = OverlaySource::open(&path).map_err(|error| error.to_string())?;
            self.opened.push(match &overlay.named {
                Some(named) => source.of_origin(Origin {
                    path: text::path_of(named),
                    as_type: overlay.as_type.clone(),
                    imatrix: overlay.imatrix.clone(),
                }),
                None => source,
            });
        }
        self.by_path.insert(overlay.from.clone(), index);
        Ok(index)
    }
}

/// Looks up the tensors of one model; `last` has the overlay of each. An overlay that does not fit
/// all its tensors is left out.
fn find_in_model(
    model: &Model,
    last: &[Option<usize>],
    wanted: &mut [Wanted<'_>],
    sources: &[OverlaySource],
) -> OfModel {
    let mut tensors = vec![Vec::new(); wanted.len()];
    for (tensor, last) in last.iter().enumerate() {
        if let Some(at) = last {
            tensors[*at].push(tensor);
        }
    }
    let mut found = OfModel::default();
    for (wanted, tensors) in wanted.iter_mut().zip(tensors) {
        let source = wanted.source;
        let misfit = |&tensor: &usize| {
            let (name, ne) = (model.name(tensor), model.ne(tensor));
            model.engine.misfit(&sources[source], name, ne)
        };
        match tensors.iter().find_map(misfit) {
            Some(misfit) => wanted.misfit = Some(misfit),
            None => {
                wanted.fits |= !tensors.is_empty();
                found
                    .set
                    .extend(tensors.into_iter().map(|tensor| (tensor, source)));
            }
        }
    }
    found
}

fn parse_hash(text: &str) -> Result<Hash, String> {
    let is_hash = text.len() == 32;
    let hash = Hash::from_str_radix(text, 16).ok().filter(|_| is_hash);
    hash.ok_or_else(|| format!("expected a hash of 32 hexadecimal digits, found '{text}'"))
}
