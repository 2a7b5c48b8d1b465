//! Quantises tensors with the ggml library of a llama.cpp program.
//!
//! The library (`libggml-base.so`) is opened at run time, so that the bytes are those that the
//! `llama-quantize` beside it writes. [`Ggml`] has the library's functions, [`rules`] has the
//! decisions of `llama-quantize` (as of llama.cpp b11434): which tensors are quantised, and which
//! type replaces one whose blocks do not fit a row. [`convert`] converts a tensor of any size in
//! pieces, on several threads.
//!
//! Modules, top to bottom:
//!
//! | module | contents |
//! |---|---|
//! | `convert` | tensors of any size, in pieces and on several threads |
//! | `library`, `rules` | the functions of `libggml-base.so`; the decisions of `llama-quantize` |

mod convert;
mod library;
pub mod rules;

use std::io;
use std::path::PathBuf;

pub use convert::{Shape, convert};
pub use library::{Ggml, Kind, TARGETS};

/// Why a library was not opened, or a tensor was not quantised.
#[derive(Debug, thiserror::Error)]
#[allow(
    missing_docs,
    reason = "the message of each variant describes its fields"
)]
pub enum Error {
    #[error("cannot open {path}: {reason}", path = path.display())]
    Open { path: PathBuf, reason: String },
    #[error("{path} has no function {name}: use the libggml-base.so of a llama.cpp from 2025 or later", path = path.display())]
    Function { path: PathBuf, name: &'static str },
    #[error("this ggml library has no type '{0}': use a type that it has, or a newer library")]
    UnknownType(String),
    #[error("ggml does not quantise to '{0}': use a type such as q4_K")]
    NotATarget(String),
    #[error("ggml cannot convert '{0}' to f32: quantise from f32, f16, bf16 or q8_0")]
    NotASource(String),
    #[error(
        "'{0}' needs an importance matrix: pass one with data for this tensor, or use another type"
    )]
    NeedsMatrix(String),
    #[error(
        "an importance matrix of {found} values does not fit a tensor that needs {needed}: use the matrix of this model"
    )]
    MatrixSize { found: usize, needed: usize },
    #[error("rows of {row} elements do not consist of blocks of {block}")]
    Blocks { row: usize, block: usize },
    #[error("the data is not valid '{0}': the file is damaged")]
    InvalidSource(String),
    #[error(
        "quantising to '{0}' gave invalid data: the source has values that are infinite or not numbers"
    )]
    InvalidResult(String),
    #[error("the tensor is larger than this machine can address")]
    TooLarge,
    #[error(transparent)]
    Io(#[from] io::Error),
}
