//! The decisions of `llama-quantize`, as of llama.cpp b11434.

/// Parts of names of tensors that are never quantised.
const NEVER: [&str; 37] = [
    "_norm.weight",
    "ffn_gate_inp.weight",
    "ffn_gate_tid2eid.weight",
    "altup",
    "laurel",
    "per_layer_model_proj",
    "ssm_conv1d",
    "shortconv.conv.weight",
    "indexer.k_proj.weight",
    "indexer.q_proj.weight",
    "time_mix_first.weight",
    "time_mix_w0.weight",
    "time_mix_w1.weight",
    "time_mix_w2.weight",
    "time_mix_v0.weight",
    "time_mix_v1.weight",
    "time_mix_v2.weight",
    "time_mix_a0.weight",
    "time_mix_a1.weight",
    "time_mix_a2.weight",
    "time_mix_g1.weight",
    "time_mix_g2.weight",
    "time_mix_decay_w1.weight",
    "time_mix_decay_w2.weight",
    "time_mix_lerp_fused.weight",
    "attn_rel_b.weight",
    ".position_embd",
    "sam.pos_embd",
    "sam.neck.",
    "sam.net_",
    ".rel_pos",
    ".patch_embd",
    ".patch_merger",
    "a.rvq.codebook",
    "mm.a.code_embd",
    "position_embd.weight",
    "token_types.weight",
];

/// Parts of further names that are never quantised in the architecture `glm5-next`.
const NEVER_IN_GLM5_NEXT: [&str; 14] = [
    "hc_",
    "indexer.attn_q_b",
    "indexer.attn_k",
    "indexer.proj",
    "indexer_compressor_gate",
    "indexer_compressor_ape",
    "ssm_f_a.weight",
    "ssm_f_b.weight",
    "ssm_g_a.weight",
    "ssm_g_b.weight",
    "ssm_beta.weight",
    "attn_kv_a_mqa.weight",
    "attn_k_b.weight",
    "attn_v_b.weight",
];

/// Returns whether a tensor is quantised. `dimensions` does not count trailing ones.
pub fn allows(architecture: &str, name: &str, dimensions: usize) -> bool {
    let has = |parts: &[&str]| parts.iter().any(|part| name.contains(part));
    dimensions >= 2
        && name.ends_with("weight")
        && !has(&NEVER)
        && !(architecture == "glm5-next" && has(&NEVER_IN_GLM5_NEXT))
}

/// Returns the type that a tensor gets whose rows have `row` elements, and whose requested type
/// has blocks of `block` elements.
///
/// `None` if `llama-quantize` has no type for such a tensor.
pub fn fitting(wanted: &'static str, block: usize, row: usize) -> Option<&'static str> {
    if row.is_multiple_of(block) {
        return Some(wanted);
    }
    let smaller = match wanted {
        "iq1_s" | "iq1_m" | "iq2_xxs" | "iq2_xs" | "iq2_s" | "iq3_xxs" | "iq3_s" | "iq4_xs" => {
            "iq4_nl"
        }
        "q2_0" | "q2_K" | "q3_K" | "tq1_0" | "tq2_0" => "q4_0",
        "q4_K" => "q5_0",
        "q5_K" => "q5_1",
        "q6_K" => "q8_0",
        _ if block <= 32 => return Some("f16"),
        _ => return None,
    };
    // All of them have blocks of 32 elements.
    Some(if row.is_multiple_of(32) {
        smaller
    } else {
        "f16"
    })
}

/// Returns whether `llama-quantize` refuses this type for a tensor without an importance matrix.
pub fn needs_matrix(name: &str, ty: &str) -> bool {
    let is_table = [
        "token_embd.weight",
        "per_layer_token_embd.weight",
        "output.weight",
    ];
    let low = ["iq3_xxs", "iq2_xxs", "iq2_xs", "iq2_s", "iq1_m", "iq1_s"];
    low.contains(&ty) && !is_table.contains(&name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn norms_vectors_and_routers_stay() {
        assert!(allows("llama", "blk.0.ffn_down_exps.weight", 3));
        assert!(allows("llama", "token_embd.weight", 2));
        for name in [
            "blk.0.attn_norm.weight",
            "blk.0.ffn_gate_inp.weight",
            "blk.0.attn_q.bias",
        ] {
            assert!(!allows("llama", name, 2), "{name}");
        }
        assert!(!allows("llama", "rope_freqs.weight", 1));
        assert!(allows("llama", "blk.0.attn_k_b.weight", 2));
        assert!(!allows("glm5-next", "blk.0.attn_k_b.weight", 2));
    }

    #[test]
    fn rows_that_do_not_fit_get_smaller_blocks() {
        assert_eq!(fitting("q4_K", 256, 1536), Some("q4_K"));
        assert_eq!(fitting("q4_K", 256, 576), Some("q5_0"));
        assert_eq!(fitting("q3_K", 256, 576), Some("q4_0"));
        assert_eq!(fitting("iq4_xs", 256, 576), Some("iq4_nl"));
        assert_eq!(fitting("q6_K", 256, 100), Some("f16"));
        assert_eq!(fitting("q8_0", 32, 100), Some("f16"));
        assert_eq!(fitting("other", 64, 100), None);
    }
}
