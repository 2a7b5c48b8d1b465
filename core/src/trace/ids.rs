//! Matrices of routed ids.

/// A matrix of routed ids: the experts of each token, in the layout of ggml's
/// `GGML_OP_MUL_MAT_ID` (`src[2]`): 32-bit integers, rows possibly padded.
#[derive(Debug, Clone, Copy)]
pub struct Ids<'a> {
    /// The bytes from the first id to the end of the last.
    pub bytes: &'a [u8],
    /// Experts per token (`ne[0]`).
    pub used: usize,
    /// Tokens (`ne[1]`).
    pub tokens: usize,
    /// Bytes from one id of a token to the next (`nb[0]`).
    pub used_stride: usize,
    /// Bytes from one token to the next (`nb[1]`).
    pub token_stride: usize,
}

impl<'a> Ids<'a> {
    /// Returns the matrix of one id.
    pub fn one(id: &'a [u8; 4]) -> Ids<'a> {
        Ids::packed(id, 1)
    }

    /// Returns the matrix of tokens with `used` experts each, one behind the other.
    pub fn packed(bytes: &'a [u8], used: usize) -> Ids<'a> {
        Ids {
            bytes,
            used,
            tokens: (bytes.len() / 4).checked_div(used).unwrap_or(0),
            used_stride: 4,
            token_stride: 4 * used,
        }
    }

    /// Returns the bytes from the first id of such a matrix to the end of the last; 0 without
    /// ids, `None` when the result is more than an allocation can have.
    pub fn byte_len(
        used: usize,
        tokens: usize,
        used_stride: usize,
        token_stride: usize,
    ) -> Option<usize> {
        if used == 0 || tokens == 0 {
            return Some(0);
        }
        let rows = (tokens - 1).checked_mul(token_stride)?;
        let row = (used - 1).checked_mul(used_stride)?;
        let len = rows.checked_add(row)?.checked_add(4)?;
        (len <= isize::MAX as usize).then_some(len)
    }

    /// Returns an id; `None` when it is outside the bytes.
    pub fn get(&self, token: usize, used: usize) -> Option<i32> {
        let at = token
            .checked_mul(self.token_stride)?
            .checked_add(used.checked_mul(self.used_stride)?)?;
        let bytes = self.bytes.get(at..at.checked_add(4)?)?;
        Some(i32::from_ne_bytes(bytes.try_into().ok()?))
    }
}
