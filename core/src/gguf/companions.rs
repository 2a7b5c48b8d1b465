//! Tensors that belong to a weight: llama.cpp multiplies the product of the weight by `.scale`, and its
//! input by `.input_scale`. The weight alone means nothing else than a part of the product.

use std::ffi::{CStr, CString};

const WEIGHT: &str = ".weight";
const COMPANIONS: [&str; 2] = [".scale", ".input_scale"];

/// Returns the names of the tensors that belong to a weight, if the model has them; none for a tensor
/// that is no weight.
pub fn companions(name: &CStr) -> impl Iterator<Item = CString> + use<> {
    let stem = name
        .to_str()
        .ok()
        .and_then(|name| name.strip_suffix(WEIGHT));
    named(stem.map(str::to_owned), &COMPANIONS)
}

/// Returns the names of the other tensors that a tensor is one with: a weight and its companions.
pub fn group(name: &CStr) -> impl Iterator<Item = CString> + use<> {
    let text = name.to_str().unwrap_or_default();
    let ends = || [WEIGHT].into_iter().chain(COMPANIONS);
    let end = ends().find(|end| text.ends_with(end));
    let stem = end.map(|end| text[..text.len() - end.len()].to_owned());
    let others: Vec<&str> = ends().filter(|other| Some(*other) != end).collect();
    named(stem, &others)
}

fn named(stem: Option<String>, ends: &[&str]) -> impl Iterator<Item = CString> + use<> {
    let names = stem.map(|stem| ends.iter().map(move |end| format!("{stem}{end}")));
    let names: Vec<String> = names.into_iter().flatten().collect();
    names.into_iter().filter_map(|name| CString::new(name).ok())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_weight_and_its_scales_are_one() {
        let of = |name: &CStr| group(name).collect::<Vec<_>>();
        assert_eq!(of(c"a.scale"), [c"a.weight", c"a.input_scale"]);
        assert_eq!(of(c"a.weight"), companions(c"a.weight").collect::<Vec<_>>());
        assert!(of(c"a.bias").is_empty() && companions(c"a.scale").next().is_none());
    }
}
