//! Which models are tested.

use std::fmt;
use std::path::PathBuf;

use regex::Regex;
use testkit::architectures;

/// How many models of the daily test are tested with more experts, too.
pub const DAILY_MORE: usize = 2;

/// Which models `test-llama-archs` writes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Form {
    /// As llama.cpp tests them: two experts, which are both used.
    Upstream,
    /// With 8 experts, of which 3 are used. Only mixtures of experts differ.
    MoreExperts,
}

impl Form {
    pub const ALL: [Form; 2] = [Form::Upstream, Form::MoreExperts];
}

impl fmt::Display for Form {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Form::Upstream => "models",
            Form::MoreExperts => "8 experts, 3 used",
        })
    }
}

/// Which models are tested.
pub enum Models {
    /// Those whose file names match.
    Matching(Regex),
    /// Those of the daily test.
    Daily,
}

impl Models {
    /// Returns the types that tensors are given. The CPU has a buffer type of its own for q4_0.
    pub fn types(&self) -> &'static [&'static str] {
        match self {
            Models::Matching(_) => &["f16", "q4_0"],
            Models::Daily => &["q4_0"],
        }
    }
}

/// Where the models of a form are kept, beside the programs that write them.
pub fn folder(form: Form) -> PathBuf {
    match form {
        Form::Upstream => architectures::folder(),
        Form::MoreExperts => architectures::folder().with_file_name("architectures-8-experts"),
    }
}
