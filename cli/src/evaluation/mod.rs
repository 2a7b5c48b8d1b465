//! Evaluations of a text by llama-perplexity, against the base logits of a model.
//!
//! Modules, top to bottom:
//!
//! | module | contents |
//! |---|---|
//! | [`session`] | evaluations of one model and of what is made from it |
//! | [`program`] | the program: once for the base logits, and as a process that evaluates again and again |
//! | [`base`], [`statistics`] | base logits; averages and errors |

pub mod base;
pub mod program;
pub mod session;
pub mod statistics;
