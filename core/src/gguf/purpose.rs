//! What llama.cpp uses metadata for.
//!
//! The names are those of `LLM_KV_NAMES` in `llama-arch.cpp`, and of `common.cpp` (b11549). A key that
//! is not known counts as one that is computed with.

/// What llama.cpp uses the value of a metadata key for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Purpose {
    /// It is computed with, or decides whether the file can be loaded.
    Computes,
    /// It is read when the program starts, and nothing that a graph computes depends on it.
    Start,
    /// It is not read, or only as text about the file.
    Description,
}

/// Keys that count for the start of a program. One that ends with a dot stands for all that begin
/// with it.
const START: [&str; 4] = [
    "general.name",
    "general.sampling.",
    "general.type",
    "tokenizer.",
];

/// Keys of the vocabulary that must fit the shapes of tensors.
const SHAPES: [&str; 1] = ["tokenizer.ggml.token_type_count"];

/// Keys that describe a file, and that the loader reads as a value of one type.
const TYPED: [&str; 3] = [
    "general.alignment",
    "general.file_type",
    "general.quantization_version",
];

/// Keys that describe a file.
const DESCRIPTION: [&str; 24] = [
    "general.alignment",
    "general.author",
    "general.base_model.",
    "general.basename",
    "general.dataset.",
    "general.datasets",
    "general.description",
    "general.doi",
    "general.file_type",
    "general.finetune",
    "general.languages",
    "general.license",
    "general.license.",
    "general.organization",
    "general.quantization_version",
    "general.quantized_by",
    "general.repo_url",
    "general.size_label",
    "general.source.",
    "general.tags",
    "general.url",
    "general.uuid",
    "general.version",
    "quantize.imatrix.",
];

/// Ends of keys with the architecture in front that decide which element of a tensor stands where,
/// beyond its shape: heads and experts follow each other in the rows, and `rope` interleaves them.
const PLACES: [&str; 11] = [
    "attention.head_count",
    "attention.head_count_kv",
    "attention.key_length",
    "attention.value_length",
    "rope.dimension_count",
    "rope.dimension_sections",
    "expert_count",
    "tensor_data_layout",
    "ssm.group_count",
    "ssm.time_step_rank",
    "wkv.head_size",
];

impl Purpose {
    /// Returns what a key is used for.
    pub fn of(key: &[u8]) -> Purpose {
        let is_in = |names: &[&str]| {
            names.iter().any(|name| match name.ends_with('.') {
                true => key.starts_with(name.as_bytes()),
                false => key == name.as_bytes(),
            })
        };
        if is_in(&SHAPES) {
            Purpose::Computes
        } else if is_in(&START) {
            Purpose::Start
        } else if is_in(&DESCRIPTION) {
            Purpose::Description
        } else {
            Purpose::Computes
        }
    }
}

/// Returns whether llama.cpp loads no file in which this key has a value of another type.
pub fn has_one_type(key: &[u8]) -> bool {
    let is_typed = TYPED.iter().any(|name| key == name.as_bytes());
    is_typed || Purpose::of(key) != Purpose::Description
}

/// Returns whether a key decides which element of a tensor stands where. A tensor of a model with
/// another value means something else, although its shape is the same.
pub fn places_elements(key: &[u8]) -> bool {
    let Ok(key) = std::str::from_utf8(key) else {
        return false;
    };
    let of_architecture = key.split_once('.').map(|(_, end)| end);
    key == "general.architecture" || of_architecture.is_some_and(|end| PLACES.contains(&end))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_that_is_not_known_is_computed_with() {
        use Purpose::*;
        for (key, purpose) in [
            ("llama.attention.layer_norm_rms_epsilon", Computes),
            ("general.architecture", Computes),
            ("general.tensor_extra.prec_a4", Computes),
            ("general.names", Computes),
            ("xielu.eps", Computes),
            ("tokenizer.ggml.token_type_count", Computes),
            ("tokenizer.chat_template", Start),
            ("general.sampling.top_k", Start),
            ("general.license.link", Description),
            ("quantize.imatrix.file", Description),
        ] {
            assert_eq!(Purpose::of(key.as_bytes()), purpose, "{key}");
        }
        assert!(places_elements(b"qwen3.attention.head_count"));
        assert!(!places_elements(b"qwen3.rope.freq_base"));
        assert!(
            has_one_type(b"tokenizer.ggml.add_bos_token") && has_one_type(b"general.file_type")
        );
        assert!(!has_one_type(b"general.author"));
    }
}
