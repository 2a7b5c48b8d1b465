//! Reloads and their reports.

use std::ffi::{CString, c_char};
use std::os::unix::ffi::OsStrExt;

use super::handle::{self, llama_context, llama_sidecar_report};
use super::status::{Failure, call, llama_sidecar_status, status};
use super::{SizedStruct, fill, put};
use crate::reload::{FileEvent, Outcome, Report};

/// A report and its texts for C.
pub(super) struct OwnedReport {
    report: Report,
    /// Reason and placement of each tensor.
    tensors: Vec<(CString, CString)>,
    /// Why the reload stopped half-way.
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

/// Brings all tensors of the context's model up to date with their files, and says whether any
/// changed. False also when it failed: llama_sidecar_last_error then says why.
///
/// Same name and meaning as in ik_llama.cpp, whose programs link against this library unchanged.
/// Waits until running evaluations end, for at most 60 seconds: then it fails with
/// LLAMA_SIDECAR_STATUS_BUSY and what it did not switch is as before. A thread must not call it during
/// its own evaluation.
#[unsafe(no_mangle)]
pub extern "C" fn llama_reload_changed_tensors(context: *mut llama_context) -> bool {
    call(|| Ok(handle::get(context)?.reload()?.changed())).unwrap_or(false)
}

/// Like llama_reload_changed_tensors, and tells what happened to each tensor.
///
/// Everything that changed is switched together, between evaluations; on failure nothing is. Files
/// that cannot be taken (unreadable, incomplete, of another model) are left out and reported. Only
/// when there is less memory, or staging_bytes, than a reload needs is it done in several steps, each
/// consistent; when a later one fails, the report says so and the next reload goes on from there.
///
/// `report` gets a report to be freed with llama_sidecar_report_free; it is independent of the
/// model. With a status other than OK there is none.
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
        let made = handle::new(OwnedReport::new(context.reload()?));
        // SAFETY: not null, and valid as the caller vouches.
        unsafe { put(report, made, "report") }
    })
}

/// Frees a report.
#[unsafe(no_mangle)]
pub extern "C" fn llama_sidecar_report_free(
    report: *mut llama_sidecar_report,
) -> llama_sidecar_status {
    status(|| handle::free(report))
}

/// What a reload did, in numbers.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct llama_sidecar_report_info {
    /// sizeof(struct llama_sidecar_report_info), set by the caller.
    pub struct_size: usize,
    /// Files that were looked at, one stat each.
    pub n_files_checked: u64,
    /// Files that are not as they were; ask for each with llama_sidecar_report_get_file.
    pub n_files: u64,
    /// Tensors of those files; ask for each with llama_sidecar_report_get_tensor.
    pub n_tensors: u64,
    /// Tensors with new bytes in a buffer of their own.
    pub n_swapped: u64,
    /// Tensors that are back on their original bytes.
    pub n_returned: u64,
    /// Tensors whose file changed and whose bytes did not.
    pub n_unchanged: u64,
    /// Tensors whose file was written in place: they had changed already.
    pub n_in_place: u64,
    /// Tensors that were refused.
    pub n_refused: u64,
    /// Tensors whose bytes are the same in other places.
    pub n_moved: u64,
    /// Bytes read into new buffers.
    pub bytes_staged: u64,
    /// The model's generation after the reload; 0 when it changed nothing.
    pub generation: u64,
    /// How often evaluations were kept out: 1 when something changed, more when it was done in steps.
    pub n_commits: u64,
    /// Why a reload that was done in steps stopped after some of them; empty otherwise. Valid until
    /// the report is freed.
    pub failure: *const c_char,
    /// Looking at files and parsing changed headers.
    pub detect_us: u64,
    /// Reading and hashing tensors.
    pub compare_us: u64,
    /// Allocating and filling new buffers.
    pub stage_us: u64,
    /// Waiting for running evaluations to end.
    pub wait_us: u64,
    /// The switch, during which no evaluation could run, in nanoseconds.
    pub switch_ns: u64,
    /// Everything.
    pub total_us: u64,
}

// SAFETY: repr(C), starts with struct_size, plain fields.
unsafe impl SizedStruct for llama_sidecar_report_info {
    const NAME: &'static str = "llama_sidecar_report_info";
    const FIRST: usize = 160;
}

/// Tells what a reload did, in numbers.
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
        // SAFETY: as the caller vouches.
        unsafe { fill(info, &value) }
    })
}

/// What happened to a tensor in a reload.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum llama_sidecar_outcome {
    /// Its file changed, its bytes did not.
    Unchanged = 0,
    /// It has new bytes in a buffer of its own.
    Swapped = 1,
    /// It is back on its original bytes.
    Returned = 2,
    /// Its file was written in place: the bytes in use had changed already.
    InPlace = 3,
    /// It, or its whole file, was refused; it is as before.
    Refused = 4,
    /// The same bytes in other places, because something that is laid out with it changed, or there
    /// was no room on a device, or there is again.
    Moved = 5,
}

/// One tensor of a changed file.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct llama_sidecar_report_tensor {
    /// sizeof(struct llama_sidecar_report_tensor), set by the caller.
    pub struct_size: usize,
    /// Its index in the model.
    pub index: u64,
    /// Its name. Valid until the report is freed, as the other strings.
    pub name: *const c_char,
    /// Name of its type before. Static.
    pub old_type: *const c_char,
    /// Name of its type now. Static.
    pub new_type: *const c_char,
    /// Why it was refused; empty otherwise.
    pub reason: *const c_char,
    /// Which devices hold which rows of it now, in words; empty when it did not change or is on no
    /// device.
    pub placement: *const c_char,
    /// Bytes in the file; 0 for a tensor that was refused or only moved.
    pub nbytes: u64,
    /// What happened to it.
    pub outcome: llama_sidecar_outcome,
}

// SAFETY: repr(C), starts with struct_size, plain fields.
unsafe impl SizedStruct for llama_sidecar_report_tensor {
    const NAME: &'static str = "llama_sidecar_report_tensor";
    const FIRST: usize = 72;
}

/// Tells about entry `at` of a report, of n_tensors.
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
            outcome: match tensor.outcome {
                Outcome::Unchanged => llama_sidecar_outcome::Unchanged,
                Outcome::Swapped => llama_sidecar_outcome::Swapped,
                Outcome::Returned => llama_sidecar_outcome::Returned,
                Outcome::InPlace => llama_sidecar_outcome::InPlace,
                Outcome::Refused => llama_sidecar_outcome::Refused,
                Outcome::Moved => llama_sidecar_outcome::Moved,
            },
        };
        // SAFETY: as the caller vouches.
        unsafe { fill(info, &value) }
    })
}

/// What became of a changed file.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum llama_sidecar_file_event {
    /// Its tensors are now the ones in use.
    Taken = 0,
    /// It was left out; its tensors are as before.
    Ignored = 1,
}

/// One file that is not as it was at the last reload.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct llama_sidecar_report_file {
    /// sizeof(struct llama_sidecar_report_file), set by the caller.
    pub struct_size: usize,
    /// Its path. Valid until the report is freed, as the other string.
    pub path: *const c_char,
    /// Why it was ignored; empty otherwise.
    pub reason: *const c_char,
    /// What became of it.
    pub event: llama_sidecar_file_event,
}

// SAFETY: repr(C), starts with struct_size, plain fields.
unsafe impl SizedStruct for llama_sidecar_report_file {
    const NAME: &'static str = "llama_sidecar_report_file";
    const FIRST: usize = 32;
}

/// Tells about entry `at` of a report, of n_files.
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
            event: match file.event() {
                FileEvent::Taken => llama_sidecar_file_event::Taken,
                FileEvent::Ignored => llama_sidecar_file_event::Ignored,
            },
        };
        // SAFETY: as the caller vouches.
        unsafe { fill(info, &value) }
    })
}

fn missing(at: u64, count: usize) -> Failure {
    Failure::new(
        llama_sidecar_status::NotFound,
        format!("entry {at} of the report does not exist: there are {count}"),
    )
}
