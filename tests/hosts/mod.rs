//! Checks of a swap that are the same for all real hosts.
#![allow(dead_code, reason = "each test uses what it needs")]

pub mod servers;
pub mod simulated;

use std::collections::BTreeMap;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Mutex;

use serde_json::{Value, json};
use sidecar_core::gguf::{Access, GgufFile};
use testkit::fixtures::{cache, fixture};
pub use testkit::host::taken;
use testkit::host::{DropIn, Host, Program, Transcript, replace};

/// Tokens of a text.
pub const TOKENS: usize = 8;

/// Hot-swap on, without polling.
pub fn on() -> DropIn {
    DropIn::On(Vec::new())
}

/// A request that sets overlays and reverts those that match `revert`.
pub fn swap_request(revert: Option<&str>, overlays: &[(&str, &Path)]) -> Value {
    let overlays = overlays.iter();
    let overlays = overlays.map(|(tensor, from)| json!({"tensor": tensor, "from": from}));
    json!({
        "cmd": "swap",
        "revert": revert,
        "overlays": overlays.collect::<Vec<_>>(),
    })
}

/// A folder with a copy of a fixture.
pub fn copied(name: &str) -> (tempfile::TempDir, PathBuf) {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("model.gguf");
    replace(&path, &fixture(name));
    (folder, path)
}

/// A copy of a fixture in which bytes of one tensor differ.
pub fn other_bytes(folder: &Path, name: &str, tensor: &std::ffi::CStr) -> PathBuf {
    let path = folder.join("other-bytes.gguf");
    std::fs::copy(fixture(name), &path).expect("free space");
    let gguf = GgufFile::open(&path, Access::Read).expect("a model");
    let info = gguf.header.find(tensor).expect("a tensor of this name");
    exchange_blocks(&path, info);
    path
}

/// Lets neighbouring blocks of a tensor change places: valid blocks, other weights.
pub fn exchange_blocks(path: &Path, tensor: usize) {
    let gguf = GgufFile::open(path, Access::Read).expect("a model");
    let info = &gguf.header.tensors[tensor];
    let mut bytes = vec![0; info.nbytes as usize];
    gguf.source.read_at(&mut bytes, info.offset).expect("bytes");
    for pair in bytes.chunks_exact_mut(2 * info.ty.bytes as usize) {
        let (left, right) = pair.split_at_mut(info.ty.bytes as usize);
        left.swap_with_slice(right);
    }
    let file = std::fs::OpenOptions::new().write(true).open(path);
    let file = file.expect("our own copy");
    file.write_all_at(&bytes, info.offset).expect("free space");
}

/// What a new process writes with a file. It is written once for each program and fixture.
pub fn fresh(program: Program, path: &Path) -> Transcript {
    static WRITTEN: Mutex<BTreeMap<String, Transcript>> = Mutex::new(BTreeMap::new());
    let key = format!("{program:?} {}", path.display());
    let written = WRITTEN.lock().expect("no panic").get(&key).cloned();
    if let Some(text) = written {
        return text;
    }
    let text = write_fresh(program, path);
    if path.starts_with(cache()) {
        let mut written = WRITTEN.lock().expect("no panic");
        written.insert(key, text.clone());
    }
    text
}

fn write_fresh(program: Program, path: &Path) -> Transcript {
    let mut host = Host::start(program, path, &on());
    let text = host.text(TOKENS);
    assert_eq!(text.hashes.len(), TOKENS, "a hash for each step");
    assert_eq!(host.end(), Some(0));
    text
}

/// Swaps a file for a variant while a host runs, and back.
pub fn swap_and_back(program: Program, original: &str, variant: &Path, tensors: u64) {
    let (_folder, path) = copied(original);
    let before = fresh(program, &fixture(original));
    let after = fresh(program, variant);
    assert_ne!(before.hashes, after.hashes, "the variant shows");

    let mut host = Host::start(program, &path, &on());
    assert_eq!(host.text(TOKENS), before);
    // A GPU backend keeps kernels and memory for later. A leak grows in each round.
    let rounds = match program {
        Program::NodeVulkan(_) | Program::NodeVulkanDevices(_) => 5,
        _ => 1,
    };
    for round in 1..=rounds {
        let memory = host.private_memory();
        replace(&path, variant);
        assert_eq!(taken(&host.control("reload")), (tensors, 0));
        // In the middle of a text, with the keys and values of the old weights.
        host.steps("more", 2);
        assert_eq!(host.text(TOKENS), after);
        let status = host.control("status");
        let changed = status["models"][0]["changed"].as_array().expect("a list");
        assert_eq!(changed.len() as u64, tensors, "{status}");

        replace(&path, &fixture(original));
        assert_eq!(taken(&host.control("reload")), (0, tensors));
        assert_eq!(host.text(TOKENS), before);
        let status = host.control("status");
        assert_eq!(status["models"][0]["changed"], Value::Array(Vec::new()));
        let grown = host.private_memory().saturating_sub(memory);
        println!(
            "{program:?}, {original}: {} KiB more after a swap and back",
            grown >> 10
        );
        if grown < 16 << 20 {
            break;
        }
        assert!(
            round < rounds,
            "{grown} bytes more after each swap and back"
        );
    }
    assert_eq!(host.end(), Some(0));
}

/// Counts of each layer and expert, by the host itself.
pub fn counted_by_host(host: &mut Host) -> Vec<Vec<u64>> {
    let counts: Value = serde_json::from_str(&host.ask("counts")).expect("JSON");
    let counts = counts.as_object().expect("an object");
    let layer = |layer: usize| {
        let experts = &counts[&layer.to_string()];
        let count = |expert: usize| experts[expert.to_string()].as_u64().unwrap_or(0);
        (0..8).map(count).collect()
    };
    (0..counts.len()).map(layer).collect()
}

/// What a host with `count` saw: `routes`, `gates` or `norms`, by layer, token and place.
pub fn seen(host: &mut Host, what: &str) -> BTreeMap<usize, Vec<Vec<f64>>> {
    let seen: Value = serde_json::from_str(&host.ask("routes")).expect("JSON");
    let layers: BTreeMap<String, Vec<Vec<f64>>> =
        serde_json::from_value(seen[what].clone()).expect("numbers");
    layers
        .into_iter()
        .map(|(layer, rows)| (layer.parse().expect("a number"), rows))
        .collect()
}

/// Counts of each layer and expert in a trace.
pub fn traced(trace: &Value) -> Vec<Vec<u64>> {
    let layers = trace["layers"].as_array().expect("layers");
    let counts = |layer: &Value| {
        let counts = layer["counts"].as_array().expect("counts");
        counts
            .iter()
            .map(|count| count.as_u64().expect("a count"))
            .collect()
    };
    layers.iter().map(counts).collect()
}

/// Streaming on, with these further variables.
pub fn streaming(more: &[(&'static str, &str)]) -> DropIn {
    let mut variables = vec![("LLAMA_EXPERT_STREAM", "on".to_owned())];
    variables.extend(
        more.iter()
            .map(|(name, value)| (*name, (*value).to_owned())),
    );
    DropIn::On(variables)
}

/// Through the page cache, and in memory of the process: more than a layer of `moe.gguf`.
pub const WAYS: [&[(&str, &str)]; 2] = [&[], &[IN_MEMORY]];
/// Experts are kept in memory of the process.
pub const IN_MEMORY: (&str, &str) = ("LLAMA_EXPERT_STREAM_MEMORY_MB", "20");

/// Checks that experts were kept in memory of the process exactly where that was requested.
pub fn check_way(figures: &Value, way: &[(&str, &str)]) {
    let held = count(figures, "held_bytes");
    assert_eq!(held > 0, way.contains(&IN_MEMORY), "{figures}");
    assert!(held <= 20 << 20, "{figures}");
}

/// The figures of the first model.
pub fn stream_figures(host: &Host) -> Value {
    host.control("status")["models"][0]["stream"].clone()
}

/// A figure by name.
pub fn count(figures: &Value, name: &str) -> u64 {
    let count = figures[name].as_u64();
    count.unwrap_or_else(|| panic!("{name} is missing in {figures}"))
}

/// Writes a text twice, and returns it with the figures.
pub fn streamed_text(program: Program, model: &Path, drop_in: &DropIn) -> (Transcript, Value) {
    let mut host = Host::start(program, model, drop_in);
    let text = host.text(TOKENS);
    assert_eq!(host.text(TOKENS), text);
    let figures = stream_figures(&host);
    assert_eq!(host.end(), Some(0));
    (text, figures)
}

/// Checks that a program writes the same with streaming; returns the figures.
pub fn same_with_streaming(program: Program, model: &str) -> Value {
    let model = fixture(model);
    let expected = fresh(program, &model);
    let (text, figures) = streamed_text(program, &model, &streaming(&[IN_MEMORY]));
    assert_eq!(text, expected);
    check_way(&figures, &[IN_MEMORY]);
    let (text, figures) = streamed_text(program, &model, &streaming(&[]));
    assert_eq!(text, expected);
    check_way(&figures, &[]);
    // A prompt and then a token at a time: all layers are scheduled in each evaluation.
    assert!(
        count(&figures, "layers") >= 4 * 2 * TOKENS as u64,
        "{figures}"
    );
    assert!(count(&figures, "checked_bytes") > 0, "{figures}");
    figures
}
