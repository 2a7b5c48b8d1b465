//! The unwinder, which is part of libgcc_s: found when a panic or an exception needs it.
//!
//! Rust's standard library calls libgcc_s, so that every program that loads this library would
//! load libgcc_s as well: a third of what an idle drop-in costs. The functions here have the names of
//! the unwinder's, so that the linker needs no libgcc_s, and are visible in this library only.
//! The first call of each looks the function up in the libgcc_s of the process: exceptions of
//! C++ pass through functions of the drop-in, and two copies of an unwinder do not fit together.

use std::ffi::{c_char, c_void};
use std::sync::atomic::{AtomicPtr, Ordering};

/// Defines functions that jump to the function of the same name in libgcc_s.
macro_rules! forward {
    ($($name:ident)*) => {
        $(
            crate::arch::found!($name, find);
        )*
    };
}

forward! {
    _Unwind_Backtrace
    _Unwind_DeleteException
    _Unwind_FindEnclosingFunction
    _Unwind_GetCFA
    _Unwind_GetDataRelBase
    _Unwind_GetIP
    _Unwind_GetIPInfo
    _Unwind_GetLanguageSpecificData
    _Unwind_GetRegionStart
    _Unwind_GetTextRelBase
    _Unwind_RaiseException
    _Unwind_Resume
    _Unwind_SetGR
    _Unwind_SetIP
}

/// Finds a function of libgcc_s and notes it. Ends the process if there is none: the panic or
/// the exception cannot go on.
extern "C" fn find(name: *const c_char, found: &AtomicPtr<c_void>) -> *mut c_void {
    // SAFETY: both names are C strings; a library of null is no error of dlsym's.
    let function = unsafe {
        let library = libc::dlopen(c"libgcc_s.so.1".as_ptr(), libc::RTLD_LAZY);
        match library.is_null() {
            true => library,
            false => libc::dlsym(library, name),
        }
    };
    if function.is_null() {
        const MESSAGE: &[u8] = b"llama-sidecar: an internal error needs libgcc_s.so.1, which cannot be loaded: install libgcc\n";
        // SAFETY: writes a constant, and ends the process.
        unsafe {
            libc::write(libc::STDERR_FILENO, MESSAGE.as_ptr().cast(), MESSAGE.len());
            libc::abort();
        }
    }
    found.store(function, Ordering::Relaxed);
    function
}

#[cfg(test)]
mod tests {
    use std::backtrace::Backtrace;
    use std::cell::Cell;
    use std::panic::{catch_unwind, resume_unwind};

    #[test]
    fn a_panic_runs_destructors_and_is_caught() {
        struct Counted<'a>(&'a Cell<u32>);
        impl Drop for Counted<'_> {
            fn drop(&mut self) {
                self.0.set(self.0.get() + 1);
            }
        }
        let dropped = Cell::new(0);
        let work = std::panic::AssertUnwindSafe(|| {
            let _outer = Counted(&dropped);
            let _inner = Counted(&dropped);
            resume_unwind(Box::new(7u32));
        });
        let caught = catch_unwind(work).expect_err("it panics");
        assert_eq!(caught.downcast_ref::<u32>(), Some(&7));
        assert_eq!(dropped.get(), 2);
    }

    #[test]
    fn a_backtrace_names_the_function() {
        let text = Backtrace::force_capture().to_string();
        assert!(text.contains("a_backtrace_names_the_function"), "{text}");
    }
}
