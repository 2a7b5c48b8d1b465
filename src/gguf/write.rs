//! Writes GGUF files: the header, then the data of each tensor.
//!
//! Layout, from the [GGUF specification]: the magic, the version, both counts, the key-values, the
//! tensor infos, zeros up to a multiple of `general.alignment`, and the data section. In the data
//! section, each tensor starts at a multiple of the alignment. All integers are little-endian;
//! a string is its length as `u64` and its bytes, without a NUL.
//!
//! ```
//! use llama_sidecar::gguf::{Access, GgufFile, HeaderWriter, TypeInfo, write_data};
//!
//! let f32 = TypeInfo::from_name("f32").unwrap();
//! let data: Vec<u8> = (0..6).flat_map(|n| (n as f32).to_le_bytes()).collect();
//!
//! let mut header = HeaderWriter::new(32);
//! header.value("general.architecture", "llama");
//! header.value("llama.block_count", &1u32);
//! header.array("tokenizer.ggml.tokens", &["a", "b", "c"]);
//! header.tensor(b"output.weight", &[3, 2], f32.id, data.len() as u64)?;
//!
//! let path = tempfile::NamedTempFile::new()?.into_temp_path();
//! let mut file = std::fs::File::create(&path)?;
//! std::io::Write::write_all(&mut file, &header.finish())?;
//! write_data(&mut file, data.as_slice(), data.len() as u64, 32)?;
//!
//! let read = GgufFile::open(&path, Access::Map)?;
//! let info = &read.header.tensors[0];
//! assert_eq!(read.header.name(info), c"output.weight");
//! assert_eq!(read.source.mapped(info.offset, info.nbytes), Some(data.as_slice()));
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! [GGUF specification]: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md

use std::io::{self, Read, Write};

use super::header::{ALIGNMENT_KEY, DEFAULT_ALIGNMENT, Header};
use super::types::TypeInfo;
use super::value::ValueType;

/// The version that is written.
const VERSION: u32 = 3;

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

/// Bytes of the type and the offset of a tensor info, which follow each other.
pub const TYPE_AND_OFFSET: usize = 4 + 8;

/// Finds the type field of each tensor in the bytes of a header; the offset field follows it.
///
/// `None` when `bytes` are not those that `header` was parsed from.
pub fn type_fields(header: &Header, bytes: &[u8]) -> Option<Vec<usize>> {
    let ends = header.keys.iter().map(|key| key.offset + key.len);
    let mut at = usize::try_from(ends.max().unwrap_or(24)).ok()?;
    let mut fields = Vec::with_capacity(header.tensors.len());
    for info in &header.tensors {
        let len = u64::from_le_bytes(*bytes.get(at..)?.first_chunk()?);
        let name = bytes.get(at + 8..)?.get(..usize::try_from(len).ok()?)?;
        let field = at + 8 + name.len() + 4 + 8 * info.n_dims as usize;
        at = field + TYPE_AND_OFFSET;
        if !name.starts_with(header.name(info).to_bytes()) || at > bytes.len() {
            return None;
        }
        fields.push(field);
    }
    Some(fields)
}

/// Gives the tensors of a header other types, and the data offsets that follow from their sizes.
///
/// `fields` comes from [`type_fields`]; `tensors` are type and size in bytes of each tensor, in the
/// order of the header.
pub fn retype<'a>(
    bytes: &mut [u8],
    fields: &[usize],
    alignment: u64,
    tensors: impl IntoIterator<Item = (&'a TypeInfo, u64)>,
) -> Result<(), TooLarge> {
    let mut offset = 0u64;
    for (&at, (ty, nbytes)) in fields.iter().zip(tensors) {
        let field = &mut bytes[at..at + TYPE_AND_OFFSET];
        field[..4].copy_from_slice(&ty.id.to_le_bytes());
        field[4..].copy_from_slice(&offset.to_le_bytes());
        let next = padded(nbytes, alignment).and_then(|len| offset.checked_add(len));
        offset = next.ok_or(TooLarge)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn parse(bytes: &[u8], data_len: u64) -> Header {
        Header::parse(bytes, bytes.len() as u64 + data_len).unwrap()
    }

    #[test]
    fn values_of_every_type_are_found() {
        let mut writer = HeaderWriter::new(32);
        writer.value("u8", &1u8);
        writer.value("i64", &-1i64);
        writer.value("bool", &true);
        writer.value("text", "llama");
        writer.array("texts", &["a", "", "ccc"]);
        writer.array("floats", &[1.5f32, 2.5]);
        let bytes = writer.finish();
        let header = parse(&bytes, 0);
        let found: Vec<_> = header
            .keys
            .iter()
            .map(|key| (key.name_lossy(), key.ty, key.array, key.count))
            .collect();
        let expected = [
            ("u8", ValueType::U8, false, 1),
            ("i64", ValueType::I64, false, 1),
            ("bool", ValueType::Bool, false, 1),
            ("text", ValueType::String, false, 1),
            ("texts", ValueType::String, true, 3),
            ("floats", ValueType::F32, true, 2),
        ];
        assert_eq!(
            found,
            expected.map(|(name, ty, array, count)| (name.to_owned(), ty, array, count))
        );
        let text = &header.keys[3];
        assert_eq!(
            &bytes[text.offset as usize..][..text.len as usize],
            b"llama"
        );
    }

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

    proptest! {
        #[test]
        fn what_is_written_is_read(
            shapes in prop::collection::vec(prop::collection::vec(1u64..9, 0..=4), 0..8),
            shift in 0u32..8,
        ) {
            let f32 = TypeInfo::from_name("f32").unwrap();
            let f64 = TypeInfo::from_name("f64").unwrap();
            let alignment = 1 << shift;
            let len = |ty: &TypeInfo, ne: &[u64]| ne.iter().product::<u64>() * ty.bytes;
            let header = |ty: &TypeInfo| {
                let mut writer = HeaderWriter::new(alignment);
                writer.value("general.architecture", "llama");
                for (at, ne) in shapes.iter().enumerate() {
                    writer.tensor(format!("t{at}").as_bytes(), ne, ty.id, len(ty, ne)).unwrap();
                }
                writer.finish()
            };
            let mut bytes = header(f32);
            let data: u64 = shapes.iter().map(|ne| padded(len(f32, ne), alignment.into()).unwrap()).sum();
            let parsed = parse(&bytes, data);
            prop_assert_eq!(parsed.alignment, u64::from(alignment));
            prop_assert_eq!(parsed.tensors.len(), shapes.len());
            for (info, ne) in parsed.tensors.iter().zip(&shapes) {
                prop_assert_eq!(&info.ne[..ne.len()], ne.as_slice());
                prop_assert_eq!(info.nbytes, len(f32, ne));
            }
            prop_assert!(parsed.check_data(bytes.len() as u64 + data).is_ok());

            let fields = type_fields(&parsed, &bytes).unwrap();
            let tensors = shapes.iter().map(|ne| (f64, len(f64, ne)));
            retype(&mut bytes, &fields, alignment.into(), tensors).unwrap();
            prop_assert_eq!(bytes, header(f64));
        }
    }
}
