//! The description of a tensor in a header.

use super::types::TypeInfo;

/// `GGML_MAX_DIMS`.
pub(super) const MAX_DIMS: usize = 4;

/// The description of a tensor in a header.
#[derive(Debug, Clone)]
pub struct TensorInfo {
    pub(super) name_at: usize,
    /// Type of the elements.
    pub ty: &'static TypeInfo,
    /// Number of dimensions in the file, at most 4.
    pub n_dims: u32,
    /// Elements per dimension, innermost first; 1 beyond `n_dims`.
    pub ne: [u64; MAX_DIMS],
    /// First byte, from the start of the file.
    pub offset: u64,
    /// Bytes of data.
    pub nbytes: u64,
}

impl TensorInfo {
    /// Returns the strides in bytes, as in ggml: `nb[0]` is a block, `nb[1]` is a row.
    pub fn nb(&self) -> [u64; MAX_DIMS] {
        strides(self.ty, &self.ne)
    }
}

/// Returns the strides in bytes of a contiguous tensor, as in ggml.
pub fn strides(ty: &TypeInfo, ne: &[u64; MAX_DIMS]) -> [u64; MAX_DIMS] {
    let row = ty.row_bytes(ne[0]).unwrap_or(0);
    [
        ty.bytes,
        row,
        row.saturating_mul(ne[1]),
        row.saturating_mul(ne[1]).saturating_mul(ne[2]),
    ]
}
