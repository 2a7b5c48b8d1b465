//! Tensors of any size, in pieces and on several threads.
//!
//! A row is quantised independently of other rows, so that the bytes depend neither on the pieces
//! nor on the threads. Each matrix of a tensor with three dimensions (an expert) has a part of the
//! importance matrix.

use std::io;
use std::sync::Mutex;
use std::thread;

use crate::{Error, Ggml, Kind};

/// Elements of a piece, at least a row: 64 MiB as `f32`.
const PIECE: usize = 16 << 20;

/// Extents of a tensor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Shape {
    /// Elements of a row.
    pub row: usize,
    /// Rows of a matrix.
    pub rows: usize,
    /// Matrices, for example one for each expert.
    pub matrices: usize,
}

/// Reads a tensor piece by piece, converts it, and writes its bytes in order.
///
/// `read` fills a buffer from an offset in the tensor. `matrix` has one value for each element of
/// a row, for each matrix of the tensor.
#[allow(
    clippy::too_many_arguments,
    reason = "a source, a target and their types"
)]
pub fn convert(
    ggml: &Ggml,
    from: &Kind,
    to: &Kind,
    shape: Shape,
    matrix: Option<&[f32]>,
    threads: usize,
    mut read: impl FnMut(u64, &mut [u8]) -> io::Result<()>,
    mut write: impl FnMut(&[u8]) -> io::Result<()>,
) -> Result<(), Error> {
    let Shape { row, rows, .. } = shape;
    let blocks = |kind: &Kind| {
        let block = kind.block;
        kind.size(row).ok_or(Error::Blocks { row, block })
    };
    let (source_row, target_row) = (blocks(from)?, blocks(to)?);
    let needed = row.checked_mul(shape.matrices).ok_or(Error::TooLarge)?;
    if let Some(found) = matrix.map(<[f32]>::len).filter(|found| *found != needed) {
        return Err(Error::MatrixSize { found, needed });
    }
    let all = rows.checked_mul(shape.matrices).ok_or(Error::TooLarge)?;
    let most = (PIECE / row.max(1)).clamp(1, all.max(1));
    let (mut source, mut target) = (vec![0; most * source_row], vec![0; most * target_row]);
    let mut first = 0;
    while first < all {
        let count = most.min(all - first);
        let source = &mut source[..count * source_row];
        read(first as u64 * source_row as u64, source)?;
        let target = &mut target[..count * target_row];
        // Smaller parts than threads, because rows take different times.
        let part = count.div_ceil(threads.max(1) * 4).max(1);
        let parts = source
            .chunks(part * source_row)
            .zip(target.chunks_mut(part * target_row))
            .enumerate();
        let parts = Mutex::new(parts);
        let work = || -> Result<(), Error> {
            let mut floats = vec![0.0; part * row];
            loop {
                let next = parts.lock().map_or(None, |mut parts| parts.next());
                let Some((at, (source, target))) = next else {
                    return Ok(());
                };
                let floats = &mut floats[..source.len() / source_row * row];
                ggml.to_f32(from, source, floats)?;
                let mut at = first + at * part;
                let (mut floats, mut target) = (&*floats, target);
                while !floats.is_empty() {
                    // Rows of one matrix.
                    let same = (rows - at % rows).min(floats.len() / row);
                    let (these, later) = floats.split_at(same * row);
                    let (out, rest) = target.split_at_mut(same * target_row);
                    let weights = matrix.map(|of| &of[at / rows * row..][..row]);
                    ggml.quantize(to, these, row, weights, out)?;
                    (floats, target, at) = (later, rest, at + same);
                }
            }
        };
        thread::scope(|scope| {
            let others: Vec<_> = (1..threads).map(|_| scope.spawn(work)).collect();
            let mine = work();
            let others = others.into_iter().map(|other| match other.join() {
                Ok(result) => result,
                Err(panic) => std::panic::resume_unwind(panic),
            });
            others.fold(mine, Result::and)
        })?;
        write(target)?;
        first += count;
    }
    Ok(())
}
