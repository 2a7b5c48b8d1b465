//! The pruned model.

use std::collections::{BTreeMap, BTreeSet};
use std::io::{BufWriter, Write};
use std::ops::Range;
use std::path::Path;

use anyhow::{Context, Result, bail, ensure};
use sidecar_core::experts::ExpertIndex;
use sidecar_core::files;
use sidecar_core::gguf::{
    GgufFile, HeaderWriter, Pieces, TensorInfo, Value, copy_value, write_data,
};
use sidecar_core::protocol::LayerMask;

use crate::output::progress;
use crate::space::Need;

/// What names of tensors end with that have a part for each expert, after `blk.N.`.
const ROUTERS: [&str; 3] = [
    "ffn_gate_inp.weight",
    "ffn_gate_inp.bias",
    "exp_probs_b.bias",
];
/// What the names of matrices of experts contain, and their biases and scales.
const EXPERTS: &str = "_exps.";
/// What the names of other tensors of layers with experts contain.
const SHARED: [&str; 4] = ["_shexp", "_chexp", "ffn_gate_inp_s", "ffn_norm_exps"];
/// Keys that describe shards, and one that the writer adds.
const LEFT_OUT: [&[u8]; 4] = [
    b"general.alignment",
    b"split.no",
    b"split.count",
    b"split.tensors.count",
];

/// A tensor of the new model.
struct Part<'a> {
    file: &'a GgufFile,
    info: &'a TensorInfo,
    ne: Vec<u64>,
    pieces: Vec<Range<u64>>,
}

impl Part<'_> {
    fn nbytes(&self) -> u64 {
        self.pieces
            .iter()
            .map(|piece| piece.end - piece.start)
            .sum()
    }
}

/// The experts of a model, as its file states them.
pub struct Mixture {
    architecture: String,
    /// Layers with experts.
    pub layers: BTreeSet<u32>,
    /// Experts of a layer.
    pub experts: u64,
    /// Experts that a token uses.
    pub used: u64,
    /// Groups of experts; one where there are none.
    pub groups: u64,
}

impl Mixture {
    /// Reads the header of a model.
    pub fn of(files: &[GgufFile]) -> Result<Mixture> {
        let first = files.first().context("a model has a file")?;
        let key = first.header.key(b"general.architecture");
        let architecture = match key.map(|key| first.value(key)) {
            Some(Ok(Value::Text(text))) => String::from_utf8(text)?,
            _ => bail!("the model has no general.architecture"),
        };
        let number = |name: &str| {
            let key = first
                .header
                .key(format!("{architecture}.{name}").as_bytes());
            key.and_then(|key| key.as_u64())
        };
        let experts = number("expert_count").filter(|count| *count > 0);
        let experts = experts.with_context(|| {
            format!("the model has no {architecture}.expert_count: it is no mixture of experts, or an older file")
        })?;
        let used = number("expert_used_count").context("the model has no expert_used_count")?;
        let groups = number("expert_group_count").unwrap_or(1).max(1);
        ensure!(
            experts % groups == 0,
            "{experts} experts are not in {groups} equal groups"
        );
        let index = ExpertIndex::of(files);
        Ok(Mixture {
            architecture,
            layers: index.layers().map(|(layer, _)| layer).collect(),
            experts,
            used,
            groups,
        })
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
    /// A model without these experts.
    pub fn of(
        files: &'a [GgufFile],
        mixture: &'a Mixture,
        masks: &[LayerMask],
    ) -> Result<Pruned<'a>> {
        let &Mixture {
            experts,
            used,
            groups,
            ref layers,
            ..
        } = mixture;
        let mut removed: BTreeMap<u32, BTreeSet<u64>> = BTreeMap::new();
        for mask in masks {
            let of_layer = removed.entry(mask.layer).or_default();
            of_layer.extend(mask.experts.iter().map(|expert| u64::from(*expert)));
        }
        if let Some(layer) = removed.keys().find(|layer| !layers.contains(layer)) {
            bail!("layer {layer} has no experts");
        }
        let mut kept = BTreeMap::new();
        let mut left = None;
        for &layer in layers {
            let gone = removed.remove(&layer).unwrap_or_default();
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
            ensure!(
                count >= used,
                "layer {layer} keeps {count} experts, and a token uses {used}"
            );
            kept.insert(layer, of_layer);
        }
        Ok(Pruned {
            files,
            mixture,
            kept,
            left: left.context("the model has no layer with experts")?,
        })
    }

    /// Returns the tensors of the new model.
    fn parts(&self) -> Result<Vec<Part<'a>>> {
        let tensors = self.files.iter().flat_map(|file| {
            let infos = file.header.tensors.iter();
            infos.map(move |info| (file, info))
        });
        tensors.map(|(file, info)| self.part(file, info)).collect()
    }

    fn part(&self, file: &'a GgufFile, info: &'a TensorInfo) -> Result<Part<'a>> {
        let all = info.offset..info.offset + info.nbytes;
        let mut ne = info.ne[..info.n_dims as usize].to_vec();
        let whole = Part {
            file,
            info,
            ne: ne.clone(),
            pieces: std::iter::once(all.clone()).collect(),
        };
        let name = file.header.name(info).to_string_lossy();
        let in_layer = name
            .strip_prefix("blk.")
            .and_then(|rest| rest.split_once('.'));
        let Some((kept, role)) =
            in_layer.and_then(|(layer, role)| Some((self.kept.get(&layer.parse().ok()?)?, role)))
        else {
            return Ok(whole);
        };
        if SHARED.iter().any(|shared| role.contains(shared)) {
            return Ok(whole);
        }
        if !ROUTERS.contains(&role) && !role.contains(EXPERTS) {
            ensure!(
                !role.contains("exp") && !role.contains("gate_inp"),
                "'{name}' is not known: it may have a part for each expert"
            );
            return Ok(whole);
        }
        let last = ne.last_mut().context("a tensor has an extent")?;
        ensure!(
            *last == self.mixture.experts && info.nbytes.is_multiple_of(self.mixture.experts),
            "'{name}' has {last} parts for {} experts",
            self.mixture.experts
        );
        *last = self.left;
        let each = info.nbytes / self.mixture.experts;
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

    fn header(&self, parts: &[Part<'_>]) -> Result<Vec<u8>> {
        let first = &self.files[0];
        let count = format!("{}.expert_count", self.mixture.architecture);
        let mut header = HeaderWriter::new(u32::try_from(first.header.alignment)?);
        for key in &first.header.keys {
            if *key.name == *count.as_bytes() {
                header.value(&count, &u32::try_from(self.left)?);
            } else if !LEFT_OUT.contains(&&*key.name) {
                copy_value(&mut header, first, key)?;
            }
        }
        for part in parts {
            let name = part.file.header.name(part.info).to_bytes();
            header.tensor(name, &part.ne, part.info.ty.id, part.nbytes())?;
        }
        Ok(header.finish())
    }

    /// Returns the bytes of its tensors.
    pub fn size(&self) -> Result<u64> {
        Ok(self.parts()?.iter().map(Part::nbytes).sum())
    }

    /// Writes the model. Its path has the old content, or all of the new.
    pub fn write(&self, path: &Path) -> Result<()> {
        let explain = || format!("cannot write {}", path.display());
        let parts = self.parts()?;
        let header = self.header(&parts)?;
        let bytes = header.len() as u64 + parts.iter().map(Part::nbytes).sum::<u64>();
        for need in Need::of([(path, bytes)])? {
            need.check()?;
        }
        let file = files::beside(path).with_context(explain)?;
        let mut out = BufWriter::new(file.as_file());
        out.write_all(&header).with_context(explain)?;
        let alignment = self.files[0].header.alignment;
        for part in parts {
            let nbytes = part.nbytes();
            let data = Pieces::of(part.file, part.pieces);
            write_data(&mut out, data, nbytes, alignment).with_context(explain)?;
        }
        out.flush().with_context(explain)?;
        drop(out);
        if let Some(kept) = files::persist(file, path, |_| false).with_context(explain)? {
            progress(&format!(
                "{}: the earlier file is kept as {}",
                path.display(),
                kept.display()
            ));
        }
        Ok(())
    }
}

#[cfg(test)]
impl Mixture {
    /// One layer of so many experts in so many groups.
    pub fn for_tests(experts: u64, groups: u64) -> Mixture {
        Mixture {
            architecture: "test".into(),
            layers: BTreeSet::from([0]),
            experts,
            used: 1,
            groups,
        }
    }
}
