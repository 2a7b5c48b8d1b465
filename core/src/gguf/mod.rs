//! The GGUF format: types, headers, metadata values, files, shards.
//!
//! This module does not depend on models or devices.
//!
//! ```
//! use sidecar_core::gguf::{Access, GgufFile, Value};
//! # use sidecar_core::gguf::HeaderWriter;
//! # let file = tempfile::NamedTempFile::new()?;
//! # let path = file.path();
//! # let mut header = HeaderWriter::new(32);
//! # header.value("general.architecture", "llama");
//! # header.array("tokenizer.ggml.tokens", &["a", "b"]);
//! # header.tensor(b"output_norm.weight", &[8], 0, 32)?;
//! # std::fs::write(path, [header.finish(), vec![0; 32]].concat())?;
//!
//! let file = GgufFile::open(path, Access::Map)?;
//! let key = file.header.key(b"general.architecture").unwrap();
//! assert_eq!(file.value(key)?, Value::Text(b"llama".to_vec()));
//! let tokens = file.header.key(b"tokenizer.ggml.tokens").unwrap();
//! assert_eq!(file.strings(tokens)?.get(1), Some(b"b".as_slice()));
//!
//! for tensor in &file.header.tensors {
//!     let name = file.header.name(tensor).to_string_lossy();
//!     println!("{name}: {} {:?}, {} bytes", tensor.ty.name(), tensor.ne, tensor.nbytes);
//! }
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! Modules, top to bottom:
//!
//! | module | contents |
//! |---|---|
//! | `shards` | models in several files |
//! | `write` | new files, and headers with other types |
//! | `file` | a file on disk |
//! | `header` | the header of a file |
//! | `cursor` | integers and strings of a header, with bounds checks |
//! | `error`, `names` | errors of the parser; the names of tensors, with an index |
//! | `tensor`, `scales` | the description of a tensor; the scales in the blocks of each type |
//! | `types`, `value`, `pattern` | the table of types; metadata values; expressions for names of tensors |
//! | `purpose`, `companions` | what llama.cpp uses a metadata key for; tensors that belong to a weight |

mod companions;
mod cursor;
mod error;
mod file;
mod header;
mod names;
mod pattern;
mod purpose;
mod scales;
mod shards;
mod tensor;
mod types;
mod value;
mod write;

pub use companions::{companions, group, is_scale};
pub use error::{FormatError, ParseError};
pub use file::{Access, FileId, GgufFile, OpenError, Source};
pub use header::{DEFAULT_ALIGNMENT, Header};
pub use pattern::NamePattern;
pub use purpose::{Purpose, has_one_type, places_elements};
pub use scales::{ScaleClass, ScaleFormat};
pub use shards::{has_tensor, new_paths, open_model, shard_name};
pub use tensor::{TensorInfo, strides};
pub use types::{Dialect, TYPES, TypeInfo};
pub use value::{KeyValue, Strings, Value, ValueType};
pub use write::{
    HeaderWriter, MetadataValue, Pieces, TYPE_AND_OFFSET, TooLarge, copy_value, padded, padding,
    retype, type_fields, write_data,
};
