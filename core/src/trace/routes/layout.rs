//! What a file of routes has: constants, layout of a token, formats.

use std::ffi::OsStr;
use std::path::Path;

use crate::experts::MAX_LAYERS;

/// Stands in place of an expert where a layer did not compute a token.
pub const NOT_ROUTED: i16 = -1;
/// The longest mark in bytes.
pub const LONGEST_MARK: usize = 4096;

pub(super) const MAGIC: &[u8; 8] = b"LSROUTES";
pub(super) const VERSION: u32 = 1;
pub(super) const WITH_WEIGHTS: u32 = 1;
pub(super) const ROWS: u32 = 1;
pub(super) const MARK: u32 = 2;
pub(super) const DROPPED: u32 = 3;
/// The most bytes of rows in a record with more than one token.
pub(super) const RECORD_BYTES: usize = 1 << 20;
/// The most ids of a token, and experts of all layers.
pub(super) const MOST_PLACES: usize = 1 << 20;
/// The length of a model's name that is kept.
pub(super) const LONGEST_NAME: usize = 1024;
/// The size of the header of an `.npy` file.
pub(super) const NPY_HEADER: usize = 128;

/// What the rows of a file mean.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RouteLayout {
    model: String,
    pub(super) layers: Vec<(u32, u32)>,
    pub(super) top_k: usize,
    pub(super) weights: bool,
}

impl RouteLayout {
    /// Makes the layout of a model from its name, number and experts of each layer, and the
    /// experts of a token; with gate weights or without. Fails for sizes that the format does
    /// not have.
    pub fn new(
        model: &str,
        layers: &[(u32, u32)],
        top_k: usize,
        weights: bool,
    ) -> Result<RouteLayout, String> {
        let places = layers.len().checked_mul(top_k);
        if !places.is_some_and(|places| (1..=MOST_PLACES).contains(&places)) {
            return Err(format!(
                "{} layers with {top_k} experts of a token cannot be written",
                layers.len()
            ));
        }
        if let Some((layer, _)) = layers.iter().find(|(layer, _)| *layer >= MAX_LAYERS) {
            return Err(format!("layer {layer} is not below {MAX_LAYERS}"));
        }
        if let Some((layer, experts)) = layers
            .iter()
            .find(|(_, experts)| *experts > i16::MAX as u32)
        {
            return Err(format!(
                "layer {layer} has {experts} experts, and a file of routes at most {}",
                i16::MAX
            ));
        }
        let experts: u64 = layers.iter().map(|(_, experts)| u64::from(*experts)).sum();
        if experts > MOST_PLACES as u64 {
            return Err(format!("{experts} experts of all layers cannot be written"));
        }
        let mut length = model.len().min(LONGEST_NAME);
        while !model.is_char_boundary(length) {
            length -= 1;
        }
        Ok(RouteLayout {
            model: model[..length].to_owned(),
            layers: layers.to_vec(),
            top_k,
            weights,
        })
    }

    /// Returns the name of the model.
    pub fn model(&self) -> &str {
        &self.model
    }

    /// Returns number and experts of each layer.
    pub fn layers(&self) -> &[(u32, u32)] {
        &self.layers
    }

    /// Returns the experts of a token in a layer.
    pub fn top_k(&self) -> usize {
        self.top_k
    }

    /// Returns whether there are gate weights.
    pub fn has_weights(&self) -> bool {
        self.weights
    }

    /// Returns the ids of a token.
    pub fn places(&self) -> usize {
        self.layers.len() * self.top_k
    }

    /// Returns the bytes of a token in a record.
    pub(super) fn token_bytes(&self) -> usize {
        self.places() * if self.weights { 6 } else { 2 }
    }

    /// Returns the most tokens of a record.
    pub(super) fn record_tokens(&self) -> usize {
        (RECORD_BYTES / self.token_bytes()).max(1)
    }

    /// Returns the start of a file.
    pub(super) fn header(&self) -> Vec<u8> {
        let flags = if self.weights { WITH_WEIGHTS } else { 0 };
        let mut header = MAGIC.to_vec();
        let numbers = [
            VERSION,
            flags,
            self.layers.len() as u32,
            self.top_k as u32,
            self.model.len() as u32,
        ];
        header.extend(numbers.iter().flat_map(|number| number.to_le_bytes()));
        header.extend(self.model.as_bytes());
        for (layer, experts) in &self.layers {
            header.extend([layer, experts].iter().flat_map(|n| n.to_le_bytes()));
        }
        header
    }
}

/// Format of a file of routes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RouteFormat {
    /// An array for numpy.
    Npy,
    /// A line for each routed expert.
    Csv,
    /// Compact binary.
    Binary,
}

impl RouteFormat {
    /// Returns the format that the extension of a path stands for.
    pub fn of(path: &Path) -> RouteFormat {
        match path.extension().and_then(OsStr::to_str) {
            Some("npy") => RouteFormat::Npy,
            Some("csv") => RouteFormat::Csv,
            _ => RouteFormat::Binary,
        }
    }
}
