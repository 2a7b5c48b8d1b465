//! The share of expert uses that slots of a layer hit, for routes of real models: the policy of
//! post-fetch with several half-lives, an LRU, an LFU, and the best possible choice.
//!
//! Run it with `cargo xtask bench routes [FILE ...]`. A file is one of `--expert-trace-routes
//! FILE.routes`, or a CSV file of BigMoeOnEdge (`--route-trace`). Without files, those in the folder
//! `routes` of the cache (`LLAMA_SIDECAR_CACHE`) are read.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::{fs, io};

use sidecar_core::fetch::ExpertCache;
use sidecar_core::trace::{Ids, NOT_ROUTED, RouteReader, RouteRecord};
use testkit::caches::{best_hits, lfu_hits, lru_hits};
use testkit::fixtures::cache;

/// Half-lives in uses of any expert of the layer; the first one makes the policy an LRU.
const HALF_LIVES: [u32; 6] = [1, 4, 16, 32, 64, 256];
/// Slots of a layer, in percent of its experts.
const SLOTS: [usize; 3] = [10, 25, 50];

/// The experts of each token of a layer.
type Tokens = Vec<Vec<u32>>;

/// Routes of one model.
struct Routes {
    model: String,
    experts: u32,
    /// By the number of the layer.
    layers: BTreeMap<u32, Tokens>,
}

fn main() {
    let arguments = std::env::args().skip(1);
    let mut files: Vec<PathBuf> = arguments
        .filter(|argument| argument != "--bench")
        .map(PathBuf::from)
        .collect();
    let folder = cache().join("routes");
    if files.is_empty() {
        let entries = fs::read_dir(&folder).into_iter().flatten();
        files.extend(entries.map(|entry| entry.expect("a readable folder").path()));
        files.sort();
    }
    if files.is_empty() {
        println!(
            "Not measured: no routes are in {}, and no file was given.",
            folder.display()
        );
    }
    for file in &files {
        print(&read(file));
    }
}

fn read(file: &Path) -> Routes {
    let is_csv = file.extension().is_some_and(|extension| extension == "csv");
    let routes = match is_csv {
        true => read_csv(file),
        false => read_compact(file),
    };
    let routes = routes.unwrap_or_else(|error| panic!("{}: {error}", file.display()));
    assert!(
        routes.experts > 0 && !routes.layers.is_empty(),
        "{} has no routes",
        file.display()
    );
    routes
}

/// Reads a file of `--expert-trace-routes`.
fn read_compact(file: &Path) -> io::Result<Routes> {
    let mut reader = RouteReader::open(file)?;
    let layout = reader.layout().clone();
    let mut layers: BTreeMap<u32, Tokens> = BTreeMap::new();
    while let Some(record) = reader.read()? {
        let RouteRecord::Rows { experts, .. } = record else {
            continue;
        };
        for (at, used) in experts.chunks_exact(layout.top_k()).enumerate() {
            let used = used.iter().filter(|&&id| id != NOT_ROUTED);
            let token: Vec<u32> = used.map(|&id| id as u32).collect();
            if !token.is_empty() {
                let (layer, _) = layout.layers()[at % layout.layers().len()];
                layers.entry(layer).or_default().push(token);
            }
        }
    }
    let sizes = layout.layers().iter().map(|&(_, experts)| experts);
    Ok(Routes {
        model: layout.model().to_owned(),
        experts: sizes.max().unwrap_or(0),
        layers,
    })
}

/// Reads a CSV file of BigMoeOnEdge: comments with the model, a line with names of columns
/// (`turn,phase,step,layer,slot,expert,...`), and a line for each use.
fn read_csv(file: &Path) -> io::Result<Routes> {
    let text = fs::read_to_string(file)?;
    let field = |name: &str| {
        let comments = text.lines().filter(|line| line.starts_with('#'));
        let mut words = comments.flat_map(str::split_whitespace);
        words.find_map(|word| word.strip_prefix(name).map(str::to_owned))
    };
    let mut layers: BTreeMap<u32, Tokens> = BTreeMap::new();
    let mut last = None;
    for line in text.lines() {
        let numbers: Vec<u32> = line
            .split(',')
            .map_while(|word| word.parse().ok())
            .collect();
        let &[turn, phase, step, layer, _, expert, ..] = numbers.as_slice() else {
            continue;
        };
        let tokens = layers.entry(layer).or_default();
        if last.replace((turn, phase, step, layer)) != Some((turn, phase, step, layer)) {
            tokens.push(Vec::new());
        }
        tokens.last_mut().expect("one was added").push(expert);
    }
    let model = field("model=").unwrap_or_default();
    Ok(Routes {
        model: model.rsplit('/').next().unwrap_or_default().to_owned(),
        experts: field("n_expert=").map_or(0, |count| count.parse().unwrap_or(0)),
        layers,
    })
}

/// Returns the hits of the policy of post-fetch.
fn our_hits(tokens: &Tokens, experts: u32, slots: usize, half_life: u32) -> u64 {
    let mut cache = ExpertCache::new(experts, slots as u32, half_life);
    let (mut loads, mut places) = (Vec::new(), Vec::new());
    let hits = tokens.iter().map(|token| {
        let bytes: Vec<u8> = token
            .iter()
            .flat_map(|id| (*id as i32).to_ne_bytes())
            .collect();
        let ids = Ids::packed(&bytes, token.len());
        loads.clear();
        places.clear();
        let found = cache.look_up(&ids, &mut loads, &mut places);
        found.expect("valid ids, and a slot for each") as u64
    });
    hits.sum()
}

fn print(routes: &Routes) {
    let all = || routes.layers.values();
    let uses: usize = all().flatten().map(Vec::len).sum();
    let used = all().flatten().map(Vec::len).max().unwrap_or(0);
    println!(
        "{}: {} layers, {} experts, {used} used; {} tokens:\n",
        routes.model,
        routes.layers.len(),
        routes.experts,
        all().map(Vec::len).max().unwrap_or(0)
    );
    let ours = HALF_LIVES
        .map(|half_life| format!("half-life {half_life}"))
        .join(" | ");
    println!("| slots | LRU | {ours} | LFU | best |");
    println!("|---|---|{}---|---|", "---|".repeat(HALF_LIVES.len()));
    for percent in SLOTS {
        let slots = (routes.experts as usize * percent).div_ceil(100);
        if slots < used {
            println!(
                "| {percent} %: {slots} | {} |",
                ["-"; HALF_LIVES.len() + 3].join(" | ")
            );
            continue;
        }
        let share = |hits: &dyn Fn(&Tokens) -> u64| {
            100.0 * all().map(hits).sum::<u64>() as f64 / uses as f64
        };
        let lru = share(&|tokens| lru_hits(tokens, slots));
        let ours = HALF_LIVES
            .map(|half_life| share(&|tokens| our_hits(tokens, routes.experts, slots, half_life)));
        let lfu = share(&|tokens| lfu_hits(tokens, slots));
        let best = share(&|tokens| best_hits(tokens, slots));
        // Slots replace an expert at each miss, as an LRU does.
        assert_eq!(ours[0], lru, "a half-life of one use is an LRU");
        assert!(
            ours.iter().all(|&ours| ours <= best),
            "no choice has more hits than the best"
        );
        let columns: Vec<String> = [lru]
            .iter()
            .chain(&ours)
            .chain(&[lfu, best])
            .map(|share| format!("{share:.1}"))
            .collect();
        println!("| {percent} %: {slots} | {} |", columns.join(" | "));
    }
    println!();
}
