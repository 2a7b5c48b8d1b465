//! Routes: the experts of every token, layer by layer, in files.
//!
//! The extension of a path gives the format:
//!
//! * `.npy`: an array of 16-bit integers `[tokens, layers, top_k]` for numpy. Gate weights are in
//!   `FILE.weights.npy`, an array of 32-bit floats of the same shape.
//! * `.csv`: a line `layer,expert` for each routed expert, with the gate weight as third column.
//! * other: compact binary, which [`RouteReader`] reads. All numbers are little-endian:
//!
//! | bytes | contents |
//! |---|---|
//! | 8 | `LSROUTES` |
//! | 4 | version, 1 |
//! | 4 | flags; 1: with gate weights |
//! | 4 | number of layers |
//! | 4 | experts of a token in a layer, `top_k` |
//! | 4 + n | length and text of the model's name |
//! | 8 each | number and experts of each layer |
//!
//! Records follow, each with three numbers of 4 bytes: kind, count, context.
//!
//! | kind | contents |
//! |---|---|
//! | 1 | `count` tokens of an evaluation in `context`: ids `[count, layers, top_k]` of 2 bytes; then gate weights of 4 bytes, if flagged. At most 1 MiB, or one token |
//! | 2 | a mark: text of `count` bytes, at most 4096 |
//! | 3 | `count` tokens were dropped here |
//!
//! Marks and dropped tokens of the other formats are in `FILE.marks.jsonl`, a JSON object in each
//! line: `{"token":N,"mark":"text"}` or `{"token":N,"dropped":M}`, where `token` is the number
//! of tokens before.
//!
//! An id is [`NOT_ROUTED`], and its weight NaN, where a layer did not compute a token. The file
//! of an interrupted process ends with its last complete token: the shape in an `.npy` file never
//! exceeds what the file has, and [`RouteReader`] leaves out a truncated record.
//!
//! | module | contents |
//! |---|---|
//! | `writer`, `reader` | writing; reading of compact binary |
//! | `layout` | constants, layout of a token, formats |

mod layout;
mod reader;
#[cfg(test)]
mod tests;
mod writer;

pub use layout::{LONGEST_MARK, NOT_ROUTED, RouteFormat, RouteLayout};
pub use reader::{RouteReader, RouteRecord};
pub use writer::RouteWriter;
