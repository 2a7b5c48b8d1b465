//! A copy of ggml in this process: its public functions and the layout of its tensors.
//!
//! Modules, top to bottom:
//!
//! | module | contents |
//! |---|---|
//! | [`own`] | contexts and buffers of the drop-in |
//! | [`remote`] | buffers on other machines, which wait to be freed |
//! | [`ends`] | the end of a buffer, seen at the buffer itself |
//! | [`split`] | devices that stand for several |
//! | [`custom`] | a view that calls a function when it is evaluated |
//! | [`layout`] | the offsets of the fields of tensors |
//! | [`sys`] | the functions of ggml's C API |
//! | [`left_out`] | functions that a linker left out of a program |
//! | [`one_device`] | functions for devices in a ggml that has none |
//! | [`types`] | types and constants of ggml's C API |

use std::ffi::{CStr, c_char, c_int, c_void};
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};

use once_cell::sync::OnceCell;
use parking_lot::Mutex;
use sidecar_core::config::Config;
use sidecar_core::gguf::TypeInfo;
use sidecar_core::protocol;

use crate::process::journal;

mod custom;
mod ends;
mod layout;
mod left_out;
mod one_device;
mod own;
mod remote;
pub mod split;
mod sys;
mod types;

use custom::{Custom, Origin};
pub use layout::FusedOps;
use layout::{Ops, TensorLayout};
pub use one_device::is_other;
pub use own::{OwnBuffer, OwnContext};
pub use remote::{free_remote, is_remote, remote_waits};
pub use sys::*;
pub use types::*;

/// One copy of ggml. Never freed.
pub struct Ggml {
    /// Its functions.
    pub f: Functions,
    /// The offsets of the fields of its tensors.
    pub layout: TensorLayout,
    /// Its numbers of operations.
    pub ops: Ops,
    /// Makes a part of a graph, where this copy exports the function.
    pub graph_view: Option<GraphView>,
    /// What shows how a node calls a function.
    custom_origin: Origin,
    /// How a node calls a function; determined on first use.
    custom: OnceCell<Option<Custom>>,
    /// The offset of `free_buffer` in buffers, if it is known; determined on first use.
    free_buffer_at: OnceCell<Option<usize>>,
}

/// The fields of a tensor that a switch replaces.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Descriptor {
    /// `type`.
    pub ty: i32,
    /// `nb`.
    pub nb: [usize; 4],
    /// `buffer`.
    pub buffer: *mut Buffer,
    /// `data`.
    pub data: *mut c_void,
    /// `extra`.
    pub extra: *mut c_void,
}

// SAFETY: the pointers are values that are written into tensors; the code that writes them
// ensures that they are still valid.
unsafe impl Send for Descriptor {}
// SAFETY: as above.
unsafe impl Sync for Descriptor {}

impl Ggml {
    /// Returns the copy whose functions `symbol` finds; `None` when it is not supported,
    /// after logging the reason once. `is_linked`: whether it is linked into the program.
    pub fn resolve(
        symbol: &dyn Fn(&CStr) -> *mut c_void,
        is_linked: bool,
    ) -> Option<&'static Ggml> {
        static COPIES: Mutex<Vec<&'static Ggml>> = Mutex::new(Vec::new());
        let (functions, makers) = match resolve(symbol) {
            Ok(found) => found,
            Err(missing) if is_linked => {
                passive(format_args!(
                    "the linker left '{missing}' out of this program, or its ggml is too old or too new: link all functions of ggml (without --gc-sections; in Rust, RUSTFLAGS='-C link-dead-code')"
                ));
                return None;
            }
            Err(missing) => {
                passive(format_args!(
                    "this program's ggml has no function '{missing}': it is too old, too new or another library of that name: report the version of llama.cpp"
                ));
                return None;
            }
        };
        let mut copies = COPIES.lock();
        let same = |copy: &&&Ggml| std::ptr::fn_addr_eq(copy.f.ggml_init, functions.ggml_init);
        if let Some(known) = copies.iter().find(same) {
            return Some(known);
        }
        if kind_of_cpu(symbol, &functions).is_some_and(|kind| kind != DEVICE_CPU) {
            passive(format_args!(
                "this program's ggml numbers the kinds of devices in another way: it is too old: use a llama.cpp of 2025 or later"
            ));
            return None;
        }
        match layout::probe(&functions, makers.as_ref()) {
            Ok((layout, ops)) => {
                let about = || about(symbol, &functions);
                if Config::get().strict && is_untried(&about().1) {
                    return None;
                }
                journal::note(|| {
                    let (path, version) = about();
                    protocol::Event::Ggml { path, version }
                });
                let view = symbol(c"ggml_graph_view");
                let copy = Box::leak(Box::new(Ggml {
                    f: functions,
                    layout,
                    ops,
                    // SAFETY: ggml-impl.h gives the function of this name this type.
                    graph_view: (!view.is_null())
                        .then(|| unsafe { std::mem::transmute::<*mut c_void, GraphView>(view) }),
                    custom_origin: Origin::of(symbol),
                    custom: OnceCell::new(),
                    free_buffer_at: OnceCell::new(),
                }));
                copies.push(copy);
                Some(copy)
            }
            Err(unclear) => {
                passive(format_args!(
                    "the layout of this program's ggml_tensor is not understood ({unclear}): report the version of llama.cpp"
                ));
                None
            }
        }
    }

    /// Whether this copy has a type of the same name and layout.
    pub fn knows(&self, ty: &TypeInfo) -> bool {
        let id = ty.id as c_int;
        let row_bytes = ty.row_bytes(ty.block);
        // SAFETY: ggml_type_name takes any number; the others are only called for a type
        // that has the expected name.
        unsafe {
            let name = (self.f.ggml_type_name)(id);
            !name.is_null()
                && CStr::from_ptr(name) == ty.c_name()
                && (self.f.ggml_type_size)(id) as u64 == ty.bytes
                && (self.f.ggml_blck_size)(id) as u64 == ty.block
                && Some((self.f.ggml_row_size)(id, ty.block as i64) as u64) == row_bytes
        }
    }

    /// Returns the data of a tensor.
    ///
    /// # Safety
    ///
    /// A live tensor of this copy.
    pub unsafe fn data(&self, tensor: *const Tensor) -> *mut c_void {
        // SAFETY: as the caller ensures.
        unsafe { self.layout.read(tensor.cast_mut(), self.layout.data) }
    }

    /// Evaluates a graph without a scheduler, and returns a status of ggml.
    ///
    /// # Safety
    ///
    /// A live backend, and a live graph whose tensors are in its memory.
    pub unsafe fn compute(&self, backend: *mut Backend, graph: *mut Graph) -> u32 {
        // SAFETY: as the caller ensures.
        unsafe {
            let status = (self.f.ggml_backend_graph_compute_async)(backend, graph);
            (self.f.ggml_backend_synchronize)(backend);
            status as u32
        }
    }

    /// Returns the memory that a context has for its tensors.
    ///
    /// # Safety
    ///
    /// A live context of this copy.
    pub unsafe fn memory(&self, context: *const Context) -> Range<usize> {
        // SAFETY: as the caller ensures; both functions only read.
        unsafe {
            let start = (self.f.ggml_get_mem_buffer)(context) as usize;
            start..start + (self.f.ggml_get_mem_size)(context)
        }
    }

    /// Returns the bytes that a device can still allocate; `None` if it does not report them. Of a device that
    /// stands for several, it is the smallest number.
    pub fn free_memory(&self, device: *mut Device) -> Option<u64> {
        let free = |device| {
            let (free, total) = self.memory_of(device);
            (total > 0).then_some(free)
        };
        let of_several = split::devices(device);
        let smallest = of_several.iter().map(|&device| free(device)).min();
        smallest.unwrap_or_else(|| free(device))
    }

    /// Whether ggml splits tensors in a buffer type over several devices, which are known.
    pub fn is_split(&self, buft: *mut BufferType) -> bool {
        // SAFETY: a live buffer type, which is static.
        let device = unsafe { (self.f.ggml_backend_buft_get_device)(buft) };
        split::is_known(device)
    }

    /// Returns the bytes that a device can still allocate, and all bytes that it has; 0 if it does
    /// not report them.
    pub fn memory_of(&self, device: *mut Device) -> (u64, u64) {
        let (mut free, mut total) = (0usize, 0usize);
        // SAFETY: a live device, and two numbers to write to.
        unsafe { (self.f.ggml_backend_dev_memory)(device, &raw mut free, &raw mut total) };
        (free as u64, total as u64)
    }

    /// Returns the special buffer types of a CPU device, best first.
    pub fn special_types(&self, cpu: *mut Device) -> Vec<*mut BufferType> {
        type GetExtra = unsafe extern "C-unwind" fn(*mut Device) -> *mut *mut BufferType;
        let name = c"ggml_backend_dev_get_extra_bufts";
        // SAFETY: a live device; ggml-backend.h gives the function this type, and its result is an
        // array that ends with null, or null.
        let list = unsafe {
            let found = self.device_function(cpu, name);
            match found.is_null() {
                true => std::ptr::null_mut(),
                false => std::mem::transmute::<*mut c_void, GetExtra>(found)(cpu),
            }
        };
        (0..)
            .map_while(move |i: usize| match list.is_null() {
                true => None,
                // SAFETY: read up to the null and no further.
                false => Some(unsafe { *list.add(i) }),
            })
            .take_while(|buft| !buft.is_null())
            .collect()
    }

    /// Whether a device has kernels for an operation that reads a weight, which is still without memory, from a
    /// buffer type.
    ///
    /// # Safety
    ///
    /// A live device and buffer type; tensors of a live context of this copy.
    pub unsafe fn supports(
        &self,
        device: *mut Device,
        weight: *mut Tensor,
        node: *mut Tensor,
        buft: *mut BufferType,
    ) -> bool {
        // SAFETY: as the caller ensures; a buffer of no bytes stands for the one to come, and is taken
        // out before it is freed.
        unsafe {
            let buffer = (self.f.ggml_backend_buft_alloc_buffer)(buft, 0);
            if buffer.is_null() {
                return false;
            }
            self.layout.write(weight, self.layout.buffer, buffer);
            let supported = (self.f.ggml_backend_dev_supports_op)(device, node);
            self.layout
                .write(weight, self.layout.buffer, std::ptr::null_mut::<()>());
            (self.f.ggml_backend_buffer_free)(buffer);
            supported
        }
    }

    /// Whether a device is the CPU.
    ///
    /// # Safety
    ///
    /// A device of this copy, or null.
    pub unsafe fn is_cpu(&self, device: *mut Device) -> bool {
        // SAFETY: as the caller ensures.
        !device.is_null() && unsafe { (self.f.ggml_backend_dev_type)(device) } == DEVICE_CPU
    }

    /// Returns a function of a device's backend by name; null if it has none, as a device that stands for several.
    ///
    /// # Safety
    ///
    /// A live device of this copy.
    pub unsafe fn device_function(&self, device: *mut Device, name: &CStr) -> *mut c_void {
        // SAFETY: as the caller ensures.
        unsafe {
            let registration = (self.f.ggml_backend_dev_backend_reg)(device);
            match registration.is_null() {
                true => std::ptr::null_mut(),
                false => (self.f.ggml_backend_reg_get_proc_address)(registration, name.as_ptr()),
            }
        }
    }

    /// Returns the name of a device's backend; empty for a device that stands for several.
    ///
    /// # Safety
    ///
    /// A live device of this copy.
    pub unsafe fn backend_name(&self, device: *mut Device) -> &'static CStr {
        let f = &self.f;
        // SAFETY: as the caller ensures; the name of a registration is a static string.
        unsafe {
            let registration = (f.ggml_backend_dev_backend_reg)(device);
            match registration.is_null() {
                true => c"",
                false => CStr::from_ptr((f.ggml_backend_reg_name)(registration)),
            }
        }
    }

    /// Returns the name of a buffer type; of one that stands for several, their names.
    pub fn buffer_type_name(&self, buft: *mut BufferType) -> String {
        // SAFETY: live buffer types and devices, which are static and have names.
        unsafe {
            let name = |buft| CStr::from_ptr((self.f.ggml_backend_buft_name)(buft));
            let of_several = split::devices((self.f.ggml_backend_buft_get_device)(buft));
            let parts = of_several.into_iter();
            let parts = parts.map(|device| (self.f.ggml_backend_dev_buffer_type)(device));
            let names: Vec<_> = parts.map(|buft| name(buft).to_string_lossy()).collect();
            match names.is_empty() {
                true => name(buft).to_string_lossy().into_owned(),
                false => names.join(" + "),
            }
        }
    }

    /// Reads the fields that a switch replaces.
    ///
    /// # Safety
    ///
    /// The tensor is one of this copy, and no other thread writes to it.
    pub unsafe fn descriptor(&self, tensor: *const Tensor) -> Descriptor {
        let at = &self.layout;
        // SAFETY: the offsets are those of the fields.
        unsafe {
            Descriptor {
                ty: at.read(tensor, at.ty),
                nb: at.read(tensor, at.nb),
                buffer: at.read(tensor, at.buffer),
                data: at.read(tensor, at.data),
                extra: at.read(tensor, at.extra),
            }
        }
    }

    /// Writes the fields that a switch replaces.
    ///
    /// # Safety
    ///
    /// The tensor is one of this copy, no other thread uses it, and the buffer of the
    /// descriptor outlives its use.
    pub unsafe fn describe(&self, tensor: *mut Tensor, to: &Descriptor) {
        let at = &self.layout;
        // SAFETY: the offsets are those of the fields.
        unsafe {
            at.write(tensor, at.ty, to.ty);
            at.write(tensor, at.nb, to.nb);
            at.write(tensor, at.buffer, to.buffer);
            at.write(tensor, at.data, to.data);
            at.write(tensor, at.extra, to.extra);
        }
    }

    /// Copies the struct of a tensor: the copy has its name, shape and memory.
    ///
    /// # Safety
    ///
    /// The tensor is one of this copy of ggml, and no other thread writes to it.
    pub unsafe fn copy_struct(&self, tensor: *const Tensor) -> TensorStruct {
        // `extra` is the last field that is used; a tensor may be the last one of its context.
        let end = self.layout.extra + size_of::<*mut c_void>();
        // SAFETY: takes nothing.
        let size = unsafe { (self.f.ggml_tensor_overhead)() }.max(end);
        let mut memory = vec![0u128; size.div_ceil(size_of::<u128>())];
        // SAFETY: the tensor has `end` bytes, and the memory has at least as many.
        unsafe {
            std::ptr::copy_nonoverlapping(tensor.cast::<u8>(), memory.as_mut_ptr().cast(), end)
        };
        TensorStruct(memory)
    }

    fn custom(&self) -> Option<&Custom> {
        let of = (&self.f, &self.layout, &self.ops);
        let learn = || Custom::learn(&self.custom_origin, of);
        self.custom.get_or_init(learn).as_ref()
    }

    /// Returns the offset of the parameters of operations in a tensor, and their bytes.
    pub fn parameters(&self) -> Option<(usize, usize)> {
        Some(self.custom()?.parameters())
    }

    /// Turns a view into a node that calls a function, on one thread; returns whether the tensor
    /// is a view, or was turned before, and the CPU supports such a node.
    ///
    /// # Safety
    ///
    /// A node of a live graph that the CPU backend evaluates, and that no thread evaluates now.
    /// The function and its data live as long as the graph.
    pub unsafe fn call_at_view(
        &self,
        cpu: *mut Device,
        node: *mut Tensor,
        function: Callback,
        data: *const c_void,
    ) -> bool {
        let of = (&self.f, &self.layout, &self.ops);
        // SAFETY: as the caller ensures.
        let turn = |custom: &Custom| unsafe { custom.call_at_view(of, cpu, node, function, data) };
        self.custom().is_some_and(turn)
    }

    /// Gives a tensor the memory of another one of the same type and shape.
    ///
    /// # Safety
    ///
    /// Both are tensors of this copy, no other thread uses the first, and the memory outlives
    /// its use.
    pub unsafe fn share_memory(&self, tensor: *mut Tensor, with: *const Tensor) {
        let at = &self.layout;
        // SAFETY: as the caller ensures; the offsets are those of the fields.
        unsafe {
            let to = self.descriptor(with);
            at.write(tensor, at.buffer, to.buffer);
            at.write(tensor, at.data, to.data);
            at.write(tensor, at.extra, to.extra);
        }
    }
}

/// The struct of a tensor in memory of the drop-in.
pub struct TensorStruct(Vec<u128>);

impl TensorStruct {
    /// Returns the tensor, which lives as long as the struct.
    pub fn tensor(&mut self) -> *mut Tensor {
        self.0.as_mut_ptr().cast()
    }
}

/// Finds the functions of a copy of ggml, or returns the name of one that is missing.
fn resolve(
    symbol: &dyn Fn(&CStr) -> *mut c_void,
) -> Result<(Functions, Option<FusedMakers>), &'static str> {
    let functions = Functions::resolve(symbol)?;
    let makers = FusedMakers::resolve(symbol)?;
    match (has_devices(symbol), &makers) {
        (true, _) => {}
        (false, Some(_)) => one_device::prepare(symbol)?,
        (false, None) => return Err("ggml_backend_dev_type"),
    }
    Ok((functions, makers))
}

/// Returns the kind of the CPU, where the copy has its backend. It was 2 in October 2024.
fn kind_of_cpu(symbol: &dyn Fn(&CStr) -> *mut c_void, functions: &Functions) -> Option<c_int> {
    let init = symbol(c"ggml_backend_cpu_init");
    if init.is_null() || !has_devices(symbol) {
        return None;
    }
    // SAFETY: ggml's headers give the function of this name this type; its backend is freed.
    unsafe {
        let init: unsafe extern "C-unwind" fn() -> *mut Backend = std::mem::transmute(init);
        let backend = init();
        if backend.is_null() {
            return None;
        }
        let kind = (functions.ggml_backend_dev_type)((functions.ggml_backend_get_device)(backend));
        (functions.ggml_backend_free)(backend);
        Some(kind)
    }
}

/// Returns the file of a copy of ggml, and its version.
fn about(symbol: &dyn Fn(&CStr) -> *mut c_void, functions: &Functions) -> (String, String) {
    let mut found = std::mem::MaybeUninit::<libc::Dl_info>::zeroed();
    let address = functions.ggml_init as *const c_void;
    // SAFETY: dladdr fills the struct, whose names are C strings of loaded objects. ggml.h
    // declares both functions without arguments and with a static string as result.
    unsafe {
        let path = match libc::dladdr(address, found.as_mut_ptr()) {
            0 => None,
            _ => Some(CStr::from_ptr(found.assume_init().dli_fname)),
        };
        let text = |name: &CStr| {
            let found = symbol(name);
            if found.is_null() {
                return None;
            }
            let function: extern "C" fn() -> *const c_char = std::mem::transmute(found);
            let text = function();
            (!text.is_null()).then(|| CStr::from_ptr(text).to_string_lossy().into_owned())
        };
        let version = [text(c"ggml_version"), text(c"ggml_commit")];
        let known = version.into_iter().flatten();
        let version: Vec<String> = known.filter(|text| text != "unknown").collect();
        let path = path.map(|path| path.to_string_lossy().into_owned());
        (path.unwrap_or_default(), version.join(" "))
    }
}

/// Whether the drop-in was not tried with a version of ggml, which is then logged.
fn is_untried(version: &str) -> bool {
    if protocol::is_tried_ggml(version) {
        return false;
    }
    let version = match version {
        "" => "that is not stated",
        known => known,
    };
    passive(format_args!(
        "LLAMA_SIDECAR_STRICT is set, and the drop-in was not tried with this program's ggml, of version {version}: unset the variable to try it"
    ));
    true
}

/// Logs once for the process why hot-swap is off.
pub fn passive(reason: std::fmt::Arguments<'_>) {
    static SAID: AtomicBool = AtomicBool::new(false);
    if !SAID.swap(true, Ordering::Relaxed) {
        journal::note(|| protocol::Event::Passive {
            reason: reason.to_string(),
        });
        log::warn!("{reason}; hot-swap stays off in this program");
    }
}
