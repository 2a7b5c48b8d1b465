//! Contexts and buffers of the drop-in.

use std::ffi::{CStr, c_int, c_void};

use super::types::{
    Buffer, BufferType, Context, DEVICE_CPU, F32, InitParams, Tensor, USAGE_WEIGHTS,
};
use super::{Descriptor, Ggml, TensorStruct};
use super::{remote, split};

impl Ggml {
    /// Makes a context for `tensors` tensors without data; `None` when there is no memory.
    pub fn context(&'static self, tensors: usize) -> Option<OwnContext> {
        // SAFETY: takes nothing.
        self.context_of(unsafe { (self.f.ggml_tensor_overhead)() } * tensors)
    }

    /// Makes a context for a graph of at most `nodes` nodes and `tensors` tensors without data;
    /// `None` when there is no memory.
    pub fn graph_context(&'static self, nodes: usize, tensors: usize) -> Option<OwnContext> {
        // SAFETY: plain values.
        self.context_of(unsafe {
            (self.f.ggml_tensor_overhead)() * tensors
                + (self.f.ggml_graph_overhead_custom)(nodes, false)
        })
    }

    fn context_of(&'static self, mem_size: usize) -> Option<OwnContext> {
        // SAFETY: plain values.
        let context = unsafe {
            (self.f.ggml_init)(InitParams {
                mem_size,
                mem_buffer: std::ptr::null_mut(),
                no_alloc: true,
            })
        };
        (!context.is_null()).then_some(OwnContext {
            ggml: self,
            context,
        })
    }

    /// Makes the struct of a tensor of this type and shape; `None` when there is no memory.
    fn tensor_struct(&'static self, ty: i32, ne: &[i64]) -> Option<TensorStruct> {
        let context = self.context(1)?;
        // SAFETY: a new tensor of this copy.
        Some(unsafe { self.copy_struct(context.tensor(ty, ne)) })
    }
}

/// A context without data that is freed when dropped.
pub struct OwnContext {
    ggml: &'static Ggml,
    context: *mut Context,
}

// SAFETY: ggml ties no context to a thread.
unsafe impl Send for OwnContext {}

impl OwnContext {
    /// Makes a tensor of this type and shape, without data.
    pub fn tensor(&self, ty: i32, ne: &[i64]) -> *mut Tensor {
        // SAFETY: a live context with memory for the tensor; the count is that of the extents.
        unsafe { (self.ggml.f.ggml_new_tensor)(self.context, ty, ne.len() as c_int, ne.as_ptr()) }
    }

    /// Returns the context, for functions that make tensors.
    pub fn raw(&self) -> *mut Context {
        self.context
    }
}

impl Drop for OwnContext {
    fn drop(&mut self) {
        // SAFETY: made by this copy, freed once.
        unsafe { (self.ggml.f.ggml_free)(self.context) }
    }
}

/// A buffer that holds one tensor's bytes and is freed when dropped.
pub struct OwnBuffer {
    ggml: &'static Ggml,
    buffer: *mut Buffer,
    /// The size in bytes.
    size: u64,
    tensor: Home,
}

/// Where the tensor of a buffer is: backends keep pointers to it.
enum Home {
    /// In no context, of which ik_llama.cpp has at most 64.
    Struct(TensorStruct),
    /// In a context, which is kept: ggml places it itself, as it splits it over several devices.
    Context { _kept: OwnContext },
}

// SAFETY: ggml ties no buffer to a thread.
unsafe impl Send for OwnBuffer {}

impl Drop for OwnBuffer {
    /// Frees it, or adds it to those that [`free_remote`](remote::free_remote) frees.
    fn drop(&mut self) {
        // SAFETY: allocated by this copy, dropped once, and no tensor uses it any more.
        unsafe { remote::free(self.ggml, self.buffer) }
    }
}

impl OwnBuffer {
    /// Allocates a buffer of a type for one tensor; returns both. The tensor lives as long as
    /// the buffer. The error is the size that could not be allocated.
    pub fn for_tensor(
        ggml: &'static Ggml,
        buft: *mut BufferType,
        ty: i32,
        ne: &[i64],
        name: &CStr,
    ) -> Result<(OwnBuffer, *mut Tensor), u64> {
        let size = OwnBuffer::size_for(ggml, buft, ty, ne)?;
        if ggml.is_split(buft) {
            return OwnBuffer::split(ggml, buft, ty, ne, name, size);
        }
        let tensor = ggml.tensor_struct(ty, ne).ok_or(0u64)?;
        // SAFETY: a live buffer type.
        let buffer = unsafe { (ggml.f.ggml_backend_buft_alloc_buffer)(buft, size as usize) };
        if buffer.is_null() {
            return Err(size);
        }
        let mut own = OwnBuffer {
            ggml,
            buffer,
            size,
            tensor: Home::Struct(tensor),
        };
        let tensor = own.place_tensor(ty, name);
        // SAFETY: a live buffer.
        unsafe {
            (ggml.f.ggml_backend_buffer_set_usage)(buffer, USAGE_WEIGHTS);
            if own.is_host() {
                let base = (ggml.f.ggml_backend_buffer_get_base)(buffer);
                use_huge_pages(base as usize, size as usize);
            }
        }
        Ok((own, tensor))
    }

    /// Allocates the parts of a tensor on several devices. ggml ends the process where one has no memory for its part
    /// (`ggml_backend_meta_buffer_type_alloc_buffer_n`), so memory for all of it is allocated on each of them first,
    /// and freed.
    fn split(
        ggml: &'static Ggml,
        buft: *mut BufferType,
        ty: i32,
        ne: &[i64],
        name: &CStr,
        size: u64,
    ) -> Result<(OwnBuffer, *mut Tensor), u64> {
        // SAFETY: a live buffer type, whose device and the devices that it stands for live as long.
        unsafe {
            let device = (ggml.f.ggml_backend_buft_get_device)(buft);
            let on_each = split::devices(device).into_iter().map(|device| {
                let buft = (ggml.f.ggml_backend_dev_buffer_type)(device);
                OwnBuffer::for_tensor(ggml, buft, ty, ne, name)
            });
            on_each.collect::<Result<Vec<_>, u64>>()?;
        }
        let context = ggml.context(2).ok_or(0u64)?;
        let offset = OwnBuffer::offset_for(ggml, buft, ty);
        if offset > 0 {
            // Each device gets all of a tensor whose name is unknown.
            context.tensor(F32, &[(offset / size_of::<f32>()) as i64]);
        }
        let tensor = context.tensor(ty, ne);
        // SAFETY: a tensor of a new context; a live buffer type.
        let buffer = unsafe {
            (ggml.f.ggml_set_name)(tensor, name.as_ptr());
            (ggml.f.ggml_backend_alloc_ctx_tensors_from_buft)(context.raw(), buft)
        };
        if buffer.is_null() {
            return Err(size);
        }
        // SAFETY: a live buffer.
        unsafe { (ggml.f.ggml_backend_buffer_set_usage)(buffer, USAGE_WEIGHTS) };
        let own = OwnBuffer {
            ggml,
            buffer,
            size,
            tensor: Home::Context { _kept: context },
        };
        Ok((own, tensor))
    }

    /// Returns the descriptor for a tensor of the program that takes the place of the buffer's tensor.
    ///
    /// # Safety
    ///
    /// `tensor` is the buffer's.
    pub unsafe fn descriptor(&self, tensor: *const Tensor) -> Descriptor {
        // SAFETY: as the caller ensures; a live buffer.
        unsafe {
            let found = self.ggml.descriptor(tensor);
            match self.tensor {
                Home::Struct(_) => found,
                // The tensor's own address does not tell where its parts are.
                Home::Context { .. } => {
                    let base = (self.ggml.f.ggml_backend_buffer_get_base)(self.buffer);
                    let at = OwnBuffer::offset_for(self.ggml, self.buffer_type(), found.ty);
                    Descriptor {
                        data: base.byte_add(at),
                        ..found
                    }
                }
            }
        }
    }

    /// Enters a tensor of the program that has the descriptor of this buffer, if ggml finds the parts of a
    /// tensor by its address.
    ///
    /// # Safety
    ///
    /// No other thread uses the tensor or the buffer.
    pub unsafe fn enter(&self, tensor: *mut Tensor) {
        if matches!(self.tensor, Home::Context { .. }) {
            // SAFETY: as the caller ensures.
            unsafe { (self.ggml.f.ggml_backend_buffer_init_tensor)(self.buffer, tensor) };
        }
    }

    /// Gives the buffer to another tensor, which must not need more than its size; returns both.
    /// No tensor uses the buffer any more.
    pub fn reuse(self, ty: i32, ne: &[i64], name: &CStr) -> Result<(OwnBuffer, *mut Tensor), u64> {
        let mut own = self;
        own.tensor = Home::Struct(own.ggml.tensor_struct(ty, ne).ok_or(0u64)?);
        let tensor = own.place_tensor(ty, name);
        Ok((own, tensor))
    }

    /// Returns the size of a buffer of a type for one tensor.
    pub fn size_for(
        ggml: &'static Ggml,
        buft: *mut BufferType,
        ty: i32,
        ne: &[i64],
    ) -> Result<u64, u64> {
        let context = ggml.context(1).ok_or(0u64)?;
        let tensor = context.tensor(ty, ne);
        // SAFETY: a live buffer type, and a tensor of a live context.
        let tensor = unsafe { (ggml.f.ggml_backend_buft_get_alloc_size)(buft, tensor) };
        Ok((tensor + OwnBuffer::offset_for(ggml, buft, ty)) as u64)
    }

    /// Returns where a buffer has its tensor. Types of one size have different offsets: before CUDA replays a graph
    /// that it captured, it compares addresses and shapes, and no types (`ggml_cuda_graph_update_required`).
    fn offset_for(ggml: &Ggml, buft: *mut BufferType, ty: i32) -> usize {
        // SAFETY: types up to one that exists, and a live buffer type.
        unsafe {
            let size = |ty| ((ggml.f.ggml_type_size)(ty), (ggml.f.ggml_blck_size)(ty));
            let others = (0..ty).filter(|&other| size(other) == size(ty)).count();
            others * (ggml.f.ggml_backend_buft_get_alignment)(buft)
        }
    }

    /// Places its tensor in the buffer.
    fn place_tensor(&mut self, ty: i32, name: &CStr) -> *mut Tensor {
        let Home::Struct(home) = &mut self.tensor else {
            unreachable!("buffers of several devices are not used again")
        };
        let (f, tensor) = (&self.ggml.f, home.tensor());
        // SAFETY: the tensor is new and not shared; the buffer is live and has the size that its
        // type returns for the tensor.
        unsafe {
            (f.ggml_set_name)(tensor, name.as_ptr());
            let base = (f.ggml_backend_buffer_get_base)(self.buffer);
            let at = OwnBuffer::offset_for(self.ggml, self.buffer_type(), ty);
            (f.ggml_backend_tensor_alloc)(self.buffer, tensor, base.byte_add(at));
        }
        tensor
    }

    /// Returns the address of its struct, to compare.
    pub fn address(&self) -> usize {
        self.buffer as usize
    }

    /// Sets all bytes to zero.
    pub fn clear(&self) {
        // SAFETY: a live buffer.
        unsafe { (self.ggml.f.ggml_backend_buffer_clear)(self.buffer, 0) }
    }

    /// The size in bytes.
    pub fn size(&self) -> u64 {
        self.size
    }

    /// Returns its buffer type.
    pub fn buffer_type(&self) -> *mut BufferType {
        // SAFETY: a live buffer.
        unsafe { (self.ggml.f.ggml_backend_buffer_get_type)(self.buffer) }
    }

    /// Returns the name of its buffer type.
    pub fn place(&self) -> String {
        self.ggml.buffer_type_name(self.buffer_type())
    }

    /// Whether it belongs to the CPU, also in a special buffer type.
    pub fn is_in_memory_of_process(&self) -> bool {
        let f = &self.ggml.f;
        // SAFETY: live buffer types and devices, which are static.
        unsafe {
            let device = (f.ggml_backend_buft_get_device)(self.buffer_type());
            device.is_null() || (f.ggml_backend_dev_type)(device) == DEVICE_CPU
        }
    }

    /// Whether its bytes are in memory of this process.
    pub fn is_host(&self) -> bool {
        // SAFETY: a live buffer.
        unsafe { (self.ggml.f.ggml_backend_buffer_is_host)(self.buffer) }
    }
}

/// Advises the kernel to use huge pages for the part of a buffer that covers whole ones:
/// the first write to each page is a page fault, which costs more than the copy.
fn use_huge_pages(start: usize, len: usize) {
    const HUGE_PAGE: usize = 2 << 20;
    let first = start.next_multiple_of(HUGE_PAGE);
    let end = (start + len) / HUGE_PAGE * HUGE_PAGE;
    if first < end {
        // SAFETY: within the buffer; the advice changes no byte.
        unsafe { libc::madvise(first as *mut c_void, end - first, libc::MADV_HUGEPAGE) };
    }
}
