//! Models in several files (shards).
//!
//! llama.cpp's `gguf-split` writes `split.no`, `split.count` and
//! `split.tensors.count` into every file and names them
//! `NAME-00001-of-00003.gguf`.

use std::collections::HashMap;
use std::ffi::CStr;
use std::path::{Path, PathBuf};

use super::file::{Access, GgufFile, OpenError};
use crate::text;

const COUNT_KEY: &str = "split.count";
const NUMBER_KEY: &str = "split.no";
const TENSORS_KEY: &str = "split.tensors.count";

/// Returns the file name of shard `number` (from 0) of `count`.
pub fn shard_name(prefix: &str, number: u64, count: u64) -> String {
    format!("{prefix}-{:05}-of-{count:05}.gguf", number + 1)
}

/// Returns the paths of a new model of so many files.
///
/// `path` is that of one file. Of several, it is the first one, or what their names begin with,
/// with or without `.gguf`.
pub fn new_paths(path: &Path, count: u64) -> Result<Vec<PathBuf>, OpenError> {
    if count <= 1 {
        return Ok(vec![path.to_owned()]);
    }
    let refused = |reason| OpenError::Shard {
        path: path.to_owned(),
        reason,
    };
    let name = path.file_name().and_then(|name| name.to_str());
    let name = name.ok_or_else(|| refused("the name of a file in UTF-8 is expected".into()))?;
    let prefix = match parse_name(name) {
        Some((prefix, 0, of)) if of == count => prefix,
        Some(_) => {
            return Err(refused(format!(
                "the model has {count} shards: name the first one, which ends in '{}', or their name without the numbers",
                shard_name("", 0, count)
            )));
        }
        None => name.strip_suffix(".gguf").unwrap_or(name),
    };
    let shard = |number| path.with_file_name(shard_name(prefix, number, count));
    Ok((0..count).map(shard).collect())
}

/// Reads the name of a shard: what it begins with, its number (from 0), and the count.
fn parse_name(name: &str) -> Option<(&str, u64, u64)> {
    let (rest, count) = name.strip_suffix(".gguf")?.rsplit_once("-of-")?;
    let (prefix, number) = rest.rsplit_once('-')?;
    let (number, count) = (number.parse::<u64>().ok()?, count.parse().ok()?);
    Some((prefix, number.checked_sub(1)?, count))
}

/// Whether a tensor is in one of the files of a model.
pub fn has_tensor<'a>(files: impl IntoIterator<Item = &'a GgufFile>, name: &CStr) -> bool {
    let mut files = files.into_iter();
    files.any(|file| file.header.find(name).is_some())
}

/// Opens all files of a model. `path` is the file or any of its shards.
///
/// Files are returned in the order of their numbers. Each tensor name is in one file only. All
/// files have the same count of tensors. That of files is the one of `path`: llama.cpp reads no other.
pub fn open_model(path: &Path, access: Access) -> Result<Vec<GgufFile>, OpenError> {
    let named = GgufFile::open(path, access)?;
    let count = integer(&named, COUNT_KEY)?.unwrap_or(0);
    if count <= 1 {
        return Ok(vec![named]);
    }
    let named_number = integer(&named, NUMBER_KEY)?.unwrap_or(0);
    let prefix = shard_prefix(path, named_number, count).ok_or_else(|| OpenError::Shard {
        path: path.to_owned(),
        reason: format!(
            "this is shard {} of {count}, so its name must end in '{}'",
            named_number.saturating_add(1),
            shard_name("", named_number, count)
        ),
    })?;
    let total = integer(&named, TENSORS_KEY)?;

    let mut named = Some(named);
    let mut files = Vec::new();
    for number in 0..count {
        let file = match named.take_if(|_| number == named_number) {
            Some(file) => file,
            None => {
                let shard = path.with_file_name(shard_name(&prefix, number, count));
                GgufFile::open(&shard, access)?
            }
        };
        check_member(&file, NUMBER_KEY, Some(number))?;
        check_member(&file, TENSORS_KEY, total)?;
        files.push(file);
    }
    check_tensors(&files, total)?;
    Ok(files)
}

impl GgufFile {
    /// Returns whether the file is a shard other than the first one of its model.
    pub fn is_further_shard(&self) -> bool {
        integer(self, NUMBER_KEY).is_ok_and(|number| number.is_some_and(|number| number > 0))
    }
}

fn shard_prefix(path: &Path, number: u64, count: u64) -> Option<String> {
    let name = path.file_name()?.to_str()?;
    let suffix = shard_name("", number, count);
    name.strip_suffix(&suffix).map(str::to_owned)
}

/// Returns the value of an integer key, or `None` when the key is absent.
fn integer(file: &GgufFile, key: &str) -> Result<Option<u64>, OpenError> {
    let Some(found) = file.header.key(key.as_bytes()) else {
        return Ok(None);
    };
    match found.as_u64() {
        Some(value) if value <= u64::from(u32::MAX) => Ok(Some(value)),
        _ => Err(OpenError::Shard {
            path: file.source.path().to_owned(),
            reason: format!(
                "key '{key}' has type {}, expected a small non-negative integer",
                found.ty
            ),
        }),
    }
}

fn check_member(file: &GgufFile, key: &str, expected: Option<u64>) -> Result<(), OpenError> {
    let found = integer(file, key)?;
    if found == expected {
        return Ok(());
    }
    let show = |value: Option<u64>| value.map_or("none".into(), |n| n.to_string());
    Err(OpenError::Shard {
        path: file.source.path().to_owned(),
        reason: format!(
            "this shard does not belong to the model: '{key}' is {}, expected {}; restore the file that was written with the others",
            show(found),
            show(expected)
        ),
    })
}

fn check_tensors(files: &[GgufFile], total: Option<u64>) -> Result<(), OpenError> {
    let mut seen: HashMap<&std::ffi::CStr, &Path> = HashMap::new();
    for file in files {
        for tensor in &file.header.tensors {
            let name = file.header.name(tensor);
            if let Some(other) = seen.insert(name, file.source.path()) {
                return Err(OpenError::Shard {
                    path: file.source.path().to_owned(),
                    reason: format!(
                        "tensor '{}' is also in {}",
                        name.to_string_lossy(),
                        text::path(other)
                    ),
                });
            }
        }
    }
    let found = seen.len() as u64;
    if let Some(expected) = total.filter(|&expected| expected != found) {
        return Err(OpenError::Shard {
            path: files[0].source.path().to_owned(),
            reason: format!(
                "'{TENSORS_KEY}' states {expected} tensors, but all shards together have {found}: restore the files that were written together"
            ),
        });
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn new_shards_are_named_by_the_first_one_or_without_numbers() {
        let paths = |path: &str, count| new_paths(Path::new(path), count);
        let both = ["a/m-00001-of-00002.gguf", "a/m-00002-of-00002.gguf"].map(PathBuf::from);
        for path in ["a/m-00001-of-00002.gguf", "a/m.gguf", "a/m"] {
            assert_eq!(paths(path, 2).expect("paths"), both, "{path}");
        }
        let one = "a/m-00003-of-00002.gguf";
        assert_eq!(paths(one, 1).expect("a path"), [PathBuf::from(one)]);
        for path in [
            "m-00002-of-00002.gguf",
            "m-00001-of-00003.gguf",
            "m-1-of-3.gguf",
        ] {
            let error = paths(path, 2).expect_err(path).to_string();
            assert!(error.contains("ends in '-00001-of-00002.gguf'"), "{error}");
        }
        assert!(paths("..", 2).is_err());
    }
}
