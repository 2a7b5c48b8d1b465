//! A model of which one tensor at a time has other bytes or another type.

use std::fmt;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use ggml_quantize::Ggml;
use sidecar_core::gguf::{Access, GgufFile, TensorInfo, TypeInfo, padding, retype, type_fields};

/// What is changed of a tensor.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Change {
    /// Other bytes of the same type.
    Bytes,
    /// About the same values, in the type of this name.
    Type(&'static str),
}

/// A model in memory.
pub struct Model {
    pub path: PathBuf,
    gguf: GgufFile,
    bytes: Vec<u8>,
    /// Where the header has the type of each tensor.
    fields: Vec<usize>,
    /// The types that tensors are given.
    types: &'static [&'static str],
}

impl fmt::Display for Change {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Change::Bytes => "other bytes",
            Change::Type(name) => name,
        })
    }
}

impl Model {
    /// Reads a model whose tensors are given these types.
    pub fn open(path: &Path, types: &'static [&'static str]) -> Result<Model> {
        let gguf = GgufFile::open(path, Access::Read)?;
        let bytes = std::fs::read(path)?;
        let header = &bytes[..gguf.header.data_offset as usize];
        let fields = type_fields(&gguf.header, header).context("a header that can be changed")?;
        Ok(Model {
            path: path.to_owned(),
            gguf,
            fields,
            bytes,
            types,
        })
    }

    /// Whether evaluations route to experts. llama.cpp loads those of refact and evaluates none.
    pub fn has_experts(&self) -> bool {
        let is_refact = self.path.file_stem() == Some("refact-moe".as_ref());
        let mut names = (0..self.tensors()).map(|tensor| self.tensor(tensor));
        !is_refact && names.any(|name| name.contains("ffn_down_exps."))
    }

    /// Returns the number of its tensors.
    pub fn tensors(&self) -> usize {
        self.gguf.header.tensors.len()
    }

    /// Returns the tensors of routed experts and of their routers.
    pub fn experts(&self) -> Vec<usize> {
        let is_of_experts = |tensor: &usize| {
            let name = self.tensor(*tensor);
            name.contains("exps.") || name.contains("ffn_gate_inp")
        };
        (0..self.tensors()).filter(is_of_experts).collect()
    }

    /// Returns the name of a tensor.
    pub fn tensor(&self, tensor: usize) -> String {
        let header = &self.gguf.header;
        let name = header.name(&header.tensors[tensor]);
        name.to_string_lossy().into_owned()
    }

    /// Returns the changes that are possible with a tensor: its rows have whole blocks.
    pub fn changes(&self, tensor: usize) -> Vec<Change> {
        let info = &self.gguf.header.tensors[tensor];
        let types = self
            .types
            .iter()
            .filter_map(|name| TypeInfo::from_name(name));
        let types = types.filter(|ty| ty.id != info.ty.id && ty.row_bytes(info.ne[0]).is_some());
        let types = types.map(|ty| Change::Type(ty.name()));
        std::iter::once(Change::Bytes).chain(types).collect()
    }

    /// Writes the model with a changed tensor.
    pub fn write(&self, ggml: &Ggml, tensor: usize, change: Change, path: &Path) -> Result<()> {
        let header = &self.gguf.header;
        let changed = &header.tensors[tensor];
        let (ty, data) = self.changed(ggml, changed, change)?;
        let mut bytes = self.bytes[..header.data_offset as usize].to_vec();
        let tensors = header.tensors.iter().enumerate();
        let tensors = tensors.map(|(at, info)| match at == tensor {
            true => (ty, data.len() as u64),
            false => (info.ty, info.nbytes),
        });
        retype(&mut bytes, &self.fields, header.alignment, tensors)?;
        for (at, info) in header.tensors.iter().enumerate() {
            match at == tensor {
                true => bytes.extend(&data),
                false => bytes.extend(self.data(info)),
            }
            let padding = padding(bytes.len() as u64, header.alignment);
            bytes.resize(bytes.len() + padding as usize, 0);
        }
        Ok(std::fs::write(path, bytes)?)
    }

    /// Returns the file with another name of the same length for a key or a tensor.
    pub fn with_name(&self, name: &str, other: &str) -> Result<Vec<u8>> {
        let mut bytes = self.bytes.clone();
        let text = [&(name.len() as u64).to_le_bytes(), name.as_bytes()].concat();
        let header = &bytes[..self.gguf.header.data_offset as usize];
        let at = header.windows(text.len()).position(|of| of == text);
        let at = at.with_context(|| format!("no name {name}"))? + 8;
        bytes[at..at + name.len()].copy_from_slice(other.as_bytes());
        Ok(bytes)
    }

    /// Returns these bytes of the file with another value of the key whose name ends so.
    pub fn with_value(&self, base: &[u8], end: &str) -> Result<Vec<u8>> {
        let mut bytes = base.to_vec();
        let mut keys = self.gguf.header.keys.iter();
        let key = keys.find(|key| key.name.ends_with(end.as_bytes()));
        let key = key.with_context(|| format!("no key {end}"))?;
        // The lowest bit of a letter or a truth value; of a float, one that counts.
        let at = match key.len {
            4 => key.offset + 2,
            _ => key.offset,
        };
        bytes[at as usize] ^= 1;
        Ok(bytes)
    }

    fn data(&self, info: &TensorInfo) -> &[u8] {
        &self.bytes[info.offset as usize..][..info.nbytes as usize]
    }

    /// Returns the new type and bytes of a tensor.
    fn changed(
        &self,
        ggml: &Ggml,
        info: &TensorInfo,
        change: Change,
    ) -> Result<(&'static TypeInfo, Vec<u8>)> {
        let ty = match change {
            Change::Bytes => info.ty,
            Change::Type(name) => TypeInfo::from_name(name).context("a type of ggml")?,
        };
        let [from, to] = [info.ty, ty].map(|ty| ggml.kind(ty.id, ty.name()));
        let elements = info.ne.iter().product::<u64>() as usize;
        let mut values = vec![0.0; elements];
        ggml.to_f32(&from?, self.data(info), &mut values)?;
        if change == Change::Bytes {
            // Signs stay: some tensors have to be negative.
            for (at, value) in values.iter_mut().enumerate() {
                *value *= [0.75, 0.5][at % 2];
            }
        }
        let to = to?;
        let row = info.ne[0] as usize;
        let mut data = vec![0; to.size(elements).context("whole blocks")?];
        ggml.quantize(&to, &values, row, None, &mut data)?;
        Ok((ty, data))
    }
}

/// Returns the name of a tensor without the number of its layer.
pub fn generic(name: &str) -> String {
    let parts = name.split('.');
    let parts = parts.map(|part| match part.parse::<u32>() {
        Ok(_) => "N",
        Err(_) => part,
    });
    parts.collect::<Vec<_>>().join(".")
}
