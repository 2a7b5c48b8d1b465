//! Calls of loaded objects that go to a function of the drop-in.
//!
//! In a program that ggml is linked into, all calls of its function go there ([`linked`]).
//!
//! An exported name replaces a function in every program that loads this library, also in
//! those without llama.cpp. A redirection changes the slots through which certain objects
//! call a function, from when it is needed: `mmap` of one library, for example.

use std::ffi::CStr;
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::loader::linked;
use crate::loader::loaded::{self, Object};

/// A function whose calls are redirected.
pub struct Redirection {
    name: &'static CStr,
    /// The function that the calls reached before; 0 while none is redirected.
    before: AtomicUsize,
}

impl Redirection {
    /// The redirection of a function that does nothing yet.
    pub const fn of(name: &'static CStr) -> Redirection {
        Redirection {
            name,
            before: AtomicUsize::new(0),
        }
    }

    /// Returns the name of the function.
    pub fn name(&self) -> &'static CStr {
        self.name
    }

    /// Returns the function that the calls reached before.
    pub fn before(&self) -> usize {
        self.before.load(Ordering::Acquire)
    }

    /// Lets the chosen objects call `to`. Returns whether any object calls it now.
    ///
    /// `real` is the function of slots that the loader has not filled yet. Slots that hold
    /// another function than earlier ones keep it: there is one function to go on to.
    ///
    /// # Safety
    ///
    /// `to` and `real` have the type of the function, and the chosen objects stay loaded.
    pub unsafe fn install(
        &self,
        to: usize,
        real: usize,
        mut chosen: impl FnMut(&Object) -> bool,
    ) -> bool {
        let installed = loaded::look(|objects, _| {
            let mut any = false;
            for object in objects.iter().filter(|object| chosen(object)) {
                if object.name().is_empty()
                    && let Some(function) = linked::redirected(self.name)
                    && self.goes_on_to(function.real())
                {
                    function.set(to);
                    any = true;
                }
                for slot in object.slots(self.name) {
                    let found = slot.get();
                    let function = match object.contains(found) {
                        true => real,
                        false => found,
                    };
                    any |= found == to || self.goes_on_to(function) && slot.set(to);
                }
            }
            any
        });
        installed == Some(true)
    }

    /// Lets all objects call `to`, if only one object defines the function; `real` is its address.
    ///
    /// # Safety
    ///
    /// As for [`Redirection::install`].
    pub unsafe fn install_in_all(&self, to: usize, real: usize) {
        let copies = loaded::look(|objects, _| {
            let defining = objects.iter().filter(|object| object.defines(self.name));
            defining.count()
        });
        if copies == Some(1) {
            // SAFETY: as the caller ensures.
            unsafe { self.install(to, real, |_| true) };
        }
    }

    /// Notes the function that is called after the replacement; false if that is another one
    /// already. Done before the first slot is changed: a call may come at once.
    fn goes_on_to(&self, function: usize) -> bool {
        let (set, get) = (Ordering::AcqRel, Ordering::Acquire);
        let noted = self.before.compare_exchange(0, function, set, get);
        function != 0 && noted.map_or_else(|before| before == function, |_| true)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    extern "C" fn forty_two() -> libc::pid_t {
        42
    }

    /// The only test that calls getpgrp.
    #[test]
    fn calls_reach_the_replacement_and_know_the_function_before() {
        static GROUP: Redirection = Redirection::of(c"getpgrp");
        // SAFETY: takes nothing.
        let group = || unsafe { libc::getpgrp() };
        let before = group();
        assert_eq!(GROUP.before(), 0);
        let real = libc::getpgrp as *const () as usize;
        let of_program = |object: &Object| object.name().is_empty();
        for _ in 0..2 {
            // SAFETY: both have the type of the function; the program stays loaded.
            let installed = unsafe {
                let to = forty_two as *const () as usize;
                GROUP.install(to, real, of_program)
            };
            assert!(installed);
            assert_eq!(group(), 42);
        }
        // SAFETY: the function that was called before.
        let real: extern "C" fn() -> libc::pid_t = unsafe { std::mem::transmute(GROUP.before()) };
        assert_eq!(real(), before);
    }

    #[test]
    fn a_function_that_no_chosen_object_calls_is_not_redirected() {
        static NONE: Redirection = Redirection::of(c"no such function");
        // SAFETY: nothing is redirected.
        assert!(!unsafe { NONE.install(1, 1, |_| true) });
        assert_eq!(NONE.before(), 0);
    }
}
