//! Masks of experts from the command line.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use sidecar_core::protocol::{LayerMask, Request};

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

/// Reads experts by layer.
pub fn read(path: &Path) -> Result<Vec<LayerMask>> {
    let size = std::fs::metadata(path).map(|found| found.len());
    let read = size.and_then(|size| match size <= LARGEST {
        true => std::fs::read_to_string(path),
        false => Err(std::io::Error::other("it is larger than 64 MiB")),
    });
    let text = read.with_context(|| format!("cannot read {}", path.display()))?;
    serde_json::from_str(&text).with_context(|| {
        format!(
            "{}: expected [{{\"layer\": 3, \"experts\": [3, 17]}}, ...]",
            path.display()
        )
    })
}
