//! The short form of the fuzz tests: seeds and regressions, whole, cut at each length and with each
//! byte changed.
#![allow(unexpected_cfgs, reason = "cfg(fuzzing) is that of cargo-fuzz")]

#[path = "../fuzz/fuzz_targets/gguf.rs"]
mod gguf;
#[path = "../fuzz/fuzz_targets/imatrix.rs"]
mod imatrix;
#[path = "../fuzz/fuzz_targets/messages.rs"]
mod messages;
#[path = "../fuzz/fuzz_targets/routes.rs"]
mod routes;
#[path = "../fuzz/fuzz_targets/trace.rs"]
mod trace;

use std::path::Path;

/// Values that a byte is changed to, or by.
const CHANGES: [fn(u8) -> u8; 4] = [|_| 0, |_| 0xff, |byte| byte ^ 1, |byte| byte ^ 0x80];

fn stands(target: &str, check: fn(&[u8])) {
    let mut files: Vec<Vec<u8>> = testkit::seeds::of(target)
        .into_iter()
        .map(|(_, bytes)| bytes)
        .collect();
    assert!(!files.is_empty(), "{target} has seeds");
    let fuzz = Path::new(env!("CARGO_MANIFEST_DIR")).join("fuzz/regressions");
    let regressions = std::fs::read_dir(fuzz.join(target)).into_iter().flatten();
    for entry in regressions {
        files.push(std::fs::read(entry.expect("an entry").path()).expect("a file"));
    }
    for file in files {
        check(&file);
        for at in 0..file.len() {
            check(&file[..at]);
            for change in CHANGES {
                let mut damaged = file.clone();
                damaged[at] = change(damaged[at]);
                check(&damaged);
            }
        }
    }
}

#[test]
fn parser_and_model_stand_damaged_seeds() {
    stands("gguf", gguf::check);
}

#[test]
fn readers_stand_damaged_traces_routes_messages_and_matrices() {
    stands("imatrix", imatrix::check);
    stands("trace", trace::check);
    stands("routes", routes::check);
    stands("messages", messages::check);
}
