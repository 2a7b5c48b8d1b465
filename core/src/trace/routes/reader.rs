//! Reading of compact binary.

use std::fs::File;
use std::io::{self, BufReader, ErrorKind, Read};
use std::path::Path;

use super::super::counters::{ExpertLayout, Trace};
use super::super::ids::Ids;
use super::super::snapshot::Snapshot;
use super::layout::{
    DROPPED, LONGEST_MARK, LONGEST_NAME, MAGIC, MARK, MOST_PLACES, NOT_ROUTED, ROWS, RouteLayout,
    VERSION, WITH_WEIGHTS,
};
use crate::files;

/// What [`RouteReader`] reads.
#[derive(Debug, Clone, PartialEq)]
pub enum RouteRecord {
    /// Tokens of an evaluation.
    Rows {
        /// Number of the context that evaluated them; tokens of one context are in order.
        context: u32,
        /// Experts `[tokens, layers, top_k]`, or [`NOT_ROUTED`].
        experts: Vec<i16>,
        /// Gate weights in the same order; empty without.
        weights: Vec<f32>,
    },
    /// A mark.
    Mark(String),
    /// So many tokens are missing here.
    Dropped(u64),
}

/// Reads compact binary. Uses as much memory as one record, whatever the file claims.
#[derive(Debug)]
pub struct RouteReader<R> {
    input: R,
    layout: RouteLayout,
    is_cut: bool,
}

impl RouteReader<BufReader<File>> {
    /// Opens a file.
    pub fn open(path: &Path) -> io::Result<RouteReader<BufReader<File>>> {
        RouteReader::new(BufReader::new(files::open(path)?))
    }
}

impl<R: Read> RouteReader<R> {
    /// Reads the header.
    pub fn new(mut input: R) -> io::Result<RouteReader<R>> {
        let mut magic = [0; 8];
        input.read_exact(&mut magic)?;
        if magic != *MAGIC {
            return Err(invalid(
                "this is not a file of routes: its first bytes differ",
            ));
        }
        let [version, flags, layers, top_k, name] = numbers(&mut input)?;
        if version != VERSION || flags > WITH_WEIGHTS {
            return Err(invalid(format!(
                "routes of version {version} with flags {flags} are not known: use a newer llama-sidecar"
            )));
        }
        let (layers, top_k, name) = (layers as usize, top_k as usize, name as usize);
        if layers > MOST_PLACES || name > LONGEST_NAME {
            return Err(invalid(format!(
                "{layers} layers and a name of {name} bytes exceed the limits of the format"
            )));
        }
        let model = String::from_utf8_lossy(&bytes(&mut input, name)?).into_owned();
        let mut sizes = Vec::new();
        for _ in 0..layers {
            let [layer, experts] = numbers(&mut input)?;
            sizes.push((layer, experts));
        }
        let layout = RouteLayout::new(&model, &sizes, top_k, flags == WITH_WEIGHTS);
        Ok(RouteReader {
            input,
            layout: layout.map_err(invalid)?,
            is_cut: false,
        })
    }

    /// Returns what the rows mean.
    pub fn layout(&self) -> &RouteLayout {
        &self.layout
    }

    /// Returns whether the file ended within a record, which was left out.
    pub fn is_cut(&self) -> bool {
        self.is_cut
    }

    /// Returns the next record; `None` at the end.
    pub fn read(&mut self) -> io::Result<Option<RouteRecord>> {
        match self.record() {
            Err(error) if error.kind() == ErrorKind::UnexpectedEof => {
                self.is_cut = true;
                Ok(None)
            }
            record => record,
        }
    }

    fn record(&mut self) -> io::Result<Option<RouteRecord>> {
        let mut kind = [0; 4];
        // The end of the file is before a record or within it.
        if self.input.by_ref().take(1).read(&mut kind)? == 0 {
            return Ok(None);
        }
        self.input.read_exact(&mut kind[1..])?;
        let [count, context] = numbers(&mut self.input)?;
        let length = count as usize;
        Ok(Some(match u32::from_le_bytes(kind) {
            ROWS if (1..=self.layout.record_tokens()).contains(&length) => {
                let places = length * self.layout.places();
                let experts = bytes(&mut self.input, places * 2)?;
                let weights = match self.layout.weights {
                    true => bytes(&mut self.input, places * 4)?,
                    false => Vec::new(),
                };
                let expert = |bytes: &[u8; 2]| i16::from_le_bytes(*bytes);
                let weight = |bytes: &[u8; 4]| f32::from_le_bytes(*bytes);
                RouteRecord::Rows {
                    context,
                    experts: experts.as_chunks().0.iter().map(expert).collect(),
                    weights: weights.as_chunks().0.iter().map(weight).collect(),
                }
            }
            MARK if length <= LONGEST_MARK => {
                let text = bytes(&mut self.input, length)?;
                RouteRecord::Mark(String::from_utf8_lossy(&text).into_owned())
            }
            DROPPED => RouteRecord::Dropped(u64::from(count)),
            kind => {
                return Err(invalid(format!(
                    "a record of kind {kind} with {count} elements is not valid: the file is damaged"
                )));
            }
        }))
    }

    /// Reads to the end, and passes counts and locality of each workload on: of the tokens before
    /// the first mark, with an empty text, and of those after each mark, with its text. Workloads
    /// without tokens are left out. Keeps one workload in memory.
    pub fn workloads(
        mut self,
        mut each: impl FnMut(&str, Snapshot) -> io::Result<()>,
    ) -> io::Result<()> {
        let layout = ExpertLayout::new(self.layout.layers.iter().copied());
        let positions = self.layout.layers.iter();
        let positions = positions.map(|(layer, _)| layout.position(*layer));
        let positions: Vec<Option<usize>> = positions.collect();
        let top_k = self.layout.top_k;
        let mut end = |text: &str, trace: &Trace| {
            let counted = trace.snapshot_with_locality();
            match counted.tokens() {
                0 => Ok(()),
                _ => each(text, counted),
            }
        };
        // Whether the trace has tokens of the workload.
        let mut is_used = false;
        let mut trace = Trace::with_locality(layout.clone());
        let mut text = String::new();
        let mut bytes = Vec::new();
        while let Some(record) = self.read()? {
            match record {
                RouteRecord::Rows { experts, .. } => {
                    is_used = true;
                    for (at, experts) in experts.chunks(top_k).enumerate() {
                        let ids = experts.iter().filter(|id| **id != NOT_ROUTED);
                        bytes.clear();
                        bytes.extend(ids.flat_map(|id| i32::from(*id).to_ne_bytes()));
                        let ids = Ids::packed(&bytes, bytes.len() / 4);
                        if let Some(layer) = positions[at % positions.len()] {
                            trace.record_batch(layer, &ids);
                        }
                    }
                }
                RouteRecord::Mark(mark) => {
                    if std::mem::take(&mut is_used) {
                        end(&text, &trace)?;
                        trace = Trace::with_locality(layout.clone());
                    }
                    text = mark;
                }
                RouteRecord::Dropped(_) => {}
            }
        }
        end(&text, &trace)
    }
}

fn invalid(reason: impl Into<String>) -> io::Error {
    io::Error::new(ErrorKind::InvalidData, reason.into())
}

fn numbers<const N: usize>(input: &mut impl Read) -> io::Result<[u32; N]> {
    let mut numbers = [0; N];
    for number in &mut numbers {
        let mut bytes = [0; 4];
        input.read_exact(&mut bytes)?;
        *number = u32::from_le_bytes(bytes);
    }
    Ok(numbers)
}

/// Reads so many bytes; memory grows with what is there.
fn bytes(input: &mut impl Read, length: usize) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    input.take(length as u64).read_to_end(&mut bytes)?;
    match bytes.len() == length {
        true => Ok(bytes),
        false => Err(ErrorKind::UnexpectedEof.into()),
    }
}
