//! Hashes the bytes of a tensor and finds defects: rows of zeros and non-finite scales.
//!
//! An incomplete download into preallocated space has a valid header, the right size, and zeros
//! for data. A broken conversion has scales that are infinite or not a number. Header and size
//! show neither.

use std::ffi::CStr;
use std::io;

use xxhash_rust::xxh3::Xxh3;

use super::hash::Hash;
use crate::config::Config;
use crate::error::{Error, Result};
use crate::gguf::{GgufFile, ScaleClass, ScaleFormat, Source, TensorInfo, TypeInfo};
use crate::memory;
use crate::text;

/// Bytes read at a time, before rounding to whole blocks: fits the second-level cache.
const CHUNK: u64 = 256 << 10;

/// Hash and defects of a tensor, from one pass over its bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Content {
    /// Hash of all bytes.
    pub hash: Hash,
    /// Signs that the bytes are not weights.
    pub defects: Defects,
}

/// Signs that the bytes of a tensor are not weights.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Defects {
    /// Number of rows in which every byte is zero, as in a part of a file that was never written.
    pub blank_rows: u64,
    /// Number of rows whose elements are all zero, blank rows included.
    pub zero_rows: u64,
    /// Number of scales (of types without blocks: elements) that are infinite or not a number.
    pub non_finite: u64,
}

impl Defects {
    /// Returns whether the defects have to be compared with those of the bytes in use.
    pub fn is_suspicious(&self) -> bool {
        self.blank_rows > 0 || self.non_finite > 0
    }

    /// Returns why these bytes must not replace bytes with the defects `old`; `None` when they may. Without `old`, each defect
    /// is a reason.
    pub fn worse_than(&self, old: Option<&Defects>) -> Option<String> {
        let known = old.copied().unwrap_or_default();
        let compared = |text: String| if old.is_some() { text } else { String::new() };
        if self.blank_rows > known.zero_rows {
            let others = compared(format!(", {} do in the tensor in use", known.zero_rows));
            return Some(format!(
                "{} of its rows hold only zeros{others}",
                self.blank_rows
            ));
        }
        (self.non_finite > 0 && known.non_finite == 0).then(|| {
            let others = compared(", none is in the tensor in use".into());
            format!(
                "{} of its scales are infinite or not a number{others}",
                self.non_finite
            )
        })
    }
}

/// Why a tensor is damaged, in a sentence with the next step; `others` are further ones that are damaged.
pub fn damaged(name: &CStr, others: usize, why: &str) -> String {
    let others = match others {
        0 => String::new(),
        others => format!(" ({others} more tensors are damaged, too)"),
    };
    format!(
        "tensor '{}' is damaged{others}: {why}; write the file again, or set LLAMA_HOTSWAP_CHECK=0 to use it as it is",
        name.to_string_lossy()
    )
}

/// Reads a tensor that is about to be used, and fails if it is damaged. `in_use` is the tensor in whose place it comes.
///
/// Without one, rows of zeros may be the model's own; only those in a part of the file that was never written are damage.
pub fn check_tensor(
    file: &GgufFile,
    info: &TensorInfo,
    in_use: Option<(&GgufFile, &TensorInfo)>,
) -> Result<Content> {
    let read = |file: &GgufFile, info: &TensorInfo| {
        of_tensor(&file.source, info).map_err(|source| Error::Read {
            path: file.source.path().to_owned(),
            what: format!("tensor '{}'", file.header.name(info).to_string_lossy()),
            offset: info.offset,
            source,
        })
    };
    let content = read(file, info)?;
    let mut defects = content.defects;
    if !Config::get().check_blocks || !defects.is_suspicious() {
        return Ok(content);
    }
    let old = in_use.map(|(file, info)| read(file, info)).transpose()?;
    if old.is_none() && !file.source.has_hole(info.offset, info.nbytes) {
        defects.blank_rows = 0;
    }
    match defects.worse_than(old.map(|old| old.defects).as_ref()) {
        None => Ok(content),
        Some(why) => Err(Error::Invalid(format!(
            "{}: {}",
            text::path(file.source.path()),
            damaged(file.header.name(info), 0, &why)
        ))),
    }
}

/// Reads a tensor once, without filling the page cache.
pub fn of_tensor(source: &Source, info: &TensorInfo) -> io::Result<Content> {
    let block = info.ty.bytes;
    let chunk = (CHUNK / block).max(1) * block;
    let mut buffer = memory::zeroed(chunk.min(info.nbytes) as usize)?;
    let mut hasher = Xxh3::new();
    let mut scan = Scan::new(info.ty, info.ne[0]);
    let mut at = 0;
    while at < info.nbytes {
        let n = (info.nbytes - at).min(chunk) as usize;
        source.read_once_at(&mut buffer[..n], info.offset + at)?;
        hasher.update(&buffer[..n]);
        scan.add(&buffer[..n]);
        at += n as u64;
    }
    Ok(Content {
        hash: hasher.digest128(),
        defects: scan.defects,
    })
}

/// Counts the defects of a tensor, piece by piece. A piece has whole blocks if the rows of the
/// type have.
struct Scan {
    row: usize,
    block: usize,
    format: ScaleFormat,
    scales: &'static [usize],
    /// Bytes of the current row so far.
    at: usize,
    blank: bool,
    zero: bool,
    defects: Defects,
}

impl Scan {
    fn new(ty: &TypeInfo, elements: u64) -> Scan {
        let (format, scales) = ty.scales();
        Scan {
            row: ty.row_bytes(elements).unwrap_or(0).max(1) as usize,
            block: ty.bytes as usize,
            format,
            scales,
            at: 0,
            blank: true,
            zero: true,
            defects: Defects::default(),
        }
    }

    fn add(&mut self, mut piece: &[u8]) {
        while !piece.is_empty() {
            let (of_row, rest) = piece.split_at(piece.len().min(self.row - self.at));
            self.blank = self.blank && of_row.iter().all(|&byte| byte == 0);
            if self.scales.is_empty() {
                self.zero = self.blank;
            }
            if self.block == self.format.size() && self.scales == [0] {
                let (zero, non_finite) = self.format.scan(of_row);
                self.zero &= zero;
                self.defects.non_finite += non_finite;
            } else {
                self.add_blocks(of_row);
            }
            self.at += of_row.len();
            piece = rest;
            if self.at == self.row {
                self.defects.blank_rows += u64::from(self.blank);
                self.defects.zero_rows += u64::from(self.zero || self.blank);
                (self.at, self.blank, self.zero) = (0, true, true);
            }
        }
    }

    /// Counts the scales in whole blocks.
    fn add_blocks(&mut self, bytes: &[u8]) {
        for block in bytes.chunks_exact(self.block) {
            for &scale in self.scales {
                match self.format.classify(&block[scale..]) {
                    ScaleClass::Zero => {}
                    ScaleClass::Finite => self.zero = false,
                    ScaleClass::NonFinite => {
                        self.zero = false;
                        self.defects.non_finite += 1;
                    }
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn scan(ty: &str, elements: u64, pieces: &[&[u8]]) -> Defects {
        let mut scan = Scan::new(TypeInfo::from_name(ty).expect("a type"), elements);
        pieces.iter().for_each(|piece| scan.add(piece));
        scan.defects
    }

    #[test]
    fn rows_and_scales_are_counted_across_pieces() {
        let one = 0x3c00u16.to_le_bytes();
        // Two rows of two blocks of q8_0: one with scales and values, one never written.
        let mut block = vec![7u8; 34];
        block[..2].copy_from_slice(&one);
        let blank = vec![0u8; 34];
        let found = scan("q8_0", 64, &[&block, &blank, &blank, &blank]);
        assert_eq!((found.blank_rows, found.zero_rows), (1, 1));
        // A zero row of q4_0 as ggml quantises it: the scale is zero, its bytes are not.
        let mut zero = vec![0x88u8; 18];
        zero[..2].fill(0);
        let found = scan("q4_0", 32, &[&zero]);
        assert_eq!((found.blank_rows, found.zero_rows), (0, 1));
        let mut infinite = vec![1u8; 210];
        infinite[208..].copy_from_slice(&0x7c00u16.to_le_bytes());
        assert_eq!(scan("q6_K", 256, &[&infinite]).non_finite, 1);
        let values = [1.0f32, 0.0, f32::NAN, f32::INFINITY].map(f32::to_le_bytes);
        assert_eq!(scan("f32", 2, &[&values.concat()]).non_finite, 2);
    }

    #[test]
    fn only_what_is_worse_is_refused() {
        let old = Defects {
            zero_rows: 2,
            ..Defects::default()
        };
        let blank = |blank_rows| Defects {
            blank_rows,
            zero_rows: blank_rows,
            non_finite: 0,
        };
        assert_eq!(blank(2).worse_than(Some(&old)), None);
        assert!(
            blank(3)
                .worse_than(Some(&old))
                .is_some_and(|why| why.contains("3 of its rows hold only zeros, 2 do"))
        );
        let broken = Defects {
            non_finite: 1,
            ..Defects::default()
        };
        assert!(broken.worse_than(Some(&old)).is_some());
        assert_eq!(broken.worse_than(Some(&broken)), None);
        // What is not known is not stated.
        let why = blank(3).worse_than(None);
        assert_eq!(why.as_deref(), Some("3 of its rows hold only zeros"));
    }
}
