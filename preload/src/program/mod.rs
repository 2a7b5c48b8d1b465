//! The program's models, graphs and schedulers, and the events that capabilities get from them.
//!
//! | module | contents |
//! |---|---|
//! | [`capability`] | the events that are reported to capabilities |
//! | [`weight_copies`] | copies of weights that a scheduler is about to make |
//! | [`routing`] | the moment at which the experts of a layer are known |
//! | [`parts`] | the graph whose parts a thread evaluates |
//! | [`sched`] | schedulers, their evaluations and kept graphs |
//! | [`completion`] | evaluations that the program does not wait for |
//! | [`watched`] | the nodes of a scheduler's graph at which routed experts are known |
//! | [`own_cache`] | the expert cache that the program has of its own |
//! | [`masks`] | masks of routers |
//! | [`models`] | the models that the program loaded |
//! | [`own_hotswap`] | the hot-swap that a program has of its own |
//! | [`first_graph`] | one thread at a time completes models |
//! | [`loads`] | the models that the program is loading |
//! | [`derived`] | weights that are from no file, and how far they are known |
//! | [`graph`] | what a graph reads |
//! | [`groups`] | tensors that are placed together: the routed experts of a layer |
//! | [`barrier`] | switches between evaluations |
//! | [`pool`] | buffers of replaced tensors, for the next ones |

pub mod barrier;
pub mod capability;
pub mod completion;
pub mod derived;
pub mod first_graph;
pub mod graph;
pub mod groups;
pub mod loads;
pub mod masks;
pub mod models;
pub mod own_cache;
pub mod own_hotswap;
pub mod parts;
pub mod pool;
pub mod routing;
pub mod sched;
pub mod watched;
pub mod weight_copies;
