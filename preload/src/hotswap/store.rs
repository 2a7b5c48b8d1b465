//! The program's tensors as the reload engine sees them.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::{CStr, c_void};
use std::sync::Arc;

use parking_lot::Mutex;
use sidecar_core::config::Config;
use sidecar_core::error::DeviceError;
use sidecar_core::error::{Error, Result};
use sidecar_core::gguf::{FileId, TypeInfo};
use sidecar_core::memory::{self, usable};
use sidecar_core::parallel::Threads;
use sidecar_core::reload::{
    Change, Commit, Content, Defects, Effect, Hash, Need, NewData, OnOutOfMemory, Outcome,
    OverlaySource, Report, StageError, Store, Trigger, content_of, hash_bytes,
};

use crate::ggml::{BufferType, Descriptor, Ggml, OwnBuffer, Tensor};
use crate::hotswap::placement::{self, extents};
use crate::process::memory::Memory;
use crate::program::barrier::{MODEL_FREED, Replaced};
use crate::program::groups::Bytes;
use crate::program::models::{Instance, Model};
use crate::program::{barrier, own_cache, sched};
use crate::streaming;

/// What the CPU backend may allocate to compute with other types. Where that fails, it frees memory twice when the program
/// frees it (`ggml_backend_cpu_graph_compute` of ggml 0.26), which ends the program.
const WORK_BYTES: usize = 16 << 20;
/// Why a switch does not happen.
const REFUSED_MEANWHILE: &str = "a graph that the program made meanwhile refuses swaps of its weights: 'llama-sidecar status' has the reason";

/// The tensors of one model.
struct ProgramStore<'a>(&'a Arc<Model>, WrittenInPlace);

/// Whether the bytes of a mapped file that was written in place are hashed.
#[derive(Clone, Copy, PartialEq)]
enum WrittenInPlace {
    /// They are, for a reload: it compares with the bytes in use.
    Hashed,
    /// They are not, for a content hash: the next reload has to find the write.
    Unknown,
}

/// Reloads the changed tensors of a model.
pub fn reload(model: &Arc<Model>, trigger: Trigger) -> Result<Report> {
    model
        .engine
        .reload(&ProgramStore(model, WrittenInPlace::Hashed), trigger)
}

/// Returns all tensors of a model to their originals.
pub fn revert(model: &Arc<Model>) -> Result<Report> {
    let store = ProgramStore(model, WrittenInPlace::Hashed);
    store.check()?;
    model.engine.revert(&store)
}

/// Reverts overlays of a model and sets others.
pub fn overlay(
    model: &Arc<Model>,
    revert: &[usize],
    set: &[(usize, &OverlaySource)],
) -> Result<Report> {
    let store = ProgramStore(model, WrittenInPlace::Hashed);
    store.check()?;
    model.engine.overlay(&store, revert, set)
}

/// Hashes tensors of a model from `next` on; see [`Engine::hash_some`]. The caller holds
/// [`Model::reloading`], which keeps the program from freeing the model.
///
/// [`Engine::hash_some`]: sidecar_core::reload::Engine::hash_some
pub fn hash_some(model: &Arc<Model>, next: &mut usize) -> bool {
    let store = ProgramStore(model, WrittenInPlace::Unknown);
    model.engine.hash_some(&store, next)
}

/// New descriptors and buffers for instances, filled and not yet in use.
#[derive(Default)]
pub struct Staged {
    next: Vec<Next>,
    effects: Vec<Effect>,
}

impl Staged {
    /// Returns what was staged so far, to return to with [`Staged::truncate`].
    fn so_far(&self) -> (usize, usize) {
        (self.next.len(), self.effects.len())
    }

    fn truncate(&mut self, (next, effects): (usize, usize)) {
        self.next.truncate(next);
        self.effects.truncate(effects);
    }
}

/// The next descriptor of an instance.
struct Next {
    tensor: usize,
    instance: usize,
    to: Descriptor,
    /// The buffer of the new bytes; `None` when it returns to the original bytes.
    private: Option<OwnBuffer>,
    /// Which bytes it has, if it is in host memory because its device has none.
    displaced: Option<Bytes>,
}

/// Where tensors of a device are staged.
#[derive(Clone, Copy, PartialEq)]
enum Place {
    /// Where a fresh load would have them.
    AsLoaded,
    /// In host memory.
    Host,
}

impl ProgramStore<'_> {
    /// Whether a tensor has other bytes than those that the program loaded.
    fn has_new_bytes(&self, tensor: usize) -> bool {
        let instances = &self.0.tensors[tensor].instances;
        let displaced = self.0.groups.displaced_bytes(tensor);
        instances[0].private.lock().is_some() && displaced != Some(Bytes::Original)
    }

    /// Whether a tensor is in the memory of a device.
    fn is_on_device(&self, tensor: usize) -> bool {
        let first = &self.0.tensors[tensor].instances[0];
        placement::device_buffer_type(self.0, first).is_some_and(|(_, own)| {
            let private = first.private.lock();
            private
                .as_ref()
                .is_none_or(|buffer| buffer.buffer_type() == own)
        })
    }

    /// Reads the current bytes of a tensor in the file that the program loaded.
    fn file_content(&self, tensor: usize) -> Option<Content> {
        let tensor = &self.0.tensors[tensor];
        let file = &self.0.files[tensor.file].gguf;
        file.source.advise_random();
        content_of(&file.source, &file.header.tensors[tensor.info]).ok()
    }

    /// Returns the shape of a tensor, as ggml takes it.
    fn extents(&self, tensor: usize) -> Vec<i64> {
        let tensor = &self.0.tensors[tensor];
        let info = &self.0.files[tensor.file].gguf.header.tensors[tensor.info];
        extents(&info.ne, info.n_dims)
    }

    /// Whether the file still has the bytes of a tensor that the program loaded.
    fn holds_original_bytes(&self, tensor: usize) -> bool {
        let tensor = &self.0.tensors[tensor];
        let file = &self.0.files[tensor.file];
        file.holds_bytes_in_use(tensor.instances.iter().any(|instance| !instance.mapped))
    }

    /// Reads the bytes that the program loaded from their file; `None` when the file was
    /// written since, or meanwhile.
    fn original_content(&self, tensor: usize) -> Option<Content> {
        if !self.holds_original_bytes(tensor) {
            return None;
        }
        let content = self.file_content(tensor);
        content.filter(|_| self.holds_original_bytes(tensor))
    }

    /// Returns the hash of the bytes that the program loaded; `None` when their file was written
    /// since.
    fn original_hash(&self, tensor: usize) -> Option<Hash> {
        self.original_content(tensor).map(|content| content.hash)
    }

    /// Returns the hash of the bytes that the mapping of a tensor has, although a write may have
    /// changed them since the program loaded it: a file that was moved back into its place has a
    /// new modification time. `None` if an instance is not mapped, the file is not at its path,
    /// or it changed meanwhile.
    fn hash_in_place(&self, tensor: usize) -> Option<Hash> {
        let tensor_of = &self.0.tensors[tensor];
        let source = &self.0.files[tensor_of.file].gguf.source;
        let at_path = || {
            let id = FileId::of_path(source.path()).ok();
            id.filter(|id| id.same_inode(&source.id()))
        };
        let before = at_path().filter(|_| tensor_of.instances.iter().all(|i| i.mapped))?;
        let content = self.file_content(tensor)?;
        (at_path() == Some(before)).then_some(content.hash)
    }

    /// Returns the hash of a tensor's bytes in use, read back from memory or from a device.
    /// The special buffer types of the CPU cannot be read back.
    fn resident_hash(&self, tensor: usize) -> Option<Hash> {
        if !self.is_wanted() {
            return None;
        }
        let model = self.0;
        let f = &model.ggml.f;
        let instance = &model.tensors[tensor].instances[0];
        // SAFETY: the model is alive while it is reloaded ([`Model::reloading`]), so its
        // tensor and its buffer are.
        unsafe {
            let is_host = (f.ggml_backend_buffer_is_host)(instance.original.buffer);
            if !is_host && placement::device_buffer_type(model, instance).is_none() {
                return None;
            }
            let len = (f.ggml_nbytes)(instance.tensor.0);
            let mut bytes = memory::zeroed(len).ok()?;
            (f.ggml_backend_tensor_get)(instance.tensor.0, bytes.as_mut_ptr().cast(), 0, len);
            Some(hash_bytes(&bytes))
        }
    }

    /// Whether an instance is a copy that a fresh load would not need: it reads new bytes in the
    /// buffer of the first instance.
    fn shares_buffer(&self, tensor: usize, ty: &TypeInfo, instance: &Instance) -> bool {
        let ne = self.extents(tensor);
        let chosen = |of| placement::choose(self.0, of, &ne, ty, false);
        let first = &self.0.tensors[tensor].instances[0];
        instance.is_copy() && chosen(instance) == chosen(first)
    }

    /// Returns why a tensor cannot have other bytes now, although it could when the program loaded it.
    fn refuses_now(&self, change: &Change<'_>) -> Option<String> {
        let model = self.0;
        let ty = match change {
            Change::Swap(new_data) => new_data.ty.id as i32,
            Change::Return(tensor) => model.tensors[*tensor].instances[0].original.ty,
            Change::InPlace(_) => return None,
        };
        let reason = model.obstacle();
        let reason = reason.or_else(|| own_cache::refuses(model, change.tensor(), ty))?;
        Some(format!("{:?}: {reason}", model.name(change.tensor())))
    }

    /// Stages other bytes for a tensor, or the bytes that it has in another place.
    fn stage_bytes(
        &self,
        new: &New<'_>,
        place: Place,
        outcome: Outcome,
        staged: &mut Staged,
    ) -> Result<(), StageError> {
        let model = self.0;
        let ggml = model.ggml;
        let &New { tensor, ty, .. } = new;
        let name = model.name(tensor);
        let failed = |reason: String| StageError::Read {
            tensor,
            reason: format!("{name:?}: {reason}"),
        };
        let ne = self.extents(tensor);
        let mut bytes = Vec::new();
        let mut places = Vec::new();
        for (number, instance) in model.tensors[tensor].instances.iter().enumerate() {
            if self.shares_buffer(tensor, ty, instance)
                && let Some(first) = staged.next.last()
            {
                staged.next.push(Next {
                    instance: number,
                    private: None,
                    ..*first
                });
                continue;
            }
            if barrier::is_shut() || !model.is_alive() {
                return Err(failed(
                    "the process ends, or the program has freed the model".into(),
                ));
            }
            let chosen = |on_host| {
                let buft = placement::choose(model, instance, &ne, ty, on_host);
                buft.ok_or_else(|| {
                    failed(format!("no device of this program supports {}", ty.name()))
                })
            };
            let at_home = chosen(false)?;
            let buft = match place {
                Place::Host if placement::device_buffer_type(model, instance).is_some() => {
                    chosen(true)?
                }
                _ => at_home,
            };
            let (buffer, made) = self.allocate(instance, buft, ty, &ne, name)?;
            new.write_to(ggml, instance, (&buffer, made), &mut bytes)
                .map_err(|error| failed(format!("cannot read it: {error}")))?;
            // SAFETY: the tensor of this buffer, which is not shared.
            let to = unsafe { buffer.descriptor(made) };
            places.push(placement::describe(ggml, &to));
            if placement::fresh_load_duplicates(model, instance, &ne, ty) {
                log::warn!(
                    "{name:?}: input and output share this matrix, and a fresh load in {} would have two copies: the last bits of the results can differ from a fresh load",
                    ty.name()
                );
            }
            staged.next.push(Next {
                tensor,
                instance: number,
                to,
                private: Some(buffer),
                displaced: (buft != at_home).then_some(new.kind),
            });
        }
        places.dedup();
        staged.effects.push(Effect {
            tensor,
            outcome,
            placement: places.join(", "),
        });
        Ok(())
    }

    /// Allocates a buffer of a type for a tensor.
    fn allocate(
        &self,
        instance: &Instance,
        buft: *mut BufferType,
        ty: &TypeInfo,
        ne: &[i64],
        name: &CStr,
    ) -> Result<(OwnBuffer, *mut Tensor), StageError> {
        let (model, ggml) = (self.0, self.0.ggml);
        let out_of_memory = |requested, free| {
            StageError::OutOfMemory(DeviceError::OutOfMemory {
                device: ggml.buffer_type_name(buft),
                requested,
                free,
            })
        };
        let own = placement::device_buffer_type(model, instance).filter(|own| own.1 == buft);
        // A control group's memory can fall below what there was when the reload began.
        let in_host = || match Config::get().memory_bytes {
            Some(_) => None,
            None => memory::free_memory().map(|(free, _)| free),
        };
        let free = match own {
            Some((device, _)) => ggml.free_memory(device).map(usable),
            None => in_host(),
        };
        if let Some(free) = free {
            let size = OwnBuffer::size_for(ggml, buft, ty.id as i32, ne);
            let size = size.map_err(|requested| out_of_memory(requested, free))?;
            if free < size {
                return Err(out_of_memory(size, free));
            }
        }
        let made = model.pool.buffer(ggml, buft, ty.id as i32, ne, name);
        made.map_err(|requested| out_of_memory(requested, 0))
    }

    /// Stages the return of a tensor to the bytes that the program loaded, where it loaded them.
    fn stage_return(&self, tensor: usize, outcome: Outcome, staged: &mut Staged) {
        let instances = &self.0.tensors[tensor].instances;
        for (number, instance) in instances.iter().enumerate() {
            staged.next.push(Next {
                tensor,
                instance: number,
                to: instance.original,
                private: None,
                displaced: None,
            });
        }
        staged.effects.push(Effect {
            tensor,
            outcome,
            placement: placement::describe(self.0.ggml, &instances[0].original),
        });
    }

    /// Stages changes of one group.
    fn stage_group(
        &self,
        changes: &[&Change<'_>],
        place: Place,
        staged: &mut Staged,
    ) -> Result<(), StageError> {
        for &change in changes {
            match change {
                Change::Swap(new_data) => {
                    let new = New::of_file(new_data);
                    self.stage_bytes(&new, place, Outcome::Swapped, staged)?;
                }
                &Change::Return(tensor) => match place {
                    Place::AsLoaded => self.stage_return(tensor, Outcome::Returned, staged),
                    Place::Host => {
                        let new = New::moved(self.0, tensor, Bytes::Original)?;
                        self.stage_bytes(&new, place, Outcome::Returned, staged)?;
                    }
                },
                &Change::InPlace(tensor) => staged.effects.push(Effect {
                    tensor,
                    outcome: Outcome::InPlace,
                    placement: String::new(),
                }),
            }
        }
        Ok(())
    }

    /// Stages changes of a group in host memory, and moves its other tensors there.
    fn stage_group_on_host(
        &self,
        group: usize,
        changes: &[&Change<'_>],
        staged: &mut Staged,
    ) -> Result<(), StageError> {
        self.stage_group(changes, Place::Host, staged)?;
        for tensor in self.others_on_device(group, changes) {
            let kind = match self.has_new_bytes(tensor) {
                true => Bytes::New,
                false => Bytes::Original,
            };
            let new = New::moved(self.0, tensor, kind)?;
            self.stage_bytes(&new, Place::Host, Outcome::Moved, staged)?;
        }
        Ok(())
    }

    /// Stages the return of displaced tensors of a group to their device.
    fn stage_back(
        &self,
        tensors: &[(usize, Bytes)],
        staged: &mut Staged,
    ) -> Result<(), StageError> {
        for &(tensor, kind) in tensors {
            match kind {
                Bytes::Original => self.stage_return(tensor, Outcome::Moved, staged),
                Bytes::New => {
                    let new = New::moved(self.0, tensor, kind)?;
                    self.stage_bytes(&new, Place::AsLoaded, Outcome::Moved, staged)?;
                }
            }
        }
        Ok(())
    }

    /// Returns the tensors of a group on a device that no change gives other bytes to.
    fn others_on_device(&self, group: usize, changes: &[&Change<'_>]) -> Vec<usize> {
        let is_changed = |tensor| changes.iter().any(|change| change.tensor() == tensor);
        let members = self.0.groups.members(group);
        members
            .filter(|&tensor| !is_changed(tensor) && self.is_on_device(tensor))
            .collect()
    }
}

/// Bytes for a tensor.
struct New<'a> {
    tensor: usize,
    ty: &'static TypeInfo,
    kind: Bytes,
    /// Where they are in a file; `None`: where the tensor has them.
    source: Option<NewData<'a>>,
}

impl<'a> New<'a> {
    fn of_file(new_data: &NewData<'a>) -> New<'a> {
        New {
            tensor: new_data.tensor,
            ty: new_data.ty,
            kind: Bytes::New,
            source: Some(*new_data),
        }
    }

    /// Returns bytes that a tensor has: its original ones, or those in use.
    fn moved(model: &Model, tensor: usize, kind: Bytes) -> Result<New<'a>, StageError> {
        let instance = &model.tensors[tensor].instances[0];
        let id = descriptor_of(model.ggml, instance, kind).ty;
        let ty = TypeInfo::from_id(id as u32).ok_or_else(|| StageError::Read {
            tensor,
            reason: format!("{:?}: its type {id} is unknown", model.name(tensor)),
        })?;
        Ok(New {
            tensor,
            ty,
            kind,
            source: None,
        })
    }

    /// Writes them to a new tensor for an instance. `bytes` has those of a file once they were read.
    fn write_to(
        &self,
        ggml: &'static Ggml,
        instance: &Instance,
        (buffer, tensor): (&OwnBuffer, *mut Tensor),
        bytes: &mut Vec<u8>,
    ) -> std::io::Result<()> {
        match &self.source {
            Some(new_data) => write_tensor(ggml, new_data, buffer, tensor, bytes),
            None => {
                let from = descriptor_of(ggml, instance, self.kind);
                copy_tensor(ggml, instance, &from, tensor)
            }
        }
    }
}

/// Returns where an instance has bytes.
fn descriptor_of(ggml: &Ggml, instance: &Instance, kind: Bytes) -> Descriptor {
    match kind {
        Bytes::Original => instance.original,
        // SAFETY: the model is alive while it is reloaded ([`Model::reloading`]), and only a reload
        // writes to its tensors.
        Bytes::New => unsafe { ggml.descriptor(instance.tensor.0) },
    }
}

/// Copies the bytes of an instance to a new tensor of the same type and shape.
fn copy_tensor(
    ggml: &'static Ggml,
    instance: &Instance,
    from: &Descriptor,
    to: *mut Tensor,
) -> std::io::Result<()> {
    // SAFETY: the model is alive while it is reloaded, so its tensor and both of its buffers are; the
    // new tensor is not shared.
    unsafe {
        let mut source = ggml.copy_struct(instance.tensor.0);
        let source = source.tensor();
        ggml.describe(source, from);
        let len = (ggml.f.ggml_nbytes)(source);
        let mut bytes = memory::zeroed(len)?;
        (ggml.f.ggml_backend_tensor_get)(source, bytes.as_mut_ptr().cast(), 0, len);
        (ggml.f.ggml_backend_tensor_set)(to, bytes.as_ptr().cast(), 0, len);
    }
    Ok(())
}

/// Writes the bytes of a file to a new tensor: directly where the tensor is in memory of the
/// process, else through `bytes`, which are read once for all instances.
fn write_tensor(
    ggml: &'static Ggml,
    new_data: &NewData<'_>,
    buffer: &OwnBuffer,
    tensor: *mut Tensor,
    bytes: &mut Vec<u8>,
) -> std::io::Result<()> {
    let len = new_data.nbytes as usize;
    // SAFETY: the tensor is new and not shared, and its buffer was made for it.
    unsafe {
        if (ggml.f.ggml_nbytes)(tensor) != len {
            return Err(std::io::Error::other(
                "its size differs from the size that this ggml expects",
            ));
        }
        if buffer.is_host() {
            let data = ggml.data(tensor).cast::<u8>();
            let data = std::slice::from_raw_parts_mut(data, len);
            return new_data.source.read_at(data, new_data.offset);
        }
        if bytes.is_empty() {
            *bytes = memory::zeroed(len)?;
            new_data.source.read_at(bytes, new_data.offset)?;
        }
        let from: *const c_void = bytes.as_ptr().cast();
        (ggml.f.ggml_backend_tensor_set)(tensor, from, 0, len);
    }
    Ok(())
}

impl Store for ProgramStore<'_> {
    type Staged = Staged;

    fn live_hash(&self, tensor: usize, known: Option<Hash>) -> Option<Hash> {
        if self.has_new_bytes(tensor) {
            return known;
        }
        let tensor_of = &self.0.tensors[tensor];
        let mapped = tensor_of.instances.iter().filter(|i| i.mapped).count();
        let known = known.filter(|_| mapped == 0 || self.0.files[tensor_of.file].is_trusted());
        let all_mapped = mapped == tensor_of.instances.len();
        known.or_else(|| match mapped {
            _ if all_mapped && self.1 == WrittenInPlace::Hashed => {
                self.file_content(tensor).map(|content| content.hash)
            }
            0 => self
                .original_hash(tensor)
                .or_else(|| self.resident_hash(tensor)),
            _ => self.original_hash(tensor),
        })
    }

    fn modified_mapped_offset(&self, tensor: usize, id: &FileId) -> Option<u64> {
        let tensor_of = &self.0.tensors[tensor];
        let mapped = tensor_of.instances.iter().all(|instance| instance.mapped);
        if self.has_new_bytes(tensor) || !mapped {
            return None;
        }
        let file = &self.0.files[tensor_of.file];
        let written = file.is_write_in_place(id);
        written.then(|| file.gguf.header.tensors[tensor_of.info].offset)
    }

    fn can_return(&self, tensor: usize, hash: Hash) -> bool {
        if !self.has_new_bytes(tensor) {
            return false;
        }
        let tensor_of = &self.0.tensors[tensor];
        let source = &self.0.files[tensor_of.file].gguf.source;
        let mapped = tensor_of.instances.iter().any(|instance| instance.mapped);
        !mapped
            || source.is_unwritten_since(&source.id())
            || self.original_hash(tensor) == Some(hash)
            || self.hash_in_place(tensor) == Some(hash)
    }

    fn original_defects(&self, tensor: usize) -> Option<Defects> {
        self.original_content(tensor).map(|content| content.defects)
    }

    fn refuses(&self, new_data: &NewData<'_>) -> Option<String> {
        let (model, ggml) = (self.0, self.0.ggml);
        let tensor = &model.tensors[new_data.tensor];
        let ne = self.extents(new_data.tensor);
        let name = new_data.ty.name();
        let usable = |instance: &Instance, on_host| {
            placement::choose(model, instance, &ne, new_data.ty, on_host).is_some()
        };
        let mut instances = tensor.instances.iter();
        let reason = if let Some(obstacle) = model.obstacle() {
            obstacle
        } else if placement::is_read_at_load(model, new_data.tensor) {
            "the program computed other weights from it as it loaded it: start it again".into()
        } else if !ggml.knows(new_data.ty) {
            format!("this program's ggml does not know the type {name}")
        } else if tensor.instances.iter().any(Instance::has_kept_view) {
            "the program keeps views of it, which a swap would not change".into()
        } else if instances
            .clone()
            .any(|instance| placement::is_split_over_unknown(model, instance))
        {
            "ggml splits it over several devices, which are not known".into()
        } else if let Some(why) = own_cache::refuses(model, new_data.tensor, new_data.ty.id as i32)
        {
            why
        } else if let Some(why) = instances
            .clone()
            .find_map(|instance| placement::refuses_type(instance, ggml, ne.len(), new_data.ty))
        {
            why
        } else if !instances.all(|instance| usable(instance, false) || usable(instance, true)) {
            format!("no device of this program supports {name}")
        } else {
            return None;
        };
        Some(format!("{:?}: {reason}", model.name(new_data.tensor)))
    }

    fn need(&self, changes: &[Change<'_>]) -> Need {
        let model = self.0;
        let mut need = Need {
            held: model.private_bytes() + model.pool.bytes(),
            ..Need::default()
        };
        for change in changes {
            let Change::Swap(new_data) = change else {
                continue;
            };
            for instance in &model.tensors[new_data.tensor].instances {
                if self.shares_buffer(new_data.tensor, new_data.ty, instance) {
                    continue;
                }
                match placement::device_buffer_type(model, instance) {
                    Some(_) => need.device += new_data.nbytes,
                    None => need.host += new_data.nbytes,
                }
            }
        }
        need
    }

    fn moved_along(&self, changes: &[Change<'_>]) -> u64 {
        let changes: Vec<&Change<'_>> = changes.iter().collect();
        let groups: BTreeSet<usize> = changes.iter().map(|of| self.group(of.tensor())).collect();
        let others = groups
            .into_iter()
            .flat_map(|group| self.others_on_device(group, &changes));
        let bytes = |tensor: usize| {
            let first = &self.0.tensors[tensor].instances[0];
            // SAFETY: the model is alive while it is reloaded, and its tensors are.
            unsafe { (self.0.ggml.f.ggml_nbytes)(first.tensor.0) as u64 }
        };
        others.map(bytes).sum()
    }

    fn release_unused(&self) -> bool {
        self.0.pool.clear()
    }

    fn threads(&self) -> Threads {
        match barrier::is_busy() {
            true => Threads::BESIDE_THE_PROGRAM,
            false => Threads::All,
        }
    }

    fn check(&self) -> Result<()> {
        self.0.check().map_err(Error::Busy)
    }

    fn is_wanted(&self) -> bool {
        self.0.is_alive() && !barrier::is_shut()
    }

    fn activity(&self) -> u64 {
        sched::activity()
    }

    fn group(&self, tensor: usize) -> usize {
        self.0.groups.of_tensor(tensor)
    }

    fn stage(
        &self,
        changes: &[Change<'_>],
        on_out_of_memory: OnOutOfMemory,
    ) -> Result<Option<Staged>, StageError> {
        let mut staged = Staged::default();
        if !self.is_wanted() {
            return Err(StageError::Device(DeviceError::Failed {
                device: "host".into(),
                action: "be staged for",
                reason: "the process ends, or the program has freed the model".into(),
            }));
        }
        // Of an earlier step, or of one that failed.
        sched::free_remote();
        for change in changes {
            if let Some(reason) = self.refuses_now(change) {
                let tensor = change.tensor();
                return Err(StageError::Refused { tensor, reason });
            }
        }
        let mut groups: BTreeMap<usize, Vec<&Change<'_>>> = BTreeMap::new();
        for change in changes {
            let group = self.group(change.tensor());
            groups.entry(group).or_default().push(change);
        }
        for (group, changes) in groups {
            let so_far = staged.so_far();
            match self.stage_group(&changes, Place::AsLoaded, &mut staged) {
                Err(StageError::OutOfMemory(_)) if on_out_of_memory == OnOutOfMemory::Fallback => {
                    staged.truncate(so_far);
                    self.stage_group_on_host(group, &changes, &mut staged)?;
                }
                result => result?,
            }
        }
        let is_return = staged.next.iter().all(|next| next.private.is_none());
        if !is_return && !memory::has(WORK_BYTES) {
            return Err(StageError::OverBudget(format!(
                "this process gets no further {} MiB, which the program may need to compute with other types: raise its limits",
                WORK_BYTES >> 20
            )));
        }
        Ok((!staged.effects.is_empty()).then_some(staged))
    }

    fn stage_displaced(&self) -> Result<Option<Staged>, StageError> {
        let mut groups: BTreeMap<usize, Vec<(usize, Bytes)>> = BTreeMap::new();
        for (tensor, bytes) in self.0.groups.displaced() {
            groups
                .entry(self.group(tensor))
                .or_default()
                .push((tensor, bytes));
        }
        let mut staged = Staged::default();
        if groups.is_empty() || !self.is_wanted() || self.0.obstacle().is_some() {
            return Ok(None);
        }
        for tensors in groups.values() {
            let so_far = staged.so_far();
            match self.stage_back(tensors, &mut staged) {
                Err(StageError::OutOfMemory(_)) => staged.truncate(so_far),
                result => result?,
            }
        }
        Ok((!staged.effects.is_empty()).then_some(staged))
    }

    fn commit(&self, staged: Staged) -> Result<Commit> {
        let model = self.0.clone();
        // Buffers are exchanged together with the descriptors, before the program can free the
        // model; the old ones are kept or freed afterwards, when no evaluation reads them any more.
        let instances = staged.next.iter().map(|next| (next.tensor, next.instance));
        let instances: Vec<(usize, usize)> = instances.collect();
        let tensors: Vec<usize> = staged.effects.iter().map(|effect| effect.tensor).collect();
        let viewer = self.0.clone();
        let viewed = move |&(tensor, instance): &(usize, usize)| {
            viewer.tensors[tensor].instances[instance].is_viewed()
        };
        let mut outcomes = staged.effects.iter().map(|effect| effect.outcome);
        let in_place = outcomes.any(|outcome| outcome == Outcome::InPlace);
        let next = Arc::new(Mutex::new(staged.next));
        let replaced = next.clone();
        let memory = Memory::open();
        let switched = barrier::switch(
            Replaced {
                models: self.0.as_set(),
                viewed: Box::new(move || instances.iter().any(&viewed)),
            },
            || self.0.is_alive(),
            move || {
                if !model.is_alive() {
                    return Err(MODEL_FREED);
                }
                if model.obstacle().is_some() {
                    return Err(REFUSED_MEANWHILE);
                }
                let mut next = next.lock();
                let instances = next.iter().map(|next| (next.tensor, next.instance));
                model.check_tensors(memory.as_ref(), instances)?;
                own_cache::check(&model, next.iter().map(|next| (next.tensor, next.to.ty)))?;
                for next in next.iter_mut() {
                    let instance = &model.tensors[next.tensor].instances[next.instance];
                    // SAFETY: no evaluation runs and the model is alive, so nothing reads the
                    // tensor; its new buffer is kept in `private`, or is the original one.
                    unsafe {
                        model.ggml.describe(instance.tensor.0, &next.to);
                        if let Some(buffer) = &next.private {
                            buffer.enter(instance.tensor.0);
                        }
                    }
                    std::mem::swap(&mut *instance.private.lock(), &mut next.private);
                    model.groups.displace(next.tensor, next.displaced);
                }
                for &tensor in &tensors {
                    own_cache::changed(&model, tensor);
                }
                if in_place {
                    streaming::read_again(&model);
                }
                Ok(())
            },
        )
        .map_err(Error::Busy)?;
        let replaced = std::mem::take(&mut *replaced.lock());
        let replaced = replaced.into_iter().filter_map(|next| next.private);
        let in_use = self.0.private_bytes();
        self.0.pool.keep(replaced, in_use);
        Ok(Commit {
            switched,
            effects: staged.effects,
        })
    }

    fn trust(&self, file: usize, id: FileId) {
        self.0.files[file].trust(id);
    }
}
