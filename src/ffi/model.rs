//! Models: open, look at, load, free.

use std::ffi::{CString, c_char, c_void};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::sync::Arc;

use super::handle::{self, llama_model};
use super::params::llama_sidecar_params;
use super::status::{call, llama_sidecar_status, status};
use super::{SizedStruct, fill, read, text};
use crate::gguf::Strings;
use crate::model::{Model, Progress};
use parking_lot::Mutex;

/// A model and the C strings about it, which live as long as its handle.
pub(super) struct OpenModel {
    pub model: Arc<Model>,
    pub paths: Vec<CString>,
    pub keys: Vec<CString>,
    /// The array of strings that was last asked for, by the index of its key: a caller
    /// that walks over a vocabulary asks for one after the other.
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

/// Opens the model that a GGUF file, or any shard of one, belongs to.
///
/// Reads headers only; tensors stay where they are until they are asked for.
///
/// `params` can be NULL for the defaults. Returns NULL on failure. Free the result with
/// llama_sidecar_model_free.
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
        // SAFETY: as the caller vouches.
        let path = unsafe { text(path, "path") }?;
        let mut chosen = llama_sidecar_params::defaults();
        if !params.is_null() {
            // SAFETY: as the caller vouches.
            chosen = unsafe { read(params, chosen) }?;
        }
        let path = Path::new(std::ffi::OsStr::from_bytes(path.to_bytes()));
        // SAFETY: the strings are the caller's, or our own defaults.
        let options = unsafe { chosen.options() }?;
        let model = Model::open(path, options)?;
        Ok(handle::new(OpenModel::new(model)))
    });
    opened.unwrap_or(std::ptr::null_mut())
}

/// Lets go of a model. Contexts keep it alive until they are freed, too; reports do not need it.
#[unsafe(no_mangle)]
pub extern "C" fn llama_sidecar_model_free(model: *mut llama_model) -> llama_sidecar_status {
    status(|| handle::free(model))
}

/// What a model is.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct llama_sidecar_model_info {
    /// sizeof(struct llama_sidecar_model_info), set by the caller.
    pub struct_size: usize,
    /// How many tensors it has; their indices count from 0.
    pub n_tensors: u64,
    /// How many files it comes in.
    pub n_files: u64,
    /// How many metadata keys its first file has.
    pub n_metadata: u64,
    /// How many devices it can use.
    pub n_devices: u64,
    /// Size of all files.
    pub file_bytes: u64,
    /// How many reloads changed something.
    pub generation: u64,
    /// How many evaluations had to wait for a reload before they began.
    pub n_pauses: u64,
    /// The longest of those waits.
    pub longest_pause_us: u64,
    /// GGUF version of its first file.
    pub gguf_version: u32,
}

// SAFETY: repr(C), starts with struct_size, plain fields.
unsafe impl SizedStruct for llama_sidecar_model_info {
    const NAME: &'static str = "llama_sidecar_model_info";
    const FIRST: usize = 80;
}

/// Tells what a model is.
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
            longest_pause_us: pauses.longest.as_micros() as u64,
            gguf_version: model.gguf_version(),
        };
        // SAFETY: as the caller vouches.
        unsafe { fill(info, &value) }
    })
}

/// Receives how far loading is: bytes that are in place, bytes in all. Called on the thread that
/// called llama_sidecar_model_load_all, for the last time with `done` equal to `total`; not at all when
/// there is nothing to load. Returning false stops the call, also the last time.
pub type llama_sidecar_progress =
    Option<unsafe extern "C" fn(done: u64, total: u64, user_data: *mut c_void) -> bool>;

/// What llama_sidecar_model_load_all did.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct llama_sidecar_load_report {
    /// sizeof(struct llama_sidecar_load_report), set by the caller.
    pub struct_size: usize,
    /// Tensors that were not loaded before.
    pub n_tensors: u64,
    /// Their bytes.
    pub bytes: u64,
    /// Device allocations, at most 9 for any model.
    pub allocations: u64,
    /// How long it took.
    pub time_us: u64,
}

// SAFETY: repr(C), starts with struct_size, plain fields.
unsafe impl SizedStruct for llama_sidecar_load_report {
    const NAME: &'static str = "llama_sidecar_load_report";
    const FIRST: usize = 40;
}

/// Loads every tensor that is not loaded yet to the model's device, in at most 9 allocations.
///
/// `progress` can be NULL; when it stops the call, everything that the call had loaded is dropped
/// again. It must not reload this model. `report` can be NULL.
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
        let done = open.model.load_all(|Progress { done, total }| {
            // SAFETY: the caller gave the function for this call.
            progress.is_none_or(|progress| unsafe { progress(done, total, user_data) })
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
        // SAFETY: as the caller vouches.
        unsafe { fill(report, &value) }
    })
}
