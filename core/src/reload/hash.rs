//! Hashes the bytes of tensors with the 128-bit XXH3.
//!
//! Two different tensors have the same hash with a probability of about 2^-128. Hashing is as
//! fast as reading memory.

use std::io;

use xxhash_rust::xxh3::{Xxh3, xxh3_128};

use crate::gguf::Source;

/// Hash of the bytes of a tensor.
pub type Hash = u128;

/// Bytes read at a time: fits the second-level cache.
const CHUNK: usize = 256 << 10;

/// Hashes bytes in memory.
pub fn of_bytes(bytes: &[u8]) -> Hash {
    xxh3_128(bytes)
}

/// Hashes `len` bytes of a file from `offset` on.
pub fn of_source(source: &Source, offset: u64, len: u64) -> io::Result<Hash> {
    of_reads(len, |at, bytes| source.read_at(bytes, offset + at))
}

/// Hashes `len` bytes, which `read` copies into a buffer piece by piece.
pub fn of_reads<E>(len: u64, read: impl Fn(u64, &mut [u8]) -> Result<(), E>) -> Result<Hash, E> {
    let mut hasher = Xxh3::new();
    let mut buffer = vec![0; CHUNK.min(len as usize)];
    let mut at = 0;
    while at < len {
        let n = (len - at).min(buffer.len() as u64) as usize;
        read(at, &mut buffer[..n])?;
        hasher.update(&buffer[..n]);
        at += n as u64;
    }
    Ok(hasher.digest128())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_hash_like_the_whole() {
        let bytes: Vec<u8> = (0..CHUNK * 2 + 77).map(|i| (i * 31) as u8).collect();
        let pieces = of_reads(bytes.len() as u64, |at, buffer| {
            buffer.copy_from_slice(&bytes[at as usize..at as usize + buffer.len()]);
            Ok::<_, ()>(())
        });
        assert_eq!(pieces, Ok(of_bytes(&bytes)));
    }
}
