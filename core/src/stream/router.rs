//! A guess at the routing of the next layer.
//!
//! The residual stream changes little from one layer to the next. So the router of the next
//! layer, applied to the input of this layer's router, chooses many of the experts that it will
//! choose from its own input. That input is normalised with the weights of its own layer, so the
//! quotient of both layers' weights is multiplied into the router beforehand.

use std::io;
use std::sync::atomic::{AtomicUsize, Ordering};

use parking_lot::Mutex;

use super::requests::ExpertSet;
use crate::gguf::GgufFile;

/// The most bytes of routers that are kept.
const MOST_BYTES: u64 = 256 << 20;
/// No layer waits for a guess.
const NONE: usize = usize::MAX;

/// The routers of a model.
#[derive(Debug)]
pub struct Routers {
    /// By the position of the layer; empty where there is no guess.
    layers: Vec<Router>,
    input: Mutex<Input>,
    /// The position of the layer to guess.
    next: AtomicUsize,
}

/// The router of a layer, made for the input of the layer before.
#[derive(Debug, Default)]
struct Router {
    /// A row for each expert.
    rows: Vec<f32>,
    width: usize,
}

/// The input of a router that ran.
#[derive(Debug)]
struct Input {
    hidden: Vec<f32>,
    /// How many experts the router chose.
    used: usize,
}

impl Routers {
    /// Reads the routers of layers, given by number and experts. Layers whose router is not
    /// stored as `F32` have no guess.
    pub fn read(files: &[&GgufFile], layers: &[(u32, u32)]) -> io::Result<Routers> {
        let mut bytes = 0;
        let mut before: Option<Vec<f32>> = None;
        let mut routers = Vec::with_capacity(layers.len());
        for &(layer, experts) in layers {
            let norm = ["ffn_norm", "post_attention_norm"]
                .iter()
                .find_map(|name| floats(files, &format!("blk.{layer}.{name}.weight"), MOST_BYTES));
            let norm = norm.transpose()?.map(|(norm, _)| norm);
            let left = MOST_BYTES - bytes;
            let found = floats(files, &format!("blk.{layer}.ffn_gate_inp.weight"), left);
            let mut router = Router::default();
            if let Some((mut rows, width)) = found.transpose()?
                && width > 0
                && width.checked_mul(experts as usize) == Some(rows.len())
            {
                bytes += 4 * rows.len() as u64;
                if let (Some(before), Some(norm)) = (&before, &norm)
                    && before.len() == width
                    && norm.len() == width
                {
                    for row in rows.chunks_exact_mut(width) {
                        for ((weight, norm), before) in row.iter_mut().zip(norm).zip(before) {
                            *weight *= if *before == 0.0 { 1.0 } else { norm / before };
                        }
                    }
                }
                router = Router { rows, width };
            }
            before = norm;
            routers.push(router);
        }
        let width = routers.iter().map(|router| router.width).max();
        Ok(Routers {
            layers: routers,
            input: Mutex::new(Input {
                hidden: Vec::with_capacity(width.unwrap_or(0)),
                used: 0,
            }),
            next: AtomicUsize::new(NONE),
        })
    }

    /// Keeps the input of a router, which chose `used` experts, for a guess at the layer after it,
    /// which is given by its position. Drops the input if the last one is being used.
    pub fn keep(&self, next: usize, hidden: &[f32], used: usize) {
        if hidden.is_empty() || self.layers[next].width != hidden.len() {
            return;
        }
        if let Some(mut input) = self.input.try_lock() {
            input.hidden.clear();
            // Within the capacity.
            input.hidden.extend_from_slice(hidden);
            // The best half: what is more likely wrong would cost more bytes than it saves time.
            input.used = used.div_ceil(2);
            self.next.store(next, Ordering::Release);
        }
    }

    /// Returns a guess that was not made yet: the position of a layer, and its experts.
    pub fn guess(&self) -> Option<(usize, ExpertSet)> {
        if self.next.load(Ordering::Acquire) == NONE {
            return None;
        }
        let input = self.input.lock();
        let next = self.next.swap(NONE, Ordering::AcqRel);
        let router = self.layers.get(next)?;
        Some((next, router.choose(&input)))
    }
}

impl Router {
    /// Returns the experts with the largest products.
    fn choose(&self, input: &Input) -> ExpertSet {
        let product =
            |row: &[f32]| -> f32 { row.iter().zip(&input.hidden).map(|(a, b)| a * b).sum() };
        let mut scores: Vec<(f32, u32)> = self
            .rows
            .chunks_exact(self.width)
            .map(product)
            .zip(0..)
            .collect();
        if !(1..=scores.len()).contains(&input.used) {
            return ExpertSet::EMPTY;
        }
        scores.select_nth_unstable_by(input.used - 1, |a, b| b.0.total_cmp(&a.0));
        let best = scores[..input.used].iter();
        best.map(|(_, expert)| *expert).collect()
    }
}

/// Returns a tensor of floats and its row length; `None` when there is none of that name, or its
/// type or size is another.
fn floats(files: &[&GgufFile], name: &str, most: u64) -> Option<io::Result<(Vec<f32>, usize)>> {
    let name = std::ffi::CString::new(name).ok()?;
    let (file, info) = files.iter().find_map(|file| {
        let at = file.header.find(&name)?;
        Some((*file, &file.header.tensors[at]))
    })?;
    if info.ty.name() != "f32" || info.nbytes > most {
        return None;
    }
    let len = usize::try_from(info.nbytes).ok()?;
    let read = || {
        // Where memory is limited, the program goes on without a reader.
        let (mut bytes, mut floats) = (Vec::new(), Vec::new());
        bytes.try_reserve_exact(len)?;
        floats.try_reserve_exact(len / 4)?;
        bytes.resize(len, 0);
        file.source.read_at(&mut bytes, info.offset)?;
        let (words, _) = bytes.as_chunks::<4>();
        floats.extend(words.iter().map(|word| f32::from_le_bytes(*word)));
        Ok((floats, info.ne[0] as usize))
    };
    Some(read())
}
