//! The files that are mapped into this process.

use std::ffi::c_void;
use std::ops::Range;
use std::os::unix::ffi::OsStrExt;
use std::time::Duration;

use memmap2::MmapOptions;
use sidecar_core::descriptors;
use sidecar_core::gguf::GgufFile;

/// Whether an address is in memory that is locked (`mlock`).
pub fn is_locked(address: usize) -> bool {
    // smaps counts the pages of each mapping, which takes long.
    let status = descriptors::read_to_string("/proc/self/status").unwrap_or_default();
    let locked = status.lines().find_map(|line| line.strip_prefix("VmLck:"));
    if locked.is_some_and(|size| size.trim().starts_with("0 ")) {
        return false;
    }
    let text = descriptors::read("/proc/self/smaps").unwrap_or_default();
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

/// A mapped part of a file.
struct Map {
    addresses: Range<usize>,
    /// Where the part begins in the file.
    offset: usize,
    listed: Listed,
    path: Vec<u8>,
    /// Whether it is shared, and for reading alone.
    is_plain: bool,
    is_code: bool,
}

/// A file as the kernel lists it. Some file systems show another device and inode there than `stat` does.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Listed {
    device: Vec<u8>,
    inode: u64,
}

/// The mapped files.
pub struct Maps(Vec<Map>);

impl Maps {
    /// Reads `/proc/self/maps` (proc_pid_maps(5)).
    pub fn read() -> Maps {
        let text = descriptors::read("/proc/self/maps").unwrap_or_default();
        let line = |line: &[u8]| {
            let fields: Vec<&[u8]> = line.splitn(6, |&byte| byte == b' ').collect();
            let text = |at: usize| std::str::from_utf8(fields.get(at)?).ok();
            Some(Map {
                addresses: range_of(line)?,
                offset: usize::from_str_radix(text(2)?, 16).ok()?,
                listed: Listed {
                    device: fields.get(3)?.to_vec(),
                    inode: text(4)?.parse().ok()?,
                },
                path: fields.get(5)?.trim_ascii().to_vec(),
                is_plain: text(1)? == "r--s",
                is_code: text(1)?.contains('x'),
            })
        };
        Maps(text.split(|&byte| byte == b'\n').filter_map(line).collect())
    }

    /// Reads until a condition holds, a few times; `None` if it cannot be read.
    ///
    /// The kernel does not list all mappings at one moment. Those that are replaced meanwhile, as expert streaming does, can be
    /// missing, and are there in the next list.
    pub fn any_list(mut holds: impl FnMut(&Maps) -> bool) -> Option<bool> {
        const LISTS: u64 = 10;
        for list in 0..LISTS {
            let maps = Maps::read();
            if maps.is_empty() {
                return None;
            }
            if holds(&maps) {
                return Some(true);
            }
            std::thread::sleep(Duration::from_millis(list));
        }
        Some(false)
    }

    /// Reads the same, and how the kernel lists these files; `None` for one that cannot be mapped here.
    pub fn with(files: &[GgufFile]) -> (Maps, Vec<Option<Listed>>) {
        let map = |file: &GgufFile| {
            let handle = file.source.handle();
            // SAFETY: the page is not read.
            unsafe { MmapOptions::new().len(1).map(handle.get().ok()?) }.ok()
        };
        let pages: Vec<_> = files.iter().map(map).collect();
        let maps = Maps::read();
        let listed = pages.iter().map(|page| {
            let map = maps.at(page.as_ref()?.as_ptr() as usize);
            map.map(|map| map.listed.clone())
        });
        let listed = listed.collect();
        (maps, listed)
    }

    /// Whether it could not be read: each process has mapped files.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Returns the addresses around one to which a file is mapped in one piece, in the order of
    /// its bytes.
    pub fn around(&self, address: usize) -> Option<Range<usize>> {
        let at = self.position(address)?;
        // The kernel splits a mapping where its access or advice changes.
        let continues = |at: usize| {
            let (a, b) = (&self.0[at - 1], &self.0[at]);
            a.addresses.end == b.addresses.start
                && a.offset + a.addresses.len() == b.offset
                && (&a.listed, &a.path) == (&b.listed, &b.path)
        };
        let first = (1..=at).rev().take_while(|&at| continues(at)).last();
        let last = (at + 1..self.0.len())
            .take_while(|&at| continues(at))
            .last();
        let first = first.map_or(at, |second| second - 1);
        let last = last.unwrap_or(at);
        Some(self.0[first].addresses.start..self.0[last].addresses.end)
    }

    /// Returns the position of the part that has an address. The kernel lists parts by address.
    fn position(&self, address: usize) -> Option<usize> {
        let after = self.0.partition_point(|map| map.addresses.start <= address);
        let at = after.checked_sub(1)?;
        self.0[at].addresses.contains(&address).then_some(at)
    }

    fn at(&self, address: usize) -> Option<&Map> {
        self.position(address).map(|at| &self.0[at])
    }

    /// Whether an address is in memory that can be executed.
    pub fn is_code(&self, address: usize) -> bool {
        self.at(address).is_some_and(|map| map.is_code)
    }

    /// Whether an address is in shared memory without a file, as streamed experts are.
    pub fn is_shared_memory(&self, address: usize) -> bool {
        let map = self.at(address);
        map.is_some_and(|map| map.path == b"/dev/zero (deleted)")
    }

    /// Whether bytes of a file from an offset on are mapped at an address, shared and for reading alone.
    pub fn has_plain(&self, address: usize, len: u64, offset: u64) -> bool {
        self.at(address).is_some_and(|map| {
            map.is_plain
                && len <= (map.addresses.end - address) as u64
                && (map.offset + address - map.addresses.start) as u64 == offset
        })
    }

    /// Whether an address is in the mapping of a file, which the kernel lists like this.
    pub fn is_of_listed(
        &self,
        address: *mut c_void,
        file: &GgufFile,
        listed: Option<&Listed>,
    ) -> bool {
        match (self.at(address as usize), listed) {
            (Some(map), Some(listed)) => map.listed == *listed,
            _ => self.is_of(address, file),
        }
    }

    /// Whether an address is in the mapping of a file, or of another one that is at its path: whether the kernel lists it like
    /// `stat` is not known.
    pub fn is_of(&self, address: *mut c_void, file: &GgufFile) -> bool {
        self.at(address as usize).is_some_and(|map| {
            let source = &file.source;
            let has_path = || {
                std::fs::canonicalize(source.path())
                    .is_ok_and(|real| real.as_os_str().as_bytes() == map.path.as_slice())
            };
            map.listed.inode == source.id().ino || has_path()
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_piece_of_a_file_is_told_from_another_beside_it() {
        let map = |start: usize, len: usize, offset: usize, inode: u64| Map {
            addresses: start..start + len,
            offset,
            listed: Listed {
                device: b"08:01".to_vec(),
                inode,
            },
            path: b"/model".to_vec(),
            is_plain: inode == 8,
            is_code: false,
        };
        let maps = Maps(vec![
            map(100, 10, 0, 7),
            map(110, 20, 0, 7),
            map(130, 10, 20, 7),
            map(140, 10, 30, 8),
            map(160, 10, 40, 8),
        ]);
        let around = |address| maps.around(address);
        assert_eq!(around(105), Some(100..110));
        assert_eq!(around(115), Some(110..140));
        assert_eq!(around(139), Some(110..140));
        assert_eq!(around(140), Some(140..150));
        assert_eq!(around(155), None);
        assert_eq!(around(165), Some(160..170));
        assert!(maps.has_plain(142, 8, 32));
        assert!(!maps.has_plain(142, 9, 32));
        assert!(!maps.has_plain(142, 8, 31));
        assert!(!maps.has_plain(132, 8, 22));
        assert!(!maps.has_plain(155, 1, 0));
    }

    #[test]
    fn what_a_list_lacks_is_in_the_next_one() {
        let mut lists = 0;
        let mut nth = |nth| {
            lists = 0;
            Maps::any_list(|maps| {
                lists += 1;
                !maps.is_empty() && lists == nth
            })
        };
        assert_eq!(nth(1), Some(true));
        assert_eq!(nth(3), Some(true));
        assert_eq!(nth(0), Some(false));
    }

    #[test]
    fn a_file_is_told_from_another_one_at_its_path() {
        use std::fs::{File, rename, write};
        let folder = tempfile::tempdir().expect("a folder");
        let path = |name: &str| folder.path().join(name);
        let empty = [b"GGUF".as_slice(), &[3, 0, 0, 0], &[0; 16]].concat();
        for name in ["model", "other"] {
            write(path(name), &empty).expect("free space");
        }
        let opened = GgufFile::open(&path("model"), sidecar_core::gguf::Access::Read);
        let files = [opened.expect("an empty model")];
        // SAFETY: no process writes to the files.
        let map = || unsafe { MmapOptions::new().map(&File::open(path("model")).expect("a file")) };
        let first = map().expect("a file");
        rename(path("other"), path("model")).expect("a folder");
        let second = map().expect("a file");
        let (maps, listed) = Maps::with(&files);
        let [first, second] = [first, second].map(|map| {
            let address = map.as_ptr() as *mut c_void;
            let is_listed = maps.is_of_listed(address, &files[0], listed[0].as_ref());
            (maps.is_of(address, &files[0]), is_listed)
        });
        assert_eq!((first, second), ((true, true), (true, false)));
    }

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
