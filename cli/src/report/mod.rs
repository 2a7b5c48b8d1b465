//! Expert traces: as a page, as text or as an image, and what caches of experts would hit.
//!
//! | module | contents |
//! |---|---|
//! | [`command`] | expert traces as a page or text |
//! | [`stream`] | what expert streaming would do with a model |
//! | [`comparison`] | how the use of experts differs between traces |
//! | [`cache`] | what caches of experts would hit |
//! | [`pin`] | experts for fast memory |
//! | [`svg`] | images of expert traces |
//! | [`traces`] | expert traces from files |

pub mod cache;
mod command;
mod comparison;
mod pin;
pub mod stream;
pub mod svg;
pub mod traces;

pub use command::{ReportOptions, run};
