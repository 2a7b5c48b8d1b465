//! Prefill in an unmodified host whose experts are in host memory, in virtual time: a simulated
//! GPU takes the time of copies and kernels and moves nothing. Stock against the drop-in.
//!
//! Run it with `cargo xtask bench postfetch_host`. The models have the sizes of real ones: one in
//! its own architecture, two in the plain architecture `llama`, without a shared expert and with
//! full attention in each layer. Files have holes for data.

mod simulated;

use std::path::Path;

use simulated::{EXPERTS, LAYERS, MACHINE, MACHINES, Variables, models, placed, simulation, start};
use testkit::moe::Moe;
use testkit::sim_ggml::{Report, SimGgml};

/// The layer that is measured, from the end of the one before to its own end. The first ones
/// wait for copies of inputs, and the last of a prompt may have one token.
const MEASURED: usize = 5;
/// Tokens of a prompt, in one batch.
const PROMPTS: [usize; 2] = [512, 2048];

/// Bytes per nanosecond that the link copies from mapped weights, and a copy's latency.
const LINK: f64 = 12.0;
const LATENCY: f64 = 8000.0;

/// Milliseconds to copy a tensor with all experts.
fn copy_time(model: &Moe) -> f64 {
    (LATENCY + model.expert_bytes() as f64 / LINK) / 1e6
}

const STOCK: Variables = &[];
const EARLY: Variables = &[("LLAMA_POSTFETCH_MODE", "on")];
const ROUTED: Variables = &[EARLY[0], ("LLAMA_POSTFETCH_LOOK_AHEAD", "0")];
const LOCKED: Variables = &[("LLAMA_SIDECAR_PAGE_LOCK", "1")];
const DOWN: Variables = &[("LLAMA_POSTFETCH_MODE", "down"), LOCKED[0]];
const ALL: Variables = &[("LLAMA_POSTFETCH_MODE", "all"), LOCKED[0]];
const BOTH: Variables = &[EARLY[0], LOCKED[0]];

/// No tensor is in host memory.
const NONE: &str = "no tensor";

/// Returns the milliseconds of a token, at the speeds of a CPU and a link in GB/s.
fn token(model: &Path, cpu: f64, link: f64, variables: Variables) -> f64 {
    const COUNTED: u64 = 4;
    let sim = simulation(cpu, link, &[]);
    let mut host = start(model, &sim, &placed(EXPERTS, 64), variables);
    host.ask("prompt 5");
    // Graphs of one token, which are kept.
    host.ask("hashes 3");
    let before = sim.report_now(&mut host);
    host.ask(&format!("hashes {COUNTED}"));
    let after = sim.report_now(&mut host);
    assert_eq!(host.end(), Some(0));
    sim.report().assert_ordered();
    let time = |report: &Report| report.threads[0].time_ns;
    (time(&after) - time(&before)) as f64 / COUNTED as f64 / 1e6
}

/// Evaluates a prompt twice; returns the times of a layer.
fn prefill(model: &Path, tokens: usize, on_cpu: &str, variables: Variables) -> Layer {
    let sim = SimGgml::new(&MACHINE);
    let mut host = start(model, &sim, &placed(on_cpu, tokens), variables);
    // The drop-in reads the first graph; early copies begin with the second.
    for _ in 0..2 {
        host.ask(&format!("prompt {tokens}"));
    }
    assert_eq!(host.end(), Some(0));
    let report = sim.report();
    report.assert_ordered();
    Layer::of(&report)
}

/// Virtual times of a layer in milliseconds.
struct Layer {
    /// From the end of the layer before to its own end.
    whole: f64,
    /// One product of routed weights, on average.
    product: f64,
}

impl Layer {
    /// Of the last evaluation.
    fn of(report: &Report) -> Layer {
        let find = |role: &str, layer: usize| {
            let name = format!("ffn_moe_{role}-{layer}");
            let found = report.products.iter().rfind(|product| product.name == name);
            found.unwrap_or_else(|| panic!("no {name} on the device"))
        };
        let end = |layer| find("down", layer).end_ns;
        let products = ["gate", "up", "down"].map(|role| {
            let product = find(role, MEASURED);
            product.end_ns - product.start_ns
        });
        Layer {
            whole: (end(MEASURED) - end(MEASURED - 1)) as f64 / 1e6,
            product: products.iter().sum::<u64>() as f64 / 3.0 / 1e6,
        }
    }

    /// All but the products.
    fn rest(&self) -> f64 {
        self.whole - 3.0 * self.product
    }
}

fn main() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("model.gguf");
    let mut locked = String::new();
    println!(
        "Virtual time of a layer in a prompt, ms. A: all but the experts, C: the copy of a tensor of experts, \
K: its product. Overlap: time saved, of what copies and computation can overlap.\n"
    );
    println!(
        "| model | tokens | A | C | K | stock | A + 3C + 3K | no look-ahead | A + 3C + K | look-ahead | max(3C, A + 3K) | gain | overlap |"
    );
    println!("|---|---|---|---|---|---|---|---|---|---|---|---|---|");
    for (name, model) in models() {
        let file = model.file();
        file.write_sparse(&path).expect("a file with holes");
        for tokens in PROMPTS {
            // The order in which threads run can move a copy by the time of a product.
            let run = |on_cpu, variables| {
                let mut runs = [0; 3].map(|_| prefill(&path, tokens, on_cpu, variables));
                runs.sort_by(|a, b| a.whole.total_cmp(&b.whole));
                let [_, median, _] = runs;
                median
            };
            let stock = run(EXPERTS, STOCK);
            let (a, k) = (run(NONE, STOCK).rest(), stock.product);
            let c = copy_time(&model);
            let stock = stock.whole;
            let routed = run(EXPERTS, ROUTED).whole;
            let early = run(EXPERTS, EARLY).whole;
            let bound = (3.0 * c).max(a + 3.0 * k);
            println!(
                "| {} | {tokens} | {a:.2} | {c:.2} | {k:.2} | {stock:.1} | {:.1} | {routed:.1} | {:.1} | {early:.1} | {bound:.1} | {:.2} | {:.0} % |",
                name,
                a + 3.0 * c + 3.0 * k,
                a + 3.0 * c + k,
                stock / early,
                100.0 * (stock - early) / (stock - bound),
            );
            let (lock, both) = (run(EXPERTS, LOCKED).whole, run(EXPERTS, BOTH).whole);
            let gain = stock / both;
            locked += &format!(
                "| {name} | {tokens} | {stock:.1} | {lock:.1} | {both:.1} | {gain:.2} |\n"
            );
        }
    }
    println!("\nThe same with page-locked experts:\n");
    println!("| model | tokens | stock | page-locked | and copied early | gain |");
    println!("|---|---|---|---|---|---|\n{}", locked.trim_end());
    decode(&path);
}

/// Prints the time of a token for the machines of the bandwidth model.
fn decode(path: &Path) {
    let [(name, model), ..] = models();
    let file = model.file();
    file.write_sparse(path).expect("a file with holes");
    println!(
        "\nVirtual time of a token in {LAYERS} layers of {name}, ms, with page-locked experts. \
In brackets what memory allows, where that is longer: CPU and link read from the same memory.\n"
    );
    println!(
        "| machine | CPU, GB/s | link, GB/s | stock, on the CPU | down on the GPU | all on the GPU |"
    );
    println!("|---|---|---|---|---|---|");
    let layer = 3 * model.expert_bytes() * model.used as u64 / model.experts as u64;
    let bytes = LAYERS as u64 * layer;
    for (name, memory, cpu, link) in MACHINES {
        let stock = token(path, cpu, link, STOCK);
        let bound = bytes as f64 / memory / 1e6;
        let cell = |variables| {
            let time = token(path, cpu, link, variables);
            match time < bound {
                true => format!("{time:.2} ({bound:.2})"),
                false => format!("{time:.2}"),
            }
        };
        let (down, all) = (cell(DOWN), cell(ALL));
        println!("| {name} | {cpu} | {link} | {stock:.2} | {down} | {all} |");
    }
}
