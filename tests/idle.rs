//! The drop-in with nothing switched on: a program does what it does without it.

use std::os::unix::process::ExitStatusExt;
use std::process::Command;

use testkit::fixtures::fixture;
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

/// The loader's work in each program of a command: libraries to load, and addresses to relocate
/// in pages that are copied for it.
#[test]
fn the_loader_has_little_to_do() {
    /// There are 2,231, one for each place that can panic among them. A capability adds about 50 (masks: 54), and each
    /// dependency with tables of strings hundreds.
    const MOST_RELOCATIONS: usize = 2300;
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
