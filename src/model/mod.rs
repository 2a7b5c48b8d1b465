//! A model that is open: its tensors, where they are, and how they get there.
//!
//! Opening reads headers only. A tensor is a handle until somebody asks for it:
//! its bytes can be had in place, through the mapping, or materialised in a buffer
//! on its device, one at a time or all together in a few arenas.

mod context;
mod gate;
mod load;
mod swap;
mod tensor;

use std::ffi::CStr;
use std::path::Path;
use std::sync::Arc;

use parking_lot::{Mutex, RwLock};

use crate::device::{Device, HostDevice};
use crate::error::{Error, Result};
use crate::gguf::{self, Access, FileId, GgufFile, Key, Value};
use crate::reload;

pub use context::Context;
pub use gate::{Evaluation, Pauses};
pub use load::{LoadReport, Progress};
pub use tensor::{State, TensorView};

use gate::Gate;
use tensor::{Home, Version};

/// How to open a model.
#[derive(Debug, Clone)]
pub struct Options {
    /// How file bytes are reached.
    pub access: Access,
    /// Whether changed files can be reloaded.
    pub hotswap: bool,
    /// Devices the model can use; the first must be a host device.
    pub devices: Vec<Arc<dyn Device>>,
    /// Index of the device that tensors are materialised on.
    pub device: usize,
}

impl Options {
    /// Everything on one host device, mapped.
    pub fn host() -> Options {
        Options {
            access: Access::Map,
            hotswap: false,
            devices: vec![HostDevice::new("host")],
            device: 0,
        }
    }
}

/// An open model. All methods can be called from several threads.
#[derive(Debug)]
pub struct Model {
    files: Vec<ModelFile>,
    tensors: Vec<Tensor>,
    /// First tensor of each file.
    first_of_file: Vec<usize>,
    versions: RwLock<Versions>,
    devices: Vec<Arc<dyn Device>>,
    device: usize,
    gate: Gate,
    listeners: context::Listeners,
    reload: Option<reload::Engine>,
}

/// One file of the model.
#[derive(Debug)]
struct ModelFile {
    gguf: GgufFile,
    /// The identity under which its bytes are trusted: the one it was opened with,
    /// or the one of an in-place change that a reload has seen.
    trusted: Mutex<FileId>,
}

/// What never changes about a tensor.
#[derive(Debug)]
struct Tensor {
    file: u32,
    info: u32,
    original: Arc<Version>,
}

/// What a reload changes, all at once.
#[derive(Debug)]
struct Versions {
    current: Vec<Current>,
    /// How many reloads changed something.
    generation: u64,
}

#[derive(Debug)]
struct Current {
    version: Arc<Version>,
    /// How often this tensor changed.
    generation: u64,
}

impl Model {
    /// Opens the model that `path`, a GGUF file or any shard of one, belongs to.
    pub fn open(path: &Path, options: Options) -> Result<Model> {
        if options.device >= options.devices.len() {
            return Err(Error::NotFound {
                what: "device",
                wanted: options.device.to_string(),
                available: format!("there are {}", options.devices.len()),
            });
        }
        let files = gguf::open_model(path, options.access)?;
        let mut tensors = Vec::new();
        let mut current = Vec::new();
        let mut first_of_file = Vec::with_capacity(files.len());
        for (file_index, file) in files.iter().enumerate() {
            first_of_file.push(tensors.len());
            for (info_index, info) in file.header.tensors.iter().enumerate() {
                let original = Arc::new(Version::in_file(info, file_index));
                current.push(Current {
                    version: original.clone(),
                    generation: 0,
                });
                tensors.push(Tensor {
                    file: file_index as u32,
                    info: info_index as u32,
                    original,
                });
            }
        }
        let files: Vec<ModelFile> = files
            .into_iter()
            .map(|gguf| ModelFile {
                trusted: Mutex::new(gguf.source.id()),
                gguf,
            })
            .collect();
        let mut model = Model {
            first_of_file,
            files,
            tensors,
            versions: RwLock::new(Versions {
                current,
                generation: 0,
            }),
            devices: options.devices,
            device: options.device,
            gate: Gate::default(),
            listeners: context::Listeners::default(),
            reload: None,
        };
        if options.hotswap {
            model.reload = Some(reload::Engine::new(model.registry()));
        }
        Ok(model)
    }

    /// How many tensors there are.
    pub fn tensor_count(&self) -> usize {
        self.tensors.len()
    }

    /// Name of a tensor. Panics when there is no such tensor.
    pub fn name(&self, index: usize) -> &CStr {
        let tensor = &self.tensors[index];
        let header = &self.files[tensor.file as usize].gguf.header;
        header.name(&header.tensors[tensor.info as usize])
    }

    /// Index of the tensor with this name.
    pub fn find(&self, name: &CStr) -> Option<usize> {
        let firsts = self.first_of_file.iter();
        firsts
            .zip(&self.files)
            .find_map(|(first, file)| Some(first + file.gguf.header.find(name)?))
    }

    /// What a tensor is at this moment. Panics when there is no such tensor.
    pub fn tensor(&self, index: usize) -> TensorView {
        let (version, generation) = {
            let versions = self.versions.read();
            let current = &versions.current[index];
            (current.version.clone(), current.generation)
        };
        let tensor = &self.tensors[index];
        let state = if Arc::ptr_eq(&version, &tensor.original) {
            State::OnOriginal
        } else {
            State::Detached
        };
        TensorView::new(version, state, tensor.file as usize, generation)
    }

    /// The bytes of a tensor where the process can read them without a copy: in its
    /// host buffer if it has one, else in the mapping of its file.
    ///
    /// They stay valid and unchanged until a reload replaces the tensor; hold a
    /// [`Context`]'s evaluation to keep reloads away. Bytes in the mapping also
    /// change when somebody writes the file in place.
    pub fn host_bytes(&self, view: &TensorView) -> Option<*const [u8]> {
        let bytes = match view.version().placed() {
            Some(placed) => placed.host()?,
            None => match &view.version().home {
                Home::File { file, offset, .. } => {
                    let source = &self.files[*file].gguf.source;
                    source.mapped(*offset, view.version().nbytes)?
                }
                Home::Private(_) => return None,
            },
        };
        Some(bytes)
    }

    /// Path of the file a tensor was loaded from.
    pub fn file_path(&self, file: usize) -> &Path {
        self.files[file].gguf.source.path()
    }

    /// How many files the model has.
    pub fn file_count(&self) -> usize {
        self.files.len()
    }

    /// Size of all files together, in bytes.
    pub fn file_bytes(&self) -> u64 {
        self.files
            .iter()
            .map(|file| file.gguf.source.id().size)
            .sum()
    }

    /// Format version of the first file.
    pub fn gguf_version(&self) -> u32 {
        self.files[0].gguf.header.version
    }

    /// Devices of the model, by index.
    pub fn devices(&self) -> &[Arc<dyn Device>] {
        &self.devices
    }

    /// How many reloads changed something.
    pub fn generation(&self) -> u64 {
        self.versions.read().generation
    }

    /// How long evaluations had to wait for reloads.
    pub fn pauses(&self) -> Pauses {
        self.gate.pauses()
    }

    /// The model's metadata: the key-values of its first file.
    pub fn metadata(&self) -> &[Key] {
        &self.files[0].gguf.header.keys
    }

    /// A metadata key by name.
    pub fn key(&self, name: &[u8]) -> Option<&Key> {
        self.files[0].gguf.header.key(name)
    }

    /// Reads the metadata value of `key`, one of [`Model::metadata`]'s.
    pub fn value(&self, key: &Key) -> Result<Value> {
        let file = &self.files[0].gguf;
        file.value(key)
            .map_err(|source| self.read_error(0, key, source))
    }

    /// Reads elements `from..` of an array, at most `limit`.
    pub fn elements(&self, key: &Key, from: u64, limit: u64) -> Result<Vec<Value>> {
        let file = &self.files[0].gguf;
        file.elements(key, from, limit)
            .map_err(|source| self.read_error(0, key, source))
    }

    fn read_error(&self, file: usize, key: &Key, source: std::io::Error) -> Error {
        Error::Read {
            path: self.file_path(file).to_owned(),
            what: format!("metadata key '{}'", key.name_lossy()),
            offset: key.offset,
            source,
        }
    }

    fn current(&self, index: usize) -> Arc<Version> {
        self.versions.read().current[index].version.clone()
    }
}
