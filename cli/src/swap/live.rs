//! `llama-sidecar swap --live`: overlays in a running program. No file of the model changes.

use std::path::Path;

use anyhow::{Context, Result};
use sidecar_core::protocol::{Overlay, Request};
use sidecar_core::text;

use crate::control::{self, Control};

/// Sets overlays: the tensors that match take type and bytes from another model. `named` is the
/// model that the user named, from which `from` may be quantised.
pub fn set(at: &Control, tensor: &str, from: &Path, named: &Path) -> Result<()> {
    let overlay = Overlay {
        tensor: tensor.into(),
        from: absolute(from)?,
        named: (from != named).then(|| absolute(named)).transpose()?,
    };
    let request = Request::Swap {
        revert: None,
        overlays: vec![overlay],
    };
    control::change(at, &request, "undo")
}

/// Returns a path for a request, which has text only.
fn absolute(path: &Path) -> Result<String> {
    let found = path.canonicalize();
    let found = found.with_context(|| format!("cannot find {}", text::path(path)))?;
    Ok(text::path(&found))
}
