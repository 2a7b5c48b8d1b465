//! Texts for files that the user names, and progress.

use std::path::Path;

use anyhow::{Context, Result};
use sidecar_core::files;

/// The shortest first line by which a report is known.
const FIRST_LINE: usize = 12;

/// Prints on standard error what a command does now.
pub fn progress(line: &str) {
    eprintln!("llama-sidecar: {line}");
}

/// Writes a text to a file. An earlier file with the same first line is a report of the same kind
/// and goes; any other is kept, and standard error has its path.
pub fn write_text(path: &Path, text: &str) -> Result<()> {
    let first = text.lines().next().unwrap_or_default().as_bytes();
    let replaces = |start: &[u8]| {
        let known = &first[..first.len().min(start.len())];
        known.len() >= FIRST_LINE && start.starts_with(known)
    };
    let kept = files::write(path, text.as_bytes(), replaces)
        .with_context(|| format!("cannot write {}", path.display()))?;
    if let Some(kept) = kept {
        let (path, kept) = (path.display(), kept.display());
        eprintln!("llama-sidecar: {path}: the earlier file is kept as {kept}");
    }
    Ok(())
}
