//! A set of experts, and the bytes that are copied for it.

use std::ops::Range;

use sidecar_core::trace::Ids;

use super::transfer::Piece;

/// Bytes behind a run of experts that are copied with it, as ggml's scheduler does: kernels read
/// a little past the last expert, and nothing there may be a NaN.
const PADDING: usize = 512;

/// A set of experts.
pub struct Marked(Vec<bool>);

impl Marked {
    /// Returns the empty set.
    pub const fn new() -> Marked {
        Marked(Vec::new())
    }

    /// Marks the experts of a layer that were routed to, and no others. Returns their number;
    /// `None` if an id is not one of an expert.
    pub fn mark(&mut self, ids: &Ids<'_>, experts: u32) -> Option<usize> {
        self.0.clear();
        self.0.resize(experts as usize, false);
        let mut count = 0;
        for token in 0..ids.tokens {
            for used in 0..ids.used {
                let id = usize::try_from(ids.get(token, used)?).ok()?;
                let marked = self.0.get_mut(id)?;
                count += usize::from(!std::mem::replace(marked, true));
            }
        }
        Some(count)
    }

    /// Marks all experts of a layer.
    pub fn mark_all(&mut self, experts: u32) {
        self.0.clear();
        self.0.resize(experts as usize, true);
    }

    /// Writes the bytes of the marked experts of a matrix at an address, neighbours together, without
    /// those of the experts that are marked in `without`. These are the ranges that libllama copies.
    pub fn pieces(
        &self,
        from: usize,
        expert_bytes: usize,
        without: &[bool],
        pieces: &mut Vec<Piece>,
    ) {
        pieces.clear();
        self.ranges(expert_bytes, without, |to| {
            let from = from + to.start;
            pieces.push(Piece { from, to });
        });
    }

    /// Returns the bytes that libllama copies of a matrix for the marked experts.
    pub fn bytes(&self, expert_bytes: usize) -> usize {
        let mut bytes = 0;
        self.ranges(expert_bytes, &[], |range| bytes += range.len());
        bytes
    }

    fn ranges(&self, expert_bytes: usize, without: &[bool], mut add: impl FnMut(Range<usize>)) {
        let mut add = |range: Range<usize>| {
            if !range.is_empty() {
                add(range);
            }
        };
        let experts = self.0.len();
        let mut expert = 0;
        while expert < experts {
            let marked = self.0[expert..].iter().take_while(|marked| **marked);
            let end = expert + marked.count();
            if end > expert {
                let left_out = |at: &usize| without.get(*at).is_some_and(|is_out| *is_out);
                for at in (expert..end).filter(left_out) {
                    add(expert * expert_bytes..at * expert_bytes);
                    expert = at + 1;
                }
                let padding = match end < experts {
                    true => expert_bytes.min(PADDING),
                    false => 0,
                };
                add(expert * expert_bytes..end * expert_bytes + padding);
            }
            expert = end + 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_are_the_ranges_that_libllama_copies() {
        let ranges = |marked: &str, without: &str| {
            let set = |text: &str| text.chars().map(|of| of == 'x').collect::<Vec<bool>>();
            let mut pieces = Vec::new();
            Marked(set(marked)).pieces(7000, 1000, &set(without), &mut pieces);
            assert!(
                pieces
                    .iter()
                    .all(|piece| piece.from == 7000 + piece.to.start)
            );
            let range = |piece: Piece| (piece.to.start, piece.to.end);
            pieces.into_iter().map(range).collect::<Vec<_>>()
        };
        assert_eq!(ranges("..xx.x", ""), [(2000, 4512), (5000, 6000)]);
        assert_eq!(ranges("xxxx..", ".x...."), [(0, 1000), (2000, 4512)]);
        assert_eq!(ranges("xxxxxx", "x....x"), [(1000, 5000)]);
        // What is behind an expert may be read, wherever the expert comes from.
        assert_eq!(ranges(".x....", ".x...."), [(2000, 2512)]);
        assert_eq!(ranges("......", "xxxxxx"), []);
        let all = Marked("..xx.x".chars().map(|of| of == 'x').collect());
        assert_eq!(all.bytes(1000), 2512 + 1000);
    }
}
