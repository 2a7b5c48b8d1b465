//! The free memory of this process.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::descriptors::read_to_string;
use crate::limits;

/// Returns zeros, as many as a file or a tensor has bytes: where there is no memory for them, an error, and no
/// end of the process.
///
/// # Errors
///
/// Fails with [`io::ErrorKind::OutOfMemory`].
pub fn zeroed(len: usize) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    bytes.try_reserve_exact(len).map_err(|_| {
        let text = format!("no memory for {len} bytes");
        io::Error::new(io::ErrorKind::OutOfMemory, text)
    })?;
    bytes.resize(len, 0);
    Ok(bytes)
}

/// Returns how much of the free memory new buffers may use: all but one sixteenth, and all but at
/// least 64 MiB.
pub fn usable(free: u64) -> u64 {
    free.saturating_sub((free / 16).max(64 << 20))
}

/// Returns the bytes that this process can still allocate, and the name of the limit. Page cache
/// that can be dropped counts as free.
pub fn free_memory() -> Option<(u64, &'static str)> {
    let machine = available(&read_to_string("/proc/meminfo").ok()?)?;
    let group = control_groups(&read_to_string("/proc/self/cgroup").unwrap_or_default())
        .iter()
        .filter_map(|folder| free_in_group(folder))
        .min();
    Some(match group {
        Some(group) if group < machine => (group, "the memory limit of the control group"),
        _ => (machine, "the machine"),
    })
}

/// A limit of the memory of this process. The program keeps half of what was left at the first look, and at least 256 MiB: it
/// has yet to allocate its context and what its threads need.
#[derive(Debug)]
struct Limit {
    resource: libc::__rlimit_resource_t,
    /// What counts, in /proc/self/status.
    used: &'static str,
    name: &'static str,
    /// The command of a shell that sets it.
    option: &'static str,
    most: OnceLock<u64>,
    taken: AtomicU64,
}

impl Limit {
    const fn new(
        resource: libc::__rlimit_resource_t,
        used: &'static str,
        name: &'static str,
        option: &'static str,
    ) -> Limit {
        Limit {
            resource,
            used,
            name,
            option,
            most: OnceLock::new(),
            taken: AtomicU64::new(0),
        }
    }

    /// Returns the bytes that are left; `None` without a limit.
    fn free(&self) -> Option<u64> {
        let limit = limits::current(self.resource);
        let limit = Some(limit).filter(|limit| *limit != libc::RLIM_INFINITY)?;
        let status = read_to_string("/proc/self/status").ok()?;
        Some(limit.saturating_sub(kib(&status, self.used)?))
    }

    fn take(&'static self, bytes: u64) -> io::Result<Taken> {
        let Some(free) = self.free() else {
            return Ok(Taken(self, 0));
        };
        let most = || free.saturating_sub((free / 2).max(256 << 20));
        let most = *self.most.get_or_init(most);
        let order = Ordering::SeqCst;
        let fits = |taken: u64| taken.checked_add(bytes).filter(|sum| *sum <= most);
        match self.taken.fetch_update(order, order, fits) {
            Ok(_) => Ok(Taken(self, bytes)),
            Err(taken) => Err(io::Error::other(format!(
                "it needs {} MiB of {}, and the limit ({}) leaves {} MiB beside what the program may need: raise the limit",
                bytes >> 20,
                self.name,
                self.option,
                (most - taken) >> 20
            ))),
        }
    }
}

static ADDRESS_SPACE: Limit = Limit::new(libc::RLIMIT_AS, "VmSize:", "address space", "ulimit -v");
static DATA: Limit = Limit::new(libc::RLIMIT_DATA, "VmData:", "data", "ulimit -d");

/// Memory that was taken from a limit of this process.
#[derive(Debug)]
pub struct Taken(&'static Limit, u64);

impl Drop for Taken {
    fn drop(&mut self) {
        self.0.taken.fetch_sub(self.1, Ordering::SeqCst);
    }
}

/// Takes address space.
///
/// # Errors
///
/// Fails if less is left beside what the program may need.
pub fn take_address_space(bytes: u64) -> io::Result<Taken> {
    ADDRESS_SPACE.take(bytes)
}

/// Takes the memory of a thread: its stack, and what malloc uses for it and reserves (`HEAP_MAX_SIZE` of glibc).
///
/// # Errors
///
/// Fails if less is left, and where malloc has nothing left: the C library ends a process in which a thread
/// cannot register the destructors of its variables.
pub fn take_for_thread() -> io::Result<[Taken; 2]> {
    match has(64 << 10) {
        true => Ok([
            ADDRESS_SPACE.take((2 << 20) + (64 << 20))?,
            DATA.take((2 << 20) + (1 << 20))?,
        ]),
        false => Err(io::ErrorKind::OutOfMemory.into()),
    }
}

/// Whether malloc has so many bytes.
pub fn has(bytes: usize) -> bool {
    // SAFETY: memory of malloc, which is not used and given back.
    unsafe {
        let memory = std::hint::black_box(libc::malloc(bytes));
        libc::free(memory);
        !memory.is_null()
    }
}

/// Returns `MemAvailable` of /proc/meminfo, in bytes.
fn available(meminfo: &str) -> Option<u64> {
    kib(meminfo, "MemAvailable:")
}

/// Returns a number of kibibytes of a file in /proc, in bytes.
fn kib(text: &str, name: &str) -> Option<u64> {
    let line = text.lines().find_map(|line| line.strip_prefix(name))?;
    let kib: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    kib.checked_mul(1024)
}

/// Returns the folders of the control groups of a process and of the groups above them
/// (cgroups(7)): version 2, and the memory controller of version 1.
pub fn control_groups(of_process: &str) -> Vec<PathBuf> {
    let mut folders = Vec::new();
    for line in of_process.lines() {
        let mut fields = line.splitn(3, ':').skip(1);
        let (Some(controllers), Some(path)) = (fields.next(), fields.next()) else {
            continue;
        };
        let root = match controllers {
            "" => "/sys/fs/cgroup",
            _ if controllers.split(',').any(|name| name == "memory") => "/sys/fs/cgroup/memory",
            _ => continue,
        };
        let inside = Path::new(path.trim_start_matches('/'));
        folders.extend(
            inside
                .ancestors()
                .map(|folder| Path::new(root).join(folder)),
        );
    }
    folders
}

/// Returns the bytes that a control group can still use; page cache counts as free. `None` without
/// a limit.
fn free_in_group(folder: &Path) -> Option<u64> {
    let number = |names: [&str; 2]| {
        let text = names
            .iter()
            .find_map(|name| read_to_string(folder.join(name)).ok())?;
        text.trim().parse::<u64>().ok()
    };
    let limit = number(["memory.max", "memory.limit_in_bytes"])?;
    let used = number(["memory.current", "memory.usage_in_bytes"])?;
    let statistics = read_to_string(folder.join("memory.stat")).unwrap_or_default();
    Some(limit.saturating_sub(used.saturating_sub(cached(&statistics))))
}

/// Returns the bytes of page cache that can be dropped, from `memory.stat`.
fn cached(statistics: &str) -> u64 {
    let field = |name: &str| {
        let mut lines = statistics.lines();
        lines.find_map(|line| line.strip_prefix(name)?.trim().parse::<u64>().ok())
    };
    field("inactive_file ").unwrap_or(0) + field("active_file ").unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_of_the_kernel_are_read() {
        assert_eq!(
            available("MemTotal: 9 kB\nMemAvailable:   12 kB\n"),
            Some(12 << 10)
        );
        assert_eq!(available("MemTotal: 9 kB\n"), None);
        let folders = control_groups("0::/a/b\n5:cpu,memory:/c\n4:pids:/d\n");
        let expected = [
            "/sys/fs/cgroup/a/b",
            "/sys/fs/cgroup/a",
            "/sys/fs/cgroup/",
            "/sys/fs/cgroup/memory/c",
            "/sys/fs/cgroup/memory/",
        ];
        assert_eq!(folders, expected.map(PathBuf::from));
        assert_eq!(cached("inactive_file 5\nactive_file 7\nfile 99\n"), 12);
        let folder = tempfile::tempdir().expect("a folder");
        assert_eq!(free_in_group(folder.path()), None);
        std::fs::write(folder.path().join("memory.max"), "max\n").expect("written");
        std::fs::write(folder.path().join("memory.current"), "100\n").expect("written");
        assert_eq!(free_in_group(folder.path()), None);
        std::fs::write(folder.path().join("memory.max"), "1000\n").expect("written");
        std::fs::write(folder.path().join("memory.stat"), "inactive_file 40\n").expect("written");
        assert_eq!(free_in_group(folder.path()), Some(940));
    }
}
