//! The program's own hot-swap: libllama of ik_llama.cpp has one since June 2026.
//!
//! It replaces tensors when the program calls `llama_reload_changed_tensors`. Two hot-swaps of
//! one tensor would free each other's buffers, so one of them stands back. Calls that the dynamic
//! loader binds come to the drop-in, which reloads in its place. Where no loaded object makes such
//! calls, the program may have the address from `dlsym`, and the drop-in swaps nothing.

use std::ffi::CStr;

use crate::loaded;

/// The function that reloads.
const RELOAD: &CStr = c"llama_reload_changed_tensors";

/// Which hot-swap stands back.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OwnHotSwap {
    /// The program's own: its calls come to the drop-in.
    StandsBack,
    /// The drop-in's: the program may call past it.
    MayBeCalled,
}

impl OwnHotSwap {
    /// Returns which hot-swap stands back; `None` in a program without a hot-swap of its own.
    pub fn find() -> Option<OwnHotSwap> {
        let here = OwnHotSwap::find as *const () as usize;
        loaded::look(|objects, _| {
            let others = || objects.iter().filter(|object| !object.contains(here));
            if !others().any(|object| object.defines(RELOAD)) {
                return None;
            }
            Some(
                match others().any(|object| object.reference(RELOAD).is_some()) {
                    true => OwnHotSwap::StandsBack,
                    false => OwnHotSwap::MayBeCalled,
                },
            )
        })?
    }
}
