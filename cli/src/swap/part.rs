//! Tensors of files, identified by type and content.

use std::ffi::CStr;
use std::fmt;

use anyhow::{Context, Result};
use sidecar_core::gguf::{GgufFile, TensorInfo};
use sidecar_core::reload::{Hash, hash_source};
use sidecar_core::text;

/// A tensor for a new file: the file that has its data, and the hash of the data.
#[derive(Clone, Copy)]
pub struct Part<'a> {
    pub file: &'a GgufFile,
    pub info: &'a TensorInfo,
    pub hash: Hash,
}

impl Part<'_> {
    /// Returns the name of the tensor.
    pub fn name(&self) -> &CStr {
        self.file.header.name(self.info)
    }

    /// Returns type and content of the tensor.
    pub fn version(&self) -> Version {
        Version::new(self.info, self.hash)
    }
}

/// Type and content of a tensor, which identify a version of the tensor.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Version {
    pub ty: u32,
    pub hash: Hash,
}

impl Version {
    /// Returns the version of a tensor with this hash.
    pub fn new(info: &TensorInfo, hash: Hash) -> Version {
        let ty = info.ty.id;
        Version { ty, hash }
    }

    /// Parses a version as `to_string` writes it.
    pub fn parse(text: &[u8]) -> Option<Version> {
        let (ty, hash) = std::str::from_utf8(text).ok()?.split_once(' ')?;
        Some(Version {
            ty: ty.parse().ok()?,
            hash: hash_from(hash.as_bytes())?,
        })
    }
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {:032x}", self.ty, self.hash)
    }
}

/// Parses a hash in hexadecimal digits.
pub fn hash_from(text: &[u8]) -> Option<Hash> {
    let text = std::str::from_utf8(text).ok()?;
    Hash::from_str_radix(text, 16).ok()
}

/// Hashes the data of a tensor.
pub fn hash_of(file: &GgufFile, info: &TensorInfo) -> Result<Hash> {
    let hash = hash_source(&file.source, info.offset, info.nbytes);
    hash.with_context(|| format!("cannot read {}", text::path(file.source.path())))
}
