//! The prose linter: words and phrases that documentation, comments and messages avoid.
//!
//! The word lists are the styles of vale in `styles/llama-sidecar`; this module reads the same
//! files, so the check needs no other program. Where vale is installed, it runs too.

use std::fmt;
use std::path::Path;
use std::sync::LazyLock;

use anyhow::{Context, Result, bail, ensure};
use regex::{Regex, RegexBuilder};

use crate::run::{command, exists, output, root, run};

/// Folders whose sources are checked. Markdown files are checked everywhere.
const FOLDERS: &[&str] = &[
    "benches",
    "c_examples",
    "cli",
    "core",
    "fuzz",
    "ggml-quantize",
    "gguf-write",
    "hosts",
    "preload",
    "src",
    "testkit",
    "tests",
    "xtask",
];
/// Headers of released versions, which never change, and files generated from `src/ffi`.
const EXCLUDED: &[&str] = &["tests/abi/", "include/"];
/// Stands for a character of code: neither a space nor part of a word.
const CODE: char = '\u{1}';

/// A pattern that is not to be used.
struct Rule {
    pattern: Regex,
    suggestion: String,
    /// The text of a finding, with `%s` for the suggestion and the match.
    message: String,
}

/// The rules, and the matches that are correct in their context.
#[derive(Default)]
struct Style {
    rules: Vec<Rule>,
    exceptions: Vec<String>,
}

/// A use of a word of the lists.
#[derive(Debug, PartialEq)]
struct Finding {
    line: usize,
    word: String,
    message: String,
}

/// The kinds of text that are checked.
#[derive(Clone, Copy, PartialEq)]
enum Language {
    Markdown,
    Rust,
    C,
}

/// Checks the Markdown files and the folders of [`FOLDERS`].
pub fn check() -> Result<()> {
    let files = output(command("git", &root()).args(["ls-files", "-co", "--exclude-standard"]))?;
    let is_checked = |file: &&str| {
        let covered = file.ends_with(".md") || FOLDERS.iter().any(|folder| is_in(file, folder));
        covered && !EXCLUDED.iter().any(|excluded| file.starts_with(excluded))
    };
    let files: Vec<&str> = files.lines().filter(is_checked).collect();
    let styles = styles(&root().join("styles/llama-sidecar"))?;
    let mut count = 0;
    for file in &files {
        let Some(language) = language(file) else {
            continue;
        };
        let text =
            std::fs::read_to_string(root().join(file)).with_context(|| (*file).to_owned())?;
        for finding in findings(&text, language, &styles) {
            println!("{file}:{finding}");
            count += 1;
        }
    }
    ensure!(
        count == 0,
        "{count} words of styles/llama-sidecar: use the suggestions, or make the pattern more precise"
    );
    if exists("vale") {
        let markdown = files.iter().filter(|file| file.ends_with(".md"));
        run(command("vale", &root()).args(markdown))?;
    }
    Ok(())
}

fn is_in(file: &str, folder: &str) -> bool {
    file.strip_prefix(folder)
        .is_some_and(|rest| rest.starts_with('/'))
}

fn language(file: &str) -> Option<Language> {
    match Path::new(file).extension()?.to_str()? {
        "md" => Some(Language::Markdown),
        "rs" => Some(Language::Rust),
        "c" | "h" | "cpp" => Some(Language::C),
        _ => None,
    }
}

/// Reads all styles of a folder.
fn styles(folder: &Path) -> Result<Vec<Style>> {
    let mut paths: Vec<_> = std::fs::read_dir(folder)?
        .map(|entry| Ok(entry?.path()))
        .collect::<Result<_>>()?;
    paths.sort();
    paths
        .iter()
        .map(|path| {
            let text = std::fs::read_to_string(path)?;
            style(&text).with_context(|| path.display().to_string())
        })
        .collect()
}

/// Reads a style of vale: a `message`, entries `'pattern': suggestion` below `swap`, and a list
/// below `exceptions`. Other keys are vale's own.
fn style(text: &str) -> Result<Style> {
    let mut style = Style::default();
    let (mut section, mut message) = ("", "");
    for line in text.lines().filter(|line| !line.starts_with('#')) {
        match line.strip_prefix("  ") {
            None => {
                let (key, value) = line.split_once(':').context("expected KEY: VALUE")?;
                section = key;
                if key == "message" {
                    message = value.trim().trim_matches('"');
                }
            }
            Some(entry) if section == "swap" => {
                let (pattern, suggestion) = entry
                    .strip_prefix('\'')
                    .and_then(|rest| rest.split_once("': "))
                    .with_context(|| format!("expected 'PATTERN': SUGGESTION, found {entry}"))?;
                style.rules.push(Rule {
                    pattern: word(pattern)?,
                    suggestion: suggestion.replace('|', "' or '"),
                    message: message.to_owned(),
                });
            }
            Some(entry) if section == "exceptions" => {
                let exception = entry.strip_prefix("- ").context("expected - EXCEPTION")?;
                style.exceptions.push(exception.to_lowercase());
            }
            Some(entry) => bail!("'{entry}' belongs to neither swap nor exceptions"),
        }
    }
    Ok(style)
}

/// Compiles a pattern as vale does: whole words, in any case. Its spaces match line ends, too.
fn word(pattern: &str) -> Result<Regex> {
    let spaces = pattern.replace(' ', r"\s+");
    let whole = format!(r"\b(?:{spaces})\b");
    Ok(RegexBuilder::new(&whole).case_insensitive(true).build()?)
}

/// Finds the words of the styles in the prose of a file.
fn findings(text: &str, language: Language, styles: &[Style]) -> Vec<Finding> {
    let prose = prose(text, language);
    let mut found = Vec::new();
    for style in styles {
        for rule in &style.rules {
            for word in rule.pattern.find_iter(&prose) {
                let line = prose[..word.start()].matches('\n').count() + 1;
                let words: Vec<&str> = word.as_str().split_whitespace().collect();
                let word = words.join(" ");
                if style.exceptions.contains(&word.to_lowercase()) {
                    continue;
                }
                let message = rule.message.replacen("%s", &rule.suggestion, 1);
                let message = message.replacen("%s", &word, 1);
                found.push(Finding {
                    line,
                    word,
                    message,
                });
            }
        }
    }
    found.sort_by_key(|finding| finding.line);
    found
}

/// Replaces code by [`CODE`]. Line ends stay, so lines keep their numbers.
fn prose(text: &str, language: Language) -> String {
    match language {
        Language::Markdown => {
            // A span may continue in the next line of its paragraph.
            static SPAN: LazyLock<Regex> = LazyLock::new(|| pattern("`[^`\n]*(?:\n[^`\n]+)*`"));
            without(&SPAN, &without_links(&without_fences(text)))
        }
        Language::Rust | Language::C => {
            static SPAN: LazyLock<Regex> = LazyLock::new(|| pattern("`[^`\n]*`"));
            without(&SPAN, &comments_and_strings(text, language))
        }
    }
}

fn hidden(code: &str) -> String {
    let hide = |c: char| if c.is_whitespace() { c } else { CODE };
    code.chars().map(hide).collect()
}

/// Hides fenced blocks of code.
fn without_fences(text: &str) -> String {
    let mut fenced = false;
    let lines = text.split_inclusive('\n').map(|line| {
        let fence = line.trim_start().starts_with("```");
        let hide = fenced || fence;
        fenced ^= fence;
        if hide { hidden(line) } else { line.to_owned() }
    });
    lines.collect()
}

/// Hides the targets of links.
fn without_links(text: &str) -> String {
    static TARGET: LazyLock<Regex> = LazyLock::new(|| pattern(r"\]\([^)\s]*\)"));
    without(&TARGET, text)
}

/// Hides all but comments and string literals, and the markers of comments.
fn comments_and_strings(text: &str, language: Language) -> String {
    let mut out = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(c) = rest.chars().next() {
        let (token, is_prose) = token(rest, c, language);
        let (now, next) = rest.split_at(token);
        let is_comment = now.starts_with("//") || now.starts_with("/*");
        match (is_prose, is_comment) {
            (true, true) => out.push_str(&without_markers(now)),
            (true, false) => out.push_str(&without_placeholders(now)),
            (false, _) => out.push_str(&hidden(now)),
        }
        rest = next;
    }
    out
}

/// Returns the length of the token at the start of `rest`, whose first character is `c`, and
/// whether it is a comment or a string literal.
fn token(rest: &str, c: char, language: Language) -> (usize, bool) {
    let until = |end: &str, from: usize| {
        let found = rest[from..].find(end);
        found.map_or(rest.len(), |at| from + at + end.len())
    };
    if rest.starts_with("//") {
        return (rest.find('\n').unwrap_or(rest.len()), true);
    }
    if rest.starts_with("/*") {
        return (until("*/", 2), true);
    }
    if language == Language::Rust && c == 'r' {
        let hashes = rest[1..].bytes().take_while(|byte| *byte == b'#').count();
        if rest[1 + hashes..].starts_with('"') {
            let end = format!("\"{}", "#".repeat(hashes));
            return (until(&end, 2 + hashes), true);
        }
    }
    if c == '"' {
        return (1 + quoted(&rest[1..], '"'), true);
    }
    if c == '\'' {
        // A lifetime has no closing quote behind one character.
        let mut chars = rest[1..].chars();
        let is_literal = match chars.next() {
            Some('\\') => true,
            Some(_) => chars.next() == Some('\''),
            None => false,
        };
        if is_literal || language == Language::C {
            return (1 + quoted(&rest[1..], '\''), false);
        }
    }
    if c.is_alphanumeric() || c == '_' {
        // The prefix of a string literal belongs to the literal.
        let end = rest.find(|c: char| !(c.is_alphanumeric() || c == '_'));
        let end = end.unwrap_or(rest.len());
        let is_raw = matches!(&rest[..end], "br" | "cr") && rest[end..].starts_with(['"', '#']);
        return (if is_raw { end - 1 } else { end }, false);
    }
    (c.len_utf8(), false)
}

/// Returns the length of a literal behind its opening quote, with the closing one.
fn quoted(rest: &str, quote: char) -> usize {
    let mut escaped = false;
    for (at, c) in rest.char_indices() {
        match c {
            _ if escaped => escaped = false,
            '\\' => escaped = true,
            _ if c == quote => return at + c.len_utf8(),
            _ => {}
        }
    }
    rest.len()
}

/// Hides quotes, line ends and the placeholders of format strings.
fn without_placeholders(literal: &str) -> String {
    static PLACEHOLDER: LazyLock<Regex> = LazyLock::new(|| pattern(r#""|\\n|\{[^{}\s]*\}"#));
    without(&PLACEHOLDER, literal)
}

fn pattern(text: &str) -> Regex {
    Regex::new(text).expect("a valid pattern")
}

/// Hides the matches of a pattern.
fn without(pattern: &Regex, text: &str) -> String {
    pattern
        .replace_all(text, |found: &regex::Captures<'_>| hidden(&found[0]))
        .into_owned()
}

/// Replaces slashes and asterisks at the beginning of lines by spaces, so that a phrase is found
/// across lines.
fn without_markers(comment: &str) -> String {
    let lines = comment.split_inclusive('\n').map(|line| {
        let text = line.trim_start_matches([' ', '\t', '/', '*', '!']);
        let markers = line.len() - text.len();
        format!("{}{text}", " ".repeat(markers))
    });
    lines.collect()
}

impl fmt::Display for Finding {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "{}: {}: {}", self.line, self.word, self.message)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const STYLE: &str = "\
# A comment.
extends: substitution
message: \"Metaphor: write '%s' instead of '%s'.\"
swap:
  '(?:head)?widgets?': memory|space
  'spins? fast': poll
  'greens?(?: ms)?': this library
exceptions:
  - headwidget
  - green ms
";

    fn words(text: &str, language: Language) -> Vec<(usize, String)> {
        let found = findings(text, language, &[style(STYLE).unwrap()]);
        found
            .into_iter()
            .map(|finding| (finding.line, finding.word))
            .collect()
    }

    fn pairs(expected: &[(usize, &str)]) -> Vec<(usize, String)> {
        expected
            .iter()
            .map(|(line, word)| (*line, (*word).to_owned()))
            .collect()
    }

    #[test]
    fn a_finding_has_the_suggestion_and_the_word() {
        let found = findings("No widget.", Language::Markdown, &[style(STYLE).unwrap()]);
        assert_eq!(
            found[0].to_string(),
            "1: widget: Metaphor: write 'memory' or 'space' instead of 'widget'."
        );
    }

    #[test]
    fn markdown_is_read_without_code_and_link_targets() {
        let text = "A `widget` in [a page](widget.md).\n```\nwidget\n```\nTwo\nWidgets, no_widget, headwidget.\nA `widget\nwidget` and a widget.\n";
        let expected = [(6, "Widgets"), (8, "widget")];
        assert_eq!(words(text, Language::Markdown), pairs(&expected));
    }

    #[test]
    fn rust_is_read_in_comments_and_literals() {
        let text = "//! A widget.\nfn widget<'a>(widget: &'a str) {\n    let c = '\"';\n    f(\"{widget:4} no \\\"widget\\\"\"); // spins\n    // fast for `widget`\n    g(r#\"a \"widget\"#, b\"widget\", 'r');\n    /* widget */\n}\n";
        let expected = [
            (1, "widget"),
            (4, "widget"),
            (4, "spins fast"),
            (6, "widget"),
            (6, "widget"),
            (7, "widget"),
        ];
        assert_eq!(words(text, Language::Rust), pairs(&expected));
    }

    #[test]
    fn code_between_words_separates_them() {
        let text = "f(\"spins\", \"fast\"); // spins\nx(); // fast\n";
        assert_eq!(words(text, Language::Rust), []);
    }

    #[test]
    fn c_is_read_in_comments_and_literals() {
        let text = "/*\n * spins\n * fast\n */\nint widget = 'r'; // green ms, green\nputs(\"widget\\n\");\n";
        let expected = [(2, "spins fast"), (5, "green"), (6, "widget")];
        assert_eq!(words(text, Language::C), pairs(&expected));
    }

    #[test]
    fn an_entry_that_is_not_understood_is_an_error() {
        assert!(style("swap:\n  widget: memory\n").is_err());
        assert!(style("other:\n  'widget': memory\n").is_err());
    }

    #[test]
    fn the_styles_of_the_project_are_understood() {
        let styles = styles(&root().join("styles/llama-sidecar")).unwrap();
        assert_eq!(styles.len(), 4);
        for style in styles {
            assert!(style.rules.len() > 5);
            let messages = style
                .rules
                .iter()
                .map(|rule| rule.message.matches("%s").count());
            assert!(messages.eq(std::iter::repeat_n(2, style.rules.len())));
        }
    }
}
