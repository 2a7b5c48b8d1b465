//! Models: open, inspect, load, free.

use sidecar_core::text;
use std::ffi::{CString, c_char, c_void};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::sync::Arc;

use super::handle::{self, Handle};
use super::params::llama_sidecar_params;
use super::status::{Failure, call, llama_sidecar_status, status};
use super::{Flag, SizedStruct, fill, read, text};
use crate::model::Model;
use parking_lot::Mutex;
use sidecar_core::gguf::Strings;

/// An open model. This is not the llama_model of llama.cpp. Passing a handle of llama.cpp to this
/// library fails with LLAMA_SIDECAR_STATUS_BAD_HANDLE; passing a handle of this library to
/// llama.cpp is undefined behaviour.
pub struct llama_model {
    _opaque: [u8; 0],
}

impl Handle for llama_model {
    type Object = OpenModel;
    const NAME: &'static str = "llama_model";
}

/// A model and its C strings, which live as long as the handle.
pub(super) struct OpenModel {
    pub model: Arc<Model>,
    pub paths: Vec<CString>,
    pub keys: Vec<CString>,
    /// The last array of strings that was read, by the index of its key. A caller that iterates
    /// over a vocabulary reads the same array many times.
    pub strings: Mutex<Option<(usize, Arc<Strings>)>>,
}

impl OpenModel {
    pub(super) fn new(model: Model) -> OpenModel {
        let lossy = |bytes: &[u8]| {
            let until_nul = bytes.split(|&byte| byte == 0).next().unwrap_or_default();
            CString::new(until_nul).expect("cut at the first NUL")
        };
        OpenModel {
            paths: (0..model.file_count())
                .map(|file| lossy(model.file_path(file).as_os_str().as_bytes()))
                .collect(),
            keys: model
                .metadata()
                .iter()
                .map(|key| lossy(&key.name))
                .collect(),
            strings: Mutex::new(None),
            model: Arc::new(model),
        }
    }
}

/// Opens the model of a GGUF file or of any of its shards.
///
/// The call reads headers only. Tensor data is read on demand.
///
/// @param params NULL for the defaults of llama_sidecar_default_params.
/// @return The model, or NULL on failure. Free it with llama_sidecar_model_free.
///
/// # Safety
///
/// `path` is null or a NUL-terminated string; `params` is null or points to a llama_sidecar_params
/// whose struct_size is set.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn llama_model_load(
    path: *const c_char,
    params: *const llama_sidecar_params,
) -> *mut llama_model {
    let opened = call(|| {
        // SAFETY: as the caller guarantees.
        let path = unsafe { text(path, "path") }?;
        let mut chosen = llama_sidecar_params::defaults();
        if !params.is_null() {
            // SAFETY: as the caller guarantees.
            chosen = unsafe { read(params, chosen) }?;
        }
        let path = Path::new(std::ffi::OsStr::from_bytes(path.to_bytes()));
        // SAFETY: the strings are the caller's, or our own defaults.
        let options = unsafe { chosen.options() }?;
        let model = Model::open(path, options).map_err(|error| of_path(path, error.into()))?;
        Ok(handle::new(OpenModel::new(model)))
    });
    opened.unwrap_or(std::ptr::null_mut())
}

/// Adds the path to a failure that does not name it.
fn of_path(path: &Path, mut failure: Failure) -> Failure {
    let path = text::path(path);
    if !failure.message.contains(&path) {
        failure.message = format!("{path}: {}", failure.message);
    }
    failure
}

/// Frees the handle of a model. The model itself lives until its contexts, post-fetch schedulers and
/// expert streams are freed. Reports and expert traces do not use it.
#[unsafe(no_mangle)]
pub extern "C" fn llama_sidecar_model_free(model: *mut llama_model) -> llama_sidecar_status {
    status(|| handle::free(model))
}

/// Tensor, file, and device counts of a model.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct llama_sidecar_model_info {
    /// Set by the caller to sizeof(struct llama_sidecar_model_info).
    pub struct_size: usize,
    /// Number of tensors. Indices of tensors start at 0.
    pub n_tensors: u64,
    /// Number of files.
    pub n_files: u64,
    /// Number of metadata keys of the first file.
    pub n_metadata: u64,
    /// Number of devices that the model can use.
    pub n_devices: u64,
    /// Total size of all files in bytes.
    pub file_bytes: u64,
    /// Number of times that reloads switched tensors since the model was opened.
    pub generation: u64,
    /// Number of evaluations that waited for a reload before they began.
    pub n_pauses: u64,
    /// Longest of these waits in microseconds.
    pub longest_pause_us: u64,
    /// GGUF version of the first file.
    pub gguf_version: u32,
}

// SAFETY: repr(C), starts with struct_size, plain fields.
unsafe impl SizedStruct for llama_sidecar_model_info {
    const NAME: &'static str = "llama_sidecar_model_info";
    const FIRST: usize = 80;
}

/// Fills `info` with the tensor, file, and device counts of a model.
///
/// # Safety
///
/// `info` is null or points to a struct whose struct_size is set.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn llama_sidecar_model_get_info(
    model: *const llama_model,
    info: *mut llama_sidecar_model_info,
) -> llama_sidecar_status {
    status(|| {
        let open = handle::get(model)?;
        let model = &open.model;
        let pauses = model.pauses();
        let value = llama_sidecar_model_info {
            struct_size: size_of::<llama_sidecar_model_info>(),
            n_tensors: model.tensor_count() as u64,
            n_files: model.file_count() as u64,
            n_metadata: model.metadata().len() as u64,
            n_devices: model.devices().len() as u64,
            file_bytes: model.file_bytes(),
            generation: model.generation(),
            n_pauses: pauses.count,
            longest_pause_us: pauses.longest_us(),
            gguf_version: model.gguf_version(),
        };
        // SAFETY: as the caller guarantees.
        unsafe { fill(info, &value) }
    })
}

/// How far llama_sidecar_model_load_all is.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct llama_sidecar_load_progress {
    /// Set by the library to sizeof(struct llama_sidecar_load_progress), as the library knows it.
    pub struct_size: usize,
    /// Bytes loaded so far.
    pub done: u64,
    /// Bytes to load.
    pub total: u64,
    /// Number of tensors that are loaded completely.
    pub n_done: u64,
    /// Number of tensors to load.
    pub n_tensors: u64,
    /// Name of the tensor whose bytes were loaded last. Valid as long as the model.
    pub name: *const c_char,
}

/// Receives the progress of llama_sidecar_model_load_all, on the thread that made that call. The
/// last call has `done` equal to `total`. There is no call if nothing is to be loaded. It can make any
/// call, except that it must not reload this model.
///
/// @param progress Valid during the call.
/// @return false to cancel the load, also in the last call.
pub type llama_sidecar_progress = Option<
    unsafe extern "C" fn(
        progress: *const llama_sidecar_load_progress,
        user_data: *mut c_void,
    ) -> Flag,
>;

/// Result of llama_sidecar_model_load_all.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct llama_sidecar_load_report {
    /// Set by the caller to sizeof(struct llama_sidecar_load_report).
    pub struct_size: usize,
    /// Number of tensors that the call loaded.
    pub n_tensors: u64,
    /// Bytes of these tensors.
    pub bytes: u64,
    /// Number of device allocations: at most 9 per model, unless the model has more devices than
    /// that.
    pub allocations: u64,
    /// Duration in microseconds.
    pub time_us: u64,
}

// SAFETY: repr(C), starts with struct_size, plain fields.
unsafe impl SizedStruct for llama_sidecar_load_report {
    const NAME: &'static str = "llama_sidecar_load_report";
    const FIRST: usize = 40;
}

/// Loads every tensor that is not loaded yet to its device.
///
/// @param progress Can be NULL. If it returns false, the call frees what it loaded and fails with
/// LLAMA_SIDECAR_STATUS_CANCELLED.
/// @param user_data Passed to `progress`; not used after the call.
/// @param report Receives the result; can be NULL.
///
/// # Safety
///
/// `progress` can be called with `user_data` during the call; `report` is null or points to a struct
/// whose struct_size is set.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn llama_sidecar_model_load_all(
    model: *const llama_model,
    progress: llama_sidecar_progress,
    user_data: *mut c_void,
    report: *mut llama_sidecar_load_report,
) -> llama_sidecar_status {
    status(|| {
        let open = handle::get(model)?;
        let done = open.model.load_all(|now| {
            let now = llama_sidecar_load_progress {
                struct_size: size_of::<llama_sidecar_load_progress>(),
                done: now.done,
                total: now.total,
                n_done: now.tensors,
                n_tensors: now.total_tensors,
                name: now.name.as_ptr(),
            };
            // SAFETY: the caller gave the function for this call.
            progress.is_none_or(|progress| unsafe { progress(&now, user_data) }.into())
        })?;
        if report.is_null() {
            return Ok(());
        }
        let value = llama_sidecar_load_report {
            struct_size: size_of::<llama_sidecar_load_report>(),
            n_tensors: done.tensors,
            bytes: done.bytes,
            allocations: done.allocations,
            time_us: done.time.as_micros() as u64,
        };
        // SAFETY: as the caller guarantees.
        unsafe { fill(report, &value) }
    })
}
