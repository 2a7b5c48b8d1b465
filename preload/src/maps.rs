//! The files that are mapped into this process.

use std::ffi::c_void;
use std::ops::Range;
use std::os::unix::ffi::OsStrExt;

use llama_sidecar::gguf::GgufFile;

/// Mapped files: addresses, inode and path.
pub struct Maps(Vec<(Range<usize>, u64, Vec<u8>)>);

impl Maps {
    /// Reads `/proc/self/maps` (proc_pid_maps(5)).
    pub fn read() -> Maps {
        let text = std::fs::read("/proc/self/maps").unwrap_or_default();
        let line = |line: &[u8]| {
            let fields: Vec<&[u8]> = line.splitn(6, |&byte| byte == b' ').collect();
            let text = |at: usize| std::str::from_utf8(fields.get(at)?).ok();
            let (start, end) = text(0)?.split_once('-')?;
            let address = |text: &str| usize::from_str_radix(text, 16).ok();
            let inode = text(4)?.parse().ok()?;
            let path = fields.get(5)?.trim_ascii().to_vec();
            Some((address(start)?..address(end)?, inode, path))
        };
        Maps(text.split(|&byte| byte == b'\n').filter_map(line).collect())
    }

    /// Whether an address lies in the mapping of a file. Some file systems show another
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
