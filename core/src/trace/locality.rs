//! Locality of routing: how often a cache of N experts of a layer would have had the expert
//! that a token uses, for all N at once.
//!
//! A layer's experts are looked up token by token: the experts of a token are looked up first, in
//! the state that the tokens before it left; then all of them count as used, in the order of
//! their ids. An id that a token repeats is looked up again. A cache begins empty, so the first
//! use of an expert is a miss at every size.
//!
//! | policy | what a cache of N experts has |
//! |---|---|
//! | LRU | the N experts that were used last |
//! | LFU | the N experts with the most uses so far; of equal ones, those that reached this number first |
//! | best | after a token, any N of the experts that it had and those of the token, chosen so that most later look-ups hit |
//!
//! In all three, the content of a cache is part of that of the next larger one (stack
//! algorithms: Mattson et al., IBM Systems Journal 9, 1970). So each use has one least size from
//! which on it is a hit, and a curve counts uses by it: `curve[d]` uses hit in each cache of
//! more than `d` experts. LRU and LFU are counted while the program runs. The best choice needs
//! the uses to come (Belady, IBM Systems Journal 5, 1966): [`Recorder`] keeps the last
//! [`WINDOW_IDS`] ids of a layer, and [`Recorder::locality`] computes it over their tokens.

use super::ids::Ids;
use crate::experts::MAX_EXPERTS;

/// Ids of a layer that are kept: 4,096 tokens with 10 experts each, 80 KiB.
pub const WINDOW_IDS: usize = 40_960;

/// Marks the first id of a token among those that are kept.
const FIRST: u16 = 1 << 15;
const _: () = assert!(MAX_EXPERTS < FIRST as u32);

/// Locality of one layer.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Locality {
    /// First uses of experts, which miss at every size.
    pub first: u64,
    /// Uses by the size from which on an LRU hits, less one.
    pub lru: Vec<u64>,
    /// Uses by the size from which on an LFU hits, less one.
    pub lfu: Vec<u64>,
    /// The last tokens.
    pub window: Window,
}

/// Locality of the last tokens of one layer, in caches that are empty before them.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Window {
    /// Number of the tokens.
    pub tokens: u64,
    /// First uses of experts among these tokens.
    pub first: u64,
    /// Uses by the size from which on an LRU hits, less one.
    pub lru: Vec<u64>,
    /// Uses by the size from which on the best possible choice hits, less one.
    pub best: Vec<u64>,
}

/// Returns the hits of a cache of `size` experts.
pub fn hits(curve: &[u64], size: usize) -> u64 {
    curve.iter().take(size).sum()
}

impl Locality {
    /// Returns the uses that were looked up.
    pub fn uses(&self) -> u64 {
        self.first + self.lru.iter().sum::<u64>()
    }

    /// Adds the locality of another run. Its caches begin empty, too.
    pub fn merge(&mut self, other: &Locality) {
        self.first += other.first;
        add(&mut self.lru, &other.lru);
        add(&mut self.lfu, &other.lfu);
        self.window.tokens += other.window.tokens;
        self.window.first += other.window.first;
        add(&mut self.window.lru, &other.window.lru);
        add(&mut self.window.best, &other.window.best);
    }
}

impl Window {
    /// Returns the uses that were looked up.
    pub fn uses(&self) -> u64 {
        self.first + self.lru.iter().sum::<u64>()
    }
}

fn add(to: &mut Vec<u64>, other: &[u64]) {
    to.resize(to.len().max(other.len()), 0);
    for (to, other) in to.iter_mut().zip(other) {
        *to += other;
    }
}

/// Records the routes of one layer. Its memory is fixed: per expert 2 bytes for its last use, 12
/// for its uses and 16 for the curves, and twice [`WINDOW_IDS`]. 48 layers of 512 experts take
/// 4.6 MB, however many tokens they route.
#[derive(Debug, Clone)]
pub struct Recorder {
    experts: usize,
    first: u64,
    lru: Vec<u64>,
    lfu: Vec<u64>,
    last_uses: LastUses,
    use_counts: UseCounts,
    /// The last ids, those of a token together, the first of them with [`FIRST`].
    recent: Vec<u16>,
    /// The place of the oldest id, where the next one is put when all places are taken.
    oldest: usize,
    /// The experts of the token that is recorded.
    token: Vec<u16>,
}

impl Recorder {
    /// Makes an empty record of a layer with so many experts, at most [`MAX_EXPERTS`].
    pub fn new(experts: u32) -> Recorder {
        let experts = experts.min(MAX_EXPERTS) as usize;
        Recorder {
            experts,
            first: 0,
            lru: vec![0; experts],
            lfu: vec![0; experts],
            last_uses: LastUses::new(experts),
            use_counts: UseCounts::new(experts),
            recent: Vec::with_capacity(WINDOW_IDS),
            oldest: 0,
            token: Vec::with_capacity(64),
        }
    }

    /// Records the tokens of a matrix of ids, in order. Ids that are no experts are left out.
    pub fn record(&mut self, ids: &Ids<'_>) {
        for token in 0..ids.tokens {
            self.token.clear();
            for used in 0..ids.used {
                let id = ids.get(token, used).and_then(|id| u16::try_from(id).ok());
                self.token
                    .extend(id.filter(|&id| usize::from(id) < self.experts));
            }
            self.record_token();
        }
    }

    fn record_token(&mut self) {
        let mut mark = FIRST;
        for &expert in &self.token {
            match self.last_uses.distance(expert) {
                Some(distance) => {
                    self.lru[distance] += 1;
                    self.lfu[self.use_counts.rank(expert)] += 1;
                }
                None => self.first += 1,
            }
            if self.recent.len() < WINDOW_IDS {
                self.recent.push(expert | mark);
            } else {
                self.recent[self.oldest] = expert | mark;
                self.oldest = (self.oldest + 1) % WINDOW_IDS;
            }
            mark = 0;
        }
        for &expert in &self.token {
            self.last_uses.note(expert);
            self.use_counts.note(expert);
        }
    }

    /// Returns the curves of all tokens, and computes those of the last ones. That takes about a
    /// microsecond for each token: work on a clone where another thread waits.
    pub fn locality(&self) -> Locality {
        Locality {
            first: self.first,
            lru: trimmed(&self.lru),
            lfu: trimmed(&self.lfu),
            window: self.window(),
        }
    }

    fn window(&self) -> Window {
        let (newer, older) = self.recent.split_at(self.oldest);
        let ids = [older, newer].concat();
        // Some ids of the oldest token can be gone.
        let whole = ids.iter().position(|id| id & FIRST != 0);
        let ids = &ids[whole.unwrap_or(ids.len())..];
        let plain: Vec<u16> = ids.iter().map(|id| id & !FIRST).collect();
        let mut tokens: Vec<&[u16]> = Vec::new();
        let mut rest = plain.as_slice();
        for token in ids.chunk_by(|_, next| next & FIRST == 0) {
            let (token, after) = rest.split_at(token.len());
            tokens.push(token);
            rest = after;
        }
        let lru = lru(&tokens, self.experts);
        Window {
            tokens: tokens.len() as u64,
            first: plain.len() as u64 - lru.iter().sum::<u64>(),
            lru,
            best: best(&tokens, self.experts),
        }
    }
}

/// Returns a curve without the zeros at its end.
fn trimmed(curve: &[u64]) -> Vec<u64> {
    let zeros = curve.iter().rev().take_while(|&&uses| uses == 0).count();
    curve[..curve.len() - zeros].to_vec()
}

/// The order in which experts were used last.
#[derive(Debug, Clone)]
struct LastUses {
    /// The time of each expert's last use; 0 for one that was never used. Small numbers, because
    /// all of them are compared for each use.
    times: Vec<i16>,
    now: i16,
}

impl LastUses {
    fn new(experts: usize) -> LastUses {
        LastUses {
            times: vec![0; experts],
            now: 0,
        }
    }

    /// Returns the number of experts that were used after the last use of this one; `None` for one
    /// that was never used.
    fn distance(&self, expert: u16) -> Option<usize> {
        let last = self.times[usize::from(expert)];
        let later: i16 = self.times.iter().map(|&time| i16::from(time > last)).sum();
        (last > 0).then_some(later as usize)
    }

    fn note(&mut self, expert: u16) {
        if self.now == i16::MAX {
            self.renumber();
        }
        self.now += 1;
        self.times[usize::from(expert)] = self.now;
    }

    /// Gives the times 1, 2, 3, … to the experts that were used, in the same order.
    fn renumber(&mut self) {
        let used = (0..self.times.len()).filter(|&expert| self.times[expert] > 0);
        let mut order: Vec<usize> = used.collect();
        order.sort_unstable_by_key(|&expert| self.times[expert]);
        self.now = 0;
        for expert in order {
            self.now += 1;
            self.times[expert] = self.now;
        }
    }
}

/// The experts that were used, by descending number of uses; of equal ones, those first that
/// reached the number first.
#[derive(Debug, Clone)]
struct UseCounts {
    uses: Vec<u64>,
    by_rank: Vec<u16>,
    /// The place of each expert in `by_rank`, once it was used.
    rank_of: Vec<u16>,
}

impl UseCounts {
    fn new(experts: usize) -> UseCounts {
        UseCounts {
            uses: vec![0; experts],
            by_rank: Vec::with_capacity(experts),
            rank_of: vec![0; experts],
        }
    }

    /// Returns the number of experts before this one, which was used before.
    fn rank(&self, expert: u16) -> usize {
        self.rank_of[usize::from(expert)].into()
    }

    fn note(&mut self, expert: u16) {
        let uses = self.uses[usize::from(expert)];
        self.uses[usize::from(expert)] += 1;
        if uses == 0 {
            self.rank_of[usize::from(expert)] = self.by_rank.len() as u16;
            self.by_rank.push(expert);
            return;
        }
        // The expert goes to the front of those that have as many uses as it had.
        let mut rank = self.rank(expert);
        while rank > 0 {
            let before = self.by_rank[rank - 1];
            if self.uses[usize::from(before)] != uses {
                break;
            }
            self.by_rank[rank] = before;
            self.rank_of[usize::from(before)] = rank as u16;
            rank -= 1;
        }
        self.by_rank[rank] = expert;
        self.rank_of[usize::from(expert)] = rank as u16;
    }
}

/// Returns the curve of an LRU.
fn lru(tokens: &[&[u16]], experts: usize) -> Vec<u64> {
    let mut curve = vec![0; experts];
    let mut last_uses = LastUses::new(experts);
    for token in tokens {
        for &expert in *token {
            if let Some(distance) = last_uses.distance(expert) {
                curve[distance] += 1;
            }
        }
        for &expert in *token {
            last_uses.note(expert);
        }
    }
    trimmed(&curve)
}

/// Returns the curve of the best possible choice: a cache keeps those experts that are used
/// again soonest.
///
/// The first N entries of `stack` are what a cache of N experts has. A token changes them from
/// the top: each entry is the soonest one of those that the entries above gave up and its own.
fn best(tokens: &[&[u16]], experts: usize) -> Vec<u64> {
    const NEVER: usize = usize::MAX;
    // For each id, the token that uses the expert again.
    let mut again: Vec<Vec<usize>> = Vec::with_capacity(tokens.len());
    let mut next_use = vec![NEVER; experts];
    for (number, token) in tokens.iter().enumerate().rev() {
        again.push(token.iter().map(|&id| next_use[usize::from(id)]).collect());
        for &expert in *token {
            next_use[usize::from(expert)] = number;
        }
    }
    let mut curve = vec![0; experts];
    let mut stack: Vec<u16> = Vec::with_capacity(experts);
    // The token that used an expert last.
    let mut used_in = vec![NEVER; experts];
    // Experts without an entry, the one that is used soonest at the end.
    let mut without: Vec<u16> = Vec::new();
    for ((number, token), again) in tokens.iter().enumerate().zip(again.iter().rev()) {
        without.clear();
        for (&expert, &again) in token.iter().zip(again) {
            next_use[usize::from(expert)] = again;
            if used_in[usize::from(expert)] != number {
                used_in[usize::from(expert)] = number;
                without.push(expert);
            }
        }
        // No two are equal, so that caches of all sizes choose alike.
        let key = |expert: u16| (next_use[usize::from(expert)], expert);
        without.sort_unstable_by_key(|&expert| std::cmp::Reverse(key(expert)));
        for (place, entry) in stack.iter_mut().enumerate() {
            let Some(&soonest) = without.last() else {
                break;
            };
            if used_in[usize::from(*entry)] == number {
                curve[place] += token.iter().filter(|&id| id == entry).count() as u64;
                without.pop();
                *entry = soonest;
            } else if key(soonest) < key(*entry) {
                without.pop();
                let out = std::mem::replace(entry, soonest);
                let at = without.partition_point(|&other| key(other) > key(out));
                without.insert(at, out);
            }
        }
        stack.extend(without.iter().rev());
    }
    trimmed(&curve)
}

#[cfg(test)]
mod tests {
    use testkit::caches::{best_hits, lfu_hits, lru_hits, most_hits};

    use super::*;

    /// Routes of a layer: `used` different experts for each token. Some experts are hot, and the
    /// experts of a token are likely those of the token before.
    fn routes(experts: u32, used: usize, tokens: usize, seed: u64) -> Vec<Vec<u32>> {
        let mut state = seed * 2 + 1;
        let mut random = move || {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            (state >> 33) as u32
        };
        let mut all: Vec<Vec<u32>> = Vec::new();
        for _ in 0..tokens {
            let mut now: Vec<u32> = Vec::new();
            while now.len() < used {
                let before = all.last().and_then(|token| token.get(now.len()).copied());
                let expert = match (random() % 4, before) {
                    (0, _) => random() % (experts / 4),
                    (1 | 2, Some(before)) => before,
                    _ => random() % experts,
                };
                if !now.contains(&expert) {
                    now.push(expert);
                }
            }
            all.push(now);
        }
        all
    }

    /// Records routes in batches of different sizes.
    fn recorded(experts: u32, routes: &[Vec<u32>]) -> Recorder {
        let mut recorder = Recorder::new(experts);
        let mut rest = routes;
        while !rest.is_empty() {
            let tokens = rest.len().min(1 + rest.len() % 7);
            let (batch, after) = rest.split_at(tokens);
            let ids = batch.iter().flatten();
            let bytes: Vec<u8> = ids.flat_map(|id| id.to_ne_bytes()).collect();
            recorder.record(&Ids::packed(&bytes, batch[0].len()));
            rest = after;
        }
        recorder
    }

    type Simulation = fn(&[Vec<u32>], usize) -> u64;

    /// Compares a curve with a simulation of caches of these sizes.
    fn same(curve: &[u64], simulation: Simulation, routes: &[Vec<u32>], sizes: &[usize]) {
        for &size in sizes {
            assert_eq!(hits(curve, size), simulation(routes, size), "{size}");
        }
    }

    #[test]
    fn curves_are_those_of_a_simulation_of_each_size() {
        for (experts, used, tokens) in [(8, 2, 10_000), (32, 4, 10_000), (64, 8, 1000)] {
            let routes = routes(experts, used, tokens, u64::from(experts));
            let locality = recorded(experts, &routes).locality();
            assert_eq!(locality.uses(), (used * tokens) as u64);
            let window = &routes[tokens.saturating_sub(WINDOW_IDS / used)..];
            assert_eq!(locality.window.tokens, window.len() as u64);
            assert_eq!(locality.window.uses(), (used * window.len()) as u64);
            let step = (experts as usize).div_ceil(12);
            let sizes: Vec<usize> = (0..=experts as usize).step_by(step).collect();
            same(&locality.lru, lru_hits, &routes, &sizes);
            same(&locality.lfu, lfu_hits, &routes, &sizes);
            same(&locality.window.lru, lru_hits, window, &sizes);
            same(&locality.window.best, best_hits, window, &sizes);
        }
    }

    /// Times are renumbered twice, and the oldest token of the window is not whole.
    #[test]
    fn long_runs_of_wide_layers_are_exact() {
        let (experts, used, tokens) = (512, 10, 7000);
        let routes = routes(experts, used, tokens, 3);
        let locality = recorded(experts, &routes).locality();
        same(&locality.lru, lru_hits, &routes, &[9, 200]);
        same(&locality.lfu, lfu_hits, &routes, &[100]);
        let routes = self::routes(16, 3, 20_000, 5);
        let window = recorded(16, &routes).locality().window;
        assert_eq!(window.tokens, WINDOW_IDS as u64 / 3);
        let last = &routes[routes.len() - WINDOW_IDS / 3..];
        same(&window.best, best_hits, last, &[1, 3, 8]);
    }

    /// Against all choices that a cache has.
    #[test]
    fn no_choice_has_more_hits_than_the_best() {
        for seed in 0..200 {
            let used = 1 + seed as usize % 3;
            let routes = routes(6, used, 12, seed);
            let best = recorded(6, &routes).locality().window.best;
            same(&best, most_hits, &routes, &[0, 1, 2, 3, 4, 5, 6]);
        }
    }

    #[test]
    fn repeated_ids_are_looked_up_again_and_others_left_out() {
        let recorder = recorded(4, &[vec![1, 1], vec![1, 1], vec![7, 4], vec![2, 9]]);
        let locality = recorder.locality();
        assert_eq!((locality.first, &locality.lru[..]), (3, &[2][..]));
        assert_eq!(locality.window.tokens, 3);
        assert_eq!(locality.window.best, [2]);
    }

    #[test]
    fn runs_are_added() {
        let (first, second) = (routes(16, 2, 300, 1), routes(16, 2, 500, 2));
        let mut sum = recorded(16, &first).locality();
        sum.merge(&recorded(16, &second).locality());
        for size in 1..=16 {
            let added = |of: Simulation| of(&first, size) + of(&second, size);
            assert_eq!(hits(&sum.lru, size), added(lru_hits));
            assert_eq!(hits(&sum.lfu, size), added(lfu_hits));
            assert_eq!(hits(&sum.window.best, size), added(best_hits));
        }
        assert_eq!((sum.uses(), sum.window.tokens), (1600, 800));
    }
}
