//! Models that are read to be written again, with changes.

use std::path::Path;

use sidecar_core::gguf::{Access, GgufFile, ValueType};
use testkit::writer::{Gguf, Kv, Tensor};

/// Reads a model, with each value as it is.
pub fn read(path: &Path) -> Gguf {
    let file = GgufFile::open(path, Access::Read).expect("a model");
    let bytes = |offset: u64, len: u64| {
        let mut bytes = vec![0; len as usize];
        file.source
            .read_at(&mut bytes, offset)
            .expect("the file is whole");
        bytes
    };
    let mut gguf = Gguf::default();
    gguf.kvs.clear();
    for key in &file.header.keys {
        let (id, before) = match (key.array, key.ty) {
            (true, _) => (ValueType::Array as u32, 12),
            (false, ValueType::String) => (key.ty as u32, 8),
            (false, _) => (key.ty as u32, 0),
        };
        let value = bytes(key.offset - before, key.len + before);
        gguf = gguf.kv(&key.name_lossy(), Kv::Raw(id, value));
    }
    for info in &file.header.tensors {
        gguf.tensors.push(Tensor {
            name: file.header.name(info).to_string_lossy().into_owned(),
            ne: info.ne[..info.n_dims as usize]
                .iter()
                .map(|n| *n as i64)
                .collect(),
            ty: info.ty.id,
            data: bytes(info.offset, info.nbytes),
        });
    }
    gguf
}
