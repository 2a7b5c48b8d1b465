//! Types for all tensors of a model, and the file type that follows.

use std::collections::BTreeMap;

use sidecar_core::gguf::TypeInfo;

use super::model::Tensor;

/// A tensor of a mix.
pub struct Part<'a> {
    pub tensor: Tensor<'a>,
    pub ty: &'static TypeInfo,
    pub bytes: u64,
    /// The candidate that it comes from; none if it stays as it is.
    pub candidate: Option<usize>,
}

/// Types for a whole model.
pub struct Mix<'a> {
    /// A candidate for each group; none if the group stays as it is.
    pub choices: Vec<Option<usize>>,
    /// The cut, by position.
    pub cut: Option<usize>,
    /// All tensors, in the order of the file.
    pub parts: Vec<Part<'a>>,
    /// Size of the file.
    pub bytes: u64,
    pub bits_per_weight: f64,
}

impl Mix<'_> {
    /// Returns number and name of the file type.
    pub fn file_type(&self) -> (u32, &'static str) {
        file_type(self.parts.iter().map(|part| (part.ty, part.bytes)))
    }
}

/// File types: a type of most tensors, the number of the file type, and its name.
const FILE_TYPES: [(&str, u32, &str); 28] = [
    ("f32", 0, "F32"),
    ("f16", 1, "F16"),
    ("q4_0", 2, "Q4_0"),
    ("q4_1", 3, "Q4_1"),
    ("q8_0", 7, "Q8_0"),
    ("q5_0", 8, "Q5_0"),
    ("q5_1", 9, "Q5_1"),
    ("q2_K", 10, "Q2_K"),
    ("q3_K", 12, "Q3_K_M"),
    ("q4_K", 15, "Q4_K_M"),
    ("q5_K", 17, "Q5_K_M"),
    ("q6_K", 18, "Q6_K"),
    ("iq2_xxs", 19, "IQ2_XXS"),
    ("iq2_xs", 20, "IQ2_XS"),
    ("iq3_xxs", 23, "IQ3_XXS"),
    ("iq1_s", 24, "IQ1_S"),
    ("iq4_nl", 25, "IQ4_NL"),
    ("iq3_s", 26, "IQ3_S"),
    ("iq2_s", 29, "IQ2_M"),
    ("iq4_xs", 30, "IQ4_XS"),
    ("iq1_m", 31, "IQ1_M"),
    ("bf16", 32, "BF16"),
    ("tq1_0", 36, "TQ1_0"),
    ("tq2_0", 37, "TQ2_0"),
    ("mxfp4", 38, "MXFP4_MOE"),
    ("q1_0", 40, "Q1_0"),
    ("q2_0", 41, "Q2_0"),
    ("nvfp4", 39, "NVFP4"),
];

/// Returns number and name of the file type that has most of these bytes. A quantised one, if
/// there is one, because `llama-quantize` uses a list of types only with such.
pub fn file_type<'a>(parts: impl Iterator<Item = (&'a TypeInfo, u64)>) -> (u32, &'static str) {
    let mut sums: BTreeMap<&str, u64> = BTreeMap::new();
    for (ty, bytes) in parts {
        *sums.entry(ty.name()).or_default() += bytes;
    }
    let known = FILE_TYPES
        .iter()
        .filter_map(|of| Some((of, *sums.get(of.0)?)));
    let most = known.max_by_key(|(of, bytes)| (!matches!(of.0, "f32" | "f16" | "bf16"), *bytes));
    most.map_or((0, "F32"), |(of, _)| (of.1, of.2))
}
