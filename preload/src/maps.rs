//! The files that are mapped into this process.

use std::ffi::c_void;
use std::ops::Range;
use std::os::unix::ffi::OsStrExt;

use llama_sidecar::gguf::GgufFile;

/// Whether an address is in memory that is locked (`mlock`).
pub fn is_locked(address: usize) -> bool {
    // smaps counts the pages of each mapping, which takes long.
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let locked = status.lines().find_map(|line| line.strip_prefix("VmLck:"));
    if locked.is_some_and(|size| size.trim().starts_with("0 ")) {
        return false;
    }
    let text = std::fs::read("/proc/self/smaps").unwrap_or_default();
    let mut here = false;
    for line in text.split(|&byte| byte == b'\n') {
        if let Some(range) = range_of(line) {
            here = range.contains(&address);
        } else if here && line.starts_with(b"VmFlags:") {
            return line.split(|&byte| byte == b' ').any(|flag| flag == b"lo");
        }
    }
    false
}

/// Returns the addresses at the start of a line; `None` where a line has none.
fn range_of(line: &[u8]) -> Option<Range<usize>> {
    let first = line.split(|&byte| byte == b' ').next()?;
    let (start, end) = std::str::from_utf8(first).ok()?.split_once('-')?;
    let address = |text: &str| usize::from_str_radix(text, 16).ok();
    Some(address(start)?..address(end)?)
}

/// Mapped files: addresses, inode and path.
pub struct Maps(Vec<(Range<usize>, u64, Vec<u8>)>);

impl Maps {
    /// Reads `/proc/self/maps` (proc_pid_maps(5)).
    pub fn read() -> Maps {
        let text = std::fs::read("/proc/self/maps").unwrap_or_default();
        let line = |line: &[u8]| {
            let fields: Vec<&[u8]> = line.splitn(6, |&byte| byte == b' ').collect();
            let text = |at: usize| std::str::from_utf8(fields.get(at)?).ok();
            let inode = text(4)?.parse().ok()?;
            let path = fields.get(5)?.trim_ascii().to_vec();
            Some((range_of(line)?, inode, path))
        };
        Maps(text.split(|&byte| byte == b'\n').filter_map(line).collect())
    }

    /// Returns the addresses around one that are mapped to the same file without a gap.
    pub fn around(&self, address: usize) -> Option<Range<usize>> {
        let at = self.0.iter().position(|map| map.0.contains(&address))?;
        let joins = |a: usize, b: usize| {
            let (a, b) = (&self.0[a], &self.0[b]);
            a.0.end == b.0.start && (a.1, &a.2) == (b.1, &b.2)
        };
        let first = (1..=at).rev().take_while(|&i| joins(i - 1, i)).last();
        let last = (at + 1..self.0.len())
            .take_while(|&i| joins(i - 1, i))
            .last();
        let first = first.map_or(at, |first| first - 1);
        Some(self.0[first].0.start..self.0[last.unwrap_or(at)].0.end)
    }

    /// Whether an address is in the mapping of a file. Some file systems show another
    /// device there than `stat` does, so the path is compared, too.
    pub fn is_of(&self, address: *mut c_void, file: &GgufFile) -> bool {
        let found = self
            .0
            .iter()
            .find(|map| map.0.contains(&(address as usize)));
        found.is_some_and(|(_, inode, path)| {
            let source = &file.source;
            let same_path = std::fs::canonicalize(source.path())
                .is_ok_and(|real| real.as_os_str().as_bytes() == path.as_slice());
            *inode == source.id().ino || same_path
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn locked_memory_is_told_from_other_memory() {
        const BYTES: usize = 4096;
        let map = || {
            let access = libc::PROT_READ | libc::PROT_WRITE;
            let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
            // SAFETY: a new mapping.
            unsafe { libc::mmap(std::ptr::null_mut(), BYTES, access, flags, -1, 0) }
        };
        let (locked, other) = (map(), map());
        assert!(!is_locked(locked as usize));
        // SAFETY: a mapping of this size.
        if unsafe { libc::mlock(locked, BYTES) } != 0 {
            println!("not tested: this process may not lock memory");
            return;
        }
        assert!(is_locked(locked as usize));
        assert!(!is_locked(other as usize));
    }
}
