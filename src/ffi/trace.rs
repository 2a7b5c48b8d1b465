//! Expert traces.
//!
//! A trace does at its end what the variables request: when it is freed, or at exit. What schedulers of
//! post-fetch are given is counted for the variables, too, in models of which the program has no trace.

use std::ffi::{CStr, OsStr, c_char};
use std::os::unix::ffi::OsStrExt;
use std::panic::catch_unwind;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Once, Weak};
use std::time::Duration;

use parking_lot::Mutex;
use sidecar_core::text;

use super::handle::{self, Handle};
use super::model::llama_model;
use super::status::{Failure, call, llama_sidecar_status, status};
use super::{Flag, put_text, routed_ids, text};
use crate::model::Model;
use sidecar_core::config::Config;
use sidecar_core::files;
use sidecar_core::logger::print;
use sidecar_core::trace::{
    ExpertLayout, ExpertNames, Ids, ModelMeta, Trace, enabled, log_unwritten, numbered,
    print_exported, print_summary, to_text, write,
};

/// Usage counters for the routed experts of a model.
pub struct llama_expert_trace {
    _opaque: [u8; 0],
}

impl Handle for llama_expert_trace {
    type Object = OwnedTrace;
    const NAME: &'static str = "llama_expert_trace";
}

/// A trace of the program.
pub(super) struct OwnedTrace {
    counts: Counts,
    /// How many traces the process made before.
    number: usize,
    /// What counts for the model otherwise.
    scheduled: Option<Arc<Scheduled>>,
}

impl OwnedTrace {
    fn finish(&self) {
        self.counts.finish(|| self.number);
    }
}

impl Drop for OwnedTrace {
    fn drop(&mut self) {
        if let Some(scheduled) = &self.scheduled {
            scheduled.own_traces.fetch_sub(1, Ordering::Relaxed);
        }
        self.finish();
    }
}

/// The number of traces that the process made.
static MADE: AtomicUsize = AtomicUsize::new(0);

/// Counters and the model that they belong to.
struct Counts {
    counters: Trace,
    about: ModelMeta,
    /// The names that are printed, if they are.
    names: Option<ExpertNames>,
    is_finished: AtomicBool,
}

impl Counts {
    /// Makes the counters of a model; `None` if it has no routed experts.
    fn of(model: &Model) -> Option<Counts> {
        let layout = ExpertLayout::of(model.experts());
        if layout.layers().is_empty() {
            return None;
        }
        start();
        let names = || ExpertNames::of(model.gguf_files());
        Some(Counts {
            counters: Trace::with_locality(layout),
            about: ModelMeta::of(model.gguf_files()),
            names: Config::get().trace_names.then(names),
            is_finished: AtomicBool::new(false),
        })
    }

    fn position(&self, layer: u32) -> Result<usize, Failure> {
        self.counters.layout().position(layer).ok_or_else(|| {
            Failure::new(
                llama_sidecar_status::NotFound,
                format!("layer {layer} of the model has no routed experts"),
            )
        })
    }

    /// Counts ids; `layer` is a position in the layout.
    fn record(&self, layer: usize, ids: &Ids<'_>) {
        self.counters.record_batch(layer, ids);
        if let Some(names) = &self.names {
            names.print(layer, ids);
        }
    }

    /// Prints and writes what the variables request at the end of a trace, once. The file gets a number
    /// among those of all traces.
    fn finish(&self, number: impl FnOnce() -> usize) {
        let config = Config::get();
        if self.is_finished.swap(true, Ordering::Relaxed) || !config.traces() {
            return;
        }
        let snapshot = self.counters.snapshot_with_locality();
        print_summary(config, &self.about, &snapshot);
        if let Some(path) = &config.trace_output {
            let path = numbered(&path.now(), number());
            let write = |path: &Path| write(path, &self.about, &snapshot);
            match files::at_free_name(&path, write) {
                Ok((path, ())) => print_exported(&path),
                Err(error) => log_unwritten(&path, &error),
            }
        }
    }
}

/// What the schedulers of a model are given, as long as the program has no trace of the model.
pub(super) struct Scheduled {
    model: Weak<Model>,
    counts: Counts,
    own_traces: AtomicUsize,
}

/// Those of all models until the end of the process.
static SCHEDULED: Mutex<Vec<Arc<Scheduled>>> = Mutex::new(Vec::new());
/// How long the end of the process waits for another thread that makes one.
const LONGEST_WAIT: Duration = Duration::from_secs(2);

impl Scheduled {
    /// Returns the counts of a model; `None` if no variable requests them, or without routed experts.
    pub fn of(model: &Arc<Model>) -> Option<Arc<Scheduled>> {
        if !Config::get().traces() {
            return None;
        }
        let mut all = SCHEDULED.lock();
        let is_same = |of: &&Arc<Scheduled>| of.model.as_ptr() == Arc::as_ptr(model);
        if let Some(found) = all.iter().find(is_same) {
            return Some(found.clone());
        }
        all.push(Arc::new(Scheduled {
            model: Arc::downgrade(model),
            counts: Counts::of(model)?,
            own_traces: AtomicUsize::new(0),
        }));
        all.last().cloned()
    }

    /// Counts the ids of the tokens of a layer, token after token.
    pub fn count(&self, layer: u32, ids: &[i32]) {
        let Ok(layer) = self.counts.position(layer) else {
            return;
        };
        if self.own_traces.load(Ordering::Relaxed) > 0 {
            return;
        }
        // SAFETY: integers without padding.
        let bytes = unsafe { std::slice::from_raw_parts(ids.as_ptr().cast(), size_of_val(ids)) };
        let used = self.counts.about.experts_used as usize;
        let is_whole = ids.len().is_multiple_of(used.max(1));
        let used = if used > 0 && is_whole {
            used
        } else {
            ids.len()
        };
        self.counts.record(layer, &Ids::packed(bytes, used));
    }
}

/// The process that made the first trace.
static PROCESS: AtomicUsize = AtomicUsize::new(0);

/// Prints what the variables turn on, and prepares the end of the process, once.
fn start() {
    static ONCE: Once = Once::new();
    let config = Config::get();
    if !config.traces() {
        return;
    }
    ONCE.call_once(|| {
        print(&enabled(config));
        PROCESS.store(std::process::id() as usize, Ordering::Relaxed);
        // SAFETY: only registers the function. The C library calls it before this library is
        // unloaded.
        unsafe { libc::atexit(at_exit) };
    });
}

/// Ends the traces that were not freed.
extern "C" fn at_exit() {
    // In a forked child, the traces are those of its parent.
    if PROCESS.load(Ordering::Relaxed) != std::process::id() as usize {
        return;
    }
    let _ = catch_unwind(|| {
        for trace in handle::all::<llama_expert_trace>() {
            trace.finish();
        }
        let scheduled = SCHEDULED.try_lock_for(LONGEST_WAIT);
        for Scheduled { counts, .. } in scheduled.iter().flat_map(|all| all.iter().map(|of| &**of))
        {
            if counts.counters.snapshot().activations() > 0 {
                counts.finish(|| MADE.fetch_add(1, Ordering::Relaxed));
            }
        }
    });
}

/// Creates usage counters for the routed experts of a model. The trace does not keep the model
/// alive.
///
/// Any number of threads can record at the same time. Each thread has its own counters; only
/// threads that record batches of the same layer wait for each other, for its locality
/// (docs/expert-trace.md).
///
/// The variables LLAMA_EXPERT_TRACE_STATS, _NAMES, _PER_LAYER, _TOP and _OUTPUT add what they state,
/// on standard error: the first trace of the process prints which of them are on, the thread that
/// records prints the names, and summary and file follow when the trace is freed, or at exit. The second
/// trace of the process writes to stats-2.json, and so on.
///
/// As long as a model has no trace, the variables count what llama_postfetch_schedule is given, and
/// summary and file follow at exit. So each use is counted once.
///
/// @return The trace, or NULL on failure: for example, when the model has no routed experts. Free
/// it with llama_expert_trace_free.
#[unsafe(no_mangle)]
pub extern "C" fn llama_expert_trace_new(model: *const llama_model) -> *mut llama_expert_trace {
    let made = call(|| {
        let open = handle::get(model)?;
        let counts = Counts::of(&open.model).ok_or_else(|| {
            Failure::new(
                llama_sidecar_status::NotFound,
                "the model has no routed experts (tensors such as blk.0.ffn_gate_exps.weight)",
            )
        })?;
        let scheduled = Scheduled::of(&open.model);
        if let Some(scheduled) = &scheduled {
            scheduled.own_traces.fetch_add(1, Ordering::Relaxed);
        }
        Ok(handle::new(OwnedTrace {
            counts,
            number: MADE.fetch_add(1, Ordering::Relaxed),
            scheduled,
        }))
    });
    made.unwrap_or(std::ptr::null_mut())
}

/// Frees a trace, after its summary and its file if the variables request them.
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
        let counted = &owned.counts;
        let layer = counted.position(layer)?;
        counted.counters.record(layer, expert);
        if let Some(names) = &counted.names {
            names.print(layer, &Ids::one(&expert.to_ne_bytes()));
        }
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
        let counted = &owned.counts;
        let layer = counted.position(layer)?;
        // SAFETY: as the caller guarantees.
        let ids = unsafe { routed_ids(ids, n_used, n_tokens, used_stride, token_stride) }?;
        if let Some(ids) = ids {
            counted.record(layer, &ids);
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
        let counted = &owned.counts;
        let layer = counted.position(layer)?;
        if counts.is_null() && n_counts > 0 {
            return Err(Failure::null("counts"));
        }
        let snapshot = counted.counters.snapshot();
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
        handle::get(trace)?.counts.counters.reset();
        Ok(())
    })
}

/// Writes the trace to a file: the counts as CSV (layer,expert,count,share) if the path ends in
/// ".csv", otherwise counts and locality as JSON (docs/expert-trace.md). The call writes a temporary file in the same folder
/// and renames it to the path. It fails if another file than an earlier trace is there.
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
        let counted = &owned.counts;
        // SAFETY: as the caller guarantees.
        let path: &CStr = unsafe { text(path, "path")? };
        let path = Path::new(OsStr::from_bytes(path.to_bytes()));
        write(
            path,
            &counted.about,
            &counted.counters.snapshot_with_locality(),
        )
        .map_err(|error| {
            Failure::new(
                llama_sidecar_status::Io,
                format!("cannot write {}: {error}", text::path(path)),
            )
        })
    })
}

/// Writes a plain-text summary to `buffer`, truncated to `size` bytes including the NUL. It lists the
/// experts that were used, the most used first: all, or as many as LLAMA_EXPERT_TRACE_TOP states.
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
    per_layer: Flag,
    buffer: *mut c_char,
    size: usize,
) -> usize {
    let written = call(|| {
        let owned = handle::get(trace)?;
        let counted = &owned.counts;
        let most = Config::get().trace_top;
        let text = to_text(
            &counted.about,
            &counted.counters.snapshot(),
            per_layer.into(),
            most,
        );
        // SAFETY: as the caller guarantees.
        unsafe { put_text(&text, buffer, size) }
    });
    written.unwrap_or(0)
}
