//! Rounds: an unmodified llama-perplexity evaluates again and again, with its model loaded once.
//!
//! `main` of llama-perplexity calls `llama_perplexity` of a library. That call comes here, and
//! the function is called once for each round, each time with a copy of the arguments that the
//! program was started with. After each round the program waits for a request.
//!
//! The model is freed at the end of a round and loaded at the start of the next one. The calls
//! are answered here: a model that was evaluated is kept until the last round has ended. In all
//! rounds the arguments are the same, so that the parameters of the model are the same, except
//! for those that `--fit` derives from the memory that is free. `--fit` loads the model without
//! memory first; that model is never evaluated, and therefore not kept. Later rounds have
//! `--fit off`, because the model has its place, and `--no-warmup`, because it was used.
//!
//! The calls are redirected before the program starts, and only with a variable set.

use std::cell::RefCell;
use std::ffi::{CStr, OsStr, c_char, c_int, c_void};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use parking_lot::{Condvar, Mutex, MutexGuard};
use sidecar_core::config::Config;
use sidecar_core::protocol::NoEffect;

use crate::loader::loaded::Object;
use crate::loader::redirect::Redirection;
use crate::program::capability::{Capability, Effect};
use crate::program::models;
use crate::program::own_hotswap::OwnHotSwap;

/// `int llama_perplexity(int argc, char ** argv)`.
static PERPLEXITY: Redirection = Redirection::of(c"_Z16llama_perplexityiPPc");
static LOAD: Redirection = Redirection::of(c"llama_model_load_from_file");
static FREE: Redirection = Redirection::of(c"llama_model_free");

type Perplexity = unsafe extern "C-unwind" fn(c_int, *mut *mut c_char) -> c_int;
type Free = unsafe extern "C-unwind" fn(*mut c_void);

/// Why there are no rounds.
const NOT_PERPLEXITY: &str = "rounds need llama-perplexity from a build with shared libraries, where it calls 'llama_perplexity' of a library: run that program, or leave out --rounds (LLAMA_SIDECAR_ROUNDS) and LLAMA_HOTSWAP_CONTROL_FILE";

/// Why there are none.
static EFFECT: Effect = Effect::of(NoEffect::ROUNDS);

/// Rounds, as a capability.
pub struct Rounds;

impl Capability for Rounds {
    fn is_enabled(&self) -> bool {
        Config::get().rounds
    }

    fn start(&self) {
        // A program with a hot-swap of its own serves these files itself.
        if STATE.lock().phase == Phase::None && OwnHotSwap::find().is_none() {
            log::warn!("{NOT_PERPLEXITY}");
            EFFECT.note_obstacle(NOT_PERPLEXITY.into());
        }
    }

    fn no_effect(&self) -> Vec<NoEffect> {
        EFFECT.obstacles()
    }
}

/// What the program does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Phase {
    /// It has no rounds.
    None,
    /// It evaluates a round.
    Evaluating,
    /// It waits for a request.
    Waiting,
    /// It has left the last round.
    Ended,
}

impl Phase {
    /// Returns the name in the protocol.
    pub fn name(self) -> &'static str {
        match self {
            Phase::None => "none",
            Phase::Evaluating => "evaluating",
            Phase::Waiting => "waiting",
            Phase::Ended => "ended",
        }
    }
}

struct State {
    phase: Phase,
    /// What the program's function returned, for each round that has ended.
    exits: Vec<c_int>,
    /// Whether requests can arrive.
    driven: bool,
    /// Whether no round follows the current one.
    last: bool,
}

static STATE: Mutex<State> = Mutex::new(State {
    phase: Phase::None,
    exits: Vec::new(),
    driven: false,
    last: false,
});
/// Notified when the phase changes.
static CHANGED: Condvar = Condvar::new();
/// How often a wait for a round looks whether it is still wanted.
const LOOK_INTERVAL: Duration = Duration::from_secs(1);

/// A round that has ended.
#[derive(Debug, Clone, Copy)]
pub struct Ended {
    /// Its number, from 1.
    pub round: u32,
    /// What the program's function returned.
    pub exit: c_int,
    /// What the program does now.
    pub phase: Phase,
}

/// Notes that requests can arrive from now on; returns whether the program has rounds.
pub fn drive() -> bool {
    let mut state = STATE.lock();
    state.driven = true;
    state.phase != Phase::None
}

/// Returns what the program does.
pub fn phase() -> Phase {
    STATE.lock().phase
}

/// Waits for the end of the current round, if the program evaluates one. Fails once `is_wanted`
/// is false.
pub fn wait(is_wanted: impl Fn() -> bool) -> Result<Ended, String> {
    let state = STATE.lock();
    let current = usize::from(state.phase == Phase::Evaluating);
    wait_for(state.exits.len() + current, state, is_wanted)
}

/// Starts the next round and waits for its end. Fails once `is_wanted` is false; the round goes
/// on.
pub fn evaluate(is_wanted: impl Fn() -> bool) -> Result<Ended, String> {
    let mut state = STATE.lock();
    match state.phase {
        Phase::Waiting => state.phase = Phase::Evaluating,
        Phase::Evaluating => {
            return Err(
                "a round is being evaluated: wait for its end with {\"cmd\":\"round\"}, then try again"
                    .into(),
            );
        }
        Phase::None | Phase::Ended => {}
    }
    CHANGED.notify_all();
    wait_for(state.exits.len() + 1, state, is_wanted)
}

/// Returns an error where the program has no rounds.
pub fn exist() -> Result<(), String> {
    match phase() {
        Phase::None => Err(NOT_PERPLEXITY.into()),
        _ => Ok(()),
    }
}

/// Lets the program end: at once if it waits, else after the current round.
pub fn end() {
    let mut state = STATE.lock();
    state.last = true;
    if state.phase == Phase::Waiting {
        state.phase = Phase::Ended;
    }
    CHANGED.notify_all();
}

/// Waits until so many rounds have ended.
fn wait_for(
    rounds: usize,
    mut state: MutexGuard<'_, State>,
    is_wanted: impl Fn() -> bool,
) -> Result<Ended, String> {
    loop {
        if let Some(last) = rounds.checked_sub(1)
            && let Some(exit) = state.exits.get(last)
        {
            return Ok(Ended {
                round: rounds as u32,
                exit: *exit,
                phase: state.phase,
            });
        }
        match state.phase {
            Phase::None => return Err(NOT_PERPLEXITY.into()),
            Phase::Ended => return Err("the program is ending: start it again".into()),
            Phase::Evaluating | Phase::Waiting if is_wanted() => {
                CHANGED.wait_for(&mut state, LOOK_INTERVAL);
            }
            Phase::Evaluating | Phase::Waiting => return Err("nothing waits for the round".into()),
        }
    }
}

/// Notes the end of a round, and waits for a request. Returns whether another round follows.
fn another_round(exit: c_int) -> bool {
    let mut state = STATE.lock();
    state.exits.push(exit);
    state.phase = match state.driven && !state.last {
        true => Phase::Waiting,
        false => Phase::Ended,
    };
    CHANGED.notify_all();
    while state.phase == Phase::Waiting {
        CHANGED.wait(&mut state);
    }
    state.phase == Phase::Evaluating
}

/// The models that the thread of the rounds loads.
struct Loads {
    /// Whether a round is evaluated on this thread.
    in_round: bool,
    /// The paths of models that were loaded and not freed since.
    paths: Vec<PathBuf>,
    /// The model that is kept, and its path.
    kept: Option<(usize, PathBuf)>,
    /// Whether a model was freed that was not kept: `--fit` loaded it.
    fits: bool,
}

thread_local! {
    static LOADS: RefCell<Loads> = const {
        RefCell::new(Loads {
            in_round: false,
            paths: Vec::new(),
            kept: None,
            fits: false,
        })
    };
}

impl Loads {
    /// Returns the kept model of a path; else 0, and notes that the path is loaded.
    fn load(&mut self, path: &Path) -> usize {
        match &self.kept {
            _ if !self.in_round => 0,
            Some((kept, of)) if of == path => *kept,
            _ => {
                self.paths.push(path.to_owned());
                0
            }
        }
    }

    /// Whether a model that the program frees is kept.
    fn keeps(&mut self, model: usize) -> bool {
        if !self.in_round {
            return false;
        }
        if let Some((kept, _)) = &self.kept {
            return *kept == model;
        }
        // With several, it is not known which of them is freed.
        let path = self.paths.pop().filter(|_| self.paths.is_empty());
        self.kept = path.filter(|of| is_evaluated(of)).map(|of| (model, of));
        self.fits |= self.kept.is_none();
        self.kept.is_some()
    }
}

/// Whether a model of this path has weights in memory, and a graph reads them.
fn is_evaluated(path: &Path) -> bool {
    let Ok(path) = std::path::absolute(path) else {
        return false;
    };
    models::models().iter().any(|model| model.path == path)
}

/// Changes the loads of this thread; does nothing where they are gone.
fn with_loads<R: Default>(work: impl FnOnce(&mut Loads) -> R) -> R {
    let done = LOADS.try_with(|loads| Some(work(&mut *loads.try_borrow_mut().ok()?)));
    done.ok().flatten().unwrap_or_default()
}

/// Redirects the calls if a variable is set and the program is llama-perplexity. Runs when the
/// library is loaded.
#[used]
#[unsafe(link_section = ".init_array")]
static PREPARE: extern "C" fn() = prepare;

extern "C" fn prepare() {
    // SAFETY: reads the environment before any other thread of the program can exist.
    let is_set = |name: &CStr| unsafe { !libc::getenv(name.as_ptr()).is_null() };
    let names = [c"LLAMA_SIDECAR_ROUNDS", c"LLAMA_HOTSWAP_CONTROL_FILE"];
    if !names.into_iter().any(is_set) || !Config::get().rounds {
        return;
    }
    let replacements = [
        (&FREE, model_free as *const ()),
        (&LOAD, model_load as *const ()),
        (&PERPLEXITY, perplexity as *const ()),
    ];
    // SAFETY: looks up names.
    let real = |of: &Redirection| unsafe { libc::dlsym(libc::RTLD_DEFAULT, of.name().as_ptr()) };
    if replacements.iter().any(|(of, _)| real(of).is_null()) {
        return;
    }
    for (of, to) in replacements {
        // SAFETY: the replacements have the types of the functions, and the libraries that a
        // program is linked with stay loaded.
        if !unsafe { of.install(to as usize, real(of) as usize, |_: &Object| true) } {
            return;
        }
    }
}

/// Evaluates rounds in place of `llama_perplexity`.
unsafe extern "C-unwind" fn perplexity(argc: c_int, argv: *mut *mut c_char) -> c_int {
    // SAFETY: noted before the call could be redirected; of this type by the name.
    let real: Perplexity = unsafe { std::mem::transmute(PERPLEXITY.before()) };
    STATE.lock().phase = Phase::Evaluating;
    let mut added: Vec<&CStr> = Vec::new();
    let exit = loop {
        with_loads(|loads| loads.in_round = true);
        // SAFETY: the arguments of the program.
        let mut arguments = unsafe { Arguments::copy(argc, argv, &added) };
        // SAFETY: arguments as `main` has them.
        let exit = unsafe { real(arguments.count(), arguments.pointers.as_mut_ptr()) };
        with_loads(|loads| {
            loads.in_round = false;
            loads.paths.clear();
            added = match loads.fits {
                true => vec![c"--no-warmup", c"--fit", c"off"],
                false => vec![c"--no-warmup"],
            };
        });
        flush();
        if !another_round(exit) {
            break exit;
        }
    };
    if let Some((kept, _)) = with_loads(|loads| loads.kept.take()) {
        // SAFETY: the program's own call, which was put off.
        unsafe { free(kept as *mut c_void) };
    }
    exit
}

/// A copy of a program's arguments: parsers may change them.
struct Arguments {
    pointers: Vec<*mut c_char>,
    _texts: Vec<Vec<u8>>,
}

impl Arguments {
    /// Copies the arguments of a program, and adds others.
    ///
    /// # Safety
    ///
    /// The arguments of `main`.
    unsafe fn copy(argc: c_int, argv: *mut *mut c_char, added: &[&CStr]) -> Arguments {
        let given = (0..usize::try_from(argc).unwrap_or(0)).map(|at| {
            // SAFETY: as the caller ensures.
            unsafe { CStr::from_ptr(*argv.add(at)) }
        });
        let all = given.chain(added.iter().copied());
        let mut texts: Vec<_> = all.map(|text| text.to_bytes_with_nul().to_vec()).collect();
        let pointers = texts.iter_mut().map(|text| text.as_mut_ptr().cast());
        Arguments {
            pointers: pointers.chain([std::ptr::null_mut()]).collect(),
            _texts: texts,
        }
    }

    fn count(&self) -> c_int {
        (self.pointers.len() - 1) as c_int
    }
}

/// Writes what the program printed: llama.cpp's log has a thread of its own, and streams of the C
/// library have buffers.
fn flush() {
    type Main = unsafe extern "C-unwind" fn() -> *mut c_void;
    type OfLog = unsafe extern "C-unwind" fn(*mut c_void);
    let names = [
        c"_Z15common_log_mainv",
        c"_Z16common_log_pauseP10common_log",
        c"_Z17common_log_resumeP10common_log",
    ];
    // SAFETY: looks up names. Pausing the log writes all of it; the functions have these types by
    // their names; no round is evaluated. `fflush` of no stream flushes all of them.
    unsafe {
        let functions = names.map(|name| libc::dlsym(libc::RTLD_DEFAULT, name.as_ptr()));
        if functions.iter().all(|function| !function.is_null()) {
            let main: Main = std::mem::transmute(functions[0]);
            let [pause, resume]: [OfLog; 2] = std::mem::transmute([functions[1], functions[2]]);
            let log = main();
            pause(log);
            resume(log);
        }
        libc::fflush(std::ptr::null_mut());
    }
}

/// Where a call that loads a model goes: to the kept model, if any, else to the real function.
#[repr(C)]
struct Destination {
    kept: usize,
    real: usize,
}

extern "C" fn destination(path: *const c_char) -> Destination {
    let mut kept = 0;
    if !path.is_null() {
        // SAFETY: the argument of the call.
        let path = unsafe { CStr::from_ptr(path) };
        let path = Path::new(OsStr::from_bytes(path.to_bytes()));
        kept = with_loads(|loads| loads.load(path));
    }
    Destination {
        kept,
        real: LOAD.before(),
    }
}

/// Returns the kept model, or jumps to the real function with the stack as it is: the parameters
/// are a struct on the stack, whose size depends on the version of llama.cpp.
#[unsafe(naked)]
unsafe extern "C" fn model_load() {
    crate::arch::kept_or_real!(destination)
}

/// Frees a model unless it is kept.
unsafe extern "C-unwind" fn model_free(model: *mut c_void) {
    if !with_loads(|loads| loads.keeps(model as usize)) {
        // SAFETY: the argument of the call.
        unsafe { free(model) };
    }
}

/// # Safety
///
/// A live model, or null.
unsafe fn free(model: *mut c_void) {
    // SAFETY: noted before the call could be redirected; of this type by the name.
    let real: Free = unsafe { std::mem::transmute(FREE.before()) };
    // SAFETY: as the caller ensures.
    unsafe { real(model) };
}
