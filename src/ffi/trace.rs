//! Expert traces.

use std::ffi::{CStr, OsStr, c_char};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use super::handle::{self, llama_expert_trace, llama_model};
use super::status::{Failure, call, llama_sidecar_status, status};
use super::{put_text, text};
use crate::trace::{ExpertLayout, Ids, ModelMeta, Trace, to_text, write};

/// Counters and whose experts they count.
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

/// Begins to count which experts of a model are used. Returns NULL on failure, for example when the
/// model has no routed experts. Free the result with llama_expert_trace_free; it does not keep the
/// model alive.
///
/// Any number of threads may record at the same time: each has counters of its own.
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
            counters: Trace::new(layout),
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

/// Counts one token that used one expert. `layer` is the number in the tensors' names.
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

/// Counts a matrix of routed ids: for each of `n_tokens` tokens `n_used` experts, as ggml lays out
/// src[2] of GGML_OP_MUL_MAT_ID. `used_stride` is its nb[0] and `token_stride` its nb[1], in bytes;
/// rows may be padded.
///
/// Ids that are no experts of the layer are counted as rejected and otherwise left out.
///
/// # Safety
///
/// `ids` is null, or every id is readable: the last one ends
/// `(n_tokens - 1) * token_stride + (n_used - 1) * used_stride + 4` bytes behind it.
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
        let len = Ids::byte_len(n_used, n_tokens, used_stride, token_stride)
            .ok_or_else(|| Failure::argument("the matrix of ids is larger than memory"))?;
        if len == 0 {
            return Ok(());
        }
        if ids.is_null() {
            return Err(Failure::null("ids"));
        }
        let ids = Ids {
            // SAFETY: not null, and readable up to there as the caller vouches.
            bytes: unsafe { std::slice::from_raw_parts(ids.cast::<u8>(), len) },
            used: n_used,
            tokens: n_tokens,
            used_stride,
            token_stride,
        };
        owned.counters.record_batch(layer, &ids);
        Ok(())
    })
}

/// Copies the counts of a layer: how often each expert was used since the trace began or was reset,
/// and how many tokens the layer routed. Of more than `n_counts` experts, the first are copied.
///
/// `counts` can be NULL when `n_counts` is 0; `tokens` and `n_experts` can be NULL.
///
/// # Safety
///
/// `counts` has room for `n_counts`; `tokens` and `n_experts` are null or valid for a write.
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
            // SAFETY: not null and with room for `n_counts`, as the caller vouches.
            unsafe { counts.add(at).write(count) };
        }
        // SAFETY: null or valid, as the caller vouches.
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

/// Forgets what was counted so far.
#[unsafe(no_mangle)]
pub extern "C" fn llama_expert_trace_reset(
    trace: *const llama_expert_trace,
) -> llama_sidecar_status {
    status(|| {
        handle::get(trace)?.counters.reset();
        Ok(())
    })
}

/// Writes what was counted: CSV to a path that ends in ".csv" (layer,expert,count,share), JSON to any
/// other (docs/expert-trace.md). The file is written beside the path and renamed.
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
        // SAFETY: as the caller vouches.
        let path: &CStr = unsafe { text(path, "path")? };
        let path = Path::new(OsStr::from_bytes(path.to_bytes()));
        write(path, &owned.about, &owned.counters.snapshot()).map_err(|error| {
            Failure::new(
                llama_sidecar_status::Io,
                format!("cannot write {}: {error}", path.display()),
            )
        })
    })
}

/// Writes a summary for people into `buffer`, cut to `size` bytes with the NUL, and returns how long
/// the whole text is; 0 on failure. `buffer` can be NULL when `size` is 0.
///
/// # Safety
///
/// `buffer` has room for `size` bytes.
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
        // SAFETY: as the caller vouches.
        unsafe { put_text(&text, buffer, size) }
    });
    written.unwrap_or(0)
}
