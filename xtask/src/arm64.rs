//! The library, the drop-in and the command for AArch64, tested under emulation: `cargo xtask arm64`.

use std::path::Path;
use std::time::Instant;

use anyhow::{Result, ensure};

use crate::cmake::{build_arm64_examples, build_arm64_host, ctest};
use crate::install::{DebugInfo, install, target_folder};
use crate::machine::Machine;
use crate::matrix;
use crate::run::run as run_command;
use crate::{dist, fixtures};

const MACHINE: Machine = Machine::Aarch64;

/// Unit tests that emulation cannot run.
const UNIT_TESTS: [&str; 5] = [
    // They start themselves, which needs an emulator that the kernel knows.
    "a_file_with_the_number_of_standard_error_gets_no_message",
    "a_reader_that_does_not_read_is_not_waited_for",
    // The emulator has descriptors of its own.
    "threads_leave_each_other_no_number_of_a_standard_one",
    // It has neither cachestat nor RWF_NOWAIT, nor process_vm_readv.
    "pages_that_were_just_written_are_cached",
    "memory_is_read_where_its_file_may_not_be_opened",
];
/// Examples that emulation cannot run.
const EXAMPLES: [&str; 2] = [
    // The emulator counts no cached pages.
    "expert_stream",
    // CTest preloads the library into a program of this machine.
    "wrong_library",
];

/// A step: its name on the command line, and what it does with the folder of the installed tree.
type Step = (&'static str, fn(&Path) -> Result<()>);

/// Gets what is missing, builds and tests. Each step has a line with a verdict; an error names those that failed.
pub fn run(chosen: &[String]) -> Result<()> {
    ensure!(
        Machine::HERE != MACHINE,
        "this machine has the processor itself: run 'cargo xtask test'"
    );
    MACHINE.prepare()?;
    fixtures::make()?;
    let tree = target_folder()?.join("stage-arm64");
    let steps: [Step; 5] = [
        ("build", |tree| install(tree, MACHINE, DebugInfo::Left)),
        ("unit", |_| unit_tests()),
        ("program", |_| {
            build_arm64_host()?;
            matrix::check_those(&[matrix::ARM64])
        }),
        ("examples", examples),
        ("packages", |_| {
            let out = target_folder()?.join("dist");
            dist::make(&out, MACHINE).map(|_| ())
        }),
    ];
    for name in chosen {
        let known = steps.iter().any(|(step, _)| step == name);
        let all = steps.map(|(step, _)| step).join(", ");
        ensure!(known, "{name} is no step: use one of {all}");
    }
    let is_chosen = |name: &str| chosen.is_empty() || chosen.iter().any(|of| of == name);
    let mut verdicts = Vec::new();
    for (name, step) in steps.into_iter().filter(|(name, _)| is_chosen(name)) {
        let began = Instant::now();
        let failed = step(&tree).err();
        let verdict = match &failed {
            None => "passed".to_owned(),
            Some(error) => format!("FAILED: {error:#}"),
        };
        println!("{name}: {verdict}, {:.0} s", began.elapsed().as_secs_f64());
        verdicts.push((name, failed.is_none()));
    }
    let failed: Vec<_> = verdicts.iter().filter(|(_, passed)| !passed).collect();
    let names: Vec<_> = failed.iter().map(|(name, _)| *name).collect();
    println!(
        "AArch64 under emulation: {} of {} steps passed; not tested: {}",
        verdicts.len() - failed.len(),
        verdicts.len(),
        [&UNIT_TESTS[..], &EXAMPLES[..]].concat().join(", ")
    );
    ensure!(failed.is_empty(), "failed: {}", names.join(", "));
    Ok(())
}

fn unit_tests() -> Result<()> {
    let packages = [
        "llama-sidecar-core",
        "llama-sidecar",
        "llama-sidecar-preload",
    ];
    run_command(
        MACHINE
            .cargo("test")
            .arg("--lib")
            .args(packages.map(|name| format!("--package={name}")))
            .arg("--")
            .args(UNIT_TESTS.map(|name| format!("--skip={name}"))),
    )
}

fn examples(tree: &Path) -> Result<()> {
    let build = build_arm64_examples(tree)?;
    let left_out = format!("^({})$", EXAMPLES.join("|"));
    ctest(&build, &["--exclude-regex", &left_out])
}
