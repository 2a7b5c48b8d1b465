//! Overlays: tensors that take type and bytes from another file than the model's.
//!
//! An overlay is set and reverted by request only. It is staged, checked and committed as a reload
//! is, and the whole request in one commit. An overlay stays above later versions of the model's
//! file. Bytes are copied: a source can be removed after the commit.

use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::ffi::{CStr, CString};
use std::path::Path;
use std::time::Instant;

use super::commit::{Commits, FileBytes, Follows, Planned, PlannedBytes};
use super::compare::{self, Action};
use super::content::{Content, damaged};
use super::detect::{self, settle};
use super::hash::Hash;
use super::known::{Origin, Overlay};
use super::registry::{Changed, OriginalBytes, Registry};
use super::report::{Outcome, Report};
use super::same_model::LoadedModel;
use super::store::Store;
use crate::error::{Error, Result};
use crate::gguf::{Access, FileId, GgufFile, OpenError, TensorInfo, group, open_model};
use crate::text;

/// A GGUF file, or all shards of one, whose tensors can be overlays.
#[derive(Debug)]
pub struct OverlaySource {
    origin: Origin,
    files: Vec<GgufFile>,
    expected: HashMap<CString, Hash>,
}

/// A tensor, and the bytes of a file that a request gives it.
struct Wanted<'a> {
    tensor: usize,
    file: &'a GgufFile,
    info: &'a TensorInfo,
    follows: Follows,
    /// The hash that the bytes must have, if the request has one.
    expected: Option<Hash>,
}

/// How a tensor gets the bytes of the model's file again.
enum WayBack {
    /// The bytes are in use.
    InUse,
    /// The original bytes, which have this hash, are used again.
    Return(Hash),
    /// The bytes are read from the file.
    Read,
}

impl OverlaySource {
    /// Opens a file, and all shards if it is one of several. Waits until each is old enough for a
    /// later write to change its modification time.
    pub fn open(path: &Path) -> Result<OverlaySource> {
        let ids = |files: &[GgufFile]| -> Vec<FileId> {
            files.iter().map(|file| file.source.id()).collect()
        };
        let mut files = open_model(path, Access::Read)?;
        let found = ids(&files);
        if found.iter().filter(|id| settle(id)).count() > 0 {
            files = open_model(path, Access::Read)?;
            if ids(&files) != found {
                return Err(changing(path));
            }
        }
        let origin = Origin {
            path: path.to_owned(),
            as_type: None,
            imatrix: None,
        };
        Ok(OverlaySource {
            origin,
            files,
            expected: HashMap::new(),
        })
    }

    /// Reports another origin of the overlays: the file is temporary.
    #[must_use]
    pub fn of_origin(self, origin: Origin) -> OverlaySource {
        OverlaySource { origin, ..self }
    }

    /// Refuses other bytes of a tensor than those that have this hash.
    pub fn expect(&mut self, name: &CStr, hash: Hash) {
        self.expected.insert(name.to_owned(), hash);
    }

    /// Returns whether `id` is one of the files of the source, in the version that was opened.
    pub fn has_opened(&self, id: &FileId) -> bool {
        self.files.iter().any(|file| file.source.id() == *id)
    }

    /// Returns why the source has no bytes for a tensor of a model; see [`LoadedModel::misfit`].
    pub(super) fn misfit(&self, model: &LoadedModel, name: &CStr, ne: &[u64; 4]) -> Option<String> {
        model.misfit(&self.files, &self.origin.path, name, ne)
    }

    fn find(&self, name: &CStr) -> Option<(&GgufFile, &TensorInfo)> {
        self.files.iter().find_map(|file| {
            let info = file.header.find(name)?;
            Some((file, &file.header.tensors[info]))
        })
    }
}

impl Registry {
    /// Sets overlays and reverts others, all in one commit; see [`Engine::overlay`].
    ///
    /// [`Engine::overlay`]: super::Engine::overlay
    pub fn overlay<S: Store>(
        &mut self,
        store: &S,
        revert: &[usize],
        set: &[(usize, &OverlaySource)],
        report: &mut Report,
    ) -> Result<()> {
        let comparing = Instant::now();
        let mut set: BTreeMap<usize, &OverlaySource> = set.iter().copied().collect();
        let mut revert: BTreeSet<usize> = revert.iter().copied().collect();
        self.add_companions(&mut set, &mut revert)?;
        let revert = revert.into_iter();
        let reverted: Vec<usize> = revert
            .filter(|at| self.tensors[*at].overlay.is_some() && !set.contains_key(at))
            .collect();
        let mut planned = Vec::new();
        let mut read = Vec::new();
        for &tensor in &reverted {
            match self.way_back(store, tensor) {
                WayBack::InUse => self.note_unchanged(tensor, report),
                WayBack::Return(hash) => {
                    let bytes = PlannedBytes::Original(hash);
                    planned.push(Planned { tensor, bytes });
                }
                WayBack::Read => read.push(tensor),
            }
        }
        let own = self.open_own_files(&read)?;
        let mut wanted = self.own_bytes(&read, &own)?;
        for (&tensor, source) in &set {
            match self.overlay_bytes(store, tensor, source)? {
                None => self.note_unchanged(tensor, report),
                Some(new) => wanted.push(new),
            }
        }
        planned.extend(self.plan(store, wanted)?);
        report.times.compare += comparing.elapsed();
        self.switch(store, &planned, Commits::One, report)?;
        for &tensor in &reverted {
            self.tensors[tensor].overlay = None;
        }
        for tensor in set.into_keys().chain(reverted) {
            // Other tensors follow the file now.
            self.files[self.tensors[tensor].file].forget_attempts();
        }
        Ok(())
    }

    /// Adds the other tensors of each weight and its companions, which come from one file.
    fn add_companions<'a>(
        &self,
        set: &mut BTreeMap<usize, &'a OverlaySource>,
        revert: &mut BTreeSet<usize>,
    ) -> Result<()> {
        let tensors = self.tensors.iter().enumerate();
        let by_name: HashMap<&CStr, usize> = tensors.map(|(at, of)| (&*of.name, at)).collect();
        let others = |tensor: usize| -> Vec<usize> {
            let has = |name: &CStr| by_name.contains_key(name);
            let names = group(&self.tensors[tensor].name, has).into_iter();
            names
                .filter_map(|name| by_name.get(&*name).copied())
                .collect()
        };
        let named: Vec<(usize, &'a OverlaySource)> =
            set.iter().map(|(at, of)| (*at, *of)).collect();
        for (tensor, source) in named {
            for other in others(tensor) {
                let before = *set.entry(other).or_insert(source);
                if !std::ptr::eq(before, source) {
                    return Err(Error::Invalid(format!(
                        "tensors '{}' and '{}' are used together, and would come from {} and {}: name one file for both",
                        self.name(tensor),
                        self.name(other),
                        text::path(&source.origin.path),
                        text::path(&before.origin.path)
                    )));
                }
            }
        }
        for tensor in revert.clone() {
            revert.extend(others(tensor));
        }
        Ok(())
    }

    /// Returns the tensors that left their original bytes or have an overlay.
    pub fn changed(&self) -> Vec<Changed> {
        let tensors = self.tensors.iter().enumerate();
        let changed = tensors.filter(|(_, tensor)| {
            tensor.overlay.is_some() || tensor.original_bytes != OriginalBytes::InUse
        });
        changed
            .map(|(at, tensor)| Changed {
                tensor: at,
                original_type: tensor.original_type,
                ty: tensor.ty,
                overlay: tensor
                    .overlay
                    .as_ref()
                    .map(|overlay| (overlay.from.clone(), tensor.live_hash)),
            })
            .collect()
    }

    /// Decides how a tensor gets the bytes of its own file again, in the version in use.
    fn way_back<S: Store>(&self, store: &S, tensor: usize) -> WayBack {
        let known = &self.tensors[tensor];
        let file = &self.files[known.file];
        if file.id != file.first_id || file.mixed || known.written_in_place {
            return WayBack::Read;
        }
        match known.original_bytes {
            OriginalBytes::InUse => WayBack::InUse,
            OriginalBytes::Left(hash) if store.can_return(tensor, hash) => WayBack::Return(hash),
            _ => WayBack::Read,
        }
    }

    /// Opens the files of these tensors, in the version in use.
    fn open_own_files(&self, tensors: &[usize]) -> Result<BTreeMap<usize, GgufFile>> {
        let mut opened = BTreeMap::new();
        for &tensor in tensors {
            let file = self.tensors[tensor].file;
            if opened.contains_key(&file) {
                continue;
            }
            let watched = &self.files[file];
            let at_path = FileId::of_path(&watched.path).ok();
            if watched.mixed || at_path != Some(watched.id) {
                return Err(Error::Invalid(format!(
                    "{}: the file changed since the last reload: reload first, or restore the file",
                    text::path(&watched.path)
                )));
            }
            opened.insert(file, detect::open(&watched.path, watched.id)?);
        }
        Ok(opened)
    }

    /// Returns the bytes of these tensors in their own files.
    fn own_bytes<'a>(
        &self,
        tensors: &[usize],
        own: &'a BTreeMap<usize, GgufFile>,
    ) -> Result<Vec<Wanted<'a>>> {
        let bytes = tensors.iter().map(|&tensor| {
            let known = &self.tensors[tensor];
            let file = own.get(&known.file)?;
            let info = &file.header.tensors[file.header.find(&known.name)?];
            (info.ne == known.ne).then_some(Wanted {
                tensor,
                file,
                info,
                follows: Follows::VersionInUse,
                expected: None,
            })
        });
        let complete: Option<Vec<Wanted<'a>>> = bytes.collect();
        complete.ok_or_else(|| {
            Error::Invalid("a file of the model holds another model: restore the file".into())
        })
    }

    /// Returns the bytes of a tensor in the source of its overlay; `None` when the tensor has this
    /// overlay already.
    fn overlay_bytes<'a, S: Store>(
        &self,
        store: &S,
        tensor: usize,
        source: &'a OverlaySource,
    ) -> Result<Option<Wanted<'a>>> {
        let known = &self.tensors[tensor];
        if let Some(reason) = source.misfit(&self.loaded, &known.name, &known.ne) {
            return Err(Error::Invalid(reason));
        }
        let own = &self.files[known.file].path;
        let modified = |id| store.modified_mapped_offset(tensor, &id);
        if FileId::of_path(own).ok().and_then(modified).is_some() {
            return Err(Error::WrittenInPlace {
                path: own.clone(),
                what: format!("tensor '{}'", known.name.to_string_lossy()),
            });
        }
        let (file, info) = source.find(&known.name).expect("it fits");
        let overlay = Overlay {
            from: source.origin.clone(),
            version: (file.source.id(), info.offset),
        };
        Ok(
            (known.overlay.as_ref() != Some(&overlay)).then_some(Wanted {
                tensor,
                file,
                info,
                follows: Follows::Overlay(Box::new(overlay)),
                expected: source.expected.get(&*known.name).copied(),
            }),
        )
    }

    /// Reads new bytes and decides what happens to each tensor. Refuses all if one is refused.
    fn plan<'a, S: Store>(
        &mut self,
        store: &S,
        wanted: Vec<Wanted<'a>>,
    ) -> Result<Vec<Planned<'a>>> {
        let contents = self.read_new(store, &wanted)?;
        let tensors: HashSet<usize> = wanted.iter().map(|new| new.tensor).collect();
        compare::hash_tensors(self, store, |at, _| tensors.contains(&at));
        let mut planned = Vec::new();
        for (new, content) in wanted.into_iter().zip(contents) {
            let (tensor, file, info) = (new.tensor, new.file, new.info);
            if let Some(expected) = new.expected.filter(|hash| *hash != content.hash)
                && let Follows::Overlay(of) = &new.follows
            {
                return Err(Error::Invalid(format!(
                    "{}: the bytes of tensor '{}' are not those that were requested: their hash is {:032x}, expected {expected:032x}: the file, the importance matrix or the ggml library that quantises is another one",
                    text::path(&of.from.path),
                    self.name(tensor),
                    content.hash
                )));
            }
            let (action, leaves) = compare::action(self, store, tensor, info, content.hash, None);
            if action == Action::Swap
                && let Some(why) = compare::damage(self, store, tensor, &content)
            {
                return Err(Error::Invalid(format!(
                    "{}: {}",
                    text::path(file.source.path()),
                    damaged(&self.tensors[tensor].name, 0, &why)
                )));
            }
            planned.push(Planned {
                tensor,
                bytes: PlannedBytes::OfFile(FileBytes {
                    file,
                    info,
                    content,
                    action,
                    leaves,
                    follows: new.follows,
                }),
            });
        }
        Ok(planned)
    }

    /// Returns the content of each of these, in order. A version of a tensor is read once.
    fn read_new<S: Store>(&mut self, store: &S, wanted: &[Wanted<'_>]) -> Result<Vec<Content>> {
        self.read.make_space(wanted.len());
        let unread = wanted
            .iter()
            .filter(|new| self.read.get(new.file, new.info).is_none());
        let unread: Vec<&Wanted<'_>> = unread.collect();
        let sources: Vec<_> = unread
            .iter()
            .map(|new| (&new.file.source, new.info))
            .collect();
        let contents =
            compare::read_contents(store, &sources).map_err(|failure| match failure {
                Some((at, source)) => Error::Read {
                    path: sources[at].0.path().to_owned(),
                    what: format!("tensor '{}'", self.name(unread[at].tensor)),
                    offset: sources[at].1.offset,
                    source,
                },
                None => Error::Busy("the process ends, or the program has freed the model"),
            })?;
        for (new, content) in unread.into_iter().zip(contents) {
            self.read.insert(new.file, new.info, content);
        }
        let known = wanted.iter().map(|new| self.read.get(new.file, new.info));
        Ok(known.flatten().collect())
    }

    fn name(&self, tensor: usize) -> Cow<'_, str> {
        self.tensors[tensor].name.to_string_lossy()
    }

    fn note_unchanged(&self, tensor: usize, report: &mut Report) {
        report.add(self.tensors[tensor].report(tensor, Outcome::Unchanged));
    }
}

fn changing(path: &Path) -> Error {
    Error::Open(OpenError::Changing {
        path: path.to_owned(),
    })
}
