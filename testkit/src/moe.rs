//! Models with mixtures of experts, in sizes that a test or a bench chooses.

use crate::writer::{F32, Gguf, Kv, MXFP4, Q8_0, Tensor, nbytes, pattern, vocabulary};

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

/// What the tensors hold.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Data {
    /// Zeros, which take no memory.
    Zeros,
    /// Pseudo-random weights that give finite results.
    Random,
}

impl Moe {
    /// A small model with biases of experts.
    pub fn small_gpt_oss() -> Moe {
        Moe {
            architecture: Architecture::GptOss,
            layers: 4,
            experts: 8,
            used: 2,
            width: 256,
            inner: 256,
            heads: 4,
            heads_kv: 2,
            head: 64,
            ty: MXFP4,
            tokens: 512,
        }
    }

    /// Returns the bytes of a tensor of experts.
    pub fn expert_bytes(&self) -> u64 {
        nbytes(self.ty, (self.width * self.inner * self.experts) as u64)
    }

    /// Returns the file.
    pub fn file(&self, data: Data) -> Gguf {
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
        const FLOAT: u32 = 6;
        file = file.kv(
            &format!("{architecture}.attention.layer_norm_rms_epsilon"),
            Kv::Raw(FLOAT, 1e-5f32.to_le_bytes().to_vec()),
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
            file = match data {
                Data::Zeros => file.zeros(&name, &ne, ty),
                Data::Random => {
                    let elements: i64 = ne.iter().product();
                    let seed = file.tensors.len() as u64 + 1;
                    let data = match name.ends_with("norm.weight") {
                        true => 1f32.to_le_bytes().repeat(elements as usize),
                        false => small_weights(seed, ty, elements as u64),
                    };
                    file.tensors.push(Tensor { name, ne, ty, data });
                    file
                }
            };
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

/// Returns pseudo-random weights of this seed, of about a tenth.
fn small_weights(seed: u64, ty: u32, elements: u64) -> Vec<u8> {
    let mut bytes = pattern(seed, nbytes(ty, elements) as usize);
    match ty {
        F32 => {
            for value in bytes.chunks_exact_mut(4) {
                let small = f32::from(i16::from_le_bytes([value[0], value[1]])) / 163840.0;
                value.copy_from_slice(&small.to_le_bytes());
            }
        }
        // The scale is 2^-10, of numbers up to 127.
        Q8_0 => (bytes.chunks_exact_mut(34))
            .for_each(|block| block[..2].copy_from_slice(&0x1400u16.to_le_bytes())),
        // The scale is 2^-6, of numbers up to 12.
        MXFP4 => (bytes.chunks_exact_mut(17)).for_each(|block| block[0] = 121),
        other => panic!("no small weights of type {other}"),
    }
    bytes
}
