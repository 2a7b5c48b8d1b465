//! Files that fuzzing starts from.

use crate::writer::{F32, Gguf, Q4_0, vocabulary};

/// Two small models, by name: one without and one with a vocabulary.
pub fn gguf() -> [(&'static str, Vec<u8>); 2] {
    let mut small = Gguf::default()
        .tensor("blk.0.ffn_down_exps.weight", &[32, 2, 4], Q4_0, 1)
        .tensor("output_norm.weight", &[5], F32, 2);
    let plain = small.bytes();
    small.kvs.extend(vocabulary(3));
    small.alignment = 64;
    [("small", plain), ("vocabulary", small.bytes())]
}
