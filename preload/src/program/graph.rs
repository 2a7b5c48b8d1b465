//! What a graph of the program reads.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::ffi::{CStr, c_int};

use sidecar_core::trace::Ids;

use crate::ggml::{Buffer, Device, F32, FusedOps, Ggml, Graph, Sched, Tensor, USAGE_WEIGHTS};

/// `GGML_OP_NONE`.
pub const OP_NONE: i32 = 0;
/// `GGML_TENSOR_FLAG_INPUT`.
pub const FLAG_INPUT: i32 = 1;
/// `GGML_TENSOR_FLAG_OUTPUT`.
pub const FLAG_OUTPUT: i32 = 2;
/// Inputs of libllama's graphs whose first extent is the number of tokens. libllama compares it
/// with that of the next batch.
const COUNTED_INPUTS: [&CStr; 2] = [c"inp_tokens", c"inp_pos"];

/// The start of the names of the keys in the cache. libllama of ik_llama.cpp compares the tensor
/// that each node copies keys to with the cache.
const KEYS: &[u8] = b"cache_k_l";
/// The start of the names of the values in the cache.
const VALUES: &[u8] = b"cache_v_l";

/// A weight that a graph reads.
pub struct UsedWeight {
    /// The tensor.
    pub tensor: *mut Tensor,
    /// The node that reads the tensor.
    pub node: *mut Tensor,
    /// The operation of the node, or the operation that does the same with this weight alone.
    pub op: i32,
    /// The routed ids, when the operation reads experts; else null.
    pub ids: *mut Tensor,
    /// A node without work that is evaluated once the ids are complete and before the experts
    /// are read; null if there is none.
    pub after_ids: *mut Tensor,
}

/// The start of the names in the expert cache that llama.cpp has of its own: `moe_cache.<weight>`.
pub const OWN_CACHE: &[u8] = b"moe_cache.";

/// A product over experts that are in slots of the program's own expert cache.
pub struct CachedProduct {
    /// The matrix of the experts; null while it is not known.
    pub matrix: *mut Tensor,
    /// The experts in slots.
    pub slots: *mut Tensor,
    /// The slot of each expert, or -1: integers in host memory.
    pub slot_map: *mut Tensor,
    /// The routed ids. Those of the product count slots.
    pub ids: *mut Tensor,
}

/// What libllama compares before it uses a graph again: a field with another value makes it build
/// another graph.
#[derive(Clone, Copy)]
pub struct ComparedField {
    /// The number of tokens that the graph is for.
    pub tokens: i64,
    /// The tensor that has the field.
    pub tensor: *mut Tensor,
    /// The offset of the field.
    pub offset: usize,
    /// Its value, which is not 0.
    pub value: i64,
}

// SAFETY: the tensor is only used by the thread that evaluates, while it keeps the graph.
unsafe impl Send for ComparedField {}

/// What a graph reads.
pub struct GraphReads {
    /// What libllama compares before it uses the graph again.
    pub compared: Option<ComparedField>,
    /// Weights that nodes read.
    pub weights: Vec<UsedWeight>,
    /// Weights of which nodes are views.
    pub viewed: Vec<*mut Tensor>,
    /// Weights that nodes read through views that outlive the graph.
    pub kept_views: Vec<*mut Tensor>,
    /// Products over experts in the program's own cache.
    pub cached: Vec<CachedProduct>,
    /// Other tensors that are in memory for weights and that no node computes.
    pub others: Vec<*mut Tensor>,
}

impl GraphReads {
    /// Lists what a graph reads. `is_weight` is fast and decides which tensors count as weights. A view of a tensor may
    /// be a weight, too: `is_loaded` is whether it was loaded from a file.
    ///
    /// # Safety
    ///
    /// A live graph of this copy.
    pub unsafe fn of(
        ggml: &Ggml,
        graph: *mut Graph,
        is_weight: impl Fn(*mut Tensor) -> bool,
        is_loaded: impl Fn(*mut Tensor) -> bool,
    ) -> GraphReads {
        let (f, layout) = (&ggml.f, &ggml.layout);
        let mut reads = GraphReads {
            compared: None,
            weights: Vec::new(),
            viewed: Vec::new(),
            kept_views: Vec::new(),
            cached: Vec::new(),
            others: Vec::new(),
        };
        let mut copy = None;
        // SAFETY: nodes of a live graph are live tensors, and so are their sources.
        unsafe {
            let count: c_int = (f.ggml_graph_n_nodes)(graph);
            for i in 0..count {
                let node = (f.ggml_graph_node)(graph, i);
                let op: i32 = layout.read(node, layout.op);
                let viewed: *mut Tensor = layout.read(node, layout.view_src);
                for source in layout.sources(node) {
                    // What reads a view of a weight reads the weight; making the view does not.
                    let of: *mut Tensor = layout.read(source, layout.view_src);
                    let is_itself = of.is_null() || is_weight(source) && is_loaded(source);
                    let weight = if is_itself { source } else { of };
                    if is_weight(weight) && weight != viewed {
                        // A view of this graph has no memory before the graph is allocated.
                        let buffer: *mut Buffer = layout.read(source, layout.buffer);
                        if !is_itself && !buffer.is_null() {
                            reads.kept_views.push(weight);
                        }
                        let used = ggml.ops.use_of(op);
                        let no_ids = std::ptr::null_mut();
                        let ids = used.ids.map_or(no_ids, |at| layout.source(node, at));
                        reads.weights.push(UsedWeight {
                            tensor: weight,
                            node,
                            op: used.op,
                            ids,
                            after_ids: after_ids(ggml, graph, ids, i),
                        });
                    }
                    if !is_weight(weight) {
                        note_other(ggml, source, &mut reads.others);
                    }
                    let flags: i32 = layout.read(source, layout.flags);
                    if flags & FLAG_INPUT != 0 && reads.compared.is_none() {
                        let name = CStr::from_ptr((f.ggml_get_name)(source));
                        let tokens = layout.read(source, layout.ne);
                        reads.compared = COUNTED_INPUTS.contains(&name).then_some(ComparedField {
                            tokens,
                            tensor: source,
                            offset: layout.ne,
                            value: tokens,
                        });
                    }
                }
                if op == ggml.ops.mul_mat_id {
                    reads.cached.extend(cached_product(ggml, node));
                }
                if copy.is_none()
                    && ggml.ops.fused.is_some_and(|fused| op == fused.cpy)
                    && !viewed.is_null()
                    && name(ggml, viewed).starts_with(KEYS)
                {
                    copy = Some((node, viewed));
                }
                if is_weight(viewed) {
                    reads.viewed.push(viewed);
                }
            }
        }
        if let Some((compared, (node, keys))) = reads.compared.as_mut().zip(copy) {
            compared.tensor = node;
            compared.offset = layout.view_src;
            compared.value = keys as i64;
        }
        reads
    }
}

impl GraphReads {
    /// Returns the matrices of experts that nodes multiply, each with the routed ids.
    pub fn routed(&self) -> impl Iterator<Item = (*mut Tensor, *mut Tensor)> {
        let weights = self.weights.iter().filter(|weight| !weight.ids.is_null());
        let cached = self.cached.iter().filter(|of| !of.matrix.is_null());
        let weights = weights.map(|weight| (weight.tensor, weight.ids));
        weights.chain(cached.map(|of| (of.matrix, of.ids)))
    }
}

/// Keys and values of a context.
#[derive(Debug, Clone, Copy, Default)]
pub struct Context {
    /// Tokens that they are for, of all sequences; 0 if that is not known.
    pub tokens: u64,
    /// Bytes in host memory that grow with the tokens.
    pub bytes: u64,
    /// Bytes that a context of a quarter of the tokens would free.
    pub freed: u64,
}

impl Context {
    /// Finds the context that a graph reads and writes: tensors named `cache_k_l<layer>` and `cache_v_l<layer>` of
    /// numbers, tokens and sequences. A layer with a window of attention has fewer tokens, which do not count.
    ///
    /// # Safety
    ///
    /// A live graph of this copy.
    pub unsafe fn of(ggml: &Ggml, graph: *mut Graph) -> Context {
        let (f, layout) = (&ggml.f, &ggml.layout);
        let mut caches: BTreeMap<usize, ([i64; 4], u64)> = BTreeMap::new();
        // SAFETY: nodes of a live graph are live tensors, and so are what they are views of and its buffer.
        unsafe {
            for at in 0..(f.ggml_graph_n_nodes)(graph) {
                let viewed: *mut Tensor =
                    layout.read((f.ggml_graph_node)(graph, at), layout.view_src);
                if viewed.is_null() {
                    continue;
                }
                let name = name(ggml, viewed);
                let buffer: *mut Buffer = layout.read(viewed, layout.buffer);
                let is_cache = name.starts_with(KEYS) || name.starts_with(VALUES);
                if !is_cache || buffer.is_null() || !(f.ggml_backend_buffer_is_host)(buffer) {
                    continue;
                }
                let ne: [i64; 4] = layout.read(viewed, layout.ne);
                // ik_llama.cpp has values in one dimension, and keys of each head in a row.
                if ne[1] == 1 {
                    return Context::default();
                }
                caches.insert(viewed as usize, (ne, (f.ggml_nbytes)(viewed) as u64));
            }
        }
        let tokens = |ne: &[i64; 4]| ne[1].max(0) as u64 * ne[2].max(1) as u64;
        let Some(longest) = caches.values().map(|of| of.0).max_by_key(tokens) else {
            return Context::default();
        };
        let whole = caches
            .values()
            .filter(|of| tokens(&of.0) == tokens(&longest));
        let bytes: u64 = whole.map(|of| of.1).sum();
        Context {
            tokens: tokens(&longest),
            bytes,
            // SAFETY: as the caller ensures.
            freed: bytes / 4 * 3 + unsafe { freed_by_attention(ggml, graph, longest[1]) },
        }
    }
}

/// Returns the bytes that attention to a quarter of so many keys would free in the memory of a graph. A graph that only
/// reserves memory has all keys. Masks have memory throughout; scores share theirs with what other nodes compute.
///
/// # Safety
///
/// A live graph of this copy, which is not yet allocated.
unsafe fn freed_by_attention(ggml: &Ggml, graph: *mut Graph, keys: i64) -> u64 {
    let (f, layout) = (&ggml.f, &ggml.layout);
    let mut masks: BTreeMap<usize, u64> = BTreeMap::new();
    let (mut scores, mut others) = (0, 0);
    // SAFETY: nodes of a live graph and their sources are live tensors.
    unsafe {
        for at in 0..(f.ggml_graph_n_nodes)(graph) {
            let node = (f.ggml_graph_node)(graph, at);
            for tensor in layout.sources(node).chain([node]) {
                let [viewed, memory]: [*mut Tensor; 2] =
                    [layout.view_src, layout.buffer].map(|of| layout.read(tensor, of));
                if !viewed.is_null() || !memory.is_null() {
                    continue;
                }
                let ne: [i64; 4] = layout.read(tensor, layout.ne);
                let bytes = (f.ggml_nbytes)(tensor) as u64;
                match (ne[0] == keys, ne[2] == 1) {
                    (true, true) => drop(masks.insert(tensor as usize, bytes)),
                    (true, false) => scores = bytes.max(scores),
                    (false, _) => others = bytes.max(others),
                }
            }
        }
    }
    let masks: u64 = masks.values().sum();
    masks / 4 * 3 + scores.max(others) - (scores / 4).max(others)
}

/// Notes a tensor, or what it is a view of, if it is in memory for weights and no node computes it.
///
/// # Safety
///
/// A live tensor of this copy.
pub unsafe fn note_other(ggml: &Ggml, tensor: *mut Tensor, others: &mut Vec<*mut Tensor>) {
    // SAFETY: as the caller ensures; a view lives as long as what it views.
    unsafe {
        let viewed: *mut Tensor = ggml.layout.read(tensor, ggml.layout.view_src);
        let tensor = if viewed.is_null() { tensor } else { viewed };
        if is_in_memory_for_weights(ggml, tensor) && !others.contains(&tensor) {
            others.push(tensor);
        }
    }
}

/// Whether a tensor that no node computes is in memory for weights.
///
/// # Safety
///
/// A live tensor of this copy.
unsafe fn is_in_memory_for_weights(ggml: &Ggml, tensor: *const Tensor) -> bool {
    let layout = &ggml.layout;
    // SAFETY: as the caller ensures; the buffer of a live tensor is live.
    unsafe {
        let buffer: *mut Buffer = layout.read(tensor, layout.buffer);
        layout.read::<i32>(tensor, layout.op) == OP_NONE
            && !buffer.is_null()
            && (ggml.f.ggml_backend_buffer_get_usage)(buffer) == USAGE_WEIGHTS
    }
}

/// Returns what a product over experts reads, if its ids are looked up in a slot map.
///
/// # Safety
///
/// A live node of this copy, a product over experts.
unsafe fn cached_product(ggml: &Ggml, node: *const Tensor) -> Option<CachedProduct> {
    let layout = &ggml.layout;
    // SAFETY: sources of a live node are live.
    unsafe {
        let source = |of: *mut Tensor, at| Some(layout.source(of, at)).filter(|of| !of.is_null());
        let [slots, _, slot_ids]: [*mut Tensor; 3] = layout.read(node, layout.src);
        if slots.is_null() || !name(ggml, slots).starts_with(OWN_CACHE) || slot_ids.is_null() {
            return None;
        }
        let lookup = source(slot_ids, 0)?;
        if layout.read::<i32>(lookup, layout.op) != ggml.ops.get_rows {
            return None;
        }
        let (slot_map, flat) = (source(lookup, 0)?, source(lookup, 1)?);
        let ids = source(flat, 0)?;
        let ne = |tensor| layout.read::<[i64; 4]>(tensor, layout.ne);
        (ne(ids) == ne(slot_ids)).then_some(CachedProduct {
            matrix: std::ptr::null_mut(),
            slots,
            slot_map,
            ids,
        })
    }
}

/// Returns the node that is evaluated once routed ids are complete: the ids themselves, which are
/// a view of the sorted scores. The CPU of ik_llama.cpp computes scores, ids and gate weights at
/// once where it finds that view among their nodes. There it is the last node without work between
/// the ids and the product.
///
/// # Safety
///
/// A live graph of this copy, and the number of a node in it.
unsafe fn after_ids(
    ggml: &Ggml,
    graph: *mut Graph,
    ids: *mut Tensor,
    product: c_int,
) -> *mut Tensor {
    let Some(fused) = ggml.ops.fused.filter(|_| !ids.is_null()) else {
        return ids;
    };
    let mut found = std::ptr::null_mut();
    for at in (0..product).rev() {
        // SAFETY: nodes of a live graph are live tensors.
        let (node, op): (*mut Tensor, i32) = unsafe {
            let node = (ggml.f.ggml_graph_node)(graph, at);
            (node, ggml.layout.read(node, ggml.layout.op))
        };
        if node == ids {
            return found;
        }
        if found.is_null() && (op == fused.reshape || op == ggml.ops.view) {
            found = node;
        }
    }
    std::ptr::null_mut()
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
        let op: i32 = layout.read(node, layout.op);
        let adds_up = |fused: FusedOps| op == fused.mul_multi_add;
        if op != ggml.ops.mul && !ggml.ops.fused.is_some_and(adds_up) {
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

/// Tensors of a graph that is about to be allocated, which are read after its evaluation. They are
/// marked as outputs, so that no other tensor of the graph reuses their memory.
#[derive(Default)]
pub struct Outputs {
    /// The flags of viewed tensors that were marked.
    viewed: RefCell<Vec<*mut i32>>,
}

impl Outputs {
    /// Marks a tensor as an output.
    ///
    /// # Safety
    ///
    /// A live tensor of this copy, in the graph, which outlives `self`.
    pub unsafe fn keep(&self, ggml: &Ggml, tensor: *mut Tensor) {
        let layout = &ggml.layout;
        let mut tensor = tensor;
        let mut is_viewed = false;
        while !tensor.is_null() {
            // SAFETY: as the caller ensures; a view lives as long as what it views.
            unsafe {
                let flags: i32 = layout.read(tensor, layout.flags);
                if is_viewed && flags & FLAG_OUTPUT == 0 {
                    let flags = tensor.byte_add(layout.flags).cast();
                    self.viewed.borrow_mut().push(flags);
                }
                layout.write(tensor, layout.flags, flags | FLAG_OUTPUT);
                tensor = layout.read(tensor, layout.view_src);
            }
            is_viewed = true;
        }
    }
}

/// Removes the marks of viewed tensors: the graph is allocated. Backends fuse operations whose
/// intermediate results are no outputs (`ggml_can_fuse_subgraph`), also around a view that is one.
impl Drop for Outputs {
    fn drop(&mut self) {
        for flags in self.viewed.get_mut().drain(..) {
            // SAFETY: the graph is live, as the caller of `keep` ensured.
            unsafe { *flags &= !FLAG_OUTPUT };
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
