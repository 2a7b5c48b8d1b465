//! What computes routed experts that have no slot, decided by the time of whole evaluations.
//!
//! The speeds of CPU, memory and link say little: CPU and link read from the same memory, kernels
//! start late, and a part on the CPU interrupts the device. So evaluations of one batch size are
//! measured as the program runs them, by each [`Method`] in turn. The fastest one is used until the
//! next [trial](TRIAL), or until evaluations take longer than they did.

use std::time::Duration;

/// What computes routed experts that have no slot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Method {
    /// The device, after a copy into a slot.
    Fetched,
    /// The CPU, while the device computes those that have a slot.
    OnCpu,
    /// There are no slots: the program's own placement computes all experts.
    NoSlots,
}

const METHODS: [Method; 3] = [Method::Fetched, Method::OnCpu, Method::NoSlots];

impl Method {
    /// Returns its name, as `LLAMA_POSTFETCH_CACHE_MISSES` has it.
    fn name(self) -> &'static str {
        match self {
            Method::Fetched => "fetch",
            Method::OnCpu => "cpu",
            Method::NoSlots => "no slots",
        }
    }
}

/// Evaluations before the first trial, in which slots fill.
const WARM_UP: u32 = 48;
/// Evaluations of a method in a trial that count.
const TRIAL: usize = 12;
/// Evaluations after a change of the method that do not count.
const SKIPPED: u32 = 2;
/// Evaluations after which a trial of a method ends early, if all of them are slow.
const EARLY: usize = 3;
/// From this share of the fastest method's time on, a method is slow.
const SLOW: f64 = 1.5;
/// A method replaces the one before only if it takes less than this share of its time.
const FASTER: f64 = 0.97;
/// Evaluations between the first two trials. Each time, it doubles up to [`LONGEST_PERIOD`].
const PERIOD: u32 = 256;
const LONGEST_PERIOD: u32 = 4096;
/// Evaluations whose median is compared with the trial's.
const RECENT: usize = 32;
/// From this share of the trial's time on, evaluations take longer than they did.
const CHANGED: f64 = 1.25;

/// The choice for evaluations of one batch size.
#[derive(Debug)]
pub struct Choice {
    method: Method,
    /// Times of the evaluations since the method, or its use, began.
    times: Vec<Duration>,
    /// Evaluations that do not count.
    skipped: u32,
    phase: Phase,
    period: u32,
}

#[derive(Debug)]
enum Phase {
    /// The method is used for so many evaluations. Its time in the trial, if there was one.
    Use { left: u32, time: Option<Duration> },
    /// The methods that were measured, the one before the trial first.
    Trial(Vec<(Method, Duration)>),
}

impl Choice {
    /// Begins with a method.
    pub fn new(first: Method) -> Choice {
        Choice {
            method: first,
            times: Vec::with_capacity(RECENT),
            skipped: SKIPPED,
            phase: Phase::Use {
                left: WARM_UP,
                time: None,
            },
            period: PERIOD,
        }
    }

    /// Returns the method for the next graph.
    pub fn method(&self) -> Method {
        self.method
    }

    /// Records the time of an evaluation by a method. Returns whether the next graph is to be built
    /// for another one.
    pub fn evaluated(&mut self, method: Method, time: Duration) -> bool {
        if method != self.method {
            return true;
        }
        if self.skipped > 0 {
            self.skipped -= 1;
            return false;
        }
        self.times.push(time);
        match &mut self.phase {
            Phase::Use { left, time } => {
                *left -= 1;
                let mut is_over = *left == 0;
                if self.times.len() == RECENT {
                    let now = median(&mut self.times);
                    is_over |= time.is_some_and(|time| now > time.mul_f64(CHANGED));
                    self.times.clear();
                }
                if is_over {
                    self.times.clear();
                    self.phase = Phase::Trial(Vec::new());
                }
                false
            }
            Phase::Trial(tried) => {
                let best = tried.iter().map(|(_, time)| time.mul_f64(SLOW)).min();
                let is_slow = |time: &Duration| best.is_some_and(|best| *time > best);
                let is_early = self.times.len() >= EARLY && self.times.iter().all(is_slow);
                if self.times.len() < TRIAL && !is_early {
                    return false;
                }
                tried.push((method, median(&mut self.times)));
                let is_tried = |next: &Method| tried.iter().any(|(method, _)| method == next);
                match METHODS.into_iter().find(|next| !is_tried(next)) {
                    Some(next) => self.begin(next),
                    None => self.decide(),
                }
                self.method != method
            }
        }
    }

    /// Uses the fastest method that was tried.
    fn decide(&mut self) {
        let Phase::Trial(tried) = &self.phase else {
            return;
        };
        let before = tried[0];
        let fastest = tried.iter().min_by_key(|(_, time)| *time);
        let is_faster = |(_, time): &&(Method, Duration)| *time < before.1.mul_f64(FASTER);
        let (method, time) = *fastest.filter(is_faster).unwrap_or(&before);
        let took = |(method, time): &(Method, Duration)| {
            format!("{} {:.2} ms", method.name(), time.as_secs_f64() * 1e3)
        };
        let all: Vec<String> = tried.iter().map(took).collect();
        log::info!(
            "post-fetch: --expert-cache-misses=auto uses '{}'; an evaluation takes, with {}",
            method.name(),
            all.join(", ")
        );
        self.phase = Phase::Use {
            left: self.period,
            time: Some(time),
        };
        self.period = LONGEST_PERIOD.min(2 * self.period);
        self.begin(method);
    }

    fn begin(&mut self, method: Method) {
        self.times.clear();
        self.skipped = SKIPPED;
        self.method = method;
    }
}

fn median(times: &mut [Duration]) -> Duration {
    let middle = times.len() / 2;
    *times.select_nth_unstable(middle).1
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Evaluates so often; returns how often each method was used, and the time of all.
    fn run(choice: &mut Choice, evaluations: u32, time: impl Fn(Method) -> f64) -> ([u32; 3], f64) {
        let (mut used, mut all) = ([0; 3], 0.0);
        let mut built = choice.method();
        for _ in 0..evaluations {
            let ms = time(built);
            used[built as usize] += 1;
            all += ms;
            if choice.evaluated(built, Duration::from_secs_f64(ms / 1e3)) {
                built = choice.method();
            }
        }
        (used, all)
    }

    #[test]
    fn the_fastest_method_is_used_and_trials_cost_little() {
        for fastest in METHODS {
            for first in METHODS {
                let time = |method| if method == fastest { 10.0 } else { 25.0 };
                let mut choice = Choice::new(first);
                run(&mut choice, WARM_UP + 100, time);
                assert_eq!(choice.method(), fastest);
                let (_, all) = run(&mut choice, 20_000, time);
                assert!(all < 1.01 * 20_000.0 * 10.0, "{all}");
            }
        }
    }

    #[test]
    fn a_small_difference_changes_nothing() {
        let mut choice = Choice::new(Method::OnCpu);
        let time = |method| if method == Method::OnCpu { 10.0 } else { 9.9 };
        let (used, _) = run(&mut choice, 2000, time);
        let trials = 4 * 2 * (TRIAL as u32 + SKIPPED);
        assert!(used[Method::OnCpu as usize] >= 2000 - trials, "{used:?}");
    }

    #[test]
    fn what_becomes_slower_is_tried_again() {
        let mut choice = Choice::new(Method::Fetched);
        let with_copies_of = |ms| move |of| if of == Method::Fetched { ms } else { 12.0 };
        run(&mut choice, 20_000, with_copies_of(10.0));
        assert_eq!(choice.method(), Method::Fetched);
        // Another program uses the link, long before the next trial is due.
        run(&mut choice, 120, with_copies_of(30.0));
        assert_ne!(choice.method(), Method::Fetched);
    }

    #[test]
    fn a_graph_that_the_program_keeps_is_measured_as_what_it_is() {
        let mut choice = Choice::new(Method::Fetched);
        let time = Duration::from_millis(10);
        while !choice.evaluated(Method::Fetched, time) {}
        let next = choice.method();
        assert_ne!(next, Method::Fetched);
        for _ in 0..100 {
            assert!(choice.evaluated(Method::Fetched, time));
            assert_eq!(choice.method(), next);
        }
    }
}
