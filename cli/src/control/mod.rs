//! Requests to a running program.
//!
//! | module | contents |
//! |---|---|
//! | [`requests`] | requests, and their replies as text |
//! | [`server`] | the slots of a llama-server |

mod requests;
pub mod server;

pub use requests::{ask, ask_within, check_connection, check_unused, parsed, reload, run};
