//! The table of the `LLAMA_*` variables.
//!
//! Parsing, the flags of `llama-sidecar run`, the tables in `docs/variables.md` and the tests of
//! rejected values follow from it.

use std::ffi::OsStr;

use log::LevelFilter;
use regex_lite::Regex;

/// A variable of the environment.
#[derive(Debug)]
pub struct Variable {
    /// Name in the environment.
    pub name: &'static str,
    /// Value in force when the variable is unset, empty or rejected.
    pub default: DefaultValue,
    /// Grammar of the values.
    pub kind: Kind,
    /// Effect, in Markdown.
    pub help: &'static str,
    /// Flag of `llama-sidecar run` that sets the variable, without the dashes.
    pub flag: Option<&'static str>,
}

/// Default of a variable.
#[derive(Debug, Clone, Copy)]
pub enum DefaultValue {
    /// A value in the grammar of the variable.
    Value(&'static str),
    /// A description, in Markdown, of a default that no value expresses.
    Described(&'static str),
}

/// Grammar of the values of a variable.
#[derive(Debug, Clone, Copy)]
pub enum Kind {
    /// `0`, `off`, `no` and `false` are off, every other value is on.
    Switch,
    /// A whole number.
    Number {
        /// Unit, in the plural.
        unit: &'static str,
        /// Smallest value.
        least: u64,
        /// Largest value.
        most: u64,
    },
    /// A path.
    Path,
    /// A log level.
    Level,
    /// One of a few words.
    Choice {
        /// The words.
        values: &'static [&'static str],
        /// Word that the flag of `run` sets when it has no value.
        bare_flag: &'static str,
    },
    /// A whole number of MiB, or `auto`, which is also what the flag of `run` sets without a value.
    Memory,
    /// Text that this function accepts, or rejects with the reason.
    Text(fn(&str) -> Result<(), String>),
}

use DefaultValue::{Described, Value};
use Kind::{Level, Path, Switch, Text};

const fn number(unit: &'static str, least: u64, most: u64) -> Kind {
    Kind::Number { unit, least, most }
}

/// A number of MiB whose bytes fit into 64 bits.
const MIB: Kind = number("MiB", 0, u64::MAX >> 20);

/// All variables, in the order of the documentation.
pub static VARIABLES: &[Variable] = &[
    Variable {
        name: "LLAMA_HOTSWAP_ENABLED",
        default: Value("0"),
        kind: Switch,
        help: "register files at load and allow reloads",
        flag: None,
    },
    Variable {
        name: "LLAMA_SIDECAR_HOTSWAP",
        default: Described("`LLAMA_HOTSWAP_ENABLED`"),
        kind: Switch,
        help: "replace tensors of the running program: register files at load and allow reloads. Programs with a [hot-swap of their own](docs/programs.md#ik_llamacpp) do not read this variable, but `LLAMA_HOTSWAP_ENABLED`",
        flag: Some("hotswap"),
    },
    Variable {
        name: "LLAMA_HOTSWAP_POLL_MS",
        default: Value("1000"),
        kind: number("milliseconds", 0, u64::MAX),
        help: "drop-in: interval between checks of the files, in ms; `0`: only on request",
        flag: Some("poll-ms"),
    },
    Variable {
        name: "LLAMA_HOTSWAP_QUIET_MS",
        default: Value("2000"),
        kind: number("milliseconds", 0, u32::MAX as u64),
        help: "time for which a changed file must stay the same before polling uses it, in ms",
        flag: Some("quiet-ms"),
    },
    Variable {
        name: "LLAMA_HOTSWAP_CHECK",
        default: Value("1"),
        kind: Switch,
        help: "refuse damaged files (rows of zeros, non-finite scales); `0`: use them",
        flag: None,
    },
    Variable {
        name: "LLAMA_SIDECAR_CONTROL",
        default: Described("none"),
        kind: Path,
        help: "drop-in: path of the control socket",
        flag: Some("socket"),
    },
    Variable {
        name: "LLAMA_SIDECAR_STRICT",
        default: Value("0"),
        kind: Switch,
        help: "drop-in: do nothing in programs with a ggml of another version than those in which it was [tried](docs/hosts.md#versions)",
        flag: Some("strict"),
    },
    Variable {
        name: "LLAMA_SIDECAR_ROUNDS",
        default: Value("0"),
        kind: Switch,
        help: "drop-in: let llama-perplexity [evaluate again and again](docs/rounds.md), on request, with its model loaded once; files are then checked only on request",
        flag: Some("rounds"),
    },
    Variable {
        name: "LLAMA_HOTSWAP_CONTROL_FILE",
        default: Described("none"),
        kind: Path,
        help: "drop-in: file with the commands of [GGUF-Tool-Suite](docs/rounds.md#gguf-tool-suite) to llama-perplexity; sets `LLAMA_SIDECAR_ROUNDS`",
        flag: None,
    },
    Variable {
        name: "LLAMA_HOTSWAP_STATUS_FILE",
        default: Described("none"),
        kind: Path,
        help: "drop-in: file with the state of llama-perplexity, for GGUF-Tool-Suite",
        flag: None,
    },
    Variable {
        name: "LLAMA_EXPERT_TRACE_STATS",
        default: Value("0"),
        kind: Switch,
        help: "count expert use and print a summary at exit; link mode: when a trace is freed",
        flag: Some("expert-trace-stats"),
    },
    Variable {
        name: "LLAMA_EXPERT_TRACE_NAMES",
        default: Value("0"),
        kind: Switch,
        help: "print the tensor names of each expert used; also counts",
        flag: Some("expert-trace-names"),
    },
    Variable {
        name: "LLAMA_EXPERT_TRACE_PER_LAYER",
        default: Value("0"),
        kind: Switch,
        help: "add the experts of each layer to the summary; sets `LLAMA_EXPERT_TRACE_STATS` where that is not set",
        flag: Some("expert-trace-per-layer"),
    },
    Variable {
        name: "LLAMA_EXPERT_TRACE_TOP",
        default: Value("0"),
        kind: number("experts", 0, 1 << 20),
        help: "length of each list of the summary: so many experts, the most used first; `0`: all that were used",
        flag: Some("expert-trace-top"),
    },
    Variable {
        name: "LLAMA_EXPERT_TRACE_OUTPUT",
        default: Described("none"),
        kind: Path,
        help: "count expert use and write JSON, or CSV by extension, to this path at exit; link mode: when a trace is freed",
        flag: Some("expert-trace-output"),
    },
    Variable {
        name: "LLAMA_EXPERT_TRACE_EVERY_S",
        default: Value("0"),
        kind: number("seconds", 0, u32::MAX as u64),
        help: "drop-in: also write the output at this interval, in seconds; `0`: only at exit",
        flag: Some("expert-trace-every-s"),
    },
    Variable {
        name: "LLAMA_EXPERT_TRACE_ROUTES",
        default: Described("none"),
        kind: Path,
        help: "drop-in: write the experts of every token to this path, by extension as `.npy`, `.csv` or compact binary; also counts",
        flag: Some("expert-trace-routes"),
    },
    Variable {
        name: "LLAMA_EXPERT_TRACE_WEIGHTS",
        default: Value("0"),
        kind: Switch,
        help: "drop-in: write gate weights beside the routes",
        flag: Some("expert-trace-weights"),
    },
    Variable {
        name: "LLAMA_EXPERT_TRACE_SALIENCY",
        default: Described("none"),
        kind: Path,
        help: "drop-in: write to this path at exit, as JSON, how much each expert contributes to its layer; also counts. Needs memory and time",
        flag: Some("expert-trace-saliency"),
    },
    Variable {
        name: "LLAMA_EXPERT_MASKS",
        default: Value("0"),
        kind: Switch,
        help: "drop-in: build graphs in which experts can be masked through the control socket, so that they are never chosen",
        flag: Some("expert-masks"),
    },
    Variable {
        name: "LLAMA_EXPERT_STREAM",
        default: Value("off"),
        kind: Kind::Choice {
            values: &["off", "needed", "auto", "on"],
            bare_flag: "auto",
        },
        help: "drop-in: read routed experts from disk as soon as routing is known: `off`, `needed` (of models that do not fit into the free memory when they are loaded; others are loaded as without streaming), `auto` (while experts are not in memory), `on`; link mode: `on` is the default of `always`",
        flag: Some("stream-experts"),
    },
    Variable {
        name: "LLAMA_EXPERT_STREAM_TRACE",
        default: Described("none"),
        kind: Path,
        help: "drop-in: an expert trace of an earlier run (JSON): its most used experts are read from the start, while nothing else is, in half of the free memory. `LLAMA_EXPERT_STREAM` is then `auto` unless it is set",
        flag: Some("stream-trace"),
    },
    Variable {
        name: "LLAMA_EXPERT_STREAM_PREFER",
        default: Described("none"),
        kind: Text(|text| margin(text).map(drop)),
        help: "drop-in: prefer experts in memory: an expert that is to be read is replaced by one in memory if their scores differ by less than this, 0 to 1. [Changes results](docs/streaming.md#experts-in-memory-are-preferred). `LLAMA_EXPERT_STREAM` is then `auto` unless it is set",
        flag: Some("stream-prefer"),
    },
    Variable {
        name: "LLAMA_EXPERT_STREAM_ACCEPT_CHANGES",
        default: Value("0"),
        kind: Switch,
        help: "drop-in: accept that `LLAMA_EXPERT_STREAM_PREFER` changes results",
        flag: Some("accept-changed-results"),
    },
    Variable {
        name: "LLAMA_EXPERT_STREAM_MEMORY_MB",
        default: Described("automatic"),
        kind: MIB,
        help: "drop-in: the most memory of the process for experts of a model that does not fit into it; automatic is what is free, less one sixteenth. `0`: experts are read into the page cache. `LLAMA_EXPERT_STREAM` is then `auto` unless it is set",
        flag: Some("stream-memory"),
    },
    Variable {
        name: "LLAMA_POSTFETCH_ENABLE",
        // A value that is set has another effect in an unmodified program than an unset one.
        default: Described("`1`"),
        kind: Switch,
        help: "`0`: use no device; drop-in: `1` sets `LLAMA_POSTFETCH_MODE=on` where that is not set",
        flag: None,
    },
    Variable {
        name: "LLAMA_POSTFETCH_FORCE_CPU",
        default: Value("0"),
        kind: Switch,
        help: "`1`: use no device, with the reason `forced`, for comparisons",
        flag: None,
    },
    Variable {
        name: "LLAMA_POSTFETCH_BLOCK_ON_MISS",
        default: Value("1"),
        kind: Switch,
        help: "`0`: compute an expert on the CPU while its copy is in flight; drop-in: let the program copy what has not begun",
        flag: None,
    },
    Variable {
        name: "LLAMA_POSTFETCH_MAX_TRANSFERS",
        default: Value("8"),
        kind: number("copies", 1, 1024),
        help: "maximum number of copies in flight, from 1 to 1024; drop-in: of matrices",
        flag: None,
    },
    Variable {
        name: "LLAMA_POSTFETCH_SCRATCHPAD_MB",
        default: Value("0"),
        kind: MIB,
        help: "device memory for experts, in MiB; `0`: the need of one token; drop-in: that of two layers, and at most half of the free memory; `0` never takes more than 10 % of the device",
        flag: None,
    },
    Variable {
        name: "LLAMA_POSTFETCH_USE_DEDICATED_STREAMS",
        default: Value("1"),
        kind: Switch,
        help: "`0`: `compute_stream` is the stream of the copies; drop-in: copy nothing early",
        flag: None,
    },
    Variable {
        name: "LLAMA_POSTFETCH_CPU_LIMIT",
        default: Described("physical cores"),
        kind: number("experts", 1, 1 << 16),
        help: "link mode: number of experts of a layer with `gate_up_on_cpu` set in the answer",
        flag: None,
    },
    Variable {
        name: "LLAMA_POSTFETCH_PAGE_LOCK",
        default: Value("1"),
        kind: Switch,
        help: "link mode: `0`: always copy through page-locked buffers",
        flag: None,
    },
    Variable {
        name: "LLAMA_POSTFETCH_SPIN_US",
        default: Described("`2000` with SMT, else `0`"),
        kind: number("microseconds", 0, u32::MAX as u64),
        help: "microseconds for which the fetch thread busy-waits before it sleeps",
        flag: None,
    },
    Variable {
        name: "LLAMA_POSTFETCH_TIMEOUT_MS",
        default: Value("5000"),
        kind: number("milliseconds", 1, u32::MAX as u64),
        help: "longest time for a copy, in milliseconds; later, the CPU computes all experts; drop-in: the program copies all experts",
        flag: None,
    },
    Variable {
        name: "LLAMA_POSTFETCH_DEBUG",
        default: Value("0"),
        kind: Switch,
        help: "`1`: log each layer and expert, and the overlap of each layer; drop-in: also read each early copy back and compare it with the model",
        flag: None,
    },
    Variable {
        name: "LLAMA_POSTFETCH_MODE",
        default: Value("off"),
        kind: Kind::Choice {
            values: &["off", "on", "down", "all"],
            bare_flag: "on",
        },
        help: "drop-in: copy routed experts early in an unmodified program: `off`, `on` (where the program itself copies them to a GPU), `down` and `all` (down-projections, or all matrices, of every batch)",
        flag: Some("post-fetch"),
    },
    Variable {
        name: "LLAMA_POSTFETCH_CACHE_MB",
        default: Value("0"),
        kind: Kind::Memory,
        help: "device memory in which recently used experts stay, in MiB; `0`: none; drop-in: also `auto`, what the program leaves free",
        flag: Some("expert-cache"),
    },
    Variable {
        name: "LLAMA_POSTFETCH_CACHE_HALF_LIFE",
        default: Value("1"),
        kind: number("uses", 1, 1 << 20),
        help: "a use of an expert counts for half as much after so many uses of others; `1`: the expert that was used the longest time ago is replaced",
        flag: None,
    },
    Variable {
        name: "LLAMA_POSTFETCH_CACHE_TRACE",
        default: Described("none"),
        kind: Path,
        help: "drop-in: an expert trace of an earlier run (JSON): its most used experts are on the device from the start, and layers get memory by what it gains there. Sets `LLAMA_POSTFETCH_CACHE_MB=auto` where that is not set",
        flag: Some("expert-cache-trace"),
    },
    Variable {
        name: "LLAMA_POSTFETCH_CACHE_MISSES",
        default: Value("auto"),
        kind: Kind::Choice {
            values: &["auto", "cpu", "fetch"],
            bare_flag: "auto",
        },
        help: "drop-in: where routed experts that are not on the device are computed: `cpu`, on the CPU while the device computes the others; `fetch`, on the device after a copy; `auto`, the fastest in trials of whole evaluations, in which no slots are tried, too",
        flag: Some("expert-cache-misses"),
    },
    Variable {
        name: "LLAMA_POSTFETCH_CACHE_UPLOADS",
        default: Value("0"),
        kind: number("experts", 0, 1 << 10),
        help: "drop-in: how many experts of a layer, at most, are copied for later tokens while the CPU computes them; `0`: as many as an idle link copies meanwhile",
        flag: None,
    },
    Variable {
        name: "LLAMA_POSTFETCH_LOOK_AHEAD",
        default: Value("1"),
        kind: Switch,
        help: "drop-in: `0`: copy no expert before its layer is routed",
        flag: None,
    },
    Variable {
        name: "LLAMA_SIDECAR_PAGE_LOCK",
        default: Value("0"),
        kind: Switch,
        help: "drop-in: page-lock the mapping of a model for the GPU backend; works without the other variables",
        flag: Some("page-lock"),
    },
    Variable {
        name: "LLAMA_SIDECAR_JOURNAL",
        default: Described("none"),
        kind: Path,
        help: "drop-in: file for events; `run` and `doctor` set it",
        flag: None,
    },
    Variable {
        name: "LLAMA_SIDECAR_STREAM_SOCKET",
        default: Described("none"),
        kind: Path,
        help: "drop-in: control socket that appears once experts are streamed, if `LLAMA_SIDECAR_CONTROL` is not set; `run` sets it",
        flag: None,
    },
    Variable {
        name: "LLAMA_SIDECAR_PROFILE",
        default: Described("none"),
        kind: Path,
        help: "drop-in: a [profile](docs/hot-swap.md#profiles): overlays and masks that each model has from its first evaluation on; `run --profile` sets it",
        flag: None,
    },
    Variable {
        name: "LLAMA_SIDECAR_SPLIT",
        default: Described("none"),
        kind: Text(|text| split(text).map(drop)),
        help: "split matrices over devices 1, 2, … in these proportions: `3,1,1`",
        flag: None,
    },
    Variable {
        name: "LLAMA_SIDECAR_CPU_MOE",
        default: Value("0"),
        kind: Switch,
        help: "keep routed experts in host memory",
        flag: None,
    },
    Variable {
        name: "LLAMA_SIDECAR_OVERRIDE_TENSOR",
        default: Described("none"),
        kind: Text(|text| overrides(text).map(drop)),
        help: "place tensors with matching names on a device, whole: `ffn_.*_exps=0;attn=2`",
        flag: None,
    },
    Variable {
        name: "LLAMA_SIDECAR_STAGING_MB",
        default: Value("0"),
        kind: MIB,
        help: "limit for the bytes that a reload stages before it switches, in MiB; `0`: no limit",
        flag: None,
    },
    Variable {
        name: "LLAMA_SIDECAR_MEMORY_MB",
        default: Described("free memory"),
        kind: MIB,
        help: "limit for the memory of swapped tensors, including what a reload stages, in MiB",
        flag: Some("memory-mb"),
    },
    Variable {
        name: "LLAMA_SIDECAR_LOGITS_HASHES",
        default: Described("none"),
        kind: Path,
        help: "drop-in: write a hash of the logits of each evaluation to this path; programs that write the same lines computed the same logits",
        flag: Some("logits-hashes"),
    },
    Variable {
        name: "LLAMA_SIDECAR_LOG",
        default: Value("warn"),
        kind: Level,
        help: "log level: `off`, `error`, `warn`, `info`, `debug`",
        flag: Some("log"),
    },
];

impl Variable {
    /// Returns the variable with this name.
    ///
    /// # Panics
    ///
    /// Panics when the table has no such variable.
    pub fn named(name: &str) -> &'static Variable {
        let found = VARIABLES.iter().find(|variable| variable.name == name);
        found.unwrap_or_else(|| panic!("{name} is missing in VARIABLES"))
    }

    /// Returns how messages name the variable: with its flag, if it has one.
    pub fn title(&self) -> String {
        match self.flag {
            Some(flag) => format!("--{flag} ({})", self.name),
            None => self.name.into(),
        }
    }

    /// Returns how messages name a variable of the table.
    ///
    /// # Panics
    ///
    /// Panics when the table has no such variable.
    pub fn title_of(name: &str) -> String {
        Variable::named(name).title()
    }

    /// Returns whether a value means what an unset variable means.
    pub(super) fn is_default(&self, value: &OsStr) -> bool {
        match (self.default, self.kind) {
            (Value(default), Switch) => is_on(value) == is_on(default.as_ref()),
            (Value(default), _) => value == default,
            (Described(_), _) => false,
        }
    }

    /// Checks a value against the grammar; the error states what is expected.
    pub fn check(&self, value: &OsStr) -> Result<(), String> {
        match self.kind {
            Switch | Path => Ok(()),
            Kind::Number { .. } => self.number(value).map(drop),
            Kind::Memory => memory(value).map(drop),
            Level => utf8(value).and_then(level).map(drop),
            Kind::Choice { values, .. } => match values.iter().any(|&word| value == word) {
                true => Ok(()),
                false => Err(format!("expected one of {}", values.join(", "))),
            },
            Text(accept) => utf8(value).and_then(accept),
        }
    }

    /// Parses a number in the range of the variable.
    pub(super) fn number(&self, value: &OsStr) -> Result<u64, String> {
        let Kind::Number { unit, least, most } = self.kind else {
            return Err(format!("{} is not a number", self.name));
        };
        let number = utf8(value)?.parse().ok();
        let number = number.filter(|number| (least..=most).contains(number));
        number.ok_or_else(|| format!("expected a number of {unit} from {least} to {most}"))
    }
}

/// Parses the margin within which experts in memory are preferred.
pub fn margin(text: &str) -> Result<f32, String> {
    let margin = text.trim().parse().ok();
    let margin = margin.filter(|margin| (0.0..=1.0).contains(margin));
    margin.ok_or_else(|| "expected a number from 0 to 1, such as 0.05".into())
}

/// Parses an amount of memory in bytes; `None` for `auto`.
pub(super) fn memory(value: &OsStr) -> Result<Option<u64>, String> {
    let text = utf8(value)?;
    let mib = || text.parse().ok().filter(|&mib: &u64| mib <= u64::MAX >> 20);
    match text {
        "auto" => Ok(None),
        _ => match mib() {
            Some(mib) => Ok(Some(mib << 20)),
            None => Err(format!(
                "expected auto, or a number of MiB from 0 to {}",
                u64::MAX >> 20
            )),
        },
    }
}

/// Returns whether a value turns a switch on.
pub(super) fn is_on(value: &OsStr) -> bool {
    let off = ["0", "off", "no", "false"];
    !off.iter().any(|word| value.eq_ignore_ascii_case(word))
}

/// Returns a value as text.
pub(super) fn utf8(value: &OsStr) -> Result<&str, String> {
    value.to_str().ok_or_else(|| "expected UTF-8".into())
}

/// Writes variables as a table in Markdown.
pub fn table<'a>(variables: impl IntoIterator<Item = &'a Variable>) -> String {
    let head = "| variable | flag of `run` | default | meaning |\n|---|---|---|---|\n";
    let mut text = String::from(head);
    for variable in variables {
        let Variable { name, help, .. } = variable;
        let flag = variable.flag.map(|flag| format!("`--{flag}`"));
        let default = match variable.default {
            Value(value) => format!("`{value}`"),
            Described(words) => words.into(),
        };
        let flag = flag.unwrap_or_default();
        text += &format!("| `{name}` | {flag} | {default} | {help} |\n");
    }
    text
}

/// Returns the level with this name; no message has the level `trace`.
pub(super) fn level(name: &str) -> Result<LevelFilter, String> {
    match name.parse() {
        Ok(level) if level != LevelFilter::Trace => Ok(level),
        _ => Err("expected off, error, warn, info or debug".into()),
    }
}

/// Reads proportions such as `3,1,1`.
pub fn split(text: &str) -> Result<Vec<f64>, String> {
    let proportion = |part: &str| {
        let number: f64 = part.trim().parse().ok()?;
        (number.is_finite() && number >= 0.0).then_some(number)
    };
    let all: Option<Vec<f64>> = text.split(',').map(proportion).collect();
    all.filter(|all| all.iter().sum::<f64>() > 0.0).ok_or_else(|| {
        format!(
            "split '{text}': expected numbers separated by commas, at least one of them above 0, for example 3,1,1"
        )
    })
}

/// Reads rules such as `ffn_.*_exps=0;attn=2`: a regular expression for tensor names
/// and the index of a device.
pub fn overrides(text: &str) -> Result<Vec<(Regex, usize)>, String> {
    let rules = text.split(';').filter(|rule| !rule.trim().is_empty());
    rules
        .map(|rule| {
            let (pattern, device) = rule
                .rsplit_once('=')
                .ok_or_else(|| format!("override '{rule}': expected PATTERN=DEVICE"))?;
            let device = device.trim().parse().map_err(|_| {
                format!("override '{rule}': expected the number of a device after '='")
            })?;
            let pattern = Regex::new(pattern.trim())
                .map_err(|error| format!("override '{rule}': {error}"))?;
            Ok((pattern, device))
        })
        .collect()
}
