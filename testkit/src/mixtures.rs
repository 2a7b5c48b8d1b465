//! Small mixtures of experts that llama.cpp loads, in architectures whose graphs differ.
//!
//! All data are pseudo-random, so that no two experts are alike.

use std::path::Path;

use crate::writer::{F32, Gguf, Kv, MXFP4, Q4_0, Q8_0, Tensor, nbytes, pattern};

/// Layers.
const LAYERS: u32 = 4;
/// Experts of a layer.
pub const EXPERTS: u32 = 32;
/// Groups of the experts of [`Mixture::Grouped`].
pub const GROUPS: u32 = 4;
/// Experts that a token uses.
pub const USED: u32 = 4;
/// Tokens of the vocabulary.
const TOKENS: usize = 512;
/// The width of the model, and that of an expert.
const WIDTH: i64 = 256;
const HEADS: u32 = 4;
const KV_HEADS: u32 = 2;
const HEAD: i64 = 64;
/// The widths of DeepSeek-V2's attention: of latent keys and values, and of the parts of a key without
/// and with positions.
const LATENT: i64 = 512;
const PLAIN: i64 = 128;
const ROTATED: i64 = 64;
/// The size of a weight, as an exponent of two: sums over the width have the size of a summand.
const WEIGHT: i32 = -4;

/// A mixture of experts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mixture {
    /// As GPT-OSS: MXFP4 experts with biases, a router with a bias, attention with sinks, biases
    /// and windows.
    GptOss,
    /// As Command with experts: gate and up in one matrix, a shared expert, and a first layer
    /// without experts.
    MergedGateUp,
    /// The same with a layer that predicts the token after the next (MTP).
    Predicting,
    /// As Ling: scores from a sigmoid, a bias for the choice alone, groups of experts, and a shared expert.
    Grouped,
    /// As Qwen2: a shared expert with a gate of its own, and matrices of two types.
    SharedExpert,
    /// As DeepSeek-V2 for ik_llama.cpp: attention with latent keys and values, whose projections are
    /// in one matrix (MLA), a shared expert, and a first layer without experts.
    Latent,
}

/// A router never chooses an expert of [`Mixture::Grouped`] with this bias for the choice.
const NEVER: f32 = -1000.0;

/// Returns the data of a tensor of a layer.
///
/// # Panics
///
/// Panics if there is none.
pub fn data<'a>(model: &'a mut Gguf, layer: u32, role: &str) -> &'a mut Vec<u8> {
    let name = format!("blk.{layer}.{role}");
    let mut tensors = model.tensors.iter_mut();
    let tensor = tensors.find(|tensor| tensor.name == name);
    &mut tensor.expect("a tensor").data
}

/// Returns the part of an expert in the data of a tensor.
pub fn part(data: &mut [u8], expert: u64) -> &mut [u8] {
    let each = data.len() / EXPERTS as usize;
    &mut data[expert as usize * each..][..each]
}

/// Lets the router of a layer of [`Mixture::Grouped`] never choose these experts; the others have no bias.
pub fn never_choose(model: &mut Gguf, layer: u32, experts: &[u64]) {
    let bias = data(model, layer, "exp_probs_b.bias");
    bias.fill(0);
    for expert in experts {
        part(bias, *expert).copy_from_slice(&NEVER.to_le_bytes());
    }
}

impl Mixture {
    /// Returns the number of layers with experts.
    pub fn layers(self) -> u32 {
        match self {
            Mixture::MergedGateUp | Mixture::Latent => LAYERS - 1,
            _ => LAYERS,
        }
    }

    /// Whether its architecture is that of Command with experts.
    fn is_command(self) -> bool {
        matches!(self, Mixture::MergedGateUp | Mixture::Predicting)
    }

    /// Writes the model.
    pub fn write(self, path: &Path) -> std::io::Result<()> {
        self.write_variant(0, path)
    }

    /// Writes the model with other data, by this number.
    pub fn write_variant(self, variant: u64, path: &Path) -> std::io::Result<()> {
        self.describe(variant).write(path)
    }

    fn architecture(self) -> &'static str {
        match self {
            Mixture::GptOss => "gpt-oss",
            Mixture::MergedGateUp | Mixture::Predicting => "cohere2moe",
            Mixture::Grouped => "bailingmoe2",
            Mixture::SharedExpert => "qwen2moe",
            Mixture::Latent => "deepseek2",
        }
    }

    /// Returns the model with the data of a variant.
    pub fn describe(self, variant: u64) -> Gguf {
        let mut model = Writer::new(self.architecture(), variant);
        match self {
            Mixture::GptOss => model.key("attention.sliding_window", Kv::U32(32)),
            Mixture::MergedGateUp | Mixture::Predicting => {
                model.key("attention.sliding_window", Kv::U32(32));
                model.key("logit_scale", Kv::F32(0.25));
                model.key("leading_dense_block_count", Kv::U32(1));
                model.key("expert_shared_count", Kv::U32(1));
                model.key("expert_weights_norm", Kv::Bool(true));
            }
            Mixture::SharedExpert => {}
            Mixture::Grouped => {
                const SIGMOID: u32 = 2;
                model.key("expert_shared_count", Kv::U32(1));
                model.key("expert_gating_func", Kv::U32(SIGMOID));
                model.key("expert_group_count", Kv::U32(GROUPS));
                model.key("expert_group_used_count", Kv::U32(2));
                model.key("expert_weights_norm", Kv::Bool(true));
            }
            Mixture::Latent => {
                for (key, value) in [
                    ("leading_dense_block_count", 1),
                    ("expert_shared_count", 1),
                    ("attention.head_count_kv", HEADS),
                    ("attention.q_lora_rank", WIDTH as u32),
                    ("attention.kv_lora_rank", LATENT as u32),
                    ("attention.key_length", (PLAIN + ROTATED) as u32),
                    ("attention.value_length", PLAIN as u32),
                    ("rope.dimension_count", ROTATED as u32),
                ] {
                    model.key(key, Kv::U32(value));
                }
                model.key("expert_weights_scale", Kv::F32(1.0));
            }
        }
        model.matrix("token_embd.weight", &[WIDTH, TOKENS as i64], Q8_0, 0);
        model.ones("output_norm.weight");
        model.matrix("output.weight", &[WIDTH, TOKENS as i64], Q8_0, WEIGHT);
        let predicting = u32::from(self == Mixture::Predicting);
        if predicting > 0 {
            model.key("block_count", Kv::U32(LAYERS + predicting));
            model.key("nextn_predict_layers", Kv::U32(predicting));
        }
        for number in 0..LAYERS + predicting {
            let mut layer = model.layer(number);
            match self {
                Mixture::Latent => layer.latent_attention(),
                Mixture::Grouped => layer.joint_attention(),
                _ => layer.attention(!self.is_command()),
            }
            if number == LAYERS {
                layer.ones("nextn.enorm.weight");
                layer.ones("nextn.hnorm.weight");
                layer.matrix("nextn.eh_proj.weight", &[2 * WIDTH, WIDTH], Q8_0);
            }
            match self {
                Mixture::GptOss => {
                    layer.ones("post_attention_norm.weight");
                    layer.floats("attn_sinks.weight", &[HEADS.into()], 0);
                    layer.floats("attn_output.bias", &[WIDTH], -3);
                    layer.experts(["gate", "up", "down"].map(|name| (name, 1, MXFP4)));
                    layer.floats("ffn_gate_inp.bias", &[EXPERTS.into()], 0);
                    for role in ["gate", "up", "down"] {
                        let name = format!("ffn_{role}_exps.bias");
                        layer.floats(&name, &[WIDTH, EXPERTS.into()], -1);
                    }
                }
                Mixture::MergedGateUp | Mixture::Predicting if number == 0 => layer.dense(""),
                Mixture::Latent if number == 0 => {
                    layer.ones("ffn_norm.weight");
                    layer.dense("");
                }
                Mixture::Latent => {
                    layer.ones("ffn_norm.weight");
                    layer.experts(["gate", "up", "down"].map(|name| (name, 1, Q4_0)));
                    layer.dense("_shexp");
                }
                Mixture::MergedGateUp | Mixture::Predicting => {
                    layer.experts([("gate_up", 2, MXFP4), ("down", 1, Q8_0)]);
                    layer.dense("_shexp");
                }
                Mixture::Grouped => {
                    layer.ones("ffn_norm.weight");
                    layer.experts(["gate", "up", "down"].map(|name| (name, 1, Q4_0)));
                    layer.floats("exp_probs_b.bias", &[EXPERTS.into()], 0);
                    layer.dense("_shexp");
                }
                Mixture::SharedExpert => {
                    layer.ones("ffn_norm.weight");
                    layer.experts([("gate", 1, Q4_0), ("up", 1, Q4_0), ("down", 1, MXFP4)]);
                    layer.dense("_shexp");
                    layer.floats("ffn_gate_inp_shexp.weight", &[WIDTH], WEIGHT);
                }
            }
        }
        model.gguf
    }
}

/// A model that is being described.
struct Writer {
    gguf: Gguf,
    architecture: &'static str,
    variant: u64,
}

/// A layer of it.
struct Layer<'a> {
    model: &'a mut Writer,
    number: u32,
}

impl Writer {
    fn new(architecture: &'static str, variant: u64) -> Writer {
        let mut gguf = Gguf::default();
        gguf.kvs[0].1 = Kv::Text(architecture.into());
        // Texts of ik_llama.cpp's server are valid UTF-8 if no token is a byte that is none.
        let bytes = if architecture == "deepseek2" {
            128
        } else {
            256
        };
        gguf.kvs.extend(vocabulary(bytes));
        let mut model = Writer {
            gguf,
            architecture,
            variant,
        };
        let width = WIDTH as u32;
        for (key, value) in [
            ("context_length", 1024),
            ("embedding_length", width),
            ("block_count", LAYERS),
            ("feed_forward_length", width),
            ("expert_feed_forward_length", width),
            ("expert_shared_feed_forward_length", width),
            ("expert_count", EXPERTS),
            ("expert_used_count", USED),
            ("attention.head_count", HEADS),
            ("attention.head_count_kv", KV_HEADS),
            ("attention.key_length", HEAD as u32),
            ("attention.value_length", HEAD as u32),
            ("rope.dimension_count", HEAD as u32),
        ] {
            model.key(key, Kv::U32(value));
        }
        model.key("attention.layer_norm_rms_epsilon", Kv::F32(1e-5));
        model.key("rope.freq_base", Kv::F32(10000.0));
        model
    }

    fn key(&mut self, name: &str, value: Kv) {
        let name = format!("{}.{name}", self.architecture);
        self.gguf.kvs.retain(|(other, _)| *other != name);
        self.gguf.kvs.push((name, value));
    }

    fn layer(&mut self, number: u32) -> Layer<'_> {
        Layer {
            model: self,
            number,
        }
    }

    fn tensor(&mut self, name: &str, ne: &[i64], ty: u32, data: Vec<u8>) {
        self.gguf.tensors.push(Tensor {
            name: name.into(),
            ne: ne.to_vec(),
            ty,
            data,
        });
    }

    fn matrix(&mut self, name: &str, ne: &[i64], ty: u32, exponent: i32) {
        let elements: i64 = ne.iter().product();
        let seed = (self.variant << 16) + self.gguf.tensors.len() as u64 + 1;
        self.tensor(name, ne, ty, random(seed, ty, elements as u64, exponent));
    }

    fn ones(&mut self, name: &str) {
        self.ones_of(name, WIDTH);
    }

    fn ones_of(&mut self, name: &str, width: i64) {
        let data = 1f32.to_le_bytes().repeat(width as usize);
        self.tensor(name, &[width], F32, data);
    }
}

impl Layer<'_> {
    fn name(&self, name: &str) -> String {
        format!("blk.{}.{name}", self.number)
    }

    fn matrix(&mut self, name: &str, ne: &[i64], ty: u32) {
        let name = self.name(name);
        self.model.matrix(&name, ne, ty, WEIGHT);
    }

    fn floats(&mut self, name: &str, ne: &[i64], exponent: i32) {
        let name = self.name(name);
        self.model.matrix(&name, ne, F32, exponent);
    }

    fn ones(&mut self, name: &str) {
        let name = self.name(name);
        self.model.ones(&name);
    }

    fn attention(&mut self, biases: bool) {
        self.ones("attn_norm.weight");
        for (name, heads) in [("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS)] {
            let rows = i64::from(heads) * HEAD;
            self.matrix(&format!("attn_{name}.weight"), &[WIDTH, rows], Q8_0);
            if biases {
                self.floats(&format!("attn_{name}.bias"), &[rows], -3);
            }
        }
        let columns = i64::from(HEADS) * HEAD;
        self.matrix("attn_output.weight", &[columns, WIDTH], Q8_0);
    }

    /// Queries, keys and values in one matrix, and norms of queries and keys.
    fn joint_attention(&mut self) {
        self.ones("attn_norm.weight");
        for name in ["attn_q_norm.weight", "attn_k_norm.weight"] {
            let name = self.name(name);
            self.model.ones_of(&name, HEAD);
        }
        let (queries, keys) = (i64::from(HEADS) * HEAD, i64::from(KV_HEADS) * HEAD);
        self.matrix("attn_qkv.weight", &[WIDTH, queries + 2 * keys], Q8_0);
        self.matrix("attn_output.weight", &[queries, WIDTH], Q8_0);
    }

    fn latent_attention(&mut self) {
        let heads = i64::from(HEADS);
        self.ones("attn_norm.weight");
        self.ones("attn_q_a_norm.weight");
        let name = self.name("attn_kv_a_norm.weight");
        self.model.ones_of(&name, LATENT);
        for (name, ne) in [
            ("q_a", [WIDTH, WIDTH]),
            ("q_b", [WIDTH, heads * (PLAIN + ROTATED)]),
            ("kv_a_mqa", [WIDTH, LATENT + ROTATED]),
            ("kv_b", [LATENT, heads * 2 * PLAIN]),
            ("output", [heads * PLAIN, WIDTH]),
        ] {
            self.matrix(&format!("attn_{name}.weight"), &ne, Q8_0);
        }
    }

    /// The router, and for each role a matrix of all experts, with so many widths of rows.
    fn experts<const ROLES: usize>(&mut self, roles: [(&str, i64, u32); ROLES]) {
        let experts = i64::from(EXPERTS);
        self.floats("ffn_gate_inp.weight", &[WIDTH, experts], -3);
        for (role, widths, ty) in roles {
            let name = format!("ffn_{role}_exps.weight");
            self.matrix(&name, &[WIDTH, widths * WIDTH, experts], ty);
        }
    }

    /// A network that all tokens use.
    fn dense(&mut self, suffix: &str) {
        for role in ["gate", "up", "down"] {
            let name = format!("ffn_{role}{suffix}.weight");
            self.matrix(&name, &[WIDTH, WIDTH], Q8_0);
        }
    }
}

/// Returns pseudo-random data of this seed, of about the size of this power of two.
fn random(seed: u64, ty: u32, elements: u64, exponent: i32) -> Vec<u8> {
    if ty == F32 {
        let bytes = pattern(seed, 2 * elements as usize);
        let float = |pair: &[u8]| {
            let whole = i16::from_le_bytes([pair[0], pair[1]]);
            f32::from(whole) / 16384.0 * 2f32.powi(exponent)
        };
        let floats = bytes.chunks_exact(2).map(float);
        return floats.flat_map(f32::to_le_bytes).collect();
    }
    let mut bytes = pattern(seed, nbytes(ty, elements) as usize);
    // A block begins with its scale: a power of two, over the size of the numbers that follow.
    let half = |exponent: i32| (((15 + exponent) as u16) << 10).to_le_bytes().to_vec();
    let (block, scale) = match ty {
        Q4_0 => (18, half(exponent - 2)),
        Q8_0 => (34, half(exponent - 6)),
        MXFP4 => (17, vec![(127 + exponent - 1) as u8]),
        other => panic!("no experts of type {other}"),
    };
    for block in bytes.chunks_exact_mut(block) {
        block[..scale.len()].copy_from_slice(&scale);
    }
    bytes
}

/// Returns the keys of a vocabulary that has a token for each of so many bytes.
fn vocabulary(bytes: usize) -> Vec<(String, Kv)> {
    const UNKNOWN: i32 = 2;
    const CONTROL: i32 = 3;
    const BYTE: i32 = 6;
    let mut words = vec!["<unk>".to_owned(), "<s>".to_owned(), "</s>".to_owned()];
    let mut types = vec![UNKNOWN, CONTROL, CONTROL];
    words.extend((0..bytes).map(|byte| format!("<0x{byte:02X}>")));
    types.resize(words.len(), BYTE);
    if bytes < 256 {
        // A space has several bytes here.
        words.push("\u{2581}".to_owned());
    }
    let more = TOKENS - words.len();
    words.extend((0..more).map(|i| format!("\u{2581}{i:x}")));
    types.resize(words.len(), 1);
    let scores = (0..words.len()).map(|i| -(i as f32)).collect();
    let keys = [
        ("model", Kv::Text("llama".into())),
        ("tokens", Kv::Texts(words)),
        ("scores", Kv::F32s(scores)),
        ("token_type", Kv::I32s(types)),
        ("bos_token_id", Kv::U32(1)),
        ("eos_token_id", Kv::U32(2)),
    ];
    keys.map(|(key, value)| (format!("tokenizer.ggml.{key}"), value))
        .into()
}
