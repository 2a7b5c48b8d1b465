//! Errors of the parser.

use super::tensor::MAX_DIMS;
use super::value::ValueType;

/// Why a header was not parsed.
#[derive(Debug)]
pub enum ParseError {
    /// The prefix ends before the header does; the file itself is long enough
    /// for at least this many bytes.
    NeedMore(u64),
    /// The file is malformed.
    Malformed(FormatError),
}

/// What makes a file invalid, and where.
///
/// Offsets are bytes from the start of the file. [`FormatError::is_short`] is true for the errors
/// of a file that is still being written.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[allow(
    missing_docs,
    reason = "the message of each variant describes its fields"
)]
pub enum FormatError {
    #[error("expected the magic 'GGUF' at offset 0, found {found:?}: this is not a GGUF file")]
    BadMagic { found: String },
    #[error(
        "this is a big-endian GGUF file (version field {version:#010x}); only little-endian files are read: convert it with gguf's gguf_convert_endian"
    )]
    BigEndian { version: u32 },
    #[error("GGUF version 1 is no longer supported, expected 2 or 3: convert the model again")]
    Version1,
    #[error("expected GGUF version 2 or 3, found {found}: a newer reader is needed")]
    UnknownVersion { found: u32 },
    #[error("the header states {count} {what}, more than fit into the remaining {remaining} bytes")]
    Count {
        what: &'static str,
        count: i64,
        remaining: u64,
    },
    #[error(
        "the file ends inside {what} at offset {offset}: {needed} bytes needed, {remaining} left"
    )]
    Truncated {
        what: String,
        offset: u64,
        needed: u64,
        remaining: u64,
    },
    #[error("{what} at offset {offset} has length {length}, the limit is {limit}")]
    TooLong {
        what: String,
        offset: u64,
        length: u64,
        limit: u64,
    },
    #[error("key number {index} at offset {offset} is empty")]
    EmptyKey { index: u64, offset: u64 },
    #[error("key '{key}' appears twice, again at offset {offset}")]
    DuplicateKey { key: String, offset: u64 },
    #[error(
        "key '{key}' at offset {offset} has value type {found}, expected 0 to 12 and no array of arrays"
    )]
    ValueType {
        key: String,
        found: u32,
        offset: u64,
    },
    #[error("key 'general.alignment' has type {found}, expected u32")]
    AlignmentType { found: ValueType },
    #[error("general.alignment is {found}, expected a power of two")]
    Alignment { found: u32 },
    #[error("tensor name number {index} at offset {offset} has {length} bytes, the limit is 63")]
    LongName {
        index: u64,
        offset: u64,
        length: u64,
    },
    #[error("tensor '{name}' appears twice, again at offset {offset}")]
    DuplicateTensor { name: String, offset: u64 },
    #[error("tensor '{name}' at offset {offset} has {found} dimensions, the limit is 4")]
    Dimensions {
        name: String,
        offset: u64,
        found: u32,
    },
    #[error("tensor '{name}' at offset {offset} has shape {shape:?}: {reason}")]
    Shape {
        name: String,
        offset: u64,
        shape: [i64; MAX_DIMS],
        reason: &'static str,
    },
    #[error(
        "tensor '{name}' at offset {offset} has type {found}, which neither llama.cpp nor ik_llama.cpp defines: update llama-sidecar, or convert the model again"
    )]
    UnknownType {
        name: String,
        offset: u64,
        found: u32,
    },
    #[error(
        "tensor '{name}' at offset {offset} has rows of {row} elements, not a multiple of the {block} elements in a block of {ty}"
    )]
    Block {
        name: String,
        offset: u64,
        row: u64,
        block: u64,
        ty: &'static str,
    },
    #[error(
        "tensor '{name}' starts at offset {found} of the data section, expected {expected}: tensors must follow each other"
    )]
    Offset {
        name: String,
        found: u64,
        expected: u64,
    },
    #[error("the data of all tensors together does not fit 64 bits, from tensor '{name}' on")]
    DataSize { name: String },
    #[error(
        "the data section should start at offset {start}, past the end of the file at {file_len}"
    )]
    DataStart { start: u64, file_len: u64 },
    #[error(
        "tensor '{name}' needs bytes {start} to {end}, but the file ends at {file_len}: the file is incomplete"
    )]
    DataShort {
        name: String,
        start: u64,
        end: u64,
        file_len: u64,
    },
}

impl FormatError {
    /// Returns whether a file that is still being written can have this error.
    pub fn is_short(&self) -> bool {
        matches!(
            self,
            FormatError::Truncated { .. }
                | FormatError::Count { .. }
                | FormatError::DataStart { .. }
                | FormatError::DataShort { .. }
        )
    }
}
