//! Which files a host loaded, and which of its tensors came out of them.
//!
//! llama.cpp opens the files of a model, makes its tensors and gives them memory on
//! one thread, one model at a time. So a tensor that gets memory on a thread belongs
//! to the files that the thread opened last, if one of them has a tensor of its name
//! and shape. A model is complete when a graph reads one of its tensors; until then
//! it may still be loading and is left alone. It is gone when the host frees any of
//! its memory.

use std::cell::Cell;
use std::collections::HashMap;
use std::ffi::{CStr, c_void};
use std::ops::Range;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicI64, AtomicU64, AtomicUsize, Ordering};
use std::thread::ThreadId;
use std::time::Duration;

use llama_sidecar::config::Config;
use llama_sidecar::experts::ExpertIndex;
use llama_sidecar::gguf::{Access, GgufFile};
use llama_sidecar::reload::{Engine, TrackedFile};
use once_cell::sync::OnceCell;
use parking_lot::{Mutex, RwLock};
use serde_json::json;

use crate::evaluations::UsedWeight;
use crate::gate;
use crate::ggml::{Buffer, BufferType, Descriptor, Device, Ggml, OwnBuffer, Tensor};
use crate::journal;
use crate::service;
use crate::tracing::{ModelTrace, Routed};

/// Some of the models, by number: a set that may hold more than was put in.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct ModelSet(u64);

impl ModelSet {
    /// From what [`ModelSet::bits`] gave.
    pub const fn from_bits(bits: u64) -> ModelSet {
        ModelSet(bits)
    }

    /// To be kept in an atomic.
    pub const fn bits(self) -> u64 {
        self.0
    }

    /// Whether both have a model in common; models whose numbers differ by a multiple of 64
    /// count as one.
    pub const fn overlaps(self, other: ModelSet) -> bool {
        self.0 & other.0 != 0
    }
}

/// A model that the host has loaded.
pub struct Model {
    /// Tells models apart.
    pub number: u64,
    /// The copy of ggml that holds it.
    pub ggml: &'static Ggml,
    /// Its files.
    pub files: Vec<TrackedFile>,
    /// Those of its tensors that the host has.
    pub tensors: Vec<HostTensor>,
    /// What brings it up to date.
    pub engine: Engine,
    /// What is counted of its experts.
    pub trace: Option<Arc<ModelTrace>>,
    /// Whether the host puts its tensors into special buffer types of the CPU, once known.
    pub special_types: OnceCell<bool>,
    /// The devices that evaluate it, the CPU last.
    pub devices: Vec<DevicePointer>,
    /// False once the host has freed any of its memory.
    alive: AtomicBool,
    /// Held while tensors of it are read, staged and replaced.
    pub reloading: Mutex<()>,
}

/// A device of ggml; it lives as long as the process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DevicePointer(pub *mut Device);

// SAFETY: devices are static objects that any thread may ask.
unsafe impl Send for DevicePointer {}
// SAFETY: as above.
unsafe impl Sync for DevicePointer {}

/// A tensor of a file, and all tensors of the host that were loaded from it.
pub struct HostTensor {
    /// Index of its file.
    pub file: usize,
    /// Its place in the header.
    pub info: usize,
    /// llama.cpp makes several of one when input and output share a matrix.
    pub instances: Vec<Instance>,
}

/// One tensor of the host.
pub struct Instance {
    /// The host's struct.
    pub tensor: TensorPointer,
    /// Where its bytes were at first.
    pub original: Descriptor,
    /// The type of its first buffer.
    pub original_buffer_type: BufferTypePointer,
    /// Whether its bytes were those of the mapped file.
    pub mapped: bool,
    /// The operation that reads it: [`Instance::op`].
    op: AtomicI32,
    /// An operation that reads it and takes few types: [`Instance::bound_to_type`].
    bound_to_type: AtomicI32,
    /// Whether it is looked up and multiplied: input and output share it.
    shared: AtomicBool,
    /// Whether the host keeps another tensor that is a view of it.
    viewed: AtomicBool,
    /// Experts used per token by the operation that reads it.
    pub experts_used: AtomicI64,
    /// The buffer it is in, when that is ours.
    pub private: Mutex<Option<OwnBuffer>>,
}

/// A tensor of the host.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TensorPointer(pub *mut Tensor);

// SAFETY: only followed while the gate is closed and the model alive.
unsafe impl Send for TensorPointer {}
// SAFETY: as above.
unsafe impl Sync for TensorPointer {}

/// A buffer type of ggml; it lives as long as the process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BufferTypePointer(pub *mut BufferType);

// SAFETY: buffer types are static objects that any thread may ask.
unsafe impl Send for BufferTypePointer {}
// SAFETY: as above.
unsafe impl Sync for BufferTypePointer {}

/// How long a host that frees a model waits for a reload of it to notice: as long as one
/// tensor may take to be read.
const LONGEST_STEP: Duration = Duration::from_secs(10);

/// A model that is being loaded.
struct Load {
    thread: ThreadId,
    ggml: &'static Ggml,
    files: Vec<GgufFile>,
    /// Each tensor with its buffer, its file and its place in the header.
    tensors: Vec<(TensorPointer, usize, usize, usize)>,
}

static LOADS: Mutex<Vec<Load>> = Mutex::new(Vec::new());
static MODELS: RwLock<Vec<Arc<Model>>> = RwLock::new(Vec::new());
/// Every registered tensor by its address: its model, and which instance of which
/// tensor it is.
type Index = HashMap<usize, (Arc<Model>, usize, usize)>;
static INDEX: RwLock<Option<Index>> = RwLock::new(None);
/// Addresses of all tensors that were ever registered.
static LOWEST: AtomicUsize = AtomicUsize::new(usize::MAX);
static HIGHEST: AtomicUsize = AtomicUsize::new(0);

thread_local! {
    /// Whether this thread loads a model.
    static LOADING: Cell<bool> = const { Cell::new(false) };
    /// Set on a thread that opened a file.
    static OPENER: Opener = const { Opener };
}

/// Forgets, at the end of a thread, files that it opened for their metadata alone.
struct Opener;

impl Drop for Opener {
    fn drop(&mut self) {
        let thread = std::thread::current().id();
        LOADS
            .lock()
            .retain(|load| load.thread != thread || !load.tensors.is_empty());
    }
}

impl Model {
    /// The set of this model alone.
    pub fn as_set(&self) -> ModelSet {
        ModelSet(1 << (self.number % 64))
    }

    /// Whether the host still has all of it.
    pub fn is_alive(&self) -> bool {
        self.alive.load(Ordering::SeqCst)
    }

    /// Bytes that its swapped tensors hold beside it.
    pub fn private_bytes(&self) -> u64 {
        let instances = self.tensors.iter().flat_map(|tensor| &tensor.instances);
        instances
            .filter_map(|instance| Some(instance.private.lock().as_ref()?.size()))
            .sum()
    }

    /// Name of a tensor.
    pub fn name(&self, tensor: usize) -> &CStr {
        let tensor = &self.tensors[tensor];
        let header = &self.files[tensor.file].gguf.header;
        header.name(&header.tensors[tensor.info])
    }
}

impl Instance {
    /// The operation that reads it, by ggml's number; `None` while no graph showed it.
    pub fn op(&self) -> Option<i32> {
        match self.op.load(Ordering::Relaxed) {
            0 => None,
            op => Some(op),
        }
    }

    /// An operation that reads it and is no matrix product and no look-up of rows, by ggml's
    /// number. The kernels of such operations take few types, and backends do not say which.
    pub fn bound_to_type(&self) -> Option<i32> {
        match self.bound_to_type.load(Ordering::Relaxed) {
            0 => None,
            op => Some(op),
        }
    }

    /// Whether the host keeps another tensor that is a view of it, and that a switch
    /// would leave behind.
    pub fn is_viewed(&self) -> bool {
        self.viewed.load(Ordering::Relaxed)
    }

    /// Whether it is both looked up and multiplied.
    pub fn is_shared(&self) -> bool {
        self.shared.load(Ordering::Relaxed)
    }
}

/// All models, in the order in which they were first evaluated.
pub fn models() -> Vec<Arc<Model>> {
    MODELS.read().clone()
}

/// Whether any file was opened so far.
pub fn is_empty() -> bool {
    !ANY.load(Ordering::Relaxed)
}

static ANY: AtomicBool = AtomicBool::new(false);

/// Addresses between which all registered tensors are.
pub fn addresses() -> Range<usize> {
    LOWEST.load(Ordering::Relaxed)..HIGHEST.load(Ordering::Relaxed)
}

/// Whether a tensor is one that was loaded from a file.
pub fn is_registered(tensor: *mut Tensor) -> bool {
    let index = INDEX.read();
    index
        .as_ref()
        .is_some_and(|index| index.contains_key(&(tensor as usize)))
}

/// The host has opened a GGUF file on this thread.
pub fn file_opened(ggml: &'static Ggml, path: &Path) {
    let gguf = match GgufFile::open(path, Access::Read) {
        Ok(gguf) => gguf,
        Err(error) => {
            log::warn!("the host opened a file that is not watched: {error}");
            return;
        }
    };
    let thread = std::thread::current().id();
    let mut loads = LOADS.lock();
    // Tensors have memory already: this file is of the next model.
    let mut current = loads
        .iter_mut()
        .find(|load| load.thread == thread && load.tensors.is_empty());
    // A file that is not a further shard begins a model: what was opened before was read for
    // its metadata alone, or to fit this model to a device.
    if let Some(load) = &mut current
        && !gguf.is_further_shard()
    {
        load.files.clear();
    }
    if gguf.header.tensors.is_empty() {
        return;
    }
    journal::note("opened", || json!({"path": path.display().to_string()}));
    match current {
        Some(load) => {
            load.files.retain(|file| file.source.path() != path);
            load.files.push(gguf);
        }
        None => {
            loads.push(Load {
                thread,
                ggml,
                files: vec![gguf],
                tensors: Vec::new(),
            });
        }
    }
    ANY.store(true, Ordering::Relaxed);
    LOADING.set(true);
    // A thread that is ending already keeps nothing.
    let _ = OPENER.try_with(|_| ());
}

/// Whether tensors that get memory on this thread may be weights.
pub fn is_loading() -> bool {
    LOADING.get()
}

/// A tensor has got memory on this thread.
///
/// # Safety
///
/// A live tensor of this copy of ggml that has a name.
pub unsafe fn tensor_placed(ggml: &'static Ggml, tensor: *mut Tensor, buffer: *mut Buffer) {
    // SAFETY: as the caller vouches.
    let (name, ne) = unsafe {
        let name = CStr::from_ptr((ggml.f.ggml_get_name)(tensor));
        let ne: [i64; 4] = ggml.layout.read(tensor, ggml.layout.ne);
        (name, ne.map(|extent| extent as u64))
    };
    let thread = std::thread::current().id();
    let mut loads = LOADS.lock();
    let Some(load) = loads.iter_mut().rev().find(|load| load.thread == thread) else {
        LOADING.set(false);
        return;
    };
    for (file, gguf) in load.files.iter().enumerate().rev() {
        let Some(info) = gguf.header.find(name) else {
            continue;
        };
        if gguf.header.tensors[info].ne != ne {
            continue;
        }
        load.tensors
            .push((TensorPointer(tensor), buffer as usize, file, info));
        LOWEST.fetch_min(tensor as usize, Ordering::Relaxed);
        HIGHEST.fetch_max(tensor as usize + 1, Ordering::Relaxed);
        return;
    }
}

/// A graph reads these tensors. Models whose tensors show up for the first time are
/// complete. Returns the models that the graph reads.
pub fn found_in_graph(devices: &[*mut Device], weights: &[UsedWeight]) -> ModelSet {
    let mut unknown = Vec::new();
    let mut reads = ModelSet::default();
    {
        let index = INDEX.read();
        for weight in weights {
            let known = index
                .as_ref()
                .and_then(|i| i.get(&(weight.tensor as usize)));
            match known {
                Some((model, tensor, instance)) => {
                    reads.0 |= model.as_set().0;
                    note_use(model, *tensor, *instance, weight);
                }
                None => unknown.push(weight.tensor),
            }
        }
    }
    if unknown.is_empty() {
        return reads;
    }
    let mut loads = LOADS.lock();
    let first = unknown.iter().find_map(|&weight| {
        let has = |load: &Load| load.tensors.iter().any(|(tensor, ..)| tensor.0 == weight);
        loads.iter().position(has)
    });
    let Some(complete) = first else {
        return reads;
    };
    let load = loads.remove(complete);
    // What else the thread opened before was read for its metadata alone.
    loads.retain(|other| other.thread != load.thread || !other.tensors.is_empty());
    drop(loads);
    LOADING.set(false);
    register(load, devices);
    // Once more: uses of the new tensors are noted now, and further models found.
    found_in_graph(devices, weights)
}

/// The host keeps a tensor that is a view of this one.
pub fn note_view(tensor: *mut Tensor) {
    if let Some(index) = INDEX.read().as_ref()
        && let Some((model, tensor, instance)) = index.get(&(tensor as usize))
    {
        let instance = &model.tensors[*tensor].instances[*instance];
        instance.viewed.store(true, Ordering::Relaxed);
    }
}

/// Marks routed ids that are multiplied with this weight, so that they can be counted
/// after the evaluation; `None` when there is nothing to count.
///
/// # Safety
///
/// As for [`ModelTrace::keep_ids`].
pub unsafe fn keep_ids(weight: *mut Tensor, ids: *mut Tensor) -> Option<Routed> {
    let index = INDEX.read();
    let (model, tensor, _) = index.as_ref()?.get(&(weight as usize))?;
    let trace = model.trace.as_ref()?;
    let name = model.name(*tensor).to_str().ok()?;
    // SAFETY: as the caller vouches.
    unsafe { trace.keep_ids(model.ggml, name, ids) }
}

fn note_use(model: &Model, tensor: usize, instance: usize, weight: &UsedWeight) {
    let instance = &model.tensors[tensor].instances[instance];
    let ops = &model.ggml.ops;
    let get_rows = ops.get_rows;
    if ![get_rows, ops.mul_mat, ops.mul_mat_id].contains(&weight.op) {
        instance.bound_to_type.store(weight.op, Ordering::Relaxed);
    }
    let known = instance.op.load(Ordering::Relaxed);
    if known != 0 && known != weight.op && (known == get_rows || weight.op == get_rows) {
        instance.shared.store(true, Ordering::Relaxed);
    }
    // A matrix that is looked up and multiplied was placed for being looked up.
    if known != get_rows {
        instance.op.store(weight.op, Ordering::Relaxed);
    }
    if !weight.ids.is_null() {
        let layout = &model.ggml.layout;
        // SAFETY: the ids are a live tensor of the graph that is looked at.
        let used: i64 = unsafe { layout.read(weight.ids, layout.ne) };
        instance.experts_used.store(used, Ordering::Relaxed);
    }
}

fn register(load: Load, devices: &[*mut Device]) {
    static NEXT: AtomicU64 = AtomicU64::new(1);
    let ggml = load.ggml;
    let maps = Maps::read();
    let mut tensors: Vec<HostTensor> = Vec::new();
    let mut by_place: HashMap<(usize, usize), usize> = HashMap::new();
    for (tensor, buffer, file, info) in load.tensors {
        let buffer = buffer as *mut Buffer;
        // SAFETY: the host has loaded the model and not freed it, which takes the
        // gate; the functions only read.
        let (original, buft, is_host) = unsafe {
            (
                ggml.descriptor(tensor.0),
                (ggml.f.ggml_backend_buffer_get_type)(buffer),
                (ggml.f.ggml_backend_buffer_is_host)(buffer),
            )
        };
        if original.ty as u32 != load.files[file].header.tensors[info].ty.id {
            // The host converted it: there is no telling what to put in its place.
            continue;
        }
        let mapped = is_host && maps.is_of(original.data, &load.files[file]);
        let at = *by_place.entry((file, info)).or_insert_with(|| {
            tensors.push(HostTensor {
                file,
                info,
                instances: Vec::new(),
            });
            tensors.len() - 1
        });
        tensors[at].instances.push(Instance {
            tensor,
            original,
            original_buffer_type: BufferTypePointer(buft),
            mapped,
            op: AtomicI32::new(0),
            bound_to_type: AtomicI32::new(0),
            shared: AtomicBool::new(false),
            viewed: AtomicBool::new(false),
            experts_used: AtomicI64::new(1),
            private: Mutex::new(None),
        });
    }
    let trace = ModelTrace::of(&load.files);
    let files: Vec<TrackedFile> = load.files.into_iter().map(TrackedFile::new).collect();
    let places = tensors.iter().map(|tensor| (tensor.file, tensor.info));
    let engine = Engine::new(&files, places, Config::get().staging_bytes);
    let model = Arc::new(Model {
        number: NEXT.fetch_add(1, Ordering::Relaxed),
        ggml,
        files,
        tensors,
        engine,
        trace,
        special_types: OnceCell::new(),
        devices: devices
            .iter()
            .map(|&device| DevicePointer(device))
            .collect(),
        alive: AtomicBool::new(true),
        reloading: Mutex::new(()),
    });
    {
        let mut index = INDEX.write();
        let index = index.get_or_insert_default();
        for (at, tensor) in model.tensors.iter().enumerate() {
            for (number, instance) in tensor.instances.iter().enumerate() {
                index.insert(instance.tensor.0 as usize, (model.clone(), at, number));
            }
        }
    }
    log::info!(
        "watching {} tensors of {} file(s), the first is {}",
        model.tensors.len(),
        model.files.len(),
        model.files[0].gguf.source.path().display()
    );
    MODELS.write().push(model.clone());
    service::start();
    journal::note("model", || {
        let files = model.files.iter().map(|file| &file.gguf);
        json!({
            "path": model.files[0].gguf.source.path().display().to_string(),
            "files": model.files.len(),
            "tensors": model.tensors.len(),
            "expert_layers": ExpertIndex::of(files).layers().count(),
        })
    });
}

/// The host is about to free a buffer.
pub fn buffer_freed(buffer: *mut Buffer) {
    remove(|instance| instance.original.buffer == buffer);
    let mut loads = LOADS.lock();
    loads.retain(|load| load.tensors.iter().all(|t| t.1 != buffer as usize));
}

/// The host is about to free the memory of tensors.
pub fn tensors_freed(range: &Range<usize>) {
    let known = addresses();
    if known.start >= range.end || range.start >= known.end {
        return;
    }
    remove(|instance| range.contains(&(instance.tensor.0 as usize)));
    let mut loads = LOADS.lock();
    loads.retain(|load| {
        let tensors = load.tensors.iter();
        tensors
            .map(|t| t.0.0 as usize)
            .all(|at| !range.contains(&at))
    });
}

/// Removes the models of which any instance answers to a condition.
fn remove(gone: impl Fn(&Instance) -> bool) {
    let dead: Vec<Arc<Model>> = models()
        .into_iter()
        .filter(|model| model.tensors.iter().flat_map(|t| &t.instances).any(&gone))
        .collect();
    for model in dead {
        {
            let _closed = gate::closed();
            model.alive.store(false, Ordering::SeqCst);
        }
        MODELS.write().retain(|other| other.number != model.number);
        if let Some(index) = INDEX.write().as_mut() {
            index.retain(|_, (other, ..)| other.number != model.number);
        }
        // Here and not where the last reference goes: the host may unload its backends
        // next. A reload that runs notices between two tensors, and frees what it staged.
        gate::changed();
        let _none_runs = model.reloading.try_lock_for(LONGEST_STEP);
        for instance in model.tensors.iter().flat_map(|tensor| &tensor.instances) {
            *instance.private.lock() = None;
        }
        log::info!(
            "the host freed the model of {}",
            model.files[0].gguf.source.path().display()
        );
    }
}

/// Files that are mapped into this process.
struct Maps(Vec<(Range<usize>, u64, Vec<u8>)>);

impl Maps {
    /// Reads them from `/proc/self/maps` (proc_pid_maps(5)).
    fn read() -> Maps {
        let text = std::fs::read("/proc/self/maps").unwrap_or_default();
        let line = |line: &[u8]| {
            let fields: Vec<&[u8]> = line.splitn(6, |&byte| byte == b' ').collect();
            let text = |at: usize| std::str::from_utf8(fields.get(at)?).ok();
            let (start, end) = text(0)?.split_once('-')?;
            let address = |text: &str| usize::from_str_radix(text, 16).ok();
            let inode = text(4)?.parse().ok()?;
            let path = fields.get(5)?.trim_ascii().to_vec();
            Some((address(start)?..address(end)?, inode, path))
        };
        Maps(text.split(|&byte| byte == b'\n').filter_map(line).collect())
    }

    /// Whether an address lies in the mapping of a file. Some file systems show
    /// another device there than `stat` does, so the path tells in the end.
    fn is_of(&self, address: *mut c_void, file: &GgufFile) -> bool {
        let found = self
            .0
            .iter()
            .find(|map| map.0.contains(&(address as usize)));
        found.is_some_and(|(_, inode, path)| {
            let source = &file.source;
            let same_path = std::fs::canonicalize(source.path())
                .is_ok_and(|real| real.as_os_str().as_bytes() == path.as_slice());
            *inode == source.id().ino || same_path
        })
    }
}
