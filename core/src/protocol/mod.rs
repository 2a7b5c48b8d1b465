//! Messages of the control socket and events of the journal, for the drop-in and for the
//! command.
//!
//! A request is a JSON object on one line, and so is its reply:
//!
//! | request | reply |
//! |---|---|
//! | `{"cmd":"ping"}`, `{"cmd":"unfreeze"}`, `{"cmd":"trace-reset"}` | [`Reply`] |
//! | `{"cmd":"mark","text":"…"}` | [`Reply`] |
//! | `{"cmd":"status"}` | [`Status`] |
//! | `{"cmd":"reload"}`, `{"cmd":"revert"}` | [`Reloads`], after the switch |
//! | `{"cmd":"swap","revert":"REGEX","overlays":[{"tensor":"REGEX","from":"/PATH"}]}` | [`Reloads`], after the switch |
//! | `{"cmd":"hash"}` | [`Hashes`], after reading tensors without a hash |
//! | `{"cmd":"metrics"}` | [`Metrics`] |
//! | `{"cmd":"trace"}` | [`Traces`] |
//! | `{"cmd":"round","start":true}` | [`Round`], after the round |
//! | `{"cmd":"round-end"}` | [`Reply`], before the program ends |
//!
//! Every reply has `ok`. A request that fails as a whole has a [`Reply`] with `error`. A
//! reader ignores keys that it does not know, and a missing key has the default of its type,
//! so that a command and a drop-in of different versions understand each other.
//!
//! | module | contents |
//! |---|---|
//! | `journal` | events of the journal |
//! | `answers` | answers of the drop-in |
//! | `figures` | figures in answers and events, and the metrics |
//! | `requests` | requests of a client |

mod answers;
mod figures;
mod journal;
mod requests;

pub use answers::*;
pub use figures::*;
pub use journal::*;
pub use requests::*;

use serde::Serialize;

use crate::text;

/// Returns a value as one line of JSON, with its end.
///
/// # Panics
///
/// Panics on a map whose keys are not text.
pub fn line(value: &impl Serialize) -> String {
    let json = serde_json::to_string(value).expect("a map whose keys are text");
    format!("{}\n", text::line(&json))
}
