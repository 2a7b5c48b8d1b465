//! Masks of routers: tensors that are added to the scores of experts.
//!
//! libllama builds a layer of experts from a product with `blk.N.ffn_gate_inp.weight`, the scores. Its calls of
//! `ggml_mul_mat` come here, and get the sum of the product and of a mask: zero for an expert that may be chosen, minus
//! infinity for one that may not. Softmax and sigmoid make zero of minus infinity, so that the others have the weights
//! that they would have without that expert. A bias that only counts for the choice, `blk.N.exp_probs_b`, could exceed that
//! zero: its sum, from `ggml_add`, gets the mask, too.
//!
//! The masks are in all graphs from the start. A mask of zeros changes no score, and another mask is other bytes of the
//! same tensor, so that a graph that is used again needs no change. They are written by the next evaluation, before it
//! computes: its thread can wait for what its devices still compute.

use std::cell::Cell;
use std::ffi::{CString, c_void};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicPtr, Ordering};

use parking_lot::{Mutex, RwLock};

use crate::ggml::{Buffer, Context, F32, Ggml, OwnBuffer, Tensor};
use crate::loader::caller::Caller;
use crate::loader::redirect::Redirection;
use crate::process::thread::Inside;
use crate::program::graph;
use crate::program::models::{Model, TensorPointer};

/// What the name of a router ends with.
const ROUTER: &[&[u8]] = &[b".ffn_gate_inp.weight"];
/// What names of biases for the choice end with: in most models, in Hunyuan 3, and for tokens of images.
const CHOICE_BIAS: &[&[u8]] = &[
    b".exp_probs_b.bias",
    b".exp_probs_b",
    b".exp_probs_b_vl.bias",
];
/// What names of masks end with.
pub const MASK: &str = ".ffn_gate_inp.mask";

/// The products of which masks change some.
pub static PRODUCT: Redirection = Redirection::of(c"ggml_mul_mat");
/// The sums of which masks change some.
pub static SUM: Redirection = Redirection::of(c"ggml_add");
/// The copy of ggml whose calls are redirected.
static GGML: AtomicPtr<Ggml> = AtomicPtr::new(std::ptr::null_mut());
/// The masks of all models. A list: there are as many as layers.
static MASKS: RwLock<Vec<Arc<Mask>>> = RwLock::new(Vec::new());
/// Whether any mask is to be written.
static ANY_STALE: AtomicBool = AtomicBool::new(false);
/// Held by the evaluation that writes masks.
static WRITING: Mutex<()> = Mutex::new(());

thread_local! {
    /// The mask of the layer that this thread builds.
    static LAST: Cell<Option<(u32, TensorPointer)>> = const { Cell::new(None) };
}

/// A function of two operands.
type Binary = unsafe extern "C-unwind" fn(*mut Context, *mut Tensor, *mut Tensor) -> *mut Tensor;

/// The mask of a router.
pub struct Mask {
    ggml: &'static Ggml,
    /// The address of the router.
    router: usize,
    /// The number of the layer.
    pub layer: u32,
    /// The number of its experts.
    pub experts: u32,
    tensor: TensorPointer,
    _buffer: Mutex<OwnBuffer>,
    masked: Mutex<Vec<u32>>,
    /// Whether the tensor is to be written.
    is_stale: AtomicBool,
}

/// Lets libllama build graphs with masks; `caller` has opened a file of a model.
pub fn install(caller: &Caller, ggml: &'static Ggml) {
    if !caller.is_llama() || ggml.ops.fused.is_some() {
        return;
    }
    let before = GGML.swap(std::ptr::from_ref(ggml).cast_mut(), Ordering::AcqRel);
    if !before.is_null() && !std::ptr::eq(before, ggml) {
        // There is one function to go on to.
        GGML.store(before, Ordering::Release);
        return;
    }
    for (redirection, to) in [
        (&PRODUCT, product as Binary as usize),
        (&SUM, sum as Binary as usize),
    ] {
        let real = caller.symbol(redirection.name()) as usize;
        // SAFETY: the type that ggml.h gives; libllama stays loaded once its ggml is known.
        unsafe { redirection.install(to, real, |object| caller.is(object)) };
    }
}

/// Replaces `ggml_mul_mat`.
unsafe extern "C-unwind" fn product(
    context: *mut Context,
    a: *mut Tensor,
    b: *mut Tensor,
) -> *mut Tensor {
    // SAFETY: the arguments of the call, to the function that was called before.
    unsafe {
        let real: Binary = std::mem::transmute(PRODUCT.before());
        let product = real(context, a, b);
        match ggml().and_then(|ggml| Some((ggml, layer_of(ggml, a, ROUTER)?))) {
            Some((ggml, layer)) => masked(ggml, context, product, mask_of(ggml, a, layer)),
            None => product,
        }
    }
}

/// Replaces `ggml_add`.
unsafe extern "C-unwind" fn sum(
    context: *mut Context,
    a: *mut Tensor,
    b: *mut Tensor,
) -> *mut Tensor {
    // SAFETY: the arguments of the call, to the function that was called before.
    unsafe {
        let real: Binary = std::mem::transmute(SUM.before());
        let sum = real(context, a, b);
        match ggml().and_then(|ggml| Some((ggml, layer_of(ggml, b, CHOICE_BIAS)?))) {
            Some((ggml, layer)) => {
                let last = LAST.get().filter(|(of, _)| *of == layer);
                masked(ggml, context, sum, last.map(|(_, mask)| mask))
            }
            None => sum,
        }
    }
}

fn ggml() -> Option<&'static Ggml> {
    // SAFETY: from a reference that lives for ever.
    unsafe { GGML.load(Ordering::Acquire).as_ref() }
}

/// Returns the sum of scores and a mask.
///
/// # Safety
///
/// Scores of a live context, one row of them with a number for each expert.
unsafe fn masked(
    ggml: &Ggml,
    context: *mut Context,
    scores: *mut Tensor,
    mask: Option<TensorPointer>,
) -> *mut Tensor {
    match mask {
        // SAFETY: as the caller ensures; the mask lives as long as its model.
        Some(mask) => unsafe { (ggml.f.ggml_add)(context, scores, mask.0) },
        None => scores,
    }
}

/// Returns the layer of a weight whose name ends in one of these ways.
///
/// # Safety
///
/// A live tensor, or null.
unsafe fn layer_of(ggml: &Ggml, tensor: *mut Tensor, ends: &[&[u8]]) -> Option<u32> {
    if tensor.is_null() {
        return None;
    }
    // SAFETY: as the caller ensures.
    layer_in(unsafe { graph::name(ggml, tensor) }, ends)
}

fn layer_in(name: &[u8], ends: &[&[u8]]) -> Option<u32> {
    let rest = name.strip_prefix(b"blk.")?;
    let number = ends.iter().find_map(|end| rest.strip_suffix(*end))?;
    std::str::from_utf8(number).ok()?.parse().ok()
}

/// Returns the mask of a router, which is made with its first graph.
///
/// # Safety
///
/// A live tensor of this copy.
unsafe fn mask_of(ggml: &'static Ggml, router: *mut Tensor, layer: u32) -> Option<TensorPointer> {
    let known = find(router as usize).or_else(|| {
        let _inside = Inside::enter();
        // SAFETY: as the caller ensures.
        let mask = Arc::new(unsafe { Mask::new(ggml, router, layer) }?);
        let mut masks = MASKS.write();
        let before = masks.iter().find(|of| of.router == mask.router);
        let mask = before.unwrap_or(&mask).clone();
        if before.is_none() {
            masks.push(mask.clone());
        }
        Some(mask)
    });
    let found = known.map(|mask| mask.tensor);
    LAST.set(found.map(|mask| (layer, mask)));
    found
}

/// Returns the mask of a router, by its address.
fn find(router: usize) -> Option<Arc<Mask>> {
    let masks = MASKS.read();
    masks.iter().find(|mask| mask.router == router).cloned()
}

impl Mask {
    /// Makes a mask of zeros on the device of a router.
    ///
    /// # Safety
    ///
    /// A live tensor of this copy.
    unsafe fn new(ggml: &'static Ggml, router: *mut Tensor, layer: u32) -> Option<Mask> {
        let (f, at) = (&ggml.f, &ggml.layout);
        // SAFETY: as the caller ensures; the buffer and its type are live.
        unsafe {
            let buffer: *mut Buffer = at.read(router, at.buffer);
            if buffer.is_null() {
                return None;
            }
            let loaded = (f.ggml_backend_buffer_get_type)(buffer);
            if ggml.is_split(loaded) || crate::ggml::is_remote(ggml, loaded) {
                return None;
            }
            let device = (f.ggml_backend_buft_get_device)(loaded);
            let buft = match device.is_null() || (f.ggml_backend_buft_is_host)(loaded) {
                true => (f.ggml_backend_cpu_buffer_type)(),
                false => (f.ggml_backend_dev_buffer_type)(device),
            };
            let experts = at.read::<[i64; 4]>(router, at.ne)[1];
            let name = CString::new(format!("blk.{layer}{MASK}")).ok()?;
            let (buffer, tensor) =
                OwnBuffer::for_tensor(ggml, buft, F32, &[experts], &name).ok()?;
            let mask = Mask {
                ggml,
                router: router as usize,
                layer,
                experts: u32::try_from(experts).ok()?,
                tensor: TensorPointer(tensor),
                _buffer: Mutex::new(buffer),
                masked: Mutex::default(),
                is_stale: AtomicBool::new(false),
            };
            mask.write();
            Some(mask)
        }
    }

    /// Returns the experts that are never chosen, ascending.
    pub fn masked(&self) -> Vec<u32> {
        self.masked.lock().clone()
    }

    /// Masks these experts, and no others, from the next evaluation on. No evaluation runs.
    pub fn set(&self, masked: Vec<u32>) {
        *self.masked.lock() = masked;
        self.is_stale.store(true, Ordering::SeqCst);
        ANY_STALE.store(true, Ordering::SeqCst);
    }

    /// Writes the tensor. Nothing reads it meanwhile.
    fn write(&self) {
        let masked = self.masked();
        let score = |expert| match masked.contains(&expert) {
            true => f32::NEG_INFINITY,
            false => 0.0,
        };
        let scores: Vec<f32> = (0..self.experts).map(score).collect();
        let bytes = size_of_val(&*scores);
        let scores = scores.as_ptr().cast::<c_void>();
        // SAFETY: a live tensor of so many numbers.
        unsafe { (self.ggml.f.ggml_backend_tensor_set)(self.tensor.0, scores, 0, bytes) };
    }
}

/// Writes the masks that were set since the last evaluation. An evaluation is about to begin; `synchronize` waits for
/// what its devices still compute. No other one runs that began before the masks were set, and those that began since
/// wait here.
pub fn write_changed(synchronize: impl FnOnce()) {
    if !ANY_STALE.load(Ordering::SeqCst) {
        return;
    }
    let _turn = WRITING.lock();
    if !ANY_STALE.load(Ordering::SeqCst) {
        return;
    }
    let _inside = Inside::enter();
    synchronize();
    for mask in MASKS.read().iter() {
        if mask.is_stale.swap(false, Ordering::SeqCst) {
            mask.write();
        }
    }
    ANY_STALE.store(false, Ordering::SeqCst);
}

/// Whether a model has a tensor at an address.
fn has(model: &Model, address: usize) -> bool {
    let mut instances = model.tensors.iter().flat_map(|tensor| &tensor.instances);
    instances.any(|instance| instance.tensor.0 as usize == address)
}

/// Returns the masks of a model, by layer.
pub fn of_model(model: &Model) -> Vec<Arc<Mask>> {
    let masks = MASKS.read();
    let of_model = masks.iter().filter(|mask| has(model, mask.router));
    let mut of_model: Vec<_> = of_model.cloned().collect();
    of_model.sort_unstable_by_key(|mask| mask.layer);
    of_model
}

/// Forgets the masks of a model that the program is about to free.
pub fn model_freed(model: &Model) {
    MASKS.write().retain(|mask| !has(model, mask.router));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn layers_are_read_from_names() {
        assert_eq!(layer_in(b"blk.17.ffn_gate_inp.weight", ROUTER), Some(17));
        for bias in [
            &b"blk.3.exp_probs_b.bias"[..],
            b"blk.3.exp_probs_b",
            b"blk.3.exp_probs_b_vl.bias",
        ] {
            assert_eq!(layer_in(bias, CHOICE_BIAS), Some(3));
        }
        for other in [
            &b"blk.3.ffn_gate_inp_shexp.weight"[..],
            b"blk.x.ffn_gate_inp.weight",
            b"ffn_gate_inp.weight",
            b"blk.3.ffn_gate_inp.bias",
            b"blk.-3.ffn_gate_inp.weight",
        ] {
            assert_eq!(layer_in(other, ROUTER), None);
        }
    }
}
