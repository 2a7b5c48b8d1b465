//! Regular expressions, with the features that the library itself enables.
//!
//! This package is a workspace of its own, without the dependencies of the library's own
//! tests: they enable more features of the same crates, which would hide a missing one.

use sidecar_core::config::overrides;

#[test]
fn an_expression_can_ignore_case() {
    let rules = overrides("(?i)FFN_.*_EXPS=0").expect("a rule");
    assert!(rules[0].0.is_match("blk.1.ffn_down_exps.weight"));
}
