//! Variables that have an effect in an unmodified program only beside another one.

use super::settings::{Config, PostFetchMode};
use super::variables::Variable;

/// Variables with the same condition.
struct Need {
    variables: &'static [&'static str],
    /// Whether they have an effect.
    is_met: fn(&Config) -> bool,
    /// What to do otherwise.
    next: &'static str,
}

/// The flags that turn something on.
pub const CAPABILITIES: &str = "--hotswap, --stream-experts, --post-fetch, --expert-cache, --page-lock, --rounds, --expert-masks or an --expert-trace-* option";

/// A variable is in one row at most.
static NEEDS: [Need; 16] = [
    Need {
        variables: &["LLAMA_SIDECAR_CONTROL", "LLAMA_SIDECAR_STRICT"],
        is_met: Config::is_used,
        next: "turn something on: LLAMA_SIDECAR_HOTSWAP=1 (--hotswap), LLAMA_EXPERT_STREAM=auto (--stream-experts), LLAMA_POSTFETCH_MODE=on (--post-fetch) or LLAMA_EXPERT_TRACE_STATS=1 (--expert-trace-stats)",
    },
    Need {
        variables: &[
            "LLAMA_HOTSWAP_POLL_MS",
            "LLAMA_HOTSWAP_QUIET_MS",
            "LLAMA_HOTSWAP_CHECK",
            "LLAMA_SIDECAR_STAGING_MB",
            "LLAMA_SIDECAR_MEMORY_MB",
        ],
        is_met: |config| config.hotswap,
        next: "also set LLAMA_SIDECAR_HOTSWAP=1 (--hotswap)",
    },
    Need {
        variables: &["LLAMA_SIDECAR_ROUNDS"],
        is_met: |config| config.control.is_some() || config.control_file.is_some(),
        next: "also set LLAMA_SIDECAR_CONTROL (--socket) or LLAMA_HOTSWAP_CONTROL_FILE, through which rounds are requested",
    },
    Need {
        variables: &["LLAMA_EXPERT_MASKS"],
        is_met: |config| config.control.is_some() || config.profile.is_some(),
        next: "also set LLAMA_SIDECAR_CONTROL (--socket), through which masks are requested",
    },
    Need {
        variables: &["LLAMA_SIDECAR_PROFILE"],
        is_met: |config| config.hotswap || config.expert_masks,
        next: "also set LLAMA_SIDECAR_HOTSWAP=1 (--hotswap) for overlays, or LLAMA_EXPERT_MASKS=1 (--expert-masks) for masks; 'run --profile' does that",
    },
    Need {
        variables: &["LLAMA_HOTSWAP_STATUS_FILE"],
        is_met: |config| config.control_file.is_some(),
        next: "also set LLAMA_HOTSWAP_CONTROL_FILE",
    },
    Need {
        variables: &["LLAMA_EXPERT_TRACE_EVERY_S"],
        is_met: |config| config.trace_output.is_some(),
        next: "also set LLAMA_EXPERT_TRACE_OUTPUT (--expert-trace-output)",
    },
    Need {
        variables: &["LLAMA_EXPERT_TRACE_WEIGHTS"],
        is_met: |config| config.trace_routes.is_some(),
        next: "also set LLAMA_EXPERT_TRACE_ROUTES (--expert-trace-routes)",
    },
    Need {
        variables: &["LLAMA_EXPERT_TRACE_PER_LAYER", "LLAMA_EXPERT_TRACE_TOP"],
        is_met: |config| config.trace_summary,
        next: "also set LLAMA_EXPERT_TRACE_STATS=1 (--expert-trace-stats)",
    },
    Need {
        variables: &["LLAMA_EXPERT_STREAM_MEMORY_MB", "LLAMA_EXPERT_STREAM_TRACE"],
        is_met: |config| config.expert_stream.streams(),
        next: "set LLAMA_EXPERT_STREAM=auto (--stream-experts)",
    },
    Need {
        variables: &["LLAMA_EXPERT_STREAM_PREFER"],
        is_met: |config| config.accepts_changed_results && config.expert_stream.streams(),
        next: "it changes results: also pass --accept-changed-results (LLAMA_EXPERT_STREAM_ACCEPT_CHANGES=1), after 'llama-sidecar ctl margins' has measured by how much",
    },
    Need {
        variables: &["LLAMA_EXPERT_STREAM_ACCEPT_CHANGES"],
        is_met: |config| config.expert_stream_prefer.is_some(),
        next: "also set LLAMA_EXPERT_STREAM_PREFER (--stream-prefer)",
    },
    Need {
        variables: &[
            "LLAMA_POSTFETCH_MODE",
            "LLAMA_POSTFETCH_CACHE_MB",
            "LLAMA_POSTFETCH_CACHE_TRACE",
        ],
        is_met: |config| config.program_postfetch.mode != PostFetchMode::Off,
        next: "unset LLAMA_POSTFETCH_ENABLE, LLAMA_POSTFETCH_FORCE_CPU and LLAMA_POSTFETCH_USE_DEDICATED_STREAMS, or the value that turns experts on the device off",
    },
    Need {
        variables: &[
            "LLAMA_POSTFETCH_BLOCK_ON_MISS",
            "LLAMA_POSTFETCH_MAX_TRANSFERS",
            "LLAMA_POSTFETCH_SCRATCHPAD_MB",
            "LLAMA_POSTFETCH_SPIN_US",
            "LLAMA_POSTFETCH_TIMEOUT_MS",
            "LLAMA_POSTFETCH_DEBUG",
            "LLAMA_POSTFETCH_LOOK_AHEAD",
        ],
        is_met: |config| config.program_postfetch.mode != PostFetchMode::Off,
        next: "also set LLAMA_POSTFETCH_MODE=on (--post-fetch)",
    },
    Need {
        variables: &[
            "LLAMA_POSTFETCH_CACHE_HALF_LIFE",
            "LLAMA_POSTFETCH_CACHE_MISSES",
            "LLAMA_POSTFETCH_CACHE_UPLOADS",
        ],
        is_met: |config| config.program_postfetch.cache.is_some(),
        next: "also set LLAMA_POSTFETCH_CACHE_MB=auto (--expert-cache)",
    },
    Need {
        variables: &[
            "LLAMA_SIDECAR_SPLIT",
            "LLAMA_SIDECAR_CPU_MOE",
            "LLAMA_SIDECAR_OVERRIDE_TENSOR",
            "LLAMA_POSTFETCH_CPU_LIMIT",
            "LLAMA_POSTFETCH_PAGE_LOCK",
        ],
        is_met: |_| false,
        next: "only programs that link llama-sidecar read it: use an option of the program",
    },
];

/// Returns a sentence for each of these variables that has no effect in an unmodified program.
pub(super) fn unmet(config: &Config, set: &[&Variable]) -> Vec<String> {
    let sentence = |variable: &&Variable| {
        let need = NEEDS
            .iter()
            .find(|need| need.variables.contains(&variable.name))?;
        let next = (!(need.is_met)(config)).then_some(need.next)?;
        Some(format!("{} has no effect: {next}", variable.title()))
    };
    set.iter().filter_map(sentence).collect()
}
