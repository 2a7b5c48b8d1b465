//! The end of a buffer, seen at the buffer itself.
//!
//! ggml frees a buffer through `free_buffer`, a pointer in the struct of the buffer. Each copy of ggml reads it at each
//! free, however the copy is linked and whatever its compiler inlined. A watched buffer has a function of the drop-in
//! there, which goes on to the function before.
//!
//! Only buffers of the CPU are watched: backends of devices, and buffers that stand for several, are known by that
//! pointer (`ggml_backend_buffer_is_cuda`, `ggml_backend_buffer_is_multi_buffer`).
//!
//! The struct is private to ggml, and begins with another function in older copies. So the pointer is found by
//! experiment: both of the first two functions are replaced in a new buffer, and one of them is called when it is freed.

use std::sync::atomic::{AtomicUsize, Ordering};

use once_cell::sync::OnceCell;
use parking_lot::Mutex;

use super::Ggml;
use super::sys::Functions;
use super::types::Buffer;
use crate::process::maps::Maps;
use crate::process::memory::Memory;

/// `free_buffer`.
type Free = unsafe extern "C-unwind" fn(*mut Buffer) -> usize;

const WORD: usize = size_of::<usize>();
/// More functions that free buffers of the CPU than any process has.
const KINDS: usize = 8;

/// The functions that watched buffers had before, by the number of the function that they have now. The first is
/// none: ggml does not free memory that it was given.
static BEFORE: [AtomicUsize; KINDS] = [const { AtomicUsize::new(0) }; KINDS];
/// What watched buffers have.
static OURS: [Free; KINDS] = [
    ended::<0>, ended::<1>, ended::<2>, ended::<3>, ended::<4>, ended::<5>, ended::<6>, ended::<7>,
];
/// Called with each watched buffer that is about to be freed.
static REPORT: OnceCell<fn(*mut Buffer)> = OnceCell::new();

unsafe extern "C-unwind" fn ended<const KIND: usize>(buffer: *mut Buffer) -> usize {
    if let Some(report) = REPORT.get() {
        report(buffer);
    }
    match BEFORE[KIND].load(Ordering::Acquire) {
        0 => 0,
        // SAFETY: the function that this buffer had before, with its argument.
        before => unsafe { std::mem::transmute::<usize, Free>(before)(buffer) },
    }
}

/// Returns the number of the function for buffers that had this one; `None` if there are too many.
fn kind_of(before: usize) -> Option<usize> {
    let claims = |kind: &usize| {
        let (set, get) = (Ordering::AcqRel, Ordering::Acquire);
        let claimed = BEFORE[*kind].compare_exchange(0, before, set, get);
        claimed.is_ok() || claimed == Err(before)
    };
    match before {
        0 => Some(0),
        _ => (1..KINDS).find(claims),
    }
}

fn is_ours(function: usize) -> bool {
    OURS.iter().any(|ours| *ours as usize == function)
}

/// The first two functions of the buffer that is freed to find the pointer, and how often each was called.
static FOUND: [AtomicUsize; 2] = [const { AtomicUsize::new(0) }; 2];
static CALLED: [AtomicUsize; 2] = [const { AtomicUsize::new(0) }; 2];

unsafe extern "C-unwind" fn called<const AT: usize>(buffer: *mut Buffer) -> usize {
    CALLED[AT].fetch_add(1, Ordering::SeqCst);
    // SAFETY: the function that the buffer had there; the first functions of a buffer take it alone.
    unsafe { std::mem::transmute::<usize, Free>(FOUND[AT].load(Ordering::SeqCst))(buffer) }
}

/// Returns the offset of `free_buffer` in buffers; `None` if the experiment does not show it.
pub fn find(f: &Functions) -> Option<usize> {
    static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());
    let _turn = ONE_AT_A_TIME.lock();
    let ours = [called::<0> as Free, called::<1> as Free];
    // SAFETY: a new buffer, whose struct is larger than two words; what replaces functions goes on to them.
    unsafe {
        let buffer = (f.ggml_backend_buft_alloc_buffer)((f.ggml_backend_cpu_buffer_type)(), 64);
        if buffer.is_null() {
            return None;
        }
        let words = buffer.cast::<usize>();
        let maps = Maps::read();
        let are_functions = (0..2).all(|at| maps.is_code(*words.add(at)));
        for (at, ours) in ours.into_iter().enumerate().filter(|_| are_functions) {
            CALLED[at].store(0, Ordering::SeqCst);
            FOUND[at].store(*words.add(at), Ordering::SeqCst);
            words.add(at).write(ours as usize);
        }
        (f.ggml_backend_buffer_free)(buffer);
        if !are_functions {
            return None;
        }
    }
    match [0, 1].map(|at| CALLED[at].load(Ordering::SeqCst)) {
        [1, 0] => Some(0),
        [0, 1] => Some(WORD),
        _ => None,
    }
}

impl Ggml {
    /// Makes the end of a buffer of the CPU call `report`, the same function for all buffers, before the buffer is
    /// freed. Leaves other buffers as they are.
    ///
    /// # Safety
    ///
    /// A live buffer of this copy, which no other thread frees.
    pub unsafe fn watch(&self, buffer: *mut Buffer, report: fn(*mut Buffer)) {
        let Some(at) = self.free_buffer_at() else {
            return;
        };
        // SAFETY: as the caller ensures; the field is an aligned pointer, which is read when the buffer is freed.
        unsafe {
            let device =
                (self.f.ggml_backend_buft_get_device)((self.f.ggml_backend_buffer_get_type)(
                    buffer,
                ));
            if !device.is_null() && !self.is_cpu(device) {
                return;
            }
            let field = buffer.byte_add(at).cast::<usize>();
            if !is_ours(*field)
                && let Some(kind) = kind_of(*field)
            {
                let _ = REPORT.set(report);
                field.write(OURS[kind] as usize);
            }
        }
    }

    /// Whether a buffer is one whose end is watched. It may be gone.
    pub fn is_watched(&self, memory: &Memory, buffer: *const Buffer) -> bool {
        let at = self.free_buffer_at();
        let field = at.and_then(|at| memory.word(buffer as usize + at));
        field.is_some_and(is_ours)
    }

    fn free_buffer_at(&self) -> Option<usize> {
        *self.free_buffer_at.get_or_init(|| find(&self.f))
    }
}
