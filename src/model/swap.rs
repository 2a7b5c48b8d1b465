//! A model's tensors as the reload engine sees them.

use std::sync::Arc;

use super::tensor::{Home, Placed, Version};
use super::{Model, load};
use crate::device::{Buffer, DeviceError};
use crate::error::{Error, Result};
use crate::gguf::FileId;
use crate::parallel;
use crate::reload::{
    Commit, Hash, Job, Report, SourceFile, SourceTensor, StageError, Store, hash_reads,
};

impl Model {
    /// Brings all tensors up to date with their files; see
    /// [`reload::Engine::reload`](crate::reload::Engine::reload).
    ///
    /// Waits for evaluations that run, so a thread cannot call it during its own.
    pub fn reload(&self) -> Result<Report> {
        let engine = self.reload.as_ref().ok_or(Error::HotSwapOff)?;
        self.gate.check_can_switch()?;
        engine.reload(self)
    }

    pub(super) fn registry(&self) -> (Vec<SourceFile>, Vec<SourceTensor>) {
        let files = self.files.iter().map(|file| SourceFile {
            path: file.gguf.source.path().to_owned(),
            id: file.gguf.source.id(),
        });
        let tensors = self.tensors.iter().enumerate().map(|(index, tensor)| {
            let header = &self.files[tensor.file as usize].gguf.header;
            let info = &header.tensors[tensor.info as usize];
            SourceTensor {
                name: self.name(index).to_owned(),
                file: tensor.file as usize,
                ty: info.ty,
                ne: info.ne,
            }
        });
        (files.collect(), tensors.collect())
    }

    /// Hash of the bytes of a version, or `None` when they cannot be trusted.
    fn hash(&self, version: &Version) -> Option<Hash> {
        if let Some(placed) = version.placed() {
            return hash_reads(version.nbytes, |at, bytes| placed.read(at, bytes)).ok();
        }
        let Home::File { file, offset, .. } = version.home else {
            return None;
        };
        let source = &self.files[file].gguf.source;
        let hash = hash_reads(version.nbytes, |at, bytes| {
            source.read_at(bytes, offset + at)
        })
        .ok();
        hash.filter(|_| self.is_trusted(file))
    }

    fn is_trusted(&self, file: usize) -> bool {
        let file = &self.files[file];
        file.gguf.source.id_now().ok() == Some(*file.trusted.lock())
    }
}

/// The new versions of tensors, filled and not yet in use.
pub struct Staged(Vec<(usize, Arc<Version>)>);

impl Store for Model {
    type Staged = Staged;

    fn live_hash(&self, tensor: usize, known: Option<Hash>) -> Option<Hash> {
        let version = self.current(tensor);
        let unchangeable = match version.home {
            Home::File { file, .. } => version.placed().is_some() || self.is_trusted(file),
            Home::Private(_) => true,
        };
        known
            .filter(|_| unchangeable)
            .or_else(|| self.hash(&version))
    }

    fn written_through(&self, tensor: usize, id: &FileId) -> Option<u64> {
        let version = self.current(tensor);
        let Home::File {
            file,
            offset,
            loaded,
            ..
        } = &version.home
        else {
            return None;
        };
        let trusted = self.files[*file].trusted.lock();
        let written = trusted.same_inode(id) && *trusted != *id;
        (written && loaded.get().is_none()).then_some(*offset)
    }

    fn can_return(&self, tensor: usize, hash: Hash) -> bool {
        let original = &self.tensors[tensor].original;
        if Arc::ptr_eq(original, &self.current(tensor)) {
            return false;
        }
        let untouched = match original.home {
            Home::File { file, .. } => {
                let source = &self.files[file].gguf.source;
                original.placed().is_some() || source.id_now().ok() == Some(source.id())
            }
            Home::Private(_) => true,
        };
        untouched || self.hash(original) == Some(hash)
    }

    fn stage(&self, jobs: &[Job<'_>]) -> Result<Self::Staged, StageError> {
        let mut staged = Vec::with_capacity(jobs.len());
        for job in jobs {
            let buffer = self.devices[self.device].clone().allocate(job.nbytes);
            staged.push(buffer.map_err(|error| match error {
                DeviceError::OutOfMemory { .. } => StageError::OutOfMemory(error),
                DeviceError::Copy { .. } => StageError::Device(error),
            })?);
        }
        let failure = parking_lot::Mutex::new(None);
        let fill = |(at, buffer): (usize, &mut Box<dyn Buffer>)| {
            let job = &jobs[at];
            let filled = load::fill(&mut **buffer, job.source, job.offset);
            filled
                .map_err(|error| *failure.lock() = Some((at, error)))
                .is_ok()
        };
        parallel::for_each(staged.iter_mut().enumerate().collect(), fill, || true);
        match failure.into_inner() {
            Some((job, load::FillError::Read(offset, error))) => {
                return Err(StageError::Read {
                    job,
                    reason: format!(
                        "cannot read tensor '{}' at offset {offset}: {error}",
                        self.name(jobs[job].tensor).to_string_lossy()
                    ),
                });
            }
            Some((_, load::FillError::Device(error))) => return Err(StageError::Device(error)),
            None => {}
        }
        let version = |(job, buffer): (&Job<'_>, Box<dyn Buffer>)| {
            let version = Version {
                ty: job.ty,
                ne: self.tensors[job.tensor].original.ne,
                nbytes: job.nbytes,
                home: Home::Private(Placed {
                    buffer: buffer.into(),
                    device: self.device,
                    offset: 0,
                    len: job.nbytes,
                }),
            };
            (job.tensor, Arc::new(version))
        };
        Ok(Staged(jobs.iter().zip(staged).map(version).collect()))
    }

    fn commit(&self, staged: Option<Self::Staged>, others: &[usize]) -> Result<Commit> {
        self.gate.check_can_switch()?;
        let mut next = staged.map_or_else(Vec::new, |staged| staged.0);
        next.extend(
            others
                .iter()
                .map(|&tensor| (tensor, self.tensors[tensor].original.clone())),
        );
        let mut generation = 0;
        let switched = self.gate.switch(|| {
            {
                let mut versions = self.versions.write();
                versions.generation += 1;
                generation = versions.generation;
                for (tensor, version) in &mut next {
                    let current = &mut versions.current[*tensor];
                    std::mem::swap(&mut current.version, version);
                    current.generation += 1;
                }
            }
            self.listeners.tell(generation);
        });
        // Freeing what was replaced takes longer than replacing it: evaluations do
        // not wait for it.
        drop(next);
        Ok(Commit {
            wait: switched.wait,
            switch: switched.switch,
            generation,
        })
    }

    fn trust(&self, file: usize, id: FileId) {
        let file = &self.files[file];
        if file.gguf.source.id().same_inode(&id) {
            *file.trusted.lock() = id;
        }
    }
}
