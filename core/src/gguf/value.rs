//! Metadata values: their positions in the file, and decoding.

use std::fmt;

pub use gguf_write::ValueType;

/// The validated position of a key-value. The value stays in the file.
#[derive(Debug, Clone)]
pub struct KeyValue {
    /// Name, as in the file.
    pub name: Box<[u8]>,
    /// Type of the value, or of the elements of an array.
    pub ty: ValueType,
    /// Whether the value is an array.
    pub array: bool,
    /// Number of elements of an array; 1 for any other value.
    pub count: u64,
    /// First byte of the value from the start of the file (for a string, of its
    /// text; for an array, of its first element).
    pub offset: u64,
    /// Bytes of the value.
    pub len: u64,
    /// The little-endian bits of a value of at most 8 bytes that is not an array.
    pub(super) scalar: u64,
    /// A hash of the bytes of the value.
    pub(super) hash: u64,
}

impl KeyValue {
    /// Returns the name for messages.
    pub fn name_lossy(&self) -> String {
        String::from_utf8_lossy(&self.name).into_owned()
    }

    /// Returns whether both have the same type and the same bytes, which need not be in a file any more.
    pub fn same_value(&self, other: &KeyValue) -> bool {
        let value = |key: &KeyValue| (key.ty, key.array, key.count, key.len, key.hash);
        value(self) == value(other)
    }

    /// Returns the value of a non-negative integer that is not an array; `None` for any other
    /// value.
    pub fn as_u64(&self) -> Option<u64> {
        if self.array {
            return None;
        }
        Value::of_bits(self.ty, self.scalar)?.as_u64()
    }

    pub(super) fn inline(bytes: &[u8]) -> u64 {
        let mut bits = [0; 8];
        if let Some(bits) = bits.get_mut(..bytes.len()) {
            bits.copy_from_slice(bytes);
        }
        u64::from_le_bytes(bits)
    }
}

/// A value that is not an array.
#[derive(Debug, Clone, PartialEq)]
pub enum Value {
    /// Any unsigned integer.
    Unsigned(u64),
    /// Any signed integer.
    Signed(i64),
    /// A 32-bit float.
    Single(f32),
    /// A 64-bit float.
    Double(f64),
    /// A boolean.
    Bool(bool),
    /// Text, not necessarily UTF-8.
    Text(Vec<u8>),
}

impl Value {
    /// Decodes one value of type `ty` from exactly its bytes.
    ///
    /// Returns `None` when `bytes` has the wrong length for the type.
    pub fn decode(ty: ValueType, bytes: &[u8]) -> Option<Value> {
        if ty
            .fixed_size()
            .is_some_and(|size| size != bytes.len() as u64)
        {
            return None;
        }
        match ty {
            ValueType::String => Some(Value::Text(bytes.to_vec())),
            _ => Value::of_bits(ty, KeyValue::inline(bytes)),
        }
    }

    /// Returns a non-negative integer; `None` for any other value.
    pub fn as_u64(&self) -> Option<u64> {
        match *self {
            Value::Unsigned(number) => Some(number),
            Value::Signed(number) => number.try_into().ok(),
            _ => None,
        }
    }

    /// Decodes a value of a fixed size from its little-endian bits.
    fn of_bits(ty: ValueType, bits: u64) -> Option<Value> {
        Some(match ty {
            ValueType::U8 | ValueType::U16 | ValueType::U32 | ValueType::U64 => {
                Value::Unsigned(bits)
            }
            ValueType::I8 => Value::Signed(i64::from(bits as i8)),
            ValueType::I16 => Value::Signed(i64::from(bits as i16)),
            ValueType::I32 => Value::Signed(i64::from(bits as i32)),
            ValueType::I64 => Value::Signed(bits as i64),
            ValueType::F32 => Value::Single(f32::from_bits(bits as u32)),
            ValueType::F64 => Value::Double(f64::from_bits(bits)),
            ValueType::Bool => Value::Bool(bits != 0),
            ValueType::String | ValueType::Array => return None,
        })
    }
}

impl fmt::Display for Value {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Value::Unsigned(n) => n.fmt(f),
            Value::Signed(n) => n.fmt(f),
            Value::Single(n) => n.fmt(f),
            Value::Double(n) => n.fmt(f),
            Value::Bool(b) => b.fmt(f),
            Value::Text(text) => f.write_str(&String::from_utf8_lossy(text)),
        }
    }
}

/// The bytes of an array of strings, and the range of each string.
#[derive(Debug)]
pub struct Strings {
    bytes: Vec<u8>,
    ranges: Vec<std::ops::Range<usize>>,
}

impl Strings {
    /// Finds `count` strings in the bytes of an array.
    ///
    /// Returns `None` when the lengths do not add up to `bytes`, because the file changed after its
    /// header was checked.
    pub fn parse(bytes: Vec<u8>, count: u64) -> Option<Strings> {
        let mut ranges = Vec::with_capacity(count.min(bytes.len() as u64 / 8) as usize);
        let mut at = 0usize;
        for _ in 0..count {
            let length = u64::from_le_bytes(*bytes.get(at..)?.first_chunk()?);
            let start = at + 8;
            let end = start.checked_add(usize::try_from(length).ok()?)?;
            bytes.get(start..end)?;
            ranges.push(start..end);
            at = end;
        }
        (at == bytes.len()).then_some(Strings { bytes, ranges })
    }

    /// Returns the string at a position.
    pub fn get(&self, at: u64) -> Option<&[u8]> {
        let range = self.ranges.get(usize::try_from(at).ok()?)?;
        Some(&self.bytes[range.clone()])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scalars_decode_by_type() {
        let decode = |ty, bytes: &[u8]| Value::decode(ty, bytes).unwrap();
        assert_eq!(decode(ValueType::I16, &[0xff, 0xff]), Value::Signed(-1));
        assert_eq!(
            decode(ValueType::F32, &1.5f32.to_le_bytes()),
            Value::Single(1.5)
        );
        assert_eq!(decode(ValueType::Bool, &[2]), Value::Bool(true));
        assert_eq!(Value::decode(ValueType::U64, &[0; 4]), None);
    }

    #[test]
    fn string_arrays_are_checked_when_read() {
        let mut bytes = 2u64.to_le_bytes().to_vec();
        bytes.extend(b"ab");
        bytes.extend(0u64.to_le_bytes());
        let parse = |bytes: &[u8], count| Strings::parse(bytes.to_vec(), count);
        let strings = parse(&bytes, 2).unwrap();
        assert_eq!(strings.get(0), Some(b"ab".as_slice()));
        assert_eq!(
            (strings.get(1), strings.get(2)),
            (Some(b"".as_slice()), None)
        );
        assert!(parse(&bytes, 1).is_none(), "bytes left over");
        assert!(parse(&bytes, 3).is_none(), "too few bytes");
        bytes[0] = 0xff;
        assert!(parse(&bytes, 2).is_none(), "length past the end");
    }
}
