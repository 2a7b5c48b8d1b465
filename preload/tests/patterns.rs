//! Regular expressions, with the features that the library asks for itself.
//!
//! This package is a workspace of its own, without the dependencies of the library's own
//! tests: they ask for more of the same crates, and would hide that a feature is missing.

use llama_sidecar::config::overrides;

#[test]
fn an_expression_can_ignore_case() {
    let rules = overrides("(?i)FFN_.*_EXPS=0").expect("a rule");
    assert!(rules[0].0.is_match("blk.1.ffn_down_exps.weight"));
}
