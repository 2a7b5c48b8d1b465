//! `llama-sidecar top`: what running programs hold and fetch now.
//!
//! | module | contents |
//! |---|---|
//! | [`web`] | a page in a browser |
//! | [`screen`] | a terminal, and its keys |
//! | [`programs`] | programs that are watched, and actions |
//! | [`facts`] | what is known of a program after two samples, as lines |
//! | [`sample`] | programs, and what they answer |

mod facts;
mod programs;
mod sample;
mod screen;
mod web;

use std::io::{IsTerminal, Write};
use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Result, ensure};

use sidecar_core::text;

use crate::control::sockets;
use crate::print;
use crate::sizes::time;
use crate::top::programs::Programs;
use crate::top::sample::Program;

/// The shortest and the longest time between two samples.
const SHORTEST: Duration = Duration::from_millis(100);
const LONGEST: Duration = Duration::from_secs(3600);

/// The programs, and how often they are asked.
#[derive(clap::Args)]
pub struct TopOptions {
    /// Path of the control socket, from LLAMA_SIDECAR_CONTROL of the program. Can be repeated. By default those of programs
    /// that 'run' has started without one.
    #[arg(short, long, env = "LLAMA_SIDECAR_CONTROL")]
    socket: Vec<PathBuf>,
    /// Time between two samples.
    #[arg(long, value_name = "TIME", default_value = "1s", value_parser = time)]
    interval: Duration,
    /// End after this many samples.
    #[arg(long, value_name = "NUMBER", conflicts_with = "web")]
    samples: Option<u64>,
    /// Show them on a page at this address, for example 127.0.0.1:9465, and print what to open.
    #[arg(long, value_name = "ADDRESS")]
    web: Option<SocketAddr>,
    /// Permit reload, revert and unfreeze on the page.
    #[arg(long, requires = "web")]
    allow_control: bool,
}

/// Shows the programs in the terminal or on a page, or prints lines where the output is no terminal.
pub fn run(options: &TopOptions) -> Result<()> {
    let interval = options.interval;
    ensure!(
        (SHORTEST..=LONGEST).contains(&interval),
        "--interval: use 0.1 to 3600 seconds"
    );
    let mut sockets = options.socket.clone();
    if sockets.is_empty() {
        sockets = sockets::running();
        ensure!(!sockets.is_empty(), "{}", sockets::none());
    }
    let programs: Vec<Program> = sockets.into_iter().map(Program::new).collect();
    if let Some(address) = options.web {
        let programs = Programs::of(programs);
        return web::show(programs, interval, address, options.allow_control);
    }
    match std::io::stdout().is_terminal() {
        true => screen::show(Programs::of(programs), interval, options.samples),
        false => print(programs, interval, options.samples),
    }
}

/// Prints the facts of each program at each sample.
fn print(mut programs: Vec<Program>, interval: Duration, samples: Option<u64>) -> Result<()> {
    let mut number = 0;
    loop {
        for program in &mut programs {
            program.update();
            let mut out = print::stdout();
            let socket = text::path(&program.socket);
            for fact in facts::of(program) {
                writeln!(out, "{socket}: {}", fact.text)?;
            }
            out.flush()?;
        }
        number += 1;
        if samples.is_some_and(|samples| number >= samples) {
            let answers = programs.iter().any(|program| program.now.is_ok());
            ensure!(answers, "no program answers");
            return Ok(());
        }
        std::thread::sleep(interval);
    }
}
