//! The settings that are predicted, and what each of them costs.

use std::collections::BTreeSet;
use std::ffi::OsString;

use serde::Serialize;
use sidecar_core::memory;
use sidecar_core::protocol::{Measured, OnDevice, StreamFigures, Work};

use super::model::{self, Cache, Calibration, Disk, Gpu, Misses, Model, Place, Products, Time};
use super::options::{self, Known};
use super::shape::{Bytes, Shape};

/// llama.cpp's default for the tokens of a batch.
pub const DEFAULT_BATCH: u64 = 512;
/// Batches that are predicted where experts are copied to a GPU.
const BATCHES: [u64; 4] = [512, 1024, 2048, 4096];
/// Memory of a device that stays free, at most: llama.cpp's `--fit-target` is 1024 MiB.
const MARGIN: u64 = 1 << 30;
/// Activations of a token that a device has at a time, in the size of an input, in F32.
const ACTIVATIONS: u64 = 40;
/// Capabilities of the drop-in, as `run` has them.
pub const STREAM: &str = "--stream-experts";
const POST_FETCH: &str = "--post-fetch";
const EXPERT_CACHE: &str = "--expert-cache";
const PAGE_LOCK: &str = "--page-lock";

/// What is not slower than this, as a share, is equal.
pub const EQUAL: f64 = 0.02;
/// Why a number of threads is not predicted.
const NOT_MEASURED: &str = "this number of threads was not measured";

/// How the program uses a GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct OnGpu {
    /// Layers with experts whose experts are in host memory.
    pub host_layers: u32,
    /// llama.cpp's own cache of experts, in MiB; 0: none.
    pub own_cache_mib: u64,
    /// A capability of the drop-in: early copies, a cache of experts, page-locked memory.
    pub with: Option<&'static str>,
}

/// What can be chosen.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct Setting {
    pub threads: u32,
    pub batch_threads: u32,
    pub repacked: bool,
    pub mapped: bool,
    pub batch: u64,
    pub gpu: Option<OnGpu>,
    pub streams: bool,
}

/// Speeds of the model's file, in bytes per second.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct FileSpeeds {
    /// Of direct reads, several at a time.
    pub direct: f64,
    /// Of page faults in experts by so many threads, with a single token.
    pub faults: Vec<(u32, f64)>,
    /// Of page faults in experts, with a batch: threads wait for the disk at different times.
    pub batch_faults: f64,
}

/// What a run of the program has shown.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Calibrations {
    pub token: Calibration,
    pub prompt: Calibration,
}

/// What runs of the program have shown.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct Runs {
    pub typed: Option<Calibrations>,
    /// With experts from disk. `None`: not run.
    pub streamed: Option<Calibrations>,
    /// What its program had in memory then.
    pub memory: StreamFigures,
    /// Why no experts were read from disk.
    #[serde(skip)]
    pub stream_obstacle: Option<String>,
}

/// What is known about the model, the machine and the program.
pub struct Facts {
    pub shape: Shape,
    pub works: [Work; 4],
    pub measured: Measured,
    /// Memory that programs can still use.
    pub free: u64,
    pub file: Option<FileSpeeds>,
    /// Tokens of the context, for memory of devices.
    pub context: u64,
    /// Tokens of prompts and answers that are weighed.
    pub tokens: (f64, f64),
    /// Hits of a cache of a share of all experts, by a trace.
    pub hits: Option<Vec<f64>>,
    /// How the program was typed.
    pub typed: Setting,
    pub runs: Runs,
}

/// A setting and its prediction.
#[derive(Debug, Clone, Serialize)]
pub struct Candidate {
    pub setting: Setting,
    pub token: Time,
    pub prompt: Time,
    /// Time of the weighed tokens.
    pub seconds: f64,
    pub memory: Memory,
}

/// Where a part of the weights is, in bytes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize)]
pub struct Spread {
    pub gpu: u64,
    pub memory: u64,
    /// What is read from the disk when it is needed.
    pub disk: u64,
}

/// What goes where.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize)]
pub struct Memory {
    /// Routed experts; on the GPU also those in a cache.
    pub experts: Spread,
    /// All other tensors.
    pub others: Spread,
    /// Keys and values of the context, in F16.
    pub context: Spread,
}

impl Facts {
    /// The device that is planned for: the one with the most memory whose products were measured.
    pub fn device(&self) -> Option<&OnDevice> {
        let usable = self
            .measured
            .devices
            .iter()
            .filter(|of| of.obstacle.is_none());
        usable.max_by_key(|of| of.free)
    }

    /// Returns the products of the processor with a number of threads.
    fn products(&self, threads: u32, repacked: bool) -> Option<Products> {
        let of = self.measured.processor.iter();
        let mut of = of.filter(|of| of.threads == threads);
        let repacked = repacked && !self.measured.repacked.is_empty();
        let of = of.find(|of| of.repacked == repacked)?;
        Some(self.shape.products(&self.works, &of.seconds))
    }

    /// Returns numbers of threads, and bytes of weights per second that they multiply a single token with.
    pub fn weights_per_second(&self) -> Vec<(u32, f64)> {
        let bytes = self.shape.bytes().others as f64 + self.shape.model().routed_token;
        let plain = self.measured.processor.iter().filter(|of| !of.repacked);
        let speed = |of: Products| bytes / (of.other_token + of.routed_token);
        plain
            .map(|of| {
                (
                    of.threads,
                    speed(self.shape.products(&self.works, &of.seconds)),
                )
            })
            .collect()
    }

    /// Returns the smallest number of layers whose experts must stay in host memory.
    pub fn fewest_host_layers(&self, batch: u64, cache: u64) -> Option<u32> {
        let layers = self.shape.expert_layers;
        (0..=layers).find(|&host| self.fits_device(host, batch, cache))
    }

    fn fits_device(&self, host_layers: u32, batch: u64, cache: u64) -> bool {
        self.on_device(host_layers, cache) + self.working(batch) <= self.device_memory()
    }

    /// Memory of the device that may be used.
    fn device_memory(&self) -> u64 {
        let free = self.device().map_or(0, |of| of.free);
        free - MARGIN.min(free / 8)
    }

    fn on_device(&self, host_layers: u32, cache: u64) -> u64 {
        let Bytes { routed, others, .. } = self.shape.bytes();
        let layers = u64::from(self.shape.expert_layers.max(1));
        let here = layers - u64::from(host_layers).min(layers);
        others + routed / layers * here + cache
    }

    /// Memory of a device for the context and for activations.
    fn working(&self, batch: u64) -> u64 {
        self.context_bytes() + 4 * ACTIVATIONS * batch * self.shape.width
    }

    /// Memory of the program beside its weights: as a run has shown; else that of its context.
    fn beside_weights(&self) -> u64 {
        let Bytes { others, rest, .. } = self.shape.bytes();
        let found = &self.runs.memory;
        match found.fitting_bytes < found.expert_bytes {
            true => (memory::usable(self.free) + found.missing_bytes)
                .saturating_sub(others + rest + found.fitting_bytes),
            false => self.context_bytes(),
        }
    }

    pub fn context_bytes(&self) -> u64 {
        self.shape.context_bytes.unwrap_or(0) * self.context
    }

    /// Returns the share of the layers with experts whose experts are in host memory.
    fn on_host(&self, gpu: &OnGpu) -> f64 {
        f64::from(gpu.host_layers) / f64::from(self.shape.expert_layers.max(1))
    }

    /// Returns the hits of a cache on a device.
    fn hits(&self, bytes: u64, host_layers: u32) -> f64 {
        let layers = u64::from(self.shape.expert_layers.max(1));
        let cached = self.shape.bytes().routed / layers * u64::from(host_layers);
        let share = bytes as f64 / cached.max(1) as f64;
        self.hits_of(share)
    }

    /// Returns the hits of a cache of a share of all experts.
    fn hits_of(&self, share: f64) -> f64 {
        match &self.hits {
            Some(curve) => {
                let at = (share * (curve.len() - 1) as f64).clamp(0.0, (curve.len() - 1) as f64);
                curve[at as usize]
            }
            None => model::hits(share),
        }
    }

    /// Returns the prediction of a setting, or why the program could not run with it.
    pub fn predict(&self, setting: &Setting) -> Result<Candidate, String> {
        let (place, token, prompt) = self.uncalibrated(setting, self.tokens.0)?;
        let (token, prompt) = self.calibrated(setting, token, prompt);
        Ok(Candidate {
            setting: *setting,
            token,
            prompt,
            seconds: self.tokens.0 * prompt.seconds + self.tokens.1 * token.seconds,
            memory: self.memory(setting, &place),
        })
    }

    /// Returns what is predicted without any run: where the model is computed, the time of a single token, and
    /// that of one of a prompt of so many tokens.
    pub fn uncalibrated(
        &self,
        setting: &Setting,
        prompt_tokens: f64,
    ) -> Result<(Place, Time, Time), String> {
        let model = self.shape.model();
        let place = self.place(setting, &model)?;
        let prompt = place.prompt(&model, prompt_tokens);
        Ok((place, place.token(&model), prompt))
    }

    fn memory(&self, setting: &Setting, place: &Place) -> Memory {
        let Bytes {
            routed,
            others,
            rest,
        } = self.shape.bytes();
        let context = self.context_bytes();
        let missing = place.disk.map_or(0.0, |disk| disk.missing_token);
        let on_host = place.gpu.map_or(1.0, |gpu| gpu.on_host);
        let in_host = (routed as f64 * on_host) as u64;
        let on_disk = (in_host as f64 * missing) as u64;
        let mut found = Memory {
            experts: Spread {
                gpu: routed - in_host,
                memory: in_host - on_disk,
                disk: on_disk,
            },
            ..Memory::default()
        };
        match setting.gpu {
            None => {
                found.others.memory = others + rest;
                found.context.memory = context;
            }
            Some(gpu) => {
                found.experts.gpu += self.cache_bytes(&gpu, setting.batch);
                found.others.gpu = others;
                found.others.memory = rest;
                found.context.gpu = context;
            }
        }
        found
    }

    /// Memory of a cache of experts on the device.
    fn cache_bytes(&self, gpu: &OnGpu, batch: u64) -> u64 {
        if gpu.with != Some(EXPERT_CACHE) {
            return gpu.own_cache_mib << 20;
        }
        let used = self.on_device(gpu.host_layers, 0) + self.working(batch);
        self.device_memory().saturating_sub(used)
    }

    fn place(&self, setting: &Setting, model: &Model) -> Result<Place, String> {
        if let Some(obstacle) = self
            .runs
            .stream_obstacle
            .as_ref()
            .filter(|_| setting.streams)
        {
            return Err(obstacle.clone());
        }
        let repacked = setting.repacked && !setting.streams;
        let of_token = self
            .products(setting.threads, repacked)
            .ok_or(NOT_MEASURED)?;
        let of_batch = self
            .products(setting.batch_threads, repacked)
            .ok_or(NOT_MEASURED)?;
        let processor = Products {
            routed_batch: of_batch.routed_batch,
            other_batch: of_batch.other_batch,
            ..of_token
        };
        let gpu = setting
            .gpu
            .map(|gpu| self.gpu(&gpu, setting.batch))
            .transpose()?;
        Ok(Place {
            processor,
            gpu,
            disk: self.disk(setting, model)?,
            batch: setting.batch as f64,
        })
    }

    fn gpu(&self, gpu: &OnGpu, batch: u64) -> Result<Gpu, String> {
        let device = self.device().ok_or("no GPU was measured")?;
        let cache = self.cache_bytes(gpu, batch);
        if !self.fits_device(gpu.host_layers, batch, cache) {
            return Err(format!("the memory of {} is too small for it", device.name));
        }
        let link = match gpu.with {
            // Early copies are staged in page-locked memory.
            Some(_) if device.locked > 0.0 => device.locked,
            _ => device.pageable,
        };
        let hits = self.hits(cache, gpu.host_layers);
        let misses = match gpu.with {
            Some(EXPERT_CACHE) => Misses::Beside,
            _ => Misses::Copied,
        };
        Ok(Gpu {
            products: self.shape.products(&self.works, &device.seconds),
            link,
            copies_ahead: matches!(gpu.with, Some(POST_FETCH | EXPERT_CACHE)),
            on_host: self.on_host(gpu),
            cache: (cache > 0 && gpu.host_layers > 0).then_some(Cache { hits, misses }),
            // Caches of experts are for single tokens.
            held: 0.0,
        })
    }

    /// Returns what is read from the disk; an error where memory is too small for what cannot be read
    /// again.
    fn disk(&self, setting: &Setting, model: &Model) -> Result<Option<Disk>, String> {
        let Bytes {
            routed,
            others,
            rest,
        } = self.shape.bytes();
        let on_host = setting.gpu.map_or(1.0, |gpu| self.on_host(&gpu));
        let routed_here = (routed as f64 * on_host) as u64;
        let others_here = if setting.gpu.is_some() {
            rest
        } else {
            others + rest
        };
        if !setting.mapped && routed_here + others_here > self.free {
            return Err("without a mapping, all of it must fit into the free memory".into());
        }
        let (repacked_routed, repacked_others) = match (setting.repacked, setting.gpu) {
            (true, None) => self.shape.repacked(&self.measured.repacked),
            _ => (0, 0),
        };
        let repacked = match setting.streams {
            true => repacked_others,
            false => repacked_routed + repacked_others,
        };
        if repacked > self.free {
            return Err("repacked weights cannot be dropped from memory, and do not fit".into());
        }
        let for_experts = match setting.streams {
            true => memory::usable(self.free),
            false => self.free,
        };
        let beside = match setting.gpu {
            None => self.beside_weights(),
            Some(_) => 0,
        };
        let for_experts = for_experts.saturating_sub(others_here + beside);
        let share = for_experts as f64 / routed_here.max(1) as f64;
        if model.routed == 0.0 && others_here > self.free {
            return Err("the model does not fit into the free memory".into());
        }
        if share >= 1.0 || model.routed == 0.0 {
            return Ok(None);
        }
        let file = self.file.as_ref();
        let file = file.ok_or("the speed of the model's file is not known")?;
        let mut faults = file.faults.iter();
        let faults = faults.find(|(threads, _)| *threads == setting.threads);
        let (_, faults) = *faults.ok_or(NOT_MEASURED)?;
        Ok(Some(match setting.streams {
            true => Disk {
                missing_token: 1.0 - self.resident(share),
                missing_batch: 1.0 - share,
                speed: file.direct,
                batch_speed: file.direct,
                reads_ahead: true,
            },
            false => Disk {
                missing_token: 1.0 - self.resident(share),
                // Each batch reads all experts in turn: a cache of the last used ones has none of them.
                missing_batch: 1.0,
                speed: faults,
                batch_speed: file.batch_faults,
                reads_ahead: false,
            },
        }))
    }

    /// Returns the share of routed experts that is in memory which holds a share of all experts.
    fn resident(&self, share: f64) -> f64 {
        match &self.hits {
            Some(_) => self.hits_of(share),
            None => share,
        }
    }

    /// Returns times with what a run has shown. What is no product takes longer where the processor is
    /// slower.
    fn calibrated(&self, setting: &Setting, token: Time, prompt: Time) -> (Time, Time) {
        let streamed = self.runs.streamed.as_ref().filter(|_| setting.streams);
        let Some(run) = streamed.or(self.runs.typed.as_ref()) else {
            let products = |of: &Time| of.processor + of.gpu;
            let assumed = |of: &Time| of.calibrated(&Calibration::assumed(products(of)), 1.0);
            return (assumed(&token), assumed(&prompt));
        };
        let (mut slower, mut slower_batch) = (1.0, 1.0);
        // Where the disk is waited for, it is most of what is no product, and waits for no thread.
        if setting.gpu.is_none() && token.disk == 0.0 {
            let repacked = self.typed.repacked && streamed.is_none();
            let of = |threads| self.products(threads, repacked).unwrap_or_default();
            let (here, typed) = (of(setting.threads), of(self.typed.threads));
            slower = ratio(
                here.other_token + here.routed_token,
                typed.other_token + typed.routed_token,
            );
            let (here, typed) = (of(setting.batch_threads), of(self.typed.batch_threads));
            slower_batch = ratio(
                here.other_batch + here.routed_batch,
                typed.other_batch + typed.routed_batch,
            );
        }
        (
            token.calibrated(&run.token, slower),
            prompt.calibrated(&run.prompt, slower_batch),
        )
    }

    /// Returns the settings that could be best for this program, and those that it was typed with.
    pub fn settings(&self, known: &Known) -> Vec<Setting> {
        let threads = self.measured.processor.iter().map(|of| of.threads);
        let all_threads: BTreeSet<u32> = threads.collect();
        let orders = match self.measured.repacked.is_empty() {
            true => vec![self.typed.repacked],
            false if known.has(options::NO_REPACK) || known.has(options::REPACK) => {
                vec![true, false]
            }
            false => vec![self.typed.repacked],
        };
        let mut all = vec![self.typed];
        let places = self.places(known);
        // Mapped, read into memory, streamed.
        let can_choose = known.has(options::LOAD_MODE) || known.has(options::NO_MMAP);
        // What is in memory gains nothing from being read from the disk.
        let can_stream = self.file.is_some();
        let mut files = vec![(true, false), (false, false), (true, true)];
        files.retain(|&(mapped, streams)| {
            (mapped == self.typed.mapped || can_choose) && (can_stream || !streams)
        });
        let can_differ = known.has(options::BATCH_THREADS);
        for &threads in &all_threads {
            let of_batch = all_threads.iter().copied();
            let of_batch = of_batch.filter(|&of| can_differ || of == threads);
            for &repacked in &orders {
                for batch_threads in of_batch.clone() {
                    for &(gpu, batch) in &places {
                        all.extend(files.iter().map(|&(mapped, streams)| Setting {
                            threads,
                            batch_threads,
                            repacked,
                            mapped,
                            batch,
                            gpu,
                            streams,
                        }));
                    }
                }
            }
        }
        all
    }

    /// Returns the places of experts, with sizes of batches.
    fn places(&self, known: &Known) -> Vec<(Option<OnGpu>, u64)> {
        let mut all = vec![(None, self.typed.batch)];
        if self.device().is_none() || !known.has(options::GPU_LAYERS) {
            return all;
        }
        let batches = BATCHES.into_iter().filter(|_| known.has(options::BATCH));
        for batch in std::iter::once(self.typed.batch).chain(batches) {
            let Some(fewest) = self.fewest_host_layers(batch, 0) else {
                continue;
            };
            let layers = self.shape.expert_layers;
            for host_layers in [fewest, layers] {
                if host_layers > 0 && !known.has(options::HOST_LAYERS) {
                    continue;
                }
                let on_host = |with, own_cache_mib| OnGpu {
                    host_layers,
                    own_cache_mib,
                    with,
                };
                all.push((Some(on_host(None, 0)), batch));
                if host_layers == 0 {
                    continue;
                }
                for with in [POST_FETCH, EXPERT_CACHE, PAGE_LOCK] {
                    all.push((Some(on_host(Some(with), 0)), batch));
                }
                let spare = self.cache_bytes(&on_host(Some(EXPERT_CACHE), 0), batch) >> 20;
                if known.has(options::MOE_CACHE) && spare > 0 {
                    all.push((Some(on_host(None, spare)), batch));
                }
            }
        }
        all
    }
}

fn ratio(of: f64, to: f64) -> f64 {
    if to > 0.0 { of / to } else { 1.0 }
}

impl Setting {
    /// Returns how many choices differ from those of another setting.
    pub fn changes(&self, other: &Setting) -> usize {
        let differing = [
            self.threads != other.threads,
            self.batch_threads != other.batch_threads,
            self.repacked != other.repacked,
            self.mapped != other.mapped,
            self.batch != other.batch,
            self.gpu != other.gpu,
            self.streams != other.streams,
        ];
        differing.into_iter().filter(|differs| *differs).count()
    }

    /// Whether two settings differ in the threads of prompts alone.
    pub fn is_like(&self, other: &Setting) -> bool {
        let batch_threads = other.batch_threads;
        *other
            == Setting {
                batch_threads,
                ..*self
            }
    }

    /// Returns the options of `run` for it.
    pub fn flags(&self) -> Vec<&'static str> {
        let streams = self.streams.then_some(STREAM);
        let with = self.gpu.and_then(|gpu| gpu.with);
        streams.into_iter().chain(with).collect()
    }

    /// Returns the command for it, of one that was typed with another setting.
    pub fn words(&self, typed: &Setting, command: &[OsString], known: &Known) -> Vec<OsString> {
        let mut words = command.to_vec();
        if self.threads != typed.threads {
            known.set(&mut words, options::THREADS, &self.threads.to_string());
        }
        if self.batch_threads != typed.batch_threads || self.threads != typed.threads {
            options::remove(&mut words, options::BATCH_THREADS);
            if self.batch_threads != self.threads {
                let threads = self.batch_threads.to_string();
                known.set(&mut words, options::BATCH_THREADS, &threads);
            }
        }
        if self.repacked != typed.repacked {
            match (self.repacked, known.has(options::NO_REPACK)) {
                (true, true) => options::remove(&mut words, options::NO_REPACK),
                (false, true) => known.add(&mut words, options::NO_REPACK),
                (repacked, false) => {
                    let value = if repacked { "1" } else { "0" };
                    known.set(&mut words, options::REPACK, value);
                }
            }
        }
        if self.mapped != typed.mapped {
            options::remove(&mut words, options::NO_MMAP);
            options::remove(&mut words, options::LOAD_MODE);
            match (self.mapped, known.has(options::LOAD_MODE)) {
                (true, _) => {}
                (false, true) => known.set(&mut words, options::LOAD_MODE, "none"),
                (false, false) => known.add(&mut words, options::NO_MMAP),
            }
        }
        if self.batch != typed.batch {
            known.set(&mut words, options::BATCH, &self.batch.to_string());
            let logical = options::number_in(&words, options::LOGICAL_BATCH).unwrap_or(2048);
            if self.batch > logical {
                known.set(&mut words, options::LOGICAL_BATCH, &self.batch.to_string());
            }
        }
        if self.gpu != typed.gpu {
            for name in [
                options::HOST_LAYERS,
                options::ALL_HOST,
                options::GPU_LAYERS,
                options::MOE_CACHE,
            ] {
                options::remove(&mut words, name);
            }
            let layers = if self.gpu.is_some() { "999" } else { "0" };
            known.set(&mut words, options::GPU_LAYERS, layers);
            if let Some(gpu) = self.gpu {
                if gpu.host_layers > 0 {
                    known.set(
                        &mut words,
                        options::HOST_LAYERS,
                        &gpu.host_layers.to_string(),
                    );
                }
                if gpu.own_cache_mib > 0 {
                    known.set(
                        &mut words,
                        options::MOE_CACHE,
                        &gpu.own_cache_mib.to_string(),
                    );
                }
            }
        }
        words
    }

    /// Returns the setting that a command has, on the processor.
    pub fn typed(words: &[OsString], cores: u32, repacks: bool) -> Setting {
        let number = |of| options::number_in(words, of);
        let threads = number(options::THREADS).map_or(cores, |of| of as u32);
        let repack = options::value_in(words, options::REPACK);
        let load = options::value_in(words, options::LOAD_MODE);
        let is_repacked =
            !options::is_in(words, options::NO_REPACK) && repack.is_none_or(|of| of != "0");
        let mapped =
            load.is_none_or(|mode| mode == "auto" || mode.to_string_lossy().contains("mmap"));
        Setting {
            threads,
            batch_threads: number(options::BATCH_THREADS).map_or(threads, |of| of as u32),
            repacked: repacks && is_repacked,
            mapped: mapped && !options::is_in(words, options::NO_MMAP),
            batch: number(options::BATCH).unwrap_or(DEFAULT_BATCH),
            gpu: None,
            streams: false,
        }
    }
}
