//! What the drop-in does in each host, as a table: `cargo xtask hosts`.
//!
//! A cell of the table is a test that passed, or states why the host does not have the capability.
//! A test that fails is an error and is not written.
//!
//! Modules, top to bottom:
//!
//! | module | contents |
//! |---|---|
//! | `capability` | what the drop-in does in a program |
//! | `subject` | the programs, and how each is started |
//! | `running` | a program that runs, and what it computes |

use std::fmt::Write;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Mutex;
use std::time::Instant;

use anyhow::{Context, Result, ensure};

mod capability;
mod running;
mod subject;

use capability::CAPABILITIES;
use subject::Subject;

use crate::run::root;
pub use subject::{ARM64, IK_LLAMA_CPP, IK_LLAMA_VULKAN, OLDER};

const PAGE: &str = "docs/hosts.md";
const BEGIN: &str = "<!-- hosts:begin -->\n";
const END: &str = "<!-- hosts:end -->";

/// Hosts that no other suite runs. The daily test compares their rows with the page.
const DAILY: [&str; 5] = [
    "llama-cpp-python",
    "llama-completion",
    "llama-bench",
    subject::LINKED[0],
    subject::LINKED[1],
];

/// Tests hosts, all of them without names, and writes their rows into the page.
pub fn write(names: &[String]) -> Result<()> {
    let page = std::fs::read_to_string(root().join(PAGE)).context(PAGE)?;
    let tested = test(names)?;
    let table = table(&page, &tested)?;
    println!("\n{table}");
    std::fs::write(root().join(PAGE), with_table(&page, &table)?)?;
    Ok(())
}

/// Fails when a host that no other suite runs does not do what the page states.
pub fn check() -> Result<()> {
    check_those(&DAILY)
}

/// Fails when one of these hosts does not do what the page states.
pub fn check_those(names: &[&str]) -> Result<()> {
    let page = std::fs::read_to_string(root().join(PAGE)).context(PAGE)?;
    let names: Vec<String> = names.iter().map(|name| (*name).to_owned()).collect();
    let tested = test(&names)?;
    ensure!(
        with_table(&page, &table(&page, &tested)?)? == page,
        "the table in {PAGE} is stale: run 'cargo xtask hosts'"
    );
    Ok(())
}

/// Tests hosts, two at a time; returns those that do what they should.
fn test(names: &[String]) -> Result<Vec<Subject>> {
    let mut subjects = subject::all();
    for name in names {
        let known = subjects.iter().any(|subject| subject.name == name);
        let all: Vec<_> = subjects.iter().map(|subject| subject.name).collect();
        ensure!(known, "{name} is no host: use one of {}", all.join(", "));
    }
    subjects.retain(|subject| match names.is_empty() {
        true => can_be_tested(subject),
        false => names.iter().any(|name| subject.name == name),
    });
    // What fails is printed below, with the name of the host.
    let hook = std::panic::take_hook();
    std::panic::set_hook(Box::new(|_| {}));
    let left = Mutex::new(subjects.into_iter());
    let (passed, failed) = (Mutex::new(Vec::new()), Mutex::new(Vec::new()));
    std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                loop {
                    let next = left.lock().expect("no panic").next();
                    let Some(subject) = next else { return };
                    match test_one(&subject) {
                        Ok(()) => passed.lock().expect("no panic").push(subject),
                        Err(failure) => failed.lock().expect("no panic").push(failure),
                    }
                }
            });
        }
    });
    std::panic::set_hook(hook);
    let failed = failed.into_inner()?;
    ensure!(failed.is_empty(), "{}", failed.join("\n\n"));
    Ok(passed.into_inner()?)
}

/// Whether a host can be tested on this machine; prints why not.
fn can_be_tested(subject: &Subject) -> bool {
    if let Some(missing) = &subject.missing {
        println!("not tested: {}: {missing}", subject.name);
    }
    subject.missing.is_none()
}

/// Tests all that a host has; an error has what failed.
fn test_one(subject: &Subject) -> Result<(), String> {
    if let Some(missing) = &subject.missing {
        return Err(format!("{} cannot be tested here: {missing}", subject.name));
    }
    let began = Instant::now();
    let (mut tested, mut failed) = (0, Vec::new());
    for capability in &CAPABILITIES {
        if (capability.lacks)(subject).is_some() {
            continue;
        }
        tested += 1;
        let test = AssertUnwindSafe(|| (capability.test)(subject));
        if let Err(panic) = catch_unwind(test) {
            let text = panic.downcast_ref::<String>().cloned();
            let text = text.or_else(|| panic.downcast_ref::<&str>().map(|text| (*text).into()));
            failed.push(format!(
                "{}, {}: {}",
                subject.name,
                capability.title,
                text.unwrap_or_default()
            ));
        }
    }
    println!(
        "{:22} {} of {tested} passed, {:.0} s",
        subject.name,
        tested - failed.len(),
        began.elapsed().as_secs_f64()
    );
    match failed.is_empty() {
        true => Ok(()),
        false => Err(failed.join("\n")),
    }
}

/// Returns the table with the rows of tested hosts, and those of the page for others.
fn table(page: &str, tested: &[Subject]) -> Result<String> {
    let mut table = String::from("| host | version |");
    for capability in &CAPABILITIES {
        write!(table, " {} |", capability.title)?;
    }
    table += "\n|---|---|";
    table += &"---|".repeat(CAPABILITIES.len());
    table.push('\n');
    let mut reasons = Vec::new();
    for subject in subject::all() {
        let head = format!("| {} | {} |", subject.title, subject.version);
        let is_tested = tested.iter().any(|tested| tested.name == subject.name);
        let written = page.lines().any(|line| line.starts_with(&head));
        if !is_tested && !written {
            continue;
        }
        table += &head;
        for capability in &CAPABILITIES {
            let lacks = (capability.lacks)(&subject);
            let cell = if lacks.is_none() { "yes" } else { "no" };
            write!(table, " {cell} |")?;
            let reason = lacks.map(|why| format!("{}: {why}", capability.title));
            reasons.extend(reason.filter(|reason| !reasons.contains(reason)));
        }
        table.push('\n');
    }
    table.push('\n');
    for reason in reasons {
        writeln!(table, "- {reason}")?;
    }
    Ok(table)
}

/// Puts a table between the markers of the page.
fn with_table(page: &str, table: &str) -> Result<String> {
    let parts = page.split_once(BEGIN);
    let parts = parts.and_then(|(before, rest)| Some((before, rest.split_once(END)?.1)));
    let (before, after) = parts.with_context(|| format!("{PAGE} has no table to replace"))?;
    Ok(format!("{before}{BEGIN}{table}{END}{after}"))
}
