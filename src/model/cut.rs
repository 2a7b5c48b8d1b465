//! How a tensor is cut into parts for several devices.
//!
//! A tensor is cut along one axis. Most are cut by rows. The down-projection of
//! routed experts is cut inside its rows instead, because its inner dimension is
//! the hidden layer of the expert, as the rows of gate and up are: cut alike, each
//! device holds the same hidden units of all three and computes its share alone.
//!
//! Either way the bytes repeat a pattern: a stride that holds one run for each part.
//! By rows, the stride is a slice (one expert of a merged tensor) and a run some
//! rows of it; inside rows, the stride is a row (or the rows that a type stores
//! interleaved) and a run some blocks of it.

use crate::gguf::TypeInfo;

/// Where a tensor is cut.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Axis {
    /// Inside rows: parts hold some elements of every row.
    Columns,
    /// Between rows: parts hold some rows of every slice.
    Rows,
}

/// A tensor, seen as strides of units that parts take runs of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Cut {
    /// Units to share: rows of a slice, or elements of a row.
    pub units: u64,
    /// A part takes a whole number of this many units, but for the last.
    pub granule: u64,
    /// Bytes of a granule within one stride.
    granule_bytes: u64,
    /// How often the pattern repeats.
    repeats: u64,
    /// Bytes of one repetition.
    stride: u64,
}

impl Cut {
    /// How a tensor of this type and shape is cut along `axis`; its rows come in
    /// slices of `rows` (`ne[1]`, or half of it when gate and up share a tensor).
    pub fn new(ty: &TypeInfo, ne: &[u64; 4], rows: u64, axis: Axis) -> Cut {
        let row_bytes = ty.row_bytes(ne[0]).unwrap_or(0);
        let all_rows = ne[1] * ne[2] * ne[3];
        match axis {
            Axis::Rows => Cut {
                units: rows,
                granule: ty.interleave,
                granule_bytes: ty.interleave * row_bytes,
                repeats: all_rows.checked_div(rows).unwrap_or(0),
                stride: rows * row_bytes,
            },
            // A row that begins with bytes of its own cannot be cut.
            Axis::Columns if ty.row_meta > 0 => Cut {
                units: ne[0],
                granule: ne[0],
                granule_bytes: row_bytes,
                repeats: all_rows,
                stride: row_bytes,
            },
            Axis::Columns => Cut {
                units: ne[0],
                granule: ty.block,
                granule_bytes: ty.interleave * ty.bytes,
                repeats: all_rows.div_ceil(ty.interleave),
                stride: ty.interleave * row_bytes,
            },
        }
    }

    /// Where the run of a part begins or ends within a stride, in bytes.
    fn byte(&self, unit: u64) -> u64 {
        if unit == self.units {
            return self.stride;
        }
        unit / self.granule.max(1) * self.granule_bytes
    }
}

/// Cumulative shares of `units`: part *i* takes `bounds[i]..bounds[i + 1]`, as close
/// to its proportion as whole granules allow. Nothing is lost or taken twice.
pub fn share(units: u64, granule: u64, proportions: &[f64]) -> Vec<u64> {
    let total: f64 = proportions.iter().sum();
    let granule = granule.max(1);
    let mut bounds = vec![0];
    let mut sum = 0.0;
    for (i, proportion) in proportions.iter().enumerate() {
        sum += proportion;
        let exact = units as f64 * sum / total;
        let whole = (exact / granule as f64).round() as u64 * granule;
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

/// The runs of one part in the bytes of the whole tensor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Runs {
    /// First byte of the run within a stride.
    pub from: u64,
    /// Bytes of a run.
    pub len: u64,
    /// Bytes of a stride.
    pub stride: u64,
    /// How many runs.
    pub repeats: u64,
}

impl Runs {
    /// The runs of the part that takes units `from..to`.
    pub fn of(cut: &Cut, from: u64, to: u64) -> Runs {
        let start = cut.byte(from);
        Runs {
            from: start,
            len: cut.byte(to) - start,
            stride: cut.stride,
            repeats: cut.repeats,
        }
    }

    /// A tensor in one piece.
    pub fn whole(nbytes: u64) -> Runs {
        Runs {
            from: 0,
            len: nbytes,
            stride: nbytes,
            repeats: 1,
        }
    }

    /// Bytes of the part.
    pub fn bytes(&self) -> u64 {
        self.len * self.repeats
    }
}

/// Least common multiple: the granule of tensors that are cut alike.
pub fn common_granule(a: u64, b: u64) -> u64 {
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
    fn shares_follow_proportions_in_whole_granules() {
        assert_eq!(share(1536, 32, &[3.0, 1.0, 1.0]), [0, 928, 1216, 1536]);
        assert_eq!(share(1536, 256, &[3.0, 1.0, 1.0]), [0, 1024, 1280, 1536]);
        assert_eq!(share(100, 32, &[1.0, 1.0]), [0, 64, 100]);
        assert_eq!(share(5, 8, &[1.0, 1.0, 1.0]), [0, 0, 0, 5]);
        assert_eq!(share(0, 32, &[1.0, 1.0]), [0, 0, 0]);
        assert_eq!(share(64, 32, &[0.0, 1.0]), [0, 0, 64]);
    }

    #[test]
    fn parts_of_every_cut_cover_all_bytes_once() {
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
                let cut = Cut::new(ty(name), &ne, rows, axis);
                let bounds = share(cut.units, cut.granule, &[2.0, 1.0, 1.5]);
                let mut times_covered = vec![0u8; nbytes as usize];
                for part in bounds.windows(2) {
                    let runs = Runs::of(&cut, part[0], part[1]);
                    for repeat in 0..runs.repeats {
                        let start = repeat * runs.stride + runs.from;
                        for byte in start..start + runs.len {
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
    fn granules_combine() {
        assert_eq!(common_granule(32, 256), 256);
        assert_eq!(common_granule(1, 32), 32);
        assert_eq!(common_granule(12, 8), 24);
    }
}
