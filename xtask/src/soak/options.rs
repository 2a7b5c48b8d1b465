//! How the servers are started.

use std::path::Path;

use testkit::host::DropIn;
use testkit::server::Options;

/// How often the server looks at its file.
const POLL_MS: &str = "100";

/// Turns everything on; `outputs` is the start of the paths of the files that are written.
pub fn options(outputs: &Path, slots: usize) -> Options {
    let output = |name: &str| format!("{}{name}", outputs.display());
    let variables = [
        ("LLAMA_HOTSWAP_POLL_MS", POLL_MS.into()),
        ("LLAMA_SIDECAR_LOG", "info".into()),
        ("LLAMA_EXPERT_STREAM", "on".into()),
        ("LLAMA_EXPERT_MASKS", "1".into()),
        ("LLAMA_EXPERT_TRACE_STATS", "1".into()),
        ("LLAMA_EXPERT_TRACE_OUTPUT", output("t.json")),
        ("LLAMA_EXPERT_TRACE_EVERY_S", "1".into()),
        ("LLAMA_EXPERT_TRACE_ROUTES", output("r.routes")),
        ("LLAMA_EXPERT_TRACE_SALIENCY", output("s.json")),
    ];
    Options {
        drop_in: DropIn::On(variables.to_vec()),
        // Experts are streamed from the mapping.
        arguments: vec!["--no-repack".into()],
        ..Options::new(slots)
    }
}
