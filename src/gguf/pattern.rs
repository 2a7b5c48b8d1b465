//! Regular expressions for whole names of tensors.

use std::ffi::CStr;

use regex::Regex;

/// A regular expression that matches whole names of tensors.
#[derive(Debug, Clone)]
pub struct NamePattern(Regex);

impl NamePattern {
    /// Parses a regular expression. The error names it and states what is wrong.
    pub fn parse(text: &str) -> Result<NamePattern, String> {
        let whole = Regex::new(&format!("^(?:{text})$"));
        whole.map(NamePattern).map_err(|error| {
            format!("'{text}' is not a regular expression for names of tensors: {error}")
        })
    }

    /// Returns whether the whole name matches.
    pub fn matches(&self, name: &CStr) -> bool {
        self.0.is_match(&name.to_string_lossy())
    }
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
}
