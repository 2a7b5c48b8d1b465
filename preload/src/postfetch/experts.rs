//! Where the routed experts of a model are, for the command that started the program.

use sidecar_core::protocol::Event;
use sidecar_core::text;

use crate::ggml::{self, BufferType};
use crate::process::journal;
use crate::program::capability::Effect;
use crate::program::models::Model;

/// Notes whether experts of a model could be copied to a GPU.
pub fn note(model: &Model, effect: &Effect) {
    let instances = model.tensors.iter().flat_map(|tensor| &tensor.instances);
    let experts = instances.filter(|instance| instance.has_experts);
    let buffer_types: Vec<_> = experts.map(|of| of.original_buffer_type.0).collect();
    if buffer_types.is_empty() {
        return;
    }
    let path = text::path(model.files[0].gguf.source.path());
    let obstacle = obstacle(model, &buffer_types)
        .map(str::to_owned)
        .or_else(|| model.unreached.post_fetch.clone());
    if let Some(obstacle) = &obstacle {
        let sentence = format!("post-fetch: no experts of {path} are copied: {obstacle}");
        log::warn!("{sentence}");
        effect.note_obstacle(sentence);
    }
    journal::note_once(|| Event::PostFetchStart { path, obstacle });
}

/// Returns why no experts in buffers of these types are copied to a GPU, and the next step.
fn obstacle(model: &Model, of_experts: &[*mut BufferType]) -> Option<&'static str> {
    let ggml = model.ggml;
    // SAFETY: devices and buffer types live as long as the process.
    let is_gpu = |device| unsafe { !ggml.is_cpu(device) };
    if !model.devices.iter().any(|device| is_gpu(device.0)) {
        return Some(
            "the program uses no GPU: use a build of llama.cpp with a backend for it, and load layers there (-ngl 99)",
        );
    }
    if model.devices.iter().any(|device| ggml::is_other(device.0)) {
        return Some(
            "the program's ggml has no functions for its devices: use a build of llama.cpp",
        );
    }
    // SAFETY: as above.
    let is_host = |buft: &*mut BufferType| unsafe { (ggml.f.ggml_backend_buft_is_host)(*buft) };
    if of_experts.iter().any(is_host) {
        return None;
    }
    // SAFETY: as above.
    let device = |buft: &*mut BufferType| unsafe { (ggml.f.ggml_backend_buft_get_device)(*buft) };
    match of_experts.iter().any(|buft| is_gpu(device(buft))) {
        true => Some(
            "its routed experts are on a GPU, so nothing is left to copy: keep them in host memory (-cmoe, --n-cpu-moe) if the GPU is too small",
        ),
        false => Some(
            "its routed experts are in buffers that only the CPU reads: start the program with -cmoe or --no-repack",
        ),
    }
}
