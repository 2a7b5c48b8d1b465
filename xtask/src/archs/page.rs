//! The page with the results: docs/model-architectures.md.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;

use super::masks::{Cut, Outcome as Masked, TOLERANCE};
use super::model::{Change, generic};
use super::models::Form;
use super::modes::MODES;
use super::reloads::KINDS;
use super::swaps::{Outcome, Swap};

/// What was tested with a model.
pub struct Tested {
    pub form: Form,
    pub name: String,
    pub has_experts: bool,
    /// How many tensors scale or bias a weight. All are swapped with it.
    pub companions: usize,
    /// Indices of the modes that passed.
    pub modes: Vec<usize>,
    pub swaps: Vec<Swap>,
    /// How many reloads of each kind were right; none if there were no reloads.
    pub reloads: Option<[usize; KINDS.len()]>,
    /// Numbers of experts that were masked.
    pub cuts: Vec<Cut>,
}

const INTRODUCTION: &str = "# Architectures

What the drop-in does with models of every architecture that llama.cpp can make for its own tests: MLA, merged gate and
up matrices, expert biases, shared experts, recurrent and hybrid layers, per-layer embeddings, and others. The page is
written by a command:

```sh
cargo xtask check --archs   # all models; the daily test has some of them
```

The models are those of llama.cpp's `test-llama-archs`, with random weights in f32. Each evaluation has six batches of 1,
12 or 36 tokens, and \"equal\" means that all logits of all tokens are equal in every bit.

";

const MODES_HEAD: &str = "## Capabilities that change no result

All logits are equal to those without the drop-in, and the capability did something: a trace has the program's own
counts, layers were scheduled for reading, experts were copied early, or were on the device. On the simulated GPU, routed
experts are in host memory.

| capability | device | models | of which have routed experts | with 8 experts, 3 used |
|---|---|---|---|---|
";

const SWAPS: &str = "
## Hot-swap of every tensor

In one process per model, each tensor is swapped by an overlay and then returned. After the swap, logits must equal those
of a fresh load of a file with that change, in a process without the drop-in that loads one file after the other; after
the return, those of the first file. Or the swap is refused by the name of the tensor. On the simulated GPU, the process
has post-fetch with experts that stay on the device.

| tensors | models | to | swaps | equal | refused |
|---|---|---|---|---|---|
";

const REFUSED: &str = "
Refused, by reason. \"Evaluates\": a fresh load of the changed file evaluates. For the others llama.cpp itself aborts or
refuses the file.

";

const UNREAD: &str = "
In at least one of the models, other bytes of these tensors change no logits, neither by a swap nor by a fresh load:
";

const COMPANIONS: &str = "
## Companions of weights

Tensors that scale or bias the product of a weight, or its input, in graphs of a program without the drop-in. Each is one of
the [companions](hot-swap.md#metadata) that are swapped with the weight. Only hrm_text has others: it evaluates the weights of
a layer several times, with scales of further layers, which stay as they are.

| models | of which have companions | companions |
|---|---|---|
";

const RELOADS: &str = "
## Reloads of changed files

A file with one change takes the place of the model, in a process that has loaded the model. After each kind of change, logits
are those from before.

| change | models | changes | outcome of all |
|---|---|---|---|
";

const MASKS: &str = "
## Masks of experts

Of 8 experts (64 in deepseek2), of which 3 are used, the most used ones of each layer are [masked](pruning.md) on the CPU.
Logits are compared with those of the model that `llama-sidecar prune` writes, in a process without the drop-in; without masks,
they must be those from before. Biases for the choice have values that exceed all scores. Logits must be equal in every bit,
except where a sum has another order: a softmax of all experts, and the product of a router whose rows are no multiple of
four. refact has experts that llama.cpp does not evaluate.

| experts left | models with equal logits | models with sums in another order | largest difference, as a part of the largest logit |
|---|---|---|---|
";

/// Returns the page for models that were all tested.
pub fn page(tested: &[Tested], version: &str) -> String {
    let mut page = INTRODUCTION.to_owned();
    let _ = writeln!(page, "Tested with llama.cpp {version}.\n");
    modes(&mut page, tested);
    swaps(&mut page, tested);
    page += &companions(tested);
    page += &reloads(tested);
    masks(&mut page, tested);
    page
}

fn modes(page: &mut String, tested: &[Tested]) {
    *page += MODES_HEAD;
    for (at, mode) in MODES.iter().enumerate() {
        let passed = |form| {
            let of_form = tested.iter().filter(move |model| model.form == form);
            of_form.filter(|model| model.modes.contains(&at))
        };
        let upstream = passed(Form::Upstream);
        let mixtures = passed(Form::Upstream).filter(|model| model.has_experts);
        let more = passed(Form::MoreExperts).filter(|model| model.has_experts);
        let _ = writeln!(
            page,
            "| {} | {} | {} | {} | {} |",
            mode.title,
            mode.device,
            upstream.count(),
            mixtures.count(),
            more.count()
        );
    }
}

/// What a line of a table of swaps counts.
#[derive(Default)]
struct Line {
    swaps: usize,
    loads: usize,
    tensors: BTreeSet<String>,
}

fn swaps(page: &mut String, tested: &[Tested]) {
    *page += SWAPS;
    for (form, what) in [
        (Form::Upstream, "all tensors, CPU"),
        (
            Form::MoreExperts,
            "routers and routed experts, simulated GPU",
        ),
    ] {
        let of_form: Vec<_> = tested.iter().filter(|model| model.form == form).collect();
        let models = of_form
            .iter()
            .filter(|model| !model.swaps.is_empty())
            .count();
        let swaps = || of_form.iter().flat_map(|model| &model.swaps);
        let changes: BTreeSet<_> = swaps().map(|swap| swap.change).collect();
        for change in changes {
            let outcomes = swaps().filter(|swap| swap.change == change);
            let (mut equal, mut refused) = (0, 0);
            for swap in outcomes {
                match swap.outcome {
                    Outcome::Equal { .. } => equal += 1,
                    Outcome::Refused { .. } => refused += 1,
                    Outcome::Wrong(_) => {}
                }
            }
            let _ = writeln!(
                page,
                "| {what} | {models} | {change} | {} | {equal} | {refused} |",
                equal + refused
            );
        }
    }
    let all: Vec<_> = tested.iter().flat_map(|model| &model.swaps).collect();
    let mut refused: BTreeMap<(&str, Change), Line> = BTreeMap::new();
    let mut unread = BTreeSet::new();
    for swap in &all {
        match &swap.outcome {
            Outcome::Refused { reason, loads } => {
                let line = refused.entry((reason, swap.change)).or_default();
                line.swaps += 1;
                line.loads += usize::from(*loads);
                line.tensors.insert(generic(&swap.tensor));
            }
            Outcome::Equal { read: false } if swap.change == Change::Bytes => {
                unread.insert(generic(&swap.tensor));
            }
            _ => {}
        }
    }
    *page += REFUSED;
    *page += "| reason | to | swaps | evaluates | tensors |\n|---|---|---|---|---|\n";
    for ((reason, change), line) in refused {
        let _ = writeln!(
            page,
            "| {reason} | {change} | {} | {} | {} |",
            line.swaps,
            line.loads,
            some(&line.tensors)
        );
    }
    *page += UNREAD;
    let names: Vec<_> = unread.iter().map(|name| format!("`{name}`")).collect();
    let _ = writeln!(page, "{}.", names.join(", "));
}

/// Returns the section about tensors that belong to a weight.
pub fn companions(tested: &[Tested]) -> String {
    let mut section = COMPANIONS.to_owned();
    let upstream = tested.iter().filter(|model| model.form == Form::Upstream);
    let counts = upstream.map(|model| model.companions);
    let with = counts.clone().filter(|count| *count > 0).count();
    let (models, all) = (counts.clone().count(), counts.sum::<usize>());
    let _ = writeln!(section, "| {models} | {with} | {all} |");
    section
}

/// Returns the section about reloads.
pub fn reloads(tested: &[Tested]) -> String {
    let mut section = RELOADS.to_owned();
    for (at, kind) in KINDS.iter().enumerate() {
        let counts = tested.iter().filter_map(|model| Some(model.reloads?[at]));
        let (models, changes) = (counts.clone().count(), counts.sum::<usize>());
        let _ = writeln!(
            section,
            "| {} | {models} | {changes} | {} |",
            kind.title, kind.outcome
        );
    }
    section
}

fn masks(page: &mut String, tested: &[Tested]) {
    *page += MASKS;
    let mut equal: BTreeMap<u64, usize> = BTreeMap::new();
    let mut rounded: BTreeMap<u64, (usize, f32)> = BTreeMap::new();
    let mut refused: BTreeMap<&str, BTreeSet<&str>> = BTreeMap::new();
    for model in tested {
        for cut in &model.cuts {
            match &cut.outcome {
                Masked::Equal => *equal.entry(cut.left).or_default() += 1,
                Masked::Rounded(differs) => {
                    let (models, most) = rounded.entry(cut.left).or_default();
                    (*models, *most) = (*models + 1, most.max(*differs));
                }
                Masked::Refused(reason) => {
                    refused.entry(reason).or_default().insert(&model.name);
                }
            }
        }
    }
    let lefts: BTreeSet<u64> = equal.keys().chain(rounded.keys()).copied().collect();
    for left in lefts {
        let equal = equal.get(&left).unwrap_or(&0);
        let (rounded, most) = rounded.get(&left).unwrap_or(&(0, 0.0));
        let _ = writeln!(page, "| {left} | {equal} | {rounded} | {most:.1e} |");
    }
    let _ = writeln!(
        page,
        "\nA difference may be {TOLERANCE:.0e}. Refused, by reason:\n\n| reason | models |\n|---|---|"
    );
    for (reason, models) in refused {
        let models: Vec<_> = models.into_iter().collect();
        let _ = writeln!(page, "| {reason} | {} |", models.join(", "));
    }
}

/// Returns the first names of a set, and how many more it has.
fn some(names: &BTreeSet<String>) -> String {
    const MOST: usize = 4;
    let first: Vec<_> = names
        .iter()
        .take(MOST)
        .map(|name| format!("`{name}`"))
        .collect();
    let more = names.len().saturating_sub(MOST);
    match more {
        0 => first.join(", "),
        more => format!("{} and {more} more", first.join(", ")),
    }
}
