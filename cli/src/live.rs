//! `llama-sidecar swap --live`: overlays in a running program. No file of the model changes.

use std::path::Path;

use anyhow::{Context, Result};
use llama_sidecar::protocol::{Overlay, Request};

use crate::control;

/// Sets overlays: the tensors that match take type and bytes from another model.
pub fn set(socket: &Path, tensor: &str, from: &Path) -> Result<()> {
    let unusable = || format!("cannot find {}", from.display());
    let absolute = from.canonicalize().with_context(unusable)?;
    let from = absolute.to_str().with_context(|| {
        format!(
            "{} is not UTF-8: rename the file or its folder",
            absolute.display()
        )
    })?;
    let overlay = Overlay {
        tensor: tensor.into(),
        from: from.into(),
    };
    send(socket, None, vec![overlay])
}

/// Reverts the overlays of the tensors that match; of all without a pattern.
pub fn restore(socket: &Path, tensor: Option<&str>) -> Result<()> {
    send(socket, Some(tensor.unwrap_or(".*")), Vec::new())
}

fn send(socket: &Path, revert: Option<&str>, overlays: Vec<Overlay>) -> Result<()> {
    let revert = revert.map(str::to_owned);
    control::run(socket, &Request::Swap { revert, overlays }, false)
}
