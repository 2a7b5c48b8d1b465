//! How much work a node is.

use crate::ggml::Tensor;
use crate::sim::sim;

/// What a node takes time for.
#[derive(Debug)]
pub struct Work {
    /// Bytes that are read.
    pub bytes: f64,
    /// Operations of products.
    pub operations: f64,
}

impl Work {
    /// Of a node; of routed weights, those of so many experts are read.
    ///
    /// # Safety
    ///
    /// The pointers to its sources are valid.
    pub unsafe fn of(node: &Tensor, experts: f64) -> Work {
        let (ggml, operations) = (&sim().ggml, &sim().ggml.operations);
        // SAFETY: the caller's promise.
        let source = |number: usize| unsafe { node.src[number].as_ref() };
        let nbytes = |tensor: &Tensor| ggml.nbytes(tensor) as f64;
        let bytes_of = |number: usize| source(number).map_or(0.0, nbytes);
        let bytes = if node.op == operations.mul_mat_id {
            let expert = source(0).map_or(0, |weights| weights.nb[2]);
            experts * expert as f64 + bytes_of(1)
        } else if node.op == operations.get_rows {
            nbytes(node)
        } else if node.op == operations.set_rows {
            bytes_of(0)
        } else {
            (0..node.src.len()).map(bytes_of).sum()
        };
        let multiplied = if node.op == operations.mul_mat || node.op == operations.mul_mat_id {
            source(0).map_or(0, |weights| weights.ne[0])
        } else if node.op == operations.flash_attention {
            // With keys, and then with values.
            source(1).map_or(0, |keys| 2 * keys.ne[1])
        } else {
            0
        };
        Work {
            bytes,
            operations: (2 * multiplied * node.elements()) as f64,
        }
    }
}
