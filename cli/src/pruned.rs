//! A model without some of its experts.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail, ensure};
use sidecar_core::experts::{ExpertIndex, ExpertName, MAX_EXPERTS, Routing};
use sidecar_core::gguf::{GgufFile, HeaderWriter, Pieces, TensorInfo, copy_value};
use sidecar_core::protocol::LayerMask;
use sidecar_core::reload::check_tensor;

use crate::output::{NewFile, Outputs, check_space, write_model};

/// What names of tensors end with that have a part for each expert, after `blk.N.`.
const ROUTERS: [&str; 5] = [
    "ffn_gate_inp.weight",
    "ffn_gate_inp.bias",
    "exp_probs_b.bias",
    "exp_probs_b",
    "exp_probs_b_vl.bias",
];
/// What the names of matrices of experts contain, and their biases and scales.
const EXPERTS: &str = "_exps.";
/// What the names of other tensors of layers with experts contain: shared experts, scales and norms of inputs, and experts
/// of attention, which have a router of their own.
const SHARED: [&str; 4] = ["_shexp", "ffn_gate_inp_s", "ffn_norm_exps", "attn_v_exps"];
/// The key that the writer adds.
const ALIGNMENT: &[u8] = b"general.alignment";

/// Returns the layer and the rest of a name.
fn in_layer(name: &str) -> Option<(u32, &str)> {
    let (layer, role) = name.strip_prefix("blk.")?.split_once('.')?;
    Some((layer.parse().ok()?, role))
}

fn is_shared(role: &str) -> bool {
    SHARED.iter().any(|shared| role.contains(shared))
}

/// Returns the layer of a tensor with matrices, biases or scales of experts.
pub fn of_experts(name: &str) -> Option<u32> {
    let (layer, role) = in_layer(name)?;
    (role.contains(EXPERTS) && !is_shared(role)).then_some(layer)
}

/// A tensor of a new file.
pub struct Part<'a> {
    info: &'a TensorInfo,
    /// Its extents.
    pub ne: Vec<u64>,
    /// What it has of the file.
    pub pieces: Vec<Range<u64>>,
}

impl Part<'_> {
    /// Returns its bytes.
    pub fn nbytes(&self) -> u64 {
        self.pieces
            .iter()
            .map(|piece| piece.end - piece.start)
            .sum()
    }
}

/// The experts of a model, as its files state them.
pub struct Mixture {
    /// How they are chosen.
    pub routing: Routing,
    /// Layers with experts.
    pub layers: BTreeSet<u32>,
}

impl Mixture {
    /// Reads the headers of a model.
    pub fn of(files: &[GgufFile]) -> Result<Mixture> {
        let routing = Routing::of(files);
        let Routing {
            architecture,
            experts,
            groups,
            ..
        } = &routing;
        ensure!(
            *experts > 0,
            "the model has no {architecture}.expert_count: it is no mixture of experts, or an older file; 'tune' makes other models smaller"
        );
        ensure!(
            *experts <= u64::from(MAX_EXPERTS),
            "{architecture}.expert_count is {experts}, expected at most {MAX_EXPERTS}"
        );
        ensure!(
            experts % groups == 0 && (*groups == 1 || experts / groups > 1),
            "{experts} experts in {groups} groups: llama.cpp loads groups of as many experts, two or more in each"
        );
        let index = ExpertIndex::of(files);
        let layers: BTreeSet<u32> = index.layers().map(|(layer, _)| layer).collect();
        for layer in &layers {
            ensure!(
                routing.used_in(*layer) > 0,
                "the model has no {architecture}.expert_used_count for layer {layer}"
            );
            routing.check_layer(*layer).map_err(anyhow::Error::msg)?;
        }
        Ok(Mixture { layers, routing })
    }

    /// Returns the layers with experts that are computed for each token: not those that predict further tokens.
    pub fn computed(&self) -> impl Iterator<Item = u32> {
        let layers = self.layers.iter().copied();
        layers.filter(|layer| !self.routing.predicting.contains(layer))
    }

    /// Returns the masks of layers that are computed for each token.
    pub fn masks_of_computed(&self, masks: &[LayerMask]) -> Vec<LayerMask> {
        let computed = |mask: &&LayerMask| !self.routing.predicting.contains(&mask.layer);
        masks.iter().filter(computed).cloned().collect()
    }
}

/// A model without some of its experts.
pub struct Pruned<'a> {
    files: &'a [GgufFile],
    mixture: &'a Mixture,
    /// The experts that stay, by layer.
    kept: BTreeMap<u32, Vec<u64>>,
    /// How many these are in a layer.
    pub left: u64,
}

impl<'a> Pruned<'a> {
    /// A model without these experts. A layer that predicts further tokens and is not in the list leaves out the last experts
    /// of each group, as many as the other layers: which tokens it drafts changes no result.
    pub fn of(
        files: &'a [GgufFile],
        mixture: &'a Mixture,
        masks: &[LayerMask],
    ) -> Result<Pruned<'a>> {
        let Mixture { routing, layers } = mixture;
        let &Routing {
            experts, groups, ..
        } = routing;
        let mut removed: BTreeMap<u32, BTreeSet<u64>> = BTreeMap::new();
        for mask in masks {
            let of_layer = removed.entry(mask.layer).or_default();
            of_layer.extend(mask.experts.iter().map(|expert| u64::from(*expert)));
        }
        if let Some(layer) = removed.keys().find(|layer| !layers.contains(layer)) {
            bail!("layer {layer} has no experts: the list is of another model");
        }
        let mut kept = BTreeMap::new();
        let mut left = None;
        for &layer in layers {
            let stay = left.unwrap_or(experts) / groups;
            let gone = match removed.remove(&layer) {
                None if routing.predicting.contains(&layer) => (0..experts)
                    .filter(|expert| expert % (experts / groups) >= stay)
                    .collect(),
                listed => listed.unwrap_or_default(),
            };
            if let Some(expert) = gone.iter().find(|expert| **expert >= experts) {
                bail!("layer {layer} has no expert {expert}: it has {experts}");
            }
            let of_layer: Vec<u64> = (0..experts).filter(|at| !gone.contains(at)).collect();
            let count = of_layer.len() as u64;
            let before = *left.get_or_insert(count);
            ensure!(
                before == count,
                "layer {layer} keeps {count} experts, and the first layer {before}: llama.cpp has one number for all layers, so leave out the same number in each"
            );
            let each = experts / groups;
            let in_group = |group| of_layer.iter().filter(|at| **at / each == group).count() as u64;
            ensure!(
                (0..groups).all(|group| in_group(group) * groups == count),
                "layer {layer} keeps different numbers of experts in its {groups} groups: a group would have experts of another one"
            );
            let gone = gone.iter().map(|expert| *expert as u32);
            routing
                .check_without(layer, routing.used_in(layer), experts, gone)
                .map_err(anyhow::Error::msg)?;
            kept.insert(layer, of_layer);
        }
        let left = left.context("the model has no layer with experts")?;
        ensure!(left < experts, "the list leaves out no expert");
        ensure!(
            groups == 1 || left > groups,
            "{left} experts would stay in {groups} groups, and llama.cpp loads more experts than groups alone"
        );
        Ok(Pruned {
            files,
            mixture,
            kept,
            left,
        })
    }

    /// Returns what is left of so many elements of a tensor, or of its bytes in any type.
    pub fn left_of(&self, file: &GgufFile, info: &TensorInfo, whole: u64) -> Result<u64> {
        let part = self.part(file, info)?;
        let extents = &info.ne[..info.n_dims as usize];
        Ok(match (extents.last(), part.ne.last()) {
            (Some(before), Some(left)) if before != left => whole / before * left,
            _ => whole,
        })
    }

    /// Returns the key with the number of experts.
    pub fn count_key(&self) -> String {
        format!("{}.expert_count", self.mixture.routing.architecture)
    }

    /// Returns a tensor of this model, of a file that has it whole.
    pub fn part<'b>(&self, file: &GgufFile, info: &'b TensorInfo) -> Result<Part<'b>> {
        let all = info.offset..info.offset + info.nbytes;
        let mut ne = info.ne[..info.n_dims as usize].to_vec();
        let whole = Part {
            info,
            ne: ne.clone(),
            pieces: std::iter::once(all.clone()).collect(),
        };
        let name = file.header.name(info).to_string_lossy();
        let Some((kept, role)) =
            in_layer(&name).and_then(|(layer, role)| Some((self.kept.get(&layer)?, role)))
        else {
            return Ok(whole);
        };
        if is_shared(role) {
            return Ok(whole);
        }
        if !ROUTERS.contains(&role) && !role.contains(EXPERTS) {
            ensure!(
                ExpertName::parse(&name).is_none(),
                "'{name}' has one expert, as in older files: convert the model with a current llama.cpp first"
            );
            ensure!(
                !role.contains("exp") && !role.contains("gate_inp"),
                "'{name}' is not known: it may have a part for each expert"
            );
            return Ok(whole);
        }
        let last = ne.last_mut().context("a tensor has an extent")?;
        ensure!(
            *last == self.mixture.routing.experts
                && info.nbytes.is_multiple_of(self.mixture.routing.experts),
            "'{name}' has {last} parts for {} experts",
            self.mixture.routing.experts
        );
        *last = self.left;
        let each = info.nbytes / self.mixture.routing.experts;
        let pieces = kept.iter().map(|expert| {
            let start = all.start + expert * each;
            start..start + each
        });
        Ok(Part {
            ne,
            pieces: pieces.collect(),
            ..whole
        })
    }

    /// The header of a file of the new model. It has as many tensors as before, so that keys of shards stay.
    fn header(&self, file: &GgufFile, parts: &[Part<'_>]) -> Result<Vec<u8>> {
        let count = self.count_key();
        let mut header = HeaderWriter::new(u32::try_from(file.header.alignment)?);
        for key in &file.header.keys {
            if *key.name == *count.as_bytes() {
                header.value(&count, &u32::try_from(self.left)?);
            } else if *key.name != *ALIGNMENT {
                copy_value(&mut header, file, key)?;
            }
        }
        for part in parts {
            let name = file.header.name(part.info).to_bytes();
            header.tensor(name, &part.ne, part.info.ty.id, part.nbytes())?;
        }
        Ok(header.finish())
    }

    /// Writes the files of the model to as many paths, and returns their bytes.
    /// `check` is called with the first one before it gets its path.
    pub fn write(
        &self,
        paths: &[PathBuf],
        outputs: Outputs,
        check: impl FnOnce(&Path) -> Result<()>,
    ) -> Result<u64> {
        for file in self.files {
            for info in &file.header.tensors {
                check_tensor(file, info, None)?;
            }
        }
        write_model(self.new_files(paths)?, outputs, check)
    }

    /// Fails if the files of the model cannot be made, or do not fit on the disk.
    pub fn check(&self, paths: &[PathBuf]) -> Result<()> {
        check_space(&self.new_files(paths)?)
    }

    fn new_files(&self, paths: &[PathBuf]) -> Result<Vec<NewFile<'a>>> {
        let files = self.files.iter().zip(paths);
        files
            .map(|(file, path)| self.file(file, path.clone()))
            .collect()
    }

    fn file(&self, file: &'a GgufFile, path: PathBuf) -> Result<NewFile<'a>> {
        let infos = file.header.tensors.iter();
        let parts: Vec<_> = infos
            .map(|info| self.part(file, info))
            .collect::<Result<_>>()?;
        let header = self.header(file, &parts)?;
        let tensors = parts.into_iter().map(|part| Pieces::of(file, part.pieces));
        Ok(NewFile {
            path,
            header,
            alignment: file.header.alignment,
            tensors: tensors.collect(),
        })
    }
}

#[cfg(test)]
impl Mixture {
    /// One layer of so many experts in so many groups.
    pub fn for_tests(experts: u64, groups: u64) -> Mixture {
        Mixture {
            routing: Routing {
                architecture: "test".into(),
                experts,
                used: vec![1],
                groups,
                groups_used: groups,
                predicting: 0..0,
                by_token: Vec::new(),
            },
            layers: BTreeSet::from([0]),
        }
    }
}

#[cfg(test)]
mod tests {
    use sidecar_core::gguf::Access;
    use testkit::writer::{F32, Gguf, Kv};

    use super::*;

    #[test]
    fn a_layer_that_predicts_further_tokens_leaves_out_as_many_experts() {
        let mut mixture = Mixture::for_tests(8, 2);
        mixture.layers = BTreeSet::from([0, 1, 2]);
        mixture.routing.predicting = 2..3;
        let mask = |layer, experts: &[u32]| LayerMask {
            layer,
            experts: experts.to_vec(),
        };
        let kept = |masks: &[LayerMask]| {
            let pruned = Pruned::of(&[], &mixture, masks)?;
            anyhow::Ok(pruned.kept[&2].clone())
        };
        let both = [mask(0, &[0, 5]), mask(1, &[1, 4])];
        assert_eq!(kept(&both).expect("a model"), [0, 1, 2, 4, 5, 6]);
        let all = [&both[..], &[mask(2, &[1, 7])]].concat();
        assert_eq!(kept(&all).expect("a model"), [0, 2, 3, 4, 5, 6]);
        assert_eq!(mixture.masks_of_computed(&all), both);
        let error = kept(&both[..1]).expect_err("layer 1 is not in the list");
        assert!(error.to_string().contains("layer 1 keeps 8"), "{error}");
    }

    #[test]
    fn more_experts_than_a_layer_can_have_are_refused() {
        let file = tempfile::NamedTempFile::new().expect("a file");
        Gguf::default()
            .tensor("blk.0.ffn_down_exps.weight", &[4, 2, 8], F32, 1)
            .kv("llama.expert_count", Kv::U32(u32::MAX))
            .kv("llama.expert_used_count", Kv::U32(2))
            .write(file.path())
            .expect("free space");
        let files = [GgufFile::open(file.path(), Access::Read).expect("a model")];
        let error = Mixture::of(&files).err().expect("too many").to_string();
        assert!(error.contains("is 4294967295, expected at most"), "{error}");
    }

    #[test]
    fn tensors_have_parts_for_experts_or_none_or_are_refused() {
        let mixture = Mixture::for_tests(8, 1);
        let mask = LayerMask {
            layer: 0,
            experts: vec![0, 1, 2],
        };
        let last = |name: &str, ne: &[i64]| -> Result<u64> {
            let file = tempfile::NamedTempFile::new()?;
            let model = Gguf::default().tensor(name, ne, F32, 1);
            model.write(file.path())?;
            let files = [GgufFile::open(file.path(), Access::Read)?];
            let pruned = Pruned::of(&files, &mixture, std::slice::from_ref(&mask))?;
            let part = pruned.part(&files[0], &files[0].header.tensors[0])?;
            part.ne.last().copied().context("an extent")
        };
        for (name, ne) in [
            ("blk.0.ffn_gate_inp.weight", &[4, 8][..]),
            ("blk.0.exp_probs_b", &[8]),
            ("blk.0.exp_probs_b.bias", &[8]),
            ("blk.0.ffn_down_exps.weight", &[4, 4, 8]),
            ("blk.0.ffn_down_exps.scale", &[8]),
        ] {
            assert_eq!(last(name, ne).expect(name), 5, "{name}");
        }
        for name in [
            "blk.0.ffn_gate_inp_shexp.weight",
            "blk.0.attn_v_exps.weight",
            "blk.0.ffn_down.weight",
            "blk.1.ffn_down_exps.weight",
        ] {
            assert_eq!(last(name, &[4, 8]).expect(name), 8, "{name}");
        }
        for (name, reason) in [
            // As in GroveMoE: an expert for several of the others.
            ("blk.0.ffn_down_chexps.weight", "is not known"),
            ("blk.0.ffn_down.3.weight", "older files"),
            ("blk.0.ffn_down_exps.weight", "has 7 parts for 8 experts"),
        ] {
            let error = last(name, &[4, 7]).expect_err(name).to_string();
            assert!(error.contains(reason), "{error}");
        }
    }
}
