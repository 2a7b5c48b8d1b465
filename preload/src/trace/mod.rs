//! The expert trace: which experts the program uses, and how much they contribute.
//!
//! | module | contents |
//! |---|---|
//! | [`counts`] | how often evaluations use each expert |
//! | [`routes`] | routes: the experts of every token, in a file |
//! | [`saliency`] | saliency: how much each expert contributes to the output of its layer |

pub mod counts;
pub mod routes;
pub mod saliency;
