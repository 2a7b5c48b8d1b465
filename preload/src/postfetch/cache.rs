//! Experts that stay on a device: slots for each layer, and the change of a product that reads
//! them.
//!
//! The scheduler's copy of a matrix has memory for all experts, and the ids of the graph count
//! experts. A product that reads slots gets, only while its part of the graph is submitted, the
//! tensor of the slots in place of the copy, and ids that count slots. So everything that the
//! scheduler reads stays as it made it.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Once;
use std::time::Duration;

use sidecar_core::config::{CacheSize, Config, Misses};
use sidecar_core::experts::ExpertName;
use sidecar_core::fetch::{ExpertCache, LayerBudget, Load, share};
use sidecar_core::protocol::{CacheLayer, Event};
use sidecar_core::trace::{self, Ids, Snapshot};

use super::choice::{Choice, Method};
use super::figures::FIGURES;
use super::instance::Scratch;
use super::speeds::{self, Speeds};
use super::transfer::Piece;
use crate::ggml::{Backend, Buffer, Descriptor, Device, Ggml, I32, OwnBuffer, OwnContext, Tensor};
use crate::process::journal;
use crate::program::graph::GraphReads;
use crate::program::models::{self, TensorPointer};

/// Memory that is left to the program at least.
const RESERVE: u64 = 512 << 20;
/// Bytes behind the ids, which kernels may read in blocks.
const IDS_PADDING: usize = 512;

/// The slots of a matrix.
struct Role {
    /// The matrix in host memory.
    weight: TensorPointer,
    ty: i32,
    /// The bytes of an expert.
    expert_bytes: usize,
    /// The tensor of the slots.
    tensor: TensorPointer,
    memory: OwnBuffer,
}

/// The slots of a layer.
pub struct LayerCache {
    model: u64,
    layer: u32,
    experts: ExpertCache,
    roles: Vec<Role>,
    ids: Scratch,
    /// What the last look-up loads.
    loads: Vec<Load>,
    /// The slots of the ids of the last look-up.
    slots: Vec<i32>,
}

/// The slots of the layers of a scheduler.
pub struct Cache {
    layers: Vec<LayerCache>,
    /// The device of the slots.
    device: usize,
    speeds: Option<Speeds>,
    /// The time of the idle link that was too short for an expert.
    link_time: Duration,
    /// What computes misses, by batch size.
    choices: BTreeMap<usize, Choice>,
}

// SAFETY: ggml ties no memory to a thread; the device is compared only.
unsafe impl Send for LayerCache {}

/// A matrix that is read by expert.
struct Matrix {
    tensor: *mut Tensor,
    ty: i32,
    ne: [i64; 4],
    expert_bytes: usize,
}

/// Records why no experts stay on a device.
pub fn note_obstacle(obstacle: String) {
    FIGURES.note_obstacle(obstacle.clone());
    journal::note_once(|| Event::ExpertCache {
        slots: 0,
        bytes: 0,
        link_speed: 0.0,
        memory_speed: 0.0,
        on_cpu: false,
        obstacle: Some(obstacle),
    });
}

impl Cache {
    /// Makes slots for the expert matrices in host memory that a graph reads; `None` where there
    /// are none.
    ///
    /// # Safety
    ///
    /// A live graph of this copy that is not split, and a live device.
    pub unsafe fn new(
        ggml: &'static Ggml,
        device: *mut Device,
        reads: &GraphReads,
        size: CacheSize,
    ) -> Option<Cache> {
        // SAFETY: as the caller ensures.
        let (matrices, used) = unsafe { matrices(ggml, reads) };
        let trace = Config::get().program_postfetch.cache_trace.as_deref();
        let trace = trace.and_then(read_trace);
        if matrices.is_empty() {
            return None;
        }
        let budgets: Vec<LayerBudget> = matrices
            .iter()
            .map(|((_, layer), matrices)| budget(*layer, matrices, trace.as_ref()))
            .collect();
        let whole = |of: &Matrix| of.expert_bytes as u64 * of.ne[2] as u64;
        let largest = matrices.values().map(|of| of.iter().map(whole).sum());
        let largest: u64 = largest.max().unwrap_or(0);
        let mut limit = match size {
            // The scheduler may allocate a layer's matrices once more.
            CacheSize::Auto => ggml.free_memory(device)?.saturating_sub(RESERVE + largest),
            CacheSize::Bytes(bytes) => bytes,
        };
        while let Some(slots) = share(limit, used, &budgets) {
            // SAFETY: as the caller ensures.
            let layers = unsafe { allocate(ggml, device, &matrices, &slots) };
            let Some(layers) = layers else {
                limit = limit / 4 * 3;
                continue;
            };
            let mut cache = Cache {
                layers,
                device: device as usize,
                speeds: None,
                link_time: Duration::ZERO,
                choices: BTreeMap::new(),
            };
            let bytes = cache.bytes();
            FIGURES.note_cache(bytes, cache.slots());
            for layer in &cache.layers {
                FIGURES.note_layer(CacheLayer {
                    slots: layer.experts.slots() as u64,
                    ..layer.figures()
                });
            }
            // SAFETY: as the caller ensures, and nothing uses the slots.
            cache.speeds = unsafe { cache.measure(ggml, &matrices) };
            let speeds = cache.speeds;
            static NOTED: Once = Once::new();
            let event = || Event::ExpertCache {
                slots: cache.slots() as u64,
                bytes,
                link_speed: speeds.map_or(0.0, |of| of.link),
                memory_speed: speeds.map_or(0.0, |of| of.memory),
                on_cpu: cache.first_method() == Method::OnCpu,
                obstacle: None,
            };
            NOTED.call_once(|| journal::note(event));
            if let Some(trace) = &trace {
                // SAFETY: as the caller ensures: the matrices are live, and nothing uses the slots.
                unsafe { cache.fill(ggml, trace) };
            }
            return Some(cache);
        }
        note_obstacle(format!(
            "no experts stay on the device: {} MiB do not hold the {used} experts of each layer that a token uses; set --expert-cache (LLAMA_POSTFETCH_CACHE_MB), or load fewer layers there",
            limit >> 20,
        ));
        None
    }

    /// Measures what decides whether slots are faster than the CPU.
    ///
    /// # Safety
    ///
    /// The matrices are live, and no other thread or queue uses the slots.
    unsafe fn measure(
        &self,
        ggml: &Ggml,
        matrices: &BTreeMap<(u64, u32), Vec<Matrix>>,
    ) -> Option<Speeds> {
        let role = self.layers.first()?.roles.first()?;
        let matrix = matrices.values().flatten().next()?;
        let bytes = matrix.expert_bytes * matrix.ne[2] as usize;
        // SAFETY: as the caller ensures; a matrix in host memory has the bytes of its experts.
        let speeds = unsafe {
            let data: usize = ggml.layout.read(matrix.tensor, ggml.layout.data);
            let matrix = std::slice::from_raw_parts(data as *const u8, bytes);
            speeds::measure(ggml, matrix, role.tensor.0)
        };
        FIGURES.note_speeds(speeds);
        Some(speeds)
    }

    /// Returns what computes misses before it was measured.
    fn first_method(&self) -> Method {
        // The CPU reads experts at the speed of memory at most.
        let is_cpu_faster = self.speeds.is_some_and(|of| of.memory > of.link);
        match Config::get().program_postfetch.cache_misses {
            Misses::Fetch => Method::Fetched,
            Misses::Auto if !is_cpu_faster => Method::Fetched,
            Misses::Cpu | Misses::Auto => Method::OnCpu,
        }
    }

    /// Returns what computes misses in the next graph for so many ids of a layer.
    pub fn method(&mut self, ids: usize) -> Method {
        let first = self.first_method();
        match Config::get().program_postfetch.cache_misses {
            Misses::Auto => {
                let choice = self.choices.entry(ids);
                choice.or_insert_with(|| Choice::new(first)).method()
            }
            _ => first,
        }
    }

    /// Records the time of an evaluation of such a graph. Returns whether another graph is wanted.
    pub fn evaluated(&mut self, ids: usize, method: Method, time: Duration) -> bool {
        let choice = self.choices.get_mut(&ids);
        choice.is_some_and(|choice| choice.evaluated(method, time))
    }

    /// Returns how many experts of a layer the idle link could have copied since this was last asked
    /// in the evaluation, which is so long ago. The rest of that time counts the next time, so that it
    /// is not always the same layers that get an expert.
    pub fn copied_in(&mut self, at: usize, time: Duration) -> usize {
        let bytes = self.layers[at].expert_bytes().max(1) as f64;
        self.link_time += time;
        let link = self.speeds.map_or(0.0, |of| of.link);
        let count = (self.link_time.as_secs_f64() * link / bytes).floor();
        if count >= 1.0 {
            let taken = Duration::try_from_secs_f64(count * bytes / link);
            self.link_time = self
                .link_time
                .saturating_sub(taken.unwrap_or(Duration::MAX));
        }
        count as usize
    }

    /// Copies the most used experts of a trace into free slots, and waits for the copies.
    ///
    /// # Safety
    ///
    /// The matrices are live, and no other thread or queue uses the slots.
    unsafe fn fill(&mut self, ggml: &Ggml, counted: &Snapshot) {
        for layer in &mut self.layers {
            let Some(traced) = counted.layers.iter().find(|of| of.layer == layer.layer) else {
                continue;
            };
            layer.loads = layer.experts.fill(trace::hottest(traced));
            for (role, of) in layer.roles.iter().enumerate() {
                let mut pieces = Vec::new();
                // SAFETY: as the caller ensures; pieces lie within matrix and slots.
                unsafe {
                    let address: usize = ggml.layout.read(of.weight.0, ggml.layout.data);
                    layer.pieces(role, address, &mut pieces);
                    for piece in pieces {
                        (ggml.f.ggml_backend_tensor_set)(
                            of.tensor.0,
                            piece.from as *const _,
                            piece.to.start,
                            piece.to.len(),
                        );
                    }
                }
            }
        }
    }

    /// Returns the memory of its slots.
    pub fn bytes(&self) -> u64 {
        let roles = self.layers.iter().flat_map(|layer| &layer.roles);
        roles.map(|role| role.memory.size()).sum()
    }

    /// Whether its slots are on a device.
    pub fn is_on(&self, device: *mut Device) -> bool {
        self.device == device as usize
    }

    /// Returns the number of slots of the layer that has the fewest.
    pub fn slots(&self) -> usize {
        let slots = self.layers.iter().map(|layer| layer.experts.slots());
        slots.min().unwrap_or(0)
    }

    /// Returns the number of slots of a layer.
    pub fn slots_of(&self, at: usize) -> usize {
        self.layers[at].experts.slots()
    }

    /// Counts uses of experts by a batch that has more than fit.
    pub fn note(&mut self, model: u64, layer: u32, ids: &Ids<'_>) {
        let is_of = |of: &&mut LayerCache| (of.model, of.layer) == (model, layer);
        if let Some(of_layer) = self.layers.iter_mut().find(is_of) {
            of_layer.experts.note(ids);
        }
    }

    /// Forgets what is in the slots.
    pub fn clear(&mut self) {
        for layer in &mut self.layers {
            layer.experts.clear();
        }
    }

    /// Returns the slots of a layer on a device, for matrices in this order.
    ///
    /// # Safety
    ///
    /// Live tensors of this copy.
    pub unsafe fn find(
        &self,
        ggml: &Ggml,
        device: *mut Device,
        (model, layer): (u64, u32),
        matrices: &[*mut Tensor],
    ) -> Option<usize> {
        let is_of = |of: &LayerCache| (of.model, of.layer) == (model, layer);
        let at = self.layers.iter().position(is_of)?;
        let roles = &self.layers[at].roles;
        let is_role = |(role, matrix): (&Role, &*mut Tensor)| {
            // SAFETY: as the caller ensures.
            let ty: i32 = unsafe { ggml.layout.read(*matrix, ggml.layout.ty) };
            (role.weight.0, role.ty) == (*matrix, ty)
        };
        let same = roles.len() == matrices.len() && roles.iter().zip(matrices).all(is_role);
        (same && self.is_on(device)).then_some(at)
    }

    /// Makes a tensor for the ids of a graph in the memory of a layer's ids.
    pub fn ids_tensor(
        &self,
        at: usize,
        used: i64,
        tokens: i64,
    ) -> Option<(OwnContext, *mut Tensor)> {
        self.layers[at].ids.tensor(I32, &[used, tokens, 1, 1])
    }

    /// Returns the tensor of the slots of a matrix.
    pub fn tensor(&self, at: usize, role: usize) -> *mut Tensor {
        self.layers[at].roles[role].tensor.0
    }

    /// Returns the slots of a layer.
    pub fn layer(&mut self, at: usize) -> &mut LayerCache {
        &mut self.layers[at]
    }
}

/// Returns the expert matrices in host memory by layer, and the most experts of a token.
///
/// # Safety
///
/// As for [`Cache::new`].
unsafe fn matrices(ggml: &Ggml, reads: &GraphReads) -> (BTreeMap<(u64, u32), Vec<Matrix>>, u32) {
    let layout = &ggml.layout;
    let mut found: BTreeMap<(u64, u32), Vec<Matrix>> = BTreeMap::new();
    let mut most_used = 0;
    for used in reads.weights.iter().filter(|of| !of.ids.is_null()) {
        // SAFETY: as the caller ensures.
        let (buffer, ty, ne, nb, ids) = unsafe {
            (
                layout.read::<*mut Buffer>(used.tensor, layout.buffer),
                layout.read(used.tensor, layout.ty),
                layout.read::<[i64; 4]>(used.tensor, layout.ne),
                layout.read::<[usize; 4]>(used.tensor, layout.nb),
                layout.read::<[i64; 4]>(used.ids, layout.ne),
            )
        };
        // SAFETY: a live buffer.
        if buffer.is_null() || unsafe { !(ggml.f.ggml_backend_buffer_is_host)(buffer) } {
            continue;
        }
        let Some((model, at)) = models::find(used.tensor) else {
            continue;
        };
        let name = model.name(at).to_str().ok().and_then(ExpertName::parse);
        let Some(name) = name.filter(|_| ne[2] > 0) else {
            continue;
        };
        most_used = most_used.max(u32::try_from(ids[0]).unwrap_or(0));
        let layer = found.entry((model.number, name.layer)).or_default();
        if layer.iter().all(|of| of.tensor != used.tensor) {
            layer.push(Matrix {
                tensor: used.tensor,
                ty,
                ne,
                expert_bytes: nb[2],
            });
        }
    }
    (found, most_used)
}

/// Reads a trace; logs why it is not used.
fn read_trace(path: &Path) -> Option<Snapshot> {
    let read = trace::read(path).inspect_err(|error| {
        log::error!(
            "--expert-cache-trace (LLAMA_POSTFETCH_CACHE_TRACE): {error}; the device begins without experts: write a trace with --expert-trace-output trace.json"
        );
    });
    Some(read.ok()?.1)
}

/// Returns what a layer needs of shared memory, and what it gains from it by a trace: how many
/// uses each further slot of an LRU makes hits or, in a trace that does not have this, how many
/// each further expert has.
fn budget(layer: u32, matrices: &[Matrix], trace: Option<&Snapshot>) -> LayerBudget {
    let experts = matrices.iter().map(|of| of.ne[2]).min().unwrap_or(0);
    let traced = trace.and_then(|trace| trace.layers.iter().find(|of| of.layer == layer));
    let traced = traced.filter(|of| of.experts.len() == experts as usize);
    if let (Some(trace), None) = (trace, traced) {
        log::warn!(
            "--expert-cache-trace (LLAMA_POSTFETCH_CACHE_TRACE): expected {experts} experts of layer {layer}, found another model with {} layers: write a trace of this model",
            trace.layers.len()
        );
    }
    let gains = traced.map(|of| match &of.locality {
        Some(locality) => locality.lru.clone(),
        None => {
            let mut uses = of.experts.clone();
            uses.sort_unstable_by_key(|uses| std::cmp::Reverse(*uses));
            uses
        }
    });
    LayerBudget {
        slot_bytes: matrices.iter().map(|of| of.expert_bytes as u64).sum(),
        experts: experts as u32,
        gains,
    }
}

/// Allocates slots for matrices; `None` when there is no memory for all.
///
/// # Safety
///
/// As for [`Cache::new`].
unsafe fn allocate(
    ggml: &'static Ggml,
    device: *mut Device,
    matrices: &BTreeMap<(u64, u32), Vec<Matrix>>,
    slots: &[u32],
) -> Option<Vec<LayerCache>> {
    let half_life = Config::get().postfetch.cache_half_life;
    // SAFETY: a live device.
    let buft = unsafe { (ggml.f.ggml_backend_dev_buffer_type)(device) };
    let mut layers: Vec<LayerCache> = Vec::new();
    for (((model, layer), matrices), &slots) in matrices.iter().zip(slots) {
        let mut roles = Vec::new();
        for matrix in matrices {
            let ne = [matrix.ne[0], matrix.ne[1], slots.into()];
            let made = OwnBuffer::for_tensor(ggml, buft, matrix.ty, &ne, c"expert-cache");
            let (memory, tensor) = made.ok()?;
            // Kernels read a little past an expert, and nothing there may be a NaN.
            memory.clear();
            roles.push(Role {
                weight: TensorPointer(matrix.tensor),
                ty: matrix.ty,
                expert_bytes: matrix.expert_bytes,
                tensor: TensorPointer(tensor),
                memory,
            });
        }
        let experts = matrices.iter().map(|of| of.ne[2]).min()?;
        layers.push(LayerCache {
            model: *model,
            layer: *layer,
            experts: ExpertCache::new(u32::try_from(experts).ok()?, slots, half_life),
            roles,
            ids: Scratch::allocate(ggml, buft, slots as usize * size_of::<i32>() + IDS_PADDING)?,
            loads: Vec::new(),
            slots: Vec::new(),
        });
    }
    Some(layers)
}

impl LayerCache {
    /// Returns the bytes of an expert in all matrices.
    fn expert_bytes(&self) -> usize {
        self.roles.iter().map(|role| role.expert_bytes).sum()
    }

    /// Looks up the experts of an evaluation. Returns whether they have slots, and are to be
    /// loaded where they had none.
    pub fn look_up(&mut self, ids: &Ids<'_>) -> bool {
        self.loads.clear();
        self.slots.clear();
        let before = self.experts.evictions();
        let found = self.experts.look_up(ids, &mut self.loads, &mut self.slots);
        if let Some(hits) = found {
            self.count(hits, self.loads.len(), 0, before);
        }
        found.is_some()
    }

    /// Looks up the experts of an evaluation that computes on the CPU those without a slot, whose
    /// positions are appended to `missed`. At most so many get one for later.
    pub fn look_up_now(&mut self, ids: &Ids<'_>, most: usize, missed: &mut Vec<usize>) -> bool {
        self.loads.clear();
        self.slots.clear();
        let before = self.experts.evictions();
        let (loads, slots) = (&mut self.loads, &mut self.slots);
        let found = self.experts.look_up_now(ids, most, loads, slots, missed);
        if let Some(hits) = found {
            self.count(hits, missed.len(), missed.len(), before);
        }
        found.is_some()
    }

    /// Counts a look-up, given the evictions before it.
    fn count(&self, hits: usize, misses: usize, on_cpu: usize, before: u64) {
        FIGURES.looked_up(&CacheLayer {
            hits: hits as u64,
            misses: misses as u64,
            evictions: self.experts.evictions() - before,
            on_cpu: on_cpu as u64,
            ..self.figures()
        });
    }

    /// Returns its figures before the first look-up.
    fn figures(&self) -> CacheLayer {
        CacheLayer {
            model: self.model,
            layer: self.layer,
            ..CacheLayer::default()
        }
    }

    /// Whether the last look-up loads experts.
    pub fn has_loads(&self) -> bool {
        !self.loads.is_empty()
    }

    /// Writes what the last look-up loads of a matrix at this address.
    pub fn pieces(&self, role: usize, address: usize, pieces: &mut Vec<Piece>) {
        let bytes = self.roles[role].expert_bytes;
        let piece = |load: &Load| {
            let to = load.slot as usize * bytes;
            Piece {
                from: address + load.expert as usize * bytes,
                to: to..to + bytes,
            }
        };
        pieces.clear();
        pieces.extend(self.loads.iter().map(piece));
    }

    /// Submits the ids of the last look-up, in slots, to a backend.
    ///
    /// # Safety
    ///
    /// A live backend on its thread, and the tensor of the graph's ids.
    pub unsafe fn write_ids(&self, ggml: &Ggml, backend: *mut Backend, tensor: *mut Tensor) {
        let bytes = size_of_val(self.slots.as_slice());
        // SAFETY: as the caller ensures; the slots stay until the next evaluation of the layer,
        // before which the program waits for the backend.
        unsafe {
            (ggml.f.ggml_backend_tensor_set_async)(
                backend,
                tensor,
                self.slots.as_ptr().cast(),
                0,
                bytes,
            );
        }
    }
}

/// A product that reads slots, while this value lives.
pub struct Changed {
    ggml: &'static Ggml,
    node: *mut Tensor,
    copy: *mut Tensor,
    ids: *mut Tensor,
    descriptor: Descriptor,
    extents: [i64; 4],
}

// SAFETY: used by the thread that evaluates.
unsafe impl Send for Changed {}

impl Changed {
    /// Gives a product the slots of its matrix, and ids that count slots.
    ///
    /// # Safety
    ///
    /// A live product of this copy whose matrix is the scheduler's copy `copy`; the tensors of
    /// the slots and of the ids are live, and no other thread reads or writes the product.
    pub unsafe fn new(
        ggml: &'static Ggml,
        node: *mut Tensor,
        copy: *mut Tensor,
        slots: *mut Tensor,
        ids: *mut Tensor,
    ) -> Changed {
        let layout = &ggml.layout;
        // SAFETY: as the caller ensures.
        unsafe {
            let before = Changed {
                ggml,
                node,
                copy,
                ids: layout.read(node, layout.src + 16),
                descriptor: ggml.descriptor(copy),
                extents: layout.read(copy, layout.ne),
            };
            ggml.describe(copy, &ggml.descriptor(slots));
            layout.write(copy, layout.ne, layout.read::<[i64; 4]>(slots, layout.ne));
            layout.write(node, layout.src + 16, ids);
            before
        }
    }
}

impl Drop for Changed {
    fn drop(&mut self) {
        let layout = &self.ggml.layout;
        // SAFETY: the values before, in the same tensors.
        unsafe {
            self.ggml.describe(self.copy, &self.descriptor);
            layout.write(self.copy, layout.ne, self.extents);
            layout.write(self.node, layout.src + 16, self.ids);
        }
    }
}
