//! Splits a tensor into parts for several devices.
//!
//! A tensor is split along one axis. Most tensors are split by rows. The down-projection of
//! routed experts is split inside its rows, because its inner dimension is the hidden layer of
//! the expert, which the rows of gate and up are. Split at the same bounds, each device holds
//! the same hidden units of all three projections and computes its share alone.
//!
//! Either way the bytes of a part repeat a pattern: one range in each stride. By rows, a stride
//! is a slice (one expert of a merged tensor), and the range is some rows of the slice. Inside
//! rows, a stride is a row (or the rows that a type stores interleaved), and the range is some
//! blocks of the row.

use sidecar_core::gguf::TypeInfo;

/// The axis along which a tensor is split.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Axis {
    /// Inside rows: a part holds some elements of every row.
    Columns,
    /// Between rows: a part holds some rows of every slice.
    Rows,
}

/// The units of a tensor that parts share, and where the units are in its bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SplitUnits {
    /// How many units parts share: rows of a slice, or elements of a row.
    pub units: u64,
    /// A part holds a multiple of this many units; the last part holds the rest.
    pub granularity: u64,
    /// Bytes of `granularity` units within one stride.
    granularity_bytes: u64,
    /// How often the pattern repeats.
    repeats: u64,
    /// Bytes of one repetition.
    stride: u64,
}

impl SplitUnits {
    /// Plans how a tensor of this type and shape is split along `axis`. The rows of the tensor
    /// come in slices of `rows`: `ne[1]`, or half of it when gate and up share a tensor.
    pub fn new(ty: &TypeInfo, ne: &[u64; 4], rows: u64, axis: Axis) -> SplitUnits {
        let row_bytes = ty.row_bytes(ne[0]).unwrap_or(0);
        let all_rows = ne[1] * ne[2] * ne[3];
        match axis {
            Axis::Rows => SplitUnits {
                units: rows,
                granularity: ty.interleave,
                granularity_bytes: ty.interleave * row_bytes,
                repeats: all_rows.checked_div(rows).unwrap_or(0),
                stride: rows * row_bytes,
            },
            // A row that begins with bytes of its own cannot be split.
            Axis::Columns if ty.row_meta > 0 => SplitUnits {
                units: ne[0],
                granularity: ne[0],
                granularity_bytes: row_bytes,
                repeats: all_rows,
                stride: row_bytes,
            },
            Axis::Columns => SplitUnits {
                units: ne[0],
                granularity: ty.block,
                granularity_bytes: ty.interleave * ty.bytes,
                repeats: all_rows.div_ceil(ty.interleave),
                stride: ty.interleave * row_bytes,
            },
        }
    }

    /// Returns the offset of a bound within a stride, in bytes.
    fn byte(&self, unit: u64) -> u64 {
        if unit == self.units {
            return self.stride;
        }
        unit / self.granularity.max(1) * self.granularity_bytes
    }
}

/// Splits `units` in these proportions: part *i* holds units `bounds[i]..bounds[i + 1]`, as
/// close to its proportion as the granularity allows.
pub fn split_bounds(units: u64, granularity: u64, proportions: &[f64]) -> Vec<u64> {
    let total: f64 = proportions.iter().sum();
    let granularity = granularity.max(1);
    let mut bounds = vec![0];
    let mut sum = 0.0;
    for (i, proportion) in proportions.iter().enumerate() {
        sum += proportion;
        let exact = units as f64 * sum / total;
        let whole = (exact / granularity as f64).round() as u64 * granularity;
        let last = i + 1 == proportions.len();
        let previous = bounds[i];
        bounds.push(if last {
            units
        } else {
            whole.clamp(previous, units)
        });
    }
    bounds
}

/// The bytes of one part within the bytes of the whole tensor: one range in each stride.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StridedRange {
    /// First byte of the range within a stride.
    pub from: u64,
    /// Bytes of the range within a stride.
    pub len: u64,
    /// Bytes of a stride.
    pub stride: u64,
    /// How many strides the tensor has.
    pub repeats: u64,
}

impl StridedRange {
    /// Returns the bytes of the part that holds units `from..to`.
    pub fn of(units: &SplitUnits, from: u64, to: u64) -> StridedRange {
        let start = units.byte(from);
        StridedRange {
            from: start,
            len: units.byte(to) - start,
            stride: units.stride,
            repeats: units.repeats,
        }
    }

    /// Returns the bytes of a tensor in one part.
    pub fn whole(nbytes: u64) -> StridedRange {
        StridedRange {
            from: 0,
            len: nbytes,
            stride: nbytes,
            repeats: 1,
        }
    }

    /// Returns the number of bytes of the part.
    pub fn bytes(&self) -> u64 {
        self.len * self.repeats
    }
}

/// Returns the least common multiple: the granularity of tensors that are split at the same
/// bounds.
pub fn common_granularity(a: u64, b: u64) -> u64 {
    let (mut x, mut y) = (a.max(1), b.max(1));
    while y != 0 {
        (x, y) = (y, x % y);
    }
    (a.max(1) / x).saturating_mul(b.max(1))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ty(name: &str) -> &'static TypeInfo {
        TypeInfo::from_name(name).unwrap()
    }

    #[test]
    fn bounds_follow_proportions_at_the_granularity() {
        assert_eq!(
            split_bounds(1536, 32, &[3.0, 1.0, 1.0]),
            [0, 928, 1216, 1536]
        );
        assert_eq!(
            split_bounds(1536, 256, &[3.0, 1.0, 1.0]),
            [0, 1024, 1280, 1536]
        );
        assert_eq!(split_bounds(100, 32, &[1.0, 1.0]), [0, 64, 100]);
        assert_eq!(split_bounds(5, 8, &[1.0, 1.0, 1.0]), [0, 0, 0, 5]);
        assert_eq!(split_bounds(0, 32, &[1.0, 1.0]), [0, 0, 0]);
        assert_eq!(split_bounds(64, 32, &[0.0, 1.0]), [0, 0, 64]);
    }

    #[test]
    fn parts_of_every_split_cover_all_bytes_once() {
        for (name, ne, axis) in [
            ("q4_0", [256, 64, 3, 1], Axis::Rows),
            ("q4_0", [256, 64, 3, 1], Axis::Columns),
            ("q4_K", [1024, 8, 2, 1], Axis::Columns),
            ("q4_0_r8", [256, 64, 3, 1], Axis::Columns),
            ("q4_0_r8", [256, 64, 3, 1], Axis::Rows),
            ("iq4_ks", [512, 6, 2, 1], Axis::Columns),
            ("iq4_ks", [512, 6, 2, 1], Axis::Rows),
            ("f32", [7, 5, 1, 1], Axis::Rows),
        ] {
            let nbytes = ty(name).row_bytes(ne[0]).unwrap() * ne[1] * ne[2];
            for rows in [ne[1], ne[1] / 2]
                .into_iter()
                .filter(|rows| ne[1] % rows == 0)
            {
                let units = SplitUnits::new(ty(name), &ne, rows, axis);
                let bounds = split_bounds(units.units, units.granularity, &[2.0, 1.0, 1.5]);
                let mut times_covered = vec![0u8; nbytes as usize];
                for part in bounds.windows(2) {
                    let range = StridedRange::of(&units, part[0], part[1]);
                    for repeat in 0..range.repeats {
                        let start = repeat * range.stride + range.from;
                        for byte in start..start + range.len {
                            times_covered[byte as usize] += 1;
                        }
                    }
                }
                assert!(
                    times_covered.iter().all(|&n| n == 1),
                    "{name} {axis:?} {rows}"
                );
            }
        }
    }

    #[test]
    fn granularities_combine() {
        assert_eq!(common_granularity(32, 256), 256);
        assert_eq!(common_granularity(1, 32), 32);
        assert_eq!(common_granularity(12, 8), 24);
    }
}
