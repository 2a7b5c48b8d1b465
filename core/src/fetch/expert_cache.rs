//! Which experts of a layer stay on a device, in a fixed number of slots.
//!
//! A layer that is routed to experts looks them up. Those without a slot are to be loaded into a
//! slot of an expert that is not used now:
//!
//! ```
//! use sidecar_core::fetch::{ExpertCache, Load};
//! use sidecar_core::trace::Ids;
//!
//! // A layer of 8 experts, and 3 slots.
//! let mut cache = ExpertCache::new(8, 3, 1);
//! let mut look_up = |ids: [i32; 2]| {
//!     let bytes: Vec<u8> = ids.iter().flat_map(|id| id.to_ne_bytes()).collect();
//!     let ids = Ids::packed(&bytes, 2);
//!     let (mut loads, mut slots) = (Vec::new(), Vec::new());
//!     cache.look_up(&ids, &mut loads, &mut slots).expect("valid ids");
//!     (loads, slots)
//! };
//! let loads = [Load { expert: 6, slot: 0 }, Load { expert: 2, slot: 1 }];
//! assert_eq!(look_up([6, 2]), (loads.to_vec(), vec![0, 1]));
//! // Expert 2 has a slot, and 5 gets the free one.
//! assert_eq!(look_up([2, 5]), (vec![Load { expert: 5, slot: 2 }], vec![1, 2]));
//! // Expert 6 was used the longest time ago.
//! assert_eq!(look_up([2, 7]), (vec![Load { expert: 7, slot: 0 }], vec![1, 0]));
//! ```

use crate::trace::Ids;

/// An expert that is to be copied to a slot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Load {
    /// The expert.
    pub expert: u32,
    /// The slot, whose bytes are not needed any more.
    pub slot: u32,
}

/// The slots of one layer.
///
/// The slot of the expert with the least recent and frequent use is loaded next (the policy LRFU
/// of Lee et al., IEEE Transactions on Computers 50, 2001): each use counts for half as much after
/// `half_life` uses of any expert of the layer. A half-life of one use gives LRU, because a use
/// then counts more than all uses before it together.
#[derive(Debug)]
pub struct ExpertCache {
    /// The slot of each expert.
    slot_of: Vec<Option<u32>>,
    /// The expert in each slot.
    expert_in: Vec<Option<u32>>,
    /// The score of each expert, with or without a slot: the logarithm to base 2 of the sum of
    /// `2^(time / half_life)` over its uses. Only differences matter, and time changes none.
    score: Vec<f64>,
    /// The look-up in which each expert was used last.
    used_in: Vec<u64>,
    look_ups: u64,
    /// Uses so far, divided by the half-life.
    time: f64,
    /// The time of one use.
    step: f64,
    evictions: u64,
}

impl ExpertCache {
    /// Makes empty slots for a layer of so many experts.
    pub fn new(experts: u32, slots: u32, half_life: u32) -> ExpertCache {
        ExpertCache {
            slot_of: vec![None; experts as usize],
            expert_in: vec![None; slots as usize],
            score: vec![f64::NEG_INFINITY; experts as usize],
            used_in: vec![0; experts as usize],
            look_ups: 0,
            time: 0.0,
            step: 1.0 / f64::from(half_life.max(1)),
            evictions: 0,
        }
    }

    /// Returns the number of slots.
    pub fn slots(&self) -> usize {
        self.expert_in.len()
    }

    /// Returns how often an expert lost its slot to another.
    pub fn evictions(&self) -> u64 {
        self.evictions
    }

    /// Puts experts into free slots, the most wanted first. Returns those that are to be loaded.
    pub fn fill(&mut self, experts: impl IntoIterator<Item = u32>) -> Vec<Load> {
        let mut loads = Vec::new();
        for expert in experts {
            let free = self.expert_in.iter().position(Option::is_none);
            let Some(slot) = free else { break };
            if self.slot_of.get(expert as usize) == Some(&None) {
                let slot = slot as u32;
                self.put(expert, slot);
                loads.push(Load { expert, slot });
            }
        }
        for load in loads.iter().rev() {
            self.note_use(load.expert as usize);
        }
        loads
    }

    /// Counts uses that need no slot: those of the last tokens of a batch, as many as fit the
    /// slots. Their experts keep the slots that they have.
    pub fn note(&mut self, ids: &Ids<'_>) {
        let tokens = self.slots() / ids.used.max(1);
        for token in ids.tokens.saturating_sub(tokens)..ids.tokens {
            for expert in (0..ids.used).filter_map(|used| ids.get(token, used)) {
                if usize::try_from(expert).is_ok_and(|expert| expert < self.score.len()) {
                    self.note_use(expert as usize);
                }
            }
        }
    }

    /// Forgets what is in the slots.
    pub fn clear(&mut self) {
        self.slot_of.fill(None);
        self.expert_in.fill(None);
    }

    /// Looks up the experts of a layer. Appends those that are to be loaded, and the slot of each
    /// id, token by token. Returns the number of different experts that had a slot.
    ///
    /// `None` if an id is not one of an expert, or if the ids may need more slots than there are;
    /// nothing is changed then.
    pub fn look_up(
        &mut self,
        ids: &Ids<'_>,
        loads: &mut Vec<Load>,
        slots: &mut Vec<i32>,
    ) -> Option<usize> {
        let hits = self.begin(ids)?;
        for expert in experts(ids) {
            let slot = match self.slot_of[expert as usize] {
                Some(slot) => slot,
                None => self.load_next(expert, loads)?,
            };
            self.note_use(expert as usize);
            slots.push(slot as i32);
        }
        Some(hits)
    }

    /// Looks up the experts of a layer as [`look_up`](ExpertCache::look_up) does, for a caller that
    /// computes without slots what has none now.
    ///
    /// Loads are for later look-ups: at most `most`, and at most the slots that one token leaves.
    /// The position of each id whose expert has no slot now is appended to `missed`. Its slot is
    /// any one that is not loaded, and that no other id of its token has: kernels expect different
    /// experts.
    pub fn look_up_now(
        &mut self,
        ids: &Ids<'_>,
        most: usize,
        loads: &mut Vec<Load>,
        slots: &mut Vec<i32>,
        missed: &mut Vec<usize>,
    ) -> Option<usize> {
        let hits = self.begin(ids)?;
        let most = most.min(self.slots() - ids.used);
        for (at, expert) in experts(ids).enumerate() {
            let is_new = |load: &Load| load.expert == expert;
            let slot = match self.slot_of[expert as usize] {
                Some(slot) if !loads.iter().any(is_new) => slot as i32,
                known => {
                    if known.is_none() && loads.len() < most {
                        self.load_next(expert, loads)?;
                    }
                    missed.push(at);
                    -1
                }
            };
            self.note_use(expert as usize);
            slots.push(slot);
        }
        for &at in missed.iter() {
            let token = at - at % ids.used;
            let of_token = &slots[token..token + ids.used];
            let is_loaded = |slot: i32| loads.iter().any(|load| load.slot as i32 == slot);
            let mut all = 0..self.slots() as i32;
            slots[at] = all.find(|slot| !of_token.contains(slot) && !is_loaded(*slot))?;
        }
        Some(hits)
    }

    /// Begins a look-up. Returns the number of different experts that have a slot; `None` if the
    /// ids are not valid, or may need more slots than there are.
    fn begin(&mut self, ids: &Ids<'_>) -> Option<usize> {
        let count = ids.used.checked_mul(ids.tokens)?;
        let is_valid = |at: usize| {
            let id = ids.get(at / ids.used, at % ids.used);
            id.is_some_and(|id| usize::try_from(id).is_ok_and(|id| id < self.slot_of.len()))
        };
        if count > self.slots() || !(0..count).all(is_valid) {
            return None;
        }
        self.look_ups += 1;
        let mut hits = 0;
        for expert in experts(ids).map(|expert| expert as usize) {
            let first = self.used_in[expert] != self.look_ups;
            self.used_in[expert] = self.look_ups;
            hits += usize::from(first && self.slot_of[expert].is_some());
        }
        Some(hits)
    }

    /// Gives an expert the slot that is loaded next, and returns it.
    fn load_next(&mut self, expert: u32, loads: &mut Vec<Load>) -> Option<u32> {
        let is_used_now = |expert: u32| self.used_in[expert as usize] == self.look_ups;
        let (slot, _) = self.victim(|_, held| held.is_some_and(is_used_now))?;
        loads.push(Load { expert, slot });
        self.put(expert, slot);
        Some(slot)
    }

    /// Returns the slot of an expert.
    pub fn slot(&self, expert: u32) -> Option<u32> {
        *self.slot_of.get(expert as usize)?
    }

    /// Notes a use of an expert, with or without a slot.
    pub fn touch(&mut self, expert: u32) {
        self.note_use(expert as usize);
    }

    /// Gives an expert that has no slot a free slot, or that of the expert with the lowest score.
    /// `in_use` excludes slots, by their number and expert. Returns the slot and the expert that
    /// lost it; `None` if all slots are in use.
    pub fn load(
        &mut self,
        expert: u32,
        in_use: impl Fn(u32, Option<u32>) -> bool,
    ) -> Option<(u32, Option<u32>)> {
        let (slot, before) = self.victim(in_use)?;
        self.put(expert, slot);
        Some((slot, before))
    }

    /// Returns a free slot, or that of the expert with the lowest score, with its expert.
    /// `in_use` excludes slots, by their number and expert.
    fn victim(&self, in_use: impl Fn(u32, Option<u32>) -> bool) -> Option<(u32, Option<u32>)> {
        let score = |(slot, held): (usize, &Option<u32>)| {
            let score = held.map_or(f64::NEG_INFINITY, |held| self.score[held as usize]);
            (!in_use(slot as u32, *held)).then_some((score, slot as u32, *held))
        };
        let all = self.expert_in.iter().enumerate().filter_map(score);
        let (_, slot, held) = all.min_by(|a, b| a.0.total_cmp(&b.0))?;
        Some((slot, held))
    }

    /// Takes the slot from an expert.
    pub fn forget(&mut self, expert: u32) {
        if let Some(slot) = self.slot_of[expert as usize].take() {
            self.expert_in[slot as usize] = None;
        }
    }

    /// Adds a use to the score of an expert.
    fn note_use(&mut self, expert: usize) {
        self.time += self.step;
        let score = &mut self.score[expert];
        let (more, less) = (score.max(self.time), score.min(self.time));
        *score = more + libm::log1p(libm::exp2(less - more)) / std::f64::consts::LN_2;
    }

    /// Puts an expert into a slot, in place of the one that is there.
    fn put(&mut self, expert: u32, slot: u32) {
        if let Some(before) = self.expert_in[slot as usize].replace(expert) {
            self.slot_of[before as usize] = None;
            self.evictions += 1;
        }
        self.slot_of[expert as usize] = Some(slot);
    }
}

/// Returns the experts of valid ids, token by token.
fn experts<'a>(ids: &'a Ids<'a>) -> impl Iterator<Item = u32> + 'a {
    let id = |at| ids.get(at / ids.used, at % ids.used);
    (0..ids.used * ids.tokens).filter_map(move |at| id(at).map(|id| id as u32))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Routes of a layer: `used` different experts for each token. Some experts are hot, and the
    /// experts of a token are likely those of the token before.
    fn routes(experts: u32, used: usize, tokens: usize) -> Vec<Vec<i32>> {
        let mut state = 88172645463325252u64;
        let mut random = move || {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            state >> 33
        };
        let mut before: Vec<i32> = Vec::new();
        let mut all = Vec::new();
        for _ in 0..tokens {
            let mut now: Vec<i32> = Vec::new();
            while now.len() < used {
                let expert = match random() % 4 {
                    0 => (random() % u64::from(experts / 8)) as i32,
                    1 => (random() % u64::from(experts)) as i32,
                    _ => match before.get(now.len()) {
                        Some(&expert) => expert,
                        None => (random() % u64::from(experts)) as i32,
                    },
                };
                if !now.contains(&expert) {
                    now.push(expert);
                }
            }
            before.clone_from(&now);
            all.push(now);
        }
        all
    }

    fn ids(list: &[i32]) -> Vec<u8> {
        list.iter().flat_map(|id| id.to_ne_bytes()).collect()
    }

    fn look_up(
        cache: &mut ExpertCache,
        list: &[i32],
        tokens: usize,
    ) -> Option<(usize, Vec<Load>, Vec<i32>)> {
        let bytes = ids(list);
        let ids = Ids::packed(&bytes, list.len() / tokens);
        let (mut loads, mut slots) = (Vec::new(), Vec::new());
        let hits = cache.look_up(&ids, &mut loads, &mut slots)?;
        Some((hits, loads, slots))
    }

    /// An exact LRU: experts by their last use.
    fn simulated_hits(routes: &[Vec<i32>], slots: usize) -> usize {
        let mut order: Vec<i32> = Vec::new();
        let mut hits = 0;
        for token in routes {
            hits += token.iter().filter(|expert| order.contains(expert)).count();
            order.retain(|expert| !token.contains(expert));
            order.extend(token);
            let len = order.len();
            order.drain(..len.saturating_sub(slots));
        }
        hits
    }

    #[test]
    fn hits_are_those_of_a_simulated_lru() {
        for (experts, used, slots) in [
            (8, 2, 2),
            (16, 4, 5),
            (64, 4, 16),
            (128, 8, 32),
            (512, 10, 64),
        ] {
            let routes = routes(experts, used, 3000);
            let mut cache = ExpertCache::new(experts, slots, 1);
            let mut hits = 0;
            for token in &routes {
                hits += look_up(&mut cache, token, 1).expect("valid").0;
            }
            assert_eq!(
                hits,
                simulated_hits(&routes, slots as usize),
                "{experts} {slots}"
            );
        }
    }

    /// Each id finds its expert's bytes in its slot, whatever the policy.
    #[test]
    fn slots_have_the_experts() {
        for half_life in [1, 100] {
            let mut cache = ExpertCache::new(64, 16, half_life);
            let mut device = [None; 16];
            for tokens in routes(64, 4, 3000).chunks(3) {
                let list = tokens.concat();
                let (hits, loads, slots) = look_up(&mut cache, &list, tokens.len()).expect("valid");
                let mut different = list.clone();
                different.sort_unstable();
                different.dedup();
                assert_eq!(hits + loads.len(), different.len());
                for load in loads {
                    device[load.slot as usize] = Some(load.expert as i32);
                }
                for (id, slot) in list.iter().zip(slots) {
                    assert_eq!(device[slot as usize], Some(*id));
                }
            }
        }
    }

    /// What is not missed finds its expert's bytes, as the device has them before the loads.
    #[test]
    fn what_has_no_slot_now_is_missed() {
        for (used, tokens, slots, most) in [
            (4, 1, 16, 0),
            (4, 1, 16, 1),
            (4, 1, 16, 9),
            (4, 3, 16, 9),
            (4, 1, 5, 9),
            (1, 1, 2, 9),
        ] {
            let mut cache = ExpertCache::new(64, slots, 1);
            let mut device = vec![None; slots as usize];
            let mut count = 0;
            for list in routes(64, used, 3000).chunks_exact(tokens) {
                let list = list.concat();
                let bytes = ids(&list);
                let ids = Ids::packed(&bytes, used);
                let (mut loads, mut found, mut missed) = (Vec::new(), Vec::new(), Vec::new());
                let hits = cache.look_up_now(&ids, most, &mut loads, &mut found, &mut missed);
                assert!(hits.expect("valid") + missed.len() <= used * tokens);
                for token in found.chunks(used) {
                    let mut different = token.to_vec();
                    different.sort_unstable();
                    different.dedup();
                    assert_eq!(different.len(), used, "{token:?}");
                }
                assert!(loads.len() <= most.min(missed.len()));
                for (at, slot) in found.iter().enumerate() {
                    assert!(loads.iter().all(|load| load.slot as i32 != *slot));
                    let has = device[*slot as usize] == Some(list[at]);
                    assert_eq!(has, !missed.contains(&at), "{list:?} {found:?}");
                }
                for load in loads {
                    device[load.slot as usize] = Some(load.expert as i32);
                    count += 1;
                }
            }
            assert_eq!(count > 0, most > 0);
        }
    }

    #[test]
    fn ids_that_are_no_experts_or_too_many_change_nothing() {
        let mut cache = ExpertCache::new(8, 4, 1);
        look_up(&mut cache, &[1, 2, 3, 4], 1).expect("valid");
        for list in [&[1, 8][..], &[-1, 2], &[1, 2, 3, 4, 5]] {
            assert_eq!(look_up(&mut cache, list, 1), None);
        }
        let (hits, loads, slots) = look_up(&mut cache, &[4, 3, 2, 1], 1).expect("valid");
        assert_eq!((hits, loads, slots), (4, Vec::new(), vec![3, 2, 1, 0]));
        cache.clear();
        assert_eq!(look_up(&mut cache, &[1], 1).expect("valid").0, 0);
        let mut none = ExpertCache::new(8, 0, 1);
        assert_eq!(look_up(&mut none, &[1], 1), None);
    }

    #[test]
    fn slots_that_were_filled_are_hits() {
        let mut cache = ExpertCache::new(8, 3, 1);
        let loads = cache.fill([5, 9, 5, 2, 7, 1]);
        let loaded: Vec<_> = loads.iter().map(|load| (load.expert, load.slot)).collect();
        assert_eq!(loaded, [(5, 0), (2, 1), (7, 2)]);
        let (hits, loads, _) = look_up(&mut cache, &[5, 3], 1).expect("valid");
        // The least wanted one is replaced.
        assert_eq!((hits, loads), (1, vec![Load { expert: 3, slot: 2 }]));
        assert_eq!(cache.evictions(), 1);
    }

    #[test]
    fn uses_without_slots_keep_experts() {
        let mut cache = ExpertCache::new(8, 2, 1);
        look_up(&mut cache, &[1, 2], 1).expect("valid");
        // Of four tokens, the last two fit.
        let bytes = ids(&[4, 2, 9, 1]);
        cache.note(&Ids::packed(&bytes, 1));
        let (_, loads, _) = look_up(&mut cache, &[3], 1).expect("valid");
        assert_eq!(loads, [Load { expert: 3, slot: 1 }]);
    }

    /// A hot expert stays although many others are used once.
    #[test]
    fn frequent_experts_outlive_a_scan() {
        let hits = |half_life| {
            let mut cache = ExpertCache::new(64, 8, half_life);
            let mut hits = 0;
            for token in 0..400 {
                // Two hot experts, each in every fifth token, among others that come once.
                let list = match token % 5 {
                    0 => [0, 1],
                    _ => [2 + (token * 2) % 60, 3 + (token * 2) % 60],
                };
                hits += look_up(&mut cache, &list, 1).expect("valid").0;
            }
            hits
        };
        assert_eq!(hits(1), 0);
        assert!(hits(200) > 100, "{}", hits(200));
    }

    #[test]
    fn a_slot_in_use_keeps_its_expert() {
        let mut cache = ExpertCache::new(8, 2, 1);
        for expert in [5, 6] {
            cache.touch(expert);
            cache.load(expert, |_, _| false).expect("a free slot");
        }
        assert_eq!(cache.load(7, |_, _| true), None);
        // Expert 5 was used the longest time ago, but is in use.
        let loaded = cache.load(7, |_, held| held == Some(5));
        assert_eq!(loaded, Some((1, Some(6))));
        let slots = [5, 6, 7, 8].map(|expert| cache.slot(expert));
        assert_eq!(slots, [Some(0), None, Some(1), None]);
        cache.forget(5);
        cache.forget(5);
        assert_eq!(cache.slot(5), None);
        // Slot 0 is free, but in use.
        assert_eq!(cache.load(1, |slot, _| slot == 0), Some((1, Some(7))));
        assert_eq!(cache.load(2, |_, _| false), Some((0, None)));
    }
}
