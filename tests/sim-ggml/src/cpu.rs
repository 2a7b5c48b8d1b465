//! The host's own CPU backend in virtual time: what a thread of the host computes takes time.

use std::ffi::{c_char, c_int};
use std::sync::OnceLock;

use crate::ggml::{Backend, Device, Graph, Tensor};
use crate::host::HostThread;
use crate::sim::sim;
use crate::work::Work;

type Compute = extern "C" fn(*mut Backend, *mut Graph) -> c_int;

/// The function that computes a graph.
static COMPUTE: OnceLock<Compute> = OnceLock::new();

/// Lets CPU backends that the host starts from now on take time.
pub fn count_time() {
    sim().ggml.replace_cpu_init(init);
}

extern "C" fn init(device: *mut Device, settings: *const c_char) -> *mut Backend {
    let backend = sim().ggml.init_cpu(device, settings);
    // SAFETY: a new backend, or none.
    if let Some(backend) = unsafe { backend.as_mut() } {
        let _ = COMPUTE.set(backend.interface.compute);
        backend.interface.compute = compute;
    }
    backend
}

extern "C" fn compute(backend: *mut Backend, graph: *mut Graph) -> c_int {
    let nodes = sim().ggml.nodes(graph);
    // SAFETY: nodes of a graph that the host computes.
    let time: f64 = nodes.iter().map(|&node| time(unsafe { &*node })).sum();
    let status = COMPUTE.get().expect("set by init")(backend, graph);
    HostThread::this().spend(time as u64);
    status
}

/// Returns the time of a node, in nanoseconds.
fn time(node: &Tensor) -> f64 {
    let (settings, operations) = (&sim().settings, &sim().ggml.operations);
    if operations.only_names(node.op) || node.elements() == 0 {
        return 0.0;
    }
    let mut experts = 0.0;
    if node.op == operations.mul_mat_id {
        // SAFETY: sources of a node that the host computes.
        let (weights, ids) = unsafe { (&*node.src[0], &*node.src[2]) };
        // The expected number for tokens that choose at random: exact for one token.
        let (all, used) = (weights.ne[2] as f64, ids.ne[0] as f64);
        experts = all * (1.0 - (1.0 - used / all).powf(ids.ne[1] as f64));
    }
    // SAFETY: as above.
    let work = unsafe { Work::of(node, experts) };
    (work.bytes / settings.host).max(work.operations / settings.host_flops)
}
