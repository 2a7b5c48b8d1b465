//! The counters.

use std::cell::{Cell, RefCell};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use parking_lot::Mutex;

/// Which layers are counted and how many routed experts each has.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Layout {
    /// Number of each layer and how many experts it has, by ascending number.
    layers: Vec<(u32, u32)>,
}

impl Layout {
    /// Layers in any order; of one that is named twice, the larger count is taken.
    /// Layers without experts are left out.
    pub fn new(layers: impl IntoIterator<Item = (u32, u32)>) -> Layout {
        let mut layers: Vec<(u32, u32)> = layers
            .into_iter()
            .filter(|&(_, experts)| experts > 0)
            .collect();
        layers.sort_unstable();
        layers.dedup_by(|next, before| {
            let same = next.0 == before.0;
            if same {
                before.1 = before.1.max(next.1);
            }
            same
        });
        Layout { layers }
    }

    /// Number and expert count of each layer, ascending.
    pub fn layers(&self) -> &[(u32, u32)] {
        &self.layers
    }

    /// Position of a layer by its number.
    pub fn position(&self, layer: u32) -> Option<usize> {
        self.layers.binary_search_by_key(&layer, |l| l.0).ok()
    }
}

/// A matrix of routed ids: for each token the experts that were chosen, as ggml lays
/// it out for `GGML_OP_MUL_MAT_ID`: 32-bit integers, rows perhaps padded.
#[derive(Debug, Clone, Copy)]
pub struct Ids<'a> {
    /// Everything from the first id to the last.
    pub bytes: &'a [u8],
    /// Experts per token (`ne[0]`).
    pub used: usize,
    /// Tokens (`ne[1]`).
    pub tokens: usize,
    /// Bytes from one id of a token to the next (`nb[0]`).
    pub used_stride: usize,
    /// Bytes from one token to the next (`nb[1]`).
    pub token_stride: usize,
}

impl Ids<'_> {
    /// Bytes from the first id of such a matrix to the end of the last; `None` when that
    /// is more than memory, and 0 when there are no ids.
    pub fn span(
        used: usize,
        tokens: usize,
        used_stride: usize,
        token_stride: usize,
    ) -> Option<usize> {
        if used == 0 || tokens == 0 {
            return Some(0);
        }
        let rows = (tokens - 1).checked_mul(token_stride)?;
        let row = (used - 1).checked_mul(used_stride)?;
        let len = rows.checked_add(row)?.checked_add(4)?;
        (len <= isize::MAX as usize).then_some(len)
    }

    /// An id; `None` beyond the bytes.
    pub fn get(&self, token: usize, used: usize) -> Option<i32> {
        let at = token
            .checked_mul(self.token_stride)?
            .checked_add(used.checked_mul(self.used_stride)?)?;
        let bytes = self.bytes.get(at..at.checked_add(4)?)?;
        Some(i32::from_ne_bytes(bytes.try_into().ok()?))
    }
}

/// Counts of one model, added to by any number of threads.
#[derive(Debug)]
pub struct Trace {
    /// Tells traces apart, also those at the same address one after the other.
    id: u64,
    layout: Layout,
    /// Where the counters of each layer begin: its tokens, then its experts.
    starts: Vec<usize>,
    shards: Mutex<Vec<Arc<Shard>>>,
    origin: Mutex<Origin>,
    rejected: AtomicU64,
}

/// What the counters were at the last reset.
#[derive(Debug)]
struct Origin {
    counts: Vec<u64>,
    since: Instant,
}

/// The counters of one thread. Only that thread adds to them, so an addition is a load
/// and a store; others read them at any time.
#[derive(Debug)]
struct Shard {
    counts: Box<[AtomicU64]>,
    owned: AtomicBool,
}

impl Shard {
    fn add(&self, at: usize, by: u64) {
        let counter = &self.counts[at];
        counter.store(counter.load(Ordering::Relaxed) + by, Ordering::Relaxed);
    }
}

/// The shards that a thread owns; given back when it ends.
struct Owned(Vec<(u64, Arc<Shard>)>);

impl Drop for Owned {
    fn drop(&mut self) {
        for (_, shard) in &self.0 {
            shard.owned.store(false, Ordering::Release);
        }
    }
}

thread_local! {
    static OWNED: RefCell<Owned> = const { RefCell::new(Owned(Vec::new())) };
    /// The shard that was used last, by the id of its trace. It is kept alive by `OWNED`.
    static LAST: Cell<(u64, *const Shard)> = const { Cell::new((0, std::ptr::null())) };
}

impl Trace {
    /// Counters for these layers, all zero.
    pub fn new(layout: Layout) -> Trace {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        let mut starts = Vec::with_capacity(layout.layers.len() + 1);
        let mut at = 0;
        for &(_, experts) in &layout.layers {
            starts.push(at);
            at += 1 + experts as usize;
        }
        starts.push(at);
        Trace {
            id: NEXT.fetch_add(1, Ordering::Relaxed),
            layout,
            starts,
            shards: Mutex::new(Vec::new()),
            origin: Mutex::new(Origin {
                counts: vec![0; at],
                since: Instant::now(),
            }),
            rejected: AtomicU64::new(0),
        }
    }

    /// The layers that are counted.
    pub fn layout(&self) -> &Layout {
        &self.layout
    }

    /// Counts one activation of one token. `layer` is a position in the layout.
    pub fn record(&self, layer: usize, expert: u32) {
        let bytes = expert.to_ne_bytes();
        self.record_batch(
            layer,
            &Ids {
                bytes: &bytes,
                used: 1,
                tokens: 1,
                used_stride: 4,
                token_stride: 4,
            },
        );
    }

    /// Counts every id of a matrix, and its tokens. Ids that are no experts of the layer
    /// are counted as rejected and otherwise left out.
    pub fn record_batch(&self, layer: usize, ids: &Ids<'_>) {
        let Some((_, experts)) = self.layout.layers.get(layer) else {
            self.rejected.fetch_add(1, Ordering::Relaxed);
            return;
        };
        let start = self.starts[layer];
        let mut rejected = 0;
        self.with_shard(|shard| {
            shard.add(start, ids.tokens as u64);
            for token in 0..ids.tokens {
                for used in 0..ids.used {
                    match ids.get(token, used).and_then(|id| u32::try_from(id).ok()) {
                        Some(expert) if expert < *experts => {
                            shard.add(start + 1 + expert as usize, 1);
                        }
                        _ => rejected += 1,
                    }
                }
            }
        });
        if rejected > 0 {
            self.rejected.fetch_add(rejected, Ordering::Relaxed);
        }
    }

    fn with_shard(&self, work: impl FnOnce(&Shard)) {
        let (id, shard) = LAST.get();
        if id == self.id {
            // SAFETY: `LAST` names a shard that `OWNED` of this thread keeps alive.
            work(unsafe { &*shard });
            return;
        }
        OWNED.with_borrow_mut(|owned| {
            // Shards of traces that are gone have no other owner.
            owned.0.retain(|(_, shard)| Arc::strong_count(shard) > 1);
            let known = owned.0.iter().find(|(id, _)| *id == self.id);
            let shard = match known {
                Some((_, shard)) => shard.clone(),
                None => {
                    let shard = self.take_shard();
                    owned.0.push((self.id, shard.clone()));
                    shard
                }
            };
            LAST.set((self.id, Arc::as_ptr(&shard)));
            work(&shard);
        });
    }

    /// A shard that no thread owns, new if need be.
    fn take_shard(&self) -> Arc<Shard> {
        let mut shards = self.shards.lock();
        let free = shards
            .iter()
            .find(|shard| !shard.owned.swap(true, Ordering::Acquire));
        if let Some(shard) = free {
            return shard.clone();
        }
        let total = *self.starts.last().expect("at least one");
        let shard = Arc::new(Shard {
            counts: (0..total).map(|_| AtomicU64::new(0)).collect(),
            owned: AtomicBool::new(true),
        });
        shards.push(shard.clone());
        shard
    }

    fn sums(&self) -> Vec<u64> {
        let mut sums = vec![0; *self.starts.last().expect("at least one")];
        for shard in self.shards.lock().iter() {
            for (sum, count) in sums.iter_mut().zip(&shard.counts) {
                *sum += count.load(Ordering::Relaxed);
            }
        }
        sums
    }

    /// Forgets what was counted so far. Additions that run meanwhile are counted before
    /// or after it, each once.
    pub fn reset(&self) {
        let mut origin = self.origin.lock();
        origin.counts = self.sums();
        origin.since = Instant::now();
        self.rejected.store(0, Ordering::Relaxed);
    }

    /// What was counted since the last reset.
    pub fn snapshot(&self) -> Snapshot {
        let origin = self.origin.lock();
        let mut counts = self.sums();
        for (count, before) in counts.iter_mut().zip(&origin.counts) {
            *count -= before;
        }
        let layers = self.layout.layers.iter().zip(self.starts.windows(2));
        Snapshot {
            layers: layers
                .map(|(&(layer, _), bounds)| LayerCounts {
                    layer,
                    tokens: counts[bounds[0]],
                    experts: counts[bounds[0] + 1..bounds[1]].to_vec(),
                })
                .collect(),
            rejected: self.rejected.load(Ordering::Relaxed),
            time: origin.since.elapsed(),
        }
    }
}

/// What was counted.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Snapshot {
    /// Layers by ascending number.
    pub layers: Vec<LayerCounts>,
    /// Ids that were no experts.
    pub rejected: u64,
    /// Since the trace began or was reset.
    pub time: Duration,
}

/// Counts of one layer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LayerCounts {
    /// Its number.
    pub layer: u32,
    /// Tokens that were routed.
    pub tokens: u64,
    /// Activations of each expert.
    pub experts: Vec<u64>,
}

impl LayerCounts {
    /// Activations of all experts.
    pub fn activations(&self) -> u64 {
        self.experts.iter().sum()
    }
}

impl Snapshot {
    /// Activations of all layers.
    pub fn activations(&self) -> u64 {
        self.layers.iter().map(LayerCounts::activations).sum()
    }

    /// The most tokens that any layer routed. Layers differ: of a prompt, the last ones
    /// see only the tokens whose results are asked for.
    pub fn tokens(&self) -> u64 {
        let tokens = self.layers.iter().map(|layer| layer.tokens);
        tokens.max().unwrap_or(0)
    }

    /// Adds what another process or run counted of the same model.
    pub fn merge(&mut self, other: &Snapshot) {
        for layer in &other.layers {
            match self.layers.binary_search_by_key(&layer.layer, |l| l.layer) {
                Err(at) => self.layers.insert(at, layer.clone()),
                Ok(at) => {
                    let mine = &mut self.layers[at];
                    mine.tokens += layer.tokens;
                    let len = mine.experts.len().max(layer.experts.len());
                    mine.experts.resize(len, 0);
                    for (mine, other) in mine.experts.iter_mut().zip(&layer.experts) {
                        *mine += other;
                    }
                }
            }
        }
        self.rejected += other.rejected;
        self.time += other.time;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ids(rows: &[[i32; 2]], padding: usize) -> Vec<u8> {
        let row =
            |row: &[i32; 2]| [row.map(i32::to_ne_bytes).concat(), vec![0xff; padding]].concat();
        rows.iter().flat_map(row).collect()
    }

    fn matrix(bytes: &[u8], tokens: usize, padding: usize) -> Ids<'_> {
        Ids {
            bytes,
            used: 2,
            tokens,
            used_stride: 4,
            token_stride: 8 + padding,
        }
    }

    #[test]
    fn every_id_of_a_padded_matrix_is_counted_once() {
        let trace = Trace::new(Layout::new([(3, 4), (1, 8)]));
        let bytes = ids(&[[0, 3], [3, 1], [3, 0]], 20);
        let layer = trace.layout().position(3).expect("a layer");
        trace.record_batch(layer, &matrix(&bytes, 3, 20));
        let snapshot = trace.snapshot();
        assert_eq!(snapshot.layers[0].layer, 1);
        assert_eq!(snapshot.layers[0].experts, [0; 8]);
        assert_eq!(
            (snapshot.layers[1].layer, snapshot.layers[1].tokens),
            (3, 3)
        );
        assert_eq!(snapshot.layers[1].experts, [2, 1, 0, 3]);
        assert_eq!((snapshot.activations(), snapshot.tokens()), (6, 3));
    }

    #[test]
    fn what_is_no_expert_is_rejected() {
        let trace = Trace::new(Layout::new([(0, 4)]));
        let bytes = ids(&[[4, -1], [i32::MAX, 2]], 0);
        trace.record_batch(0, &matrix(&bytes, 2, 0));
        // Strides and counts that lead out of the bytes.
        trace.record_batch(0, &matrix(&bytes[..9], 2, usize::MAX - 8));
        trace.record_batch(9, &matrix(&bytes, 2, 0));
        let snapshot = trace.snapshot();
        assert_eq!(snapshot.layers[0].experts, [0, 0, 1, 0]);
        assert_eq!(snapshot.rejected, 3 + 4 + 1);
    }

    #[test]
    fn threads_add_in_parallel_and_nothing_is_lost() {
        const EACH: u64 = 100_000;
        let trace = Trace::new(Layout::new([(0, 512), (1, 512)]));
        // More threads than live at a time: shards are used again.
        for _ in 0..3 {
            std::thread::scope(|scope| {
                for thread in 0..8u32 {
                    let trace = &trace;
                    scope.spawn(move || {
                        for i in 0..EACH {
                            trace.record((i % 2) as usize, (i as u32 * 7 + thread) % 512);
                        }
                    });
                }
                let watched = trace.snapshot().activations();
                assert!(watched <= 3 * 8 * EACH);
            });
        }
        assert_eq!(trace.snapshot().activations(), 3 * 8 * EACH);
        assert!(trace.shards.lock().len() <= 8);
    }

    #[test]
    fn a_reset_forgets_and_a_merge_adds() {
        let trace = Trace::new(Layout::new([(0, 4), (2, 2)]));
        trace.record(0, 1);
        trace.reset();
        assert_eq!(trace.snapshot().activations(), 0);
        trace.record(0, 1);
        trace.record(1, 0);
        let mut sum = trace.snapshot();
        let other = Trace::new(Layout::new([(0, 6), (1, 2)]));
        other.record(0, 5);
        other.record(1, 1);
        sum.merge(&other.snapshot());
        let layers: Vec<(u32, Vec<u64>)> = sum
            .layers
            .iter()
            .map(|l| (l.layer, l.experts.clone()))
            .collect();
        assert_eq!(
            layers,
            [
                (0, vec![0, 1, 0, 0, 0, 1]),
                (1, vec![0, 1]),
                (2, vec![1, 0])
            ]
        );
    }

    #[test]
    fn traces_do_not_share_counters() {
        for _ in 0..100 {
            let first = Trace::new(Layout::new([(0, 2)]));
            let second = Trace::new(Layout::new([(0, 2)]));
            for _ in 0..3 {
                first.record(0, 0);
                second.record(0, 1);
            }
            assert_eq!(first.snapshot().layers[0].experts, [3, 0]);
            assert_eq!(second.snapshot().layers[0].experts, [0, 3]);
        }
    }
}
