//! Programs with the drop-in.
//!
//! | module | contents |
//! |---|---|
//! | [`doctor`] | what the drop-in can do in a program |
//! | [`run`] | a program with the drop-in, and a summary at its end |
//! | [`limit`] | a limit of a program's memory |
//! | [`hooks`] | reachable hooks |
//! | [`proof`] | a trial of the drop-in before a program starts |
//! | [`crashes`] | programs that a fault ended while the drop-in was in them |
//! | [`journal`] | events of the drop-in |
//! | [`gains`] | what comparisons have shown to make programs faster |
//! | [`kept`] | lists that are kept for the user |
//! | [`own_cache`] | the expert cache that llama.cpp has of its own |
//! | [`session`] | programs without a terminal, and what they use |
//! | [`child`] | processes |
//! | [`executable`] | ELF files |

pub mod child;
pub mod crashes;
pub mod doctor;
pub mod executable;
pub mod gains;
pub mod hooks;
pub mod journal;
pub mod kept;
pub mod limit;
pub mod own_cache;
pub mod proof;
pub mod run;
pub mod session;
