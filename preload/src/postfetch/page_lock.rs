//! Page locks on the mappings of models: a GPU copies from locked pages without a staging buffer.
//!
//! ggml's CUDA backend has functions for that, `ggml_backend_register_host_buffer` and its
//! counterpart, which llama.cpp does not call. With an own environment variable unset, they
//! refuse: `GGML_CUDA_REGISTER_HOST=1`. The whole mapping of a file is locked, since a copy from
//! memory that is locked in part fails.

use std::ffi::{CStr, c_void};
use std::ops::Range;
use std::sync::Arc;

use parking_lot::Mutex;
use sidecar_core::config::Config;
use sidecar_core::memory::free_memory;
use sidecar_core::protocol::NoEffect;
use sidecar_core::text;

use crate::ggml::{Device, Ggml};
use crate::process::maps::Maps;
use crate::program::capability::{Capability, Effect};
use crate::program::models::Model;
use crate::streaming::load;

/// Whether pages were locked, and why those of other models are not.
static EFFECT: Effect = Effect::of(NoEffect::PAGE_LOCK);

/// Page locks, as a capability.
pub struct PageLock;

/// A mapping that is locked.
struct Locked {
    /// The number of the model.
    model: u64,
    range: Range<usize>,
    unregister: Unregister,
}

type Register = unsafe extern "C-unwind" fn(*mut c_void, usize) -> bool;
type Unregister = unsafe extern "C-unwind" fn(*mut c_void);

static LOCKED: Mutex<Vec<Locked>> = Mutex::new(Vec::new());

impl Capability for PageLock {
    fn is_enabled(&self) -> bool {
        Config::get().program_postfetch.page_lock
    }

    fn model_complete(&self, model: &Arc<Model>) {
        if self.is_enabled() {
            lock(model);
        }
    }

    fn model_freed(&self, model: &Model) {
        let mut locked = LOCKED.lock();
        for of_model in locked.extract_if(.., |of| of.model == model.number) {
            // SAFETY: the function that belongs to the one that locked the range.
            unsafe { (of_model.unregister)(of_model.range.start as *mut c_void) }
        }
    }

    fn no_effect(&self) -> Vec<NoEffect> {
        EFFECT.missing(|| "no pages were locked: no model was evaluated".into())
    }
}

/// Returns the bytes that are locked.
pub fn locked_bytes() -> u64 {
    let locked = LOCKED.lock();
    locked.iter().map(|of| of.range.len() as u64).sum()
}

/// Locks the mappings of a model's files, as far as routed experts are there.
fn lock(model: &Arc<Model>) {
    let path = text::path(model.files[0].gguf.source.path());
    let refuse = |why: &str| {
        let sentence = format!("{path}: its pages are not locked: {why}");
        log::warn!("{sentence}");
        EFFECT.note_obstacle(sentence);
    };
    match load::expert_memory(model) {
        Some(load::ExpertMemory::Mapped | load::ExpertMemory::Locked) => {}
        Some(load::ExpertMemory::Copied) | None => {
            return refuse("no routed experts are in the mapping of its file");
        }
        Some(load::ExpertMemory::Unknown) => return refuse("/proc/self/maps cannot be read"),
    }
    if Config::get().expert_stream.streams() {
        return refuse("locked pages stay in memory, and streaming is for models that do not fit");
    }
    let mut devices = model.devices.iter().map(|device| device.0);
    let functions = devices.find_map(|device| functions(model.ggml, device));
    let Some((register, unregister)) = functions else {
        return refuse("no backend of this program can lock memory");
    };
    let ranges = mappings(model);
    let wanted: usize = ranges.iter().map(|range| range.len()).sum();
    // Pages of the file in memory count as free.
    if let Some((free, _)) = free_memory().filter(|(free, _)| wanted as u64 > *free) {
        return refuse(&format!(
            "they are {} MiB, and {} MiB of memory are free",
            wanted >> 20,
            free >> 20
        ));
    }
    for range in ranges {
        // SAFETY: a mapping of the program, which it unmaps after it has freed the tensors in it.
        match unsafe { register(range.start as *mut c_void, range.len()) } {
            true => LOCKED.lock().push(Locked {
                model: model.number,
                range,
                unregister,
            }),
            false => {
                return refuse(
                    "the backend refused; CUDA needs GGML_CUDA_REGISTER_HOST=1 in the environment, which 'llama-sidecar run --page-lock' sets",
                );
            }
        }
    }
    EFFECT.note();
    log::info!("{path}: {} MiB are page-locked", locked_bytes() >> 20);
}

/// Returns the functions of a device's backend that lock memory and release it.
fn functions(ggml: &Ggml, device: *mut Device) -> Option<(Register, Unregister)> {
    // SAFETY: a live device; ggml's backends give the functions of these names these types.
    unsafe {
        let find = |name: &CStr| {
            let found = ggml.device_function(device, name);
            (!found.is_null()).then_some(found)
        };
        let register = find(c"ggml_backend_register_host_buffer")?;
        let unregister = find(c"ggml_backend_unregister_host_buffer")?;
        Some((
            std::mem::transmute::<*mut c_void, Register>(register),
            std::mem::transmute::<*mut c_void, Unregister>(unregister),
        ))
    }
}

/// Returns the mappings of files that hold routed experts of a model.
fn mappings(model: &Model) -> Vec<Range<usize>> {
    let maps = Maps::read();
    let instances = model.tensors.iter().flat_map(|tensor| &tensor.instances);
    let experts = instances.filter(|instance| instance.mapped && instance.has_experts);
    let mut ranges: Vec<Range<usize>> = Vec::new();
    for instance in experts {
        let address = instance.original.data as usize;
        if !ranges.iter().any(|range| range.contains(&address)) {
            ranges.extend(maps.around(address));
        }
    }
    ranges
}
