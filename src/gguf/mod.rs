//! The GGUF format: types, headers, metadata values, files, shards.
//!
//! This module knows the format and nothing of models or devices.

mod file;
mod header;
mod scales;
mod shards;
mod types;
mod value;
mod write;

pub use file::{Access, FileId, GgufFile, OpenError, Source};
pub use header::{DEFAULT_ALIGNMENT, Defect, Header, Stop, TensorInfo, strides};
pub use scales::{ScaleClass, ScaleFormat};
pub use shards::{open_model, shard_name};
pub use types::{Origin, TYPES, TypeInfo};
pub use value::{Key, Strings, Value, ValueType};
pub use write::{
    HeaderWriter, MetadataValue, TYPE_AND_OFFSET, TooLarge, padded, padding, retype, type_fields,
    write_data,
};
