//! Decoding in an unmodified host with experts that stay on a device, in virtual time, over routes
//! of a published locality.
//!
//! Run it with `cargo xtask bench expert_cache`; `cargo bench --bench expert_cache -- x4` has only the
//! machines whose names contain a word, and `--own-cache` only the tables of llama.cpp's own cache.

mod simulated;

use std::fmt::Write;
use std::path::Path;

use sidecar_core::fetch::ExpertCache;
use sidecar_core::gguf::{Access, GgufFile};
use sidecar_core::trace::{Ids, ModelMeta};
use simulated::{EXPERTS, LAYERS, MACHINES, Placed, Variables, models, placed, simulation, start};
use testkit::fixtures::fixture;
use testkit::host::{DropIn, Host, Program};
use testkit::sim_ggml::Report;

/// Tokens before the measurement, in which the slots fill.
const BEFORE: usize = 60;
/// Tokens that are measured.
const COUNTED: usize = 40;

const STOCK: Variables = &[];
const LOCKED: (&str, &str) = ("LLAMA_SIDECAR_PAGE_LOCK", "1");
const AUTO: (&str, &str) = ("LLAMA_POSTFETCH_CACHE_MISSES", "auto");
const ONE_UPLOAD: (&str, &str) = ("LLAMA_POSTFETCH_CACHE_UPLOADS", "1");
const EACH_TIME: Variables = &[("LLAMA_POSTFETCH_MODE", "all"), LOCKED];

/// The share of hits of an LRU, by the share of the experts that it holds.
type Locality = &'static [(f64, f64)];

/// By name. Between the points, the share is linear.
const LOCALITIES: [(&str, Locality); 2] = [
    // The author's figures of llama.cpp pull request 27861, for 64 and 128 of 512 experts.
    ("67 % at 1/8, 81 % at 1/4", &[(0.125, 0.67), (0.25, 0.81)]),
    // Of tetherto/qvac-fabric-llm.cpp pull request 237.
    ("78 % at 1/10", &[(0.1, 0.778)]),
];

/// Routes of a model: by layer, token after token.
type Routes = Vec<Vec<i32>>;

/// What is known of a model.
struct Shape {
    experts: u32,
    used: usize,
    /// Bytes of an expert in all matrices of its layer.
    expert_bytes: u64,
}

/// Makes routes: each expert is chosen by its place in the order of the last use.
fn routes(model: &Shape, locality: Locality, tokens: usize) -> Routes {
    let mut state = 88172645463325252u64;
    let mut random = move || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 11) as f64 / (1u64 << 53) as f64
    };
    let place = |hits: f64| {
        let (mut from, mut of_from) = (0.0, 0.0);
        for &(to, of_to) in locality.iter().chain(&[(1.0, 1.0)]) {
            if hits < of_to {
                return from + (to - from) * (hits - of_from) / (of_to - of_from);
            }
            (from, of_from) = (to, of_to);
        }
        1.0
    };
    let layer = |_| {
        let mut order: Vec<i32> = (0..model.experts as i32).collect();
        let mut all = Vec::new();
        for _ in 0..tokens {
            let mut chosen: Vec<i32> = Vec::new();
            let used = model.used;
            for number in 0..used {
                // One of each part of the distribution: places are seldom chosen twice.
                let hits = (number as f64 + random()) / used as f64;
                let mut at = (place(hits) * order.len() as f64) as usize % order.len();
                while chosen.contains(&order[at]) {
                    at = (at + 1) % order.len();
                }
                chosen.push(order[at]);
            }
            order.retain(|expert| !chosen.contains(expert));
            order.splice(..0, chosen.iter().rev().copied());
            all.extend(chosen);
        }
        all
    };
    (0..LAYERS).map(layer).collect()
}

/// Returns the routes of a text that an unmodified host writes with a model.
fn routes_of_text(path: &Path, model: &Shape) -> Routes {
    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join("routes.csv");
    let text = file.to_str().expect("UTF-8").to_owned();
    let drop_in = DropIn::On(vec![
        ("LLAMA_EXPERT_TRACE_ROUTES", text),
        ("LLAMA_SIDECAR_LOG", "warn".into()),
    ]);
    let mut host = Host::start(Program::Python, path, &drop_in);
    host.ask(&format!("text {}", ALL));
    assert_eq!(host.end(), Some(0));
    let mut routes = Routes::new();
    for line in std::fs::read_to_string(&file).expect("routes").lines() {
        let pair = line.split_once(',').expect("LAYER,EXPERT");
        let Ok(layer) = pair.0.parse::<usize>() else {
            continue;
        };
        routes.resize(routes.len().max(layer + 1), Vec::new());
        routes[layer].push(pair.1.parse().expect("an expert"));
    }
    // The first layers have the whole prompt, and the last one only its last token.
    for layer in &mut routes {
        let before = layer.len() - ALL * model.used;
        layer.drain(..before);
    }
    routes
}

/// Returns the hits of the last tokens of so many, by slots that are empty before the first. With
/// `uploads`, the CPU computes what has no slot from the second token on.
fn expected_hits(
    model: &Shape,
    routes: &Routes,
    slots: u32,
    tokens: std::ops::Range<usize>,
    uploads: Option<usize>,
) -> u64 {
    let used = model.used;
    let mut hits = 0;
    for layer in routes {
        let mut cache = ExpertCache::new(model.experts, slots, 1);
        for token in tokens.clone() {
            let ids = &layer[token * used..][..used];
            let bytes: Vec<u8> = ids.iter().flat_map(|id| id.to_ne_bytes()).collect();
            let ids = Ids::packed(&bytes, used);
            let (loads, found) = (&mut Vec::new(), &mut Vec::new());
            let found = match uploads.filter(|_| token > tokens.start) {
                Some(most) => cache.look_up_now(&ids, most, loads, found, &mut Vec::new()),
                None => cache.look_up(&ids, loads, found),
            };
            hits += found.expect("valid ids") as u64;
        }
    }
    hits
}

/// Texts that are written before the measurement: a method is chosen in the first ones.
const TEXTS: usize = 3;
/// Tokens of the longest run.
const ALL: usize = TEXTS * BEFORE + COUNTED;

/// What a run took for a token.
struct Token {
    /// Milliseconds.
    time: f64,
    /// Milliseconds of the products of experts on the device.
    products: f64,
    /// Milliseconds of the bytes on the link.
    link: f64,
    /// The share of experts that were on the device.
    hits: f64,
}

/// The host on llama.cpp from source; with `mib`, with its own cache of experts.
fn from_source(mib: Option<&str>) -> Placed {
    let mut all = placed(EXPERTS, 64);
    all.program = Program::PythonExpertsOnCpuFromSource;
    all.options
        .extend(mib.map(|mib| format!("{OWN_CACHE}{mib}")));
    all
}

const OWN_CACHE: &str = "own-cache=";

/// Decodes with these routes, at speeds of a CPU and a link in GB/s.
fn decode(
    model: &Shape,
    (path, routes, slots): (&Path, &Routes, u32),
    (cpu, link): (f64, f64),
    host: &Placed,
    variables: &[(&'static str, &str)],
) -> Token {
    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join("routes");
    let mut lines = String::new();
    for (layer, experts) in routes.iter().enumerate() {
        for expert in experts {
            let _ = writeln!(lines, "{layer},{expert}");
        }
    }
    std::fs::write(&file, lines).expect("written");
    let mut on_cpu = false;
    let mut settings = vec![("SIM_GGML_ROUTES", file.to_str().expect("UTF-8"))];
    let is_auto = variables.contains(&AUTO);
    if is_auto {
        settings.push(("SIM_GGML_CLOCK", "100"));
    }
    let sim = simulation(cpu, link, &settings);
    let has_own_cache = host.options.iter().any(|of| of.starts_with(OWN_CACHE));
    let mut host = start(path, &sim, host, variables);
    let texts = if is_auto || has_own_cache { TEXTS } else { 1 };
    for _ in 0..texts {
        host.ask("prompt 1");
        host.ask(&format!("hashes {}", BEFORE - 1));
    }
    let before = sim.report_now(&mut host);
    host.ask(&format!("hashes {COUNTED}"));
    let after = sim.report_now(&mut host);
    let mut hits = 0.0;
    if !variables.is_empty() && !is_auto && !has_own_cache {
        let figures = &host.control("status")["post_fetch"];
        let count = |name: &str| figures[name].as_u64().expect("a number");
        let looked_up = count("cache_hits") + count("cache_misses");
        let tokens = looked_up as usize / routes.len() / model.used;
        if tokens > 0 {
            assert_eq!(count("cache_slots"), u64::from(slots));
            on_cpu = count("cache_on_cpu") > 0;
            let uploads = variables.iter().find(|of| of.0.ends_with("_UPLOADS"));
            let uploads = uploads.and_then(|of| of.1.parse().ok());
            let all = BEFORE + COUNTED;
            let uploads = uploads.filter(|_| on_cpu);
            let expected = expected_hits(model, routes, slots, all - tokens..all, uploads);
            assert_eq!(count("cache_hits"), expected, "{figures}");
            hits = expected as f64 / looked_up as f64;
        }
    }
    assert_eq!(host.end(), Some(0));
    // Where nothing is computed, the device knows no slots, and may read those that are written.
    if !on_cpu && !is_auto {
        sim.report().assert_ordered();
    }
    let time = |report: &Report| report.threads[0].time_ns;
    let bytes = |report: &Report| report.first().link.to_device.bytes;
    let each = COUNTED as f64 * 1e6;
    let products = after.products.iter().skip(before.products.len());
    Token {
        time: (time(&after) - time(&before)) as f64 / each,
        products: products.map(|of| of.end_ns - of.start_ns).sum::<u64>() as f64 / each,
        link: (bytes(&after) - bytes(&before)) as f64 / link / each,
        hits,
    }
}

/// Prints a table with a row for each machine.
fn table(title: &str, model: &Shape, (path, routes, slots): (&Path, &Routes, u32)) {
    println!("{title}:\n");
    println!(
        "| machine | stock, on the CPU | copied each time | slots | bound | time / bound | misses on the CPU, 1 upload | 2 uploads | auto | fastest / auto |"
    );
    println!("|---|---|---|---|---|---|---|---|---|---|");
    let bytes = u64::from(slots) * model.expert_bytes * routes.len() as u64;
    let mib = bytes.div_ceil(1 << 20).to_string();
    let cached = |misses, uploads| {
        [
            ("LLAMA_POSTFETCH_CACHE_MB", mib.as_str()),
            ("LLAMA_POSTFETCH_CACHE_MISSES", misses),
            ("LLAMA_POSTFETCH_CACHE_UPLOADS", uploads),
            LOCKED,
        ]
    };
    let from = (path, routes, slots);
    let host = placed(EXPERTS, 64);
    for (machine, _, cpu, link) in machines() {
        let decode = |variables: &[_]| decode(model, from, (cpu, link), &host, variables);
        let stock = decode(STOCK).time;
        let each = decode(EACH_TIME).time;
        let token = decode(&cached("fetch", "0"));
        let bound = token.link.max(token.products);
        let beside = ["1", "2"].map(|uploads| decode(&cached("cpu", uploads)));
        let chosen = decode(&cached("auto", "1")).time;
        let fastest = stock.min(token.time).min(beside[0].time);
        let beside = beside.map(|of| {
            let gain = stock / of.time;
            format!("{:.2} ({gain:.2}), {:.1} %", of.time, 100.0 * of.hits)
        });
        println!(
            "| {machine} | {stock:.2} | {each:.2} ({:.2}) | {:.2} ({:.2}), {:.1} % | {bound:.2} | {:.2} | {} | {} | {chosen:.2} ({:.2}) | {:.2} |",
            stock / each,
            token.time,
            stock / token.time,
            100.0 * token.hits,
            token.time / bound,
            beside[0],
            beside[1],
            stock / chosen,
            fastest / chosen,
        );
    }
    println!();
}

/// The machines, or those whose names contain a word of the command line.
fn machines() -> impl Iterator<Item = (&'static str, f64, f64, f64)> {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<String> = words
        .into_iter()
        .filter(|of| !of.starts_with('-'))
        .collect();
    MACHINES.into_iter().filter(move |machine| {
        words.is_empty() || words.iter().any(|word| machine.0.contains(word))
    })
}

/// Prints a table of llama.cpp's own cache with as much memory as the slots, all on its libraries.
fn table_of_own_cache(title: &str, model: &Shape, (path, routes, slots): (&Path, &Routes, u32)) {
    println!("{title}, beside llama.cpp's own cache:\n");
    println!(
        "| machine | stock, on the CPU | its cache | its cache, page-locked | auto | its cache / auto | page-locked / auto | stock / auto |"
    );
    println!("|---|---|---|---|---|---|---|---|");
    let of_token = (model.used * routes.len()) as f64 * model.expert_bytes as f64;
    let mib = (u64::from(slots) * model.expert_bytes * routes.len() as u64).div_ceil(1 << 20);
    let mib = mib.to_string();
    let slots_of_ours = [
        ("LLAMA_POSTFETCH_CACHE_MB", mib.as_str()),
        AUTO,
        ONE_UPLOAD,
        LOCKED,
    ];
    for (machine, _, cpu, link) in machines() {
        let decode = |mib: Option<&str>, variables: &[_]| {
            let from = (path, routes, slots);
            decode(model, from, (cpu, link), &from_source(mib), variables)
        };
        let stock = decode(None, STOCK).time;
        let [own, locked] = [STOCK, &[LOCKED]].map(|of| decode(Some(&mib), of));
        let auto = decode(None, &slots_of_ours).time;
        // What its cache copies are misses.
        let shown = |token: &Token| {
            let (gain, misses) = (stock / token.time, token.link * link * 1e6 / of_token);
            format!(
                "{:.2} ({gain:.2}), {:.1} %",
                token.time,
                100.0 * (1.0 - misses)
            )
        };
        println!(
            "| {machine} | {stock:.2} | {} | {} | {auto:.2} | {:.2} | {:.2} | {:.2} |",
            shown(&own),
            shown(&locked),
            own.time / auto,
            locked.time / auto,
            stock / auto,
        );
    }
    println!();
}

fn main() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("model.gguf");
    let only_own_cache = std::env::args().any(|argument| argument == "--own-cache");
    println!("Virtual time of a token, ms; in brackets the gain over stock; the share of hits.\n");
    let [gpt_oss, qwen, _] = models();
    for (name, model) in [gpt_oss, qwen] {
        model.file().write_sparse(&path).expect("a file with holes");
        let shape = Shape {
            experts: model.experts as u32,
            used: model.used as usize,
            expert_bytes: 3 * model.expert_bytes() / model.experts as u64,
        };
        let slots = shape.experts / 10 + 1;
        for (locality_name, locality) in LOCALITIES {
            let routes = routes(&shape, locality, ALL);
            let title = format!("{name}, an LRU hits {locality_name} of the experts");
            if !only_own_cache {
                table(&title, &shape, (&path, &routes, slots));
            }
            table_of_own_cache(&title, &shape, (&path, &routes, slots));
        }
    }
    if only_own_cache {
        return;
    }
    let path = fixture("moe.gguf");
    let file = GgufFile::open(&path, Access::Map).expect("a model");
    let about = ModelMeta::of([&file]);
    let shape = Shape {
        experts: 8,
        used: about.experts_used as usize,
        expert_bytes: about.expert_bytes[&0],
    };
    let routes = routes_of_text(&path, &shape);
    for slots in [2, 4, 6] {
        let title = format!("SmolLM2 with 8 experts, {slots} slots, routes of a text");
        table(&title, &shape, (&path, &routes, slots));
    }
}
