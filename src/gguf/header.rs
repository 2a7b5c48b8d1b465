//! The header of one GGUF file: counts, key-values, tensor infos.
//!
//! One walk over the bytes checks everything that llama.cpp's own reader checks
//! (`gguf_init_from_file` in ggml's `gguf.cpp`) and writes down where things are.
//! Values stay in the file: a vocabulary of 262,144 tokens costs the walk over its
//! lengths and no allocation. Nothing is trusted: every length is compared with
//! what is left of the file before it is used, and no allocation is larger than
//! the bytes already seen justify.
//!
//! Layout, from the GGUF specification: magic `GGUF`, version `u32`, tensor count
//! `i64`, key-value count `i64`, the key-values, the tensor infos, padding up to
//! `general.alignment`, tensor data. All little-endian.

use std::ffi::CStr;
use std::hash::BuildHasher;

use hashbrown::{DefaultHashBuilder, HashTable};

use super::types::TypeInfo;
use super::value::{Key, ValueType};

/// Alignment of the data section when the file names none.
pub const DEFAULT_ALIGNMENT: u64 = 32;

/// `GGML_MAX_NAME`: a tensor name, its NUL included, fits in this many bytes.
const MAX_NAME: usize = 64;
/// `GGML_MAX_DIMS`.
const MAX_DIMS: usize = 4;
/// Limit of llama.cpp's reader for one string.
const MAX_STRING: u64 = 1 << 30;
/// Limit of llama.cpp's reader for one array.
const MAX_ELEMENTS: u64 = 1 << 30;
/// The key whose value places the data section.
pub(super) const ALIGNMENT_KEY: &str = "general.alignment";

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
    pub keys: Vec<Key>,
    /// Tensor infos in file order.
    pub tensors: Vec<TensorInfo>,
    names: Names,
}

/// One tensor, as the header describes it.
#[derive(Debug, Clone)]
pub struct TensorInfo {
    name_at: usize,
    /// Type of the elements.
    pub ty: &'static TypeInfo,
    /// How many dimensions the file states, at most 4.
    pub n_dims: u32,
    /// Elements per dimension, innermost first; 1 beyond `n_dims`.
    pub ne: [u64; MAX_DIMS],
    /// First byte, from the start of the file.
    pub offset: u64,
    /// Bytes of data.
    pub nbytes: u64,
}

impl TensorInfo {
    /// Strides in bytes, as ggml computes them: `nb[0]` is one block, `nb[1]` one
    /// row.
    pub fn nb(&self) -> [u64; MAX_DIMS] {
        strides(self.ty, &self.ne)
    }
}

/// Strides in bytes of a contiguous tensor, as ggml computes them.
pub fn strides(ty: &TypeInfo, ne: &[u64; MAX_DIMS]) -> [u64; MAX_DIMS] {
    let row = ty.row_bytes(ne[0]).unwrap_or(0);
    [
        ty.bytes,
        row,
        row.saturating_mul(ne[1]),
        row.saturating_mul(ne[1]).saturating_mul(ne[2]),
    ]
}

/// Why a header was not parsed.
#[derive(Debug)]
pub enum Stop {
    /// The prefix ends before the header does; the file itself is long enough
    /// for at least this many bytes.
    NeedMore(u64),
    /// The file is malformed.
    Malformed(Defect),
}

/// What is wrong with a file, and where.
///
/// Offsets are bytes from the start of the file. [`Defect::is_short`] tells the
/// defects that a file still being written would show.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[allow(
    missing_docs,
    reason = "the message of each variant says what its fields are"
)]
pub enum Defect {
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
    #[error("the header promises {count} {what}, which {remaining} remaining bytes cannot hold")]
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
        "tensor '{name}' at offset {offset} has type {found}, which neither llama.cpp nor ik_llama.cpp defines"
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
        "tensor '{name}' needs bytes {start} to {end}, but the file ends at {file_len}: it is incomplete"
    )]
    DataShort {
        name: String,
        start: u64,
        end: u64,
        file_len: u64,
    },
}

impl Defect {
    /// Whether a file that is still being written could look like this.
    pub fn is_short(&self) -> bool {
        matches!(
            self,
            Defect::Truncated { .. }
                | Defect::Count { .. }
                | Defect::DataStart { .. }
                | Defect::DataShort { .. }
        )
    }
}

impl Header {
    /// Parses a header from the first bytes of a file of `file_len` bytes.
    ///
    /// `prefix` may be shorter than the header: [`Stop::NeedMore`] then says how
    /// much to read before trying again.
    pub fn parse(prefix: &[u8], file_len: u64) -> Result<Header, Stop> {
        let mut cursor = Cursor {
            bytes: prefix,
            at: 0,
            file_len: file_len.max(prefix.len() as u64),
        };
        let version = magic_and_version(&mut cursor)?;
        let n_tensors = count(&mut cursor, "tensors", MIN_TENSOR_BYTES)?;
        let n_keys = count(&mut cursor, "key-values", MIN_KEY_BYTES)?;

        let mut keys: Vec<Key> = Vec::with_capacity(n_keys.min(MAX_RESERVED));
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
                return Err(Stop::Malformed(Defect::DuplicateKey {
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

    /// The key-value with this name.
    pub fn key(&self, name: &[u8]) -> Option<&Key> {
        self.keys.iter().find(|key| &*key.name == name)
    }

    /// Name of a tensor of this header.
    ///
    /// Bytes as in the file, cut at the first NUL as ggml does; not necessarily
    /// UTF-8.
    pub fn name(&self, tensor: &TensorInfo) -> &CStr {
        self.names.get(tensor.name_at)
    }

    /// Position of the tensor with this name.
    pub fn find(&self, name: &CStr) -> Option<usize> {
        self.names.find(name, &self.tensors)
    }

    /// Checks that the data of every tensor lies inside a file of `file_len`
    /// bytes, as llama.cpp's model loader does.
    pub fn check_data(&self, file_len: u64) -> Result<(), Defect> {
        for tensor in &self.tensors {
            let end = tensor.offset.checked_add(tensor.nbytes);
            if end.is_none_or(|end| end > file_len) {
                return Err(Defect::DataShort {
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

/// Tensor names, each with its NUL, in one allocation, and the index over them.
#[derive(Debug)]
struct Names {
    bytes: Vec<u8>,
    index: HashTable<u32>,
    hasher: DefaultHashBuilder,
}

impl Names {
    fn with_capacity(names: usize) -> Names {
        Names {
            bytes: Vec::with_capacity(names * 32),
            index: HashTable::with_capacity(names),
            hasher: DefaultHashBuilder::default(),
        }
    }

    fn get(&self, at: usize) -> &CStr {
        CStr::from_bytes_until_nul(&self.bytes[at..]).expect("every name was stored with its NUL")
    }

    fn find(&self, name: &CStr, tensors: &[TensorInfo]) -> Option<usize> {
        let hash = self.hasher.hash_one(name.to_bytes());
        self.index
            .find(hash, |&at| self.get(tensors[at as usize].name_at) == name)
            .map(|&at| at as usize)
    }

    /// Stores the name of the next tensor; `None` when it is taken.
    fn insert(&mut self, name: &[u8], tensors: &[TensorInfo]) -> Option<usize> {
        let name_at = self.bytes.len();
        self.bytes.extend_from_slice(name);
        self.bytes.push(0);
        let stored = self.get(name_at);
        if self.find(stored, tensors).is_some() {
            return None;
        }
        let hash = self.hasher.hash_one(stored.to_bytes());
        let (bytes, hasher) = (&self.bytes, &self.hasher);
        self.index
            .insert_unique(hash, tensors.len() as u32, |&other| {
                let at = tensors
                    .get(other as usize)
                    .map_or(name_at, |tensor| tensor.name_at);
                let name = CStr::from_bytes_until_nul(&bytes[at..]).expect("stored with its NUL");
                hasher.hash_one(name.to_bytes())
            });
        Some(name_at)
    }
}

/// Shortest key-value: an empty key, its type and a one-byte value.
const MIN_KEY_BYTES: u64 = 8 + 4 + 1;
/// Shortest tensor info: an empty name, no dimension, type and offset.
const MIN_TENSOR_BYTES: u64 = 8 + 4 + 4 + 8;
/// Most entries to make room for on the word of a count alone.
const MAX_RESERVED: usize = 1 << 15;

fn magic_and_version(cursor: &mut Cursor) -> Result<u32, Stop> {
    let magic = cursor.take(4, || "the magic".into())?;
    if magic != b"GGUF" {
        return Err(Stop::Malformed(Defect::BadMagic {
            found: magic.escape_ascii().to_string(),
        }));
    }
    let version = cursor.u32(|| "the version".into())?;
    match version {
        2 | 3 => Ok(version),
        1 => Err(Stop::Malformed(Defect::Version1)),
        // A small number read with the wrong byte order has its low half empty.
        v if v != 0 && v & 0xffff == 0 => Err(Stop::Malformed(Defect::BigEndian { version })),
        found => Err(Stop::Malformed(Defect::UnknownVersion { found })),
    }
}

fn count(cursor: &mut Cursor, what: &'static str, min_bytes: u64) -> Result<usize, Stop> {
    let count = cursor.u64(|| format!("the number of {what}"))? as i64;
    let remaining = cursor.file_len - cursor.at as u64;
    let possible = remaining / min_bytes;
    if count < 0 || count as u64 > possible || count > i64::from(u32::MAX) {
        return Err(Stop::Malformed(Defect::Count {
            what,
            count,
            remaining,
        }));
    }
    Ok(count as usize)
}

fn key_value(cursor: &mut Cursor, index: u64) -> Result<Key, Stop> {
    let at = cursor.at as u64;
    let name = cursor.string(|| format!("key number {index}"))?;
    if name.is_empty() {
        return Err(Stop::Malformed(Defect::EmptyKey { index, offset: at }));
    }
    let name: Box<[u8]> = name.into();
    let lossy = || String::from_utf8_lossy(&name).into_owned();
    let what = || format!("the value of key '{}'", lossy());

    let bad_type = |found, offset| {
        Stop::Malformed(Defect::ValueType {
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
        let (scalar, len) = (Key::inline(bytes), bytes.len() as u64);
        return Ok(Key {
            name,
            ty,
            array: false,
            count: 1,
            offset,
            len,
            scalar,
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
        return Err(Stop::Malformed(Defect::TooLong {
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
    Ok(Key {
        name,
        ty: element,
        array: true,
        count,
        offset,
        len: cursor.at as u64 - offset,
        scalar: 0,
    })
}

fn alignment(keys: &[Key]) -> Result<u64, Stop> {
    let Some(key) = keys
        .iter()
        .find(|key| &*key.name == ALIGNMENT_KEY.as_bytes())
    else {
        return Ok(DEFAULT_ALIGNMENT);
    };
    if key.ty != ValueType::U32 || key.array {
        return Err(Stop::Malformed(Defect::AlignmentType {
            found: if key.array { ValueType::Array } else { key.ty },
        }));
    }
    let found = key.scalar as u32;
    if !found.is_power_of_two() {
        return Err(Stop::Malformed(Defect::Alignment { found }));
    }
    Ok(u64::from(found))
}

/// Reads one tensor info; its `offset` is still the one inside the data section.
fn tensor_info(
    cursor: &mut Cursor,
    index: u64,
    names: &mut Names,
    tensors: &[TensorInfo],
) -> Result<TensorInfo, Stop> {
    let offset = cursor.at as u64;
    let what = || format!("the info of tensor number {index}");
    let raw_name = cursor.string(what)?;
    if raw_name.len() >= MAX_NAME {
        return Err(Stop::Malformed(Defect::LongName {
            index,
            offset,
            length: raw_name.len() as u64,
        }));
    }
    // ggml keeps names as C strings: what follows a NUL is not part of them.
    let raw_name = raw_name.split(|&byte| byte == 0).next().unwrap_or_default();
    let lossy = || String::from_utf8_lossy(raw_name).into_owned();
    let Some(name_at) = names.insert(raw_name, tensors) else {
        return Err(Stop::Malformed(Defect::DuplicateTensor {
            name: lossy(),
            offset,
        }));
    };

    let n_dims = cursor.u32(what)?;
    if n_dims as usize > MAX_DIMS {
        return Err(Stop::Malformed(Defect::Dimensions {
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
        Stop::Malformed(Defect::Shape {
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
        Stop::Malformed(Defect::UnknownType {
            name: lossy(),
            offset,
            found: raw_type,
        })
    })?;
    if !ne[0].is_multiple_of(ty.block) {
        return Err(Stop::Malformed(Defect::Block {
            name: lossy(),
            offset,
            row: ne[0],
            block: ty.block,
            ty: ty.name(),
        }));
    }
    let nbytes = if empty {
        Some(0)
    } else {
        ne[1..]
            .iter()
            .try_fold(ty.row_bytes(ne[0]).unwrap_or(u64::MAX), |n, &extent| {
                n.checked_mul(extent)
            })
    };
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
) -> Result<u64, Stop> {
    let header_end = cursor.at as u64;
    if tensors.is_empty() {
        return Ok(header_end);
    }
    let start = header_end.next_multiple_of(alignment);
    if start > cursor.file_len {
        return Err(Stop::Malformed(Defect::DataStart {
            start,
            file_len: cursor.file_len,
        }));
    }
    let mut expected = 0u64;
    for tensor in tensors {
        let lossy = || names.get(tensor.name_at).to_string_lossy().into_owned();
        if tensor.offset != expected {
            return Err(Stop::Malformed(Defect::Offset {
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
            return Err(Stop::Malformed(Defect::DataSize { name: lossy() }));
        };
        tensor.offset = absolute;
        expected = next;
    }
    Ok(start)
}

/// A position in the bytes read so far of a file that may be longer.
struct Cursor<'a> {
    bytes: &'a [u8],
    at: usize,
    file_len: u64,
}

impl<'a> Cursor<'a> {
    #[inline]
    fn take(&mut self, n: u64, what: impl Fn() -> String) -> Result<&'a [u8], Stop> {
        if n > (self.bytes.len() - self.at) as u64 {
            return Err(self.out_of_bytes(n, what));
        }
        let taken = &self.bytes[self.at..self.at + n as usize];
        self.at += n as usize;
        Ok(taken)
    }

    #[cold]
    fn out_of_bytes(&self, needed: u64, what: impl Fn() -> String) -> Stop {
        let remaining = self.file_len - self.at as u64;
        if needed > remaining {
            return Stop::Malformed(Defect::Truncated {
                what: what(),
                offset: self.at as u64,
                needed,
                remaining,
            });
        }
        Stop::NeedMore(self.at as u64 + needed)
    }

    #[inline]
    fn u32(&mut self, what: impl Fn() -> String) -> Result<u32, Stop> {
        let bytes = self.take(4, what)?;
        Ok(u32::from_le_bytes(bytes.try_into().expect("four bytes")))
    }

    #[inline]
    fn u64(&mut self, what: impl Fn() -> String) -> Result<u64, Stop> {
        let bytes = self.take(8, what)?;
        Ok(u64::from_le_bytes(bytes.try_into().expect("eight bytes")))
    }

    #[inline]
    fn string(&mut self, what: impl Fn() -> String) -> Result<&'a [u8], Stop> {
        let offset = self.at as u64;
        let length = self.u64(&what)?;
        if length > MAX_STRING {
            return Err(Stop::Malformed(Defect::TooLong {
                what: what(),
                offset,
                length,
                limit: MAX_STRING,
            }));
        }
        self.take(length, what)
    }

    /// Walks over `count` strings. This loop is where opening a model spends its
    /// time: each length is needed to find the next one, so it is kept to one load
    /// and one comparison a string, and leaves the messages to [`Cursor::string`].
    fn skip_strings(&mut self, count: u64, what: impl Fn() -> String) -> Result<(), Stop> {
        let bytes = self.bytes;
        let mut at = self.at;
        for _ in 0..count {
            let length = bytes[at..].first_chunk().map(|n| u64::from_le_bytes(*n));
            match length {
                Some(n) if n <= MAX_STRING.min((bytes.len() - at - 8) as u64) => {
                    at += 8 + n as usize;
                }
                _ => {
                    self.at = at;
                    self.string(&what)?;
                    at = self.at;
                }
            }
        }
        self.at = at;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn header(bytes: &[u8]) -> Result<Header, Stop> {
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
            Err(Stop::Malformed(Defect::BigEndian {
                version: 0x0300_0000
            }))
        ));
        bytes[4..8].copy_from_slice(&1u32.to_le_bytes());
        assert!(matches!(
            header(&bytes),
            Err(Stop::Malformed(Defect::Version1))
        ));
    }

    #[test]
    fn counts_larger_than_the_file_do_not_allocate() {
        for count in [1, i64::MAX, -1, 1 << 32] {
            let mut bytes = minimal();
            bytes[8..16].copy_from_slice(&count.to_le_bytes());
            assert!(matches!(
                header(&bytes),
                Err(Stop::Malformed(Defect::Count { .. }))
            ));
        }
    }

    #[test]
    fn a_prefix_asks_for_more_and_the_end_of_the_file_is_an_error() {
        let whole = minimal();
        for cut in 0..whole.len() {
            let more = Header::parse(&whole[..cut], whole.len() as u64);
            assert!(
                matches!(more, Err(Stop::NeedMore(n)) if n > cut as u64),
                "{cut}"
            );
            let end = header(&whole[..cut]);
            assert!(
                matches!(end, Err(Stop::Malformed(d)) if d.is_short()),
                "{cut}"
            );
        }
    }
}
