//! What a graph of the program reads.

use std::ffi::{CStr, c_int};

use llama_sidecar::trace::Ids;

use crate::ggml::{Buffer, Device, F32, Ggml, Graph, Sched, Tensor};

/// `GGML_TENSOR_FLAG_INPUT`.
pub const FLAG_INPUT: i32 = 1;
/// `GGML_TENSOR_FLAG_OUTPUT`.
pub const FLAG_OUTPUT: i32 = 2;
/// Inputs of libllama's graphs whose first extent is the number of tokens.
const COUNTED_INPUTS: [&CStr; 2] = [c"inp_tokens", c"inp_pos"];

/// A weight that a graph reads.
pub struct UsedWeight {
    /// The tensor.
    pub tensor: *mut Tensor,
    /// The node that reads the tensor.
    pub node: *mut Tensor,
    /// The operation of the node.
    pub op: i32,
    /// The routed ids, when the operation reads experts; else null.
    pub ids: *mut Tensor,
    /// The second operand: the input of a matrix product.
    pub input: *mut Tensor,
}

/// An input of a graph whose first extent is the number of tokens.
#[derive(Clone, Copy)]
pub struct CountedInput {
    /// The tensor.
    pub tensor: *mut Tensor,
    /// The extent.
    pub extent: i64,
}

// SAFETY: the tensor is only used by the thread that evaluates, while it keeps the graph.
unsafe impl Send for CountedInput {}

/// The weights and the input of a graph.
pub struct GraphReads {
    /// The first input whose extent is the number of tokens.
    pub input: Option<CountedInput>,
    /// Weights that nodes read.
    pub weights: Vec<UsedWeight>,
    /// Weights of which nodes are views.
    pub viewed: Vec<*mut Tensor>,
    /// Weights of which nodes are views that outlive the graph.
    pub kept_views: Vec<*mut Tensor>,
}

impl GraphReads {
    /// Lists what a graph reads. `is_weight` decides which tensors count as weights.
    ///
    /// # Safety
    ///
    /// A live graph of this copy.
    pub unsafe fn of(
        ggml: &Ggml,
        graph: *mut Graph,
        is_weight: impl Fn(*mut Tensor) -> bool,
    ) -> GraphReads {
        let (f, layout) = (&ggml.f, &ggml.layout);
        let mut reads = GraphReads {
            input: None,
            weights: Vec::new(),
            viewed: Vec::new(),
            kept_views: Vec::new(),
        };
        // SAFETY: nodes of a live graph are live tensors, and so are their sources.
        unsafe {
            let count: c_int = (f.ggml_graph_n_nodes)(graph);
            for i in 0..count {
                let node = (f.ggml_graph_node)(graph, i);
                let op: i32 = layout.read(node, layout.op);
                let viewed: *mut Tensor = layout.read(node, layout.view_src);
                for source in layout.sources(node) {
                    // What reads a view of a weight reads the weight; making the view does not.
                    let weight = match is_weight(source) {
                        true => source,
                        false => layout.read(source, layout.view_src),
                    };
                    if is_weight(weight) && weight != viewed {
                        reads.weights.push(UsedWeight {
                            tensor: weight,
                            node,
                            op,
                            // GGML_OP_MUL_MAT_ID has weights, activations, ids as sources.
                            ids: match op == ggml.ops.mul_mat_id {
                                true => layout.read(node, layout.src + 16),
                                false => std::ptr::null_mut(),
                            },
                            input: layout.read(node, layout.src + 8),
                        });
                    }
                    let flags: i32 = layout.read(source, layout.flags);
                    if flags & FLAG_INPUT != 0 && reads.input.is_none() {
                        let name = CStr::from_ptr((f.ggml_get_name)(source));
                        reads.input = COUNTED_INPUTS.contains(&name).then(|| CountedInput {
                            tensor: source,
                            extent: layout.read(source, layout.ne),
                        });
                    }
                }
                if is_weight(viewed) {
                    reads.viewed.push(viewed);
                    // A view of this graph has no memory before the graph is allocated.
                    if !layout.read::<*mut Buffer>(node, layout.buffer).is_null() {
                        reads.kept_views.push(viewed);
                    }
                }
            }
        }
        reads
    }
}

/// The backends of a scheduler.
pub struct Backends {
    /// Their addresses.
    pub addresses: Vec<usize>,
    /// Their devices, the CPU last.
    pub devices: Vec<*mut Device>,
    /// Whether all devices are the CPU.
    pub on_cpu: bool,
}

impl Backends {
    /// Lists the backends of a scheduler.
    ///
    /// # Safety
    ///
    /// A live scheduler of this copy.
    pub unsafe fn of(ggml: &Ggml, sched: *mut Sched) -> Backends {
        let f = &ggml.f;
        // SAFETY: a live scheduler has as many backends as it counts.
        let (addresses, devices): (Vec<usize>, Vec<*mut Device>) = unsafe {
            let count = (f.ggml_backend_sched_get_n_backends)(sched);
            (0..count)
                .map(|i| (f.ggml_backend_sched_get_backend)(sched, i))
                .map(|backend| (backend as usize, (f.ggml_backend_get_device)(backend)))
                .unzip()
        };
        // SAFETY: live devices.
        let on_cpu = devices.iter().all(|device| unsafe { ggml.is_cpu(*device) });
        Backends {
            addresses,
            devices,
            on_cpu,
        }
    }
}

/// The start of the names of nodes that multiply the outputs of experts with gate weights.
const WEIGHTED: &[u8] = b"ffn_moe_weighted-";

/// The outputs of a layer's experts and their gate weights, which a node of the graph multiplies.
/// Elements of both are 32-bit floats.
pub struct WeightedExperts {
    /// The number of the layer.
    pub layer: u32,
    /// `[width, used, tokens]`.
    pub outputs: *mut Tensor,
    /// `[1, used, tokens]`.
    pub gates: *mut Tensor,
}

// SAFETY: the tensors are only used by the thread that evaluates, while it keeps the graph.
unsafe impl Send for WeightedExperts {}

/// Finds the experts of a graph, layer by layer.
///
/// # Safety
///
/// A live graph of this copy.
pub unsafe fn weighted_experts(ggml: &Ggml, graph: *mut Graph) -> Vec<WeightedExperts> {
    let (f, layout) = (&ggml.f, &ggml.layout);
    // SAFETY: nodes of a live graph are live tensors, and so are their sources.
    let experts = |i| unsafe {
        let node = (f.ggml_graph_node)(graph, i);
        if layout.read::<i32>(node, layout.op) != ggml.ops.mul {
            return None;
        }
        let layer = name(ggml, node).strip_prefix(WEIGHTED)?;
        let [outputs, gates]: [*mut Tensor; 2] = layout.read(node, layout.src);
        let types = [outputs, gates].map(|tensor| layout.read::<i32>(tensor, layout.ty));
        (types == [F32; 2]).then_some(WeightedExperts {
            layer: std::str::from_utf8(layer).ok()?.parse().ok()?,
            outputs,
            gates,
        })
    };
    // SAFETY: a live graph.
    let nodes = unsafe { (f.ggml_graph_n_nodes)(graph) };
    (0..nodes).filter_map(experts).collect()
}

/// Returns the name of a tensor.
///
/// # Safety
///
/// A live tensor of this copy, which outlives the name.
pub unsafe fn name<'a>(ggml: &Ggml, tensor: *const Tensor) -> &'a [u8] {
    // SAFETY: as the caller ensures.
    unsafe { CStr::from_ptr((ggml.f.ggml_get_name)(tensor)) }.to_bytes()
}

/// Marks a tensor as an output, so that no other tensor of the graph reuses its memory.
///
/// # Safety
///
/// A live tensor of this copy, in a graph that is not yet allocated.
pub unsafe fn keep(ggml: &Ggml, tensor: *mut Tensor) {
    let layout = &ggml.layout;
    let mut tensor = tensor;
    while !tensor.is_null() {
        // SAFETY: as the caller ensures; a view lives as long as what it views.
        unsafe {
            let flags: i32 = layout.read(tensor, layout.flags);
            layout.write(tensor, layout.flags, flags | FLAG_OUTPUT);
            tensor = layout.read(tensor, layout.view_src);
        }
    }
}

/// Reads numbers of four bytes for each token and each of its experts into a buffer. The experts
/// of a token are the dimension `first` of the tensor; `None` without elements.
///
/// # Safety
///
/// A live tensor of this copy that was kept, in a graph whose evaluation has ended. Its elements
/// have four bytes.
pub unsafe fn read_matrix<'a>(
    ggml: &Ggml,
    tensor: *mut Tensor,
    first: usize,
    buffer: &'a mut Vec<u8>,
) -> Option<Ids<'a>> {
    let layout = &ggml.layout;
    // SAFETY: as the caller ensures.
    let (ne, nb): ([i64; 4], [usize; 4]) = unsafe {
        (
            layout.read(tensor, layout.ne),
            layout.read(tensor, layout.nb),
        )
    };
    let (used, tokens) = (ne[first].max(0) as usize, ne[first + 1].max(0) as usize);
    let (used_stride, token_stride) = (nb[first], nb[first + 1]);
    let len = Ids::byte_len(used, tokens, used_stride, token_stride).filter(|len| *len > 0)?;
    buffer.resize(len, 0);
    // SAFETY: the tensor has `len` bytes by its extents.
    unsafe { (ggml.f.ggml_backend_tensor_get)(tensor, buffer.as_mut_ptr().cast(), 0, len) };
    Some(Ids {
        bytes: buffer,
        used,
        tokens,
        used_stride,
        token_stride,
    })
}
