//! Names of the experts that evaluations use.
//!
//! The thread that evaluates prints them, a layer at a time: whatever ends the process next, they are
//! out. Without names, nothing of this runs.

use std::fmt::Write;

use super::counters::ExpertLayout;
use super::ids::Ids;
use crate::experts::{ExpertIndex, Projection};
use crate::gguf::GgufFile;
use crate::logger::print;

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
    matrices: Vec<MatrixNames>,
}

/// The tensors of a matrix.
#[derive(Debug, Default)]
struct MatrixNames {
    /// Of all experts, without the end of its name.
    merged: Option<String>,
    /// Of single experts, ascending by their numbers.
    single: Vec<(u32, String)>,
}

impl ExpertNames {
    /// Returns the names of the layers of [`ExpertLayout::of`], as the files of a model have them.
    pub fn of<'a>(files: impl IntoIterator<Item = &'a GgufFile>) -> ExpertNames {
        let files: Vec<&GgufFile> = files.into_iter().collect();
        let experts = ExpertIndex::of(files.iter().copied());
        let layout = ExpertLayout::of(&experts);
        let infos = files.iter().flat_map(|file| {
            let infos = file.header.tensors.iter();
            infos.map(|info| file.header.name(info).to_string_lossy())
        });
        let spelled: Vec<_> = infos.collect();
        let matrix = |layer: u32, projection: Projection| {
            let mut names = MatrixNames::default();
            let tensors = experts.of_layer(layer).iter();
            for tensor in tensors.filter(|tensor| tensor.name.projection == projection) {
                let name = spelled.get(tensor.tensor)?;
                match tensor.name.expert {
                    Some(expert) => names.single.push((expert, name.to_string())),
                    None => names.merged = Some(name.strip_suffix(".weight")?.to_owned()),
                }
            }
            (names.merged.is_some() || !names.single.is_empty()).then_some(names)
        };
        let names = |&(layer, _): &(u32, u32)| LayerNames {
            layer,
            matrices: ORDER.iter().filter_map(|&of| matrix(layer, of)).collect(),
        };
        ExpertNames {
            layers: layout.layers().iter().map(names).collect(),
        }
    }

    /// Prints the tensors of the experts that an evaluation used. `layer` is a position in the layout.
    pub fn print(&self, layer: usize, ids: &Ids<'_>) {
        let places = (0..ids.tokens).flat_map(|token| (0..ids.used).map(move |used| (token, used)));
        let mut experts: Vec<u32> = places
            .filter_map(|(token, used)| u32::try_from(ids.get(token, used)?).ok())
            .collect();
        experts.sort_unstable();
        experts.dedup();
        let mut text = String::new();
        for expert in experts {
            self.write(&mut text, layer, expert);
        }
        print(&text);
    }

    /// Adds a line for each matrix of an expert. A tensor of all experts is named with the number
    /// of the expert: `blk.0.ffn_gate_exps.3.weight` is expert 3 of `blk.0.ffn_gate_exps.weight`.
    fn write(&self, text: &mut String, layer: usize, expert: u32) {
        let LayerNames { layer, matrices } = &self.layers[layer];
        for MatrixNames { merged, single } in matrices {
            let begin = format_args!("[EXPERT-TRACE] Layer {layer}, Expert {expert}: ");
            let found = single.binary_search_by_key(&expert, |(of, _)| *of);
            let _ = match (merged, found) {
                (Some(stem), _) => writeln!(text, "{begin}{stem}.{expert}.weight"),
                (None, Ok(at)) => writeln!(text, "{begin}{}", single[at].1),
                (None, Err(_)) => Ok(()),
            };
        }
    }
}

#[cfg(test)]
mod tests {
    use crate::experts::ExpertName;
    use crate::gguf::Access;
    use testkit::writer::{F32, Gguf};

    use super::*;

    #[test]
    fn the_names_of_an_expert_are_those_of_the_file() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("model.gguf");
        let mut file = Gguf::default();
        for projection in ["gate", "down", "up"] {
            file = file.tensor(
                &format!("blk.0.ffn_{projection}_exps.weight"),
                &[32, 32, 4],
                F32,
                1,
            );
        }
        for (spelling, expert) in [("gate", 0), ("gate_exps", 1), ("down_exps", 0), ("down", 1)] {
            file = file.tensor(
                &format!("blk.7.ffn_{spelling}.{expert}.weight"),
                &[32, 32],
                F32,
                1,
            );
        }
        file.write(&path).expect("a file");
        let file = GgufFile::open(&path, Access::Read).expect("a model");
        let names = ExpertNames::of([&file]);
        let mut text = String::new();
        for (layer, expert) in [(0, 3), (1, 0), (1, 1), (1, 2)] {
            names.write(&mut text, layer, expert);
        }
        let expected = "\
[EXPERT-TRACE] Layer 0, Expert 3: blk.0.ffn_gate_exps.3.weight
[EXPERT-TRACE] Layer 0, Expert 3: blk.0.ffn_down_exps.3.weight
[EXPERT-TRACE] Layer 0, Expert 3: blk.0.ffn_up_exps.3.weight
[EXPERT-TRACE] Layer 7, Expert 0: blk.7.ffn_gate.0.weight
[EXPERT-TRACE] Layer 7, Expert 0: blk.7.ffn_down_exps.0.weight
[EXPERT-TRACE] Layer 7, Expert 1: blk.7.ffn_gate_exps.1.weight
[EXPERT-TRACE] Layer 7, Expert 1: blk.7.ffn_down.1.weight
";
        assert_eq!(text, expected);
        for line in text.lines() {
            let name = line.rsplit(' ').next().expect("a word");
            assert!(ExpertName::parse(name).is_some(), "{name}");
        }
    }
}
