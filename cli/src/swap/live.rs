//! `llama-sidecar swap --live`: overlays in a running program. No file of the model changes.

use std::path::Path;

use anyhow::{Context, Result};
use sidecar_core::protocol::{Overlay, Request};
use sidecar_core::text;

use crate::control::{self, Control};

/// What tensors were quantised from, and how.
pub struct Quantised<'a> {
    pub from: &'a Path,
    pub as_type: &'a str,
    pub imatrix: Option<&'a Path>,
}

/// Sets overlays: the tensors that match take type and bytes from another model, a temporary one if they were quantised.
pub fn set(at: &Control, tensor: &str, from: &Path, made: Option<Quantised<'_>>) -> Result<()> {
    let mut overlay = Overlay {
        tensor: tensor.into(),
        from: absolute(from)?,
        ..Overlay::default()
    };
    if let Some(made) = made {
        overlay.named = Some(absolute(made.from)?);
        overlay.as_type = Some(made.as_type.into());
        overlay.imatrix = made.imatrix.map(absolute).transpose()?;
    }
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
