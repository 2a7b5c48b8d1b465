//! Which experts a workload uses: exact counts per layer and expert.
//!
//! Counting is what happens at every token of every layer, so it takes no lock and
//! hashes nothing: each thread adds to counters of its own, one for each expert, and a
//! snapshot adds those up. A reset writes to nobody's counters either; it remembers
//! what they were.

mod about;
mod counters;
mod export;
mod figures;

pub use about::{About, AboutFile};
pub use counters::{Ids, LayerCounts, Layout, Snapshot, Trace};
pub use export::{SCHEMA, from_json, to_csv, to_json, to_text, write};
pub use figures::{Figures, coverage, experts_for};
