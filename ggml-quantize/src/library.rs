//! The functions of `libggml-base.so`.

use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::ptr;

use crate::Error;

/// The types that `ggml_quantize_chunk` writes. It aborts for others.
pub const TARGETS: [&str; 28] = [
    "f32", "f16", "bf16", "q1_0", "q2_0", "q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "mxfp4", "nvfp4",
    "q2_K", "q3_K", "q4_K", "q5_K", "q6_K", "tq1_0", "tq2_0", "iq1_s", "iq1_m", "iq2_xxs",
    "iq2_xs", "iq2_s", "iq3_xxs", "iq3_s", "iq4_nl", "iq4_xs",
];

/// `struct ggml_type_traits`. Only what its first fields agree on is used.
#[repr(C)]
struct Traits {
    type_name: *const c_char,
    block: i64,
    interleaved: i64,
    bytes: usize,
    is_quantized: bool,
    to_float: Option<unsafe extern "C" fn(*const c_void, *mut f32, i64)>,
}

/// `struct ggml_init_params`.
#[repr(C)]
struct InitParams {
    bytes: usize,
    buffer: *mut c_void,
    no_alloc: bool,
}

type Init = unsafe extern "C" fn(InitParams) -> *mut c_void;
type Free = unsafe extern "C" fn(*mut c_void);
type TypeName = unsafe extern "C" fn(c_int) -> *const c_char;
type TypeTraits = unsafe extern "C" fn(c_int) -> *const Traits;
type BlockSize = unsafe extern "C" fn(c_int) -> i64;
type TypeSize = unsafe extern "C" fn(c_int) -> usize;
type ToF32 = unsafe extern "C" fn(*const c_void, *mut f32, i64);
type Requires = unsafe extern "C" fn(c_int) -> bool;
type Validate = unsafe extern "C" fn(c_int, *const c_void, usize) -> bool;
type Quantize =
    unsafe extern "C" fn(c_int, *const f32, *mut c_void, i64, i64, i64, *const f32) -> usize;

/// An open ggml library. It stays open until the process ends.
pub struct Ggml {
    type_name: TypeName,
    type_traits: TypeTraits,
    block_size: BlockSize,
    type_size: TypeSize,
    f16_to_f32: ToF32,
    bf16_to_f32: ToF32,
    requires_matrix: Requires,
    validate: Validate,
    quantize: Quantize,
}

/// A type that the library has.
#[derive(Debug, Clone, Copy)]
pub struct Kind {
    id: c_int,
    /// The name in ggml, such as `q4_K`.
    pub name: &'static str,
    /// Elements of a block.
    pub block: usize,
    /// Bytes of a block.
    pub bytes: usize,
    /// Whether quantising to this type needs an importance matrix.
    pub needs_matrix: bool,
    is_target: bool,
    to_f32: Option<ToF32>,
}

impl Ggml {
    /// Opens a library.
    pub fn open(path: &Path) -> Result<Ggml, Error> {
        let name = CString::new(path.as_os_str().as_bytes()).map_err(|_| Error::Open {
            path: path.to_owned(),
            reason: "its name has a NUL".into(),
        })?;
        // SAFETY: the name is a C string; the user named a ggml library, whose constructors run.
        let handle = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
        if handle.is_null() {
            // SAFETY: dlerror returns NULL or a C string that lives until the next call.
            let reason = unsafe {
                let text = libc::dlerror();
                (!text.is_null()).then(|| CStr::from_ptr(text).to_string_lossy().into_owned())
            };
            return Err(Error::Open {
                path: path.to_owned(),
                reason: reason.unwrap_or_else(|| "unknown reason".into()),
            });
        }
        let find = |name: &'static CStr| {
            // SAFETY: the handle is open, and the name is a C string.
            let found = unsafe { libc::dlsym(handle, name.as_ptr()) };
            match found.is_null() {
                true => Err(Error::Function {
                    path: path.to_owned(),
                    name: name.to_str().unwrap_or_default(),
                }),
                false => Ok(found),
            }
        };
        macro_rules! function {
            ($name:literal, $type:ty) => {
                // SAFETY: the exported function of this name has this signature in ggml.h.
                unsafe { std::mem::transmute::<*mut c_void, $type>(find($name)?) }
            };
        }
        // Versions before 2025-06 fill the table for conversions of f16 at the first context.
        let init = function!(c"ggml_init", Init);
        let free = function!(c"ggml_free", Free);
        // SAFETY: a small context without data, freed at once.
        unsafe {
            free(init(InitParams {
                bytes: 1024,
                buffer: ptr::null_mut(),
                no_alloc: true,
            }));
        }
        Ok(Ggml {
            type_name: function!(c"ggml_type_name", TypeName),
            type_traits: function!(c"ggml_get_type_traits", TypeTraits),
            block_size: function!(c"ggml_blck_size", BlockSize),
            type_size: function!(c"ggml_type_size", TypeSize),
            f16_to_f32: function!(c"ggml_fp16_to_fp32_row", ToF32),
            bf16_to_f32: function!(c"ggml_bf16_to_fp32_row", ToF32),
            requires_matrix: function!(c"ggml_quantize_requires_imatrix", Requires),
            validate: function!(c"ggml_validate_row_data", Validate),
            quantize: function!(c"ggml_quantize_chunk", Quantize),
        })
    }

    /// Returns a type by its number and name, if the library has it.
    pub fn kind(&self, id: u32, name: &'static str) -> Result<Kind, Error> {
        let unknown = || Error::UnknownType(name.into());
        let id = c_int::try_from(id).map_err(|_| unknown())?;
        let nothing: [u8; 1] = [0];
        // SAFETY: no byte is read; the result is false for a number without a type.
        if !unsafe { (self.validate)(id, nothing.as_ptr().cast(), 0) } {
            return Err(unknown());
        }
        // SAFETY: the library has a type with this number: returns NULL or a C string.
        let found = unsafe {
            let found = (self.type_name)(id);
            (!found.is_null()).then(|| CStr::from_ptr(found))
        };
        if found.and_then(|found| found.to_str().ok()) != Some(name) {
            return Err(unknown());
        }
        // SAFETY: the library has a type with this number.
        let (block, bytes, needs_matrix, traits) = unsafe {
            (
                usize::try_from((self.block_size)(id)).unwrap_or(0),
                (self.type_size)(id),
                (self.requires_matrix)(id),
                (self.type_traits)(id),
            )
        };
        if block == 0 || bytes == 0 {
            return Err(unknown());
        }
        // SAFETY: NULL or the traits of the type.
        let traits = unsafe { traits.as_ref() };
        // The layout of the struct is as expected if its fields agree with the functions.
        let agrees =
            |of: &&Traits| of.block == block as i64 && of.bytes == bytes && of.interleaved <= 8;
        let to_f32 = match name {
            "f16" => Some(self.f16_to_f32),
            "bf16" => Some(self.bf16_to_f32),
            _ => traits.filter(agrees).and_then(|of| of.to_float),
        };
        Ok(Kind {
            id,
            name,
            block,
            bytes,
            needs_matrix,
            is_target: TARGETS.contains(&name),
            to_f32,
        })
    }

    /// Converts whole blocks to `f32`. `out` has one element for each element of `data`.
    pub fn to_f32(&self, kind: &Kind, data: &[u8], out: &mut [f32]) -> Result<(), Error> {
        kind.check(data.len(), out.len())?;
        // SAFETY: the range is valid for reads of its length.
        if !unsafe { (self.validate)(kind.id, data.as_ptr().cast(), data.len()) } {
            return Err(Error::InvalidSource(kind.name.into()));
        }
        if kind.name == "f32" {
            for (to, from) in out.iter_mut().zip(data.chunks_exact(4)) {
                *to = f32::from_le_bytes([from[0], from[1], from[2], from[3]]);
            }
            return Ok(());
        }
        let convert = kind
            .to_f32
            .ok_or_else(|| Error::NotASource(kind.name.into()))?;
        // SAFETY: both ranges have this number of elements; `check` compared their lengths.
        unsafe { convert(data.as_ptr().cast(), out.as_mut_ptr(), out.len() as i64) };
        Ok(())
    }

    /// Quantises whole rows of `row` elements. `matrix` has one value for each element of a row.
    pub fn quantize(
        &self,
        kind: &Kind,
        rows: &[f32],
        row: usize,
        matrix: Option<&[f32]>,
        out: &mut [u8],
    ) -> Result<(), Error> {
        if !kind.is_target {
            return Err(Error::NotATarget(kind.name.into()));
        }
        if row == 0 || !row.is_multiple_of(kind.block) || !rows.len().is_multiple_of(row) {
            return Err(Error::Blocks {
                row,
                block: kind.block,
            });
        }
        kind.check(out.len(), rows.len())?;
        if matrix.is_none() && kind.needs_matrix {
            return Err(Error::NeedsMatrix(kind.name.into()));
        }
        if let Some(found) = matrix.map(<[f32]>::len).filter(|found| *found != row) {
            return Err(Error::MatrixSize { found, needed: row });
        }
        // SAFETY: `rows` and `out` have the same number of elements, in whole rows of whole
        // blocks; the matrix has the length of a row, or is NULL where the type permits it; the
        // type is one that the function writes. The function may be called on several threads.
        let valid = unsafe {
            (self.quantize)(
                kind.id,
                rows.as_ptr(),
                out.as_mut_ptr().cast(),
                0,
                (rows.len() / row) as i64,
                row as i64,
                matrix.map_or(ptr::null(), <[f32]>::as_ptr),
            );
            (self.validate)(kind.id, out.as_ptr().cast(), out.len())
        };
        match valid {
            true => Ok(()),
            false => Err(Error::InvalidResult(kind.name.into())),
        }
    }
}

impl Kind {
    /// Fails if tensors of this type cannot be quantised to another one, with an importance matrix
    /// or without.
    pub fn check_target(&self, to: &Kind, has_matrix: bool) -> Result<(), Error> {
        if self.name != "f32" && self.to_f32.is_none() {
            return Err(Error::NotASource(self.name.into()));
        }
        if !to.is_target {
            return Err(Error::NotATarget(to.name.into()));
        }
        match to.needs_matrix && !has_matrix {
            true => Err(Error::NeedsMatrix(to.name.into())),
            false => Ok(()),
        }
    }

    /// Returns the bytes of a number of elements; `None` if these are no whole blocks.
    pub fn size(&self, elements: usize) -> Option<usize> {
        let blocks = elements
            .is_multiple_of(self.block)
            .then_some(elements / self.block)?;
        blocks.checked_mul(self.bytes)
    }

    fn check(&self, bytes: usize, elements: usize) -> Result<(), Error> {
        match self.size(elements) == Some(bytes) {
            true => Ok(()),
            false => Err(Error::Blocks {
                row: elements,
                block: self.block,
            }),
        }
    }
}
