//! The `llama-sidecar` command.
//!
//! Modules, top to bottom. A module imports only modules below it:
//!
//! | module | content |
//! |---|---|
//! | [`generate`] | man pages and shell completions |
//! | [`doctor`], [`run`] | programs with the drop-in |
//! | [`swap`] | tensors from one model's files to another's, and back |
//! | [`control`] | requests to a running program |
//! | [`server`] | the slots of a llama-server |
//! | [`report`], [`svg`], [`trace_report`] | expert traces as a page, images, counts |
//! | [`inspect`], [`load`] | a model's description, the time to load it |
//! | [`originals`], [`rewrite`] | the file of original tensors, new versions of a file |
//! | [`target`], [`attributes`], [`space`] | a file to replace, its attributes, free space |
//! | [`child`], [`executable`], [`journal`], [`hooks`] | processes, ELF files, events of the drop-in, reachable hooks |

mod attributes;
mod child;
mod control;
mod doctor;
mod executable;
mod generate;
mod hooks;
mod inspect;
mod journal;
mod load;
mod originals;
mod report;
mod rewrite;
mod run;
mod server;
mod space;
mod svg;
mod swap;
mod target;
mod trace_report;

use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Parser, Subcommand};
use llama_sidecar::protocol::Request;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// Look at GGUF models, load them, and talk to hosts that run with llama-sidecar.
#[derive(Parser)]
#[command(name = "llama-sidecar", version)]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Show metadata, tensors, shards and experts of a model.
    ///
    /// Ends with 0 when llama.cpp would accept the file, else with 1 and the reason.
    Inspect {
        /// A GGUF file, or any shard of a model.
        file: PathBuf,
        /// Print JSON.
        #[arg(long)]
        json: bool,
    },
    /// Run a llama.cpp program with the drop-in, and say at its end what was done.
    ///
    /// Signals are passed on, and it ends as the program ends.
    Run(run::RunOptions),
    /// Find out what the drop-in can do in a program.
    ///
    /// Runs it until it has evaluated its model for the first time. Ends with 0 when
    /// hot-swap works there, else with 1 and the reason.
    Doctor(doctor::DoctorOptions),
    /// Put other versions of tensors into a model's files, and the original ones back.
    ///
    /// The new file is written beside the old one, checked, and renamed over it: an
    /// interruption leaves the old one, and a program that has the old one open keeps it.
    /// Owner, group, mode, access lists and extended attributes stay. The original tensors
    /// are kept in MODEL.originals; a model that no swap wrote stops the swap while
    /// originals of another one are there. Of a symbolic link, the file behind it is
    /// replaced, and its originals are beside that file. A second swap of the same model
    /// waits until the first has ended.
    Swap(swap::SwapOptions),
    /// Ask a running host which models it has and what was swapped.
    Status {
        #[command(flatten)]
        at: Control,
        /// Read what was not hashed yet, and print a content hash of each model alone.
        #[arg(long)]
        hash: bool,
    },
    /// Return a running host to its original tensors, and freeze it: changed files are not
    /// reloaded before 'unfreeze'.
    Revert(Control),
    /// Let changed files be reloaded again after 'revert'.
    ///
    /// Files that differ from what the host loaded count as changed.
    Unfreeze(Control),
    /// Print figures of a running host in the text format of Prometheus.
    Metrics(Control),
    /// Let a running host look at its files now, and wait until they are in use.
    ///
    /// Ends with 1 when a model could not be brought up to date, or when --server is given
    /// and its slots could not be emptied.
    Reload {
        #[command(flatten)]
        at: Control,
        #[command(flatten)]
        server: server::ServerOptions,
    },
    /// Ask whether a host is there.
    Ping(Control),
    /// Ask a running host which experts its models used so far.
    Trace {
        #[command(flatten)]
        at: Control,
        /// Count anew from here on.
        #[arg(long)]
        reset: bool,
    },
    /// Show expert traces: a page with -o, a picture with --svg, text without.
    Report {
        /// Traces as written to LLAMA_EXPERT_TRACE_OUTPUT; several of the same model are
        /// added up.
        #[arg(required = true)]
        traces: Vec<PathBuf>,
        /// Write a self-contained HTML page.
        #[arg(short, long)]
        output: Option<PathBuf>,
        /// Write the heat map alone, as SVG.
        #[arg(long, requires = "output")]
        svg: bool,
        /// Show traces beside each other.
        #[arg(long)]
        compare: bool,
    },
    /// Write man pages and shell completions below a prefix.
    #[command(hide = true)]
    Generate {
        /// For example /usr/local.
        prefix: PathBuf,
    },
    /// Load all tensors of a model into memory and say how long it took.
    Load {
        /// A GGUF file, or any shard of a model.
        file: PathBuf,
    },
}

/// Where a host listens.
#[derive(clap::Args)]
struct Control {
    /// The path that the host was given in LLAMA_SIDECAR_CONTROL.
    #[arg(long, env = "LLAMA_SIDECAR_CONTROL")]
    socket: PathBuf,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

fn main() -> ExitCode {
    allow_many_open_files();
    let result = match Arguments::parse().command {
        Command::Inspect { file, json } => inspect::run(&file, json),
        Command::Run(options) => run::run(&options),
        Command::Doctor(options) => doctor::run(&options),
        Command::Swap(options) => swap::run(&options),
        Command::Status { at, hash: true } => control::run(&at.socket, Request::Hash, at.json),
        Command::Status { at, hash: false } => control::run(&at.socket, Request::Status, at.json),
        Command::Revert(at) => control::run(&at.socket, Request::Revert, at.json),
        Command::Unfreeze(at) => control::run(&at.socket, Request::Unfreeze, at.json),
        Command::Metrics(at) => control::run(&at.socket, Request::Metrics, at.json),
        Command::Reload { at, server } => control::reload(&at.socket, &server, at.json),
        Command::Trace { at, reset: true } => {
            control::run(&at.socket, Request::TraceReset, at.json)
        }
        Command::Trace { at, reset: false } => control::run(&at.socket, Request::Trace, at.json),
        Command::Report {
            traces,
            output,
            svg,
            compare,
        } => report::run(
            &traces,
            &report::Output {
                path: output,
                svg,
                compare,
            },
        ),
        Command::Ping(at) => control::run(&at.socket, Request::Ping, at.json),
        Command::Load { file } => load::run(&file),
        Command::Generate { prefix } => generate::run(&prefix),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        // A reader that has seen enough, for example `head`, is no failure.
        Err(error) if is_broken_pipe(&error) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("llama-sidecar: {}", sentence(&error));
            ExitCode::FAILURE
        }
    }
}

/// What failed and why, in one line. Some errors name their cause themselves.
fn sentence(error: &anyhow::Error) -> String {
    let mut text = String::new();
    for cause in error.chain() {
        let cause = cause.to_string();
        if text.contains(&cause) {
            continue;
        }
        if !text.is_empty() {
            text.push_str(": ");
        }
        text.push_str(&cause);
    }
    text
}

fn is_broken_pipe(error: &anyhow::Error) -> bool {
    let io = error.downcast_ref::<std::io::Error>();
    io.is_some_and(|error| error.kind() == std::io::ErrorKind::BrokenPipe)
}

/// Raises the limit for open files: a model of more than 1,000 shards needs more than the usual
/// limit. A library must not change the limits of its process; this is the process.
fn allow_many_open_files() {
    let limit = getrlimit(Resource::Nofile);
    // A failure shows when a file cannot be opened.
    let _ = setrlimit(
        Resource::Nofile,
        Rlimit {
            current: limit.maximum,
            ..limit
        },
    );
}
