//! Regular expressions for whole names of tensors, without tables of Unicode: the loader would
//! relocate them in every program that the drop-in is loaded into.

use std::ffi::CStr;

use regex_lite::{Regex, RegexBuilder};

/// The most memory of a compiled expression, in bytes: enough for the names of thousands of
/// tensors.
const SIZE_LIMIT: usize = 16 << 20;

/// A regular expression that matches whole names of tensors.
#[derive(Debug, Clone)]
pub struct NamePattern(Regex);

impl NamePattern {
    /// Parses a regular expression. The error names it and states what is wrong.
    pub fn parse(text: &str) -> Result<NamePattern, String> {
        // An expression that is valid alone ends no group around it. A comment at its end would
        // hide what follows on the same line.
        let whole = compile(text).and_then(|_| {
            compile(&format!(r"\A(?:{text})\z"))
                .or_else(|_| compile(&format!("\\A(?:{text}\n)\\z")))
        });
        whole.map(NamePattern).map_err(|error| {
            format!("'{text}' is not a regular expression for names of tensors: {error}")
        })
    }

    /// Returns whether the whole name matches.
    pub fn matches(&self, name: &CStr) -> bool {
        self.0.is_match(&name.to_string_lossy())
    }

    /// Returns the message for an expression that matches none of these names.
    pub fn no_match<'a>(text: &str, names: impl Iterator<Item = &'a CStr>) -> String {
        let names: Vec<_> = names.collect();
        let is_part = |name: &&CStr| name.to_string_lossy().contains(text);
        let part = match names.iter().any(is_part) {
            true => format!("; for a part of a name, write '.*{text}.*'"),
            false => String::new(),
        };
        let some = names.iter().take(3).map(|name| name.to_string_lossy());
        format!(
            "no tensor's whole name matches '{text}'{part}: names have the form {}; run 'llama-sidecar inspect MODEL' to list them",
            some.collect::<Vec<_>>().join(", ")
        )
    }
}

fn compile(text: &str) -> Result<Regex, regex_lite::Error> {
    RegexBuilder::new(text).size_limit(SIZE_LIMIT).build()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn whole_names_match() {
        let pattern = NamePattern::parse("blk|blk.1").expect("a regular expression");
        assert!(pattern.matches(c"blk") && pattern.matches(c"blk.1"));
        assert!(!pattern.matches(c"blk.10") && !pattern.matches(c"xblk"));
        let error = NamePattern::parse("a(").expect_err("not closed");
        assert!(error.contains("'a('"), "{error}");
    }

    #[test]
    fn the_message_has_the_expression_for_a_part_of_a_name() {
        let message = |text| NamePattern::no_match(text, [c"blk.1.a", c"blk.2.a"].into_iter());
        assert!(message("1.a").contains("write '.*1.a.*': names have the form blk.1.a, blk.2.a;"));
        assert!(!message("3.a").contains("write"));
    }

    #[test]
    fn no_expression_matches_a_part_of_a_name() {
        for text in [
            "a)|(?:b",
            "a)|(b",
            ")(",
            "a\\",
            "(?x)a (?-x:#",
            "[a",
            "(?x:a #c)",
        ] {
            let error = NamePattern::parse(text).expect_err(text);
            assert!(error.contains(text), "{error}");
        }
        for text in [
            "(?x)a #c",
            "(?x)a #)|b",
            "(?x) a # (\n",
            "(?m)^a$",
            "a|(?x)a#",
            "(?s)a",
        ] {
            let pattern = NamePattern::parse(text).expect(text);
            assert!(pattern.matches(c"a"), "{text}");
            for other in [c"ab", c"ba", c"a\n", c"\na", c"a\na", c"b"] {
                assert!(!pattern.matches(other), "{text}: {other:?}");
            }
        }
    }

    #[test]
    fn large_expressions_are_refused() {
        let error = NamePattern::parse("(a{1000}){1000}").expect_err("too large");
        assert!(error.contains("size limit"), "{error}");
        let name = |layer| format!(r"blk\.{layer}\.ffn_gate_up_exps_of_a_long_name\.weight");
        let names: Vec<String> = (0..5000).map(name).collect();
        assert!(NamePattern::parse(&names.join("|")).is_ok());
    }
}
