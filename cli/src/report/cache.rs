//! What a cache of experts would hit, by the locality of a trace.
//!
//! A cache has the same number of experts for each layer, or all of a layer that has fewer.

use std::fmt::Write;

use sidecar_core::trace::{LayerCounts, Locality, hits};

use crate::report::traces::TraceReport;
use crate::sizes::{Table, percent, size_text};

/// How a cache chooses the experts that it keeps, and the tokens for which that is known.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Policy {
    /// Those used last, over all tokens.
    Lru,
    /// Those used most, over all tokens.
    Lfu,
    /// Those used last, over the last tokens.
    WindowLru,
    /// The best possible choice, over the last tokens.
    Best,
}

impl Policy {
    /// Returns tokens, look-ups, and hits of a cache of `size` experts.
    fn hits(self, layer: &Layer<'_>, size: usize) -> (u64, u64, u64) {
        let Locality {
            lru, lfu, window, ..
        } = layer.locality;
        let (tokens, uses, curve) = match self {
            Policy::Lru => (layer.counts.tokens, layer.locality.uses(), lru),
            Policy::Lfu => (layer.counts.tokens, layer.locality.uses(), lfu),
            Policy::WindowLru => (window.tokens, window.uses(), &window.lru),
            Policy::Best => (window.tokens, window.uses(), &window.best),
        };
        (tokens, uses, hits(curve, size))
    }
}

/// A layer that was used.
struct Layer<'a> {
    counts: &'a LayerCounts,
    locality: &'a Locality,
    /// Bytes of an expert, if known.
    bytes: Option<u64>,
}

/// Caches for the layers of a model.
pub struct Caches<'a> {
    layers: Vec<Layer<'a>>,
    /// Bytes of all experts of all layers, if known.
    pub all_bytes: Option<u64>,
    /// The largest number of experts of a layer.
    pub experts: usize,
    used: usize,
}

impl<'a> Caches<'a> {
    /// Reads the locality of a trace; `None` if it has none.
    pub fn of(traced: &'a TraceReport) -> Option<Caches<'a>> {
        let layers = || traced.counts.layers.iter();
        let bytes = |layer: &LayerCounts| traced.about.expert_bytes.get(&layer.layer).copied();
        let with_locality = layers().map(|counts| {
            Some(Layer {
                counts,
                locality: counts.locality.as_ref()?,
                bytes: bytes(counts),
            })
        });
        let mut found: Vec<Layer<'_>> = with_locality.collect::<Option<_>>()?;
        found.retain(|layer| layer.locality.uses() > 0);
        let all_bytes = layers().map(|layer| Some(bytes(layer)? * layer.experts.len() as u64));
        (!found.is_empty()).then(|| Caches {
            layers: found,
            all_bytes: all_bytes.sum(),
            experts: layers().map(|layer| layer.experts.len()).max().unwrap_or(0),
            used: (traced.about.experts_used as usize).max(1),
        })
    }

    /// Returns the hit rate of a cache of `size` experts a layer.
    pub fn rate(&self, policy: Policy, size: usize) -> f64 {
        let (mut uses, mut all_hits) = (0, 0);
        for layer in &self.layers {
            let (_, of_layer, hits) = policy.hits(layer, size);
            uses += of_layer;
            all_hits += hits;
        }
        all_hits as f64 / uses as f64
    }

    /// Returns the lowest and the highest hit rate of a layer, with its number.
    fn extremes(&self, policy: Policy, size: usize) -> [(f64, u32); 2] {
        let rates = self.layers.iter().map(|layer| {
            let (_, uses, hits) = policy.hits(layer, size);
            (hits as f64 / uses as f64, layer.counts.layer)
        });
        let mut rates: Vec<(f64, u32)> = rates.collect();
        rates.sort_by(|a, b| a.0.total_cmp(&b.0));
        [rates[0], rates[rates.len() - 1]]
    }

    /// Returns the bytes of experts that a token misses, in a cache of `size` experts a layer.
    pub fn moved(&self, policy: Policy, size: usize) -> Option<f64> {
        let of_layer = |layer: &Layer<'_>| {
            let (tokens, uses, hits) = policy.hits(layer, size);
            let misses = (uses - hits) as f64 / tokens.max(1) as f64;
            Some(misses * layer.bytes? as f64)
        };
        self.layers.iter().map(of_layer).sum()
    }

    /// Returns the bytes of a cache of `size` experts a layer.
    pub fn memory(&self, size: usize) -> Option<u64> {
        let of_layer =
            |layer: &Layer<'_>| Some(layer.bytes? * layer.counts.experts.len().min(size) as u64);
        self.layers.iter().map(of_layer).sum()
    }

    /// Returns how many experts a layer fit into memory.
    pub fn fitting(&self, memory: u64) -> Option<usize> {
        self.memory(0)?;
        let fits = |size: &usize| self.memory(*size).is_some_and(|bytes| bytes <= memory);
        (0..=self.experts).rev().find(fits)
    }

    /// Returns the least size of a cache with a hit rate; `None` if the first uses of experts are
    /// too many.
    pub fn size_for(&self, policy: Policy, rate: f64) -> Option<usize> {
        (0..=self.experts).find(|&size| self.rate(policy, size) >= rate - 1e-12)
    }

    /// Returns the share of the uses that are first uses.
    pub fn first_uses(&self) -> f64 {
        1.0 - self.rate(Policy::Lru, self.experts)
    }

    /// Returns whether the last tokens are not all.
    fn window_is_part(&self) -> bool {
        let mut layers = self.layers.iter();
        layers.any(|layer| layer.locality.window.uses() < layer.locality.uses())
    }

    /// Returns a size, its share of the experts, and its memory if that is known.
    pub fn describe(&self, size: usize) -> String {
        let memory = self
            .memory(size)
            .map(|bytes| format!(", {}", size_text(bytes as f64)));
        format!(
            "{size} of {} a layer{}",
            self.experts,
            memory.unwrap_or_default()
        )
    }

    /// Returns what a cache of each size would hit.
    pub fn table(&self) -> Table {
        let part = self.window_is_part();
        let known = self.all_bytes.is_some();
        let mut head = vec!["experts a layer", "LRU", "worst layer", "best layer", "LFU"];
        head.extend(part.then_some("LRU, last tokens"));
        head.push("best possible");
        head.extend(
            known
                .then_some(["memory", "LRU moves a token"])
                .into_iter()
                .flatten(),
        );
        let mut table = Table::new(head);
        for size in self.sizes() {
            let rate = |policy| percent(self.rate(policy, size));
            let [worst, best] = self
                .extremes(Policy::Lru, size)
                .map(|(rate, layer)| format!("{} ({layer})", percent(rate)));
            let share = size as f64 / self.experts as f64;
            let mut row = vec![
                format!("{size} ({:.0} %)", share * 100.0),
                rate(Policy::Lru),
                worst,
                best,
                rate(Policy::Lfu),
            ];
            row.extend(part.then(|| rate(Policy::WindowLru)));
            row.push(rate(Policy::Best));
            if let Some((memory, moved)) = self.memory(size).zip(self.moved(Policy::Lru, size)) {
                row.extend([size_text(memory as f64), size_text(moved)]);
            }
            table.rows.push(row);
        }
        table
    }

    /// Returns the experts of a token, and tenths of the experts of a layer.
    fn sizes(&self) -> Vec<usize> {
        let tenths = (1..=10).map(|tenth| (self.experts * tenth).div_ceil(10));
        let mut sizes: Vec<usize> = std::iter::once(self.used).chain(tenths).collect();
        sizes.retain(|&size| size <= self.experts);
        sizes.sort_unstable();
        sizes.dedup();
        sizes
    }

    /// Returns what the table shows.
    pub fn note(&self) -> String {
        let mut note = format!(
            "Each layer has a cache that begins empty: {} of the uses are first uses, which miss at every size.",
            percent(self.first_uses())
        );
        if self.window_is_part() {
            let tokens = self.layers.iter().map(|layer| layer.locality.window.tokens);
            let _ = write!(
                note,
                " The best possible choice is that for the last {} tokens, with a cache that is empty before them.",
                tokens.max().unwrap_or(0)
            );
        }
        note
    }

    /// Returns what memory of this size would hit, and the bound that the speed of a disk or link
    /// sets; `None` if the bytes of experts are not known.
    pub fn for_memory(&self, memory: u64, speed: Option<u64>) -> Option<String> {
        let size = self.fitting(memory)?;
        let mut text = format!(
            "{} for experts: {} of {} fit\n\n",
            size_text(memory as f64),
            self.describe(size),
            size_text(self.all_bytes? as f64)
        );
        let bound = speed.map(|speed| format!("tokens/s at {}/s", size_text(speed as f64)));
        let mut table = Table::new(
            ["", "hits", "moved a token"]
                .into_iter()
                .chain(bound.as_deref()),
        );
        let part = self.window_is_part();
        let policies = [
            (Policy::Lru, "LRU"),
            (Policy::Lfu, "LFU"),
            (Policy::WindowLru, "LRU, last tokens"),
            (Policy::Best, "best possible"),
        ];
        for (policy, name) in policies {
            if policy == Policy::WindowLru && !part {
                continue;
            }
            let moved = self.moved(policy, size)?;
            let mut row = vec![
                name.to_owned(),
                percent(self.rate(policy, size)),
                size_text(moved),
            ];
            row.extend(speed.map(|speed| match moved {
                0.0 => "no bound".to_owned(),
                moved => format!("at most {:.1}", speed as f64 / moved),
            }));
            table.rows.push(row);
        }
        text.push_str(&table.as_text());
        let _ = writeln!(text, "\n{}", self.note());
        Some(text)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::traces::sample_routes;

    #[test]
    fn rates_and_bytes_are_those_of_the_curves() {
        // Each layer: 0 1, 1 2, 0 1, 3 0. An expert of layer 1 has 100 bytes, of layer 4 300.
        let routes = [[0, 1], [1, 2], [0, 1], [3, 0]];
        let traced = sample_routes(4, &[(1, 100), (4, 300)], &routes);
        let caches = Caches::of(&traced).expect("it has locality");
        // Distances: 1 at 0; then 0 at 2 and 1 at 1; then 0 at 1.
        let rates = [0, 1, 2, 3, 4].map(|size| caches.rate(Policy::Lru, size) * 8.0);
        assert_eq!(rates, [0.0, 1.0, 3.0, 4.0, 4.0]);
        assert_eq!(caches.moved(Policy::Lru, 2), Some(5.0 / 4.0 * 400.0));
        assert_eq!(
            (caches.memory(3), caches.all_bytes),
            (Some(1200), Some(1600))
        );
        let fitting = [0, 399, 400, 1199, 1200, 1 << 40].map(|memory| caches.fitting(memory));
        assert_eq!(fitting, [0, 0, 1, 2, 3, 4].map(Some));
        assert_eq!(caches.size_for(Policy::Lru, 0.375), Some(2));
        assert_eq!(caches.size_for(Policy::Lru, 0.6), None);
        assert_eq!(caches.first_uses(), 0.5);
        let text = caches.for_memory(800, Some(2000)).expect("bytes are known");
        assert!(
            text.starts_with("800 B for experts: 2 of 4 a layer, 800 B of 1.56 KiB fit\n"),
            "{text}"
        );
        assert!(
            text.contains("LRU  37.5 %          500 B             at most 4.0"),
            "{text}"
        );
        let table = caches.table().as_text();
        assert!(
            table.contains("2 (50 %)  37.5 %   37.5 % (1)  37.5 % (4)"),
            "{table}"
        );
    }

    #[test]
    fn a_trace_without_locality_or_bytes() {
        let mut traced = sample_routes(4, &[(0, 1)], &[[0, 1], [0, 1]]);
        traced.about.expert_bytes.clear();
        let caches = Caches::of(&traced).expect("it has locality");
        assert_eq!((caches.for_memory(8, None), caches.memory(1)), (None, None));
        assert_eq!(
            caches.table().head.last().map(String::as_str),
            Some("best possible")
        );
        traced.counts.layers[0].locality = None;
        assert!(Caches::of(&traced).is_none());
    }
}
