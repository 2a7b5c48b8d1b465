//! How long a token takes: sizes of a model divided by speeds of a machine. `docs/plan.md` has the formulas
//! and where they come from.
//!
//! All times are in seconds, all sizes in bytes, all speeds in bytes per second.

use serde::Serialize;

/// Tokens from which ggml's scheduler copies the experts of a batch to a GPU, in place of computing them on
/// the processor (`op_offload_min_batch_size` in ggml's CUDA backend).
const OFFLOADED_FROM: f64 = 32.0;
/// What it costs to hand a layer from a GPU to the processor and back: two copies of activations and two
/// waits, each of about 10 microseconds.
const CROSSING: f64 = 40e-6;

/// Sizes of a model.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Model {
    /// Layers with routed experts.
    pub expert_layers: f64,
    /// Experts of a layer.
    pub experts: f64,
    /// Experts that a token uses in a layer.
    pub used: f64,
    /// Bytes of all routed experts.
    pub routed: f64,
    /// Bytes of the routed experts of a token.
    pub routed_token: f64,
}

/// The products of a token with all layers, on one processor.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize)]
pub struct Products {
    /// Routed experts, a single token.
    pub routed_token: f64,
    /// Other matrices, a single token.
    pub other_token: f64,
    /// Routed experts, a token of a long batch.
    pub routed_batch: f64,
    /// Other matrices, a token of a long batch.
    pub other_batch: f64,
}

/// Who computes experts that are not in a cache on the GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Misses {
    /// The GPU, after a copy.
    Copied,
    /// The processor, before or after the GPU, as in some published engines.
    #[cfg_attr(
        not(test),
        expect(dead_code, reason = "no program that is planned for does it")
    )]
    Processor,
    /// The processor, at the same time as the GPU.
    Beside,
}

/// A cache of experts on a GPU.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Cache {
    /// The share of routed experts that it has.
    pub hits: f64,
    pub misses: Misses,
}

/// A GPU that computes layers.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Gpu {
    pub products: Products,
    /// Speed of copies of experts to it.
    pub link: f64,
    /// Whether copies of the next experts run during products.
    pub copies_ahead: bool,
    /// The share of the layers with experts whose experts are in host memory.
    pub on_host: f64,
    pub cache: Option<Cache>,
    /// The share of these experts that batches find in the cache, and that is not copied for them.
    pub held: f64,
}

/// Experts in host memory that are on a disk.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Disk {
    /// The share of the experts of a single token that is read.
    pub missing_token: f64,
    /// The share of the experts of a batch that is read.
    pub missing_batch: f64,
    /// Useful bytes per second, for a single token.
    pub speed: f64,
    /// The same for a batch.
    pub batch_speed: f64,
    /// Whether experts of a batch are read during products.
    pub reads_ahead: bool,
}

/// Where a model is computed.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Place {
    pub processor: Products,
    pub gpu: Option<Gpu>,
    pub disk: Option<Disk>,
    /// Tokens of a batch.
    pub batch: f64,
}

/// What a run of the program adds to predictions.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Calibration {
    /// What predictions are multiplied with: less than 1 if the program was faster than they.
    pub scale: f64,
    /// What is in no prediction: attention, norms, sampling.
    pub rest: f64,
}

/// The share of a measured time that a prediction explains at most: no run consists of products alone.
const EXPLAINED: f64 = 0.85;

impl Calibration {
    /// Without a run, the rest is taken as a share of what is predicted.
    pub fn assumed(predicted: f64) -> Calibration {
        Calibration {
            scale: 1.0,
            rest: predicted * (1.0 / EXPLAINED - 1.0),
        }
    }

    /// Compares a measured time with its prediction.
    pub fn of(measured: f64, predicted: f64) -> Calibration {
        let scale = (EXPLAINED * measured / predicted).min(1.0);
        Calibration {
            scale,
            rest: measured - scale * predicted,
        }
    }
}

/// What a token waits for.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize)]
pub struct Time {
    pub processor: f64,
    pub gpu: f64,
    pub link: f64,
    pub disk: f64,
    /// What is no product.
    pub rest: f64,
    /// All of it. Less than the sum where parts overlap.
    pub seconds: f64,
}

impl Model {
    /// Returns the share of a layer's experts that a batch uses, if all are used equally often.
    pub fn used_by(&self, tokens: f64) -> f64 {
        1.0 - (1.0 - self.used / self.experts).powf(tokens)
    }
}

impl Time {
    /// Returns tokens per second.
    pub fn rate(&self) -> f64 {
        1.0 / self.seconds
    }

    /// Returns the time with what a run has shown. `slower`: how many times the rest of that run.
    pub fn calibrated(&self, by: &Calibration, slower: f64) -> Time {
        let rest = by.rest * slower;
        Time {
            processor: self.processor * by.scale,
            gpu: self.gpu * by.scale,
            link: self.link * by.scale,
            disk: self.disk * by.scale,
            rest: self.rest * by.scale + rest,
            seconds: self.seconds * by.scale + rest,
        }
    }

    /// Returns what takes longest.
    pub fn limit(&self) -> &'static str {
        let parts = [
            ("the processor", self.processor),
            ("the GPU", self.gpu),
            ("the link", self.link),
            ("the disk", self.disk),
            ("what is no product", self.rest),
        ];
        let longest = parts.into_iter().max_by(|a, b| a.1.total_cmp(&b.1));
        longest.map_or("", |(name, _)| name)
    }

    /// Adds up the parts. `hides_link`: copies run during products; `hides_disk`: reads run during all
    /// else.
    fn sum(mut self, hides_link: bool, hides_disk: bool) -> Time {
        let computes = self.processor + self.gpu;
        let works = match hides_link {
            true => computes.max(self.link),
            false => computes + self.link,
        } + self.rest;
        self.seconds = match hides_disk {
            true => works.max(self.disk),
            false => works + self.disk,
        };
        self
    }
}

impl Place {
    /// The share of the layers with experts whose experts are in host memory.
    fn on_host(&self) -> f64 {
        self.gpu.map_or(1.0, |gpu| gpu.on_host)
    }

    /// Returns the time of a single token, in an answer.
    pub fn token(&self, model: &Model) -> Time {
        let host = self.on_host();
        let mut time = Time::default();
        let on_processor = self.processor.routed_token;
        match self.gpu {
            None => time.processor = self.processor.other_token + on_processor,
            Some(gpu) => {
                let on_gpu = gpu.products.routed_token;
                time.gpu = gpu.products.other_token + (1.0 - host) * on_gpu;
                time.rest += host * model.expert_layers * CROSSING;
                match gpu.cache {
                    None => time.processor = host * on_processor,
                    Some(Cache { hits, misses }) => match misses {
                        Misses::Copied => {
                            time.gpu += host * on_gpu;
                            time.link = host * (1.0 - hits) * model.routed_token / gpu.link;
                        }
                        Misses::Processor => {
                            time.gpu += host * hits * on_gpu;
                            time.processor = host * (1.0 - hits) * on_processor;
                        }
                        Misses::Beside => {
                            let (hit, missed) = (hits * on_gpu, (1.0 - hits) * on_processor);
                            time.gpu += host * hit;
                            time.processor = host * (missed - hit).max(0.0);
                        }
                    },
                }
            }
        }
        if let Some(disk) = self.disk {
            time.disk = host * disk.missing_token * model.routed_token / disk.speed;
        }
        time.sum(false, false)
    }

    /// Returns the time of a token of a prompt of `tokens`.
    pub fn prompt(&self, model: &Model, tokens: f64) -> Time {
        let batch = self.batch.min(tokens).max(1.0);
        let host = self.on_host();
        // The experts of the host's layers that a batch uses, once for each batch.
        let experts = host * model.used_by(batch) * model.routed / batch;
        let mut time = Time::default();
        match self.gpu {
            None => time.processor = self.processor.other_batch + self.processor.routed_batch,
            Some(gpu) => {
                let routed = gpu.products.routed_batch;
                time.gpu = gpu.products.other_batch + (1.0 - host) * routed;
                if batch >= OFFLOADED_FROM {
                    time.gpu += host * routed;
                    time.link = (1.0 - gpu.held) * experts / gpu.link;
                } else {
                    time.processor = host * self.processor.routed_batch;
                }
            }
        }
        if let Some(disk) = self.disk {
            time.disk = disk.missing_batch * experts / disk.batch_speed;
        }
        let copies_ahead = self.gpu.is_some_and(|gpu| gpu.copies_ahead);
        time.sum(copies_ahead, self.disk.is_some_and(|disk| disk.reads_ahead))
    }
}

/// Returns the share of routed experts that a cache of a share of all experts has, where no trace is known.
/// The exponent is that of published pairs of shares and hits: `docs/plan.md`.
pub fn hits(share: f64) -> f64 {
    share.clamp(0.0, 1.0).powf(0.3)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// 10 layers of 8 experts of 1 MB, of which a token uses 2.
    const MODEL: Model = Model {
        expert_layers: 10.0,
        experts: 8.0,
        used: 2.0,
        routed: 80e6,
        routed_token: 20e6,
    };
    const PROCESSOR: Products = Products {
        routed_token: 4e-3,
        other_token: 1e-3,
        routed_batch: 2e-3,
        other_batch: 0.5e-3,
    };
    const GPU: Gpu = Gpu {
        products: Products {
            routed_token: 0.4e-3,
            other_token: 0.1e-3,
            routed_batch: 0.02e-3,
            other_batch: 0.01e-3,
        },
        link: 10e9,
        copies_ahead: false,
        on_host: 0.5,
        cache: None,
        held: 0.0,
    };

    fn place(gpu: Option<Gpu>, disk: Option<Disk>) -> Place {
        Place {
            processor: PROCESSOR,
            gpu,
            disk,
            batch: 100.0,
        }
    }

    #[track_caller]
    fn assert_seconds(time: Time, expected: f64) {
        let error = (time.seconds - expected).abs();
        assert!(error < 1e-9, "{time:?}: expected {expected}");
    }

    #[test]
    fn a_processor_computes_all() {
        let place = place(None, None);
        // 4 + 1 ms; 2 + 0.5 ms.
        assert_seconds(place.token(&MODEL), 5e-3);
        assert_seconds(place.prompt(&MODEL, 1000.0), 2.5e-3);
        assert_eq!(place.token(&MODEL).limit(), "the processor");
    }

    #[test]
    fn a_disk_is_waited_for_unless_it_reads_ahead() {
        let disk = Disk {
            missing_token: 0.5,
            missing_batch: 1.0,
            speed: 100e6,
            batch_speed: 100e6,
            reads_ahead: false,
        };
        // Half of 20 MB at 100 MB/s takes 100 ms. A batch of 100 uses all of 80 MB (8 ms each).
        let slow = place(None, Some(disk));
        assert_seconds(slow.token(&MODEL), 105e-3);
        assert_eq!(slow.token(&MODEL).limit(), "the disk");
        let all = MODEL.used_by(100.0);
        assert!((all - 1.0).abs() < 1e-9, "{all}");
        assert_seconds(slow.prompt(&MODEL, 1000.0), 8e-3 * all + 2.5e-3);
        let ahead = Disk {
            reads_ahead: true,
            ..disk
        };
        assert_seconds(place(None, Some(ahead)).prompt(&MODEL, 1000.0), 8e-3 * all);
    }

    #[test]
    fn experts_of_some_layers_stay_in_host_memory() {
        let token = place(Some(GPU), None).token(&MODEL);
        // The GPU: 0.1 + 0.2; the processor: 2 ms; 5 crossings.
        assert_seconds(token, 0.3e-3 + 2e-3 + 5.0 * CROSSING);
        // A batch of 100 copies 40 MB in 4 ms: 0.04 ms a token.
        let batch = place(Some(GPU), None).prompt(&MODEL, 1000.0);
        assert_seconds(batch, 0.03e-3 + 0.04e-3 * MODEL.used_by(100.0));
        let ahead = Gpu {
            copies_ahead: true,
            ..GPU
        };
        let batch = place(Some(ahead), None).prompt(&MODEL, 1000.0);
        assert_seconds(batch, 0.04e-3 * MODEL.used_by(100.0));
        // Below 32 tokens, the processor computes.
        let batch = place(Some(GPU), None).prompt(&MODEL, 16.0);
        assert_seconds(batch, 0.02e-3 + 1e-3);
    }

    #[test]
    fn a_cache_leaves_misses_to_the_link_or_to_the_processor() {
        let with = |misses| {
            let cache = Some(Cache { hits: 0.75, misses });
            place(Some(Gpu { cache, ..GPU }), None).token(&MODEL)
        };
        let others = 0.1e-3 + 0.2e-3 + 5.0 * CROSSING;
        // A quarter of 10 MB at 10 GB/s: 0.25 ms; the GPU computes all.
        assert_seconds(with(Misses::Copied), others + 0.2e-3 + 0.25e-3);
        // Three quarters of 0.2 ms, a quarter of 2 ms; together the longer of both.
        assert_seconds(with(Misses::Processor), others + 0.15e-3 + 0.5e-3);
        assert_seconds(with(Misses::Beside), others + 0.5e-3);
    }

    #[test]
    fn a_run_adds_what_is_predicted_nowhere() {
        // 8 of 10 ms are explained: 2 ms are added to each prediction.
        let slower = Calibration::of(10e-3, 8e-3);
        let other = |of: &Calibration, seconds| {
            let time = Time {
                processor: seconds,
                seconds,
                ..Time::default()
            };
            time.calibrated(of, 1.0)
        };
        assert_seconds(other(&slower, 8e-3), 10e-3);
        assert_seconds(other(&slower, 4e-3), 6e-3);
        // A prediction of 17 ms for 10 is halved, and 1.5 ms are no product.
        let faster = Calibration::of(10e-3, 17e-3);
        assert_seconds(other(&faster, 17e-3), 10e-3);
        assert_seconds(other(&faster, 4e-3), 3.5e-3);
        assert_seconds(other(&Calibration::assumed(8.5e-3), 8.5e-3), 10e-3);
    }

    #[test]
    fn hits_grow_with_the_cache() {
        assert_eq!([hits(0.0), hits(1.0), hits(2.0)], [0.0, 1.0, 1.0]);
        assert!(hits(0.1) < hits(0.2) && hits(0.1) > 0.1);
    }
}
