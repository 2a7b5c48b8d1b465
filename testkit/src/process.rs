//! Memory and limits of a process.

/// Resident memory in bytes.
pub fn resident() -> u64 {
    memory("self", "VmRSS:")
}

/// A field of `/proc/PROCESS/status` that is in kB, in bytes.
pub fn memory(process: &str, field: &str) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{process}/status"));
    let status = status.expect("Linux, and a process that lives");
    let line = status.lines().find_map(|line| line.strip_prefix(field));
    let kib = line.and_then(|line| line.split_whitespace().next()?.parse::<u64>().ok());
    kib.expect("a number of kB") << 10
}

/// Raises the limit of open files as far as it goes: 1,000 shards and the rest of the
/// process are more than the usual one.
pub fn allow_many_open_files() {
    let mut limit = libc::rlimit {
        rlim_cur: 0,
        rlim_max: 0,
    };
    // SAFETY: both calls get a valid struct.
    unsafe {
        libc::getrlimit(libc::RLIMIT_NOFILE, &mut limit);
        limit.rlim_cur = limit.rlim_max;
        libc::setrlimit(libc::RLIMIT_NOFILE, &limit);
    }
}
