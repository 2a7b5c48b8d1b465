//! How long evaluations wait for switches.

use std::time::Duration;

/// How long evaluations waited for switches before they began.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Pauses {
    /// How many evaluations had to wait.
    pub count: u64,
    /// The longest wait.
    pub longest: Duration,
    /// All waits together.
    pub total: Duration,
    /// How many waits lasted up to each of [`Pauses::BOUNDS`], and longer than the bound before.
    pub by_bound: [u64; Pauses::BOUNDS.len()],
}

impl Pauses {
    /// Upper bounds of the classes in which waits are counted.
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

    /// Counts one wait.
    pub fn add(&mut self, wait: Duration) {
        self.count += 1;
        self.longest = self.longest.max(wait);
        self.total += wait;
        if let Some(class) = Pauses::BOUNDS.iter().position(|bound| wait <= *bound) {
            self.by_bound[class] += 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_wait_is_counted_in_its_class() {
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
