//! Quantised tensors, kept in the work folder: a GGUF file for each type.
//!
//! The name of a file has a hash of everything that its bytes depend on: the source, the type, the
//! importance matrix, the ggml library and the names of the tensors. A file is written under
//! another name first, so that a file with its name is complete.

use std::collections::BTreeSet;
use std::ffi::CString;
use std::fs;
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use ggml_quantize::{Ggml, Kind, convert};
use indicatif::ProgressBar;
use sidecar_core::files::{self, Replace};
use sidecar_core::gguf::{
    GgufFile, HeaderWriter, TypeInfo, companions, has_tensor, is_scale, padding,
};
use sidecar_core::reload::{check_tensor, hash_bytes};
use sidecar_core::text;

use super::candidate::Outcome;
use super::imatrix::Matrix;
use super::model::{Model, Tensor, elements, find};
use crate::space::Need;

/// The alignment of tensors in files.
const ALIGNMENT: u32 = 32;

/// What quantised bytes depend on.
pub struct Quantizer<'a> {
    pub ggml: &'a Ggml,
    /// A hash of the library.
    pub library: &'a str,
    pub source: &'a Model,
    /// The model in which the tensors are to be used; empty if that is the source itself.
    pub in_use: &'a [GgufFile],
    /// A hash of the source.
    pub content: &'a str,
    pub matrix: Option<&'a Matrix>,
    pub threads: usize,
    /// The folder for the files.
    pub folder: &'a Path,
}

impl Quantizer<'_> {
    /// Returns the path of the file for a type.
    pub fn path(&self, name: &str, tensors: &[Tensor<'_>], outcomes: &[Outcome]) -> PathBuf {
        let matrix = self.matrix.map_or(0, Matrix::hash);
        let mut key = format!("{} {} {name} {matrix:032x}", self.library, self.content);
        for (tensor, outcome) in tensors.iter().zip(outcomes) {
            key += &format!(" {} {}", tensor.name, outcome.ty.name());
        }
        for companion in self.source.companions(tensors) {
            key += &format!(" {}", companion.name);
        }
        for scale in self.further_scales(tensors) {
            key += &format!(" {} of ones", scale.name);
        }
        let hash = hash_bytes(key.as_bytes());
        self.folder.join(format!("{name}-{hash:032x}.gguf"))
    }

    /// Returns the scales of the model in use that belong to these tensors, and that the source lacks:
    /// its weights are whole, as those that an NVFP4 model was made from.
    fn further_scales(&self, tensors: &[Tensor<'_>]) -> Vec<Tensor<'_>> {
        let names = tensors.iter().map(|of| of.file.header.name(of.info));
        let names = names.flat_map(|name| companions(name, |name| has_tensor(self.in_use, name)));
        let names: BTreeSet<CString> = names.collect();
        let mut scales: Vec<Tensor<'_>> = self.in_use.iter().flat_map(Tensor::of_file).collect();
        scales.retain(|of| {
            let name = names.get(of.file.header.name(of.info));
            let is_further = name.is_some_and(|name| !has_tensor(&self.source.files, name));
            is_further && is_scale(of.name) && of.info.ty.name() == "f32"
        });
        scales
    }

    /// Quantises tensors of the source and returns the file that has them, with their scales and biases.
    /// Scales that only the model in use has are ones. An existing file is used.
    pub fn make(
        &self,
        name: &str,
        tensors: &[Tensor<'_>],
        outcomes: &[Outcome],
        bar: &ProgressBar,
    ) -> Result<PathBuf> {
        let path = self.path(name, tensors, outcomes);
        let total: u64 = tensors.iter().map(|tensor| elements(tensor.info)).sum();
        if path.exists() {
            bar.inc(total);
            return Ok(path);
        }
        let companions = self.source.companions(tensors);
        let of_companions = companions.iter().map(|tensor| Outcome {
            ty: tensor.info.ty,
            bytes: tensor.info.nbytes,
        });
        let outcomes: Vec<Outcome> = outcomes.iter().copied().chain(of_companions).collect();
        let tensors: Vec<Tensor<'_>> = tensors.iter().copied().chain(companions).collect();
        let ones = self.further_scales(&tensors);
        let explain = || format!("cannot quantise to {name} in {}", text::path(self.folder));
        fs::create_dir_all(self.folder).with_context(explain)?;
        let mut header = HeaderWriter::new(ALIGNMENT);
        header.value("general.architecture", self.source.architecture.as_str());
        for (tensor, outcome) in tensors.iter().zip(&outcomes) {
            let extents = &tensor.info.ne[..tensor.info.n_dims as usize];
            header.tensor(
                tensor.name.as_bytes(),
                extents,
                outcome.ty.id,
                outcome.bytes,
            )?;
        }
        for Tensor { name, info, .. } in &ones {
            let extents = &info.ne[..info.n_dims as usize];
            header.tensor(name.as_bytes(), extents, info.ty.id, info.nbytes)?;
        }
        let bytes = outcomes.iter().map(|outcome| outcome.bytes).sum();
        for need in Need::of([(path.as_path(), bytes)])? {
            need.check()?;
        }
        let file = files::beside(&path).with_context(explain)?;
        let mut out = BufWriter::new(file.as_file());
        out.write_all(&header.finish()).with_context(explain)?;
        for (tensor, outcome) in tensors.iter().zip(&outcomes) {
            let name = tensor.file.header.name(tensor.info);
            let in_use = find(self.in_use, name, &tensor.info.ne);
            // A row of zeros, quantised, has other bytes.
            check_tensor(tensor.file, tensor.info, in_use)?;
            self.quantize(tensor, outcome, &mut out).with_context(|| {
                format!("cannot quantise '{}' to {}", tensor.name, outcome.ty.name())
            })?;
            let zeros = vec![0; padding(outcome.bytes, ALIGNMENT.into()) as usize];
            out.write_all(&zeros).with_context(explain)?;
            bar.inc(elements(tensor.info));
        }
        for scale in &ones {
            let count = elements(scale.info) as usize;
            out.write_all(&1f32.to_le_bytes().repeat(count))
                .with_context(explain)?;
            let zeros = vec![0; padding(scale.info.nbytes, ALIGNMENT.into()) as usize];
            out.write_all(&zeros).with_context(explain)?;
        }
        out.flush().with_context(explain)?;
        drop(out);
        for file in &self.source.files {
            file.source.check_unwritten()?;
        }
        files::persist(file, &path, Replace::Any).with_context(explain)?;
        Ok(path)
    }

    /// Fails if a tensor cannot be quantised, before any is.
    pub fn check(&self, tensors: &[Tensor<'_>], outcomes: &[Outcome]) -> Result<()> {
        for (tensor, outcome) in tensors.iter().zip(outcomes) {
            if std::ptr::eq(tensor.info.ty, outcome.ty) {
                continue;
            }
            let checked = self.matrix_of(tensor).and_then(|matrix| {
                let (from, to) = (self.kind(tensor.info.ty)?, self.kind(outcome.ty)?);
                Ok(from.check_target(&to, matrix.is_some())?)
            });
            checked.with_context(|| {
                format!("cannot quantise '{}' to {}", tensor.name, outcome.ty.name())
            })?;
        }
        Ok(())
    }

    /// Returns the importance matrix of a tensor, if there is one.
    fn matrix_of(&self, tensor: &Tensor<'_>) -> Result<Option<&[f32]>> {
        let shape = tensor.shape().context("it is too large")?;
        match self.matrix {
            Some(matrix) => matrix.of(tensor.name, shape.row.saturating_mul(shape.matrices)),
            None => Ok(None),
        }
    }

    fn quantize(&self, tensor: &Tensor<'_>, outcome: &Outcome, out: &mut impl Write) -> Result<()> {
        let (source, offset) = (&tensor.file.source, tensor.info.offset);
        let shape = tensor.shape().context("it is too large")?;
        let read = |at: u64, buffer: &mut [u8]| source.read_at(buffer, offset + at);
        if std::ptr::eq(tensor.info.ty, outcome.ty) {
            // llama-quantize copies it, too.
            return copy(tensor.info.nbytes, read, out);
        }
        let matrix = self.matrix_of(tensor)?;
        let (from, to) = (self.kind(tensor.info.ty)?, self.kind(outcome.ty)?);
        let write = |bytes: &[u8]| out.write_all(bytes);
        convert(
            self.ggml,
            &from,
            &to,
            shape,
            matrix,
            self.threads,
            read,
            write,
        )?;
        Ok(())
    }

    /// Returns a type as the library has it.
    fn kind(&self, ty: &'static TypeInfo) -> Result<Kind> {
        let kind = self.ggml.kind(ty.id, ty.name())?;
        ensure!(
            (kind.block as u64, kind.bytes as u64) == (ty.block, ty.bytes) && ty.row_meta == 0,
            "this ggml library has another layout of {}",
            ty.name()
        );
        Ok(kind)
    }
}

/// Removes files that an earlier process did not complete. The caller has the lock of the folder.
pub fn remove_incomplete(folder: &Path) {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    for entry in entries {
        let name = entry.file_name();
        let name = name.to_string_lossy();
        if name.starts_with('.') && name.ends_with(files::INCOMPLETE) {
            // What is left only takes space.
            let _ = fs::remove_file(entry.path());
        }
    }
}

fn copy(
    len: u64,
    read: impl Fn(u64, &mut [u8]) -> std::io::Result<()>,
    out: &mut impl Write,
) -> Result<()> {
    let mut buffer = vec![0; len.min(4 << 20) as usize];
    let mut at = 0;
    while at < len {
        let step = (len - at).min(buffer.len() as u64) as usize;
        read(at, &mut buffer[..step])?;
        out.write_all(&buffer[..step])?;
        at += step as u64;
    }
    Ok(())
}
