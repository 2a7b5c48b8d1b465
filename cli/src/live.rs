//! `llama-sidecar swap --live`: overlays in a running program. No file of the model changes.

use std::path::Path;

use anyhow::{Context, Result};
use llama_sidecar::protocol::{Overlay, Request, Status};
use regex::Regex;

use crate::{control, hooks, tune};

/// A type that tensors are quantised to before they are used.
pub struct Target<'a> {
    pub ty: &'a str,
    pub imatrix: Option<&'a Path>,
}

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
        named: None,
    };
    send(socket, None, vec![overlay])
}

/// Sets overlays of tensors that are quantised from another model with the program's own ggml
/// library. The file with them is temporary, because the program copies the tensors.
pub fn set_quantized(
    socket: &Path,
    tensor: &Regex,
    from: &Path,
    target: &Target<'_>,
) -> Result<()> {
    let status: Status = control::parsed(&control::ask(socket, &Request::Status)?)?;
    let library = tune::ggml_library(hooks::mapped(status.pid)).with_context(|| {
        format!(
            "process {} has no libggml-base.so: leave out --as, and pass a file of llama-quantize to --from",
            status.pid
        )
    })?;
    let folder = tempfile::tempdir()?;
    let (ty, imatrix) = (target.ty, target.imatrix);
    let made = tune::quantize(from, tensor, ty, imatrix, &library, folder.path())?;
    let names: Vec<String> = made.names.iter().map(|name| regex::escape(name)).collect();
    set(socket, &names.join("|"), &made.path)
}

/// Reverts the overlays of the tensors that match; of all without a pattern.
pub fn restore(socket: &Path, tensor: Option<&str>) -> Result<()> {
    send(socket, Some(tensor.unwrap_or(".*")), Vec::new())
}

fn send(socket: &Path, revert: Option<&str>, overlays: Vec<Overlay>) -> Result<()> {
    let revert = revert.map(str::to_owned);
    control::run(socket, &Request::Swap { revert, overlays }, false)
}
