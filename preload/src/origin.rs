//! The object that called one of our functions, and the functions that it meant.
//!
//! A host may have loaded llama.cpp with local scope (Python, Node), or twice. The
//! next definition in the global order is then missing or the wrong one. What the
//! caller meant is what its own object and the libraries it depends on define.

use std::ffi::{CStr, CString, c_int, c_void};
use std::sync::atomic::{AtomicPtr, Ordering};

use once_cell::sync::OnceCell;
use parking_lot::Mutex;

use crate::ggml::Ggml;
use crate::interpose::HOOKS;

/// A loaded object from which our functions were called. Never freed, and neither
/// is the object: it holds a reference to it.
pub struct Origin {
    start: usize,
    end: usize,
    /// What `dlopen` gave; null for the main program, whose symbols are global.
    handle: *mut c_void,
    /// The functions behind ours, by number of the hook.
    real: [AtomicPtr<c_void>; HOOKS.len()],
    ggml: OnceCell<Option<&'static Ggml>>,
    /// Whether this is libllama: it defines `llama_decode`, or is linked with it.
    is_llama: bool,
    next: *const Origin,
}

// SAFETY: the handle is only passed to dlsym, which any thread may call; the rest is
// immutable or atomic.
unsafe impl Send for Origin {}
// SAFETY: as above.
unsafe impl Sync for Origin {}

/// The origins seen so far, newest first.
static SEEN: AtomicPtr<Origin> = AtomicPtr::new(std::ptr::null_mut());

impl Origin {
    /// The origin of a call that returns to this address.
    pub fn of(return_address: usize) -> &'static Origin {
        match find(SEEN.load(Ordering::Acquire), return_address) {
            Some(origin) => origin,
            None => learn(return_address),
        }
    }

    /// The function behind a hook, or null.
    pub fn real(&self, hook: usize) -> *mut c_void {
        let known = self.real[hook].load(Ordering::Relaxed);
        if !known.is_null() {
            return known;
        }
        let found = self.symbol(HOOKS[hook]);
        self.real[hook].store(found, Ordering::Relaxed);
        found
    }

    /// A function by name, as this object would have found it without us; or null.
    pub fn symbol(&self, name: &CStr) -> *mut c_void {
        let mut found = std::ptr::null_mut();
        if !self.handle.is_null() {
            // SAFETY: the handle is a live one, the name a C string.
            found = unsafe { libc::dlsym(self.handle, name.as_ptr()) };
        }
        if !found.is_null() && !is_ours(found as usize) {
            return found;
        }
        // SAFETY: as above; the call is made from this library, which is what
        // RTLD_NEXT goes by.
        let next = unsafe { libc::dlsym(libc::RTLD_NEXT, name.as_ptr()) };
        if is_ours(next as usize) {
            return std::ptr::null_mut();
        }
        next
    }

    /// The copy of ggml that this object uses; `None` when it is not understood.
    pub fn ggml(&self) -> Option<&'static Ggml> {
        *self.ggml.get_or_init(|| Ggml::of(self))
    }

    /// Whether this is libllama.
    pub fn is_llama(&self) -> bool {
        self.is_llama
    }
}

fn find(mut at: *const Origin, address: usize) -> Option<&'static Origin> {
    // SAFETY: the list holds leaked boxes only, which are never changed but for
    // atomics and a cell.
    while let Some(origin) = unsafe { at.as_ref() } {
        if (origin.start..origin.end).contains(&address) {
            return Some(origin);
        }
        at = origin.next;
    }
    None
}

fn learn(address: usize) -> &'static Origin {
    static LEARNING: Mutex<()> = Mutex::new(());
    let _one_at_a_time = LEARNING.lock();
    let first = SEEN.load(Ordering::Acquire);
    if let Some(origin) = find(first, address) {
        return origin;
    }
    // Code of no object (made at run time) is taken for the main program's.
    let object = object_at(address).unwrap_or(Object {
        start: address,
        end: address + 1,
        name: CString::default(),
    });
    // The main program has an empty name.
    let handle = match object.name.is_empty() {
        true => std::ptr::null_mut(),
        // SAFETY: a C string; NOLOAD only takes a reference to what is loaded.
        false => unsafe { libc::dlopen(object.name.as_ptr(), libc::RTLD_NOLOAD | libc::RTLD_LAZY) },
    };
    let mut origin = Origin {
        start: object.start,
        end: object.end,
        handle,
        real: [const { AtomicPtr::new(std::ptr::null_mut()) }; HOOKS.len()],
        ggml: OnceCell::new(),
        is_llama: false,
        next: first,
    };
    let decode = origin.symbol(c"llama_decode") as usize;
    origin.is_llama = (origin.start..origin.end).contains(&decode);
    let origin = Box::leak(Box::new(origin));
    SEEN.store(origin, Ordering::Release);
    origin
}

/// A loaded object: where it lies, and the name the loader knows it by.
struct Object {
    start: usize,
    end: usize,
    name: CString,
}

fn object_at(address: usize) -> Option<Object> {
    struct Search {
        address: usize,
        found: Option<Object>,
    }
    unsafe extern "C" fn visit(
        info: *mut libc::dl_phdr_info,
        _size: usize,
        data: *mut c_void,
    ) -> c_int {
        // SAFETY: the loader passes a valid entry, and what was given to it below.
        let (info, search) = unsafe { (&*info, &mut *data.cast::<Search>()) };
        // SAFETY: the entry says how many program headers there are.
        let headers =
            unsafe { std::slice::from_raw_parts(info.dlpi_phdr, usize::from(info.dlpi_phnum)) };
        let loaded = headers.iter().filter(|h| h.p_type == libc::PT_LOAD);
        let bounds = loaded.map(|h| {
            let start = info.dlpi_addr as usize + h.p_vaddr as usize;
            (start, start + h.p_memsz as usize)
        });
        let (start, end) = bounds.fold((usize::MAX, 0), |(low, high), (start, end)| {
            (low.min(start), high.max(end))
        });
        if !(start..end).contains(&search.address) {
            return 0;
        }
        // SAFETY: the loader's name is null or a C string.
        let name = (!info.dlpi_name.is_null())
            .then(|| unsafe { CStr::from_ptr(info.dlpi_name) }.to_owned());
        search.found = Some(Object {
            start,
            end,
            name: name.unwrap_or_default(),
        });
        1
    }
    let mut search = Search {
        address,
        found: None,
    };
    // SAFETY: the callback has the right type and gets a pointer that outlives it.
    unsafe { libc::dl_iterate_phdr(Some(visit), (&raw mut search).cast()) };
    search.found
}

/// Whether an address lies in this library.
fn is_ours(address: usize) -> bool {
    static OURS: OnceCell<(usize, usize)> = OnceCell::new();
    let (start, end) = *OURS.get_or_init(|| {
        let here = is_ours as fn(usize) -> bool as usize;
        object_at(here).map_or((0, 0), |object| (object.start, object.end))
    });
    (start..end).contains(&address)
}

/// The path of the file behind an open stream.
pub fn path_of_stream(stream: *mut libc::FILE) -> Option<std::path::PathBuf> {
    // SAFETY: the host has just let ggml read this stream.
    let descriptor = unsafe { libc::fileno(stream) };
    let path = std::fs::read_link(format!("/proc/self/fd/{descriptor}")).ok()?;
    path.is_absolute().then_some(path)
}
