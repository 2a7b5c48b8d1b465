//! The peer: upstream's own `libggml-base.so`, called through `dlopen`.

use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

/// Mirrors `struct gguf_init_params`.
#[repr(C)]
struct InitParams {
    no_alloc: bool,
    ctx: *mut *mut c_void,
}

/// Mirrors the start of `struct ggml_type_traits`.
#[repr(C)]
struct TypeTraits {
    type_name: *const c_char,
    block: i64,
    block_interleaved: i64,
    bytes: usize,
    is_quantized: bool,
    to_float: Option<unsafe extern "C" fn(*const c_void, *mut f32, i64)>,
}

/// A loaded `libggml-base.so`.
pub struct Ggml {
    gguf_init_from_file: unsafe extern "C" fn(*const c_char, InitParams) -> *mut c_void,
    gguf_free: unsafe extern "C" fn(*mut c_void),
    ggml_type_name: unsafe extern "C" fn(c_int) -> *const c_char,
    ggml_type_size: unsafe extern "C" fn(c_int) -> usize,
    ggml_blck_size: unsafe extern "C" fn(c_int) -> i64,
    ggml_get_type_traits: unsafe extern "C" fn(c_int) -> *const TypeTraits,
}

extern "C" fn quiet(_level: c_int, _text: *const c_char, _user: *mut c_void) {}

impl Ggml {
    /// Loads the library in `folder`.
    pub fn load(folder: &Path) -> Ggml {
        let path = CString::new(folder.join("libggml-base.so").as_os_str().as_bytes())
            .expect("no NUL in a path");
        // SAFETY: loading runs the library's initialisers, which is its ordinary
        // start; the symbols are looked up by the names and called with the
        // signatures that ggml.h and gguf.h give them.
        unsafe {
            let library = libc::dlopen(path.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL);
            assert!(
                !library.is_null(),
                "{}",
                CStr::from_ptr(libc::dlerror()).to_string_lossy()
            );
            let symbol = |name: &CStr| {
                let found = libc::dlsym(library, name.as_ptr());
                assert!(!found.is_null(), "libggml-base.so has no {name:?}");
                found
            };
            let log_set: unsafe extern "C" fn(
                extern "C" fn(c_int, *const c_char, *mut c_void),
                *mut c_void,
            ) = std::mem::transmute(symbol(c"ggml_log_set"));
            log_set(quiet, std::ptr::null_mut());
            Ggml {
                gguf_init_from_file: std::mem::transmute::<
                    *mut c_void,
                    unsafe extern "C" fn(*const c_char, InitParams) -> *mut c_void,
                >(symbol(c"gguf_init_from_file")),
                gguf_free: std::mem::transmute::<*mut c_void, unsafe extern "C" fn(*mut c_void)>(
                    symbol(c"gguf_free"),
                ),
                ggml_type_name: std::mem::transmute::<
                    *mut c_void,
                    unsafe extern "C" fn(c_int) -> *const c_char,
                >(symbol(c"ggml_type_name")),
                ggml_type_size: std::mem::transmute::<
                    *mut c_void,
                    unsafe extern "C" fn(c_int) -> usize,
                >(symbol(c"ggml_type_size")),
                ggml_blck_size: std::mem::transmute::<
                    *mut c_void,
                    unsafe extern "C" fn(c_int) -> i64,
                >(symbol(c"ggml_blck_size")),
                ggml_get_type_traits: std::mem::transmute::<
                    *mut c_void,
                    unsafe extern "C" fn(c_int) -> *const TypeTraits,
                >(symbol(c"ggml_get_type_traits")),
            }
        }
    }

    /// Opens a file the way llama.cpp does and closes it again; whether it was
    /// accepted. A file that makes ggml abort takes the process along.
    pub fn accepts(&self, path: &Path) -> bool {
        let path = CString::new(path.as_os_str().as_bytes()).expect("no NUL in a path");
        let params = InitParams {
            no_alloc: true,
            ctx: std::ptr::null_mut(),
        };
        // SAFETY: the path is a C string, the parameters request only the header,
        // and what was returned is freed once.
        unsafe {
            let context = (self.gguf_init_from_file)(path.as_ptr(), params);
            if context.is_null() {
                return false;
            }
            (self.gguf_free)(context);
            true
        }
    }

    /// The numbers that a block of a type id below ggml's count stands for; `None` for types
    /// that ggml does not turn into floats.
    pub fn floats(&self, id: u32, block: &[u8]) -> Option<Vec<f32>> {
        // SAFETY: the traits are static, and the block and the floats are as large as they say.
        unsafe {
            let traits = &*(self.ggml_get_type_traits)(id as c_int);
            assert_eq!(traits.bytes, block.len());
            let mut floats = vec![0.0; traits.block as usize];
            traits.to_float?(block.as_ptr().cast(), floats.as_mut_ptr(), traits.block);
            Some(floats)
        }
    }

    /// Name, block size and bytes per block of a type id below ggml's count.
    pub fn type_traits(&self, id: u32) -> (String, u64, u64) {
        let id = id as c_int;
        // SAFETY: the three take any id below GGML_TYPE_COUNT and return plain
        // values or a static string.
        unsafe {
            let name = CStr::from_ptr((self.ggml_type_name)(id));
            (
                name.to_string_lossy().into_owned(),
                (self.ggml_blck_size)(id) as u64,
                (self.ggml_type_size)(id) as u64,
            )
        }
    }
}
