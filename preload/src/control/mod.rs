//! The control socket: requests to a running program, and its figures.
//!
//! | module | contents |
//! |---|---|
//! | [`requests`] | the requests, and their replies |
//! | [`metrics`] | figures in the text format of Prometheus |
//! | [`clients`] | connections to the socket |

pub mod clients;
mod metrics;
mod requests;

pub use requests::{no_effect, start};
