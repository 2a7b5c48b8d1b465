//! Texts and models for files that the user names, and progress.

use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use sidecar_core::files;
use sidecar_core::gguf::{Pieces, write_data};

use crate::space::Need;

/// The shortest first line by which a report is known.
const FIRST_LINE: usize = 12;

/// Text that may be from another program, for a terminal: control characters are written as escapes.
pub fn printable(text: &str) -> String {
    let escaped = |character: char| match character {
        '\n' | '\t' => character.to_string(),
        other if other.is_control() => other.escape_default().to_string(),
        other => other.to_string(),
    };
    text.chars().map(escaped).collect()
}

/// Writes [`printable`] text.
pub struct Printable<W>(pub W);

impl<W: Write> Write for Printable<W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let text = printable(&String::from_utf8_lossy(bytes));
        self.0.write_all(text.as_bytes())?;
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        self.0.flush()
    }
}

/// Prints on standard error what a command does now.
pub fn progress(line: &str) {
    eprintln!("llama-sidecar: {line}");
}

/// Writes a model with this header and these tensors, and returns its bytes. The path has the old content, or all of the
/// new; a model that is there is never written over.
pub fn write_model(
    path: &Path,
    header: &[u8],
    alignment: u64,
    tensors: Vec<Pieces<'_>>,
) -> Result<u64> {
    let explain = || format!("cannot write {}", path.display());
    let bytes = header.len() as u64 + tensors.iter().map(Pieces::size).sum::<u64>();
    for need in Need::of([(path, bytes)])? {
        need.check()?;
    }
    let file = files::beside(path).with_context(explain)?;
    let mut out = BufWriter::new(file.as_file());
    out.write_all(header).with_context(explain)?;
    for data in tensors {
        let size = data.size();
        write_data(&mut out, data, size, alignment).with_context(explain)?;
    }
    out.flush().with_context(explain)?;
    drop(out);
    let kept = files::persist(file, path, |_| false).with_context(explain)?;
    report_kept(path, kept);
    Ok(bytes)
}

/// Prints where an earlier file is kept, if there was one.
fn report_kept(path: &Path, kept: Option<PathBuf>) {
    if let Some(kept) = kept {
        let (path, kept) = (path.display(), kept.display());
        progress(&format!("{path}: the earlier file is kept as {kept}"));
    }
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
    report_kept(path, kept);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn control_characters_are_escaped() {
        let mut out = Printable(Vec::new());
        let title = "\u{1b}]0;title\u{7}";
        writeln!(out, "{title}\t\u{9b}ä").expect("memory");
        let written = String::from_utf8(out.0).expect("text");
        assert_eq!(written, "\\u{1b}]0;title\\u{7}\t\\u{9b}ä\n");
    }
}
