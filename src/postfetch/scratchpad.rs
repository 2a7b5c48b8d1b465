//! An allocator for the scratchpad on the device.
//!
//! The scratchpad is one allocation. Its parts are taken at cumulative offsets, because experts
//! differ in size. A part is given out again only after it was given back, so layers that are
//! under way at the same time do not share bytes.

/// The free and taken parts of the scratchpad.
#[derive(Debug)]
pub(super) struct Scratchpad {
    pub len: u64,
    /// Start and length of each part, ascending.
    taken: Vec<(u64, u64)>,
    /// The most bytes that were taken at a time.
    pub peak: u64,
}

impl Scratchpad {
    /// Makes an allocator for `len` bytes. Up to `parts` parts at a time need no allocation.
    pub fn new(len: u64, parts: usize) -> Scratchpad {
        Scratchpad {
            len,
            taken: Vec::with_capacity(parts),
            peak: 0,
        }
    }

    /// Takes the first free part that is large enough, and returns its offset.
    pub fn take(&mut self, len: u64) -> Option<u64> {
        let mut start = 0;
        let mut at = 0;
        for &(begins, takes) in &self.taken {
            if begins - start >= len {
                break;
            }
            start = begins + takes;
            at += 1;
        }
        if self.len.checked_sub(start)? < len {
            return None;
        }
        self.taken.insert(at, (start, len));
        self.peak = self.peak.max(self.used());
        Some(start)
    }

    /// Gives back a part by its offset.
    pub fn give(&mut self, start: u64) {
        let at = self.taken.binary_search_by_key(&start, |part| part.0);
        self.taken
            .remove(at.expect("only what was taken is given back"));
    }

    /// Returns the bytes that are taken.
    pub fn used(&self) -> u64 {
        self.taken.iter().map(|part| part.1).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn offsets_are_cumulative_for_unequal_sizes() {
        let mut pad = Scratchpad::new(1536, 4);
        assert_eq!(pad.take(512), Some(0));
        assert_eq!(pad.take(256), Some(512));
        assert_eq!(pad.take(768), Some(768));
        assert_eq!(pad.take(256), None);
        pad.give(512);
        assert_eq!(pad.take(512), None);
        assert_eq!(pad.take(256), Some(512));
        assert_eq!((pad.used(), pad.peak), (1536, 1536));
    }

    proptest! {
        #[test]
        fn parts_never_overlap(steps in prop::collection::vec((any::<bool>(), 1u64..9), 0..200)) {
            let mut pad = Scratchpad::new(32 * 256, 64);
            let mut out: Vec<(u64, u64)> = Vec::new();
            for (take, size) in steps {
                if take {
                    if let Some(start) = pad.take(size * 256) {
                        let end = start + size * 256;
                        prop_assert!(end <= 32 * 256);
                        prop_assert!(out.iter().all(|&(s, l)| end <= s || s + l <= start));
                        out.push((start, size * 256));
                    }
                } else if !out.is_empty() {
                    let (start, _) = out.swap_remove(size as usize % out.len());
                    pad.give(start);
                }
                prop_assert_eq!(pad.used(), out.iter().map(|part| part.1).sum::<u64>());
            }
        }
    }
}
