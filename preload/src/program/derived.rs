//! Weights that are from no file: what programs derive from weights as they load them.
//!
//! A swap of a tensor does not change what was derived from it. So the tensors that a known kind is
//! derived from are refused one by one, and a graph that reads a tensor of an unknown kind refuses all.

use crate::ggml::{Ggml, Tensor};
use crate::program::graph;

/// A kind of derived weights.
struct Kind {
    /// Whether only ik_llama.cpp has it.
    is_fused: bool,
    /// What names end with.
    end: &'static [u8],
}

/// The known kinds.
const KINDS: [Kind; 6] = [
    // The drop-in's own: `masks::MASK`.
    Kind::of(b".ffn_gate_inp.mask"),
    // Adapters are from a file of their own, which is not watched.
    Kind::of(b".lora_a"),
    Kind::of(b".lora_b"),
    // Of each other, in models with multi-head latent attention; `placement::is_read_at_load`
    // refuses both.
    Kind::fused(b".attn_k_b.weight"),
    Kind::fused(b".attn_v_b.weight"),
    Kind::fused(b".attn_kv_b.weight"),
];

impl Kind {
    const fn of(end: &'static [u8]) -> Kind {
        Kind {
            is_fused: false,
            end,
        }
    }

    const fn fused(end: &'static [u8]) -> Kind {
        Kind {
            is_fused: true,
            end,
        }
    }
}

/// Whether a tensor that is from no file is of a known kind.
///
/// # Safety
///
/// A live tensor of this copy.
pub unsafe fn is_known(ggml: &Ggml, tensor: *const Tensor) -> bool {
    // SAFETY: as the caller ensures.
    let name = unsafe { graph::name(ggml, tensor) };
    let is_fused = ggml.ops.fused.is_some();
    let mut kinds = KINDS.iter();
    kinds.any(|kind| (!kind.is_fused || is_fused) && name.ends_with(kind.end))
}
