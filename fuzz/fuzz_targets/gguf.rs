//! Parses any bytes as a GGUF header, whole and in part; opens them as a model, and reads
//! each of its values and tensors.
//!
//! `cargo xtask check --fuzz MINUTES` runs this under libFuzzer; `tests/fuzz_seeds.rs` is the
//! short form.
#![cfg_attr(fuzzing, no_main)]

use std::io::Write;

use llama_sidecar::model::{Model, Options};
use sidecar_core::gguf::{Access, Header, ParseError};

#[cfg(fuzzing)]
libfuzzer_sys::fuzz_target!(|bytes: &[u8]| check(bytes));

/// Panics where the library contradicts itself.
pub fn check(bytes: &[u8]) {
    let whole = Header::parse(bytes, bytes.len() as u64);
    assert!(
        !matches!(whole, Err(ParseError::NeedMore(_))),
        "the file is all there"
    );

    // A prefix gives the same verdict or needs more bytes.
    let cut = bytes.len() / 2;
    match Header::parse(&bytes[..cut], bytes.len() as u64) {
        Err(ParseError::NeedMore(needed)) => {
            assert!(needed > cut as u64 && needed <= bytes.len() as u64);
        }
        part => assert_eq!(part.is_ok(), whole.is_ok()),
    }
    if whole.is_err() {
        return;
    }

    let mut file = tempfile::NamedTempFile::new_in("/dev/shm").expect("a file");
    file.write_all(bytes).expect("free space");
    for access in [Access::Map, Access::Read] {
        let options = Options {
            access,
            ..Options::host()
        };
        let Ok(model) = Model::open(file.path(), options) else {
            continue;
        };
        for key in model.metadata() {
            if key.array {
                let elements = model.elements(key, 0, 3).expect("checked at open");
                assert_eq!(elements.len() as u64, key.count.min(3));
            } else {
                model.value(key).expect("checked at open");
            }
        }
        for index in 0..model.tensor_count() {
            assert!(model.find(model.name(index)).is_some());
            let view = model.tensor(index);
            let mut end = [0; 1];
            if view.nbytes() > 0 {
                model
                    .read(index, view.nbytes() - 1, &mut end)
                    .expect("checked at open");
            }
        }
        model.load_all(|_| true).expect("it fits in memory");
    }
}
