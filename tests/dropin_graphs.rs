//! The drop-in in a stand-in for libllama that does what no real host does on demand:
//! evaluations that stall or are aborted, and graphs that are freed first.

use std::path::{Path, PathBuf};

use serde_json::Value;
use testkit::host::{DropIn, Host, Program};
use testkit::writer::{F16, F32, Gguf, Kv, Tensor};

/// Elements of a row of the model's matrix, and its rows.
const SHAPE: [i64; 2] = [64, 8];

/// A model whose matrix is `value` everywhere: an evaluation gives `512 * value`.
fn model(value: f32) -> Gguf {
    with_tensor(Gguf::default(), "w.weight", &SHAPE, value)
}

fn with_tensor(mut gguf: Gguf, name: &str, ne: &[i64], value: f32) -> Gguf {
    let count = ne.iter().product::<i64>() as usize;
    gguf.tensors.push(Tensor {
        name: name.into(),
        ne: ne.to_vec(),
        ty: F32,
        data: value.to_le_bytes().repeat(count),
    });
    gguf
}

/// The same with four experts, of which two are used.
fn mixture(value: f32) -> Gguf {
    let gguf = with_tensor(
        model(value),
        "blk.0.ffn_down_exps.weight",
        &[64, 64, 4],
        value,
    );
    gguf.kv("llama.block_count", Kv::U32(1))
        .kv("llama.expert_count", Kv::U32(4))
        .kv("llama.expert_used_count", Kv::U32(2))
}

/// A folder with a model in it.
fn folder(gguf: &Gguf) -> (tempfile::TempDir, PathBuf) {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("model.gguf");
    gguf.write(&path).expect("room");
    (folder, path)
}

fn on(variables: &[(&'static str, &str)]) -> DropIn {
    DropIn::On(
        variables
            .iter()
            .map(|(name, value)| (*name, (*value).to_owned()))
            .collect(),
    )
}

/// Puts a model in place of another and has it taken.
fn swap(host: &Host, path: &Path, gguf: &Gguf) -> Value {
    gguf.replace(path).expect("room");
    host.control("reload")
}

fn result(value: f32) -> String {
    format!("{}", 512.0 * value)
}

/// Evaluates until the host's graph is known to be built again when needed.
fn settle(host: &mut Host, value: f32) {
    for _ in 0..4 {
        assert_eq!(host.ask("decode"), result(value));
    }
}

#[test]
fn a_graph_that_was_begun_before_a_swap_never_computes_with_old_weights() {
    for reserves in [true, false] {
        let (_folder, path) = folder(&model(1.0));
        let mut host = Host::start(Program::Small(reserves), &path, &on(&[]));
        settle(&mut host, 1.0);
        let report = swap(&host, &path, &model(2.0));
        assert_eq!(report["reports"][0]["swapped"], 1, "{report}");
        assert_eq!(host.ask("decode"), result(2.0), "reserves: {reserves}");
        // A decode that stalls for longer than a graph takes to build counts as given up.
        host.tell("decode 4000");
        let report = swap(&host, &path, &model(3.0));
        assert_eq!(report["reports"][0]["swapped"], 1, "{report}");
        assert_eq!(host.line(), "failed -1", "the kept graph mixes old and new");
        for _ in 0..3 {
            assert_eq!(host.ask("decode"), result(3.0));
        }
        assert_eq!(host.end(), Some(0));
    }
}

#[test]
fn a_host_that_frees_its_graph_before_its_scheduler_goes_on() {
    let (_folder, path) = folder(&mixture(1.0));
    let with = on(&[("LLAMA_EXPERT_TRACE_STATS", "1")]);
    let mut host = Host::start(Program::Small(true), &path, &with);
    for _ in 0..3 {
        host.ask("decode");
    }
    assert_eq!(host.ask("begin"), "begun");
    assert_eq!(host.ask("free"), "freed");
    let trace = &host.control("trace")["traces"][0];
    let tokens = trace["layers"][0]["tokens"].as_u64();
    assert_eq!(tokens, Some(4), "the last evaluation counts: {trace}");
    assert_eq!(host.end(), Some(0));
}

#[test]
fn an_evaluation_that_was_aborted_is_not_counted() {
    let (_folder, path) = folder(&mixture(1.0));
    let with = on(&[("LLAMA_EXPERT_TRACE_STATS", "1")]);
    let mut host = Host::start(Program::Small(true), &path, &with);
    host.ask("decode");
    assert!(host.ask("aborted").starts_with("failed"), "it is aborted");
    host.ask("decode");
    let trace = &host.control("trace")["traces"][0];
    assert_eq!(trace["layers"][0]["tokens"], 2, "{trace}");
    assert_eq!(host.end(), Some(0));
}

#[test]
fn a_type_that_the_kernel_does_not_take_is_refused_by_name() {
    let whole = with_tensor(model(1.0), "norm.weight", &[64], 1.0);
    let (_folder, path) = folder(&whole);
    let mut host = Host::start(Program::Small(true), &path, &on(&[]));
    settle(&mut host, 1.0);
    let mut half = whole.clone();
    let one = 0x3c00u16.to_le_bytes();
    half.tensors[1].ty = F16;
    half.tensors[1].data = one.repeat(64);
    let report = swap(&host, &path, &half);
    let reason = report["reports"][0]["files"][0]["reason"].to_string();
    assert!(
        reason.contains("norm.weight") && reason.contains("f16"),
        "{report}"
    );
    assert_eq!(host.ask("decode"), result(1.0));
    // The same type with other bytes is taken.
    let twice = with_tensor(model(1.0), "norm.weight", &[64], 2.0);
    let report = swap(&host, &path, &twice);
    assert_eq!(report["reports"][0]["swapped"], 1, "{report}");
    assert_eq!(host.ask("decode"), result(2.0));
    assert_eq!(host.end(), Some(0));
}
