//! What expert streaming would do with a model on this machine.

use std::collections::BTreeMap;
use std::fs::{File, OpenOptions};
use std::io;
use std::ops::Range;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::Result;
use memmap2::MmapMut;
use sidecar_core::experts::{ExpertIndex, Routing};
use sidecar_core::gguf::{self, Access, GgufFile};
use sidecar_core::memory::free_memory;
use sidecar_core::protocol::StreamFigures;
use sidecar_core::stream::WINDOW;
use sidecar_core::{summary, text};

/// The bytes of a read.
const PIECE: usize = WINDOW as usize;
/// Threads that read at a time.
const DEPTH: u64 = 16;
/// How long reads at one depth are measured at a time.
const PERIOD: Duration = Duration::from_millis(200);
/// Measurements at each depth.
const ROUNDS: usize = 5;

/// Returns a name and a sentence for each finding about a model with routed experts, of which a token uses so many in each
/// layer, and whose program has had these figures.
pub fn describe(
    model: &Path,
    used: &[(u32, u64)],
    figures: &StreamFigures,
) -> Result<Vec<(&'static str, String)>> {
    let files = gguf::open_model(model, Access::Read)?;
    let sizes = Sizes::of(&files, &used.iter().copied().collect());
    let mut lines = vec![("sizes", sizes.sentence())];
    let Some((free, whose)) = free_memory() else {
        lines.push(("memory", "cannot read the free memory in /proc".into()));
        return Ok(lines);
    };
    let share = match figures.expert_bytes {
        0 => sizes.share(free),
        all => figures.fitting_bytes as f64 / all as f64,
    };
    let beside_context = summary::memory(figures);
    lines.push((
        "memory",
        memory_sentence(free, whose, share, beside_context),
    ));
    let largest = files.iter().max_by_key(|file| file.source.id().size);
    let largest = largest.expect("a model has a file").source.path();
    match Disk::measure(largest) {
        Ok(disk) => {
            lines.push(("disk", disk.sentence()));
            lines.extend(
                sizes
                    .bound(share, figures.missing_bytes, &disk)
                    .map(|text| ("bound", text)),
            );
        }
        Err(error) => lines.push((
            "disk",
            format!(
                "not measured: reads of {} that bypass memory (O_DIRECT) fail: {error}",
                text::path(largest)
            ),
        )),
    }
    Ok(lines)
}

fn mb(bytes: f64) -> f64 {
    bytes / 1e6
}

/// Sizes of a model.
#[derive(Debug, Clone, PartialEq)]
pub struct Sizes {
    /// The numbers of the layers with routed experts, except those that predict further tokens.
    pub layers: Vec<u32>,
    /// The most experts of a layer.
    experts: u32,
    /// The fewest and the most experts that a token uses in a layer; none when not known.
    used: Option<(u64, u64)>,
    pub expert_bytes: u64,
    pub other_bytes: u64,
    /// Bytes of the experts that a token uses in all layers.
    token_bytes: f64,
}

impl Sizes {
    /// Reads the headers of a model.
    pub fn read(path: &Path) -> Result<Sizes> {
        let files = gguf::open_model(path, Access::Read)?;
        let routing = Routing::of(&files);
        let index = ExpertIndex::of(&files);
        let layers = index.layers().map(|(layer, _)| layer);
        let layers = layers.filter(|layer| !routing.predicting.contains(layer));
        let used = layers.map(|layer| (layer, routing.used_in(layer)));
        Ok(Sizes::of(&files, &used.collect()))
    }

    pub fn all_bytes(&self) -> u64 {
        self.expert_bytes + self.other_bytes
    }

    fn of(files: &[GgufFile], used: &BTreeMap<u32, u64>) -> Sizes {
        let index = ExpertIndex::of(files);
        let mut sizes = Sizes {
            layers: Vec::new(),
            experts: 0,
            used: used
                .values()
                .min()
                .copied()
                .zip(used.values().max().copied()),
            expert_bytes: 0,
            other_bytes: 0,
            token_bytes: 0.0,
        };
        let predicting = Routing::of(files).predicting;
        for (layer, experts) in index
            .layers()
            .filter(|(layer, _)| !predicting.contains(layer))
        {
            let tensors = index
                .tensors()
                .iter()
                .filter(|tensor| tensor.name.layer == layer);
            let bytes: u64 = tensors.map(|tensor| tensor.nbytes).sum();
            sizes.layers.push(layer);
            sizes.experts = sizes.experts.max(experts);
            sizes.expert_bytes += bytes;
            let of_token = used.get(&layer).map_or(0, |used| *used);
            sizes.token_bytes += bytes as f64 * of_token as f64 / f64::from(experts);
        }
        let tensors = files.iter().flat_map(|file| &file.header.tensors);
        let all: u64 = tensors.map(|tensor| tensor.nbytes).sum();
        sizes.other_bytes = all - sizes.expert_bytes;
        sizes
    }

    pub fn sentence(&self) -> String {
        if self.layers.is_empty() {
            return format!(
                "{:.0} MB of tensors, without routed experts",
                mb(self.other_bytes as f64)
            );
        }
        let all = mb(self.token_bytes);
        let of_token = match self.used {
            None => "how many a token uses is not known".into(),
            Some((fewest, most)) if fewest == most => {
                format!("a token uses {most} of them in each layer, {all:.1} MB in all")
            }
            Some((fewest, most)) => {
                format!("a token uses {fewest} to {most} of them in a layer, {all:.1} MB in all")
            }
        };
        format!(
            "{} layers of {} experts: {:.0} MB of routed experts, {:.0} MB of other tensors; {of_token}",
            self.layers.len(),
            self.experts,
            mb(self.expert_bytes as f64),
            mb(self.other_bytes as f64)
        )
    }

    /// Returns the share of the experts that fits into free memory beside the other tensors.
    fn share(&self, free: u64) -> f64 {
        let left = free.saturating_sub(self.other_bytes);
        (left as f64 / self.expert_bytes as f64).min(1.0)
    }

    /// Returns the limit that the disk sets where such a share of the experts fits, and so many bytes of the rest do not;
    /// `None` when nothing is read from it, or it is not known how much.
    fn bound(&self, share: f64, of_rest: u64, disk: &Disk) -> Option<String> {
        let missing = self.token_bytes * (1.0 - share) + of_rest as f64;
        if of_rest > 0 {
            return Some(format!(
                "less than {:.2} tokens/s: page faults read parts of the rest again, one at a time",
                disk.one.median() / missing
            ));
        }
        (missing > 0.0).then(|| {
            format!(
                "the disk limits the program to {:.2} tokens/s with {DEPTH} reads at a time, {:.2} with one at a time, if all experts are used equally often",
                disk.many.median() / missing,
                disk.one.median() / missing
            )
        })
    }
}

/// `beside_context` is what is known of a run of the program.
fn memory_sentence(free: u64, whose: &str, share: f64, beside_context: Option<String>) -> String {
    let free = format!("{whose} leaves {:.0} MB for the program", mb(free as f64));
    match beside_context {
        Some(known) => format!("{free}: {known}"),
        None if share >= 1.0 => {
            format!("{free}: all experts fit, so streaming would rest and gain nothing")
        }
        None => format!("{free}: at most {:.0} % of the experts fit", 100.0 * share),
    }
}

/// Random reads of a file that bypass the page cache.
pub struct Disk {
    /// One at a time.
    one: Speeds,
    /// [`DEPTH`] at a time.
    pub many: Speeds,
}

/// Measurements at one depth.
#[derive(Default)]
pub struct Speeds {
    /// Bytes per second of each.
    rates: Vec<f64>,
    /// Reads of all.
    reads: u64,
}

impl Disk {
    /// Measures both depths in turn: the load of other programs changes with time.
    pub fn measure(path: &Path) -> io::Result<Disk> {
        let mut options = OpenOptions::new();
        let file = options.read(true).custom_flags(libc::O_DIRECT).open(path)?;
        let pieces = file.metadata()?.len() / PIECE as u64;
        if pieces == 0 {
            return Err(io::Error::other("the file is shorter than one read"));
        }
        let (mut one, mut many) = (Speeds::default(), Speeds::default());
        for round in 0..ROUNDS as u64 {
            for (speeds, depth) in [(&mut one, 1), (&mut many, DEPTH)] {
                let first_seed = 1 + round * DEPTH;
                speeds.measure(&file, pieces, first_seed..first_seed + depth)?;
            }
        }
        Ok(Disk { one, many })
    }

    fn sentence(&self) -> String {
        let varies = if self.one.vary() || self.many.vary() {
            "; the speed varies: run this again while no other program uses the disk"
        } else {
            ""
        };
        format!(
            "random reads of {} KiB: {} one at a time, {} with {DEPTH} at a time; medians and ranges of {ROUNDS} measurements with {} and {} reads{varies}",
            PIECE >> 10,
            self.one.sentence(),
            self.many.sentence(),
            self.one.reads,
            self.many.reads,
        )
    }
}

impl Speeds {
    /// Adds a measurement with a thread for each seed.
    fn measure(&mut self, file: &File, pieces: u64, seeds: Range<u64>) -> io::Result<()> {
        let began = Instant::now();
        let reads: io::Result<u64> = std::thread::scope(|scope| {
            let threads: Vec<_> = seeds
                .map(|seed| scope.spawn(move || read_randomly(file, pieces, seed)))
                .collect();
            let joined = threads.into_iter().map(|thread| thread.join());
            joined
                .map(|reads| reads.expect("reading does not panic"))
                .sum()
        });
        let reads = reads?;
        let bytes = (reads * PIECE as u64) as f64;
        self.reads += reads;
        self.rates.push(bytes / began.elapsed().as_secs_f64());
        self.rates.sort_by(f64::total_cmp);
        Ok(())
    }

    /// Returns the median in bytes per second.
    pub fn median(&self) -> f64 {
        self.rates[self.rates.len() / 2]
    }

    fn range(&self) -> (f64, f64) {
        (self.rates[0], self.rates[self.rates.len() - 1])
    }

    /// Whether the fastest measurement is more than twice the slowest.
    fn vary(&self) -> bool {
        let (slowest, fastest) = self.range();
        fastest > 2.0 * slowest
    }

    fn sentence(&self) -> String {
        let (slowest, fastest) = self.range();
        format!(
            "{:.0} MB/s ({:.0} to {:.0})",
            mb(self.median()),
            mb(slowest),
            mb(fastest)
        )
    }
}

/// Reads pieces of a file for some time, at least one. Returns their number.
fn read_randomly(file: &File, pieces: u64, seed: u64) -> io::Result<u64> {
    // Memory of a page boundary, as O_DIRECT needs.
    let mut buffer = MmapMut::map_anon(PIECE)?;
    let began = Instant::now();
    let mut state = seed;
    for reads in 1.. {
        // Steps of splitmix64: numbers that differ between threads and between reads.
        state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (state ^ (state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let piece = (mixed ^ (mixed >> 31)) % pieces;
        file.read_exact_at(&mut buffer, piece * PIECE as u64)?;
        if began.elapsed() >= PERIOD {
            return Ok(reads);
        }
    }
    unreachable!("the period ends")
}

#[cfg(test)]
mod tests {
    use super::*;
    use testkit::writer::{F32, Gguf, Q4_0};

    fn sizes() -> Sizes {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("model.gguf");
        Gguf::default()
            .tensor("blk.0.ffn_down_exps.weight", &[64, 32, 8], Q4_0, 1)
            .tensor("blk.2.ffn_down_exps.weight", &[64, 32, 4], Q4_0, 2)
            .tensor("output.weight", &[64, 64], F32, 3)
            .write(&path)
            .expect("a file");
        let used = BTreeMap::from([(0, 2), (2, 2)]);
        Sizes::of(
            &gguf::open_model(&path, Access::Read).expect("a model"),
            &used,
        )
    }

    /// The bytes of an expert.
    const EXPERT: u64 = 64 * 32 / 32 * 18;

    /// A disk with sorted rates, in bytes per second.
    fn disk(one: [u64; 3], many: [u64; 3]) -> Disk {
        let speeds = |rates: [u64; 3]| Speeds {
            rates: rates.map(|rate| rate as f64).to_vec(),
            reads: 30,
        };
        Disk {
            one: speeds(one),
            many: speeds(many),
        }
    }

    #[test]
    fn a_speed_has_its_range() {
        const MB: u64 = 1_000_000;
        let steady = disk([90 * MB, 100 * MB, 110 * MB], [800 * MB; 3]).sentence();
        let expected =
            "100 MB/s (90 to 110) one at a time, 800 MB/s (800 to 800) with 16 at a time";
        assert!(steady.contains(expected), "{steady}");
        assert!(steady.ends_with("with 30 and 30 reads"), "{steady}");
        let busy = disk([40 * MB, 100 * MB, 110 * MB], [800 * MB; 3]).sentence();
        assert!(busy.contains("the speed varies"), "{busy}");
    }

    #[test]
    fn experts_and_other_tensors_are_summed() {
        let expected = Sizes {
            layers: vec![0, 2],
            experts: 8,
            used: Some((2, 2)),
            expert_bytes: 12 * EXPERT,
            other_bytes: 64 * 64 * 4,
            token_bytes: (2 * 2 * EXPERT) as f64,
        };
        assert_eq!(sizes(), expected);
    }

    #[test]
    fn memory_holds_the_other_tensors_first() {
        let sizes = sizes();
        assert_eq!(sizes.share(sizes.other_bytes - 1), 0.0);
        assert_eq!(sizes.share(sizes.other_bytes + 3 * EXPERT), 0.25);
        assert_eq!(sizes.share(u64::MAX), 1.0);
        let sentence = memory_sentence(5_000_000, "the machine", 0.25, None);
        assert_eq!(
            sentence,
            "the machine leaves 5 MB for the program: at most 25 % of the experts fit"
        );
        assert!(memory_sentence(1, "the machine", 1.0, None).contains("streaming would rest"));
    }

    #[test]
    fn the_disk_limits_what_is_not_in_memory() {
        let sizes = sizes();
        let disk = disk([4 * EXPERT, 4 * EXPERT, 40 * EXPERT], [8 * EXPERT; 3]);
        assert_eq!(sizes.bound(1.0, 0, &disk), None);
        let sentence = sizes.bound(0.5, 0, &disk);
        let sentence = sentence.expect("two experts a token");
        assert!(
            sentence.contains("4.00 tokens/s with 16 reads at a time, 2.00 with"),
            "{sentence}"
        );
        let unknown = Sizes {
            used: None,
            token_bytes: 0.0,
            ..sizes
        };
        assert_eq!(unknown.bound(0.5, 0, &disk), None);
        assert!(unknown.sentence().contains("is not known"));
    }

    #[test]
    fn a_file_that_is_shorter_than_a_read_is_not_measured() {
        let file = tempfile::NamedTempFile::new().expect("a file");
        assert!(Disk::measure(file.path()).is_err());
    }
}
