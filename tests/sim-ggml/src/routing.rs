//! Which experts tokens use: as the host computed it; where nothing is computed, from a file or
//! at random.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::path::Path;
use std::sync::Mutex;

use crate::ggml::{I32, Tensor};
use crate::splitmix::{STEP, mixed};

/// Experts of tokens from a file.
#[derive(Debug, Default)]
pub struct Routes {
    /// By layer, token after token.
    experts: BTreeMap<u64, Vec<i32>>,
    /// By layer, which of them the present tokens use.
    present: Mutex<BTreeMap<u64, Range<usize>>>,
}

impl Routes {
    /// Reads a file with a line `LAYER,EXPERT` for each expert of each token, in their order.
    pub fn read(path: &Path) -> Result<Routes, String> {
        let text = std::fs::read_to_string(path).map_err(|error| error.to_string())?;
        let mut routes = Routes::default();
        for line in text.lines() {
            let pair = line.split_once(',');
            let pair = pair.and_then(|(layer, expert)| {
                Some((layer.parse().ok()?, expert.parse::<i32>().ok()?))
            });
            let (layer, expert) =
                pair.ok_or_else(|| format!("expected LAYER,EXPERT, found {line:?}"))?;
            routes.experts.entry(layer).or_default().push(expert);
        }
        Ok(routes)
    }

    /// Returns the experts that the present tokens of a layer use, from the first ones again after
    /// the last; `None` for a layer that the file does not have. A host may read them more than once.
    fn present(&self, layer: u64, count: usize) -> Option<Vec<i32>> {
        let all = self.experts.get(&layer)?;
        let mut present = self.present.lock().expect("no panic");
        let range = present.entry(layer).or_default();
        range.end = range.start + count;
        let experts = all.iter().cycle().skip(range.start % all.len());
        Some(experts.take(count).copied().collect())
    }

    /// Goes on to the next tokens of a layer, whose router has this name.
    pub fn routed(&self, router: &str) {
        let mut present = self.present.lock().expect("no panic");
        let range = present.entry(layer(router)).or_default();
        range.start = range.end;
    }
}

/// Returns how many experts there are, for the numbers of experts that a layer chose: a view of
/// all experts in their order. `None` for any other tensor.
///
/// # Safety
///
/// The tensor belongs to a graph that exists.
pub unsafe fn experts(tensor: &Tensor, argsort: i32) -> Option<usize> {
    // SAFETY: the caller's promise.
    let order = unsafe { tensor.view_src.as_ref() }?;
    (tensor.ty == I32 && order.op == argsort).then_some(order.ne[0] as usize)
}

/// The number of the layer that a name of one of its tensors ends with.
///
/// A scheduler's copy of a tensor is named `DEVICE#NAME#COPY`; a view has an addition in brackets.
fn layer(name: &str) -> u64 {
    let name = name.split('#').nth(1).unwrap_or(name);
    let name = name.split(' ').next().unwrap_or(name);
    let number = name
        .rsplit('-')
        .next()
        .and_then(|number| number.parse().ok());
    number.unwrap_or(0)
}

/// Returns the experts of a token: distinct, and the same in each run.
pub fn chosen(name: &str, token: usize, used: usize, experts: usize) -> Vec<i32> {
    let mut state = (layer(name) << 32 | token as u64).wrapping_add(STEP);
    let mut chosen = BTreeSet::new();
    let mut order = Vec::with_capacity(used);
    while order.len() < used.min(experts) {
        let expert = (mixed(state) % experts as u64) as i32;
        state = state.wrapping_add(STEP);
        if chosen.insert(expert) {
            order.push(expert);
        }
    }
    order
}

/// Fills a copy of the numbers of experts, or of a part of them, with those of `routes` or at
/// random.
///
/// # Safety
///
/// `to` holds `size` bytes.
pub unsafe fn fill(
    tensor: &Tensor,
    experts: usize,
    routes: Option<&Routes>,
    to: *mut u8,
    offset: usize,
    size: usize,
) {
    let name = tensor.name();
    let (used, tokens) = (tensor.ne[0] as usize, tensor.ne[1] as usize);
    let routes = routes.filter(|_| offset == 0);
    let routed = routes.and_then(|routes| routes.present(layer(&name), used * tokens));
    for token in 0..tokens {
        let chosen = match &routed {
            Some(all) => all[token * used..][..used].to_vec(),
            None => chosen(&name, token, used, experts),
        };
        for (place, expert) in chosen.into_iter().enumerate() {
            let at = token * tensor.nb[1] + place * tensor.nb[0];
            if at >= offset && at + 4 <= offset + size {
                // SAFETY: inside of what the caller promises.
                unsafe { to.add(at - offset).cast::<i32>().write_unaligned(expert) };
            }
        }
    }
}

/// Returns which experts are used by tokens.
pub fn used(experts: usize, ids: impl Iterator<Item = i32>) -> Vec<bool> {
    let mut used = vec![false; experts];
    for id in ids {
        if let Some(used) = used.get_mut(id as usize) {
            *used = true;
        }
    }
    used
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn experts_of_a_token_are_distinct_and_valid() {
        for token in 0..100 {
            let all = chosen("ffn_moe_topk-3", token, 8, 9);
            assert_eq!(all.iter().collect::<BTreeSet<_>>().len(), 8);
            assert!(all.iter().all(|expert| (0..9).contains(expert)));
        }
    }

    #[test]
    fn experts_of_a_file_come_in_their_order() {
        let file = std::env::temp_dir().join(format!("routes-{}", std::process::id()));
        std::fs::write(&file, "3,1\n0,7\n3,2\n3,5\n").expect("written");
        let routes = Routes::read(&file).expect("valid");
        for _ in 0..2 {
            assert_eq!(routes.present(3, 2), Some(vec![1, 2]));
        }
        assert_eq!(routes.present(0, 1), Some(vec![7]));
        routes.routed("ffn_moe_argsort-3");
        assert_eq!(routes.present(3, 2), Some(vec![5, 1]));
        assert_eq!(routes.present(0, 1), Some(vec![7]));
        assert_eq!(routes.present(1, 2), None);
        std::fs::write(&file, "3,1\n3\n").expect("written");
        assert!(Routes::read(&file).is_err());
        std::fs::remove_file(&file).expect("removed");
    }

    #[test]
    fn a_copy_of_a_tensor_has_the_same_experts() {
        let of = |name| chosen(name, 5, 4, 128);
        assert_eq!(of("ffn_moe_topk-3"), of("SIM0#ffn_moe_topk-3#0"));
        assert_eq!(of("ffn_moe_topk-3"), of("ffn_moe_topk-3 (reshaped)"));
        assert_ne!(of("ffn_moe_topk-3"), of("ffn_moe_topk-2"));
    }
}
