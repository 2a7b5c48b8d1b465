//! A choice that prefers experts in memory.
//!
//! A router chooses the experts with the highest scores. Here, one that is in memory replaces one that is not where their
//! scores differ by less than a margin, so that less is read. The gate weights are those that the router gives to the new
//! choice. Results change, by how much is to be measured.
//!
//! A score is what the program sorts by: a probability of a softmax or a sigmoid, with its bias for the choice. Where it
//! sorts logits, the margin is for their softmax.

use super::requests::ExpertSet;
use crate::experts::MAX_EXPERTS;

/// The experts of a layer, sorted by their scores for each token.
#[derive(Debug)]
pub struct Ranking<'a> {
    /// A row of scores for each token.
    pub scores: &'a [f32],
    /// A row of experts for each token, the one with the highest score first. The first ones are chosen.
    pub order: &'a mut [i32],
    /// Experts in a row.
    pub experts: usize,
    /// Experts that a token uses.
    pub used: usize,
    /// Whether the scores are logits.
    pub logits: bool,
}

impl Ranking<'_> {
    /// Chooses experts that are `here` in place of others whose score is higher by less than `margin`. What one token needs
    /// from the disk all the same is here for the others. Returns how many choices are others than before; `None`, and no
    /// change, if the rows are not sorted by the scores.
    ///
    /// Takes no memory.
    pub fn prefer(&mut self, here: &ExpertSet, margin: f32) -> Option<u64> {
        if !self.is_valid() {
            return None;
        }
        let (used, logits) = (self.used, self.logits);
        let choose = |order: &[i32], scores: &[f32], here: &ExpertSet| {
            let row = Row {
                order,
                scores,
                logits,
            };
            row.choose(used, here, margin)
        };
        let mut needed = *here;
        if self.order.len() > self.experts {
            for (order, scores) in self.rows() {
                let chosen = choose(order, scores, here);
                chosen
                    .iter()
                    .for_each(|at| needed.insert(order[at as usize] as u32));
            }
        }
        let mut replaced = 0;
        let rows = self.order.chunks_exact_mut(self.experts);
        for (order, scores) in rows.zip(self.scores.chunks_exact(self.experts)) {
            let chosen = choose(order, scores, &needed);
            // Ascending, so that none is overwritten before it is moved.
            for (to, at) in chosen.iter().enumerate() {
                replaced += u64::from(at as usize >= used);
                order[to] = order[at as usize];
            }
        }
        Some(replaced)
    }

    fn rows(&self) -> impl Iterator<Item = (&[i32], &[f32])> {
        let scores = self.scores.chunks_exact(self.experts);
        self.order.chunks_exact(self.experts).zip(scores)
    }

    /// Whether the rows have experts, in the order of their scores: memory of the program that was used again has others.
    fn is_valid(&self) -> bool {
        let has_rows = (1..=MAX_EXPERTS as usize).contains(&self.experts)
            && (1..=self.experts).contains(&self.used)
            && self.order.len() == self.scores.len()
            && self.order.len().is_multiple_of(self.experts);
        has_rows
            && self.rows().all(|(order, scores)| {
                let in_order = order.iter().map(|expert| scores.get(*expert as usize));
                in_order.is_sorted_by(
                    |one, two| matches!((one, two), (Some(one), Some(two)) if one >= two),
                )
            })
    }
}

/// The ranking for a token.
struct Row<'a> {
    order: &'a [i32],
    scores: &'a [f32],
    logits: bool,
}

impl Row<'_> {
    /// Returns the positions of the chosen experts.
    fn choose(&self, used: usize, here: &ExpertSet, margin: f32) -> ExpertSet {
        let score = |at: usize| self.scores[self.order[at] as usize];
        let highest = score(0);
        let exponential = |score: f32| libm::expf(score - highest);
        let sum: f32 = match self.logits {
            true => self.scores.iter().map(|score| exponential(*score)).sum(),
            false => 1.0,
        };
        let difference = |higher: usize, lower: usize| match self.logits {
            true => (exponential(score(higher)) - exponential(score(lower))) / sum,
            false => score(higher) - score(lower),
        };
        let next = |from: usize, is_here: bool| {
            let mut rest = from..self.order.len();
            rest.find(|at| here.contains(self.order[*at] as u32) == is_here)
        };
        let (mut near, mut far) = (next(0, true), next(0, false));
        let mut chosen = ExpertSet::EMPTY;
        for _ in 0..used {
            let is_near = match (near, far) {
                (Some(near), Some(far)) => near < far || difference(far, near) < margin,
                (near, _) => near.is_some(),
            };
            let of_kind = if is_near { &mut near } else { &mut far };
            let Some(at) = *of_kind else { break };
            chosen.insert(at as u32);
            *of_kind = next(at + 1, is_near);
        }
        chosen
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn set(experts: &[u32]) -> ExpertSet {
        experts.iter().copied().collect()
    }

    /// Sorts rows of four scores, chooses two of each, and returns the choices and how many are others.
    fn chosen(scores: &[f32], logits: bool, here: &[u32], margin: f32) -> (Vec<i32>, Option<u64>) {
        let rows = scores.chunks(4);
        let mut order: Vec<i32> = rows
            .flat_map(|row| {
                let mut order: Vec<i32> = (0..4).collect();
                order.sort_by(|one, two| row[*two as usize].total_cmp(&row[*one as usize]));
                order
            })
            .collect();
        let mut ranking = Ranking {
            scores,
            order: &mut order,
            experts: 4,
            used: 2,
            logits,
        };
        let replaced = ranking.prefer(&set(here), margin);
        let chosen = order.chunks(4).flat_map(|row| row[..2].to_vec());
        (chosen.collect(), replaced)
    }

    const SCORES: [f32; 4] = [0.1, 0.4, 0.3, 0.2];

    #[test]
    fn an_expert_in_memory_replaces_one_within_the_margin() {
        let of = |here: &[u32], margin| chosen(&SCORES, false, here, margin);
        assert_eq!(of(&[3], 0.05), (vec![1, 2], Some(0)));
        assert_eq!(of(&[3], 0.15), (vec![1, 3], Some(1)));
        assert_eq!(of(&[0, 3], 0.15), (vec![1, 3], Some(1)));
        assert_eq!(of(&[0, 3], 0.5), (vec![3, 0], Some(2)));
        assert_eq!(of(&[1, 2], 0.5), (vec![1, 2], Some(0)));
        assert_eq!(of(&[], 0.5), (vec![1, 2], Some(0)));
    }

    #[test]
    fn without_a_margin_nothing_changes() {
        for here in [&[][..], &[0], &[0, 3], &[1], &[0, 1, 2, 3]] {
            assert_eq!(chosen(&SCORES, false, here, 0.0), (vec![1, 2], Some(0)));
            // Equal scores stay in the order of the program.
            assert_eq!(chosen(&[0.5; 4], true, here, 0.0), (vec![0, 1], Some(0)));
        }
    }

    #[test]
    fn the_margin_of_logits_is_one_of_probabilities() {
        // Probabilities of 0.64, 0.24, 0.09 and 0.03.
        let logits = [3.0, 2.0, 1.0, 0.0];
        assert_eq!(chosen(&logits, true, &[3], 0.2), (vec![0, 1], Some(0)));
        assert_eq!(chosen(&logits, true, &[3], 0.25), (vec![0, 3], Some(1)));
        assert_eq!(chosen(&logits, false, &[3], 0.25), (vec![0, 1], Some(0)));
    }

    #[test]
    fn what_one_token_reads_is_in_memory_for_the_others() {
        // The first token needs expert 0, which the second one then has.
        let scores = [0.9, 0.05, 0.03, 0.02, 0.3, 0.35, 0.05, 0.3];
        let (both, replaced) = chosen(&scores, false, &[1, 3], 0.1);
        assert_eq!((&both[2..], replaced), (&[1, 0][..], Some(0)));
        let (alone, replaced) = chosen(&scores[4..], false, &[1, 3], 0.1);
        assert_eq!((alone, replaced), (vec![1, 3], Some(1)));
    }

    #[test]
    fn experts_that_may_not_be_chosen_are_not() {
        let none = f32::NEG_INFINITY;
        let scores = [none, 0.4, 0.3, none];
        assert_eq!(chosen(&scores, false, &[0, 3], 1.0), (vec![1, 2], Some(0)));
    }

    #[test]
    fn rows_that_are_not_sorted_by_their_scores_are_left() {
        let prefer = |order: &mut [i32], scores: &[f32], used| {
            let mut ranking = Ranking {
                scores,
                order,
                experts: 4,
                used,
                logits: false,
            };
            ranking.prefer(&set(&[3]), 1.0)
        };
        for mut order in [[2, 1, 3, 0], [1, 2, 3, 4], [1, 2, 3, -1]] {
            let before = order;
            assert_eq!(prefer(&mut order, &SCORES, 2), None);
            assert_eq!(order, before);
        }
        let sorted = &mut [1, 2, 3, 0];
        assert_eq!(prefer(sorted, &[0.1, 0.4, f32::NAN, 0.2], 2), None);
        assert_eq!(prefer(sorted, &SCORES, 5), None);
        assert_eq!(prefer(sorted, &SCORES, 0), None);
        assert_eq!(prefer(sorted, &SCORES[..3], 2), None);
        assert_eq!(prefer(sorted, &SCORES, 2), Some(1));
    }
}
