//! The header of a GGUF file: counts, key-values, tensor infos.
//!
//! One pass over the bytes checks everything that llama.cpp's reader checks (`gguf_init_from_file`
//! in ggml's `gguf.cpp`) and records the positions and a hash of each value. Values stay in the file:
//! a vocabulary of 262,144 tokens costs one pass over its bytes and no allocation. The input is untrusted: every
//! length is compared with the remaining bytes of the file before use, and allocations are bounded
//! by the bytes already read.
//!
//! Layout, from the GGUF specification: magic `GGUF`, version `u32`, tensor count
//! `i64`, key-value count `i64`, the key-values, the tensor infos, padding up to
//! `general.alignment`, tensor data. All little-endian.

use std::ffi::CStr;
use std::hash::BuildHasher;

use gguf_write::ALIGNMENT_KEY;
pub use gguf_write::DEFAULT_ALIGNMENT;
use hashbrown::{DefaultHashBuilder, HashTable};
use xxhash_rust::xxh3::xxh3_64;

use super::cursor::Cursor;
use super::error::{FormatError, ParseError};
use super::names::Names;
use super::tensor::{MAX_DIMS, TensorInfo};
use super::types::TypeInfo;
use super::value::{KeyValue, ValueType};

/// `GGML_MAX_NAME`: a tensor name, its NUL included, fits in this many bytes.
const MAX_NAME: usize = 64;
/// Limit of llama.cpp's reader for one array.
const MAX_ELEMENTS: u64 = 1 << 30;

/// The parsed header of one file.
#[derive(Debug)]
pub struct Header {
    /// Format version, 2 or 3.
    pub version: u32,
    /// Alignment of the data section and of every tensor in it, in bytes.
    pub alignment: u64,
    /// Where the data section starts, in bytes from the start of the file.
    pub data_offset: u64,
    /// Key-values in file order.
    pub keys: Vec<KeyValue>,
    /// Tensor infos in file order.
    pub tensors: Vec<TensorInfo>,
    names: Names,
}

impl Header {
    /// Parses a header from the first bytes of a file of `file_len` bytes.
    ///
    /// `prefix` can be shorter than the header. [`ParseError::NeedMore`] then has the number of
    /// bytes to read before the next attempt.
    pub fn parse(prefix: &[u8], file_len: u64) -> Result<Header, ParseError> {
        let mut cursor = Cursor {
            bytes: prefix,
            at: 0,
            file_len: file_len.max(prefix.len() as u64),
        };
        let version = magic_and_version(&mut cursor)?;
        let n_tensors = count(&mut cursor, "tensors", MIN_TENSOR_BYTES)?;
        let n_keys = count(&mut cursor, "key-values", MIN_KEY_BYTES)?;

        let mut keys: Vec<KeyValue> = Vec::with_capacity(n_keys.min(MAX_RESERVED));
        let mut key_index = HashTable::new();
        let hasher = DefaultHashBuilder::default();
        for index in 0..n_keys as u64 {
            let offset = cursor.at as u64;
            let key = key_value(&mut cursor, index)?;
            let hash = |name: &[u8]| hasher.hash_one(name);
            let duplicate = key_index
                .find(hash(&key.name), |&at: &usize| keys[at].name == key.name)
                .is_some();
            if duplicate {
                return Err(ParseError::Malformed(FormatError::DuplicateKey {
                    key: key.name_lossy(),
                    offset,
                }));
            }
            key_index.insert_unique(hash(&key.name), keys.len(), |&at| hash(&keys[at].name));
            keys.push(key);
        }
        let alignment = alignment(&keys)?;

        let mut names = Names::with_capacity(n_tensors.min(MAX_RESERVED));
        let mut tensors = Vec::with_capacity(n_tensors.min(MAX_RESERVED));
        for index in 0..n_tensors as u64 {
            tensors.push(tensor_info(&mut cursor, index, &mut names, &tensors)?);
        }

        let data_offset = data_section(&cursor, alignment, &names, &mut tensors)?;
        Ok(Header {
            version,
            alignment,
            data_offset,
            keys,
            tensors,
            names,
        })
    }

    /// Returns the key-value with this name.
    pub fn key(&self, name: &[u8]) -> Option<&KeyValue> {
        self.keys.iter().find(|key| &*key.name == name)
    }

    /// Returns the name of a tensor of this header.
    ///
    /// The bytes are those of the file up to the first NUL, as in ggml. They need not be UTF-8.
    pub fn name(&self, tensor: &TensorInfo) -> &CStr {
        self.names.get(tensor.name_at)
    }

    /// Returns the position of the tensor with this name.
    pub fn find(&self, name: &CStr) -> Option<usize> {
        self.names.find(name, &self.tensors)
    }

    /// Checks that a file of `file_len` bytes has the data of every tensor, as llama.cpp's model
    /// loader does.
    pub fn check_data(&self, file_len: u64) -> Result<(), FormatError> {
        for tensor in &self.tensors {
            let end = tensor.offset.checked_add(tensor.nbytes);
            if end.is_none_or(|end| end > file_len) {
                return Err(FormatError::DataShort {
                    name: self.name(tensor).to_string_lossy().into_owned(),
                    start: tensor.offset,
                    end: end.unwrap_or(u64::MAX),
                    file_len,
                });
            }
        }
        Ok(())
    }
}

/// Bytes of the shortest key-value: an empty key, its type and a one-byte value.
const MIN_KEY_BYTES: u64 = 8 + 4 + 1;
/// Bytes of the shortest tensor info: an empty name, no dimension, type and offset.
const MIN_TENSOR_BYTES: u64 = 8 + 4 + 4 + 8;
/// Maximum number of entries to allocate from a count that is not checked yet.
const MAX_RESERVED: usize = 1 << 15;

fn magic_and_version(cursor: &mut Cursor) -> Result<u32, ParseError> {
    let magic = cursor.take(4, || "the magic".into())?;
    if magic != b"GGUF" {
        return Err(ParseError::Malformed(FormatError::BadMagic {
            found: magic.escape_ascii().to_string(),
        }));
    }
    let version = cursor.u32(|| "the version".into())?;
    match version {
        2 | 3 => Ok(version),
        1 => Err(ParseError::Malformed(FormatError::Version1)),
        // A small number read with the wrong byte order has its low half empty.
        v if v != 0 && v & 0xffff == 0 => {
            Err(ParseError::Malformed(FormatError::BigEndian { version }))
        }
        found => Err(ParseError::Malformed(FormatError::UnknownVersion { found })),
    }
}

fn count(cursor: &mut Cursor, what: &'static str, min_bytes: u64) -> Result<usize, ParseError> {
    let count = cursor.u64(|| format!("the number of {what}"))? as i64;
    let remaining = cursor.file_len - cursor.at as u64;
    let possible = remaining / min_bytes;
    if count < 0 || count as u64 > possible || count > i64::from(u32::MAX) {
        return Err(ParseError::Malformed(FormatError::Count {
            what,
            count,
            remaining,
        }));
    }
    Ok(count as usize)
}

fn key_value(cursor: &mut Cursor, index: u64) -> Result<KeyValue, ParseError> {
    let at = cursor.at as u64;
    let name = cursor.string(|| format!("key number {index}"))?;
    if name.is_empty() {
        return Err(ParseError::Malformed(FormatError::EmptyKey {
            index,
            offset: at,
        }));
    }
    let name: Box<[u8]> = name.into();
    let lossy = || String::from_utf8_lossy(&name).into_owned();
    let what = || format!("the value of key '{}'", lossy());

    let bad_type = |found, offset| {
        ParseError::Malformed(FormatError::ValueType {
            key: lossy(),
            found,
            offset,
        })
    };
    let type_at = cursor.at as u64;
    let raw = cursor.u32(what)?;
    let ty = ValueType::from_id(raw).ok_or_else(|| bad_type(raw, type_at))?;

    if ty != ValueType::Array {
        let (offset, bytes) = match ty.fixed_size() {
            Some(size) => (cursor.at as u64, cursor.take(size, what)?),
            None => {
                let bytes = cursor.string(what)?;
                (cursor.at as u64 - bytes.len() as u64, bytes)
            }
        };
        let (scalar, len) = (KeyValue::inline(bytes), bytes.len() as u64);
        let hash = xxh3_64(bytes);
        return Ok(KeyValue {
            name,
            ty,
            array: false,
            count: 1,
            offset,
            len,
            scalar,
            hash,
        });
    }

    let element_at = cursor.at as u64;
    let raw = cursor.u32(what)?;
    let element = ValueType::from_id(raw)
        .filter(|&element| element != ValueType::Array)
        .ok_or_else(|| bad_type(raw, element_at))?;
    let count_at = cursor.at as u64;
    let count = cursor.u64(what)?;
    if count > MAX_ELEMENTS {
        return Err(ParseError::Malformed(FormatError::TooLong {
            what: what(),
            offset: count_at,
            length: count,
            limit: MAX_ELEMENTS,
        }));
    }
    let offset = cursor.at as u64;
    match element.fixed_size() {
        Some(size) => {
            cursor.take(size * count, what)?;
        }
        None => cursor.skip_strings(count, what)?,
    }
    Ok(KeyValue {
        name,
        ty: element,
        array: true,
        count,
        offset,
        len: cursor.at as u64 - offset,
        scalar: 0,
        hash: xxh3_64(&cursor.bytes[offset as usize..cursor.at]),
    })
}

fn alignment(keys: &[KeyValue]) -> Result<u64, ParseError> {
    let Some(key) = keys
        .iter()
        .find(|key| &*key.name == ALIGNMENT_KEY.as_bytes())
    else {
        return Ok(DEFAULT_ALIGNMENT);
    };
    if key.ty != ValueType::U32 || key.array {
        return Err(ParseError::Malformed(FormatError::AlignmentType {
            found: if key.array { ValueType::Array } else { key.ty },
        }));
    }
    let found = key.scalar as u32;
    if !found.is_power_of_two() {
        return Err(ParseError::Malformed(FormatError::Alignment { found }));
    }
    Ok(u64::from(found))
}

/// Reads a tensor info. Its `offset` is still relative to the data section.
fn tensor_info(
    cursor: &mut Cursor,
    index: u64,
    names: &mut Names,
    tensors: &[TensorInfo],
) -> Result<TensorInfo, ParseError> {
    let offset = cursor.at as u64;
    let what = || format!("the info of tensor number {index}");
    let raw_name = cursor.string(what)?;
    if raw_name.len() >= MAX_NAME {
        return Err(ParseError::Malformed(FormatError::LongName {
            index,
            offset,
            length: raw_name.len() as u64,
        }));
    }
    // ggml keeps names as C strings: what follows a NUL is not part of them.
    let raw_name = raw_name.split(|&byte| byte == 0).next().unwrap_or_default();
    let lossy = || String::from_utf8_lossy(raw_name).into_owned();
    let Some(name_at) = names.insert(raw_name, tensors) else {
        return Err(ParseError::Malformed(FormatError::DuplicateTensor {
            name: lossy(),
            offset,
        }));
    };

    let n_dims = cursor.u32(what)?;
    if n_dims as usize > MAX_DIMS {
        return Err(ParseError::Malformed(FormatError::Dimensions {
            name: lossy(),
            offset,
            found: n_dims,
        }));
    }
    let mut shape = [1i64; MAX_DIMS];
    for extent in &mut shape[..n_dims as usize] {
        *extent = cursor.u64(what)? as i64;
    }
    let bad_shape = |reason| {
        ParseError::Malformed(FormatError::Shape {
            name: lossy(),
            offset,
            shape,
            reason,
        })
    };
    if shape.iter().any(|&extent| extent < 0) {
        return Err(bad_shape("no dimension can be negative"));
    }
    let ne = shape.map(|extent| extent as u64);
    let empty = ne.contains(&0);
    let elements = ne.iter().try_fold(1u64, |n, &extent| n.checked_mul(extent));
    if !empty && elements.is_none_or(|n| n >= i64::MAX as u64) {
        return Err(bad_shape("the number of elements does not fit 63 bits"));
    }

    let raw_type = cursor.u32(what)?;
    let ty = TypeInfo::from_id(raw_type).ok_or_else(|| {
        ParseError::Malformed(FormatError::UnknownType {
            name: lossy(),
            offset,
            found: raw_type,
        })
    })?;
    if !ne[0].is_multiple_of(ty.block) {
        return Err(ParseError::Malformed(FormatError::Block {
            name: lossy(),
            offset,
            row: ne[0],
            block: ty.block,
            ty: ty.name(),
        }));
    }
    let nbytes = ty.tensor_bytes(&ne);
    let nbytes = nbytes.ok_or_else(|| bad_shape("the size in bytes does not fit 64 bits"))?;
    let data_at = cursor.u64(what)?;
    Ok(TensorInfo {
        name_at,
        ty,
        n_dims,
        ne,
        offset: data_at,
        nbytes,
    })
}

/// Finds the data section, checks that tensors follow each other in it, and makes
/// their offsets absolute.
fn data_section(
    cursor: &Cursor,
    alignment: u64,
    names: &Names,
    tensors: &mut [TensorInfo],
) -> Result<u64, ParseError> {
    let header_end = cursor.at as u64;
    if tensors.is_empty() {
        return Ok(header_end);
    }
    let start = header_end.next_multiple_of(alignment);
    if start > cursor.file_len {
        return Err(ParseError::Malformed(FormatError::DataStart {
            start,
            file_len: cursor.file_len,
        }));
    }
    let mut expected = 0u64;
    for tensor in tensors {
        let lossy = || names.get(tensor.name_at).to_string_lossy().into_owned();
        if tensor.offset != expected {
            return Err(ParseError::Malformed(FormatError::Offset {
                name: lossy(),
                found: tensor.offset,
                expected,
            }));
        }
        let absolute = start.checked_add(expected);
        let next = tensor
            .nbytes
            .checked_next_multiple_of(alignment)
            .and_then(|padded| expected.checked_add(padded));
        let (Some(absolute), Some(next)) = (absolute, next) else {
            return Err(ParseError::Malformed(FormatError::DataSize {
                name: lossy(),
            }));
        };
        tensor.offset = absolute;
        expected = next;
    }
    Ok(start)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn header(bytes: &[u8]) -> Result<Header, ParseError> {
        Header::parse(bytes, bytes.len() as u64)
    }

    fn minimal() -> Vec<u8> {
        let mut bytes = b"GGUF".to_vec();
        bytes.extend(3u32.to_le_bytes());
        bytes.extend([0; 16]);
        bytes
    }

    #[test]
    fn an_empty_model_is_valid() {
        let parsed = header(&minimal()).unwrap();
        assert_eq!((parsed.version, parsed.data_offset), (3, 24));
    }

    #[test]
    fn big_endian_and_version_1_are_named() {
        let mut bytes = minimal();
        bytes[4..8].copy_from_slice(&3u32.to_be_bytes());
        assert!(matches!(
            header(&bytes),
            Err(ParseError::Malformed(FormatError::BigEndian {
                version: 0x0300_0000
            }))
        ));
        bytes[4..8].copy_from_slice(&1u32.to_le_bytes());
        assert!(matches!(
            header(&bytes),
            Err(ParseError::Malformed(FormatError::Version1))
        ));
    }

    #[test]
    fn counts_larger_than_the_file_do_not_allocate() {
        for count in [1, i64::MAX, -1, 1 << 32] {
            let mut bytes = minimal();
            bytes[8..16].copy_from_slice(&count.to_le_bytes());
            assert!(matches!(
                header(&bytes),
                Err(ParseError::Malformed(FormatError::Count { .. }))
            ));
        }
    }

    #[test]
    fn a_prefix_asks_for_more_and_the_end_of_the_file_is_an_error() {
        let whole = minimal();
        for cut in 0..whole.len() {
            let more = Header::parse(&whole[..cut], whole.len() as u64);
            assert!(
                matches!(more, Err(ParseError::NeedMore(n)) if n > cut as u64),
                "{cut}"
            );
            let end = header(&whole[..cut]);
            assert!(
                matches!(end, Err(ParseError::Malformed(d)) if d.is_short()),
                "{cut}"
            );
        }
    }
}
