//! A model with other types, as `llama-quantize` writes it.

use std::collections::BTreeMap;
use std::path::Path;

use anyhow::{Context, Result};
use sidecar_core::gguf::GgufFile;
use sidecar_core::gguf::{Access, HeaderWriter, Pieces, copy_value, open_model};
use sidecar_core::reload::check_tensor;

use super::mix::Mix;
use super::model::{Tensor, find};
use super::sweep::{Plan, Sweep};
use crate::output::{NewFile, Outputs, write_model};

/// The alignment that `llama-quantize` uses.
const ALIGNMENT: u32 = 32;
/// `GGML_QNT_VERSION`.
const QUANTIZATION_VERSION: u32 = 2;
/// Longest text of a key that `llama-quantize` adds.
const LONGEST: usize = 127;

/// Returns the header of a model with these types.
pub fn header(plan: &Plan<'_>, mix: &Mix<'_>) -> Result<Vec<u8>> {
    let first = &plan.model.files[0];
    let mut header = HeaderWriter::new(ALIGNMENT);
    const REPLACED: [&[u8]; 6] = [
        b"general.alignment",
        b"general.quantization_version",
        b"general.file_type",
        b"split.no",
        b"split.count",
        b"split.tensors.count",
    ];
    let imatrix = plan.quantizer.matrix;
    let pruned = mix.cut.map(|cut| &plan.cuts[cut].pruned);
    let count = pruned.map(|pruned| (pruned.count_key(), pruned.left));
    for key in &first.header.keys {
        let is_from_matrix = imatrix.is_some() && key.name.starts_with(b"quantize.imatrix.");
        if REPLACED.contains(&&*key.name) || is_from_matrix {
            continue;
        }
        if let Some((count, left)) = &count
            && *key.name == *count.as_bytes()
        {
            header.value(count, &u32::try_from(*left)?);
            continue;
        }
        copy_value(&mut header, first, key)?;
    }
    header.value("general.quantization_version", &QUANTIZATION_VERSION);
    header.value("general.file_type", &mix.file_type().0);
    if let Some(matrix) = imatrix {
        header.value(
            "quantize.imatrix.file",
            shortened(&matrix.path.to_string_lossy()),
        );
        if let Some(dataset) = &matrix.dataset {
            header.value("quantize.imatrix.dataset", shortened(dataset));
        }
        header.value(
            "quantize.imatrix.entries_count",
            &(matrix.entries.len() as u32),
        );
        if matrix.chunks > 0 {
            header.value("quantize.imatrix.chunks_count", &(matrix.chunks as u32));
        }
    }
    for part in &mix.parts {
        let Tensor { name, file, info } = part.tensor;
        let extents = match pruned {
            Some(pruned) => pruned.part(file, info)?.ne,
            None => info.ne[..info.n_dims as usize].to_vec(),
        };
        header.tensor(name.as_bytes(), &extents, part.ty.id, part.bytes)?;
    }
    Ok(header.finish())
}

fn shortened(text: &str) -> &str {
    let mut end = text.len().min(LONGEST);
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    &text[..end]
}

/// Writes a model. Its path has the old content, or all of the new, which is checked first.
pub fn write(
    plan: &Plan<'_>,
    mix: &Mix<'_>,
    sweep: &mut Sweep<'_>,
    path: &Path,
    outputs: Outputs,
    check: impl FnOnce(&Path) -> Result<()>,
) -> Result<()> {
    let mut sources: BTreeMap<usize, Vec<GgufFile>> = BTreeMap::new();
    for candidate in mix.parts.iter().filter_map(|part| part.candidate) {
        if let std::collections::btree_map::Entry::Vacant(entry) = sources.entry(candidate) {
            entry.insert(open_model(&sweep.file(candidate)?, Access::Read)?);
        }
    }
    let tensors = mix.parts.iter().map(|part| {
        let (from, info) = match part.candidate {
            None => (part.tensor.file, part.tensor.info),
            Some(candidate) => {
                let Tensor { name, file, info } = part.tensor;
                find(&sources[&candidate], file.header.name(info), &info.ne)
                    .with_context(|| format!("'{name}' is missing in the work folder"))?
            }
        };
        // What stays is compared with nothing.
        let model = part.candidate.map(|_| (part.tensor.file, part.tensor.info));
        check_tensor(from, info, model)?;
        let pieces = match mix.cut {
            Some(cut) => plan.cuts[cut].pruned.part(from, info)?.pieces,
            None => std::iter::once(info.offset..info.offset + info.nbytes).collect(),
        };
        Ok(Pieces::of(from, pieces))
    });
    let tensors = tensors.collect::<Result<_>>()?;
    let file = vec![NewFile {
        path: path.to_owned(),
        header: header(plan, mix)?,
        alignment: ALIGNMENT.into(),
        tensors,
    }];
    write_model(file, outputs, check)?;
    Ok(())
}
