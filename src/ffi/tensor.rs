//! Tensors: find, look at, load, copy out.

use std::ffi::{c_char, c_void};

use super::handle::{self, llama_model};
use super::model::OpenModel;
use super::status::{Failure, llama_sidecar_status, status};
use super::{SizedStruct, fill, put, text};
use crate::model::{Axis, Layout, State};

/// What has happened to a tensor since the model was opened.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum llama_sidecar_tensor_state {
    /// As it was when the model was opened.
    OnOriginal = 0,
    /// In buffers of its own, with other bytes or laid out in another way.
    Detached = 1,
    /// In host memory, with its whole layer, because a device had no room.
    FallbackCpu = 2,
}

/// A tensor, at the moment of the call.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct llama_sidecar_tensor_info {
    /// sizeof(struct llama_sidecar_tensor_info), set by the caller.
    pub struct_size: usize,
    /// Its index.
    pub index: u64,
    /// Its name. Valid until the model is freed.
    pub name: *const c_char,
    /// Name of its type, for example "q4_K". Static.
    pub type_name: *const c_char,
    /// Path of its file. Valid until the model is freed.
    pub path: *const c_char,
    /// Its bytes where the process can read them without a copy: in its host buffer if it is loaded
    /// in one part, in the mapping of its file if it is not loaded; else NULL. Valid until a reload replaces the tensor (hold an evaluation
    /// to keep reloads away) or the model is freed. Read only. In the mapping, it also shows what
    /// others write into the file: replace files by rename.
    pub host_data: *const c_void,
    /// Its address on its device once it is loaded in one part; else 0. Valid as long as host_data.
    pub device_data: u64,
    /// Elements per dimension, innermost first.
    pub ne: [u64; 4],
    /// Strides as ggml computes them: nb[0] one block, nb[1] one row.
    pub nb: [u64; 4],
    /// Bytes of data.
    pub nbytes: u64,
    /// Where its bytes start in its file, or UINT64_MAX once a reload replaced them.
    pub file_offset: u64,
    /// How often it changed since the model was opened.
    pub generation: u64,
    /// Value of enum ggml_type.
    pub ggml_type: u32,
    /// Elements in a block of its type; a row is a whole number of blocks.
    pub block_elements: u32,
    /// The device it is loaded to; -1 when it is not loaded, -2 when it is in parts.
    pub device: i32,
    /// How many parts it is in: 0 when it is not loaded. Ask for each with
    /// llama_sidecar_tensor_get_part.
    pub n_parts: u32,
    /// What has happened to it.
    pub state: llama_sidecar_tensor_state,
}

// SAFETY: repr(C), starts with struct_size, plain fields.
unsafe impl SizedStruct for llama_sidecar_tensor_info {
    const NAME: &'static str = "llama_sidecar_tensor_info";
    const FIRST: usize = 168;
}

/// Puts the index of the tensor with this name into `index`.
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
        // SAFETY: as the caller vouches.
        let name = unsafe { text(name, "name") }?;
        let found = open.model.find(name).ok_or_else(|| {
            Failure::new(
                llama_sidecar_status::NotFound,
                format!("the model has no tensor '{}'", name.to_string_lossy()),
            )
        })?;
        // SAFETY: as the caller vouches.
        unsafe { put(index, found as u64, "index") }
    })
}

/// Tells what a tensor is now.
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
            state: match view.state {
                State::OnOriginal => llama_sidecar_tensor_state::OnOriginal,
                State::Detached => llama_sidecar_tensor_state::Detached,
                State::FallbackCpu => llama_sidecar_tensor_state::FallbackCpu,
            },
        };
        // SAFETY: as the caller vouches.
        unsafe { fill(info, &value) }
    })
}

/// Where a tensor is cut.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum llama_sidecar_axis {
    /// Inside rows: each part holds some elements of every row.
    Columns = 0,
    /// Between rows: each part holds some rows of every slice (of every expert, for merged ones).
    Rows = 1,
    /// Nowhere: the part is all of it.
    None = 2,
}

/// A part of a loaded tensor: its bytes one after the other on a device.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct llama_sidecar_tensor_part {
    /// sizeof(struct llama_sidecar_tensor_part), set by the caller.
    pub struct_size: usize,
    /// Its address on the device. Valid as long as host_data of the tensor.
    pub device_data: u64,
    /// Bytes of the part.
    pub nbytes: u64,
    /// First row, or first element of each row, that it holds.
    pub first: u64,
    /// How many of them it holds.
    pub count: u64,
    /// Index of the device.
    pub device: u32,
    /// Where the tensor is cut.
    pub axis: llama_sidecar_axis,
}

// SAFETY: repr(C), starts with struct_size, plain fields.
unsafe impl SizedStruct for llama_sidecar_tensor_part {
    const NAME: &'static str = "llama_sidecar_tensor_part";
    const FIRST: usize = 48;
}

/// Tells about part `part` of a tensor, of n_parts.
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
            axis: match view.layout() {
                Some(Layout::Split {
                    axis: Axis::Columns,
                    ..
                }) => llama_sidecar_axis::Columns,
                Some(Layout::Split {
                    axis: Axis::Rows, ..
                }) => llama_sidecar_axis::Rows,
                _ => llama_sidecar_axis::None,
            },
        };
        // SAFETY: as the caller vouches.
        unsafe { fill(info, &value) }
    })
}

/// Loads a tensor to the devices where it belongs, unless it is there already. Threads that ask for the same
/// one at the same time get the same buffer.
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

/// Copies `size` bytes of a tensor, from `offset` on, to `buffer`: from its device if it is loaded,
/// else from its file. Does not load it.
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
        // SAFETY: not null, and valid as the caller vouches. The bytes are only
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
