//! Words of a command, as text for a shell.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;

use sidecar_core::text;

/// Quotes the words of a command for a shell, in one line.
pub fn quoted_words(words: &[impl AsRef<OsStr>]) -> String {
    let words: Vec<String> = words.iter().map(|word| quoted(word.as_ref())).collect();
    words.join(" ")
}

/// Quotes a word for a shell, in one line.
pub fn quoted(word: &OsStr) -> String {
    let text = word.to_string_lossy();
    if word
        .to_str()
        .is_none_or(|text| text.contains(text::is_hidden))
    {
        let byte = |byte: &u8| match byte {
            b'\'' | b'\\' | ..b' ' | 0x7f.. => format!("\\x{byte:02x}"),
            plain => char::from(*plain).to_string(),
        };
        let bytes = word.as_bytes().iter().map(byte);
        return format!("$'{}'", bytes.collect::<String>());
    }
    let plain = |c: char| c.is_ascii_alphanumeric() || "-_./=:,+@%".contains(c);
    match !text.is_empty() && text.chars().all(plain) {
        true => text.into_owned(),
        false => format!("'{}'", text.replace('\'', "'\\''")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::Command;

    #[test]
    fn words_come_back_from_a_shell() {
        let words = [
            "plain",
            "two words",
            "it's",
            "",
            "$HOME",
            "\u{1b}[31mä'\\\n0",
        ];
        let words = words.iter().map(|word| word.as_bytes());
        for word in words.chain([&b"\xff1"[..]]) {
            let script = format!("printf %s {}", quoted(OsStr::from_bytes(word)));
            assert!(!script.contains(text::is_hidden), "{script}");
            let output = Command::new("bash").args(["-c", &script]).output();
            assert_eq!(output.expect("a shell").stdout, word);
        }
    }
}
