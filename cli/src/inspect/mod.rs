//! Models without a program.
//!
//! | module | contents |
//! |---|---|
//! | [`description`] | a model's description |
//! | [`load`] | the time to load a model |

mod description;
pub mod load;

pub use description::run;
