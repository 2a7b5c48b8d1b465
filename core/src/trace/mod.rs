//! Expert trace: exact counts of the experts that a workload uses, per layer and expert.
//!
//! Counting runs for every token of every layer, so it takes no lock and hashes nothing: each
//! thread has its own counters, one for each expert, and a snapshot adds them up. A reset does
//! not write to the counters; it keeps their sums as the baseline of later snapshots.
//!
//! Locality depends on the order of tokens: threads that record the same layer take turns.
//!
//! Modules, top to bottom:
//!
//! | module | contents |
//! |---|---|
//! | `names` | the names of the experts that evaluations use |
//! | `requested` | what the variables of the trace request |
//! | `export`, `saliency`, `skew` | counts as JSON, CSV and text; contributions of experts; how unevenly experts are used |
//! | `formats`, `routes` | counts in formats of other programs; the experts of every token |
//! | `model_meta` | metadata of the model |
//! | `counters` | counters of each thread |
//! | `snapshot` | sums of the counters at one moment |
//! | `locality` | hits of caches of any size |
//! | `ids` | matrices of routed ids |

mod counters;
mod export;
mod formats;
mod ids;
mod locality;
mod model_meta;
mod names;
mod requested;
mod routes;
mod saliency;
mod skew;
mod snapshot;

pub use counters::{ExpertLayout, Trace};
pub use export::{SCHEMA, from_json, numbered, read, to_csv, to_json, to_text, write, write_text};
pub use formats::{hottest, ranking, to_activations, to_logical_count, to_ranked_csv, to_rankings};
pub use ids::Ids;
pub use locality::{Locality, Recorder, WINDOW_IDS, Window, hits};
pub use model_meta::{FileMeta, ModelMeta};
pub use names::ExpertNames;
pub use requested::{enabled, log_unwritten, print_exported, print_summary};
pub use routes::{
    LONGEST_MARK, NOT_ROUTED, RouteFormat, RouteLayout, RouteReader, RouteRecord, RouteWriter,
};
pub use saliency::{SALIENCY_SCHEMA, Saliency, norm};
pub use skew::{LayerStats, coverage, divergence, experts_for, overlap};
pub use snapshot::{LayerCounts, Snapshot};
