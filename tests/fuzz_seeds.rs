//! The short form of the fuzz test: its seeds and regressions, whole, cut at each length and
//! with each byte changed.
#![allow(unexpected_cfgs, reason = "cfg(fuzzing) is that of cargo-fuzz")]

#[path = "../fuzz/fuzz_targets/gguf.rs"]
mod fuzz_target;

use std::path::Path;

/// Values that a byte is changed to, or by.
const CHANGES: [fn(u8) -> u8; 4] = [|_| 0, |_| 0xff, |byte| byte ^ 1, |byte| byte ^ 0x80];

#[test]
fn parser_and_model_stand_damaged_seeds() {
    let mut files = testkit::seeds::gguf().map(|(_, bytes)| bytes).to_vec();
    let regressions = Path::new(env!("CARGO_MANIFEST_DIR")).join("fuzz/regressions/gguf");
    for entry in std::fs::read_dir(regressions).expect("a folder of the repository") {
        files.push(std::fs::read(entry.expect("an entry").path()).expect("a file"));
    }
    for file in files {
        fuzz_target::check(&file);
        for at in 0..file.len() {
            fuzz_target::check(&file[..at]);
            for change in CHANGES {
                let mut damaged = file.clone();
                damaged[at] = change(damaged[at]);
                fuzz_target::check(&damaged);
            }
        }
    }
}
