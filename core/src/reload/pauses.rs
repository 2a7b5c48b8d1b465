//! How long switches keep evaluations out.

use std::time::Duration;

/// How long evaluations waited for switches; in the drop-in, also how long switches took.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Pauses {
    /// How many pauses there were.
    pub count: u64,
    /// The longest pause.
    pub longest: Duration,
    /// All pauses together.
    pub total: Duration,
    /// How many pauses lasted up to each of [`Pauses::BOUNDS`], and longer than the bound before.
    pub by_bound: [u64; Pauses::BOUNDS.len()],
}

impl Pauses {
    /// Upper bounds of the classes in which pauses are counted.
    pub const BOUNDS: [Duration; 6] = [
        Duration::from_micros(10),
        Duration::from_micros(100),
        Duration::from_millis(1),
        Duration::from_millis(10),
        Duration::from_millis(100),
        Duration::from_secs(1),
    ];

    /// Returns counters at zero.
    pub const fn new() -> Pauses {
        Pauses {
            count: 0,
            longest: Duration::ZERO,
            total: Duration::ZERO,
            by_bound: [0; Pauses::BOUNDS.len()],
        }
    }

    /// Counts one pause.
    pub fn add(&mut self, pause: Duration) {
        self.count += 1;
        self.longest = self.longest.max(pause);
        self.total += pause;
        if let Some(class) = Pauses::BOUNDS.iter().position(|bound| pause <= *bound) {
            self.by_bound[class] += 1;
        }
    }

    /// Returns the longest pause in microseconds, rounded up.
    pub fn longest_us(&self) -> u64 {
        self.longest.as_nanos().div_ceil(1000) as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_pause_is_counted_in_its_class() {
        let mut pauses = Pauses::new();
        for micros in [3, 10, 11, 2_000_000] {
            pauses.add(Duration::from_micros(micros));
        }
        assert_eq!(pauses.count, 4);
        assert_eq!(pauses.longest, Duration::from_secs(2));
        assert_eq!(pauses.total, Duration::from_micros(2_000_024));
        assert_eq!(pauses.by_bound, [2, 1, 0, 0, 0, 0]);
    }
}
