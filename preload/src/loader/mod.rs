//! The dynamic loader: loaded objects, and the calls between them.
//!
//! | module | contents |
//! |---|---|
//! | [`reach`] | the calls of a program that a capability cannot do without |
//! | [`caller`] | the object that made a call, and the functions that it meant |
//! | [`redirect`] | calls of loaded objects that go to the drop-in |
//! | [`loaded`] | the objects that the dynamic loader has loaded |

pub mod caller;
pub mod loaded;
pub mod reach;
pub mod redirect;
