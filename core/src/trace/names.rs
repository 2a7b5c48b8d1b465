//! Names of the experts that evaluations use, printed by another thread.
//!
//! An evaluation only notes numbers. A thread forms the names and prints them, so that an
//! evaluation waits for no terminal and no disk.

use std::fmt::Write;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;

use super::counters::ExpertLayout;
use super::ids::Ids;
use super::requested::print;
use crate::experts::{ExpertIndex, ExpertName, Projection};

/// Time between two calls of [`print_used`] by the thread that prints.
pub const NAMES_EVERY: Duration = Duration::from_millis(200);
/// Entries that are kept for one call of [`print_used`]; further ones are dropped.
const MOST_USED: usize = 100_000;
/// Bytes that are printed at a time, at least.
const PRINTED: usize = 1 << 16;
/// Time for which the end of the process waits for another thread that prints.
const LONGEST_PRINT: Duration = Duration::from_secs(2);
/// The matrices of an expert, in the order in which they are printed.
const ORDER: [Projection; 4] = [
    Projection::Gate,
    Projection::GateUp,
    Projection::Down,
    Projection::Up,
];

/// The names of a model's expert tensors.
#[derive(Debug)]
pub struct ExpertNames {
    /// By the position of the layer in the layout.
    layers: Vec<LayerNames>,
}

#[derive(Debug)]
struct LayerNames {
    layer: u32,
    /// The matrices of its experts, and whether a tensor holds those of all experts.
    matrices: Vec<(Projection, bool)>,
}

/// Experts of a layer that an evaluation used.
struct Used {
    names: Arc<ExpertNames>,
    layer: usize,
    experts: Vec<u32>,
}

/// Entries that wait to be printed.
struct Waiting {
    used: Vec<Used>,
    dropped: u64,
}

static WAITING: Mutex<Waiting> = Mutex::new(Waiting {
    used: Vec::new(),
    dropped: 0,
});

impl ExpertNames {
    /// Returns the names of the layers of [`ExpertLayout::of`].
    pub fn of(experts: &ExpertIndex) -> ExpertNames {
        let layout = ExpertLayout::of(experts);
        let names = |&(layer, _): &(u32, u32)| {
            let tensors = experts.of_layer(layer);
            let matrix = |projection: Projection| {
                let of_matrix = |name: &ExpertName| name.projection == projection;
                let mut names = tensors.iter().map(|tensor| tensor.name).filter(of_matrix);
                let first = names.next()?;
                Some((projection, first.expert.is_none()))
            };
            LayerNames {
                layer,
                matrices: ORDER.into_iter().filter_map(matrix).collect(),
            }
        };
        ExpertNames {
            layers: layout.layers().iter().map(names).collect(),
        }
    }

    /// Notes the experts of an evaluation for [`print_used`]. `layer` is a position in the layout.
    pub fn note(self: &Arc<Self>, layer: usize, ids: &Ids<'_>) {
        let places = (0..ids.tokens).flat_map(|token| (0..ids.used).map(move |used| (token, used)));
        let mut experts: Vec<u32> = places
            .filter_map(|(token, used)| u32::try_from(ids.get(token, used)?).ok())
            .collect();
        experts.sort_unstable();
        experts.dedup();
        let mut waiting = WAITING.lock();
        if waiting.used.len() == MOST_USED {
            waiting.dropped += 1;
            return;
        }
        waiting.used.push(Used {
            names: self.clone(),
            layer,
            experts,
        });
    }

    /// Adds a line for each matrix of an expert. A tensor of all experts is named with the number
    /// of the expert: `blk.0.ffn_gate_exps.3.weight` is expert 3 of `blk.0.ffn_gate_exps.weight`.
    fn write(&self, text: &mut String, layer: usize, expert: u32) {
        let LayerNames { layer, matrices } = &self.layers[layer];
        for (matrix, is_merged) in matrices {
            let spelling = if *is_merged { "_exps" } else { "" };
            let _ = writeln!(
                text,
                "[EXPERT-TRACE] Layer {layer}, Expert {expert}: blk.{layer}.ffn_{matrix}{spelling}.{expert}.weight"
            );
        }
    }
}

/// Prints the names of the experts that were used since the last call.
pub fn print_used() {
    static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());
    let _turn = ONE_AT_A_TIME.try_lock_for(LONGEST_PRINT);
    // The lock is not held while lines are printed: evaluations take it. The process may end
    // while another thread holds it.
    let Some(mut waiting) = WAITING.try_lock_for(LONGEST_PRINT) else {
        return;
    };
    let (used, dropped) = (
        std::mem::take(&mut waiting.used),
        std::mem::take(&mut waiting.dropped),
    );
    drop(waiting);
    let mut text = String::new();
    for Used {
        names,
        layer,
        experts,
    } in used
    {
        for expert in experts {
            names.write(&mut text, layer, expert);
        }
        if text.len() >= PRINTED {
            print(&text);
            text.clear();
        }
    }
    if dropped > 0 {
        let _ = writeln!(
            text,
            "[EXPERT-TRACE] {dropped} layers of evaluations are not listed, because names are printed too slowly; the counts are complete"
        );
    }
    print(&text);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_names_of_an_expert_are_gate_down_and_up() {
        let names = ExpertNames {
            layers: vec![
                LayerNames {
                    layer: 0,
                    matrices: vec![
                        (Projection::Gate, true),
                        (Projection::Down, true),
                        (Projection::Up, true),
                    ],
                },
                LayerNames {
                    layer: 7,
                    matrices: vec![(Projection::GateUp, true), (Projection::Down, false)],
                },
            ],
        };
        let mut text = String::new();
        names.write(&mut text, 0, 3);
        names.write(&mut text, 1, 12);
        let expected = "\
[EXPERT-TRACE] Layer 0, Expert 3: blk.0.ffn_gate_exps.3.weight
[EXPERT-TRACE] Layer 0, Expert 3: blk.0.ffn_down_exps.3.weight
[EXPERT-TRACE] Layer 0, Expert 3: blk.0.ffn_up_exps.3.weight
[EXPERT-TRACE] Layer 7, Expert 12: blk.7.ffn_gate_up_exps.12.weight
[EXPERT-TRACE] Layer 7, Expert 12: blk.7.ffn_down.12.weight
";
        assert_eq!(text, expected);
        for line in text.lines() {
            let name = line.rsplit(' ').next().expect("a word");
            assert!(ExpertName::parse(name).is_some(), "{name}");
        }
    }
}
