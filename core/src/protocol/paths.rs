//! Paths in messages, which are text.

use std::ffi::OsString;
use std::fmt::Write;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};

/// Returns a path as text. Bytes that are no UTF-8, control characters and backslashes are escapes: `\xE9`.
pub fn path_text(path: &Path) -> String {
    let mut text = String::new();
    let escape = |text: &mut String, bytes: &[u8]| {
        for byte in bytes {
            let _ = write!(text, "\\x{byte:02X}");
        }
    };
    for chunk in path.as_os_str().as_bytes().utf8_chunks() {
        for character in chunk.valid().chars() {
            match character == '\\' || character.is_control() {
                true => escape(&mut text, character.encode_utf8(&mut [0; 4]).as_bytes()),
                false => text.push(character),
            }
        }
        escape(&mut text, chunk.invalid());
    }
    text
}

/// Returns the path that a text of [`path_text`] stands for.
pub fn path_of(text: &str) -> PathBuf {
    let escaped = |text: &[u8]| {
        let digits = text.strip_prefix(b"\\x")?.get(..2)?;
        let digits = std::str::from_utf8(digits).ok()?;
        u8::from_str_radix(digits, 16).ok()
    };
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let Some(&first) = rest.first() {
        let (byte, length) = match escaped(rest) {
            Some(byte) => (byte, 4),
            None => (first, 1),
        };
        bytes.push(byte);
        rest = &rest[length..];
    }
    PathBuf::from(OsString::from_vec(bytes))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::ffi::OsStr;

    #[test]
    fn each_path_has_a_text_without_control_characters() {
        for (bytes, expected) in [
            (
                &b"/models/caf\xc3\xa9 2.gguf"[..],
                "/models/caf\u{e9} 2.gguf",
            ),
            (b"/caf\xe9/m.gguf", "/caf\\xE9/m.gguf"),
            (b"/a\nb\x1b[31m\xc2\x9b", "/a\\x0Ab\\x1B[31m\\xC2\\x9B"),
            (b"/a\\xE9\\b", "/a\\x5CxE9\\x5Cb"),
        ] {
            let path = Path::new(OsStr::from_bytes(bytes));
            assert_eq!(path_text(path), expected);
            assert_eq!(path_of(expected), path);
        }
        assert_eq!(path_of("/a\\n\\x"), Path::new("/a\\n\\x"));
    }
}
