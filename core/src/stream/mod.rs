//! Routed experts, read from disk as soon as routing is known.
//!
//! A model that is larger than memory stays on disk, and the page cache holds a part of it.
//! Without help, the threads that multiply matrices read the rest: each page fault waits for a
//! small read, one after the other. But once a layer's router has chosen, the bytes that the
//! layer needs are known. A [`Reader`] requests all of them from the disk at once, while the
//! program goes on, and the faults find pages that are in memory or on their way.
//!
//! | module | contents |
//! |---|---|
//! | [`reader`](Reader) | threads that read ahead; figures |
//! | [`residents`](Mapped) | experts in memory of the process, in place of pages of their file |
//! | [`preference`](Ranking) | a choice that prefers experts in memory: the one part that changes results |
//! | [`program`] | memory that the program has allocated and not touched |
//! | `requests`, `pages` | experts to be read; the page cache of a file |
//! | `arrivals` | the states of matrices that are read, and waits for them |
//! | `memory` | private memory in place of pages of a mapped file |
//!
//! | | through the page cache | in memory of the process |
//! |---|---|---|
//! | reads | advice (`POSIX_FADV_WILLNEED`) | direct (`O_DIRECT`), which takes less of the processor |
//! | what stays in memory | the kernel decides | the reader decides, within the free memory |
//! | used for | models that fit into memory; files that cannot be read directly | models that do not fit |
//!
//! A reader changes no byte of a file, and can stop at any time. It must have the files open that the program has
//! mapped.

mod arrivals;
mod memory;
mod pages;
mod preference;
pub mod program;
mod reader;
mod requests;
mod residents;

pub use memory::Span;
pub use pages::{WINDOW, page_size, read_ahead};
pub use preference::Ranking;
pub use reader::{Matrices, Reader, Settings};
pub use residents::{Mapped, Other};
