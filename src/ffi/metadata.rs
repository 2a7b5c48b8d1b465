//! Metadata of a model: the key-values of its first file.

use std::ffi::c_char;
use std::sync::Arc;

use super::handle;
use super::model::{OpenModel, llama_model};
use super::status::{Failure, llama_sidecar_status, status};
use super::{SizedStruct, fill, put, text};
use sidecar_core::gguf::{KeyValue, Value, ValueType};

/// A metadata key and the type of its value.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct llama_sidecar_metadata_info {
    /// Set by the caller to sizeof(struct llama_sidecar_metadata_info).
    pub struct_size: usize,
    /// Name of the key. Valid until the model is freed.
    pub key: *const c_char,
    /// Number of elements of an array; 1 for any other value.
    pub count: u64,
    /// Value of enum gguf_type (GGUF specification); for an array, the type of its elements.
    pub gguf_type: u32,
    /// Whether the value is an array.
    pub is_array: bool,
}

// SAFETY: repr(C), starts with struct_size, plain fields.
unsafe impl SizedStruct for llama_sidecar_metadata_info {
    const NAME: &'static str = "llama_sidecar_metadata_info";
    const FIRST: usize = 32;
}

/// Finds a key by name, for example "general.architecture", and writes its index to `index`.
///
/// # Safety
///
/// `key` is null or NUL-terminated; `index` is null or valid for a write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn llama_sidecar_metadata_find(
    model: *const llama_model,
    key: *const c_char,
    index: *mut u64,
) -> llama_sidecar_status {
    status(|| {
        let open = handle::get(model)?;
        // SAFETY: as the caller guarantees.
        let key = unsafe { text(key, "key") }?;
        let keys = open.model.metadata();
        let found = keys.iter().position(|other| &*other.name == key.to_bytes());
        let found = found.ok_or_else(|| {
            Failure::new(
                llama_sidecar_status::NotFound,
                format!("the model has no metadata key '{}'", key.to_string_lossy()),
            )
        })?;
        // SAFETY: as the caller guarantees.
        unsafe { put(index, found as u64, "index") }
    })
}

/// Fills `info` with the name and the type of a key.
///
/// @param index Index of the key, less than n_metadata of llama_sidecar_model_info.
///
/// # Safety
///
/// `info` is null or points to a struct whose struct_size is set.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn llama_sidecar_metadata_get_info(
    model: *const llama_model,
    index: u64,
    info: *mut llama_sidecar_metadata_info,
) -> llama_sidecar_status {
    status(|| {
        let open = handle::get(model)?;
        let (at, key) = in_range(&open, index)?;
        let value = llama_sidecar_metadata_info {
            struct_size: size_of::<llama_sidecar_metadata_info>(),
            key: open.keys[at].as_ptr(),
            count: key.count,
            gguf_type: key.ty as u32,
            is_array: key.array,
        };
        // SAFETY: as the caller guarantees.
        unsafe { fill(info, &value) }
    })
}

/// Writes a value as text to `buffer`, truncated to `size` bytes including the NUL. Numbers are
/// decimal, booleans are "true" or "false", strings are copied.
///
/// @param element Index of an array element; 0 for a value that is not an array.
/// @param buffer Can be NULL when `size` is 0.
/// @param length Receives the length of the whole text without the NUL; can be NULL.
///
/// The model caches the last array of strings that was read, so a loop over a vocabulary reads the
/// file once.
///
/// # Safety
///
/// `buffer` is valid for writes of `size` bytes; `length` is null or valid for a write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn llama_sidecar_metadata_text(
    model: *const llama_model,
    index: u64,
    element: u64,
    buffer: *mut c_char,
    size: usize,
    length: *mut usize,
) -> llama_sidecar_status {
    status(|| {
        let open = handle::get(model)?;
        let (at, key) = in_range(&open, index)?;
        if buffer.is_null() && size > 0 {
            return Err(Failure::null("buffer"));
        }
        let value = value(&open, at, key, element)?;
        let bytes = match value {
            Value::Text(bytes) => bytes,
            other => other.to_string().into_bytes(),
        };
        if let Some(room) = size.checked_sub(1) {
            let n = room.min(bytes.len());
            // SAFETY: `buffer` is valid for `size` bytes, which is `n` and the NUL
            // at least.
            unsafe {
                std::ptr::copy_nonoverlapping(bytes.as_ptr().cast(), buffer, n);
                buffer.add(n).write(0);
            }
        }
        if !length.is_null() {
            // SAFETY: not null, and valid as the caller guarantees.
            unsafe { length.write(bytes.len()) };
        }
        Ok(())
    })
}

fn value(open: &OpenModel, at: usize, key: &KeyValue, element: u64) -> Result<Value, Failure> {
    if element >= key.count {
        return Err(Failure::new(
            llama_sidecar_status::NotFound,
            format!(
                "element {element} of '{}' does not exist: there are {}",
                key.name_lossy(),
                key.count
            ),
        ));
    }
    if !key.array {
        return Ok(open.model.value(key)?);
    }
    let missing = || Failure::new(llama_sidecar_status::Internal, "an element is missing");
    if key.ty != ValueType::String {
        let mut found = open.model.elements(key, element, 1)?;
        return found.pop().ok_or_else(missing);
    }
    let mut kept = open.strings.lock();
    let strings = match &*kept {
        Some((of, strings)) if *of == at => strings.clone(),
        _ => {
            let strings = Arc::new(open.model.strings(key)?);
            *kept = Some((at, strings.clone()));
            strings
        }
    };
    drop(kept);
    let text = strings.get(element).ok_or_else(missing)?;
    Ok(Value::Text(text.to_vec()))
}

fn in_range(open: &OpenModel, index: u64) -> Result<(usize, &KeyValue), Failure> {
    let keys = open.model.metadata();
    let at = usize::try_from(index).ok();
    at.and_then(|at| Some((at, keys.get(at)?))).ok_or_else(|| {
        Failure::new(
            llama_sidecar_status::NotFound,
            format!(
                "metadata key {index} does not exist: there are {}",
                keys.len()
            ),
        )
    })
}
