//! The exported functions, which replace functions of ggml and llama.cpp.
//!
//! Each exported function consists of a few instructions that save every argument register,
//! call [`route`], restore the registers and jump to the address that `route` returned: the
//! function that the caller meant, or its replacement here. A program that has unrelated
//! functions of these names is not affected.
//!
//! A replacement calls the function that was meant, and returns its result unchanged,
//! whatever its type is.

use std::cell::Cell;
use std::ffi::{CStr, OsStr, c_char, c_int, c_void};
use std::os::unix::ffi::OsStrExt;
use std::panic::AssertUnwindSafe;
use std::path::Path;
use std::sync::Arc;

use sidecar_core::config::Config;
use sidecar_core::logger;
use sidecar_core::protocol::Event;

use crate::ggml::{
    self, Backend, Buffer, BufferType, Context, CopyCallback, Device, Ggml, Graph, Registration,
    STATUS_FAILED, STATUS_SUCCESS, Sched, Tensor, split,
};
use crate::hotswap::reloader;
use crate::loader::caller::{Caller, Hook, hooks};
use crate::loader::linked::{self, Arguments};
use crate::loader::loaded::Place;
use crate::loader::redirect::Redirection;
use crate::postfetch::part::{self, Evaluation};
use crate::postfetch::{copy_callback, inferred, placement};
use crate::process::journal;
use crate::process::thread::{self, Inside};
use crate::program::models::Model;
use crate::program::parts::{self, Parts, Requested};
use crate::program::sched::{self, Allocated, Scheduler};
use crate::program::weight_copies::{self, WeightCopy};
use crate::program::{first_graph, loads, masks, models, own_cache, routing};
use crate::rounds;
use crate::streaming::{self, load};
use crate::trace::counts;
use crate::{lifecycle, logits, postfetch};

/// Exports each name of the table as a jump to where [`route`] decides.
macro_rules! export {
    ($($hook:ident = $name:ident,)*) => {
        $(
            /// Jumps to the address that [`route`] returns, with all arguments unchanged.
            ///
            /// # Safety
            ///
            /// As for the function of this name.
            #[unsafe(naked)]
            #[unsafe(no_mangle)]
            pub unsafe extern "C" fn $name() {
                crate::arch::routed!(Hook::$hook as usize, route)
            }
        )*
    };
}

hooks!(export);

/// The function of the drop-in that replaces an interposed one.
fn replacement(hook: Hook) -> *const c_void {
    match hook {
        Hook::GgufInit => gguf_opened as *const c_void,
        Hook::GgufInitStream => gguf_stream_opened as *const c_void,
        Hook::TensorAlloc => tensor_alloc as *const c_void,
        Hook::TensorsAlloc => tensors_alloc as *const c_void,
        Hook::BufferAlloc => buffer_alloc as *const c_void,
        Hook::BufferGetSize => buffer_get_size as *const c_void,
        Hook::BufferFree => buffer_free as *const c_void,
        Hook::BackendFree => backend_free as *const c_void,
        Hook::ContextFree => context_free as *const c_void,
        Hook::SchedReset => sched_reset as *const c_void,
        Hook::SchedSetEvalCallback => sched_set_eval_callback as *const c_void,
        Hook::SchedSetCopyCallback => sched_set_copy_callback as *const c_void,
        Hook::SchedReserve => sched_reserve as *const c_void,
        Hook::SchedAllocGraph => sched_alloc_graph as *const c_void,
        Hook::SchedCompute => sched_compute as *const c_void,
        Hook::SchedSynchronize => sched_synchronize as *const c_void,
        Hook::SchedFree => sched_free as *const c_void,
        Hook::BackendCompute => backend_compute as *const c_void,
        Hook::BackendSynchronize => part_synchronize as *const c_void,
        Hook::TensorGetAsync => part_get as *const c_void,
        Hook::TensorSetAsync => part_set as *const c_void,
        Hook::TensorCopy => part_copy as *const c_void,
        Hook::OffloadOp => offload_op as *const c_void,
        Hook::MetaDevice => meta_device as *const c_void,
        Hook::FunctionLookup => function_looked_up as *const c_void,
        Hook::ReloadChangedTensors => reload_changed_tensors as *const c_void,
    }
}

/// A call that was routed to a replacement.
#[derive(Clone, Copy)]
struct Call {
    caller: &'static Caller,
    ggml: &'static Ggml,
    real: *mut c_void,
}

thread_local! {
    /// Passed from [`route`] to the replacement that it chose.
    static CALL: Cell<Option<Call>> = const { Cell::new(None) };
}

/// Returns the function that a call goes to: the one that was meant, or its replacement.
extern "C" fn route(hook: Hook, return_address: usize, arguments: &Arguments) -> *const c_void {
    with_errno(|| {
        let (caller, real) = Caller::of(return_address).resolve(hook, arguments);
        let real = match real {
            found if !found.is_null() => found,
            _ if hook == Hook::ReloadChangedTensors => nothing_reloaded as *mut c_void,
            _ => return missing(hook, caller),
        };
        destination(hook, caller, real, arguments)
    })
}

/// Returns the function that a call of a function of the program goes to; see [`linked`].
fn route_linked(program: Place, hook: usize, real: usize, arguments: &Arguments) -> *const c_void {
    with_errno(|| {
        let caller = Caller::of(program.start);
        destination(Hook::ALL[hook], caller, real as *mut c_void, arguments)
    })
}

/// Calls `work` and leaves errno as it is, as the loader does when it resolves a function.
fn with_errno<R>(work: impl FnOnce() -> R) -> R {
    // SAFETY: the address of errno of this thread.
    let errno = unsafe { &mut *libc::__errno_location() };
    let before = *errno;
    let result = work();
    *errno = before;
    result
}

/// Makes calls of a program visible that ggml is linked into. Runs when the library is loaded.
#[used]
#[unsafe(link_section = ".init_array")]
static SEE_LINKED: extern "C" fn() = see_linked;

extern "C" fn see_linked() {
    /// Functions that are redirected when a model is loaded.
    static REDIRECTED: [&Redirection; 5] = [
        &masks::PRODUCT,
        &masks::SUM,
        &counts::RESET,
        &load::SUPPORTS_OP,
        &load::SET_WARMUP,
    ];
    if !is_any_set() {
        return;
    }
    logger::find_standard_error();
    guarded(|| {
        let Some(program) = linked::find(lifecycle::is_on) else {
            return;
        };
        let hooks: Vec<&CStr> = Hook::ALL.iter().map(|hook| hook.name()).collect();
        let redirected = REDIRECTED.map(Redirection::name);
        linked::install(&program, &hooks, &redirected, route_linked);
        journal::note(|| Event::Linked {
            functions: linked::entries()
                .map(|(name, unseen)| {
                    let name = name.to_string_lossy().into_owned();
                    (name, unseen.map(str::to_owned))
                })
                .collect(),
        });
        let opens = Hook::GgufInit.name();
        if let Some(why) = linked::unseen(opens) {
            logger::init();
            ggml::passive(format_args!(
                "ggml is linked into this program, whose calls of {} are not seen: the function {why}; report the version of llama.cpp",
                opens.to_string_lossy()
            ));
        }
    });
}

/// Whether any variable of llama-sidecar may be set: no program without one has work to do. Allocates nothing.
fn is_any_set() -> bool {
    unsafe extern "C" {
        static environ: *const *const c_char;
    }
    // SAFETY: a list of strings that ends with null, read before any other thread of the program can exist.
    unsafe {
        let mut next = environ;
        while !next.is_null() && !(*next).is_null() {
            if CStr::from_ptr(*next).to_bytes().starts_with(b"LLAMA_") {
                return true;
            }
            next = next.add(1);
        }
    }
    false
}

fn destination(
    hook: Hook,
    caller: &'static Caller,
    real: *mut c_void,
    arguments: &Arguments,
) -> *const c_void {
    let opens_file = matches!(hook, Hook::GgufInit | Hook::GgufInitStream);
    if opens_file {
        lifecycle::report_settings();
    }
    // Devices are made before files are opened.
    let is_early = opens_file || hook == Hook::MetaDevice;
    let in_parts = parts::current().is_some();
    let wanted = match hook {
        Hook::BackendCompute => in_parts || !thread::is_inside(),
        Hook::BackendSynchronize
        | Hook::TensorGetAsync
        | Hook::TensorSetAsync
        | Hook::TensorCopy => in_parts,
        // While the program splits a graph, this thread runs code of the drop-in.
        Hook::OffloadOp => placement::offloads(),
        // libllama looks up a function for each evaluation, too.
        Hook::FunctionLookup => {
            (loads::is_loading() || !loads::sees_lookups()) && !thread::is_inside()
        }
        // Also within a call for a graph, whose results are put there. libllama allocates nothing for each weight
        // to see which types of buffers support it.
        Hook::BufferAlloc => arguments[1] != 0,
        // Of one device, each tensor is placed with `ggml_backend_tensor_alloc`.
        Hook::TensorsAlloc => split::is_any() && !thread::is_inside(),
        Hook::SchedSetEvalCallback => placement::offloads() && !thread::is_inside(),
        Hook::SchedSetCopyCallback => lifecycle::uses_copies() && !thread::is_inside(),
        _ => !thread::is_inside(),
    };
    // An evaluation that was begun is finished in the same way, also when the drop-in was turned
    // off since: copies of the program may have been left out.
    let is_on = in_parts || lifecycle::is_on();
    if !wanted || !is_on || (!is_early && loads::is_empty()) {
        return real;
    }
    let _inside = Inside::enter();
    logger::init();
    let Some(ggml) = caller.ggml() else {
        return real;
    };
    CALL.set(Some(Call { caller, ggml, real }));
    match hook {
        Hook::BackendCompute if in_parts => part_compute as *const c_void,
        _ => replacement(hook),
    }
}

/// Returns the function that a call goes to when no library has the one that was meant.
fn missing(hook: Hook, caller: &Caller) -> *const c_void {
    if caller.requires(hook.name()) {
        end_as_the_loader_does(hook.name(), caller);
    }
    // The caller found an exported name where it would have found none: by dlsym, or by a
    // reference that may stay undefined.
    nothing_done as *const c_void
}

/// Ends a program that calls a function which no library has, with the message and the
/// status of the dynamic loader.
fn end_as_the_loader_does(name: &CStr, caller: &Caller) -> ! {
    let program = std::env::args_os().next().unwrap_or_default();
    let program = program.as_bytes();
    let object = caller.name();
    let object = match object.as_slice() {
        [] => program,
        path => path,
    };
    let message = [
        program,
        b": symbol lookup error: ",
        object,
        b": undefined symbol: ",
        name.to_bytes(),
        b"\n",
    ]
    .concat();
    // SAFETY: writes valid bytes; ends the process without running its handlers.
    unsafe {
        libc::write(libc::STDERR_FILENO, message.as_ptr().cast(), message.len());
        libc::_exit(127)
    }
}

/// The function behind a name that no library defines.
extern "C" fn nothing_done() -> usize {
    0
}

/// The reload function where the program has none of its own.
extern "C" fn nothing_reloaded() -> bool {
    false
}

/// Returns the call that was routed to this replacement; calls of this thread go straight
/// to ggml while the second value lives.
fn entered() -> (Call, Inside) {
    let call = CALL.take().expect("set by route");
    (call, Inside::enter())
}

impl Call {
    /// The function that was meant.
    ///
    /// # Safety
    ///
    /// `F` is its type, except for a result that is passed on unchanged.
    unsafe fn real<F: Copy>(&self) -> F {
        const { assert!(size_of::<F>() == size_of::<*mut c_void>()) };
        // SAFETY: as the caller ensures.
        unsafe { std::mem::transmute_copy(&self.real) }
    }
}

/// Runs work of the drop-in in a call of the program. A panic disables the drop-in and does
/// not reach the program.
fn guarded(work: impl FnOnce()) {
    if std::panic::catch_unwind(AssertUnwindSafe(work)).is_err() {
        lifecycle::disable();
    }
}

/// Runs a function when it is dropped: at the end of a call, or when an exception of C++ leaves it.
struct Finally<F: FnMut()>(F);

impl<F: FnMut()> Drop for Finally<F> {
    fn drop(&mut self) {
        (self.0)();
    }
}

/// A function with these arguments, whose result fits a register.
macro_rules! meant {
    ($call:expr, $($argument:ty),*) => {
        // SAFETY: ggml's headers give the function of this name these arguments.
        unsafe { $call.real::<unsafe extern "C-unwind" fn($($argument),*) -> usize>() }
    };
}

/// `struct gguf_init_params`.
#[repr(C)]
struct GgufParams {
    no_alloc: bool,
    context: *mut *mut Context,
}

unsafe extern "C-unwind" fn gguf_opened(path: *const c_char, params: GgufParams) -> usize {
    let (call, _inside) = entered();
    let real = meant!(call, *const c_char, GgufParams);
    // SAFETY: the arguments of the call.
    let opened = unsafe { real(path, params) };
    if opened != 0 && !path.is_null() {
        // SAFETY: the real function has just read it.
        let path = unsafe { CStr::from_ptr(path) };
        opened_file(&call, Path::new(OsStr::from_bytes(path.to_bytes())));
    }
    opened
}

unsafe extern "C-unwind" fn gguf_stream_opened(
    stream: *mut libc::FILE,
    params: GgufParams,
) -> usize {
    let (call, _inside) = entered();
    let real = meant!(call, *mut libc::FILE, GgufParams);
    // SAFETY: the arguments of the call.
    let opened = unsafe { real(stream, params) };
    if opened != 0
        && let Some(path) = path_of_stream(stream)
    {
        opened_file(&call, &path);
    }
    opened
}

/// Returns the path of the file of an open stream.
fn path_of_stream(stream: *mut libc::FILE) -> Option<std::path::PathBuf> {
    // SAFETY: ggml has just read this stream.
    let descriptor = unsafe { libc::fileno(stream) };
    let path = std::fs::read_link(format!("/proc/self/fd/{descriptor}")).ok()?;
    path.is_absolute().then_some(path)
}

fn opened_file(call: &Call, path: &Path) {
    // The program may change its working directory later.
    if let Ok(path) = std::path::absolute(path) {
        guarded(|| {
            loads::file_opened(call.caller, call.ggml, &path);
            load::file_opened(call.caller, call.ggml);
            counts::file_opened(call.caller);
            if Config::get().expert_masks {
                masks::install(call.caller, call.ggml);
            }
        });
    }
}

unsafe extern "C-unwind" fn tensor_alloc(
    buffer: *mut Buffer,
    tensor: *mut Tensor,
    address: *mut c_void,
) -> usize {
    let (call, _inside) = entered();
    let real = meant!(call, *mut Buffer, *mut Tensor, *mut c_void);
    // SAFETY: the arguments of the call.
    let result = unsafe { real(buffer, tensor, address) };
    // SAFETY: the tensor was just placed.
    guarded(|| unsafe {
        own_cache::tensor_placed(call.ggml, tensor, buffer);
        if loads::is_loading() {
            weight_placed(&call, tensor, buffer);
        }
    });
    result
}

/// Records a tensor that may be a weight, and watches its buffer if it is.
///
/// # Safety
///
/// Both are live and of the copy of the call.
unsafe fn weight_placed(call: &Call, tensor: *mut Tensor, buffer: *mut Buffer) {
    report_freed(&models::tensor_placed(tensor));
    // SAFETY: as the caller ensures.
    unsafe {
        if loads::tensor_placed(call.ggml, tensor, buffer) {
            call.ggml.watch(buffer, buffer_ends);
        }
    }
}

/// Places all tensors of a context in a new buffer.
unsafe extern "C-unwind" fn tensors_alloc(context: *mut Context, buft: *mut BufferType) -> usize {
    let (call, inside) = entered();
    let is_split = call.ggml.is_split(buft);
    // Of one device, what it calls is seen.
    let inside = Some(inside).filter(|_| is_split);
    let real = meant!(call, *mut Context, *mut BufferType);
    // SAFETY: the arguments of the call.
    let buffer = unsafe { real(context, buft) };
    if is_split && buffer != 0 && loads::is_loading() {
        // SAFETY: the tensors of the context were just placed.
        guarded(|| unsafe {
            let f = &call.ggml.f;
            let mut tensor = (f.ggml_get_first_tensor)(context);
            while !tensor.is_null() {
                weight_placed(&call, tensor, buffer as *mut Buffer);
                tensor = (f.ggml_get_next_tensor)(context, tensor);
            }
        });
    }
    drop(inside);
    buffer
}

/// Allocates memory of a host or a device.
unsafe extern "C-unwind" fn buffer_alloc(buft: *mut BufferType, bytes: usize) -> usize {
    let (call, _inside) = entered();
    let f = &call.ggml.f;
    let mut allocation = None;
    if !buft.is_null() {
        // SAFETY: the type of the call.
        guarded(|| match unsafe { (f.ggml_backend_buft_is_host)(buft) } {
            true => allocation = streaming::make_room(bytes as u64),
            false => {
                // SAFETY: the type of the call.
                let device = unsafe { (f.ggml_backend_buft_get_device)(buft) };
                postfetch::make_room(call.ggml, device, bytes as u64);
            }
        });
    }
    let real = meant!(call, *mut BufferType, usize);
    // SAFETY: the arguments of the call.
    let buffer = unsafe { real(buft, bytes) };
    if let Some(allocation) = allocation
        && buffer != 0
    {
        // SAFETY: the buffer was just made.
        let address = unsafe { (f.ggml_backend_buffer_get_base)(buffer as *mut Buffer) };
        guarded(|| allocation.made(buffer, address as usize));
    }
    buffer
}

unsafe extern "C-unwind" fn buffer_get_size(buffer: *mut Buffer) -> usize {
    let (call, _inside) = entered();
    if call.caller.is_llama() {
        guarded(|| sched::output_size_read(buffer as usize));
    }
    let real = meant!(call, *mut Buffer);
    // SAFETY: the argument of the call.
    unsafe { real(buffer) }
}

unsafe extern "C-unwind" fn buffer_free(buffer: *mut Buffer) -> usize {
    let (call, _inside) = entered();
    if !buffer.is_null() {
        guarded(|| {
            sched::output_freed(buffer as usize);
            own_cache::buffer_freed(buffer);
            streaming::buffer_freed(buffer as usize);
            report_freed(&models::buffer_freed(buffer));
        });
    }
    let real = meant!(call, *mut Buffer);
    // SAFETY: the argument of the call.
    unsafe { real(buffer) }
}

/// A buffer with weights is about to be freed, by a call that may not have arrived here.
fn buffer_ends(buffer: *mut Buffer) {
    if lifecycle::is_on() {
        let _inside = Inside::enter();
        guarded(|| report_freed(&models::buffer_freed(buffer)));
    }
}

unsafe extern "C-unwind" fn backend_free(backend: *mut Backend) -> usize {
    let (call, _inside) = entered();
    guarded(|| {
        lifecycle::report(|to| to.backend_freed(backend as usize));
        forget_scheduler(backend as usize);
    });
    let real = meant!(call, *mut Backend);
    // SAFETY: the argument of the call.
    unsafe { real(backend) }
}

unsafe extern "C-unwind" fn context_free(context: *mut Context) -> usize {
    let (call, _inside) = entered();
    if !context.is_null() {
        guarded(|| {
            // SAFETY: the program has not freed it yet.
            let range = unsafe { call.ggml.memory(context) };
            lifecycle::report(|to| to.tensors_freed(&range));
            own_cache::tensors_freed(&range);
            report_freed(&models::tensors_freed(&range));
        });
    }
    let real = meant!(call, *mut Context);
    // SAFETY: the argument of the call.
    unsafe { real(context) }
}

unsafe extern "C-unwind" fn sched_reset(sched: *mut Sched) -> usize {
    let (call, _inside) = entered();
    if let Some(scheduler) = Scheduler::find(sched as usize) {
        guarded(|| {
            lifecycle::report(|to| to.graph_dropped(scheduler));
            scheduler.reset();
        });
    }
    let real = meant!(call, *mut Sched);
    // SAFETY: the argument of the call.
    unsafe { real(sched) }
}

/// A function that sees nodes while they are evaluated, or none.
unsafe extern "C-unwind" fn sched_set_eval_callback(
    sched: *mut Sched,
    callback: *mut c_void,
    data: *mut c_void,
) -> usize {
    let (call, _inside) = entered();
    if let Some(scheduler) = Scheduler::of(call.ggml, sched as usize) {
        guarded(|| postfetch::observed(scheduler, !callback.is_null()));
    }
    let real = meant!(call, *mut Sched, *mut c_void, *mut c_void);
    // SAFETY: the arguments of the call.
    unsafe { real(sched, callback, data) }
}

/// A function that copies weights for parts of graphs, or none. The scheduler gets [`copy_weight`], which
/// calls it.
unsafe extern "C-unwind" fn sched_set_copy_callback(
    sched: *mut Sched,
    callback: Option<CopyCallback>,
    data: *mut c_void,
) -> usize {
    let (call, _inside) = entered();
    let (mut to_set, mut its_data) = (callback, data);
    if let Some(scheduler) = Scheduler::of(call.ggml, sched as usize) {
        guarded(|| {
            weight_copies::set(scheduler, callback, data);
            copy_callback::set(scheduler);
            to_set = Some(copy_weight as CopyCallback);
            its_data = std::ptr::from_ref(scheduler).cast_mut().cast();
        });
    }
    let real = meant!(call, *mut Sched, Option<CopyCallback>, *mut c_void);
    // SAFETY: the scheduler of the call; a function and its data that live long enough.
    unsafe { real(sched, to_set, its_data) }
}

/// Called by a scheduler that is about to copy a weight for a part of its graph. Returns whether the
/// copy is made, or left out.
unsafe extern "C-unwind" fn copy_weight(
    backend: *mut Backend,
    weight: *const Tensor,
    copy: *mut Tensor,
    part: *mut Graph,
    scheduler: *mut c_void,
) -> bool {
    // SAFETY: set by `sched_set_copy_callback`, and never freed.
    let scheduler: &'static Scheduler = unsafe { &*scheduler.cast() };
    let mut is_copied = false;
    // Where no parts are seen, and once the drop-in is off, there is nothing to leave out.
    if parts::current().is_some_and(|of| std::ptr::eq(of, scheduler)) {
        // SAFETY: the arguments of the call.
        guarded(|| unsafe {
            let of = WeightCopy::new(scheduler.ggml(), backend, weight, copy, part);
            // First: what it requests with the ids is there once these were waited for.
            is_copied = copy_callback::is_copied(scheduler, &of);
            lifecycle::report(|to| to.weight_copied(&of));
            weight_copies::note(weight);
        });
    }
    if is_copied {
        return true;
    }
    // Nothing is locked while the program's function runs. Without one, the scheduler copies the weight.
    match weight_copies::of_program(scheduler) {
        // SAFETY: the arguments of the call; the program set the function for this scheduler.
        Some((function, data)) => unsafe { function(backend, weight, copy, part, data) },
        None => false,
    }
}

/// Makes a device that stands for others.
unsafe extern "C-unwind" fn meta_device(
    devices: *mut *mut Device,
    count: usize,
    get_split: *mut c_void,
    data: *mut c_void,
) -> usize {
    let (call, _inside) = entered();
    let real = meant!(call, *mut *mut Device, usize, *mut c_void, *mut c_void);
    // SAFETY: the arguments of the call.
    let made = unsafe { real(devices, count, get_split, data) };
    if made != 0 && !devices.is_null() {
        // SAFETY: the real function has just read so many.
        let devices = unsafe { std::slice::from_raw_parts(devices, count) };
        guarded(|| split::note(made as *mut Device, devices));
    }
    made
}

unsafe extern "C-unwind" fn sched_reserve(sched: *mut Sched, graph: *mut Graph) -> usize {
    let (call, _inside) = entered();
    let first = enter_first();
    let (scheduler, read) = allocating(&call, sched, graph, false).unzip();
    // Until a profile is set.
    let _first = first.filter(|_| read.iter().flatten().any(|of| !of.complete.is_empty()));
    let rests = scheduler.map(|scheduler| Finally(move || scheduler.rest()));
    let real = meant!(call, *mut Sched, *mut Graph);
    // SAFETY: the arguments of the call.
    let reserved = unsafe { real(sched, graph) };
    drop(rests);
    // Its outputs are marked until here.
    let complete = read.flatten().map(|read| read.complete).unwrap_or_default();
    if !complete.is_empty() {
        guarded(|| lifecycle::report(|to| to.memory_reserved(&complete)));
    }
    reserved
}

unsafe extern "C-unwind" fn sched_alloc_graph(sched: *mut Sched, graph: *mut Graph) -> usize {
    let (call, _inside) = entered();
    let first = enter_first();
    let found = allocating(&call, sched, graph, true);
    drop(first);
    let scheduler = found.as_ref().map(|(scheduler, _)| *scheduler);
    let _leaves = scheduler.map(|scheduler| Finally(move || scheduler.leave()));
    let real = meant!(call, *mut Sched, *mut Graph);
    // SAFETY: the arguments of the call.
    let result = unsafe { real(sched, graph) };
    if let Some((scheduler, Some(graph_read))) = found
        && is_true(result)
    {
        let Allocated {
            reads,
            backends,
            outputs,
            ..
        } = graph_read;
        drop(outputs);
        // SAFETY: the arguments of the call are live, and the graph is allocated.
        guarded(|| unsafe {
            if lifecycle::uses_routing() {
                routing::watch(scheduler, sched, &reads, &backends, ids_known);
            }
            if !backends.on_cpu {
                postfetch::graph_split(scheduler, sched, graph, &reads);
            }
        });
    }
    result
}

/// Waits while another thread completes a model, and lets others wait if this one may.
fn enter_first() -> Option<impl Sized> {
    let mut first = None;
    guarded(|| first = first_graph::enter());
    first
}

/// Reads a graph before ggml splits it, which puts copies in place of its inputs.
fn allocating(
    call: &Call,
    sched: *mut Sched,
    graph: *mut Graph,
    keeps: bool,
) -> Option<(&'static Scheduler, Option<Allocated>)> {
    let scheduler = Scheduler::of(call.ggml, sched as usize)?;
    scheduler.enter();
    let mut read = None;
    guarded(|| {
        // SAFETY: the arguments of the call are live.
        let allocated = read.insert(unsafe { scheduler.allocate(sched, graph, keeps) });
        allocated
            .complete
            .iter()
            .for_each(lifecycle::model_complete);
        lifecycle::report(|to| to.graph_allocated(scheduler, allocated, keeps));
    });
    Some((scheduler, read))
}

/// Called by the CPU backend when the ids of a layer are complete; see [`routing::watch`].
unsafe extern "C" fn ids_known(
    node: *mut Tensor,
    _ids: *const Tensor,
    thread: c_int,
    _threads: c_int,
    place: *mut c_void,
) {
    if lifecycle::is_on() {
        // SAFETY: the arguments of the call.
        guarded(|| unsafe {
            routing::known(node, thread, place, streaming::prefer, |routed| {
                lifecycle::report(|to| to.routed(routed))
            });
        });
    }
}

unsafe extern "C-unwind" fn sched_compute(sched: *mut Sched, graph: *mut Graph) -> usize {
    let (call, _inside) = entered();
    let scheduler = Scheduler::of(call.ggml, sched as usize);
    evaluate(scheduler, || {
        let real = meant!(call, *mut Sched, *mut Graph);
        let reported = |scheduler: &&Scheduler| {
            lifecycle::uses_routing() && routing::is_mixed(scheduler)
                || postfetch::has_plan(scheduler)
        };
        let parts = Parts::enter(scheduler.filter(reported));
        // SAFETY: the arguments of the call.
        let result = unsafe { real(sched, graph) };
        drop(parts);
        if logits::is_requested() {
            // SAFETY: the graph is live, and its backends are waited for first.
            guarded(|| unsafe {
                (call.ggml.f.ggml_backend_sched_synchronize)(sched);
                logits::note_output(call.ggml, graph);
            });
        }
        result
    })
}

/// Evaluates a graph with the function that was meant, unless the graph is stale.
fn evaluate(scheduler: Option<&'static Scheduler>, real: impl FnOnce() -> usize) -> usize {
    let Some(scheduler) = scheduler else {
        return real();
    };
    let valid = scheduler.enter_compute();
    let result = match valid {
        true => {
            guarded(|| lifecycle::report(|to| to.evaluation_begun(scheduler)));
            let thrown = Thrown(scheduler);
            let result = real();
            std::mem::forget(thrown);
            result
        }
        false => STATUS_FAILED,
    };
    if !succeeded(result) {
        guarded(|| lifecycle::report(|to| to.evaluation_failed(scheduler)));
    } else if scheduler.ends_with_compute() {
        guarded(|| lifecycle::report(|to| to.evaluation_ended(scheduler)));
    }
    match valid {
        true => scheduler.leave_compute(),
        false => scheduler.rest(),
    }
    result
}

/// Ends an evaluation that an exception of C++ leaves.
struct Thrown(&'static Scheduler);

impl Drop for Thrown {
    fn drop(&mut self) {
        let scheduler = self.0;
        guarded(|| {
            if !scheduler.ends_with_compute() {
                scheduler.synchronize();
            }
            lifecycle::report(|to| to.evaluation_failed(scheduler));
        });
        scheduler.rest();
    }
}

/// Whether a call that returns `bool` returned true: the register holds a byte.
fn is_true(result: usize) -> bool {
    result as u8 != 0
}

/// Whether a call that returns `enum ggml_status` succeeded: the register holds an int.
fn succeeded(result: usize) -> bool {
    result as u32 == STATUS_SUCCESS
}

unsafe extern "C-unwind" fn sched_synchronize(sched: *mut Sched) -> usize {
    let (call, _inside) = entered();
    let scheduler = Scheduler::find(sched as usize);
    let goes_on = scheduler.filter(|of| of.enter_synchronize());
    let goes_on = goes_on.map(|scheduler| Finally(move || scheduler.leave()));
    let real = meant!(call, *mut Sched);
    // SAFETY: the argument of the call.
    let result = unsafe { real(sched) };
    if let Some(scheduler) = scheduler
        && scheduler.synchronized()
        && goes_on.is_none()
    {
        guarded(|| lifecycle::report(|to| to.evaluation_ended(scheduler)));
        scheduler.leave_synchronize();
    }
    result
}

unsafe extern "C-unwind" fn sched_free(sched: *mut Sched) -> usize {
    let (call, _inside) = entered();
    guarded(|| forget_scheduler(sched as usize));
    let real = meant!(call, *mut Sched);
    // SAFETY: the argument of the call.
    unsafe { real(sched) }
}

/// An evaluation without a scheduler: it keeps no graph.
unsafe extern "C-unwind" fn backend_compute(backend: *mut Backend, graph: *mut Graph) -> usize {
    let (call, _inside) = entered();
    evaluate(Scheduler::of(call.ggml, backend as usize), || {
        let real = meant!(call, *mut Backend, *mut Graph);
        // SAFETY: the arguments of the call.
        unsafe { real(backend, graph) }
    })
}

/// The evaluation of a part of a graph.
unsafe extern "C-unwind" fn part_compute(backend: *mut Backend, part: *mut Graph) -> usize {
    let (call, _inside) = entered();
    parts::submitted();
    let ggml = call.ggml;
    let mut evaluation = Evaluation::Whole;
    // SAFETY: the arguments of the call are live.
    guarded(|| unsafe {
        match ggml.is_cpu((ggml.f.ggml_backend_get_device)(backend)) {
            true if lifecycle::uses_routing() => {
                routing::split_begins(ggml, part, |routed| {
                    lifecycle::report(|to| to.routed(routed));
                });
            }
            true => {}
            false => evaluation = part::begins(ggml, backend, part),
        }
    });
    let _ends = part::Ends;
    let real = meant!(call, *mut Backend, *mut Graph);
    // SAFETY: the arguments of the call.
    let compute = |part| unsafe { real(backend, part) };
    match (evaluation, ggml.graph_view) {
        (Evaluation::Whole, _) | (_, None) => compute(part),
        (Evaluation::Divided { layer, nodes }, Some(view)) => {
            let piece = |from, to| {
                // SAFETY: a live part with these nodes.
                let mut piece = unsafe { view(part, from, to) };
                compute((&raw mut piece).cast())
            };
            let status = piece(0, nodes);
            if !succeeded(status) {
                return status;
            }
            let mut status = STATUS_FAILED;
            // SAFETY: the first piece ends with the layer's last product.
            guarded(|| status = unsafe { part::compute_missed(backend, layer) } as usize);
            // SAFETY: a live part.
            let all = unsafe { (ggml.f.ggml_graph_n_nodes)(part) };
            match succeeded(status) && nodes < all {
                true => piece(nodes, all),
                false => status,
            }
        }
        (Evaluation::Refused, _) => STATUS_FAILED,
    }
}

/// A wait for a backend between the parts of a graph.
unsafe extern "C-unwind" fn part_synchronize(backend: *mut Backend) -> usize {
    let (call, _inside) = entered();
    let real = meant!(call, *mut Backend);
    // SAFETY: the argument of the call.
    let result = unsafe { real(backend) };
    // SAFETY: the backend was waited for.
    guarded(|| unsafe {
        inferred::waited(call.ggml);
        weight_copies::report_missed(call.ggml, |from, ids| {
            lifecycle::report(|to| to.experts_missed(from, ids));
        });
    });
    result
}

/// A read of bytes between the parts of a graph.
unsafe extern "C-unwind" fn part_get(
    backend: *mut Backend,
    tensor: *const Tensor,
    data: *mut c_void,
    offset: usize,
    size: usize,
) -> usize {
    let (call, _inside) = entered();
    let real = meant!(call, *mut Backend, *const Tensor, *mut c_void, usize, usize);
    // SAFETY: the arguments of the call.
    let result = unsafe { real(backend, tensor, data, offset, size) };
    if offset == 0 {
        // SAFETY: the arguments of the call.
        guarded(|| unsafe { inferred::bytes_requested(backend, tensor) });
        let data = data.cast_const().cast();
        parts::note_requested(Requested { tensor, data, size });
    }
    result
}

/// A copy to a device between the parts of a graph.
unsafe extern "C-unwind" fn part_set(
    backend: *mut Backend,
    tensor: *mut Tensor,
    data: *const c_void,
    offset: usize,
    size: usize,
) -> usize {
    let (call, _inside) = entered();
    let mut copied = false;
    guarded(|| {
        let bytes = offset..offset + size;
        // SAFETY: the arguments of the call.
        unsafe {
            // Copies of a scheduler with a copy callback were reported before.
            if weight_copies::unreported().is_some() {
                lifecycle::report(|to| to.bytes_copied(call.ggml, data as usize));
            }
            copied = inferred::is_copied(call.ggml, backend, tensor, data, bytes);
        }
    });
    if copied {
        return 0;
    }
    let real = meant!(call, *mut Backend, *mut Tensor, *const c_void, usize, usize);
    // SAFETY: the arguments of the call.
    unsafe { real(backend, tensor, data, offset, size) }
}

/// A copy of a whole tensor between the parts of a graph.
unsafe extern "C-unwind" fn part_copy(from: *mut Tensor, to: *mut Tensor) -> usize {
    let (call, _inside) = entered();
    let mut copied = false;
    guarded(|| copied = inferred::is_bias_copied(from, to));
    if copied {
        return 0;
    }
    let real = meant!(call, *mut Tensor, *mut Tensor);
    // SAFETY: the arguments of the call.
    unsafe { real(from, to) }
}

/// The question whether an operation goes to a GPU although its weight is in host memory.
unsafe extern "C-unwind" fn offload_op(backend: *mut Backend, node: *const Tensor) -> usize {
    let (call, _inside) = entered();
    let real = meant!(call, *mut Backend, *const Tensor);
    // SAFETY: the arguments of the call.
    let result = unsafe { real(backend, node) };
    let mut wanted = false;
    guarded(|| {
        // SAFETY: a live backend and a live node.
        wanted = unsafe { placement::offloads_node(call.ggml, backend, node) };
    });
    result | usize::from(wanted)
}

/// A function of a backend that is looked up by its name.
unsafe extern "C-unwind" fn function_looked_up(
    registration: *mut Registration,
    name: *const c_char,
) -> usize {
    let (call, _inside) = entered();
    if call.caller.is_llama() {
        // SAFETY: a live registration, whose name is a static string, and a string as ggml takes it.
        guarded(|| unsafe {
            let backend = (call.ggml.f.ggml_backend_reg_name)(registration);
            loads::function_looked_up(CStr::from_ptr(backend), CStr::from_ptr(name));
        });
    }
    let real = meant!(call, *mut Registration, *const c_char);
    // SAFETY: the arguments of the call.
    unsafe { real(registration, name) }
}

/// Reports a scheduler that is about to be freed, and forgets it.
fn forget_scheduler(key: usize) {
    if let Some(scheduler) = Scheduler::find(key) {
        lifecycle::report(|to| to.scheduler_freed(scheduler));
        routing::forget(scheduler);
        weight_copies::forget(scheduler);
        scheduler.forget();
    }
}

/// Reports models whose memory is about to be freed.
fn report_freed(models: &[Arc<Model>]) {
    for model in models {
        lifecycle::report(|to| to.model_freed(model));
    }
}

/// Reloads changed tensors of all models of the process, and returns whether any changed since the
/// last call. Name, argument and meaning are those of ik_llama.cpp. If the drop-in cannot swap
/// tensors of any model, the program's own function reloads.
extern "C-unwind" fn reload_changed_tensors(context: *mut c_void) -> bool {
    let (call, inside) = entered();
    let is_own = call.real != nothing_reloaded as *mut c_void;
    if is_own && !reloader::swaps_any() {
        // Its calls of ggml concern the drop-in.
        drop(inside);
        let real = meant!(call, *mut c_void);
        // SAFETY: the argument of the call.
        return is_true(unsafe { real(context) });
    }
    let mut changed = false;
    guarded(|| {
        changed = reloader::reload_all(|report| {
            if is_own {
                rounds::files::log_tensors(report);
            }
        });
    });
    changed
}
