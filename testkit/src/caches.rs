//! Caches of experts, simulated size by size: what the expert trace is compared with.
//!
//! The experts of a token are looked up first, in the state that the tokens before it left; then
//! all of them count as used, in order.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};

/// Returns the hits of a cache that keeps the experts used last.
pub fn lru_hits(routes: &[Vec<u32>], size: usize) -> u64 {
    let mut order: Vec<u32> = Vec::new();
    let mut hits = 0;
    for token in routes {
        hits += token.iter().filter(|expert| order.contains(expert)).count();
        for &expert in token {
            order.retain(|&other| other != expert);
            order.push(expert);
        }
        order.drain(..order.len().saturating_sub(size));
    }
    hits as u64
}

/// Returns the hits of a cache that keeps the experts with the most uses so far; of equal ones,
/// those that reached the number first.
pub fn lfu_hits(routes: &[Vec<u32>], size: usize) -> u64 {
    // Uses of each expert, and the time of the last.
    let mut uses: BTreeMap<u32, (u64, usize)> = BTreeMap::new();
    let (mut time, mut hits) = (0, 0);
    for token in routes {
        let used = uses
            .iter()
            .map(|(&expert, &(count, reached))| (Reverse(count), reached, expert));
        let mut order: Vec<_> = used.collect();
        order.sort_unstable();
        order.truncate(size);
        let kept = |expert: &&u32| order.iter().any(|(_, _, kept)| kept == *expert);
        hits += token.iter().filter(kept).count();
        for &expert in token {
            time += 1;
            let entry = uses.entry(expert).or_default();
            *entry = (entry.0 + 1, time);
        }
    }
    hits as u64
}

/// Returns the hits of a cache that keeps, of what it has and what a token uses, the experts that
/// are used again soonest.
pub fn best_hits(routes: &[Vec<u32>], size: usize) -> u64 {
    // The tokens that use an expert.
    let mut uses: BTreeMap<u32, Vec<usize>> = BTreeMap::new();
    for (number, token) in routes.iter().enumerate() {
        for &expert in token {
            uses.entry(expert).or_default().push(number);
        }
    }
    let mut kept: BTreeSet<u32> = BTreeSet::new();
    let mut hits = 0;
    for (number, token) in routes.iter().enumerate() {
        hits += token.iter().filter(|expert| kept.contains(expert)).count();
        kept.extend(token);
        let again = |expert: &u32| {
            let of_expert = &uses[expert];
            let later = of_expert.partition_point(|&token| token <= number);
            of_expert.get(later).copied().unwrap_or(usize::MAX)
        };
        let mut order: Vec<u32> = kept.iter().copied().collect();
        order.sort_by_key(again);
        kept = order.into_iter().take(size).collect();
    }
    hits as u64
}

/// Returns the most hits that a cache of a size can have, by trying all choices: for few experts,
/// whose numbers are below 16, and few tokens.
pub fn most_hits(routes: &[Vec<u32>], size: usize) -> u64 {
    // The most hits so far, by what the cache has.
    let mut states: BTreeMap<u16, u64> = BTreeMap::from([(0, 0)]);
    for token in routes {
        let used = token.iter().fold(0, |set, expert| set | 1u16 << expert);
        let mut next: BTreeMap<u16, u64> = BTreeMap::new();
        for (&kept, &before) in &states {
            let hit = token.iter().filter(|&&expert| kept >> expert & 1 == 1);
            let hits = before + hit.count() as u64;
            let all = kept | used;
            // All subsets.
            let mut subset = all;
            loop {
                if subset.count_ones() as usize <= size {
                    let most = next.entry(subset).or_default();
                    *most = hits.max(*most);
                }
                if subset == 0 {
                    break;
                }
                subset = (subset - 1) & all;
            }
        }
        states = next;
    }
    states.into_values().max().unwrap_or(0)
}
