//! Text from outside, as it is written to each kind of output.
//!
//! Names of tensors and models, metadata, paths, and what programs and sockets send can have any characters. Some of them
//! command a terminal, begin a line, end a field, or are a formula of a spreadsheet. Each kind of output has one function that
//! makes them plain text. All escapes are those of JSON, so that JSON is still the same JSON.

use std::borrow::Cow;
use std::ffi::OsString;
use std::fmt::Write;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};

use serde_json::Value;

/// Whether a character commands a terminal, changes the order of others, or cannot be seen.
pub fn is_hidden(character: char) -> bool {
    character.is_control()
        || matches!(
            character,
            '\u{61c}'
                | '\u{200b}'
                | '\u{200e}'..='\u{200f}'
                | '\u{2028}'..='\u{202e}'
                | '\u{2060}'..='\u{206f}'
                | '\u{feff}'
                | '\u{fff9}'..='\u{fffb}'
                | '\u{e0000}'..='\u{e007f}'
        )
}

fn escaped<'a>(text: &'a str, permitted: &[char]) -> Cow<'a, str> {
    let is_escaped = |character: char| is_hidden(character) && !permitted.contains(&character);
    if !text.contains(is_escaped) {
        return Cow::Borrowed(text);
    }
    let mut plain = String::with_capacity(text.len() + 16);
    for character in text.chars() {
        match character {
            other if !is_escaped(other) => plain.push(other),
            '\n' => plain += "\\n",
            '\r' => plain += "\\r",
            '\t' => plain += "\\t",
            other => {
                for unit in other.encode_utf16(&mut [0; 2]) {
                    let _ = write!(plain, "\\u{unit:04x}");
                }
            }
        }
    }
    Cow::Owned(plain)
}

/// Returns lines for a terminal, or JSON of several lines: all but newlines and tabs is escaped.
pub fn lines(text: &str) -> Cow<'_, str> {
    escaped(text, &['\n', '\t'])
}

/// Returns text for a part of a line: of a terminal, of a log, or of JSON.
pub fn line(text: &str) -> Cow<'_, str> {
    escaped(text, &[])
}

/// Returns a path for a part of a line. Bytes that are no UTF-8, hidden characters and backslashes are escapes: `\xE9`.
pub fn path(path: &Path) -> String {
    let mut text = String::new();
    let escape = |text: &mut String, bytes: &[u8]| {
        for byte in bytes {
            let _ = write!(text, "\\x{byte:02X}");
        }
    };
    for chunk in path.as_os_str().as_bytes().utf8_chunks() {
        for character in chunk.valid().chars() {
            match character == '\\' || is_hidden(character) {
                true => escape(&mut text, character.encode_utf8(&mut [0; 4]).as_bytes()),
                false => text.push(character),
            }
        }
        escape(&mut text, chunk.invalid());
    }
    text
}

/// Returns the path that a text of [`path`] stands for.
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

/// Returns text as a field of CSV (RFC 4180). What a spreadsheet would read as a formula begins with an apostrophe.
pub fn csv(text: &str) -> String {
    let is_formula = text.starts_with(['=', '+', '-', '@', '\t', '\r']);
    let text = format!("{}{}", if is_formula { "'" } else { "" }, line(text));
    match text.contains([',', '"']) {
        true => format!("\"{}\"", text.replace('"', "\"\"")),
        false => text,
    }
}

/// Returns text for HTML and SVG, between tags or in an attribute.
pub fn html(text: &str) -> String {
    let mut plain = String::with_capacity(text.len());
    for character in lines(text).chars() {
        match character {
            '<' => plain += "&lt;",
            '>' => plain += "&gt;",
            '&' => plain += "&amp;",
            '"' => plain += "&quot;",
            '\'' => plain += "&#39;",
            other => plain.push(other),
        }
    }
    plain
}

/// Returns text for the value of a label of Prometheus, between quotes.
pub fn label(text: &str) -> String {
    line(text).replace('\\', "\\\\").replace('"', "\\\"")
}

/// Makes each text in JSON a part of a line.
pub fn one_line(value: &mut Value) {
    match value {
        Value::String(text) => *text = line(text).into_owned(),
        Value::Array(list) => list.iter_mut().for_each(one_line),
        Value::Object(map) => {
            let entries = std::mem::take(map).into_iter();
            *map = entries
                .map(|(key, mut value)| {
                    one_line(&mut value);
                    (line(&key).into_owned(), value)
                })
                .collect();
        }
        _ => {}
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::ffi::OsStr;

    const HOSTILE: &str = "\u{1b}]0;a\u{7}\u{9b}\u{202e}\u{e0041}\n\t\r<'\"\\&ä";

    #[test]
    fn each_output_has_plain_text() {
        let start = "\\u001b]0;a\\u0007\\u009b\\u202e\\udb40\\udc41";
        let expected = |end: &str| format!("{start}{end}");
        assert_eq!(lines(HOSTILE), expected("\n\t\\r<'\"\\&ä"));
        assert_eq!(line(HOSTILE), expected("\\n\\t\\r<'\"\\&ä"));
        assert_eq!(html(HOSTILE), expected("\n\t\\r&lt;&#39;&quot;\\&amp;ä"));
        assert_eq!(label("a\"b\\c\n\u{1b}"), "a\\\"b\\\\c\\\\n\\\\u001b");
    }

    #[test]
    fn escapes_leave_json_the_same() {
        let value = Value::String(HOSTILE.into());
        let text = line(&value.to_string()).into_owned();
        assert!(!text.contains(is_hidden), "{text}");
        assert_eq!(serde_json::from_str::<Value>(&text).expect("JSON"), value);
    }

    #[test]
    fn a_field_of_csv_is_one_field_and_no_formula() {
        for formula in ["=1", "+1", "-1", "@a", "\ta", "\ra"] {
            assert!(csv(formula).starts_with('\''), "{formula:?}");
        }
        assert_eq!(csv("a,\"b\"\n"), "\"a,\"\"b\"\"\\n\"");
        assert_eq!(csv("blk.0.a"), "blk.0.a");
    }

    #[test]
    fn each_path_has_a_text_that_is_a_part_of_a_line() {
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
            assert_eq!(super::path(path), expected);
            assert_eq!(path_of(expected), path);
        }
        assert_eq!(path_of("/a\\n\\x"), Path::new("/a\\n\\x"));
    }

    #[test]
    fn names_in_json_are_parts_of_a_line() {
        let mut value = serde_json::json!({"a\n": ["b\u{7}", 1, {"c": "d\r"}]});
        one_line(&mut value);
        let expected = serde_json::json!({"a\\n": ["b\\u0007", 1, {"c": "d\\r"}]});
        assert_eq!(value, expected);
    }
}
