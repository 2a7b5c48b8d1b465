//! Models for the stand-in for libllama: their results are known beforehand.
#![allow(dead_code, reason = "each test uses what it needs")]

use std::path::{Path, PathBuf};

use serde_json::Value;
use testkit::host::{DropIn, Host};
use testkit::writer::{F32, Gguf, Kv, Tensor};

/// Elements of a row of the model's matrix, and its rows.
const SHAPE: [i64; 2] = [64, 8];

/// A model whose matrix is `value` everywhere: an evaluation gives `512 * value`.
pub fn model(value: f32) -> Gguf {
    with_tensor(Gguf::default(), "w.weight", &SHAPE, value)
}

/// Adds a tensor of floats that are all the same.
pub fn with_tensor(mut gguf: Gguf, name: &str, ne: &[i64], value: f32) -> Gguf {
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
pub fn mixture(value: f32) -> Gguf {
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
pub fn folder(gguf: &Gguf) -> (tempfile::TempDir, PathBuf) {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("model.gguf");
    gguf.write(&path).expect("free space");
    (folder, path)
}

/// Hot-swap on, with these variables.
pub fn on(variables: &[(&'static str, &str)]) -> DropIn {
    DropIn::with(variables)
}

/// Puts a model in place of another and has it taken.
pub fn swap(host: &Host, path: &Path, gguf: &Gguf) -> Value {
    gguf.replace(path).expect("free space");
    host.control("reload")
}

/// What an evaluation of such a model gives.
pub fn result(value: f32) -> String {
    format!("{}", 512.0 * value)
}
