//! The dynamic loader: loaded objects, and the calls between them.
//!
//! | module | contents |
//! |---|---|
//! | [`reach`] | the calls of a program that a capability cannot do without |
//! | [`caller`] | the object that made a call, and the functions that it meant |
//! | [`redirect`] | calls of loaded objects that go to the drop-in |
//! | [`linked`] | a program that ggml is linked into: calls are seen at its functions |
//! | [`code`] | instructions of functions that are replaced |
//! | [`loaded`] | the objects that the dynamic loader has loaded |
//! | [`symbols`] | functions that a program does not export |
//! | [`view`] | bounds-checked reads of memory of an object |

pub mod caller;
mod code;
pub mod linked;
pub mod loaded;
pub mod reach;
pub mod redirect;
mod symbols;
mod view;
