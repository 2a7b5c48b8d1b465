//! Measures the cost of counting in nanoseconds per activation, against a mutex and two hash maps,
//! and the cost of recording locality.
//!
//! Run it with `cargo xtask bench trace`.

use std::hint::black_box;
use std::time::Instant;

use hashbrown::HashMap;
use parking_lot::Mutex;
use sidecar_core::trace::{ExpertLayout, Ids, ModelMeta, Trace, to_json};
use testkit::median;

const LAYERS: u32 = 48;
const EXPERTS: u32 = 512;
const USED: usize = 10;
/// Tokens of a batch.
const TOKENS: usize = 64;
/// Activations of a round, over all threads.
const ACTIVATIONS: usize = 100_000_000;
const ROUNDS: usize = 5;

/// The design that is compared with: everything behind one lock, by hash.
#[derive(Default)]
struct Hashed {
    maps: Mutex<Maps>,
}

#[derive(Default)]
struct Maps {
    by_expert: HashMap<u64, u64>,
    by_layer: HashMap<(u32, u32), u64>,
}

impl Hashed {
    fn record(&self, layer: u32, expert: u32) {
        let mut maps = self.maps.lock();
        *maps.by_expert.entry(u64::from(expert)).or_insert(0) += 1;
        *maps.by_layer.entry((layer, expert)).or_insert(0) += 1;
    }
}

fn routed(seed: u32) -> Vec<u8> {
    let mut state = seed.wrapping_mul(2_654_435_761).max(1);
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 17;
        state ^= state << 5;
        state % EXPERTS
    };
    (0..TOKENS * USED)
        .flat_map(|_| (next() as i32).to_ne_bytes())
        .collect()
}

fn ids(bytes: &[u8]) -> Ids<'_> {
    Ids::packed(bytes, USED)
}

/// Runs `work` on so many threads and returns nanoseconds per activation.
fn run(threads: usize, activations: usize, work: impl Fn(u32, &[u8]) + Sync) -> f64 {
    let batches = activations / threads / (TOKENS * USED);
    let began = Instant::now();
    std::thread::scope(|scope| {
        for thread in 0..threads {
            let work = &work;
            scope.spawn(move || {
                let bytes = routed(thread as u32 + 1);
                for batch in 0..batches {
                    work(batch as u32 % LAYERS, black_box(&bytes));
                }
            });
        }
    });
    began.elapsed().as_secs_f64() * 1e9 / (batches * threads * TOKENS * USED) as f64
}

fn main() {
    counting();
    locality();
}

fn counting() {
    println!("### Counting activations\n");
    println!(
        "{LAYERS} layers of {EXPERTS} experts, {USED} per token, batches of {TOKENS} tokens; 10^8 activations a round (a tenth of it for the peer), alternating, medians of {ROUNDS}. Peer: one mutex and two hash maps. Limit: a load, an addition and a store in the first-level cache, about 1 ns.\n"
    );
    println!("| threads | peer ns | ours ns | ratio | total exact |");
    println!("|---|---|---|---|---|");
    for threads in [1, 8] {
        let (mut theirs, mut ours) = (Vec::new(), Vec::new());
        let mut exact = true;
        for _ in 0..ROUNDS {
            let hashed = Hashed::default();
            theirs.push(run(threads, ACTIVATIONS / 10, |layer, bytes| {
                for id in bytes.chunks_exact(4) {
                    let id = u32::from_ne_bytes(id.try_into().expect("four bytes"));
                    hashed.record(layer, id);
                }
            }));
            let trace = Trace::new(ExpertLayout::new((0..LAYERS).map(|layer| (layer, EXPERTS))));
            ours.push(run(threads, ACTIVATIONS, |layer, bytes| {
                trace.record_batch(layer as usize, &ids(bytes));
            }));
            let batches = ACTIVATIONS / threads / (TOKENS * USED) * threads;
            exact &= trace.snapshot().activations() == (batches * TOKENS * USED) as u64;
        }
        let (theirs, ours) = (median(&mut theirs), median(&mut ours));
        println!(
            "| {threads} | {theirs:.2} | {ours:.2} | **{:.1}x** | {exact} |",
            theirs / ours
        );
        assert!(exact);
    }
}

/// Different routes of a layer that follow each other, so that no table stays in the first-level
/// cache.
fn many_routes() -> Vec<Vec<u8>> {
    (1..=64).map(routed).collect()
}

fn locality() {
    const TOKENS_IN_ALL: usize = 1_000_000;
    const TOKEN_MS: f64 = 20.0;
    println!("\n### Recording locality\n");
    println!(
        "{LAYERS} layers of {EXPERTS} experts, {USED} per token, evenly at random; {TOKENS_IN_ALL} tokens of each layer, counted with and without locality, token by token and in batches of {TOKENS}. Share: of an evaluation of {TOKEN_MS} ms. Memory: resident, with {TOKENS_IN_ALL} tokens recorded. The write of a trace is the computation of the best possible hits, and the text.\n"
    );
    println!("| batch | counts ns | with locality ns | share of a token | memory MB | write ms |");
    println!("|---|---|---|---|---|---|");
    let layout = || ExpertLayout::new((0..LAYERS).map(|layer| (layer, EXPERTS)));
    let routes = many_routes();
    let before = resident();
    for tokens in [1, TOKENS] {
        let measure = |trace: &Trace| {
            let began = Instant::now();
            for batch in 0..TOKENS_IN_ALL / tokens {
                let bytes = &routes[batch % routes.len()];
                // Each token has its turn as a batch of one.
                let skip = batch * tokens / routes.len() % (TOKENS + 1 - tokens);
                let bytes = &bytes[4 * USED * skip..][..4 * USED * tokens];
                for layer in 0..LAYERS as usize {
                    trace.record_batch(
                        layer,
                        &Ids {
                            tokens,
                            ..ids(bytes)
                        },
                    );
                }
            }
            began.elapsed().as_secs_f64() * 1e9
                / (TOKENS_IN_ALL / tokens * tokens * LAYERS as usize * USED) as f64
        };
        let counts = measure(&Trace::new(layout()));
        let trace = Trace::with_locality(layout());
        let both = measure(&trace);
        let memory = (resident() - before) as f64 / 1e6;
        let began = Instant::now();
        black_box(to_json(&ModelMeta::default(), &trace.snapshot_with_locality()).to_string());
        let write = began.elapsed().as_secs_f64() * 1e3;
        let share = (both - counts) * (LAYERS as usize * USED) as f64 / (TOKEN_MS * 1e6);
        println!(
            "| {tokens} | {counts:.2} | {both:.2} | {:.2} % | {memory:.1} | {write:.0} |",
            share * 100.0
        );
    }
}

/// Returns the resident memory of this process in bytes.
fn resident() -> u64 {
    let status = std::fs::read_to_string("/proc/self/statm").expect("Linux has it");
    let pages = status.split(' ').nth(1).expect("the second field");
    pages.parse::<u64>().expect("a number") * 4096
}
