//! Per-thread counters of routed experts, and their sums.

use std::cell::{Cell, RefCell};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use super::ids::Ids;
use super::locality::{Locality, Recorder};
use super::snapshot::{LayerCounts, Snapshot};

/// How long a snapshot waits for the locality of a layer.
const LONGEST_WAIT: Duration = Duration::from_secs(1);

/// The layers that are counted, each with its number of routed experts.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ExpertLayout {
    /// Layer and number of experts, ascending by layer.
    layers: Vec<(u32, u32)>,
}

impl ExpertLayout {
    /// Makes a layout from pairs of layer and number of experts, in any order. Of a layer
    /// that is given twice, the larger number counts; layers without experts are left out.
    pub fn new(layers: impl IntoIterator<Item = (u32, u32)>) -> ExpertLayout {
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
        ExpertLayout { layers }
    }

    /// Returns layer and number of experts, ascending by layer.
    pub fn layers(&self) -> &[(u32, u32)] {
        &self.layers
    }

    /// Returns the position of a layer in the layout.
    pub fn position(&self, layer: u32) -> Option<usize> {
        self.layers.binary_search_by_key(&layer, |l| l.0).ok()
    }
}

/// Counts of one model. Any number of threads can record at the same time.
///
/// A trace counts the ids of routing and writes the sums as text, JSON or CSV:
///
/// ```
/// use sidecar_core::trace::{ExpertLayout, Ids, ModelMeta, Trace, to_csv, to_json, to_text};
///
/// // Layers 0 and 1 have 4 experts each.
/// let trace = Trace::new(ExpertLayout::new([(0, 4), (1, 4)]));
///
/// // Three tokens, two experts per token.
/// let ids: [[i32; 2]; 3] = [[0, 3], [3, 1], [3, 0]];
/// let bytes: Vec<u8> = ids.as_flattened().iter().flat_map(|id| id.to_ne_bytes()).collect();
/// let layer = trace.layout().position(1).expect("layer 1 has experts");
/// trace.record_batch(
///     layer,
///     &Ids::packed(&bytes, 2),
/// );
///
/// let counted = trace.snapshot();
/// assert_eq!(counted.layers[layer].experts, [2, 1, 0, 3]);
///
/// let model = ModelMeta { name: "a model".into(), ..ModelMeta::default() };
/// let summary = to_text(&model, &counted, false, None);
/// assert!(summary.contains("Expert   3:        3 activations (50.00%)"));
/// assert_eq!(to_json(&model, &counted)["tokens"], 3);
/// assert!(to_csv(&counted).contains("\n1,3,3,0.500000\n"));
/// ```
#[derive(Debug)]
pub struct Trace {
    /// Differs between all traces of the process, also of those that are freed.
    id: u64,
    layout: ExpertLayout,
    /// Position of each layer's first counter: its tokens; its experts follow.
    starts: Vec<usize>,
    threads: Mutex<Vec<Arc<ThreadCounters>>>,
    baseline: Mutex<Baseline>,
    rejected: AtomicU64,
    /// Of each layer, or empty. The batches of a layer come one after the other, so its lock is
    /// free unless several contexts evaluate at the same time.
    locality: Vec<Mutex<Recorded>>,
}

/// The locality of a layer.
#[derive(Debug, Default)]
struct Recorded {
    /// That of recordings that have ended.
    ended: Locality,
    running: Option<Box<Recorder>>,
}

/// The sums at the last reset.
#[derive(Debug)]
struct Baseline {
    counts: Vec<u64>,
    since: Instant,
}

/// The counters of one thread. Only that thread adds to the counters, so an addition is a
/// load and a store without a lock; other threads only read.
#[derive(Debug)]
struct ThreadCounters {
    counts: Box<[AtomicU64]>,
    owned: AtomicBool,
}

impl ThreadCounters {
    fn add(&self, at: usize, by: u64) {
        let counter = &self.counts[at];
        counter.store(counter.load(Ordering::Relaxed) + by, Ordering::Relaxed);
    }
}

/// The counters that a thread owns, by the id of their trace. Another thread can use the
/// counters after this one has ended.
struct Owned(Vec<(u64, Arc<ThreadCounters>)>);

impl Drop for Owned {
    fn drop(&mut self) {
        for (_, counters) in &self.0 {
            counters.owned.store(false, Ordering::Release);
        }
    }
}

thread_local! {
    static OWNED: RefCell<Owned> = const { RefCell::new(Owned(Vec::new())) };
    /// The counters that were used last, with the id of their trace. `OWNED` keeps them alive.
    static LAST: Cell<(u64, *const ThreadCounters)> = const { Cell::new((0, std::ptr::null())) };
}

impl Trace {
    /// Makes counters for these layers, all zero.
    pub fn new(layout: ExpertLayout) -> Trace {
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
            threads: Mutex::new(Vec::new()),
            baseline: Mutex::new(Baseline {
                counts: vec![0; at],
                since: Instant::now(),
            }),
            rejected: AtomicU64::new(0),
            locality: Vec::new(),
        }
    }

    /// Makes counters for these layers that also record the locality of batches.
    pub fn with_locality(layout: ExpertLayout) -> Trace {
        let nothing = layout.layers.iter().map(|_| Mutex::default());
        Trace {
            locality: nothing.collect(),
            ..Trace::new(layout)
        }
    }

    /// Returns the layers that are counted.
    pub fn layout(&self) -> &ExpertLayout {
        &self.layout
    }

    /// Counts one activation of one token. `layer` is a position in the layout. The other experts
    /// of the token are not known, so this use has no locality.
    pub fn record(&self, layer: usize, expert: u32) {
        self.count(layer, &Ids::one(&expert.to_ne_bytes()));
    }

    /// Counts every id of a matrix, and its tokens. `layer` is a position in the layout. Ids
    /// that are no experts of the layer are only counted as rejected.
    pub fn record_batch(&self, layer: usize, ids: &Ids<'_>) {
        self.count(layer, ids);
        if let Some(locality) = self.locality.get(layer) {
            let recorder = || Box::new(Recorder::new(self.layout.layers[layer].1));
            let mut recorded = locality.lock();
            recorded.running.get_or_insert_with(recorder).record(ids);
        }
    }

    fn count(&self, layer: usize, ids: &Ids<'_>) {
        let Some((_, experts)) = self.layout.layers.get(layer) else {
            self.rejected.fetch_add(1, Ordering::Relaxed);
            return;
        };
        let start = self.starts[layer];
        let mut rejected = 0;
        self.with_own_counters(|counters| {
            counters.add(start, ids.tokens as u64);
            for token in 0..ids.tokens {
                for used in 0..ids.used {
                    match ids.get(token, used).and_then(|id| u32::try_from(id).ok()) {
                        Some(expert) if expert < *experts => {
                            counters.add(start + 1 + expert as usize, 1);
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

    fn with_own_counters(&self, work: impl FnOnce(&ThreadCounters)) {
        let (id, counters) = LAST.get();
        if id == self.id {
            // SAFETY: `OWNED` of this thread keeps the counters in `LAST` alive.
            work(unsafe { &*counters });
            return;
        }
        OWNED.with_borrow_mut(|owned| {
            // Counters of freed traces have no other owner.
            owned
                .0
                .retain(|(_, counters)| Arc::strong_count(counters) > 1);
            let known = owned.0.iter().find(|(id, _)| *id == self.id);
            let counters = match known {
                Some((_, counters)) => counters.clone(),
                None => {
                    let counters = self.free_or_new();
                    owned.0.push((self.id, counters.clone()));
                    counters
                }
            };
            LAST.set((self.id, Arc::as_ptr(&counters)));
            work(&counters);
        });
    }

    /// Returns counters that no thread owns, and allocates them if there are none.
    fn free_or_new(&self) -> Arc<ThreadCounters> {
        let mut threads = self.threads.lock();
        let free = threads
            .iter()
            .find(|counters| !counters.owned.swap(true, Ordering::Acquire));
        if let Some(counters) = free {
            return counters.clone();
        }
        let total = *self.starts.last().expect("at least one");
        let counters = Arc::new(ThreadCounters {
            counts: (0..total).map(|_| AtomicU64::new(0)).collect(),
            owned: AtomicBool::new(true),
        });
        threads.push(counters.clone());
        counters
    }

    fn sums(&self) -> Vec<u64> {
        let mut sums = vec![0; *self.starts.last().expect("at least one")];
        for counters in self.threads.lock().iter() {
            for (sum, count) in sums.iter_mut().zip(&counters.counts) {
                *sum += count.load(Ordering::Relaxed);
            }
        }
        sums
    }

    /// Sets all counts to zero. A record that runs at the same time counts before or after
    /// the reset, and once.
    pub fn reset(&self) {
        let mut baseline = self.baseline.lock();
        baseline.counts = self.sums();
        baseline.since = Instant::now();
        self.rejected.store(0, Ordering::Relaxed);
        for locality in &self.locality {
            *locality.lock() = Recorded::default();
        }
    }

    /// Ends the recording of locality: frees its memory, and keeps the curves. Later batches begin
    /// with empty caches. Takes as long as [`Trace::snapshot_with_locality`].
    pub fn end_locality(&self) {
        for locality in &self.locality {
            let mut recorded = locality.lock();
            if let Some(recorder) = recorded.running.take() {
                recorded.ended.merge(&recorder.locality());
            }
        }
    }

    /// Returns the counts since the last reset, with the locality of each layer if it is recorded.
    /// That takes about a microsecond for each token and layer, at most [`WINDOW_IDS`] ids a layer.
    ///
    /// [`WINDOW_IDS`]: super::WINDOW_IDS
    pub fn snapshot_with_locality(&self) -> Snapshot {
        let mut snapshot = self.snapshot();
        for (layer, recorder) in snapshot.layers.iter_mut().zip(&self.locality) {
            // Evaluations do not wait for the computation. At the end of the process, a thread
            // that holds the lock may never release it.
            let Some(recorded) = recorder.try_lock_for(LONGEST_WAIT) else {
                continue;
            };
            let (mut locality, running) = (recorded.ended.clone(), recorded.running.clone());
            drop(recorded);
            if let Some(recorder) = running {
                locality.merge(&recorder.locality());
            }
            layer.locality = Some(locality);
        }
        snapshot
    }

    /// Returns the counts since the last reset, without locality.
    pub fn snapshot(&self) -> Snapshot {
        let baseline = self.baseline.lock();
        let mut counts = self.sums();
        for (count, before) in counts.iter_mut().zip(&baseline.counts) {
            *count -= before;
        }
        let layers = self.layout.layers.iter().zip(self.starts.windows(2));
        Snapshot {
            layers: layers
                .map(|(&(layer, _), bounds)| LayerCounts {
                    layer,
                    tokens: counts[bounds[0]],
                    experts: counts[bounds[0] + 1..bounds[1]].to_vec(),
                    locality: None,
                })
                .collect(),
            rejected: self.rejected.load(Ordering::Relaxed),
            time: baseline.since.elapsed(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::hits;
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
        let trace = Trace::new(ExpertLayout::new([(3, 4), (1, 8)]));
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
        let trace = Trace::new(ExpertLayout::new([(0, 4)]));
        let bytes = ids(&[[4, -1], [i32::MAX, 2]], 0);
        trace.record_batch(0, &matrix(&bytes, 2, 0));
        // Strides and counts that point outside the bytes.
        trace.record_batch(0, &matrix(&bytes[..9], 2, usize::MAX - 8));
        trace.record_batch(9, &matrix(&bytes, 2, 0));
        let snapshot = trace.snapshot();
        assert_eq!(snapshot.layers[0].experts, [0, 0, 1, 0]);
        assert_eq!(snapshot.rejected, 3 + 4 + 1);
    }

    #[test]
    fn threads_add_in_parallel_and_nothing_is_lost() {
        const EACH: u64 = 100_000;
        let trace = Trace::new(ExpertLayout::new([(0, 512), (1, 512)]));
        // More threads in total than at a time: counters are used again.
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
        assert!(trace.threads.lock().len() <= 8);
    }

    #[test]
    fn a_reset_forgets_and_a_merge_adds() {
        let trace = Trace::new(ExpertLayout::new([(0, 4), (2, 2)]));
        trace.record(0, 1);
        trace.reset();
        assert_eq!(trace.snapshot().activations(), 0);
        trace.record(0, 1);
        trace.record(1, 0);
        let mut sum = trace.snapshot();
        let other = Trace::new(ExpertLayout::new([(0, 6), (1, 2)]));
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
    fn threads_record_the_locality_of_the_same_layers() {
        const BATCHES: u64 = 500;
        let trace = Trace::with_locality(ExpertLayout::new([(0, 8), (1, 8)]));
        let bytes = ids(&[[0, 3], [7, 1], [3, 0]], 0);
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for batch in 0..BATCHES {
                        trace.record_batch(batch as usize % 2, &matrix(&bytes, 3, 0));
                    }
                });
            }
            let watched = trace.snapshot_with_locality();
            assert!(watched.activations() <= 4 * 6 * BATCHES);
        });
        for layer in trace.snapshot_with_locality().layers {
            let locality = layer.locality.as_ref().expect("it is recorded");
            assert_eq!(locality.uses(), layer.activations());
            // Batches of a layer are not mixed, so each of them misses four times once.
            assert_eq!(
                (locality.first, hits(&locality.lru, 4)),
                (4, locality.uses() - 4)
            );
        }
    }

    #[test]
    fn locality_is_recorded_on_request_and_reset() {
        let layout = || ExpertLayout::new([(0, 4), (1, 4)]);
        let bytes = ids(&[[0, 3], [3, 1], [3, 0]], 0);
        let counts_only = Trace::new(layout());
        counts_only.record_batch(0, &matrix(&bytes, 3, 0));
        let snapshot = counts_only.snapshot_with_locality();
        assert_eq!(snapshot.layers[0].locality, None);
        let trace = Trace::with_locality(layout());
        trace.record_batch(1, &matrix(&bytes, 3, 0));
        trace.record(1, 2);
        assert_eq!(trace.snapshot().layers[1].locality, None);
        let locality = |trace: &Trace| {
            let layers = trace.snapshot_with_locality().layers;
            layers[1].locality.clone().expect("it is recorded")
        };
        let recorded = locality(&trace);
        assert_eq!((recorded.first, recorded.uses()), (3, 6));
        // Expert 3 was used last, then second to last; 0 before two others.
        assert_eq!(recorded.lru, [1, 1, 1]);
        let mut sum = trace.snapshot_with_locality();
        sum.merge(&trace.snapshot_with_locality());
        let summed = sum.layers[1].locality.as_ref().expect("both have it");
        assert_eq!(summed.lru, [2, 2, 2]);
        sum.merge(&trace.snapshot());
        assert_eq!(sum.layers[1].locality, None);
        trace.reset();
        assert_eq!(locality(&trace), Locality::default());
    }

    #[test]
    fn traces_do_not_share_counters() {
        for _ in 0..100 {
            let first = Trace::new(ExpertLayout::new([(0, 2)]));
            let second = Trace::new(ExpertLayout::new([(0, 2)]));
            for _ in 0..3 {
                first.record(0, 0);
                second.record(0, 1);
            }
            assert_eq!(first.snapshot().layers[0].experts, [3, 0]);
            assert_eq!(second.snapshot().layers[0].experts, [0, 3]);
        }
    }

    #[test]
    fn locality_stays_after_its_recording() {
        let trace = Trace::with_locality(ExpertLayout::new([(0, 4)]));
        let bytes: Vec<u8> = [1i32, 2, 1]
            .iter()
            .flat_map(|id| id.to_ne_bytes())
            .collect();
        let ids = Ids::packed(&bytes, 1);
        trace.record_batch(0, &ids);
        let before = trace.snapshot_with_locality().layers;
        trace.end_locality();
        trace.end_locality();
        assert_eq!(trace.snapshot_with_locality().layers, before);
        // The caches of a later recording begin empty.
        trace.record_batch(0, &ids);
        let after = trace.snapshot_with_locality().layers;
        let mut twice = before[0].locality.clone().expect("it is recorded");
        twice.merge(&twice.clone());
        assert_eq!((after[0].tokens, &after[0].locality), (6, &Some(twice)));
        trace.reset();
        let reset = trace.snapshot_with_locality().layers;
        assert_eq!(reset[0].locality, Some(Locality::default()));
    }
}
