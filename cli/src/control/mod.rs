//! Requests to a running program.
//!
//! | module | contents |
//! |---|---|
//! | [`requests`] | requests, and their replies as text |
//! | [`mask`] | masks of experts from the command line |
//! | [`server`] | the slots of a llama-server |
//! | [`sockets`] | sockets without a path that the user chose |

pub mod mask;
mod requests;
pub mod server;
pub mod sockets;

pub use requests::{
    CACHED, Control, Limit, ask, ask_within, change, check_connection, check_unused, done, parsed,
    print_reply, reload, run, say_undo,
};
