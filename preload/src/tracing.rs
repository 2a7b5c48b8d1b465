//! Which experts the evaluations of a model used.
//!
//! The routed ids are an operand of each matrix product over experts. Their memory is
//! used again by the time the graph ends, unless they are marked as outputs of the
//! graph before it is allocated. Then all layers can be read at once after the
//! evaluation, at no cost to it. Gate, up and down share one tensor of ids, which is
//! counted once.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use llama_sidecar::config::Config;
use llama_sidecar::experts::{ExpertIndex, ExpertName};
use llama_sidecar::gguf::GgufFile;
use llama_sidecar::logger::REQUESTED;
use llama_sidecar::trace::{ModelMeta, Ids, ExpertLayout, Trace, to_json, to_text, write};
use parking_lot::Mutex;
use serde_json::{Value, json};

use crate::ggml::{Ggml, Tensor};
use crate::journal;

/// `GGML_TENSOR_FLAG_OUTPUT`.
const FLAG_OUTPUT: i32 = 2;

/// What is counted of one model.
pub struct ModelTrace {
    counters: Trace,
    about: ModelMeta,
    /// The tensor whose experts stand for each layer, by position.
    names: Mutex<Vec<String>>,
}

/// Which experts of a layer an evaluation used; to be logged.
struct Used {
    trace: Arc<ModelTrace>,
    layer: usize,
    experts: Vec<u32>,
}

/// What is to be logged, at most [`MOST_USED`] entries; then entries are left out.
static USED: Mutex<Vec<Used>> = Mutex::new(Vec::new());
const MOST_USED: usize = 100_000;
/// How long the end of the process waits for a write that is under way.
const LONGEST_WRITE: Duration = Duration::from_secs(2);
/// How often names are logged.
const NAMES_EVERY: Duration = Duration::from_millis(200);

/// The routed ids of one layer in a graph.
#[derive(Clone)]
pub struct Routed {
    ids: *mut Tensor,
    trace: Arc<ModelTrace>,
    /// Position of the layer.
    layer: usize,
}

// SAFETY: the tensor is only read by the thread that evaluates, while it keeps the graph.
unsafe impl Send for Routed {}

/// Everything that was counted, also of models that are gone.
static TRACES: Mutex<Vec<Arc<ModelTrace>>> = Mutex::new(Vec::new());

impl ModelTrace {
    /// Counters for the experts of a model; `None` when it has none, or nobody wants to
    /// know.
    pub fn of(files: &[GgufFile]) -> Option<Arc<ModelTrace>> {
        if !Config::get().traces() {
            return None;
        }
        let layout = ExpertLayout::of(&ExpertIndex::of(files));
        if layout.layers().is_empty() {
            return None;
        }
        let trace = Arc::new(ModelTrace {
            names: Mutex::new(vec![String::new(); layout.layers().len()]),
            counters: Trace::new(layout),
            about: ModelMeta::of(files),
        });
        TRACES.lock().push(trace.clone());
        Some(trace)
    }

    /// Marks the ids that route to a weight of this name, so that they outlive their
    /// graph; `None` when they route to no experts.
    ///
    /// # Safety
    ///
    /// A live tensor of this copy of ggml, in a graph that is not yet allocated.
    pub unsafe fn keep_ids(
        self: &Arc<Self>,
        ggml: &Ggml,
        weight: &str,
        ids: *mut Tensor,
    ) -> Option<Routed> {
        let layer = ExpertName::parse(weight)?.layer;
        let layer = self.counters.layout().position(layer)?;
        weight.clone_into(&mut self.names.lock()[layer]);
        let layout = &ggml.layout;
        let mut tensor = ids;
        while !tensor.is_null() {
            // SAFETY: as the caller vouches; a view lives as long as what it views.
            unsafe {
                let flags: i32 = layout.read(tensor, layout.flags);
                layout.write(tensor, layout.flags, flags | FLAG_OUTPUT);
                tensor = layout.read(tensor, layout.view_src);
            }
        }
        Some(Routed {
            ids,
            trace: self.clone(),
            layer,
        })
    }
}

impl Routed {
    /// Whether this is the same matrix of ids.
    pub fn is_of(&self, ids: *mut Tensor) -> bool {
        self.ids == ids
    }

    /// Whether the tensor of the ids lies in this memory.
    pub fn is_in(&self, range: &std::ops::Range<usize>) -> bool {
        range.contains(&(self.ids as usize))
    }

    /// Counts the ids of an evaluation that has ended.
    ///
    /// # Safety
    ///
    /// The graph is live and its backends are done.
    pub unsafe fn count(&self, ggml: &Ggml, buffer: &mut Vec<u8>) {
        let (f, layout) = (&ggml.f, &ggml.layout);
        // SAFETY: as the caller vouches.
        let (ne, nb): ([i64; 4], [usize; 4]) = unsafe {
            (
                layout.read(self.ids, layout.ne),
                layout.read(self.ids, layout.nb),
            )
        };
        let (used, tokens) = (ne[0].max(0) as usize, ne[1].max(0) as usize);
        // libllama warms a model up by routing to all experts: that is no workload.
        let expected = self.trace.about.experts_used as usize;
        let len = Ids::byte_len(used, tokens, nb[0], nb[1]).unwrap_or(0);
        if len == 0 || (expected > 0 && used > expected) {
            return;
        }
        buffer.resize(len, 0);
        // SAFETY: the ids were kept, and are as large as their extents say.
        unsafe { (f.ggml_backend_tensor_get)(self.ids, buffer.as_mut_ptr().cast(), 0, len) };
        let ids = Ids {
            bytes: buffer,
            used,
            tokens,
            used_stride: nb[0],
            token_stride: nb[1],
        };
        self.trace.counters.record_batch(self.layer, &ids);
        if Config::get().trace_names {
            self.note_names(&ids);
        }
    }

    /// Keeps the experts of an evaluation for the thread that logs their names.
    fn note_names(&self, ids: &Ids<'_>) {
        let places = (0..ids.tokens).flat_map(|token| (0..ids.used).map(move |used| (token, used)));
        let mut experts: Vec<u32> = places
            .filter_map(|(token, used)| u32::try_from(ids.get(token, used)?).ok())
            .collect();
        experts.sort_unstable();
        experts.dedup();
        let mut used = USED.lock();
        if used.len() < MOST_USED {
            used.push(Used {
                trace: self.trace.clone(),
                layer: self.layer,
                experts,
            });
        }
    }
}

/// Logs the names of experts as they come up; for a thread of its own.
pub fn log_names(go_on: impl Fn() -> bool) {
    while go_on() {
        std::thread::sleep(NAMES_EVERY);
        print_names();
    }
}

fn print_names() {
    for used in std::mem::take(&mut *USED.lock()) {
        let (layer, _) = used.trace.counters.layout().layers()[used.layer];
        let name = used.trace.names.lock()[used.layer].clone();
        for expert in used.experts {
            log::info!(target: REQUESTED, "[EXPERT-TRACE] Layer {layer}, Expert {expert}: {name}[{expert}]");
        }
    }
}

/// What was counted so far, model by model.
pub fn as_json() -> Vec<Value> {
    let traces = TRACES.lock().clone();
    let json = |trace: &Arc<ModelTrace>| to_json(&trace.about, &trace.counters.snapshot());
    traces.iter().map(json).collect()
}

/// How many experts evaluations routed to, model by model.
pub fn activations() -> Vec<u64> {
    let traces = TRACES.lock().clone();
    let all = |trace: &Arc<ModelTrace>| trace.counters.snapshot().activations();
    traces.iter().map(all).collect()
}

/// Begins to count anew.
pub fn reset() {
    for trace in TRACES.lock().iter() {
        trace.counters.reset();
    }
}

/// Writes what was asked for, at the end of the process. A reader that is gone must not
/// end it by SIGPIPE, which would change how it ended.
pub fn finish() {
    let mut pipe = std::mem::MaybeUninit::<libc::sigset_t>::uninit();
    let mut before = std::mem::MaybeUninit::<libc::sigset_t>::uninit();
    let now = libc::timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    // SAFETY: sets that are filled before they are read; what is pending is taken before
    // the mask is as it was.
    unsafe {
        libc::sigemptyset(pipe.as_mut_ptr());
        libc::sigaddset(pipe.as_mut_ptr(), libc::SIGPIPE);
        libc::pthread_sigmask(libc::SIG_BLOCK, pipe.as_ptr(), before.as_mut_ptr());
        write_all();
        libc::sigtimedwait(pipe.as_ptr(), std::ptr::null_mut(), &now);
        libc::pthread_sigmask(libc::SIG_SETMASK, before.as_ptr(), std::ptr::null_mut());
    }
}

fn write_all() {
    let config = Config::get();
    print_names();
    // The process ends: whoever holds the lock now never gives it back.
    let Some(traces) = TRACES.try_lock() else {
        return;
    };
    if config.trace_summary {
        for trace in traces.iter() {
            let snapshot = trace.counters.snapshot();
            let text = to_text(&trace.about, &snapshot, config.trace_per_layer);
            // Nobody may be there to read it any more.
            let _ = std::io::stderr().write_all(text.as_bytes());
        }
    }
    write_outputs(&traces);
}

/// Writes the output of every model so far, every so often; for a thread of its own.
pub fn write_every(period: Duration, go_on: impl Fn() -> bool) {
    while go_on() {
        std::thread::sleep(period);
        let traces = TRACES.lock().clone();
        if go_on() {
            write_outputs(&traces);
        }
    }
}

fn write_outputs(traces: &[Arc<ModelTrace>]) {
    let Some(output) = &Config::get().trace_output else {
        return;
    };
    // The end of the process may come while the other thread writes.
    static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());
    let _turn = ONE_AT_A_TIME.try_lock_for(LONGEST_WRITE);
    for (number, trace) in traces.iter().enumerate() {
        let path = numbered(output, number);
        let written = write(&path, &trace.about, &trace.counters.snapshot());
        journal::note("trace", || {
            json!({
                "path": path.display().to_string(),
                "error": written.as_ref().err().map(|error| error.to_string()),
            })
        });
        if let Err(error) = written {
            log::error!(
                "LLAMA_EXPERT_TRACE_OUTPUT: cannot write {}: {error}; the counts are lost, but for the summary of LLAMA_EXPERT_TRACE_STATS=1",
                path.display()
            );
        }
    }
}

/// The path for the first model, and one with a number for each further.
fn numbered(path: &Path, number: usize) -> PathBuf {
    if number == 0 {
        return path.to_owned();
    }
    let stem = path.file_stem().unwrap_or_default().to_string_lossy();
    let name = match path.extension() {
        Some(extension) => format!("{stem}-{}.{}", number + 1, extension.to_string_lossy()),
        None => format!("{stem}-{}", number + 1),
    };
    path.with_file_name(name)
}
