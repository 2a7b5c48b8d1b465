//! Expert streaming: experts from disk as soon as they are routed.
//!
//! | module | contents |
//! |---|---|
//! | [`readers`] | the readers of models, and what evaluations request of them |
//! | [`load`] | loading a model without reading its experts |

pub mod load;
mod readers;

pub use sidecar_core::stream::program::buffer_freed;

pub use readers::{Streaming, figures, make_room, prefer, read_again, set_margin};
