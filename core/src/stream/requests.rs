//! Experts to be read, as bits: a set for each matrix of each layer.
//!
//! A request is never lost and takes no memory of its own: to request an expert sets its bit.
//! Any thread may set and take bits; none waits for another.

use std::sync::atomic::{AtomicU64, Ordering};

use crate::experts::{MAX_EXPERTS, Projection};

/// Experts in a word.
const BITS: usize = u64::BITS as usize;

/// A set of experts.
#[derive(Debug, Clone, Copy)]
pub struct ExpertSet([u64; MAX_EXPERTS as usize / BITS]);

impl ExpertSet {
    /// The set without experts.
    pub const EMPTY: ExpertSet = ExpertSet([0; MAX_EXPERTS as usize / BITS]);

    /// Returns the set of the first experts, at most [`MAX_EXPERTS`].
    pub fn first(experts: u32) -> ExpertSet {
        (0..experts.min(MAX_EXPERTS)).collect()
    }

    /// Adds an expert, which must be less than [`MAX_EXPERTS`].
    pub fn insert(&mut self, expert: u32) {
        self.0[expert as usize / BITS] |= 1 << (expert as usize % BITS);
    }

    /// Whether it has an expert.
    pub fn contains(&self, expert: u32) -> bool {
        let word = self.0.get(expert as usize / BITS);
        word.is_some_and(|word| word >> (expert as usize % BITS) & 1 != 0)
    }

    /// Returns the experts, ascending.
    pub fn iter(&self) -> impl Iterator<Item = u32> {
        let words = (0u32..).zip(self.0);
        words.flat_map(|(at, word)| {
            let rest = std::iter::successors(Some(word), |word| Some(word & word.wrapping_sub(1)));
            let rest = rest.take_while(|word| *word != 0);
            rest.map(move |word| at * u64::BITS + word.trailing_zeros())
        })
    }

    /// Returns the number of experts.
    pub fn len(&self) -> u32 {
        self.0.iter().map(|word| word.count_ones()).sum()
    }
}

impl FromIterator<u32> for ExpertSet {
    /// Collects experts, which must be less than [`MAX_EXPERTS`].
    fn from_iter<I: IntoIterator<Item = u32>>(experts: I) -> ExpertSet {
        let mut set = ExpertSet::EMPTY;
        experts.into_iter().for_each(|expert| set.insert(expert));
        set
    }
}

/// A matrix of a layer, by number: the layer's position times four, plus the projection.
pub type Unit = usize;
/// Units of a layer.
pub const UNITS: usize = Projection::ALL.len();

/// Requested experts.
#[derive(Debug)]
pub struct Requests {
    /// Words of the set of one unit.
    words: usize,
    /// The sets of all units, one after the other.
    experts: Vec<AtomicU64>,
    /// Units with a set that is not empty.
    pending: Vec<AtomicU64>,
}

impl Requests {
    /// Makes empty sets.
    pub fn new(layers: usize, experts: usize) -> Requests {
        let zeros = |count: usize| (0..count).map(|_| AtomicU64::new(0)).collect();
        let words = experts.div_ceil(BITS);
        Requests {
            words,
            experts: zeros(layers * UNITS * words),
            pending: zeros((layers * UNITS).div_ceil(BITS)),
        }
    }

    fn set(&self, unit: Unit) -> &[AtomicU64] {
        &self.experts[unit * self.words..][..self.words]
    }

    /// Adds experts to the set of a unit. The unit becomes pending with [`Requests::publish`].
    pub fn add(&self, unit: Unit, experts: &ExpertSet) {
        for (word, more) in self.set(unit).iter().zip(&experts.0) {
            if *more != 0 {
                word.fetch_or(*more, Ordering::Relaxed);
            }
        }
    }

    /// Makes a unit pending.
    pub fn publish(&self, unit: Unit) {
        self.pending[unit / BITS].fetch_or(1 << (unit % BITS), Ordering::SeqCst);
    }

    /// Whether a unit is pending.
    pub fn is_pending(&self) -> bool {
        let mut words = self.pending.iter();
        words.any(|word| word.load(Ordering::SeqCst) != 0)
    }

    /// Claims a pending unit: the first one from `first` on, else the first of all.
    pub fn claim(&self, first: Unit) -> Option<Unit> {
        let words = self.pending.len();
        // The word of `first` is visited twice: from `first` on, and at last as a whole.
        (0..=words).find_map(|step| {
            let at = (first / BITS + step) % words;
            let skipped = if step == 0 { first % BITS } else { 0 };
            let word = &self.pending[at];
            loop {
                let found = word.load(Ordering::SeqCst) & (u64::MAX << skipped);
                if found == 0 {
                    return None;
                }
                let bit = found.trailing_zeros() as usize;
                if word.fetch_and(!(1 << bit), Ordering::SeqCst) & (1 << bit) != 0 {
                    return Some(at * BITS + bit);
                }
            }
        })
    }

    /// Whether the set of a unit has experts.
    pub fn has_any(&self, unit: Unit) -> bool {
        let mut words = self.set(unit).iter();
        words.any(|word| word.load(Ordering::Acquire) != 0)
    }

    /// Removes the first expert from the set of a unit and returns it.
    pub fn pop(&self, unit: Unit) -> Option<u32> {
        let words = self.set(unit).iter().enumerate();
        words
            .filter(|(_, word)| word.load(Ordering::Acquire) != 0)
            .find_map(|(at, word)| {
                loop {
                    let found = word.load(Ordering::Acquire);
                    if found == 0 {
                        return None;
                    }
                    let bit = found.trailing_zeros();
                    if word.fetch_and(!(1 << bit), Ordering::AcqRel) & (1 << bit) != 0 {
                        return Some(at as u32 * u64::BITS + bit);
                    }
                }
            })
    }

    /// Drops the requests of a unit.
    pub fn clear(&self, unit: Unit) {
        self.pending[unit / BITS].fetch_and(!(1 << (unit % BITS)), Ordering::SeqCst);
        for word in self.set(unit) {
            word.store(0, Ordering::Relaxed);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn set(experts: &[u32]) -> ExpertSet {
        experts.iter().copied().collect()
    }

    fn taken(requests: &Requests, unit: Unit) -> Vec<u32> {
        std::iter::from_fn(|| requests.pop(unit)).collect()
    }

    #[test]
    fn sets_have_a_size() {
        assert_eq!(ExpertSet::first(70).len(), 70);
        assert_eq!(ExpertSet::first(MAX_EXPERTS + 1).len(), MAX_EXPERTS);
        let experts: Vec<u32> = set(&[4095, 0, 65, 63]).iter().collect();
        assert_eq!(experts, [0, 63, 65, 4095]);
    }

    #[test]
    fn experts_are_taken_once_and_in_order() {
        let requests = Requests::new(3, 130);
        requests.add(5, &set(&[129, 0]));
        requests.add(5, &set(&[64, 0]));
        assert!(!requests.is_pending());
        requests.publish(5);
        assert!(requests.is_pending());
        assert_eq!(requests.claim(0), Some(5));
        assert_eq!(requests.claim(0), None);
        assert_eq!(taken(&requests, 5), [0, 64, 129]);
        assert!(taken(&requests, 5).is_empty());
    }

    #[test]
    fn units_are_claimed_from_the_current_layer_on() {
        let requests = Requests::new(40, 8);
        for unit in [2, 70, 90, 159] {
            requests.publish(unit);
        }
        requests.clear(90);
        let order: Vec<_> = std::iter::from_fn(|| requests.claim(72)).collect();
        assert_eq!(order, [159, 2, 70]);
    }

    #[test]
    fn threads_claim_different_units() {
        let requests = Requests::new(64, 8);
        let units = 64 * UNITS;
        (0..units).for_each(|unit| requests.publish(unit));
        let claim = || std::iter::from_fn(|| requests.claim(100)).collect::<Vec<_>>();
        let mut all: Vec<_> = std::thread::scope(|scope| {
            let threads: Vec<_> = (0..4).map(|_| scope.spawn(claim)).collect();
            let claimed = threads.into_iter().map(|thread| thread.join());
            claimed.flat_map(|units| units.expect("no panic")).collect()
        });
        all.sort_unstable();
        assert_eq!(all, (0..units).collect::<Vec<_>>());
    }
}
