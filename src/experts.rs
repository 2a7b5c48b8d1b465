//! Names of the routed experts' tensors.
//!
//! Models spell them in three ways: all experts of a layer merged in one 3-D tensor
//! (`blk.5.ffn_down_exps.weight`, expert *e* at `e * nb[2]`), one tensor an expert
//! as older files have them (`blk.5.ffn_down.3.weight`), and rarely
//! `blk.5.ffn_down_exps.3.weight`. Shared experts (`_shexp`) are not routed, and
//! biases are no projections: neither is an expert tensor here.

use std::fmt;

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
