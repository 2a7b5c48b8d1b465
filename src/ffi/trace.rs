//! Expert traces.

use std::ffi::{CStr, OsStr, c_char};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use super::handle::{self, Handle};
use super::model::llama_model;
use super::status::{Failure, call, llama_sidecar_status, status};
use super::{put_text, routed_ids, text};
use crate::trace::{ExpertLayout, ModelMeta, Trace, to_text, write};

/// Usage counters for the routed experts of a model.
pub struct llama_expert_trace {
    _opaque: [u8; 0],
}

impl Handle for llama_expert_trace {
    type Object = OwnedTrace;
    const NAME: &'static str = "llama_expert_trace";
}

/// Counters and the model that they belong to.
pub(super) struct OwnedTrace {
    counters: Trace,
    about: ModelMeta,
}

impl OwnedTrace {
    fn position(&self, layer: u32) -> Result<usize, Failure> {
        self.counters.layout().position(layer).ok_or_else(|| {
            Failure::new(
                llama_sidecar_status::NotFound,
                format!("layer {layer} of the model has no routed experts"),
            )
        })
    }
}

/// Creates usage counters for the routed experts of a model. The trace does not keep the model
/// alive.
///
/// Any number of threads can record at the same time. Each thread has its own counters; only
/// threads that record batches of the same layer wait for each other, for its locality
/// (docs/expert-trace.md).
///
/// @return The trace, or NULL on failure: for example, when the model has no routed experts. Free
/// it with llama_expert_trace_free.
#[unsafe(no_mangle)]
pub extern "C" fn llama_expert_trace_new(model: *const llama_model) -> *mut llama_expert_trace {
    let made = call(|| {
        let open = handle::get(model)?;
        let layout = ExpertLayout::of(open.model.experts());
        if layout.layers().is_empty() {
            return Err(Failure::new(
                llama_sidecar_status::NotFound,
                "the model has no routed experts (tensors such as blk.0.ffn_gate_exps.weight)",
            ));
        }
        Ok(handle::new(OwnedTrace {
            counters: Trace::with_locality(layout),
            about: ModelMeta::of(open.model.gguf_files()),
        }))
    });
    made.unwrap_or(std::ptr::null_mut())
}

/// Frees a trace.
#[unsafe(no_mangle)]
pub extern "C" fn llama_expert_trace_free(trace: *mut llama_expert_trace) -> llama_sidecar_status {
    status(|| handle::free(trace))
}

/// Counts one use of an expert by one token. The use is not part of the locality, because the
/// other experts of the token are not known.
///
/// @param layer Number of the layer in tensor names, such as 3 in blk.3.ffn_gate_exps.weight.
#[unsafe(no_mangle)]
pub extern "C" fn llama_expert_trace_record(
    trace: *const llama_expert_trace,
    layer: u32,
    expert: u32,
) -> llama_sidecar_status {
    status(|| {
        let owned = handle::get(trace)?;
        owned.counters.record(owned.position(layer)?, expert);
        Ok(())
    })
}

/// Counts a matrix of routed ids, laid out as src[2] of GGML_OP_MUL_MAT_ID in ggml, and adds its
/// tokens in order to the locality. Rows can be padded.
///
/// Ids that are not experts of the layer are counted as rejected only.
///
/// @param n_used Number of experts per token.
/// @param used_stride Bytes between the ids of a token: nb[0].
/// @param token_stride Bytes between the rows of two tokens: nb[1].
///
/// # Safety
///
/// `ids` is null, or every id is readable: the last one ends
/// `(n_tokens - 1) * token_stride + (n_used - 1) * used_stride + 4` bytes after `ids`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn llama_expert_trace_record_batch(
    trace: *const llama_expert_trace,
    layer: u32,
    ids: *const i32,
    n_used: usize,
    n_tokens: usize,
    used_stride: usize,
    token_stride: usize,
) -> llama_sidecar_status {
    status(|| {
        let owned = handle::get(trace)?;
        let layer = owned.position(layer)?;
        // SAFETY: as the caller guarantees.
        let ids = unsafe { routed_ids(ids, n_used, n_tokens, used_stride, token_stride) }?;
        if let Some(ids) = ids {
            owned.counters.record_batch(layer, &ids);
        }
        Ok(())
    })
}

/// Copies the counts of a layer since the trace was created or reset. If the layer has more than
/// `n_counts` experts, the first `n_counts` are copied.
///
/// @param counts Receives the number of uses of each expert; can be NULL when `n_counts` is 0.
/// @param tokens Receives the number of tokens that the layer routed; can be NULL.
/// @param n_experts Receives the number of experts of the layer; can be NULL.
///
/// # Safety
///
/// `counts` is valid for `n_counts` writes; `tokens` and `n_experts` are null or valid for a write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn llama_expert_trace_counts(
    trace: *const llama_expert_trace,
    layer: u32,
    counts: *mut u64,
    n_counts: usize,
    tokens: *mut u64,
    n_experts: *mut usize,
) -> llama_sidecar_status {
    status(|| {
        let owned = handle::get(trace)?;
        let layer = owned.position(layer)?;
        if counts.is_null() && n_counts > 0 {
            return Err(Failure::null("counts"));
        }
        let snapshot = owned.counters.snapshot();
        let layer = &snapshot.layers[layer];
        for (at, &count) in layer.experts.iter().take(n_counts).enumerate() {
            // SAFETY: not null and valid for `n_counts` writes, as the caller guarantees.
            unsafe { counts.add(at).write(count) };
        }
        // SAFETY: null or valid, as the caller guarantees.
        unsafe {
            if !tokens.is_null() {
                tokens.write(layer.tokens);
            }
            if !n_experts.is_null() {
                n_experts.write(layer.experts.len());
            }
        }
        Ok(())
    })
}

/// Resets all counters to 0.
#[unsafe(no_mangle)]
pub extern "C" fn llama_expert_trace_reset(
    trace: *const llama_expert_trace,
) -> llama_sidecar_status {
    status(|| {
        handle::get(trace)?.counters.reset();
        Ok(())
    })
}

/// Writes the trace to a file: the counts as CSV (layer,expert,count,share) if the path ends in
/// ".csv", otherwise counts and locality as JSON (docs/expert-trace.md). The call writes a temporary file in the same folder
/// and renames it to the path.
///
/// # Safety
///
/// `path` is null or a C string.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn llama_expert_trace_write(
    trace: *const llama_expert_trace,
    path: *const c_char,
) -> llama_sidecar_status {
    status(|| {
        let owned = handle::get(trace)?;
        // SAFETY: as the caller guarantees.
        let path: &CStr = unsafe { text(path, "path")? };
        let path = Path::new(OsStr::from_bytes(path.to_bytes()));
        write(path, &owned.about, &owned.counters.snapshot_with_locality()).map_err(|error| {
            Failure::new(
                llama_sidecar_status::Io,
                format!("cannot write {}: {error}", path.display()),
            )
        })
    })
}

/// Writes a plain-text summary to `buffer`, truncated to `size` bytes including the NUL.
///
/// @param per_layer true to add a section per layer.
/// @param buffer Can be NULL when `size` is 0.
/// @return Length of the whole text without the NUL, or 0 on failure.
///
/// # Safety
///
/// `buffer` is valid for writes of `size` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn llama_expert_trace_summary(
    trace: *const llama_expert_trace,
    per_layer: bool,
    buffer: *mut c_char,
    size: usize,
) -> usize {
    let written = call(|| {
        let owned = handle::get(trace)?;
        let text = to_text(&owned.about, &owned.counters.snapshot(), per_layer);
        // SAFETY: as the caller guarantees.
        unsafe { put_text(&text, buffer, size) }
    });
    written.unwrap_or(0)
}
