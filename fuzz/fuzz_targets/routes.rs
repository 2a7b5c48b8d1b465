//! Reads any bytes as routes in the compact format, whole and in part.
#![cfg_attr(fuzzing, no_main)]

use sidecar_core::trace::{RouteReader, RouteRecord};

#[cfg(fuzzing)]
libfuzzer_sys::fuzz_target!(|bytes: &[u8]| check(bytes));

/// Returns the records before the end or the first error.
fn records(bytes: &[u8]) -> Vec<RouteRecord> {
    let mut records = Vec::new();
    if let Ok(mut reader) = RouteReader::new(bytes) {
        while let Ok(Some(record)) = reader.read() {
            records.push(record);
        }
    }
    records
}

/// Panics where the library contradicts itself.
pub fn check(bytes: &[u8]) {
    let all = records(bytes);
    // A file that is cut has the records before the cut.
    let part = records(&bytes[..bytes.len() / 2]);
    assert!(format!("{all:?}").starts_with(format!("{part:?}").trim_end_matches(']')));
    if let Ok(reader) = RouteReader::new(bytes) {
        let _ = reader.workloads(|_, counts| {
            assert!(counts.tokens() > 0);
            Ok(())
        });
    }
}
