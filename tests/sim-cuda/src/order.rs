//! Who may touch what: a vector clock per stream.
//!
//! Every piece of work of a stream has a number. A clock states up to which number of each
//! stream something comes after. Two uses of the same bytes, one of them a write, are a
//! race unless the later one's clock knows the earlier one.

use std::collections::HashMap;
use std::ops::Range;

/// Up to which piece of work of each stream something is ordered.
#[derive(Debug, Clone, Default)]
pub struct Clock(HashMap<u64, u64>);

impl Clock {
    /// Whether it knows a piece of work.
    pub fn knows(&self, stream: u64, number: u64) -> bool {
        self.0.get(&stream).is_some_and(|&known| known >= number)
    }

    /// Notes that a piece of work comes before.
    pub fn note(&mut self, stream: u64, number: u64) {
        let known = self.0.entry(stream).or_default();
        *known = number.max(*known);
    }

    /// Comes after everything that `other` comes after.
    pub fn join(&mut self, other: &Clock) {
        for (&stream, &number) in &other.0 {
            self.note(stream, number);
        }
    }
}

/// A use of memory.
#[derive(Debug, Clone)]
pub struct Access {
    /// Addresses.
    pub range: Range<u64>,
    /// Whose work it is, and which.
    pub stream: u64,
    /// Its number.
    pub number: u64,
    /// Whether it writes.
    pub writes: bool,
}

/// Uses of memory that later work may have to wait for.
#[derive(Debug, Default)]
pub struct Accesses(Vec<Access>);

impl Accesses {
    /// A use that a new one with this clock races with.
    pub fn race(&self, range: &Range<u64>, writes: bool, clock: &Clock) -> Option<&Access> {
        self.0.iter().find(|old| {
            old.range.start < range.end
                && range.start < old.range.end
                && (old.writes || writes)
                && !clock.knows(old.stream, old.number)
        })
    }

    /// Adds a use, and forgets those that the process has seen the end of.
    pub fn add(&mut self, access: Access, seen: &Clock) {
        self.0.retain(|old| !seen.knows(old.stream, old.number));
        self.0.push(access);
    }
}
