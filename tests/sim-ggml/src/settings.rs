//! The variables.

use std::path::PathBuf;

use crate::calls::{Call, Fault, Faults};
use crate::routing::Routes;

/// Devices at most.
const MOST_DEVICES: f64 = 16.0;

/// What the variables set; see the table of the crate.
#[derive(Debug)]
pub struct Settings {
    /// Bytes of memory of each device.
    pub memory: Vec<usize>,
    /// Bytes per nanosecond, which is GB/s, from page-locked memory.
    pub link: f64,
    /// The same from other memory.
    pub pageable: f64,
    /// Nanoseconds of each copy before its first byte.
    pub latency: u64,
    /// Bytes per nanosecond that a kernel reads.
    pub device: f64,
    /// Operations per nanosecond.
    pub flops: f64,
    /// Nanoseconds of each kernel before its first byte.
    pub launch: u64,
    /// Bytes per nanosecond that the host's CPU backend reads; infinite where it takes no time.
    pub host: f64,
    /// Its operations per nanosecond.
    pub host_flops: f64,
    /// Whether kernels and copies move bytes.
    pub computes: bool,
    /// Whether routed products are replaced by sums of the bytes that they read.
    pub sums: bool,
    /// Whether graphs are captured and replayed.
    pub captures: bool,
    /// Threads of each stream's kernels.
    pub threads: i32,
    /// The smallest batch for which the device takes an operation with weights in host memory.
    pub offload_batch: i64,
    /// Calls that are treated in another way.
    pub faults: Faults,
    /// Experts of tokens where nothing is computed.
    pub routes: Option<Routes>,
    /// Where the report goes at the end of the process.
    pub report: Option<PathBuf>,
}

impl Settings {
    /// Reads the variables; an error names the variable and its value.
    pub fn from_environment() -> Result<Settings, String> {
        let sums = text("SIM_GGML_COMPUTE").as_deref() == Some("sums");
        Ok(Settings {
            memory: memory()?,
            link: number("SIM_GGML_LINK_GBS", 24.0)?,
            pageable: number("SIM_GGML_PAGEABLE_GBS", 12.0)?,
            latency: (number("SIM_GGML_LATENCY_US", 8.0)? * 1e3) as u64,
            device: number("SIM_GGML_DEVICE_GBS", 800.0)?,
            flops: number("SIM_GGML_TFLOPS", 60.0)? * 1e3,
            launch: (number("SIM_GGML_LAUNCH_US", 3.0)? * 1e3) as u64,
            host: unless_zero(number("SIM_GGML_HOST_GBS", 0.0)?),
            host_flops: unless_zero(number("SIM_GGML_HOST_TFLOPS", 0.0)? * 1e3),
            computes: sums || number("SIM_GGML_COMPUTE", 1.0)? != 0.0,
            sums,
            captures: number("SIM_GGML_CAPTURE", 1.0)? != 0.0,
            threads: number("SIM_GGML_THREADS", 1.0)? as i32,
            offload_batch: number("GGML_OP_OFFLOAD_MIN_BATCH", 32.0)? as i64,
            faults: Faults {
                fail: faults("SIM_GGML_FAIL", Call::can_fail)?,
                ignore: faults("SIM_GGML_IGNORE", Call::is_wait)?,
                late: faults("SIM_GGML_LATE", Call::can_be_late)?,
            },
            routes: routes("SIM_GGML_ROUTES")?,
            report: text("SIM_GGML_REPORT").map(PathBuf::from),
        })
    }
}

fn text(name: &str) -> Option<String> {
    let value = std::env::var(name).ok()?;
    (!value.is_empty()).then_some(value)
}

fn number(name: &str, default: f64) -> Result<f64, String> {
    let Some(value) = text(name) else {
        return Ok(default);
    };
    let number = value.parse().ok();
    let number = number.filter(|number: &f64| number.is_finite() && *number >= 0.0);
    number.ok_or_else(|| format!("{name}: expected a number, found {value:?}"))
}

/// Returns the memory of each device: the last number counts for all further ones.
fn memory() -> Result<Vec<usize>, String> {
    let devices = number("SIM_GGML_DEVICES", 1.0)?;
    if !(1.0..=MOST_DEVICES).contains(&devices) {
        return Err(format!(
            "SIM_GGML_DEVICES: expected 1 to {MOST_DEVICES}, found {devices}"
        ));
    }
    let value = text("SIM_GGML_MEMORY_MB").unwrap_or_else(|| "8192".into());
    let sizes = value.split(',').map(|one| {
        let size = one
            .parse()
            .ok()
            .filter(|size: &f64| size.is_finite() && *size >= 0.0);
        size.map(|size| (size * 1048576.0) as usize)
    });
    let sizes: Option<Vec<usize>> = sizes.collect();
    let mut sizes =
        sizes.ok_or_else(|| format!("SIM_GGML_MEMORY_MB: expected numbers, found {value:?}"))?;
    let last = sizes.last().copied().unwrap_or(0);
    sizes.resize(devices as usize, last);
    Ok(sizes)
}

fn unless_zero(speed: f64) -> f64 {
    if speed == 0.0 { f64::INFINITY } else { speed }
}

fn routes(name: &str) -> Result<Option<Routes>, String> {
    let Some(path) = text(name) else {
        return Ok(None);
    };
    let routes = Routes::read(path.as_ref()).map_err(|error| format!("{name}: {path}: {error}"))?;
    Ok(Some(routes))
}

fn faults(name: &str, allowed: fn(Call) -> bool) -> Result<Vec<Fault>, String> {
    let value = text(name).unwrap_or_default();
    let all = value.split(',').filter(|one| !one.is_empty());
    all.map(|one| {
        let fault = Fault::parse(one).filter(|fault| allowed(fault.call));
        fault.ok_or_else(|| {
            format!("{name}: expected CALL:N of a call that can be meant, found {one:?}")
        })
    })
    .collect()
}
