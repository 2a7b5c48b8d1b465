//! Reloads and their reports.

use std::ffi::{CString, OsStr, c_char};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use super::context::llama_context;
use super::handle::{self, Handle};
use super::status::{Failure, call, llama_sidecar_status, status};
use super::tensor::find;
use super::{SizedStruct, fill, put, text};
use crate::model::Model;
use sidecar_core::reload::{FileEvent, Outcome, OverlaySource, Report};

/// The result of a reload.
pub struct llama_sidecar_report {
    _opaque: [u8; 0],
}

impl Handle for llama_sidecar_report {
    type Object = OwnedReport;
    const NAME: &'static str = "llama_sidecar_report";
}

/// A report and its C strings.
pub(super) struct OwnedReport {
    report: Report,
    /// Reason and placement of each tensor.
    tensors: Vec<(CString, CString)>,
    /// Why the reload stopped after some of its steps.
    failure: CString,
    /// Path and reason of each file.
    files: Vec<(CString, CString)>,
}

impl OwnedReport {
    fn new(report: Report) -> OwnedReport {
        let c = |bytes: &[u8]| CString::new(bytes).unwrap_or_default();
        OwnedReport {
            tensors: report
                .tensors
                .iter()
                .map(|t| (c(t.reason.as_bytes()), c(t.placement.as_bytes())))
                .collect(),
            failure: c(report.failure.as_deref().unwrap_or_default().as_bytes()),
            files: report
                .files
                .iter()
                .map(|f| (c(f.path.as_os_str().as_bytes()), c(f.reason().as_bytes())))
                .collect(),
            report,
        }
    }
}

/// Reloads the tensors of the context's model whose files changed.
///
/// Name and meaning are those of ik_llama.cpp, so programs that are written for it link without
/// changes. The call waits at most 60 seconds for running evaluations to end, then fails with
/// LLAMA_SIDECAR_STATUS_BUSY and keeps the tensors that were not switched. A thread must not call
/// it during its own evaluation.
///
/// @return true if any tensor changed; false if none changed or on failure.
/// llama_sidecar_last_error has the message of a failure.
#[unsafe(no_mangle)]
pub extern "C" fn llama_reload_changed_tensors(context: *mut llama_context) -> bool {
    call(|| Ok(handle::get(context)?.reload()?.changed())).unwrap_or(false)
}

/// Does the same as llama_reload_changed_tensors, and reports the outcome of each tensor.
///
/// All changed tensors are switched together between evaluations; on failure, none is switched.
/// Files that cannot be used (unreadable, incomplete, of another model) are skipped and reported.
/// If a reload needs more memory than is free, or more than staging_bytes, it is done in several
/// consistent steps. If a later step fails, the report has the reason, and the next reload
/// continues from there.
///
/// @param report Receives a report if the status is LLAMA_SIDECAR_STATUS_OK. Free it with
/// llama_sidecar_report_free. It stays valid after the model is freed.
///
/// # Safety
///
/// `report` is null or valid for a write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn llama_sidecar_reload(
    context: *const llama_context,
    report: *mut *mut llama_sidecar_report,
) -> llama_sidecar_status {
    status(|| {
        let context = handle::get(context)?;
        if report.is_null() {
            return Err(Failure::null("report"));
        }
        // SAFETY: as the caller guarantees.
        unsafe { put_report(report, context.reload()?) }
    })
}

/// Gives tensors the type and data of another GGUF file, for example in another quantisation. The
/// model's own files stay as they are.
///
/// The file is any version of the same model, or any shard of one. All tensors are checked and
/// switched together between evaluations, as llama_sidecar_reload does; if one of them is missing
/// in the file, has another shape, or is damaged, none is switched. The data is copied, so the file
/// can be removed afterwards. These tensors no longer follow the model's own files, until
/// llama_sidecar_overlay_revert. Other tensors keep what they have; a reload is not included.
///
/// @param path The file to take the tensors from.
/// @param names Names of the tensors; NULL for all tensors of the model.
/// @param n_names Number of names; 0 if names is NULL.
/// @param report Receives a report if the status is LLAMA_SIDECAR_STATUS_OK; can be NULL. Free it
/// with llama_sidecar_report_free.
///
/// # Safety
///
/// `path` is null or NUL-terminated; `names` is null or points to `n_names` pointers, each null or
/// NUL-terminated; `report` is null or valid for a write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn llama_sidecar_overlay_set(
    context: *const llama_context,
    path: *const c_char,
    names: *const *const c_char,
    n_names: u64,
    report: *mut *mut llama_sidecar_report,
) -> llama_sidecar_status {
    status(|| {
        let context = handle::get(context)?;
        // SAFETY: as the caller guarantees.
        let path = unsafe { text(path, "path") }?;
        // SAFETY: as the caller guarantees.
        let tensors = unsafe { named(context.model(), names, n_names) }?;
        let source = OverlaySource::open(Path::new(OsStr::from_bytes(path.to_bytes())))?;
        let set: Vec<_> = tensors
            .into_iter()
            .map(|tensor| (tensor, &source))
            .collect();
        let made = context.overlay(&[], &set)?;
        // SAFETY: as the caller guarantees.
        unsafe { put_report(report, made) }
    })
}

/// Returns tensors with an overlay to the data of the model's own files. Tensors without one stay
/// as they are.
///
/// All tensors are switched together between evaluations. A tensor gets the data of the version of
/// its file that is in use: its original data without a copy, or the data of a changed file that a
/// reload used meanwhile, which must still be there.
///
/// @param names Names of the tensors; NULL for all tensors of the model.
/// @param n_names Number of names; 0 if names is NULL.
/// @param report Receives a report if the status is LLAMA_SIDECAR_STATUS_OK; can be NULL. Free it
/// with llama_sidecar_report_free.
///
/// # Safety
///
/// `names` is null or points to `n_names` pointers, each null or NUL-terminated; `report` is null
/// or valid for a write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn llama_sidecar_overlay_revert(
    context: *const llama_context,
    names: *const *const c_char,
    n_names: u64,
    report: *mut *mut llama_sidecar_report,
) -> llama_sidecar_status {
    status(|| {
        let context = handle::get(context)?;
        // SAFETY: as the caller guarantees.
        let tensors = unsafe { named(context.model(), names, n_names) }?;
        let made = context.overlay(&tensors, &[])?;
        // SAFETY: as the caller guarantees.
        unsafe { put_report(report, made) }
    })
}

/// Finds the tensors with these names; all tensors of the model if `names` is null.
///
/// # Safety
///
/// `names` is null or points to `count` pointers, each null or NUL-terminated.
unsafe fn named(
    model: &Model,
    names: *const *const c_char,
    count: u64,
) -> Result<Vec<usize>, Failure> {
    if names.is_null() && count > 0 {
        return Err(Failure::null("names"));
    }
    if names.is_null() {
        return Ok((0..model.tensor_count()).collect());
    }
    let names = (0..count as usize).map(|at| {
        // SAFETY: as the caller guarantees.
        let name = unsafe { text(*names.add(at), "name") }?;
        find(model, name)
    });
    names.collect()
}

/// Hands a report to the caller, if `to` is not null.
///
/// # Safety
///
/// `to` is null or valid for a write.
unsafe fn put_report(to: *mut *mut llama_sidecar_report, report: Report) -> Result<(), Failure> {
    match to.is_null() {
        true => Ok(()),
        // SAFETY: not null, and valid as the caller guarantees.
        false => unsafe { put(to, handle::new(OwnedReport::new(report)), "report") },
    }
}

/// Frees a report.
#[unsafe(no_mangle)]
pub extern "C" fn llama_sidecar_report_free(
    report: *mut llama_sidecar_report,
) -> llama_sidecar_status {
    status(|| handle::free(report))
}

/// Counts and durations of a reload.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct llama_sidecar_report_info {
    /// Set by the caller to sizeof(struct llama_sidecar_report_info).
    pub struct_size: usize,
    /// Number of files that were checked for changes, with one stat call each.
    pub n_files_checked: u64,
    /// Number of changed files; see llama_sidecar_report_get_file.
    pub n_files: u64,
    /// Number of tensors in these files; see llama_sidecar_report_get_tensor.
    pub n_tensors: u64,
    /// Number of tensors with LLAMA_SIDECAR_OUTCOME_SWAPPED.
    pub n_swapped: u64,
    /// Number of tensors with LLAMA_SIDECAR_OUTCOME_RETURNED.
    pub n_returned: u64,
    /// Number of tensors with LLAMA_SIDECAR_OUTCOME_UNCHANGED.
    pub n_unchanged: u64,
    /// Number of tensors with LLAMA_SIDECAR_OUTCOME_IN_PLACE.
    pub n_in_place: u64,
    /// Number of tensors with LLAMA_SIDECAR_OUTCOME_REFUSED.
    pub n_refused: u64,
    /// Number of tensors with LLAMA_SIDECAR_OUTCOME_MOVED.
    pub n_moved: u64,
    /// Bytes read into new buffers.
    pub bytes_staged: u64,
    /// Generation of the model after the reload; 0 if nothing changed.
    pub generation: u64,
    /// Number of switches: 0 if nothing changed, 1 for an ordinary reload, more for a reload in
    /// several steps.
    pub n_commits: u64,
    /// Why a reload in several steps stopped before the last one; empty otherwise. Valid until the
    /// report is freed.
    pub failure: *const c_char,
    /// Time for checking files and parsing changed headers, in microseconds.
    pub detect_us: u64,
    /// Time for reading and hashing tensors, in microseconds.
    pub compare_us: u64,
    /// Time for allocating and filling new buffers, in microseconds.
    pub stage_us: u64,
    /// Time spent waiting for running evaluations to end, in microseconds.
    pub wait_us: u64,
    /// Time of the switch, during which no evaluation could run, in nanoseconds.
    pub switch_ns: u64,
    /// Total time in microseconds.
    pub total_us: u64,
}

// SAFETY: repr(C), starts with struct_size, plain fields.
unsafe impl SizedStruct for llama_sidecar_report_info {
    const NAME: &'static str = "llama_sidecar_report_info";
    const FIRST: usize = 160;
}

/// Fills `info` with the counts and durations of a reload.
///
/// # Safety
///
/// `info` is null or points to a struct whose struct_size is set.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn llama_sidecar_report_get_info(
    report: *const llama_sidecar_report,
    info: *mut llama_sidecar_report_info,
) -> llama_sidecar_status {
    status(|| {
        let owned = handle::get(report)?;
        let report = &owned.report;
        let count = |outcome| report.count(outcome) as u64;
        let value = llama_sidecar_report_info {
            struct_size: size_of::<llama_sidecar_report_info>(),
            n_files_checked: report.files_checked as u64,
            n_files: report.files.len() as u64,
            n_tensors: report.tensors.len() as u64,
            n_swapped: count(Outcome::Swapped),
            n_returned: count(Outcome::Returned),
            n_unchanged: count(Outcome::Unchanged),
            n_in_place: count(Outcome::InPlace),
            n_refused: count(Outcome::Refused),
            n_moved: count(Outcome::Moved),
            bytes_staged: report.bytes_staged,
            generation: report.generation,
            n_commits: u64::from(report.commits),
            failure: owned.failure.as_ptr(),
            detect_us: report.times.detect.as_micros() as u64,
            compare_us: report.times.compare.as_micros() as u64,
            stage_us: report.times.stage.as_micros() as u64,
            wait_us: report.times.wait.as_micros() as u64,
            switch_ns: report.times.switch.as_nanos() as u64,
            total_us: report.times.total.as_micros() as u64,
        };
        // SAFETY: as the caller guarantees.
        unsafe { fill(info, &value) }
    })
}

/// Outcome of a reload for one tensor.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum llama_sidecar_outcome {
    /// The file changed, but the data of the tensor did not.
    Unchanged = 0,
    /// The tensor has new data in a buffer of its own.
    Swapped = 1,
    /// The tensor has its original data again.
    Returned = 2,
    /// The file was modified in place, so the mapped data had already changed.
    InPlace = 3,
    /// The tensor or its file was refused. The tensor is unchanged.
    Refused = 4,
    /// Same data, new placement: the layout of a sibling changed, a device ran out of memory, or a
    /// device has enough memory again.
    Moved = 5,
}

impl From<Outcome> for llama_sidecar_outcome {
    fn from(outcome: Outcome) -> llama_sidecar_outcome {
        match outcome {
            Outcome::Unchanged => llama_sidecar_outcome::Unchanged,
            Outcome::Swapped => llama_sidecar_outcome::Swapped,
            Outcome::Returned => llama_sidecar_outcome::Returned,
            Outcome::InPlace => llama_sidecar_outcome::InPlace,
            Outcome::Refused => llama_sidecar_outcome::Refused,
            Outcome::Moved => llama_sidecar_outcome::Moved,
        }
    }
}

/// One tensor of a changed file.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct llama_sidecar_report_tensor {
    /// Set by the caller to sizeof(struct llama_sidecar_report_tensor).
    pub struct_size: usize,
    /// Index of the tensor in the model.
    pub index: u64,
    /// Name of the tensor. Valid until the report is freed, as are the other strings.
    pub name: *const c_char,
    /// Name of the previous type. A static string.
    pub old_type: *const c_char,
    /// Name of the new type. A static string.
    pub new_type: *const c_char,
    /// Why the tensor was refused; empty otherwise.
    pub reason: *const c_char,
    /// Description of the devices and the rows on each; empty if the tensor did not change or is on
    /// no device.
    pub placement: *const c_char,
    /// Bytes in the file; 0 for a tensor that was refused or only moved.
    pub nbytes: u64,
    /// Outcome for the tensor.
    pub outcome: llama_sidecar_outcome,
}

// SAFETY: repr(C), starts with struct_size, plain fields.
unsafe impl SizedStruct for llama_sidecar_report_tensor {
    const NAME: &'static str = "llama_sidecar_report_tensor";
    const FIRST: usize = 72;
}

/// Fills `info` with a tensor of a report.
///
/// @param at Index of the entry, less than n_tensors of llama_sidecar_report_info.
///
/// # Safety
///
/// `info` is null or points to a struct whose struct_size is set.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn llama_sidecar_report_get_tensor(
    report: *const llama_sidecar_report,
    at: u64,
    info: *mut llama_sidecar_report_tensor,
) -> llama_sidecar_status {
    status(|| {
        let owned = handle::get(report)?;
        let tensors = &owned.report.tensors;
        let tensor = tensors
            .get(at as usize)
            .ok_or_else(|| missing(at, tensors.len()))?;
        let (reason, placement) = &owned.tensors[at as usize];
        let value = llama_sidecar_report_tensor {
            struct_size: size_of::<llama_sidecar_report_tensor>(),
            index: tensor.tensor as u64,
            name: tensor.name.as_ptr(),
            old_type: tensor.old_type.c_name().as_ptr(),
            new_type: tensor.new_type.c_name().as_ptr(),
            reason: reason.as_ptr(),
            placement: placement.as_ptr(),
            nbytes: tensor.nbytes,
            outcome: tensor.outcome.into(),
        };
        // SAFETY: as the caller guarantees.
        unsafe { fill(info, &value) }
    })
}

/// Outcome of a reload for one file.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum llama_sidecar_file_event {
    /// The tensors of the file are now in use.
    Taken = 0,
    /// The file was skipped; its tensors are unchanged.
    Ignored = 1,
}

impl From<FileEvent> for llama_sidecar_file_event {
    fn from(event: FileEvent) -> llama_sidecar_file_event {
        match event {
            FileEvent::Taken => llama_sidecar_file_event::Taken,
            FileEvent::Ignored => llama_sidecar_file_event::Ignored,
        }
    }
}

/// A file that changed since the last reload.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct llama_sidecar_report_file {
    /// Set by the caller to sizeof(struct llama_sidecar_report_file).
    pub struct_size: usize,
    /// Path of the file. Valid until the report is freed, as is the reason.
    pub path: *const c_char,
    /// Why the file was skipped, or what of it needs a new start of the program; empty otherwise.
    pub reason: *const c_char,
    /// Outcome for the file.
    pub event: llama_sidecar_file_event,
}

// SAFETY: repr(C), starts with struct_size, plain fields.
unsafe impl SizedStruct for llama_sidecar_report_file {
    const NAME: &'static str = "llama_sidecar_report_file";
    const FIRST: usize = 32;
}

/// Fills `info` with a file of a report.
///
/// @param at Index of the entry, less than n_files of llama_sidecar_report_info.
///
/// # Safety
///
/// `info` is null or points to a struct whose struct_size is set.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn llama_sidecar_report_get_file(
    report: *const llama_sidecar_report,
    at: u64,
    info: *mut llama_sidecar_report_file,
) -> llama_sidecar_status {
    status(|| {
        let owned = handle::get(report)?;
        let (files, texts) = (&owned.report.files, &owned.files);
        let file = files
            .get(at as usize)
            .ok_or_else(|| missing(at, files.len()))?;
        let (path, reason) = &texts[at as usize];
        let value = llama_sidecar_report_file {
            struct_size: size_of::<llama_sidecar_report_file>(),
            path: path.as_ptr(),
            reason: reason.as_ptr(),
            event: file.event().into(),
        };
        // SAFETY: as the caller guarantees.
        unsafe { fill(info, &value) }
    })
}

fn missing(at: u64, count: usize) -> Failure {
    Failure::new(
        llama_sidecar_status::NotFound,
        format!("entry {at} of the report does not exist: there are {count}"),
    )
}
