//! A copy of ggml in this process: its public functions and the layout of its tensors.
//!
//! Modules, top to bottom:
//!
//! | module | contents |
//! |---|---|
//! | [`custom`], [`remote`] | a view that calls a function; buffers on other machines |
//! | [`layout`] | the offsets of the fields of tensors |
//! | [`one_device`] | functions for devices in a ggml that has none |
//! | [`sys`] | ggml's C API as far as it is used |

use std::ffi::{CStr, c_char, c_int, c_void};
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};

use llama_sidecar::config::Config;
use llama_sidecar::gguf::TypeInfo;
use llama_sidecar::protocol;
use once_cell::sync::OnceCell;
use parking_lot::Mutex;

use crate::process::journal;

mod custom;
mod layout;
mod one_device;
mod remote;
mod sys;

use custom::Custom;
pub use layout::FusedOps;
use layout::{Ops, TensorLayout};
pub use one_device::is_other;
pub use remote::{free_remote, is_remote, remote_waits};
pub use sys::*;

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
    /// How a node calls a function; determined on first use.
    custom: OnceCell<Option<Custom>>,
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
    /// after logging the reason once.
    pub fn resolve(symbol: &dyn Fn(&CStr) -> *mut c_void) -> Option<&'static Ggml> {
        static COPIES: Mutex<Vec<&'static Ggml>> = Mutex::new(Vec::new());
        let (functions, makers) = match resolve(symbol) {
            Ok(found) => found,
            Err(missing) => {
                passive(format_args!(
                    "this program's ggml has no function '{missing}': it is too old, too new or another library of that name"
                ));
                return None;
            }
        };
        let mut copies = COPIES.lock();
        let same = |copy: &&&Ggml| std::ptr::fn_addr_eq(copy.f.ggml_init, functions.ggml_init);
        if let Some(known) = copies.iter().find(same) {
            return Some(known);
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
                    custom: OnceCell::new(),
                }));
                copies.push(copy);
                Some(copy)
            }
            Err(unclear) => {
                passive(format_args!(
                    "the layout of this program's ggml_tensor is not understood ({unclear})"
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

    /// Makes a context for `tensors` tensors without data; `None` when there is no memory.
    pub fn context(&'static self, tensors: usize) -> Option<OwnContext> {
        // SAFETY: takes nothing.
        self.context_of(unsafe { (self.f.ggml_tensor_overhead)() } * tensors)
    }

    /// Makes a context for a graph of at most `nodes` nodes and `tensors` tensors without data;
    /// `None` when there is no memory.
    pub fn graph_context(&'static self, nodes: usize, tensors: usize) -> Option<OwnContext> {
        // SAFETY: plain values.
        self.context_of(unsafe {
            (self.f.ggml_tensor_overhead)() * tensors
                + (self.f.ggml_graph_overhead_custom)(nodes, false)
        })
    }

    fn context_of(&'static self, mem_size: usize) -> Option<OwnContext> {
        // SAFETY: plain values.
        let context = unsafe {
            (self.f.ggml_init)(InitParams {
                mem_size,
                mem_buffer: std::ptr::null_mut(),
                no_alloc: true,
            })
        };
        (!context.is_null()).then_some(OwnContext {
            ggml: self,
            context,
        })
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

    /// Returns the bytes that a device can still allocate; `None` if it does not report them.
    pub fn free_memory(&self, device: *mut Device) -> Option<u64> {
        let (mut free, mut total) = (0usize, 0usize);
        // SAFETY: a live device, and two numbers to write to.
        unsafe { (self.f.ggml_backend_dev_memory)(device, &raw mut free, &raw mut total) };
        (total > 0).then_some(free as u64)
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

    /// Returns the name of a device's backend.
    ///
    /// # Safety
    ///
    /// A live device of this copy.
    pub unsafe fn backend_name(&self, device: *mut Device) -> &'static CStr {
        let f = &self.f;
        // SAFETY: as the caller ensures; the name of a registration is a static string.
        unsafe {
            let registration = (f.ggml_backend_dev_backend_reg)(device);
            CStr::from_ptr((f.ggml_backend_reg_name)(registration))
        }
    }

    /// Returns the name of a buffer type.
    pub fn buffer_type_name(&self, buft: *mut BufferType) -> String {
        // SAFETY: a live buffer type has a name.
        let name = unsafe { CStr::from_ptr((self.f.ggml_backend_buft_name)(buft)) };
        name.to_string_lossy().into_owned()
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

    /// Makes the struct of a tensor of this type and shape; `None` when there is no memory.
    fn tensor_struct(&'static self, ty: i32, ne: &[i64]) -> Option<TensorStruct> {
        let context = self.context(1)?;
        // SAFETY: a new tensor of this copy.
        Some(unsafe { self.copy_struct(context.tensor(ty, ne)) })
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

/// A context without data that is freed when dropped.
pub struct OwnContext {
    ggml: &'static Ggml,
    context: *mut Context,
}

// SAFETY: ggml ties no context to a thread.
unsafe impl Send for OwnContext {}

impl OwnContext {
    /// Makes a tensor of this type and shape, without data.
    pub fn tensor(&self, ty: i32, ne: &[i64]) -> *mut Tensor {
        // SAFETY: a live context with memory for the tensor; the count is that of the extents.
        unsafe { (self.ggml.f.ggml_new_tensor)(self.context, ty, ne.len() as c_int, ne.as_ptr()) }
    }

    /// Returns the context, for functions that make tensors.
    pub fn raw(&self) -> *mut Context {
        self.context
    }
}

impl Drop for OwnContext {
    fn drop(&mut self) {
        // SAFETY: made by this copy, freed once.
        unsafe { (self.ggml.f.ggml_free)(self.context) }
    }
}

/// A buffer that holds one tensor's bytes and is freed when dropped.
pub struct OwnBuffer {
    ggml: &'static Ggml,
    buffer: *mut Buffer,
    /// The size in bytes.
    size: u64,
    /// Its tensor: some backends keep pointers to it. It is in no context, of which ik_llama.cpp has
    /// at most 64.
    tensor: TensorStruct,
}

// SAFETY: ggml ties no buffer to a thread.
unsafe impl Send for OwnBuffer {}

impl Drop for OwnBuffer {
    /// Frees it, or adds it to those that [`free_remote`] frees.
    fn drop(&mut self) {
        // SAFETY: allocated by this copy, dropped once, and no tensor uses it any more.
        unsafe { remote::free(self.ggml, self.buffer) }
    }
}

impl OwnBuffer {
    /// Allocates a buffer of a type for one tensor; returns both. The tensor lives as long as
    /// the buffer. The error is the size that could not be allocated.
    pub fn for_tensor(
        ggml: &'static Ggml,
        buft: *mut BufferType,
        ty: i32,
        ne: &[i64],
        name: &CStr,
    ) -> Result<(OwnBuffer, *mut Tensor), u64> {
        let size = OwnBuffer::size_for(ggml, buft, ty, ne)?;
        let tensor = ggml.tensor_struct(ty, ne).ok_or(0u64)?;
        // SAFETY: a live buffer type.
        let buffer = unsafe { (ggml.f.ggml_backend_buft_alloc_buffer)(buft, size as usize) };
        if buffer.is_null() {
            return Err(size);
        }
        let mut own = OwnBuffer {
            ggml,
            buffer,
            size,
            tensor,
        };
        let tensor = own.place_tensor(name);
        // SAFETY: a live buffer.
        unsafe {
            (ggml.f.ggml_backend_buffer_set_usage)(buffer, USAGE_WEIGHTS);
            if own.is_host() {
                let base = (ggml.f.ggml_backend_buffer_get_base)(buffer);
                use_huge_pages(base as usize, size as usize);
            }
        }
        Ok((own, tensor))
    }

    /// Gives the buffer to another tensor, which must not need more than its size; returns both.
    /// No tensor uses the buffer any more.
    pub fn reuse(self, ty: i32, ne: &[i64], name: &CStr) -> Result<(OwnBuffer, *mut Tensor), u64> {
        let mut own = self;
        own.tensor = own.ggml.tensor_struct(ty, ne).ok_or(0u64)?;
        let tensor = own.place_tensor(name);
        Ok((own, tensor))
    }

    /// Returns the size of a buffer of a type for one tensor.
    pub fn size_for(
        ggml: &'static Ggml,
        buft: *mut BufferType,
        ty: i32,
        ne: &[i64],
    ) -> Result<u64, u64> {
        let context = ggml.context(1).ok_or(0u64)?;
        let tensor = context.tensor(ty, ne);
        // SAFETY: a live buffer type, and a tensor of a live context.
        Ok(unsafe { (ggml.f.ggml_backend_buft_get_alloc_size)(buft, tensor) } as u64)
    }

    /// Places its tensor at the start of the buffer.
    fn place_tensor(&mut self, name: &CStr) -> *mut Tensor {
        let (f, tensor) = (&self.ggml.f, self.tensor.tensor());
        // SAFETY: the tensor is new and not shared; the buffer is live and has the size that its
        // type returns for the tensor.
        unsafe {
            (f.ggml_set_name)(tensor, name.as_ptr());
            let base = (f.ggml_backend_buffer_get_base)(self.buffer);
            (f.ggml_backend_tensor_alloc)(self.buffer, tensor, base);
        }
        tensor
    }

    /// Sets all bytes to zero.
    pub fn clear(&self) {
        // SAFETY: a live buffer.
        unsafe { (self.ggml.f.ggml_backend_buffer_clear)(self.buffer, 0) }
    }

    /// The size in bytes.
    pub fn size(&self) -> u64 {
        self.size
    }

    /// Returns its buffer type.
    pub fn buffer_type(&self) -> *mut BufferType {
        // SAFETY: a live buffer.
        unsafe { (self.ggml.f.ggml_backend_buffer_get_type)(self.buffer) }
    }

    /// Returns the name of its buffer type.
    pub fn place(&self) -> String {
        self.ggml.buffer_type_name(self.buffer_type())
    }

    /// Whether it belongs to the CPU, also in a special buffer type.
    pub fn is_in_memory_of_process(&self) -> bool {
        let f = &self.ggml.f;
        // SAFETY: live buffer types and devices, which are static.
        unsafe {
            let device = (f.ggml_backend_buft_get_device)(self.buffer_type());
            device.is_null() || (f.ggml_backend_dev_type)(device) == DEVICE_CPU
        }
    }

    /// Whether its bytes are in memory of this process.
    pub fn is_host(&self) -> bool {
        // SAFETY: a live buffer.
        unsafe { (self.ggml.f.ggml_backend_buffer_is_host)(self.buffer) }
    }
}

/// Advises the kernel to use huge pages for the part of a buffer that covers whole ones:
/// the first write to each page is a page fault, which costs more than the copy.
fn use_huge_pages(start: usize, len: usize) {
    const HUGE_PAGE: usize = 2 << 20;
    let first = start.next_multiple_of(HUGE_PAGE);
    let end = (start + len) / HUGE_PAGE * HUGE_PAGE;
    if first < end {
        // SAFETY: within the buffer; the advice changes no byte.
        unsafe { libc::madvise(first as *mut c_void, end - first, libc::MADV_HUGEPAGE) };
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
fn passive(reason: std::fmt::Arguments<'_>) {
    static SAID: AtomicBool = AtomicBool::new(false);
    if !SAID.swap(true, Ordering::Relaxed) {
        journal::note(|| protocol::Event::Passive {
            reason: reason.to_string(),
        });
        log::warn!("{reason}; hot-swap stays off in this program");
    }
}
