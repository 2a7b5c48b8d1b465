//! The C ABI: handles, null checks, panic boundaries, and plain structs. Each file covers one
//! concept. The modules below do the work of each call.
//!
//! `include/llama_sidecar.h` is generated from this module by `cargo xtask header`.
//!
//! Modules, top to bottom:
//!
//! | module | contents |
//! |---|---|
//! | `reload` | reloads and their reports |
//! | `context`, `tensor` | contexts; tensors |
//! | `device`, `experts`, `metadata` | devices, expert tensors and metadata of a model |
//! | `postfetch`, `stream` | post-fetch; expert streaming |
//! | `trace` | expert traces |
//! | `model` | models |
//! | `params`, `log` | parameters for opening a model; log messages |
//! | `handle` | handles |
//! | `status` | status codes, the last error of each thread, the boundary that catches panics |
#![allow(non_camel_case_types, reason = "names as C programs write them")]

mod context;
mod device;
mod experts;
mod handle;
mod log;
mod metadata;
mod model;
mod params;
mod postfetch;
mod reload;
mod status;
mod stream;
mod tensor;
mod trace;

use std::ffi::{CStr, c_char};

use sidecar_core::trace::Ids;

/// A struct that starts with its size, as the caller knows it.
///
/// # Safety
///
/// The type is `repr(C)`. Its first field is `struct_size: usize`. Every bit pattern that the
/// library writes to a field is valid in C.
///
/// New fields are added at the end only. In a struct that the library reads, a new field also
/// starts after the padding that ended the previous version: an older caller does not initialise
/// that padding.
unsafe trait SizedStruct: Copy {
    /// Name of the struct, for messages.
    const NAME: &'static str;
    /// Size of the first published version on x86-64 and AArch64, the minimum that a caller knows. It is a
    /// literal, because `size_of` grows with the struct and would reject older callers.
    const FIRST: usize;
}

/// A type of which every bit pattern is valid.
///
/// # Safety
///
/// That is so.
unsafe trait AnyBits {}
// SAFETY: integers and pointers, and a struct of one.
unsafe impl AnyBits for u32 {}
// SAFETY: as above.
unsafe impl AnyBits for u64 {}
// SAFETY: as above.
unsafe impl AnyBits for [u64; 4] {}
// SAFETY: as above.
unsafe impl AnyBits for usize {}
// SAFETY: as above.
unsafe impl<T> AnyBits for *const T {}
// SAFETY: as above.
unsafe impl AnyBits for Flag {}

/// A struct that the library reads. C programs can put any bytes into it.
///
/// # Safety
///
/// All fields are [`AnyBits`]; the macro [`parameters`] checks that.
unsafe trait Parameters: SizedStruct {}

/// Declares a struct that the library reads, by its first size and its fields.
macro_rules! parameters {
    ($name:ident, $first:literal, $($field:ident),+) => {
        // The pattern fails to compile if a field is missing.
        const _: fn($name) = |$name { $($field),+ }| {
            fn check<T: super::AnyBits>(_: T) {}
            $(check($field);)+
        };

        // SAFETY: repr(C), starts with struct_size, plain fields.
        unsafe impl SizedStruct for $name {
            const NAME: &'static str = stringify!($name);
            const FIRST: usize = $first;
        }

        // SAFETY: checked above.
        unsafe impl super::Parameters for $name {}
    };
}
use parameters;

/// A `bool` that a C program passes or returns: true for every byte but 0. A `bool` of Rust has two bytes only.
#[repr(transparent)]
#[derive(Debug, Clone, Copy)]
pub struct Flag(u8);

impl From<bool> for Flag {
    fn from(value: bool) -> Flag {
        Flag(value.into())
    }
}

impl From<Flag> for bool {
    fn from(flag: Flag) -> bool {
        flag.0 != 0
    }
}

/// Copies the fields of `value` that the caller knows to `out`.
///
/// # Safety
///
/// `out` is null or points to memory whose first field is its size in bytes.
unsafe fn fill<T: SizedStruct>(out: *mut T, value: &T) -> Result<(), status::Failure> {
    // SAFETY: `size_of_out` checked that `out` has `size` bytes. Both start
    // with `struct_size`, which is skipped: the caller's own value stays.
    unsafe {
        let size = size_of_out(out)?.min(size_of::<T>());
        let skip = size_of::<usize>();
        std::ptr::copy_nonoverlapping(
            std::ptr::from_ref(value).cast::<u8>().add(skip),
            out.cast::<u8>().add(skip),
            size - skip,
        );
    }
    Ok(())
}

/// Reads the caller's struct. Fields that the caller does not know keep their values in `defaults`.
///
/// # Safety
///
/// As for [`fill`].
unsafe fn read<T: Parameters>(input: *const T, defaults: T) -> Result<T, status::Failure> {
    let mut value = defaults;
    // SAFETY: the caller's struct has at least `size` readable bytes, and every bit pattern is valid.
    unsafe {
        let size = size_of_out(input.cast_mut())?.min(size_of::<T>());
        let target = std::ptr::from_mut(&mut value).cast::<u8>();
        std::ptr::copy_nonoverlapping(input.cast::<u8>(), target, size);
    }
    Ok(value)
}

unsafe fn size_of_out<T: SizedStruct>(out: *mut T) -> Result<usize, status::Failure> {
    const { assert!(T::FIRST <= size_of::<T>(), "structs only grow") };
    if out.is_null() {
        return Err(status::Failure::null(T::NAME));
    }
    // SAFETY: the caller guarantees the first field; it may be unaligned.
    let size = unsafe { out.cast::<usize>().read_unaligned() };
    if size < T::FIRST {
        return Err(status::Failure::argument(format!(
            "struct_size of {} is {size}, expected at least {}: set it to sizeof(struct {}) before the call",
            T::NAME,
            T::FIRST,
            T::NAME
        )));
    }
    Ok(size)
}

/// Converts a C string argument.
///
/// # Safety
///
/// `text` is null or a NUL-terminated string that lives as long as the result.
unsafe fn text<'a>(text: *const c_char, what: &str) -> Result<&'a CStr, status::Failure> {
    if text.is_null() {
        return Err(status::Failure::null(what));
    }
    // SAFETY: as the caller guarantees.
    Ok(unsafe { CStr::from_ptr(text) })
}

/// Returns routed ids that a caller passes; `None` when there are none.
///
/// # Safety
///
/// `ids` is null, or every id is readable for `'a`: the last one ends
/// `(n_tokens - 1) * token_stride + (n_used - 1) * used_stride + 4` bytes after `ids`.
unsafe fn routed_ids<'a>(
    ids: *const i32,
    n_used: usize,
    n_tokens: usize,
    used_stride: usize,
    token_stride: usize,
) -> Result<Option<Ids<'a>>, status::Failure> {
    let id = size_of::<i32>();
    if n_used > 1 && used_stride < id || n_tokens > 1 && token_stride < id {
        return Err(status::Failure::argument(format!(
            "used_stride is {used_stride} and token_stride is {token_stride}, expected at least {id} bytes, the size of an id: pass nb[0] and nb[1] of the ids"
        )));
    }
    let len = Ids::byte_len(n_used, n_tokens, used_stride, token_stride).ok_or_else(|| {
        status::Failure::argument(
            "the matrix of ids is larger than memory: pass ne[0], ne[1], nb[0] and nb[1] of the ids",
        )
    })?;
    if len == 0 {
        return Ok(None);
    }
    if ids.is_null() {
        return Err(status::Failure::null("ids"));
    }
    Ok(Some(Ids {
        // SAFETY: not null, and readable up to there as the caller guarantees.
        bytes: unsafe { std::slice::from_raw_parts(ids.cast::<u8>(), len) },
        used: n_used,
        tokens: n_tokens,
        used_stride,
        token_stride,
    }))
}

/// Writes a result through an output pointer.
///
/// # Safety
///
/// `out` is null or valid for a write.
unsafe fn put<T>(out: *mut T, value: T, what: &str) -> Result<(), status::Failure> {
    if out.is_null() {
        return Err(status::Failure::null(what));
    }
    // SAFETY: not null, and valid as the caller guarantees.
    unsafe { out.write(value) };
    Ok(())
}

/// Writes text into a caller's buffer, truncated to `size` bytes including the NUL. Returns the
/// length of the whole text.
///
/// # Safety
///
/// `buffer` is valid for writes of `size` bytes.
unsafe fn put_text(text: &str, buffer: *mut c_char, size: usize) -> Result<usize, status::Failure> {
    if buffer.is_null() && size > 0 {
        return Err(status::Failure::null("buffer"));
    }
    if size > 0 {
        let len = text.len().min(size - 1);
        // SAFETY: valid for `size` bytes, as the caller guarantees.
        unsafe {
            std::ptr::copy_nonoverlapping(text.as_ptr(), buffer.cast(), len);
            buffer.add(len).write(0);
        }
    }
    Ok(text.len())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Reads a struct with every value in every byte behind the size, except in pointers, and uses it.
    #[track_caller]
    pub(super) fn use_with_every_byte<T: Parameters>(
        defaults: T,
        pointers: std::ops::Range<usize>,
        mut used: impl FnMut(&T),
    ) {
        for at in (size_of::<usize>()..size_of::<T>()).filter(|at| !pointers.contains(at)) {
            for byte in 0..=u8::MAX {
                let mut input = defaults;
                // SAFETY: in the struct, of which every bit pattern is valid.
                unsafe {
                    std::ptr::from_mut(&mut input)
                        .cast::<u8>()
                        .add(at)
                        .write(byte)
                };
                // SAFETY: the struct begins with its size.
                let value = unsafe { read(&input, defaults) }.expect("the size is right");
                used(&value);
            }
        }
    }

    /// A struct whose first version ended before `added`.
    #[repr(C)]
    #[derive(Debug, Clone, Copy, PartialEq)]
    struct Grown {
        struct_size: usize,
        known: u64,
        added: u64,
    }

    parameters!(Grown, 16, struct_size, known, added);

    const PRESENT: Grown = Grown {
        struct_size: size_of::<Grown>(),
        known: 1,
        added: 2,
    };

    #[test]
    fn an_older_caller_gives_and_gets_the_fields_it_knows() {
        let mut older = Grown {
            struct_size: 16,
            known: 7,
            added: 9,
        };
        // SAFETY: the struct has at least `struct_size` bytes.
        let value = unsafe { read(&older, PRESENT) }.unwrap();
        assert_eq!((value.known, value.added), (7, 2));
        // SAFETY: as above.
        unsafe { fill(&mut older, &PRESENT) }.unwrap();
        assert_eq!((older.struct_size, older.known, older.added), (16, 1, 9));
    }

    #[test]
    fn a_newer_caller_keeps_what_the_library_does_not_know() {
        let mut newer = [32, 0xee, 0xee, 0xee_u64];
        // SAFETY: the array has the 32 bytes that its first element states.
        unsafe { fill(newer.as_mut_ptr().cast(), &PRESENT) }.unwrap();
        assert_eq!(newer, [32, 1, 2, 0xee]);
    }

    #[test]
    fn a_size_below_the_first_version_is_refused() {
        let mut smaller = Grown {
            struct_size: 15,
            ..PRESENT
        };
        // SAFETY: the struct has at least `struct_size` bytes.
        let error = unsafe { fill(&mut smaller, &PRESENT) }.unwrap_err();
        assert!(error.message.contains("is 15, expected at least 16"));
    }
}
