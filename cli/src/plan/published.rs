//! Predictions of speeds that others have published: `docs/reports/published.csv`.
//!
//! Each row has two configurations of a machine. The speed of the first stands for the run of the program as it was
//! typed; that of the second is predicted. The speeds of the machines are not measured but taken from
//! specifications, with the same shares of them for all machines. Nothing is fitted to the rows.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::path::PathBuf;

use testkit::median;

use super::model::{Cache, Calibration, Disk, Gpu, Misses, Model, Place, Products, hits};

/// What programs reach of the peak speed of memory, of a GPU's memory, and of a link with page-locked and with
/// pageable memory (large copies of prompts, small copies of single tokens).
const MEMORY: f64 = 0.6;
const GPU: f64 = 0.6;
const LOCKED: f64 = 0.6;
const PAGEABLE: f64 = 0.25;
/// Cores where a source states none.
const CORES: f64 = 8.0;
/// Reads of a PCIe 4.0 disk: direct reads at a time, and page faults with the kernel's read-ahead.
const DIRECT: f64 = 5e9;
const FAULTS: f64 = 1e9;
/// Ratios in this range count as "no difference" in a published pair, and in a prediction.
const SAME: f64 = 0.03;
const SAME_PREDICTED: f64 = 0.05;

type Row = BTreeMap<String, String>;

fn folder() -> PathBuf {
    PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/reports"))
}

fn rows(name: &str) -> Vec<Row> {
    let mut reader = csv::Reader::from_path(folder().join(name)).expect(name);
    let rows = reader.deserialize().collect::<Result<_, _>>();
    rows.expect(name)
}

fn number(row: &Row, name: &str) -> Option<f64> {
    row.get(name)?.parse().ok()
}

/// Bytes per second of a core that multiplies with weights of a type, as `plan` measures them on an AMD EPYC with
/// AVX2: 2 GB/s for types of a table of vectors, 6.5 GB/s for others of few bits, more for wide ones.
fn speed_of_core(quantisation: &str) -> f64 {
    let name = quantisation.to_uppercase();
    let has = |part: &str| name.contains(part);
    match () {
        () if ["IQ1", "IQ2", "IQ3"].iter().any(|of| has(of)) => 2.3e9,
        () if has("IQ4") || has("MXFP4") => 7e9,
        () if has("Q8") => 9.5e9,
        () => 6.5e9,
    }
}

/// A row, and what is known about its machine and model.
struct Case<'a> {
    row: &'a Row,
    model: Model,
    other: f64,
    machine: &'a Row,
}

impl Case<'_> {
    fn find<'a>(row: &'a Row, models: &[Row], machines: &'a [Row]) -> Option<Case<'a>> {
        let is_of =
            |of: &Row, names: [&str; 2]| names.iter().all(|name| of.get(*name) == row.get(*name));
        let found = models
            .iter()
            .find(|of| is_of(of, ["model", "quantisation"]))?;
        let machine = machines.iter().find(|of| is_of(of, ["source", "gpu"]))?;
        let gib = f64::from(1 << 30);
        let routed = number(found, "expert_gib")? * gib;
        let (experts, used) = (number(found, "experts")?, number(found, "used")?);
        Some(Case {
            row,
            machine,
            other: number(found, "other_gib")? * gib,
            model: Model {
                expert_layers: number(found, "layers")?,
                experts,
                used,
                routed,
                routed_token: routed * used / experts,
            },
        })
    }

    /// Returns one configuration; `None` if the row does not state it.
    fn place(&self, side: &str) -> Option<Place> {
        let get = |name: &str| number(self.row, &format!("{name}_{side}"));
        let machine = |name: &str| Some(1e9 * number(self.machine, name)?);
        let is_prompt = number(self.row, "prompt_tokens").is_some();
        let host = self.row.get(&format!("host_{side}"))?;
        let cores = number(self.machine, "cores").unwrap_or(CORES);
        let threads = get("threads").unwrap_or(cores).min(cores);
        let reads = machine("memory_gbs").map(|peak| {
            let speed = speed_of_core(self.row.get("quantisation").map_or("", |of| of));
            (MEMORY * peak).min(threads * speed)
        });
        let batch = get("batch").or(is_prompt.then_some(512.0)).unwrap_or(1.0);
        let small = batch.min(number(self.row, "prompt_tokens").unwrap_or(1.0)) < 32.0;
        if reads.is_none() && (small || !is_prompt) {
            return None;
        }
        // What a batch costs beside reads of weights is in the rest of the first configuration.
        let model = &self.model;
        let processor = Products {
            routed_token: model.routed_token / reads.unwrap_or(f64::INFINITY),
            other_token: self.other / reads.unwrap_or(f64::INFINITY),
            routed_batch: model.used_by(batch) * model.routed
                / batch
                / reads.unwrap_or(f64::INFINITY),
            other_batch: 0.0,
        };
        let gpu = match host.as_str() {
            "" => return None,
            "cpu" if is_prompt => return None,
            "cpu" => None,
            layers => Some(self.gpu(side, layers.parse().ok()?, is_prompt)?),
        };
        Some(Place {
            processor,
            gpu,
            disk: self.disk(side)?,
            batch,
        })
    }

    fn gpu(&self, side: &str, layers: f64, is_prompt: bool) -> Option<Gpu> {
        let get = |name: &str| number(self.row, &format!("{name}_{side}"));
        let model = &self.model;
        let reads = GPU * 1e9 * number(self.machine, "gpu_gbs")?;
        let link = 1e9 * number(self.machine, "link_gbs")?;
        let is_locked = self.row.get(&format!("locked_{side}"));
        let share = match is_locked.map_or("", |of| of) {
            "no" => PAGEABLE,
            _ if is_prompt => LOCKED,
            _ => PAGEABLE,
        };
        let cached = get("cached");
        let found = get("hits").or(cached.map(hits));
        let misses = match self.row.get("misses").map_or("", |of| of) {
            "copied" => Misses::Copied,
            "cpu" => Misses::Processor,
            _ => Misses::Beside,
        };
        Some(Gpu {
            products: Products {
                routed_token: model.routed_token / reads,
                other_token: self.other / reads,
                ..Products::default()
            },
            link: share * link,
            copies_ahead: false,
            on_host: (layers / model.expert_layers).min(1.0),
            cache: found.map(|hits| Cache { hits, misses }),
            held: cached.unwrap_or(0.0),
        })
    }

    /// Returns the disk of a configuration, if any; `None` if it cannot be expressed. The second configuration of a
    /// row about disks reads directly where its options name that.
    fn disk(&self, side: &str) -> Option<Option<Disk>> {
        let Some(resident) = number(self.row, &format!("resident_{side}")) else {
            return Some(None);
        };
        let options = self.row.get(side)?.to_lowercase();
        let is_direct = options.contains("direct");
        let speed = if is_direct { DIRECT } else { FAULTS };
        Some(Some(Disk {
            missing_token: 1.0 - resident,
            missing_batch: 1.0 - resident,
            speed,
            batch_speed: speed,
            reads_ahead: is_direct,
        }))
    }
}

/// A prediction beside what was published.
struct Predicted {
    line: usize,
    row: Row,
    published: f64,
    predicted: f64,
}

impl Predicted {
    fn sign_is_right(&self) -> bool {
        let differs = |ratio: f64, same: f64| (ratio - 1.0).abs() > same;
        match differs(self.published, SAME) {
            true => (self.published - 1.0) * (self.predicted - 1.0) > 0.0,
            false => !differs(self.predicted, SAME_PREDICTED),
        }
    }

    fn error(&self) -> f64 {
        (self.predicted / self.published - 1.0).abs()
    }
}

fn predict_all() -> (Vec<Predicted>, usize) {
    let [published, models, machines] = ["published.csv", "models.csv", "machines.csv"].map(rows);
    let all = published.len();
    let mut found = Vec::new();
    for (at, row) in published.into_iter().enumerate() {
        let predict = || {
            let case = Case::find(&row, &models, &machines)?;
            let time = |place: Place| match number(&row, "prompt_tokens") {
                Some(tokens) => place.prompt(&case.model, tokens),
                None => place.token(&case.model),
            };
            let (one, other) = (time(case.place("one")?), time(case.place("other")?));
            let measured = 1.0 / number(&row, "one_tokens_s")?;
            let calibration = Calibration::of(measured, one.seconds);
            Some(measured / other.calibrated(&calibration, 1.0).seconds)
        };
        if let Some(predicted) = predict() {
            let speed = |name| number(&row, name).expect("a speed");
            found.push(Predicted {
                line: at + 2,
                published: speed("other_tokens_s") / speed("one_tokens_s"),
                predicted,
                row,
            });
        }
    }
    (found, all)
}

/// Returns the predictions as a table.
fn table(found: &[Predicted]) -> String {
    let mut text = String::from("line,kind,source,published,predicted,error,sign\n");
    for of in found {
        let get = |name: &str| of.row.get(name).map_or("", |of| of);
        let source = get("source").replace(',', " ");
        let sign = if of.sign_is_right() { "right" } else { "wrong" };
        let _ = writeln!(
            text,
            "{},{},{source},{:.2},{:.2},{:.2},{sign}",
            of.line,
            get("kind"),
            of.published,
            of.predicted,
            of.error()
        );
    }
    text
}

/// The table of predictions is that of the model, and the model is good enough to publish it. To write the table
/// after a change of the model, remove `docs/reports/predicted.csv` and run this test.
#[test]
fn published_speeds_are_predicted() {
    let (found, all) = predict_all();
    let right = found.iter().filter(|of| of.sign_is_right()).count();
    let mut errors: Vec<f64> = found.iter().map(Predicted::error).collect();
    let (signs, error) = (right as f64 / found.len() as f64, median(&mut errors));
    let mut sources: BTreeMap<&str, Vec<&Predicted>> = BTreeMap::new();
    for of in &found {
        sources
            .entry(of.row["source"].as_str())
            .or_default()
            .push(of);
    }
    println!(
        "{} of {all} rows: {signs:.3} signs, median error {error:.3}",
        found.len()
    );
    let mut by_source = Vec::new();
    for (source, of) in &sources {
        let right = of.iter().filter(|of| of.sign_is_right()).count();
        let mut errors: Vec<f64> = of.iter().map(|of| of.error()).collect();
        let error = median(&mut errors);
        by_source.push(error);
        println!(
            "{source}: {right} of {} signs, median error {error:.2}",
            of.len()
        );
    }
    println!(
        "median of the sources' medians: {:.3}",
        median(&mut by_source)
    );
    let (path, table) = (folder().join("predicted.csv"), table(&found));
    if !path.exists() {
        crate::output::Outputs::default()
            .write(&path, &table)
            .expect("a file");
    }
    let written = std::fs::read_to_string(&path).expect("a table");
    assert_eq!(
        written, table,
        "docs/reports/predicted.csv is not that of the model"
    );
    assert!(found.len() >= 20 && signs >= 0.9 && error < 0.2, "{table}");
}
