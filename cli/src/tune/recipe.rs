//! The choice of a type for each group, so that the sum of the divergences is small and the sum of
//! the sizes fits a budget.
//!
//! The divergences of single groups are taken to add up. The sizes are counted in units of a
//! fraction of the budget, rounded up, so that a choice never exceeds the budget; what rounding
//! leaves is spent afterwards.

/// A type for a group.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Choice {
    pub bytes: u64,
    /// What the group adds to the divergence.
    pub cost: f64,
}

/// Number of parts into which the budget is divided.
const UNITS: usize = 1 << 14;

/// Returns the position of a choice for each group; `None` if even the smallest choices exceed the
/// budget. Each group has at least one choice.
pub fn allocate(groups: &[Vec<Choice>], budget: u64) -> Option<Vec<usize>> {
    let smallest: Vec<usize> = groups.iter().map(|choices| smallest(choices)).collect();
    let least = bytes(groups, &smallest)?;
    // What each group needs beyond its smallest choice is allocated.
    let spare = budget.checked_sub(least)?;
    let unit = (spare / UNITS as u64).max(1);
    let units = (spare / unit) as usize;
    let extra = |group: usize, choice: &Choice| {
        (choice.bytes - groups[group][smallest[group]].bytes).div_ceil(unit) as usize
    };
    // The least cost of the groups so far, for each number of units.
    let mut costs = vec![0.0; units + 1];
    let mut chosen: Vec<Vec<u16>> = Vec::with_capacity(groups.len());
    for (group, choices) in groups.iter().enumerate() {
        let mut next = vec![f64::INFINITY; units + 1];
        let mut best = vec![0; units + 1];
        for (at, choice) in choices.iter().enumerate() {
            let extra = extra(group, choice);
            for used in extra..=units {
                let cost = costs[used - extra] + choice.cost;
                if cost < next[used] {
                    next[used] = cost;
                    best[used] = at as u16;
                }
            }
        }
        costs = next;
        chosen.push(best);
    }
    let mut left = units;
    let mut found = vec![0; groups.len()];
    for group in (0..groups.len()).rev() {
        found[group] = usize::from(chosen[group][left]);
        left -= extra(group, &groups[group][found[group]]);
    }
    spend(groups, &mut found, budget)?;
    Some(found)
}

/// Takes better choices while they fit, those first that gain the most for their bytes.
fn spend(groups: &[Vec<Choice>], found: &mut [usize], budget: u64) -> Option<()> {
    loop {
        let left = budget.checked_sub(bytes(groups, found)?)?;
        let mut best: Option<(f64, usize, usize)> = None;
        for (group, choices) in groups.iter().enumerate() {
            let now = choices[found[group]];
            for (at, choice) in choices.iter().enumerate() {
                let more = choice.bytes.saturating_sub(now.bytes);
                let gain = (now.cost - choice.cost) / more.max(1) as f64;
                if gain > 0.0 && more <= left && best.is_none_or(|best| gain > best.0) {
                    best = Some((gain, group, at));
                }
            }
        }
        let Some((_, group, at)) = best else {
            return Some(());
        };
        found[group] = at;
    }
}

fn smallest(choices: &[Choice]) -> usize {
    let all = choices.iter().enumerate();
    let least = all.min_by_key(|(_, choice)| choice.bytes);
    least.map_or(0, |(at, _)| at)
}

/// Returns the sum of the sizes of choices.
pub fn bytes(groups: &[Vec<Choice>], found: &[usize]) -> Option<u64> {
    let mut chosen = groups.iter().zip(found).map(|(of, at)| of[*at].bytes);
    chosen.try_fold(0u64, u64::checked_add)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every combination, for comparison.
    fn exact(groups: &[Vec<Choice>], budget: u64) -> Option<f64> {
        let Some((first, rest)) = groups.split_first() else {
            return Some(0.0);
        };
        let costs = first.iter().filter_map(|choice| {
            let left = budget.checked_sub(choice.bytes)?;
            Some(choice.cost + exact(rest, left)?)
        });
        costs.min_by(f64::total_cmp)
    }

    #[test]
    fn the_choice_is_the_best_that_fits() {
        // Numbers of a linear congruential generator.
        let mut state = 1u64;
        let mut random = move |most: u64| {
            state = state
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1);
            (state >> 33) % most
        };
        for _ in 0..200 {
            let groups: Vec<Vec<Choice>> = (0..5)
                .map(|_| {
                    let choice = |_| Choice {
                        bytes: 1 + random(50),
                        cost: random(1000) as f64,
                    };
                    (0..3).map(choice).collect()
                })
                .collect();
            let budget = 20 + random(200);
            let found = allocate(&groups, budget);
            let cost = found.as_ref().map(|found| {
                assert!(bytes(&groups, found).is_some_and(|bytes| bytes <= budget));
                let chosen = groups.iter().zip(found);
                chosen.map(|(choices, at)| choices[*at].cost).sum::<f64>()
            });
            assert_eq!(cost, exact(&groups, budget));
        }
    }

    #[test]
    fn a_budget_below_the_smallest_choices_has_no_recipe() {
        let group = vec![
            Choice {
                bytes: 10,
                cost: 1.0,
            },
            Choice {
                bytes: 20,
                cost: 0.0,
            },
        ];
        let groups = [group.clone(), group];
        assert_eq!(allocate(&groups, 19), None);
        assert_eq!(allocate(&groups, 20), Some(vec![0, 0]));
        assert_eq!(allocate(&groups, 1 << 40), Some(vec![1, 1]));
        assert_eq!(allocate(&[], 0), Some(vec![]));
    }
}
