//! Routes: the experts of every token, layer by layer, in files.
//!
//! The extension of a path gives the format:
//!
//! * `.npy`: an array of 16-bit integers `[tokens, layers, top_k]` for numpy. Gate weights are in
//!   `FILE.weights.npy`, an array of 32-bit floats of the same shape.
//! * `.csv`: a line `layer,expert` for each routed expert, with the gate weight as third column.
//! * other: compact binary, which [`RouteReader`] reads. All numbers are little-endian:
//!
//! | bytes | contents |
//! |---|---|
//! | 8 | `LSROUTES` |
//! | 4 | version, 1 |
//! | 4 | flags; 1: with gate weights |
//! | 4 | number of layers |
//! | 4 | experts of a token in a layer, `top_k` |
//! | 4 + n | length and text of the model's name |
//! | 8 each | number and experts of each layer |
//!
//! Records follow, each with three numbers of 4 bytes: kind, count, context.
//!
//! | kind | contents |
//! |---|---|
//! | 1 | `count` tokens of an evaluation in `context`: ids `[count, layers, top_k]` of 2 bytes; then gate weights of 4 bytes, if flagged. At most 1 MiB, or one token |
//! | 2 | a mark: text of `count` bytes, at most 4096 |
//! | 3 | `count` tokens were dropped here |
//!
//! Marks and dropped tokens of the other formats are in `FILE.marks.jsonl`, a JSON object in each
//! line: `{"token":N,"mark":"text"}` or `{"token":N,"dropped":M}`, where `token` is the number
//! of tokens before.
//!
//! An id is [`NOT_ROUTED`], and its weight NaN, where a layer did not compute a token. The file
//! of an interrupted process ends with its last complete token: the shape in an `.npy` file never
//! exceeds what the file has, and [`RouteReader`] leaves out a truncated record.

use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io::{self, BufReader, ErrorKind, Read, Write};
use std::os::unix::fs::FileExt;
use std::path::Path;

use serde_json::json;

use super::counters::{ExpertLayout, Snapshot, Trace};
use super::ids::Ids;
use crate::experts::MAX_LAYERS;
use crate::{files, protocol};

/// Stands in place of an expert where a layer did not compute a token.
pub const NOT_ROUTED: i16 = -1;
/// The longest mark in bytes.
pub const LONGEST_MARK: usize = 4096;

const MAGIC: &[u8; 8] = b"LSROUTES";
const VERSION: u32 = 1;
const WITH_WEIGHTS: u32 = 1;
const ROWS: u32 = 1;
const MARK: u32 = 2;
const DROPPED: u32 = 3;
/// The most bytes of rows in a record with more than one token.
const RECORD_BYTES: usize = 1 << 20;
/// The most ids of a token, and experts of all layers.
const MOST_PLACES: usize = 1 << 20;
/// The length of a model's name that is kept.
const LONGEST_NAME: usize = 1024;
/// The size of the header of an `.npy` file.
const NPY_HEADER: usize = 128;

/// What the rows of a file mean.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RouteLayout {
    model: String,
    layers: Vec<(u32, u32)>,
    top_k: usize,
    weights: bool,
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
        if let Some((layer, _)) = layers.iter().find(|of| of.0 >= MAX_LAYERS) {
            return Err(format!("layer {layer} is not below {MAX_LAYERS}"));
        }
        if let Some((layer, experts)) = layers.iter().find(|of| of.1 > i16::MAX as u32) {
            return Err(format!(
                "layer {layer} has {experts} experts, and a file of routes at most {}",
                i16::MAX
            ));
        }
        let experts: u64 = layers.iter().map(|of| u64::from(of.1)).sum();
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
    fn token_bytes(&self) -> usize {
        self.places() * if self.weights { 6 } else { 2 }
    }

    /// Returns the most tokens of a record.
    fn record_tokens(&self) -> usize {
        (RECORD_BYTES / self.token_bytes()).max(1)
    }

    fn header(&self) -> Vec<u8> {
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

/// A file to which whole pieces are appended.
#[derive(Debug)]
struct Output {
    file: File,
    /// The end of the last complete piece.
    end: u64,
}

impl Output {
    /// Creates a file that starts with these bytes. Another process that writes to it keeps it:
    /// the error has the kind `ResourceBusy`.
    fn create(path: &Path, start: &[u8]) -> io::Result<Output> {
        let (file, kept) = files::create(path, |_| false)?;
        files::log_kept(path, kept.as_deref());
        let mut output = Output { file, end: 0 };
        output.append(start)?;
        Ok(output)
    }

    fn append(&mut self, bytes: &[u8]) -> io::Result<()> {
        let written = self.file.write_all_at(bytes, self.end);
        match written {
            Ok(()) => self.end += bytes.len() as u64,
            Err(_) => self.cut(self.end),
        }
        written
    }

    /// Removes what follows a complete piece.
    fn cut(&mut self, end: u64) {
        self.end = end;
        // What stays is overwritten later, or lies behind the shape of an array.
        let _ = self.file.set_len(end);
    }
}

/// Returns a path with an ending after its extension.
fn beside(path: &Path, ending: &str) -> OsString {
    let mut name = path.as_os_str().to_owned();
    name.push(ending);
    name
}

/// Writes a file of routes. A failed call leaves the complete tokens before it, and the next call
/// goes on there.
///
/// ```
/// use sidecar_core::trace::{RouteLayout, RouteReader, RouteRecord, RouteWriter};
///
/// let folder = tempfile::tempdir()?;
/// let path = folder.path().join("model.routes");
/// // Layers 0 and 1 have 4 experts each, of which a token uses 2.
/// let layout = RouteLayout::new("a model", &[(0, 4), (1, 4)], 2, false)?;
/// let mut writer = RouteWriter::create(&path, layout)?;
/// writer.mark("a question")?;
/// writer.rows(0, &[0, 3, 1, 2], &[])?;
/// writer.flush()?;
///
/// let mut reader = RouteReader::open(&path)?;
/// assert_eq!(reader.read()?, Some(RouteRecord::Mark("a question".into())));
/// let Some(RouteRecord::Rows { experts, .. }) = reader.read()? else { panic!() };
/// assert_eq!(experts, [0, 3, 1, 2]);
/// assert_eq!(reader.read()?, None);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct RouteWriter {
    layout: RouteLayout,
    format: RouteFormat,
    routes: Output,
    /// Gate weights, beside an array.
    weights: Option<Output>,
    /// Marks, unless the file itself has them.
    marks: Option<Output>,
    tokens: u64,
    dropped: u64,
    /// Dropped tokens that are not yet noted in the file.
    gap: u64,
    encoded: Vec<u8>,
}

impl RouteWriter {
    /// Creates the files of a path, in the format of its extension.
    pub fn create(path: &Path, layout: RouteLayout) -> io::Result<RouteWriter> {
        let format = RouteFormat::of(path);
        let start = match format {
            RouteFormat::Npy => npy_header("<i2", 0, &layout),
            RouteFormat::Csv if layout.weights => b"layer,expert,weight\n".to_vec(),
            RouteFormat::Csv => b"layer,expert\n".to_vec(),
            RouteFormat::Binary => layout.header(),
        };
        // First, because it can be refused.
        let routes = Output::create(path, &start)?;
        let weights = (format == RouteFormat::Npy && layout.weights).then(|| {
            let path = beside(path, ".weights.npy");
            Output::create(Path::new(&path), &npy_header("<f4", 0, &layout))
        });
        let marks = (format != RouteFormat::Binary)
            .then(|| Output::create(Path::new(&beside(path, ".marks.jsonl")), &[]));
        Ok(RouteWriter {
            format,
            routes,
            weights: weights.transpose()?,
            marks: marks.transpose()?,
            layout,
            tokens: 0,
            dropped: 0,
            gap: 0,
            encoded: Vec::new(),
        })
    }

    /// Returns the number of tokens that are in the file.
    pub fn tokens(&self) -> u64 {
        self.tokens
    }

    /// Returns the number of tokens that are missing in the file.
    pub fn missing(&self) -> u64 {
        self.dropped
    }

    /// Appends tokens of an evaluation: their experts `[tokens, layers, top_k]`, and as many gate
    /// weights if the layout has them. Tokens that cannot be written count as missing.
    pub fn rows(&mut self, context: u32, experts: &[i16], weights: &[f32]) -> io::Result<()> {
        let places = self.layout.places();
        let all = (experts.len() / places) as u64;
        let before = self.tokens;
        let piece = self.layout.record_tokens() * places;
        let mut weights = weights.chunks(piece);
        let written = self.note_gap().and_then(|()| {
            experts.chunks(piece).try_for_each(|experts| {
                self.piece(context, experts, weights.next().unwrap_or_default())
            })
        });
        self.dropped(all - (self.tokens - before));
        written
    }

    /// Counts tokens that are missing from here on.
    pub fn dropped(&mut self, tokens: u64) {
        self.dropped += tokens;
        self.gap += tokens;
    }

    /// Appends a mark, of which the first 4096 bytes are kept.
    pub fn mark(&mut self, text: &str) -> io::Result<()> {
        self.note_gap()?;
        let mut length = text.len().min(LONGEST_MARK);
        while !text.is_char_boundary(length) {
            length -= 1;
        }
        let text = &text[..length];
        match &mut self.marks {
            Some(marks) => {
                let line = protocol::line(&json!({ "token": self.tokens, "mark": text }));
                marks.append(line.as_bytes())
            }
            None => {
                let mut record = record_header(MARK, length as u32, 0);
                record.extend(text.as_bytes());
                self.routes.append(&record)
            }
        }
    }

    /// Completes the file, so that all tokens before can be read.
    pub fn flush(&mut self) -> io::Result<()> {
        if self.format == RouteFormat::Npy {
            let header = |ty| npy_header(ty, self.tokens, &self.layout);
            self.routes.file.write_all_at(&header("<i2"), 0)?;
            if let Some(weights) = &self.weights {
                weights.file.write_all_at(&header("<f4"), 0)?;
            }
        }
        self.note_gap()
    }

    /// Appends a note of the tokens that are missing here.
    fn note_gap(&mut self) -> io::Result<()> {
        while self.gap > 0 {
            let count = self.gap.min(u64::from(u32::MAX));
            match &mut self.marks {
                Some(marks) => {
                    let line = protocol::line(&json!({ "token": self.tokens, "dropped": count }));
                    marks.append(line.as_bytes())?;
                }
                None => {
                    let record = record_header(DROPPED, count as u32, 0);
                    self.routes.append(&record)?;
                }
            }
            self.gap -= count;
        }
        Ok(())
    }

    /// Appends tokens that fit into a record.
    fn piece(&mut self, context: u32, experts: &[i16], weights: &[f32]) -> io::Result<()> {
        let tokens = experts.len() / self.layout.places();
        let encoded = &mut self.encoded;
        encoded.clear();
        match self.format {
            RouteFormat::Npy => encode(encoded, experts),
            RouteFormat::Csv => csv(encoded, &self.layout, experts, weights),
            RouteFormat::Binary => {
                encoded.extend(record_header(ROWS, tokens as u32, context));
                encode(encoded, experts);
                encoded.extend(weights.iter().flat_map(|weight| weight.to_le_bytes()));
            }
        }
        let before = self.routes.end;
        self.routes.append(encoded)?;
        if let Some(output) = &mut self.weights {
            encoded.clear();
            encoded.extend(weights.iter().flat_map(|weight| weight.to_le_bytes()));
            if let Err(error) = output.append(encoded) {
                self.routes.cut(before);
                return Err(error);
            }
        }
        self.tokens += tokens as u64;
        Ok(())
    }
}

fn encode(encoded: &mut Vec<u8>, experts: &[i16]) {
    encoded.extend(experts.iter().flat_map(|expert| expert.to_le_bytes()));
}

fn record_header(kind: u32, count: u32, context: u32) -> Vec<u8> {
    [kind, count, context]
        .iter()
        .flat_map(|number| number.to_le_bytes())
        .collect()
}

fn csv(encoded: &mut Vec<u8>, layout: &RouteLayout, experts: &[i16], weights: &[f32]) {
    let layers = layout.layers.iter().cycle();
    for (at, ((layer, _), experts)) in layers.zip(experts.chunks(layout.top_k)).enumerate() {
        for (place, expert) in experts.iter().enumerate() {
            if *expert == NOT_ROUTED {
                continue;
            }
            // A vector takes all bytes.
            let _ = match weights.get(at * layout.top_k + place) {
                Some(weight) => writeln!(encoded, "{layer},{expert},{weight}"),
                None => writeln!(encoded, "{layer},{expert}"),
            };
        }
    }
}

/// Returns the header of an array of this type, `[tokens, layers, top_k]`. It has the same size
/// for every number of tokens.
fn npy_header(ty: &str, tokens: u64, layout: &RouteLayout) -> Vec<u8> {
    let (layers, top_k) = (layout.layers.len(), layout.top_k);
    let shape = format!("({tokens}, {layers}, {top_k})");
    let text = format!("{{'descr': '{ty}', 'fortran_order': False, 'shape': {shape}, }}");
    let start = b"\x93NUMPY\x01\x00";
    let length = NPY_HEADER - start.len() - 2;
    let mut header = start.to_vec();
    header.extend((length as u16).to_le_bytes());
    header.extend(format!("{text:width$}\n", width = length - 1).as_bytes());
    header
}

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
        let positions = positions.map(|of| layout.position(of.0));
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
                        let ids = Ids {
                            bytes: &bytes,
                            used: bytes.len() / 4,
                            tokens: usize::from(!bytes.is_empty()),
                            used_stride: 4,
                            token_stride: bytes.len(),
                        };
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

#[cfg(test)]
mod tests {
    use super::*;

    fn layout(weights: bool) -> RouteLayout {
        RouteLayout::new("a model", &[(0, 4), (3, 8)], 2, weights).expect("it fits")
    }

    fn read_all(bytes: &[u8]) -> io::Result<(Vec<RouteRecord>, bool)> {
        let mut reader = RouteReader::new(bytes)?;
        let mut records = Vec::new();
        while let Some(record) = reader.read()? {
            records.push(record);
        }
        Ok((records, reader.is_cut()))
    }

    /// Two evaluations, a mark and a gap.
    fn written(name: &str, weights: bool) -> (tempfile::TempDir, std::path::PathBuf) {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join(name);
        let mut writer = RouteWriter::create(&path, layout(weights)).expect("free space");
        let gate = |count: usize| vec![0.5; if weights { count } else { 0 }];
        writer
            .rows(1, &[0, 1, 2, 3, 3, 2, -1, -1], &gate(8))
            .expect("free space");
        writer.mark("next").expect("free space");
        writer.dropped(5);
        writer.rows(2, &[1, 2, 6, 7], &gate(4)).expect("free space");
        writer.flush().expect("free space");
        assert_eq!((writer.tokens(), writer.missing()), (3, 5));
        (folder, path)
    }

    #[test]
    fn compact_binary_comes_back() {
        for weights in [false, true] {
            let (_folder, path) = written("model.routes", weights);
            let bytes = std::fs::read(&path).expect("a file");
            let (records, is_cut) = read_all(&bytes).expect("valid");
            let gate = |count: usize| vec![0.5; if weights { count } else { 0 }];
            let rows = |context, experts: &[i16]| RouteRecord::Rows {
                context,
                weights: gate(experts.len()),
                experts: experts.to_vec(),
            };
            let expected = [
                rows(1, &[0, 1, 2, 3, 3, 2, -1, -1]),
                RouteRecord::Mark("next".into()),
                RouteRecord::Dropped(5),
                rows(2, &[1, 2, 6, 7]),
            ];
            assert_eq!((&records[..], is_cut), (&expected[..], false));
            let reader = RouteReader::open(&path).expect("valid");
            assert_eq!(reader.layout(), &layout(weights));
            let mut workloads = Vec::new();
            let read = reader.workloads(|text, counts| {
                workloads.push((text.to_owned(), counts));
                Ok(())
            });
            read.expect("valid");
            let counts: Vec<_> = workloads
                .iter()
                .map(|(text, counts)| {
                    let layers = counts.layers.iter();
                    let layers = layers.map(|layer| (layer.tokens, layer.experts.as_slice()));
                    (text.as_str(), layers.collect::<Vec<_>>())
                })
                .collect();
            let before: [(u64, &[u64]); 2] = [(2, &[1, 1, 1, 1]), (1, &[0, 0, 1, 1, 0, 0, 0, 0])];
            let after: [(u64, &[u64]); 2] = [(1, &[0, 1, 1, 0]), (1, &[0, 0, 0, 0, 0, 0, 1, 1])];
            assert_eq!(counts, [("", before.to_vec()), ("next", after.to_vec())]);
            let locality = workloads[0].1.layers[0].locality.as_ref();
            assert_eq!(locality.map(|of| of.first), Some(4));
            // Cut at any byte: a prefix of the records, and never an error.
            let header = layout(weights).header().len();
            for end in header..bytes.len() {
                let (part, _) = read_all(&bytes[..end]).expect("valid");
                assert_eq!(part[..], expected[..part.len()]);
            }
            for end in 0..header {
                assert!(read_all(&bytes[..end]).is_err());
            }
        }
    }

    #[test]
    fn damaged_files_use_no_memory_and_never_panic() {
        let (_folder, path) = written("model.routes", true);
        let good = std::fs::read(&path).expect("a file");
        for at in 0..good.len() {
            for value in [0, 1, 0x7f, 0xff] {
                let mut bytes = good.clone();
                bytes[at] = value;
                let _ = read_all(&bytes);
                let _ =
                    RouteReader::new(&bytes[..]).and_then(|reader| reader.workloads(|_, _| Ok(())));
            }
        }
        // Sizes at the limits of their type.
        for at in [16, 20, 24] {
            let mut bytes = good.clone();
            bytes[at..at + 4].copy_from_slice(&u32::MAX.to_le_bytes());
            assert!(read_all(&bytes).is_err(), "number at {at}");
        }
        let mut bytes = layout(true).header();
        bytes.extend(record_header(ROWS, u32::MAX, 0));
        assert!(read_all(&bytes).is_err());
    }

    #[test]
    fn arrays_have_a_header_for_numpy() {
        let (_folder, path) = written("model.npy", true);
        let text = |bytes: &[u8]| String::from_utf8_lossy(&bytes[10..NPY_HEADER]).into_owned();
        let routes = std::fs::read(&path).expect("a file");
        assert_eq!(routes.len(), NPY_HEADER + 3 * 4 * 2);
        let header = text(&routes);
        assert!(
            header.starts_with("{'descr': '<i2', 'fortran_order': False, 'shape': (3, 2, 2), }")
                && header.ends_with(" \n"),
            "{header}"
        );
        let weights = std::fs::read(beside(&path, ".weights.npy")).expect("a file");
        assert_eq!(weights.len(), NPY_HEADER + 3 * 4 * 4);
        assert!(text(&weights).contains("'<f4'"));
        let marks = std::fs::read_to_string(beside(&path, ".marks.jsonl")).expect("a file");
        assert_eq!(
            marks,
            "{\"token\":2,\"mark\":\"next\"}\n{\"token\":2,\"dropped\":5}\n"
        );
    }

    #[test]
    fn csv_has_a_line_for_each_routed_expert() {
        for (weights, expected) in [
            (
                false,
                "layer,expert\n0,0\n0,1\n3,2\n3,3\n0,3\n0,2\n0,1\n0,2\n3,6\n3,7\n",
            ),
            (true, "layer,expert,weight\n0,0,0.5\n0,1,0.5\n"),
        ] {
            let (_folder, path) = written("model.csv", weights);
            let text = std::fs::read_to_string(&path).expect("a file");
            assert!(text.starts_with(expected), "{text}");
        }
    }

    #[test]
    fn tokens_that_cannot_be_written_are_missing() {
        let full = Path::new("/dev/full");
        let failed = RouteWriter::create(full, layout(false)).expect_err("no space");
        assert_eq!(failed.kind(), ErrorKind::StorageFull);
    }
}
