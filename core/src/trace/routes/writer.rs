//! Writing of routes.

use std::io::{self, Write};
use std::path::{Path, PathBuf};

use serde_json::json;

use super::layout::{
    DROPPED, LONGEST_MARK, MARK, NOT_ROUTED, NPY_HEADER, ROWS, RouteFormat, RouteLayout,
};
use crate::descriptors::Kept;
use crate::files::{self, Replace};
use crate::protocol;

/// How marks start.
const MARKS: &[u8] = br#"{"token":0,"mark":"#;

/// A file to which whole pieces are appended.
#[derive(Debug)]
struct Output {
    file: Kept,
    /// The end of the last complete piece.
    end: u64,
}

impl Output {
    /// Creates a file that starts with these bytes. Another process that writes to it keeps it:
    /// the error has the kind `ResourceBusy`.
    fn create(path: &Path, start: &[u8]) -> io::Result<Output> {
        let mut output = Output::new(path, start)?;
        output.append(start)?;
        Ok(output)
    }

    /// Creates an empty file that will start like this.
    fn new(path: &Path, start: &[u8]) -> io::Result<Output> {
        let file = files::create(path, start, Replace::Own)?;
        Ok(Output { file, end: 0 })
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
pub(super) fn beside(path: &Path, ending: &str) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(ending);
    name.into()
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
    /// Creates the files of a path, in the format of its extension, or none. Files that are there
    /// are replaced if they are routes; see [`files::create`].
    pub fn create(path: &Path, layout: RouteLayout) -> io::Result<RouteWriter> {
        let format = RouteFormat::of(path);
        let start = match format {
            RouteFormat::Npy => npy_header("<i2", 0, &layout),
            RouteFormat::Csv if layout.weights => b"layer,expert,weight\n".to_vec(),
            RouteFormat::Csv => b"layer,expert\n".to_vec(),
            RouteFormat::Binary => layout.header(),
        };
        let of_weights = npy_header("<f4", 0, &layout);
        let weights = beside(path, ".weights.npy");
        let marks = beside(path, ".marks.jsonl");
        let has_weights = format == RouteFormat::Npy && layout.weights;
        let has_marks = format != RouteFormat::Binary;
        // Other programs write arrays and tables that start so, and no marks beside them.
        let replace = match has_marks && !marks.exists() {
            true => Replace::Nothing,
            false => Replace::Own,
        };
        // All of them first, so that none is made if another one is refused.
        let mut files = vec![(path, &start[..], replace)];
        files.extend(has_weights.then_some((&*weights, &of_weights[..], replace)));
        files.extend(has_marks.then_some((&*marks, MARKS, Replace::Own)));
        for (path, start, replace) in files {
            match files::check(path, start, replace) {
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => return Err(error),
                // With the error of the file itself.
                _ => {}
            }
        }
        let routes = Output::create(path, &start)?;
        let weights = has_weights.then(|| Output::create(&weights, &of_weights));
        let marks = has_marks.then(|| Output::new(&marks, MARKS));
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

/// Returns the three numbers before a record.
pub(super) fn record_header(kind: u32, count: u32, context: u32) -> Vec<u8> {
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
