//! Candidates for the tensors: a type, or another file of the same model.

use std::collections::BTreeMap;
use std::path::PathBuf;

use anyhow::{Context, Result, ensure};
use ggml_quantize::rules;
use sidecar_core::gguf::TypeInfo;

use super::imatrix::Matrix;
use super::model::{Model, Tensor};

/// Where the tensors of a candidate come from.
pub enum Origin {
    /// They are quantised to this type, or to what fits instead.
    Type(&'static TypeInfo),
    /// They are in another model's files.
    Files(Model),
}

/// A candidate.
pub struct Candidate {
    /// The type, or the name of the file without its extension.
    pub name: String,
    pub origin: Origin,
}

/// What a tensor becomes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Outcome {
    pub ty: &'static TypeInfo,
    pub bytes: u64,
}

impl Candidate {
    /// Reads a type, or the path of a model.
    pub fn parse(text: &str) -> Result<Candidate> {
        if let Some(ty) = type_named(text) {
            return Ok(Candidate {
                name: ty.name().into(),
                origin: Origin::Type(ty),
            });
        }
        let path = PathBuf::from(text);
        ensure!(
            path.exists(),
            "'{text}' is neither a type of ggml, such as q4_K, nor a file; Q4_K_M and others that end with _S, _M or _L are mixes of types for whole models"
        );
        let name = path.file_stem().unwrap_or_default().to_string_lossy();
        Ok(Candidate {
            name: name.into_owned(),
            origin: Origin::Files(Model::open(&path)?),
        })
    }

    /// Returns a line for each type that tensors get because their rows do not fit the type of the
    /// candidate.
    pub fn fallbacks(&self, outcomes: &[Outcome]) -> Vec<String> {
        let Origin::Type(wanted) = self.origin else {
            return Vec::new();
        };
        let mut counts: BTreeMap<&str, usize> = BTreeMap::new();
        for outcome in outcomes
            .iter()
            .filter(|outcome| !std::ptr::eq(outcome.ty, wanted))
        {
            *counts.entry(outcome.ty.name()).or_default() += 1;
        }
        let line = |(ty, count): (&str, usize)| {
            format!(
                "{count} of {} tensors become {ty}, as with llama-quantize: their rows do not consist of blocks of {} elements, as {} needs",
                outcomes.len(),
                wanted.block,
                wanted.name()
            )
        };
        counts.into_iter().map(line).collect()
    }

    /// Returns what each tensor of a model becomes. `matrix` is the importance matrix.
    pub fn outcomes(
        &self,
        of: &Model,
        tensors: &[Tensor<'_>],
        matrix: Option<&Matrix>,
    ) -> Result<Vec<Outcome>> {
        match &self.origin {
            Origin::Type(ty) => {
                let of = |tensor| outcome_of_type(ty, tensor, matrix);
                tensors.iter().map(of).collect()
            }
            Origin::Files(model) => {
                let found = model.same_tensors(of, tensors, false)?;
                let outcome = |found: &Tensor<'_>| Outcome {
                    ty: found.info.ty,
                    bytes: found.info.nbytes,
                };
                Ok(found.iter().map(outcome).collect())
            }
        }
    }
}

fn outcome_of_type(
    wanted: &'static TypeInfo,
    tensor: &Tensor<'_>,
    matrix: Option<&Matrix>,
) -> Result<Outcome> {
    let row = tensor.info.ne[0];
    let fitting = rules::fitting(wanted.name(), wanted.block as usize, usize::try_from(row)?);
    let ty = fitting.and_then(TypeInfo::from_name);
    let ty = ty.with_context(|| {
        format!(
            "'{}' has rows of {row} elements, which {} does not fit: leave it out, or use another type",
            tensor.name,
            wanted.name()
        )
    })?;
    let has_matrix = matrix.is_some_and(|matrix| matrix.entries.contains_key(tensor.name));
    ensure!(
        has_matrix || !rules::needs_matrix(tensor.name, ty.name()),
        "{} needs an importance matrix with data for '{}': pass one with --imatrix (llama-imatrix makes it), or use another type",
        ty.name(),
        tensor.name
    );
    let rows = tensor.info.ne[1..]
        .iter()
        .try_fold(1u64, |product, of| product.checked_mul(*of));
    let bytes = ty
        .row_bytes(row)
        .zip(rows)
        .and_then(|(row, rows)| row.checked_mul(rows));
    Ok(Outcome {
        ty,
        bytes: bytes.with_context(|| format!("'{}' is too large", tensor.name))?,
    })
}

/// Returns a type by its name, in any case.
fn type_named(text: &str) -> Option<&'static TypeInfo> {
    let mut all = sidecar_core::gguf::TYPES.iter();
    all.find(|ty| ty.name().eq_ignore_ascii_case(text))
}
