//! Experts on a device, for link mode and the drop-in.
//!
//! | module | contents |
//! |---|---|
//! | `share` | memory for slots, divided among the layers of a model |
//! | `expert_cache` | which experts of a layer stay in its slots |
//! | `copy_queue` | the thread that issues copies |
//! | [`transfer_log`] | the log lines of `LLAMA_POSTFETCH_DEBUG` |

mod copy_queue;
mod expert_cache;
mod share;
pub mod transfer_log;

pub use copy_queue::{CopyQueue, Step, Work};
pub use expert_cache::{ExpertCache, Load};
pub use share::{LayerBudget, share};
