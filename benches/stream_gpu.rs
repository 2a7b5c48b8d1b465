//! Measures prompts of a model that is larger than memory on an emulated disk, whose experts the program
//! copies to a simulated GPU.
//!
//! Run it with `cargo xtask bench stream_gpu`; `cargo bench --bench stream_gpu -- --quick` is a short form.
//! Each argument `--with=NAME=VALUE,NAME=VALUE` adds a run with these variables of the drop-in. The program is
//! llama-completion, in a control group with a limit of memory. The device sums the bytes of routed experts
//! instead of computing products (`SIM_GGML_COMPUTE=sums`): a wrong byte changes the text.

use std::path::Path;
use std::process::Command;

use testkit::fixtures::large_model;
use testkit::host::preload_library;
use testkit::llama_cpp::llama_cpp;
use testkit::median;
use testkit::memory_limit::MemoryLimit;
use testkit::sim_ggml::SimGgml;
use testkit::slow_disk::{SlowDisk, Speed};

const DISKS: [Speed; 2] = [Speed::new(1000, 1000), Speed::new(100, 2000)];

/// What is measured.
struct Case {
    /// What the table calls it.
    name: &'static str,
    /// Words of the prompt.
    words: usize,
    /// Tokens of the answer.
    tokens: &'static str,
    /// Options of the program.
    options: &'static [&'static str],
    /// The line of the program's log that has the time.
    line: &'static str,
}

impl Case {
    /// A prompt of so many words: about as many tokens.
    const fn prompt(name: &'static str, words: usize) -> Case {
        Case {
            name,
            words,
            tokens: "4",
            options: &[],
            line: "prompt eval time",
        }
    }
}

const CASES: [Case; 3] = [
    Case::prompt("prompt, 80 words", 80),
    // With llama.cpp's own expert cache: slots for an eighth of the experts.
    Case {
        name: "single tokens",
        words: 8,
        tokens: "32",
        options: &["--moe-cache-mib", "380"],
        line: "        eval time",
    },
    Case::prompt("prompt, 512 words", 512),
];

/// The share of the model that fits into memory, in percent.
const MEMORY: u64 = 25;
const ROUNDS: usize = 3;

fn main() {
    let model = large_model();
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let quick = arguments.iter().any(|argument| argument == "--quick");
    let (disks, cases) = match quick {
        true => (&DISKS[..1], &CASES[..2]),
        false => (&DISKS[..], &CASES[..]),
    };
    let with = arguments.iter().filter_map(|of| of.strip_prefix("--with="));
    let mut ways = vec!["", "LLAMA_EXPERT_STREAM=auto"];
    ways.extend(with);
    let disk = SlowDisk::mount(&model, DISKS[0]);
    let disk = match disk {
        Ok(disk) => disk,
        Err(reason) => return println!("Skipped: {reason}.\n"),
    };
    disk.read_ahead_kb(128).expect("a setting of the disk");
    let limit = std::fs::metadata(&model).expect("a model").len() * MEMORY / 100;
    println!(
        "llama-completion with the experts of the model above in host memory and the rest on a simulated GPU, to which the program copies the experts of a prompt. Memory for {MEMORY} % of the model, nothing in the page cache at the start, 128 KB read-ahead. The time is the program's own; bytes are those of the whole run, with the load. Single tokens are 32 after a short prompt, with llama.cpp's own expert cache of 380 MiB. Medians of {ROUNDS}, alternating; the text that is generated is the same.\n"
    );
    println!("| disk | measured | with | s | ratio | GB read | GB/s | share of the disk |");
    println!("|---|---|---|---|---|---|---|---|");
    for speed in disks {
        disk.set_speed(*speed);
        for case in cases {
            let mut seconds = vec![Vec::new(); ways.len()];
            let mut bytes = vec![0; ways.len()];
            let mut text = None;
            for _ in 0..ROUNDS {
                for (at, way) in ways.iter().enumerate() {
                    disk.drop_cache().expect("no process has mapped the file");
                    let before = disk.counts().bytes;
                    let (took, answer) = measure(&disk.path(), limit, way, case);
                    assert_eq!(*text.get_or_insert_with(|| answer.clone()), answer, "{way}");
                    seconds[at].push(took);
                    bytes[at] = disk.counts().bytes - before;
                }
            }
            let stock = median(&mut seconds[0].clone());
            for (at, way) in ways.iter().enumerate() {
                let took = median(&mut seconds[at]);
                let gb = bytes[at] as f64 / 1e9;
                println!(
                    "| {:.1} ms, {:.0} GB/s | {} | {} | {took:.2} | **{:.2}x** | {gb:.2} | {:.2} | {:.0} % |",
                    speed.latency.as_secs_f64() * 1e3,
                    speed.bandwidth as f64 / 1e9,
                    case.name,
                    if way.is_empty() { "stock" } else { way },
                    stock / took,
                    gb / took,
                    100.0 * gb * 1e9 / took / speed.bandwidth as f64,
                );
            }
        }
    }
}

/// Returns a text of different words of a syllable.
fn text(words: usize) -> String {
    let (first, last) = (b"bcdfghjklmnprstvwz", b"aeiouy");
    let word = |at: usize| [first[at % first.len()], last[at / 3 % last.len()]].map(char::from);
    let words = (0..words).map(|at| word(at * 7).iter().collect());
    words.collect::<Vec<String>>().join(" ")
}

/// Returns the time of the program in seconds without its load, and what it wrote.
fn measure(model: &Path, limit: u64, way: &str, case: &Case) -> (f64, Vec<u8>) {
    let group = MemoryLimit::new(limit).unwrap_or_else(|reason| panic!("{reason}"));
    let sim = SimGgml::new(&[("SIM_GGML_COMPUTE", "sums")]);
    let prompt = text(case.words);
    let mut command = Command::new(llama_cpp("llama-completion"));
    let options = "--device SIM0 -ngl 99 -cmoe -c 2048 --temp 0 -no-cnv --no-warmup -t 2 -m";
    command.args(options.split(' ')).arg(model);
    command.args(["-p", &prompt, "-n", case.tokens]);
    command.args(case.options);
    if !way.is_empty() {
        command.env("LD_PRELOAD", preload_library());
        command.env("LLAMA_SIDECAR_LOG", "warn");
        let variables = way.split(',').filter_map(|of| of.split_once('='));
        command.envs(variables);
    }
    sim.prepare(&mut command);
    group.apply(&mut command);
    let output = command.output().expect("it ends");
    let log = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success(), "{log}");
    let line = log.lines().find(|line| line.contains(case.line));
    let milliseconds = line.and_then(|line| {
        line.split('=')
            .nth(1)?
            .trim()
            .split(' ')
            .next()?
            .parse::<f64>()
            .ok()
    });
    let took = milliseconds
        .filter(|ms| *ms > 0.0)
        .unwrap_or_else(|| panic!("{log}"));
    (took / 1e3, output.stdout)
}
