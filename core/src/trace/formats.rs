//! Counts in formats of other programs.

use std::cmp::Reverse;
use std::fmt::Write;

use serde_json::{Map, Value, json};

use super::snapshot::{LayerCounts, Snapshot};
use crate::protocol;

/// Returns the experts of a layer, the most used first; of equally used ones, by number.
pub fn ranking(layer: &LayerCounts) -> Vec<usize> {
    let mut order: Vec<usize> = (0..layer.experts.len()).collect();
    order.sort_by_key(|&expert| Reverse(layer.experts[expert]));
    order
}

/// Returns the experts of a layer that were used, in the order of [`ranking`].
pub fn hottest(layer: &LayerCounts) -> impl Iterator<Item = u32> {
    let ranked = ranking(layer).into_iter();
    let used = ranked.take_while(|expert| layer.experts[*expert] > 0);
    used.map(|expert| expert as u32)
}

/// Returns counts as SGLang reads them (`--init-expert-location`): `logical_count` has a row for
/// each layer from 0, zeros for layers without experts. The error states why that is not possible.
pub fn to_logical_count(snapshot: &Snapshot) -> Result<String, String> {
    let experts = |layer: &LayerCounts| layer.experts.len();
    let most = snapshot.layers.iter().map(experts).max().unwrap_or(0);
    if let Some(other) = snapshot.layers.iter().find(|layer| experts(layer) != most) {
        return Err(format!(
            "layer {} has {} experts and another layer {most}: rows of logical_count are of equal length",
            other.layer,
            experts(other)
        ));
    }
    let layers = snapshot.layers.last().map_or(0, |last| last.layer + 1);
    let rows: Vec<Vec<u64>> = (0..layers)
        .map(|number| {
            let found = snapshot.layers.binary_search_by_key(&number, |l| l.layer);
            found.map_or_else(|_| vec![0; most], |at| snapshot.layers[at].experts.clone())
        })
        .collect();
    Ok(protocol::line(&json!({ "logical_count": rows })))
}

/// Returns a line of JSON for each layer: its number, and its experts by [`ranking`].
pub fn to_rankings(snapshot: &Snapshot) -> String {
    let line = |layer: &LayerCounts| {
        let mut line = json!({});
        line[layer.layer.to_string()] = ranking(layer).into();
        protocol::line(&line)
    };
    snapshot.layers.iter().map(line).collect()
}

/// Returns `layer,expert,count` for each expert of all layers, the most used first.
pub fn to_ranked_csv(snapshot: &Snapshot) -> String {
    let of_layer = |layer: &LayerCounts| -> Vec<(u64, u32, usize)> {
        let counts = layer.experts.iter().enumerate();
        let row = |(expert, &count): (usize, &u64)| (count, layer.layer, expert);
        counts.map(row).collect()
    };
    let mut rows: Vec<_> = snapshot.layers.iter().flat_map(of_layer).collect();
    rows.sort_by_key(|&(count, layer, expert)| (Reverse(count), layer, expert));
    let mut text = String::from("layer,expert,count\n");
    for (count, layer, expert) in rows {
        let _ = writeln!(text, "{layer},{expert},{count}");
    }
    text
}

/// Returns the used experts by their numbers: `total_tokens`, `expert_activations` of all layers,
/// and `per_layer`, the same of each layer by its number.
pub fn to_activations(snapshot: &Snapshot) -> Value {
    let used = |counts: &[u64]| -> Map<String, Value> {
        let used = counts.iter().enumerate().filter(|(_, count)| **count > 0);
        used.map(|(expert, &count)| (expert.to_string(), count.into()))
            .collect()
    };
    let layers = snapshot.layers.iter();
    let layers: Map<String, Value> = layers
        .map(|layer| (layer.layer.to_string(), used(&layer.experts).into()))
        .collect();
    json!({
        "total_tokens": snapshot.tokens(),
        "expert_activations": used(&snapshot.by_expert()),
        "per_layer": layers,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn counted(layers: &[(u32, &[u64])]) -> Snapshot {
        let layer = |&(layer, experts): &(u32, &[u64])| LayerCounts {
            layer,
            tokens: 1,
            experts: experts.to_vec(),
            locality: None,
        };
        Snapshot {
            layers: layers.iter().map(layer).collect(),
            ..Snapshot::default()
        }
    }

    #[test]
    fn dense_layers_have_rows_of_zeros_in_logical_count() {
        let text = to_logical_count(&counted(&[(1, &[4, 5]), (3, &[6, 7])])).expect("even rows");
        assert_eq!(text, "{\"logical_count\":[[0,0],[4,5],[0,0],[6,7]]}\n");
        let error = to_logical_count(&counted(&[(0, &[1]), (1, &[1, 2])])).expect_err("uneven");
        assert!(
            error.contains("layer 0 has 1 experts and another layer 2"),
            "{error}"
        );
    }

    #[test]
    fn rankings_and_rows_begin_with_the_most_used() {
        let counts = counted(&[(2, &[1, 9, 1]), (10, &[3, 0, 9])]);
        let lines = to_rankings(&counts);
        assert_eq!(lines, "{\"2\":[1,0,2]}\n{\"10\":[2,0,1]}\n");
        let csv = to_ranked_csv(&counts);
        let expected = "layer,expert,count\n2,1,9\n10,2,9\n10,0,3\n2,0,1\n2,2,1\n10,1,0\n";
        assert_eq!(csv, expected);
    }

    #[test]
    fn activations_have_the_used_experts_by_number() {
        let counts = counted(&[(2, &[1, 0, 9]), (10, &[3, 0, 0, 4])]);
        let text = to_activations(&counts).to_string();
        let expected = r#"{"total_tokens":1,"expert_activations":{"0":4,"2":9,"3":4},"per_layer":{"2":{"0":1,"2":9},"10":{"0":3,"3":4}}}"#;
        assert_eq!(text, expected);
    }
}
