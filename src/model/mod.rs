//! An open model: its tensors, where they are, and how they are loaded and reloaded.
//!
//! Opening a model reads headers only. The bytes of a tensor can be used in place, through the
//! mapping of its file, or loaded into a buffer on its device: one tensor at a time, or all
//! tensors together in a few allocations.
//!
//! Modules, top to bottom:
//!
//! | module | contents |
//! |---|---|
//! | `load`, `swap`, `borrowed` | tensors from their file into buffers; the store of the reload engine; tensors of the program |
//! | `tensor` | versions of a tensor, and views of them |
//! | `resident` | the bytes of a tensor on devices |
//! | `context` | evaluation contexts |
//! | `copy`, `placement` | the bytes of a tensor into its parts; tensors to devices |
//! | `split` | a tensor in parts for several devices |
//! | `listeners`, `quiesce` | callbacks of contexts; switches while no evaluation runs |

mod borrowed;
mod context;
mod copy;
mod listeners;
mod load;
mod placement;
mod quiesce;
mod resident;
mod split;
mod swap;
mod tensor;

use std::collections::HashSet;
use std::ffi::CStr;
use std::path::Path;
use std::sync::Arc;

use once_cell::sync::OnceCell;
use parking_lot::RwLock;

use crate::device::{Device, HostDevice};
use sidecar_core::error::{Error, Result};
use sidecar_core::experts::ExpertIndex;
use sidecar_core::gguf::{self, Access, GgufFile, KeyValue, Strings, TensorInfo, TypeInfo, Value};
use sidecar_core::reload::{Engine, Pauses, TrackedFile};

pub use borrowed::BorrowedTensor;
pub use context::Context;
pub use load::{LoadReport, Progress};
pub use placement::{HOST, Layout, Placement};
pub use quiesce::Evaluation;
pub use split::Axis;
pub use tensor::{PartView, State, TensorView};

use placement::{Assignment, Group, GroupMember};
use quiesce::EvalBarrier;
use tensor::{Storage, Version};

/// Options of [`Model::open`].
#[derive(Debug, Clone)]
pub struct Options {
    /// How the bytes of files are read.
    pub access: Access,
    /// Whether changed files can be reloaded.
    pub hotswap: bool,
    /// Devices the model can use; the first is the memory of the process.
    pub devices: Vec<Arc<dyn Device>>,
    /// Which device each tensor is assigned to.
    pub placement: Placement,
    /// The most bytes that a reload stages before it switches; 0 for no limit. A larger reload
    /// is done in steps, each consistent.
    pub staging_bytes: u64,
}

impl Options {
    /// Returns options for a model that is mapped, with host memory as its only device.
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
///
/// # Examples
///
/// Opens a model and loads one of its tensors:
///
/// ```
/// use llama_sidecar::model::{Model, Options};
///
/// # use testkit::writer::{F32, Gguf};
/// # let folder = tempfile::tempdir()?;
/// # let path = folder.path().join("model.gguf");
/// # let file = Gguf::default().tensor("token_embd.weight", &[64, 32], F32, 1);
/// # file.write(&path)?;
/// // Reads the header only.
/// let model = Model::open(&path, Options::host())?;
/// let index = model.find(c"token_embd.weight").expect("the file has this tensor");
/// let view = model.tensor(index);
/// assert_eq!((view.ty().name(), view.nbytes()), ("f32", 64 * 32 * 4));
/// assert_eq!(view.placed(), None, "not loaded yet");
///
/// // Reads this tensor into a buffer on its device, here host memory.
/// let view = model.load(index)?;
/// assert!(view.placed().is_some());
/// let mut bytes = vec![0; view.nbytes() as usize];
/// model.read(index, 0, &mut bytes)?;
/// # assert_eq!(bytes, file.tensors[0].data);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct Model {
    files: Vec<TrackedFile>,
    tensors: Vec<Tensor>,
    /// First tensor of each file.
    first_of_file: Vec<usize>,
    versions: RwLock<Versions>,
    devices: Vec<Arc<dyn Device>>,
    placement: Placement,
    /// Made at the first use, so that opening a model stays fast.
    group_layout: OnceCell<GroupLayout>,
    /// Made at the first use, as the layout of groups.
    experts: OnceCell<ExpertIndex>,
    barrier: EvalBarrier,
    listeners: listeners::Listeners,
    reload: Option<Engine>,
}

/// The part of a tensor that never changes.
#[derive(Debug)]
struct Tensor {
    file: u32,
    info: u32,
    original: Arc<Version>,
}

/// How tensors are laid out, as far as it follows from the placement and their names.
#[derive(Debug)]
struct GroupLayout {
    /// The assignment of each tensor.
    assignments: Vec<Assignment>,
    /// Rows of one slice of each tensor.
    rows: Vec<u64>,
    groups: Vec<Group>,
    /// The group of each tensor.
    group_of: Vec<u32>,
}

/// The versions in use. A reload changes them all at once.
#[derive(Debug)]
struct Versions {
    current: Vec<Current>,
    /// Groups that are in host memory because a device was out of memory.
    displaced: HashSet<u32>,
    /// How many switches changed tensors.
    generation: u64,
}

#[derive(Debug)]
struct Current {
    version: Arc<Version>,
    /// How often the tensor changed.
    generation: u64,
}

impl Model {
    /// Returns the files of the model, in the order of the shards.
    pub fn gguf_files(&self) -> impl Iterator<Item = &GgufFile> {
        self.files.iter().map(|file| &file.gguf)
    }

    /// Opens the model that `path` belongs to: a GGUF file, or any shard of a model.
    pub fn open(path: &Path, options: Options) -> Result<Model> {
        options.placement.check(&options.devices)?;
        let files = gguf::open_model(path, options.access)?;
        Ok(Model::of_files(files, options, |file, _, info| {
            Version::in_file(info, file)
        }))
    }

    /// Makes a model of files whose tensors have these versions: each by its file, its index there and its description.
    fn of_files(
        files: Vec<GgufFile>,
        options: Options,
        version: impl Fn(usize, usize, &TensorInfo) -> Version,
    ) -> Model {
        let mut tensors = Vec::new();
        let mut current = Vec::new();
        let mut first_of_file = Vec::with_capacity(files.len());
        for (file_index, file) in files.iter().enumerate() {
            first_of_file.push(tensors.len());
            for (info_index, info) in file.header.tensors.iter().enumerate() {
                let original = Arc::new(version(file_index, info_index, info));
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
            group_layout: OnceCell::new(),
            experts: OnceCell::new(),
            barrier: EvalBarrier::default(),
            listeners: listeners::Listeners::default(),
            reload: None,
        };
        if options.hotswap {
            let tensors = model.tensors.iter();
            let places = tensors.map(|tensor| (tensor.file as usize, tensor.info as usize));
            model.reload = Some(Engine::new(&model.files, places, options.staging_bytes));
        }
        model
    }

    /// Returns the number of tensors.
    pub fn tensor_count(&self) -> usize {
        self.tensors.len()
    }

    /// Returns the name of a tensor.
    ///
    /// # Panics
    ///
    /// When there is no tensor of this index.
    pub fn name(&self, index: usize) -> &CStr {
        let tensor = &self.tensors[index];
        let header = &self.files[tensor.file as usize].gguf.header;
        header.name(&header.tensors[tensor.info as usize])
    }

    /// Returns the index of the tensor with this name.
    pub fn find(&self, name: &CStr) -> Option<usize> {
        let firsts = self.first_of_file.iter();
        firsts
            .zip(&self.files)
            .find_map(|(first, file)| Some(first + file.gguf.header.find(name)?))
    }

    /// Returns a view of a tensor as it is now.
    ///
    /// # Panics
    ///
    /// When there is no tensor of this index.
    pub fn tensor(&self, index: usize) -> TensorView {
        let (version, generation, displaced) = {
            let versions = self.versions.read();
            let current = &versions.current[index];
            let displaced = !versions.displaced.is_empty()
                && versions
                    .displaced
                    .contains(&self.group_layout().group_of[index]);
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

    /// Returns the layout that a tensor has over devices, or will have after it is loaded.
    ///
    /// # Panics
    ///
    /// When there is no tensor of this index.
    pub fn planned_layout(&self, index: usize) -> Layout {
        self.layout(&self.versions.read(), index)
    }

    /// Returns the model's expert tensors, as its files have them.
    pub fn experts(&self) -> &ExpertIndex {
        let index = || ExpertIndex::of(self.gguf_files());
        self.experts.get_or_init(index)
    }

    fn group_layout(&self) -> &GroupLayout {
        self.group_layout.get_or_init(|| {
            let (mut assignments, mut rows, mut experts) = (Vec::new(), Vec::new(), Vec::new());
            let mut names = vec![None; self.tensors.len()];
            for expert in self.experts().tensors() {
                names[expert.tensor] = Some(expert.name);
            }
            for (index, tensor) in self.tensors.iter().enumerate() {
                let (name, ne) = (self.name(index).to_string_lossy(), tensor.original.ne);
                let expert = names[index];
                assignments.push(self.placement.assignment(&name, expert, &ne));
                rows.push(placement::slice_rows(expert, &ne));
                experts.push((expert, ne));
            }
            let (groups, group_of) = placement::groups(experts.into_iter());
            GroupLayout {
                assignments,
                rows,
                groups,
                group_of,
            }
        })
    }

    fn layout(&self, versions: &Versions, index: usize) -> Layout {
        let group = self.group_layout().group_of[index] as usize;
        let tensors = &self.group_layout().groups[group].tensors;
        let at = tensors
            .binary_search(&index)
            .expect("a tensor is in its group");
        self.group_layouts(versions, group).swap_remove(at)
    }

    /// Returns the layouts of the tensors of a group, for the types that the tensors have now.
    fn group_layouts(&self, versions: &Versions, group: usize) -> Vec<Layout> {
        let tensors = &self.group_layout().groups[group].tensors;
        if versions.displaced.contains(&(group as u32)) {
            return vec![Layout::Whole(HOST); tensors.len()];
        }
        let types = |index: usize| versions.current[index].version.ty;
        self.device_layouts(group, types)
    }

    /// Returns the layouts of the tensors of a group on their assigned devices.
    fn device_layouts(&self, group: usize, ty: impl Fn(usize) -> &'static TypeInfo) -> Vec<Layout> {
        let layout = self.group_layout();
        let members = layout.groups[group]
            .tensors
            .iter()
            .map(|&index| GroupMember {
                assignment: layout.assignments[index],
                ty: ty(index),
                ne: &self.tensors[index].original.ne,
                rows: layout.rows[index],
            });
        self.placement.layouts(&members.collect::<Vec<_>>())
    }

    /// Returns the bytes of a tensor if the process can read them without a copy: in a host
    /// buffer, or in the mapping of the file.
    ///
    /// The bytes stay valid and unchanged until a reload replaces the tensor; begin an
    /// evaluation of a [`Context`] to keep reloads away. Bytes in the mapping also change when a
    /// program writes the file in place.
    pub fn host_bytes(&self, view: &TensorView) -> Option<*const [u8]> {
        let bytes = match view.version().resident() {
            // A split tensor is nowhere as a whole.
            Some(resident) => resident.host()?,
            None => match &view.version().storage {
                Storage::File { file, offset, .. } => {
                    let source = &self.files[*file].gguf.source;
                    source.mapped(*offset, view.version().nbytes)?
                }
                Storage::Private { .. } => return None,
            },
        };
        Some(bytes)
    }

    /// Returns whether the bytes of a tensor are used in place: through the mapping of its file.
    ///
    /// # Panics
    ///
    /// When there is no tensor of this index.
    pub fn is_in_place(&self, index: usize) -> bool {
        let versions = self.versions.read();
        let version = &versions.current[index].version;
        let Storage::File { file, offset, .. } = &version.storage else {
            return false;
        };
        let source = &self.files[*file].gguf.source;
        version.resident().is_none() && source.mapped(*offset, version.nbytes).is_some()
    }

    /// Returns the path of a file.
    pub fn file_path(&self, file: usize) -> &Path {
        self.files[file].gguf.source.path()
    }

    /// Returns the number of files.
    pub fn file_count(&self) -> usize {
        self.files.len()
    }

    /// Returns the size of all files together, in bytes.
    pub fn file_bytes(&self) -> u64 {
        self.files
            .iter()
            .map(|file| file.gguf.source.id().size)
            .sum()
    }

    /// Returns the format version of the first file.
    pub fn gguf_version(&self) -> u32 {
        self.files[0].gguf.header.version
    }

    /// Returns the devices of the model, by index.
    pub fn devices(&self) -> &[Arc<dyn Device>] {
        &self.devices
    }

    /// Returns the number of switches that changed tensors.
    pub fn generation(&self) -> u64 {
        self.versions.read().generation
    }

    /// Returns how long evaluations waited for switches.
    pub fn pauses(&self) -> Pauses {
        self.barrier.pauses()
    }

    /// Returns the metadata: the key-values of the first file.
    pub fn metadata(&self) -> &[KeyValue] {
        &self.files[0].gguf.header.keys
    }

    /// Returns the metadata key of this name.
    pub fn key(&self, name: &[u8]) -> Option<&KeyValue> {
        self.files[0].gguf.header.key(name)
    }

    /// Reads the value of `key`, which is one of [`Model::metadata`].
    pub fn value(&self, key: &KeyValue) -> Result<Value> {
        let file = &self.files[0].gguf;
        file.value(key)
            .map_err(|source| self.read_error(0, key, source))
    }

    /// Reads at most `limit` elements of an array, from index `from` on.
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

    /// Returns the name of a tensor for a message.
    fn quoted(&self, index: usize) -> String {
        format!("tensor '{}'", self.name(index).to_string_lossy())
    }

    fn current(&self, index: usize) -> Arc<Version> {
        self.versions.read().current[index].version.clone()
    }
}
