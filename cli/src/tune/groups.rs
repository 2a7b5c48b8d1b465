//! Groups of tensors that get a type together.

use anyhow::{Result, ensure};
use clap::ValueEnum;
use regex::Regex;

use super::model::{Tensor, layer};

/// How tensors are grouped.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum By {
    /// The same tensor of all layers.
    Role,
    /// All tensors of a layer.
    Layer,
    /// Each tensor alone.
    Tensor,
}

/// Tensors that get a type together, by their positions.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Group {
    pub name: String,
    pub tensors: Vec<usize>,
}

/// Returns the role of a tensor: `ffn_down` for `blk.7.ffn_down.weight`.
pub fn role(name: &str) -> &str {
    let inner = match layer(name) {
        Some(_) => name.splitn(3, '.').nth(2).unwrap_or(name),
        None => name,
    };
    inner.strip_suffix(".weight").unwrap_or(inner)
}

/// Groups tensors.
pub fn by(tensors: &[Tensor<'_>], how: By) -> Vec<Group> {
    group(tensors, |name| {
        Some(match (how, layer(name)) {
            (By::Role, _) => role(name).to_owned(),
            (By::Layer, Some(layer)) => format!("blk.{layer}"),
            (By::Layer, None) | (By::Tensor, _) => name.to_owned(),
        })
    })
}

/// Groups tensors by the first expression that matches the whole name. Others are in no group.
pub fn by_regex(tensors: &[Tensor<'_>], expressions: &[Regex]) -> Result<Vec<Group>> {
    let whole: Result<Vec<Regex>, _> = expressions
        .iter()
        .map(|regex| Regex::new(&format!("^(?:{regex})$")))
        .collect();
    let whole = whole?;
    let groups = group(tensors, |name| {
        let found = whole.iter().position(|regex| regex.is_match(name))?;
        Some(expressions[found].to_string())
    });
    for expression in expressions {
        let inside = tensors
            .iter()
            .any(|tensor| expression.is_match(tensor.name));
        let next = match inside {
            true => format!("an expression matches whole names: try '.*{expression}.*'"),
            false => "run 'llama-sidecar inspect' to list the tensors".into(),
        };
        ensure!(
            groups.iter().any(|group| group.name == expression.as_str()),
            "no tensor that can be quantised, and that no earlier --group has, has a name that matches '{expression}': {next}"
        );
    }
    Ok(groups)
}

/// Groups tensors by name, in the order of the first tensor of each group.
fn group(tensors: &[Tensor<'_>], name_of: impl Fn(&str) -> Option<String>) -> Vec<Group> {
    let mut groups: Vec<Group> = Vec::new();
    for (at, tensor) in tensors.iter().enumerate() {
        let Some(name) = name_of(tensor.name) else {
            continue;
        };
        match groups.iter_mut().find(|group| group.name == name) {
            Some(group) => group.tensors.push(at),
            None => groups.push(Group {
                name,
                tensors: vec![at],
            }),
        }
    }
    groups
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_role_is_the_name_without_the_layer() {
        let roles = ["blk.7.ffn_down.weight", "token_embd.weight", "blk.x.a"].map(role);
        assert_eq!(roles, ["ffn_down", "token_embd", "blk.x.a"]);
    }
}
