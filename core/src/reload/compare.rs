//! Decides what happens to each tensor of a changed file.

use std::collections::HashMap;
use std::io;

use parking_lot::Mutex;

use super::content::{self, Content};
use super::detect::ChangedFile;
use super::hash::Hash;
use super::registry::{Contents, OriginalBytes, Registered, Registry};
use super::report::{Cause, Report};
use super::store::Store;
use crate::config::Config;
use crate::gguf::{FileId, Source, TensorInfo};
use crate::parallel;

/// What is done to a tensor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Action {
    /// The bytes in use are the bytes of the file.
    Keep,
    /// The bytes in use have changed already, in the mapped file.
    InPlace,
    /// The original bytes are used again.
    Return,
    /// The bytes of the file are read.
    Swap,
}

/// Prepares the decision about every tensor of every changed file: reads and hashes tensors, and
/// keeps the hashes for later reloads. Files that cannot be used are removed from `changed` and
/// reported.
pub(super) fn prepare<S: Store>(
    registry: &mut Registry,
    store: &S,
    changed: &mut Vec<ChangedFile>,
    report: &mut Report,
) {
    refuse_other_models(registry, changed, report);
    read_files(registry, store, changed, report);
    refuse_damaged(registry, store, changed, report);
    hash_live(registry, store, changed);
}

/// Refuses files that hold another model. Using the tensors that fit would mix two models, so the whole
/// file is refused.
fn refuse_other_models(
    registry: &mut Registry,
    changed: &mut Vec<ChangedFile>,
    report: &mut Report,
) {
    changed.retain(|file| {
        let header = &file.gguf.header;
        let misfit = |tensor: usize| {
            let known = &registry.tensors[tensor];
            let name = known.name.to_string_lossy();
            let Some(info) = header.find(&known.name) else {
                return Some(format!("the file has no tensor '{name}' any more"));
            };
            let info = &header.tensors[info];
            (info.ne != known.ne).then(|| {
                format!(
                    "tensor '{name}' has shape {:?} in the file, the model needs {:?}",
                    info.ne, known.ne
                )
            })
        };
        let Err(difference) = registry.loaded.compare(file.file, &file.gguf) else {
            return true;
        };
        refuse_all(registry, file, report, |tensor| {
            misfit(tensor).unwrap_or_else(|| format!("its file holds another model: {difference}"))
        });
        registry.ignore(
            file.file,
            Some(file.gguf.source.id()),
            Cause::OtherModel,
            format!("it holds another model: {difference}; start the program with it, or restore the file"),
            report,
        );
        false
    });
}

/// Reads the tensors of each changed file, once for each version of the file. Files that cannot
/// be read are removed.
fn read_files<S: Store>(
    registry: &mut Registry,
    store: &S,
    changed: &mut Vec<ChangedFile>,
    report: &mut Report,
) {
    changed.retain(|file| {
        let watched = &registry.files[file.file];
        let id = file.gguf.source.id();
        if watched.contents.as_ref().is_some_and(|(of, _)| *of == id) {
            return true;
        }
        match read_file(registry, store, file) {
            Ok(contents) => {
                registry.files[file.file].contents = Some((id, contents));
                true
            }
            Err(reason) => {
                registry.files[file.file].note_failure(id, None);
                registry.ignore(file.file, None, Cause::Unreadable, reason, report);
                false
            }
        }
    });
}

/// Returns each tensor that follows a file, with its position in the new header and its content.
fn read_file<S: Store>(
    registry: &Registry,
    store: &S,
    file: &ChangedFile,
) -> Result<Contents, String> {
    let (source, header) = (&file.gguf.source, &file.gguf.header);
    let tensors = registry.files[file.file].tensors.iter();
    let id = source.id();
    // A tensor with an overlay follows only a write in place, if it is mapped from the file.
    let follows = |tensor: usize| {
        let overlaid = registry.tensors[tensor].overlay.is_some();
        !overlaid || store.modified_mapped_offset(tensor, &id).is_some()
    };
    let followers = tensors.copied().filter(|&tensor| follows(tensor));
    let found =
        followers.filter_map(|tensor| Some((tensor, header.find(&registry.tensors[tensor].name)?)));
    let found: Vec<(usize, usize)> = found.collect();
    let infos = found
        .iter()
        .map(|&(_, info)| (source, &header.tensors[info]));
    match read_contents(store, &infos.collect::<Vec<_>>()) {
        Ok(contents) => {
            let read = found.into_iter().zip(contents);
            Ok(read
                .map(|((tensor, info), content)| (tensor, info, content))
                .collect())
        }
        Err(Some((at, error))) => {
            let offset = header.tensors[found[at].1].offset;
            Err(format!("cannot read it at offset {offset}: {error}"))
        }
        Err(None) => Err("the model was freed meanwhile".into()),
    }
}

/// Reads and hashes tensors of files, each once. Fails with the position and the error of a tensor
/// that cannot be read, or with `None` when the model was freed meanwhile.
pub(super) fn read_contents<S: Store>(
    store: &S,
    tensors: &[(&Source, &TensorInfo)],
) -> Result<Vec<Content>, Option<(usize, io::Error)>> {
    let failure = Mutex::new(None);
    let mut contents: Vec<Option<Content>> = vec![None; tensors.len()];
    parallel::for_each(
        store.threads(),
        contents.iter_mut().enumerate().collect(),
        |(at, content)| {
            let (source, info) = tensors[at];
            source.advise_random();
            match content::of_tensor(source, info) {
                Ok(read) => *content = Some(read),
                Err(error) => {
                    *failure.lock() = Some((at, error));
                    return false;
                }
            }
            store.is_wanted()
        },
        || true,
    );
    let complete: Option<Vec<Content>> = contents.into_iter().collect();
    complete.ok_or_else(|| failure.into_inner())
}

/// Hashes the bytes in use of the tensors of the changed files that have no overlay. Leaves out
/// tensors that are used through the mapping of a file that was written in place: [`action`]
/// compares their known hash with the new one.
fn hash_live<S: Store>(registry: &mut Registry, store: &S, changed: &[ChangedFile]) {
    let ids: HashMap<usize, FileId> = changed
        .iter()
        .map(|file| (file.file, file.gguf.source.id()))
        .collect();
    hash_tensors(registry, store, |at, tensor| {
        let id = ids.get(&tensor.file).filter(|_| tensor.overlay.is_none());
        id.is_some_and(|id| store.modified_mapped_offset(at, id).is_none())
    });
}

/// Hashes the bytes in use of tensors that fulfil a condition.
pub(super) fn hash_tensors<S: Store>(
    registry: &mut Registry,
    store: &S,
    wanted: impl Fn(usize, &Registered) -> bool,
) {
    let tensors = registry.tensors.iter_mut().enumerate();
    let tensors = tensors.filter(|(at, tensor)| wanted(*at, tensor)).collect();
    let hash = |(at, tensor): (usize, &mut Registered)| {
        tensor.live_hash = store.live_hash(at, tensor.live_hash);
        store.is_wanted()
    };
    parallel::for_each(store.threads(), tensors, hash, || true);
}

/// Refuses files in which a tensor has zeros or non-finite scales that the tensor in use does not
/// have: an incomplete download, or a broken conversion.
fn refuse_damaged<S: Store>(
    registry: &mut Registry,
    store: &S,
    changed: &mut Vec<ChangedFile>,
    report: &mut Report,
) {
    changed.retain(|file| {
        let contents = registry.files[file.file].contents_of(file.gguf.source.id());
        let damaged = contents.iter().filter_map(|(tensor, _, content)| {
            Some((*tensor, damage(registry, store, *tensor, content)?))
        });
        let damage: Vec<(usize, String)> = damaged.collect();
        let Some((first, why)) = damage.first() else {
            return true;
        };
        let name = &registry.tensors[*first].name;
        let reason = content::damaged(name, damage.len() - 1, why);
        let reasons: HashMap<usize, String> = damage.into_iter().collect();
        refuse_all(registry, file, report, |tensor| {
            let of_file = || "another tensor of its file is damaged".to_owned();
            reasons.get(&tensor).cloned().unwrap_or_else(of_file)
        });
        let id = file.gguf.source.id();
        registry.ignore(file.file, Some(id), Cause::Damaged, reason, report);
        false
    });
}

/// Returns why new bytes of a tensor must not replace the bytes in use; `None` when they may.
pub(super) fn damage<S: Store>(
    registry: &mut Registry,
    store: &S,
    tensor: usize,
    content: &Content,
) -> Option<String> {
    if !Config::get().check_blocks || !content.defects.is_suspicious() {
        return None;
    }
    let known = &mut registry.tensors[tensor];
    if known.live_defects.is_none() {
        known.live_defects = store.original_defects(tensor);
    }
    content.defects.worse_than(known.live_defects.as_ref())
}

/// Reports every tensor of a file as refused.
fn refuse_all(
    registry: &Registry,
    file: &ChangedFile,
    report: &mut Report,
    reason: impl Fn(usize) -> String,
) {
    for &tensor in &registry.files[file.file].tensors {
        report.add(registry.tensors[tensor].refused(tensor, reason(tensor)));
    }
}

/// Decides what happens to a tensor, and what will be known of its original bytes then.
///
/// `modified` is the offset of the bytes in use, if they are mapped from a file that was written in
/// place.
pub(super) fn action<S: Store>(
    registry: &Registry,
    store: &S,
    tensor: usize,
    info: &TensorInfo,
    new_hash: Hash,
    modified: Option<u64>,
) -> (Action, Option<OriginalBytes>) {
    let known = &registry.tensors[tensor];
    let same_type = info.ty == known.ty;
    let same_bytes = known.live_hash == Some(new_hash);
    match modified {
        None if same_type && same_bytes => return (Action::Keep, None),
        Some(offset) if same_type && info.offset == offset => {
            return match same_bytes {
                true => (Action::Keep, None),
                false => (Action::InPlace, None),
            };
        }
        _ => {}
    }
    match known.original_bytes {
        OriginalBytes::InUse => {
            // A write in place has overwritten the bytes that were hashed.
            let left = match (modified, known.live_hash) {
                (None, Some(hash)) => OriginalBytes::Left(hash),
                _ => OriginalBytes::Lost,
            };
            (Action::Swap, Some(left))
        }
        OriginalBytes::Left(hash)
            if hash == new_hash
                && known.original_type == info.ty
                && store.can_return(tensor, hash) =>
        {
            (Action::Return, Some(OriginalBytes::InUse))
        }
        _ => (Action::Swap, None),
    }
}
