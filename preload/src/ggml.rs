//! One copy of ggml in this process: its public functions and the layout of its
//! tensors.
//!
//! Names, signatures and constants are those of ggml.h, ggml-backend.h and gguf.h.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};

use llama_sidecar::gguf::TypeInfo;
use llama_sidecar::protocol::Event;
use parking_lot::Mutex;

use crate::journal;
use crate::layout::{Layout, Ops};
use crate::origin::Origin;

/// Opaque types of ggml.
macro_rules! opaque {
    ($($(#[$doc:meta])* $name:ident)*) => {
        $($(#[$doc])* #[repr(C)] pub struct $name { _opaque: [u8; 0] })*
    };
}

opaque! {
    /// `struct ggml_tensor`.
    Tensor
    /// `struct ggml_context`.
    Context
    /// `struct ggml_cgraph`.
    Graph
    /// `struct ggml_backend_sched`.
    Sched
    /// `struct ggml_backend`.
    Backend
    /// `struct ggml_backend_buffer`.
    Buffer
    /// `struct ggml_backend_buffer_type`.
    BufferType
    /// `struct ggml_backend_device`.
    Device
    /// `struct ggml_backend_reg`.
    Registration
}

/// `struct ggml_init_params`.
#[repr(C)]
pub struct InitParams {
    /// Bytes of the context.
    pub mem_size: usize,
    /// Its memory; ggml allocates it when this is null.
    pub mem_buffer: *mut c_void,
    /// Whether tensors get no memory for data.
    pub no_alloc: bool,
}

/// `GGML_BACKEND_DEVICE_TYPE_CPU`.
pub const DEVICE_CPU: c_int = 0;
/// `GGML_BACKEND_DEVICE_TYPE_ACCEL`: after the CPU and two kinds of GPU. What follows
/// (`META`) stands for several devices.
pub const LAST_PLAIN_DEVICE: c_int = 3;
/// `GGML_BACKEND_BUFFER_USAGE_WEIGHTS`.
const USAGE_WEIGHTS: c_int = 1;
/// `GGML_STATUS_SUCCESS`.
pub const STATUS_SUCCESS: u32 = 0;
/// `GGML_STATUS_FAILED`, as it comes back in a register.
pub const STATUS_FAILED: usize = -1i32 as u32 as usize;

macro_rules! functions {
    ($($name:ident($($argument:ty),*) $(-> $result:ty)?;)*) => {
        /// Public functions of ggml, found through the object that uses it.
        #[allow(missing_docs, reason = "documented in ggml's headers")]
        pub struct Functions {
            $(pub $name: unsafe extern "C-unwind" fn($($argument),*) $(-> $result)?,)*
        }

        impl Functions {
            /// Finds all of them, or names one that is missing.
            fn of(origin: &Origin) -> Result<Functions, &'static str> {
                Ok(Functions {
                    $($name: {
                        let name = concat!(stringify!($name), "\0");
                        let name = CStr::from_bytes_with_nul(name.as_bytes()).expect("one NUL");
                        let found = origin.symbol(name);
                        if found.is_null() {
                            return Err(stringify!($name));
                        }
                        // SAFETY: ggml's headers give the function of this name this type.
                        unsafe {
                            std::mem::transmute::<
                                *mut c_void,
                                unsafe extern "C-unwind" fn($($argument),*) $(-> $result)?,
                            >(found)
                        }
                    },)*
                })
            }
        }
    };
}

functions! {
    ggml_init(InitParams) -> *mut Context;
    ggml_free(*mut Context);
    ggml_get_mem_buffer(*const Context) -> *mut c_void;
    ggml_get_mem_size(*const Context) -> usize;
    ggml_tensor_overhead() -> usize;
    ggml_new_tensor(*mut Context, c_int, c_int, *const i64) -> *mut Tensor;
    ggml_view_tensor(*mut Context, *mut Tensor) -> *mut Tensor;
    ggml_set_name(*mut Tensor, *const c_char) -> *mut Tensor;
    ggml_get_name(*const Tensor) -> *const c_char;
    ggml_get_data(*const Tensor) -> *mut c_void;
    ggml_nbytes(*const Tensor) -> usize;
    ggml_set_input(*mut Tensor);
    ggml_add(*mut Context, *mut Tensor, *mut Tensor) -> *mut Tensor;
    ggml_mul(*mut Context, *mut Tensor, *mut Tensor) -> *mut Tensor;
    ggml_mul_mat(*mut Context, *mut Tensor, *mut Tensor) -> *mut Tensor;
    ggml_mul_mat_id(*mut Context, *mut Tensor, *mut Tensor, *mut Tensor) -> *mut Tensor;
    ggml_get_rows(*mut Context, *mut Tensor, *mut Tensor) -> *mut Tensor;
    ggml_op_name(c_int) -> *const c_char;
    ggml_type_name(c_int) -> *const c_char;
    ggml_type_size(c_int) -> usize;
    ggml_blck_size(c_int) -> i64;
    ggml_graph_n_nodes(*mut Graph) -> c_int;
    ggml_graph_node(*mut Graph, c_int) -> *mut Tensor;
    ggml_backend_buffer_free(*mut Buffer);
    ggml_backend_buffer_get_base(*mut Buffer) -> *mut c_void;
    ggml_backend_buffer_get_type(*mut Buffer) -> *mut BufferType;
    ggml_backend_buffer_is_host(*mut Buffer) -> bool;
    ggml_backend_buffer_set_usage(*mut Buffer, c_int);
    ggml_backend_buft_alloc_buffer(*mut BufferType, usize) -> *mut Buffer;
    ggml_backend_buft_get_alloc_size(*mut BufferType, *const Tensor) -> usize;
    ggml_backend_buft_get_device(*mut BufferType) -> *mut Device;
    ggml_backend_buft_name(*mut BufferType) -> *const c_char;
    ggml_backend_cpu_buffer_type() -> *mut BufferType;
    ggml_backend_tensor_alloc(*mut Buffer, *mut Tensor, *mut c_void) -> c_int;
    ggml_backend_tensor_set(*mut Tensor, *const c_void, usize, usize);
    ggml_backend_tensor_get(*const Tensor, *mut c_void, usize, usize);
    ggml_backend_dev_type(*mut Device) -> c_int;
    ggml_backend_dev_memory(*mut Device, *mut usize, *mut usize);
    ggml_backend_dev_supports_op(*mut Device, *const Tensor) -> bool;
    ggml_backend_dev_host_buffer_type(*mut Device) -> *mut BufferType;
    ggml_backend_dev_backend_reg(*mut Device) -> *mut Registration;
    ggml_backend_reg_get_proc_address(*mut Registration, *const c_char) -> *mut c_void;
    ggml_backend_get_device(*mut Backend) -> *mut Device;
    ggml_backend_sched_synchronize(*mut Sched);
    ggml_backend_sched_get_n_backends(*mut Sched) -> c_int;
    ggml_backend_sched_get_backend(*mut Sched, c_int) -> *mut Backend;
}

/// One copy of ggml. Never freed.
pub struct Ggml {
    /// Its functions.
    pub f: Functions,
    /// Where the fields of its tensors are.
    pub layout: Layout,
    /// Its numbers of the operations that read weights.
    pub ops: Ops,
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

// SAFETY: the pointers are values that are written into tensors; who does it sees to
// it that they are still valid.
unsafe impl Send for Descriptor {}
// SAFETY: as above.
unsafe impl Sync for Descriptor {}

impl Ggml {
    /// The copy that an object uses. Says once why it is not understood.
    pub fn of(origin: &Origin) -> Option<&'static Ggml> {
        static COPIES: Mutex<Vec<&'static Ggml>> = Mutex::new(Vec::new());
        let functions = match Functions::of(origin) {
            Ok(functions) => functions,
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
        match crate::layout::probe(&functions) {
            Ok((layout, ops)) => {
                journal::note(|| {
                    let (path, version) = about(origin, &functions);
                    Event::Ggml { path, version }
                });
                let copy = Box::leak(Box::new(Ggml {
                    f: functions,
                    layout,
                    ops,
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

    /// Whether this copy knows a type by the same name and with the same layout.
    pub fn knows(&self, ty: &TypeInfo) -> bool {
        let id = ty.id as c_int;
        // SAFETY: ggml_type_name takes any number; the others are only asked for a type
        // that has the expected name.
        unsafe {
            let name = (self.f.ggml_type_name)(id);
            !name.is_null()
                && CStr::from_ptr(name) == ty.c_name()
                && (self.f.ggml_type_size)(id) as u64 == ty.bytes
                && (self.f.ggml_blck_size)(id) as u64 == ty.block
        }
    }

    /// A context for `tensors` tensors without data; `None` when there is no memory.
    pub fn context(&'static self, tensors: usize) -> Option<OwnContext> {
        // SAFETY: plain values.
        let context = unsafe {
            (self.f.ggml_init)(InitParams {
                mem_size: (self.f.ggml_tensor_overhead)() * tensors,
                mem_buffer: std::ptr::null_mut(),
                no_alloc: true,
            })
        };
        (!context.is_null()).then_some(OwnContext {
            ggml: self,
            context,
        })
    }

    /// The memory that a context has for its tensors.
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

    /// Bytes that a device can still allocate; `None` where it does not say.
    pub fn free_memory(&self, device: *mut Device) -> Option<u64> {
        let (mut free, mut total) = (0usize, 0usize);
        // SAFETY: a live device, and two numbers to write to.
        unsafe { (self.f.ggml_backend_dev_memory)(device, &raw mut free, &raw mut total) };
        (total > 0).then_some(free as u64)
    }

    /// The name of a buffer type.
    pub fn buffer_type_name(&self, buft: *mut BufferType) -> String {
        // SAFETY: a live buffer type has a name.
        let name = unsafe { CStr::from_ptr((self.f.ggml_backend_buft_name)(buft)) };
        name.to_string_lossy().into_owned()
    }

    /// Reads the fields that a switch replaces.
    ///
    /// # Safety
    ///
    /// The tensor is one of this copy, and nobody writes to it meanwhile.
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
    /// The tensor is one of this copy, nobody uses it meanwhile, and the buffer of the
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
}

/// A context without data that is freed when dropped.
pub struct OwnContext {
    ggml: &'static Ggml,
    context: *mut Context,
}

// SAFETY: a context belongs to whoever holds it; ggml ties none to a thread.
unsafe impl Send for OwnContext {}

impl OwnContext {
    /// A new tensor of this type and shape, without data.
    pub fn tensor(&self, ty: i32, ne: &[i64]) -> *mut Tensor {
        // SAFETY: a live context with room for it, and as many extents as are counted.
        unsafe { (self.ggml.f.ggml_new_tensor)(self.context, ty, ne.len() as c_int, ne.as_ptr()) }
    }

    /// The context itself, for functions that make tensors.
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
    /// Bytes that it takes.
    size: u64,
    /// The tensor it was made for: some backends keep pointers into it.
    _context: OwnContext,
}

// SAFETY: ggml ties no buffer to a thread.
unsafe impl Send for OwnBuffer {}

impl Drop for OwnBuffer {
    fn drop(&mut self) {
        // SAFETY: allocated by this copy, freed once, and no tensor uses it any more.
        unsafe { (self.ggml.f.ggml_backend_buffer_free)(self.buffer) }
    }
}

impl OwnBuffer {
    /// Allocates a buffer of a type for one tensor; `Err` with the size that was not to
    /// be had. The second value is the tensor, which lives as long as the buffer.
    pub fn for_tensor(
        ggml: &'static Ggml,
        buft: *mut BufferType,
        ty: i32,
        ne: &[i64],
        name: &CStr,
    ) -> Result<(OwnBuffer, *mut Tensor), u64> {
        let context = ggml.context(1).ok_or(0u64)?;
        let tensor = context.tensor(ty, ne);
        // SAFETY: the tensor is new and not shared; the buffer is as large as its type
        // says that the tensor needs.
        unsafe {
            (ggml.f.ggml_set_name)(tensor, name.as_ptr());
            let size = (ggml.f.ggml_backend_buft_get_alloc_size)(buft, tensor);
            let buffer = (ggml.f.ggml_backend_buft_alloc_buffer)(buft, size);
            if buffer.is_null() {
                return Err(size as u64);
            }
            let own = OwnBuffer {
                ggml,
                buffer,
                size: size as u64,
                _context: context,
            };
            (ggml.f.ggml_backend_buffer_set_usage)(buffer, USAGE_WEIGHTS);
            let base = (ggml.f.ggml_backend_buffer_get_base)(buffer);
            (ggml.f.ggml_backend_tensor_alloc)(buffer, tensor, base);
            if own.is_host() {
                use_huge_pages(base as usize, size);
            }
            Ok((own, tensor))
        }
    }

    /// Bytes that it takes.
    pub fn size(&self) -> u64 {
        self.size
    }

    /// The name of its buffer type.
    pub fn place(&self) -> String {
        // SAFETY: a live buffer.
        let buft = unsafe { (self.ggml.f.ggml_backend_buffer_get_type)(self.buffer) };
        self.ggml.buffer_type_name(buft)
    }

    /// Whether its bytes are plain memory of this process.
    pub fn is_host(&self) -> bool {
        // SAFETY: a live buffer.
        unsafe { (self.ggml.f.ggml_backend_buffer_is_host)(self.buffer) }
    }
}

/// Asks for huge pages where a buffer in plain memory has whole ones: filling new
/// memory costs a fault a page, which is more than copying into it.
fn use_huge_pages(start: usize, len: usize) {
    const HUGE_PAGE: usize = 2 << 20;
    let first = start.next_multiple_of(HUGE_PAGE);
    let end = (start + len) / HUGE_PAGE * HUGE_PAGE;
    if first < end {
        // SAFETY: within our own buffer; advice changes no byte.
        unsafe { libc::madvise(first as *mut c_void, end - first, libc::MADV_HUGEPAGE) };
    }
}

/// The file of a copy of ggml, and the version that it says it is.
fn about(origin: &Origin, functions: &Functions) -> (String, String) {
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
            let symbol = origin.symbol(name);
            if symbol.is_null() {
                return None;
            }
            let ask: extern "C" fn() -> *const c_char = std::mem::transmute(symbol);
            let text = ask();
            (!text.is_null()).then(|| CStr::from_ptr(text).to_string_lossy().into_owned())
        };
        let version = [text(c"ggml_version"), text(c"ggml_commit")];
        let version: Vec<String> = version.into_iter().flatten().collect();
        let path = path.map(|path| path.to_string_lossy().into_owned());
        (path.unwrap_or_default(), version.join(" "))
    }
}

/// Says once for the process why nothing will be swapped.
fn passive(reason: std::fmt::Arguments<'_>) {
    static SAID: AtomicBool = AtomicBool::new(false);
    if !SAID.swap(true, Ordering::Relaxed) {
        journal::note(|| Event::Passive {
            reason: reason.to_string(),
        });
        log::warn!("{reason}; hot-swap stays off in this program");
    }
}
