//! A hash of the output of each evaluation: programs with the same hashes computed the same logits.
//!
//! Hashes are lines of the file that `LLAMA_SIDECAR_LOGITS_HASHES` names, and of the log at debug level.

use std::ffi::CStr;

use once_cell::sync::Lazy;
use parking_lot::Mutex;
use sidecar_core::config::{Config, Variable};
use sidecar_core::descriptors::Kept;
use sidecar_core::files::{self, Replace};
use sidecar_core::memory;
use sidecar_core::protocol::NoEffect;
use sidecar_core::reload::hash_bytes;

use crate::ggml::{Ggml, Graph, Tensor};
use crate::program::barrier;
use crate::program::capability::{Capability, Effect};

/// Names of the tensor that libllama reads logits or embeddings from.
const OUTPUTS: [&CStr; 2] = [c"result_output", c"result_embd_pooled"];
/// The output is among the last nodes of a graph.
const LAST_NODES: i32 = 64;
/// The first line of a file with hashes.
const TITLE: &str = "# rows and hash of each output\n";

/// Whether an output was hashed.
static EFFECT: Effect = Effect::of(NoEffect::LOGITS);
static OUTPUT: Lazy<Option<Mutex<Kept>>> = Lazy::new(open);

/// Hashes of logits, as a capability.
pub struct Logits;

impl Capability for Logits {
    fn is_enabled(&self) -> bool {
        Config::get().logits_hashes.is_some()
    }

    fn no_effect(&self) -> Vec<NoEffect> {
        EFFECT.missing(|| {
            "no logits were hashed: no evaluation had an output of a known name; let the model generate a token".into()
        })
    }
}

fn open() -> Option<Mutex<Kept>> {
    let path = Config::get().logits_hashes.as_ref()?.now();
    let written = files::at_free_name(&path, |path| {
        let file = files::create(path, TITLE.as_bytes(), Replace::Own)?;
        file.write_all(TITLE.as_bytes()).map(|()| file)
    });
    let written = written.map(|(_, file)| file);
    written.map(Mutex::new).map_err(|error| note(&error)).ok()
}

fn note(error: &std::io::Error) {
    EFFECT.log_obstacle(format!(
        "{}: cannot write the hashes of logits: {error}; choose another path",
        Variable::title_of("LLAMA_SIDECAR_LOGITS_HASHES")
    ));
}

/// Whether outputs are hashed.
pub fn is_requested() -> bool {
    Logits.is_enabled() || log::log_enabled!(log::Level::Debug)
}

/// Hashes the output of a graph that was evaluated to its end.
///
/// # Safety
///
/// A live graph of this copy of ggml whose backends are done.
pub unsafe fn note_output(ggml: &Ggml, graph: *mut Graph) {
    let f = &ggml.f;
    // SAFETY: nodes of a live graph are live; the bytes of an output are kept.
    let (rows, hash) = unsafe {
        let count = (f.ggml_graph_n_nodes)(graph);
        let named =
            |node: &*mut Tensor| OUTPUTS.contains(&CStr::from_ptr((f.ggml_get_name)(*node)));
        let last = (0..count.min(LAST_NODES)).map(|i| (f.ggml_graph_node)(graph, count - 1 - i));
        let Some(output) = last.into_iter().find(named) else {
            return;
        };
        let mut bytes = match memory::zeroed((f.ggml_nbytes)(output)) {
            Ok(bytes) => bytes,
            Err(error) => return note(&error),
        };
        (f.ggml_backend_tensor_get)(output, bytes.as_mut_ptr().cast(), 0, bytes.len());
        let ne: [i64; 4] = ggml.layout.read(output, ggml.layout.ne);
        (ne[1], hash_bytes(&bytes))
    };
    log::debug!(
        "output generation {} rows {rows} hash {hash:032x}",
        barrier::generation()
    );
    // A batch of a prompt that is not its last one has no output.
    if let Some(file) = OUTPUT.as_ref().filter(|_| rows > 0) {
        let line = format!("{rows} {hash:032x}\n");
        match file.lock().write_all(line.as_bytes()) {
            Ok(()) => EFFECT.note(),
            Err(error) => note(&error),
        }
    }
}
