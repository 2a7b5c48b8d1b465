//! `llama-sidecar load`.

use std::path::Path;
use std::time::Instant;

use anyhow::Result;
use indicatif::{ProgressBar, ProgressStyle};
use llama_sidecar::model::{Model, Options, Progress};

/// Loads all tensors and prints time and memory. The progress bar appears on a terminal only.
pub fn run(file: &Path) -> Result<()> {
    let opening = Instant::now();
    let model = Model::open(file, Options::host())?;
    let open_time = opening.elapsed();

    let style =
        ProgressStyle::with_template("{bar:40} {bytes}/{total_bytes} {binary_bytes_per_sec}")?;
    let bar = ProgressBar::new(model.file_bytes()).with_style(style);
    let report = model.load_all(|Progress { done, total }| {
        bar.set_length(total);
        bar.set_position(done);
        true
    })?;
    bar.finish_and_clear();

    let memory = model.devices()[0].memory();
    let seconds = report.time.as_secs_f64();
    println!(
        "open         {:>10.3} ms, {} tensors in {} file(s)",
        open_time.as_secs_f64() * 1e3,
        model.tensor_count(),
        model.file_count()
    );
    println!(
        "load         {:>10.3} ms, {} bytes",
        seconds * 1e3,
        report.bytes
    );
    println!(
        "bandwidth    {:>10.2} GB/s",
        report.bytes as f64 / seconds.max(1e-9) / 1e9
    );
    println!("allocations  {:>10}", report.allocations);
    println!(
        "device peak  {:>10.1} MiB, {:.1} MiB free",
        mib(memory.peak),
        mib(memory.free)
    );
    println!(
        "process peak {:>10.1} MiB resident",
        mib(peak_resident_bytes())
    );
    Ok(())
}

fn mib(bytes: u64) -> f64 {
    bytes as f64 / f64::from(1 << 20)
}

fn peak_resident_bytes() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
    let kib = line.and_then(|line| line.split_whitespace().next()?.parse::<u64>().ok());
    kib.unwrap_or(0) << 10
}
