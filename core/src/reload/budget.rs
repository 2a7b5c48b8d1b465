//! Limits the memory that swapped tensors hold beside the model.
//!
//! `LLAMA_SIDECAR_MEMORY_MB` sets the limit. Without it, the limit is the free memory of the
//! machine or of the control group of the process, less a reserve: a swap must not make the
//! kernel kill a server.

use crate::memory::{free_memory, usable};

/// The memory that new buffers need and that swapped tensors hold.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Need {
    /// Bytes that swapped tensors hold already, in any memory.
    pub held: u64,
    /// Bytes of new buffers in memory of the process.
    pub host: u64,
    /// Bytes of new buffers on devices.
    pub device: u64,
}

/// Checks that new buffers are within the limit, and returns the reason when they are not.
/// `limit` is in bytes; `None` for the free memory. Tensors that return to their originals need none.
pub(super) fn check(limit: Option<u64>, need: Need) -> Result<(), String> {
    const MIB: u64 = 1 << 20;
    let new = need.host.saturating_add(need.device);
    if new == 0 {
        return Ok(());
    }
    if let Some(limit) = limit {
        if need.held.saturating_add(new) > limit {
            return Err(format!(
                "staging {} MiB beside the {} MiB that swapped tensors hold would exceed LLAMA_SIDECAR_MEMORY_MB={} (--memory-mb): raise the limit, or return tensors to their originals first",
                new.div_ceil(MIB),
                need.held.div_ceil(MIB),
                limit / MIB
            ));
        }
        return Ok(());
    }
    let Some((free, what)) = free_memory() else {
        return Ok(());
    };
    let usable = usable(free);
    if need.host > usable {
        return Err(format!(
            "staging {} MiB needs more than the {} MiB that {what} leaves for new buffers: free memory, or set --memory-mb (LLAMA_SIDECAR_MEMORY_MB) to allow it",
            need.host.div_ceil(MIB),
            usable / MIB
        ));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_limit_counts_what_is_held_and_what_is_new() {
        let need = Need {
            held: 6 << 20,
            host: 3 << 20,
            device: 1 << 20,
        };
        assert_eq!(check(Some(10 << 20), need), Ok(()));
        let refused = check(Some(9 << 20), need).expect_err("too much");
        assert!(refused.contains("4 MiB beside the 6 MiB"), "{refused}");
        assert!(refused.contains("LLAMA_SIDECAR_MEMORY_MB=9"), "{refused}");
    }

    #[test]
    fn more_than_the_machine_has_is_refused() {
        let need = Need {
            host: u64::MAX / 2,
            ..Need::default()
        };
        let refused = check(None, need).expect_err("too much");
        assert!(refused.contains("LLAMA_SIDECAR_MEMORY_MB"), "{refused}");
        assert_eq!(check(None, Need::default()), Ok(()));
    }
}
