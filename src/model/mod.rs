//! A model that is open: its tensors, where they are, and how they get there.
//!
//! Opening reads headers only. A tensor is a handle until somebody asks for it:
//! its bytes can be had in place, through the mapping, or materialised in a buffer
//! on its device, one at a time or all together in a few arenas.

mod context;
mod cut;
mod fill;
mod gate;
mod load;
mod placement;
mod swap;
mod tensor;

use std::collections::HashSet;
use std::ffi::CStr;
use std::path::Path;
use std::sync::Arc;

use once_cell::sync::OnceCell;
use parking_lot::RwLock;

use crate::device::{Device, HostDevice};
use crate::error::{Error, Result};
use crate::experts::ExpertIndex;
use crate::gguf::{self, Access, GgufFile, KeyValue, Strings, TypeInfo, Value};
use crate::reload::{Engine, Pauses, TrackedFile};

pub use context::Context;
pub use cut::Axis;
pub use gate::Evaluation;
pub use load::{LoadReport, Progress};
pub use placement::{HOST, Layout, Placement};
pub use tensor::{PartView, State, TensorView};

use gate::Gate;
use placement::{Group, Member, Target};
use tensor::{Home, Version};

/// How to open a model.
#[derive(Debug, Clone)]
pub struct Options {
    /// How file bytes are reached.
    pub access: Access,
    /// Whether changed files can be reloaded.
    pub hotswap: bool,
    /// Devices the model can use; the first is the memory of the process.
    pub devices: Vec<Arc<dyn Device>>,
    /// Where on them tensors belong.
    pub placement: Placement,
    /// The most bytes that a reload stages before it switches; 0 for no limit. A
    /// reload of more is done in steps, each consistent.
    pub staging_bytes: u64,
}

impl Options {
    /// Everything on one host device, mapped.
    pub fn host() -> Options {
        Options {
            access: Access::Map,
            hotswap: false,
            devices: vec![HostDevice::new("host")],
            placement: Placement::on(HOST),
            staging_bytes: 0,
        }
    }
}

/// An open model. All methods can be called from several threads.
#[derive(Debug)]
pub struct Model {
    files: Vec<TrackedFile>,
    tensors: Vec<Tensor>,
    /// First tensor of each file.
    first_of_file: Vec<usize>,
    versions: RwLock<Versions>,
    devices: Vec<Arc<dyn Device>>,
    placement: Placement,
    /// Made when it is first needed: opening a model does without.
    plan: OnceCell<Plan>,
    /// Made when it is first needed, as the plan.
    experts: OnceCell<ExpertIndex>,
    gate: Gate,
    listeners: context::Listeners,
    reload: Option<Engine>,
}

/// What never changes about a tensor.
#[derive(Debug)]
struct Tensor {
    file: u32,
    info: u32,
    original: Arc<Version>,
}

/// What follows from the placement and the names of tensors.
#[derive(Debug)]
struct Plan {
    /// Where each tensor belongs.
    targets: Vec<Target>,
    /// Rows of one slice of each tensor.
    rows: Vec<u64>,
    groups: Vec<Group>,
    /// The group of each tensor.
    group_of: Vec<u32>,
}

/// What a reload changes, all at once.
#[derive(Debug)]
struct Versions {
    current: Vec<Current>,
    /// Groups that are in host memory because a device had no room.
    displaced: HashSet<u32>,
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
    /// Its files, in the order of the shards.
    pub fn gguf_files(&self) -> impl Iterator<Item = &GgufFile> {
        self.files.iter().map(|file| &file.gguf)
    }

    /// Opens the model that `path`, a GGUF file or any shard of one, belongs to.
    pub fn open(path: &Path, options: Options) -> Result<Model> {
        options.placement.check(&options.devices)?;
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
        let files: Vec<TrackedFile> = files.into_iter().map(TrackedFile::new).collect();
        let mut model = Model {
            first_of_file,
            files,
            tensors,
            versions: RwLock::new(Versions {
                current,
                displaced: HashSet::new(),
                generation: 0,
            }),
            devices: options.devices,
            placement: options.placement,
            plan: OnceCell::new(),
            experts: OnceCell::new(),
            gate: Gate::default(),
            listeners: context::Listeners::default(),
            reload: None,
        };
        if options.hotswap {
            let tensors = model.tensors.iter();
            let places = tensors.map(|tensor| (tensor.file as usize, tensor.info as usize));
            model.reload = Some(Engine::new(&model.files, places, options.staging_bytes));
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
        let (version, generation, displaced) = {
            let versions = self.versions.read();
            let current = &versions.current[index];
            let displaced = !versions.displaced.is_empty()
                && versions.displaced.contains(&self.plan().group_of[index]);
            (current.version.clone(), current.generation, displaced)
        };
        let tensor = &self.tensors[index];
        let state = if displaced {
            State::FallbackCpu
        } else if Arc::ptr_eq(&version, &tensor.original) {
            State::OnOriginal
        } else {
            State::Detached
        };
        TensorView::new(version, state, tensor.file as usize, generation)
    }

    /// How a tensor is laid out over devices, or will be once it is materialised.
    /// Panics when there is no such tensor.
    pub fn planned_layout(&self, index: usize) -> Layout {
        self.layout(&self.versions.read(), index)
    }

    /// Returns the model's expert tensors, as its files have them.
    pub fn experts(&self) -> &ExpertIndex {
        let index = || ExpertIndex::of(self.gguf_files());
        self.experts.get_or_init(index)
    }

    fn plan(&self) -> &Plan {
        self.plan.get_or_init(|| {
            let (mut targets, mut rows, mut experts) = (Vec::new(), Vec::new(), Vec::new());
            let mut names = vec![None; self.tensors.len()];
            for expert in self.experts().tensors() {
                names[expert.tensor] = Some(expert.name);
            }
            for (index, tensor) in self.tensors.iter().enumerate() {
                let (name, ne) = (self.name(index).to_string_lossy(), tensor.original.ne);
                let expert = names[index];
                targets.push(self.placement.target(&name, expert, &ne));
                rows.push(placement::slice_rows(expert, &ne));
                experts.push((expert, ne));
            }
            let (groups, group_of) = placement::groups(experts.into_iter());
            Plan {
                targets,
                rows,
                groups,
                group_of,
            }
        })
    }

    fn layout(&self, versions: &Versions, index: usize) -> Layout {
        let group = self.plan().group_of[index] as usize;
        let tensors = &self.plan().groups[group].tensors;
        let at = tensors
            .binary_search(&index)
            .expect("a tensor is in its group");
        self.group_layouts(versions, group).swap_remove(at)
    }

    /// Layouts of the tensors of a group, with the types that they have now.
    fn group_layouts(&self, versions: &Versions, group: usize) -> Vec<Layout> {
        let tensors = &self.plan().groups[group].tensors;
        if versions.displaced.contains(&(group as u32)) {
            return vec![Layout::Whole(HOST); tensors.len()];
        }
        let types = |index: usize| versions.current[index].version.ty;
        self.device_layouts(group, types)
    }

    /// Layouts of the tensors of a group on the devices where they belong.
    fn device_layouts(&self, group: usize, ty: impl Fn(usize) -> &'static TypeInfo) -> Vec<Layout> {
        let plan = self.plan();
        let members = plan.groups[group].tensors.iter().map(|&index| Member {
            target: plan.targets[index],
            ty: ty(index),
            ne: &self.tensors[index].original.ne,
            rows: plan.rows[index],
        });
        self.placement.layouts(&members.collect::<Vec<_>>())
    }

    /// The bytes of a tensor where the process can read them without a copy: in its
    /// host buffer if it has one, else in the mapping of its file.
    ///
    /// They stay valid and unchanged until a reload replaces the tensor; hold a
    /// [`Context`]'s evaluation to keep reloads away. Bytes in the mapping also
    /// change when somebody writes the file in place.
    pub fn host_bytes(&self, view: &TensorView) -> Option<*const [u8]> {
        let bytes = match view.version().placed() {
            // In parts, it is nowhere as a whole.
            Some(placed) => placed.host()?,
            None => match &view.version().home {
                Home::File { file, offset, .. } => {
                    let source = &self.files[*file].gguf.source;
                    source.mapped(*offset, view.version().nbytes)?
                }
                Home::Private { .. } => return None,
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
    pub fn metadata(&self) -> &[KeyValue] {
        &self.files[0].gguf.header.keys
    }

    /// A metadata key by name.
    pub fn key(&self, name: &[u8]) -> Option<&KeyValue> {
        self.files[0].gguf.header.key(name)
    }

    /// Reads the metadata value of `key`, one of [`Model::metadata`]'s.
    pub fn value(&self, key: &KeyValue) -> Result<Value> {
        let file = &self.files[0].gguf;
        file.value(key)
            .map_err(|source| self.read_error(0, key, source))
    }

    /// Reads elements `from..` of an array, at most `limit`.
    pub fn elements(&self, key: &KeyValue, from: u64, limit: u64) -> Result<Vec<Value>> {
        let file = &self.files[0].gguf;
        file.elements(key, from, limit)
            .map_err(|source| self.read_error(0, key, source))
    }

    /// Reads an array of strings.
    pub fn strings(&self, key: &KeyValue) -> Result<Strings> {
        let file = &self.files[0].gguf;
        file.strings(key)
            .map_err(|source| self.read_error(0, key, source))
    }

    fn read_error(&self, file: usize, key: &KeyValue, source: std::io::Error) -> Error {
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
