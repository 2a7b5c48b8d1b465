//! Experts with the same matrices.

use std::collections::BTreeMap;
use std::io;

use sidecar_core::gguf::{GgufFile, TensorInfo};
use sidecar_core::reload::{Hash, hash_source};

use crate::pruned::{Mixture, of_experts};

/// The first bytes of a part, which are compared before all of it: few experts begin alike.
const FIRST: u64 = 4 << 10;

/// Sets of experts, by layer.
pub type Duplicates = BTreeMap<u32, Vec<Vec<u32>>>;

/// Returns the experts of each layer whose matrices, biases and scales have the same bytes. Their rows of the router may
/// differ.
pub fn of(files: &[GgufFile], mixture: &Mixture) -> io::Result<Duplicates> {
    let mut layers: BTreeMap<u32, Vec<(&GgufFile, &TensorInfo)>> = BTreeMap::new();
    for file in files {
        for info in &file.header.tensors {
            if let Some(layer) = of_experts(&file.header.name(info).to_string_lossy()) {
                layers.entry(layer).or_default().push((file, info));
            }
        }
    }
    let experts = mixture.routing.experts;
    let mut found = Duplicates::new();
    for (layer, tensors) in layers {
        let mut sets = vec![(0..experts as u32).collect()];
        for limit in [FIRST, u64::MAX] {
            for (file, info) in &tensors {
                let each = info.nbytes / experts;
                sets = alike(sets, |expert| {
                    let start = info.offset + u64::from(expert) * each;
                    hash_source(&file.source, start, each.min(limit))
                })?;
            }
        }
        // Hashes have no order that means anything.
        sets.sort_unstable();
        if !sets.is_empty() {
            found.insert(layer, sets);
        }
    }
    Ok(found)
}

/// Divides sets by a hash; a set of one is none.
fn alike(sets: Vec<Vec<u32>>, hash: impl Fn(u32) -> io::Result<Hash>) -> io::Result<Vec<Vec<u32>>> {
    let mut divided = Vec::new();
    for set in sets {
        let mut parts: BTreeMap<Hash, Vec<u32>> = BTreeMap::new();
        for expert in set {
            parts.entry(hash(expert)?).or_default().push(expert);
        }
        divided.extend(parts.into_values().filter(|part| part.len() > 1));
    }
    Ok(divided)
}

#[cfg(test)]
mod tests {
    use sidecar_core::gguf::Access;
    use testkit::writer::{F32, Gguf, Q4_0};

    use super::*;

    #[test]
    fn duplicates_are_equal_in_all_bytes_of_all_tensors() {
        let mut model = Gguf::default()
            .tensor("blk.0.ffn_gate_inp.weight", &[64, 6], F32, 1)
            .tensor("blk.0.ffn_up_exps.weight", &[64, 512, 6], Q4_0, 2)
            .tensor("blk.0.ffn_down_exps.weight", &[512, 64, 6], Q4_0, 3)
            .tensor("blk.0.ffn_down_exps.bias", &[64, 6], F32, 4)
            .tensor("blk.1.ffn_down_exps.weight", &[512, 64, 6], Q4_0, 5);
        let mut copy = |tensor: usize, from: usize, to: usize| {
            let data = &mut model.tensors[tensor].data;
            let each = data.len() / 6;
            data.copy_within(from * each..(from + 1) * each, to * each);
            (to + 1) * each - 1
        };
        for tensor in 1..4 {
            for (from, to) in [(0, 3), (1, 2), (1, 5)] {
                copy(tensor, from, to);
            }
        }
        // The last byte of a matrix of expert 2 differs, and only the bias of expert 4.
        let last = copy(2, 1, 2);
        copy(1, 0, 4);
        copy(2, 0, 4);
        model.tensors[2].data[last] ^= 1;
        let file = tempfile::NamedTempFile::new().expect("a file");
        model.write(file.path()).expect("free space");
        let file = GgufFile::open(file.path(), Access::Read).expect("a model");
        let found = of(&[file], &Mixture::for_tests(6, 1)).expect("bytes");
        assert_eq!(found, Duplicates::from([(0, vec![vec![0, 3], vec![1, 5]])]));
    }
}
