//! Functions that a linker left out of a program, because the program calls none of them.
//!
//! Their results are read from ggml's structs, at places that [`prepare`] checks with structs of known contents. A backend
//! that should wait for an event lets the processor wait.

use std::ffi::{CStr, c_char, c_int, c_void};

use once_cell::sync::OnceCell;

use super::types::{
    Backend, BufferType, Context, DEVICE_CPU, Device, DeviceByType, Event, InitParams, Sched,
};

/// `ggml_backend_event_synchronize`.
static EVENT_SYNCHRONIZE: OnceCell<EventSynchronize> = OnceCell::new();
type EventSynchronize = unsafe extern "C-unwind" fn(*mut Event);
/// Whether the places were found.
static CHECKED: OnceCell<Result<(), &'static str>> = OnceCell::new();

/// The first fields of `struct ggml_context`.
#[repr(C)]
struct ContextStart {
    size: usize,
    buffer: *mut c_void,
}

/// The first fields of `struct ggml_backend_sched`; there are as many backends as counted.
#[repr(C)]
struct SchedStart {
    flags: [bool; 2],
    count: c_int,
    backends: [*mut Backend; 2],
}

pub unsafe extern "C-unwind" fn mem_buffer(context: *const Context) -> *mut c_void {
    // SAFETY: a live context.
    unsafe { (*context.cast::<ContextStart>()).buffer }
}

pub unsafe extern "C-unwind" fn mem_size(context: *const Context) -> usize {
    // SAFETY: a live context.
    unsafe { (*context.cast::<ContextStart>()).size }
}

pub unsafe extern "C-unwind" fn n_backends(sched: *mut Sched) -> c_int {
    // SAFETY: a live scheduler.
    unsafe { (*sched.cast::<SchedStart>()).count }
}

pub unsafe extern "C-unwind" fn backend(sched: *mut Sched, at: c_int) -> *mut Backend {
    // SAFETY: a live scheduler, which has this backend.
    unsafe {
        let backends = (&raw const (*sched.cast::<SchedStart>()).backends).cast::<*mut Backend>();
        *backends.add(at as usize)
    }
}

pub unsafe extern "C-unwind" fn event_wait(_: *mut Backend, event: *mut Event) {
    if let Some(synchronize) = EVENT_SYNCHRONIZE.get() {
        // SAFETY: a live event.
        unsafe { synchronize(event) }
    }
}

/// Finds functions by name, or returns the name of one that is missing.
macro_rules! find {
    ($symbol:ident, $($name:ident: $function:ty;)*) => {
        $(
            let $name = {
                let name = concat!(stringify!($name), "\0");
                let found = $symbol(CStr::from_bytes_with_nul(name.as_bytes()).expect("one NUL"));
                if found.is_null() {
                    return Err(stringify!($name));
                }
                std::mem::transmute::<*mut c_void, $function>(found)
            };
        )*
    };
}

/// Checks the places, or returns the name of a function whose result cannot be read.
pub fn prepare(symbol: &dyn Fn(&CStr) -> *mut c_void) -> Result<(), &'static str> {
    // SAFETY: ggml's headers give the functions of these names these types; scheduler and backends are freed once.
    *CHECKED.get_or_init(|| unsafe {
        find! {
            symbol,
            ggml_backend_event_synchronize: EventSynchronize;
        }
        EVENT_SYNCHRONIZE.get_or_init(|| ggml_backend_event_synchronize);
        check_context(symbol)?;
        check_scheduler(symbol)
    })
}

/// # Safety
///
/// The functions that `symbol` finds are ggml's.
unsafe fn check_context(symbol: &dyn Fn(&CStr) -> *mut c_void) -> Result<(), &'static str> {
    // SAFETY: as the caller ensures.
    unsafe {
        find! {
            symbol,
            ggml_init: unsafe extern "C-unwind" fn(InitParams) -> *mut Context;
            ggml_free: unsafe extern "C-unwind" fn(*mut Context);
        }
        let mut memory = [0u128; 256];
        let (size, buffer) = (size_of_val(&memory), memory.as_mut_ptr().cast());
        let context = ggml_init(InitParams {
            mem_size: size,
            mem_buffer: buffer,
            no_alloc: true,
        });
        if context.is_null() {
            return Err("ggml_get_mem_buffer");
        }
        let found = (mem_size(context), mem_buffer(context));
        ggml_free(context);
        match found == (size, buffer) {
            true => Ok(()),
            false => Err("ggml_get_mem_buffer"),
        }
    }
}

/// # Safety
///
/// The functions that `symbol` finds are ggml's.
unsafe fn check_scheduler(symbol: &dyn Fn(&CStr) -> *mut c_void) -> Result<(), &'static str> {
    type New = unsafe extern "C-unwind" fn(
        *const *mut Backend,
        *const *mut BufferType,
        c_int,
        usize,
        bool,
        bool,
    ) -> *mut Sched;
    // SAFETY: as the caller ensures.
    unsafe {
        find! {
            symbol,
            ggml_backend_dev_by_type: DeviceByType;
            ggml_backend_dev_init: unsafe extern "C-unwind" fn(*mut Device, *const c_char) -> *mut Backend;
            ggml_backend_free: unsafe extern "C-unwind" fn(*mut Backend);
            ggml_backend_sched_new: New;
            ggml_backend_sched_free: unsafe extern "C-unwind" fn(*mut Sched);
        }
        let cpu = ggml_backend_dev_by_type(DEVICE_CPU);
        if cpu.is_null() {
            return Err("ggml_backend_sched_get_backend");
        }
        let made = [(); 2].map(|()| ggml_backend_dev_init(cpu, std::ptr::null()));
        let mut is_read = false;
        if made.iter().all(|backend| !backend.is_null()) {
            let sched =
                ggml_backend_sched_new(made.as_ptr(), std::ptr::null(), 2, 16, false, false);
            if !sched.is_null() {
                is_read = n_backends(sched) == 2 && [0, 1].map(|at| backend(sched, at)) == made;
                ggml_backend_sched_free(sched);
            }
        }
        for backend in made.into_iter().filter(|backend| !backend.is_null()) {
            ggml_backend_free(backend);
        }
        match is_read {
            true => Ok(()),
            false => Err("ggml_backend_sched_get_backend"),
        }
    }
}
