//! Tensors: find, inspect, load, read.

use std::ffi::{CStr, c_char, c_void};

use super::handle;
use super::model::{OpenModel, llama_model};
use super::status::{Failure, llama_sidecar_status, status};
use super::{SizedStruct, fill, put, text};
use crate::model::{Axis, Layout, Model, State};

/// State of a tensor since the model was opened.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum llama_sidecar_tensor_state {
    /// The tensor is unchanged.
    OnOriginal = 0,
    /// The tensor is in buffers of its own, with other data or another layout.
    Detached = 1,
    /// The tensor and its layer are in host memory, because a device did not have enough memory.
    FallbackCpu = 2,
}

impl From<State> for llama_sidecar_tensor_state {
    fn from(state: State) -> llama_sidecar_tensor_state {
        match state {
            State::OnOriginal => llama_sidecar_tensor_state::OnOriginal,
            State::Detached => llama_sidecar_tensor_state::Detached,
            State::FallbackCpu => llama_sidecar_tensor_state::FallbackCpu,
        }
    }
}

/// A tensor at the time of the call.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct llama_sidecar_tensor_info {
    /// Set by the caller to sizeof(struct llama_sidecar_tensor_info).
    pub struct_size: usize,
    /// Index of the tensor.
    pub index: u64,
    /// Name of the tensor. Valid until the model is freed.
    pub name: *const c_char,
    /// Name of the type in ggml, for example "q4_K". A static string.
    pub type_name: *const c_char,
    /// Path of the file of the tensor. Valid until the model is freed.
    pub path: *const c_char,
    /// Host address of the data (host buffer or file mapping), or NULL if it is not readable
    /// without a copy. Read-only. Valid until a reload replaces the tensor or the model is freed;
    /// reloads do not replace tensors during an evaluation. A file mapping shows in-place changes
    /// of the file, so replace files by rename.
    pub host_data: *const c_void,
    /// Device address of a tensor that is loaded in one part; otherwise 0. Valid as long as
    /// host_data.
    pub device_data: u64,
    /// Number of elements per dimension, innermost first, as in ggml.
    pub ne: [u64; 4],
    /// Strides in bytes, as in ggml: nb[0] is a block, nb[1] is a row.
    pub nb: [u64; 4],
    /// Size of the data in bytes.
    pub nbytes: u64,
    /// Offset of the data in the file, or UINT64_MAX if a reload replaced the data.
    pub file_offset: u64,
    /// Number of times that the tensor changed since the model was opened.
    pub generation: u64,
    /// Value of enum ggml_type.
    pub ggml_type: u32,
    /// Number of elements in a block of the type. A row is a whole number of blocks.
    pub block_elements: u32,
    /// Index of the device; -1 if the tensor is not loaded, -2 if it is in several parts.
    pub device: i32,
    /// Number of parts; 0 if the tensor is not loaded. See llama_sidecar_tensor_get_part.
    pub n_parts: u32,
    /// State of the tensor.
    pub state: llama_sidecar_tensor_state,
}

// SAFETY: repr(C), starts with struct_size, plain fields.
unsafe impl SizedStruct for llama_sidecar_tensor_info {
    const NAME: &'static str = "llama_sidecar_tensor_info";
    const FIRST: usize = 168;
}

/// Finds a tensor by name and writes its index to `index`.
///
/// # Safety
///
/// `name` is null or NUL-terminated; `index` is null or valid for a write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn llama_sidecar_tensor_find(
    model: *const llama_model,
    name: *const c_char,
    index: *mut u64,
) -> llama_sidecar_status {
    status(|| {
        let open = handle::get(model)?;
        // SAFETY: as the caller guarantees.
        let name = unsafe { text(name, "name") }?;
        let found = find(&open.model, name)?;
        // SAFETY: as the caller guarantees.
        unsafe { put(index, found as u64, "index") }
    })
}

/// Finds a tensor by name.
pub(super) fn find(model: &Model, name: &CStr) -> Result<usize, Failure> {
    model.find(name).ok_or_else(|| {
        Failure::new(
            llama_sidecar_status::NotFound,
            format!("the model has no tensor '{}'", name.to_string_lossy()),
        )
    })
}

/// Fills `info` with the type, shape, and location of a tensor.
///
/// # Safety
///
/// `info` is null or points to a struct whose struct_size is set.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn llama_sidecar_tensor_get_info(
    model: *const llama_model,
    index: u64,
    info: *mut llama_sidecar_tensor_info,
) -> llama_sidecar_status {
    status(|| {
        let open = handle::get(model)?;
        let index = in_range(&open, index)?;
        let model = &open.model;
        let view = model.tensor(index);
        let placed = view.placed();
        let n_parts = view.part_count() as u32;
        let value = llama_sidecar_tensor_info {
            struct_size: size_of::<llama_sidecar_tensor_info>(),
            index: index as u64,
            name: model.name(index).as_ptr(),
            type_name: view.ty().c_name().as_ptr(),
            path: open.paths[view.file].as_ptr(),
            host_data: model
                .host_bytes(&view)
                .map_or(std::ptr::null(), |bytes| bytes.cast()),
            device_data: placed.map_or(0, |(_, address)| address),
            ne: view.ne(),
            nb: view.nb(),
            nbytes: view.nbytes(),
            file_offset: view.file_offset().unwrap_or(u64::MAX),
            generation: view.generation,
            ggml_type: view.ty().id,
            block_elements: view.ty().block as u32,
            device: match (placed, n_parts) {
                (Some((device, _)), _) => device as i32,
                (None, 0) => -1,
                (None, _) => -2,
            },
            n_parts,
            state: view.state.into(),
        };
        // SAFETY: as the caller guarantees.
        unsafe { fill(info, &value) }
    })
}

/// Axis along which a tensor is split.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum llama_sidecar_axis {
    /// Within rows: each part has some elements of every row.
    Columns = 0,
    /// Between rows: each part has some rows of every slice; for merged experts, of every expert.
    Rows = 1,
    /// Not split: the part is the whole tensor.
    None = 2,
}

impl From<Option<&Layout>> for llama_sidecar_axis {
    fn from(layout: Option<&Layout>) -> llama_sidecar_axis {
        match layout {
            Some(Layout::Split { axis, .. }) => match axis {
                Axis::Columns => llama_sidecar_axis::Columns,
                Axis::Rows => llama_sidecar_axis::Rows,
            },
            Some(Layout::Whole(_)) | None => llama_sidecar_axis::None,
        }
    }
}

/// A part of a loaded tensor, contiguous on one device.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct llama_sidecar_tensor_part {
    /// Set by the caller to sizeof(struct llama_sidecar_tensor_part).
    pub struct_size: usize,
    /// Address of the part on the device. Valid as long as host_data of the tensor.
    pub device_data: u64,
    /// Size of the part in bytes.
    pub nbytes: u64,
    /// First row of the part, or first element of each row, depending on the axis.
    pub first: u64,
    /// Number of rows, or of elements of each row.
    pub count: u64,
    /// Index of the device.
    pub device: u32,
    /// Axis along which the tensor is split.
    pub axis: llama_sidecar_axis,
}

// SAFETY: repr(C), starts with struct_size, plain fields.
unsafe impl SizedStruct for llama_sidecar_tensor_part {
    const NAME: &'static str = "llama_sidecar_tensor_part";
    const FIRST: usize = 48;
}

/// Fills `info` with a part of a tensor.
///
/// @param part Index of the part, less than n_parts of llama_sidecar_tensor_info.
///
/// # Safety
///
/// `info` is null or points to a struct whose struct_size is set.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn llama_sidecar_tensor_get_part(
    model: *const llama_model,
    index: u64,
    part: u32,
    info: *mut llama_sidecar_tensor_part,
) -> llama_sidecar_status {
    status(|| {
        let open = handle::get(model)?;
        let index = in_range(&open, index)?;
        let view = open.model.tensor(index);
        let parts = view.parts();
        let found = parts.get(part as usize).ok_or_else(|| {
            Failure::new(
                llama_sidecar_status::NotFound,
                format!(
                    "part {part} does not exist: tensor {index} is in {}",
                    parts.len()
                ),
            )
        })?;
        let value = llama_sidecar_tensor_part {
            struct_size: size_of::<llama_sidecar_tensor_part>(),
            device_data: found.address,
            nbytes: found.bytes,
            first: found.units.0,
            count: found.units.1 - found.units.0,
            device: found.device as u32,
            axis: view.layout().into(),
        };
        // SAFETY: as the caller guarantees.
        unsafe { fill(info, &value) }
    })
}

/// Loads a tensor to its devices. Does nothing if the tensor is loaded. Concurrent calls for the
/// same tensor load it once.
#[unsafe(no_mangle)]
pub extern "C" fn llama_sidecar_tensor_load(
    model: *const llama_model,
    index: u64,
) -> llama_sidecar_status {
    status(|| {
        let open = handle::get(model)?;
        let index = in_range(&open, index)?;
        open.model.load(index)?;
        Ok(())
    })
}

/// Copies `size` bytes of a tensor, starting at `offset`, to `buffer`. Reads from the device if the
/// tensor is loaded, otherwise from the file. Does not load the tensor.
///
/// # Safety
///
/// `buffer` is null or valid for writes of `size` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn llama_sidecar_tensor_read(
    model: *const llama_model,
    index: u64,
    offset: u64,
    buffer: *mut c_void,
    size: usize,
) -> llama_sidecar_status {
    status(|| {
        let open = handle::get(model)?;
        let index = in_range(&open, index)?;
        if buffer.is_null() {
            return Err(Failure::null("buffer"));
        }
        // SAFETY: not null, and valid as the caller guarantees. The bytes are only
        // written to; zeroing them first makes them a proper slice.
        let bytes = unsafe {
            std::ptr::write_bytes(buffer.cast::<u8>(), 0, size);
            std::slice::from_raw_parts_mut(buffer.cast::<u8>(), size)
        };
        open.model.read(index, offset, bytes)?;
        Ok(())
    })
}

fn in_range(open: &OpenModel, index: u64) -> Result<usize, Failure> {
    let count = open.model.tensor_count();
    usize::try_from(index)
        .ok()
        .filter(|&index| index < count)
        .ok_or_else(|| {
            Failure::new(
                llama_sidecar_status::NotFound,
                format!("tensor {index} does not exist: the model has {count}"),
            )
        })
}
