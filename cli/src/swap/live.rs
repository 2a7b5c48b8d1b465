//! `llama-sidecar swap --live`: overlays in a running program. No file of the model changes.

use std::path::Path;

use anyhow::{Context, Result};
use sidecar_core::protocol::{Overlay, Request};
use sidecar_core::text;

use crate::control::{self, Control};
use crate::launch::child::quoted;

/// Sets overlays: the tensors that match take type and bytes from another model. `named` is the
/// model that the user named, from which `from` may be quantised.
pub fn set(at: &Control, tensor: &str, from: &Path, named: &Path) -> Result<()> {
    let overlay = Overlay {
        tensor: tensor.into(),
        from: absolute(from)?,
        named: (from != named).then(|| absolute(named)).transpose()?,
    };
    send(at, None, vec![overlay])?;
    if !at.json {
        let socket = quoted(at.socket()?.as_os_str());
        println!("undo it with: llama-sidecar swap --live {socket} --restore");
    }
    Ok(())
}

/// Returns a path for a request, which has text only.
fn absolute(path: &Path) -> Result<String> {
    let found = path.canonicalize();
    let found = found.with_context(|| format!("cannot find {}", text::path(path)))?;
    Ok(text::path(&found))
}

/// Reverts the overlays of the tensors that match; of all without a pattern.
pub fn restore(at: &Control, tensor: Option<&str>) -> Result<()> {
    send(at, Some(tensor.unwrap_or(".*")), Vec::new())
}

fn send(at: &Control, revert: Option<&str>, overlays: Vec<Overlay>) -> Result<()> {
    let revert = revert.map(str::to_owned);
    control::run(at, &Request::Swap { revert, overlays })
}
