//! Masks of experts from the command line.

use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use sidecar_core::protocol::{LayerMask, Request};

use crate::sizes::size_text;

/// The most bytes of a file with masks.
const LARGEST: u64 = 64 << 20;

/// Which experts are masked.
#[derive(clap::Args)]
pub struct MaskOptions {
    /// The layer of --experts.
    #[arg(long, requires = "experts")]
    layer: Option<u32>,
    /// Numbers of experts, with commas between them; they take the place of those that were masked in the layer.
    #[arg(long, value_delimiter = ',', requires = "layer")]
    experts: Vec<u32>,
    /// A file with masks of several layers, as JSON: [{"layer": 3, "experts": [3, 17]}, ...].
    #[arg(long, value_name = "FILE", conflicts_with = "layer")]
    file: Option<PathBuf>,
    /// Remove all other masks.
    #[arg(long)]
    clear: bool,
}

impl MaskOptions {
    /// Returns the request.
    pub fn request(self) -> Result<Request> {
        let mut masks = match &self.file {
            Some(path) => read(path)?,
            None => Vec::new(),
        };
        masks.extend(self.layer.map(|layer| LayerMask {
            layer,
            experts: self.experts,
        }));
        ensure!(
            self.clear || !masks.is_empty(),
            "no mask: use --layer and --experts, --file or --clear"
        );
        Ok(Request::Mask {
            masks,
            clear: self.clear,
        })
    }
}

/// Returns numbers of experts as text.
pub fn text(experts: &[u32]) -> String {
    let experts: Vec<String> = experts.iter().map(u32::to_string).collect();
    experts.join(", ")
}

/// Reads experts by layer.
pub fn read(path: &Path) -> Result<Vec<LayerMask>> {
    // Not its size: that of a device or a pipe is 0.
    let mut text = String::new();
    let read = File::open(path).and_then(|file| file.take(LARGEST + 1).read_to_string(&mut text));
    let bytes = read.with_context(|| format!("cannot read {}", path.display()))?;
    ensure!(
        bytes as u64 <= LARGEST,
        "cannot read {}: it is larger than {}",
        path.display(),
        size_text(LARGEST as f64)
    );
    serde_json::from_str(&text).with_context(|| {
        format!(
            "{}: expected [{{\"layer\": 3, \"experts\": [3, 17]}}, ...]",
            path.display()
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_without_end_are_refused() {
        let error = read(Path::new("/dev/zero")).expect_err("no masks");
        assert!(error.to_string().contains("larger than 64"), "{error}");
        assert!(read(Path::new("/nowhere")).is_err());
    }
}
