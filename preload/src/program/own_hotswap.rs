//! The program's own hot-swap: libllama of ik_llama.cpp has one since June 2026.
//!
//! `LLAMA_HOTSWAP_ENABLED` turns it on, with any value. It replaces tensors when the program calls
//! `llama_reload_changed_tensors`. Two hot-swaps of one tensor would free each other's buffers, so
//! one of them is disabled. Calls that the dynamic loader binds come to the drop-in, which reloads
//! in its place. Where no loaded object makes such calls, the program may have the address from
//! `dlsym`, and the drop-in swaps nothing. `LLAMA_SIDECAR_HOTSWAP` turns on the drop-in's alone.

use std::ffi::CStr;

use crate::loader::loaded;

/// The function that reloads.
const RELOAD: &CStr = c"llama_reload_changed_tensors";
/// The variable that turns on both hot-swaps.
const BOTH: &str = "LLAMA_HOTSWAP_ENABLED";

/// Which hot-swap is disabled.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OwnHotSwap {
    /// The program's own: its calls come to the drop-in.
    StandsBack,
    /// The drop-in's: the program may call its own without the loader.
    MayBeCalled,
}

impl OwnHotSwap {
    /// Returns which hot-swap is disabled; `None` in a program whose own hot-swap is off, or that has
    /// none.
    pub fn find() -> Option<OwnHotSwap> {
        std::env::var_os(BOTH)?;
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

    /// Returns a sentence that states which hot-swap works.
    pub fn sentence(self) -> &'static str {
        match self {
            OwnHotSwap::StandsBack => {
                "LLAMA_HOTSWAP_ENABLED turns on the program's own hot-swap and the drop-in's, and the drop-in's works: the program's calls of llama_reload_changed_tensors reload with the drop-in"
            }
            OwnHotSwap::MayBeCalled => {
                "LLAMA_HOTSWAP_ENABLED turns on the program's own hot-swap and the drop-in's, and the program's own works, because it may be called past the drop-in: for the drop-in's, unset that variable and set LLAMA_SIDECAR_HOTSWAP=1"
            }
        }
    }
}
