//! Base logits, as llama-perplexity writes them for a text.

use std::io::Read;
use std::path::Path;

use anyhow::{Context, Result, ensure};
use sidecar_core::files;
use sidecar_core::gguf::GgufFile;
use sidecar_core::text;

use crate::space::Need;

/// The bytes before the tokens: a name of 8 bytes, and the numbers of [`Base`].
const START: usize = 20;
/// An error.
pub const TOO_SHORT: &str = "the text is too short: llama-perplexity needs the tokens of two chunks; pass a longer text, or a smaller --ctx";
/// llama-perplexity computes no statistics of fewer evaluated tokens.
const FEWEST_TOKENS: u64 = 100;
/// With fewer tokens, the errors are large.
const ENOUGH_TOKENS: u64 = 100 * 512;

/// The sizes of base logits, from their first bytes.
#[derive(Debug, Clone, Copy)]
pub struct Base {
    /// Tokens of a chunk. The second half of them is evaluated.
    pub context: u32,
    vocabulary: u32,
    pub chunks: u32,
}

impl Base {
    /// Reads the sizes.
    pub fn read(path: &Path) -> Result<Base> {
        let mut start = [0; START];
        let read = files::open(path).and_then(|mut file| file.read_exact(&mut start));
        read.with_context(|| format!("cannot read {}", text::path(path)))?;
        let number = |at: usize| {
            u32::from_le_bytes([start[at], start[at + 1], start[at + 2], start[at + 3]])
        };
        let base = Base {
            context: number(8),
            vocabulary: number(12),
            chunks: number(16),
        };
        ensure!(
            start.starts_with(b"_logits_") && (16..1 << 20).contains(&base.context),
            "{} has no base logits: pass a file that 'llama-perplexity --kl-divergence-base' wrote",
            text::path(path)
        );
        Ok(base)
    }

    /// Reads the sizes of a file that llama-perplexity just wrote: it ends without an error where the text is too short for
    /// a chunk, or the disk is full.
    pub fn read_complete(path: &Path) -> Result<Base> {
        let explain = || format!("cannot read {}", text::path(path));
        let found = path.metadata().with_context(explain)?.len();
        ensure!(found >= START as u64, "{TOO_SHORT}");
        let base = Base::read(path)?;
        let expected = base.bytes();
        ensure!(
            base.chunks > 0 && found == expected,
            "expected {expected} bytes of {} chunks, found {found}: free some space, or pass a longer text",
            base.chunks
        );
        base.check()?;
        Ok(base)
    }

    fn evaluated(&self) -> u64 {
        evaluated(self.context) * u64::from(self.chunks)
    }

    fn bytes(&self) -> u64 {
        bytes(self.context, self.vocabulary.into(), self.chunks)
    }

    fn check(&self) -> Result<()> {
        ensure!(
            self.evaluated() >= FEWEST_TOKENS,
            "{self} evaluate {} tokens, and llama-perplexity has statistics of at least {FEWEST_TOKENS}: pass more --chunks, a longer text or a larger --ctx",
            self.evaluated()
        );
        Ok(())
    }

    /// Returns a warning where the tokens are few.
    pub fn note(&self) -> Option<String> {
        (u64::from(self.context) * u64::from(self.chunks) < ENOUGH_TOKENS).then(|| {
            format!(
                "{self} are few: use about 100 chunks of 512 tokens before you rely on the choice"
            )
        })
    }
}

impl std::fmt::Display for Base {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let chunks = if self.chunks == 1 { "chunk" } else { "chunks" };
        write!(out, "{} {chunks} of {} tokens", self.chunks, self.context)
    }
}

/// Returns the fewest chunks that have statistics.
pub fn fewest_chunks(context: u32) -> u32 {
    FEWEST_TOKENS.div_ceil(evaluated(context).max(1)) as u32
}

/// The evaluated tokens of a chunk.
fn evaluated(context: u32) -> u64 {
    let context = u64::from(context);
    context.saturating_sub(1).saturating_sub(context / 2)
}

/// The size of a file: after its start the tokens, then for each evaluated one a row of 16-bit numbers and two scales.
fn bytes(context: u32, vocabulary: u64, chunks: u32) -> u64 {
    let row = 2 * (2 * vocabulary.div_ceil(2) + 4);
    let chunk = (4 * u64::from(context)).saturating_add(evaluated(context).saturating_mul(row));
    chunk
        .saturating_mul(chunks.into())
        .saturating_add(START as u64)
}

/// Fails if a number of chunks is too small for statistics, or if their base logits do not fit on the disk.
pub fn check(path: &Path, context: u32, chunks: u32, vocabulary: Option<u64>) -> Result<()> {
    let base = Base {
        context,
        vocabulary: 0,
        chunks,
    };
    base.check()?;
    let bytes = vocabulary.map_or(0, |vocabulary| bytes(context, vocabulary, chunks));
    for need in Need::of([(path, bytes)])? {
        need.check().context("the base logits do not fit: pass fewer --chunks, or name a folder on a larger disk with --work")?;
    }
    Ok(())
}

/// Returns the number of tokens that a model knows.
pub fn vocabulary(files: &[GgufFile]) -> Option<u64> {
    let tokens = files.first()?.header.key(b"tokenizer.ggml.tokens")?;
    Some(tokens.count)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_those_that_llama_perplexity_writes() {
        // 3 chunks of 128 tokens of a model with 49152 tokens.
        assert_eq!(
            bytes(128, 49152, 3),
            20 + 3 * (4 * 128 + 63 * 2 * (49152 + 4))
        );
        let path = Path::new("/tmp/base");
        assert!(check(path, 128, 1, None).is_err());
        assert!(check(path, 128, 2, None).is_ok());
        let full = check(path, 512, u32::MAX, Some(1 << 40)).expect_err("a disk is not so large");
        assert!(format!("{full:#}").contains("--work"), "{full:#}");
    }

    #[test]
    fn few_tokens_are_named() {
        let base = |context, chunks| Base {
            context,
            vocabulary: 1,
            chunks,
        };
        assert!(base(512, 99).note().is_some());
        assert!(base(512, 100).note().is_none());
        assert!(
            base(128, 1)
                .check()
                .is_err_and(|error| error.to_string().contains("1 chunk of"))
        );
    }
}
