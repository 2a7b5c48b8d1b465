//! The expert matrices that a graph reads on a GPU although they are in host memory.
//!
//! For each of them, the scheduler has put a copy in its place in the graph: a tensor on the
//! device, which the scheduler fills with the used experts before the product. Copies of several
//! matrices may share memory, so that none of them can be filled early. A plan gives each copy
//! memory of its own ([`Scratch`]): a set for each role of a matrix in its layer, or two sets
//! that the layers use by turns. The graph itself is not changed.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use llama_sidecar::config::Config;
use llama_sidecar::experts::ExpertName;

use super::figures::FIGURES;
use super::instance::{Instance, OwnEvent, Scratch};
use super::transfer::Transfer;
use crate::ggml::{Backend, Buffer, BufferType, Ggml, Sched, Tensor};
use crate::graph::{GraphReads, UsedWeight};
use crate::models;

/// Sets of memory with which the experts of a layer can be copied before its routing.
const SETS_AHEAD: usize = 2;

/// A matrix that the scheduler copies.
pub struct Product {
    /// The matrix in host memory.
    pub weight: *mut Tensor,
    /// The scheduler's copy.
    pub copy: *mut Tensor,
    /// The early copy.
    pub transfer: Arc<Transfer>,
    /// Whether the program copied experts of the matrix in this evaluation.
    pub host_copied: bool,
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
    /// Its matrices, in the order of the graph.
    pub products: Vec<Product>,
    /// The event that orders early copies after products that read the same memory.
    pub free: Arc<OwnEvent>,
    /// Whether its ids are known in this evaluation.
    pub known: bool,
    /// Whether all its experts were requested in this evaluation.
    pub ahead: bool,
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
    /// Returns layer and product of a copy of the scheduler.
    pub fn find(&self, copy: *const Tensor) -> Option<(usize, usize)> {
        let address = copy as usize;
        let at = self.copies.binary_search_by_key(&address, |of| of.0).ok()?;
        Some((self.copies[at].1, self.copies[at].2))
    }
}

/// Memory and instances on the devices of a scheduler. Kept from graph to graph.
pub struct Devices {
    of: Vec<DeviceMemory>,
    /// The plan of the graph before: the devices may still use its events.
    retired: Option<Plan>,
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
    /// Its place among the matrices of its layer.
    role: usize,
    bytes: usize,
}

impl Devices {
    /// Returns none.
    pub const fn new() -> Devices {
        Devices {
            of: Vec::new(),
            retired: None,
        }
    }

    /// Keeps a plan whose graph is dropped until its devices are waited for.
    pub fn retire(&mut self, plan: Plan) {
        self.retired = Some(plan);
    }

    /// Gives copies of the scheduler memory of their own, and returns what can be copied early;
    /// `None` when there is nothing.
    ///
    /// # Safety
    ///
    /// A scheduler and what its graph read before it was split; the graph was split and allocated
    /// since. No earlier graph of this scheduler is evaluated again.
    pub unsafe fn plan(
        &mut self,
        ggml: &'static Ggml,
        sched: *mut Sched,
        reads: &GraphReads,
    ) -> Option<Plan> {
        // SAFETY: as the caller ensures.
        let candidates = unsafe { candidates(ggml, sched, reads) };
        if candidates.is_empty() {
            return None;
        }
        // SAFETY: as the caller ensures: what used the memory before is done after that.
        unsafe { (ggml.f.ggml_backend_sched_synchronize)(sched) };
        self.retired = None;
        let mut sets = SETS_AHEAD;
        let mut by_device: BTreeMap<usize, Vec<&Candidate<'_>>> = BTreeMap::new();
        for candidate in &candidates {
            by_device
                .entry(candidate.buft as usize)
                .or_default()
                .push(candidate);
        }
        for candidates in by_device.values() {
            sets = sets.min(self.provide(ggml, candidates)?);
        }
        let mut plan = Plan {
            layers: Vec::new(),
            looks_ahead: sets == SETS_AHEAD && Config::get().host_postfetch.look_ahead,
            copies: Vec::new(),
        };
        for candidate in &candidates {
            // SAFETY: as the caller ensures.
            if unsafe { self.add(ggml, &mut plan, candidate, sets) }.is_none() {
                FIGURES.note_obstacle(format!(
                    "the program copies some experts itself: {} gives no event or no tensor for them",
                    ggml.buffer_type_name(candidate.buft)
                ));
            }
        }
        plan.copies.sort_unstable();
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
        let at = match self.of.iter().position(|of| of.buft == buft as usize) {
            Some(at) => at,
            None => {
                // SAFETY: a live buffer type.
                let device = unsafe { (ggml.f.ggml_backend_buft_get_device)(buft) };
                let instance = (!device.is_null())
                    .then(|| Instance::open(ggml, device))
                    .flatten();
                let Some(instance) = instance else {
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
                self.of.len() - 1
            }
        };
        self.of[at].provide(ggml, buft, &sizes)
    }

    /// Adds a matrix to a plan, and redirects the scheduler's copy to memory of its own. `None`
    /// when the backend refuses what that needs; the copy is the scheduler's own then.
    ///
    /// # Safety
    ///
    /// As for [`Devices::plan`].
    unsafe fn add(
        &self,
        ggml: &'static Ggml,
        plan: &mut Plan,
        candidate: &Candidate<'_>,
        sets: usize,
    ) -> Option<()> {
        let used = candidate.used;
        let is_new = plan
            .layers
            .last()
            .is_none_or(|layer| (layer.model, layer.number) != (candidate.model, candidate.layer));
        let layer = plan.layers.len() - usize::from(!is_new);
        let of_buft = |of: &&DeviceMemory| of.buft == candidate.buft as usize;
        let device = self.of.iter().find(of_buft).expect("provided");
        let scratch = &device.scratch[layer % sets * device.roles + candidate.role];
        let layout = &ggml.layout;
        // SAFETY: live tensors, as the caller ensures. The scheduler's copy has the type and shape
        // of the matrix; its buffer, data and extra become those of a tensor of that type and
        // shape, which lives as long as the plan.
        unsafe {
            let ty: i32 = layout.read(candidate.copy, layout.ty);
            let ne: [i64; 4] = layout.read(candidate.copy, layout.ne);
            let target = scratch.tensor(ty, &ne)?;
            let to = ggml.descriptor(target.1);
            let transfer = Transfer::new(ggml, device.instance.clone(), target)?;
            if is_new {
                plan.layers.push(Layer {
                    model: candidate.model,
                    number: candidate.layer,
                    ids: [used.ids, layout.read(used.node, layout.src + 16)],
                    backend: candidate.backend,
                    experts: u32::try_from(ne[2]).ok()?,
                    products: Vec::new(),
                    free: Arc::new(device.instance.event()?),
                    known: false,
                    ahead: false,
                });
            }
            layout.write(candidate.copy, layout.buffer, to.buffer);
            layout.write(candidate.copy, layout.data, to.data);
            layout.write(candidate.copy, layout.extra, to.extra);
            let products = &mut plan.layers[layer].products;
            let at = (candidate.copy as usize, layer, products.len());
            plan.copies.push(at);
            products.push(Product {
                weight: used.tensor,
                copy: candidate.copy,
                transfer: Arc::new(transfer),
                host_copied: false,
            });
        }
        Some(())
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
        let ours: usize = self.scratch.iter().map(Scratch::size).sum();
        FIGURES
            .scratch_bytes
            .fetch_sub(ours as u64, Ordering::Relaxed);
        self.scratch.clear();
        let limit = match Config::get().postfetch.scratchpad_bytes {
            // SAFETY: a live buffer type.
            0 => unsafe {
                let device = (ggml.f.ggml_backend_buft_get_device)(buft);
                ggml.free_memory(device).map_or(0, |free| free / 2)
            },
            limit => limit,
        };
        let set: usize = sizes.iter().sum();
        self.roles = sizes.len();
        for sets in (1..=SETS_AHEAD).rev() {
            if (sets * set) as u64 > limit {
                continue;
            }
            let sizes = std::iter::repeat_n(sizes, sets).flatten();
            let scratch = sizes.map(|size| Scratch::allocate(ggml, buft, *size));
            if let Some(scratch) = scratch.collect::<Option<Vec<_>>>() {
                let bytes: usize = scratch.iter().map(Scratch::size).sum();
                FIGURES
                    .scratch_bytes
                    .fetch_add(bytes as u64, Ordering::Relaxed);
                log::info!(
                    "post-fetch: {} MiB on {} for the experts of {sets} layers at a time",
                    bytes >> 20,
                    ggml.buffer_type_name(buft)
                );
                self.scratch = scratch;
                return Some(sets);
            }
        }
        FIGURES.note_obstacle(format!(
            "the program copies experts itself: the experts of a layer need {} MiB on {}, and {} MiB can be used; set LLAMA_POSTFETCH_SCRATCHPAD_MB, or load fewer layers there",
            set >> 20,
            ggml.buffer_type_name(buft),
            limit >> 20,
        ));
        None
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
    // SAFETY: a live scheduler.
    if unsafe { (f.ggml_backend_sched_get_n_copies)(sched) } != 1 {
        // Each copy would have a tensor of its own, and the scheduler takes them by turns.
        FIGURES.note_obstacle(
            "the program copies experts itself: it evaluates several batches at a time".into(),
        );
        return found;
    }
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
            if !is_copy || found.iter().any(|other| other.copy == copy) {
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
            let role = found
                .iter()
                .rev()
                .take_while(|other| (other.model, other.layer) == (model.number, name.layer))
                .count();
            found.push(Candidate {
                used,
                copy,
                backend,
                buft,
                model: model.number,
                layer: name.layer,
                role,
                bytes: (f.ggml_backend_buft_get_alloc_size)(buft, copy),
            });
        }
    }
    found
}
