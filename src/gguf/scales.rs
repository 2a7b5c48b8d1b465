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
            let size = match format {
                ScaleFormat::F32 => 4,
                ScaleFormat::E8m0 => 1,
                _ => 2,
            };
            for at in offsets {
                assert!(at + size <= ty.bytes as usize, "{}", ty.name());
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
        let e8m0 = |byte: u8| ScaleFormat::E8m0.classify(&[byte]);
        assert_eq!((e8m0(0), e8m0(255)), (Finite, NonFinite));
    }
}
