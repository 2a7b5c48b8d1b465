//! The object that called one of our functions, and the functions that it meant.
//!
//! What a caller gets is what the dynamic loader would have given it without this
//! library. Whatever is global comes first, in the loader's order, then what was loaded
//! together with the caller. A host may have loaded llama.cpp with local scope (Python,
//! Node), or twice, so the next definition in the global order can be missing.
//!
//! The address that a call returns to does not always lie in the caller: a function whose
//! last act is a call jumps there, and the called one returns to the caller's caller. So a
//! name that is not found in the scope of that object is looked for in all objects.
//! When several define it, the arguments decide: ggml's structs hold addresses of functions
//! and data of the copy that made them. When they do not tell, the first copy is taken.
//!
//! No object is kept loaded by being known here, and no lock is taken: a library's
//! constructor may wait for a thread that calls one of our functions.

use std::ffi::{CStr, c_int, c_void};
use std::os::fd::AsRawFd;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU64, Ordering};

use once_cell::sync::OnceCell;

use crate::ggml::Ggml;
use crate::loaded::{self, Place};

/// Calls a macro with the table of interposed functions: a [`Hook`] and the exported name.
macro_rules! hooks {
    ($use:ident) => {
        $use! {
            GgufInit = gguf_init_from_file,
            GgufInitStream = gguf_init_from_file_ptr,
            TensorAlloc = ggml_backend_tensor_alloc,
            BufferGetSize = ggml_backend_buffer_get_size,
            BufferFree = ggml_backend_buffer_free,
            BackendFree = ggml_backend_free,
            ContextFree = ggml_free,
            SchedReset = ggml_backend_sched_reset,
            SchedReserve = ggml_backend_sched_reserve,
            SchedAllocGraph = ggml_backend_sched_alloc_graph,
            SchedCompute = ggml_backend_sched_graph_compute_async,
            SchedSynchronize = ggml_backend_sched_synchronize,
            SchedFree = ggml_backend_sched_free,
            BackendCompute = ggml_backend_graph_compute_async,
            ReloadChangedTensors = llama_reload_changed_tensors,
        }
    };
}
pub(crate) use hooks;

macro_rules! define_hooks {
    ($($hook:ident = $name:ident,)*) => {
        /// An interposed function.
        #[derive(Debug, Clone, Copy, PartialEq, Eq)]
        #[repr(usize)]
        pub enum Hook {
            $(
                #[doc = concat!("`", stringify!($name), "`.")]
                $hook,
            )*
        }

        impl Hook {
            /// All of them, in the order of their numbers.
            const ALL: &[Hook] = &[$(Hook::$hook),*];

            /// Returns the exported name.
            pub const fn name(self) -> &'static CStr {
                let name = match self {
                    $(Hook::$hook => concat!(stringify!($name), "\0"),)*
                };
                match CStr::from_bytes_with_nul(name.as_bytes()) {
                    Ok(name) => name,
                    Err(_) => panic!("one NUL, at the end"),
                }
            }
        }
    };
}
hooks!(define_hooks);

/// Arguments in integer registers.
pub type Arguments = [usize; 6];

/// A loaded object from which our functions were called. Never freed; when the object is
/// unloaded and loaded again at the same place, it is used again.
pub struct Origin {
    /// Where the object lies; nowhere for code that is in no object.
    place: Option<Place>,
    /// How many objects had been unloaded when what is known here was last found to hold.
    checked: AtomicU64,
    /// The functions behind ours, by number of the hook.
    real: [AtomicPtr<c_void>; Hook::ALL.len()],
    ggml: OnceCell<Option<&'static Ggml>>,
    /// Whether the object and its ggml stay loaded for as long as the process lives.
    kept: AtomicBool,
    is_llama: OnceCell<bool>,
    next: *const Origin,
}

// SAFETY: all fields are immutable or atomic, and so is what `next` points to.
unsafe impl Send for Origin {}
// SAFETY: as above.
unsafe impl Sync for Origin {}

/// The origins seen so far, newest first.
static SEEN: AtomicPtr<Origin> = AtomicPtr::new(std::ptr::null_mut());
/// Code that was made at run time.
static NOWHERE: Origin = Origin::new(None, 0);

/// What a name stands for.
enum Meaning {
    /// This function.
    This(usize),
    /// One of several, and the caller's scope does not say which; this is the first.
    OneOf(usize),
    /// Nothing that is loaded defines it.
    Nothing,
}

impl Origin {
    const fn new(place: Option<Place>, checked: u64) -> Origin {
        Origin {
            place,
            checked: AtomicU64::new(checked),
            real: [const { AtomicPtr::new(std::ptr::null_mut()) }; Hook::ALL.len()],
            ggml: OnceCell::new(),
            kept: AtomicBool::new(false),
            is_llama: OnceCell::new(),
            next: std::ptr::null(),
        }
    }

    /// The origin of a call that returns to this address.
    pub fn of(return_address: usize) -> &'static Origin {
        let unloads = loaded::unloads();
        let current = |origin: &&Origin| {
            origin.contains(return_address) && origin.checked.load(Ordering::Acquire) == unloads
        };
        if let Some(origin) = seen().find(current) {
            return origin;
        }
        let Some(place) = loaded::place_of(return_address) else {
            NOWHERE.check(unloads);
            return &NOWHERE;
        };
        if let Some(origin) = seen().find(|origin| origin.place == Some(place)) {
            origin.check(unloads);
            return origin;
        }
        learn(place, unloads)
    }

    /// The function behind a hook, or null if there is none; and the object that meant it.
    pub fn meant(
        &'static self,
        hook: Hook,
        arguments: &Arguments,
    ) -> (&'static Origin, *mut c_void) {
        if let Some(known) = self.real(hook) {
            return (self, known);
        }
        match self.meaning(hook.name()) {
            Meaning::This(found) => (self, self.remember(hook, found)),
            Meaning::Nothing => (self, std::ptr::null_mut()),
            // Not remembered: the next call may have other arguments.
            Meaning::OneOf(first) => {
                by_arguments(hook, arguments).unwrap_or((self, first as *mut c_void))
            }
        }
    }

    /// What is known to be behind a hook.
    fn real(&self, hook: Hook) -> Option<*mut c_void> {
        let known = self.real[hook as usize].load(Ordering::Relaxed);
        (!known.is_null()).then_some(known)
    }

    fn remember(&self, hook: Hook, found: usize) -> *mut c_void {
        let found = found as *mut c_void;
        self.real[hook as usize].store(found, Ordering::Relaxed);
        found
    }

    /// A function by name, as this object would have found it without us; or null.
    pub fn symbol(&self, name: &CStr) -> *mut c_void {
        match self.meaning(name) {
            Meaning::This(found) | Meaning::OneOf(found) => found as *mut c_void,
            Meaning::Nothing => std::ptr::null_mut(),
        }
    }

    /// Whether this object cannot work without a function of this name.
    pub fn requires(&self, name: &CStr) -> bool {
        let reference = loaded::look(|objects, _| self.among(objects)?.reference(name));
        reference.flatten().is_some_and(|reference| !reference.weak)
    }

    /// What the loader calls the object; nothing for the main program.
    pub fn name(&self) -> Vec<u8> {
        const LONGEST: usize = libc::PATH_MAX as usize;
        let mut name = Vec::with_capacity(LONGEST);
        loaded::look(|objects, _| {
            let object = self.among(objects);
            let found = object.map_or(&[][..], |object| object.name().to_bytes());
            name.extend(found.iter().take(LONGEST));
        });
        name
    }

    fn among<'a>(&self, objects: &'a [loaded::Object]) -> Option<&'a loaded::Object> {
        objects
            .iter()
            .find(|object| Some(object.place) == self.place)
    }

    fn meaning(&self, name: &CStr) -> Meaning {
        let ours = ours();
        let found = loaded::look(|objects, _| {
            // Objects before this library are those that the loader asks before it.
            let after = objects.iter().position(|object| object.place == ours);
            let after = objects.get(after.map_or(0, |at| at + 1)..).unwrap_or(&[]);
            // Most libraries have no versions, and then it takes long to find out which
            // one a caller means.
            let versions = after.iter().any(|object| object.defines_versions_of(name));
            let caller = self.among(objects).filter(|_| versions);
            let reference = caller.and_then(|caller| caller.reference(name));
            let version = reference.and_then(|reference| reference.version);
            let mut all = after
                .iter()
                .filter_map(|object| object.definition(name, version));
            (all.next(), all.next().is_some(), version)
        });
        let (first, version) = match found {
            Some((Some(first), false, _)) => return Meaning::This(first),
            Some((None, _, _)) => return Meaning::Nothing,
            Some((Some(first), true, version)) => (Some(first), version),
            // No memory to look.
            None => (None, None),
        };
        // Which objects are global is known to the loader only.
        // SAFETY: the call is made from this library, which is what RTLD_NEXT goes by.
        let next = unsafe { libc::dlsym(libc::RTLD_NEXT, name.as_ptr()) } as usize;
        let scoped = loaded::look(|objects, scratch| {
            let global = objects.iter().find(|object| object.contains(next));
            let global = global.and_then(|object| object.definition(name, version));
            let from = self.place?.start;
            global.or_else(|| loaded::in_local_scope(objects, scratch, from, name, version, ours))
        });
        match (scoped.flatten(), first) {
            (Some(found), _) => Meaning::This(found),
            (None, Some(first)) => Meaning::OneOf(first),
            (None, None) if next != 0 => Meaning::OneOf(next),
            (None, None) => Meaning::Nothing,
        }
    }

    /// Keeps what is known only as far as it still holds after objects were unloaded.
    fn check(&self, unloads: u64) {
        if self.checked.load(Ordering::Acquire) == unloads {
            return;
        }
        for (real, hook) in self.real.iter().zip(Hook::ALL) {
            let known = real.load(Ordering::Relaxed);
            if known.is_null() {
                continue;
            }
            let holds = loaded::look(|objects, _| {
                let object = objects
                    .iter()
                    .find(|object| object.contains(known as usize));
                object.is_some_and(|object| object.defines_at(hook.name(), known as usize))
            });
            if holds != Some(true) {
                real.store(std::ptr::null_mut(), Ordering::Relaxed);
            }
        }
        self.checked.store(unloads, Ordering::Release);
    }

    fn contains(&self, address: usize) -> bool {
        let place = self.place;
        place.is_some_and(|place| (place.start..place.end).contains(&address))
    }

    /// The copy of ggml that this object uses; `None` when it is not understood. From here
    /// on the object and the copy stay loaded: threads of the drop-in call into it.
    pub fn ggml(&self) -> Option<&'static Ggml> {
        let found = *self
            .ggml
            .get_or_init(|| Ggml::resolve(&|name| self.symbol(name)));
        // Not while the cell is being filled: dlopen waits for constructors, which may wait
        // for it.
        if let Some(ggml) = found
            && !self.kept.swap(true, Ordering::Relaxed)
        {
            keep_loaded(ggml.f.ggml_init as *const c_void);
            if let Some(place) = self.place {
                keep_loaded(place.start as *const c_void);
            }
        }
        found
    }

    /// Whether this is libllama: it defines `llama_decode`.
    pub fn is_llama(&self) -> bool {
        let decode = || self.contains(self.symbol(c"llama_decode") as usize);
        *self.is_llama.get_or_init(decode)
    }
}

fn seen() -> impl Iterator<Item = &'static Origin> {
    // SAFETY: the list holds what is never freed and never changed but for atomics and
    // cells.
    let first = unsafe { SEEN.load(Ordering::Acquire).cast_const().as_ref() };
    // SAFETY: as above.
    std::iter::successors(first, |origin| unsafe { origin.next.as_ref() })
}

/// Adds an origin to the list. Two threads may add the same; the newer one is used then.
fn learn(place: Place, unloads: u64) -> &'static Origin {
    let layout = std::alloc::Layout::new::<Origin>();
    // SAFETY: an origin has a size.
    let room = unsafe { std::alloc::alloc(layout) }.cast::<Origin>();
    if room.is_null() {
        // It is looked at anew with each call.
        return &NOWHERE;
    }
    let mut origin = Origin::new(Some(place), unloads);
    let mut first = SEEN.load(Ordering::Acquire);
    loop {
        origin.next = first;
        // SAFETY: the room is for this, and not in the list yet.
        unsafe { room.write(origin) };
        match SEEN.compare_exchange(first, room, Ordering::AcqRel, Ordering::Acquire) {
            // SAFETY: it is never freed, and never changed but for atomics and cells.
            Ok(_) => return unsafe { &*room },
            Err(other) => {
                first = other;
                origin = Origin::new(Some(place), unloads);
            }
        }
    }
}

/// The function behind a hook for the first object whose code or data an argument, or what
/// it points to, leads into; for calls from code that has none of the copies in its scope.
fn by_arguments(hook: Hook, arguments: &Arguments) -> Option<(&'static Origin, *mut c_void)> {
    /// Hooks have three arguments at most.
    const LOOKED_AT: usize = 3;
    arguments.iter().take(LOOKED_AT).find_map(|argument| {
        let mut words = [0; 1 + WORDS];
        words[0] = *argument;
        copy_of_memory(*argument, &mut words[1..]);
        words.into_iter().find_map(|word| {
            let found = loaded::look(|objects, scratch| {
                loaded::in_own_group(objects, scratch, word, hook.name(), ours())
            });
            Some((Origin::of(word), found.flatten()? as *mut c_void))
        })
    })
}

/// How much of what an argument points to is looked at, in words.
const WORDS: usize = 24;

/// Copies memory that may not be there, as far as it is.
fn copy_of_memory(address: usize, words: &mut [usize]) {
    let Ok(memory) = std::fs::File::open("/proc/self/mem") else {
        return;
    };
    let Ok(offset) = libc::off_t::try_from(address) else {
        return;
    };
    let bytes = size_of_val(words);
    // SAFETY: the kernel writes as many bytes as there is room for, or fails.
    unsafe { libc::pread(memory.as_raw_fd(), words.as_mut_ptr().cast(), bytes, offset) };
}

/// Keeps the object loaded that an address lies in.
fn keep_loaded(address: *const c_void) {
    let mut found = std::mem::MaybeUninit::<libc::Dl_info>::zeroed();
    // SAFETY: dladdr fills the struct, whose name is a C string of a loaded object; NOLOAD
    // takes a reference to what is loaded.
    unsafe {
        if libc::dladdr(address, found.as_mut_ptr()) != 0 {
            let flags: c_int = libc::RTLD_NOLOAD | libc::RTLD_LAZY;
            libc::dlopen(found.assume_init().dli_fname, flags);
        }
    }
}

/// Where this library lies.
fn ours() -> Place {
    static OURS: OnceCell<Place> = OnceCell::new();
    *OURS.get_or_init(|| {
        let here = ours as fn() -> Place as usize;
        loaded::place_of(here).unwrap_or(Place::NOWHERE)
    })
}
