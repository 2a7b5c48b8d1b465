//! The table of tensor types in GGUF files.
//!
//! Ids, block sizes and names are those of `enum ggml_type` and its type traits, in upstream ggml
//! and in ik_llama.cpp. A quantised row is a sequence of blocks. Some types of ik_llama.cpp have
//! scale bytes before each row (`row_meta`) or interleave several rows (`interleave`).

/// The project that defines a type id.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Dialect {
    /// Upstream ggml. ik_llama.cpp also reads most of these types.
    Upstream,
    /// ik_llama.cpp only.
    IkLlama,
}

/// Layout of one tensor type.
#[derive(Debug, PartialEq, Eq)]
pub struct TypeInfo {
    /// Value of `enum ggml_type`, as stored in the file.
    pub id: u32,
    /// ggml's lower-case name, NUL-terminated for C.
    c_name: &'static std::ffi::CStr,
    /// Elements per block; a row's length is a multiple of it.
    pub block: u64,
    /// Bytes per block.
    pub bytes: u64,
    /// Bytes before each row.
    pub row_meta: u64,
    /// Number of interleaved rows. A tensor can be split between such groups of rows only.
    pub interleave: u64,
    /// The project that defines the type.
    pub dialect: Dialect,
}

impl TypeInfo {
    /// Returns the type with this id, or `None` when the id is unknown or was removed.
    pub fn from_id(id: u32) -> Option<&'static TypeInfo> {
        TYPES
            .binary_search_by_key(&id, |t| t.id)
            .ok()
            .map(|at| &TYPES[at])
    }

    /// Returns the type with this name in ggml, for example `q4_K`.
    pub fn from_name(name: &str) -> Option<&'static TypeInfo> {
        TYPES.iter().find(|t| t.name() == name)
    }

    /// Returns the name of the type in ggml.
    pub fn name(&self) -> &'static str {
        self.c_name.to_str().expect("type names are ASCII")
    }

    /// Returns the same name as a C string.
    pub fn c_name(&self) -> &'static std::ffi::CStr {
        self.c_name
    }

    /// Returns the bytes of a row of `elements`, or `None` when that is not a whole number of
    /// blocks or does not fit 64 bits.
    pub fn row_bytes(&self, elements: u64) -> Option<u64> {
        if !elements.is_multiple_of(self.block) {
            return None;
        }
        (elements / self.block)
            .checked_mul(self.bytes)?
            .checked_add(self.row_meta)
    }

    /// Returns the bytes of a tensor of these dimensions, as [`TypeInfo::row_bytes`]; 0 without elements.
    pub fn tensor_bytes(&self, ne: &[u64; 4]) -> Option<u64> {
        match ne {
            ne if ne.contains(&0) => Some(0),
            [columns, rows @ ..] => rows
                .iter()
                .try_fold(self.row_bytes(*columns)?, |n, &extent| {
                    n.checked_mul(extent)
                }),
        }
    }
}

const fn upstream(id: u32, c_name: &'static std::ffi::CStr, block: u64, bytes: u64) -> TypeInfo {
    TypeInfo {
        dialect: Dialect::Upstream,
        ..ik(id, c_name, block, bytes, 0, 1)
    }
}

const fn ik(
    id: u32,
    c_name: &'static std::ffi::CStr,
    block: u64,
    bytes: u64,
    row_meta: u64,
    interleave: u64,
) -> TypeInfo {
    TypeInfo {
        id,
        c_name,
        block,
        bytes,
        row_meta,
        interleave,
        dialect: Dialect::IkLlama,
    }
}

/// Every known type, by ascending id.
///
/// Ids 4 and 5 (`q4_2`, `q4_3`), 37 and 38 (`iq4_nl_4_8`, `iq4_nl_8_8`) are absent, because no
/// current reader accepts them.
pub static TYPES: [TypeInfo; TYPE_COUNT] = [
    upstream(0, c"f32", 1, 4),
    upstream(1, c"f16", 1, 2),
    upstream(2, c"q4_0", 32, 18),
    upstream(3, c"q4_1", 32, 20),
    upstream(6, c"q5_0", 32, 22),
    upstream(7, c"q5_1", 32, 24),
    upstream(8, c"q8_0", 32, 34),
    upstream(9, c"q8_1", 32, 36),
    upstream(10, c"q2_K", 256, 84),
    upstream(11, c"q3_K", 256, 110),
    upstream(12, c"q4_K", 256, 144),
    upstream(13, c"q5_K", 256, 176),
    upstream(14, c"q6_K", 256, 210),
    upstream(15, c"q8_K", 256, 292),
    upstream(16, c"iq2_xxs", 256, 66),
    upstream(17, c"iq2_xs", 256, 74),
    upstream(18, c"iq3_xxs", 256, 98),
    upstream(19, c"iq1_s", 256, 50),
    upstream(20, c"iq4_nl", 32, 18),
    upstream(21, c"iq3_s", 256, 110),
    upstream(22, c"iq2_s", 256, 82),
    upstream(23, c"iq4_xs", 256, 136),
    upstream(24, c"i8", 1, 1),
    upstream(25, c"i16", 1, 2),
    upstream(26, c"i32", 1, 4),
    upstream(27, c"i64", 1, 8),
    upstream(28, c"f64", 1, 8),
    upstream(29, c"iq1_m", 256, 56),
    upstream(30, c"bf16", 1, 2),
    ik(31, c"q4_0_4x4", 32, 18, 0, 4),
    ik(32, c"q4_0_4x8", 32, 18, 0, 4),
    ik(33, c"q4_0_8x8", 32, 18, 0, 8),
    upstream(34, c"tq1_0", 256, 54),
    upstream(35, c"tq2_0", 256, 66),
    ik(36, c"i2_s", 1, 1, 0, 1),
    upstream(39, c"mxfp4", 32, 17),
    upstream(40, c"nvfp4", 64, 36),
    upstream(41, c"q1_0", 128, 18),
    upstream(42, c"q2_0", 64, 18),
    ik(97, c"q8_0_x4", 32, 34, 0, 1),
    ik(98, c"q8_1_x4", 32, 36, 0, 1),
    ik(99, c"q8_2_x4", 32, 36, 0, 1),
    ik(133, c"q6_0", 32, 26, 0, 1),
    ik(134, c"iq1_bn", 64, 13, 2, 1),
    ik(135, c"iq2_bn", 64, 16, 4, 1),
    ik(136, c"q8_K64", 64, 68, 0, 1),
    ik(137, c"iq2_k", 256, 76, 0, 1),
    ik(138, c"iq3_k", 256, 110, 0, 1),
    ik(139, c"iq4_k", 256, 144, 0, 1),
    ik(140, c"iq5_k", 256, 176, 0, 1),
    ik(141, c"iq6_k", 256, 212, 0, 1),
    ik(144, c"iq4_ks", 256, 136, 4, 1),
    ik(145, c"iq2_ks", 256, 70, 2, 1),
    ik(146, c"iq4_kss", 256, 128, 4, 1),
    ik(147, c"q8_K16", 64, 64, 20, 1),
    ik(148, c"q8_K32", 256, 296, 0, 1),
    ik(149, c"q8_KR8", 256, 296, 0, 1),
    ik(150, c"q8_K128", 128, 140, 0, 1),
    ik(151, c"q8_KV", 32, 32, 8, 1),
    ik(152, c"iq5_ks", 256, 168, 4, 1),
    ik(153, c"iq2_kt", 256, 68, 4, 1),
    ik(154, c"iq3_kt", 256, 100, 4, 1),
    ik(155, c"iq4_kt", 256, 128, 4, 1),
    ik(156, c"iq3_ks", 256, 102, 2, 1),
    ik(157, c"iq2_kl", 256, 86, 2, 1),
    ik(158, c"iq1_kt", 256, 56, 4, 1),
    ik(202, c"q4_0_r8", 32, 18, 0, 8),
    ik(206, c"q5_0_r4", 32, 22, 0, 4),
    ik(208, c"q8_0_r8", 32, 34, 0, 8),
    ik(210, c"q2_k_r4", 256, 84, 0, 4),
    ik(211, c"q3_k_r4", 256, 110, 0, 4),
    ik(212, c"q4_k_r4", 256, 144, 0, 4),
    ik(213, c"q5_k_r4", 256, 176, 0, 4),
    ik(214, c"q6_k_r4", 256, 210, 0, 4),
    ik(216, c"iq2_xxs_r4", 256, 66, 0, 4),
    ik(217, c"iq2_xs_r4", 256, 74, 0, 4),
    ik(218, c"iq3_xxs_r4", 256, 98, 0, 4),
    ik(219, c"iq1_s_r4", 32, 6, 2, 4),
    ik(220, c"iq4_nl_r4", 32, 18, 0, 4),
    ik(221, c"iq3_s_r4", 256, 110, 0, 4),
    ik(222, c"iq2_s_r4", 256, 82, 0, 4),
    ik(223, c"iq4_xs_r8", 256, 136, 0, 8),
    ik(229, c"iq1_m_r4", 32, 7, 2, 4),
    ik(230, c"bf16_r16", 1, 2, 0, 16),
    ik(233, c"q6_0_r4", 32, 26, 0, 4),
    ik(335, c"iq2_bn_r4", 64, 16, 4, 4),
    ik(337, c"iq2_k_r4", 256, 76, 0, 4),
    ik(338, c"iq3_k_r4", 256, 110, 0, 4),
    ik(339, c"iq4_k_r4", 256, 144, 0, 4),
    ik(340, c"iq5_k_r4", 256, 176, 0, 4),
    ik(344, c"iq4_ks_r4", 256, 136, 4, 4),
    ik(352, c"iq5_ks_r4", 256, 168, 4, 4),
    ik(397, c"q8_k_r16", 256, 258, 0, 16),
    ik(398, c"q8_KV_r8", 32, 32, 4, 8),
    ik(399, c"q8_k_r8", 256, 258, 0, 8),
];

const TYPE_COUNT: usize = 95;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn table_is_sorted_and_names_are_unique() {
        assert!(TYPES.windows(2).all(|pair| pair[0].id < pair[1].id));
        for t in &TYPES {
            assert_eq!(TypeInfo::from_name(t.name()).unwrap().id, t.id);
        }
    }

    #[test]
    fn rows_count_blocks_and_row_meta() {
        let q4_1 = TypeInfo::from_name("q4_1").unwrap();
        assert_eq!(q4_1.row_bytes(576), Some(360));
        assert_eq!(q4_1.row_bytes(577), None);
        let iq4_ks = TypeInfo::from_name("iq4_ks").unwrap();
        assert_eq!(iq4_ks.row_bytes(512), Some(2 * 136 + 4));
        assert_eq!(
            TypeInfo::from_name("f64").unwrap().row_bytes(u64::MAX),
            None
        );
    }

    #[test]
    fn removed_ids_are_unknown() {
        for id in [4, 5, 37, 38, 43, 400, u32::MAX] {
            assert!(TypeInfo::from_id(id).is_none(), "{id}");
        }
    }
}
