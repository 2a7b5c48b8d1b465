//! The buffer type that llama.cpp would have chosen.
//!
//! The CPU backend has buffer types that store some types in another order, with other
//! kernels. A tensor gives the same result as after a fresh load only in the buffer type
//! that llama.cpp would have loaded it into. llama.cpp takes the first buffer type in which
//! the device supports the operation that reads the tensor. Its order is: the device of the
//! layer, memory that a GPU can read, the special types of the CPU, and plain memory
//! (`select_weight_buft` in llama.cpp).

use std::ffi::{CStr, c_int};

use sidecar_core::gguf::TypeInfo;

use crate::ggml::{BufferType, DEVICE_ACCEL, DEVICE_CPU, Descriptor, Device, Ggml, Tensor};
use crate::program::loads;
use crate::program::models::{Instance, Model};
use crate::streaming::load;

/// Tokens of the batch that llama.cpp checks its devices with.
const BATCH: i64 = 512;

/// Returns the buffer type for bytes of a tensor; `None` when no device can use them. With `on_host`, it is
/// one of host memory that can be read back: the tensor is there until its device has memory.
pub fn choose(
    model: &Model,
    instance: &Instance,
    ne: &[i64],
    ty: &TypeInfo,
    on_host: bool,
) -> Option<*mut BufferType> {
    let own = device_buffer_type(model, instance);
    let mut others = in_host_memory(model);
    let op = instance.op().unwrap_or(match ne.len() {
        1 => model.ggml.ops.mul,
        _ => model.ggml.ops.mul_mat,
    });
    let supported = |&(device, buft): &(*mut Device, *mut BufferType)| {
        supports(model.ggml, instance, ne, ty, op, buft, device)
    };
    if on_host {
        others.retain(|&(device, buft)| buft == plain_memory(model) || !is_cpu(model.ggml, device));
    } else if let Some((_, buft)) = own.filter(supported) {
        return Some(buft);
    }
    if own.is_none() && has_override(model, instance, ne, op, &others) {
        let plain = |(_, buft): &(*mut Device, *mut BufferType)| *buft == plain_memory(model);
        others.retain(plain);
    }
    let found = others.into_iter().find(supported)?;
    Some(as_mapped(model, instance, found))
}

/// Whether ik_llama.cpp computes other weights or parameters from a weight as it loads it.
pub fn is_read_at_load(model: &Model, tensor: usize) -> bool {
    const PARTS: [&str; 6] = [
        ".attn_kv_b.",
        ".attn_k_b.",
        ".attn_v_b.",
        ".ffn_gate_inp_s.",
        "param_sink",
        ".scale",
    ];
    let name = model.name(tensor).to_string_lossy();
    model.ggml.ops.fused.is_some() && PARTS.iter().any(|part| name.contains(part))
}

/// Returns why no kernel of this program supports a tensor in another type, if none does.
/// Backends report that they support element-wise operations for every type, and abort on
/// most.
pub fn refuses_type(
    instance: &Instance,
    ggml: &Ggml,
    n_dims: usize,
    ty: &TypeInfo,
) -> Option<String> {
    if ty.id == instance.original.ty as u32 {
        return None;
    }
    let ops = &ggml.ops;
    if ty.interleave > 1 && (instance.op() == Some(ops.get_rows) || instance.is_shared()) {
        return Some(format!(
            "rows are looked up in it, and {} interleaves rows",
            ty.name()
        ));
    }
    let op = match (instance.op(), instance.bound_to_type()) {
        (_, Some(op)) => op,
        // Only matrices are certain to be multiplied.
        (None, None) if n_dims <= 1 => {
            return Some(format!(
                "no graph has read it so far, and most operations on vectors do not support {}: keep its type",
                ty.name()
            ));
        }
        _ => {
            return (!is_weight_type(ty)).then(|| {
                format!(
                    "not every matrix product of this program supports weights in {}",
                    ty.name()
                )
            });
        }
    };
    if (op == ops.mul || op == ops.add) && ty.name() == "f32" {
        return None;
    }
    // SAFETY: ggml has a name for each operation of its graphs.
    let op = unsafe { CStr::from_ptr((ggml.f.ggml_op_name)(op)) };
    Some(format!(
        "the operation {} that reads it supports {}, not {}: keep its type",
        op.to_string_lossy(),
        TypeInfo::from_id(instance.original.ty as u32).map_or("another type", TypeInfo::name),
        ty.name()
    ))
}

/// Whether a type is used for matrices of weights, and every product has a kernel for it. That is
/// not so for integers, 64-bit floats, the types of intermediate activations, and types of
/// ik_llama.cpp for which some processors lack kernels, or the node that reads gate and up.
fn is_weight_type(ty: &TypeInfo) -> bool {
    const OTHERS: [&str; 23] = [
        "i8", "i16", "i32", "i64", "f64", "q8_1", "q8_K", "q8_0_x4", "q8_1_x4", "q8_2_x4",
        "q8_K64", "q8_K16", "q8_K32", "q8_KR8", "q8_K128", "i2_s", "q4_0_4x4", "q4_0_4x8",
        "q4_0_8x8", "bf16_r16", "q8_k_r16", "q8_KV", "q8_KV_r8",
    ];
    !OTHERS.contains(&ty.name())
}

/// Whether the program keeps a tensor in plain memory although llama.cpp's default for its
/// first type is another buffer type: an option overrides the placement of this tensor.
fn has_override(
    model: &Model,
    instance: &Instance,
    ne: &[i64],
    op: i32,
    others: &[(*mut Device, *mut BufferType)],
) -> bool {
    let Some(first) = TypeInfo::from_id(instance.original.ty as u32) else {
        return false;
    };
    let supported = |&&(device, buft): &&(*mut Device, *mut BufferType)| {
        supports(model.ggml, instance, ne, first, op, buft, device)
    };
    let expected = others.iter().find(supported);
    expected.is_some_and(|&found| {
        let expected = as_mapped(model, instance, found);
        let actual = instance.original_buffer_type.0;
        expected != plain_memory(model) && expected != actual
    })
}

fn plain_memory(model: &Model) -> *mut BufferType {
    // SAFETY: takes nothing.
    unsafe { (model.ggml.f.ggml_backend_cpu_buffer_type)() }
}

/// Whether a fresh load would have two copies of a matrix, and one tensor is both looked up and
/// multiplied ([`Instance::is_shared`]): products have no [copy](Instance::is_copy), which would
/// be in a special buffer type with other kernels.
pub fn fresh_load_duplicates(
    model: &Model,
    instance: &Instance,
    ne: &[i64],
    ty: &TypeInfo,
) -> bool {
    let Some(cpu) = model.devices.last().map(|device| device.0) else {
        return false;
    };
    let op = model.ggml.ops.mul_mat;
    instance.is_shared()
        && device_buffer_type(model, instance).is_none()
        && uses_special_types(model, cpu)
        && model
            .ggml
            .special_types(cpu)
            .into_iter()
            .any(|buft| supports(model.ggml, instance, ne, ty, op, buft, cpu))
}

/// Returns the device and the buffer type that an instance was loaded into, if that was not
/// memory of the process.
pub fn device_buffer_type(
    model: &Model,
    instance: &Instance,
) -> Option<(*mut Device, *mut BufferType)> {
    let f = &model.ggml.f;
    let buft = instance.original_buffer_type.0;
    // SAFETY: live buffer types and devices, which are static.
    unsafe {
        let device = (f.ggml_backend_buft_get_device)(buft);
        let in_host_memory =
            is_cpu(model.ggml, device) || buft == (f.ggml_backend_dev_host_buffer_type)(device);
        (!in_host_memory).then_some((device, buft))
    }
}

/// Returns what llama.cpp tries in memory of the process, best first.
fn in_host_memory(model: &Model) -> Vec<(*mut Device, *mut BufferType)> {
    let Some(cpu) = model.devices.last().map(|device| device.0) else {
        return Vec::new();
    };
    let devices = model.devices.iter().map(|device| device.0);
    let mut gpus = devices.filter(|&device| !is_cpu(model.ggml, device));
    let readable = |gpu| {
        // SAFETY: a live device, which is static.
        let host = unsafe { (model.ggml.f.ggml_backend_dev_host_buffer_type)(gpu) };
        (!host.is_null()).then_some((gpu, host))
    };
    let first = gpus.find_map(readable);
    let mut all: Vec<(*mut Device, *mut BufferType)> = first.into_iter().collect();
    if uses_special_types(model, cpu) {
        let special = model.ggml.special_types(cpu).into_iter();
        all.extend(special.map(|buft| (cpu, buft)));
    }
    all.push((cpu, plain_memory(model)));
    all
}

fn is_cpu(ggml: &Ggml, device: *mut Device) -> bool {
    // SAFETY: a live device.
    device.is_null() || unsafe { (ggml.f.ggml_backend_dev_type)(device) } == DEVICE_CPU
}

/// Returns the buffer type that llama.cpp uses with a mapped file: plain memory instead of
/// memory that a GPU can read.
fn as_mapped(
    model: &Model,
    instance: &Instance,
    (device, buft): (*mut Device, *mut BufferType),
) -> *mut BufferType {
    let f = &model.ggml.f;
    // SAFETY: live devices, which are static.
    unsafe {
        let gpu_host = (f.ggml_backend_dev_host_buffer_type)(device);
        let mapped = instance.mapped || model.tensors.iter().any(|t| t.instances[0].mapped);
        match !gpu_host.is_null() && buft == gpu_host && mapped {
            true => plain_memory(model),
            false => buft,
        }
    }
}

/// Whether the program uses special buffer types of the CPU. An option turns them off; then
/// a tensor is in plain memory although one of these types supports it, or, if none supports any of
/// them, the program did not list these types. All tensors are checked, so the result is kept.
fn uses_special_types(model: &Model, cpu: *mut Device) -> bool {
    let known = &model.special_types;
    *known.get_or_init(|| find_special_types(model, cpu))
}

fn find_special_types(model: &Model, cpu: *mut Device) -> bool {
    let special = model.ggml.special_types(cpu);
    let instances = model.tensors.iter().flat_map(|tensor| {
        tensor
            .instances
            .iter()
            .map(move |instance| (tensor, instance))
    });
    let mut left_out = false;
    for (tensor, instance) in instances {
        if special.contains(&instance.original_buffer_type.0) {
            return true;
        }
        // SAFETY: a live buffer type.
        let device =
            unsafe { (model.ggml.f.ggml_backend_buft_get_device)(instance.original_buffer_type.0) };
        if left_out || !(device == cpu || device.is_null()) {
            continue;
        }
        if let Some(op) = instance.op() {
            let info = &model.files[tensor.file].gguf.header.tensors[tensor.info];
            let ne = extents(&info.ne, info.n_dims);
            left_out = special
                .iter()
                .any(|&buft| supports(model.ggml, instance, &ne, info.ty, op, buft, cpu));
        }
    }
    !left_out && (model.lists_special_types || !loads::sees_lookups())
}

/// Returns extents as ggml takes them.
pub fn extents(ne: &[u64; 4], n_dims: u32) -> Vec<i64> {
    ne[..(n_dims as usize).clamp(1, 4)]
        .iter()
        .map(|&extent| extent as i64)
        .collect()
}

/// Whether a device supports the operation that reads an instance, for this type in this
/// buffer type.
fn supports(
    ggml: &'static Ggml,
    instance: &Instance,
    ne: &[i64],
    ty: &TypeInfo,
    op: i32,
    buft: *mut BufferType,
    device: *mut Device,
) -> bool {
    let (f, ops) = (&ggml.f, &ggml.ops);
    let has_experts = instance.has_experts && op == ops.mul_mat_id;
    if has_experts && load::keeps_experts_out(ggml, device, buft) {
        return false;
    }
    let Some(context) = ggml.context(8) else {
        return false;
    };
    let float = |ne: &[i64]| context.tensor(0, ne);
    let whole = |at: usize| ne.get(at).copied().unwrap_or(1);
    let integers = |ne: &[i64]| context.tensor(26, ne);
    let weight = context.tensor(ty.id as c_int, ne);
    // SAFETY: tensors of one live context, with the shapes that the operations need.
    unsafe {
        let c = context.raw();
        let node: *mut Tensor = if op == ops.get_rows {
            (f.ggml_get_rows)(c, weight, integers(&[BATCH]))
        } else if op == ops.mul_mat {
            let batch = float(&[whole(0), BATCH, whole(2), whole(3)]);
            (f.ggml_mul_mat)(c, weight, batch)
        } else if op == ops.mul_mat_id {
            let used = instance.experts_used().max(1) as i64;
            let batch = float(&[whole(0), used, BATCH]);
            (f.ggml_mul_mat_id)(c, weight, batch, integers(&[used, BATCH]))
        } else if op == ops.add {
            (f.ggml_add)(c, float(&[whole(0), whole(1), whole(2), whole(3)]), weight)
        } else {
            (f.ggml_mul)(c, float(&[whole(0), whole(1), whole(2), whole(3)]), weight)
        };
        ggml.supports(device, weight, node, buft)
    }
}

/// Returns the name of the buffer type of a descriptor.
pub fn describe(ggml: &Ggml, descriptor: &Descriptor) -> String {
    // SAFETY: the buffer of a descriptor in use is live.
    let buft = unsafe { (ggml.f.ggml_backend_buffer_get_type)(descriptor.buffer) };
    ggml.buffer_type_name(buft)
}

/// Whether ggml splits an instance over several devices, and made their device before the drop-in saw it.
pub fn is_split_over_unknown(model: &Model, instance: &Instance) -> bool {
    let (f, buft) = (&model.ggml.f, instance.original_buffer_type.0);
    // SAFETY: live buffer types and devices, which are static.
    let is_plain = unsafe {
        let device = (f.ggml_backend_buft_get_device)(buft);
        device.is_null() || (f.ggml_backend_dev_type)(device) <= DEVICE_ACCEL
    };
    !is_plain && !model.ggml.is_split(buft)
}
