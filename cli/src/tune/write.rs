//! A model with other types, as `llama-quantize` writes it.

use std::collections::BTreeMap;
use std::io::{BufWriter, Write};
use std::path::Path;

use anyhow::{Context, Result};
use llama_sidecar::files;
use llama_sidecar::gguf::{Access, HeaderWriter, ValueType, open_model, write_data};
use llama_sidecar::gguf::{GgufFile, TensorInfo, TypeInfo};

use super::results::Mix;
use super::sweep::{Plan, Sweep};
use crate::space::Need;

/// The alignment that `llama-quantize` uses.
const ALIGNMENT: u32 = 32;
/// `GGML_QNT_VERSION`.
const QUANTIZATION_VERSION: u32 = 2;
/// Longest text of a key that `llama-quantize` adds.
const LONGEST: usize = 127;

/// File types: a type of most tensors, the number of the file type, and its name.
const FILE_TYPES: [(&str, u32, &str); 28] = [
    ("f32", 0, "F32"),
    ("f16", 1, "F16"),
    ("q4_0", 2, "Q4_0"),
    ("q4_1", 3, "Q4_1"),
    ("q8_0", 7, "Q8_0"),
    ("q5_0", 8, "Q5_0"),
    ("q5_1", 9, "Q5_1"),
    ("q2_K", 10, "Q2_K"),
    ("q3_K", 12, "Q3_K_M"),
    ("q4_K", 15, "Q4_K_M"),
    ("q5_K", 17, "Q5_K_M"),
    ("q6_K", 18, "Q6_K"),
    ("iq2_xxs", 19, "IQ2_XXS"),
    ("iq2_xs", 20, "IQ2_XS"),
    ("iq3_xxs", 23, "IQ3_XXS"),
    ("iq1_s", 24, "IQ1_S"),
    ("iq4_nl", 25, "IQ4_NL"),
    ("iq3_s", 26, "IQ3_S"),
    ("iq2_s", 29, "IQ2_M"),
    ("iq4_xs", 30, "IQ4_XS"),
    ("iq1_m", 31, "IQ1_M"),
    ("bf16", 32, "BF16"),
    ("tq1_0", 36, "TQ1_0"),
    ("tq2_0", 37, "TQ2_0"),
    ("mxfp4", 38, "MXFP4_MOE"),
    ("q1_0", 40, "Q1_0"),
    ("q2_0", 41, "Q2_0"),
    ("nvfp4", 39, "NVFP4"),
];

/// Returns number and name of the file type that has most of these bytes. A quantised one, if
/// there is one, because `llama-quantize` uses a list of types only with such.
pub fn file_type<'a>(parts: impl Iterator<Item = (&'a TypeInfo, u64)>) -> (u32, &'static str) {
    let mut sums: BTreeMap<&str, u64> = BTreeMap::new();
    for (ty, bytes) in parts {
        *sums.entry(ty.name()).or_default() += bytes;
    }
    let known = FILE_TYPES
        .iter()
        .filter_map(|of| Some((of, *sums.get(of.0)?)));
    let most = known.max_by_key(|(of, bytes)| (!matches!(of.0, "f32" | "f16" | "bf16"), *bytes));
    most.map_or((0, "F32"), |(of, _)| (of.1, of.2))
}

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
    for key in &first.header.keys {
        let is_of_matrix = imatrix.is_some() && key.name.starts_with(b"quantize.imatrix.");
        if REPLACED.contains(&&*key.name) || is_of_matrix {
            continue;
        }
        let mut bytes = Vec::new();
        if key.array {
            bytes.extend((key.ty as u32).to_le_bytes());
            bytes.extend(key.count.to_le_bytes());
        } else if key.ty == ValueType::String {
            bytes.extend(key.len.to_le_bytes());
        }
        let start = bytes.len();
        bytes.resize(start + usize::try_from(key.len)?, 0);
        first.source.read_at(&mut bytes[start..], key.offset)?;
        let ty = if key.array { ValueType::Array } else { key.ty };
        let name = std::str::from_utf8(&key.name).context("a key of the model is not UTF-8")?;
        header.raw(name, ty as u32, &bytes);
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
        let info = part.tensor.info;
        let extents = &info.ne[..info.n_dims as usize];
        header.tensor(part.tensor.name.as_bytes(), extents, part.ty.id, part.bytes)?;
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

/// Writes a model. Its path has the old content, or all of the new.
pub fn write(plan: &Plan<'_>, mix: &Mix<'_>, sweep: &mut Sweep<'_>, path: &Path) -> Result<()> {
    let explain = || format!("cannot write {}", path.display());
    for need in Need::of([(path, mix.bytes)])? {
        need.check()?;
    }
    let mut sources: BTreeMap<usize, Vec<GgufFile>> = BTreeMap::new();
    for candidate in mix.parts.iter().filter_map(|part| part.candidate) {
        if let std::collections::btree_map::Entry::Vacant(entry) = sources.entry(candidate) {
            entry.insert(open_model(&sweep.file(candidate)?, Access::Read)?);
        }
    }
    let file = files::beside(path).with_context(explain)?;
    let mut out = BufWriter::new(file.as_file());
    out.write_all(&header(plan, mix)?).with_context(explain)?;
    for part in &mix.parts {
        let (from, info) = match part.candidate {
            None => (part.tensor.file, part.tensor.info),
            Some(candidate) => find(&sources[&candidate], part.tensor.name)
                .with_context(|| format!("'{}' is missing in the work folder", part.tensor.name))?,
        };
        let data = Data {
            file: from,
            at: info.offset,
        };
        write_data(&mut out, data, info.nbytes, ALIGNMENT.into()).with_context(explain)?;
    }
    out.flush().with_context(explain)?;
    drop(out);
    files::persist(file, path, |_| false).with_context(explain)?;
    Ok(())
}

fn find<'a>(files: &'a [GgufFile], name: &str) -> Option<(&'a GgufFile, &'a TensorInfo)> {
    let name = std::ffi::CString::new(name).ok()?;
    files.iter().find_map(|file| {
        let at = file.header.find(&name)?;
        Some((file, &file.header.tensors[at]))
    })
}

/// Reads a file from a position on.
struct Data<'a> {
    file: &'a GgufFile,
    at: u64,
}

impl std::io::Read for Data<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> std::io::Result<usize> {
        let left = self.file.source.id().size.saturating_sub(self.at);
        let count = left.min(buffer.len() as u64) as usize;
        self.file.source.read_at(&mut buffer[..count], self.at)?;
        self.at += count as u64;
        Ok(count)
    }
}
