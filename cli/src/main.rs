//! The `llama-sidecar` command.
//!
//! Modules, top to bottom. A module imports only modules below it; `tests/layers.rs` checks
//! that. The module of each folder has a map of its own.
//!
//! | module | content |
//! |---|---|
//! | [`generate`] | man pages and shell completions |
//! | [`candidates`] | values for the completions of a shell |
//! | [`undo`], [`profile`] | what was changed, in a program or in files, is returned, or kept for the next start |
//! | [`ask`] | answers of a running server, before and after a change |
//! | [`swap`] | tensors from one model's files to another's or to a running program, and back |
//! | [`shrink`] | a smaller model whose cost is known |
//! | [`prune`] | what a mixture of experts can do without |
//! | [`margins`] | what it costs and gains to prefer experts in memory |
//! | [`plan`] | what to type for a model on this machine |
//! | [`compare`] | a program with and without the drop-in |
//! | [`trial`] | a run of a program, and its speeds |
//! | [`tune`] | which tensors can be quantised further, and types for a size |
//! | [`evaluation`] | evaluations of a text, and how far the results of a changed model differ |
//! | [`pruned`] | a model without some of its experts |
//! | [`launch`] | programs with the drop-in |
//! | [`top`] | what running programs hold and fetch now |
//! | [`exporter`] | metrics of running programs, for Prometheus |
//! | [`report`] | expert traces, and what caches of experts would hit |
//! | [`control`] | requests to a running program |
//! | [`inspect`] | models without a program |
//! | [`http`], [`page`] | a server for a few pages, and how pages look |
//! | [`deadline`] | a stream that has to deliver in time |
//! | [`output`] | texts and models in files, progress |
//! | [`temporary`] | folders that are removed, also after a signal |
//! | [`interruption`] | keys and signals that end a command that measures |
//! | [`inherited`] | limits and ignored signals, which programs get as this one had them |
//! | [`words`] | words of a command, as text for a shell |
//! | [`sizes`], [`space`] | sizes, times, shares and tables as text; free space |
//! | [`help`] | the help of the commands, and names that commands had |
//! | [`print`] | standard output and standard error |

#![warn(clippy::print_stdout, clippy::print_stderr)]
#![cfg_attr(test, allow(clippy::disallowed_methods))]

// Before all modules: they use its macros.
#[macro_use]
mod print;

mod ask;
mod candidates;
mod compare;
mod control;
mod deadline;
mod evaluation;
mod exporter;
mod generate;
mod help;
mod http;
mod inherited;
mod inspect;
mod interruption;
mod launch;
mod margins;
mod output;
mod page;
mod plan;
mod profile;
mod prune;
mod pruned;
mod report;
mod shrink;
mod sizes;
mod space;
mod swap;
mod temporary;
mod top;
mod trial;
mod tune;
mod undo;
#[cfg(test)]
mod vocabulary;
mod words;

use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Result;
use clap::{CommandFactory, Parser, Subcommand};
use control::{Control, Limit};
use launch::{child, doctor, proof, run};
use sidecar_core::config::margin;
use sidecar_core::protocol::Request;

/// Inspects and changes GGUF models, and speeds up llama.cpp without a rebuild.
#[derive(Parser)]
#[command(name = "llama-sidecar", version)]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Show what the drop-in can do in a program.
    ///
    /// Runs the program until the first evaluation of its model. The exit status is 0 if
    /// hot-swap works in the program, else 1, with the reason. With --stream-experts, the
    /// experts of its models must also be streamed.
    Doctor(doctor::DoctorOptions),
    /// Run a program with the drop-in, and print a summary at its end.
    ///
    /// The program gets the signals that this command gets. The exit status is that of the
    /// program. 'llama-sidecar run -h' shows the options that are used most.
    Run(run::RunOptions),
    /// Measure whether the drop-in makes a program faster.
    ///
    /// Runs the program as it was typed and with each capability that applies, in turn, until the
    /// difference is known. Compares a hash of all logits of each evaluation. Writes compare.json
    /// and compare.html. No process is left at the end or after an interruption.
    Compare(compare::CompareOptions),
    /// Find the fastest options for a model on this machine, and print them.
    ///
    /// Runs the program as it was typed and with each option that could help, in rounds, until the last difference is
    /// known or --time is over.
    Plan(plan::PlanOptions),
    /// Replace tensors in a model's files or in a running program.
    ///
    /// Writes the new file next to the old one, checks the new file and renames it over the
    /// old one. An interruption leaves the old file, and a program that has the old file open
    /// keeps it. Owner, group, mode, access lists and extended attributes stay. The original
    /// tensors are kept in MODEL.originals. If MODEL.originals belongs to another model, the
    /// command fails and changes nothing. A symbolic link stays: the file that it names is
    /// replaced, and the originals are next to that file. A second swap of the same model
    /// waits for the first.
    ///
    /// With --live, no file changes: the running program takes the tensors from the other
    /// model, until 'undo'.
    #[command(override_usage = swap::USAGE)]
    Swap(swap::SwapOptions),
    /// Return what was changed in a running program or in a model's files.
    ///
    /// Without MODEL, tensors, masks and the margin of a running program are as at its start, and reloads are permitted
    /// unless a file of the model differs. With MODEL, the originals that 'swap' keeps are put back. The exit status is 0
    /// if there is nothing to undo.
    Undo(undo::UndoOptions),
    /// Show how the answers of a running llama-server change.
    ///
    /// With -o, the answers to prompts are written to a file, and later ones are compared with them by --against: the text,
    /// the likeliest tokens, and the divergence of the candidates. No answer uses what the server has cached, and each takes the likeliest tokens.
    Ask(ask::AskOptions),
    /// Show the models of a running program and their swapped tensors.
    Status {
        #[command(flatten)]
        at: Control,
        /// Read the tensors without a hash, and print only a content hash of each model.
        #[arg(long)]
        hash: bool,
        /// Write the overlays and masks to a file, for 'run --profile'.
        #[arg(long, value_name = "FILE", conflicts_with_all = ["hash", "json"])]
        save: Option<PathBuf>,
        #[command(flatten)]
        outputs: output::Outputs,
    },
    /// Show what running programs hold and fetch now.
    ///
    /// Models, swaps, experts by layer, disk and link. Prints lines where the output is no terminal.
    Top(top::TopOptions),
    /// Show which experts a running program has used.
    Trace {
        #[command(flatten)]
        at: Control,
        /// Set the counts to 0.
        #[arg(long)]
        reset: bool,
    },
    /// Show expert traces as text, as a page with -o, or as an image with --svg.
    ///
    /// Also what a cache of experts would hit (--memory), which experts to keep in fast memory
    /// (--pin), and the counts in formats of other programs (--format).
    Report(report::ReportOptions),
    /// Make a model as small as a size, and state what it costs.
    ///
    /// Measures which experts contribute least and which tensors tolerate fewer bits, as 'prune' and 'tune' do, chooses
    /// both together, measures the new model, and writes it. An interrupted command continues where it was.
    Shrink(Box<shrink::ShrinkOptions>),
    /// Measure which tensors tolerate fewer bits, and choose types for a size.
    ///
    /// Starts llama-perplexity once, with the drop-in. For each group of tensors and each type, the
    /// tensors are quantised, swapped in the running program and evaluated; the model's file
    /// stays as it is. An interrupted command continues where it was. With --size or --bpw, a
    /// recipe is chosen, measured and compared with uniform types.
    Tune(Box<tune::TuneOptions>),
    /// Find experts that a model can do without, and write it without them.
    ///
    /// With --leave-out, llama-perplexity measures what each cut costs, by masks in the running program, before a model is
    /// written. Ctrl-C prints and saves what was measured. With --experts, a list of an earlier search is used.
    Prune(prune::PruneOptions),
    /// Show metadata, tensors, shards and experts of a model.
    ///
    /// The exit status is 0 if llama.cpp accepts the file, else 1, with the reason.
    Inspect {
        /// A GGUF file, or any shard of a model.
        file: PathBuf,
        /// Print JSON.
        #[arg(long)]
        json: bool,
        /// Load all tensors into memory, and print the time.
        #[arg(long, conflicts_with = "json")]
        load: bool,
        /// Load into the memory of this CUDA device, by its number after CUDA_VISIBLE_DEVICES.
        #[arg(long, value_name = "N", requires = "load")]
        device: Option<usize>,
    },
    /// Send single requests to a running program.
    Ctl {
        #[command(subcommand)]
        request: Ctl,
    },
    /// Write man pages and shell completions below a prefix.
    #[command(hide = true)]
    Generate {
        /// For example /usr/local.
        prefix: PathBuf,
    },
    /// Print values for the last word of a command line, for a shell.
    #[command(hide = true, name = candidates::NAME)]
    Candidates {
        /// The words as they were typed, with their quotes.
        #[arg(last = true)]
        words: Vec<String>,
    },
    /// Print the signals that this process gets. 'run' starts it to know those of its group.
    #[command(hide = true, name = child::WITNESS)]
    Witness,
    /// End at once. 'run' starts it with the drop-in, to try the library.
    #[command(hide = true, name = proof::TRIAL)]
    Trial,
}

/// Single requests, and what measures for them.
#[derive(Subcommand)]
enum Ctl {
    /// Reload changed files in a running program and wait for the result.
    ///
    /// The exit status is 1 if a changed file is not in use afterwards, or if the slots of
    /// --server cannot be emptied.
    Reload {
        #[command(flatten)]
        at: Control,
        #[command(flatten)]
        server: control::server::ServerOptions,
    },
    /// Restore the original tensors, and freeze reloads.
    ///
    /// Changed files and swaps are not used until 'ctl unfreeze'.
    Freeze(Control),
    /// Permit reloads after 'ctl freeze'.
    ///
    /// Files that differ from what the program loaded count as changed.
    Unfreeze(Control),
    /// Mask experts of a running program: they are never chosen.
    ///
    /// The other experts have the weights that they would have without the masked ones. The program runs with
    /// --expert-masks. 'undo' removes all masks.
    Mask {
        #[command(flatten)]
        at: Control,
        #[command(flatten)]
        options: control::mask::MaskOptions,
    },
    /// Set the margin within which experts in memory are preferred.
    ///
    /// The program runs with --stream-prefer and --accept-changed-results.
    Prefer {
        #[command(flatten)]
        at: Control,
        /// The largest difference of scores, 0 to 1. With 0, no expert is replaced.
        #[arg(long, value_name = "MARGIN", value_parser = margin)]
        margin: f32,
    },
    /// Measure what it costs and gains to prefer experts in memory.
    ///
    /// Starts llama-perplexity once, with experts from disk. For each margin, the text is evaluated one token at a time:
    /// the divergence from the model as it is, the bytes that are read, and the speed. 'run --stream-prefer' uses a margin.
    Margins(margins::MarginsOptions),
    /// Note a text at the current position of the routes.
    ///
    /// The program runs with --expert-trace-routes. Routes before and after a mark belong to
    /// different workloads.
    Mark {
        #[command(flatten)]
        at: Control,
        /// The text, for example the name of a workload.
        text: String,
    },
    /// Wait for a round of llama-perplexity, or start the next one.
    ///
    /// The program runs with --rounds. When the command ends, all output of the round is written.
    /// The exit status is 1 if the round failed.
    Round {
        #[command(flatten)]
        at: Control,
        /// Start a round and wait for its end.
        #[arg(long)]
        start: bool,
        /// Let the program end.
        #[arg(long, conflicts_with = "start")]
        end: bool,
    },
    /// Check that a program listens at the socket.
    Ping(Control),
    /// Print metrics for Prometheus, or serve them.
    Metrics(MetricsOptions),
}

/// Where metrics are from, and where they go.
#[derive(clap::Args)]
struct MetricsOptions {
    /// Path of the control socket, from LLAMA_SIDECAR_CONTROL of the program; with --listen also a pattern, such as
    /// '/run/llama/*.sock'. Can be repeated. By default those of programs that 'run' has started without one.
    #[arg(short, long, env = "LLAMA_SIDECAR_CONTROL")]
    socket: Vec<String>,
    #[command(flatten)]
    limit: Limit,
    /// Print JSON.
    #[arg(long, conflicts_with = "listen")]
    json: bool,
    /// Serve the metrics of all programs at this address for Prometheus (OpenMetrics), for example 127.0.0.1:9464.
    #[arg(long, value_name = "ADDRESS")]
    listen: Option<SocketAddr>,
}

fn main() -> ExitCode {
    inherited::raise_open_files();
    let arguments = help::parse::<Arguments>();
    let result = match arguments.command {
        Command::Doctor(options) => doctor::run(&options),
        Command::Run(mut options) => {
            profile::prepare(&mut options).and_then(|held| run::run(&options, held))
        }
        Command::Compare(options) => compare::run(&options),
        Command::Plan(options) => plan::run(&options),
        Command::Swap(options) => swap::run(options),
        Command::Undo(options) => undo::run(&options),
        Command::Ask(options) => ask::run(&options),
        Command::Status {
            at,
            save: Some(path),
            outputs,
            ..
        } => profile::save(&at, &path, outputs),
        Command::Status { at, hash: true, .. } => control::run(&at, &Request::Hash),
        Command::Status { at, .. } => control::run(&at, &Request::Status),
        Command::Top(options) => top::run(&options),
        Command::Trace { at, reset: true } => control::run(&at, &Request::TraceReset),
        Command::Trace { at, reset: false } => control::run(&at, &Request::Trace),
        Command::Report(options) => report::run(&options),
        Command::Shrink(options) => shrink::run(&options),
        Command::Tune(options) => tune::run(&options),
        Command::Prune(options) => prune::run(&options),
        Command::Inspect {
            file,
            load: true,
            device,
            ..
        } => inspect::load::run(&file, device),
        Command::Inspect { file, json, .. } => inspect::run(&file, json),
        Command::Ctl { request } => request.run(),
        Command::Generate { prefix } => generate::run(help::arrange(Arguments::command()), &prefix),
        Command::Candidates { words } => {
            candidates::run(Arguments::command(), words);
            Ok(())
        }
        Command::Witness => child::witness(),
        Command::Trial => Ok(()),
    };
    // What was measured and written is complete.
    interruption::end_by_signal();
    match result.and(print::finish()) {
        Ok(()) => ExitCode::SUCCESS,
        // A reader that closes its end, for example `head`, is not a failure.
        Err(error) if print::is_closed(&error) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("llama-sidecar: {}", sentence(&error));
            ExitCode::FAILURE
        }
    }
}

impl Ctl {
    fn run(self) -> Result<()> {
        match self {
            Ctl::Reload { at, server } => match control::reload(&at, &server)? && !at.json {
                true => control::say_undo(&at.socket()?, "undo"),
                false => Ok(()),
            },
            Ctl::Freeze(at) => control::change(&at, &Request::Revert, "ctl unfreeze"),
            Ctl::Unfreeze(at) => control::run(&at, &Request::Unfreeze),
            Ctl::Mask { at, options } => control::change(&at, &options.request()?, "undo"),
            Ctl::Prefer { at, margin } => control::change(&at, &Request::Prefer { margin }, "undo"),
            Ctl::Margins(options) => margins::run(&options),
            Ctl::Mark { at, text } => control::run(&at, &Request::Mark { text }),
            Ctl::Round { at, end: true, .. } => control::run(&at, &Request::RoundEnd),
            Ctl::Round { at, start, .. } => control::run(&at, &Request::Round { start }),
            Ctl::Ping(at) => control::run(&at, &Request::Ping),
            Ctl::Metrics(MetricsOptions {
                socket,
                listen: Some(address),
                ..
            }) => {
                let all = || control::sockets::pattern().into_iter().collect();
                exporter::serve(address, &if socket.is_empty() { all() } else { socket })
            }
            Ctl::Metrics(MetricsOptions {
                socket,
                limit,
                json,
                ..
            }) => {
                let only = socket.is_empty().then_some(None);
                let named = socket.into_iter().map(|path| Some(path.into()));
                only.into_iter().chain(named).try_for_each(|socket| {
                    let at = Control {
                        socket,
                        limit,
                        json,
                    };
                    control::run(&at, &Request::Metrics)
                })
            }
        }
    }
}

/// Returns an error and its causes in one line. Some errors contain their cause.
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
