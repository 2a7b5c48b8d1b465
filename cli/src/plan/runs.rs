//! What runs of the program show: as it was typed and, where the model does not fit into memory, with experts
//! from disk.

use anyhow::{Result, bail};
use serde::Serialize;

use super::model::{Calibration, Time};
use super::search::{Calibrations, Facts, STREAM, Setting};
use crate::output::progress;
use crate::trial::speeds::{Speed, Speeds};
use crate::trial::{Interrupted, Program, Run};

/// Runs that are shorter are repeated once.
const SHORT: f64 = 30.0;

/// Speeds of the program as it was typed, in tokens per second.
#[derive(Debug, Clone, Copy, Serialize)]
pub struct Baseline {
    pub prompt: f64,
    pub token: f64,
    pub start_seconds: f64,
}

/// Runs the program, and takes what is no product from its times. Returns the speeds of the run as it was
/// typed; `None` if the program does not print them.
pub fn calibrate(program: &mut Program, facts: &mut Facts) -> Result<Option<Baseline>> {
    progress("running the program as it was typed");
    let run = match program.first_run(true, false) {
        Ok(run) => run,
        Err(error) => {
            let error = unless_interrupted(error)?;
            progress(&format!(
                "it does not run, and nothing is taken from it: {error}"
            ));
            return Ok(None);
        }
    };
    let speeds = repeated(program, None, &run, facts)?;
    let typed = facts.typed;
    facts.runs.typed = calibrations(facts, &typed, &speeds);
    if facts.file.is_some() {
        stream(program, facts)?;
    }
    let rates = speeds.prompt.rate().zip(speeds.answer.rate());
    Ok(rates.map(|(prompt, token)| Baseline {
        prompt,
        token,
        start_seconds: run.start_seconds,
    }))
}

/// Runs the program with experts from disk.
fn stream(program: &Program, facts: &mut Facts) -> Result<()> {
    progress("running it with experts from disk");
    let flags = [STREAM.to_owned()];
    let found =
        program
            .run(Some(&flags), false)
            .and_then(|(run, events)| match events.stream_obstacle() {
                Some(obstacle) => bail!(obstacle),
                None => {
                    facts.runs.memory = events.streamed().cloned().unwrap_or_default();
                    repeated(program, Some(&flags), &run, facts)
                }
            });
    match found {
        Ok(speeds) => {
            let setting = Setting {
                streams: true,
                ..facts.typed
            };
            facts.runs.streamed = calibrations(facts, &setting, &speeds);
        }
        Err(error) => facts.runs.stream_obstacle = Some(unless_interrupted(error)?),
    }
    Ok(())
}

/// Compares the speeds of a run with what is predicted for it. Where page faults are waited for, both their
/// speed and what is no product are unknown, and the speed is taken from the run.
fn calibrations(facts: &mut Facts, setting: &Setting, speeds: &Speeds) -> Option<Calibrations> {
    let prompt_seconds = 1.0 / speeds.prompt.rate()?;
    let token_seconds = 1.0 / speeds.answer.rate()?;
    let tokens = speeds.prompt.tokens as f64;
    let (_, token, prompt) = facts.uncalibrated(setting, tokens).ok()?;
    if let Some(file) = facts
        .file
        .as_mut()
        .filter(|_| token.disk > 0.0 && !setting.streams)
    {
        let assumed = |of: &Time| Calibration::assumed(of.processor + of.gpu);
        // How many times as fast as measured alone.
        let faster = |seconds: f64, of: &Time| {
            let waits = seconds - (of.seconds - of.disk) - assumed(of).rest;
            if waits > 0.0 { of.disk / waits } else { 1.0 }
        };
        for (_, speed) in &mut file.faults {
            *speed *= faster(token_seconds, &token);
        }
        file.batch_faults *= faster(prompt_seconds, &prompt);
        return Some(Calibrations {
            token: assumed(&token),
            prompt: assumed(&prompt),
        });
    }
    Some(Calibrations {
        token: Calibration::of(token_seconds, token.seconds),
        prompt: Calibration::of(prompt_seconds, prompt.seconds),
    })
}

/// Returns the speeds of the longest prompt and of the longest answer of a server; else those of all.
fn speeds_of(run: &Run) -> Speeds {
    match &run.requests[..] {
        [long, .., short] => Speeds {
            prompt: long.prompt,
            answer: short.answer,
        },
        _ => run.speeds,
    }
}

/// Returns the text of an error, unless the user has ended the command.
fn unless_interrupted(error: anyhow::Error) -> Result<String> {
    match error.is::<Interrupted>() {
        true => Err(error),
        false => Ok(format!("{error:#}")),
    }
}

/// Returns the speeds of a run. A short one is repeated: the faster speeds count, as the first run may have
/// waited for the disk that the second one no longer needs; where all runs wait for it, their mean.
fn repeated(
    program: &Program,
    flags: Option<&[String]>,
    run: &Run,
    facts: &Facts,
) -> Result<Speeds> {
    let one = speeds_of(run);
    if run.seconds >= SHORT {
        return Ok(one);
    }
    let other = speeds_of(&program.run(flags, false)?.0);
    let of_both = |a: Speed, b: Speed| match facts.file.is_some() {
        true => Speed {
            tokens: a.tokens.midpoint(b.tokens),
            seconds: a.seconds.midpoint(b.seconds),
        },
        false if b.rate() > a.rate() => b,
        false => a,
    };
    Ok(Speeds {
        prompt: of_both(one.prompt, other.prompt),
        answer: of_both(one.answer, other.answer),
    })
}
