//! Graphs: a snapshot of the nodes at submission, computed by the host's own CPU kernels.

use std::collections::HashMap;
use std::ffi::c_void;
use std::ptr::null_mut;
use std::sync::Arc;

use crate::ggml::{COMPUTE, Tensor};
use crate::memory::Block;
use crate::routing;
use crate::sim::{Product, sim};
use crate::stream::Worker;
use crate::sums;
use crate::work::Work;

/// A graph as it was when the host submitted it.
pub struct Snapshot {
    /// Nodes and their sources.
    tensors: Vec<Tensor>,
    /// Indices of the sources of each.
    sources: Vec<[Option<usize>; 10]>,
    /// Indices of the nodes.
    nodes: Vec<usize>,
}

// SAFETY: the pointers of the tensors lead into device memory, or are never followed.
unsafe impl Send for Snapshot {}
// SAFETY: as above, and nothing is changed.
unsafe impl Sync for Snapshot {}

/// A run of a graph.
struct Run {
    /// Nodes and their sources; pointers between them lead into this vector.
    tensors: Vec<Tensor>,
    /// Indices of the nodes.
    nodes: Vec<usize>,
    /// Device memory of each tensor.
    places: Vec<Option<(Arc<Block>, usize)>>,
}

impl Snapshot {
    /// Copies the nodes of a graph.
    ///
    /// # Safety
    ///
    /// The nodes of a valid graph.
    pub unsafe fn of(graph: &[*mut Tensor]) -> Snapshot {
        let mut indices = HashMap::new();
        let mut tensors: Vec<Tensor> = Vec::new();
        let mut add = |tensor: *mut Tensor| {
            *indices.entry(tensor).or_insert_with(|| {
                // SAFETY: the caller's promise.
                tensors.push(unsafe { *tensor });
                tensors.len() - 1
            })
        };
        let mut nodes = Vec::new();
        let mut sources = Vec::new();
        for &node in graph {
            // SAFETY: the caller's promise.
            for source in unsafe { (*node).src } {
                if !source.is_null() {
                    add(source);
                }
            }
            nodes.push(add(node));
        }
        for tensor in &tensors {
            let index = |source: &*mut Tensor| indices.get(source).copied();
            sources.push(tensor.src.each_ref().map(index));
        }
        Snapshot {
            tensors,
            sources,
            nodes,
        }
    }

    /// Computes it on a stream.
    pub fn run(&self, worker: &mut Worker) {
        let mut tensors = self.tensors.clone();
        let base = tensors.as_mut_ptr();
        for (tensor, sources) in tensors.iter_mut().zip(&self.sources) {
            // SAFETY: inside of the vector.
            let pointer =
                |index: Option<usize>| index.map_or(null_mut(), |index| unsafe { base.add(index) });
            tensor.src = sources.map(pointer);
            tensor.view_src = null_mut();
            tensor.buffer = null_mut();
        }
        let run = Run {
            tensors,
            nodes: self.nodes.clone(),
            places: Vec::new(),
        };
        run.on(worker);
    }
}

impl Run {
    fn on(mut self, worker: &mut Worker) {
        let operations = &sim().ggml.operations;
        // Graphs of a scheduler may mark the nodes that are to be computed.
        let marks = self
            .nodes
            .iter()
            .any(|&node| self.tensors[node].flags & COMPUTE != 0);
        let computed = |&node: &usize| {
            let tensor = &self.tensors[node];
            let marked = !marks || tensor.flags & COMPUTE != 0;
            marked && !operations.only_names(tensor.op) && tensor.elements() > 0
        };
        let nodes: Vec<usize> = self.nodes.iter().copied().filter(computed).collect();
        if !self.find_memory(&nodes) {
            return;
        }
        let mut waiting: Vec<*mut Tensor> = Vec::new();
        for node in nodes {
            let routed = self.tensors[node].op == operations.mul_mat_id;
            if routed {
                // The numbers of experts may come from nodes of this graph.
                self.compute(worker, &mut waiting);
            }
            let used = routed.then(|| self.experts(node));
            self.uses(worker, node, used.as_deref());
            if self.tensors[node].op == operations.argsort
                && let Some(routes) = &sim().settings.routes
            {
                routes.routed(&self.tensors[node].name());
            }
            let start = worker.moment.time;
            worker.spend(self.time(node, used.as_deref()));
            if let Some(used) = used {
                sim().product(Product {
                    name: self.tensors[node].name(),
                    stream: worker.figures.name.clone(),
                    time: start..worker.moment.time,
                    experts: used.iter().filter(|&&used| used).count(),
                });
            }
            if routed && sim().settings.sums {
                let (weights, input) = (self.source(node, 0), self.source(node, 1));
                // SAFETY: memory that the snapshot keeps, and what comes before is computed.
                unsafe { sums::product(weights, input, self.source(node, 2), &self.tensors[node]) };
            } else {
                waiting.push(&raw mut self.tensors[node]);
            }
        }
        self.compute(worker, &mut waiting);
    }

    /// Finds the device memory of the tensors; whether there is all of it.
    fn find_memory(&mut self, nodes: &[usize]) -> bool {
        let sim = sim();
        let find = |tensor: &Tensor| sim.memory.find(tensor.data as usize);
        self.places = self.tensors.iter().map(find).collect();
        let mut complete = true;
        for &node in nodes {
            for index in self.sources(node).chain([node]) {
                let tensor = &self.tensors[index];
                if self.places[index].is_none() && tensor.elements() > 0 {
                    sim.unknown_memory(&format!(
                        "{} for {}",
                        tensor.name(),
                        self.tensors[node].name()
                    ));
                    complete = false;
                }
            }
        }
        for (tensor, place) in self.tensors.iter_mut().zip(&self.places) {
            if let Some((block, offset)) = place {
                tensor.data = block
                    .at(*offset)
                    .map_or(tensor.data, <*mut u8>::cast::<c_void>);
            }
        }
        complete
    }

    /// Indices of the sources of a node.
    fn sources(&self, node: usize) -> impl Iterator<Item = usize> {
        let base = self.tensors.as_ptr();
        let sources = self.tensors[node]
            .src
            .into_iter()
            .filter(|source| !source.is_null());
        // SAFETY: sources lead into the vector.
        sources.map(move |source| unsafe { source.cast_const().offset_from(base) } as usize)
    }

    /// A source of a node.
    fn source(&self, node: usize, number: usize) -> &Tensor {
        // SAFETY: leads into the vector; the operations that have it are known.
        unsafe { &*self.tensors[node].src[number] }
    }

    /// Computes nodes whose turn has come.
    fn compute(&self, worker: &mut Worker, nodes: &mut Vec<*mut Tensor>) {
        if sim().settings.computes && !nodes.is_empty() {
            sim().ggml.compute(worker.cpu(), nodes);
        }
        nodes.clear();
    }

    /// Which experts a product of routed weights uses.
    fn experts(&self, node: usize) -> Vec<bool> {
        let (weights, ids) = (self.source(node, 0), self.source(node, 2));
        let experts = weights.ne[2] as usize;
        let (used, tokens) = (ids.ne[0] as usize, ids.ne[1] as usize);
        if !sim().settings.computes {
            let name = ids.name();
            let all = (0..tokens).flat_map(|token| routing::chosen(&name, token, used, experts));
            return routing::used(experts, all);
        }
        let all = (0..tokens).flat_map(|token| (0..used).map(move |place| (token, place)));
        let all = all.map(|(token, place)| {
            let at = token * ids.nb[1] + place * ids.nb[0];
            // SAFETY: an element of the tensor, in memory that the snapshot keeps.
            unsafe { ids.data.cast::<u8>().add(at).cast::<i32>().read() }
        });
        routing::used(experts, all)
    }

    /// Notes which memory a node uses.
    fn uses(&self, worker: &Worker, node: usize, experts: Option<&[bool]>) {
        let name = self.tensors[node].name();
        let note = |index: usize, from: usize, size: usize, writes: bool| {
            let Some((block, offset)) = &self.places[index] else {
                return;
            };
            let start = (offset + from) as u64;
            let range = start..(start + size as u64).min(block.whole().end);
            let what = match writes {
                true => format!("{name} is written"),
                false => format!("{name} reads {}", self.tensors[index].name()),
            };
            sim().access(
                block,
                range,
                writes,
                &worker.uses(what),
                &worker.moment.clock,
            );
        };
        for (number, index) in self.sources(node).enumerate() {
            let tensor = &self.tensors[index];
            match experts {
                // Of routed weights, only those of experts that are used.
                Some(experts) if number == 0 => {
                    for run in runs(experts) {
                        note(
                            index,
                            run.start * tensor.nb[2],
                            run.len() * tensor.nb[2],
                            false,
                        );
                    }
                }
                _ => note(index, 0, sim().ggml.nbytes(tensor), false),
            }
        }
        note(node, 0, sim().ggml.nbytes(&self.tensors[node]), true);
    }

    /// Returns the time of a node, in nanoseconds.
    fn time(&self, node: usize, experts: Option<&[bool]>) -> u64 {
        let used = experts.map_or(0, |experts| experts.iter().filter(|&&used| used).count());
        // SAFETY: sources lead into the vector.
        let work = unsafe { Work::of(&self.tensors[node], used as f64) };
        let settings = &sim().settings;
        settings.launch + (work.bytes / settings.device + work.operations / settings.flops) as u64
    }
}

/// Returns the ranges of used experts.
fn runs(used: &[bool]) -> Vec<std::ops::Range<usize>> {
    let mut runs: Vec<std::ops::Range<usize>> = Vec::new();
    for (expert, _) in used.iter().enumerate().filter(|(_, used)| **used) {
        match runs.last_mut() {
            Some(run) if run.end == expert => run.end += 1,
            _ => runs.push(expert..expert + 1),
        }
    }
    runs
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn neighbouring_experts_are_one_run() {
        assert_eq!(runs(&[true, true, false, true]), [0..2, 3..4]);
        assert_eq!(runs(&[false, false]), []);
    }
}
