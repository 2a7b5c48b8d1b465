//! The names of tensors, and the index that finds a tensor by its name.

use std::ffi::CStr;
use std::hash::BuildHasher;

use hashbrown::{DefaultHashBuilder, HashTable};

use super::tensor::TensorInfo;

/// Tensor names with their NULs in one allocation, and a hash index.
#[derive(Debug)]
pub(super) struct Names {
    bytes: Vec<u8>,
    index: HashTable<u32>,
    hasher: DefaultHashBuilder,
}

impl Names {
    pub fn with_capacity(names: usize) -> Names {
        Names {
            bytes: Vec::with_capacity(names * 32),
            index: HashTable::with_capacity(names),
            hasher: DefaultHashBuilder::default(),
        }
    }

    pub fn get(&self, at: usize) -> &CStr {
        CStr::from_bytes_until_nul(&self.bytes[at..]).expect("every name was stored with its NUL")
    }

    pub fn find(&self, name: &CStr, tensors: &[TensorInfo]) -> Option<usize> {
        let hash = self.hasher.hash_one(name.to_bytes());
        self.index
            .find(hash, |&at| self.get(tensors[at as usize].name_at) == name)
            .map(|&at| at as usize)
    }

    /// Stores the name of the next tensor. Returns `None` when another tensor has the name.
    pub fn insert(&mut self, name: &[u8], tensors: &[TensorInfo]) -> Option<usize> {
        let name_at = self.bytes.len();
        self.bytes.extend_from_slice(name);
        self.bytes.push(0);
        let stored = self.get(name_at);
        if self.find(stored, tensors).is_some() {
            return None;
        }
        let hash = self.hasher.hash_one(stored.to_bytes());
        let (bytes, hasher) = (&self.bytes, &self.hasher);
        self.index
            .insert_unique(hash, tensors.len() as u32, |&other| {
                let at = tensors
                    .get(other as usize)
                    .map_or(name_at, |tensor| tensor.name_at);
                let name = CStr::from_bytes_until_nul(&bytes[at..]).expect("stored with its NUL");
                hasher.hash_one(name.to_bytes())
            });
        Some(name_at)
    }
}
