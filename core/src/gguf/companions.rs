//! Tensors that belong to a weight, and without which the weight means something else.
//!
//! The rule is one of names, those of llama.cpp's loader. Of one stem: llama.cpp multiplies the product of
//! `STEM.weight` by `STEM.scale`, its input by `STEM.input_scale`, and adds `STEM.bias`. Two have stems of
//! their own: `exp_probs_b` is added to the scores of `ffn_gate_inp` for the choice of experts, and
//! `ffn.act.scales` divides the input of `ffn_down`. Norms are weights with a stem of their own: they
//! belong to a layer, and to no product alone.

use std::ffi::{CStr, CString};

const WEIGHT: &str = ".weight";
const OF_A_STEM: [&str; 3] = [".scale", ".input_scale", ".bias"];
/// The end of a weight, and of a companion with another stem.
const OTHER_STEMS: [(&str, &str); 4] = [
    (".ffn_gate_inp.weight", ".exp_probs_b.bias"),
    (".ffn_gate_inp.weight", ".exp_probs_b"),
    (".ffn_gate_inp.weight", ".exp_probs_b_vl.bias"),
    (".ffn_down.weight", ".ffn.act.scales"),
];

/// Returns the names of the tensors that belong to a weight, if the model has them; none for a tensor
/// that is no weight.
pub fn companions(name: &CStr) -> impl Iterator<Item = CString> + use<> {
    names(of_weight(name.to_str().unwrap_or_default()))
}

/// Returns whether a tensor only multiplies the product of a weight or its input: with ones, a model computes
/// as without it.
pub fn is_scale(name: &str) -> bool {
    name.ends_with(".scale") || name.ends_with(".input_scale")
}

/// Returns the names of the other tensors that a tensor is one with: a weight and its companions.
pub fn group(name: &CStr) -> impl Iterator<Item = CString> + use<> {
    let text = name.to_str().unwrap_or_default();
    let weight = weight_of(text);
    let all = weight.iter().cloned();
    let all = all.chain(weight.iter().flat_map(|weight| of_weight(weight)));
    names(all.filter(|name| name != text).collect())
}

/// Returns the weight that a tensor belongs to, which is the tensor itself if it is a weight.
fn weight_of(name: &str) -> Option<String> {
    let joined = |stem: Option<&str>, end: &str| stem.map(|stem| format!("{stem}{end}"));
    let mut others = OTHER_STEMS.iter();
    let other = others.find_map(|(weight, end)| joined(name.strip_suffix(end), weight));
    let mut ends = [WEIGHT].into_iter().chain(OF_A_STEM);
    other.or_else(|| ends.find_map(|end| joined(name.strip_suffix(end), WEIGHT)))
}

fn of_weight(weight: &str) -> Vec<String> {
    let stem = weight.strip_suffix(WEIGHT).into_iter();
    let of_stem = stem.flat_map(|stem| OF_A_STEM.map(|end| format!("{stem}{end}")));
    let others = OTHER_STEMS.iter().filter_map(|(of, end)| {
        let stem = weight.strip_suffix(of)?;
        Some(format!("{stem}{end}"))
    });
    of_stem.chain(others).collect()
}

fn names(names: Vec<String>) -> impl Iterator<Item = CString> + use<> {
    names.into_iter().filter_map(|name| CString::new(name).ok())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_weight_is_one_with_its_scales_and_its_bias() {
        let of = |name: &CStr| group(name).collect::<Vec<_>>();
        assert_eq!(of(c"a.scale"), [c"a.weight", c"a.input_scale", c"a.bias"]);
        assert_eq!(of(c"a.bias"), [c"a.weight", c"a.scale", c"a.input_scale"]);
        assert_eq!(of(c"a.weight"), companions(c"a.weight").collect::<Vec<_>>());
        assert!(of(c"blk.0.ssm_a").is_empty() && companions(c"a.scale").next().is_none());
    }

    #[test]
    fn two_kinds_of_companions_have_other_stems() {
        for (companion, weight) in [
            (c"blk.3.exp_probs_b.bias", c"blk.3.ffn_gate_inp.weight"),
            (c"blk.3.exp_probs_b", c"blk.3.ffn_gate_inp.weight"),
            (c"blk.3.ffn.act.scales", c"blk.3.ffn_down.weight"),
        ] {
            assert_eq!(group(companion).next().as_deref(), Some(weight));
            assert!(companions(weight).any(|name| *name == *companion));
        }
        assert!(
            !companions(c"blk.3.ffn_up.weight").any(|name| name.to_bytes().ends_with(b"scales"))
        );
    }
}
