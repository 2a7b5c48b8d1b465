//! Models of tensors that the program has in its memory.

use std::ffi::CStr;
use std::path::Path;
use std::sync::Arc;

use super::placement::{HOST, Layout};
use super::resident::{Resident, part_extents};
use super::tensor::Version;
use super::{Model, Options};
use crate::device::{BorrowedBuffer, Buffer};
use sidecar_core::error::{Error, Result};
use sidecar_core::gguf::{DEFAULT_ALIGNMENT, GgufFile, HeaderWriter, TypeInfo};

/// Stands for the path of a file in messages.
const PATH: &str = "tensors of the program";

/// A tensor in memory of the program.
#[derive(Debug, Clone, Copy)]
pub struct BorrowedTensor<'a> {
    /// The name as in a GGUF file, such as `blk.3.ffn_down_exps.weight`.
    pub name: &'a CStr,
    /// Value of enum ggml_type.
    pub ty: u32,
    /// Elements per dimension, innermost first.
    pub ne: [u64; 4],
    /// The bytes, without gaps.
    pub data: *const u8,
    /// Number of bytes.
    pub nbytes: u64,
}

impl Model {
    /// Makes a model of tensors in memory of the program, which are used in place. No file is opened, so nothing can be
    /// reloaded or streamed.
    ///
    /// # Safety
    ///
    /// The bytes of all tensors can be read, and do not change, as long as the model lives.
    pub unsafe fn of_memory(tensors: &[BorrowedTensor<'_>]) -> Result<Model> {
        let mut header = HeaderWriter::new(DEFAULT_ALIGNMENT as u32);
        for tensor in tensors {
            let ty = TypeInfo::from_id(tensor.ty);
            let expected = ty.and_then(|ty| ty.tensor_bytes(&tensor.ne));
            // What has no size is refused with the header.
            if let Some(expected) = expected
                && (expected != tensor.nbytes || tensor.data.is_null())
            {
                return Err(Error::Invalid(format!(
                    "{PATH}: '{}' has {} bytes at {:p}, expected {expected} by its type and dimensions",
                    tensor.name.to_string_lossy(),
                    tensor.nbytes,
                    tensor.data,
                )));
            }
            let dimensions = tensor.ne.iter().rposition(|&ne| ne != 1).unwrap_or(0) + 1;
            let (name, ne) = (tensor.name.to_bytes(), &tensor.ne[..dimensions]);
            header
                .tensor(name, ne, tensor.ty, tensor.nbytes)
                .map_err(|error| Error::Invalid(format!("{PATH}: {error}")))?;
        }
        let file = GgufFile::of_header(Path::new(PATH), &header.finish())?;
        Ok(Model::of_files(
            vec![file],
            Options::host(),
            |_, index, info| {
                // SAFETY: as the caller guarantees.
                let buffer =
                    unsafe { BorrowedBuffer::new(tensors[index].data, info.nbytes as usize) };
                let buffer: Arc<dyn Buffer> = Arc::new(buffer);
                let layout = Layout::Whole(HOST);
                let parts = part_extents(info.ty, &info.ne, info.nbytes, info.ne[1], &layout);
                let parts = parts
                    .iter()
                    .map(|part| part.at(buffer.clone(), 0))
                    .collect();
                Version::on_devices(info, Resident { layout, parts })
            },
        ))
    }
}
