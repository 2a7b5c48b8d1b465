//! The expert matrices that a graph reads on a GPU although they are in host memory.
//!
//! For each of them, the scheduler has put a copy in its place in the graph: a tensor on the
//! device, which the scheduler fills with the used experts before the product. Copies of several
//! matrices may share memory, so that none of them can be filled early. A plan gives each copy
//! memory of its own ([`Scratch`]): a set for each role of a matrix in its layer, or two sets
//! that the layers use by turns. The graph itself is not changed.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use sidecar_core::config::Config;
use sidecar_core::experts::ExpertName;
use sidecar_core::fetch::transfer_log::{self, Times};

use super::cache::Cache;
use super::figures::FIGURES;
use super::instance::{self, Instance, OwnEvent, Scratch};
use super::on_cpu::{ExpertProduct, HostMemory, OnCpu, Readers};
use super::transfer::Transfer;
use crate::ggml::{Backend, Buffer, BufferType, Descriptor, Ggml, OwnContext, Sched, Tensor};
use crate::program::graph::{GraphReads, UsedWeight};
use crate::program::models;

/// Sets of memory with which the experts of a layer can be copied before its routing.
const SETS_AHEAD: usize = 2;

/// A matrix that the scheduler copies.
pub struct Product {
    /// The matrix in host memory.
    pub weight: *mut Tensor,
    /// The scheduler's copy.
    pub copy: *mut Tensor,
    /// The memory that the scheduler gave its copy.
    own: Descriptor,
    /// The early copy.
    pub transfer: Arc<Transfer>,
    /// The bytes of an expert.
    pub expert_bytes: usize,
    /// The bytes of the experts that this evaluation uses, once they are known.
    pub used_bytes: usize,
    /// Whether the program came to copy the matrix in this evaluation.
    pub is_reached: bool,
}

impl Product {
    /// Gives the scheduler's copy its own memory again, unless the early copy is there.
    ///
    /// # Safety
    ///
    /// On the thread that evaluates the graph, which is live.
    pub unsafe fn restore(&self, ggml: &Ggml) {
        if !self.transfer.is_issued() {
            // SAFETY: as the caller ensures; the scheduler keeps the memory as long as the graph.
            unsafe { ggml.describe(self.copy, &self.own) };
        }
    }
}

/// A layer of which the scheduler copies matrices.
pub struct Layer {
    /// The number of the model.
    pub model: u64,
    /// The number of the layer.
    pub number: u32,
    /// The tensors that the scheduler may read the ids from.
    pub ids: [*mut Tensor; 2],
    /// The backend that multiplies.
    pub backend: *mut Backend,
    /// The number of experts.
    pub experts: u32,
    /// Whether its tokens can use all experts.
    pub may_use_all: bool,
    /// Its matrices, in the order of the graph.
    pub products: Vec<Product>,
    /// The event that orders early copies after products that read the same memory.
    pub free: Arc<OwnEvent>,
    /// Whether its ids are known in this evaluation.
    pub known: bool,
    /// Whether all its experts were requested in this evaluation.
    pub ahead: bool,
    /// Whether all its experts that are used were requested: the program copies none from its own
    /// cache.
    pub is_whole: bool,
    /// When its copies were requested in this evaluation.
    pub requested: Option<Instant>,
    /// Its slots; `None` where the used experts are copied in each evaluation.
    pub slots: Option<LayerSlots>,
}

impl Layer {
    /// Logs the experts whose copies were requested. The first bytes of a matrix are at `from`, and
    /// its experts have a size.
    pub fn log_requested(&self, matrices: &[(usize, usize)]) {
        let mut experts: Vec<(u64, u64, u64)> = Vec::new();
        for (product, &(from, size)) in self.products.iter().zip(matrices) {
            for piece in &product.transfer.request().pieces {
                // Behind the last expert, there is padding.
                let first = (piece.from - from) / size;
                let of_piece = (0..piece.to.len() / size).map(|at| {
                    let offset = piece.to.start + at * size;
                    ((first + at) as u64, size as u64, offset as u64)
                });
                experts.extend(of_piece);
            }
        }
        let bytes = experts.iter().map(|(_, size, _)| size).sum();
        let count = experts.len() / matrices.len().max(1);
        transfer_log::requested(self.number, count as u64, bytes);
        for (id, size, offset) in experts {
            transfer_log::expert(id, size, offset);
        }
    }

    /// Logs the times of its copies, if there were any.
    pub fn log_ended(&mut self) {
        let Some(requested) = self.requested.take() else {
            return;
        };
        let times = || self.products.iter().map(|of| of.transfer.times());
        let sum = Times {
            transfer: times().map(|of| of.transfer).sum(),
            waited: times().map(|of| of.waited).sum(),
            unused: times().map(|of| of.unused).sum(),
        };
        let end = times().filter_map(|of| of.end).max();
        let total = end.map_or(Duration::ZERO, |end| end - requested);
        transfer_log::ended(self.number, sum, total);
    }
}

/// The slots of a layer in a graph.
pub struct LayerSlots {
    /// The number of the layer in the cache.
    pub at: usize,
    /// The tensor for ids that count slots.
    pub ids: *mut Tensor,
    _context: OwnContext,
    /// Whether the ids of this evaluation were looked up.
    pub ready: bool,
    /// Whether they were submitted.
    pub written: bool,
    /// Whether there are more slots than one token uses.
    spare: bool,
    /// What computes experts that have no slot; `None` where they are copied into one.
    pub on_cpu: Option<OnCpu>,
    /// Whether the products of this evaluation wait for copies into slots.
    pub waits: bool,
    /// Whether copies and products of the device run in the order in which they are submitted.
    pub in_order: bool,
}

/// The matrices of a graph.
pub struct Plan {
    /// Layers in the order of the graph.
    pub layers: Vec<Layer>,
    /// Whether the experts of a layer can be copied while the layer before computes.
    pub looks_ahead: bool,
    /// The scheduler's copies, ascending: address, layer and product.
    copies: Vec<(usize, usize, usize)>,
}

// SAFETY: the pointers are used by the thread that evaluates the graph, while it lives.
unsafe impl Send for Plan {}

impl Plan {
    /// Gives the scheduler's copies that the program has not come to their own memory again, unless
    /// their early copies are there.
    ///
    /// # Safety
    ///
    /// On the thread that evaluates the graph, which is live.
    pub unsafe fn restore(&self, ggml: &Ggml) {
        let products = self.layers.iter().flat_map(|layer| &layer.products);
        for product in products.filter(|of| !of.is_reached) {
            // SAFETY: as the caller ensures.
            unsafe { product.restore(ggml) };
        }
    }

    /// Forgets what the last evaluation did.
    pub fn begin(&mut self) {
        for layer in &mut self.layers {
            layer.known = false;
            layer.ahead = false;
            layer.is_whole = false;
            if let Some(slots) = &mut layer.slots {
                (slots.ready, slots.written, slots.waits) = (false, false, true);
                if let Some(on_cpu) = &mut slots.on_cpu {
                    on_cpu.begin();
                }
            }
            for product in &mut layer.products {
                product.is_reached = false;
                product.transfer.forget();
            }
        }
    }

    /// Whether experts of any layer are in slots.
    pub fn has_slots(&self) -> bool {
        self.layers.iter().any(|layer| layer.slots.is_some())
    }

    /// Returns the addresses of the scheduler's copies.
    pub fn addresses(&self) -> std::ops::Range<usize> {
        let first = self.copies.first().map_or(0, |of| of.0);
        let last = self.copies.last().map_or(0, |of| of.0 + 1);
        first..last
    }

    /// Returns layer and product of a copy of the scheduler.
    pub fn find(&self, copy: *const Tensor) -> Option<(usize, usize)> {
        let address = copy as usize;
        let at = self.copies.binary_search_by_key(&address, |of| of.0).ok()?;
        Some((self.copies[at].1, self.copies[at].2))
    }

    /// Records that the program came to copy a matrix for this copy of the scheduler. Returns its
    /// layer and the matrix.
    pub fn reach(&mut self, copy: *const Tensor) -> Option<(&Layer, &Product)> {
        let (layer, product) = self.find(copy)?;
        let layer = &mut self.layers[layer];
        layer.products[product].is_reached = true;
        Some((layer, &layer.products[product]))
    }
}

/// Memory and instances on the devices of a scheduler. Kept from graph to graph.
pub struct Devices {
    of: Vec<DeviceMemory>,
    /// Buffer types whose backend gave no second instance.
    refused: Vec<usize>,
    /// The plan of the graph before: the devices may still use its events.
    retired: Option<Plan>,
    /// Memory for experts that the CPU computes.
    host_memory: Option<Arc<HostMemory>>,
}

/// What is used of one device.
struct DeviceMemory {
    /// The buffer type. Compared only.
    buft: usize,
    instance: Arc<Instance>,
    /// By set and role.
    scratch: Vec<Scratch>,
    roles: usize,
}

// SAFETY: ggml ties nothing of a device to a thread.
unsafe impl Send for DeviceMemory {}

/// A matrix for which memory is wanted.
struct Candidate<'a> {
    used: &'a UsedWeight,
    copy: *mut Tensor,
    backend: *mut Backend,
    buft: *mut BufferType,
    model: u64,
    layer: u32,
    /// What memory it gets: each projection of a layer has its own.
    role: usize,
    /// Ids that its product has.
    ids: u64,
    bytes: usize,
    /// Whether several products read the copy.
    is_shared: bool,
}

impl Devices {
    /// Returns none.
    pub const fn new() -> Devices {
        Devices {
            of: Vec::new(),
            refused: Vec::new(),
            retired: None,
            host_memory: None,
        }
    }

    /// Keeps a plan whose graph is dropped until its devices are waited for.
    pub fn retire(&mut self, plan: Plan) {
        self.retired = Some(plan);
    }

    /// Gives copies of the scheduler memory of their own, and returns what can be copied early;
    /// `None` when there is nothing. Layers with slots keep the copies of the scheduler. With
    /// `readers` of the graph, the CPU computes experts that have no slot.
    ///
    /// # Safety
    ///
    /// A scheduler with one copy of its inputs, and what its graph read before it was split; the graph
    /// was split and allocated since. No earlier graph of this scheduler is evaluated again.
    pub unsafe fn plan(
        &mut self,
        ggml: &'static Ggml,
        sched: *mut Sched,
        reads: &GraphReads,
        cache: Option<&Cache>,
        readers: Option<&Readers>,
    ) -> Option<Plan> {
        // SAFETY: as the caller ensures.
        let candidates = unsafe { candidates(ggml, sched, reads) };
        if candidates.is_empty() {
            return None;
        }
        // SAFETY: as the caller ensures: what used the memory before is done after that.
        unsafe { (ggml.f.ggml_backend_sched_synchronize)(sched) };
        self.retired = None;
        let layers: Vec<_> = candidates
            .chunk_by(|a, b| (a.model, a.layer) == (b.model, b.layer))
            // SAFETY: as the caller ensures.
            .map(|layer| (layer, unsafe { slots(ggml, layer, cache) }))
            .collect();
        let mut by_device: BTreeMap<usize, Vec<&Candidate<'_>>> = BTreeMap::new();
        for (layer, _) in layers.iter().filter(|(_, slots)| slots.is_none()) {
            for candidate in *layer {
                let of_device = by_device.entry(candidate.buft as usize).or_default();
                of_device.push(candidate);
            }
        }
        let mut sets = Some(SETS_AHEAD);
        for candidates in by_device.values() {
            let provided = self.provide(ggml, candidates);
            sets = sets.and_then(|sets| Some(sets.min(provided?)));
        }
        let mut plan = Plan {
            layers: Vec::new(),
            looks_ahead: sets == Some(SETS_AHEAD) && Config::get().program_postfetch.look_ahead,
            copies: Vec::new(),
        };
        for (candidates, slots) in layers {
            let at = plan.layers.len();
            if slots.is_none() && sets.is_none() {
                continue;
            }
            let set = at % sets.unwrap_or(1);
            // SAFETY: as the caller ensures.
            let layer = unsafe {
                let layer = self.layer(ggml, candidates, slots.zip(cache), set);
                layer.map(|layer| match readers {
                    Some(of) => self.with_cpu(ggml, sched, (reads, of), candidates, layer),
                    None => layer,
                })
            };
            let Some(layer) = layer else {
                FIGURES.note_obstacle(format!(
                    "the program copies some experts itself: {} gives no event or no tensor for them",
                    ggml.buffer_type_name(candidates[0].buft)
                ));
                continue;
            };
            let copies = layer.products.iter().enumerate();
            plan.copies
                .extend(copies.map(|(product, of)| (of.copy as usize, at, product)));
            plan.layers.push(layer);
        }
        plan.copies.sort_unstable();
        if plan.layers.iter().all(|layer| layer.slots.is_some())
            && sets.is_some()
            && !by_device.is_empty()
        {
            // The backend refused what early copies need.
            self.of.iter_mut().for_each(|device| device.scratch.clear());
        }
        (!plan.layers.is_empty()).then_some(plan)
    }

    /// Provides memory for matrices on one device. Returns the number of sets; `None` when not
    /// even one fits.
    fn provide(&mut self, ggml: &'static Ggml, candidates: &[&Candidate<'_>]) -> Option<usize> {
        let buft = candidates[0].buft;
        let mut sizes = Vec::new();
        for candidate in candidates {
            if sizes.len() <= candidate.role {
                sizes.resize(candidate.role + 1, 0);
            }
            sizes[candidate.role] = sizes[candidate.role].max(candidate.bytes);
        }
        self.device(ggml, buft)?.provide(ggml, buft, &sizes)
    }

    /// Returns what is used of the device of a buffer type.
    fn device(&mut self, ggml: &'static Ggml, buft: *mut BufferType) -> Option<&mut DeviceMemory> {
        let known = self.of.iter().position(|of| of.buft == buft as usize);
        if let Some(at) = known {
            return Some(&mut self.of[at]);
        }
        if self.refused.contains(&(buft as usize)) {
            return None;
        }
        // SAFETY: a live buffer type.
        let device = unsafe { (ggml.f.ggml_backend_buft_get_device)(buft) };
        let instance = (!device.is_null()).then(|| Instance::open(ggml, device));
        let Some(instance) = instance.flatten() else {
            self.refused.push(buft as usize);
            let name = ggml.buffer_type_name(buft);
            FIGURES.note_obstacle(format!(
                "the program copies experts itself: {name} gives no second instance of its backend"
            ));
            return None;
        };
        self.of.push(DeviceMemory {
            buft: buft as usize,
            instance: Arc::new(instance),
            scratch: Vec::new(),
            roles: 0,
        });
        self.of.last_mut()
    }

    /// Makes a layer of a plan, whose matrices have slots, or a set of memory to which the
    /// scheduler's copies are redirected. `None` when the backend refuses what that needs;
    /// nothing is changed then.
    ///
    /// # Safety
    ///
    /// As for [`Devices::plan`].
    unsafe fn layer(
        &mut self,
        ggml: &'static Ggml,
        candidates: &[Candidate<'_>],
        slots: Option<(LayerSlots, &Cache)>,
        set: usize,
    ) -> Option<Layer> {
        let layout = &ggml.layout;
        let first = &candidates[0];
        let mut products = Vec::new();
        let mut targets = Vec::new();
        for (at, candidate) in candidates.iter().enumerate() {
            let device = self.device(ggml, candidate.buft)?;
            let instance = device.instance.clone();
            let (context, target) = match &slots {
                Some((slots, cache)) => (None, cache.tensor(slots.at, at)),
                None => {
                    let scratch = &device.scratch[set * device.roles + candidate.role];
                    // SAFETY: as the caller ensures.
                    let (ty, ne) = unsafe {
                        (
                            layout.read(candidate.copy, layout.ty),
                            layout.read(candidate.copy, layout.ne),
                        )
                    };
                    let (context, target) = scratch.tensor(ty, &ne)?;
                    (Some(context), target)
                }
            };
            targets.push((candidate.copy, target));
            // SAFETY: as the caller ensures.
            let (strides, own) = unsafe {
                let strides: [usize; 4] = layout.read(candidate.used.tensor, layout.nb);
                (strides, ggml.descriptor(candidate.copy))
            };
            products.push(Product {
                weight: candidate.used.tensor,
                copy: candidate.copy,
                own,
                transfer: Arc::new(Transfer::new(ggml, instance, (context, target))?),
                expert_bytes: strides[2],
                used_bytes: 0,
                is_reached: false,
            });
        }
        let instance = self.device(ggml, first.buft)?.instance.clone();
        let free = Arc::new(instance.event()?);
        // SAFETY: live tensors, as the caller ensures. The scheduler's copy has the type and shape
        // of the matrix; its buffer, data and extra become those of a tensor of that type and
        // shape, which lives as long as the plan.
        let (ids, experts) = unsafe {
            for (copy, target) in targets.iter().filter(|_| slots.is_none()) {
                ggml.share_memory(*copy, *target);
            }
            let extents: [i64; 4] = layout.read(first.copy, layout.ne);
            let split: *mut Tensor = layout.read(first.used.node, layout.src + 16);
            ([first.used.ids, split], extents[2])
        };
        Some(Layer {
            model: first.model,
            number: first.layer,
            ids,
            backend: first.backend,
            experts: experts as u32,
            may_use_all: first.ids >= experts as u64,
            products,
            free,
            known: false,
            ahead: false,
            is_whole: false,
            requested: None,
            slots: slots.map(|(slots, _)| LayerSlots {
                in_order: instance.is_in_order(),
                ..slots
            }),
        })
    }

    /// Lets the CPU compute the experts of a layer that have no slot, if the layer has slots to spare.
    ///
    /// # Safety
    ///
    /// As for [`Devices::plan`].
    unsafe fn with_cpu(
        &mut self,
        ggml: &'static Ggml,
        sched: *mut Sched,
        reads: (&GraphReads, &Readers),
        candidates: &[Candidate<'_>],
        mut layer: Layer,
    ) -> Layer {
        let Some(slots) = layer.slots.as_mut().filter(|slots| slots.spare) else {
            return layer;
        };
        let product = |of: &Candidate<'_>| ExpertProduct {
            node: of.used.node,
            weight: of.used.tensor,
        };
        let products: Vec<_> = candidates.iter().map(product).collect();
        let memory = &mut self.host_memory;
        // SAFETY: as the caller ensures.
        let made = unsafe {
            let device = (ggml.f.ggml_backend_get_device)(layer.backend);
            OnCpu::new(ggml, sched, reads, device, &products, memory)
        };
        match made {
            Ok(on_cpu) => slots.on_cpu = Some(on_cpu),
            Err(reason) => FIGURES.note_obstacle(format!(
                "the CPU computes no experts of some layers, such as layer {}: {reason}; they are copied to the device",
                candidates[0].layer
            )),
        }
        layer
    }
}

impl DeviceMemory {
    /// Provides memory of a size for each role, in two sets if they fit, else in one. Returns the
    /// number of sets.
    fn provide(
        &mut self,
        ggml: &'static Ggml,
        buft: *mut BufferType,
        sizes: &[usize],
    ) -> Option<usize> {
        let has = |set: usize| {
            let of_set = self.scratch.get(set * self.roles..(set + 1) * self.roles);
            let of_set = of_set.filter(|of| !of.is_empty() && of.len() >= sizes.len());
            of_set.is_some_and(|of| of.iter().zip(sizes).all(|(has, size)| has.size() >= *size))
        };
        if let Some(sets) = (1..=SETS_AHEAD).rev().find(|sets| has(sets - 1)) {
            return Some(sets);
        }
        // Graphs of prompts and of single tokens take turns: what one has is kept for the other.
        let size = |role: usize| {
            let before = self.scratch.get(role).map_or(0, Scratch::size);
            before.max(sizes.get(role).copied().unwrap_or(0))
        };
        let sizes: Vec<usize> = (0..self.roles.max(sizes.len())).map(size).collect();
        self.scratch.clear();
        // SAFETY: a live buffer type.
        let device = unsafe { (ggml.f.ggml_backend_buft_get_device)(buft) };
        let (free, total) = ggml.memory_of(device);
        let config = &Config::get().postfetch;
        let mut limit = config.most_scratch(total);
        if config.scratchpad_bytes == 0 {
            // What the program allocates later needs memory, too.
            limit = limit.min(free / 2);
        }
        let set: usize = sizes.iter().sum();
        self.roles = sizes.len();
        for sets in (1..=SETS_AHEAD).rev() {
            if (sets * set) as u64 > limit {
                continue;
            }
            let sizes = std::iter::repeat_n(&sizes, sets).flatten();
            let scratch = sizes.map(|size| Scratch::allocate(ggml, buft, *size));
            if let Some(scratch) = scratch.collect::<Option<Vec<_>>>() {
                let bytes: usize = scratch.iter().map(Scratch::size).sum();
                let more = match sets {
                    SETS_AHEAD => String::new(),
                    _ => format!(
                        "; {SETS_AHEAD} need {} MiB, and {} MiB can be used (LLAMA_POSTFETCH_SCRATCHPAD_MB)",
                        (SETS_AHEAD * set) >> 20,
                        limit >> 20
                    ),
                };
                log::info!(
                    "post-fetch: {} MiB on {} for the experts of {sets} layers at a time{more}",
                    bytes >> 20,
                    ggml.buffer_type_name(buft)
                );
                self.scratch = scratch;
                return Some(sets);
            }
        }
        FIGURES.note_obstacle(format!(
            "the program copies experts itself: the experts of a layer need {} MiB on {}, and {} MiB can be used (without LLAMA_POSTFETCH_SCRATCHPAD_MB, at most 10 % of the device and half of its free memory); set that variable, or load fewer layers there",
            set >> 20,
            ggml.buffer_type_name(buft),
            limit >> 20,
        ));
        None
    }
}

/// Returns the slots of a layer's matrices in a graph; `None` where it has none, or where the
/// graph may use more experts than there are slots.
///
/// # Safety
///
/// As for [`Devices::plan`].
unsafe fn slots(
    ggml: &Ggml,
    candidates: &[Candidate<'_>],
    cache: Option<&Cache>,
) -> Option<LayerSlots> {
    let cache = cache?;
    let (f, layout) = (&ggml.f, &ggml.layout);
    let first = &candidates[0];
    if candidates.iter().any(|of| of.used.ids != first.used.ids) {
        return None;
    }
    let matrices: Vec<_> = candidates.iter().map(|of| of.used.tensor).collect();
    // SAFETY: as the caller ensures.
    unsafe {
        let device = (f.ggml_backend_get_device)(first.backend);
        let at = cache.find(ggml, device, (first.model, first.layer), &matrices)?;
        let [used, tokens, more, _]: [i64; 4] = layout.read(first.used.ids, layout.ne);
        let fits =
            more == 1 && used.checked_mul(tokens)? <= cache.slots_of(at) as i64 && tokens > 0;
        if !fits {
            return None;
        }
        let (context, ids) = cache.ids_tensor(at, used, tokens)?;
        Some(LayerSlots {
            at,
            ids,
            _context: context,
            ready: false,
            written: false,
            spare: cache.slots_of(at) as i64 > used,
            on_cpu: None,
            waits: true,
            in_order: false,
        })
    }
}

/// Returns the expert matrices of a graph for which the scheduler has put a copy.
///
/// # Safety
///
/// As for [`Devices::plan`].
unsafe fn candidates<'a>(
    ggml: &Ggml,
    sched: *mut Sched,
    reads: &'a GraphReads,
) -> Vec<Candidate<'a>> {
    let (f, layout) = (&ggml.f, &ggml.layout);
    let mut found: Vec<Candidate<'a>> = Vec::new();
    for used in reads.weights.iter().filter(|of| !of.ids.is_null()) {
        // SAFETY: nodes of the graph, their sources and buffers are live.
        unsafe {
            let copy: *mut Tensor = layout.read(used.node, layout.src);
            let shape = |tensor: *mut Tensor| {
                let extents: [i64; 4] = layout.read(tensor, layout.ne);
                let strides: [usize; 4] = layout.read(tensor, layout.nb);
                (layout.read::<i32>(tensor, layout.ty), extents, strides)
            };
            let is_copy = copy != used.tensor
                && !copy.is_null()
                && shape(copy) == shape(used.tensor)
                && !layout.read::<*mut Buffer>(copy, layout.buffer).is_null();
            if let Some(same) = found.iter_mut().find(|other| other.copy == copy) {
                same.is_shared = true;
                continue;
            }
            if !is_copy {
                continue;
            }
            let Some((model, at)) = models::find(used.tensor) else {
                continue;
            };
            let name = model.name(at).to_str().ok().and_then(ExpertName::parse);
            let backend = (f.ggml_backend_sched_get_tensor_backend)(sched, used.node);
            let Some(name) = name.filter(|_| !backend.is_null()) else {
                continue;
            };
            let buft = (f.ggml_backend_buffer_get_type)(layout.read(copy, layout.buffer));
            let device = (f.ggml_backend_get_device)(backend);
            let on_host: *mut Buffer = layout.read(used.tensor, layout.buffer);
            let on_host = !on_host.is_null() && (f.ggml_backend_buffer_is_host)(on_host);
            let [ids, tokens, ..]: [u64; 4] = layout.read(used.ids, layout.ne);
            let ids = ids.saturating_mul(tokens);
            // Without a token, the scheduler copies nothing.
            if !on_host || ids == 0 || !instance::is_usable(ggml, device) {
                continue;
            }
            let role = name.projection as usize;
            let is_same = |other: &Candidate<'_>| {
                (other.model, other.layer, other.role) == (model.number, name.layer, role)
            };
            if found.iter().any(is_same) {
                continue;
            }
            found.push(Candidate {
                used,
                copy,
                backend,
                buft,
                model: model.number,
                layer: name.layer,
                role,
                ids,
                bytes: (f.ggml_backend_buft_get_alloc_size)(buft, copy),
                is_shared: false,
            });
        }
    }
    found.retain(|candidate| !candidate.is_shared);
    found
}
