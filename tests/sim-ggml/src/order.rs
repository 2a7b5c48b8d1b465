//! Who may touch what: a vector clock for each participant.
//!
//! Participants are streams and threads of the host. Each piece of work of a participant has a
//! number; a clock states up to which number of each participant something comes after. Two
//! uses of the same bytes, one of them a write, are unordered unless the later one's clock knows
//! the earlier one.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

/// The number of a participant.
pub type Who = usize;

/// Up to which piece of work of each participant something is ordered.
#[derive(Debug, Clone, Default)]
pub struct Clock(Vec<u64>);

impl Clock {
    /// Whether it knows a piece of work.
    pub fn knows(&self, who: Who, number: u64) -> bool {
        self.0.get(who).is_some_and(|&known| known >= number)
    }

    /// Notes that a piece of work comes before.
    pub fn note(&mut self, who: Who, number: u64) {
        if self.0.len() <= who {
            self.0.resize(who + 1, 0);
        }
        self.0[who] = number.max(self.0[who]);
    }

    /// Comes after everything that `other` comes after.
    pub fn join(&mut self, other: &Clock) {
        for (who, &number) in other.0.iter().enumerate() {
            self.note(who, number);
        }
    }
}

/// A use of memory.
#[derive(Debug, Clone)]
pub struct Use {
    /// Whose work it is.
    pub who: Who,
    /// The number of that work.
    pub number: u64,
    /// What it does, for the report.
    pub what: Arc<str>,
}

/// An earlier use that nothing orders before a later one.
#[derive(Debug)]
pub struct Unordered {
    /// The earlier use.
    pub earlier: Use,
    /// How many bytes both use.
    pub bytes: u64,
}

/// Bytes with the same uses.
#[derive(Debug, Clone, Default)]
struct Piece {
    end: u64,
    /// The last write.
    write: Option<Use>,
    /// The last read of each participant since that write.
    reads: Vec<Use>,
}

/// The uses of one allocation that a later use may conflict with, by offset.
#[derive(Debug, Default)]
pub struct Uses(BTreeMap<u64, Piece>);

impl Uses {
    /// Adds a use; returns the earlier ones that its clock does not know.
    pub fn add(
        &mut self,
        range: Range<u64>,
        writes: bool,
        new: &Use,
        clock: &Clock,
    ) -> Vec<Unordered> {
        if range.is_empty() {
            return Vec::new();
        }
        self.split(range.start);
        self.split(range.end);
        let mut found: Vec<Unordered> = Vec::new();
        let mut gaps = Vec::new();
        let mut reached = range.start;
        for (&start, piece) in self.0.range_mut(range.clone()) {
            let reads = piece.reads.iter().filter(|_| writes);
            for earlier in piece.write.iter().chain(reads) {
                if earlier.who == new.who || clock.knows(earlier.who, earlier.number) {
                    continue;
                }
                let bytes = piece.end - start;
                let same = |other: &&mut Unordered| {
                    (other.earlier.who, other.earlier.number) == (earlier.who, earlier.number)
                };
                match found.iter_mut().find(same) {
                    Some(known) => known.bytes += bytes,
                    None => found.push(Unordered {
                        earlier: earlier.clone(),
                        bytes,
                    }),
                }
            }
            piece.reads.retain(|read| read.who != new.who);
            piece.reads.push(new.clone());
            gaps.push(reached..start);
            reached = piece.end;
        }
        gaps.push(reached..range.end);
        if writes {
            let covered: Vec<u64> = self
                .0
                .range(range.clone())
                .map(|(&start, _)| start)
                .collect();
            for start in covered {
                self.0.remove(&start);
            }
            gaps = vec![range];
        }
        for gap in gaps.into_iter().filter(|gap| !gap.is_empty()) {
            let piece = Piece {
                end: gap.end,
                write: writes.then(|| new.clone()),
                reads: if writes {
                    Vec::new()
                } else {
                    vec![new.clone()]
                },
            };
            self.0.insert(gap.start, piece);
        }
        found
    }

    /// Makes `at` a border of pieces.
    fn split(&mut self, at: u64) {
        let Some((_, piece)) = self.0.range_mut(..at).next_back() else {
            return;
        };
        if piece.end > at {
            let second = piece.clone();
            piece.end = at;
            self.0.insert(at, second);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn by(who: Who, number: u64) -> Use {
        Use {
            who,
            number,
            what: "test".into(),
        }
    }

    fn clock(known: &[(Who, u64)]) -> Clock {
        let mut clock = Clock::default();
        for &(who, number) in known {
            clock.note(who, number);
        }
        clock
    }

    #[test]
    fn a_read_conflicts_with_an_unknown_write() {
        let mut uses = Uses::default();
        assert!(uses.add(10..30, true, &by(0, 5), &clock(&[])).is_empty());
        let found = uses.add(20..50, false, &by(1, 1), &clock(&[(0, 4)]));
        assert_eq!((found.len(), found[0].bytes), (1, 10));
        assert!(
            uses.add(20..50, false, &by(2, 1), &clock(&[(0, 5)]))
                .is_empty()
        );
    }

    #[test]
    fn reads_do_not_conflict_with_reads() {
        let mut uses = Uses::default();
        assert!(uses.add(0..9, false, &by(0, 1), &clock(&[])).is_empty());
        assert!(uses.add(0..9, false, &by(1, 1), &clock(&[])).is_empty());
    }

    #[test]
    fn a_write_conflicts_with_each_unknown_reader() {
        let mut uses = Uses::default();
        uses.add(0..10, false, &by(0, 1), &clock(&[]));
        uses.add(4..20, false, &by(1, 1), &clock(&[]));
        let found = uses.add(2..6, true, &by(2, 1), &clock(&[]));
        let bytes: Vec<u64> = found.iter().map(|found| found.bytes).collect();
        assert_eq!(bytes, [4, 2]);
        // The rest of both reads is still known.
        assert_eq!(uses.add(0..20, true, &by(3, 1), &clock(&[(2, 1)])).len(), 2);
    }

    #[test]
    fn a_participant_is_ordered_with_itself() {
        let mut uses = Uses::default();
        uses.add(0..10, true, &by(0, 1), &clock(&[]));
        assert!(uses.add(0..10, true, &by(0, 2), &clock(&[])).is_empty());
    }

    #[test]
    fn a_write_hides_older_uses() {
        let mut uses = Uses::default();
        uses.add(0..10, true, &by(0, 1), &clock(&[]));
        uses.add(0..10, true, &by(1, 1), &clock(&[(0, 1)]));
        assert!(
            uses.add(0..10, false, &by(2, 1), &clock(&[(1, 1)]))
                .is_empty()
        );
        assert_eq!(uses.0.len(), 1);
    }
}
