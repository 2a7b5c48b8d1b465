//! Routed experts without a slot, computed by the CPU while the device computes the others.
//!
//! A few nodes lead from the input of a layer's experts to its last product, down: gate and up,
//! biases, the activation. A copy of these nodes has one row for each id that has no slot, and
//! reads the matrices in host memory. The CPU backend of the scheduler evaluates the copy after the
//! device got the nodes up to down. Its rows then replace those that the device computed for these
//! ids, before the device gets the nodes after down.

use std::collections::HashMap;
use std::ffi::CStr;
use std::sync::Arc;

use sidecar_core::trace::Ids;

use crate::ggml::{
    Backend, Buffer, Device, F32, Ggml, Graph, I32, OwnBuffer, OwnContext, STATUS_SUCCESS, Sched,
    Tensor,
};
use crate::program::graph::{FLAG_OUTPUT, GraphReads};
use crate::program::parts;

/// `GGML_OP_NONE`.
const OP_NONE: i32 = 0;
/// The most nodes that are copied.
const MOST_NODES: usize = 32;
/// Where a tensor may begin.
const ALIGNMENT: usize = 128;
/// Operations whose result has in each row what they compute of the same rows of their operands.
const ROW_BY_ROW: [&CStr; 7] = [
    c"GLU", c"UNARY", c"MUL", c"SCALE", c"CLAMP", c"SQR", c"CONT",
];

/// A product of experts in the graph of the program.
#[derive(Clone, Copy)]
pub struct ExpertProduct {
    /// The node.
    pub node: *mut Tensor,
    /// Its matrix in host memory.
    pub weight: *mut Tensor,
}

/// How many times the nodes of a graph read each tensor.
pub struct Readers(HashMap<usize, usize>);

impl Readers {
    /// Counts what the nodes of a graph read.
    ///
    /// # Safety
    ///
    /// A live graph of this copy.
    pub unsafe fn of(ggml: &Ggml, graph: *mut Graph) -> Readers {
        let mut readers = HashMap::new();
        // SAFETY: nodes of a live graph and their sources are live.
        unsafe {
            for at in 0..(ggml.f.ggml_graph_n_nodes)(graph) {
                for source in ggml.layout.sources((ggml.f.ggml_graph_node)(graph, at)) {
                    *readers.entry(source as usize).or_default() += 1;
                }
            }
        }
        Readers(readers)
    }
}

/// Host memory that the layers of a graph use one after the other.
pub struct HostMemory {
    _buffer: OwnBuffer,
    tensor: *mut Tensor,
    size: usize,
}

// SAFETY: ggml ties no memory to a thread, and the thread that evaluates uses it.
unsafe impl Send for HostMemory {}
// SAFETY: as above.
unsafe impl Sync for HostMemory {}

impl HostMemory {
    /// Allocates memory that a device copies fast, if it has such memory.
    fn allocate(ggml: &'static Ggml, device: *mut Device, size: usize) -> Option<HostMemory> {
        let f = &ggml.f;
        // SAFETY: a live device.
        let locked = unsafe { (f.ggml_backend_dev_host_buffer_type)(device) };
        // SAFETY: takes nothing.
        let plain = unsafe { (f.ggml_backend_cpu_buffer_type)() };
        let floats = [size.div_ceil(size_of::<f32>()) as i64];
        let types = [locked, plain].into_iter().filter(|buft| !buft.is_null());
        let mut made = types.filter_map(|buft| {
            OwnBuffer::for_tensor(ggml, buft, F32, &floats, c"missed-experts").ok()
        });
        let (buffer, tensor) = made.find(|(buffer, _)| buffer.is_host())?;
        Some(HostMemory {
            _buffer: buffer,
            tensor,
            size,
        })
    }
}

/// The copy of a layer's nodes, and what the CPU computes in an evaluation.
pub struct OnCpu {
    ggml: &'static Ggml,
    /// The product down, whose rows are replaced.
    pub output: *mut Tensor,
    /// The input of gate and up, on the device.
    pub input: *mut Tensor,
    cpu: *mut Backend,
    graph: *mut Graph,
    /// Tensors with a row for each missed id, and the bytes of a row.
    tensors: Vec<(*mut Tensor, usize)>,
    ids: *mut Tensor,
    /// The input on the host: all tokens, and the rows of the missed ids.
    inputs: *mut u8,
    rows: *mut u8,
    input_bytes: usize,
    input_row: usize,
    result: *mut Tensor,
    used: usize,
    _context: OwnContext,
    _memory: Arc<HostMemory>,
    /// Whether the input is complete when the ids are: an evaluation has shown it.
    pub checked: bool,
    /// Whether the input was requested in this evaluation.
    requested: bool,
    /// Positions of the ids without a slot in this evaluation.
    pub missed: Vec<usize>,
}

impl OnCpu {
    /// Copies the nodes of a layer whose products, in the order of the graph, end with down; no
    /// other node reads them. `memory` is used again if it is large enough. The error is the reason why not.
    ///
    /// # Safety
    ///
    /// A scheduler and what its graph read before it was split; the graph was split and allocated
    /// since. The products are on this device.
    pub unsafe fn new(
        ggml: &'static Ggml,
        sched: *mut Sched,
        (reads, readers): (&GraphReads, &Readers),
        device: *mut Device,
        products: &[ExpertProduct],
        memory: &mut Option<Arc<HostMemory>>,
    ) -> Result<OnCpu, String> {
        let (f, layout) = (&ggml.f, &ggml.layout);
        let no_memory = || String::from("there is no memory for it");
        let context = ggml.graph_context(MOST_NODES, 4 * MOST_NODES);
        let context = context.ok_or_else(no_memory)?;
        let down = products.last().ok_or("the layer has no products")?;
        // SAFETY: as the caller ensures.
        unsafe {
            if ggml.graph_view.is_none() {
                return Err("its ggml does not export ggml_graph_view".into());
            }
            let last = (f.ggml_backend_sched_get_n_backends)(sched) - 1;
            let cpu = (f.ggml_backend_sched_get_backend)(sched, last);
            if !ggml.is_cpu((f.ggml_backend_get_device)(cpu)) {
                return Err("its last backend is not the CPU".into());
            }
            let [_, used, tokens, more]: [i64; 4] = layout.read(down.node, layout.ne);
            let input = input(ggml, products, tokens)?;
            let [width, ..]: [i64; 4] = layout.read(input, layout.ne);
            let count = used * tokens;
            if more != 1 {
                return Err("the products have four dimensions".into());
            }
            let mut copier = Copier {
                ggml,
                reads,
                products,
                shape: (used, tokens),
                rows: context.tensor(F32, &[width, 1, count]),
                ids: context.tensor(I32, &[1, count]),
                context: &context,
                copies: Vec::new(),
                visits: 0,
            };
            let result = copier.copy(down.node)?;
            if copier.has_other_readers(readers) {
                return Err("other nodes read what its experts compute".into());
            }
            let graph = (f.ggml_new_graph_custom)(context.raw(), MOST_NODES, false);
            (f.ggml_build_forward_expand)(graph, result);
            let (rows, ids) = (copier.rows, copier.ids);
            let Copier { copies, .. } = copier;

            // The input of all tokens comes first.
            let input_row = width as usize * size_of::<f32>();
            let input_bytes = input_row * tokens as usize;
            let mut size = input_bytes.next_multiple_of(ALIGNMENT);
            let mut place = |tensor: *mut Tensor| {
                let at = size;
                size += (f.ggml_nbytes)(tensor).next_multiple_of(ALIGNMENT);
                (tensor, at)
            };
            let mut places = vec![place(rows), place(ids)];
            let own = copies.iter().filter(|copy| copy.viewed.is_none());
            places.extend(own.map(|copy| place(copy.tensor)));
            if memory.as_ref().is_none_or(|memory| memory.size < size) {
                let new = HostMemory::allocate(ggml, device, size).ok_or_else(no_memory)?;
                *memory = Some(Arc::new(new));
            }
            let memory = memory.clone().ok_or_else(no_memory)?;
            let base: *mut u8 = layout.read(memory.tensor, layout.data);
            let buffer: *mut Buffer = layout.read(memory.tensor, layout.buffer);
            for (tensor, at) in places {
                layout.write(tensor, layout.buffer, buffer);
                layout.write(tensor, layout.data, base.add(at));
            }
            for copy in &copies {
                if let Some((of, offset)) = copy.viewed {
                    let data: *mut u8 = layout.read(of, layout.data);
                    layout.write(copy.tensor, layout.buffer, buffer);
                    layout.write(copy.tensor, layout.data, data.add(offset));
                }
            }
            let mut tensors = vec![(rows, input_row)];
            tensors.extend(copies.iter().map(|copy| (copy.tensor, copy.row)));
            Ok(OnCpu {
                ggml,
                output: down.node,
                input,
                cpu,
                graph,
                tensors,
                ids,
                inputs: base,
                rows: layout.read(rows, layout.data),
                input_bytes,
                input_row,
                result,
                used: used as usize,
                _context: context,
                _memory: memory,
                checked: false,
                requested: false,
                missed: Vec::with_capacity(count as usize),
            })
        }
    }

    /// Begins an evaluation.
    pub fn begin(&mut self) {
        self.requested = false;
        self.missed.clear();
    }

    /// Whether the CPU can compute in this evaluation.
    pub fn is_ready(&self) -> bool {
        self.checked && self.requested
    }

    /// Requests the input, which the host has once it has waited for the backend.
    ///
    /// # Safety
    ///
    /// The backend of the products, on the thread that evaluates.
    pub unsafe fn request_input(&mut self, backend: *mut Backend) {
        if self.checked {
            let get = self.ggml.f.ggml_backend_tensor_get_async;
            // SAFETY: as the caller ensures; the memory has space for the input, which is
            // contiguous.
            unsafe { get(backend, self.input, self.inputs.cast(), 0, self.input_bytes) };
            self.requested = true;
        }
    }

    /// Takes the input of the missed ids.
    pub fn gather(&mut self, ids: &Ids<'_>) {
        let layout = &self.ggml.layout;
        // SAFETY: the memory has a row and an id for each id of the graph, and positions of missed
        // ids are among them.
        unsafe {
            let to: *mut i32 = layout.read(self.ids, layout.data);
            for (row, at) in self.missed.iter().enumerate() {
                let (token, used) = (at / self.used, at % self.used);
                let from = self.inputs.add(token * self.input_row);
                let rows = self.rows.add(row * self.input_row);
                rows.copy_from_nonoverlapping(from, self.input_row);
                to.add(row).write(ids.get(token, used).unwrap_or(0));
            }
        }
    }

    /// Computes the missed ids, and submits their rows of the output to its backend. Returns the
    /// status of the CPU backend.
    ///
    /// # Safety
    ///
    /// The backend of the products, on the thread that evaluates, after the nodes up to down were
    /// submitted.
    pub unsafe fn compute(&mut self, backend: *mut Backend, in_order: bool) -> u32 {
        let (f, layout) = (&self.ggml.f, &self.ggml.layout);
        if self.missed.is_empty() {
            return STATUS_SUCCESS;
        }
        // SAFETY: as the caller ensures; tensors of this copy that only this thread uses, and that
        // have memory for more rows.
        unsafe {
            self.resize();
            // What this computes is no part of the program's graph.
            let status = parts::aside(|| self.ggml.compute(self.cpu, self.graph));
            if status != STATUS_SUCCESS {
                return status;
            }
            if !in_order {
                (f.ggml_backend_synchronize)(backend);
            }
            let strides: [usize; 4] = layout.read(self.output, layout.nb);
            let result: *const u8 = layout.read(self.result, layout.data);
            let row_bytes = strides[1];
            let mut row = 0;
            for neighbours in self.missed.chunk_by(|a, b| a + 1 == *b) {
                (f.ggml_backend_tensor_set_async)(
                    backend,
                    self.output,
                    result.add(row * row_bytes).cast(),
                    neighbours[0] * row_bytes,
                    neighbours.len() * row_bytes,
                );
                row += neighbours.len();
            }
            if !in_order {
                (f.ggml_backend_synchronize)(backend);
            }
        }
        STATUS_SUCCESS
    }

    /// Gives the tensors of the copy as many rows as ids are missed.
    ///
    /// # Safety
    ///
    /// No thread uses the copy.
    unsafe fn resize(&self) {
        let layout = &self.ggml.layout;
        let count = self.missed.len();
        // SAFETY: as the caller ensures.
        unsafe {
            for (tensor, row) in &self.tensors {
                let [width, ..]: [i64; 4] = layout.read(*tensor, layout.ne);
                layout.write(*tensor, layout.ne, [width, 1, count as i64, 1]);
                let strides = [size_of::<f32>(), *row, *row, row * count];
                layout.write(*tensor, layout.nb, strides);
            }
            layout.write(self.ids, layout.ne, [1, count as i64, 1, 1]);
            let all = size_of::<i32>() * count;
            layout.write(
                self.ids,
                layout.nb,
                [size_of::<i32>(), size_of::<i32>(), all, all],
            );
        }
    }
}

/// Returns the input that all products but the last have in common: a node whose rows follow each
/// other, one for each token.
///
/// # Safety
///
/// Live nodes of this copy.
unsafe fn input(
    ggml: &Ggml,
    products: &[ExpertProduct],
    tokens: i64,
) -> Result<*mut Tensor, String> {
    let layout = &ggml.layout;
    let unknown = || String::from("the input of its experts has an unknown form");
    let mut found = None;
    for product in &products[..products.len() - 1] {
        // SAFETY: as the caller ensures.
        unsafe {
            let input: *mut Tensor = layout.read(product.node, layout.src + 8);
            let viewed: *mut Tensor = layout.read(input, layout.view_src);
            let base = if viewed.is_null() { input } else { viewed };
            let [width, rows, ..]: [i64; 4] = layout.read(input, layout.ne);
            let extents: [i64; 4] = layout.read(base, layout.ne);
            let strides: [usize; 4] = layout.read(base, layout.nb);
            let data = |tensor: *mut Tensor| layout.read::<usize>(tensor, layout.data);
            let row = width as usize * size_of::<f32>();
            let is_known = (layout.read::<i32>(base, layout.ty), rows) == (F32, 1)
                && data(base) == data(input)
                && layout.read::<i32>(base, layout.op) != OP_NONE
                && extents[0] == width
                && extents[1..].iter().product::<i64>() == tokens
                && (strides[0], strides[1]) == (size_of::<f32>(), row);
            if !is_known || found.is_some_and(|found| found != base) {
                return Err(unknown());
            }
            found = Some(base);
        }
    }
    found.ok_or_else(unknown)
}

/// A node of the copy.
struct Copy {
    of: *mut Tensor,
    tensor: *mut Tensor,
    /// Bytes of a row, or between rows of a view.
    row: usize,
    /// What the node is a view of, and from which byte.
    viewed: Option<(*mut Tensor, usize)>,
}

/// Copies nodes of a graph.
struct Copier<'a> {
    ggml: &'static Ggml,
    reads: &'a GraphReads,
    products: &'a [ExpertProduct],
    /// Experts of a token, and tokens.
    shape: (i64, i64),
    rows: *mut Tensor,
    ids: *mut Tensor,
    context: &'a OwnContext,
    copies: Vec<Copy>,
    visits: usize,
}

impl Copier<'_> {
    /// Whether the graph reads a copied node, other than the last one, elsewhere: the device has
    /// other rows there than the CPU.
    ///
    /// # Safety
    ///
    /// Live nodes of the graph.
    unsafe fn has_other_readers(&self, readers: &Readers) -> bool {
        let layout = &self.ggml.layout;
        let mut inside: HashMap<usize, usize> = HashMap::new();
        for copy in &self.copies {
            // SAFETY: as the caller ensures; sources of a live node are live.
            for source in unsafe { layout.sources(copy.of) } {
                *inside.entry(source as usize).or_default() += 1;
            }
        }
        let is_read = |copy: &Copy| {
            let node = copy.of as usize;
            // SAFETY: as the caller ensures.
            let flags: i32 = unsafe { layout.read(copy.of, layout.flags) };
            flags & FLAG_OUTPUT != 0 || readers.0.get(&node) != inside.get(&node)
        };
        let (_last, others) = self.copies.split_last().expect("down was copied");
        others.iter().any(is_read)
    }

    /// Returns the copy of a node and of all nodes that lead to it from the input.
    ///
    /// # Safety
    ///
    /// A live node of the graph.
    unsafe fn copy(&mut self, node: *mut Tensor) -> Result<*mut Tensor, String> {
        if let Some(known) = self.copies.iter().find(|copy| copy.of == node) {
            return Ok(known.tensor);
        }
        let (f, layout) = (&self.ggml.f, &self.ggml.layout);
        self.visits += 1;
        if self.visits > MOST_NODES {
            return Err("too many nodes lead to the last product of its experts".into());
        }
        // SAFETY: as the caller ensures; sources of a live node are live. Functions of ggml get
        // operands with the extents that they had in the graph, except for the number of rows.
        unsafe {
            let op: i32 = layout.read(node, layout.op);
            let name = CStr::from_ptr((f.ggml_op_name)(op));
            let [first, second, _]: [*mut Tensor; 3] = layout.read(node, layout.src);
            let extents: [i64; 4] = layout.read(node, layout.ne);
            let is_rows = (extents[1], extents[2]) == self.shape
                && layout.read::<i32>(node, layout.ty) == F32;
            let unknown = || {
                let name = name.to_string_lossy();
                format!("the operation {name} leads to the last product of its experts")
            };
            if !is_rows {
                return Err(unknown());
            }
            let row = extents[0] as usize * size_of::<f32>();
            let products = self.products;
            if let Some(at) = products.iter().position(|of| of.node == node) {
                let input = match at + 1 == products.len() {
                    true => self.copy(second)?,
                    false => self.rows,
                };
                let weight = products[at].weight;
                let raw = self.context.raw();
                let tensor = (f.ggml_mul_mat_id)(raw, weight, input, self.ids);
                return self.add(node, tensor, row);
            }
            if op == self.ggml.ops.view {
                let of = self.copy(first)?;
                let data = |tensor: *mut Tensor| layout.read::<usize>(tensor, layout.data);
                let strides: [usize; 4] = layout.read(node, layout.nb);
                let of_row = self.copies.iter().find(|copy| copy.tensor == of);
                let of_row = of_row.map_or(0, |copy| copy.row);
                let offset = data(node).wrapping_sub(data(first));
                let is_part = (strides[0], strides[1]) == (size_of::<f32>(), of_row)
                    && offset.checked_add(row).is_some_and(|end| end <= of_row);
                if !is_part {
                    return Err(unknown());
                }
                let tensor = self.context.tensor(F32, &[extents[0], 1, 1]);
                layout.write(tensor, layout.op, op);
                layout.write(tensor, layout.src, of);
                self.copies.push(Copy {
                    of: node,
                    tensor,
                    row: of_row,
                    viewed: Some((of, offset)),
                });
                return Ok(tensor);
            }
            let count = self.shape.0 * self.shape.1;
            let tensor = self.context.tensor(F32, &[extents[0], 1, count]);
            layout.write(tensor, layout.op, op);
            if name == c"ADD_ID" {
                let bias = self.reads.weights.iter().find(|of| of.node == node);
                let on_host = |tensor: *mut Tensor| {
                    let buffer: *mut Buffer = layout.read(tensor, layout.buffer);
                    !buffer.is_null() && (f.ggml_backend_buffer_is_host)(buffer)
                };
                let bias = bias.map(|of| of.tensor).filter(|bias| on_host(*bias));
                let bias = bias.ok_or("biases of its experts are not in host memory")?;
                let sources = [self.copy(first)?, bias, self.ids];
                layout.write(tensor, layout.src, sources);
            } else if ROW_BY_ROW.contains(&name) {
                for (at, source) in [first, second].into_iter().enumerate() {
                    if !source.is_null() {
                        let source = self.copy(source)?;
                        layout.write(tensor, layout.src + 8 * at, source);
                    }
                }
            } else {
                return Err(unknown());
            }
            self.add(node, tensor, row)
        }
    }

    /// Adds a node that is evaluated, with the parameters of the one that it copies.
    ///
    /// # Safety
    ///
    /// Live tensors of this copy of ggml.
    unsafe fn add(
        &mut self,
        of: *mut Tensor,
        tensor: *mut Tensor,
        row: usize,
    ) -> Result<*mut Tensor, String> {
        let parameters = self.ggml.parameters();
        let (at, bytes) = parameters.ok_or("its ggml_tensor has no known parameters")?;
        // SAFETY: as the caller ensures; the parameters are in the tensor.
        unsafe {
            let from = of.cast::<u8>().add(at);
            from.copy_to_nonoverlapping(tensor.cast::<u8>().add(at), bytes);
        }
        self.copies.push(Copy {
            of,
            tensor,
            row,
            viewed: None,
        });
        Ok(tensor)
    }
}
