//! Threads of the drop-in, and calls of the drop-in into ggml.

use std::cell::Cell;

thread_local! {
    /// Whether this thread runs code of the drop-in: ggml's functions call each other
    /// through the names that are interposed.
    static INSIDE: Cell<bool> = const { Cell::new(false) };
}

/// While this value lives, interposed calls of this thread go straight to ggml.
pub struct Inside {
    before: bool,
}

impl Inside {
    /// Marks this thread.
    pub fn enter() -> Inside {
        Inside {
            before: INSIDE.replace(true),
        }
    }
}

impl Drop for Inside {
    fn drop(&mut self) {
        INSIDE.set(self.before);
    }
}

/// Whether this thread runs code of the drop-in.
pub fn is_inside() -> bool {
    INSIDE.get()
}

/// Starts a thread that handles none of the program's signals. Returns whether it started.
pub fn spawn(name: &str, work: impl FnOnce() + Send + 'static) -> bool {
    let mut all = std::mem::MaybeUninit::<libc::sigset_t>::uninit();
    let mut before = std::mem::MaybeUninit::<libc::sigset_t>::uninit();
    // SAFETY: valid sets; the new thread inherits the mask, and this thread gets its own back.
    let started = unsafe {
        libc::sigfillset(all.as_mut_ptr());
        libc::pthread_sigmask(libc::SIG_SETMASK, all.as_ptr(), before.as_mut_ptr());
        let started = std::thread::Builder::new().name(name.into()).spawn(|| {
            let _inside = Inside::enter();
            work();
        });
        libc::pthread_sigmask(libc::SIG_SETMASK, before.as_ptr(), std::ptr::null_mut());
        started
    };
    if let Err(error) = &started {
        log::error!("cannot start the thread '{name}': {error}");
    }
    started.is_ok()
}
