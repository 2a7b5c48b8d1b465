//! The object that called an exported function, and the functions that it meant.
//!
//! A caller gets the function that the dynamic loader would have found without this
//! library. Global objects come first, in the loader's order, then the objects that were
//! loaded together with the caller. A program may load llama.cpp with local scope (Python,
//! Node), or twice, so the next definition in the global order can be missing.
//!
//! The return address of a call is not always in the caller: a tail call is a jump, and the
//! called function returns to the caller's caller. Therefore a name that is not found in the
//! scope of that object is looked up in all objects. When several define it, the arguments
//! decide: ggml's structs have addresses of functions and data of the copy that made them.
//! Where the arguments do not decide, the first copy is used.
//!
//! Registering a caller keeps no object loaded and takes no lock: a library's constructor
//! may wait for a thread that calls an exported function.

use std::ffi::{CStr, c_int, c_void};
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU64, Ordering};

use once_cell::sync::OnceCell;

use crate::ggml::Ggml;
use crate::loader::linked::{self, Arguments};
use crate::loader::loaded::{self, Place};
use crate::process::memory::Memory;

/// Calls a macro with the table of interposed functions: a [`Hook`] and the exported name.
macro_rules! hooks {
    ($use:ident) => {
        $use! {
            GgufInit = gguf_init_from_file,
            GgufInitStream = gguf_init_from_file_ptr,
            TensorAlloc = ggml_backend_tensor_alloc,
            TensorsAlloc = ggml_backend_alloc_ctx_tensors_from_buft,
            BufferAlloc = ggml_backend_buft_alloc_buffer,
            BufferGetSize = ggml_backend_buffer_get_size,
            BufferFree = ggml_backend_buffer_free,
            BackendFree = ggml_backend_free,
            ContextFree = ggml_free,
            SchedReset = ggml_backend_sched_reset,
            SchedSetEvalCallback = ggml_backend_sched_set_eval_callback,
            SchedSetCopyCallback = ggml_backend_sched_set_copy_callback,
            SchedReserve = ggml_backend_sched_reserve,
            SchedAllocGraph = ggml_backend_sched_alloc_graph,
            SchedCompute = ggml_backend_sched_graph_compute_async,
            SchedSynchronize = ggml_backend_sched_synchronize,
            SchedFree = ggml_backend_sched_free,
            BackendCompute = ggml_backend_graph_compute_async,
            BackendSynchronize = ggml_backend_synchronize,
            TensorGetAsync = ggml_backend_tensor_get_async,
            TensorSetAsync = ggml_backend_tensor_set_async,
            TensorCopy = ggml_backend_tensor_copy,
            OffloadOp = ggml_backend_offload_op,
            MetaDevice = ggml_backend_meta_device,
            FunctionLookup = ggml_backend_reg_get_proc_address,
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
            pub const ALL: &[Hook] = &[$(Hook::$hook),*];

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

/// A loaded object that called an exported function. Never freed; used again when the
/// object is unloaded and loaded again at the same place.
pub struct Caller {
    /// The place of the object; `None` for code that is in no object.
    place: Option<Place>,
    /// The number of unloaded objects when the functions below were last checked.
    checked: AtomicU64,
    /// The functions that were meant, by number of the hook.
    real: [AtomicPtr<c_void>; Hook::ALL.len()],
    ggml: OnceCell<Option<&'static Ggml>>,
    /// Whether the object and its ggml stay loaded for as long as the process lives.
    kept: AtomicBool,
    is_llama: OnceCell<bool>,
    next: *const Caller,
}

// SAFETY: all fields are immutable or atomic, and so is what `next` points to.
unsafe impl Send for Caller {}
// SAFETY: as above.
unsafe impl Sync for Caller {}

/// The registered callers, newest first.
static SEEN: AtomicPtr<Caller> = AtomicPtr::new(std::ptr::null_mut());
/// Code that is in no object: it was generated at run time.
static NOWHERE: Caller = Caller::new(None, 0);

/// The result of a look-up of a name.
enum Resolution {
    /// The address of the function.
    One(usize),
    /// The first of several, where the scope of the caller does not decide.
    Ambiguous(usize),
    /// No loaded object defines the name.
    None,
}

impl Caller {
    const fn new(place: Option<Place>, checked: u64) -> Caller {
        Caller {
            place,
            checked: AtomicU64::new(checked),
            real: [const { AtomicPtr::new(std::ptr::null_mut()) }; Hook::ALL.len()],
            ggml: OnceCell::new(),
            kept: AtomicBool::new(false),
            is_llama: OnceCell::new(),
            next: std::ptr::null(),
        }
    }

    /// Returns the caller of a call that returns to this address.
    pub fn of(return_address: usize) -> &'static Caller {
        let unloads = loaded::unloads();
        let current = |caller: &&Caller| {
            caller.contains(return_address) && caller.checked.load(Ordering::Acquire) == unloads
        };
        if let Some(caller) = seen().find(current) {
            return caller;
        }
        let Some(place) = loaded::place_of(return_address) else {
            NOWHERE.check(unloads);
            return &NOWHERE;
        };
        if let Some(caller) = seen().find(|caller| caller.place == Some(place)) {
            caller.check(unloads);
            return caller;
        }
        register(place, unloads)
    }

    /// Returns the function that was meant, or null if there is none, and its caller.
    pub fn resolve(
        &'static self,
        hook: Hook,
        arguments: &Arguments,
    ) -> (&'static Caller, *mut c_void) {
        if let Some(known) = self.real(hook) {
            return (self, known);
        }
        match self.resolution(hook.name()) {
            Resolution::One(found) => (self, self.remember(hook, found)),
            Resolution::None => (self, std::ptr::null_mut()),
            // Not kept: the next call may have other arguments.
            Resolution::Ambiguous(first) => {
                by_arguments(hook, arguments).unwrap_or((self, first as *mut c_void))
            }
        }
    }

    /// Returns the function of a hook if it was resolved before.
    fn real(&self, hook: Hook) -> Option<*mut c_void> {
        let known = self.real[hook as usize].load(Ordering::Relaxed);
        (!known.is_null()).then_some(known)
    }

    fn remember(&self, hook: Hook, found: usize) -> *mut c_void {
        let found = found as *mut c_void;
        self.real[hook as usize].store(found, Ordering::Relaxed);
        found
    }

    /// Returns a function by name, as the loader would have found it for this object; or null.
    pub fn symbol(&self, name: &CStr) -> *mut c_void {
        match self.resolution(name) {
            Resolution::One(found) | Resolution::Ambiguous(found) => found as *mut c_void,
            Resolution::None => std::ptr::null_mut(),
        }
    }

    /// Returns a function by name of the copy of ggml that `init` is in, in the object at `place`; or null. Another copy, with
    /// local scope, can be the only one that defines it.
    fn symbol_of_copy(&self, init: usize, place: Option<Place>, name: &CStr) -> *mut c_void {
        let found = self.symbol(name);
        let is_at = |place: Place| (place.start..place.end).contains(&(found as usize));
        if found.is_null() || place.is_some_and(is_at) {
            return found;
        }
        let own = loaded::look(|objects, scratch| {
            let found = found as usize;
            match loaded::are_together(objects, scratch, [init, found]) {
                true => Some(found),
                false => loaded::in_own_group(objects, scratch, init, name, this_library()),
            }
        });
        if let Some(own) = own.flatten() {
            return own as *mut c_void;
        }
        // SAFETY: the call is made from this library, which is the starting point of RTLD_NEXT.
        match unsafe { libc::dlsym(libc::RTLD_NEXT, name.as_ptr()) } == found {
            true => found,
            false => std::ptr::null_mut(),
        }
    }

    /// Whether this object cannot work without a function of this name.
    pub fn requires(&self, name: &CStr) -> bool {
        let reference = loaded::look(|objects, _| self.among(objects)?.reference(name));
        reference.flatten().is_some_and(|reference| !reference.weak)
    }

    /// Returns the loader's name of the object; empty for the main program.
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

    /// Whether this is the program, and ggml is linked into it.
    pub fn is_linked(&self) -> bool {
        linked::program().is_some_and(|place| self.place == Some(place))
    }

    fn among<'a>(&self, objects: &'a [loaded::Object]) -> Option<&'a loaded::Object> {
        objects.iter().find(|object| self.is(object))
    }

    /// Whether this is a loaded object.
    pub fn is(&self, object: &loaded::Object) -> bool {
        Some(object.place) == self.place
    }

    fn resolution(&self, name: &CStr) -> Resolution {
        let (this, is_linked) = (this_library(), self.is_linked());
        let found = loaded::look(|objects, _| {
            // A program that ggml is linked into calls its own functions.
            if is_linked
                && let Some(own) = self.among(objects).and_then(|of| of.definition(name, None))
            {
                return (Some(own), false, None);
            }
            // The loader searches the objects before this library first.
            let after = objects.iter().position(|object| object.place == this);
            let after = objects.get(after.map_or(0, |at| at + 1)..).unwrap_or(&[]);
            // Most libraries have no versions, and reading the version that a caller means
            // takes long.
            let versions = after.iter().any(|object| object.defines_versions_of(name));
            let object = self.among(objects).filter(|_| versions);
            let reference = object.and_then(|object| object.reference(name));
            let version = reference.and_then(|reference| reference.version);
            let mut all = after
                .iter()
                .filter_map(|object| object.definition(name, version));
            (all.next(), all.next().is_some(), version)
        });
        let (first, version) = match found {
            Some((Some(first), false, _)) => return Resolution::One(first),
            Some((None, _, _)) => return Resolution::None,
            Some((Some(first), true, version)) => (Some(first), version),
            // No memory for the list of objects.
            None => (None, None),
        };
        // Only the loader knows which objects are global.
        // SAFETY: the call is made from this library, which is the starting point of RTLD_NEXT.
        let next = unsafe { libc::dlsym(libc::RTLD_NEXT, name.as_ptr()) } as usize;
        let scoped = loaded::look(|objects, scratch| {
            let global = objects.iter().find(|object| object.contains(next));
            let global = global.and_then(|object| object.definition(name, version));
            let from = self.place?.start;
            global.or_else(|| loaded::in_local_scope(objects, scratch, from, name, version, this))
        });
        match (scoped.flatten(), first) {
            (Some(found), _) => Resolution::One(found),
            (None, Some(first)) => Resolution::Ambiguous(first),
            (None, None) if next != 0 => Resolution::Ambiguous(next),
            (None, None) => Resolution::None,
        }
    }

    /// Drops functions of objects that were unloaded since the last check.
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

    /// Returns the copy of ggml that this object uses; `None` when it is not supported. From
    /// here on the object and the copy stay loaded: threads of the drop-in call them.
    pub fn ggml(&self) -> Option<&'static Ggml> {
        let resolve = || {
            let init = self.symbol(c"ggml_init") as usize;
            let place = loaded::place_of(init);
            let symbol = |name: &CStr| self.symbol_of_copy(init, place, name);
            Ggml::resolve(&symbol, self.is_linked())
        };
        let found = *self.ggml.get_or_init(resolve);
        // Not while the cell is being filled: dlopen waits for constructors, which may wait
        // for the cell.
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

fn seen() -> impl Iterator<Item = &'static Caller> {
    // SAFETY: callers in the list are never freed, and change only in atomics and cells.
    let first = unsafe { SEEN.load(Ordering::Acquire).cast_const().as_ref() };
    // SAFETY: as above.
    std::iter::successors(first, |caller| unsafe { caller.next.as_ref() })
}

/// Adds a caller to the list. Two threads may add the same one; then the newer is used.
fn register(place: Place, unloads: u64) -> &'static Caller {
    let layout = std::alloc::Layout::new::<Caller>();
    // SAFETY: a caller has a size.
    let room = unsafe { std::alloc::alloc(layout) }.cast::<Caller>();
    if room.is_null() {
        // The next call tries again.
        return &NOWHERE;
    }
    let mut caller = Caller::new(Some(place), unloads);
    let mut first = SEEN.load(Ordering::Acquire);
    loop {
        caller.next = first;
        // SAFETY: allocated for this type, and not in the list yet.
        unsafe { room.write(caller) };
        match SEEN.compare_exchange(first, room, Ordering::AcqRel, Ordering::Acquire) {
            // SAFETY: never freed, and changes only in atomics and cells.
            Ok(_) => return unsafe { &*room },
            Err(other) => {
                first = other;
                caller = Caller::new(Some(place), unloads);
            }
        }
    }
}

/// Returns the function of a hook in the first object that an argument, or a word of what it
/// points to, is an address of. For calls from code that has no copy in its scope.
fn by_arguments(hook: Hook, arguments: &Arguments) -> Option<(&'static Caller, *mut c_void)> {
    /// Hooks have three arguments at most.
    const ARGUMENTS: usize = 3;
    let memory = Memory::open();
    arguments.iter().take(ARGUMENTS).find_map(|argument| {
        let mut words = [0; 1 + WORDS];
        words[0] = *argument;
        if let Some(memory) = &memory {
            memory.copy(*argument, &mut words[1..]);
        }
        words.into_iter().find_map(|word| {
            let found = loaded::look(|objects, scratch| {
                loaded::in_own_group(objects, scratch, word, hook.name(), this_library())
            });
            Some((Caller::of(word), found.flatten()? as *mut c_void))
        })
    })
}

/// How many words are read of what an argument points to.
const WORDS: usize = 24;

/// Keeps the object of an address loaded.
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

/// Returns the place of this library.
fn this_library() -> Place {
    static PLACE: OnceCell<Place> = OnceCell::new();
    *PLACE.get_or_init(|| {
        let here = this_library as fn() -> Place as usize;
        loaded::place_of(here).unwrap_or(Place::NOWHERE)
    })
}
