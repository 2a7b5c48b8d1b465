//! The products of a work in the memory of a backend.

use std::ffi::{c_int, c_void};
use std::time::{Duration, Instant};

use sidecar_core::gguf::TypeInfo;
use sidecar_core::protocol::{Matrix, Work};

use crate::ggml::{
    Backend, Buffer, BufferType, Device, F32, Ggml, Graph, I32, OwnContext, STATUS_SUCCESS, Tensor,
    USAGE_WEIGHTS,
};

/// What tensors are aligned to: backends need 512 bytes at most.
const ALIGNMENT: u64 = 4096;
/// A byte of a weight. As a scale it is a small number that is not 0, in all types.
const FILL: u8 = 0x11;

/// Products that are evaluated as one graph. Each writes to the same place, and all routed ones use the same
/// ids.
pub struct Products {
    ggml: &'static Ggml,
    _context: OwnContext,
    graph: *mut Graph,
    _buffers: Vec<Held>,
    /// The ids of experts, with the number of experts.
    ids: Vec<(*mut Tensor, Matrix)>,
    tokens: u64,
    /// The matrices that are in a special buffer type.
    pub special: Vec<Matrix>,
    random: u64,
}

/// A buffer that is freed when dropped.
struct Held {
    ggml: &'static Ggml,
    buffer: *mut Buffer,
}

impl Drop for Held {
    fn drop(&mut self) {
        // SAFETY: allocated by this copy, dropped once; its tensors are not used any more.
        unsafe { (self.ggml.f.ggml_backend_buffer_free)(self.buffer) }
    }
}

/// Where tensors are placed one after another.
struct Place {
    buft: *mut BufferType,
    tensors: Vec<(*mut Tensor, u64)>,
    bytes: u64,
}

impl Place {
    fn new(buft: *mut BufferType) -> Place {
        Place {
            buft,
            tensors: Vec::new(),
            bytes: 0,
        }
    }

    fn add(&mut self, ggml: &Ggml, tensor: *mut Tensor) {
        self.tensors.push((tensor, self.bytes));
        // SAFETY: a live buffer type, and a tensor of a live context.
        let size = unsafe { (ggml.f.ggml_backend_buft_get_alloc_size)(self.buft, tensor) } as u64;
        self.bytes += size.next_multiple_of(ALIGNMENT);
    }

    /// Allocates the memory of all tensors.
    fn allocate(self, ggml: &'static Ggml) -> Result<Held, String> {
        let bytes = self.bytes + ALIGNMENT;
        // SAFETY: a live buffer type.
        let buffer = unsafe { (ggml.f.ggml_backend_buft_alloc_buffer)(self.buft, bytes as usize) };
        if buffer.is_null() {
            return Err(format!("no memory for {bytes} bytes"));
        }
        let held = Held { ggml, buffer };
        // SAFETY: a live buffer; each tensor has the size that its buffer type returns.
        unsafe {
            (ggml.f.ggml_backend_buffer_set_usage)(buffer, USAGE_WEIGHTS);
            let base = (ggml.f.ggml_backend_buffer_get_base)(buffer) as u64;
            let base = base.next_multiple_of(ALIGNMENT);
            for (tensor, offset) in self.tensors {
                let address = (base + offset) as *mut c_void;
                (ggml.f.ggml_backend_tensor_alloc)(buffer, tensor, address);
            }
        }
        Ok(held)
    }
}

impl Products {
    /// Makes the products. Weights are in the first buffer type among `special` whose kernels the device
    /// has, else in plain memory.
    pub fn new(
        ggml: &'static Ggml,
        device: *mut Device,
        plain: *mut BufferType,
        special: impl IntoIterator<Item = *mut BufferType>,
        work: &Work,
    ) -> Result<Products, String> {
        let count = work.matrices.len();
        // A graph has space for as many weights, inputs and ids as for products.
        let size = 3 * count + 1;
        let context = ggml.graph_context(size, 4 * count);
        let context = context.ok_or("no memory for a graph")?;
        let special: Vec<_> = special.into_iter().collect();
        let mut weights = vec![Place::new(plain)];
        weights.extend(special.iter().map(|&buft| Place::new(buft)));
        let mut others = Place::new(plain);
        let mut ids: Vec<(*mut Tensor, Matrix)> = Vec::new();
        let mut inputs: Vec<(*mut Tensor, [i64; 3])> = Vec::new();
        let mut results = Vec::new();
        let mut taken = Vec::new();
        for matrix in &work.matrices {
            check(ggml, matrix)?;
            let routed = matrix.used > 0;
            let extents = [matrix.columns, matrix.rows, matrix.experts].map(|of| of as i64);
            let weight = context.tensor(matrix.ty as c_int, &extents[..2 + usize::from(routed)]);
            let tokens = work.tokens as i64;
            let shape = match (routed, matrix.own_inputs) {
                (false, _) => [extents[0], tokens, 1],
                (true, false) => [extents[0], 1, tokens],
                (true, true) => [extents[0], matrix.used as i64, tokens],
            };
            let input = match inputs.iter().find(|(_, of)| *of == shape) {
                Some((input, _)) => *input,
                None => {
                    let input = context.tensor(F32, &shape);
                    others.add(ggml, input);
                    inputs.push((input, shape));
                    input
                }
            };
            // SAFETY: tensors of one live context, with the shapes that the operations need.
            let result = unsafe {
                if routed {
                    let of = ids
                        .iter()
                        .find(|(_, of)| (of.used, of.experts) == (matrix.used, matrix.experts));
                    let of = of.map(|(of, _)| *of).unwrap_or_else(|| {
                        let of = context.tensor(I32, &[matrix.used as i64, tokens]);
                        others.add(ggml, of);
                        ids.push((of, *matrix));
                        of
                    });
                    (ggml.f.ggml_mul_mat_id)(context.raw(), weight, input, of)
                } else {
                    (ggml.f.ggml_mul_mat)(context.raw(), weight, input)
                }
            };
            results.push(result);
            // SAFETY: live buffer types and device; tensors of a live context.
            let takes =
                |place: &Place| unsafe { ggml.supports(device, weight, result, place.buft) };
            let at = weights.iter().skip(1).position(takes);
            taken.extend(at.map(|_| *matrix));
            weights[at.map_or(0, |at| at + 1)].add(ggml, weight);
            if at.is_none() && !device.is_null() {
                // SAFETY: a live device and a node of a live context.
                let can = unsafe { (ggml.f.ggml_backend_dev_supports_op)(device, result) };
                if !can {
                    return Err(format!(
                        "it has no products with weights of type {}",
                        matrix.ty
                    ));
                }
            }
        }
        // SAFETY: tensors of a live context.
        let bytes = |result: &*mut Tensor| unsafe { (ggml.f.ggml_nbytes)(*result) };
        let largest = results.iter().map(bytes).max().unwrap_or(0) as u64;
        let at = others.bytes;
        others
            .tensors
            .extend(results.iter().map(|&result| (result, at)));
        others.bytes += (2 * largest).next_multiple_of(ALIGNMENT);
        let mut buffers = Vec::new();
        for (at, place) in weights.into_iter().chain([others]).enumerate() {
            if place.tensors.is_empty() {
                continue;
            }
            let is_special = (1..=special.len()).contains(&at);
            let tensors: Vec<_> = place.tensors.iter().map(|(tensor, _)| *tensor).collect();
            let held = place.allocate(ggml)?;
            // SAFETY: a live buffer and tensors with memory; special types reorder whole tensors.
            unsafe {
                match is_special {
                    false => (ggml.f.ggml_backend_buffer_clear)(held.buffer, FILL),
                    true => tensors.iter().for_each(|&tensor| {
                        let bytes = vec![FILL; (ggml.f.ggml_nbytes)(tensor)];
                        let from = bytes.as_ptr().cast();
                        (ggml.f.ggml_backend_tensor_set)(tensor, from, 0, bytes.len());
                    }),
                }
            }
            buffers.push(held);
        }
        // SAFETY: a live context with memory for the graph; nodes of the same context.
        let graph = unsafe {
            let graph = (ggml.f.ggml_new_graph_custom)(context.raw(), size, false);
            for result in results {
                (ggml.f.ggml_build_forward_expand)(graph, result);
            }
            graph
        };
        Ok(Products {
            ggml,
            _context: context,
            graph,
            _buffers: buffers,
            ids,
            tokens: work.tokens,
            special: taken,
            random: 1,
        })
    }

    /// Evaluates all products, with other experts than before. Returns the time.
    pub fn evaluate(&mut self, backend: *mut Backend) -> Result<Duration, String> {
        for (tensor, of) in &self.ids {
            let mut ids = Vec::new();
            for _ in 0..self.tokens {
                // Neighbours of a random expert: each token has distinct experts.
                self.random = self
                    .random
                    .wrapping_mul(6_364_136_223_846_793_005)
                    .wrapping_add(1);
                let step = of.experts / of.used;
                let first = (self.random >> 33) % of.experts;
                ids.extend((0..of.used).map(|at| ((first + at * step) % of.experts) as i32));
            }
            // SAFETY: the tensor has as many numbers.
            unsafe {
                (self.ggml.f.ggml_backend_tensor_set)(
                    *tensor,
                    ids.as_ptr().cast(),
                    0,
                    4 * ids.len(),
                );
            }
        }
        let begun = Instant::now();
        // SAFETY: a live backend, and a graph whose tensors are in its memory.
        match unsafe { self.ggml.compute(backend, self.graph) } {
            STATUS_SUCCESS => Ok(begun.elapsed()),
            status => Err(format!("products fail with status {status}")),
        }
    }
}

/// Returns an error for a matrix that ggml would abort on: the request is from a file.
fn check(ggml: &Ggml, matrix: &Matrix) -> Result<(), String> {
    let ty = TypeInfo::from_id(matrix.ty).filter(|ty| ggml.knows(ty));
    let ty = ty.ok_or_else(|| format!("the program's ggml has no type {}", matrix.ty))?;
    let weights = [matrix.rows, matrix.experts];
    let weights = weights
        .iter()
        .try_fold(matrix.columns, |all, of| all.checked_mul(*of));
    let is_sound = weights.is_some_and(|all| all > 0 && all < 1 << 40)
        && matrix.columns.is_multiple_of(ty.block)
        && matrix.used <= matrix.experts;
    match is_sound {
        true => Ok(()),
        false => Err(format!("{matrix:?} is no matrix")),
    }
}
