//! A long run of llama-server from source while its model is swapped in every way.
//!
//! Four clients request text all the time. Answers that were computed with one model alone
//! have to be answers that the same server gives, under the same load, when its file never
//! changes. These are compared:
//!
//! * requests with `cache_prompt: false` that began after a swap was confirmed and were
//!   answered before the next one began,
//! * those with `cache_prompt: true` if every slot was emptied since, too.
//!
//! The others overlap with a swap, or go on with keys and values of the other model. They
//! have to succeed, with text in UTF-8 and log-probabilities that are numbers.
//!
//! Everything is on: experts from disk, the trace with routes and saliency, metrics, the page of `top --web`. Another
//! user and hostile clients are beside it: see [`hostile`] and [`page`]. The limit of its memory falls and rises. A second
//! server, in the router mode of llama-server, loads and frees models all the time.
//!
//! Modules, top to bottom:
//!
//! | module | contents |
//! |---|---|
//! | `hostile`, `page`, `router` | another user beside the run; the page; the router mode |
//! | `steps` | what happens to file and server |
//! | `load`, `known` | clients; the answers of each model |
//! | `place`, `vitals`, `options`, `failures` | the folder of the model; what a process holds; how servers are started; what goes wrong |

mod failures;
mod hostile;
mod known;
mod load;
mod options;
mod page;
mod place;
mod router;
mod steps;
mod vitals;

use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Error, Result, bail, ensure};
use serde_json::Value;
use testkit::host::disturb;
use testkit::memory_limit::MemoryLimit;
use testkit::server::Server;

use crate::install::target_folder;
use crate::{cmake, fixtures, llama_cpp};
use failures::Failures;
use hostile::Hostile;
use known::Known;
use load::{CLIENTS, Load, Observation};
use options::options;
use page::Page;
use place::Place;
use steps::{Steps, WIDE};
use vitals::{GROWTH, Vitals};

/// The model and the variant of it. The server is started with the first.
const MODELS: [&str; 2] = ["small-moe.gguf", "small-moe-q8_0.gguf"];
/// Another variant, with other types; its answers are not compared.
const THIRD: &str = "small-moe-mixed.gguf";
/// Answers to each prompt without anything new after which a model's are taken for known.
const QUIET_ANSWERS: usize = 50;
/// How long a model's answers are collected at most, as a part of the time of the run.
const LEARNING: u32 = 4;
/// How often metrics are requested.
const METRICS_EVERY: Duration = Duration::from_millis(500);
/// What the drop-in may warn about: files that are no models, and were made for that.
const EXPECTED_WARNINGS: [&str; 2] = [": ignored: ", ": refused: "];
/// How many answers are looked for again after the run.
const MOST_UNKNOWN: usize = 1000;
/// Collects the answers of the models, runs for so many minutes, prints figures, and fails if
/// anything was not as it has to be.
pub fn run(minutes: u64) -> Result<()> {
    if minutes == 0 {
        bail!("expected a number of minutes");
    }
    llama_cpp::make()?;
    cmake::build_hosts()?;
    let cli = target_folder()?.join("release/llama-sidecar");
    let fixtures = fixtures::make()?;
    let files = MODELS.map(|name| fixtures.join(name));
    let time = Duration::from_secs(minutes * 60);
    let began = Instant::now();

    let mut known = [Known::default(), Known::default()];
    for (model, known) in known.iter_mut().enumerate() {
        let most = time / LEARNING;
        let asked = learn(&files[model], known, most, |learnt, _| {
            learnt >= QUIET_ANSWERS * load::prompts()
        })?;
        println!(
            "{}: {asked} answers under load, {} different ones to {} prompts, in {:.0} s so far",
            MODELS[model],
            known.len(),
            load::prompts(),
            began.elapsed().as_secs_f64()
        );
    }
    let told = (0..load::prompts()).filter(|&prompt| known[0].is_told_from(&known[1], prompt));
    let told = told.count();
    println!("{told} prompts tell the models apart in each answer");
    ensure!(told > 0, "expected prompts that tell the models apart");

    let failures = Failures::default();
    let unknown = Mutex::new(Vec::new());
    let deadline = Instant::now() + time;
    let used = [&files[0], &files[1], &fixtures.join(THIRD)];
    let figures = soak(used, &cli, &known, deadline, &failures, &unknown)?;
    let unknown = unknown.into_inner().expect("no panic");
    let found_later = look_again(&files, &mut known, unknown, time / LEARNING, &failures)?;

    println!("\n== soak of {minutes} minutes");
    for (name, value) in figures {
        println!("{name:44} {value}");
    }
    println!("{:44} {found_later}", "of those, collected after the run");
    println!(
        "{:44} {told} of {}",
        "prompts that tell the models apart",
        load::prompts()
    );
    failures.tell()
}

/// Runs the clients on a server whose file does not change, until `enough` accepts the
/// answers without anything new and of what is known, or the time is over. Returns how many
/// answers there were.
fn learn(
    file: &Path,
    known: &mut Known,
    most: Duration,
    enough: impl Fn(usize, &Known) -> bool,
) -> Result<u64> {
    let outputs = tempfile::tempdir()?;
    let server = Server::start(file, &options(&outputs.path().join(""), CLIENTS));
    let load = Load::new(0);
    let learnt = Mutex::new((0, known));
    let failures = Failures::default();
    let began = Instant::now();
    with_clients(
        &server,
        &load,
        &failures,
        &|seen| {
            let mut learnt = learnt.lock().expect("no panic");
            learnt.0 = match learnt.1.learn(seen.prompt, &seen.answer) {
                true => 0,
                false => learnt.0 + 1,
            };
        },
        || {
            while !load.is_over() && began.elapsed() < most {
                let learnt = learnt.lock().expect("no panic");
                if enough(learnt.0, learnt.1) {
                    break;
                }
                drop(learnt);
                std::thread::sleep(Duration::from_millis(100));
            }
            Ok(())
        },
    )?;
    failures.tell()?;
    ensure!(server.end().0.success(), "the server ends with an error");
    Ok(load.answered.load(Ordering::Relaxed))
}

/// Runs the clients while something else is done.
fn with_clients<T>(
    server: &Server,
    load: &Load,
    failures: &Failures,
    observe: &(dyn Fn(Observation) + Sync),
    work: impl FnOnce() -> Result<T>,
) -> Result<T> {
    std::thread::scope(|scope| {
        for client in 1..=CLIENTS as u64 {
            scope.spawn(move || {
                if let Err(error) = load.client(server, client, observe) {
                    failures.add("requests that failed", error);
                    load.end();
                }
            });
        }
        let done = work();
        load.end();
        done
    })
}

type Figures = Vec<(String, String)>;

/// The run itself: swaps under load until the deadline.
fn soak(
    files: [&PathBuf; 3],
    cli: &Path,
    known: &[Known; 2],
    deadline: Instant,
    failures: &Failures,
    unknown: &Mutex<Vec<Observation>>,
) -> Result<Figures> {
    let place = Place::new()?;
    place.put(files[0])?;
    let mut hostile = Hostile::new()?;
    let limit = MemoryLimit::new(WIDE);
    let server = Server::start_or_end(
        &place.model(),
        &options(&hostile.outputs().join(""), CLIENTS),
        |command| limit.iter().for_each(|limit| limit.apply(command)),
    );
    let server = server.map_err(Error::msg)?;
    let page = Page::start(cli, server.socket())?;
    hostile.plant(server.id(), &place.model())?;
    let load = Load::new(0);
    let compared = Mutex::new([0u64; 2]);
    let observe = |seen: Observation| {
        compared.lock().expect("no panic")[seen.model] += 1;
        if !known[seen.model].contains(seen.prompt, &seen.answer) {
            let mut unknown = unknown.lock().expect("no panic");
            match unknown.len() < MOST_UNKNOWN {
                true => unknown.push(seen),
                false => failures.add("answers not known", "more than can be looked for again"),
            }
        }
    };
    let mut steps = Steps::new(files, cli, &place, &limit, &server, &load, failures);
    let mut rests: Vec<Vitals> = Vec::new();
    let work = || {
        loop {
            steps.cycle()?;
            rests.push(load.at_rest(|| rest(&server, rests.first()))?);
            // Fewer have no first and last third after what is settled.
            if load.is_over() || (Instant::now() >= deadline && rests.len() >= 3) {
                return Ok(());
            }
        }
    };
    let (over, connections, polled) =
        (AtomicBool::new(false), AtomicU64::new(0), AtomicU64::new(0));
    let outputs = hostile.outputs();
    let (ran, loads, samples) = std::thread::scope(|scope| {
        let over = &over;
        scope.spawn(|| {
            disturb(
                server.socket(),
                hostile::CLIENTS,
                hostile::PAUSE,
                over,
                &connections,
            )
        });
        scope.spawn(|| {
            while !over.load(Ordering::Relaxed) {
                let text = server.control("metrics")["text"].to_string();
                if !text.contains("llama_sidecar_expert_activations") {
                    failures.add("metrics", text);
                }
                polled.fetch_add(1, Ordering::Relaxed);
                std::thread::sleep(METRICS_EVERY);
            }
        });
        scope.spawn(|| page.disturb(over));
        let samples = scope.spawn(|| page.watch(over, failures));
        let router = scope.spawn(|| {
            let models = [files[0], files[1]].map(|file| file.as_path());
            router::run(&models, &outputs, over, failures)
        });
        let ran = with_clients(&server, &load, failures, &observe, work);
        over.store(true, Ordering::Relaxed);
        let [router, samples] = [router, samples].map(|thread| thread.join().expect("no panic"));
        (ran, router, samples)
    });
    let (loads, samples) = (loads?, samples?);
    if let Err(error) = ran {
        println!("{}", server.log().join("\n"));
        return Err(error);
    }
    let status = server.control("status");
    let metrics = server.control("metrics");
    let mut figures = steps.figures();
    drop(steps);
    figures.extend([
        (
            "models loaded and freed by the router".into(),
            loads.to_string(),
        ),
        (
            "connections of hostile clients".into(),
            connections.into_inner().to_string(),
        ),
        ("polls of metrics".into(), polled.into_inner().to_string()),
        ("samples of the page".into(), samples.to_string()),
        (
            "layers whose experts were streamed".into(),
            status["models"][0]["stream"]["layers"].to_string(),
        ),
        ("tokens in the trace".into(), traced(&server).to_string()),
    ]);
    flat(&rests, failures);
    let (ended, log) = server.end();
    // After the last output is written.
    let planted = (
        "links and FIFOs of another user".into(),
        hostile.end(failures)?,
    );
    figures.push(planted);
    if !ended.success() {
        failures.add(
            "the end of the server",
            format!("expected 0, found {ended}"),
        );
    }
    let warnings = read_log(&log, failures);

    let count = |value: &AtomicU64| value.load(Ordering::Relaxed).to_string();
    let compared = compared.into_inner().expect("no panic");
    let (first, last) = (rests[0], rests[rests.len() - 1]);
    let mib = |bytes: u64| bytes >> 20;
    let of = |what: &str, first: u64, last: u64, unit: &str| {
        (
            format!("{what}, first and last cycle"),
            format!("{first} -> {last}{unit}"),
        )
    };
    figures.extend([
        ("requests answered".into(), count(&load.answered)),
        ("requests cancelled".into(), count(&load.cancelled)),
        (
            "answers compared, with each model".into(),
            format!("{} + {}", compared[0], compared[1]),
        ),
        (
            "answers that overlap a swap".into(),
            count(&load.overlapping),
        ),
        ("cycles".into(), rests.len().to_string()),
        ("switches".into(), status["generation"].to_string()),
        ("evaluations".into(), status["evaluations"].to_string()),
        (
            "longest pause".into(),
            format!("{} us", status["longest_pause_us"]),
        ),
        (
            "pauses, up to so many seconds".into(),
            pauses(metrics["text"].as_str().unwrap_or_default()),
        ),
        (
            "files and reloads not taken, by cause".into(),
            status["failures"].to_string(),
        ),
        of(
            "resident memory",
            mib(first.resident),
            mib(last.resident),
            " MiB",
        ),
        of(
            "anonymous memory",
            mib(first.anonymous),
            mib(last.anonymous),
            " MiB",
        ),
        of(
            "descriptors",
            first.descriptors as u64,
            last.descriptors as u64,
            "",
        ),
        of("threads", first.threads as u64, last.threads as u64, ""),
        ("warnings, all about bad files".into(), warnings.to_string()),
        (
            "answers not known when they came".into(),
            unknown.lock().expect("no panic").len().to_string(),
        ),
    ]);
    Ok(figures)
}

/// Returns the tokens that the trace counted.
fn traced(server: &Server) -> Value {
    server.control("trace")["traces"][0]["tokens"].clone()
}

/// The histogram of pauses, from the figures of the drop-in.
fn pauses(metrics: &str) -> String {
    let bucket = |line: &str| {
        let line = line.strip_prefix("llama_sidecar_pause_seconds_bucket{le=\"")?;
        let (bound, count) = line.split_once("\"} ")?;
        Some(format!("{bound}: {count}"))
    };
    let buckets: Vec<String> = metrics.lines().filter_map(bucket).collect();
    buckets.join(", ")
}

/// What the server holds when no request is under way. Connections that clients gave up
/// are noticed a moment later.
fn rest(server: &Server, first: Option<&Vitals>) -> Result<Vitals> {
    let deadline = Instant::now() + Duration::from_secs(5);
    loop {
        let now = Vitals::of(server.id())?;
        let settled = first.is_some_and(|first| {
            now.descriptors <= first.descriptors && now.threads <= first.threads
        });
        if settled || Instant::now() >= deadline {
            return Ok(now);
        }
        std::thread::sleep(Duration::from_millis(50));
    }
}

/// Fails what grew.
fn flat(rests: &[Vitals], failures: &Failures) {
    let third = rests.len().div_ceil(3);
    let median = |part: &[Vitals]| {
        let mut values: Vec<u64> = part.iter().map(|rest| rest.anonymous).collect();
        values.sort_unstable();
        values[values.len() / 2]
    };
    // The first cycle meets every buffer for the first time.
    let early = median(&rests[1..(1 + third).min(rests.len())]);
    let late = median(&rests[rests.len() - third..]);
    if late > early + GROWTH {
        failures.add(
            "memory",
            format!(
                "{early} bytes after the first cycles, {late} after the last, {GROWTH} more at most"
            ),
        );
    }
    let (first, last) = (rests[0], rests[rests.len() - 1]);
    // Each connection of a hostile client has a descriptor and a thread, at either moment.
    if last.descriptors > first.descriptors + hostile::CLIENTS {
        failures.add(
            "descriptors",
            format!("{} -> {}", first.descriptors, last.descriptors),
        );
    }
    if last.threads > first.threads + hostile::CLIENTS {
        failures.add("threads", format!("{} -> {}", first.threads, last.threads));
    }
}

/// Fails errors and unexpected warnings; returns how many expected ones there are.
fn read_log(log: &[String], failures: &Failures) -> usize {
    let mut expected = 0;
    for line in log {
        // llama.cpp's own lines: a time, a letter, and the rest.
        let of_server = line.split(' ').nth(1) == Some("E");
        if of_server || line.contains("llama-sidecar: error") {
            failures.add("errors in the log", line);
        } else if line.contains("llama-sidecar: warn") {
            match EXPECTED_WARNINGS.iter().any(|part| line.contains(part)) {
                true => expected += 1,
                false => failures.add("warnings in the log", line),
            }
        }
    }
    expected
}

/// Collects more answers from servers without swaps until every answer that was not known is, and
/// fails those that are not; returns how many were found.
fn look_again(
    files: &[PathBuf; 2],
    known: &mut [Known; 2],
    unknown: Vec<Observation>,
    most: Duration,
    failures: &Failures,
) -> Result<usize> {
    let mut found = 0;
    for (model, known) in known.iter_mut().enumerate() {
        let mine = unknown.iter().filter(|seen| seen.model == model);
        let mine: Vec<&Observation> = mine.collect();
        let is_known =
            |known: &Known, seen: &Observation| known.contains(seen.prompt, &seen.answer);
        if mine.iter().all(|seen| is_known(known, seen)) {
            continue;
        }
        println!(
            "{}: looking for {} answers again",
            MODELS[model],
            mine.len()
        );
        learn(&files[model], known, 2 * most, |_, known| {
            mine.iter().all(|seen| is_known(known, seen))
        })?;
        for seen in mine {
            match is_known(known, seen) {
                true => found += 1,
                false => failures.add(
                    "answers that no server gives without swaps",
                    format!("{}: {:?}: {:?}", MODELS[model], seen.request, seen.answer),
                ),
            }
        }
    }
    Ok(found)
}
