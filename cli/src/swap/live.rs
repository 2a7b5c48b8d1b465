//! `llama-sidecar swap --live`: overlays in a running program. No file of the model changes.

use std::path::Path;

use anyhow::{Context, Result};
use sidecar_core::protocol::{Overlay, Request, path_text};

use crate::control;

/// Sets overlays: the tensors that match take type and bytes from another model. `named` is the
/// model that the user named, from which `from` may be quantised.
pub fn set(socket: &Path, tensor: &str, from: &Path, named: &Path, as_json: bool) -> Result<()> {
    let overlay = Overlay {
        tensor: tensor.into(),
        from: absolute(from)?,
        named: (from != named).then(|| absolute(named)).transpose()?,
    };
    send(socket, None, vec![overlay], as_json)
}

/// Returns a path for a request, which has text only.
fn absolute(path: &Path) -> Result<String> {
    let found = path.canonicalize();
    let found = found.with_context(|| format!("cannot find {}", path.display()))?;
    Ok(path_text(&found))
}

/// Reverts the overlays of the tensors that match; of all without a pattern.
pub fn restore(socket: &Path, tensor: Option<&str>, as_json: bool) -> Result<()> {
    send(socket, Some(tensor.unwrap_or(".*")), Vec::new(), as_json)
}

fn send(socket: &Path, revert: Option<&str>, overlays: Vec<Overlay>, as_json: bool) -> Result<()> {
    let revert = revert.map(str::to_owned);
    control::run(socket, &Request::Swap { revert, overlays }, as_json)
}
