//! The host's tensors as the reload engine sees them.

use std::ffi::c_void;
use std::sync::Arc;

use llama_sidecar::device::DeviceError;
use llama_sidecar::error::{Error, Result};
use llama_sidecar::gguf::FileId;
use llama_sidecar::log::{Level, log};
use llama_sidecar::reload::{
    Change, Commit, Effect, Hash, Job, NoRoom, Outcome, Report, StageError, Store, hash_source,
};

use crate::gate;
use crate::ggml::{Descriptor, OwnBuffer, Tensor};
use crate::placement::{self, extents};
use crate::registry::{Instance, Model, TensorPointer};

/// The tensors of one model.
struct HostStore<'a>(&'a Arc<Model>);

/// Brings a model of the host up to date with its files.
pub fn reload(model: &Arc<Model>) -> Result<Report> {
    model.engine.reload(&HostStore(model))
}

/// New places for instances, filled and not yet in use.
pub struct Staged {
    next: Vec<Next>,
    effects: Vec<Effect>,
}

/// What one instance will be.
struct Next {
    tensor: usize,
    instance: usize,
    to: Descriptor,
    /// The buffer of the new bytes; `None` when it returns to the host's.
    private: Option<OwnBuffer>,
}

impl HostStore<'_> {
    fn is_private(&self, tensor: usize) -> bool {
        let instances = &self.0.tensors[tensor].instances;
        instances[0].private.lock().is_some()
    }

    fn is_trusted(&self, file: usize) -> bool {
        let file = &self.0.files[file];
        file.gguf.source.has_stamp_of(&file.trusted.lock())
    }

    /// Hash of the bytes that the host loaded, from the file that it loaded them from.
    fn original_hash(&self, tensor: usize) -> Option<Hash> {
        let tensor = &self.0.tensors[tensor];
        let file = &self.0.files[tensor.file].gguf;
        let info = &file.header.tensors[tensor.info];
        let hash = hash_source(&file.source, info.offset, info.nbytes).ok();
        // Bytes that the host copied do not follow the file: without doubt it has to be
        // the file that was copied.
        let copied = tensor.instances.iter().any(|instance| !instance.mapped);
        let trusted = *self.0.files[tensor.file].trusted.lock();
        hash.filter(|_| match copied {
            true => file.source.is_unwritten_since(&trusted),
            false => file.source.has_stamp_of(&trusted),
        })
    }

    fn stage_swap(
        &self,
        job: &Job<'_>,
        no_room: NoRoom,
        staged: &mut Staged,
    ) -> Result<(), StageError> {
        let model = self.0;
        let ggml = model.ggml;
        let failed = |reason: String| StageError::Read {
            tensor: job.tensor,
            reason: format!("{:?}: {reason}", model.name(job.tensor)),
        };
        if !ggml.knows(job.ty) {
            return Err(failed(format!(
                "this program's ggml does not know the type {}",
                job.ty.name()
            )));
        }
        let tensor = &model.tensors[job.tensor];
        if tensor.instances.iter().any(Instance::is_viewed) {
            return Err(failed(
                "the host keeps views of it, which would stay behind".into(),
            ));
        }
        let cut = |instance: &Instance| placement::is_cut_by_ggml(model, instance);
        if tensor.instances.iter().any(cut) {
            return Err(failed("the host runs it on several devices at once".into()));
        }
        let info = &model.files[tensor.file].gguf.header.tensors[tensor.info];
        let ne = extents(&info.ne, info.n_dims);
        let mut bytes = Vec::new();
        let mut places = Vec::new();
        for (number, instance) in tensor.instances.iter().enumerate() {
            if gate::is_shut() || !model.is_alive() {
                return Err(failed("the host is ending or has freed the model".into()));
            }
            let on = |on_host| {
                let buft = placement::choose(model, instance, &ne, job.ty, on_host);
                let buft = buft.ok_or_else(|| {
                    failed(format!(
                        "no device of this program can use {}",
                        job.ty.name()
                    ))
                })?;
                let name = model.name(job.tensor);
                let made = OwnBuffer::for_tensor(ggml, buft, job.ty.id as i32, &ne, name);
                Ok(made.map_err(|requested| DeviceError::OutOfMemory {
                    device: ggml.buffer_type_name(buft),
                    requested,
                    free: 0,
                }))
            };
            let mut made = on(false)?;
            if made.is_err() && no_room == NoRoom::Fallback {
                made = on(true)?;
            }
            let (buffer, new) = made.map_err(StageError::OutOfMemory)?;
            fill(ggml, job, &buffer, new, &mut bytes)
                .map_err(|error| failed(format!("cannot read it: {error}")))?;
            // SAFETY: a new tensor that nobody else knows.
            let to = unsafe { ggml.descriptor(new) };
            places.push(placement::describe(ggml, &to));
            if placement::would_be_doubled(model, instance, &ne, job.ty) {
                log(
                    Level::Warn,
                    format_args!(
                        "{:?}: input and output share this matrix, and in {} a new load would keep two of it: results can differ from a new load's in their last bits",
                        model.name(job.tensor),
                        job.ty.name()
                    ),
                );
            }
            staged.next.push(Next {
                tensor: job.tensor,
                instance: number,
                to,
                private: Some(buffer),
            });
        }
        places.dedup();
        staged.effects.push(Effect {
            tensor: job.tensor,
            outcome: Outcome::Swapped,
            placement: places.join(", "),
        });
        Ok(())
    }
}

/// Fills a new tensor from a file: in place where its bytes are plain memory, else
/// through `bytes`, which are read once for all instances.
fn fill(
    ggml: &'static crate::ggml::Ggml,
    job: &Job<'_>,
    buffer: &OwnBuffer,
    tensor: *mut Tensor,
    bytes: &mut Vec<u8>,
) -> std::io::Result<()> {
    let len = job.nbytes as usize;
    // SAFETY: the tensor is new, nobody else knows it, and its buffer was made for it.
    unsafe {
        if (ggml.f.ggml_nbytes)(tensor) != len {
            return Err(std::io::Error::other(
                "its size is not what this ggml expects",
            ));
        }
        if buffer.is_host() {
            let data = (ggml.f.ggml_get_data)(tensor).cast::<u8>();
            let data = std::slice::from_raw_parts_mut(data, len);
            return job.source.read_at(data, job.offset);
        }
        if bytes.is_empty() {
            bytes.resize(len, 0);
            job.source.read_at(bytes, job.offset)?;
        }
        let from: *const c_void = bytes.as_ptr().cast();
        (ggml.f.ggml_backend_tensor_set)(tensor, from, 0, len);
    }
    Ok(())
}

impl Store for HostStore<'_> {
    type Staged = Staged;

    fn live_hash(&self, tensor: usize, known: Option<Hash>) -> Option<Hash> {
        if self.is_private(tensor) {
            return known;
        }
        let mapped = self.0.tensors[tensor].instances.iter().any(|i| i.mapped);
        let unchangeable = !mapped || self.is_trusted(self.0.tensors[tensor].file);
        known
            .filter(|_| unchangeable)
            .or_else(|| self.original_hash(tensor))
    }

    fn written_through(&self, tensor: usize, id: &FileId) -> Option<u64> {
        let tensor_of = &self.0.tensors[tensor];
        let mapped = tensor_of.instances.iter().all(|instance| instance.mapped);
        if self.is_private(tensor) || !mapped {
            return None;
        }
        let file = &self.0.files[tensor_of.file];
        let trusted = file.trusted.lock();
        let written = trusted.same_inode(id) && !id.unwritten_since(&trusted);
        written.then(|| file.gguf.header.tensors[tensor_of.info].offset)
    }

    fn can_return(&self, tensor: usize, hash: Hash) -> bool {
        if !self.is_private(tensor) {
            return false;
        }
        let tensor_of = &self.0.tensors[tensor];
        let source = &self.0.files[tensor_of.file].gguf.source;
        let mapped = tensor_of.instances.iter().any(|instance| instance.mapped);
        !mapped
            || source.is_unwritten_since(&source.id())
            || self.original_hash(tensor) == Some(hash)
    }

    fn group(&self, tensor: usize) -> usize {
        tensor
    }

    fn staging_bytes(&self) -> u64 {
        llama_sidecar::config::Config::get().staging_bytes
    }

    fn has_displaced(&self) -> bool {
        false
    }

    fn stage(&self, changes: &[Change<'_>], no_room: NoRoom) -> Result<Option<Staged>, StageError> {
        let mut staged = Staged {
            next: Vec::new(),
            effects: Vec::new(),
        };
        for change in changes {
            match change {
                Change::Swap(job) => self.stage_swap(job, no_room, &mut staged)?,
                Change::Return(tensor) => {
                    let instances = &self.0.tensors[*tensor].instances;
                    for (number, instance) in instances.iter().enumerate() {
                        staged.next.push(Next {
                            tensor: *tensor,
                            instance: number,
                            to: instance.original,
                            private: None,
                        });
                    }
                    let at = &instances[0].original;
                    staged.effects.push(Effect {
                        tensor: *tensor,
                        outcome: Outcome::Returned,
                        placement: placement::describe(self.0.ggml, at),
                    });
                }
                Change::InPlace(tensor) => staged.effects.push(Effect {
                    tensor: *tensor,
                    outcome: Outcome::InPlace,
                    placement: String::new(),
                }),
            }
        }
        Ok((!staged.effects.is_empty()).then_some(staged))
    }

    fn commit(&self, staged: Staged) -> Result<Commit> {
        let model = self.0.clone();
        let ggml = model.ggml;
        let writes: Vec<(TensorPointer, Descriptor)> = staged
            .next
            .iter()
            .map(|next| {
                let instance = &model.tensors[next.tensor].instances[next.instance];
                (instance.tensor, next.to)
            })
            .collect();
        let alive = model.clone();
        let switched = gate::switch(move || {
            if !alive.is_alive() {
                return false;
            }
            for (tensor, to) in &writes {
                // SAFETY: the gate is closed and the model alive, so nobody reads the
                // tensor; its new buffer is kept in `private`, or is the host's own.
                unsafe { ggml.describe(tensor.0, to) };
            }
            true
        })
        .map_err(Error::Busy)?;
        for next in staged.next {
            let instance = &model.tensors[next.tensor].instances[next.instance];
            // The buffer that was in use goes here: no evaluation reads it any more.
            *instance.private.lock() = next.private;
        }
        Ok(Commit {
            wait: switched.wait,
            switch: switched.switch,
            generation: switched.generation,
            effects: staged.effects,
        })
    }

    fn trust(&self, file: usize, id: FileId) {
        let file = &self.0.files[file];
        if file.gguf.source.id().same_inode(&id) {
            *file.trusted.lock() = id;
        }
    }
}
