//! What each tensor of a changed file needs.

use parking_lot::Mutex;

use super::hash::{self, Hash};
use super::{
    Action, ChangedFile, Decision, OriginalBytes, Outcome, Registry, Report, Store, TensorReport,
};
use crate::parallel;

/// Decides for every tensor of every changed file. Files that cannot be taken are
/// removed from `changed` and reported.
pub(super) fn decide<S: Store>(
    registry: &mut Registry,
    store: &S,
    changed: &mut Vec<ChangedFile>,
    report: &mut Report,
) -> Vec<Decision> {
    refuse_other_models(registry, changed, report);
    let hashes = hash_files(registry, changed, report);
    let mut decisions = Vec::new();
    for (at, file) in changed.iter().enumerate() {
        for (position, &tensor) in registry.files[file.file].tensors.clone().iter().enumerate() {
            let (info, hash) = hashes[at][position];
            let action = action(registry, store, file, tensor, info, hash);
            decisions.push(Decision {
                tensor,
                changed: at,
                info,
                hash,
                action,
            });
        }
    }
    decisions
}

/// Refuses files in which a tensor is missing or has another shape.
///
/// Such a file holds another model. Taking the tensors that happen to fit would
/// mix two models, so all of the file is refused, each tensor by name.
fn refuse_other_models(
    registry: &mut Registry,
    changed: &mut Vec<ChangedFile>,
    report: &mut Report,
) {
    changed.retain(|file| {
        let header = &file.gguf.header;
        let misfit = |tensor: usize| {
            let source = &registry.tensors[tensor].source;
            let name = source.name.to_string_lossy();
            let Some(info) = header.find(&source.name) else {
                return Some(format!("the file has no tensor '{name}' any more"));
            };
            let info = &header.tensors[info];
            (info.ne != source.ne).then(|| {
                format!(
                    "tensor '{name}' has shape {:?} in the file, the model needs {:?}",
                    info.ne, source.ne
                )
            })
        };
        let tensors = &registry.files[file.file].tensors;
        let Some(first) = tensors.iter().find_map(|&tensor| misfit(tensor)) else {
            return true;
        };
        for &tensor in tensors {
            let source = &registry.tensors[tensor].source;
            report.add(TensorReport {
                tensor,
                name: source.name.clone(),
                outcome: Outcome::Refused,
                old_type: source.ty,
                new_type: source.ty,
                nbytes: 0,
                file: file.file,
                placement: String::new(),
                reason: misfit(tensor)
                    .unwrap_or_else(|| format!("its file holds another model: {first}")),
            });
        }
        registry.ignore(
            file.file,
            Some(file.gguf.source.id()),
            format!("it holds another model: {first}"),
            report,
        );
        false
    });
}

/// Position in the new header and hash of the new bytes, for each tensor of each
/// changed file. A file that cannot be read is removed.
fn hash_files(
    registry: &mut Registry,
    changed: &mut Vec<ChangedFile>,
    report: &mut Report,
) -> Vec<Vec<(usize, Hash)>> {
    let mut hashes = Vec::new();
    changed.retain(|file| {
        let header = &file.gguf.header;
        let tensors = &registry.files[file.file].tensors;
        let mut found: Vec<(usize, Hash)> = tensors
            .iter()
            .filter_map(|&tensor| header.find(&registry.tensors[tensor].source.name))
            .map(|info| (info, 0))
            .collect();
        let failure = Mutex::new(None);
        parallel::for_each(
            found.iter_mut().collect(),
            |(info, hash)| {
                let info = &header.tensors[*info];
                match hash::of_source(&file.gguf.source, info.offset, info.nbytes) {
                    Ok(of_file) => *hash = of_file,
                    Err(error) => {
                        *failure.lock() =
                            Some(format!("cannot read it at offset {}: {error}", info.offset));
                        return false;
                    }
                }
                true
            },
            || true,
        );
        match failure.into_inner() {
            None => {
                hashes.push(found);
                true
            }
            Some(reason) => {
                registry.ignore(file.file, None, reason, report);
                false
            }
        }
    });
    hashes
}

fn action<S: Store>(
    registry: &mut Registry,
    store: &S,
    file: &ChangedFile,
    tensor: usize,
    info: usize,
    new_hash: Hash,
) -> Action {
    let info = &file.gguf.header.tensors[info];
    let known = &mut registry.tensors[tensor];
    let live_type = known.source.ty;
    if let Some(offset) = store.written_through(tensor, &file.gguf.source.id()) {
        let before = known.live_hash.take();
        if info.ty == live_type && info.offset == offset {
            known.live_hash = before.filter(|&hash| hash == new_hash);
            return match known.live_hash {
                Some(_) => Action::Keep,
                None => Action::InPlace,
            };
        }
    } else {
        known.live_hash = store.live_hash(tensor, known.live_hash);
        if info.ty == live_type && known.live_hash == Some(new_hash) {
            return Action::Keep;
        }
    }
    match known.original_bytes {
        OriginalBytes::InUse => {
            known.original_bytes = known
                .live_hash
                .map_or(OriginalBytes::Lost, OriginalBytes::Left);
            Action::Swap
        }
        OriginalBytes::Left(hash)
            if hash == new_hash
                && known.original_type == info.ty
                && store.can_return(tensor, hash) =>
        {
            Action::Return
        }
        _ => Action::Swap,
    }
}
