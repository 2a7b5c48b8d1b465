//! The drop-in while a real host loads a model whose experts are streamed: what is read of the
//! file, where experts are, and that a swap gives what a fresh start gives.

mod hosts;

use std::fs::File;
use std::os::fd::AsRawFd;
use std::path::Path;

use hosts::{TOKENS, copied, taken, traced};
use testkit::fixtures::fixture;
use testkit::host::{DropIn, Host, Program, Transcript, replace};
use testkit::skipped;

/// Hot-swap and streaming on.
fn streaming(variables: &[(&'static str, &str)]) -> DropIn {
    let stream = [("LLAMA_EXPERT_STREAM", "on")];
    let all = stream.iter().chain(variables);
    DropIn::On(all.map(|&(name, value)| (name, value.into())).collect())
}

/// Writes a file to disk and drops its pages from memory.
fn drop_pages(path: &Path) {
    let file = File::options().write(true).open(path).expect("a file");
    file.sync_all().expect("a disk");
    // SAFETY: an open file; the advice changes no byte.
    let failed = unsafe { libc::posix_fadvise(file.as_raw_fd(), 0, 0, libc::POSIX_FADV_DONTNEED) };
    assert_eq!(failed, 0);
}

/// Returns the share of the pages of a file that are in memory.
fn resident(path: &Path) -> f64 {
    let file = File::open(path).expect("a file");
    let len = file.metadata().expect("a file").len() as usize;
    // SAFETY: a new mapping that nothing reads; mincore writes a byte for each of its pages.
    unsafe {
        let (null, fd) = (std::ptr::null_mut(), file.as_raw_fd());
        let map = libc::mmap(null, len, libc::PROT_READ, libc::MAP_SHARED, fd, 0);
        assert_ne!(map, libc::MAP_FAILED);
        let page = libc::sysconf(libc::_SC_PAGESIZE) as usize;
        let mut pages = vec![0u8; len.div_ceil(page)];
        assert_eq!(libc::mincore(map, len, pages.as_mut_ptr()), 0);
        libc::munmap(map, len);
        pages.iter().filter(|&&page| page & 1 == 1).count() as f64 / pages.len() as f64
    }
}

/// Returns the share of a file that is in memory when a host has loaded it.
fn resident_after_load(program: Program, path: &Path, drop_in: &DropIn) -> f64 {
    drop_pages(path);
    let host = Host::start(program, path, drop_in);
    let share = resident(path);
    println!("{program:?}: {:.1} % after loading", 100.0 * share);
    assert_eq!(host.end(), Some(0));
    share
}

#[test]
fn a_load_reads_only_what_it_needs() {
    let (_folder, path) = copied("moe.gguf");
    drop_pages(&path);
    let left = resident(&path);
    if left > 0.1 {
        skipped("the temporary folder keeps files in memory (a tmpfs?)");
        return;
    }
    // With AMX, the programs with default parameters read dense weights to convert them, and with
    // each a window of the kernel's read-ahead, which can be larger than the experts between them.
    let processor = std::fs::read_to_string("/proc/cpuinfo").expect("its text");
    let mut programs = vec![Program::CMapped, Program::PythonExpertsOnCpu];
    match processor.contains(" amx_tile") {
        true => skipped("the processor has AMX: node-llama-cpp reads dense weights as it loads"),
        false => programs.push(Program::Node),
    }
    for program in programs {
        assert!(resident_after_load(program, &path, &hosts::on()) > 0.9);
        assert!(resident_after_load(program, &path, &streaming(&[])) < 0.3);
    }
    // Calls that the loader binds at the start.
    let bound = streaming(&[("LD_BIND_NOW", "1")]);
    assert!(resident_after_load(Program::CMapped, &path, &bound) < 0.3);
    // A file without experts is loaded as ever.
    let (_folder, path) = copied("smollm2.gguf");
    assert!(resident_after_load(Program::CMapped, &path, &streaming(&[])) > 0.9);
}

/// What a new process writes with a file.
fn fresh(path: &Path, drop_in: &DropIn) -> Transcript {
    let mut host = Host::start(Program::C, path, drop_in);
    let text = host.text(TOKENS);
    assert_eq!(text.hashes.len(), TOKENS, "a hash for each step");
    assert_eq!(host.end(), Some(0));
    text
}

/// Lines about experts that stay in the mapping.
fn kept(host: &Host) -> usize {
    host.logged("expert tensors stay in the mapping").len()
}

#[test]
fn a_swap_gives_what_a_fresh_start_gives() {
    let stream = streaming(&[]);
    let (_folder, path) = copied("moe.gguf");
    let variant = fixture("moe-mixed.gguf");
    let before = fresh(&path, &stream);
    let after = fresh(&variant, &stream);
    assert_eq!(before, fresh(&path, &hosts::on()), "no type is repacked");
    if std::is_x86_feature_detected!("avx2") {
        let repacked = fresh(&variant, &hosts::on());
        assert_ne!(after.hashes, repacked.hashes, "other kernels");
    } else {
        skipped("without AVX2 the host repacks no type of the fixture");
    }

    let mut host = Host::start(Program::C, &path, &stream);
    assert_eq!(host.text(TOKENS), before);
    assert_eq!(kept(&host), 0);
    replace(&path, &variant);
    assert_eq!(taken(&host.control("reload")), (4, 0));
    assert_eq!(host.text(TOKENS), after);
    assert_eq!(host.end(), Some(0));

    let mut host = Host::start(Program::C, &path, &stream);
    assert_eq!(host.text(TOKENS), after);
    let repacks = std::is_x86_feature_detected!("avx2");
    assert_eq!(kept(&host), usize::from(repacks), "{:?}", host.log());
    replace(&path, &fixture("moe.gguf"));
    assert_eq!(taken(&host.control("reload")), (4, 0));
    assert_eq!(host.text(TOKENS), before);
    replace(&path, &variant);
    assert_eq!(taken(&host.control("reload")), (0, 4));
    assert_eq!(host.text(TOKENS), after);
    assert_eq!(host.end(), Some(0));
}

/// Returns the number of experts that a trace counts in the first layer for a warm-up, and
/// whether the drop-in changed the warm-up.
fn counted_in_warm_up(drop_in: &DropIn) -> (u64, bool) {
    let mut host = Host::start(Program::C, &fixture("moe.gguf"), drop_in);
    host.ask("warmup");
    let trace = &host.control("trace")["traces"][0];
    let said = host.logged("the program's warm-up routes like any evaluation");
    assert_eq!(host.end(), Some(0));
    (traced(trace)[0].iter().sum(), said.len() == 1)
}

#[test]
fn a_warm_up_routes_like_any_evaluation() {
    let trace = ("LLAMA_EXPERT_TRACE_STATS", "1");
    let stock = DropIn::On(vec![(trace.0, trace.1.into())]);
    // The trace leaves evaluations out that route to all experts.
    assert_eq!(counted_in_warm_up(&stock), (0, false));
    // Two experts for each of five tokens.
    assert_eq!(counted_in_warm_up(&streaming(&[trace])), (10, true));
}
