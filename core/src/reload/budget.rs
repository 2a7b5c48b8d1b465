//! Limits the memory that swapped tensors hold beside the model.
//!
//! `LLAMA_SIDECAR_MEMORY_MB` sets the limit. Without it, the limit is the free memory of the
//! machine or of the control group of the process, less a reserve: a swap must not make the
//! kernel kill a server.

use std::path::{Path, PathBuf};

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

/// Returns how much of the free memory new buffers may use: all but one sixteenth, and all but at
/// least 64 MiB.
pub fn usable(free: u64) -> u64 {
    free.saturating_sub((free / 16).max(64 << 20))
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

/// Returns the bytes that this process can still allocate, and the name of the limit. Page cache
/// that can be dropped counts as free.
pub fn free_memory() -> Option<(u64, &'static str)> {
    let machine = available(&std::fs::read_to_string("/proc/meminfo").ok()?)?;
    let group = control_groups(&std::fs::read_to_string("/proc/self/cgroup").unwrap_or_default())
        .iter()
        .filter_map(|folder| free_in_group(folder))
        .min();
    Some(match group {
        Some(group) if group < machine => (group, "the memory limit of the control group"),
        _ => (machine, "the machine"),
    })
}

/// Returns `MemAvailable` of /proc/meminfo, in bytes.
fn available(meminfo: &str) -> Option<u64> {
    let line = meminfo
        .lines()
        .find_map(|line| line.strip_prefix("MemAvailable:"))?;
    let kib: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    kib.checked_mul(1024)
}

/// Returns the folders of the control groups of a process and of the groups above them
/// (cgroups(7)): version 2, and the memory controller of version 1.
fn control_groups(of_process: &str) -> Vec<PathBuf> {
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
            .find_map(|name| std::fs::read_to_string(folder.join(name)).ok())?;
        text.trim().parse::<u64>().ok()
    };
    let limit = number(["memory.max", "memory.limit_in_bytes"])?;
    let used = number(["memory.current", "memory.usage_in_bytes"])?;
    let statistics = std::fs::read_to_string(folder.join("memory.stat")).unwrap_or_default();
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
