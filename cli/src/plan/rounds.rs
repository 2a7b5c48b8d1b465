//! Rounds of runs: the commands that could be fastest run in turn, and after some rounds the slower half is left out each time. The
//! command that was typed runs in all rounds, so that each has been compared with it under the same load.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use sidecar_core::protocol::{Event, StreamFigures};

use super::changes::{Change, Kind};
use super::others::Since;
use crate::compare::results::{LEAST_ROUNDS, Ratio};
use crate::output::progress;
use crate::trial::prompts::Request;
use crate::trial::speeds::Speeds;
use crate::trial::{Interrupted, Program, Run};

/// The most rounds.
const ROUNDS: usize = 20;
/// The error at which the last difference is known.
const PRECISION: f64 = 0.03;
/// What is not slower than this, as a share, is equal.
const EQUAL: f64 = 0.02;
/// The share of the processors that others may take during a round that counts.
const MOST_OF_OTHERS: f64 = 0.15;
/// How many times as long as the first run a run may take, and how much longer in any case.
const LONGER: u32 = 5;
const MARGIN: Duration = Duration::from_secs(10);
/// Why there were no more rounds.
const TIME: &str = "the time was over: pass a longer --time";
const INTERRUPTED: &str = "it was interrupted";
/// Why a program is not measured.
const NO_SPEEDS: &str = "it prints no speeds of prompts and answers, as llama-server, llama-completion and llama-bench do";

/// Tokens of prompts and answers that are weighed.
#[derive(Debug, Clone, Copy)]
pub struct Weighed {
    pub prompt: f64,
    pub answer: f64,
}

/// A command, and what its runs have shown.
pub struct Candidate {
    /// How it differs from the command that was typed.
    pub changes: Vec<Change>,
    /// All words of it as text.
    pub command: String,
    pub words: Vec<OsString>,
    pub program: Program,
    /// The runs that count, by round.
    pub runs: BTreeMap<usize, Measured>,
    /// Why it does not run, or has no effect.
    pub obstacle: Option<String>,
}

/// What a run has shown.
#[derive(Debug, Clone, Default)]
pub struct Measured {
    /// Tokens per second.
    pub prompt: f64,
    pub answer: f64,
    pub start_seconds: f64,
    pub read_bytes: u64,
    pub streamed: Option<StreamFigures>,
}

/// How many times as fast a command is as another one.
#[derive(Debug, Clone, Copy)]
pub struct Faster {
    pub mean: f64,
    /// The same with its error, of several rounds.
    pub ratio: Option<Ratio>,
    /// In how many rounds both ran.
    pub rounds: usize,
}

/// What all rounds have shown.
pub struct Results {
    /// The first one is the command that was typed.
    pub candidates: Vec<Candidate>,
    /// The fastest command; of those that are equal, the one with the fewest changes. `None` if none has run.
    pub best: Option<usize>,
    pub rounds: usize,
    /// By how much two runs of the command that was typed differed, as a share.
    pub spread: Option<f64>,
    /// Why there were no more rounds.
    pub stopped: Option<&'static str>,
}

impl Weighed {
    /// Returns the time of the tokens.
    fn seconds(self, run: &Measured) -> f64 {
        self.prompt / run.prompt + self.answer / run.answer
    }
}

impl Candidate {
    pub fn new(
        changes: Vec<Change>,
        command: String,
        words: Vec<OsString>,
        program: Program,
    ) -> Candidate {
        Candidate {
            changes,
            command,
            words,
            program,
            runs: BTreeMap::new(),
            obstacle: None,
        }
    }

    /// Runs it, and notes what it shows; `None` if it does not run, or takes longer than this. Fails if the user has ended
    /// the command.
    fn run(&mut self, deadline: Instant, longest: Duration) -> Result<Option<Measured>> {
        let began = Instant::now();
        self.program.longest = deadline.saturating_duration_since(began).min(longest);
        let flags: Vec<&str> = self.changes.iter().filter_map(|of| of.flag()).collect();
        let flags = (!flags.is_empty()).then_some(&flags[..]);
        let found = self.program.run(flags, false).and_then(|(run, events)| {
            let no_effect = events.iter().find_map(|event| match event {
                Event::NoEffect { found } => Some(found.sentence.clone()),
                _ => None,
            });
            let streams = self.changes.contains(&Change::Stream);
            let obstacle = no_effect.or_else(|| events.stream_obstacle().filter(|_| streams));
            if let Some(obstacle) = obstacle.filter(|_| flags.is_some()) {
                bail!(obstacle);
            }
            Ok(measured(&run, events.streamed().cloned()))
        });
        match found {
            Ok(Some(measured)) => return Ok(Some(measured)),
            Ok(None) => self.obstacle = Some(NO_SPEEDS.into()),
            Err(error) if error.is::<Interrupted>() => return Err(error),
            // It was ended, as there was no more time.
            Err(_) if Instant::now() > deadline => {}
            Err(_) if began.elapsed() > longest => {
                let why = format!(
                    "it takes more than {LONGER} times as long as the command that was typed"
                );
                self.obstacle = Some(why);
            }
            Err(error) => self.obstacle = Some(format!("{error:#}")),
        }
        Ok(None)
    }

    /// Compares it with another one in the rounds that both have; `None` without one.
    pub fn faster_than(&self, other: &Candidate, tokens: Weighed) -> Option<Faster> {
        let both = self
            .runs
            .iter()
            .filter_map(|(round, of)| Some((of, other.runs.get(round)?)));
        let pairs: Vec<_> = both
            .map(|(of, to)| (tokens.seconds(to), tokens.seconds(of)))
            .collect();
        let ratio = Ratio::of(&pairs);
        let of_first = || pairs.first().map(|(to, of)| to / of);
        Some(Faster {
            mean: ratio.map(|ratio| ratio.mean).or_else(of_first)?,
            ratio,
            rounds: pairs.len(),
        })
    }

    /// Returns means of all runs; `None` without one.
    pub fn mean(&self) -> Option<Measured> {
        let runs = || self.runs.values();
        let count = self.runs.len() as f64;
        let last = runs().next_back()?.clone();
        // The mean of times, as tokens are weighed by.
        let rate = |of: fn(&Measured) -> f64| count / runs().map(|run| 1.0 / of(run)).sum::<f64>();
        Some(Measured {
            prompt: rate(|of| of.prompt),
            answer: rate(|of| of.answer),
            ..last
        })
    }
}

/// Returns the speeds of a run: those of the longest prompt and of the longest answer of a server, else those of all.
fn measured(run: &Run, streamed: Option<StreamFigures>) -> Option<Measured> {
    let speeds = match &run.requests[..] {
        [long, .., short] => Speeds {
            prompt: long.prompt,
            answer: short.answer,
        },
        _ => run.speeds,
    };
    Some(Measured {
        prompt: speeds.prompt.rate()?,
        answer: speeds.answer.rate()?,
        start_seconds: run.start_seconds,
        read_bytes: run.usage.read_bytes,
        streamed,
    })
}

/// Rounds in progress.
struct Rounds {
    candidates: Vec<Candidate>,
    /// Those that run in the next round.
    racing: Vec<usize>,
    tokens: Weighed,
    deadline: Instant,
    /// How long a run may take.
    longest: Duration,
}

/// Runs commands, of which the first is the one that was typed, until so much time has passed. After the first round, the best
/// change of each kind are made together in one more command. Fails if the user has ended the command before anything is known.
pub fn measure(
    mut candidates: Vec<Candidate>,
    tokens: Weighed,
    time: Duration,
    with: impl Fn(&[Change]) -> Candidate,
    typed_threads: (u32, u32),
) -> Result<Results> {
    let deadline = Instant::now() + time;
    // The others need time, too: where too little memory makes it slow, they show what helps.
    let others = candidates.len() > 1;
    let typed = &mut candidates[0].program;
    if others {
        typed.longest = typed.longest.min((time / 3).max(MARGIN));
    }
    let most = typed.longest;
    // Its file may have to be read from the disk first: this run counts only if there is no later one.
    progress(&format!(
        "command 1, as it was typed, for {} s at most: {}",
        most.as_secs(),
        candidates[0].command
    ));
    let began = Instant::now();
    let mut longest = time;
    let first = match candidates[0].program.first_run(true, false) {
        Ok(run) => {
            longest = LONGER * Duration::from_secs_f64(run.seconds) + MARGIN;
            Some(measured(&run, None).context(NO_SPEEDS)?)
        }
        Err(error) if error.is::<Interrupted>() => {
            progress("nothing was measured");
            return Err(error);
        }
        Err(_) if others && began.elapsed() >= most => {
            let why = format!(
                "it takes more than {} s: pass a longer --time to compare it",
                most.as_secs()
            );
            progress(&why);
            candidates[0].obstacle = Some(why);
            None
        }
        Err(error) => {
            candidates[0].obstacle = Some(format!("{error:#}"));
            progress(&format!("it does not run: {error:#}"));
            None
        }
    };
    // The prompt may have become shorter.
    let requests = candidates[0].program.requests.clone();
    for candidate in &mut candidates[1..] {
        candidate.program.requests = requests.clone();
    }
    let mut rounds = Rounds {
        racing: (0..candidates.len()).collect(),
        candidates,
        tokens,
        deadline,
        longest,
    };
    let (mut number, mut was_repeated) = (0, false);
    let stopped = loop {
        if number == ROUNDS || rounds.is_decided() {
            break None;
        }
        let (began, since) = (Instant::now(), Since::now());
        let count = rounds.racing.len() as u32;
        let is_whole = match rounds.run(number) {
            Ok(is_whole) => is_whole,
            Err(_) => break Some(INTERRUPTED),
        };
        let others = since.and_then(|since| since.share()).unwrap_or(0.0);
        if is_whole && others > MOST_OF_OTHERS && !was_repeated {
            was_repeated = true;
            progress(&format!(
                "other programs used {:.0} % of the processors: this round does not count",
                100.0 * others
            ));
            for &at in &rounds.racing {
                rounds.candidates[at].runs.remove(&number);
            }
            continue;
        }
        if number == 0
            && is_whole
            && let Some(changes) = rounds.best_changes(typed_threads)
        {
            rounds.add(with(&changes), &requests);
        }
        if !is_whole {
            break Some(TIME);
        }
        number += 1;
        // One run may be that of another load: all have several, if there is time for those.
        let missing = LEAST_ROUNDS.saturating_sub(number) as u32;
        if missing == 0 || Instant::now() + began.elapsed() * missing > deadline {
            rounds.leave_out_slower_half();
        } else {
            rounds.race_all();
        }
        let next = began.elapsed() * rounds.racing.len() as u32 / count;
        if number < ROUNDS && Instant::now() + next > deadline && !rounds.is_decided() {
            break Some(TIME);
        }
    };
    let typed = &mut rounds.candidates[0].runs;
    let both = first.as_ref().zip(typed.get(&0));
    let spread =
        both.map(|(first, second)| (tokens.seconds(first) / tokens.seconds(second) - 1.0).abs());
    if let (Some(first), true) = (first, typed.is_empty()) {
        typed.insert(0, first);
    }
    Ok(rounds.results(number, spread, stopped))
}

impl Rounds {
    /// Runs each command once; in the first round the one that was typed is last, and every second round has the reverse order.
    /// Returns whether there was time for all.
    fn run(&mut self, number: usize) -> Result<bool> {
        let mut order = self.racing.clone();
        order.rotate_left(1);
        if number % 2 == 1 {
            order.reverse();
        }
        let count = order.len();
        for (done, at) in order.into_iter().enumerate() {
            let candidate = &mut self.candidates[at];
            if candidate.obstacle.is_some() {
                continue;
            }
            if Instant::now() > self.deadline {
                return Ok(false);
            }
            if number == 0 && at > 0 {
                progress(&format!("command {}: {}", at + 1, candidate.command));
            }
            // All others are compared with the one that was typed.
            let longest = if at == 0 { Duration::MAX } else { self.longest };
            let found = candidate.run(self.deadline, longest)?;
            let text = match (&found, &candidate.obstacle) {
                (Some(of), _) => format!(
                    "prompts {:.1}, answers {:.1} tokens/s",
                    of.prompt, of.answer
                ),
                (None, Some(obstacle)) => format!("does not run: {obstacle}"),
                (None, None) => "was ended".into(),
            };
            let left = self.deadline.saturating_duration_since(Instant::now());
            progress(&format!(
                "round {}, {} of {count}, command {}: {text}; {} s left",
                number + 1,
                done + 1,
                at + 1,
                left.as_secs()
            ));
            match found {
                Some(found) => drop(candidate.runs.insert(number, found)),
                None if candidate.obstacle.is_none() => return Ok(false),
                None => {}
            }
        }
        Ok(true)
    }

    fn add(&mut self, mut candidate: Candidate, requests: &[Request]) {
        let is_known = |of: &Candidate| of.command == candidate.command;
        if self.candidates.iter().any(is_known) {
            return;
        }
        candidate.program.requests = requests.to_vec();
        progress(&format!(
            "command {}, with the best of each: {}",
            self.candidates.len() + 1,
            candidate.command
        ));
        self.candidates.push(candidate);
    }

    /// Returns the best change of each kind after the first round, of those that make the command faster.
    fn best_changes(&self, typed_threads: (u32, u32)) -> Option<Vec<Change>> {
        let typed = self.candidates[0].runs.get(&0)?;
        let mut best: BTreeMap<Kind, (f64, Change)> = BTreeMap::new();
        let (mut answers, mut prompts) = (
            (typed.answer * (1.0 + EQUAL), typed_threads.0),
            (typed.prompt * (1.0 + EQUAL), typed_threads.1),
        );
        for candidate in &self.candidates[1..] {
            let (Some(&change), Some(run)) = (candidate.changes.first(), candidate.runs.get(&0))
            else {
                continue;
            };
            if let Change::Threads {
                answers: threads, ..
            } = change
            {
                if run.answer > answers.0 {
                    answers = (run.answer, threads);
                }
                if run.prompt > prompts.0 {
                    prompts = (run.prompt, threads);
                }
                continue;
            }
            let faster = self.tokens.seconds(typed) / self.tokens.seconds(run);
            let known = best.get(&change.kind()).map_or(1.0 + EQUAL, |of| of.0);
            if faster > known {
                best.insert(change.kind(), (faster, change));
            }
        }
        let mut changes: Vec<Change> = best.into_values().map(|of| of.1).collect();
        if (answers.1, prompts.1) != typed_threads {
            changes.push(Change::Threads {
                answers: answers.1,
                prompts: prompts.1,
            });
        }
        (!changes.is_empty()).then_some(changes)
    }

    /// Lets all run that do, also what was added.
    fn race_all(&mut self) {
        let runs = |at: &usize| *at == 0 || self.candidates[*at].obstacle.is_none();
        self.racing = (0..self.candidates.len()).filter(runs).collect();
    }

    /// Leaves out what does not run, and the slower half of the others; at least one stays, and the command that was typed. What was
    /// added after the first round stays.
    fn leave_out_slower_half(&mut self) {
        let all = 0..self.candidates.len();
        let (mut known, mut new): (Vec<usize>, Vec<usize>) = all
            .filter(|at| self.racing.contains(at) || self.candidates[*at].runs.is_empty())
            .filter(|&at| at > 0 && self.candidates[at].obstacle.is_none())
            .partition(|&at| !self.candidates[at].runs.is_empty());
        known.sort_by(|&a, &b| self.time(a).total_cmp(&self.time(b)));
        known.truncate(known.len().div_ceil(2));
        known.append(&mut new);
        known.sort_unstable();
        self.racing = [vec![0], known].concat();
    }

    /// Whether nothing is left that could be fastest, or the last difference is known.
    fn is_decided(&self) -> bool {
        let typed = &self.candidates[0];
        match self.racing[..] {
            [_] => true,
            [_, last] => {
                let faster = self.candidates[last].faster_than(typed, self.tokens);
                let ratio = faster.and_then(|of| of.ratio);
                typed.obstacle.is_some() || ratio.is_some_and(|of| of.is_known(PRECISION))
            }
            _ => false,
        }
    }

    /// Returns the time of the weighed tokens against that of one command, which has run in the same rounds as most others: if
    /// it always runs, that is the one that was typed.
    fn time(&self, at: usize) -> f64 {
        let all = &self.candidates;
        let shared = |of: &&Candidate| {
            let others = all
                .iter()
                .filter(|to| to.faster_than(of, self.tokens).is_some());
            others.count()
        };
        // The first of several.
        let reference = all
            .iter()
            .rev()
            .max_by_key(shared)
            .expect("a command was typed");
        let faster = all[at].faster_than(reference, self.tokens);
        faster.map_or(f64::INFINITY, |of| 1.0 / of.mean)
    }

    fn results(self, rounds: usize, spread: Option<f64>, stopped: Option<&'static str>) -> Results {
        let ran = |at: &usize| !self.candidates[*at].runs.is_empty();
        // Those of the last round have been compared most often.
        let last: Vec<usize> = self.racing.iter().copied().filter(ran).collect();
        let fastest = last
            .iter()
            .copied()
            .min_by(|&a, &b| self.time(a).total_cmp(&self.time(b)));
        let best = fastest.and_then(|fastest| {
            let is_equal = |at: &usize| {
                let of = &self.candidates[fastest];
                of.faster_than(&self.candidates[*at], self.tokens)
                    .is_some_and(|of| match of.ratio {
                        Some(ratio) => !ratio.differs() || ratio.mean < 1.0 + EQUAL,
                        None => of.mean < 1.0 + spread.unwrap_or(0.0).max(EQUAL),
                    })
            };
            let equal = last.iter().copied().filter(is_equal);
            equal
                .min_by_key(|&at| self.candidates[at].changes.len())
                .or(Some(fastest))
        });
        Results {
            candidates: self.candidates,
            best,
            rounds,
            spread,
            stopped,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::trial::Kind as Works;

    const TOKENS: Weighed = Weighed {
        prompt: 100.0,
        answer: 100.0,
    };

    /// A program that prints constant speeds: 100 tokens per second of prompts, and some of answers.
    fn program(answer: u32) -> Program {
        let print = format!(
            "echo 'prompt eval time = 1000 ms / 100 tokens' >&2; echo 'eval time = 1000 ms / {answer} runs' >&2"
        );
        Program {
            kind: Works::Other,
            words: ["sh", "-c", &print].map(OsString::from).to_vec(),
            requests: crate::trial::prompts::long_and_short(1, 1),
            longest: Duration::from_secs(60),
        }
    }

    fn candidate(changes: &[Change], answer: u32) -> Candidate {
        Candidate::new(
            changes.to_vec(),
            answer.to_string(),
            Vec::new(),
            program(answer),
        )
    }

    /// Returns a command that has had these speeds of answers in rounds.
    fn ran(changes: &[Change], answers: &[f64]) -> Candidate {
        let mut of = candidate(changes, answers[0] as u32);
        let run = |&answer: &f64| Measured {
            prompt: 100.0,
            answer,
            ..Measured::default()
        };
        of.runs = answers.iter().map(run).enumerate().collect();
        of
    }

    fn rounds(candidates: Vec<Candidate>) -> Rounds {
        Rounds {
            racing: (0..candidates.len()).collect(),
            candidates,
            tokens: TOKENS,
            deadline: Instant::now(),
            longest: Duration::ZERO,
        }
    }

    #[test]
    fn the_faster_half_goes_on_with_the_command_that_was_typed() {
        let of = |answer| ran(&[Change::Stream], &[answer]);
        let mut rounds = rounds(vec![of(1.0), of(4.0), of(2.0), of(8.0), of(3.0)]);
        rounds.leave_out_slower_half();
        assert_eq!(rounds.racing, [0, 1, 3]);
        rounds.candidates[3].obstacle = Some("it ends".into());
        rounds.add(candidate(&[], 9), &[]);
        rounds.leave_out_slower_half();
        assert_eq!(rounds.racing, [0, 1, 5], "what was added has not run yet");
    }

    #[test]
    fn the_best_of_each_kind_are_made_together() {
        let threads = |of| Change::Threads {
            answers: of,
            prompts: of,
        };
        let (two, four) = (ran(&[threads(2)], &[20.0]), ran(&[threads(4)], &[15.0]));
        let (map, plain) = (
            ran(&[Change::Map], &[11.0]),
            ran(&[Change::Repack(false)], &[10.1]),
        );
        let rounds = rounds(vec![ran(&[], &[10.0]), two, four, map, plain]);
        let expected = Change::Threads {
            answers: 2,
            prompts: 1,
        };
        assert_eq!(
            rounds.best_changes((1, 1)),
            Some(vec![Change::Map, expected])
        );
    }

    #[test]
    fn a_difference_that_is_not_known_is_no_reason_to_change_a_command() {
        let best = |candidates| rounds(candidates).results(3, None, None).best;
        let typed = || ran(&[], &[10.0, 11.0, 10.0]);
        let equal = ran(&[Change::Map], &[11.0, 10.0, 10.5]);
        assert_eq!(best(vec![typed(), equal]), Some(0));
        let faster = ran(&[Change::Map, Change::Stream], &[20.0, 21.0, 20.0]);
        let same = ran(&[Change::Map], &[20.1, 20.9, 19.9]);
        assert_eq!(
            best(vec![typed(), faster, same]),
            Some(2),
            "the one with fewer changes"
        );
    }

    #[test]
    fn one_run_of_each_shows_what_differs_by_more_than_two_runs_of_one() {
        let both = || vec![ran(&[], &[10.0]), ran(&[Change::Map], &[12.0])];
        let best = |spread| rounds(both()).results(1, Some(spread), None).best;
        assert_eq!((best(0.01), best(0.5)), (Some(1), Some(0)));
    }

    #[test]
    fn commands_are_compared_in_rounds_that_they_share() {
        // All are slower in the second round, which the first command has not had.
        let mut typed = ran(&[], &[10.0]);
        let both = ran(&[Change::Map], &[12.0, 3.0]);
        let mut new = ran(&[Change::Stream], &[0.0, 4.0]);
        new.runs.remove(&0);
        typed.obstacle = Some("it ends".into());
        let rounds = rounds(vec![typed, both, new]);
        assert!(rounds.time(2) < rounds.time(1) && rounds.time(1) < rounds.time(0));
    }

    #[test]
    fn what_takes_much_longer_is_left_out() {
        let mut slow = candidate(&[Change::Map], 10);
        slow.program.words = ["sleep", "600"].map(OsString::from).to_vec();
        let deadline = Instant::now() + Duration::from_secs(600);
        let found = slow
            .run(deadline, Duration::from_millis(1))
            .expect("no interruption");
        assert!(found.is_none());
        let why = slow.obstacle.expect("a reason");
        assert_eq!(
            why,
            "it takes more than 5 times as long as the command that was typed"
        );
    }

    #[test]
    fn without_time_the_command_that_was_typed_has_its_first_run() {
        let candidates = vec![candidate(&[], 10), candidate(&[Change::Map], 20)];
        let with = |_: &[Change]| unreachable!("no round was completed");
        let found = measure(candidates, TOKENS, Duration::ZERO, with, (1, 1)).expect("runs");
        assert_eq!(
            (found.best, found.rounds, found.stopped),
            (Some(0), 0, Some(TIME))
        );
        assert_eq!(found.candidates[0].runs[&0].answer, 10.0);
        assert!(found.candidates[1].runs.is_empty());
    }
}
