//! Which tensors belong to a weight: by graphs of the program, and by the rule of names.

use std::collections::BTreeSet;
use std::ffi::{CStr, CString};

use sidecar_core::gguf::companions;

use super::model::Model;

/// Evaluates the weights of a layer several times, with scales that are of further layers.
const SHARES_WEIGHTS: &str = "hrm_text-dense";

/// Compares the rule with pairs of a weight and a tensor that scales or biases it. Returns how many pairs are in
/// the rule, and those that are not.
pub fn compare(model: &Model, pairs: &BTreeSet<(String, String)>) -> (usize, Vec<String>) {
    let tensors = (0..model.tensors()).map(|tensor| model.tensor(tensor));
    let tensors: BTreeSet<String> = tensors.collect();
    let has = |name: &CStr| name.to_str().is_ok_and(|name| tensors.contains(name));
    let loaded = |pair: &&(String, String)| tensors.contains(&pair.0) && tensors.contains(&pair.1);
    let is_in_rule = |(weight, companion): &(String, String)| {
        let weight = CString::new(weight.as_str()).unwrap_or_default();
        let mut all = companions(&weight, has).into_iter();
        all.any(|of| of.as_bytes() == companion.as_bytes())
    };
    let (known, other): (Vec<_>, Vec<_>) =
        pairs.iter().filter(loaded).partition(|of| is_in_rule(of));
    let is_excepted = model.path.file_stem() == Some(SHARES_WEIGHTS.as_ref());
    let other = other.into_iter().filter(|_| !is_excepted);
    let other = other.map(|(weight, companion)| {
        format!("'{companion}' scales or biases '{weight}', and is none of its companions by name")
    });
    (known.len(), other.collect())
}
