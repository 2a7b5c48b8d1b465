//! Writes GGUF files.
//!
//! It writes what it is told, also nonsense: the parser's tests need files that no
//! sane writer makes.

use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::path::Path;

/// A metadata value.
#[derive(Debug, Clone)]
#[allow(missing_docs)]
pub enum Kv {
    U16(u16),
    U32(u32),
    I32(i32),
    Text(String),
    Texts(Vec<String>),
    F32s(Vec<f32>),
    I32s(Vec<i32>),
    /// A value type and the bytes after it, as they are.
    Raw(u32, Vec<u8>),
}

/// One tensor to write.
#[derive(Debug, Clone)]
pub struct Tensor {
    /// Its name.
    pub name: String,
    /// Elements per dimension, innermost first.
    pub ne: Vec<i64>,
    /// Value of `enum ggml_type`.
    pub ty: u32,
    /// Its data, already in that type.
    pub data: Vec<u8>,
}

/// Value of `enum ggml_type` for `f32`.
pub const F32: u32 = 0;
/// Value of `enum ggml_type` for `f16`.
pub const F16: u32 = 1;
/// Value of `enum ggml_type` for `q4_0`: 18 bytes for 32 elements.
pub const Q4_0: u32 = 2;
/// Value of `enum ggml_type` for `q8_0`: 34 bytes for 32 elements.
pub const Q8_0: u32 = 8;
/// Value of `enum ggml_type` for `q4_K`: 144 bytes for 256 elements.
pub const Q4_K: u32 = 12;

/// Bytes of `elements` elements in one of the types named here.
pub fn nbytes(ty: u32, elements: u64) -> u64 {
    match ty {
        F32 => elements * 4,
        F16 => elements * 2,
        Q4_0 => elements / 32 * 18,
        Q8_0 => elements / 32 * 34,
        Q4_K => elements / 256 * 144,
        other => panic!("the test writer does not know type {other}"),
    }
}

/// A file to write.
#[derive(Debug, Clone)]
pub struct Gguf {
    /// Version field.
    pub version: u32,
    /// Alignment of the data; written as a key only when it is not 32.
    pub alignment: u64,
    /// Key-values, in order.
    pub kvs: Vec<(String, Kv)>,
    /// Tensors, in order.
    pub tensors: Vec<Tensor>,
}

impl Default for Gguf {
    fn default() -> Gguf {
        Gguf {
            version: 3,
            alignment: 32,
            kvs: vec![("general.architecture".into(), Kv::Text("llama".into()))],
            tensors: Vec::new(),
        }
    }
}

impl Gguf {
    /// Adds a key-value.
    pub fn kv(mut self, key: &str, value: Kv) -> Gguf {
        self.kvs.push((key.into(), value));
        self
    }

    /// Adds a tensor whose bytes follow from `seed`.
    pub fn tensor(mut self, name: &str, ne: &[i64], ty: u32, seed: u64) -> Gguf {
        let elements: i64 = ne.iter().product();
        self.tensors.push(Tensor {
            name: name.into(),
            ne: ne.to_vec(),
            ty,
            data: weights(seed, ty, elements as u64),
        });
        self
    }

    /// Bytes of the header, padding before the data included.
    pub fn header(&self) -> Vec<u8> {
        let mut kvs = self.kvs.clone();
        if self.alignment != 32 {
            kvs.push(("general.alignment".into(), Kv::U32(self.alignment as u32)));
        }
        let mut out = b"GGUF".to_vec();
        out.extend(self.version.to_le_bytes());
        out.extend((self.tensors.len() as u64).to_le_bytes());
        out.extend((kvs.len() as u64).to_le_bytes());
        for (key, value) in &kvs {
            text(&mut out, key);
            value.write(&mut out);
        }
        let mut at = 0u64;
        for tensor in &self.tensors {
            text(&mut out, &tensor.name);
            out.extend((tensor.ne.len() as u32).to_le_bytes());
            for extent in &tensor.ne {
                out.extend(extent.to_le_bytes());
            }
            out.extend(tensor.ty.to_le_bytes());
            out.extend(at.to_le_bytes());
            at += (tensor.data.len() as u64).next_multiple_of(self.alignment);
        }
        let len = out.len().next_multiple_of(self.alignment as usize);
        out.resize(len, 0);
        out
    }

    /// The whole file.
    pub fn bytes(&self) -> Vec<u8> {
        let mut out = Vec::new();
        self.write_to(&mut out).expect("a Vec takes everything");
        out
    }

    /// Writes the file over `path`, in place.
    pub fn write(&self, path: &Path) -> io::Result<()> {
        let mut file = BufWriter::new(File::create(path)?);
        self.write_to(&mut file)?;
        file.flush()
    }

    /// Writes the file beside `path` and renames it over `path`: how a model that
    /// is in use is to be changed.
    pub fn replace(&self, path: &Path) -> io::Result<()> {
        let beside = path.with_extension("gguf.new");
        self.write(&beside)?;
        std::fs::rename(beside, path)
    }

    fn write_to(&self, out: &mut impl Write) -> io::Result<()> {
        out.write_all(&self.header())?;
        for tensor in &self.tensors {
            out.write_all(&tensor.data)?;
            let padded = tensor.data.len().next_multiple_of(self.alignment as usize);
            out.write_all(&vec![0; padded - tensor.data.len()])?;
        }
        Ok(())
    }
}

impl Kv {
    fn write(&self, out: &mut Vec<u8>) {
        let mut typed = |id: u32, bytes: &[u8]| {
            out.extend(id.to_le_bytes());
            out.extend(bytes);
        };
        let array = |id: u32, count: usize| {
            let mut bytes = id.to_le_bytes().to_vec();
            bytes.extend((count as u64).to_le_bytes());
            bytes
        };
        match self {
            Kv::U16(n) => typed(2, &n.to_le_bytes()),
            Kv::U32(n) => typed(4, &n.to_le_bytes()),
            Kv::I32(n) => typed(5, &n.to_le_bytes()),
            Kv::Text(s) => {
                let mut bytes = Vec::new();
                text(&mut bytes, s);
                typed(8, &bytes);
            }
            Kv::Texts(all) => {
                let mut bytes = array(8, all.len());
                all.iter().for_each(|s| text(&mut bytes, s));
                typed(9, &bytes);
            }
            Kv::F32s(all) => {
                let mut bytes = array(6, all.len());
                bytes.extend(all.iter().flat_map(|n| n.to_le_bytes()));
                typed(9, &bytes);
            }
            Kv::I32s(all) => {
                let mut bytes = array(5, all.len());
                bytes.extend(all.iter().flat_map(|n| n.to_le_bytes()));
                typed(9, &bytes);
            }
            Kv::Raw(id, bytes) => typed(*id, bytes),
        }
    }
}

fn text(out: &mut Vec<u8>, s: &str) {
    out.extend((s.len() as u64).to_le_bytes());
    out.extend(s.as_bytes());
}

/// `len` bytes that follow from `seed` and differ between seeds.
pub fn pattern(seed: u64, len: usize) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut out = Vec::with_capacity(len + 8);
    while out.len() < len {
        // xorshift64*, enough for bytes that no bug can guess.
        state ^= state >> 12;
        state ^= state << 25;
        state ^= state >> 27;
        out.extend(state.wrapping_mul(0x2545_f491_4f6c_dd1d).to_le_bytes());
    }
    out.truncate(len);
    out
}

/// Bytes of `elements` elements that follow from `seed`, with scales that are finite.
pub fn weights(seed: u64, ty: u32, elements: u64) -> Vec<u8> {
    let mut bytes = pattern(seed, nbytes(ty, elements) as usize);
    // Where a block has its scales ends the exponent: without its highest bit it is finite.
    let (block, ends): (usize, &[usize]) = match ty {
        F32 => (4, &[3]),
        F16 => (2, &[1]),
        Q4_0 => (18, &[1]),
        Q8_0 => (34, &[1]),
        Q4_K => (144, &[1, 3]),
        other => panic!("the test writer does not know type {other}"),
    };
    for block in bytes.chunks_exact_mut(block) {
        ends.iter().for_each(|&end| block[end] &= 0xbf);
    }
    bytes
}

/// A vocabulary of `tokens` tokens with scores and types, as tokenizers store it.
pub fn vocabulary(tokens: usize) -> [(String, Kv); 4] {
    let words = (0..tokens)
        .map(|i| {
            let word = format!("\u{2581}{i:x}");
            word[..3 + (i * 7) % (word.len() - 2)].to_owned() + &format!("{}", i % 10)
        })
        .collect();
    [
        ("tokenizer.ggml.model".into(), Kv::Text("llama".into())),
        ("tokenizer.ggml.tokens".into(), Kv::Texts(words)),
        (
            "tokenizer.ggml.scores".into(),
            Kv::F32s((0..tokens).map(|i| -(i as f32)).collect()),
        ),
        (
            "tokenizer.ggml.token_type".into(),
            Kv::I32s(vec![1; tokens]),
        ),
    ]
}
