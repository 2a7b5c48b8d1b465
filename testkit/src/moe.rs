//! Mixtures of experts in the sizes of real models, without data.

use crate::writer::{F32, Gguf, Kv, Q8_0, nbytes, vocabulary};

/// The sizes of a model. All numbers are those of its metadata.
#[derive(Debug, Clone)]
#[allow(missing_docs, reason = "the names say it")]
pub struct Moe {
    pub architecture: Architecture,
    pub layers: usize,
    pub experts: i64,
    pub used: i64,
    pub width: i64,
    /// Width of an expert.
    pub inner: i64,
    pub heads: i64,
    pub heads_kv: i64,
    pub head: i64,
    /// `enum ggml_type` of the experts.
    pub ty: u32,
    /// Tokens of the vocabulary.
    pub tokens: usize,
}

/// An architecture of llama.cpp.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Architecture {
    /// `llama`: only attention and experts.
    Llama,
    /// `gpt-oss`: biases of experts, a sliding window in each second layer.
    GptOss,
}

impl Moe {
    /// Returns the bytes of a tensor of experts.
    pub fn expert_bytes(&self) -> u64 {
        nbytes(self.ty, (self.width * self.inner * self.experts) as u64)
    }

    /// Returns the file. All tensors are zeros.
    pub fn file(&self) -> Gguf {
        let mut file = Gguf {
            kvs: Vec::new(),
            ..Gguf::default()
        };
        let architecture = match self.architecture {
            Architecture::Llama => "llama",
            Architecture::GptOss => "gpt-oss",
        };
        file = file.kv("general.architecture", Kv::Text(architecture.into()));
        for (key, value) in [
            ("block_count", self.layers as i64),
            ("context_length", 4096),
            ("embedding_length", self.width),
            ("feed_forward_length", self.inner),
            ("expert_feed_forward_length", self.inner),
            ("attention.head_count", self.heads),
            ("attention.head_count_kv", self.heads_kv),
            ("attention.key_length", self.head),
            ("attention.value_length", self.head),
            ("attention.sliding_window", 128),
            ("rope.dimension_count", self.head),
            ("expert_count", self.experts),
            ("expert_used_count", self.used),
        ] {
            file = file.kv(&format!("{architecture}.{key}"), Kv::U32(value as u32));
        }
        file = file.kv(
            &format!("{architecture}.attention.layer_norm_rms_epsilon"),
            Kv::F32(1e-5),
        );
        for (key, value) in vocabulary(self.tokens) {
            let distinct = || (0..self.tokens).map(|token| format!("token {token}"));
            let value = match key.as_str() {
                "tokenizer.ggml.tokens" => Kv::Texts(distinct().collect()),
                _ => value,
            };
            file = file.kv(&key, value);
        }
        for (name, ne, ty) in self.tensors() {
            file = file.zeros(&name, &ne, ty);
        }
        file
    }

    /// Names, shapes and types.
    fn tensors(&self) -> Vec<(String, Vec<i64>, u32)> {
        let (width, inner, experts) = (self.width, self.inner, self.experts);
        let (q, kv) = (self.heads * self.head, self.heads_kv * self.head);
        let tokens = self.tokens as i64;
        let mut all = vec![
            ("token_embd.weight".into(), vec![width, tokens], Q8_0),
            ("output_norm.weight".into(), vec![width], F32),
            ("output.weight".into(), vec![width, tokens], Q8_0),
        ];
        let gpt_oss = self.architecture == Architecture::GptOss;
        let norm = match gpt_oss {
            true => "post_attention_norm.weight",
            false => "ffn_norm.weight",
        };
        for layer in 0..self.layers {
            let mut add = |name: &str, ne: &[i64], ty| {
                all.push((format!("blk.{layer}.{name}"), ne.to_vec(), ty));
            };
            add("attn_norm.weight", &[width], F32);
            add("attn_q.weight", &[width, q], Q8_0);
            add("attn_k.weight", &[width, kv], Q8_0);
            add("attn_v.weight", &[width, kv], Q8_0);
            add("attn_output.weight", &[q, width], Q8_0);
            add(norm, &[width], F32);
            add("ffn_gate_inp.weight", &[width, experts], F32);
            add("ffn_gate_exps.weight", &[width, inner, experts], self.ty);
            add("ffn_up_exps.weight", &[width, inner, experts], self.ty);
            add("ffn_down_exps.weight", &[inner, width, experts], self.ty);
            if gpt_oss {
                add("attn_sinks.weight", &[self.heads], F32);
                add("attn_q.bias", &[q], F32);
                add("attn_k.bias", &[kv], F32);
                add("attn_v.bias", &[kv], F32);
                add("attn_output.bias", &[width], F32);
                add("ffn_gate_inp.bias", &[experts], F32);
                add("ffn_gate_exps.bias", &[inner, experts], F32);
                add("ffn_up_exps.bias", &[inner, experts], F32);
                add("ffn_down_exps.bias", &[width, experts], F32);
            }
        }
        all
    }
}
