//! Writes GGUF files with the crate `gguf-write`, and changes the types of tensors in a header.
//!
//! ```
//! use sidecar_core::gguf::{Access, GgufFile, HeaderWriter, TypeInfo, write_data};
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

pub use gguf_write::{HeaderWriter, MetadataValue, TooLarge, padded, padding, write_data};

use std::collections::VecDeque;
use std::io;
use std::ops::Range;

use super::file::GgufFile;
use super::header::Header;
use super::types::TypeInfo;
use super::value::{KeyValue, ValueType};

/// Adds a key of another file to a header, with the bytes of its value.
///
/// # Errors
///
/// Fails when the value cannot be read, or the key is not UTF-8.
pub fn copy_value(header: &mut HeaderWriter, file: &GgufFile, key: &KeyValue) -> io::Result<()> {
    let mut bytes = Vec::new();
    if key.array {
        bytes.extend((key.ty as u32).to_le_bytes());
        bytes.extend(key.count.to_le_bytes());
    } else if key.ty == ValueType::String {
        bytes.extend(key.len.to_le_bytes());
    }
    let start = bytes.len();
    let len = usize::try_from(key.len).map_err(io::Error::other)?;
    bytes.resize(start + len, 0);
    file.source.read_at(&mut bytes[start..], key.offset)?;
    let ty = if key.array { ValueType::Array } else { key.ty };
    let name = std::str::from_utf8(&key.name)
        .map_err(|_| io::Error::other(format!("the key {:?} is not UTF-8", key.name_lossy())))?;
    header.raw(name, ty as u32, &bytes);
    Ok(())
}

/// Reads ranges of a file, one after the other.
pub struct Pieces<'a> {
    file: &'a GgufFile,
    ranges: VecDeque<Range<u64>>,
}

impl<'a> Pieces<'a> {
    /// Reads these ranges.
    pub fn of(file: &'a GgufFile, ranges: impl IntoIterator<Item = Range<u64>>) -> Pieces<'a> {
        Pieces {
            file,
            ranges: ranges.into_iter().collect(),
        }
    }

    /// Returns the file that has the ranges.
    pub fn file(&self) -> &'a GgufFile {
        self.file
    }

    /// Returns the bytes that are left to read.
    pub fn size(&self) -> u64 {
        let ranges = self.ranges.iter();
        ranges.map(|range| range.end - range.start).sum()
    }
}

impl io::Read for Pieces<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        while self.ranges.front().is_some_and(|range| range.is_empty()) {
            self.ranges.pop_front();
        }
        let Some(range) = self.ranges.front_mut() else {
            return Ok(0);
        };
        let count = (range.end - range.start).min(buffer.len() as u64) as usize;
        self.file
            .source
            .read_at(&mut buffer[..count], range.start)?;
        range.start += count as u64;
        Ok(count)
    }
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
    use crate::gguf::ValueType;

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
