//! Reads any bytes as a request to a page of the command, at once and byte by byte.
#![cfg_attr(fuzzing, no_main)]
#![allow(dead_code, reason = "the modules have more than reading")]

#[path = "../../cli/src/deadline.rs"]
mod deadline;
#[path = "../../cli/src/http.rs"]
mod http;

use std::io::Read;

#[cfg(fuzzing)]
libfuzzer_sys::fuzz_target!(|bytes: &[u8]| check(bytes));

/// A stream that delivers one byte a time.
struct Slow<'a>(&'a [u8]);

impl Read for Slow<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> std::io::Result<usize> {
        let len = buffer.len().min(1);
        self.0.read(&mut buffer[..len])
    }
}

/// Panics where the server contradicts itself.
pub fn check(bytes: &[u8]) {
    let whole = http::requested(bytes).expect("no error of the stream");
    let slow = http::requested(Slow(bytes)).expect("no error of the stream");
    assert_eq!(whole, slow);
    if let Some(request) = whole {
        assert!(!request.path.contains('?'));
        request.header("host");
        request.has("gzip");
    }
}
