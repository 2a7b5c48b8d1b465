//! The offsets of the fields of `struct ggml_tensor`, determined at run time.
//!
//! The struct differs between versions and forks of ggml. Tensors are made through public
//! functions, and a field is at the offset that has its known value. If no offset or several
//! offsets have the value, the layout is not supported.

use std::ffi::c_int;

use super::sys::{Functions, FusedMakers};
use super::types::{Context, InitParams, Tensor};
use crate::process::memory::Memory;

/// `GGML_MAX_NAME`.
const NAME_BYTES: usize = 64;
/// `GGML_MAX_SRC`.
const MAX_SRC: usize = 10;
/// More tensors than are made to find the layout.
const TENSORS: usize = 32;

/// Offsets in bytes of the fields that are used.
#[derive(Debug, Clone, Copy)]
pub struct TensorLayout {
    /// `type`.
    pub ty: usize,
    /// `buffer`.
    pub buffer: usize,
    /// `ne`.
    pub ne: usize,
    /// `nb`.
    pub nb: usize,
    /// `op`.
    pub op: usize,
    /// `flags`.
    pub flags: usize,
    /// The first `src`.
    pub src: usize,
    /// The number of `src`.
    pub src_count: usize,
    /// `view_src`.
    pub view_src: usize,
    /// `data`.
    pub data: usize,
    /// `extra`.
    pub extra: usize,
}

/// Numbers of operations: those that read weights, and views.
#[derive(Debug, Clone, Copy)]
pub struct Ops {
    /// `GGML_OP_ADD`.
    pub add: i32,
    /// `GGML_OP_MUL`.
    pub mul: i32,
    /// `GGML_OP_MUL_MAT`.
    pub mul_mat: i32,
    /// `GGML_OP_MUL_MAT_ID`.
    pub mul_mat_id: i32,
    /// `GGML_OP_GET_ROWS`.
    pub get_rows: i32,
    /// `GGML_OP_VIEW`.
    pub view: i32,
    /// Operations of ik_llama.cpp; `None` in another ggml.
    pub fused: Option<FusedOps>,
}

/// Numbers of operations in ik_llama.cpp, where one node does the work of several, and the CPU
/// computes several nodes at once if their operations have a certain order.
#[derive(Debug, Clone, Copy)]
pub struct FusedOps {
    /// `GGML_OP_FUSED_UP_GATE`: up and gate, of one type, multiply one input.
    pub up_gate: i32,
    /// `GGML_OP_MOE_FUSED_UP_GATE`: the same with routed experts.
    pub moe_up_gate: i32,
    /// `GGML_OP_MUL_MULTI_ADD`: outputs of experts times gate weights, added.
    pub mul_multi_add: i32,
    /// `GGML_OP_CPY`.
    pub cpy: i32,
    /// `GGML_OP_RESHAPE`.
    pub reshape: i32,
}

/// How an operation uses its sources.
#[derive(Debug, Clone, Copy)]
pub struct Use {
    /// The operation, or the operation that does the same with a single weight.
    pub op: i32,
    /// The source with routed ids, for a product of experts.
    pub ids: Option<usize>,
}

impl Ops {
    /// Returns how an operation uses its sources.
    pub fn use_of(&self, op: i32) -> Use {
        let (op, ids) = match self.fused {
            Some(fused) if op == fused.moe_up_gate => (self.mul_mat_id, Some(3)),
            Some(fused) if op == fused.up_gate => (self.mul_mat, None),
            _ => (op, (op == self.mul_mat_id).then_some(2)),
        };
        Use { op, ids }
    }
}

impl TensorLayout {
    /// Reads a field.
    ///
    /// # Safety
    ///
    /// The tensor is one that this layout describes, the offset that of a field of
    /// type `T`.
    pub unsafe fn read<T: Copy>(&self, tensor: *const Tensor, offset: usize) -> T {
        // SAFETY: as the caller ensures.
        unsafe { tensor.byte_add(offset).cast::<T>().read_unaligned() }
    }

    /// Reads the address of the buffer and the extents of a tensor that may be gone; `None` if its memory is.
    pub fn read_placed(&self, memory: &Memory, tensor: *const Tensor) -> Option<(usize, [u64; 4])> {
        let end = (self.buffer + size_of::<usize>()).max(self.ne + size_of::<[u64; 4]>());
        // Both are among the first fields.
        let mut copy = [0usize; 32];
        let copy = copy.get_mut(..end.div_ceil(size_of::<usize>()))?;
        let is_there = memory.copy(tensor as usize, copy) == copy.len();
        let copy = copy.as_ptr().cast();
        // SAFETY: a copy of the start of a tensor, with both fields.
        is_there.then(|| unsafe { (self.read(copy, self.buffer), self.read(copy, self.ne)) })
    }

    /// Writes a field.
    ///
    /// # Safety
    ///
    /// As for reading, and no other thread uses the field.
    pub unsafe fn write<T: Copy>(&self, tensor: *mut Tensor, offset: usize, value: T) {
        // SAFETY: as the caller ensures.
        unsafe { tensor.byte_add(offset).cast::<T>().write_unaligned(value) }
    }

    /// Returns a source tensor of a node, or null.
    ///
    /// # Safety
    ///
    /// As for reading.
    pub unsafe fn source(&self, node: *const Tensor, number: usize) -> *mut Tensor {
        // SAFETY: as the caller ensures.
        unsafe { self.read(node, self.src + number * size_of::<*mut Tensor>()) }
    }

    /// Returns the source tensors of a node that are not null.
    ///
    /// # Safety
    ///
    /// As for reading.
    pub unsafe fn sources(&self, node: *const Tensor) -> impl Iterator<Item = *mut Tensor> {
        let layout = *self;
        (0..self.src_count)
            // SAFETY: as the caller ensures.
            .map(move |number| unsafe { layout.source(node, number) })
            .filter(|source| !source.is_null())
    }
}

/// Finds the offsets, or returns the name of a field that is unclear.
pub fn probe(
    f: &Functions,
    makers: Option<&FusedMakers>,
) -> Result<(TensorLayout, Ops), &'static str> {
    // SAFETY: a live context with memory for so many tensors.
    let probe = |context| unsafe { probe_in(f, makers, context) };
    in_context(f, TENSORS, probe).unwrap_or(Err("no context"))
}

/// Calls `work` with a new context, whose memory for so many tensors has a value everywhere; `None` if there is no
/// context.
pub fn in_context<R>(
    f: &Functions,
    tensors: usize,
    work: impl FnOnce(*mut Context) -> R,
) -> Option<R> {
    // SAFETY: takes nothing.
    let size = unsafe { (f.ggml_tensor_overhead)() } * tensors;
    let mut memory = vec![0u128; size.div_ceil(16)];
    let params = InitParams {
        mem_size: size,
        mem_buffer: memory.as_mut_ptr().cast(),
        no_alloc: true,
    };
    // SAFETY: the arguments of the headers; the context is freed once, before its memory.
    unsafe {
        let context = (f.ggml_init)(params);
        if context.is_null() {
            return None;
        }
        let result = work(context);
        (f.ggml_free)(context);
        Some(result)
    }
}

/// # Safety
///
/// `context` is live and has memory for [`TENSORS`] tensors.
unsafe fn probe_in(
    f: &Functions,
    makers: Option<&FusedMakers>,
    context: *mut Context,
) -> Result<(TensorLayout, Ops), &'static str> {
    const F32: c_int = 0;
    const F16: c_int = 1;
    const I32: c_int = 26;
    const Q8_0: c_int = 8;
    /// `GGML_UNARY_OP_SILU` of ik_llama.cpp.
    const SILU: c_int = 10;
    // SAFETY: the context is live; every tensor read below is followed by another one,
    // so that `overhead` bytes from its start are within the context.
    unsafe {
        let overhead = (f.ggml_tensor_overhead)();
        let new = |ty: c_int, ne: [i64; 4]| (f.ggml_new_tensor)(context, ty, 4, ne.as_ptr());
        let bytes = |tensor: *mut Tensor| {
            std::slice::from_raw_parts(tensor.cast::<u8>(), overhead).to_vec()
        };
        let half = new(F16, [96, 7, 5, 3]);
        let fresh = bytes(half);
        let single = new(F32, [96, 7, 5, 3]);
        let ids = new(I32, [4, 2, 1, 1]);
        let size = single as usize - half as usize;
        if size > overhead || size < 200 {
            return Err("size");
        }

        let ne = only(find(&fresh, &words([96, 7, 5, 3])), "ne")?;
        let nb = only(find(&fresh, &words([2, 192, 1344, 6720])), "nb")?;
        let [halves, singles, integers] = [half, single, ids].map(bytes);
        let ty = only(
            matching(size, |at| {
                [&halves, &singles, &integers].map(|tensor| number(tensor, at)) == [F16, F32, I32]
            }),
            "type",
        )?;
        let name = (f.ggml_get_name)(half) as usize - half as usize;
        let extra = name + NAME_BYTES;
        if extra + 8 > size || fresh[extra..extra + 8] != [0; 8] {
            return Err("extra");
        }

        let view = (f.ggml_view_tensor)(context, half);
        let other = new(F32, [96, 7, 5, 3]);
        let sum = (f.ggml_add)(context, single, other);
        let product = (f.ggml_mul)(context, single, other);
        let matrix = new(F32, [32, 8, 4, 1]);
        let activations = new(F32, [32, 4, 2, 1]);
        let routed = (f.ggml_mul_mat_id)(context, matrix, activations, ids);
        let flat = new(F32, [32, 8, 1, 1]);
        let multiplied = (f.ggml_mul_mat)(context, flat, flat);
        let index = new(I32, [4, 1, 1, 1]);
        let rows = (f.ggml_get_rows)(context, flat, index);
        let row = (f.ggml_view_1d)(context, flat, 32, 0);
        let fused = makers.map(|make| {
            let quantised = new(Q8_0, [32, 8, 1, 1]);
            let experts = new(Q8_0, [32, 8, 4, 1]);
            let outputs = new(F32, [32, 4, 2, 1]);
            let gates = new(F32, [1, 4, 2, 1]);
            [
                (make.up_gate)(context, quantised, quantised, flat, SILU),
                (make.moe_up_gate)(context, experts, experts, activations, ids, SILU),
                (make.mul_multi_add)(context, outputs, gates),
                (f.ggml_cpy)(context, flat, flat),
                (f.ggml_reshape_3d)(context, flat, 32, 4, 2),
            ]
        });
        let end = new(F32, [1, 1, 1, 1]);

        let pointer = |to: *mut Tensor| (to as usize).to_ne_bytes();
        let view_src = only(find(&bytes(view)[..size], &pointer(half)), "view_src")?;
        let pair = [pointer(single), pointer(other)].concat();
        let src = only(find(&bytes(sum)[..size], &pair), "src")?;
        let src_count = (view_src.checked_sub(src).ok_or("src")? / 8).min(MAX_SRC);
        if src_count < 3 {
            return Err("src");
        }
        let made = [sum, product, multiplied, routed, rows].map(bytes);
        let op = only(
            matching(size, |at| {
                let numbers = made.each_ref().map(|tensor| number(tensor, at));
                let distinct = (0..5).all(|i| !numbers[..i].contains(&numbers[i]));
                let in_range = numbers.iter().all(|n| (1..1000).contains(n));
                number(&fresh, at) == 0 && in_range && distinct
            }),
            "op",
        )?;

        let before = bytes(end);
        (f.ggml_set_input)(end);
        let after = bytes(end);
        let flags = only(
            matching(size, |at| {
                at % 4 == 0 && number(&before, at) != number(&after, at)
            }),
            "flags",
        )?;

        let buffer = (f.ggml_backend_buft_alloc_buffer)((f.ggml_backend_cpu_buffer_type)(), 4096);
        if buffer.is_null() {
            return Err("buffer");
        }
        let base = (f.ggml_backend_buffer_get_base)(buffer);
        (f.ggml_backend_tensor_alloc)(buffer, ids, base);
        let placed = bytes(ids);
        let buffer_at = only(
            find(&placed[..size], &(buffer as usize).to_ne_bytes()),
            "buffer",
        );
        let data = only(
            find(&placed[..size], &(base as usize).to_ne_bytes()),
            "data",
        );
        (f.ggml_backend_buffer_free)(buffer);
        let (buffer, data) = (buffer_at?, data?);

        let number_of = |tensor: &Vec<u8>| number(tensor, op);
        let [add, mul, mul_mat, mul_mat_id, get_rows] = made.each_ref().map(number_of);
        let view = number_of(&bytes(row));
        let fused = fused.map(|made| made.map(|tensor| number_of(&bytes(tensor))));
        Ok((
            TensorLayout {
                ty,
                buffer,
                ne,
                nb,
                op,
                flags,
                src,
                src_count,
                view_src,
                data,
                extra,
            },
            Ops {
                add,
                mul,
                mul_mat,
                mul_mat_id,
                get_rows,
                view,
                fused: fused.map(
                    |[up_gate, moe_up_gate, mul_multi_add, cpy, reshape]| FusedOps {
                        up_gate,
                        moe_up_gate,
                        mul_multi_add,
                        cpy,
                        reshape,
                    },
                ),
            },
        ))
    }
}

fn words(numbers: [i64; 4]) -> Vec<u8> {
    numbers.map(i64::to_ne_bytes).concat()
}

fn number(tensor: &[u8], at: usize) -> i32 {
    i32::from_ne_bytes(tensor[at..at + 4].try_into().expect("four bytes"))
}

/// Returns the offsets, multiples of four, at which a condition holds.
fn matching(size: usize, holds: impl Fn(usize) -> bool) -> impl Iterator<Item = usize> {
    (0..=size - 4).step_by(4).filter(move |&at| holds(at))
}

/// Returns the offsets, multiples of four, at which a pattern is.
fn find(bytes: &[u8], pattern: &[u8]) -> impl Iterator<Item = usize> {
    let found = bytes.windows(pattern.len()).enumerate().step_by(4);
    found
        .filter(move |(_, window)| *window == pattern)
        .map(|(at, _)| at)
        .collect::<Vec<_>>()
        .into_iter()
}

fn only(
    mut found: impl Iterator<Item = usize>,
    field: &'static str,
) -> Result<usize, &'static str> {
    match (found.next(), found.next()) {
        (Some(at), None) => Ok(at),
        _ => Err(field),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_field_is_where_its_value_is_once() {
        let bytes = [0u8, 0, 0, 0, 7, 0, 0, 0, 9, 0, 0, 0];
        let at = |n: i32| only(find(&bytes, &n.to_ne_bytes()), "field");
        assert_eq!((at(7), at(9), at(8)), (Ok(4), Ok(8), Err("field")));
        let twice = [7u8, 0, 0, 0, 7, 0, 0, 0];
        assert_eq!(
            only(find(&twice, &7i32.to_ne_bytes()), "field"),
            Err("field")
        );
        let found = matching(12, |at| number(&bytes, at) > 7);
        assert_eq!(only(found, "field"), Ok(8));
    }
}
