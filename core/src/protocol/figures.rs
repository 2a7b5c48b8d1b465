//! Figures in answers and events, and the metrics. Each figure is declared once, here: its key on
//! the wire, its metric, the help text of the metric, the sum over several loads of a model, and the
//! table in `docs/protocol.md` follow.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::time::Duration;

use serde::{Deserialize, Serialize};

/// How a metric changes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// A sum that only grows.
    Counter,
    /// A value at this moment.
    Gauge,
    /// Counts of values by upper bounds.
    Histogram,
}

impl Kind {
    /// Returns the name in the text format of Prometheus.
    pub fn name(self) -> &'static str {
        match self {
            Kind::Counter => "counter",
            Kind::Gauge => "gauge",
            Kind::Histogram => "histogram",
        }
    }
}

/// A metric for operators.
#[derive(Debug, Clone, Copy)]
pub struct Metric {
    /// Name, which ends with the unit, without `llama_sidecar_`.
    pub name: &'static str,
    /// How it changes.
    pub kind: Kind,
    /// Names of its labels.
    pub labels: &'static [&'static str],
    /// Meaning.
    pub help: &'static str,
}

/// A metric, and its value in a struct of figures.
pub type Figure<T> = (Metric, fn(&T) -> f64);

/// Declares structs of figures. Each field has its kind, and a metric if `=>` names one; the text of
/// the field is the help text of the metric. Fields after `and` are not figures.
macro_rules! figures {
    ($(
        $(#[$about:meta])*
        struct $name:ident $labels:tt {
            $(#[doc = $help:literal] $kind:ident $field:ident: $ty:ty $(=> $metric:literal)?,)*
        } and {
            $(#[doc = $doc:literal] $other:ident: $other_ty:ty,)*
        }
    )*) => {$(
        $(#[$about])*
        #[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
        #[serde(default)]
        pub struct $name {
            $(#[doc = $help] pub $field: $ty,)*
            $(#[doc = $doc] pub $other: $other_ty,)*
        }

        impl $name {
            /// The figures that are metrics, and their values.
            pub const METRICS: &[Figure<$name>] = &[$($((
                Metric {
                    name: $metric,
                    kind: Kind::$kind,
                    labels: &$labels,
                    help: $help,
                },
                |figures| figures.$field.number(),
            ),)?)*];

            /// Adds the counters of a later count, and sets the gauges to its values.
            pub fn add(&mut self, later: &$name) {
                $(figures!(@add $kind self.$field, later.$field);)*
            }
        }
    )*};
    (@add Counter $sum:expr, $later:expr) => { $sum += $later };
    (@add Gauge $sum:expr, $later:expr) => { $sum = $later };
}

figures! {
    /// Figures of the drop-in in a process.
    #[derive(Copy)]
    struct ProcessFigures [] {
        /// Swaps committed.
        Counter generation: u64 => "switches_total",
        /// Graphs that the program evaluated.
        Counter evaluations: u64 => "evaluations_total",
        /// Graphs that the program was made to rebuild.
        Counter graphs_renewed: u64 => "graphs_renewed_total",
        /// Tensors that got new bytes.
        Counter tensors_swapped: u64 => "tensors_swapped_total",
        /// Tensors that got their original bytes again.
        Counter tensors_returned: u64 => "tensors_returned_total",
        /// Bytes read into new buffers.
        Counter staged_bytes: u64 => "staged_bytes_total",
        /// 1 after `revert`, until `unfreeze`.
        Gauge frozen: bool => "frozen",
    } and {}

    /// Figures of the expert cache that llama.cpp has of its own (`--moe-cache-mib`).
    #[derive(Copy)]
    struct OwnExpertCache [] {
        /// Number of layers that have slots in it.
        Gauge layers: usize,
        /// Bytes of the slots of llama.cpp's own expert cache.
        Gauge bytes: u64 => "own_expert_cache_bytes",
        /// Number of experts that swaps have written into these slots.
        Counter written_experts: u64,
        /// Bytes of experts that swaps have written into these slots.
        Counter written_bytes: u64 => "own_expert_cache_written_bytes_total",
    } and {}

    /// Figures of expert streaming.
    #[derive(Copy)]
    struct StreamFigures ["model"] {
        /// Number of layers that were scheduled.
        Counter layers: u64,
        /// Number of tokens in `seconds`.
        Counter tokens: u64,
        /// Bytes of routed experts whose residency was checked.
        Counter checked_bytes: u64 => "stream_checked_bytes_total",
        /// Bytes of routed experts that were in memory or on their way.
        Counter resident_bytes: u64 => "stream_resident_bytes_total",
        /// Bytes that were read ahead because of routing.
        Counter read_bytes: u64 => "stream_read_bytes_total",
        /// Bytes that were read ahead of routing: the next layers of a batch, and the most used experts of a trace.
        Counter ahead_bytes: u64 => "stream_ahead_bytes_total",
        /// Number of choices of experts of which some may be replaced (`LLAMA_EXPERT_STREAM_PREFER`).
        Counter chosen: u64 => "stream_chosen_total",
        /// Number of chosen experts that were replaced by others in memory.
        Counter replaced: u64 => "stream_replaced_total",
        /// The largest difference of scores at which an expert in memory replaces another one.
        Gauge margin: f32 => "stream_margin",
        /// Number of read-ahead calls that failed.
        Counter failed: u64,
        /// Number of page faults of the process that waited for a disk.
        Counter major_faults: u64 => "stream_major_faults_total",
        /// Time of evaluations, without pauses of the program.
        Counter seconds: f64,
        /// Time in which evaluations waited for experts that are read into memory of the process.
        Counter waited_seconds: f64 => "stream_waited_seconds_total",
        /// Time in which a disk was read for memory of the process.
        Counter reading_seconds: f64 => "stream_reading_seconds_total",
        /// Bytes of experts in memory of the process, in place of the page cache.
        Gauge held_bytes: u64 => "stream_held_bytes",
        /// Bytes of the routed experts of the model; 0 before the first evaluation has ended.
        Gauge expert_bytes: u64 => "stream_expert_bytes",
        /// Bytes of experts that fit into memory beside all else that the program needs.
        Gauge fitting_bytes: u64 => "stream_fitting_bytes",
        /// Bytes that are missing beside them where none fits.
        Gauge missing_bytes: u64,
        /// Tokens of the largest context of the model in host memory, if known.
        Gauge context_tokens: u64,
        /// Bytes of the keys and values of the largest context in host memory.
        Gauge context_bytes: u64 => "stream_context_bytes",
        /// Bytes that a context of a quarter of these tokens would free.
        Gauge freed_bytes: u64,
        /// Whether (1) or not (0) all experts are in memory, so that only samples are checked.
        Gauge resting: bool => "stream_resting",
        /// Whether streaming has stopped because reading ahead had no effect.
        Gauge stopped: bool,
    } and {}

    /// Figures of post-fetch in an unmodified program.
    struct PostFetchFigures [] {
        /// Bytes of experts that were copied early.
        Counter early_bytes: u64 => "post_fetch_early_bytes_total",
        /// Bytes of experts that the program copied itself.
        Counter host_bytes: u64 => "post_fetch_host_bytes_total",
        /// Number of layers whose experts were copied once they were routed.
        Counter layers: u64 => "post_fetch_layers_total",
        /// Number of layers whose experts were copied before they were routed.
        Counter layers_ahead: u64 => "post_fetch_layers_ahead_total",
        /// Bytes of the program's own copies that were left out.
        Counter left_out_bytes: u64,
        /// Time of the early copies.
        Counter copy_seconds: f64 => "post_fetch_copy_seconds_total",
        /// Time for which computing waited for early copies: from when the program needed them.
        Counter wait_seconds: f64 => "post_fetch_wait_seconds_total",
        /// Time of early copies that were not used.
        Counter unused_seconds: f64 => "post_fetch_unused_seconds_total",
        /// Number of early copies whose bytes differ from the model (`LLAMA_POSTFETCH_DEBUG=1`).
        Counter mismatches: u64,
        /// Memory on devices that is used for early copies.
        Gauge scratch_bytes: u64 => "post_fetch_scratch_bytes",
        /// Number of routed experts that were on the device (`LLAMA_POSTFETCH_CACHE_MB`).
        Counter cache_hits: u64,
        /// Number of routed experts that were not.
        Counter cache_misses: u64,
        /// Number of these that the CPU computed. The others were copied first.
        Counter cache_on_cpu: u64,
        /// Number of evaluations whose slots were left unused because that is faster.
        Counter cache_unused: u64 => "expert_cache_unused_total",
        /// Memory on devices for experts that stay there.
        Gauge cache_bytes: u64 => "expert_cache_bytes",
        /// Number of experts of a layer that stay there, at least.
        Gauge cache_slots: u64,
        /// Number of experts that were replaced by others.
        Counter cache_evictions: u64,
        /// Bytes of models that are page-locked.
        Gauge locked_bytes: u64 => "page_locked_bytes",
    } and {
        /// Number of copies that the program made itself, by reason.
        host_copies: BTreeMap<String, u64>,
        /// Bytes per second that the link copied at the start.
        link_speed: Option<f64>,
        /// Bytes per second that the CPU could read at the start.
        memory_speed: Option<f64>,
        /// The same figures by layer.
        cache_layers: Vec<CacheLayer>,
        /// Why nothing is copied early, if that is known.
        obstacle: Option<String>,
    }

    /// Figures of the experts of a layer that stay on a device.
    struct CacheLayer ["model", "layer"] {
        /// Number of experts of a layer that stay on a device.
        Gauge slots: u64 => "expert_cache_slots",
        /// Number of routed experts that were on the device.
        Counter hits: u64 => "expert_cache_hits_total",
        /// Number of routed experts that were not on the device.
        Counter misses: u64 => "expert_cache_misses_total",
        /// Number of routed experts that were not on the device, and that the CPU computed.
        Counter on_cpu: u64 => "expert_cache_on_cpu_total",
        /// Number of experts that were replaced by others.
        Counter evictions: u64 => "expert_cache_evictions_total",
    } and {
        /// Number of the model in its process.
        model: u64,
        /// Number of the layer.
        layer: u32,
    }
}

/// Returns the overlap of copies with computing: the share of their time, 0 to 1, for which nothing
/// waited and which was not spent on unused copies, `1 - (waited + unused) / transfer`; `None` without
/// copies.
///
/// Waits of several threads and streams add up, so the overlap can be greater than that, never less.
pub fn overlap(transfer: Duration, waited: Duration, unused: Duration) -> Option<f64> {
    let lost = (waited + unused).as_secs_f64() / transfer.as_secs_f64();
    (!transfer.is_zero()).then(|| (1.0 - lost).max(0.0))
}

impl PostFetchFigures {
    /// Returns the [`overlap`]; `None` without copies.
    pub fn overlap(&self) -> Option<f64> {
        let time = |seconds| Duration::try_from_secs_f64(seconds).unwrap_or_default();
        let (waited, unused) = (self.wait_seconds, self.unused_seconds);
        overlap(time(self.copy_seconds), time(waited), time(unused))
    }

    /// Whether no experts were copied, and nothing is locked.
    pub fn is_empty(&self) -> bool {
        self.early_bytes + self.host_bytes + self.locked_bytes + self.cache_slots == 0
    }

    /// Returns the share of routed experts, 0 to 1, that must be on the device for it to be faster
    /// than a CPU that reads experts at the speed of memory; `None` where that was not measured.
    pub fn break_even(&self) -> Option<f64> {
        Some((1.0 - self.link_speed? / self.memory_speed?).max(0.0))
    }
}

/// Metrics of more than one value, or of none in the protocol.
#[allow(missing_docs, reason = "the help text describes each")]
impl Metric {
    pub const INFO: Metric =
        Metric::new("info", Kind::Gauge, &["version"], "Version of the drop-in.");
    pub const FAILURES: Metric = Metric::new(
        "failures_total",
        Kind::Counter,
        &["cause"],
        "Versions of files, and reloads, that were not applied, by cause.",
    );
    pub const PAUSES: Metric = Metric::new(
        "pause_seconds",
        Kind::Histogram,
        &["le"],
        "How long swaps kept evaluations out: of each swap, or of the evaluation that waited for it.",
    );
    pub const WAITING: Metric = Metric::new(
        "waiting_seconds",
        Kind::Gauge,
        &["obstacle"],
        "How long a swap has been waiting, by what blocks it; 0 when none waits.",
    );
    pub const BLOCKED: Metric = Metric::new(
        "blocked_seconds",
        Kind::Gauge,
        &["model"],
        "Time since reloads of a model began to fail; 0 when the last one succeeded. Files that are ignored do not count here, but in the failures.",
    );
    pub const LOADED: Metric = Metric::new(
        "loaded_bytes",
        Kind::Gauge,
        &["model", "buffer"],
        "Bytes of tensors as the program loaded them, by model and buffer type.",
    );
    pub const PRIVATE: Metric = Metric::new(
        "private_bytes",
        Kind::Gauge,
        &["model", "buffer"],
        "Bytes that swapped tensors hold beside the model, by model and buffer type.",
    );
    pub const ACTIVATIONS: Metric = Metric::new(
        "expert_activations_total",
        Kind::Counter,
        &["trace"],
        "Experts that evaluations routed to, by model.",
    );
    pub const UNCOUNTED: Metric = Metric::new(
        "expert_layers_uncounted",
        Kind::Gauge,
        &["trace"],
        "Layers that were evaluated and whose experts were not counted, by model; 0 in a correct trace.",
    );
}

impl Metric {
    const fn new(
        name: &'static str,
        kind: Kind,
        labels: &'static [&'static str],
        help: &'static str,
    ) -> Metric {
        Metric {
            name,
            kind,
            labels,
            help,
        }
    }

    /// Returns all metrics, in the order of the documentation.
    pub fn all() -> Vec<Metric> {
        fn of<T>(figures: &[(Metric, T)]) -> Vec<Metric> {
            figures.iter().map(|(metric, _)| *metric).collect()
        }
        [
            vec![Metric::INFO],
            of(ProcessFigures::METRICS),
            vec![
                Metric::FAILURES,
                Metric::PAUSES,
                Metric::WAITING,
                Metric::BLOCKED,
                Metric::LOADED,
                Metric::PRIVATE,
            ],
            of(StreamFigures::METRICS),
            of(PostFetchFigures::METRICS),
            of(CacheLayer::METRICS),
            of(OwnExpertCache::METRICS),
            vec![Metric::ACTIVATIONS, Metric::UNCOUNTED],
        ]
        .concat()
    }

    /// Returns the table of all metrics, in Markdown.
    pub fn table() -> String {
        let mut table = String::from("| name | kind | labels | meaning |\n|---|---|---|---|\n");
        for metric in Metric::all() {
            let labels: Vec<_> = metric
                .labels
                .iter()
                .map(|name| format!("`{name}`"))
                .collect();
            let _ = writeln!(
                table,
                "| `{}` | {} | {} | {} |",
                metric.name,
                metric.kind.name(),
                labels.join(", "),
                metric.help.trim().trim_end_matches('.'),
            );
        }
        table
    }
}

/// A value as a metric.
trait Number {
    fn number(self) -> f64;
}

impl Number for u64 {
    fn number(self) -> f64 {
        self as f64
    }
}

impl Number for f64 {
    fn number(self) -> f64 {
        self
    }
}

impl Number for f32 {
    fn number(self) -> f64 {
        self.into()
    }
}

impl Number for bool {
    fn number(self) -> f64 {
        f64::from(u8::from(self))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_later_load_adds_counters_and_sets_gauges() {
        let load = |tokens, resting| StreamFigures {
            tokens,
            seconds: 0.5,
            resting,
            ..StreamFigures::default()
        };
        let mut sum = load(3, true);
        sum.add(&load(4, false));
        assert_eq!((sum.tokens, sum.seconds, sum.resting), (7, 1.0, false));
    }

    #[test]
    fn each_metric_has_a_name_of_its_own_and_counters_end_with_total() {
        let mut names: Vec<_> = Metric::all().iter().map(|metric| metric.name).collect();
        names.sort_unstable();
        assert!(names.windows(2).all(|pair| pair[0] != pair[1]));
        for metric in Metric::all() {
            let is_counter = metric.kind == Kind::Counter;
            assert_eq!(
                metric.name.ends_with("_total"),
                is_counter,
                "{}",
                metric.name
            );
        }
    }
}
