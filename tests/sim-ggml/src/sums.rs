//! Routed products that are not computed: each value is made from a sum over all bytes of its
//! expert and from a few values of the input. They cost one pass over the experts that are used, and
//! little for each token, and a byte that is copied wrongly changes what the program writes.

use std::collections::HashMap;

use crate::ggml::Tensor;
use crate::splitmix::mixed;

/// How many values of the input a value of the result is made of.
const TERMS: usize = 4;
/// What makes a value about as large as those of a product.
const SCALE: f32 = 4.0;

/// Fills the result of a routed product.
///
/// # Safety
///
/// `weights` has experts, `input` and `result` are F32, `ids` are I32, with the shapes of
/// `ggml_mul_mat_id`, and their memory can be read and written.
pub unsafe fn product(weights: &Tensor, input: &Tensor, ids: &Tensor, result: &Tensor) {
    let mut sums = HashMap::new();
    let length = |tensor: &Tensor, dimension: usize| tensor.ne[dimension] as usize;
    for token in 0..length(ids, 1) {
        for used in 0..length(ids, 0) {
            // SAFETY: as the caller ensures.
            unsafe {
                let id: i32 = row(ids, used * ids.nb[0], token * ids.nb[1])
                    .cast::<i32>()
                    .read();
                let sum = *sums.entry(id).or_insert_with(|| {
                    let expert = row(weights, id as usize * weights.nb[2], 0);
                    sum(std::slice::from_raw_parts(expert, weights.nb[2]))
                });
                let from = used % length(input, 1) * input.nb[1];
                let from = row(input, from, token * input.nb[2]).cast::<f32>();
                let from = std::slice::from_raw_parts(from, length(input, 0));
                let to = row(result, used * result.nb[1], token * result.nb[2]).cast::<f32>();
                let to = std::slice::from_raw_parts_mut(to, length(result, 0));
                for (value, to) in to.iter_mut().enumerate() {
                    let mut bits = mixed(sum.wrapping_add(value as u64));
                    *to = 0.0;
                    for _ in 0..TERMS {
                        let input = from[(bits >> 1) as u16 as usize % from.len()];
                        *to += if bits & 1 == 0 { input } else { -input };
                        bits >>= 16;
                    }
                    *to *= SCALE;
                }
            }
        }
    }
}

/// The bytes of a tensor from the sum of two offsets on.
///
/// # Safety
///
/// The tensor has bytes there.
unsafe fn row(tensor: &Tensor, first: usize, second: usize) -> *mut u8 {
    // SAFETY: as the caller ensures.
    unsafe { tensor.data.cast::<u8>().add(first + second) }
}

/// A sum of all bytes, which depends on their order by groups of 64.
fn sum(bytes: &[u8]) -> u64 {
    let mut lanes = [0u64; 8];
    let (groups, rest) = bytes.as_chunks::<64>();
    for group in groups {
        let (words, _) = group.as_chunks::<8>();
        for (lane, word) in lanes.iter_mut().zip(words) {
            *lane = lane.rotate_left(1).wrapping_add(u64::from_le_bytes(*word));
        }
    }
    let rest = rest.iter().map(|byte| u64::from(*byte));
    lanes
        .into_iter()
        .chain(rest)
        .fold(0, |sum, of| mixed(sum ^ of))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_byte_and_its_place_count() {
        let mut bytes: Vec<u8> = (0..200u8).collect();
        let before = sum(&bytes);
        for at in [0, 7, 63, 64, 191, 192, 199] {
            bytes[at] ^= 1;
            assert_ne!(sum(&bytes), before, "{at}");
            bytes[at] ^= 1;
        }
        bytes.swap(0, 64);
        assert_ne!(sum(&bytes), before);
    }
}
