//! A model's tensors, in the order in which `llama-quantize` writes them.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::{CStr, CString};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail, ensure};
use ggml_quantize::{Shape, rules};
use regex::Regex;
use sidecar_core::experts::Routing;
use sidecar_core::gguf::{
    Access, GgufFile, TensorInfo, Value, companions, has_tensor, is_scale, open_model,
};
use sidecar_core::reload::{Hash, LoadedModel, hash_bytes, hash_source};
use sidecar_core::text;

use crate::output::progress;

/// An open model.
pub struct Model {
    pub path: PathBuf,
    pub files: Vec<GgufFile>,
    pub architecture: String,
}

/// A tensor of a model.
#[derive(Clone, Copy)]
pub struct Tensor<'a> {
    pub name: &'a str,
    pub file: &'a GgufFile,
    pub info: &'a TensorInfo,
}

impl Model {
    /// Opens a model: a file, or any shard.
    pub fn open(path: &Path) -> Result<Model> {
        // Links stay: caches of downloads have shards as links to files with other names.
        let path = std::path::absolute(path)
            .with_context(|| format!("cannot open {}: check the path", text::path(path)))?;
        let files = open_model(&path, Access::Read)?;
        let model = Model {
            architecture: text(&files[0], "general.architecture")?,
            path: files[0].source.path().to_owned(),
            files,
        };
        for file in &model.files {
            for info in &file.header.tensors {
                let name = file.header.name(info);
                ensure!(
                    name.to_str().is_ok(),
                    "{}: the name of the tensor {name:?} is not UTF-8",
                    text::path(&model.path)
                );
            }
        }
        Ok(model)
    }

    /// Returns all tensors.
    pub fn tensors(&self) -> Vec<Tensor<'_>> {
        let of = |file| Tensor::of_file(file);
        let mut all: Vec<_> = self.files.iter().flat_map(of).collect();
        all.sort_by_key(|tensor| (layer(tensor.name).map_or(-1, i64::from), tensor.name));
        all
    }

    /// Returns the tensors that `llama-quantize` quantises: all, or those whose whole names match.
    pub fn quantizable(&self, only: Option<&Regex>) -> Result<Vec<Tensor<'_>>> {
        let path = text::path(&self.path);
        let pattern = only.map_or(".*", Regex::as_str);
        let whole = only.map(|only| Regex::new(&format!("^(?:{only})$")));
        let whole = whole.transpose()?;
        let mut tensors = self.tensors();
        tensors.retain(|tensor| whole.as_ref().is_none_or(|of| of.is_match(tensor.name)));
        let Some(first) = tensors.first().copied() else {
            bail!(
                "{path}: no tensor's whole name matches '{pattern}': run 'llama-sidecar inspect' to list them"
            );
        };
        tensors.retain(|tensor| self.is_quantizable(tensor));
        ensure!(
            !tensors.is_empty(),
            "{path}: llama-quantize quantises no tensor that matches '{pattern}': '{}' {}",
            first.name,
            self.why_kept(&first).unwrap_or_default()
        );
        Ok(tensors)
    }

    /// Returns the tensors that an evaluation of a text reads: not those of layers that predict further tokens (MTP).
    pub fn computed<'a>(&self, mut tensors: Vec<Tensor<'a>>) -> Result<Vec<Tensor<'a>>> {
        let predicting = Routing::of(&self.files).predicting;
        let all = tensors.len();
        tensors.retain(|tensor| layer(tensor.name).is_none_or(|of| !predicting.contains(&of)));
        let note = format!(
            "layers from {} on predict further tokens (MTP), which no evaluation of a text computes",
            predicting.start
        );
        ensure!(
            !tensors.is_empty(),
            "{}: {note}: name other tensors",
            text::path(&self.path)
        );
        if tensors.len() < all {
            progress(&format!(
                "{note}: {} tensors stay as they are",
                all - tensors.len()
            ));
        }
        Ok(tensors)
    }

    /// Whether the model has a tensor.
    pub fn has(&self, name: &CStr) -> bool {
        has_tensor(&self.files, name)
    }

    fn by_name(&self) -> BTreeMap<&str, Tensor<'_>> {
        self.tensors().into_iter().map(|of| (of.name, of)).collect()
    }

    /// Returns the tensors that have the names of tensors of another version of the model. Their
    /// companions must be the same: a list of types has one for both. With `may_lack_scales`, this model
    /// may be one without the scales of the other, as an NVFP4 model is made from.
    pub fn same_tensors(
        &self,
        model: &Model,
        tensors: &[Tensor<'_>],
        may_lack_scales: bool,
    ) -> Result<Vec<Tensor<'_>>> {
        let loaded = LoadedModel::of(model.files.iter());
        let (own, theirs) = (self.by_name(), model.by_name());
        let find = |tensor: &Tensor<'_>| {
            let name = tensor.file.header.name(tensor.info);
            let (path, ne) = (&self.path, &tensor.info.ne);
            let misfit = match may_lack_scales {
                true => loaded.misfit_alone(&self.files, path, name, ne),
                false => loaded.misfit(&self.files, path, name, ne),
            };
            if let Some(misfit) = misfit {
                bail!(misfit);
            }
            let has = |name: &CStr| self.has(name) || model.has(name);
            for companion in companions(name, has) {
                let companion = companion.to_string_lossy();
                if may_lack_scales && is_scale(&companion) && !own.contains_key(&*companion) {
                    continue;
                }
                let hash = |of: Option<&Tensor<'_>>| of.map(Tensor::hash).transpose();
                ensure!(
                    hash(own.get(&*companion))? == hash(theirs.get(&*companion))?,
                    "{}: '{companion}', which is used with '{}', has other values in {}: pass a version of the model with the same values there",
                    text::path(&self.path),
                    tensor.name,
                    text::path(&model.path)
                );
            }
            own.get(tensor.name)
                .copied()
                .context("a tensor that fits is there")
        };
        tensors.iter().map(find).collect()
    }

    /// Returns the scales and biases that belong to these tensors.
    pub fn companions(&self, tensors: &[Tensor<'_>]) -> Vec<Tensor<'_>> {
        let names = tensors.iter().map(|of| of.file.header.name(of.info));
        let names = names.flat_map(|name| companions(name, |name| self.has(name)));
        let names: BTreeSet<CString> = names.collect();
        let mut all = self.tensors();
        all.retain(|of| names.contains(of.file.header.name(of.info)));
        all
    }

    /// Returns whether `llama-quantize` quantises a tensor.
    pub fn is_quantizable(&self, tensor: &Tensor<'_>) -> bool {
        self.why_kept(tensor).is_none()
    }

    /// Returns why `llama-quantize` leaves a tensor as it is, if it does.
    fn why_kept(&self, tensor: &Tensor<'_>) -> Option<&'static str> {
        let dimensions = tensor.info.ne.iter().rposition(|extent| *extent > 1);
        match dimensions.map_or(1, |last| last + 1) {
            1 => Some("has one dimension"),
            more if rules::allows(&self.architecture, tensor.name, more) => None,
            _ => Some("is left as it is, by its name"),
        }
    }

    /// Returns whether tensors with blocks are in the model.
    pub fn is_quantized(&self) -> bool {
        let mut tensors = self.files.iter().flat_map(|file| &file.header.tensors);
        tensors.any(|info| info.ty.block > 1)
    }

    /// Returns the number of elements.
    pub fn elements(&self) -> u64 {
        let tensors = self.files.iter().flat_map(|file| &file.header.tensors);
        tensors.map(elements).sum()
    }

    /// Reads all files and returns a hash of their content.
    pub fn hash(&self) -> Result<Hash> {
        let mut all = Vec::new();
        for file in &self.files {
            let source = &file.source;
            let hash = hash_source(source, 0, source.id().size);
            let hash =
                hash.with_context(|| format!("cannot read {}", text::path(source.path())))?;
            all.extend(hash.to_le_bytes());
        }
        Ok(hash_bytes(&all))
    }
}

impl<'a> Tensor<'a> {
    /// Returns the tensors of a file.
    pub fn of_file(file: &'a GgufFile) -> impl Iterator<Item = Tensor<'a>> {
        let with_name = move |info| {
            let name = file.header.name(info).to_str().ok()?;
            Some(Tensor { name, file, info })
        };
        file.header.tensors.iter().filter_map(with_name)
    }

    /// Returns a hash of its type and bytes.
    fn hash(&self) -> Result<(u32, Hash)> {
        let source = &self.file.source;
        let hash = hash_source(source, self.info.offset, self.info.nbytes);
        let hash = hash.with_context(|| format!("cannot read {}", text::path(source.path())))?;
        Ok((self.info.ty.id, hash))
    }

    /// Returns the extents of the tensor; `None` if they exceed the address space.
    pub fn shape(&self) -> Option<Shape> {
        let [row, rows, matrices, more] = self.info.ne;
        Some(Shape {
            row: usize::try_from(row).ok()?,
            rows: usize::try_from(rows).ok()?,
            matrices: usize::try_from(matrices.checked_mul(more)?).ok()?,
        })
    }
}

/// Returns a tensor of a model, by name and shape.
pub fn find<'a>(
    files: &'a [GgufFile],
    name: &CStr,
    ne: &[u64; 4],
) -> Option<(&'a GgufFile, &'a TensorInfo)> {
    let mut found = files.iter().filter_map(|file| {
        let at = file.header.find(name)?;
        Some((file, &file.header.tensors[at]))
    });
    found.find(|(_, info)| info.ne == *ne)
}

/// Returns the number of elements of a tensor.
pub fn elements(info: &TensorInfo) -> u64 {
    info.ne.iter().product()
}

/// Returns the layer in a tensor's name: 7 in `blk.7.attn_q.weight`.
pub fn layer(name: &str) -> Option<u32> {
    let (number, _) = name.strip_prefix("blk.")?.split_once('.')?;
    number.parse().ok()
}

/// Returns a text of the metadata; empty if the key is missing.
fn text(file: &GgufFile, key: &str) -> Result<String> {
    let Some(found) = file.header.key(key.as_bytes()).filter(|key| !key.array) else {
        return Ok(String::new());
    };
    Ok(match file.value(found)? {
        Value::Text(text) => String::from_utf8_lossy(&text).into_owned(),
        other => other.to_string(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use testkit::writer::{F16, F32, Gguf};

    #[test]
    fn a_reference_has_the_scales_of_the_model_or_is_refused() {
        let folder = tempfile::tempdir().expect("a folder");
        let open = |name: &str, scale: Option<u64>| {
            let mut gguf = Gguf::default().tensor("blk.0.ffn_up.weight", &[64, 8], F16, 1);
            if let Some(seed) = scale {
                gguf = gguf.tensor("blk.0.ffn_up.scale", &[1], F32, seed);
            }
            let path = folder.path().join(name);
            gguf.write(&path).expect("a model");
            Model::open(&path).expect("a model")
        };
        let model = open("model.gguf", Some(1));
        let tensors = model.quantizable(None).expect("a weight");
        assert_eq!(model.companions(&tensors).len(), 1);
        let refused = |reference: Model, with: &str| {
            let same = reference.same_tensors(&model, &tensors, false);
            let error = same.err().expect("other scales").to_string();
            assert!(error.contains(with), "{error}");
        };
        let plain = open("plain.gguf", None);
        assert!(plain.same_tensors(&model, &tensors, true).is_ok());
        refused(plain, "has no such tensor");
        refused(open("other.gguf", Some(2)), "'blk.0.ffn_up.scale'");
        let same = open("same.gguf", Some(1));
        let found = same
            .same_tensors(&model, &tensors, false)
            .expect("the same scales");
        assert_eq!(found[0].name, "blk.0.ffn_up.weight");
    }

    #[test]
    fn the_reason_why_no_tensor_is_quantised_is_named() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("model.gguf");
        Gguf::default()
            .tensor("blk.0.ffn_down.weight", &[64, 8], F16, 1)
            .tensor("blk.0.ffn_gate_inp.weight", &[64, 8], F32, 2)
            .tensor("output_norm.weight", &[64], F32, 3)
            .write(&path)
            .expect("a model");
        let model = Model::open(&path).expect("a model");
        let found = |pattern: &str| {
            let only = Regex::new(pattern).expect("an expression");
            let tensors = model.quantizable(Some(&only));
            tensors.map(|tensors| tensors.len())
        };
        for (pattern, expected) in [
            ("ffn_down", "no tensor's whole name matches 'ffn_down'"),
            (
                "blk.*inp.weight",
                "'blk.0.ffn_gate_inp.weight' is left as it is, by its name",
            ),
            ("output_norm.*", "'output_norm.weight' has one dimension"),
        ] {
            let error = found(pattern).expect_err("no tensor").to_string();
            assert!(error.contains(expected), "{error}");
        }
        assert_eq!(found(".*").expect("a tensor"), 1);
    }
}
