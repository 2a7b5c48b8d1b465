//! Writes GGUF files: the header, then the data of each tensor.
//!
//! Layout, from the [GGUF specification]: the magic, the version, both counts, the key-values, the
//! tensor infos, zeros up to a multiple of `general.alignment`, and the data section. In the data
//! section, each tensor starts at a multiple of the alignment. All integers are little-endian;
//! a string is its length as `u64` and its bytes, without a NUL.
//!
//! [GGUF specification]: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md

use std::fmt;
use std::io::{self, Read, Write};

/// Alignment of the data section when the file names none.
pub const DEFAULT_ALIGNMENT: u64 = 32;
/// The key with the alignment of the data section.
pub const ALIGNMENT_KEY: &str = "general.alignment";
/// The version that is written.
const VERSION: u32 = 3;

/// Type of a metadata value; the numbers are those of `enum gguf_type`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
#[allow(missing_docs, reason = "the names say it")]
pub enum ValueType {
    U8 = 0,
    I8 = 1,
    U16 = 2,
    I16 = 3,
    U32 = 4,
    I32 = 5,
    F32 = 6,
    Bool = 7,
    String = 8,
    Array = 9,
    U64 = 10,
    I64 = 11,
    F64 = 12,
}

impl ValueType {
    /// Returns the type with this number.
    pub fn from_id(id: u32) -> Option<ValueType> {
        use ValueType::*;
        const ALL: [ValueType; 13] = [
            U8, I8, U16, I16, U32, I32, F32, Bool, String, Array, U64, I64, F64,
        ];
        ALL.get(id as usize).copied()
    }

    /// Returns the bytes of one value, or `None` for strings and arrays.
    pub fn fixed_size(self) -> Option<u64> {
        match self {
            ValueType::U8 | ValueType::I8 | ValueType::Bool => Some(1),
            ValueType::U16 | ValueType::I16 => Some(2),
            ValueType::U32 | ValueType::I32 | ValueType::F32 => Some(4),
            ValueType::U64 | ValueType::I64 | ValueType::F64 => Some(8),
            ValueType::String | ValueType::Array => None,
        }
    }
}

impl fmt::Display for ValueType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            ValueType::U8 => "u8",
            ValueType::I8 => "i8",
            ValueType::U16 => "u16",
            ValueType::I16 => "i16",
            ValueType::U32 => "u32",
            ValueType::I32 => "i32",
            ValueType::F32 => "f32",
            ValueType::Bool => "bool",
            ValueType::String => "str",
            ValueType::Array => "arr",
            ValueType::U64 => "u64",
            ValueType::I64 => "i64",
            ValueType::F64 => "f64",
        })
    }
}

/// The tensors need more bytes than 64 bits can count.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the file would need more bytes than a file can have")]
pub struct TooLarge;

/// A Rust type that a key can have as its value, or an array as its elements.
pub trait MetadataValue {
    /// The type of the value in the file.
    const TYPE: ValueType;

    /// Appends the bytes of the value.
    fn encode(&self, out: &mut Vec<u8>);
}

macro_rules! numbers {
    ($($rust:ty: $ty:ident,)*) => {
        $(impl MetadataValue for $rust {
            const TYPE: ValueType = ValueType::$ty;

            fn encode(&self, out: &mut Vec<u8>) {
                out.extend(self.to_le_bytes());
            }
        })*
    };
}

numbers! {
    u8: U8, i8: I8, u16: U16, i16: I16, u32: U32, i32: I32, u64: U64, i64: I64, f32: F32, f64: F64,
}

impl MetadataValue for bool {
    const TYPE: ValueType = ValueType::Bool;

    fn encode(&self, out: &mut Vec<u8>) {
        out.push(u8::from(*self));
    }
}

impl MetadataValue for str {
    const TYPE: ValueType = ValueType::String;

    fn encode(&self, out: &mut Vec<u8>) {
        push_string(out, self.as_bytes());
    }
}

impl MetadataValue for String {
    const TYPE: ValueType = ValueType::String;

    fn encode(&self, out: &mut Vec<u8>) {
        self.as_str().encode(out);
    }
}

impl<T: MetadataValue + ?Sized> MetadataValue for &T {
    const TYPE: ValueType = T::TYPE;

    fn encode(&self, out: &mut Vec<u8>) {
        T::encode(self, out);
    }
}

/// Builds the header of a file.
///
/// Names, shapes, and types are written as given. What a reader refuses, such as a tensor name
/// longer than 63 bytes, can be written too.
#[derive(Debug, Clone)]
pub struct HeaderWriter {
    version: u32,
    alignment: u32,
    keys: Vec<u8>,
    key_count: u64,
    infos: Vec<u8>,
    tensor_count: u64,
    data_len: u64,
}

impl HeaderWriter {
    /// Starts the header of a file without keys and tensors.
    ///
    /// # Panics
    ///
    /// Panics when `alignment` is not a power of two.
    pub fn new(alignment: u32) -> HeaderWriter {
        assert!(
            alignment.is_power_of_two(),
            "alignment {alignment} is not a power of two"
        );
        HeaderWriter {
            version: VERSION,
            alignment,
            keys: Vec::new(),
            key_count: 0,
            infos: Vec::new(),
            tensor_count: 0,
            data_len: 0,
        }
    }

    /// Sets the version field; it is 3 otherwise.
    pub fn version(&mut self, version: u32) {
        self.version = version;
    }

    /// Adds a key with one value.
    pub fn value<T: MetadataValue + ?Sized>(&mut self, key: &str, value: &T) {
        let mut bytes = Vec::new();
        value.encode(&mut bytes);
        self.raw(key, T::TYPE as u32, &bytes);
    }

    /// Adds a key whose value is an array.
    pub fn array<T: MetadataValue>(&mut self, key: &str, values: &[T]) {
        let mut bytes = (T::TYPE as u32).to_le_bytes().to_vec();
        bytes.extend((values.len() as u64).to_le_bytes());
        values.iter().for_each(|value| value.encode(&mut bytes));
        self.raw(key, ValueType::Array as u32, &bytes);
    }

    /// Adds a key with the number of a value type and the bytes that follow the number.
    pub fn raw(&mut self, key: &str, value_type: u32, bytes: &[u8]) {
        self.key_count += 1;
        push_string(&mut self.keys, key.as_bytes());
        self.keys.extend(value_type.to_le_bytes());
        self.keys.extend(bytes);
    }

    /// Adds a tensor of `nbytes` bytes. `ne` has the elements per dimension, innermost first.
    ///
    /// Returns the offset of its data in the data section. Data is written in the order of these
    /// calls.
    pub fn tensor(
        &mut self,
        name: &[u8],
        ne: &[u64],
        type_id: u32,
        nbytes: u64,
    ) -> Result<u64, TooLarge> {
        let offset = self.data_len;
        let next = padded(nbytes, self.alignment.into()).and_then(|len| offset.checked_add(len));
        self.data_len = next.ok_or(TooLarge)?;
        self.tensor_count += 1;
        push_string(&mut self.infos, name);
        self.infos.extend((ne.len() as u32).to_le_bytes());
        self.infos
            .extend(ne.iter().flat_map(|extent| extent.to_le_bytes()));
        self.infos.extend(type_id.to_le_bytes());
        self.infos.extend(offset.to_le_bytes());
        Ok(offset)
    }

    /// Returns the bytes before the data section, padding included.
    ///
    /// The key `general.alignment` is added when the alignment is not the default of 32.
    pub fn finish(mut self) -> Vec<u8> {
        if u64::from(self.alignment) != DEFAULT_ALIGNMENT {
            let alignment = self.alignment;
            self.value(ALIGNMENT_KEY, &alignment);
        }
        let mut header = b"GGUF".to_vec();
        header.extend(self.version.to_le_bytes());
        header.extend(self.tensor_count.to_le_bytes());
        header.extend(self.key_count.to_le_bytes());
        header.extend(&self.keys);
        header.extend(&self.infos);
        let padding = padding(header.len() as u64, self.alignment.into());
        header.resize(header.len() + padding as usize, 0);
        header
    }
}

fn push_string(out: &mut Vec<u8>, text: &[u8]) {
    out.extend((text.len() as u64).to_le_bytes());
    out.extend(text);
}

/// Returns the number of bytes between the end of `len` bytes and the next multiple of `alignment`.
pub fn padding(len: u64, alignment: u64) -> u64 {
    (alignment - len % alignment) % alignment
}

/// Returns `len` rounded up to a multiple of `alignment`, or `None` when that does not fit 64 bits.
pub fn padded(len: u64, alignment: u64) -> Option<u64> {
    len.checked_add(padding(len, alignment))
}

/// Copies `len` bytes of `data` to `out`, and appends zeros up to a multiple of `alignment`.
///
/// Fails with [`io::ErrorKind::UnexpectedEof`] when `data` is shorter.
pub fn write_data(
    out: &mut impl Write,
    data: impl Read,
    len: u64,
    alignment: u64,
) -> io::Result<()> {
    if io::copy(&mut data.take(len), out)? < len {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    io::copy(&mut io::repeat(0).take(padding(len, alignment)), out)?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_beyond_64_bits_are_refused() {
        let mut writer = HeaderWriter::new(32);
        assert_eq!(writer.tensor(b"a", &[1], 0, u64::MAX), Err(TooLarge));
        assert_eq!(writer.tensor(b"a", &[1], 0, u64::MAX - 31), Ok(0));
        assert_eq!(writer.tensor(b"b", &[1], 0, 1), Err(TooLarge));
    }

    #[test]
    fn data_that_ends_early_is_an_error() {
        let error = write_data(&mut Vec::new(), [1u8, 2].as_slice(), 3, 32).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::UnexpectedEof);
    }
}
