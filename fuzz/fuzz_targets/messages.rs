//! Reads any bytes as what a control socket, a journal and a file of masks can have: a request, an
//! answer, a list of experts, an event. What was read is the same after it was written.
#![cfg_attr(fuzzing, no_main)]

use std::fmt::Debug;

use serde::Serialize;
use serde::de::DeserializeOwned;
use sidecar_core::protocol::{
    Entry, Hashes, LayerMask, Metrics, Reloads, Reply, Request, Status, Traces, line,
};

#[cfg(fuzzing)]
libfuzzer_sys::fuzz_target!(|bytes: &[u8]| check(bytes));

fn again<T: Serialize + DeserializeOwned + Debug>(bytes: &[u8]) {
    if let Ok(read) = serde_json::from_slice::<T>(bytes) {
        let written = line(&read);
        // JSON has no infinity, and a number can be too large for its type.
        if written.contains("null") && serde_json::from_str::<T>(&written).is_err() {
            return;
        }
        assert!(written.ends_with('\n') && !written[..written.len() - 1].contains('\n'));
        let again: T =
            serde_json::from_str(&written).unwrap_or_else(|error| panic!("{error}: {written}"));
        // Infinity is written as null, which is no value where one may be missing.
        if written.contains("null") && line(&again) != written {
            let third: T = serde_json::from_str(&line(&again)).expect("it was written");
            return assert_eq!(line(&third), line(&again));
        }
        assert_eq!(line(&again), written);
    }
}

/// Panics where the library contradicts itself.
pub fn check(bytes: &[u8]) {
    again::<Request>(bytes);
    again::<Vec<LayerMask>>(bytes);
    again::<Reply>(bytes);
    again::<Status>(bytes);
    again::<Reloads>(bytes);
    again::<Hashes>(bytes);
    again::<Metrics>(bytes);
    again::<Traces>(bytes);
    again::<Entry>(bytes);
}
