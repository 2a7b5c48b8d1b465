//! The report: what was called, what was found, and what it took in virtual time.

use std::path::Path;
use std::sync::atomic::{AtomicU32, Ordering};

use serde_json::{Value, json};

use crate::calls::Call;
use crate::host::THREADS;
use crate::sim::{Direction, Sim, started};
use crate::stream::STREAMS;

/// The process that started the simulation, not one that it forked.
static PROCESS: AtomicU32 = AtomicU32::new(0);

/// Lets the report be written at the end of this process.
pub fn at_end() {
    PROCESS.store(std::process::id(), Ordering::Relaxed);
    extern "C" fn write_it() {
        if let Some(sim) = started() {
            write_if_wanted(sim);
        }
    }
    // SAFETY: the library is never unloaded: ggml keeps the libraries of its backends.
    unsafe { libc::atexit(write_it) };
}

/// Writes the report to the file that the settings name.
pub fn write_if_wanted(sim: &Sim) {
    let forked = PROCESS.load(Ordering::Relaxed) != std::process::id();
    if let Some(path) = sim.settings.report.as_ref().filter(|_| !forked) {
        write(sim, path);
    }
}

/// Writes the report to a file.
pub fn write(sim: &Sim, path: &Path) -> bool {
    let written = std::fs::write(path, format!("{:#}\n", of(sim)));
    if let Err(error) = &written {
        eprintln!("sim-ggml: cannot write {}: {error}", path.display());
    }
    written.is_ok()
}

fn of(sim: &Sim) -> Value {
    let calls = Call::ALL
        .iter()
        .map(|&call| (call.name().into(), sim.counts.of(call).into()));
    let calls: serde_json::Map<String, Value> = calls.collect();
    let (failed, ignored) = sim.counts.faults();
    let devices: Vec<Value> = (0..sim.devices.len())
        .map(|number| of_device(sim, number))
        .collect();
    let streams = STREAMS.lock().expect("no panic");
    let streams: Vec<Value> = streams
        .iter()
        .enumerate()
        .map(|(at, stream)| {
            let figures = stream.figures.lock().expect("no panic");
            json!({
                "name": figures.name,
                "time_ns": figures.time,
                "event_waits": sim.counts.of_stream(Call::EventWait, at + 1),
                "works": figures.works,
                "most_open_events": stream.most_open_events.load(Ordering::Relaxed),
                "kernel_ns": figures.kernel,
                "copy_ns": figures.copy,
                "waited_for_host_ns": figures.waited_for_host,
                "waited_for_events_ns": figures.waited_for_events,
                "waited_for_link_ns": figures.waited_for_link,
            })
        })
        .collect();
    let threads = THREADS.lock().expect("no panic");
    let threads: Vec<Value> = threads
        .iter()
        .map(|thread| {
            let (time, waited) = thread.times();
            json!({"name": &*thread.name, "time_ns": time, "waited_ns": waited})
        })
        .collect();
    let products = sim.products.lock().expect("no panic");
    let products: Vec<Value> = products
        .iter()
        .map(|product| {
            json!({
                "name": product.name,
                "stream": product.stream,
                "start_ns": product.time.start,
                "end_ns": product.time.end,
                "experts": product.experts,
            })
        })
        .collect();
    let findings = sim.findings.lock().expect("no panic");
    json!({
        "calls": calls,
        "failed": failed,
        "ignored": ignored,
        "replays": sim.replays.load(Ordering::Relaxed),
        "accesses": sim.accesses.load(Ordering::Relaxed),
        "unordered": findings.unordered,
        "unknown_memory": findings.unknown,
        "examples": findings.examples,
        "devices": devices,
        "streams": streams,
        "threads": threads,
        "products": products,
    })
}

fn of_device(sim: &Sim, number: usize) -> Value {
    let of = &sim.devices[number];
    let direction = |direction| {
        let link = of.link(direction).lock().expect("no panic");
        json!({
            "bytes": link.bytes,
            "busy_ns": link.queue.busy.total(),
            "copies_locked": link.locked,
            "copies_pageable": link.pageable,
        })
    };
    let links = json!({
        "to_device": direction(Direction::ToDevice),
        "from_device": direction(Direction::FromDevice),
    });
    let kernels = of.kernels.lock().expect("no panic");
    let link = of.link(Direction::ToDevice).lock().expect("no panic");
    let used = sim.memory.used(number);
    json!({
        "link": links,
        "kernel_ns": kernels.total(),
        "overlap_ns": kernels.common(&link.queue.busy),
        "memory": {"now": used.now, "peak": used.peak},
    })
}
