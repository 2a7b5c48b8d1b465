//! Reads any bytes as an importance matrix, in GGUF or in the older format.
#![cfg_attr(fuzzing, no_main)]
#![allow(dead_code, reason = "the module has more than reading")]

#[path = "../../cli/src/tune/imatrix.rs"]
mod matrices;

use std::io::Write;

use matrices::Matrix;

#[cfg(fuzzing)]
libfuzzer_sys::fuzz_target!(|bytes: &[u8]| check(bytes));

/// Panics where the reader contradicts itself.
pub fn check(bytes: &[u8]) {
    let mut file = tempfile::NamedTempFile::new().expect("a file");
    file.write_all(bytes).expect("free space");
    let Ok(matrix) = Matrix::load(file.path()) else {
        return;
    };
    let again = Matrix::load(file.path()).expect("it was read before");
    assert_eq!(matrix.hash(), again.hash());
    for (name, values) in &matrix.entries {
        assert!(values.iter().all(|value| value.is_finite()));
        assert_eq!(
            matrix.of(name, values.len()).ok().flatten(),
            Some(&values[..])
        );
        assert!(
            values.len() * 4 <= bytes.len(),
            "values that are not in the file"
        );
    }
}
