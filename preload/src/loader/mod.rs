//! The dynamic loader: loaded objects, and the calls between them.
//!
//! | module | contents |
//! |---|---|
//! | [`caller`] | the object that made a call, and the functions that it meant |
//! | [`redirect`] | calls of loaded objects that go to the drop-in |
//! | [`loaded`] | the objects that the dynamic loader has loaded |

pub mod caller;
pub mod loaded;
pub mod redirect;
