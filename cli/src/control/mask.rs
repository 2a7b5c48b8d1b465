//! Masks of experts from the command line.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail, ensure};
use sidecar_core::files;
use sidecar_core::protocol::{LayerMask, Request};
use sidecar_core::text;

/// No layer has so many experts.
const MOST_EXPERTS: u32 = 1 << 16;

/// Which experts are masked.
#[derive(clap::Args)]
pub struct MaskOptions {
    /// A layer and numbers of experts, such as 12:3,17 or 12:0-3; may be repeated.
    ///
    /// They take the place of those that were masked in the layer.
    #[arg(long, value_name = "LAYER:LIST", value_parser = layer)]
    layer: Vec<LayerMask>,
    /// A file with experts of several layers, as JSON: [{"layer": 3, "experts": [3, 17]}, ...].
    #[arg(long, value_name = "FILE", conflicts_with = "layer")]
    experts: Option<PathBuf>,
    /// Remove all other masks.
    #[arg(long)]
    clear: bool,
}

impl MaskOptions {
    /// Returns the request.
    pub fn request(self) -> Result<Request> {
        let masks = match &self.experts {
            Some(path) => read(path)?,
            None => once(self.layer, "--layer")?,
        };
        ensure!(
            self.clear || !masks.is_empty(),
            "no mask: use --layer, --experts or --clear"
        );
        Ok(Request::Mask {
            masks,
            clear: self.clear,
        })
    }
}

/// Reads the number of a layer, and numbers and ranges of numbers of experts.
fn layer(text: &str) -> Result<LayerMask, String> {
    let expected = || {
        format!(
            "expected a layer and numbers such as 12:3,17 or 12:0-3, found '{text}'; --clear removes masks"
        )
    };
    let (layer, list) = text.split_once(':').ok_or_else(expected)?;
    let layer = layer.parse().map_err(|_| expected())?;
    let number = |text: &str| -> Option<u32> {
        text.trim()
            .parse()
            .ok()
            .filter(|number| *number < MOST_EXPERTS)
    };
    let range = |part: &str| match part.split_once('-') {
        Some((first, last)) => Some((number(first)?, number(last)?)),
        None => number(part).map(|number| (number, number)),
    };
    let mut all = Vec::new();
    for part in list.split(',') {
        let (first, last) = range(part)
            .filter(|(first, last)| first <= last)
            .ok_or_else(expected)?;
        all.extend(first..=last);
    }
    all.sort_unstable();
    all.dedup();
    Ok(LayerMask {
        layer,
        experts: all,
    })
}

/// Returns numbers of experts as text.
pub fn text(experts: &[u32]) -> String {
    let experts: Vec<String> = experts.iter().map(u32::to_string).collect();
    experts.join(", ")
}

/// Reads experts by layer. Each layer is named once, and each of its experts.
pub fn read(path: &Path) -> Result<Vec<LayerMask>> {
    let text =
        files::read_text(path).with_context(|| format!("cannot read {}", text::path(path)))?;
    let masks: Vec<LayerMask> = serde_json::from_str(&text).with_context(|| {
        format!(
            "{}: expected [{{\"layer\": 3, \"experts\": [3, 17]}}, ...]",
            text::path(path)
        )
    })?;
    ensure!(!masks.is_empty(), "{} names no layer", text::path(path));
    let masks = once(masks, &text::path(path))?;
    for LayerMask { layer, experts } in &masks {
        let path = text::path(path);
        let mut named = BTreeSet::new();
        for expert in experts {
            ensure!(
                named.insert(expert),
                "{path} names expert {expert} of layer {layer} twice"
            );
        }
    }
    Ok(masks)
}

/// Returns masks that name each layer once; `source` is where they are from.
fn once(masks: Vec<LayerMask>, source: &str) -> Result<Vec<LayerMask>> {
    let mut layers = BTreeSet::new();
    let mut named = masks.iter().map(|mask| mask.layer);
    match named.find(|layer| !layers.insert(*layer)) {
        Some(layer) => bail!("{source} names layer {layer} twice"),
        None => Ok(masks),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_without_end_are_refused() {
        let error = read(Path::new("/dev/zero")).expect_err("no masks");
        assert!(format!("{error:#}").contains("not a regular file"));
        assert!(read(Path::new("/nowhere")).is_err());
    }

    #[test]
    fn each_expert_is_named_once() {
        let of = |text: &str| {
            let file = tempfile::NamedTempFile::new().expect("a file");
            std::fs::write(&file, text).expect("free space");
            read(file.path())
        };
        assert!(of(r#"[{"layer": 1, "experts": [2, 3]}, {"layer": 2, "experts": []}]"#).is_ok());
        for (text, reason) in [
            ("[]", "no layer"),
            (
                r#"[{"layer": 1, "experts": [2, 2]}]"#,
                "expert 2 of layer 1 twice",
            ),
            (
                r#"[{"layer": 1, "experts": [2]}, {"layer": 1, "experts": []}]"#,
                "layer 1 twice",
            ),
            ("{}", "expected [{"),
        ] {
            let error = of(text).expect_err("no masks");
            assert!(error.to_string().contains(reason), "{error}");
        }
    }

    #[test]
    fn numbers_and_ranges_are_read() {
        let of = |text| layer(text).map(|mask| (mask.layer, mask.experts));
        assert_eq!(of("12:3, 17"), Ok((12, vec![3, 17])));
        assert_eq!(of("0:0-2,9"), Ok((0, vec![0, 1, 2, 9])));
        for text in [
            "",
            "1",
            ":1",
            "1:",
            "1:1,",
            "1:a",
            "1:3-1",
            "1:-1",
            "-1:1",
            "1:0-4294967295",
        ] {
            let error = of(text).expect_err("no numbers");
            assert!(error.contains("12:3,17 or 12:0-3"), "{error}");
        }
    }
}
