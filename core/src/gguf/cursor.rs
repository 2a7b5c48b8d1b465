//! A reader of the integers and strings of a header, with bounds checks.

use super::error::{FormatError, ParseError};

/// Limit of llama.cpp's reader for one string.
const MAX_STRING: u64 = 1 << 30;

/// A position in the first bytes of a file, which can be longer.
pub(super) struct Cursor<'a> {
    pub bytes: &'a [u8],
    pub at: usize,
    pub file_len: u64,
}

impl<'a> Cursor<'a> {
    #[inline]
    pub fn take(&mut self, n: u64, what: impl Fn() -> String) -> Result<&'a [u8], ParseError> {
        if n > (self.bytes.len() - self.at) as u64 {
            return Err(self.out_of_bytes(n, what));
        }
        let taken = &self.bytes[self.at..self.at + n as usize];
        self.at += n as usize;
        Ok(taken)
    }

    #[cold]
    fn out_of_bytes(&self, needed: u64, what: impl Fn() -> String) -> ParseError {
        let remaining = self.file_len - self.at as u64;
        if needed > remaining {
            return ParseError::Malformed(FormatError::Truncated {
                what: what(),
                offset: self.at as u64,
                needed,
                remaining,
            });
        }
        ParseError::NeedMore(self.at as u64 + needed)
    }

    #[inline]
    pub fn u32(&mut self, what: impl Fn() -> String) -> Result<u32, ParseError> {
        let bytes = self.take(4, what)?;
        Ok(u32::from_le_bytes(bytes.try_into().expect("four bytes")))
    }

    #[inline]
    pub fn u64(&mut self, what: impl Fn() -> String) -> Result<u64, ParseError> {
        let bytes = self.take(8, what)?;
        Ok(u64::from_le_bytes(bytes.try_into().expect("eight bytes")))
    }

    #[inline]
    pub fn string(&mut self, what: impl Fn() -> String) -> Result<&'a [u8], ParseError> {
        let offset = self.at as u64;
        let length = self.u64(&what)?;
        if length > MAX_STRING {
            return Err(ParseError::Malformed(FormatError::TooLong {
                what: what(),
                offset,
                length,
                limit: MAX_STRING,
            }));
        }
        self.take(length, what)
    }

    /// Skips `count` strings. Opening a model spends most of its time in this loop, because each
    /// length is needed to find the next string. The loop does one load and one comparison per
    /// string; [`Cursor::string`] builds the messages.
    pub fn skip_strings(
        &mut self,
        count: u64,
        what: impl Fn() -> String,
    ) -> Result<(), ParseError> {
        let bytes = self.bytes;
        let mut at = self.at;
        for _ in 0..count {
            let length = bytes[at..].first_chunk().map(|n| u64::from_le_bytes(*n));
            match length {
                Some(n) if n <= MAX_STRING.min((bytes.len() - at - 8) as u64) => {
                    at += 8 + n as usize;
                }
                _ => {
                    self.at = at;
                    self.string(&what)?;
                    at = self.at;
                }
            }
        }
        self.at = at;
        Ok(())
    }
}
