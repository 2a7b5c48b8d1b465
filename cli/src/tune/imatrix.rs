//! Importance matrices, in GGUF and in the older binary format, scaled as `llama-quantize` scales
//! them.

use std::collections::BTreeMap;
use std::io::Read;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail, ensure};
use sidecar_core::files;
use sidecar_core::gguf::{Access, GgufFile, TensorInfo, Value};
use sidecar_core::reload::{Hash, hash_bytes};
use sidecar_core::text;

/// The most bytes of a tensor with values: those of a matrix with 1024 experts and rows of 65,536 elements.
const LARGEST: u64 = 1024 * 65_536 * 4;

/// The values of one file.
pub struct Matrix {
    pub path: PathBuf,
    /// Values of each tensor: one for each element of a row, for each expert.
    pub entries: BTreeMap<String, Vec<f32>>,
    /// The first text that the matrix was made of.
    pub dataset: Option<String>,
    pub chunks: u64,
}

impl Matrix {
    /// Reads a file.
    pub fn load(path: &Path) -> Result<Matrix> {
        let explain = || format!("cannot read the importance matrix {}", text::path(path));
        let mut start = [0; 4];
        // A device has no end.
        let mut file = files::open(path).with_context(explain)?;
        file.read_exact(&mut start).with_context(explain)?;
        let matrix = match &start {
            b"GGUF" => of_gguf(path),
            _ => of_bytes(path, &files::read(path).with_context(explain)?),
        };
        let matrix = matrix.with_context(explain)?;
        for (name, values) in &matrix.entries {
            ensure!(
                values.iter().all(|value| value.is_finite()),
                "{}: '{name}' has values that are infinite or not numbers: make the matrix again",
                text::path(path)
            );
        }
        Ok(matrix)
    }

    /// Returns the values for a tensor with this number of values in all.
    pub fn of(&self, name: &str, needed: usize) -> Result<Option<&[f32]>> {
        let found = self.entries.get(name).map(Vec::as_slice);
        match found {
            Some(values) if values.len() == needed => Ok(Some(values)),
            // llama-quantize also ignores it there.
            Some(_) if matches!(name, "token_embd.weight" | "per_layer_token_embd.weight") => {
                Ok(None)
            }
            Some(values) => bail!(
                "{} has {} values for '{name}', expected {needed}: use the importance matrix of this model",
                text::path(&self.path),
                values.len()
            ),
            None => Ok(None),
        }
    }

    /// Returns a note if tensors of a model have no values. Fails if none has any: the matrix is of another model.
    /// llama-imatrix makes none for embeddings, and for the output only on request.
    pub fn check<'a>(&self, names: impl Iterator<Item = &'a str>) -> Result<Option<String>> {
        let names: Vec<_> = names
            .filter(|name| !name.ends_with("token_embd.weight") && *name != "output.weight")
            .collect();
        let lacks = |name: &&&str| !self.entries.contains_key(**name);
        let lacking: Vec<_> = names.iter().filter(lacks).collect();
        let Some(first) = lacking.first() else {
            return Ok(None);
        };
        let path = text::path(&self.path);
        let count = format!("{} of {} tensors", lacking.len(), names.len());
        ensure!(
            lacking.len() < names.len(),
            "{path} has no values for {count}, the first is '{first}': use the importance matrix of this model"
        );
        Ok(Some(format!(
            "{path} has no values for {count}, the first is '{first}': these are quantised without it"
        )))
    }

    /// Returns a hash of all values.
    pub fn hash(&self) -> Hash {
        let mut all = Vec::new();
        for (name, values) in &self.entries {
            all.extend(name.as_bytes());
            all.push(0);
            all.extend(values.iter().flat_map(|value| value.to_le_bytes()));
        }
        hash_bytes(&all)
    }
}

fn of_gguf(path: &Path) -> Result<Matrix> {
    let file = GgufFile::open(path, Access::Read)?;
    let infos = file.header.tensors.iter();
    let by_name: BTreeMap<String, &TensorInfo> = infos
        .map(|info| (file.header.name(info).to_string_lossy().into_owned(), info))
        .collect();
    let mut entries = BTreeMap::new();
    for (name, info) in &by_name {
        let Some(tensor) = name.strip_suffix(".in_sum2") else {
            continue;
        };
        let counts = by_name.get(&format!("{tensor}.counts"));
        let counts = counts.with_context(|| format!("'{tensor}.counts' is missing"))?;
        let (mut sums, counts) = (floats(&file, info)?, floats(&file, counts)?);
        ensure!(
            !counts.is_empty() && sums.len().is_multiple_of(counts.len()),
            "'{tensor}' has {} sums for {} counts",
            sums.len(),
            counts.len()
        );
        let row = sums.len() / counts.len();
        for (values, count) in sums.chunks_mut(row.max(1)).zip(counts) {
            let count = count.round();
            let scale = |value: &mut f32| *value = if count > 0.0 { *value / count } else { 1.0 };
            values.iter_mut().for_each(scale);
        }
        entries.insert(tensor.to_owned(), sums);
    }
    ensure!(!entries.is_empty(), "it has no tensor '*.in_sum2'");
    let key = |name: &str| file.header.key(name.as_bytes());
    let datasets = key("imatrix.datasets").context("it has no key 'imatrix.datasets'")?;
    let first = file.elements(datasets, 0, 1)?.into_iter().next();
    let chunks = key("imatrix.chunk_count").context("it has no key 'imatrix.chunk_count'")?;
    key("imatrix.chunk_size").context("it has no key 'imatrix.chunk_size'")?;
    Ok(Matrix {
        path: path.to_owned(),
        entries,
        dataset: first.and_then(|first| match first {
            Value::Text(text) => Some(String::from_utf8_lossy(&text).into_owned()),
            _ => None,
        }),
        chunks: chunks.as_u64().unwrap_or(0),
    })
}

/// Reads a tensor of `f32`.
fn floats(file: &GgufFile, info: &TensorInfo) -> Result<Vec<f32>> {
    let name = file.header.name(info).to_string_lossy();
    ensure!(
        info.ty.name() == "f32",
        "'{name}' has type {}, expected f32",
        info.ty.name()
    );
    ensure!(
        info.nbytes <= LARGEST,
        "'{name}' has {} bytes, expected at most {LARGEST}",
        info.nbytes
    );
    let mut bytes = vec![0; usize::try_from(info.nbytes)?];
    file.source.read_at(&mut bytes, info.offset)?;
    Ok(bytes
        .as_chunks()
        .0
        .iter()
        .map(|four| f32::from_le_bytes(*four))
        .collect())
}

/// Reads the older format: a count, then for each tensor the length of its name, the name, calls,
/// the number of values, and the values; then the number of chunks and the name of the text.
fn of_bytes(path: &Path, bytes: &[u8]) -> Result<Matrix> {
    let mut rest = bytes;
    let count = number(&mut rest).filter(|count| *count > 0);
    let count = count.context("it is neither GGUF nor the older format")?;
    let mut entries = BTreeMap::new();
    for at in 0..count {
        let entry = entry(&mut rest);
        let (name, values) =
            entry.with_context(|| format!("entry {at} of {count} is incomplete"))?;
        entries.insert(name, values);
    }
    let chunks = number(&mut rest).unwrap_or(0);
    let dataset = number(&mut rest).and_then(|len| take(&mut rest, len));
    Ok(Matrix {
        path: path.to_owned(),
        entries,
        dataset: dataset.map(|text| String::from_utf8_lossy(text).into_owned()),
        chunks: chunks as u64,
    })
}

fn entry(rest: &mut &[u8]) -> Option<(String, Vec<f32>)> {
    let len = number(rest)?;
    let name = String::from_utf8_lossy(take(rest, len)?).into_owned();
    let calls = number(rest)? as f32;
    let values = number(rest)?.checked_mul(4)?;
    let values = take(rest, values)?.as_chunks().0.iter();
    let scale = |value: f32| if calls > 0.0 { value / calls } else { value };
    Some((
        name,
        values
            .map(|four| scale(f32::from_le_bytes(*four)))
            .collect(),
    ))
}

/// Takes a non-negative number of 32 bits.
fn number(rest: &mut &[u8]) -> Option<usize> {
    let (first, later) = rest.split_first_chunk::<4>()?;
    *rest = later;
    usize::try_from(i32::from_le_bytes(*first)).ok()
}

fn take<'a>(rest: &mut &'a [u8], len: usize) -> Option<&'a [u8]> {
    let (first, later) = rest.split_at_checked(len)?;
    *rest = later;
    Some(first)
}

#[cfg(test)]
mod tests {
    use testkit::seeds::older_imatrix as older;

    use super::*;

    #[test]
    fn the_older_format_is_divided_by_its_calls() {
        let found = of_bytes(Path::new("m"), &older(2)).expect("a matrix");
        assert_eq!(found.entries["abc"], [2.0, 3.0]);
        assert_eq!((found.chunks, found.dataset.as_deref()), (7, Some("xy")));
        assert_eq!(
            found.of("abc", 2).expect("it fits"),
            Some([2.0, 3.0].as_slice())
        );
        assert!(found.of("abc", 3).is_err());
        assert!(found.of("other", 3).expect("nothing").is_none());
    }

    #[test]
    fn counts_beyond_the_file_are_errors() {
        for values in [1000, i32::MAX, -1] {
            assert!(
                of_bytes(Path::new("m"), &older(values)).is_err(),
                "{values}"
            );
        }
        assert!(of_bytes(Path::new("m"), &[]).is_err());
    }
}
