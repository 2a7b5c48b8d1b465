//! Hot-swap: tensors of the running program are replaced.
//!
//! | module | contents |
//! |---|---|
//! | [`overlays`] | overlays: the tensors that a request names in the models of the program |
//! | [`reloader`] | what starts reloads, and their results |
//! | [`store`] | the program's tensors as the reload engine sees them |
//! | [`placement`] | the buffer type that llama.cpp would have chosen |

pub mod overlays;
pub mod placement;
pub mod reloader;
pub mod store;
