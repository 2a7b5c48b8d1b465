//! Positions and formats of the scales in the blocks of each type.
//!
//! Offsets are those of the `block_*` structs in ggml's `ggml-common.h`. For types without
//! blocks, each element counts as its own scale.

use super::types::{Dialect, TypeInfo};

/// How a scale is stored, little-endian.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ScaleFormat {
    /// IEEE 754, 32 bits.
    F32,
    /// IEEE 754, 16 bits.
    F16,
    /// The upper half of a 32-bit float.
    Bf16,
    /// An exponent alone, 8 bits, as in the OCP microscaling formats: 255 is not a number.
    E8m0,
}

/// Class of a scale.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ScaleClass {
    /// Zero: all elements of the block are zero.
    Zero,
    /// A finite number other than zero.
    Finite,
    /// An infinity, or not a number.
    NonFinite,
}

impl ScaleFormat {
    /// Classifies the scale at the start of `bytes`.
    #[inline]
    pub fn classify(self, bytes: &[u8]) -> ScaleClass {
        let word = |at: usize| u16::from_le_bytes([bytes[at], bytes[at + 1]]);
        let (magnitude, exponent) = match self {
            ScaleFormat::F32 => {
                let bits = u32::from(word(0)) | u32::from(word(2)) << 16;
                (bits & 0x7fff_ffff, 0x7f80_0000)
            }
            ScaleFormat::F16 => (u32::from(word(0) & 0x7fff), 0x7c00),
            ScaleFormat::Bf16 => (u32::from(word(0) & 0x7fff), 0x7f80),
            // The smallest exponent is a number, too: no block is zero for its scale.
            ScaleFormat::E8m0 if bytes[0] == 0xff => return ScaleClass::NonFinite,
            ScaleFormat::E8m0 => return ScaleClass::Finite,
        };
        match magnitude {
            0 => ScaleClass::Zero,
            _ if magnitude & exponent == exponent => ScaleClass::NonFinite,
            _ => ScaleClass::Finite,
        }
    }
}

impl ScaleFormat {
    /// Returns the size of a scale in bytes.
    pub fn size(self) -> usize {
        match self {
            ScaleFormat::F32 => 4,
            ScaleFormat::F16 | ScaleFormat::Bf16 => 2,
            ScaleFormat::E8m0 => 1,
        }
    }

    /// Returns whether all numbers in `bytes` are zero, and how many are not finite. The result is
    /// that of [`ScaleFormat::classify`] for each; the loops have no branches, for vector code.
    pub fn scan(self, bytes: &[u8]) -> (bool, u64) {
        match self {
            ScaleFormat::F32 => {
                let words = bytes.chunks_exact(4);
                let words = words.map(|b| u32::from_le_bytes([b[0], b[1], b[2], b[3]]));
                let (mut bits, mut non_finite) = (0, 0u32);
                for magnitude in words.map(|word| word & 0x7fff_ffff) {
                    bits |= magnitude;
                    non_finite += u32::from(magnitude as i32 >= 0x7f80_0000);
                }
                (bits == 0, u64::from(non_finite))
            }
            ScaleFormat::F16 => scan_halves(bytes, 0x7c00),
            ScaleFormat::Bf16 => scan_halves(bytes, 0x7f80),
            ScaleFormat::E8m0 => {
                let non_finite = bytes.iter().filter(|&&byte| byte == 0xff).count();
                (bytes.is_empty(), non_finite as u64)
            }
        }
    }
}

/// Scans numbers of 16 bits whose exponent has these bits.
fn scan_halves(bytes: &[u8], exponent: i16) -> (bool, u64) {
    let words = bytes.chunks_exact(2);
    let words = words.map(|b| i16::from_le_bytes([b[0], b[1]]));
    let (mut bits, mut non_finite) = (0, 0u32);
    for magnitude in words.map(|word| word & 0x7fff) {
        bits |= magnitude;
        non_finite += u32::from(magnitude >= exponent);
    }
    (bits == 0, u64::from(non_finite))
}

impl TypeInfo {
    /// Returns the format and the offsets of the scales in a block of this type. There are no
    /// offsets for a type that is not in the table.
    pub fn scales(&self) -> (ScaleFormat, &'static [usize]) {
        use ScaleFormat::*;
        if self.dialect != Dialect::Upstream {
            return (F16, &[]);
        }
        match self.name() {
            "f32" => (F32, &[0]),
            "f16" => (F16, &[0]),
            "bf16" => (Bf16, &[0]),
            "q4_0" | "q5_0" | "q8_0" | "iq4_nl" | "iq2_xxs" | "iq2_xs" | "iq2_s" | "iq3_xxs"
            | "iq3_s" | "iq1_s" | "iq4_xs" => (F16, &[0]),
            "q4_1" | "q5_1" | "q8_1" | "q4_K" | "q5_K" => (F16, &[0, 2]),
            "q2_K" => (F16, &[80, 82]),
            "q3_K" => (F16, &[108]),
            "q6_K" => (F16, &[208]),
            "tq1_0" => (F16, &[52]),
            "tq2_0" => (F16, &[64]),
            "mxfp4" => (E8m0, &[0]),
            _ => (F16, &[]),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gguf::TYPES;

    #[test]
    fn scales_lie_within_their_blocks() {
        for ty in &TYPES {
            let (format, offsets) = ty.scales();
            for at in offsets {
                assert!(at + format.size() <= ty.bytes as usize, "{}", ty.name());
            }
        }
    }

    #[test]
    fn numbers_are_classified() {
        use ScaleClass::*;
        let f32 = |x: f32| ScaleFormat::F32.classify(&x.to_le_bytes());
        assert_eq!((f32(0.0), f32(-0.0), f32(1e-45)), (Zero, Zero, Finite));
        assert_eq!(
            (f32(f32::NAN), f32(f32::NEG_INFINITY)),
            (NonFinite, NonFinite)
        );
        let f16 = |bits: u16| ScaleFormat::F16.classify(&bits.to_le_bytes());
        assert_eq!((f16(0x8000), f16(0x7bff)), (Zero, Finite));
        assert_eq!((f16(0x7c00), f16(0xfe00)), (NonFinite, NonFinite));
        let bf16 = |x: f32| ScaleFormat::Bf16.classify(&x.to_le_bytes()[2..]);
        assert_eq!((bf16(1.0), bf16(f32::INFINITY)), (Finite, NonFinite));
        let numbers = [
            0x0000u16, 0x8000, 0x3c00, 0x7c00, 0xfe00, 0x7f80, 0xffff, 0x0001,
        ];
        let bytes: Vec<u8> = numbers.iter().flat_map(|word| word.to_le_bytes()).collect();
        for format in [
            ScaleFormat::F32,
            ScaleFormat::F16,
            ScaleFormat::Bf16,
            ScaleFormat::E8m0,
        ] {
            for end in (0..=bytes.len()).step_by(4) {
                let numbers = bytes[..end].chunks_exact(format.size());
                let classes: Vec<ScaleClass> = numbers.map(|n| format.classify(n)).collect();
                let non_finite = classes.iter().filter(|class| **class == NonFinite).count();
                let zero = classes.iter().all(|class| *class == Zero);
                assert_eq!(
                    format.scan(&bytes[..end]),
                    (zero, non_finite as u64),
                    "{format:?}"
                );
            }
        }
        let e8m0 = |byte: u8| ScaleFormat::E8m0.classify(&[byte]);
        assert_eq!((e8m0(0), e8m0(255)), (Finite, NonFinite));
    }
}
