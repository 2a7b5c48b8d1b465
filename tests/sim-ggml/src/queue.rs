//! Who has the link when, in virtual time: first come, first served.

use std::collections::BTreeMap;

use crate::schedule::Schedule;

/// Copies whose times are known.
///
/// Copies arrive here in another order than they have in virtual time. One that asks at an earlier
/// time than a copy that is known already goes before it, but does not interrupt what runs. The
/// time of the later copy is known to others and stays; the time that it would have lost is taken
/// after it, so the link never carries more than it can.
#[derive(Debug, Default)]
pub struct Queue {
    /// By start, and by the order of their arrival.
    copies: BTreeMap<(u64, usize), Copy>,
    /// When the link is busy.
    pub busy: Schedule,
}

#[derive(Debug, Clone, Copy)]
struct Copy {
    /// When it could have started.
    ready: u64,
    end: u64,
}

impl Queue {
    /// Takes the link for so long, from `ready` or later; returns the start.
    pub fn take(&mut self, ready: u64, length: u64) -> u64 {
        let mut start = ready;
        let mut displaced = None;
        for ((next, _), copy) in self.from(ready) {
            if copy.end <= start {
                continue;
            }
            if next >= start + length {
                break;
            }
            if next >= start && copy.ready > ready {
                displaced = Some(copy);
                break;
            }
            start = copy.end;
        }
        self.add(ready, start, length);
        if let Some(copy) = displaced {
            let after = self.gap(copy.end, length);
            self.add(copy.ready, after, length);
        }
        start
    }

    /// Copies that end after a time, and perhaps some before.
    fn from(&self, time: u64) -> impl Iterator<Item = ((u64, usize), Copy)> {
        // Those that run at a time started before it; displaced ones may overlap.
        let before = self.copies.range(..(time, 0)).rev().take(8);
        let first = before.map(|(&key, _)| key).last().unwrap_or((time, 0));
        self.copies.range(first..).map(|(&key, &copy)| (key, copy))
    }

    /// Returns the start of the first gap of this length.
    fn gap(&self, from: u64, length: u64) -> u64 {
        let mut start = from;
        for ((next, _), copy) in self.from(from) {
            if next >= start + length {
                break;
            }
            start = start.max(copy.end);
        }
        start
    }

    fn add(&mut self, ready: u64, start: u64, length: u64) {
        let end = start + length;
        self.copies
            .insert((start, self.copies.len()), Copy { ready, end });
        self.busy.add(start, end);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_gap_that_is_long_enough() {
        let mut queue = Queue::default();
        assert_eq!(queue.take(10, 10), 10);
        assert_eq!(queue.take(25, 5), 25);
        assert_eq!(queue.take(12, 5), 20);
        assert_eq!(queue.take(0, 10), 0);
        assert_eq!(queue.busy.total(), 30);
    }

    #[test]
    fn a_running_copy_is_not_interrupted() {
        let mut queue = Queue::default();
        queue.take(0, 100);
        assert_eq!(queue.take(50, 1), 100);
    }

    #[test]
    fn who_was_ready_first_goes_first() {
        let mut queue = Queue::default();
        // Three copies of a stream: each is ready when the one before has ended.
        for ready in [0, 100, 200] {
            assert_eq!(queue.take(ready, 100), ready);
        }
        // Another stream's copy, whose request arrives here after them.
        assert_eq!(queue.take(50, 10), 100);
        // What it took is paid by the next copy.
        assert_eq!(queue.busy.total(), 310);
        assert_eq!(queue.take(300, 100), 310);
    }

    #[test]
    fn who_was_ready_later_waits() {
        let mut queue = Queue::default();
        assert_eq!(queue.take(0, 100), 0);
        assert_eq!(queue.take(0, 100), 100);
        assert_eq!(queue.take(50, 10), 200);
    }
}
