//! Names of the routed experts' tensors.
//!
//! Models spell them in three ways: all experts of a layer merged in one 3-D tensor
//! (`blk.5.ffn_down_exps.weight`, expert *e* at `e * nb[2]`), one tensor an expert
//! as older files have them (`blk.5.ffn_down.3.weight`), and rarely
//! `blk.5.ffn_down_exps.3.weight`. Shared experts (`_shexp`) are not routed, and
//! biases are no projections: neither is an expert tensor here.

use std::collections::HashMap;
use std::fmt;

use crate::gguf::GgufFile;

/// One of the matrices of an expert.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Projection {
    /// Gate.
    Gate,
    /// Up.
    Up,
    /// Gate and up in one tensor.
    GateUp,
    /// Down.
    Down,
}

impl Projection {
    const ALL: [Projection; 4] = [
        Projection::Gate,
        Projection::Up,
        Projection::GateUp,
        Projection::Down,
    ];

    fn name(self) -> &'static str {
        match self {
            Projection::Gate => "gate",
            Projection::Up => "up",
            Projection::GateUp => "gate_up",
            Projection::Down => "down",
        }
    }
}

impl fmt::Display for Projection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// What the name of an expert tensor says.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ExpertName {
    /// Layer, from 0.
    pub layer: u32,
    /// Which matrix.
    pub projection: Projection,
    /// Which expert; `None` when the tensor holds all of the layer.
    pub expert: Option<u32>,
}

impl ExpertName {
    /// Reads a tensor name; `None` when it is not one of an expert.
    pub fn parse(name: &str) -> Option<ExpertName> {
        let parts: Vec<&str> = name.split('.').collect();
        let (layer, kind, expert) = match parts.as_slice() {
            ["blk", layer, kind, "weight"] => (layer, kind, None),
            ["blk", layer, kind, expert, "weight"] => (layer, kind, Some(number(expert)?)),
            _ => return None,
        };
        let kind = kind.strip_prefix("ffn_")?;
        let (kind, merged_spelling) = match kind.strip_suffix("_exps") {
            Some(kind) => (kind, true),
            None => (kind, false),
        };
        // `blk.5.ffn_down.weight` is the network of a layer without experts.
        if !merged_spelling && expert.is_none() {
            return None;
        }
        Some(ExpertName {
            layer: number(layer)?,
            projection: Projection::ALL.into_iter().find(|p| p.name() == kind)?,
            expert,
        })
    }
}

/// More experts than any model has in a layer. A file that names more is no reason to
/// make room for them.
const MOST_EXPERTS: u32 = 1 << 16;

impl ExpertName {
    /// How many experts the layer of a tensor with this name and shape has at least; 0
    /// when that cannot be.
    pub fn count(&self, ne: &[u64; 4]) -> u32 {
        let count = match self.expert {
            Some(expert) => expert.checked_add(1),
            None => u32::try_from(ne[2]).ok(),
        };
        count.filter(|&count| count <= MOST_EXPERTS).unwrap_or(0)
    }
}

impl fmt::Display for ExpertName {
    /// The tensor's name, in the spelling of current files where there is a choice.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (layer, kind) = (self.layer, self.projection);
        match self.expert {
            None => write!(f, "blk.{layer}.ffn_{kind}_exps.weight"),
            Some(expert) => write!(f, "blk.{layer}.ffn_{kind}.{expert}.weight"),
        }
    }
}

/// Where the bytes of one matrix of one expert are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ExpertSlice {
    /// Index of the file.
    pub file: usize,
    /// Index of the tensor in its header.
    pub tensor: usize,
    /// First byte, from the start of the file.
    pub offset: u64,
    /// Bytes of the matrix.
    pub nbytes: u64,
}

/// All expert tensors of a model, found by what they are and by name.
#[derive(Debug, Default)]
pub struct ExpertIndex {
    slices: HashMap<(u32, u32, Projection), ExpertSlice>,
    names: HashMap<String, (ExpertName, u32)>,
}

impl ExpertIndex {
    /// Reads the names and places of all tensors, once.
    pub fn of<'a>(files: impl IntoIterator<Item = &'a GgufFile>) -> ExpertIndex {
        let mut index = ExpertIndex::default();
        for (file, gguf) in files.into_iter().enumerate() {
            for (tensor, info) in gguf.header.tensors.iter().enumerate() {
                let text = gguf.header.name(info).to_string_lossy();
                let Some(name) = ExpertName::parse(&text) else {
                    continue;
                };
                // A merged tensor is cut along its third dimension.
                let (first, count) = match name.expert {
                    Some(expert) => (expert, 1),
                    None => (0, name.count(&info.ne)),
                };
                let nbytes = info.nbytes / u64::from(count.max(1));
                for number in 0..count {
                    let slice = ExpertSlice {
                        file,
                        tensor,
                        offset: info.offset + u64::from(number) * nbytes,
                        nbytes,
                    };
                    let key = (name.layer, first + number, name.projection);
                    index.slices.insert(key, slice);
                }
                index.names.insert(text.into_owned(), (name, count));
            }
        }
        index
    }

    /// Where a matrix of an expert is.
    pub fn slice(&self, layer: u32, expert: u32, projection: Projection) -> Option<ExpertSlice> {
        self.slices.get(&(layer, expert, projection)).copied()
    }

    /// What a tensor is, and how many experts it holds.
    pub fn tensor(&self, name: &str) -> Option<(ExpertName, u32)> {
        self.names.get(name).copied()
    }

    /// Names of all expert tensors, ascending.
    pub fn names(&self) -> Vec<&str> {
        let mut names: Vec<&str> = self.names.keys().map(String::as_str).collect();
        names.sort_unstable();
        names
    }
}

/// A decimal number as names spell it: no sign, no leading zero.
fn number(text: &str) -> Option<u32> {
    let canonical = text == "0" || !text.starts_with(['0', '+']);
    text.parse().ok().filter(|_| canonical)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(name: &str) -> Option<(u32, Projection, Option<u32>)> {
        ExpertName::parse(name).map(|e| (e.layer, e.projection, e.expert))
    }

    #[test]
    fn all_spellings_are_read() {
        use Projection::*;
        assert_eq!(parse("blk.5.ffn_down_exps.weight"), Some((5, Down, None)));
        assert_eq!(
            parse("blk.0.ffn_gate_up_exps.weight"),
            Some((0, GateUp, None))
        );
        assert_eq!(parse("blk.12.ffn_gate.3.weight"), Some((12, Gate, Some(3))));
        assert_eq!(
            parse("blk.12.ffn_up_exps.511.weight"),
            Some((12, Up, Some(511)))
        );
    }

    #[test]
    fn names_are_built_as_they_are_read() {
        for name in ["blk.5.ffn_down_exps.weight", "blk.12.ffn_gate.3.weight"] {
            let parsed = ExpertName::parse(name).expect("an expert");
            assert_eq!(parsed.to_string(), name);
        }
    }

    #[test]
    fn other_tensors_are_not_experts() {
        for name in [
            "blk.5.ffn_down.weight",
            "blk.5.ffn_down_shexp.weight",
            "blk.5.ffn_down_exps.bias",
            "blk.5.ffn_gate_inp.weight",
            "blk.05.ffn_down_exps.weight",
            "blk.-1.ffn_down_exps.weight",
            "blk.99999999999.ffn_down_exps.weight",
            "output.weight",
            "",
        ] {
            assert_eq!(parse(name), None, "{name}");
        }
    }
}
