//! When something is busy, in virtual time.

use std::collections::BTreeMap;

/// Disjoint intervals: start and end in nanoseconds.
#[derive(Debug, Default)]
pub struct Schedule(BTreeMap<u64, u64>);

impl Schedule {
    /// Adds an interval, which may overlap others.
    pub fn add(&mut self, mut start: u64, mut end: u64) {
        if start == end {
            return;
        }
        while let Some((&other, &other_end)) = self.0.range(..=end).next_back() {
            if other_end < start {
                break;
            }
            self.0.remove(&other);
            (start, end) = (start.min(other), end.max(other_end));
        }
        self.0.insert(start, end);
    }

    /// Returns the sum of all intervals.
    pub fn total(&self) -> u64 {
        self.0.iter().map(|(start, end)| end - start).sum()
    }

    /// Returns for how long both are busy.
    pub fn common(&self, other: &Schedule) -> u64 {
        let (mut ours, mut theirs) = (self.0.iter().peekable(), other.0.iter().peekable());
        let mut common = 0;
        while let (Some((a, a_end)), Some((b, b_end))) = (ours.peek(), theirs.peek()) {
            common += (*a_end).min(*b_end).saturating_sub(**a.max(b));
            match a_end < b_end {
                true => ours.next(),
                false => theirs.next(),
            };
        }
        common
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(intervals: &[(u64, u64)]) -> Schedule {
        let mut schedule = Schedule::default();
        for &(start, end) in intervals {
            schedule.add(start, end);
        }
        schedule
    }

    #[test]
    fn overlapping_intervals_become_one() {
        let schedule = of(&[(10, 20), (15, 40), (40, 45), (5, 6)]);
        assert_eq!(schedule.0.len(), 2);
        assert_eq!(schedule.total(), 36);
    }

    #[test]
    fn time_in_common() {
        let (a, b) = (of(&[(0, 10), (20, 30)]), of(&[(5, 22), (28, 40)]));
        assert_eq!(a.common(&b), 5 + 2 + 2);
        assert_eq!(b.common(&a), 9);
    }
}
