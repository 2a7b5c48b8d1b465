//! Describes GGUF files for tests, and writes them with `gguf-write`.
//!
//! Files are written as described, also when no reader accepts them: the tests of the parser
//! need malformed files.

use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};

use gguf_write::{HeaderWriter, write_data};

/// A metadata value.
#[derive(Debug, Clone)]
#[allow(missing_docs)]
pub enum Kv {
    U16(u16),
    U32(u32),
    I32(i32),
    F32(f32),
    Bool(bool),
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
    /// Name.
    pub name: String,
    /// Elements per dimension, innermost first.
    pub ne: Vec<i64>,
    /// Value of `enum ggml_type`.
    pub ty: u32,
    /// Data in that type.
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

/// Value of `enum ggml_type` for `mxfp4`: 17 bytes for 32 elements.
pub const MXFP4: u32 = 39;

/// Returns the bytes of `elements` elements in one of these types.
pub fn nbytes(ty: u32, elements: u64) -> u64 {
    match ty {
        F32 => elements * 4,
        F16 => elements * 2,
        Q4_0 => elements / 32 * 18,
        Q8_0 => elements / 32 * 34,
        Q4_K => elements / 256 * 144,
        MXFP4 => elements / 32 * 17,
        other => panic!("the test writer does not know type {other}"),
    }
}

/// A file to write.
#[derive(Debug, Clone)]
pub struct Gguf {
    /// Version field.
    pub version: u32,
    /// Alignment of the data. The key is written only for a value other than 32.
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

    /// Adds a tensor with pseudo-random data of this seed.
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

    /// Adds a tensor of zeros, which takes no memory until it is written.
    pub fn zeros(mut self, name: &str, ne: &[i64], ty: u32) -> Gguf {
        let elements: i64 = ne.iter().product();
        self.tensors.push(Tensor {
            name: name.into(),
            ne: ne.to_vec(),
            ty,
            data: vec![0; nbytes(ty, elements as u64) as usize],
        });
        self
    }

    /// Returns the bytes of the header, with the padding before the data.
    pub fn header(&self) -> Vec<u8> {
        let mut writer = HeaderWriter::new(self.alignment as u32);
        writer.version(self.version);
        for (key, value) in &self.kvs {
            match value {
                Kv::U16(n) => writer.value(key, n),
                Kv::U32(n) => writer.value(key, n),
                Kv::I32(n) => writer.value(key, n),
                Kv::F32(x) => writer.value(key, x),
                Kv::Bool(on) => writer.value(key, on),
                Kv::Text(text) => writer.value(key, text),
                Kv::Texts(all) => writer.array(key, all),
                Kv::F32s(all) => writer.array(key, all),
                Kv::I32s(all) => writer.array(key, all),
                Kv::Raw(id, bytes) => writer.raw(key, *id, bytes),
            }
        }
        for tensor in &self.tensors {
            let ne: Vec<u64> = tensor.ne.iter().map(|&extent| extent as u64).collect();
            let (name, nbytes) = (tensor.name.as_bytes(), tensor.data.len() as u64);
            let written = writer.tensor(name, &ne, tensor.ty, nbytes);
            written.expect("data in memory fits a file");
        }
        writer.finish()
    }

    /// Returns the bytes of the whole file.
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

    /// Writes a file with a hole for all data.
    pub fn write_sparse(&self, path: &Path) -> io::Result<()> {
        let header = self.header();
        let data = self.tensors.iter().map(|tensor| tensor.data.len() as u64);
        let data: u64 = data.map(|len| len.next_multiple_of(self.alignment)).sum();
        let mut file = File::create(path)?;
        file.write_all(&header)?;
        file.set_len(header.len() as u64 + data)
    }

    /// Writes a new file next to `path` and renames it to `path`, as for a model in use.
    pub fn replace(&self, path: &Path) -> io::Result<()> {
        let beside = path.with_extension("gguf.new");
        self.write(&beside)?;
        std::fs::rename(beside, path)
    }

    fn write_to(&self, out: &mut impl Write) -> io::Result<()> {
        out.write_all(&self.header())?;
        for tensor in &self.tensors {
            let len = tensor.data.len() as u64;
            write_data(out, tensor.data.as_slice(), len, self.alignment)?;
        }
        Ok(())
    }
}

/// Writes files as the shards of one model, `m`, with the keys that gguf-split writes.
pub fn write_shards(folder: &Path, files: Vec<Gguf>) -> Vec<PathBuf> {
    let count = files.len();
    let total: usize = files.iter().map(|file| file.tensors.len()).sum();
    let keyed = files.into_iter().enumerate().map(|(no, file)| {
        let path = folder.join(format!("m-{:05}-of-{count:05}.gguf", no + 1));
        file.kv("split.no", Kv::U16(no as u16))
            .kv("split.count", Kv::U16(count as u16))
            .kv("split.tensors.count", Kv::I32(total as i32))
            .write(&path)
            .expect("free space");
        path
    });
    keyed.collect()
}

/// Returns `len` pseudo-random bytes of this seed.
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

/// Returns pseudo-random data of this seed for `elements` elements, with finite scales.
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

/// Returns the keys of a vocabulary of `tokens` tokens with scores and types.
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
