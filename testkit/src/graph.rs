//! Graphs of a program: which tensors scale or bias a weight.

use std::collections::{BTreeSet, HashMap};

const PRODUCTS: [&str; 2] = ["MUL_MAT", "MUL_MAT_ID"];
const NORMS: [&str; 4] = ["NORM", "RMS_NORM", "L2_NORM", "GROUP_NORM"];
/// Operations of which one operand scales or biases the other.
const COMBINED: [&str; 6] = ["ADD", "ADD1", "ADD_ID", "SUB", "MUL", "DIV"];
/// Operations with the same elements, elsewhere, or each times one number.
const SAME: [&str; 9] = [
    "RESHAPE",
    "VIEW",
    "PERMUTE",
    "TRANSPOSE",
    "CONT",
    "CPY",
    "REPEAT",
    "SCALE",
    "CLAMP",
];

/// A node, or a tensor that no node computes.
struct Tensor<'a> {
    op: &'a str,
    name: &'a str,
    sources: Vec<&'a str>,
}

/// The tensors of a graph by their addresses.
type Tensors<'a> = HashMap<&'a str, Tensor<'a>>;

/// Returns the weights of graphs, each with a tensor that scales or biases its product or its input. Lines are those
/// of the command `graph` in hosts/architectures/host.c.
///
/// A tensor that multiplies a norm counts as a weight, and not as a companion of the weights that multiply the sum.
pub fn companions(lines: &str) -> BTreeSet<(String, String)> {
    let mut known = Tensors::new();
    let mut found = BTreeSet::new();
    for line in lines.lines() {
        let mut fields = line.split('\t');
        let mut next = || fields.next().unwrap_or_default();
        let (address, op, name) = (next(), next(), next());
        let sources: Vec<&str> = fields.collect();
        let pair = if COMBINED.contains(&op) {
            operand(&known, &sources)
                .and_then(|(of, companion)| Some((weight(&known, of)?, companion)))
        } else if PRODUCTS.contains(&op) {
            let input = same(&known, sources[1]);
            let scaled = input.filter(|input| COMBINED.contains(&input.op));
            let scaled = scaled.and_then(|input| operand(&known, &input.sources));
            let scaled = scaled.filter(|(of, _)| !is_normed(&known, of));
            scaled.and_then(|(_, companion)| Some((stored(&known, sources[0])?, companion)))
        } else {
            None
        };
        found.extend(pair.map(|(weight, companion)| (weight.to_owned(), companion.to_owned())));
        known.insert(address, Tensor { op, name, sources });
    }
    found
}

/// Returns the tensor that has the elements of a tensor.
fn same<'a, 'b>(known: &'b Tensors<'a>, address: &str) -> Option<&'b Tensor<'a>> {
    let tensor = known.get(address)?;
    match SAME.contains(&tensor.op) {
        true => same(known, tensor.sources.first()?),
        false => Some(tensor),
    }
}

/// Returns the name of the stored tensor whose elements these are. Scales of experts are repeated, and then looked up.
fn stored<'a>(known: &Tensors<'a>, address: &str) -> Option<&'a str> {
    let tensor = same(known, address)?;
    match tensor.op {
        "NONE" => Some(tensor.name),
        "GET_ROWS" => {
            let repeated = *tensor.sources.first()?;
            let is_repeated = known.get(repeated)?.op == "REPEAT";
            is_repeated.then(|| stored(known, repeated))?
        }
        _ => None,
    }
}

/// Returns the computed operand, by its address, and the stored one.
fn operand<'a>(known: &Tensors<'a>, sources: &[&'a str]) -> Option<(&'a str, &'a str)> {
    let [one, other] = [sources[0], sources[1]].map(|of| (of, stored(known, of)));
    match (one, other) {
        ((of, None), (_, Some(name))) | ((_, Some(name)), (of, None)) => Some((of, name)),
        _ => None,
    }
}

/// Whether a tensor is a norm, or a norm with its weight.
fn is_normed(known: &Tensors<'_>, address: &str) -> bool {
    let Some(tensor) = same(known, address) else {
        return false;
    };
    let of_weight = COMBINED
        .contains(&tensor.op)
        .then(|| operand(known, &tensor.sources));
    NORMS.contains(&tensor.op)
        || of_weight
            .flatten()
            .is_some_and(|(of, _)| is_normed(known, of))
}

/// Returns the weight of which a tensor is the product, with others of its companions.
fn weight<'a>(known: &Tensors<'a>, address: &str) -> Option<&'a str> {
    let tensor = same(known, address)?;
    if PRODUCTS.contains(&tensor.op) {
        return stored(known, tensor.sources[0]);
    }
    if !COMBINED.contains(&tensor.op) {
        return None;
    }
    let (of, companion) = operand(known, &tensor.sources)?;
    let is_norm = same(known, of).is_some_and(|of| NORMS.contains(&of.op));
    if is_norm {
        Some(companion)
    } else {
        weight(known, of)
    }
}
