//! What `llama-sidecar plan` measures in a process of the program, with the program's own ggml: products of
//! the model's matrices on the processor and on GPUs, and copies to GPUs.
//!
//! | module | contents |
//! |---|---|
//! | [`products`] | the products of a work in the memory of a backend |

mod products;

use std::ffi::{CStr, c_char, c_int, c_void};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use products::Products;
use sidecar_core::config::Config;
use sidecar_core::descriptors;
use sidecar_core::protocol::{Event, Measure, Measured, OnDevice, OnProcessor, Repacked, Work};
use sidecar_core::text;

use crate::ggml::{
    Backend, BufferType, DEVICE_CPU, DEVICE_GPU, DEVICE_IGPU, Device, DeviceByType, F32, Ggml,
    OwnBuffer, Tensor,
};
use crate::process::journal;
use crate::program::capability::Capability;

/// Bytes of a copy.
const COPIED: usize = 64 << 20;
/// How long a work is measured at least, after a first evaluation that does not count.
const PERIOD: Duration = Duration::from_millis(250);
/// Evaluations of a work, at least.
const EVALUATIONS: usize = 5;

/// Measurements, as a capability.
pub struct Measurements;

impl Capability for Measurements {
    fn is_enabled(&self) -> bool {
        Config::get().measure.is_some()
    }
}

/// Finds a function of the program's ggml.
type Symbol<'a> = &'a dyn Fn(&CStr) -> *mut c_void;

/// Measures what is requested, and ends the process: the program is about to load a `model`, which is not needed
/// then. Returns if nothing is requested, or if the request cannot be read.
pub fn run_once(ggml: &'static Ggml, model: &Path, symbol: Symbol<'_>) {
    let Some(path) = &Config::get().measure else {
        return;
    };
    journal::note(|| Event::Opened {
        path: text::path(model),
    });
    let wanted = match read(path) {
        Ok(wanted) => wanted,
        Err(error) => return log::error!("nothing is measured: {error}"),
    };
    let result = measure(ggml, symbol, &wanted);
    journal::note(|| {
        let (found, error) = match result {
            Ok(found) => (found, None),
            Err(error) => (Measured::default(), Some(error)),
        };
        Event::Measured { found, error }
    });
    // SAFETY: ends the process without handlers, which expect a model.
    unsafe { libc::_exit(0) }
}

fn read(path: &Path) -> Result<Measure, String> {
    let text = descriptors::read_to_string(path);
    let text = text.map_err(|error| format!("cannot read {}: {error}", text::path(path)))?;
    serde_json::from_str(&text).map_err(|error| format!("{}: {error}", text::path(path)))
}

fn measure(ggml: &'static Ggml, symbol: Symbol<'_>, wanted: &Measure) -> Result<Measured, String> {
    load_backends(ggml, symbol);
    let processor = Processor::find(ggml, symbol)?;
    let mut found = Measured::default();
    for repacked in [false, true] {
        let of = |work| {
            let special = processor.special.iter().copied().filter(|_| repacked);
            Products::new(ggml, processor.device, processor.plain, special, work)
        };
        let works: Result<Vec<Products>, String> = wanted.works.iter().map(of).collect();
        let mut works = works?;
        let kinds = works.iter().flat_map(|work| &work.special);
        for matrix in kinds {
            let kind = Repacked {
                ty: matrix.ty,
                routed: matrix.used > 0,
            };
            if !found.repacked.contains(&kind) {
                found.repacked.push(kind);
            }
        }
        if repacked && found.repacked.is_empty() {
            break;
        }
        for &threads in &wanted.threads {
            processor.set_threads(threads);
            let seconds = works
                .iter_mut()
                .map(|work| seconds(processor.backend, work));
            found.processor.push(OnProcessor {
                threads,
                repacked,
                seconds: seconds.collect::<Result<_, _>>()?,
            });
        }
    }
    let gpus: Vec<_> = devices(symbol)
        .into_iter()
        .filter(|&of| is_gpu(ggml, of))
        .collect();
    let busy = wanted.works.iter().find(|work| !work.matrices.is_empty());
    if let Some(work) = busy.filter(|_| !gpus.is_empty()) {
        let mut beside = Products::new(ggml, processor.device, processor.plain, None, work)?;
        for device in gpus {
            let mut gpu = about(ggml, symbol, device);
            let measured = measure_device(
                ggml,
                device,
                &wanted.works,
                &processor,
                &mut beside,
                &mut gpu,
            );
            gpu.obstacle = measured.err();
            found.devices.push(gpu);
        }
    }
    Ok(found)
}

/// The CPU of a copy of ggml.
struct Processor {
    /// Null in a ggml without devices.
    device: *mut Device,
    backend: *mut Backend,
    plain: *mut BufferType,
    special: Vec<*mut BufferType>,
    set_threads: unsafe extern "C-unwind" fn(*mut Backend, c_int),
}

impl Processor {
    fn find(ggml: &'static Ggml, symbol: Symbol<'_>) -> Result<Processor, String> {
        let missing = |name: &CStr| format!("the program's ggml has no {}", name.to_string_lossy());
        let need = |name: &'static CStr| match symbol(name) {
            found if found.is_null() => Err(missing(name)),
            found => Ok(found),
        };
        let by_type = symbol(c"ggml_backend_dev_by_type");
        // SAFETY: ggml-backend.h and ggml-cpu.h give the functions of these names these types.
        unsafe {
            let (device, backend, set_threads) = if by_type.is_null() {
                type Init = unsafe extern "C-unwind" fn() -> *mut Backend;
                let init =
                    std::mem::transmute::<*mut c_void, Init>(need(c"ggml_backend_cpu_init")?);
                let set_threads = need(c"ggml_backend_cpu_set_n_threads")?;
                (std::ptr::null_mut(), init(), set_threads)
            } else {
                let device = std::mem::transmute::<*mut c_void, DeviceByType>(by_type)(DEVICE_CPU);
                if device.is_null() {
                    return Err("the program's ggml has no backend for the processor".into());
                }
                let name = c"ggml_backend_set_n_threads";
                let found = ggml.device_function(device, name);
                if found.is_null() {
                    return Err(missing(name));
                }
                let backend = (ggml.f.ggml_backend_dev_init)(device, std::ptr::null());
                (device, backend, found)
            };
            if backend.is_null() {
                return Err("the program's ggml cannot make a backend for the processor".into());
            }
            let special = (!device.is_null()).then(|| ggml.special_types(device));
            Ok(Processor {
                device,
                backend,
                plain: (ggml.f.ggml_backend_cpu_buffer_type)(),
                special: special.unwrap_or_default(),
                set_threads: std::mem::transmute::<
                    *mut c_void,
                    unsafe extern "C-unwind" fn(*mut Backend, c_int),
                >(set_threads),
            })
        }
    }

    fn set_threads(&self, threads: u32) {
        // SAFETY: a live backend of the processor.
        unsafe { (self.set_threads)(self.backend, threads as c_int) };
    }
}

/// Returns the median of the times of a work.
fn seconds(backend: *mut Backend, work: &mut Products) -> Result<f64, String> {
    work.evaluate(backend)?;
    let begun = Instant::now();
    let mut times = Vec::new();
    while times.len() < EVALUATIONS || begun.elapsed() < PERIOD {
        times.push(work.evaluate(backend)?.as_secs_f64());
    }
    Ok(median(times))
}

fn median(mut figures: Vec<f64>) -> f64 {
    figures.sort_by(f64::total_cmp);
    figures[figures.len() / 2]
}

/// Loads the backends that are libraries of their own: a program may read a model's header before it does
/// that. A second time would list devices twice.
fn load_backends(ggml: &Ggml, symbol: Symbol<'_>) {
    let load = symbol(c"ggml_backend_load_all");
    if load.is_null() || devices(symbol).into_iter().any(|of| is_gpu(ggml, of)) {
        return;
    }
    // SAFETY: ggml-backend.h gives the function of this name this type.
    unsafe { std::mem::transmute::<*mut c_void, unsafe extern "C-unwind" fn()>(load)() };
}

fn is_gpu(ggml: &Ggml, device: *mut Device) -> bool {
    // SAFETY: a live device.
    let ty = unsafe { (ggml.f.ggml_backend_dev_type)(device) };
    ty == DEVICE_GPU || ty == DEVICE_IGPU
}

/// Returns the devices that ggml knows.
fn devices(symbol: Symbol<'_>) -> Vec<*mut Device> {
    let [count, get] = [c"ggml_backend_dev_count", c"ggml_backend_dev_get"].map(symbol);
    if count.is_null() || get.is_null() {
        return Vec::new();
    }
    // SAFETY: ggml-backend.h gives the functions of these names these types.
    unsafe {
        type Count = unsafe extern "C-unwind" fn() -> usize;
        type Get = unsafe extern "C-unwind" fn(usize) -> *mut Device;
        let count = std::mem::transmute::<*mut c_void, Count>(count)();
        let get = std::mem::transmute::<*mut c_void, Get>(get);
        (0..count).map(|at| get(at)).collect()
    }
}

/// Returns what a GPU is, without figures of its speed.
fn about(ggml: &Ggml, symbol: Symbol<'_>, device: *mut Device) -> OnDevice {
    let text = |name: &CStr| {
        type Text = unsafe extern "C-unwind" fn(*mut Device) -> *const c_char;
        let found = symbol(name);
        // SAFETY: ggml-backend.h gives both functions this type; the result is a static string.
        (!found.is_null()).then(|| unsafe {
            let text = std::mem::transmute::<*mut c_void, Text>(found)(device);
            CStr::from_ptr(text).to_string_lossy().into_owned()
        })
    };
    let (free, total) = ggml.memory_of(device);
    OnDevice {
        name: text(c"ggml_backend_dev_name").unwrap_or_default(),
        description: text(c"ggml_backend_dev_description").unwrap_or_default(),
        free,
        total,
        ..OnDevice::default()
    }
}

/// Measures a GPU. `beside` is what the processor evaluates during copies.
fn measure_device(
    ggml: &'static Ggml,
    device: *mut Device,
    works: &[Work],
    processor: &Processor,
    beside: &mut Products,
    found: &mut OnDevice,
) -> Result<(), String> {
    // SAFETY: a live device; the backend is never freed, because the process ends.
    let backend = unsafe { (ggml.f.ggml_backend_dev_init)(device, std::ptr::null()) };
    if backend.is_null() {
        return Err("its backend cannot be started".into());
    }
    // SAFETY: a live device.
    let buft = unsafe { (ggml.f.ggml_backend_dev_buffer_type)(device) };
    for work in works {
        let mut products = Products::new(ggml, device, buft, None, work)?;
        found.seconds.push(seconds(backend, &mut products)?);
    }
    let no_memory = |size| format!("no memory for {size} bytes");
    let extent = [COPIED as i64 / 4];
    let (_buffer, target) =
        OwnBuffer::for_tensor(ggml, buft, F32, &extent, c"copied").map_err(no_memory)?;
    let copy = |from: *const u8| {
        let begun = Instant::now();
        // SAFETY: a tensor of this size, and as many bytes.
        unsafe {
            (ggml.f.ggml_backend_tensor_set)(target, from.cast(), 0, COPIED);
            (ggml.f.ggml_backend_synchronize)(backend);
        }
        COPIED as f64 / begun.elapsed().as_secs_f64()
    };
    let speed = |from: *const u8| {
        copy(from);
        median((0..EVALUATIONS).map(|_| copy(from)).collect())
    };
    let pageable = vec![1u8; COPIED];
    found.pageable = speed(pageable.as_ptr());
    // SAFETY: a live device; a buffer type of host memory has buffers with an address.
    unsafe {
        let host = (ggml.f.ggml_backend_dev_host_buffer_type)(device);
        if !host.is_null() {
            let buffer = OwnBuffer::for_tensor(ggml, host, F32, &extent, c"locked");
            if let Ok((_buffer, tensor)) = buffer {
                found.locked = speed(ggml.data(tensor).cast_const().cast());
            }
        }
    }
    let alone = seconds(processor.backend, beside)?;
    let is_over = AtomicBool::new(false);
    let (busy, copied) = std::thread::scope(|scope| {
        // A pointer is not sent to a thread; its tensor lives until the scope ends.
        let target = target as usize;
        let is_over = &is_over;
        let copies = scope.spawn(move || {
            let pageable = vec![1u8; COPIED];
            let (begun, mut count) = (Instant::now(), 0);
            while !is_over.load(Ordering::Relaxed) {
                // SAFETY: a tensor of this size, and as many bytes.
                unsafe {
                    let from = pageable.as_ptr().cast();
                    (ggml.f.ggml_backend_tensor_set)(target as *mut Tensor, from, 0, COPIED);
                }
                count += 1;
            }
            (count * COPIED) as f64 / begun.elapsed().as_secs_f64()
        });
        let busy = seconds(processor.backend, beside);
        is_over.store(true, Ordering::Relaxed);
        (busy, copies.join())
    });
    found.processor_left = (alone / busy?).min(1.0);
    found.link_left = (copied.unwrap_or(0.0) / found.pageable).min(1.0);
    Ok(())
}
