//! The emulated disk, by its own counts. `cargo xtask test` runs this where a FUSE file system can
//! be mounted.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Barrier;
use std::time::{Duration, Instant};

use testkit::slow_disk::{SlowDisk, Speed};

const MIB: usize = 1 << 20;
const FAST: Speed = Speed::new(10, 4000);

/// A file of so many MiB without a regular pattern.
fn file(mib: usize) -> (tempfile::NamedTempFile, Vec<u8>) {
    let numbers = 0..(mib * MIB / 8) as u64;
    let bytes: Vec<u8> = numbers
        .flat_map(|number| number.wrapping_mul(0x9E37_79B9_7F4A_7C15).to_le_bytes())
        .collect();
    let file = tempfile::NamedTempFile::new().expect("a folder");
    std::fs::write(file.path(), &bytes).expect("space");
    (file, bytes)
}

fn disk(file: &Path, speed: Speed) -> SlowDisk {
    let disk = SlowDisk::mount(file, speed).unwrap_or_else(|reason| panic!("{reason}"));
    disk.read_ahead_kb(128).expect("a setting of the kernel");
    disk
}

#[test]
fn it_has_the_bytes_of_the_file() {
    let (file, bytes) = file(3);
    let disk = disk(file.path(), FAST);
    assert!(std::fs::read(disk.path()).expect("readable") == bytes);
    assert_eq!(disk.counts().bytes, bytes.len() as u64);
    // The second time they are in the page cache, until they are dropped.
    assert!(std::fs::read(disk.path()).expect("readable") == bytes);
    assert_eq!(disk.counts().bytes, bytes.len() as u64);
    disk.drop_cache().expect("the file is not mapped");
    assert!(std::fs::read(disk.path()).expect("readable") == bytes);
    assert_eq!(disk.counts().bytes, 2 * bytes.len() as u64);
}

#[test]
fn each_request_takes_the_latency_and_its_bytes() {
    let (file, _) = file(8);
    let slow = Speed::new(2000, 100);
    let disk = disk(file.path(), slow);
    let began = Instant::now();
    std::fs::read(disk.path()).expect("readable");
    let took = began.elapsed();
    // 84 ms for the bytes, and the latency at least once; a busy machine adds to it.
    assert!(took >= Duration::from_millis(84 + 2), "{took:?}");
    disk.set_speed(FAST);
    disk.drop_cache().expect("the file is not mapped");
    std::fs::read(disk.path()).expect("readable");
    assert_eq!(disk.counts().bytes, 16 * MIB as u64);
}

#[test]
fn requests_overlap() {
    let (file, _) = file(8);
    // Long enough for both threads to ask.
    let patient = Speed::new(500_000, 4000);
    let disk = disk(file.path(), patient);
    let opened = File::open(disk.path()).expect("readable");
    let start = Barrier::new(2);
    std::thread::scope(|scope| {
        for at in [0, 4 * MIB as u64] {
            let (opened, start) = (&opened, &start);
            scope.spawn(move || {
                start.wait();
                opened.read_exact_at(&mut [0; 4096], at).expect("readable");
            });
        }
    });
    assert!(disk.counts().depth >= 2, "{:?}", disk.counts());
}

#[test]
fn reads_fail_on_demand() {
    let (file, bytes) = file(4);
    let disk = disk(file.path(), FAST);
    disk.read_ahead_kb(0).expect("a setting of the kernel");
    let opened = File::open(disk.path()).expect("readable");
    let read_page = |at: usize| {
        let mut page = [0; 4096];
        opened.read_exact_at(&mut page, at as u64)?;
        std::io::Result::Ok(page == bytes[at..at + 4096])
    };
    // The kernel asks more than once.
    disk.fail(MIB as u64..2 * MIB as u64, u64::MAX);
    assert!(read_page(0).expect("outside the range"));
    for at in [MIB, 2 * MIB - 4096] {
        let error = read_page(at).expect_err("in the range");
        assert_eq!(error.raw_os_error(), Some(libc::EIO));
    }
    assert!(read_page(2 * MIB).expect("outside the range"));
    disk.fail(0..0, 0);
    assert!(read_page(MIB).expect("readable again"));
}

#[test]
fn a_file_can_be_cut_short() {
    let (file, bytes) = file(2);
    let disk = disk(file.path(), FAST);
    assert!(std::fs::read(disk.path()).expect("readable") == bytes);
    disk.set_size(MIB as u64).expect("a size");
    assert!(std::fs::read(disk.path()).expect("readable") == bytes[..MIB]);
    disk.set_size(2 * MIB as u64).expect("a size");
    assert!(std::fs::read(disk.path()).expect("readable") == bytes);
}

#[test]
fn it_is_unmounted_at_the_end() {
    let (file, _) = file(1);
    let disk = disk(file.path(), FAST);
    let path = disk.path();
    // Also while the file is open.
    let _opened = File::open(&path).expect("readable");
    drop(disk);
    let mounts = std::fs::read_to_string("/proc/self/mounts").expect("Linux");
    let folder = path.parent().expect("a folder").to_str().expect("UTF-8");
    assert!(!mounts.contains(folder));
    assert!(!path.exists());
}
