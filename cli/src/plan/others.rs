//! What other programs take of the processors while something is measured.

use std::fs;

use crate::launch::session::stat_fields;

/// The time that the processors have worked, and that this process and its ended children have.
pub struct Since {
    all: Ticks,
    own: u64,
}

/// Time of all processors, in ticks of the kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Ticks {
    busy: u64,
    total: u64,
}

impl Since {
    /// Begins now; `None` if the kernel does not report times.
    pub fn now() -> Option<Since> {
        Some(Since {
            all: ticks(&fs::read_to_string("/proc/stat").ok()?)?,
            own: own_ticks(&fs::read_to_string("/proc/self/stat").ok()?)?,
        })
    }

    /// Returns the share of the processors that others have taken since, or that a hypervisor gave to
    /// others.
    pub fn share(&self) -> Option<f64> {
        let now = Since::now()?;
        let others = (now.all.busy - self.all.busy).saturating_sub(now.own - self.own);
        // The time of waiting for disks can go back.
        let total = now.all.total.saturating_sub(self.all.total).max(1);
        Some(others as f64 / total as f64)
    }
}

/// Reads the first line of `/proc/stat`: times of users, niced ones, the system, idle, waiting for disks, and
/// others (proc(5)).
fn ticks(text: &str) -> Option<Ticks> {
    let line = text.lines().next()?.strip_prefix("cpu ")?;
    // The time of guests is also that of users.
    let numbers = line.split_whitespace().take(8).map(str::parse);
    let numbers: Vec<u64> = numbers.collect::<Result<_, _>>().ok()?;
    let total: u64 = numbers.iter().sum();
    let idle = numbers.get(3)? + numbers.get(4)?;
    Some(Ticks {
        busy: total - idle,
        total,
    })
}

/// Reads the times of a process and its ended children: the fields 14 to 17.
fn own_ticks(text: &str) -> Option<u64> {
    let times = stat_fields(text)?.skip(11).take(4);
    times.map(|field| field.parse::<u64>().ok()).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_of_the_kernel_are_read() {
        let text = "cpu  10 20 30 400 50 6 7 8 9 0\ncpu0 1 1 1 1 1 1 1 1 1 1\n";
        let (busy, total) = (81, 531);
        assert_eq!(ticks(text), Some(Ticks { busy, total }));
        assert_eq!(ticks("intr 1"), None);
        let text = "42 (a b) c) S 1 2 3 4 5 6 7 8 9 10 100 20 3 4 20 0 1";
        assert_eq!(own_ticks(text), Some(127));
    }

    #[test]
    fn own_work_is_not_that_of_others() {
        let since = Since::now().expect("Linux");
        assert!(
            since
                .share()
                .is_some_and(|share| (0.0..=1.0).contains(&share))
        );
    }
}
