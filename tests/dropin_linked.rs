//! The drop-in in a program that ggml is linked into: calls are seen at the functions, or a capability is off by name.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use goblin::elf::{Elf, Sym};
use testkit::fixtures::fixture;
use testkit::host::{built, preload_library, without_settings};
use testkit::process::{before_exec, limit};
use testkit::server::llama_cpp_linked;

/// A few tokens.
const ARGUMENTS: [&str; 11] = [
    "-p",
    "one two",
    "-n",
    "3",
    "-t",
    "1",
    "--temp",
    "0",
    "-no-cnv",
    "--no-warmup",
    "--ignore-eos",
];

/// The program with a mixture; no variable is set.
fn completion(program: &Path) -> Command {
    let mut command = Command::new(program);
    command.arg("-m").arg(fixture("moe.gguf")).args(ARGUMENTS);
    without_settings(&mut command);
    command
}

fn program() -> PathBuf {
    llama_cpp_linked("llama-completion")
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// What the program prints alone.
fn alone(program: &Path) -> String {
    let output = completion(program).output().expect("it starts");
    assert!(output.status.success(), "{output:?}");
    text(&output.stdout)
}

/// Runs the program with capabilities on, after `set` in its process.
fn with_drop_in(program: &Path, set: impl FnMut() -> bool + Send + Sync + 'static) -> Output {
    let mut command = completion(program);
    command
        .env("LD_PRELOAD", preload_library())
        .env("LLAMA_SIDECAR_HOTSWAP", "1")
        .env("LLAMA_EXPERT_TRACE_STATS", "1")
        .env("LLAMA_EXPERT_STREAM", "on")
        .env("LLAMA_SIDECAR_LOG", "info");
    before_exec(&mut command, set);
    command.output().expect("it starts")
}

/// The same text, and these words in what the drop-in logs.
fn same_and_logs(set: fn() -> bool, expected: &[&str]) {
    let program = program();
    let output = with_drop_in(&program, set);
    assert!(output.status.success(), "{output:?}");
    assert_eq!(text(&output.stdout), alone(&program));
    let logged = text(&output.stderr);
    for words in expected {
        assert!(logged.contains(words), "{words}: {logged}");
    }
}

/// What is logged where no code can be exchanged.
const OFF: [&str; 1] = ["cannot be changed: the system forbids it"];

#[test]
fn a_program_that_may_write_no_file_lives() {
    same_and_logs(|| limit(libc::RLIMIT_FSIZE, 0), &OFF);
}

/// `memfd_create` fails with EPERM.
fn no_memory_files() -> bool {
    const ALLOWED: u32 = 0x7fff_0000;
    const ERRNO: u32 = 0x0005_0000;
    let step = |code: u32, jt, jf, k| libc::sock_filter {
        code: code as u16,
        jt,
        jf,
        k,
    };
    // The number of the call is the first word of what a filter sees.
    let mut steps = [
        step(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, 0, 0, 0),
        step(
            libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K,
            0,
            1,
            libc::SYS_memfd_create as u32,
        ),
        step(
            libc::BPF_RET | libc::BPF_K,
            0,
            0,
            ERRNO | libc::EPERM as u32,
        ),
        step(libc::BPF_RET | libc::BPF_K, 0, 0, ALLOWED),
    ];
    let filter = libc::sock_fprog {
        len: steps.len() as u16,
        filter: steps.as_mut_ptr(),
    };
    // SAFETY: plain system calls with a valid filter.
    unsafe {
        libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0
            && libc::prctl(libc::PR_SET_SECCOMP, libc::SECCOMP_MODE_FILTER, &filter) == 0
    }
}

#[test]
fn a_program_without_files_in_memory_lives() {
    same_and_logs(no_memory_files, &OFF);
}

#[test]
fn a_program_whose_memory_never_becomes_executable_is_swapped() {
    /// `PR_SET_MDWE` with `PR_MDWE_REFUSE_EXEC_GAIN`: systemd's `MemoryDenyWriteExecute`.
    const SET_MDWE: libc::c_int = 65;
    // SAFETY: takes numbers; fails on kernels before 6.3.
    let set = || unsafe { libc::prctl(SET_MDWE, 1, 0, 0, 0) == 0 };
    let mut probe = Command::new("true");
    before_exec(&mut probe, set);
    if probe.status().is_err() {
        return testkit::skipped("the kernel has no PR_SET_MDWE");
    }
    same_and_logs(
        set,
        &["watching 302 tensors", "238 activations in 30 layers"],
    );
}

/// Makes a copy of the program with another symbol table, by an option of `objcopy`.
fn copied(option: &[&str], folder: &Path) -> PathBuf {
    let copy = folder.join("llama-completion");
    let mut command = Command::new("objcopy");
    command.args(option).arg(program()).arg(&copy);
    assert!(command.status().expect("objcopy of gcc").success());
    copy
}

/// In programs that evaluate on the CPU. A function that the drop-in calls itself is missing in each capability.
#[test]
fn a_capability_is_off_where_a_function_that_it_needs_is_not_seen() {
    const SWAP: &str = "hot-swap stays off: the program calls its own ";
    const TRACE: &str = "are not counted: the program calls its own ";
    const STREAM: &str = "moe.gguf: the program calls its own ";
    const ALL: [&str; 3] = [SWAP, TRACE, STREAM];
    let expected = alone(&program());
    for (function, off) in [
        ("ggml_backend_sched_reserve", &[SWAP, TRACE][..]),
        ("ggml_backend_sched_alloc_graph", &ALL),
        ("ggml_backend_sched_graph_compute_async", &[SWAP, TRACE]),
        ("ggml_backend_sched_free", &[]),
        ("ggml_backend_buffer_free", &[]),
        ("ggml_free", &[]),
        ("gguf_init_from_file", &[]),
    ] {
        let folder = tempfile::tempdir().expect("a folder");
        let copy = copied(&["--strip-symbol", function], folder.path());
        let output = with_drop_in(&copy, || true);
        assert_eq!(text(&output.stdout), expected, "{function}");
        let logged = text(&output.stderr);
        for start in ALL {
            let is_off = logged.contains(&format!("{start}{function}, "));
            assert_eq!(is_off, off.contains(&start), "{function}: {logged}");
        }
        if off.is_empty() {
            let named = logged.lines().any(|line| {
                line.contains(function) && line.ends_with("hot-swap stays off in this program")
            });
            assert!(named, "{function}: {logged}");
        }
    }
}

/// Another module of the program can have a ggml of its own: what one copy lacks, the other does not have for it.
#[test]
fn a_function_of_another_copy_is_not_used() {
    const LACKS: &str = "ggml_get_rows";
    let folder = tempfile::tempdir().expect("a folder");
    let copy = copied(&["--strip-symbol", LACKS], folder.path());
    let mut preload = preload_library().into_os_string();
    preload.push(":");
    preload.push(built("hosts-c/libbeside.so"));
    let output = completion(&copy)
        .env("LD_PRELOAD", preload)
        .env("BESIDE", fixture("upstream").join("libggml-base.so"))
        .env("LLAMA_SIDECAR_HOTSWAP", "1")
        .output()
        .expect("it starts");
    assert_eq!(text(&output.stdout), alone(&program()));
    let logged = text(&output.stderr);
    let why = format!("the linker left '{LACKS}' out of this program");
    assert!(logged.contains(&why), "{logged}");
}

/// Linkers keep one of several functions with the same code: calls of the others must not be taken for its own.
#[test]
fn a_function_whose_code_has_another_name_counts_as_not_seen() {
    const SHARED: &str = "ggml_backend_sched_reserve";
    let bytes = std::fs::read(program()).expect("a program");
    let elf = Elf::parse(&bytes).expect("an ELF file");
    let is_named = |symbol: &Sym| elf.strtab.get_at(symbol.st_name) == Some(SHARED);
    let symbol = elf.syms.iter().find(is_named).expect("the function");
    let section = &elf.section_headers[symbol.st_shndx];
    let section_name = elf.shdr_strtab.get_at(section.sh_name).expect("a name");
    let offset = symbol.st_value - section.sh_addr;
    let folder = tempfile::tempdir().expect("a folder");
    let symbol = format!("same_code={section_name}:{offset},function,global");
    let copy = copied(&["--add-symbol", &symbol], folder.path());
    let output = with_drop_in(&copy, || true);
    assert_eq!(text(&output.stdout), alone(&program()));
    let logged = text(&output.stderr);
    let why =
        format!("{SHARED}, which the drop-in does not see and needs (has the code of another");
    assert!(logged.contains(&why), "{logged}");
}

#[test]
fn doctor_says_what_works_and_run_says_what_a_stripped_program_lacks() {
    let doctor = |program: &Path| {
        let of = completion(program);
        let output = Command::new(built("release/llama-sidecar"))
            .args(["doctor", "--"])
            .arg(program)
            .args(of.get_args())
            .output()
            .expect("it starts");
        (text(&output.stdout), text(&output.stderr), output.status)
    };
    let (found, _, status) = doctor(&program());
    assert!(status.success(), "{found}");
    for line in [
        " of 26 reachable, at the functions: ggml is linked into the program\n",
        "not reachable: ggml_backend_offload_op: ",
        "trace works: 30 layers",
        "streaming   works",
        "hot-swap    works\n",
    ] {
        assert!(found.contains(line), "{line}: {found}");
    }

    let folder = tempfile::tempdir().expect("a folder");
    let stripped = copied(&["--strip-all"], folder.path());
    let output = with_drop_in(&stripped, || true);
    assert_eq!(text(&output.stdout), alone(&program()));
    let (_, why, status) = doctor(&stripped);
    assert_eq!(status.code(), Some(1));
    assert!(why.contains("a program that is not stripped"), "{why}");
}
