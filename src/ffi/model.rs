//! Models: open, inspect, load, free.

use sidecar_core::text;
use std::ffi::{CString, c_char, c_void};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::sync::Arc;

use super::handle::{self, Handle};
use super::params::llama_sidecar_params;
use super::status::{Failure, call, llama_sidecar_status, status};
use super::{Flag, SizedStruct, fill, parameters, read, text};
use crate::model::{BorrowedTensor, Model};
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

/// A tensor that a program has in its memory, such as a ggml_tensor in host memory.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct llama_sidecar_tensor_data {
    /// Set by the caller to sizeof(struct llama_sidecar_tensor_data).
    pub struct_size: usize,
    /// Name as in a GGUF file, such as blk.3.ffn_down_exps.weight. Copied.
    pub name: *const c_char,
    /// The bytes, without gaps between rows and matrices.
    pub data: *const c_void,
    /// Number of bytes, as ggml_nbytes returns it.
    pub nbytes: u64,
    /// Number of elements per dimension, innermost first; 1 for dimensions that the tensor does not
    /// have.
    pub ne: [u64; 4],
    /// Value of enum ggml_type.
    pub ggml_type: u32,
}

parameters!(
    llama_sidecar_tensor_data,
    72,
    struct_size,
    name,
    data,
    nbytes,
    ne,
    ggml_type
);

/// Makes a model of tensors that the program has in its memory: no file is opened, and nothing is
/// copied. Post-fetch copies experts from there, and expert traces count them. Only the tensors of
/// the experts are needed. The model has no metadata: set n_active of llama_postfetch_params. It
/// cannot be reloaded or streamed, because it has no file: the path of each tensor is "tensors of
/// the program".
///
/// The bytes must be readable and stay as they are until the model and its schedulers are freed.
///
/// @param tensors Array of `n` structs, whose size is the struct_size of the first.
/// @return The model, or NULL on failure: for example, for two tensors of one name, or a number of
/// bytes that type and dimensions do not have. Free it with llama_sidecar_model_free.
///
/// # Safety
///
/// `tensors` is null or has `n` elements whose struct_size is set and whose names are null or
/// NUL-terminated strings.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn llama_sidecar_model_from_tensors(
    tensors: *const llama_sidecar_tensor_data,
    n: usize,
) -> *mut llama_model {
    let made = call(|| {
        sidecar_core::logger::init();
        if tensors.is_null() {
            return Err(Failure::null("tensors"));
        }
        if n == 0 {
            return Err(Failure::argument("n is 0, expected a number of tensors"));
        }
        let none = llama_sidecar_tensor_data {
            struct_size: size_of::<llama_sidecar_tensor_data>(),
            name: std::ptr::null(),
            data: std::ptr::null(),
            nbytes: 0,
            ne: [1; 4],
            ggml_type: 0,
        };
        // SAFETY: as the caller guarantees.
        let size = unsafe { read(tensors, none) }?.struct_size;
        let mut borrowed = Vec::new();
        for at in 0..n {
            // SAFETY: as the caller guarantees.
            let tensor = unsafe { read(tensors.byte_add(at * size), none) }?;
            if tensor.struct_size != size {
                return Err(Failure::argument(format!(
                    "struct_size of tensors[{at}] is {}, expected that of the first: {size}",
                    tensor.struct_size
                )));
            }
            borrowed.push(BorrowedTensor {
                // SAFETY: as the caller guarantees.
                name: unsafe { text(tensor.name, "name") }?,
                ty: tensor.ggml_type,
                ne: tensor.ne,
                data: tensor.data.cast(),
                nbytes: tensor.nbytes,
            });
        }
        // SAFETY: as the caller guarantees.
        let model = unsafe { Model::of_memory(&borrowed) }?;
        Ok(handle::new(OpenModel::new(model)))
    });
    made.unwrap_or(std::ptr::null_mut())
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
