//! The matrices of a model, and which of them are measured.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail, ensure};
use serde::Serialize;
use sidecar_core::experts::{ExpertName, Projection, Routing};
use sidecar_core::gguf::{self, Access, GgufFile, TensorInfo, TypeInfo};
use sidecar_core::protocol::{Matrix, Repacked, Work};
use sidecar_core::text;

use super::model::{Model, Products};

/// Tokens of a batch that is measured. Enough for kernels of batches, and quick.
pub const BATCH: u64 = 128;
/// Tokens of the batch that it stands for: llama.cpp's default.
const LONG_BATCH: u64 = 512;
/// Bytes of the matrices that are multiplied with a single token: more than caches of processors hold.
const TOKEN_BYTES: u64 = 512 << 20;
/// Operations of the products with a batch.
const BATCH_OPERATIONS: u64 = 20_000_000_000;

/// What a matrix is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Role {
    /// Routed experts of a layer.
    Routed,
    /// Read by each token.
    Layer,
    /// Read by a token whose successor is predicted, and not by the others of a prompt.
    Output,
}

/// A matrix of the model.
#[derive(Debug, Clone, Copy)]
struct Found {
    layer: u32,
    role: Role,
    matrix: Matrix,
    bytes: u64,
}

/// The matrices of a model.
pub struct Shape {
    matrices: Vec<Found>,
    /// Of all tensors.
    all_bytes: u64,
    /// Layers.
    pub layers: u32,
    /// Layers with routed experts.
    pub expert_layers: u32,
    pub experts: u64,
    /// Experts of a token, of several numbers the largest; 0 if no layer has any.
    pub used: u64,
    /// Bytes of a token of context, with keys and values in F16, if known.
    pub context_bytes: Option<u64>,
    /// The context that the model was trained with.
    pub context: u64,
    /// Weights of a row of the first matrices: the size of an activation.
    pub width: u64,
    /// The largest file.
    pub path: PathBuf,
    /// Whether a layer has a matrix for each expert, as in older files.
    is_split: bool,
    /// Matrices of experts in that file.
    pub experts_at: Vec<ExpertAt>,
}

/// Where a matrix of an expert is in a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ExpertAt {
    pub offset: u64,
    pub bytes: u64,
    pub rows: u64,
}

/// Sizes of groups of matrices.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Bytes {
    /// Routed experts.
    pub routed: u64,
    /// Matrices that each token reads.
    pub others: u64,
    /// What is left: token embeddings, norms, biases.
    pub rest: u64,
}

impl Shape {
    /// Reads the headers of a model, of which a program replaces some numbers.
    pub fn read(path: &Path, overrides: &BTreeMap<String, u64>) -> Result<Shape> {
        let files = gguf::open_model(path, Access::Read)
            .with_context(|| format!("cannot read the model {}", text::path(path)))?;
        let shape = Shape::of(&files, overrides);
        ensure!(
            !shape.matrices.is_empty(),
            "{} has no layers: pass the model itself",
            text::path(path)
        );
        ensure!(
            !shape.is_split,
            "{} has a file format of 2024, with a matrix for each expert, which newer llama.cpp does not load: convert the model again",
            text::path(path)
        );
        ensure!(
            shape.expert_layers == 0 || shape.used > 0,
            "{} does not state how many experts a token uses (expert_used_count)",
            text::path(path)
        );
        let too_many = |of: &&Found| of.matrix.used > of.matrix.experts;
        if let Some(of) = shape.matrices.iter().find(too_many) {
            bail!(
                "{}: a token uses {} of the {} experts of layer {}",
                text::path(path),
                of.matrix.used,
                of.matrix.experts,
                of.layer
            );
        }
        Ok(shape)
    }

    fn of(files: &[GgufFile], overrides: &BTreeMap<String, u64>) -> Shape {
        let mut routing = Routing::of(files);
        let replaced = overrides.get(&format!("{}.expert_used_count", routing.architecture));
        // llama.cpp replaces a number, and no array.
        if let ([used], Some(other)) = (routing.used.as_mut_slice(), replaced) {
            *used = *other;
        }
        let largest = files.iter().max_by_key(|file| file.source.id().size);
        let largest = largest.expect("a model has a file");
        let mut shape = Shape {
            matrices: Vec::new(),
            all_bytes: 0,
            layers: 0,
            expert_layers: 0,
            experts: 0,
            used: routing.most_used(),
            context_bytes: None,
            context: 0,
            width: 0,
            path: largest.source.path().to_path_buf(),
            is_split: false,
            experts_at: Vec::new(),
        };
        for file in files {
            for tensor in &file.header.tensors {
                let name = file.header.name(tensor).to_string_lossy();
                shape.all_bytes += tensor.nbytes;
                shape.add(&name, tensor, &routing);
                let is_routed = ExpertName::parse(&name).is_some();
                if is_routed && std::ptr::eq(file, largest) {
                    let experts = tensor.ne[2].max(1);
                    let bytes = tensor.nbytes / experts;
                    let at = (0..experts).map(|expert| ExpertAt {
                        offset: tensor.offset + expert * bytes,
                        bytes,
                        rows: tensor.ne[1],
                    });
                    shape.experts_at.extend(at);
                }
            }
        }
        if shape.with_role(Role::Output).next().is_none() {
            // The matrix of the token embeddings is multiplied, too.
            let tensors = files.iter().flat_map(|file| {
                let name =
                    |of: &TensorInfo| file.header.name(of).to_bytes() == b"token_embd.weight";
                file.header.tensors.iter().filter(move |of| name(of))
            });
            shape
                .matrices
                .extend(tensors.map(|of| found(of, 0, Role::Output, 0)));
        }
        shape.expert_layers = shape.layers_of(Role::Routed).len() as u32;
        shape.read_metadata(&files[0], &routing.architecture, overrides);
        shape
    }

    fn add(&mut self, name: &str, tensor: &TensorInfo, routing: &Routing) {
        if name == "output.weight" {
            self.matrices.push(found(tensor, 0, Role::Output, 0));
            return;
        }
        let number = |rest: &str| rest.split('.').next()?.parse::<u32>().ok();
        let layer = name.strip_prefix("blk.").and_then(number);
        let Some(layer) = layer.filter(|_| tensor.n_dims >= 2 && name.ends_with(".weight")) else {
            return;
        };
        // Small convolutions are no products.
        if routing.predicting.contains(&layer) || name.contains("conv1d") {
            return;
        }
        self.layers = self.layers.max(layer + 1);
        let of = match ExpertName::parse(name) {
            Some(of) => {
                self.is_split |= of.expert.is_some();
                let mut found = found(tensor, layer, Role::Routed, routing.used_in(layer));
                found.matrix.own_inputs = of.projection == Projection::Down;
                found
            }
            None => found(tensor, layer, Role::Layer, 0),
        };
        if of.role == Role::Routed {
            self.experts = self.experts.max(of.matrix.experts);
        } else if self.width == 0 {
            self.width = tensor.ne[0];
        }
        self.matrices.push(of);
    }

    fn read_metadata(
        &mut self,
        first: &GgufFile,
        architecture: &str,
        overrides: &BTreeMap<String, u64>,
    ) {
        let number = |name: &str| {
            let key = format!("{architecture}.{name}");
            let of_file = || first.header.key(key.as_bytes())?.as_u64();
            overrides.get(&key).copied().or_else(of_file)
        };
        self.context = number("context_length").unwrap_or(0);
        let heads = number("attention.head_count");
        let shared = number("attention.head_count_kv").or(heads);
        let width = number("embedding_length");
        let of_head = heads.zip(width).map(|(heads, width)| width / heads.max(1));
        let key = number("attention.key_length").or(of_head);
        let value = number("attention.value_length").or(of_head);
        let both = key.zip(value).map(|(key, value)| key + value);
        let layers = u64::from(self.layers);
        let bytes = shared
            .zip(both)
            .map(|(heads, both)| 2 * layers * heads * both);
        self.context_bytes = bytes;
    }

    fn bytes_of(&self, role: Role) -> u64 {
        self.with_role(role).map(|of| of.bytes).sum()
    }

    /// Returns the sizes of the groups.
    pub fn bytes(&self) -> Bytes {
        let routed = self.bytes_of(Role::Routed);
        let others = self.bytes_of(Role::Layer) + self.bytes_of(Role::Output);
        Bytes {
            routed,
            others,
            rest: self.all_bytes.saturating_sub(routed + others),
        }
    }

    /// Returns the bytes of the matrices that are repacked: of routed experts, and of others.
    pub fn repacked(&self, kinds: &[Repacked]) -> (u64, u64) {
        let bytes = |routed| {
            let is = |of: &&Found| {
                let kind = Repacked {
                    ty: of.matrix.ty,
                    routed,
                };
                (of.role == Role::Routed) == routed && kinds.contains(&kind)
            };
            self.matrices.iter().filter(is).map(|of| of.bytes).sum()
        };
        (bytes(true), bytes(false))
    }

    /// Returns the sizes that predictions need.
    pub fn model(&self) -> Model {
        let routed = self.bytes().routed as f64;
        let experts = self.experts.max(1) as f64;
        let of_token = |of: &Found| {
            let share = of.matrix.used as f64 / of.matrix.experts as f64;
            of.bytes as f64 * share.min(1.0)
        };
        let routed_token: f64 = self.with_role(Role::Routed).map(of_token).sum();
        Model {
            expert_layers: f64::from(self.expert_layers),
            experts,
            used: routed_token / routed.max(1.0) * experts,
            routed,
            routed_token,
        }
    }

    /// Returns the products to measure: of routed experts and of other matrices with a single token, then
    /// the same with a batch. They take a part of the free memory.
    pub fn works(&self, free: u64) -> [Work; 4] {
        // A power of two, so that the same work is kept while the free memory varies.
        let bytes = TOKEN_BYTES.min(1 << (free / 8).max(1).ilog2());
        [
            self.sample(Role::Routed, 1, bytes),
            self.sample(Role::Layer, 1, bytes),
            self.sample(Role::Routed, BATCH, BATCH_OPERATIONS),
            self.sample(Role::Layer, BATCH, BATCH_OPERATIONS),
        ]
    }

    /// Returns matrices of some layers, at equal distances, for one work: of so many bytes for a single token, of so
    /// many operations for a batch.
    fn sample(&self, role: Role, tokens: u64, limit: u64) -> Work {
        let layers: Vec<u32> = self.layers_of(role).into_iter().collect();
        let cost = |layer: u32| -> u64 {
            let of = self.with_role(role).filter(|of| of.layer == layer);
            match tokens {
                1 => of.map(|of| of.bytes).sum(),
                _ => of.map(|of| 2 * tokens * weights_of_token(&of.matrix)).sum(),
            }
        };
        let largest = layers.iter().map(|&layer| cost(layer)).max().unwrap_or(1);
        let count = (limit / largest.max(1)).clamp(1, layers.len().max(1) as u64) as usize;
        let chosen: Vec<u32> = (0..count)
            .filter_map(|at| layers.get(at * layers.len() / count).copied())
            .collect();
        // Fewer experts stand for a layer that is too large, or for a longer batch: as many tokens for
        // each expert.
        let reduced = |matrix: &Matrix| {
            let experts = match tokens {
                1 if largest > limit => {
                    (matrix.experts as f64 * limit as f64 / largest as f64) as u64
                }
                1 => matrix.experts,
                _ => matrix.experts * tokens / LONG_BATCH,
            };
            Matrix {
                experts: experts.clamp(matrix.used.max(1), matrix.experts),
                ..*matrix
            }
        };
        let mut matrices: Vec<Matrix> = Vec::new();
        for of in self.with_role(role).filter(|of| chosen.contains(&of.layer)) {
            matrices.push(match role {
                Role::Routed => reduced(&of.matrix),
                _ => of.matrix,
            });
        }
        if role == Role::Layer && tokens == 1 {
            matrices.extend(self.with_role(Role::Output).map(|of| of.matrix));
        }
        Work { tokens, matrices }
    }

    fn layers_of(&self, role: Role) -> BTreeSet<u32> {
        self.with_role(role).map(|of| of.layer).collect()
    }

    fn with_role(&self, role: Role) -> impl Iterator<Item = &Found> {
        self.matrices.iter().filter(move |of| of.role == role)
    }

    /// Returns the times of all layers from those of the works.
    pub fn products(&self, works: &[Work; 4], seconds: &[f64]) -> Products {
        let scaled = |at: usize, roles: &[Role]| {
            let Work { tokens, matrices } = &works[at];
            // A single token is a matter of bytes, a batch of operations.
            let cost = |of: &Matrix| match tokens {
                1 => bytes_of_token(of),
                _ => weights_of_token(of),
            };
            let all = roles.iter().flat_map(|&role| self.with_role(role));
            let all: u64 = all.map(|of| cost(&of.matrix)).sum();
            let measured: u64 = matrices.iter().map(cost).sum();
            let seconds = seconds.get(at).copied().unwrap_or(0.0);
            match measured {
                0 => 0.0,
                _ => seconds / *tokens as f64 * all as f64 / measured as f64,
            }
        };
        Products {
            routed_token: scaled(0, &[Role::Routed]),
            other_token: scaled(1, &[Role::Layer, Role::Output]),
            routed_batch: scaled(2, &[Role::Routed]),
            other_batch: scaled(3, &[Role::Layer]),
        }
    }
}

fn found(tensor: &TensorInfo, layer: u32, role: Role, used: u64) -> Found {
    Found {
        layer,
        role,
        bytes: tensor.nbytes,
        matrix: Matrix {
            ty: tensor.ty.id,
            columns: tensor.ne[0],
            rows: match role {
                Role::Routed => tensor.ne[1],
                _ => tensor.ne[1..].iter().product(),
            },
            experts: match role {
                Role::Routed => tensor.ne[2].max(1),
                _ => 1,
            },
            used,
            own_inputs: false,
        },
    }
}

/// Returns the weights that a token is multiplied with.
fn weights_of_token(matrix: &Matrix) -> u64 {
    let experts = match matrix.used {
        0 => 1,
        used => used.min(matrix.experts),
    };
    matrix.columns * matrix.rows * experts
}

/// Returns the bytes of these weights.
fn bytes_of_token(matrix: &Matrix) -> u64 {
    let row = TypeInfo::from_id(matrix.ty).and_then(|ty| ty.row_bytes(matrix.columns));
    row.unwrap_or(0) * (weights_of_token(matrix) / matrix.columns.max(1))
}
