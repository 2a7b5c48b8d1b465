//! Tensors from one model's files to another's or to a running program, and back.
//!
//! | module | contents |
//! |---|---|
//! | [`command`] | the command: tensors of files |
//! | [`live`] | tensors of a running program from another model's files, and back |
//! | [`originals`] | the file of original tensors |
//! | [`rewrite`] | new versions of a file |
//! | [`part`] | tensors of files, by type and content |
//! | [`target`] | files to replace |
//! | [`attributes`] | the attributes of files |

mod attributes;
mod command;
mod live;
mod originals;
mod part;
mod rewrite;
mod target;

pub use command::{SwapOptions, USAGE, restore, run};
