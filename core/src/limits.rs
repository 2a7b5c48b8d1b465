//! Limits of this process.

/// Returns the limit of a resource as it is now (getrlimit(2)); `RLIM_INFINITY` without one.
pub fn current(resource: libc::__rlimit_resource_t) -> u64 {
    let mut limit = libc::rlimit {
        rlim_cur: libc::RLIM_INFINITY,
        rlim_max: libc::RLIM_INFINITY,
    };
    // SAFETY: fills the struct, or leaves it.
    unsafe { libc::getrlimit(resource, &raw mut limit) };
    limit.rlim_cur
}
