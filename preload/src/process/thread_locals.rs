//! Destructors of thread-local data where malloc has no memory left.
//!
//! The standard library registers them with `__cxa_thread_atexit_impl`. That of glibc ends the process if it has no memory
//! for the entry, and the program might have lived. So the name means [`register`] in this library, and in no other object:
//! its entries have the memory of the [`reserve`](super::reserve).

use std::ffi::{c_int, c_void};
use std::sync::atomic::{AtomicU64, Ordering};

std::arch::global_asm!(
    ".weak __cxa_thread_atexit_impl",
    ".hidden __cxa_thread_atexit_impl",
    ".type __cxa_thread_atexit_impl, @function",
    "__cxa_thread_atexit_impl:",
    concat!(crate::arch::branch!(), " {register}"),
    register = sym register,
);

type Destructor = unsafe extern "C" fn(*mut c_void);
/// The destructors of a thread, with their data.
type Entries = Vec<(Destructor, usize)>;

/// The key of the entries of a thread, plus one; 0 without one.
static KEY: AtomicU64 = AtomicU64::new(0);

/// Makes the key when the library is loaded: keys of a thread that ends are cleared in their order, and that of the standard
/// library, which is made at its first use, has what destructors may need.
#[used]
#[unsafe(link_section = ".init_array")]
static MAKE_KEY: extern "C" fn() = make_key;

extern "C" fn make_key() {
    let mut new = 0;
    // SAFETY: makes a key.
    if unsafe { libc::pthread_key_create(&raw mut new, Some(end)) } == 0 {
        KEY.store(u64::from(new) + 1, Ordering::Release);
    }
}

fn key() -> Option<libc::pthread_key_t> {
    let known = KEY.load(Ordering::Acquire);
    Some(known.checked_sub(1)? as libc::pthread_key_t)
}

/// Registers a destructor of this thread. Without memory, its data stays.
unsafe extern "C" fn register(destructor: Destructor, data: *mut c_void, _: *mut c_void) -> c_int {
    let Some(key) = key() else {
        return -1;
    };
    // SAFETY: the key has nothing or the entries of this thread, which no other thread reads.
    unsafe {
        let mut entries = libc::pthread_getspecific(key).cast::<Entries>();
        if entries.is_null() {
            entries = Box::into_raw(Box::default());
            if libc::pthread_setspecific(key, entries.cast()) != 0 {
                drop(Box::from_raw(entries));
                return -1;
            }
        }
        (*entries).push((destructor, data as usize));
    }
    0
}

/// Calls the destructors of a thread that ends, the last first. What they register is called after them.
unsafe extern "C" fn end(entries: *mut c_void) {
    // SAFETY: made by `register`, and taken from the thread.
    let entries = unsafe { Box::from_raw(entries.cast::<Entries>()) };
    for (destructor, data) in entries.into_iter().rev() {
        // SAFETY: as they were registered; the data of the thread is still there.
        unsafe { destructor(data as *mut c_void) };
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;
    use std::sync::atomic::{AtomicUsize, Ordering};

    static ENDED: AtomicUsize = AtomicUsize::new(0);

    struct First;
    struct Second;

    impl Drop for First {
        fn drop(&mut self) {
            ENDED.fetch_add(1, Ordering::SeqCst);
            SECOND.with(|_| ());
        }
    }

    impl Drop for Second {
        fn drop(&mut self) {
            ENDED.fetch_add(10, Ordering::SeqCst);
        }
    }

    thread_local! {
        static FIRST: Cell<First> = const { Cell::new(First) };
        static SECOND: Cell<Second> = const { Cell::new(Second) };
    }

    #[test]
    fn data_of_a_thread_is_dropped_at_its_end() {
        let threads = [(); 4].map(|()| std::thread::spawn(|| FIRST.with(|_| ())));
        threads
            .into_iter()
            .for_each(|thread| thread.join().expect("no panic"));
        assert_eq!(ENDED.load(Ordering::SeqCst), 44);
        assert_ne!(super::KEY.load(Ordering::SeqCst), 0, "by these functions");
    }
}
