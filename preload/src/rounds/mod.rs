//! Rounds: llama-perplexity evaluates again and again, with its model loaded once.
//!
//! | module | contents |
//! |---|---|
//! | [`files`] | rounds driven through files, as GGUF-Tool-Suite does |
//! | [`perplexity`] | the rounds themselves: `main` calls `llama_perplexity` once, the drop-in more often |

pub mod files;
mod perplexity;

pub use perplexity::{Rounds, drive, end, evaluate, exist, wait};
