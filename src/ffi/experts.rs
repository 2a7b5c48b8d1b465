//! Expert tensors: their names, and a list of those of a model.

use std::ffi::c_char;

use super::handle;
use super::model::llama_model;
use super::status::{Failure, llama_sidecar_status, status};
use super::{SizedStruct, fill, put, text};
use sidecar_core::experts::{ExpertName, Projection};

/// A weight matrix of an expert.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum llama_sidecar_projection {
    /// Gate.
    Gate = 0,
    /// Up.
    Up = 1,
    /// Gate and up in one matrix.
    GateUp = 2,
    /// Down.
    Down = 3,
}

impl From<Projection> for llama_sidecar_projection {
    fn from(projection: Projection) -> llama_sidecar_projection {
        match projection {
            Projection::Gate => llama_sidecar_projection::Gate,
            Projection::Up => llama_sidecar_projection::Up,
            Projection::GateUp => llama_sidecar_projection::GateUp,
            Projection::Down => llama_sidecar_projection::Down,
        }
    }
}

/// The parsed name of an expert tensor.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct llama_sidecar_expert_name {
    /// Set by the caller to sizeof(struct llama_sidecar_expert_name).
    pub struct_size: usize,
    /// Number of the layer.
    pub layer: u32,
    /// Which matrix.
    pub projection: llama_sidecar_projection,
    /// Number of the expert; -1 if the tensor has all experts of the layer.
    pub expert: i64,
}

// SAFETY: repr(C), starts with struct_size, plain fields.
unsafe impl SizedStruct for llama_sidecar_expert_name {
    const NAME: &'static str = "llama_sidecar_expert_name";
    const FIRST: usize = 24;
}

/// Parses the name of an expert tensor, for example blk.5.ffn_down_exps.weight (all experts of
/// layer 5), blk.5.ffn_down.3.weight or blk.5.ffn_down_exps.3.weight (expert 3).
///
/// Other tensors fail with LLAMA_SIDECAR_STATUS_NOT_FOUND, also biases, routers and shared experts,
/// which every token uses.
///
/// # Safety
///
/// `name` is null or NUL-terminated; `parsed` is null or points to a struct whose struct_size is set.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn llama_sidecar_expert_name_parse(
    name: *const c_char,
    parsed: *mut llama_sidecar_expert_name,
) -> llama_sidecar_status {
    status(|| {
        // SAFETY: as the caller guarantees.
        let name = unsafe { text(name, "name") }?.to_string_lossy();
        let found = ExpertName::parse(&name).ok_or_else(|| {
            Failure::new(
                llama_sidecar_status::NotFound,
                format!(
                    "'{name}' is not the name of an expert tensor: expected a name such as blk.5.ffn_down_exps.weight"
                ),
            )
        })?;
        let value = llama_sidecar_expert_name {
            struct_size: size_of::<llama_sidecar_expert_name>(),
            layer: found.layer,
            projection: found.projection.into(),
            expert: found.expert.map_or(-1, i64::from),
        };
        // SAFETY: as the caller guarantees.
        unsafe { fill(parsed, &value) }
    })
}

/// An expert tensor of a model.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct llama_sidecar_expert_tensor {
    /// Set by the caller to sizeof(struct llama_sidecar_expert_tensor).
    pub struct_size: usize,
    /// Index of the tensor for llama_sidecar_tensor_get_info.
    pub tensor: u64,
    /// Size of the tensor in bytes, at the time of the call.
    pub nbytes: u64,
    /// Size of the matrix of one expert in bytes; 0 if n_experts is 0.
    pub expert_bytes: u64,
    /// Number of the layer.
    pub layer: u32,
    /// Which matrix.
    pub projection: llama_sidecar_projection,
    /// Number of the first expert in the tensor.
    pub first_expert: u32,
    /// Number of experts in the tensor, one after the other: 1, or all of the layer. 0 if the shape
    /// is not that of experts, or if the layer or an expert has a number of 4096 or more.
    pub n_experts: u32,
}

// SAFETY: repr(C), starts with struct_size, plain fields.
unsafe impl SizedStruct for llama_sidecar_expert_tensor {
    const NAME: &'static str = "llama_sidecar_expert_tensor";
    const FIRST: usize = 48;
}

/// Writes the number of expert tensors of a model to `count`; 0 without routed experts.
///
/// # Safety
///
/// `count` is null or valid for a write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn llama_sidecar_expert_tensor_count(
    model: *const llama_model,
    count: *mut u64,
) -> llama_sidecar_status {
    status(|| {
        let open = handle::get(model)?;
        let tensors = open.model.experts().tensors().len();
        // SAFETY: as the caller guarantees.
        unsafe { put(count, tensors as u64, "count") }
    })
}

/// Fills `info` with the layer, the matrix, the experts and the sizes of an expert tensor.
///
/// @param index Less than the number of llama_sidecar_expert_tensor_count. The tensors are ascending
/// by layer, then by projection, then by expert.
///
/// # Safety
///
/// `info` is null or points to a struct whose struct_size is set.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn llama_sidecar_expert_tensor_get_info(
    model: *const llama_model,
    index: u64,
    info: *mut llama_sidecar_expert_tensor,
) -> llama_sidecar_status {
    status(|| {
        let open = handle::get(model)?;
        let tensors = open.model.experts().tensors();
        let at = usize::try_from(index).ok();
        let tensor = at.and_then(|at| tensors.get(at)).ok_or_else(|| {
            Failure::new(
                llama_sidecar_status::NotFound,
                format!(
                    "expert tensor {index} does not exist: the model has {}",
                    tensors.len()
                ),
            )
        })?;
        let nbytes = open.model.tensor(tensor.tensor).nbytes();
        let value = llama_sidecar_expert_tensor {
            struct_size: size_of::<llama_sidecar_expert_tensor>(),
            tensor: tensor.tensor as u64,
            nbytes,
            expert_bytes: nbytes.checked_div(tensor.experts.into()).unwrap_or(0),
            layer: tensor.name.layer,
            projection: tensor.name.projection.into(),
            first_expert: tensor.range().start,
            n_experts: tensor.experts,
        };
        // SAFETY: as the caller guarantees.
        unsafe { fill(info, &value) }
    })
}
