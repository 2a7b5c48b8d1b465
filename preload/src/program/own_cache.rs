//! The expert cache that llama.cpp has of its own since b11480 (`--moe-cache-mib`).
//!
//! It has *banks* on a GPU, with a slot for each expert that is kept there. In a small batch, the
//! products of a layer read a view of a bank, and their ids count slots. The *slot map* of the layer,
//! in host memory, has the slot of each expert, or -1. libllama copies an expert into its slot once. So
//! the first evaluation after a switch begins with writing the new bytes of each expert that has a slot,
//! on the thread that evaluates. Slots have the type that the matrix had when the program made its
//! context: a matrix cannot change to another type.

use std::ffi::c_void;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Instant;

use parking_lot::{Mutex, RwLock};
use sidecar_core::gguf::TypeInfo;
use sidecar_core::protocol::{Event, OwnExpertCache};

use crate::ggml::{Buffer, Ggml, Tensor};
use crate::process::journal;
use crate::program::barrier;
use crate::program::graph::{self, CachedProduct, OWN_CACHE};
use crate::program::models::{Model, TensorPointer};

/// The start of the names of slot maps.
const SLOT_MAP: &[u8] = b"moe_cache.slot_map-";

/// Why a switch does not happen.
const OTHER_SLOTS: &str = "the program's own expert cache changed meanwhile; reload again";

/// A bank or a slot map.
struct Part {
    tensor: usize,
    buffer: usize,
    is_slot_map: bool,
    bytes: u64,
}

/// A matrix of experts that has slots.
struct Cached {
    ggml: &'static Ggml,
    /// The number of its model.
    model: u64,
    /// Its index in the model.
    matrix: usize,
    /// Whether its bytes changed since they were written into slots.
    is_stale: AtomicBool,
    weight: TensorPointer,
    slots: TensorPointer,
    /// The tensor that the slots are a view of.
    bank: TensorPointer,
    /// The type of the slots.
    ty: i32,
    slot_map: TensorPointer,
    /// The buffers of the slots and of the slot map.
    buffers: [usize; 2],
}

/// The caches of all contexts.
struct Caches {
    parts: RwLock<Vec<Part>>,
    cached: RwLock<Vec<Cached>>,
    /// Whether any of `cached` is stale.
    any_stale: AtomicBool,
    /// Held by the evaluation that writes into slots.
    writing: Mutex<()>,
    written_experts: AtomicU64,
    written_bytes: AtomicU64,
}

static CACHES: Caches = Caches {
    parts: RwLock::new(Vec::new()),
    cached: RwLock::new(Vec::new()),
    any_stale: AtomicBool::new(false),
    writing: Mutex::new(()),
    written_experts: AtomicU64::new(0),
    written_bytes: AtomicU64::new(0),
};

/// Whether a context of the program has such a cache.
pub fn exists() -> bool {
    !CACHES.parts.read().is_empty()
}

/// Returns figures of the caches; `None` while there is none.
pub fn figures() -> Option<OwnExpertCache> {
    let parts = CACHES.parts.read();
    let count = |is_slot_map| {
        parts
            .iter()
            .filter(move |part| part.is_slot_map == is_slot_map)
    };
    (!parts.is_empty()).then(|| OwnExpertCache {
        layers: count(true).count(),
        bytes: count(false).map(|part| part.bytes).sum(),
        written_experts: CACHES.written_experts.load(Ordering::Relaxed),
        written_bytes: CACHES.written_bytes.load(Ordering::Relaxed),
    })
}

/// Records a tensor that was given memory, if it is a part of a cache.
///
/// # Safety
///
/// A live tensor of this copy that has a name.
pub unsafe fn tensor_placed(ggml: &Ggml, tensor: *mut Tensor, buffer: *mut Buffer) {
    // SAFETY: as the caller ensures.
    let (name, bytes) = unsafe { (graph::name(ggml, tensor), (ggml.f.ggml_nbytes)(tensor)) };
    if !name.starts_with(OWN_CACHE) {
        return;
    }
    let mut parts = CACHES.parts.write();
    if parts.is_empty() {
        log::info!("the program has an expert cache of its own");
    }
    parts.push(Part {
        tensor: tensor as usize,
        buffer: buffer as usize,
        is_slot_map: name.starts_with(SLOT_MAP),
        bytes: bytes as u64,
    });
}

/// Finds the matrices of a model whose experts a graph reads from slots.
///
/// # Safety
///
/// Products of a live graph that reads this model, and no other.
pub unsafe fn find(model: &Arc<Model>, products: &mut [CachedProduct]) {
    let ggml = model.ggml;
    for product in products {
        let slots = TensorPointer(product.slots);
        let slot_map = TensorPointer(product.slot_map);
        let same = |of: &&Cached| of.slots == slots && of.slot_map == slot_map;
        if let Some(known) = CACHES.cached.read().iter().find(same) {
            product.matrix = known.weight.0;
            continue;
        }
        // SAFETY: as the caller ensures.
        let name = unsafe { graph::name(ggml, slots.0) };
        let name = name.strip_prefix(OWN_CACHE).unwrap_or_default();
        let has_name = |at: &usize| model.name(*at).to_bytes() == name;
        let Some(matrix) = (0..model.tensors.len()).find(has_name) else {
            continue;
        };
        let instances = &model.tensors[matrix].instances;
        let weight = instances[0].tensor;
        // SAFETY: live tensors; a view has the buffer of what it views.
        let (is_sound, buffers, bank, ty) = unsafe {
            let layout = &ggml.layout;
            let is_sound = instances.len() == 1 && has_slots(ggml, weight.0, slots.0, slot_map.0);
            let buffer = |of: TensorPointer| layout.read(of.0, layout.buffer);
            let bank = TensorPointer(layout.read(slots.0, layout.view_src));
            let ty = layout.read(slots.0, layout.ty);
            (is_sound, [buffer(slots), buffer(slot_map)], bank, ty)
        };
        if is_sound {
            product.matrix = weight.0;
            let mut cached = CACHES.cached.write();
            if cached.is_empty()
                && let Some(OwnExpertCache { layers, bytes, .. }) = figures()
            {
                journal::note_once(|| Event::OwnExpertCache { layers, bytes });
            }
            cached.push(Cached {
                ggml,
                model: model.number,
                matrix,
                is_stale: AtomicBool::new(false),
                weight,
                slots,
                bank,
                ty,
                slot_map,
                buffers,
            });
        }
    }
}

/// Whether experts of a matrix fit slots, and each of them has a place in the slot map.
///
/// # Safety
///
/// Live tensors of this copy.
unsafe fn has_slots(
    ggml: &Ggml,
    weight: *const Tensor,
    slots: *const Tensor,
    slot_map: *const Tensor,
) -> bool {
    let layout = &ggml.layout;
    // SAFETY: as the caller ensures.
    unsafe {
        let ty = |tensor| layout.read::<i32>(tensor, layout.ty);
        let ne = |tensor| layout.read::<[i64; 4]>(tensor, layout.ne);
        let nb = |tensor| layout.read::<[usize; 4]>(tensor, layout.nb);
        ty(weight) == ty(slots)
            && ne(weight)[..2] == ne(slots)[..2]
            && nb(weight)[..3] == nb(slots)[..3]
            && ne(slot_map) == [1, ne(weight)[2], 1, 1]
            // A context that only measures memory has none.
            && !layout.read::<*const c_void>(slot_map, layout.data).is_null()
    }
}

/// Whether a tensor is a part of a cache whose matrix is known.
pub fn is_known(tensor: *mut Tensor) -> bool {
    let tensor = TensorPointer(tensor);
    let is_part = |of: &Cached| [of.slot_map, of.slots, of.bank].contains(&tensor);
    CACHES.cached.read().iter().any(is_part)
}

/// If a tensor is the slot map of a layer, passes the address of a matrix of the layer, and the slot of each
/// expert or -1, to `visit`. Called on the thread that evaluates.
pub fn visit_slots(slot_map: *const Tensor, visit: impl FnOnce(usize, &[i32])) {
    let cached = CACHES.cached.read();
    let mut all = cached.iter();
    if let Some(of) = all.find(|of| std::ptr::eq(of.slot_map.0, slot_map)) {
        let layout = &of.ggml.layout;
        // SAFETY: entries are removed before their tensors are freed; the program changes slots on
        // this thread.
        unsafe { visit(layout.read(of.weight.0, layout.data), of.slot_map()) }
    }
}

/// Marks the experts of a matrix that have slots. A large batch copies them from there. Returns `false`
/// if it is not clear which cache it reads. Called on the thread that evaluates.
pub fn mark_slots(weight: *mut Tensor, marked: &mut Vec<bool>) -> bool {
    marked.clear();
    let cached = CACHES.cached.read();
    let mut of_weight = cached.iter().filter(|of| of.weight.0 == weight);
    if let Some(of) = of_weight.next() {
        // SAFETY: entries are removed before their tensors are freed; the program changes slots on
        // this thread.
        unsafe { marked.extend(of.slot_map().iter().map(|slot| *slot >= 0)) };
    }
    of_weight.next().is_none()
}

/// Whether a cache has slots of which no graph has shown the matrix yet.
fn has_unread_slots() -> bool {
    let cached = CACHES.cached.read();
    let is_read = |part: &Part| {
        let mut of = cached.iter();
        of.any(|of| of.slot_map.0 as usize == part.tensor)
    };
    let parts = CACHES.parts.read();
    let mut slot_maps = parts.iter().filter(|part| part.is_slot_map);
    slot_maps.any(|part| !is_read(part))
}

/// Returns why a matrix cannot have this type, if a cache has slots of another one.
pub fn refuses(model: &Model, matrix: usize, ty: i32) -> Option<String> {
    let of_matrix = |of: &&Cached| of.is_of(model, matrix);
    let slots = CACHES
        .cached
        .read()
        .iter()
        .filter(of_matrix)
        .map(|of| of.ty)
        .find(|slots| *slots != ty);
    // A context makes slots of the type that the matrix has then.
    let unread = || {
        let instance = &model.tensors[matrix].instances[0];
        // SAFETY: a model is reloaded only while it is alive.
        let now = unsafe { model.ggml.descriptor(instance.tensor.0) }.ty;
        (instance.has_experts && now != ty && has_unread_slots()).then_some(now)
    };
    let slots = slots.or_else(unread)?;
    let name = |ty: i32| TypeInfo::from_id(ty as u32).map_or("another type", TypeInfo::name);
    Some(format!(
        "the program's own expert cache has slots for {}, not {}: keep the type, or start the program without --moe-cache-mib",
        name(slots),
        name(ty)
    ))
}

/// Checks that caches have slots for matrices that get these types.
pub fn check(
    model: &Model,
    mut next: impl Iterator<Item = (usize, i32)>,
) -> Result<(), &'static str> {
    match next.any(|(matrix, ty)| refuses(model, matrix, ty).is_some()) {
        true => Err(OTHER_SLOTS),
        false => Ok(()),
    }
}

/// Records that the bytes of a matrix change, before the next evaluation begins.
pub fn changed(model: &Model, matrix: usize) {
    let cached = CACHES.cached.read();
    for of in cached.iter().filter(|of| of.is_of(model, matrix)) {
        of.is_stale.store(true, Ordering::Relaxed);
        CACHES.any_stale.store(true, Ordering::Release);
    }
}

/// Writes the bytes of changed matrices into the slots of their experts. An evaluation begins with
/// this call: a switch waits for it, and no evaluation has begun since the switch.
pub fn write_changed() {
    if !CACHES.any_stale.load(Ordering::Acquire) {
        return;
    }
    // An evaluation of another context waits here: its slots may be written by this thread.
    let _turn = CACHES.writing.lock();
    let began = Instant::now();
    for of in CACHES.cached.read().iter() {
        if of.is_stale.swap(false, Ordering::Relaxed) {
            // SAFETY: entries are removed before their tensors are freed; no evaluation runs.
            unsafe { of.write() };
        }
    }
    CACHES.any_stale.store(false, Ordering::Release);
    barrier::note_pause(began.elapsed());
}

impl Cached {
    fn is_of(&self, model: &Model, matrix: usize) -> bool {
        (self.model, self.matrix) == (model.number, matrix)
    }

    /// Returns the slot of each expert, or -1.
    ///
    /// # Safety
    ///
    /// The tensors are live, and the program does not change the slot map meanwhile.
    unsafe fn slot_map(&self) -> &[i32] {
        let layout = &self.ggml.layout;
        // SAFETY: as the caller ensures. The slot map is in host memory, and has a place for each
        // expert.
        unsafe {
            let [_, _, experts, _]: [i64; 4] = layout.read(self.weight.0, layout.ne);
            let map: *const i32 = layout.read(self.slot_map.0, layout.data);
            std::slice::from_raw_parts(map, experts as usize)
        }
    }

    /// Writes the bytes of the matrix into the slots of its experts.
    ///
    /// # Safety
    ///
    /// The tensors are live, and no evaluation reads them.
    unsafe fn write(&self) {
        let (f, layout) = (&self.ggml.f, &self.ggml.layout);
        // SAFETY: as the caller ensures.
        unsafe {
            let data: *const u8 = layout.read(self.weight.0, layout.data);
            let [_, _, size, _]: [usize; 4] = layout.read(self.weight.0, layout.nb);
            let [_, _, slots, _]: [i64; 4] = layout.read(self.slots.0, layout.ne);
            for (expert, &slot) in self.slot_map().iter().enumerate() {
                if (0..slots).contains(&i64::from(slot)) {
                    let bytes: *const c_void = data.add(expert * size).cast();
                    let to = slot as usize * size;
                    (f.ggml_backend_tensor_set)(self.slots.0, bytes, to, size);
                    CACHES.written_experts.fetch_add(1, Ordering::Relaxed);
                    CACHES
                        .written_bytes
                        .fetch_add(size as u64, Ordering::Relaxed);
                }
            }
        }
    }
}

/// Forgets what is in a buffer that is about to be freed.
pub fn buffer_freed(buffer: *mut Buffer) {
    if exists() {
        CACHES
            .parts
            .write()
            .retain(|part| part.buffer != buffer as usize);
        forget(|of| of.buffers.contains(&(buffer as usize)));
    }
}

/// Forgets tensors at these addresses, whose memory is about to be freed.
pub fn tensors_freed(range: &Range<usize>) {
    if exists() {
        CACHES
            .parts
            .write()
            .retain(|part| !range.contains(&part.tensor));
        let gone = |of: TensorPointer| range.contains(&(of.0 as usize));
        forget(|of| [of.weight, of.slots, of.slot_map].into_iter().any(gone));
    }
}

fn forget(gone: impl Fn(&Cached) -> bool) {
    if !CACHES.cached.read().iter().any(&gone) {
        return;
    }
    let _no_switch = barrier::hold();
    CACHES.cached.write().retain(|of| !gone(of));
}
