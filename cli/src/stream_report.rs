//! What expert streaming would do with a model on this machine.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::Result;
use llama_sidecar::experts::ExpertIndex;
use llama_sidecar::gguf::{self, Access, GgufFile};
use llama_sidecar::reload::free_memory;
use llama_sidecar::stream::WINDOW;
use llama_sidecar::trace::ModelMeta;
use memmap2::MmapMut;

/// The bytes of a read.
const PIECE: usize = WINDOW as usize;
/// Threads that read at a time.
const DEPTH: u64 = 16;
/// How long reads at one depth are measured.
const PERIOD: Duration = Duration::from_millis(500);

/// Returns a name and a sentence for each finding about a model with routed experts.
pub fn describe(model: &Path) -> Result<Vec<(&'static str, String)>> {
    let files = gguf::open_model(model, Access::Read)?;
    let sizes = Sizes::of(&files);
    let mut lines = vec![("sizes", sizes.sentence())];
    let Some((free, whose)) = free_memory() else {
        lines.push(("memory", "cannot read the free memory in /proc".into()));
        return Ok(lines);
    };
    let share = sizes.share(free);
    lines.push(("memory", memory_sentence(free, whose, share)));
    let largest = files.iter().max_by_key(|file| file.source.id().size);
    let largest = largest.expect("a model has a file").source.path();
    let speeds = measure(largest, 1).and_then(|one| Ok((one, measure(largest, DEPTH)?)));
    match speeds {
        Ok((one, many)) => {
            lines.push(("disk", disk_sentence(&one, &many)));
            lines.extend(sizes.bound(share, &one, &many).map(|text| ("bound", text)));
        }
        Err(error) => lines.push((
            "disk",
            format!(
                "not measured: reads of {} that bypass memory (O_DIRECT) fail: {error}",
                largest.display()
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
struct Sizes {
    layers: usize,
    /// The most experts of a layer.
    experts: u32,
    /// Experts that a token uses in a layer; 0 when not known.
    used: u64,
    expert_bytes: u64,
    other_bytes: u64,
    /// Bytes of the experts that a token uses in all layers.
    token_bytes: f64,
}

impl Sizes {
    fn of(files: &[GgufFile]) -> Sizes {
        let index = ExpertIndex::of(files);
        let used = ModelMeta::of(files).experts_used;
        let mut sizes = Sizes {
            layers: 0,
            experts: 0,
            used,
            expert_bytes: 0,
            other_bytes: 0,
            token_bytes: 0.0,
        };
        for (layer, experts) in index.layers() {
            let tensors = index.tensors().iter().filter(|of| of.name.layer == layer);
            let bytes: u64 = tensors.map(|tensor| tensor.nbytes).sum();
            sizes.layers += 1;
            sizes.experts = sizes.experts.max(experts);
            sizes.expert_bytes += bytes;
            sizes.token_bytes += bytes as f64 * used as f64 / f64::from(experts);
        }
        let tensors = files.iter().flat_map(|file| &file.header.tensors);
        let all: u64 = tensors.map(|tensor| tensor.nbytes).sum();
        sizes.other_bytes = all - sizes.expert_bytes;
        sizes
    }

    fn sentence(&self) -> String {
        let of_token = match self.used {
            0 => "the file does not say how many a token uses".into(),
            used => format!(
                "a token uses {used} of them in each layer, {:.1} MB in all",
                mb(self.token_bytes)
            ),
        };
        format!(
            "{} layers of {} experts: {:.0} MB of routed experts, {:.0} MB of other tensors; {of_token}",
            self.layers,
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

    /// Returns the limit that the disk sets; `None` when nothing is read from it, or it is not
    /// known how much.
    fn bound(&self, share: f64, one: &Speed, many: &Speed) -> Option<String> {
        let missing = self.token_bytes * (1.0 - share);
        (missing > 0.0).then(|| {
            format!(
                "the disk limits the program to {:.2} tokens/s with {DEPTH} reads at a time, {:.2} with one at a time, if all experts are used equally often",
                many.bytes_per_second / missing,
                one.bytes_per_second / missing
            )
        })
    }
}

fn memory_sentence(free: u64, whose: &str, share: f64) -> String {
    let free = format!("{whose} leaves {:.0} MB for the model", mb(free as f64));
    match share >= 1.0 {
        true => format!("{free}: all experts fit, so streaming would rest and gain nothing"),
        false => format!("{free}: at most {:.0} % of the experts fit", 100.0 * share),
    }
}

/// Speed of random reads.
#[derive(Debug, Clone, Copy)]
struct Speed {
    bytes_per_second: f64,
    /// Time of one read.
    seconds: f64,
}

fn disk_sentence(one: &Speed, many: &Speed) -> String {
    let figures = |speed: &Speed| {
        format!(
            "{:.0} MB/s, {:.2} ms each",
            mb(speed.bytes_per_second),
            speed.seconds * 1e3
        )
    };
    format!(
        "random reads of {} KiB: {}; {DEPTH} at a time: {}",
        PIECE >> 10,
        figures(one),
        figures(many)
    )
}

/// Measures random reads of a file that bypass the page cache, so many at a time.
fn measure(path: &Path, depth: u64) -> io::Result<Speed> {
    let mut options = OpenOptions::new();
    let file = options.read(true).custom_flags(libc::O_DIRECT).open(path)?;
    let pieces = file.metadata()?.len() / PIECE as u64;
    if pieces == 0 {
        return Err(io::Error::other("the file is shorter than one read"));
    }
    let began = Instant::now();
    let reads: io::Result<u64> = std::thread::scope(|scope| {
        let file = &file;
        let threads: Vec<_> = (1..=depth)
            .map(|seed| scope.spawn(move || read_randomly(file, pieces, seed)))
            .collect();
        threads
            .into_iter()
            .map(|thread| thread.join().expect("reading does not panic"))
            .sum()
    });
    let (reads, seconds) = (reads? as f64, began.elapsed().as_secs_f64());
    Ok(Speed {
        bytes_per_second: reads * PIECE as f64 / seconds,
        seconds: seconds * depth as f64 / reads,
    })
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
    use testkit::writer::{F32, Gguf, Kv, Q4_0};

    fn sizes() -> Sizes {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("model.gguf");
        Gguf::default()
            .kv("llama.expert_used_count", Kv::U32(2))
            .tensor("blk.0.ffn_down_exps.weight", &[64, 32, 8], Q4_0, 1)
            .tensor("blk.2.ffn_down_exps.weight", &[64, 32, 4], Q4_0, 2)
            .tensor("output.weight", &[64, 64], F32, 3)
            .write(&path)
            .expect("a file");
        Sizes::of(&gguf::open_model(&path, Access::Read).expect("a model"))
    }

    /// The bytes of an expert.
    const EXPERT: u64 = 64 * 32 / 32 * 18;

    #[test]
    fn experts_and_other_tensors_are_summed() {
        let expected = Sizes {
            layers: 2,
            experts: 8,
            used: 2,
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
        let sentence = memory_sentence(5_000_000, "the machine", 0.25);
        assert_eq!(
            sentence,
            "the machine leaves 5 MB for the model: at most 25 % of the experts fit"
        );
        assert!(memory_sentence(1, "the machine", 1.0).contains("streaming would rest"));
    }

    #[test]
    fn the_disk_limits_what_is_not_in_memory() {
        let sizes = sizes();
        let speed = |pieces: u64| Speed {
            bytes_per_second: (pieces * EXPERT) as f64,
            seconds: 0.0,
        };
        assert_eq!(sizes.bound(1.0, &speed(1), &speed(2)), None);
        let sentence = sizes.bound(0.5, &speed(4), &speed(8));
        let sentence = sentence.expect("two experts a token");
        assert!(
            sentence.contains("4.00 tokens/s with 16 reads at a time, 2.00 with"),
            "{sentence}"
        );
        let unknown = Sizes {
            used: 0,
            token_bytes: 0.0,
            ..sizes
        };
        assert_eq!(unknown.bound(0.5, &speed(4), &speed(8)), None);
        assert!(unknown.sentence().contains("the file does not say"));
    }

    #[test]
    fn a_file_that_is_shorter_than_a_read_is_not_measured() {
        let file = tempfile::NamedTempFile::new().expect("a file");
        assert!(measure(file.path(), 1).is_err());
    }
}
