//! Code that depends on the processor.
//!
//! The module of each processor has the same names.
//!
//! | module | contents |
//! |---|---|
//! | [`aarch64`], [`x86_64`] | AArch64, x86-64 |

#[cfg(target_arch = "aarch64")]
mod aarch64;
#[cfg(target_arch = "x86_64")]
mod x86_64;
#[cfg(target_arch = "aarch64")]
pub use aarch64::*;
#[cfg(target_arch = "aarch64")]
pub(crate) use aarch64::{branch, enter, found, kept_or_real, numbered, routed};
#[cfg(target_arch = "x86_64")]
pub use x86_64::*;
#[cfg(target_arch = "x86_64")]
pub(crate) use x86_64::{branch, enter, found, kept_or_real, routed};

#[cfg(not(all(
    any(target_arch = "aarch64", target_arch = "x86_64"),
    target_os = "linux"
)))]
compile_error!("the drop-in works on Linux x86-64 and Linux AArch64 only");
