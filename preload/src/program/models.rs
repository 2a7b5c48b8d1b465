//! The models that the program loaded: their files, and the tensors made from them.
//!
//! A model is complete when a graph reads one of its tensors; until then it is one of
//! [`loads`]. A model is removed when the program frees any of its memory.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::ffi::{CStr, CString};
use std::ops::Range;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU64, Ordering};
use std::time::Instant;

use once_cell::sync::OnceCell;
use parking_lot::{Mutex, RwLock};
use sidecar_core::config::Config;
use sidecar_core::experts::ExpertName;
use sidecar_core::gguf::TensorInfo;
use sidecar_core::protocol::Event;
use sidecar_core::reload::{Cause, Engine, TrackedFile};
use sidecar_core::text;

use crate::ggml::{
    self, Buffer, BufferType, Descriptor, Device, Ggml, OwnBuffer, Tensor, TensorStruct,
};
use crate::loader::reach::Unreached;
use crate::process::journal;
use crate::process::maps::{Listed, Maps};
use crate::process::memory::Memory;
use crate::program::barrier::{self, ModelSet};
use crate::program::graph::UsedWeight;
use crate::program::groups::Groups;
use crate::program::loads::{self, Load};
use crate::program::own_hotswap::OwnHotSwap;
use crate::program::pool::Pool;

/// A reload that failed, and since when.
#[derive(Debug, Clone)]
pub struct Blocked {
    /// The cause.
    pub cause: Cause,
    /// The message.
    pub error: String,
    /// When the reload failed first.
    pub since: Instant,
    /// How often it was tried.
    pub attempts: u64,
}

/// A model that the program loaded.
pub struct Model {
    /// Its number, from 1.
    pub number: u64,
    /// The copy of ggml that holds it.
    pub ggml: &'static Ggml,
    /// The path that it was loaded from: its only file, or its first shard.
    pub path: PathBuf,
    /// Its files that have tensors.
    pub files: Vec<TrackedFile>,
    /// The tensors of its files that the program has.
    pub tensors: Vec<ModelTensor>,
    /// Reloads it.
    pub engine: Engine,
    /// Whether the program uses special buffer types of the CPU for its tensors, once known.
    pub special_types: OnceCell<bool>,
    /// Names of the tensors that were kept out of special buffer types: [`loads::note_kept_out`].
    pub kept_out: BTreeSet<CString>,
    /// Whether the program listed the special buffer types of the CPU as it loaded the model.
    pub lists_special_types: bool,
    /// The name of a weight that the program merged with others or converted to another type as
    /// it loaded it (ik_llama.cpp, options `-mqkv`, `-muge` and `-rtr`).
    pub altered: Option<CString>,
    /// The name of a tensor that may belong to this model or to another one.
    pub unclear: Option<CString>,
    /// The hot-swap that the program has of its own, if the drop-in's is on.
    pub own_hotswap: Option<OwnHotSwap>,
    /// Why capabilities are unsafe in this program.
    pub unreached: Unreached,
    /// Whether the program may have another version of a file than the one whose header was read here.
    pub is_replaced: bool,
    /// How the kernel lists its files; `None` where that is not known.
    listed: Vec<Option<Listed>>,
    /// Why hot-swap cannot write to its devices, in a ggml without functions for devices.
    out_of_reach: Option<&'static str>,
    /// Whether the end of each of its buffers is watched.
    is_watched: bool,
    /// Set once its memory is found to be another than that which was registered.
    lost: OnceCell<()>,
    /// The name of what a graph reads in memory for weights although no file has it: perhaps a copy
    /// of weights, which a swap would not change.
    unknown: OnceCell<CString>,
    /// The devices that evaluate it, the CPU last.
    pub devices: Vec<DevicePointer>,
    /// False after the program freed any of its memory.
    alive: AtomicBool,
    /// Which of its tensors are placed together.
    pub groups: Groups,
    /// Buffers of replaced tensors.
    pub pool: Pool,
    /// Held while its tensors are read, staged and replaced.
    pub reloading: Mutex<()>,
    /// The failure of the last reload, until one succeeds.
    pub blocked: Mutex<Option<Blocked>>,
}

/// A device of ggml; it lives as long as the process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DevicePointer(pub *mut Device);

// SAFETY: devices are static objects that any thread may use.
unsafe impl Send for DevicePointer {}
// SAFETY: as above.
unsafe impl Sync for DevicePointer {}

/// A tensor of a file, and all tensors of the program that were loaded from it.
pub struct ModelTensor {
    /// Index of its file.
    pub file: usize,
    /// Its index in the header.
    pub info: usize,
    /// The tensors of the program; several when the program loaded the matrix that input and
    /// output share twice. If it loaded that matrix once, the second is a [copy].
    ///
    /// [copy]: Instance::is_copy
    pub instances: Vec<Instance>,
}

/// One tensor of the program.
pub struct Instance {
    /// Its struct in the program, or `own`.
    pub tensor: TensorPointer,
    /// Its struct, if the program has none: [`Instance::is_copy`].
    own: Option<TensorStruct>,
    /// The descriptor that the program loaded it with.
    pub original: Descriptor,
    /// The type of the buffer that the program loaded it into.
    pub original_buffer_type: BufferTypePointer,
    /// Whether the program loaded it in the mapping of its file.
    pub mapped: bool,
    /// Whether it has weights of routed experts, by its name.
    pub has_experts: bool,
    /// The operation that reads it: [`Instance::op`].
    op: AtomicI32,
    /// An operation that reads it and takes few types: [`Instance::bound_to_type`].
    bound_to_type: AtomicI32,
    /// Whether rows are read from it and it is multiplied: input and output share it, and there
    /// is no [copy](Instance::is_copy).
    shared: AtomicBool,
    /// Whether a graph had a view of it.
    viewed: AtomicBool,
    /// Whether the program keeps another tensor that is a view of it.
    kept_view: AtomicBool,
    /// Experts per token of the operation that reads it: [`Instance::experts_used`].
    experts_used: AtomicU64,
    /// Its buffer, if the drop-in allocated it.
    pub private: Mutex<Option<OwnBuffer>>,
}

/// Address of a tensor of the program.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TensorPointer(pub *mut Tensor);

// SAFETY: only dereferenced while no evaluation runs and the model is alive.
unsafe impl Send for TensorPointer {}
// SAFETY: as above.
unsafe impl Sync for TensorPointer {}

/// A buffer type of ggml; it lives as long as the process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BufferTypePointer(pub *mut BufferType);

// SAFETY: buffer types are static objects that any thread may use.
unsafe impl Send for BufferTypePointer {}
// SAFETY: as above.
unsafe impl Sync for BufferTypePointer {}

/// Registered tensors by address: the model, the index of the tensor, and the index of the
/// instance.
type Index = HashMap<usize, (Arc<Model>, usize, usize)>;

/// Why nothing is swapped in a model.
const LOST: &str = "its memory is not that which the program loaded: the program freed it by a call that the drop-in does not see; report it with the version of the program";

/// Why nothing is swapped or streamed in a model.
const REPLACED: &str = "one of its files was replaced while the program loaded it, and which of both the program has is not known: start the program again";

/// Why nothing is swapped now.
const UNCHECKED: &str = "whether the program still has the memory that it loaded is not known: /proc/self/maps cannot be read, or neither /proc/self/mem nor process_vm_readv is permitted; mount /proc, or raise the limit of open files (ulimit -n)";

/// The models that the program has loaded.
struct Registered {
    models: RwLock<Vec<Arc<Model>>>,
    index: RwLock<Option<Index>>,
    /// The tensors of [`Instance::is_copy`].
    copies: RwLock<Vec<TensorPointer>>,
    /// The number of the next model.
    next: AtomicU64,
}

/// Whether tokens use more experts of a model than before.
static MORE_EXPERTS_USED: AtomicBool = AtomicBool::new(false);

static REGISTERED: Registered = Registered {
    models: RwLock::new(Vec::new()),
    index: RwLock::new(None),
    copies: RwLock::new(Vec::new()),
    next: AtomicU64::new(1),
};
impl Model {
    /// Returns the set of this model.
    pub fn as_set(&self) -> ModelSet {
        ModelSet::of(self.number)
    }

    /// Whether the program loaded tensors of it on another machine.
    pub fn is_remote(&self) -> bool {
        let mut instances = self.tensors.iter().flat_map(|tensor| &tensor.instances);
        // SAFETY: buffer types of this copy, which are static.
        instances
            .any(|instance| unsafe { ggml::is_remote(self.ggml, instance.original_buffer_type.0) })
    }

    /// Whether the program still has the model.
    pub fn is_alive(&self) -> bool {
        self.alive.load(Ordering::SeqCst)
    }

    /// Returns the number of tensors that are in buffers of the drop-in.
    pub fn swapped(&self) -> usize {
        let is_swapped = |tensor: &&ModelTensor| {
            let mut instances = tensor.instances.iter();
            instances.any(|instance| !instance.is_copy() && instance.private.lock().is_some())
        };
        self.tensors.iter().filter(is_swapped).count()
    }

    /// Returns the bytes of its tensors as the program loaded them, by buffer type.
    pub fn loaded_by_type(&self) -> BTreeMap<String, u64> {
        let mut types: Vec<(*mut BufferType, u64)> = Vec::new();
        for tensor in &self.tensors {
            let bytes = self.info(tensor).nbytes;
            // Input and output can be two structs of the same bytes.
            let mut places = BTreeSet::new();
            let copies = tensor.instances.iter();
            let copies = copies.filter(|of| places.insert(of.original.data as usize));
            for buft in copies.map(|of| of.original_buffer_type.0) {
                match types.iter_mut().find(|(known, _)| *known == buft) {
                    Some((_, sum)) => *sum += bytes,
                    None => types.push((buft, bytes)),
                }
            }
        }
        let mut by_name = BTreeMap::new();
        for (buft, bytes) in types.into_iter().filter(|(buft, _)| !buft.is_null()) {
            *by_name.entry(self.ggml.buffer_type_name(buft)).or_default() += bytes;
        }
        by_name
    }

    /// Returns the bytes that its swapped tensors hold beside the model, by buffer type.
    pub fn private_by_type(&self) -> BTreeMap<String, u64> {
        let mut by_name = BTreeMap::new();
        for instance in self.tensors.iter().flat_map(|tensor| &tensor.instances) {
            if let Some(buffer) = &*instance.private.lock() {
                *by_name.entry(buffer.place()).or_default() += buffer.size();
            }
        }
        by_name
    }

    /// Returns the bytes that its swapped tensors hold beside the model.
    pub fn private_bytes(&self) -> u64 {
        let instances = self.tensors.iter().flat_map(|tensor| &tensor.instances);
        instances
            .filter_map(|instance| Some(instance.private.lock().as_ref()?.size()))
            .sum()
    }

    /// Returns why none of its tensors can be swapped, and the next step, if that is so.
    pub fn obstacle(&self) -> Option<String> {
        if let Some(name) = &self.altered {
            return Some(format!(
                "the program merged or repacked {name:?} as it loaded it: start it without -rtr, -mqkv and -muge"
            ));
        }
        if let Some(name) = &self.unclear {
            return Some(format!(
                "the program was loading several models at once, and {name:?} may belong to any of them: load one model after the other"
            ));
        }
        if self.is_replaced {
            return Some(REPLACED.into());
        }
        if self.lost.get().is_some() {
            return Some(LOST.into());
        }
        if let Some(unreached) = &self.unreached.hot_swap {
            return Some(unreached.clone());
        }
        if self.own_hotswap == Some(OwnHotSwap::MayBeCalled) {
            return Some(OwnHotSwap::MayBeCalled.sentence().into());
        }
        if let Some(name) = self.unknown.get() {
            return Some(format!(
                "the program computes with {name:?}, which no file has: it may be a copy of weights that a swap does not change; report it with the version of the program"
            ));
        }
        self.out_of_reach.map(str::to_owned)
    }

    /// Returns why nothing may be written to it or read from it, if so: its tensors, their buffers and the mappings of its
    /// files are not those that were registered, because a call that freed them did not arrive.
    pub fn check(&self) -> Result<(), &'static str> {
        // Streaming places memory of its own over the mapping.
        let is_mapped = |maps: &Maps, tensor: &ModelTensor, instance: &Instance| {
            let data = instance.original.data;
            let (file, listed) = (
                &self.files[tensor.file].gguf,
                self.listed[tensor.file].as_ref(),
            );
            maps.is_of_listed(data, file, listed) || maps.is_shared_memory(data as usize)
        };
        let is_there = |maps: &Maps, tensor: &ModelTensor| {
            let mut instances = tensor.instances.iter();
            instances.all(|instance| !instance.mapped || is_mapped(maps, tensor, instance))
        };
        let are_there = |maps: &Maps| self.tensors.iter().all(|of| is_there(maps, of));
        let all = (0..self.tensors.len()).flat_map(|tensor| {
            let instances = 0..self.tensors[tensor].instances.len();
            instances.map(move |instance| (tensor, instance))
        });
        match Maps::any_list(are_there) {
            Some(true) => self.check_tensors(Memory::open().as_ref(), all),
            Some(false) => self.is_lost(),
            None => Err(UNCHECKED),
        }
    }

    /// The same for some of its tensors and their buffers: an index of a tensor and of an instance. Makes a system call a
    /// tensor, and one a buffer.
    pub fn check_tensors(
        &self,
        memory: Option<&Memory>,
        mut instances: impl Iterator<Item = (usize, usize)>,
    ) -> Result<(), &'static str> {
        let (ggml, layout) = (self.ggml, &self.ggml.layout);
        let mut watched = std::ptr::null_mut();
        let mut is_same = |memory: &Memory, (tensor, number): (usize, usize)| {
            let instance = &self.tensors[tensor].instances[number];
            let Some((buffer, extents)) = layout.read_placed(memory, instance.tensor.0) else {
                return false;
            };
            // Instances can share a buffer of the drop-in, which one of them has.
            let is_private = || {
                let mut instances = self.tensors[tensor].instances.iter();
                instances.any(|of| {
                    let private = of.private.lock();
                    private.as_ref().is_some_and(|of| of.address() == buffer)
                })
            };
            let original = instance.original.buffer;
            let is_watched = !self.is_watched
                || original == std::mem::replace(&mut watched, original)
                || ggml.is_watched(memory, original);
            (buffer == original as usize || is_private())
                && extents == *self.ne(tensor)
                && is_watched
        };
        let Some(memory) = memory else {
            return Err(UNCHECKED);
        };
        match instances.all(|of| is_same(memory, of)) {
            true => Ok(()),
            false => self.is_lost(),
        }
    }

    fn is_lost(&self) -> Result<(), &'static str> {
        let had_obstacle = self.obstacle().is_some();
        if self.lost.set(()).is_ok() && !had_obstacle {
            self.report_obstacle();
        }
        Err(LOST)
    }

    /// Records the name of what a graph reads in memory for weights although no file has it.
    pub fn note_unknown(&self, name: &CStr) {
        let had_obstacle = self.obstacle().is_some();
        if self.unknown.set(name.to_owned()).is_ok() && !had_obstacle {
            self.report_obstacle();
        }
    }

    /// Logs why none of its tensors can be swapped, if that is so and hot-swap is on. Returns whether
    /// it is.
    fn report_obstacle(&self) -> bool {
        let obstacle = match Config::get().hotswap {
            true => self.obstacle(),
            false => None,
        };
        if let Some(obstacle) = &obstacle {
            let path = text::path(&self.path);
            log::warn!("{path}: hot-swap stays off: {obstacle}");
            journal::note_once(|| Event::HotSwapObstacle {
                path: path.clone(),
                obstacle: obstacle.clone(),
            });
        }
        obstacle.is_some()
    }

    /// Returns the experts that a token uses in each layer by the graphs that read its experts: options of a program replace
    /// the number of the file.
    pub fn experts_used(&self) -> BTreeMap<u32, u64> {
        let mut by_layer = BTreeMap::new();
        for (at, tensor) in self.tensors.iter().enumerate() {
            let of_name = self.name(at).to_str().ok().and_then(ExpertName::parse);
            let used = tensor.instances.iter().map(Instance::experts_used).max();
            if let (Some(name), Some(used @ 1..)) = (of_name, used) {
                by_layer.insert(name.layer, used);
            }
        }
        by_layer
    }

    /// Returns the shape of a tensor.
    pub fn ne(&self, tensor: usize) -> &[u64; 4] {
        let tensor = &self.tensors[tensor];
        &self.files[tensor.file].gguf.header.tensors[tensor.info].ne
    }

    /// Returns what the header of its file has of a tensor.
    pub fn info(&self, tensor: &ModelTensor) -> &TensorInfo {
        &self.files[tensor.file].gguf.header.tensors[tensor.info]
    }

    /// Returns the name of a tensor.
    pub fn name(&self, tensor: usize) -> &CStr {
        let tensor = &self.tensors[tensor];
        let header = &self.files[tensor.file].gguf.header;
        header.name(&header.tensors[tensor.info])
    }
}

impl Instance {
    /// Returns an instance that no graph was seen to read.
    fn new(tensor: TensorPointer, original: Descriptor, buft: *mut BufferType) -> Instance {
        Instance {
            tensor,
            own: None,
            original,
            original_buffer_type: BufferTypePointer(buft),
            mapped: false,
            has_experts: false,
            op: AtomicI32::new(0),
            bound_to_type: AtomicI32::new(0),
            shared: AtomicBool::new(false),
            viewed: AtomicBool::new(false),
            kept_view: AtomicBool::new(false),
            experts_used: AtomicU64::new(0),
            private: Mutex::new(None),
        }
    }

    /// Returns a copy of it that matrix products read; see [`Instance::is_copy`].
    fn for_products(&self, ggml: &Ggml) -> Instance {
        // SAFETY: the program has loaded the tensor and not freed it.
        let mut own = unsafe { ggml.copy_struct(self.tensor.0) };
        let tensor = TensorPointer(own.tensor());
        Instance {
            own: Some(own),
            mapped: self.mapped,
            ..Instance::new(tensor, self.original, self.original_buffer_type.0)
        }
    }

    /// Whether the drop-in made its struct. llama.cpp loads a matrix that input and output share
    /// twice, if products and look-ups of rows need different buffer types. Where one type was
    /// enough, products read a copy of the struct: after a swap it can be in a buffer of its own.
    pub fn is_copy(&self) -> bool {
        self.own.is_some()
    }

    /// Returns the operation that reads it, by ggml's number; `None` before a graph reads it.
    pub fn op(&self) -> Option<i32> {
        match self.op.load(Ordering::Relaxed) {
            0 => None,
            op => Some(op),
        }
    }

    /// Returns the experts that a token uses by the graphs that read it; 0 before a graph reads it.
    pub fn experts_used(&self) -> u64 {
        self.experts_used.load(Ordering::Relaxed)
    }

    /// Returns an operation that reads it and is neither a matrix product nor a look-up of
    /// rows, by ggml's number. The kernels of such operations support few types, and backends
    /// do not report which.
    pub fn bound_to_type(&self) -> Option<i32> {
        match self.bound_to_type.load(Ordering::Relaxed) {
            0 => None,
            op => Some(op),
        }
    }

    /// Whether a graph had a view of it. A switch does not change the views of a kept graph.
    pub fn is_viewed(&self) -> bool {
        self.viewed.load(Ordering::SeqCst)
    }

    /// Whether the program keeps another tensor that is a view of it. A switch does not
    /// change such a view.
    pub fn has_kept_view(&self) -> bool {
        self.kept_view.load(Ordering::Relaxed)
    }

    /// Whether rows are read from it and it is multiplied, as products read no copy of it.
    pub fn is_shared(&self) -> bool {
        self.shared.load(Ordering::Relaxed)
    }
}

/// Returns all models, in the order in which they were first evaluated.
pub fn models() -> Vec<Arc<Model>> {
    REGISTERED.models.read().clone()
}

/// Returns all models. Fails where there is none, with the reason.
pub fn loaded() -> Result<Vec<Arc<Model>>, String> {
    let models = models();
    match (models.is_empty(), REGISTERED.next.load(Ordering::Relaxed)) {
        (false, _) => Ok(models),
        (true, 1) => Err("no model is loaded yet: repeat this after the first evaluation".into()),
        (true, _) => Err("no model is loaded: the program released it, and with it masks and swapped tensors; let the program load it again, with a request for text, and repeat this".into()),
    }
}

/// Returns a fast check that is true for all registered tensors, and for few others.
pub fn may_be_registered() -> impl Fn(*mut Tensor) -> bool {
    let (addresses, copies) = (loads::addresses(), REGISTERED.copies.read().clone());
    move |tensor| addresses.contains(&(tensor as usize)) || copies.contains(&TensorPointer(tensor))
}

/// Whether a tensor was loaded from a file.
pub fn is_registered(tensor: *mut Tensor) -> bool {
    let index = REGISTERED.index.read();
    index
        .as_ref()
        .is_some_and(|index| index.contains_key(&(tensor as usize)))
}

/// Whether a tensor was loaded from a file, or is being loaded from one.
pub fn is_loaded(tensor: *mut Tensor) -> bool {
    is_registered(tensor) || loads::is_recorded(tensor)
}

/// What a graph reads.
#[derive(Default)]
pub struct Found {
    /// The models.
    pub reads: ModelSet,
    /// Those of them that are complete since now.
    pub complete: Vec<Arc<Model>>,
    /// Tensors at addresses among those of weights that were loaded from no file.
    pub others: Vec<*mut Tensor>,
}

/// Looks up the weights that a graph reads, and lets its products read the copies of weights. A
/// model that was being loaded is complete when a graph reads one of its tensors.
///
/// # Safety
///
/// The graph is live, and not yet split and allocated.
pub unsafe fn find_in_graph(devices: &[*mut Device], weights: &mut [UsedWeight]) -> Found {
    let mut complete = Vec::new();
    loop {
        // SAFETY: as the caller ensures.
        let (reads, unknown) = unsafe { note_uses(weights) };
        let Some(load) = loads::take(&unknown) else {
            return Found {
                reads,
                complete,
                others: unknown,
            };
        };
        // Once more: uses of the new tensors are noted now, and further models found.
        complete.push(register(load, devices, weights));
    }
}

/// Notes how a graph uses registered tensors. Returns the models that it reads, and the
/// tensors that are not registered.
///
/// # Safety
///
/// As for [`find_in_graph`].
unsafe fn note_uses(weights: &mut [UsedWeight]) -> (ModelSet, Vec<*mut Tensor>) {
    let mut unknown = Vec::new();
    let mut reads = ModelSet::default();
    let index = REGISTERED.index.read();
    for weight in weights {
        let known = index
            .as_ref()
            .and_then(|i| i.get(&(weight.tensor as usize)));
        match known {
            Some((model, tensor, instance)) => {
                reads.extend(model.as_set());
                let instances = &model.tensors[*tensor].instances;
                // SAFETY: as the caller ensures.
                let instance = match unsafe { read_copy(model, instances, weight) } {
                    true => instances.len() - 1,
                    false => *instance,
                };
                note_use(model, *tensor, instance, weight);
            }
            None => unknown.push(weight.tensor),
        }
    }
    (reads, unknown)
}

/// Lets a matrix product read the copy of its weight, if there is one; returns whether it does.
///
/// # Safety
///
/// As for [`find_in_graph`].
unsafe fn read_copy(model: &Model, instances: &[Instance], weight: &mut UsedWeight) -> bool {
    let layout = &model.ggml.layout;
    let Some(copy) = instances.last().filter(|last| last.is_copy()) else {
        return false;
    };
    if weight.op != model.ggml.ops.mul_mat {
        return false;
    }
    // SAFETY: a live node, whose first source is the weight; the copy lives as long as the
    // model, and has the bytes of the weight.
    unsafe {
        if layout.read::<*mut Tensor>(weight.node, layout.src) != weight.tensor {
            return false;
        }
        layout.write(weight.node, layout.src, copy.tensor.0);
    }
    weight.tensor = copy.tensor.0;
    true
}

/// Records that a graph has a view of this tensor, which the calling thread is about to allocate. Returns
/// whether it is the first.
pub fn note_view(tensor: *mut Tensor) -> bool {
    let mut is_first = false;
    with_instance(tensor, |of| {
        is_first = !of.viewed.swap(true, Ordering::SeqCst);
        if let Some(buffer) = &*of.private.lock() {
            // A buffer of several devices forgets tensors with the views that an earlier graph had.
            // SAFETY: evaluations of the model wait for each other, and this thread begins one.
            unsafe { buffer.enter(of.tensor.0) };
        }
    });
    is_first
}

/// Records that the program keeps a tensor that is a view of this one.
pub fn note_kept_view(tensor: *mut Tensor) {
    with_instance(tensor, |of| of.kept_view.store(true, Ordering::Relaxed));
}

fn with_instance(tensor: *mut Tensor, work: impl FnOnce(&Instance)) {
    if let Some(index) = REGISTERED.index.read().as_ref()
        && let Some((model, tensor, instance)) = index.get(&(tensor as usize))
    {
        work(&model.tensors[*tensor].instances[*instance]);
    }
}

/// Returns the model of a tensor, and the index of the tensor in the model.
pub fn find(tensor: *mut Tensor) -> Option<(Arc<Model>, usize)> {
    let index = REGISTERED.index.read();
    let (model, tensor, _) = index.as_ref()?.get(&(tensor as usize))?;
    Some((model.clone(), *tensor))
}

/// Returns whether tokens use more experts of a model than before, once.
pub fn take_more_experts_used() -> bool {
    let flag = &MORE_EXPERTS_USED;
    flag.load(Ordering::Relaxed) && flag.swap(false, Ordering::Relaxed)
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
    // llama.cpp placed a matrix that is both looked up and multiplied for the look-up.
    if known != get_rows {
        instance.op.store(weight.op, Ordering::Relaxed);
    }
    if !weight.ids.is_null() {
        let layout = &model.ggml.layout;
        // SAFETY: the ids and the weight are live tensors of the graph.
        let [used, experts] = unsafe {
            let experts = layout.read::<[i64; 4]>(weight.tensor, layout.ne)[2];
            [layout.read(weight.ids, layout.ne), experts].map(|of: i64| of.max(0) as u64)
        };
        // A warm-up routes to all experts, and follows the graph that libllama reserves memory with. Of
        // several contexts, the one that uses most experts counts.
        let before = instance.experts_used();
        if before == 0 || used < experts && (before == experts || used > before) {
            instance.experts_used.store(used, Ordering::Relaxed);
            if before != 0 && before != experts {
                MORE_EXPERTS_USED.store(true, Ordering::Relaxed);
            }
        }
    }
}

/// Copies matrices in memory of the process that a graph both looks up and multiplies.
fn copy_shared(ggml: &'static Ggml, tensors: &mut [ModelTensor], weights: &[UsedWeight]) {
    let read_by = |op| -> HashSet<*mut Tensor> {
        let used = weights.iter().filter(|weight| weight.op == op);
        used.map(|weight| weight.tensor).collect()
    };
    let (looked_up, multiplied) = (read_by(ggml.ops.get_rows), read_by(ggml.ops.mul_mat));
    for tensor in tensors {
        let [only] = tensor.instances.as_slice() else {
            continue;
        };
        let read = only.tensor.0;
        // SAFETY: the buffer of a tensor that the program has loaded.
        let is_host = unsafe { (ggml.f.ggml_backend_buffer_is_host)(only.original.buffer) };
        if is_host && looked_up.contains(&read) && multiplied.contains(&read) {
            let copy = only.for_products(ggml);
            REGISTERED.copies.write().push(copy.tensor);
            tensor.instances.push(copy);
        }
    }
}

/// Returns why hot-swap cannot write to some of these tensors, and the next step, if their ggml has no functions for devices.
fn out_of_reach(
    ggml: &Ggml,
    tensors: &[ModelTensor],
    devices: &[*mut Device],
) -> Option<&'static str> {
    if !devices.iter().any(|&device| ggml::is_other(device)) {
        return None;
    }
    let instances = || tensors.iter().flat_map(|tensor| &tensor.instances);
    // SAFETY: buffer types of this copy, which are static.
    let is_remote = |of: &Instance| unsafe { ggml::is_remote(ggml, of.original_buffer_type.0) };
    if instances().any(is_remote) {
        return Some(
            "the program's ggml has no functions for devices of other machines: keep the model on this machine",
        );
    }
    // This field lists the parts of a matrix.
    let is_split = |of: &Instance| !of.original.extra.is_null();
    instances().any(is_split).then_some(
        "the program splits matrices over several GPUs, and its ggml has no functions for the parts: start it with -sm layer",
    )
}

fn register(load: Load, devices: &[*mut Device], weights: &[UsedWeight]) -> Arc<Model> {
    let ggml = load.ggml;
    let (maps, listed) = Maps::with(&load.files);
    let mut replaced = load.replaced;
    let mut altered = load.altered;
    let mut tensors: Vec<ModelTensor> = Vec::new();
    let mut by_place: HashMap<(usize, usize), usize> = HashMap::new();
    for placed in load.tensors {
        let (tensor, file, info) = (placed.tensor as *mut Tensor, placed.file, placed.info);
        let (tensor, buffer) = (TensorPointer(tensor), placed.buffer as *mut Buffer);
        // SAFETY: the program has loaded the model and not freed it; the functions only read.
        let (original, buft, is_host) = unsafe {
            (
                ggml.descriptor(tensor.0),
                (ggml.f.ggml_backend_buffer_get_type)(buffer),
                (ggml.f.ggml_backend_buffer_is_host)(buffer),
            )
        };
        let header = &load.files[file].header;
        let name = header.name(&header.tensors[info]);
        if original.ty as u32 != header.tensors[info].ty.id {
            // The program converted it: the bytes to replace it with are unknown.
            altered.get_or_insert_with(|| name.to_owned());
            continue;
        }
        let (source, listed) = (&load.files[file], listed[file].as_ref());
        let mapped = is_host && maps.is_of_listed(original.data, source, listed);
        if mapped {
            // The version whose header was read here.
            replaced.retain(|path| path != source.source.path());
        } else if is_host && maps.is_of(original.data, source) {
            replaced.push(source.source.path().to_owned());
        }
        let name = name.to_str().ok();
        let has_experts = name.and_then(ExpertName::parse).is_some();
        let at = *by_place.entry((file, info)).or_insert_with(|| {
            tensors.push(ModelTensor {
                file,
                info,
                instances: Vec::new(),
            });
            tensors.len() - 1
        });
        tensors[at].instances.push(Instance {
            mapped,
            has_experts,
            ..Instance::new(tensor, original, buft)
        });
    }
    let own_hotswap = match Config::get().hotswap {
        true => OwnHotSwap::find(),
        false => None,
    };
    if Config::get().hotswap {
        copy_shared(ggml, &mut tensors, weights);
    }
    let files: Vec<TrackedFile> = load.files.into_iter().map(TrackedFile::new).collect();
    let places = tensors.iter().map(|tensor| (tensor.file, tensor.info));
    let engine = Engine::new(&files, places, Config::get().staging_bytes);
    let names = tensors.iter().map(|tensor| {
        let header = &files[tensor.file].gguf.header;
        let name = header.name(&header.tensors[tensor.info]);
        name.to_str().unwrap_or_default()
    });
    let groups = Groups::of(names);
    let memory = Memory::open();
    let is_watched = memory.is_some_and(|memory| {
        let mut instances = tensors.iter().flat_map(|tensor| &tensor.instances);
        instances.all(|instance| ggml.is_watched(&memory, instance.original.buffer))
    });
    let out_of_reach = out_of_reach(ggml, &tensors, devices);
    // SAFETY: devices live as long as the process.
    let has_gpu = devices
        .iter()
        .any(|&device| unsafe { !ggml.is_cpu(device) });
    let mut unreached = Unreached::of(load.caller, has_gpu, is_watched);
    let is_replaced = !replaced.is_empty();
    if is_replaced {
        unreached.streaming.get_or_insert_with(|| REPLACED.into());
    }
    let model = Arc::new(Model {
        number: REGISTERED.next.fetch_add(1, Ordering::Relaxed),
        ggml,
        path: load.path,
        files,
        tensors,
        engine,
        special_types: OnceCell::new(),
        kept_out: load.kept_out,
        lists_special_types: load.lists_special_types,
        altered,
        unclear: load.unclear,
        own_hotswap,
        unreached,
        is_replaced,
        listed,
        out_of_reach,
        is_watched,
        lost: OnceCell::new(),
        unknown: OnceCell::new(),
        devices: devices
            .iter()
            .map(|&device| DevicePointer(device))
            .collect(),
        alive: AtomicBool::new(true),
        groups,
        pool: Pool::default(),
        reloading: Mutex::new(()),
        blocked: Mutex::new(None),
    });
    {
        let mut index = REGISTERED.index.write();
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
        text::path(model.files[0].gguf.source.path())
    );
    if !model.report_obstacle()
        && let Some(own) = own_hotswap
    {
        log::warn!("{}: {}", text::path(&model.path), own.sentence());
    }
    REGISTERED.models.write().push(model.clone());
    model
}

/// Forgets the models that use a buffer, which is about to be freed; returns them.
pub fn buffer_freed(buffer: *mut Buffer) -> Vec<Arc<Model>> {
    loads::buffer_freed(buffer);
    remove(|instance| instance.original.buffer == buffer)
}

/// Forgets the models that have a tensor at this address, which is given memory: their memory was freed by a call that
/// did not arrive. Returns them.
pub fn tensor_placed(tensor: *mut Tensor) -> Vec<Arc<Model>> {
    match is_registered(tensor) {
        true => remove(|instance| instance.tensor.0 == tensor),
        false => Vec::new(),
    }
}

/// Forgets the models that have tensors at these addresses, whose memory is about to be
/// freed; returns them.
pub fn tensors_freed(range: &Range<usize>) -> Vec<Arc<Model>> {
    let known = loads::addresses();
    if known.start >= range.end || range.start >= known.end {
        return Vec::new();
    }
    loads::tensors_freed(range);
    remove(|instance| range.contains(&(instance.tensor.0 as usize)))
}

/// Removes the models of which any instance fulfils a condition; returns them.
fn remove(gone: impl Fn(&Instance) -> bool) -> Vec<Arc<Model>> {
    let dead: Vec<Arc<Model>> = models()
        .into_iter()
        .filter(|model| model.tensors.iter().flat_map(|t| &t.instances).any(&gone))
        .collect();
    for model in &dead {
        {
            let _no_switch = barrier::hold();
            model.alive.store(false, Ordering::SeqCst);
        }
        REGISTERED
            .models
            .write()
            .retain(|other| other.number != model.number);
        let instances = model.tensors.iter().flat_map(|tensor| &tensor.instances);
        let gone: Vec<_> = instances.map(|instance| instance.tensor).collect();
        REGISTERED
            .copies
            .write()
            .retain(|copy| !gone.contains(copy));
        if let Some(index) = REGISTERED.index.write().as_mut() {
            index.retain(|_, (other, ..)| other.number != model.number);
        }
        log::info!(
            "the program freed the model of {}",
            text::path(model.files[0].gguf.source.path())
        );
    }
    dead
}
