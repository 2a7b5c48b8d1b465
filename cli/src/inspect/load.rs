//! `llama-sidecar inspect --load`.

use std::path::Path;
use std::time::Instant;

use anyhow::Result;
use indicatif::{ProgressBar, ProgressStyle};
use llama_sidecar::device::cuda::CudaDevice;
use llama_sidecar::model::{Model, Options, Placement};
use sidecar_core::text;

/// Loads all tensors, into the memory of a CUDA device if there is a number, and prints time and memory. The progress bar
/// appears on a terminal only.
pub fn run(file: &Path, device: Option<usize>) -> Result<()> {
    let mut options = Options::host();
    if let Some(number) = device {
        options.devices.push(CudaDevice::open(number)?);
        options.placement = Placement::on(options.devices.len() - 1);
    }
    let opening = Instant::now();
    let model = Model::open(file, options)?;
    let open_time = opening.elapsed();

    let template = "{bar:30} {bytes}/{total_bytes} {binary_bytes_per_sec} {wide_msg}";
    let style = ProgressStyle::with_template(template)?;
    let bar = ProgressBar::new(model.file_bytes()).with_style(style);
    let report = model.load_all(|now| {
        bar.set_length(now.total);
        bar.set_position(now.done);
        let name = text::line(&now.name.to_string_lossy()).into_owned();
        bar.set_message(format!("{}/{} {name}", now.tensors, now.total_tensors));
        true
    })?;
    bar.finish_and_clear();

    let into = model.devices().last().expect("host memory at least");
    let memory = into.memory();
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
        "device peak  {:>10.1} MiB, {:.1} MiB free, {}",
        mib(memory.peak),
        mib(memory.free),
        into.name()
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
