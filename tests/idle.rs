//! The drop-in with nothing switched on: a program does what it does without it.

use std::os::unix::process::ExitStatusExt;
use std::process::Command;

use testkit::fixtures::{fixture, upstream_libraries};
use testkit::host::{built, ik_llama_file, preload_library, without_settings};

/// What can be seen of a program from outside.
#[derive(Debug, PartialEq, Eq)]
struct Seen {
    output: String,
    errors: String,
    code: Option<i32>,
    signal: Option<i32>,
}

/// Runs a command without the variables of llama-sidecar.
fn seen(command: &mut Command) -> Seen {
    without_settings(command);
    let output = command.output().expect("it starts");
    Seen {
        output: String::from_utf8_lossy(&output.stdout).into_owned(),
        errors: String::from_utf8_lossy(&output.stderr).into_owned(),
        code: output.status.code(),
        signal: output.status.signal(),
    }
}

/// A program of `hosts/loader` and its steps.
fn loader(program: &str, steps: &[&str]) -> Command {
    let path = built("hosts-loader").join(program);
    let mut command = Command::new(&path);
    command.args(steps).current_dir(built("hosts-loader"));
    command
}

/// Runs the steps without and with the drop-in, and compares what is seen with each
/// other and with what is expected.
fn same(program: &str, steps: &[&str], expected: &[&str]) {
    let without = seen(&mut loader(program, steps));
    let lines: Vec<&str> = without.output.lines().collect();
    assert_eq!(lines, expected, "{program} {steps:?} alone: {without:?}");
    let with = seen(loader(program, steps).env("LD_PRELOAD", preload_library()));
    assert_eq!(with, without, "{program} {steps:?}");
}

const UNLOADED: [&str; 3] = ["", "copy 1 unloaded", "copy 2 unloaded"];

#[test]
fn each_of_two_local_copies_serves_its_own_plugin() {
    let steps = [
        "local=./libplugin1.so",
        "local=./libplugin2.so",
        "call=0:go",
        "call=1:go",
        "call=1:go",
        "call=0:go",
    ];
    let expected = ["1", "2", "2", "1", UNLOADED[1], UNLOADED[2]];
    same("loader", &steps, &expected);
}

#[test]
fn a_global_copy_comes_before_a_local_one() {
    let steps = ["self", "local=./libplugin2.so", "call=0:go", "next"];
    let expected = ["1", "1", "1", UNLOADED[1], UNLOADED[2]];
    same("loader_with_copy1", &steps, &expected);
}

#[test]
fn a_deeply_bound_plugin_gets_its_own_copy() {
    let steps = ["deep=./libplugin2.so", "call=0:go", "self"];
    let expected = ["2", "1", UNLOADED[1], UNLOADED[2]];
    same("loader_with_copy1", &steps, &expected);
}

#[test]
fn a_copy_that_becomes_global_later_is_found() {
    let steps = ["local=./libbare.so", "global=./libcopy2.so", "call=0:go"];
    same("loader", &steps, &["2", UNLOADED[2]]);
    // Before a copy that is local to the caller, too.
    let steps = [
        "global=./libcopy2.so",
        "local=./libplugin1.so",
        "call=1:go",
        "call=1:go",
    ];
    same("loader", &steps, &["2", "2", UNLOADED[2], UNLOADED[1]]);
}

#[test]
fn a_bound_symbol_stays_bound() {
    let steps = [
        "local=./libplugin1.so",
        "call=0:go",
        "global=./libcopy2.so",
        "call=0:go",
        "local=./libplugin_new.so",
        "close=2",
        "call=0:go",
    ];
    let expected = ["1", "1", "copy 7 unloaded", "1", UNLOADED[1], UNLOADED[2]];
    same("loader", &steps, &expected);
}

#[test]
fn a_library_gets_the_copy_of_its_group() {
    let steps = [
        "local=./libplugin1.so",
        "call=0:go",
        "local=./libgroup.so",
        "call=1:go_on",
    ];
    same("loader", &steps, &["1", "2", UNLOADED[1], UNLOADED[2]]);
}

#[test]
fn a_jump_reaches_the_copy_although_the_caller_has_none() {
    let steps = [
        "local=./libcopy1.so",
        "call=0:jump",
        "call=0:jump_with_buffer",
    ];
    same("loader", &steps, &["1", "1", UNLOADED[1]]);
}

#[test]
fn a_buffer_goes_to_the_copy_that_made_it() {
    let steps = [
        "local=./libcopy1.so",
        "local=./libcopy2.so",
        "call=0:jump_with_buffer",
        "call=1:jump_with_buffer",
        "call=0:jump_with_buffer",
    ];
    let expected = ["1", "2", "1", UNLOADED[1], UNLOADED[2]];
    same("loader", &steps, &expected);
}

#[test]
fn a_caller_gets_the_version_that_it_was_linked_with() {
    let steps = [
        "local=./libplugin_new.so",
        "local=./libplugin_old.so",
        "call=0:go",
        "call=1:go",
    ];
    same("loader", &steps, &["8", "7", "copy 7 unloaded"]);
    let steps = [
        "local=./libplugin1.so",
        "local=./libplugin_old.so",
        "call=1:go",
    ];
    same("loader", &steps, &["7", UNLOADED[1], "copy 7 unloaded"]);
}

#[test]
fn a_library_is_unloaded_when_the_program_says_so() {
    let round = |plugin: &'static str, number| {
        let call = ["call=0:go", "call=1:go", "call=2:go", "call=3:go"];
        let close = ["close=0", "close=1", "close=2", "close=3"];
        [plugin, call[number], close[number]]
    };
    let (one, two) = ("local=./libplugin1.so", "local=./libplugin2.so");
    let rounds = [round(one, 0), round(two, 1), round(one, 2), round(two, 3)];
    let steps = rounds.concat();
    let once = ["1", UNLOADED[1], "2", UNLOADED[2]];
    same("loader", &steps, &[once, once].concat());
}

#[test]
fn a_function_that_no_library_has_ends_the_program_as_the_loader_does() {
    same("loader", &["local=./libbare.so", "call=0:go"], &[]);
}

#[test]
fn a_name_that_is_only_asked_for_ends_nothing() {
    same("loader", &["weak", "next"], &["0", "0"]);
    same("loader_wraps", &["self", "next"], &["100", "0"]);
}

#[test]
fn a_function_of_the_program_stays_in_front() {
    let steps = ["self", "next", "local=./libplugin2.so", "call=0:go"];
    let expected = ["101", "1", "101", UNLOADED[1], UNLOADED[2]];
    same("loader_wraps_copy1", &steps, &expected);
}

#[test]
fn errno_and_the_loaders_message_stay() {
    let steps = [
        "local=./libplugin1.so",
        "call=0:go",
        "local=./libplugin_old.so",
        "call=1:go",
        "local=./none.so",
        "errno=33",
        "again",
        "errno",
        "error",
    ];
    let expected = ["1", "7", "not loaded", "7", "33", "an error"];
    let ends = [UNLOADED[1], "copy 7 unloaded"];
    same("loader", &steps, &[&expected[..], &ends].concat());
    // The first call after a failure.
    let steps = ["local=./none.so", "errno=33", "self", "errno", "error"];
    let expected = ["not loaded", "1", "33", "an error", UNLOADED[1]];
    same("loader_with_copy1", &steps, &expected);
}

#[test]
fn a_constructor_may_wait_for_a_thread_that_calls() {
    let steps = ["local=./libplugin_thread.so", "call=0:go"];
    same("loader", &steps, &["1", UNLOADED[1]]);
}

/// A library whose tables a test changes. Addresses of its tables are offsets in the file.
struct Library(Vec<u8>);

impl Library {
    fn u32(&mut self, at: usize) -> &mut [u8; 4] {
        self.0[at..].first_chunk_mut().expect("in the file")
    }

    fn u64(&mut self, at: usize) -> &mut [u8; 8] {
        self.0[at..].first_chunk_mut().expect("in the file")
    }

    fn offset(&mut self, at: usize) -> usize {
        u64::from_le_bytes(*self.u64(at)) as usize
    }

    /// Returns where the program header of a kind is.
    fn header(&mut self, kind: u32) -> usize {
        let first = self.offset(32);
        let mut all = (first..).step_by(56);
        all.find(|at| *self.u32(*at) == kind.to_le_bytes())
            .expect("a header")
    }

    /// Returns where the entry of a tag is in the dynamic section. Entries that end it follow its last one.
    fn dynamic(&mut self, tag: u64) -> usize {
        let header = self.header(2);
        let first = self.offset(header + 8);
        let mut all = (first..).step_by(16);
        all.find(|at| *self.u64(*at) == tag.to_le_bytes())
            .expect("an entry")
    }

    fn table(&mut self, tag: u64) -> usize {
        let entry = self.dynamic(tag);
        self.offset(entry + 8)
    }

    fn set_tag(&mut self, tag: u64, to: u64) {
        let entry = self.dynamic(tag);
        *self.u64(entry) = to.to_le_bytes();
    }

    fn set_value(&mut self, tag: u64, to: u64) {
        let entry = self.dynamic(tag);
        *self.u64(entry + 8) = to.to_le_bytes();
    }

    fn fill(&mut self, from: usize, words: u32, value: u32) {
        for at in 0..words as usize {
            *self.u32(from + 4 * at) = value.to_le_bytes();
        }
    }

    /// Returns words at the start of a table.
    fn words<const N: usize>(&mut self, from: usize) -> [u32; N] {
        std::array::from_fn(|at| u32::from_le_bytes(*self.u32(from + 4 * at)))
    }
}

#[test]
fn a_library_with_damaged_tables_changes_nothing() {
    const HASH: u64 = 4;
    const STRINGS: u64 = 5;
    const SYMBOLS: u64 = 6;
    const SONAME: u64 = 14;
    const GNU_HASH: u64 = 0x6fff_fef5;
    /// A tag without a meaning.
    const NONE: u64 = 0x6fff_fdf0;
    fn let_all_pass(library: &mut Library) -> (usize, u32) {
        let table = library.table(GNU_HASH);
        let [buckets, _, filters, _] = library.words(table);
        library.fill(table + 16, 2 * filters, u32::MAX);
        (table + 16 + 8 * filters as usize, buckets)
    }
    fn fill_hash(library: &mut Library, bucket: u32, entry: u32) {
        library.set_tag(GNU_HASH, NONE);
        let table = library.table(HASH);
        let [buckets, entries] = library.words(table);
        library.fill(table + 8, buckets, bucket);
        library.fill(table + 8 + 4 * buckets as usize, entries, entry);
    }
    type Damage = fn(&mut Library);
    let damages: [(&str, Damage); 11] = [
        ("the buckets lead out of the file", |library| {
            let (table, buckets) = let_all_pass(library);
            library.fill(table, buckets, 0x7fff_ffff);
        }),
        ("the chains have no end", |library| {
            let (table, buckets) = let_all_pass(library);
            let [_, first] = library.words(table);
            library.fill(table, buckets, first);
            library.fill(table + 4 * buckets as usize, 1, 0);
        }),
        ("the number of filters is wrong", |library| {
            let table = library.table(GNU_HASH);
            library.fill(table + 8, 1, 1 << 31);
        }),
        ("the number of buckets is wrong", |library| {
            let_all_pass(library);
            let table = library.table(GNU_HASH);
            library.fill(table, 1, u32::MAX);
        }),
        ("a chain is a circle", |library| fill_hash(library, 1, 1)),
        ("a chain leads out of the file", |library| {
            fill_hash(library, 0x7fff_fff0, 0x7fff_fff0);
        }),
        ("there are no hashes", |library| {
            library.set_tag(GNU_HASH, NONE);
            library.set_tag(HASH, NONE + 1);
        }),
        ("its name is before its strings", |library| {
            library.set_value(SONAME, u64::MAX);
        }),
        ("the names of its symbols are far away", |library| {
            let_all_pass(library);
            let table = library.table(SYMBOLS);
            for symbol in 1..3 {
                library.fill(table + 24 * symbol, 1, 0xffff_fff0);
            }
        }),
        ("its symbols are far away", |library| {
            library.set_value(SYMBOLS, 0x7fff_ffff_0000);
        }),
        ("its strings have no end", |library| {
            let end = library.0.len() as u64;
            library.set_value(STRINGS, end);
        }),
    ];
    let folder = tempfile::tempdir().expect("a folder");
    let bytes = std::fs::read(built("hosts-loader/liblone.so")).expect("a library");
    let mut differ = Vec::new();
    for (what, damage) in damages {
        let mut library = Library(bytes.clone());
        damage(&mut library);
        let path = folder.path().join("damaged.so");
        std::fs::write(&path, library.0).expect("a file");
        let damaged = format!("local={}", path.display());
        let steps = [&damaged, "local=./libplugin1.so", "call=1:go"];
        let without = seen(&mut loader("loader", &steps));
        let with = seen(loader("loader", &steps).env("LD_PRELOAD", preload_library()));
        assert_eq!(without.code, Some(0), "{what}: {without:?}");
        if with != without {
            differ.push((what, with));
        }
    }
    assert!(differ.is_empty(), "{differ:#?}");
}

/// Everything that a variable turns on, in a command's programs.
const ALL_ON: [(&str, &str); 9] = [
    ("LLAMA_SIDECAR_HOTSWAP", "1"),
    ("LLAMA_EXPERT_STREAM", "on"),
    ("LLAMA_EXPERT_TRACE_STATS", "1"),
    ("LLAMA_EXPERT_TRACE_NAMES", "1"),
    ("LLAMA_POSTFETCH_ENABLE", "1"),
    ("LLAMA_SIDECAR_POSTFETCH", "1"),
    ("LLAMA_SIDECAR_LOG", "debug"),
    ("LLAMA_SIDECAR_CONTROL", "socket-%p"),
    ("LLAMA_EXPERT_TRACE_OUTPUT", "trace-%p.json"),
];

#[test]
fn programs_without_ggml_are_left_alone() {
    let folder = tempfile::tempdir().expect("a folder");
    let list = folder.path().join("allocations");
    let preload = [preload_library(), built("hosts-loader/liballocations.so")];
    let preload = preload.map(|path| path.display().to_string()).join(":");
    let program = |words: &[&str]| {
        let mut command = Command::new(words[0]);
        command.args(&words[1..]).current_dir(folder.path());
        command
    };
    let with = |mut command: Command| {
        without_settings(&mut command);
        command.envs(ALL_ON).env("ALLOCATIONS", &list);
        command.env("LD_PRELOAD", &preload);
        let output = command.output().expect("it starts");
        (output.stdout, output.stderr, output.status)
    };
    let source = "int main(void) { return 0; }";
    for words in [
        &["sh", "-c", "for i in 1 2 3; do echo $i | cat; done"][..],
        &["bash", "-c", "ls -l / | sort | head -3; exit 7"],
        &[
            "sh",
            "-c",
            &format!("echo '{source}' | cc -x c - -o a.out && ./a.out"),
        ],
        &[
            "python3",
            "-c",
            "import ctypes, json, socket; print(json.dumps([1]))",
        ],
        &["node", "-e", "console.log(process.argv.length)"],
        &["git", "--version"],
        &["make", "--version"],
        &["perl", "-e", "print 1 + 1"],
        &["tar", "--version"],
        &["dpkg", "--version"],
        &["no-such-program"],
    ] {
        let Ok(alone) = program(words).output() else {
            continue;
        };
        let found = with(program(words));
        assert_eq!(
            found,
            (alone.stdout, alone.stderr, alone.status),
            "{words:?}"
        );
        let allocated = std::fs::read_to_string(&list).unwrap_or_default();
        assert_eq!(allocated, "", "{words:?}");
        let left = std::fs::read_dir(folder.path()).expect("a folder");
        let names = left.map(|entry| entry.expect("an entry").file_name());
        let foreign = names.filter(|name| name != "a.out").count();
        assert_eq!(foreign, 0, "{words:?}");
    }
    // The count is one: a program with ggml has some.
    let mut host = Command::new(built("hosts-c/host"));
    host.arg(upstream_libraries()).arg(fixture("small.gguf"));
    with(host);
    let allocated = std::fs::read_to_string(&list).expect("a line");
    assert!(allocated.trim_end().ends_with("/host"), "{allocated}");
}

/// The loader's work in each program of a command: libraries to load, and addresses to relocate
/// in pages that are copied for it.
#[test]
fn the_loader_has_little_to_do() {
    /// There are 2,948, one for each place that can panic among them. A capability adds about 50 (masks: 54), and each
    /// dependency with tables hundreds (instructions of x86-64: 570).
    const MOST_RELOCATIONS: usize = 3000;
    let dynamic = Command::new("readelf")
        .arg("-dW")
        .arg(preload_library())
        .output()
        .expect("binutils are installed");
    let dynamic = String::from_utf8_lossy(&dynamic.stdout);
    let entries = |tag: &str| -> Vec<&str> {
        let lines = dynamic.lines().filter(|line| line.contains(tag));
        let last = |line: &'_ str| line.rfind([' ', '[']).map_or(0, |at| at + 1);
        lines.map(|line| &line[last(line)..]).collect()
    };
    // Every program has both already.
    let needed = entries("(NEEDED)");
    assert_eq!(needed, ["libc.so.6]", "ld-linux-x86-64.so.2]"], "{dynamic}");
    let count = entries("(RELACOUNT)");
    let count: usize = count[0].parse().expect("a number");
    assert!(count < MOST_RELOCATIONS, "{count} relocations");
}

/// What ik_llama.cpp's Python bindings write.
fn ik_llama(variables: &[(&str, &str)]) -> Seen {
    let code = "import sys; from ik_llama_cpp import IkLlama
model = IkLlama(sys.argv[1], n_ctx=256, n_threads=2)
print(*model.generate(model.tokenize('The capital of France is'), max_tokens=12))";
    let mut command = Command::new(ik_llama_file("bin/python"));
    command.args(["-c", code]).arg(fixture("smollm2.gguf"));
    seen(command.envs(variables.iter().copied()))
}

#[test]
fn ik_llama_writes_the_same() {
    let preload = preload_library();
    let preload = ("LD_PRELOAD", preload.to_str().expect("UTF-8"));
    let without = ik_llama(&[]);
    assert_eq!(without.code, Some(0), "{without:?}");
    assert_eq!(without.output.split_whitespace().count(), 12, "{without:?}");
    let idle = ik_llama(&[preload]);
    assert_eq!(
        (&idle.output, idle.code),
        (&without.output, Some(0)),
        "{idle:?}"
    );
    assert!(!idle.errors.contains("llama-sidecar: "), "{idle:?}");
    let on = ik_llama(&[preload, ("LLAMA_HOTSWAP_ENABLED", "1")]);
    assert_eq!((&on.output, on.code), (&without.output, Some(0)), "{on:?}");
}
