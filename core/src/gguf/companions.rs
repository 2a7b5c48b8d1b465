//! Tensors that belong to a weight, and without which the weight means something else.
//!
//! The rule is one of names, those of llama.cpp's loader. Of one stem: llama.cpp multiplies the product of
//! `STEM.weight` by `STEM.scale`, its input by `STEM.input_scale`, and adds `STEM.bias`. Others have stems of
//! their own: they scale or bias the product of another weight, or its input. `cargo xtask check --archs` compares
//! the rule with graphs of llama.cpp. Norms are weights with a stem of their own: they belong to a layer, and to no
//! product alone. So are tables of which rows are looked up.

use std::ffi::{CStr, CString};

const WEIGHT: &str = ".weight";
const OF_A_STEM: [&str; 3] = [".scale", ".input_scale", ".bias"];
/// A line each: the end of a companion without a weight of its stem, and those of its weights: the first one that the
/// model has. Then Mamba and linear attention, hyper-connections, RWKV. One text, since the loader relocates each
/// string of a table in every program.
const OTHER_STEMS: &str = "\
.exp_probs_b.bias .ffn_gate_inp.weight
.exp_probs_b .ffn_gate_inp.weight
.exp_probs_b_vl.bias .ffn_gate_inp.weight
.ffn.act.scales .ffn_down.weight
.ssm_dt.bias .ssm_f_b.weight .ssm_f_a.weight .ssm_alpha.weight .ssm_ba.weight .ssm_in.weight
.ssm_a .ssm_f_b.weight .ssm_f_a.weight
.hc_attn_base.weight .hc_attn_fn.weight
.hc_attn_scale.weight .hc_attn_fn.weight
.hc_ffn_base.weight .hc_ffn_fn.weight
.hc_ffn_scale.weight .hc_ffn_fn.weight
output_hc_base.weight output_hc_fn.weight
output_hc_scale.weight output_hc_fn.weight
.time_mix_w0.weight .time_mix_w2.weight
.time_mix_a0.weight .time_mix_a2.weight
.time_mix_v0.weight .time_mix_v2.weight
.time_mix_k_k.weight .time_mix_key.weight
.time_mix_k_a.weight .time_mix_key.weight
.time_mix_decay.weight .time_mix_decay_w2.weight";

/// Returns the ends of a companion and of a weight that it can belong to, in the order of [`OTHER_STEMS`].
fn other_stems() -> impl Iterator<Item = (&'static str, &'static str)> {
    OTHER_STEMS.lines().flat_map(|line| {
        let (companion, weights) = line.split_once(' ').unwrap_or_default();
        weights.split(' ').map(move |weight| (companion, weight))
    })
}

/// Returns the names of the tensors that belong to a weight; none for a tensor that is no weight. `has` is whether
/// the model has a tensor.
pub fn companions(name: &CStr, has: impl Fn(&CStr) -> bool) -> Vec<CString> {
    of_weight(name.to_str().unwrap_or_default(), &has)
}

/// Returns whether a tensor only multiplies the product of a weight or its input: with ones, a model computes
/// as without it.
pub fn is_scale(name: &str) -> bool {
    name.ends_with(".scale") || name.ends_with(".input_scale")
}

/// Returns the names of the other tensors that a tensor is one with: a weight and its companions. `has` is whether the
/// model has a tensor.
pub fn group(name: &CStr, has: impl Fn(&CStr) -> bool) -> Vec<CString> {
    let Some(weight) = weight_of(name.to_str().unwrap_or_default(), &has) else {
        return Vec::new();
    };
    let companions = weight.to_str().map(|weight| of_weight(weight, &has));
    let mut all = companions.unwrap_or_default();
    all.insert(0, weight);
    all.retain(|other| **other != *name);
    all
}

/// Returns the weight that a tensor belongs to, which is the tensor itself if it is a weight.
fn weight_of(name: &str, has: &impl Fn(&CStr) -> bool) -> Option<CString> {
    let of_stem = OF_A_STEM.iter().map(|end| (name.strip_suffix(end), WEIGHT));
    let others = other_stems().map(|(companion, end)| (name.strip_suffix(companion), end));
    let own = (name.strip_suffix(WEIGHT), WEIGHT);
    let mut all = of_stem.chain(others).chain([own]);
    all.find_map(|(stem, end)| known(stem?, end, has))
}

fn of_weight(weight: &str, has: &impl Fn(&CStr) -> bool) -> Vec<CString> {
    let stem = weight.strip_suffix(WEIGHT);
    let of_stem = OF_A_STEM.iter().map(|end| (stem, *end));
    let others = other_stems().map(|(companion, end)| (weight.strip_suffix(end), companion));
    let all = of_stem.chain(others);
    let all = all.filter_map(|(stem, end)| known(stem?, end, has));
    all.filter(|of| {
        let weight_of = of.to_str().ok().and_then(|name| weight_of(name, has));
        weight_of.is_some_and(|of| of.to_bytes() == weight.as_bytes())
    })
    .collect()
}

/// Returns a name if the model has a tensor with it.
fn known(stem: &str, end: &str, has: &impl Fn(&CStr) -> bool) -> Option<CString> {
    let name = CString::new(format!("{stem}{end}")).ok()?;
    has(&name).then_some(name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_weight_is_one_with_its_scales_and_its_bias() {
        let of = |name: &CStr| group(name, |_| true);
        assert_eq!(of(c"a.scale"), [c"a.weight", c"a.input_scale", c"a.bias"]);
        assert_eq!(of(c"a.bias"), [c"a.weight", c"a.scale", c"a.input_scale"]);
        assert_eq!(of(c"a.weight"), companions(c"a.weight", |_| true));
        assert!(of(c"blk.0.ssm_d").is_empty() && companions(c"a.scale", |_| true).is_empty());
        assert_eq!(
            group(c"a.scale", |name| name != c"a.input_scale"),
            [c"a.weight", c"a.bias"]
        );
    }

    #[test]
    fn some_companions_have_other_stems() {
        for (companion, weight) in [
            (c"blk.3.exp_probs_b.bias", c"blk.3.ffn_gate_inp.weight"),
            (c"blk.3.exp_probs_b", c"blk.3.ffn_gate_inp.weight"),
            (c"blk.3.ffn.act.scales", c"blk.3.ffn_down.weight"),
            (c"blk.3.hc_ffn_base.weight", c"blk.3.hc_ffn_fn.weight"),
            (c"output_hc_scale.weight", c"output_hc_fn.weight"),
        ] {
            let has = |name: &CStr| [companion, weight].contains(&name);
            assert_eq!(group(companion, has), [weight]);
            assert_eq!(companions(weight, has), [companion]);
        }
        let of_up = companions(c"blk.3.ffn_up.weight", |_| true);
        assert_eq!(of_up.len(), OF_A_STEM.len());
    }

    #[test]
    fn the_weight_of_a_companion_is_the_first_one_that_the_model_has() {
        const IN: &CStr = c"blk.0.ssm_in.weight";
        const DT: &CStr = c"blk.0.ssm_dt.weight";
        const BIAS: &CStr = c"blk.0.ssm_dt.bias";
        let mamba = |name: &CStr| [IN, DT, BIAS].contains(&name);
        assert_eq!(group(BIAS, mamba), [DT]);
        assert_eq!(companions(DT, mamba), [BIAS]);
        assert!(companions(IN, mamba).is_empty());
        let mamba2 = |name: &CStr| [IN, BIAS].contains(&name);
        assert_eq!(group(BIAS, mamba2), [IN]);
        assert_eq!(companions(IN, mamba2), [BIAS]);
    }
}
