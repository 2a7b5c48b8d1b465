//! Materialising tensors: from their file into buffers on their device.
//!
//! Bytes are read from the file and not copied out of its mapping: a read costs no
//! page faults on the source, and a file that was cut short gives an error instead
//! of a bus error.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use super::tensor::{Home, Placed, Version};
use super::{Model, TensorView};
use crate::device::{ALIGNMENT, Buffer, Device, DeviceError};
use crate::error::{Error, Result};
use crate::gguf::{FileId, Source};
use crate::parallel;

/// How much is read at a time.
const CHUNK: usize = 4 << 20;

/// One attempt with a single arena and one with eight make nine allocations.
const MANY_ARENAS: usize = 8;

/// How far [`Model::load_all`] is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Progress {
    /// Bytes that are where they belong.
    pub done: u64,
    /// Bytes to load.
    pub total: u64,
}

/// What [`Model::load_all`] did.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LoadReport {
    /// Tensors that were not loaded before.
    pub tensors: u64,
    /// Their bytes.
    pub bytes: u64,
    /// Device allocations, at most 9.
    pub allocations: u64,
    /// How long it took.
    pub time: Duration,
}

/// A tensor that waits to be loaded.
struct Pending {
    index: usize,
    version: Arc<Version>,
}

/// A run of tensors in one buffer.
#[derive(Default)]
struct Arena {
    /// Members and their offsets.
    tensors: Vec<(Pending, u64)>,
    bytes: u64,
}

/// An arena and its memory.
type Allocated = (Arena, Box<dyn Buffer>);

/// A piece of a file and where it goes.
struct Piece<'a> {
    file: usize,
    tensor: usize,
    offset: u64,
    target: &'a mut [u8],
}

impl Model {
    /// Materialises one tensor and returns it as it then is.
    ///
    /// Loads once: threads that ask at the same time wait and get the same buffer.
    pub fn load(&self, index: usize) -> Result<TensorView> {
        let version = self.current(index);
        let Home::File {
            file,
            offset,
            loaded,
            loading,
        } = &version.home
        else {
            return Ok(self.tensor(index));
        };
        let _loading = loading.lock();
        if loaded.get().is_none() {
            let trusted = *self.files[*file].trusted.lock();
            let mut buffer = self.devices[self.device].clone().allocate(version.nbytes)?;
            fill(&mut *buffer, &self.files[*file].gguf.source, *offset)
                .map_err(|error| self.fill_error(error, *file, index))?;
            self.publish(
                *file,
                trusted,
                || self.quoted(index),
                || {
                    // Whoever loaded everything meanwhile was first, and its buffer may
                    // already be in use.
                    let _ = loaded.set(Placed {
                        len: buffer.len(),
                        buffer: buffer.into(),
                        device: self.device,
                        offset: 0,
                    });
                },
            )?;
        }
        Ok(self.tensor(index))
    }

    /// Copies bytes of a tensor, from `at` on: from its device if it is loaded, else
    /// from its file.
    pub fn read(&self, index: usize, at: u64, bytes: &mut [u8]) -> Result<()> {
        let version = self.current(index);
        let end = at.checked_add(bytes.len() as u64);
        if end.is_none_or(|end| end > version.nbytes) {
            return Err(Error::NotFound {
                what: "byte range",
                wanted: format!("{at} + {} of {}", bytes.len(), self.quoted(index)),
                available: format!("it has {} bytes", version.nbytes),
            });
        }
        if let Some(placed) = version.placed() {
            return Ok(placed.read(at, bytes)?);
        }
        let Home::File { file, offset, .. } = version.home else {
            unreachable!("a tensor that is in no file is in a buffer");
        };
        let trusted = *self.files[file].trusted.lock();
        let read = self.files[file].gguf.source.read_at(bytes, offset + at);
        read.map_err(|error| self.fill_error(FillError::Read(offset + at, error), file, index))?;
        self.publish(file, trusted, || self.quoted(index), || ())
    }

    /// Materialises every tensor that is not yet, in at most 9 device allocations.
    ///
    /// Everything goes into one arena if the device gives one that large, else into
    /// eight of about the same size, biggest tensor first. `progress` is called on
    /// this thread after each piece that it read; when it returns `false`,
    /// everything loaded by this call is dropped again.
    pub fn load_all(&self, mut progress: impl FnMut(Progress) -> bool) -> Result<LoadReport> {
        let began = Instant::now();
        let pending: Vec<Pending> = (0..self.tensors.len())
            .map(|index| Pending {
                index,
                version: self.current(index),
            })
            .filter(|tensor| tensor.version.placed().is_none())
            .collect();
        let tensors = pending.len() as u64;
        let bytes: u64 = pending.iter().map(|tensor| tensor.version.nbytes).sum();

        let trusted: Vec<FileId> = self.files.iter().map(|file| *file.trusted.lock()).collect();
        let device = &self.devices[self.device];
        let mut arenas = allocate(device, pending)?;
        self.fill_arenas(&mut arenas, bytes, &mut progress)?;

        let allocations = arenas.len() as u64;
        let mut of_file: Vec<Vec<(Pending, Placed)>> = Vec::new();
        of_file.resize_with(self.files.len(), Vec::new);
        for (arena, buffer) in arenas {
            let buffer: Arc<dyn Buffer> = buffer.into();
            for (tensor, offset) in arena.tensors {
                let placed = Placed {
                    buffer: buffer.clone(),
                    device: self.device,
                    offset,
                    len: tensor.version.nbytes,
                };
                of_file[self.tensors[tensor.index].file as usize].push((tensor, placed));
            }
        }
        for (file, tensors) in of_file.into_iter().enumerate() {
            self.publish(
                file,
                trusted[file],
                || "its tensors".into(),
                || {
                    for (tensor, placed) in tensors {
                        if let Home::File { loaded, .. } = &tensor.version.home {
                            let _ = loaded.set(placed);
                        }
                    }
                },
            )?;
        }
        Ok(LoadReport {
            tensors,
            bytes,
            allocations,
            time: began.elapsed(),
        })
    }

    fn fill_arenas(
        &self,
        arenas: &mut [Allocated],
        total: u64,
        progress: &mut impl FnMut(Progress) -> bool,
    ) -> Result<()> {
        let done = AtomicU64::new(0);
        let failure: Mutex<Option<Error>> = Mutex::new(None);
        let cancelled = AtomicBool::new(false);
        let mut beside = || {
            let done = done.load(Ordering::Relaxed);
            let go_on = progress(Progress { done, total });
            cancelled.fetch_or(!go_on, Ordering::Relaxed);
            go_on
        };
        for (arena, buffer) in arenas {
            match buffer.host_mut() {
                Some(memory) => {
                    let read = |piece: Piece<'_>| {
                        let source = &self.files[piece.file].gguf.source;
                        let result = source.read_at(piece.target, piece.offset);
                        done.fetch_add(piece.target.len() as u64, Ordering::Relaxed);
                        result
                            .map_err(|error| {
                                let error = FillError::Read(piece.offset, error);
                                *failure.lock() =
                                    Some(self.fill_error(error, piece.file, piece.tensor));
                            })
                            .is_ok()
                    };
                    parallel::for_each(pieces(arena, memory), read, &mut beside);
                }
                None => self.upload_arena(arena, &mut **buffer, &done, &mut beside, &failure),
            }
            if let Some(error) = failure.lock().take() {
                return Err(error);
            }
            if cancelled.load(Ordering::Relaxed) {
                return Err(Error::Cancelled);
            }
        }
        Ok(())
    }

    /// Fills an arena that the process cannot write itself.
    fn upload_arena(
        &self,
        arena: &Arena,
        buffer: &mut dyn Buffer,
        done: &AtomicU64,
        beside: &mut impl FnMut() -> bool,
        failure: &Mutex<Option<Error>>,
    ) {
        let mut staging = vec![0; CHUNK];
        for (tensor, at) in &arena.tensors {
            let Home::File { file, offset, .. } = tensor.version.home else {
                continue;
            };
            let source = &self.files[file].gguf.source;
            let result = upload(
                buffer,
                *at,
                source,
                offset,
                tensor.version.nbytes,
                &mut staging,
            );
            if let Err(error) = result {
                *failure.lock() = Some(self.fill_error(error, file, tensor.index));
                return;
            }
            done.fetch_add(tensor.version.nbytes, Ordering::Relaxed);
            if !beside() {
                return;
            }
        }
    }

    /// Makes loaded tensors of a file visible, unless the file was written in place
    /// since `trusted` was the identity of its bytes.
    ///
    /// The lock keeps a reload from deciding at the same moment that these tensors
    /// are still read out of the file.
    fn publish(
        &self,
        file: usize,
        trusted: FileId,
        what: impl Fn() -> String,
        publish: impl FnOnce(),
    ) -> Result<()> {
        let file = &self.files[file];
        let now = file.trusted.lock();
        if *now != trusted || file.gguf.source.id_now().ok() != Some(trusted) {
            return Err(Error::WrittenInPlace {
                path: file.gguf.source.path().to_owned(),
                what: what(),
            });
        }
        publish();
        Ok(())
    }

    fn quoted(&self, index: usize) -> String {
        format!("tensor '{}'", self.name(index).to_string_lossy())
    }

    fn fill_error(&self, error: FillError, file: usize, tensor: usize) -> Error {
        match error {
            FillError::Device(error) => error.into(),
            FillError::Read(offset, source) => Error::Read {
                path: self.file_path(file).to_owned(),
                what: self.quoted(tensor),
                offset,
                source,
            },
        }
    }
}

/// Why a buffer was not filled.
#[derive(Debug)]
pub(super) enum FillError {
    /// Reading the file failed, near this offset.
    Read(u64, io::Error),
    Device(DeviceError),
}

/// Fills all of `buffer` with what `source` holds from `offset` on.
pub(super) fn fill(buffer: &mut dyn Buffer, source: &Source, offset: u64) -> Result<(), FillError> {
    let len = buffer.len();
    if let Some(memory) = buffer.host_mut() {
        return source
            .read_at(memory, offset)
            .map_err(|error| FillError::Read(offset, error));
    }
    let mut staging = vec![0; CHUNK.min(len as usize)];
    upload(buffer, 0, source, offset, len, &mut staging)
}

fn upload(
    buffer: &mut dyn Buffer,
    at: u64,
    source: &Source,
    offset: u64,
    len: u64,
    staging: &mut [u8],
) -> Result<(), FillError> {
    let mut copied = 0;
    while copied < len {
        let n = (len - copied).min(staging.len() as u64) as usize;
        source
            .read_at(&mut staging[..n], offset + copied)
            .map_err(|error| FillError::Read(offset + copied, error))?;
        buffer
            .write(at + copied, &staging[..n])
            .map_err(FillError::Device)?;
        copied += n as u64;
    }
    Ok(())
}

/// Lays out `pending` and allocates the arenas for it.
fn allocate(
    device: &Arc<dyn Device>,
    pending: Vec<Pending>,
) -> Result<Vec<Allocated>, DeviceError> {
    let with_buffer = |arena: Arena| {
        let buffer = device.clone().allocate(arena.bytes)?;
        Ok((arena, buffer))
    };
    if pending.is_empty() {
        return Ok(Vec::new());
    }
    let mut one = Arena::default();
    for tensor in pending {
        one.push(tensor);
    }
    match device.clone().allocate(one.bytes) {
        Ok(buffer) => Ok(vec![(one, buffer)]),
        Err(DeviceError::OutOfMemory { .. }) => {
            let tensors = one.tensors.into_iter().map(|(tensor, _)| tensor).collect();
            balance(tensors).into_iter().map(with_buffer).collect()
        }
        Err(error) => Err(error),
    }
}

/// Spreads tensors over [`MANY_ARENAS`], the biggest first, each into the arena
/// that holds least.
fn balance(mut pending: Vec<Pending>) -> Vec<Arena> {
    pending.sort_by_key(|tensor| std::cmp::Reverse(tensor.version.nbytes));
    let mut arenas: Vec<Arena> = (0..MANY_ARENAS).map(|_| Arena::default()).collect();
    for tensor in pending {
        let emptiest = arenas.iter_mut().min_by_key(|arena| arena.bytes);
        emptiest.expect("there are eight").push(tensor);
    }
    arenas.retain(|arena| !arena.tensors.is_empty());
    arenas
}

impl Arena {
    fn push(&mut self, tensor: Pending) {
        let len = tensor.version.nbytes;
        self.tensors.push((tensor, self.bytes));
        self.bytes += len.next_multiple_of(ALIGNMENT);
    }
}

/// Cuts the memory of an arena into the pieces to read.
fn pieces<'a>(arena: &Arena, mut memory: &'a mut [u8]) -> Vec<Piece<'a>> {
    let mut pieces = Vec::new();
    let mut at = 0;
    for (tensor, start) in &arena.tensors {
        let Home::File { file, offset, .. } = tensor.version.home else {
            continue;
        };
        let skip = (start - at) as usize;
        let len = tensor.version.nbytes as usize;
        let (target, rest) = memory[skip..].split_at_mut(len);
        memory = rest;
        at = start + len as u64;
        let chunks = target.chunks_mut(CHUNK).enumerate();
        pieces.extend(chunks.map(|(i, target)| Piece {
            file,
            tensor: tensor.index,
            offset: offset + (i * CHUNK) as u64,
            target,
        }));
    }
    pieces
}
