//! Figures and findings as sentences, for the command and the log.

use crate::protocol::{NoEffect, PostFetchFigures, StreamFigures, Uncounted};

/// Returns figures of expert streaming: lines without a full stop, each with a name before it.
pub fn streaming(figures: &StreamFigures) -> Vec<String> {
    let mb = |bytes: u64| bytes as f64 / 1e6;
    let percent = |part: u64, whole: u64| 100.0 * part as f64 / whole.max(1) as f64;
    let speed = format!(
        "experts: {} tokens of prompts and answers at {:.2} tokens/s",
        figures.tokens,
        figures.tokens as f64 / figures.seconds.max(1e-3)
    );
    let read = figures.read_bytes + figures.ahead_bytes;
    if figures.checked_bytes == 0 {
        return vec![format!(
            "{speed}, {} layers scheduled, {} page faults waited for the disk; the kernel does not report which pages of the file are in memory",
            figures.layers, figures.major_faults
        )];
    }
    let mut experts = format!(
        "{speed}, {:.0} MB read ahead ({:.0} MB/s), {:.0} % of the routed experts' bytes were in memory",
        mb(read),
        mb(read) / figures.seconds.max(1e-3),
        percent(figures.resident_bytes, figures.checked_bytes),
    );
    if figures.replaced > 0 {
        experts += &format!(
            "; {:.1} % of the chosen experts were replaced by others in memory, which changes results (margin {})",
            percent(figures.replaced, figures.chosen),
            figures.margin
        );
    } else if figures.chosen > 0 {
        experts += &format!(
            "; no chosen expert was replaced by one in memory (margin {})",
            figures.margin
        );
    }
    if figures.resting {
        experts += "; all experts are in memory now, so that streaming rests";
    }
    if figures.stopped {
        experts += "; streaming has stopped because reading ahead had no effect";
    }
    let mut lines = vec![experts];
    lines.extend(limit(figures).map(|limit| format!("limit: {limit}")));
    lines.extend(memory(figures).map(|memory| format!("memory: {memory}")));
    lines
}

/// Returns what limits streaming the most; `None` if nothing was read.
fn limit(figures: &StreamFigures) -> Option<String> {
    let faults = figures.major_faults;
    // How long they take is not measured.
    if faults > figures.tokens {
        return Some(format!(
            "page faults limit the most ({:.0} for each token): too little memory is left for the other tensors",
            faults as f64 / figures.tokens.max(1) as f64
        ));
    }
    if figures.reading_seconds == 0.0 {
        return None;
    }
    let waited = (100.0 * figures.waited_seconds / figures.seconds.max(1e-3)).min(100.0);
    let what = if waited > 50.0 {
        "the disk"
    } else {
        "computation"
    };
    Some(format!(
        "{what} limits the most: evaluations waited for experts in {waited:.0} % of the time, and {faults} page faults for the disk, which delivered {:.0} MB/s while it was read",
        (figures.read_bytes + figures.ahead_bytes) as f64 / 1e6 / figures.reading_seconds
    ))
}

/// Returns how many experts fit into memory beside the context, and how many beside a smaller one; `None` if all fit, or that is
/// not known.
pub fn memory(figures: &StreamFigures) -> Option<String> {
    let StreamFigures {
        expert_bytes: all,
        fitting_bytes: fitting,
        missing_bytes: missing,
        context_tokens: tokens,
        context_bytes: context,
        freed_bytes: freed,
        ..
    } = *figures;
    if fitting >= all {
        return None;
    }
    let mb = |bytes: u64| bytes as f64 / 1e6;
    let percent = |bytes: u64| 100.0 * bytes.min(all) as f64 / all as f64;
    let mut text = format!(
        "{:.0} of {:.0} MB of experts fit into memory ({:.0} %)",
        mb(fitting),
        mb(all),
        percent(fitting)
    );
    if context > 0 {
        text += &format!(
            " beside a context of {tokens} tokens ({:.0} MB)",
            mb(context)
        );
        if tokens >= 1024 && freed > all / 50 {
            text += &format!(
                ": -c {} frees {:.0} MB, and {:.0} % fit",
                tokens / 4,
                mb(freed),
                percent((fitting + freed).saturating_sub(missing))
            );
        }
    }
    if missing > 0 {
        text += &format!(
            "; {:.0} MB are missing for the rest of the program, parts of which are read again for each token: free more memory, or raise its limit",
            mb(missing)
        );
    }
    Some(text)
}

/// Returns figures of post-fetch as a sentence without its full stop.
pub fn post_fetch(figures: &PostFetchFigures) -> String {
    let mb = |bytes: u64| bytes as f64 / 1e6;
    let mut text = match figures.early_bytes + figures.host_bytes {
        0 if figures.locked_bytes > 0 => "no experts copied early".into(),
        0 => "no experts were copied to a GPU: the program does so for batches from 32 tokens, if a GPU has the rest of the model".into(),
        _ => format!(
            "{:.0} MB of experts copied early, {:.0} MB by the program",
            mb(figures.early_bytes),
            mb(figures.host_bytes),
        ),
    };
    if let Some(overlap) = figures.overlap() {
        text += &format!(
            ", {:.0} % of the copies' time overlapped with computing",
            100.0 * overlap
        );
    }
    if figures.cache_slots > 0 {
        let looked_up = figures.cache_hits + figures.cache_misses;
        let most = figures.cache_layers.iter().map(|layer| layer.slots).max();
        let slots = match most {
            Some(most) if most > figures.cache_slots => {
                format!("{} to {most} of each layer", figures.cache_slots)
            }
            _ => format!("{} of each layer", figures.cache_slots),
        };
        text += &format!(
            ", {:.1} % of {looked_up} routed experts were on the device ({slots}, {:.0} MB)",
            100.0 * figures.cache_hits as f64 / looked_up.max(1) as f64,
            mb(figures.cache_bytes),
        );
        if figures.cache_on_cpu > 0 {
            let share = 100.0 * figures.cache_on_cpu as f64 / looked_up.max(1) as f64;
            text += &format!(", {share:.1} % were computed by the CPU meanwhile");
        }
        if figures.cache_unused > 0 {
            text += &format!(
                ", {} evaluations left the slots unused, which was faster",
                figures.cache_unused
            );
        }
        // A miss replaces an expert once the slots are full.
        let lasting =
            figures.cache_hits as f64 / (figures.cache_hits + figures.cache_evictions) as f64;
        let waits = figures.cache_on_cpu == 0;
        let is_full = waits && 2 * figures.cache_evictions > figures.cache_misses;
        let is_slower = |share: &f64| is_full && *share > lasting;
        if let Some(share) = figures.break_even().filter(is_slower) {
            text += &format!(
                "; a CPU that reads experts at the speed of memory is faster below {:.0} %: give --expert-cache more memory, or leave it out",
                100.0 * share
            );
        }
    }
    if figures.locked_bytes > 0 {
        text += &format!(", {:.0} MB page-locked", mb(figures.locked_bytes));
    }
    if let Some(obstacle) = &figures.obstacle {
        text += &format!("; {obstacle}");
    }
    text
}

/// Returns what had no effect as a line of a report.
pub fn no_effect(found: &NoEffect) -> String {
    let level = if found.so_far { "warning" } else { "error" };
    format!("{level}: {}", found.sentence)
}

/// Returns which layers were not counted as a sentence without its full stop.
pub fn uncounted(found: &Uncounted) -> String {
    let mut ranges: Vec<(u32, u32)> = Vec::new();
    for &layer in &found.layers {
        match ranges.last_mut() {
            Some((_, last)) if *last + 1 == layer => *last = layer,
            _ => ranges.push((layer, layer)),
        }
    }
    let range = |&(first, last): &(u32, u32)| match first == last {
        true => first.to_string(),
        false => format!("{first}-{last}"),
    };
    let layers: Vec<String> = ranges.iter().map(range).collect();
    format!(
        "{}: {} evaluations, and no expert of layers {} was counted: {}",
        found.path,
        found.evaluations,
        layers.join(", "),
        found.reason
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slots_that_are_slower_than_the_cpu_are_named() {
        let figures = |hits, evictions| PostFetchFigures {
            early_bytes: 1,
            cache_slots: 13,
            cache_hits: hits,
            cache_misses: 100 + evictions,
            cache_evictions: evictions,
            link_speed: Some(24e9),
            memory_speed: Some(60e9),
            ..PostFetchFigures::default()
        };
        assert_eq!(figures(0, 0).break_even(), Some(0.6));
        let says = |hits, evictions| post_fetch(&figures(hits, evictions)).contains("below 60 %");
        assert!(says(500, 500));
        assert!(!says(900, 500));
        // The slots are not yet full.
        assert!(!says(50, 80));
        let unknown = PostFetchFigures {
            memory_speed: None,
            ..figures(500, 500)
        };
        assert!(!post_fetch(&unknown).contains("below"));
        let fast_link = PostFetchFigures {
            memory_speed: Some(20e9),
            ..figures(0, 500)
        };
        assert_eq!(fast_link.break_even(), Some(0.0));
        assert!(!post_fetch(&fast_link).contains("below"));
    }

    #[test]
    fn what_limits_streaming_is_named() {
        let figures = |waited_seconds| StreamFigures {
            tokens: 10,
            checked_bytes: 8,
            read_bytes: 6_000_000,
            seconds: 10.0,
            reading_seconds: 3.0,
            waited_seconds,
            ..StreamFigures::default()
        };
        let last = |figures: &StreamFigures| streaming(figures).pop().expect("lines");
        assert_eq!(
            last(&figures(6.0)),
            "limit: the disk limits the most: evaluations waited for experts in 60 % of the time, and 0 page faults for the disk, which delivered 2 MB/s while it was read"
        );
        assert!(last(&figures(4.0)).starts_with("limit: computation limits the most"));
        let faults = last(&StreamFigures {
            major_faults: 380,
            ..figures(0.2)
        });
        assert!(
            faults.starts_with("limit: page faults limit the most (38 for each token)"),
            "{faults}"
        );
    }

    #[test]
    fn a_smaller_context_is_named_where_experts_would_fit_beside_it() {
        let figures = |fitting, tokens| StreamFigures {
            expert_bytes: 273_000_000,
            fitting_bytes: fitting,
            context_tokens: tokens,
            context_bytes: 180_000_000,
            freed_bytes: 135_000_000,
            ..StreamFigures::default()
        };
        let short = StreamFigures {
            missing_bytes: 40_000_000,
            ..figures(0, 8192)
        };
        let sentence = memory(&short).expect("a sentence");
        assert!(
            sentence.contains("frees 135 MB, and 35 % fit; 40 MB are missing for the rest"),
            "{sentence}"
        );
        assert_eq!(
            memory(&figures(3_000_000, 8192)).as_deref(),
            Some(
                "3 of 273 MB of experts fit into memory (1 %) beside a context of 8192 tokens (180 MB): -c 2048 frees 135 MB, and 51 % fit"
            )
        );
        let small = memory(&figures(3_000_000, 512)).expect("a sentence");
        assert!(small.ends_with("tokens (180 MB)"), "{small}");
        assert_eq!(memory(&figures(273_000_000, 8192)), None);
        assert_eq!(memory(&StreamFigures::default()), None);
    }

    #[test]
    fn evaluations_without_slots_are_counted() {
        let figures = |cache_unused| PostFetchFigures {
            early_bytes: 1,
            cache_slots: 13,
            cache_unused,
            ..PostFetchFigures::default()
        };
        assert!(!post_fetch(&figures(0)).contains("unused"));
        let text = post_fetch(&figures(7));
        assert!(
            text.contains("7 evaluations left the slots unused"),
            "{text}"
        );
    }

    #[test]
    fn layers_without_counts_are_listed_by_ranges() {
        let found = Uncounted {
            path: "moe.gguf".into(),
            layers: vec![0, 1, 2, 5, 7, 8],
            evaluations: 9,
            reason: "a reason".into(),
        };
        assert_eq!(
            uncounted(&found),
            "moe.gguf: 9 evaluations, and no expert of layers 0-2, 5, 7-8 was counted: a reason"
        );
    }
}
