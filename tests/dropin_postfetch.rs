//! Post-fetch in unmodified hosts with a simulated GPU: the logits are those of the same
//! placement without early copies, nothing is unordered, and a failure leaves stock's path.

mod hosts;

use std::path::Path;

use hosts::servers::write_adapter;
use hosts::simulated::{
    DECODE, Run, Setup, cached, cached_beside_cpu, copied_none_itself, offloaded, on,
    same_as_without, same_in_llama_server,
};
use hosts::{count, taken};
use serde_json::Value;
use testkit::fixtures::fixture;
use testkit::host::{DropIn, Host, built, preload_library, replace};
use testkit::llama_cpp::llama_cpp;
use testkit::process::stopped_often;
use testkit::server::{Answer, Options, Request, Server};
use testkit::sim_ggml::{Report, SimGgml};

/// Prompts that the device takes with their experts, graphs that are used again, and decoding.
const COMMANDS: [&str; 5] = [
    "prompt 40",
    "prompt 64",
    "hashes 3",
    "prompt 64",
    "prompt 33",
];

#[test]
fn prompts_and_kept_graphs() {
    let run = same_as_without(&on(), &COMMANDS);
    let figures = &run.figures;
    assert!(count(figures, "layers_ahead") >= 3, "{figures}");
    // Gate, up and down of three layers, in the first evaluation only.
    let copies = figures["host_copies"].as_object().expect("an object");
    assert!(copies.len() == 1 && count(&figures["host_copies"], "first_evaluation") >= 9);
    assert!(run.report.first().overlap_ns > 0);
}

/// The bytes are those that the host would have copied, to the byte.
#[test]
fn without_a_look_ahead_the_same_bytes_are_copied() {
    let setup = on()
        .with("LLAMA_POSTFETCH_LOOK_AHEAD", "0")
        .device(DECODE.0, DECODE.1);
    let run = same_as_without(&setup, &COMMANDS);
    let figures = &run.figures;
    assert_eq!(count(figures, "layers_ahead"), 0);
    assert_eq!(
        count(figures, "early_bytes"),
        count(figures, "left_out_bytes")
    );
}

#[test]
fn decoding() {
    same_as_without(&on().device(DECODE.0, DECODE.1), &COMMANDS);
}

#[test]
fn one_matrix_and_some_layers_in_host_memory() {
    for pattern in ["ffn_down_exps", r"blk\.[12]\.ffn_(up|down|gate)_exps"] {
        let setup = on().option(&format!("on-cpu={pattern}"));
        same_as_without(&setup, &COMMANDS);
        same_as_without(&setup.device(DECODE.0, DECODE.1), &COMMANDS);
    }
}

/// An evaluation that is looked at node by node is evaluated in many parts.
#[test]
fn a_host_with_a_callback() {
    let setup = on().option("count").device(DECODE.0, DECODE.1);
    same_as_without(&setup, &["text 6", "counts"]);
}

#[test]
fn two_contexts_at_a_time() {
    let setup = on().device(DECODE.0, DECODE.1);
    same_as_without(&setup, &["both 4", "prompt 40", "both 4"]);
}

/// Matrices that the host would multiply on the CPU. The placement differs from the host's own,
/// so that the reference has the same placement, and no memory for early copies.
#[test]
fn more_on_the_device_than_the_host_would_have() {
    for early in ["down", "all"] {
        let setup = Setup::default().with("LLAMA_POSTFETCH_MODE", early);
        let reference = setup
            .clone()
            .with("LLAMA_POSTFETCH_SCRATCHPAD_MB", "1")
            .run(&COMMANDS);
        assert_eq!(count(&reference.figures, "early_bytes"), 0);
        let obstacle = reference.figures["obstacle"].as_str().expect("an obstacle");
        assert!(
            obstacle.contains("LLAMA_POSTFETCH_SCRATCHPAD_MB"),
            "{obstacle}"
        );
        let found = setup.run(&COMMANDS);
        assert_eq!(found.answers, reference.answers, "{early}");
        assert!(
            count(&found.figures, "layers") >= 3 * 4,
            "{}",
            found.figures
        );
        assert!(found.report.products.len() > on().run(&COMMANDS).report.products.len());
    }
}

#[test]
fn memory_for_one_layer_at_a_time() {
    let run = same_as_without(&on().with("LLAMA_POSTFETCH_SCRATCHPAD_MB", "14"), &COMMANDS);
    assert_eq!(count(&run.figures, "layers_ahead"), 0);
    assert!(count(&run.figures, "scratch_bytes") <= 14 << 20);
}

/// A size that is not set is at most 10 % of the device: two layers, one, or none.
#[test]
fn memory_of_an_automatic_size() {
    for (mib, layers) in [(400, 2), (140, 1), (60, 0)] {
        let setup = on().device("SIM_GGML_MEMORY_MB", &mib.to_string());
        let run = setup.run(&COMMANDS);
        // The reference has no memory for early copies.
        let reference = setup.clone().with("LLAMA_POSTFETCH_SCRATCHPAD_MB", "1");
        assert_eq!(run.answers, reference.run(&COMMANDS).answers, "{mib}");
        let bytes = count(&run.figures, "scratch_bytes");
        assert_eq!(bytes, layers * 13_271_040, "{mib}: {}", run.figures);
        assert!(bytes <= (mib << 20) / 10);
        assert_eq!(count(&run.figures, "layers_ahead") > 0, layers == 2);
        let obstacle = run.figures["obstacle"].as_str().unwrap_or_default();
        assert_eq!(obstacle.contains("at most 10 % of the device"), layers == 0);
        if layers == 0 {
            let asked = setup
                .with("LLAMA_POSTFETCH_SCRATCHPAD_MB", "14")
                .run(&COMMANDS);
            assert_eq!(asked.answers, run.answers);
            assert_eq!(count(&asked.figures, "scratch_bytes"), 13_271_040);
        }
    }
}

#[test]
fn the_variables_keep_their_meaning() {
    let plain = Setup::default().run(&COMMANDS).answers;
    for (name, value) in [
        ("LLAMA_POSTFETCH_ENABLE", "0"),
        ("LLAMA_POSTFETCH_FORCE_CPU", "1"),
        ("LLAMA_POSTFETCH_USE_DEDICATED_STREAMS", "0"),
    ] {
        let run = on().with(name, value).run(&COMMANDS);
        assert_eq!(run.answers, plain, "{name}");
        assert_eq!(run.figures, Value::Null, "{name}");
        assert_eq!(run.report.calls("init_device"), 1, "{name}");
    }
    let run = on()
        .with("LLAMA_POSTFETCH_BLOCK_ON_MISS", "0")
        .run(&COMMANDS);
    assert_eq!(run.answers, plain);
    let checked = same_as_without(&on().with("LLAMA_POSTFETCH_DEBUG", "1"), &COMMANDS);
    assert_eq!(count(&checked.figures, "mismatches"), 0);
}

/// Each transfer records an event in the stream of early copies, which has no kernels.
#[test]
fn max_transfers_limits_the_copies_in_flight() {
    let plain = Setup::default().run(&COMMANDS).answers;
    let in_flight = ["1", "2", "1024"].map(|most| {
        let run = on()
            .with("LLAMA_POSTFETCH_MAX_TRANSFERS", most)
            .run(&COMMANDS);
        assert_eq!(run.answers, plain, "{most}");
        let streams = run.report.streams.iter();
        let of_copies = streams.filter(|stream| stream.kernel_ns == 0 && stream.copy_ns > 0);
        of_copies.map(|stream| stream.most_open_events).max()
    });
    assert_eq!(in_flight[0], Some(1));
    assert!(in_flight[1] <= Some(2), "{in_flight:?}");
    assert!(in_flight[2] > Some(2), "{in_flight:?}");
}

/// The lines have each expert that was copied, in the format of the specification.
#[test]
fn debug_lines_have_what_was_copied() {
    let setup = on().with("LLAMA_POSTFETCH_DEBUG", "1");
    let sim = setup.simulation();
    let mut host = setup.start(&sim, &fixture("small-moe.gguf"));
    for command in COMMANDS {
        host.ask(command);
    }
    let figures = host.control("status")["post_fetch"].clone();
    let layers = count(&figures, "layers") + count(&figures, "layers_ahead");
    assert!(layers > 0, "{figures}");
    // The last line of each layer.
    host.wait_logged("Overlap: ", layers as usize);
    let log = host.log();
    assert_eq!(host.end(), Some(0));
    let lines = log
        .iter()
        .filter_map(|line| Some(line.split_once("[PF] ")?.1));
    let numbers = |line: &str| -> Vec<u64> {
        let words = line.split(|c: char| !c.is_ascii_digit());
        words.filter_map(|word| word.parse().ok()).collect()
    };
    let (mut requested, mut ended, mut experts, mut bytes) = (0, 0, 0, 0);
    for line in lines {
        let numbers = numbers(line);
        if line.contains("Transferring") {
            // Each expert is copied in three matrices.
            experts += 3 * numbers[1];
            requested += 1;
        } else if line.contains("Expert") {
            assert!(line.contains(" bytes @ offset "), "{line}");
            assert_eq!(numbers[2] % numbers[1], 0, "{line}");
            bytes += numbers[1];
            experts -= 1;
        } else {
            assert!(
                line.contains(" Total: ") && line.contains(" Overlap: "),
                "{line}"
            );
            ended += 1;
        }
    }
    assert_eq!(experts, 0, "each expert has a line");
    assert_eq!((requested, ended), (layers, layers), "{log:#?}");
    // Padding behind an expert is copied, too.
    let padding = count(&figures, "early_bytes") - bytes;
    assert!(bytes > 0 && padding <= 8 * 3 * 512 * layers, "{figures}");
}

/// The switch of post-fetch alone copies where the host itself copies.
#[test]
fn the_switch_alone_turns_post_fetch_on() {
    let setup = Setup::default()
        .with("LLAMA_POSTFETCH_ENABLE", "1")
        .with("LLAMA_POSTFETCH_DEBUG", "1");
    let run = same_as_without(&setup, &COMMANDS);
    assert_eq!(count(&run.figures, "mismatches"), 0);
}

/// Copies from locked pages are asynchronous: only events order them.
fn locked(setup: Setup) -> Setup {
    setup.with("LLAMA_SIDECAR_PAGE_LOCK", "1")
}

/// Whether the simulation finds that waits are left out.
fn is_found(setup: &Setup, commands: &[&str], waits: &str) -> bool {
    let setup = setup.clone().device("SIM_GGML_IGNORE", waits);
    let sim = setup.simulation();
    let mut host = setup.start(&sim, &fixture("small-moe.gguf"));
    for command in commands {
        host.ask(command);
    }
    assert_eq!(host.end(), Some(0));
    let report = sim.report();
    assert!(report.ignored > 0, "{waits}");
    report.unordered > 0
}

/// Each wait of a product for a copy is needed. The stream of the products is the first.
fn each_wait_of_a_product_is_found(setup: &Setup, commands: &[&str], at_least: u64) {
    let waits = setup.run(commands).report.streams[0].event_waits;
    assert!(waits >= at_least, "{waits}");
    for nth in 1..=waits {
        let wait = format!("event_wait@1:{nth}");
        assert!(is_found(setup, commands, &wait), "{wait}");
    }
}

#[test]
fn a_wait_that_is_left_out_is_found() {
    let setup = locked(on()).device(DECODE.0, DECODE.1);
    let commands = ["prompt 40", "prompt 40"];
    each_wait_of_a_product_is_found(&setup, &commands, 12);
    // Waits of the host cover most waits of copies for products.
    assert!(is_found(&setup, &commands, "event_wait@2:all"));
}

#[test]
fn a_wait_for_a_miss_that_is_left_out_is_found() {
    let setup = locked(cached("26"));
    each_wait_of_a_product_is_found(&setup, &["prompt 40", "hashes 2"], 9);
}

/// Every so many calls of a function fail in a run of their own. A layer makes four events, one
/// after the other: every third call meets each of them, in some layer.
fn step(call: &str) -> usize {
    match call {
        "event_new" => 3,
        _ => 1,
    }
}

/// Each call of a setup that a backend can refuse fails once. The host's own calls come first.
fn each_call_fails_once(host: &Report, setup: &Setup, commands: &[&str], expected: &[String]) {
    let whole = setup.run(commands);
    assert_eq!(whole.answers, expected);
    for call in ["init_device", "alloc_buffer", "event_new"] {
        let calls = host.calls(call) + 1..=whole.report.calls(call);
        assert!(!calls.is_empty(), "{call}");
        for nth in calls.step_by(step(call)) {
            let fault = format!("{call}:{nth}");
            let faulty = setup.clone().device("SIM_GGML_FAIL", &fault);
            let run = faulty.run(commands);
            assert_eq!(run.report.failed, 1, "{fault}");
            assert_eq!(run.answers, expected, "{fault}");
        }
    }
}

/// Each call fails once, and after that for good.
#[test]
fn calls_that_fail_leave_stocks_path() {
    let plain = Setup::default().run(&COMMANDS);
    each_call_fails_once(&plain.report, &on(), &COMMANDS, &plain.answers);
    let run = on().device("SIM_GGML_FAIL", "event_new:all").run(&COMMANDS);
    assert_eq!(run.answers, plain.answers);
    assert_eq!(count(&run.figures, "early_bytes"), 0, "{}", run.figures);
    assert!(run.figures["obstacle"].is_string());
}

/// A copy that does not end in time is made by the program, as are all after it. When it ends at last,
/// it writes to memory that nothing reads.
#[test]
fn a_copy_that_is_late() {
    let settings = [
        (Setup::default(), on()),
        (Setup::default(), on().device(DECODE.0, DECODE.1)),
        (offloaded(), cached("26")),
        (Setup::default(), cached_beside_cpu("26")),
    ];
    for (reference, setup) in settings {
        let mut commands = COMMANDS.to_vec();
        commands.extend(["hashes 9", "prompt 48"]);
        let expected = reference.run(&commands).answers;
        for nth in [1, 2, 7, 20] {
            let late = format!("set_tensor_async@2:{nth}");
            let run = setup
                .clone()
                .device("SIM_GGML_LATE", &late)
                .with("LLAMA_POSTFETCH_TIMEOUT_MS", "100")
                .run(&commands);
            assert_eq!(run.answers, expected, "{late}");
            let obstacle = run.figures["obstacle"].as_str().unwrap_or_default();
            let reason = "a copy took longer than 0.1 s (LLAMA_POSTFETCH_TIMEOUT_MS)";
            assert!(obstacle.ends_with(reason), "{late}: {}", run.figures);
        }
    }
}

/// Weights that a late copy may still read are not replaced.
#[test]
fn no_swap_after_a_copy_that_is_late() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("model.gguf");
    replace(&path, &fixture("small-moe.gguf"));
    let setup = on()
        .device("SIM_GGML_LATE", "set_tensor_async@2:1")
        .with("LLAMA_POSTFETCH_TIMEOUT_MS", "100");
    let sim = setup.simulation();
    let mut host = setup.start(&sim, &path);
    host.ask("prompt 64");
    let expected = host.ask("prompt 64");
    replace(&path, &fixture("small-moe-mixed.gguf"));
    let reload = host.control("reload");
    assert!(
        reload
            .to_string()
            .contains("swap refused: a copy to the device"),
        "{reload}"
    );
    assert_eq!(host.ask("prompt 64"), expected);
    host.ask("hashes 9");
    assert_eq!(host.end(), Some(0));
    sim.report().assert_ordered();
}

/// An evaluation that fails in its middle leaves nothing behind for the next.
#[test]
fn an_evaluation_that_fails() {
    let plain = Setup::default().run(&["prompt 40"]).answers;
    let computes = on()
        .run(&["prompt 40", "prompt 64"])
        .report
        .calls("graph_compute");
    for nth in [computes - 6, computes - 3] {
        let setup = on().device("SIM_GGML_FAIL", &format!("graph_compute:{nth}"));
        let sim = setup.simulation();
        let mut host = setup.start(&sim, &fixture("small-moe.gguf"));
        host.ask("prompt 40");
        assert_eq!(host.ask("fails prompt 64"), "failed");
        assert_eq!(host.ask("prompt 40"), plain[0]);
        assert_eq!(host.end(), Some(0));
        let report = sim.report();
        report.assert_ordered();
        assert_eq!(report.failed, 1);
    }
}

#[test]
fn swaps_and_a_trace_at_the_same_time() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("model.gguf");
    let files = [fixture("small-moe.gguf"), fixture("small-moe-mixed.gguf")];
    let expected: Vec<String> = files
        .iter()
        .map(|file| {
            let sim = SimGgml::new(&[]);
            let mut host = Setup::default().start(&sim, file);
            let answer = host.ask("prompt 64");
            assert_eq!(host.end(), Some(0));
            answer
        })
        .collect();
    assert_ne!(expected[0], expected[1]);
    let setup = on().with("LLAMA_EXPERT_TRACE_STATS", "1");
    let sim = setup.simulation();
    replace(&path, &files[0]);
    let mut host = setup.start(&sim, &path);
    for round in 0..4 {
        for _ in 0..2 {
            assert_eq!(host.ask("prompt 64"), expected[round % 2]);
        }
        replace(&path, &files[(round + 1) % 2]);
        assert_ne!(taken(&host.control("reload")), (0, 0));
    }
    let trace = host.control("trace")["traces"][0].clone();
    assert!(
        trace["layers"].as_array().is_some_and(|of| of.len() == 4),
        "{trace}"
    );
    let figures = &host.control("status")["post_fetch"];
    assert!(count(figures, "early_bytes") > 0, "{figures}");
    assert_eq!(host.end(), Some(0));
    sim.report().assert_ordered();
}

/// Copies from locked pages hold up no thread; what was locked is released with its model.
#[test]
fn page_locked_mappings() {
    let setup = Setup::default().with("LLAMA_SIDECAR_PAGE_LOCK", "1");
    let plain = Setup::default().run(&COMMANDS);
    let locked = setup.run(&COMMANDS);
    assert_eq!(locked.answers, plain.answers);
    assert!(count(&locked.figures, "locked_bytes") > 0);
    let pageable = |run: &Run| run.report.first().link.to_device.copies_pageable;
    assert!(pageable(&locked) < pageable(&plain) / 2);
    assert_eq!(locked.report.calls("register_host_buffer"), 1);
    let refused = setup
        .clone()
        .device("SIM_GGML_FAIL", "register_host_buffer:1");
    assert_eq!(refused.run(&COMMANDS).answers, plain.answers);

    let sim = setup.simulation();
    let mut host = setup.start(&sim, &fixture("small-moe.gguf"));
    host.ask("prompt 40");
    host.ask("free");
    assert_eq!(host.end(), Some(0));
    let report = sim.report();
    assert_eq!(report.calls("unregister_host_buffer"), 1);
}

/// Tokens that are decoded after prompts, and batches that fit the slots or not.
const DECODING: [&str; 6] = [
    "prompt 40",
    "hashes 12",
    "prompt 3",
    "hashes 8",
    "prompt 64",
    "hashes 4",
];

#[test]
fn slots_give_the_same_when_the_process_is_stopped_again_and_again() {
    let setup = cached("26");
    let expected = setup.run(&DECODING).answers;
    let sim = setup.simulation();
    let mut host = setup.start(&sim, &fixture("small-moe.gguf"));
    let (answers, stops) = stopped_often(host.id(), || DECODING.map(|command| host.ask(command)));
    assert_eq!(answers.to_vec(), expected);
    assert!(stops > 0);
    let figures = host.control("status")["post_fetch"].clone();
    assert!(count(&figures, "cache_hits") > 0, "{figures}");
    assert_eq!(host.end(), Some(0));
    sim.report().assert_ordered();
}

/// An expert of the fixture has 0.53 MiB in each of three matrices of four layers.
#[test]
fn experts_that_stay_on_the_device() {
    let expected = offloaded().run(&DECODING).answers;
    for (mib, slots) in [("13", 2), ("26", 4), ("38", 6), ("auto", 8)] {
        let checked = cached(mib).with("LLAMA_POSTFETCH_DEBUG", "1");
        let run = checked.run(&DECODING);
        let figures = &run.figures;
        assert_eq!(count(figures, "cache_slots"), slots, "{figures}");
        assert_eq!(count(figures, "mismatches"), 0);
        // Two experts of a token in four layers; the first decode shows how the program copies.
        let looked_up = count(figures, "cache_hits") + count(figures, "cache_misses");
        assert!(looked_up > 8 * 4 * 2, "{figures}");
        if slots == 8 {
            assert!(count(figures, "cache_misses") <= 8 * 4, "{figures}");
        }
        assert_eq!(figures["obstacle"], Value::Null);
        for speed in ["link_speed", "memory_speed"] {
            assert!(figures[speed].as_f64() > Some(0.0), "{figures}");
        }
        let layers = by_layer(figures);
        let sum = |of: fn(&(u64, u64, u64)) -> u64| layers.iter().map(of).sum::<u64>();
        assert_eq!(sum(|of| of.1), count(figures, "cache_hits"));
        assert_eq!(sum(|of| of.2), count(figures, "cache_misses"));
        assert!(layers.len() == 4 && layers.iter().all(|of| of.0 == slots));
        // A batch that the host would leave on the CPU stays there, if it does not fit.
        match slots {
            8 => assert_eq!(run.answers, expected),
            _ => assert_eq!(run.answers[..2], expected[..2], "{mib} MiB"),
        }
    }
    let none = cached("1").run(&DECODING);
    assert_eq!(none.answers, Setup::default().run(&DECODING).answers);
    let obstacle = none.figures["obstacle"].as_str().expect("an obstacle");
    assert!(
        obstacle.contains("the 2 experts of each layer that a token uses"),
        "{obstacle}"
    );
}

/// The CPU computes what has no slot now, and the device gets it for later.
#[test]
fn misses_on_the_cpu() {
    let expected = offloaded().run(&DECODING).answers;
    for (mib, slots) in [("13", 2), ("26", 4), ("38", 6), ("auto", 8)] {
        for checked in ["0", "1"] {
            let setup = cached_beside_cpu(mib).with("LLAMA_POSTFETCH_DEBUG", checked);
            let run = locked(setup).run(&DECODING);
            let figures = &run.figures;
            assert_eq!(count(figures, "cache_slots"), slots, "{figures}");
            assert_eq!(count(figures, "mismatches"), 0);
            assert_eq!(figures["obstacle"], Value::Null);
            let (hits, misses) = (count(figures, "cache_hits"), count(figures, "cache_misses"));
            let on_cpu = count(figures, "cache_on_cpu");
            assert!(hits > 0 && hits + misses > 8 * 4 * 2, "{figures}");
            // The first token of each graph shows where the input of the experts is. Without slots
            // to spare, nothing could be loaded beside the CPU.
            assert_eq!(on_cpu > 0, slots > 2, "{figures}");
            assert!(on_cpu < misses, "{figures}");
            match slots {
                8 => assert_eq!(run.answers, expected),
                _ => assert_eq!(run.answers[..2], expected[..2], "{mib} MiB"),
            }
        }
    }
}

/// The half-life changes which experts stay, and no logit.
#[test]
fn a_half_life_changes_which_experts_stay() {
    let expected = offloaded().run(&DECODING).answers;
    let [lru, lrfu, again] = ["1", "64", "64"].map(|uses| {
        let run = cached("26")
            .with("LLAMA_POSTFETCH_CACHE_HALF_LIFE", uses)
            .run(&DECODING);
        assert_eq!(run.answers, expected, "{uses}");
        let figures = ["cache_hits", "cache_misses", "cache_evictions"];
        figures.map(|figure| count(&run.figures, figure))
    });
    assert_eq!(lru[0] + lru[1], lrfu[0] + lrfu[1], "the same look-ups");
    assert_ne!(lru, lrfu);
    assert_eq!(lrfu, again);
}

/// The speeds of this machine decide, which does not change the logits.
#[test]
fn misses_where_they_are_faster() {
    let expected = offloaded().run(&DECODING).answers;
    let setup = cached("40").with("LLAMA_POSTFETCH_CACHE_MISSES", "auto");
    let commands = ["prompt 40", "hashes 12", "prompt 40", "hashes 60"];
    let run = setup.run(&commands);
    assert_eq!(run.answers[..2], expected[..2]);
    assert_eq!(run.answers[3], offloaded().run(&commands).answers[3]);
}

/// With a fast CPU and a slow link, the slots are left unused after a trial; the other way round,
/// they are used. Times are virtual. The logits are those of the same placement throughout.
#[test]
fn slots_are_used_where_they_are_faster() {
    let commands = ["prompt 1", "hashes 120", "prompt 1", "hashes 60"];
    let expected = offloaded().run(&commands).answers;
    for (cpu, link, is_used) in [("400", "0.2", false), ("0.2", "50", true)] {
        let setup = cached("14")
            .with("LLAMA_POSTFETCH_CACHE_MISSES", "auto")
            .device("SIM_GGML_HOST_GBS", cpu)
            .device("SIM_GGML_LINK_GBS", link)
            .device("SIM_GGML_PAGEABLE_GBS", link)
            .device("SIM_GGML_CLOCK", "100");
        let sim = setup.simulation();
        let mut host = setup.start(&sim, &fixture("small-moe.gguf"));
        let answers = commands.map(|command| host.ask(command));
        assert_eq!(answers[..], expected);
        let choice = &host.wait_logged("=auto uses", 1)[0];
        assert_eq!(!choice.contains("uses 'no slots'"), is_used, "{choice}");
        let counts = |host: &Host| {
            let figures = &host.control("status")["post_fetch"];
            let looked_up = count(figures, "cache_hits") + count(figures, "cache_misses");
            (looked_up, count(figures, "cache_unused"))
        };
        let before = counts(&host);
        assert!(before.0 > 0 && before.1 > 0, "each method was tried");
        host.ask("hashes 20");
        let after = counts(&host);
        assert_eq!(after.0 > before.0, is_used, "{choice}");
        assert_eq!(after.1 - before.1, if is_used { 0 } else { 20 }, "{choice}");
        assert_eq!(host.end(), Some(0));
        sim.report().assert_ordered();
    }
}

/// The evaluation fails before or after the CPU's part of it.
#[test]
fn an_evaluation_with_misses_on_the_cpu_that_fails() {
    let commands = ["prompt 40", "hashes 3"];
    let setup = cached_beside_cpu("26");
    let plain = setup.run(&commands);
    let computes = plain.report.calls("graph_compute");
    for nth in computes - 9..=computes {
        let fault = setup
            .clone()
            .device("SIM_GGML_FAIL", &format!("graph_compute:{nth}"));
        let sim = fault.simulation();
        let mut host = fault.start(&sim, &fixture("small-moe.gguf"));
        host.ask("prompt 40");
        host.ask("hashes 2");
        assert_eq!(host.ask("fails hashes 1"), "failed", "{nth}");
        assert_eq!(commands.map(|command| host.ask(command))[..], plain.answers);
        assert_eq!(host.end(), Some(0));
        let report = sim.report();
        report.assert_ordered();
        assert_eq!(report.failed, 1);
    }
}

/// A trace of an earlier run, in a folder that goes with it.
fn trace_of(commands: &[&str]) -> (tempfile::TempDir, String) {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("trace.json");
    let path = path.to_str().expect("UTF-8").to_owned();
    let setup = Setup::default().with("LLAMA_EXPERT_TRACE_OUTPUT", &path);
    setup.run(commands);
    (folder, path)
}

/// What each layer has: slots, hits and misses.
fn by_layer(figures: &Value) -> Vec<(u64, u64, u64)> {
    let layers = figures["cache_layers"].as_array().expect("layers");
    let of = |layer| {
        let count = |name| count(layer, name);
        (count("slots"), count("hits"), count("misses"))
    };
    layers.iter().map(of).collect()
}

/// What the slots of each layer gain by a trace.
fn gains(trace: &Value) -> Vec<Vec<u64>> {
    let numbers = |list: &Value| -> Vec<u64> {
        let list = list.as_array().expect("a list").iter();
        list.map(|of| of.as_u64().expect("a number")).collect()
    };
    let layers = trace["layers"].as_array().expect("layers").iter();
    let of_layer = |layer: &Value| match &layer["locality"] {
        Value::Null => {
            let mut counts = numbers(&layer["counts"]);
            counts.sort_unstable_by(|a, b| b.cmp(a));
            counts
        }
        locality => numbers(&locality["lru"]),
    };
    layers.map(of_layer).collect()
}

/// The most used experts of a trace are there from the start, and layers have slots by what
/// these gain.
#[test]
fn slots_from_a_trace() {
    let (_folder, path) = trace_of(&DECODING);
    let read = std::fs::read(&path).expect("written at the end");
    let whole: Value = serde_json::from_slice(&read).expect("JSON");
    let mut counts_only = whole.clone();
    for layer in counts_only["layers"].as_array_mut().expect("layers") {
        let removed = layer.as_object_mut().expect("an object").remove("locality");
        assert!(removed.is_some());
    }
    let start = ["prompt 40", "hashes 1"];
    let expected = offloaded().run(&start).answers;
    let cold = cached("26").run(&start);
    for trace in [counts_only, whole] {
        std::fs::write(&path, trace.to_string()).expect("written");
        let with = |setup: Setup| setup.with("LLAMA_POSTFETCH_CACHE_TRACE", &path);
        let warm = with(cached("26")).run(&start);
        assert_eq!((&cold.answers, &warm.answers), (&expected, &expected));
        let hits = |run: &Run| count(&run.figures, "cache_hits");
        assert!(hits(&warm) > hits(&cold), "{} {}", hits(&warm), hits(&cold));
        let slots = |run: &Run| -> Vec<u64> {
            let layers = by_layer(&run.figures).into_iter();
            layers.map(|of| of.0).collect()
        };
        let (slots, same) = (slots(&warm), slots(&cold));
        assert!(slots.iter().sum::<u64>() >= same.iter().sum());
        let gains = gains(&trace);
        let gain = |slots: &[u64]| -> u64 {
            let layers = gains.iter().zip(slots);
            let of_layer = |(gains, slots): (&Vec<u64>, &u64)| -> u64 {
                gains.iter().take(*slots as usize).sum()
            };
            layers.map(of_layer).sum()
        };
        assert!(gain(&slots) > gain(&same), "{slots:?} {gains:?}");
        let run = with(cached("auto")).run(&DECODING);
        assert_eq!(run.answers, offloaded().run(&DECODING).answers);
        assert_eq!(count(&run.figures, "cache_evictions"), 0);
    }
}

#[test]
fn a_trace_that_is_none() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("trace.json");
    let expected = cached("26").run(&DECODING);
    for text in [
        "",
        "{}",
        r#"{"schema": "llama-sidecar/expert-trace/1", "layers": []}"#,
        r#"{"schema": "llama-sidecar/expert-trace/1", "experts_used": 1, "layers": [{"layer": 1, "tokens": 9, "counts": [1, 2, 3]}]}"#,
    ] {
        std::fs::write(&path, text).expect("written");
        let trace = path.to_str().expect("UTF-8");
        let run = cached("26")
            .with("LLAMA_POSTFETCH_CACHE_TRACE", trace)
            .run(&DECODING);
        assert_eq!(run.answers, expected.answers, "{text}");
        let hits = |run: &Run| count(&run.figures, "cache_hits");
        assert_eq!(hits(&run), hits(&expected), "{text}");
    }
}

/// More than the slots need is copied once: each miss, and no padding.
#[test]
fn a_miss_copies_its_expert_once() {
    let few = cached("26").run(&["prompt 40", "hashes 2"]);
    let more = cached("26").run(&["prompt 40", "hashes 2", "hashes 30"]);
    let grown = |name| count(&more.figures, name) - count(&few.figures, name);
    let expert = count(&few.figures, "cache_bytes") / (4 * 4 * 3);
    assert_eq!(grown("early_bytes"), grown("cache_misses") * 3 * expert);
    assert_eq!(grown("cache_hits") + grown("cache_misses"), 30 * 4 * 2);
    assert_eq!(more.answers[..2], few.answers[..]);
}

#[test]
fn slots_with_a_callback_and_with_two_contexts() {
    let callback = ["text 6", "counts"];
    let with = |setup: Setup| {
        let run = setup.option("count").run(&callback);
        // What a callback sees of experts that the CPU computes would be wrong.
        assert_eq!(count(&run.figures, "cache_on_cpu"), 0);
        run.answers
    };
    let both = ["both 6", "prompt 40", "both 4"];
    for slots in [cached, cached_beside_cpu] {
        assert_eq!(with(slots("auto")), with(offloaded()));
        let run = slots("26").run(&both);
        assert_eq!(run.answers, offloaded().run(&both).answers);
        assert!(count(&run.figures, "cache_hits") > 0);
    }
}

/// A context that is made later has the memory that slots took, and the slots are made again with what it leaves.
#[test]
fn a_context_that_is_made_later_has_its_memory() {
    let commands = [
        "prompt 40",
        "hashes 6",
        "context 2048",
        "hashes 6",
        "both 4",
    ];
    let small = |setup: Setup| setup.device("SIM_GGML_MEMORY_MB", "200");
    let alone = small(offloaded()).run(&commands).answers;
    for slots in [cached, cached_beside_cpu] {
        let run = small(slots("51")).run(&commands);
        assert_eq!(run.answers, alone);
        assert!(count(&run.figures, "cache_slots") > 0, "{}", run.figures);
    }
}

/// A swap drops what is in the slots.
#[test]
fn swaps_of_experts_that_stay_on_the_device() {
    let commands = ["prompt 40", "hashes 6"];
    let (_folder, trace) = trace_of(&commands);
    let filled = cached("auto").with("LLAMA_POSTFETCH_CACHE_TRACE", &trace);
    swaps_reach_slots(&offloaded(), &[filled, cached_beside_cpu("26")]);
}

fn swaps_reach_slots(reference: &Setup, setups: &[Setup]) {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("model.gguf");
    let files = [fixture("small-moe.gguf"), fixture("small-moe-mixed.gguf")];
    let commands = ["prompt 40", "hashes 6"];
    let answers = |host: &mut Host| commands.map(|command| host.ask(command));
    let expected = files.clone().map(|file| {
        let sim = SimGgml::new(&[]);
        let mut host = reference.start(&sim, &file);
        let answers = answers(&mut host);
        assert_eq!(host.end(), Some(0));
        answers
    });
    assert_ne!(expected[0], expected[1]);
    for slots in setups {
        let sim = SimGgml::new(&[]);
        replace(&path, &files[0]);
        let mut host = slots.start(&sim, &path);
        for round in 0..5 {
            for _ in 0..2 {
                assert_eq!(answers(&mut host), expected[round % 2], "round {round}");
            }
            replace(&path, &files[(round + 1) % 2]);
            assert_ne!(taken(&host.control("reload")), (0, 0));
        }
        let figures = &host.control("status")["post_fetch"];
        assert!(count(figures, "cache_hits") > 0, "{figures}");
        assert_eq!(host.end(), Some(0));
        sim.report().assert_ordered();
    }
}

/// Without slots, the host decodes on the CPU, whose kernels are the device's here.
fn slots_without_calls(libraries: fn(Setup) -> Setup) {
    let commands = ["prompt 40", "hashes 4"];
    let host = libraries(Setup::default()).run(&commands).report;
    let expected = libraries(offloaded()).run(&commands).answers;
    each_call_fails_once(&host, &libraries(cached("26")), &commands, &expected);
}

#[test]
fn slots_and_calls_that_fail() {
    slots_without_calls(|setup| setup);
}

/// The host evaluates the parts of a prompt without waiting in between.
#[test]
fn a_prompt_in_parts() {
    let commands = ["prompt 192", "hashes 4", "prompt 192", "prompt 130"];
    for part in ["part=32", "part=48"] {
        let run = same_as_without(&on().option(part), &commands);
        assert!(count(&run.figures, "layers_ahead") > 6, "{}", run.figures);
        same_as_without(&on().option(part).device(DECODE.0, DECODE.1), &commands);
        let expected = offloaded().option(part).run(&commands).answers;
        assert_eq!(cached("auto").option(part).run(&commands).answers, expected);
    }
}

// The same on llama.cpp from source, whose scheduler calls back before it copies weights.

#[test]
fn from_source_early_copies() {
    let run = same_as_without(&on().built_from_source(), &COMMANDS);
    assert!(count(&run.figures, "layers_ahead") >= 3, "{}", run.figures);
    copied_none_itself(&run.figures);
    let decoding = on().built_from_source().device(DECODE.0, DECODE.1);
    let checked = decoding.with("LLAMA_POSTFETCH_DEBUG", "1");
    let run = same_as_without(&checked, &COMMANDS);
    assert_eq!(count(&run.figures, "mismatches"), 0);
}

/// Large batches take experts that have slots of llama.cpp from the device, the others early.
#[test]
fn from_source_early_copies_beside_its_own_cache() {
    let setup = on().built_from_source().option("own-cache=20");
    let run = same_as_without(&setup, &COMMANDS);
    let without = on().built_from_source().run(&COMMANDS);
    assert_eq!(run.answers[0], without.answers[0]);
    copied_none_itself(&run.figures);
    let early = |run: &Run| count(&run.figures, "early_bytes");
    assert!(early(&run) < early(&without), "{}", run.figures);
}

#[test]
fn from_source_slots() {
    let expected = offloaded().built_from_source().run(&DECODING).answers;
    for (setup, slots, computes) in [
        (cached("26"), 4, false),
        (cached("auto"), 8, false),
        (cached_beside_cpu("26"), 4, true),
    ] {
        let checked = setup.built_from_source().with("LLAMA_POSTFETCH_DEBUG", "1");
        let run = checked.run(&DECODING);
        let figures = &run.figures;
        copied_none_itself(figures);
        assert_eq!(count(figures, "cache_slots"), slots, "{figures}");
        assert_eq!(count(figures, "mismatches"), 0);
        assert_eq!(figures["obstacle"], Value::Null);
        assert!(count(figures, "cache_hits") > 0, "{figures}");
        assert_eq!(count(figures, "cache_on_cpu") > 0, computes, "{figures}");
        match slots {
            8 => assert_eq!(run.answers, expected),
            // A batch that does not fit stays on the CPU.
            _ => assert_eq!(run.answers[..2], expected[..2]),
        }
    }
}

#[test]
fn from_source_a_wait_that_is_left_out_is_found() {
    let setup = locked(on()).device(DECODE.0, DECODE.1).built_from_source();
    let commands = ["prompt 40", "prompt 40"];
    each_wait_of_a_product_is_found(&setup, &commands, 12);
    assert!(is_found(&setup, &commands, "event_wait@2:all"));
    let setup = locked(cached("26")).built_from_source();
    each_wait_of_a_product_is_found(&setup, &["prompt 40", "hashes 2"], 9);
}

#[test]
fn from_source_calls_that_fail() {
    let commands = ["prompt 40", "prompt 64"];
    let plain = Setup::default().built_from_source().run(&commands);
    each_call_fails_once(
        &plain.report,
        &on().built_from_source(),
        &commands,
        &plain.answers,
    );
    slots_without_calls(Setup::built_from_source);
}

#[test]
fn from_source_swaps_reach_slots() {
    let setups = [
        cached("auto").built_from_source(),
        cached_beside_cpu("26").built_from_source(),
    ];
    swaps_reach_slots(&offloaded().built_from_source(), &setups);
}

#[test]
fn llama_server_from_source() {
    let model = fixture("small-moe.gguf");
    let plain = same_in_llama_server(&model, &[], &[]);
    // An adapter has products of its own with the ids of experts, and with matrices in host memory.
    let folder = tempfile::tempdir().expect("a folder");
    let adapter = folder.path().join("adapter.gguf");
    write_adapter(&adapter);
    let with_adapter = ["--lora", &adapter.display().to_string()];
    let obstacles = [
        "the CPU computes no experts of some layers, such as layer 1: other nodes read what its experts compute; they are copied to the device",
        "the CPU computes no experts of some layers, such as layer 2: the operation ADD leads to the last product of its experts; they are copied to the device",
    ];
    let changed = same_in_llama_server(&model, &with_adapter, &obstacles);
    assert_ne!(changed, plain, "the adapter shows");
}

/// A start of llama-server from source with the simulated GPU.
struct InServer<'a> {
    mode: &'a str,
    /// The size of slots.
    cache: &'a str,
    arguments: &'a [&'a str],
    variables: &'a [(&'a str, String)],
}

impl InServer<'_> {
    /// Returns the answers to these prompts, each of so many tokens, and the figures.
    fn run(&self, prompts: &[&str], tokens: usize) -> (Vec<Answer>, Value) {
        let sim = SimGgml::new(&[]);
        let mut options = Options::new(1);
        options.drop_in = DropIn::with(&[
            ("LLAMA_POSTFETCH_MODE", self.mode),
            ("LLAMA_POSTFETCH_CACHE_MB", self.cache),
        ]);
        let arguments = [&["--device", "SIM0", "-cmoe"], self.arguments].concat();
        options.arguments = arguments.into_iter().map(str::to_owned).collect();
        options.variables = sim.variables().to_vec();
        let owned = self.variables.iter();
        let owned = owned.map(|(name, value)| ((*name).into(), value.clone()));
        options.variables.extend(owned);
        let server = Server::start(&fixture("small-moe.gguf"), &options);
        let answer = |prompt: &&str| server.complete(&Request::new(prompt, tokens));
        let answers = prompts.iter().map(answer).collect();
        let figures = server.control("status")["post_fetch"].clone();
        assert!(server.end().0.success());
        sim.report().assert_ordered();
        (answers, figures)
    }
}

/// Answers and figures of llama-server from source: prompts with early copies, and tokens with slots, as
/// many as `cache` has.
fn in_server(mode: &str, cache: &str, variables: &[(&str, String)]) -> (Vec<Answer>, Value) {
    let server = InServer {
        mode,
        cache,
        arguments: &[],
        variables,
    };
    let prompts = ["one two three ", "four five six "].map(|words| words.repeat(20));
    server.run(&prompts.each_ref().map(String::as_str), 8)
}

/// With early copies and with slots, the program copies all experts itself, and the reason is named.
/// Returns the figures.
fn copies_all_itself(variables: &[(&str, String)], reason: &str) -> [Value; 2] {
    let expected = in_server("off", "0", variables).0;
    ["0", "auto"].map(|cache| {
        let (answers, figures) = in_server("on", cache, variables);
        assert_eq!(answers, expected, "{cache}");
        assert_eq!(count(&figures, "left_out_bytes"), 0, "{figures}");
        let obstacle = figures["obstacle"].as_str().unwrap_or_default();
        assert!(obstacle.contains(reason), "{figures}");
        figures
    })
}

/// The variables of a server whose schedulers `hosts/c/schedulers.c` changes.
fn with_schedulers(how: &str) -> [(&str, String); 2] {
    let libraries = [built("hosts-c/libschedulers.so"), preload_library()];
    let libraries = std::env::join_paths(libraries).expect("no colon");
    let libraries = libraries.into_string().expect("UTF-8");
    [("LD_PRELOAD", libraries), ("SCHEDULERS", how.into())]
}

/// Without a callback of the program, the scheduler copies whole matrices: it gets the drop-in's answers
/// all the same. With a callback that is set between evaluations, it gets them from there on.
#[test]
fn llama_server_from_source_with_its_copy_callback_set_otherwise() {
    for how in ["no-copy-callback", "late-copy-callback"] {
        let variables = with_schedulers(how);
        let expected = in_server("off", "0", &variables).0;
        for cache in ["0", "auto"] {
            let (answers, figures) = in_server("on", cache, &variables);
            assert_eq!(answers, expected, "{how} {cache}");
            assert!(count(&figures, "left_out_bytes") > 0, "{figures}");
            assert_eq!(count(&figures, "cache_hits") > 0, cache == "auto");
        }
    }
}

/// A scheduler with several copies of its inputs copies experts itself, and the reason is named.
#[test]
fn llama_server_from_source_with_pipeline_parallelism() {
    let variables = with_schedulers("parallel");
    for figures in copies_all_itself(&variables, "several batches at a time") {
        // Tokens stay on the CPU: nothing would be in slots.
        assert_eq!(count(&figures, "cache_bytes"), 0, "{figures}");
    }
}

/// Copies a library, which then finds its own functions in itself (`DT_SYMBOLIC`), as one that was linked
/// with `-Bsymbolic` does.
fn symbolic(library: &Path, folder: &Path, name: &str) {
    const DYNAMIC: u32 = 2;
    const RELATIVE_COUNT: u64 = 0x6fff_fff9;
    const SYMBOLIC: u64 = 16;
    let mut bytes = std::fs::read(library).expect("a library");
    let word = |bytes: &[u8], at: usize| {
        u64::from_le_bytes(bytes[at..at + 8].try_into().expect("8 bytes"))
    };
    let headers = word(&bytes, 32) as usize;
    let mut headers = (headers..).step_by(56);
    let dynamic = headers
        .find(|at| word(&bytes, *at) as u32 == DYNAMIC)
        .expect("a dynamic section");
    let mut entries = (word(&bytes, dynamic + 8) as usize..).step_by(16);
    // Only a hint to the loader: its entry has another use here.
    let entry = entries
        .find(|at| word(&bytes, *at) == RELATIVE_COUNT)
        .expect("a count of relocations");
    bytes[entry..entry + 8].copy_from_slice(&SYMBOLIC.to_le_bytes());
    std::fs::write(folder.join(name), bytes).expect("written");
}

/// Where the drop-in does not see when parts of a graph are submitted, nothing could wait for early
/// copies: the program makes all copies, and the reason is named.
#[test]
fn llama_server_from_source_whose_ggml_calls_itself() {
    let folder = tempfile::tempdir().expect("a folder");
    let name = "libggml-base.so.0";
    symbolic(&llama_cpp(name), folder.path(), name);
    let path = folder.path().to_str().expect("UTF-8");
    copies_all_itself(&[("LD_LIBRARY_PATH", path.into())], "cannot be seen");
}

/// Each server answers once: to a short prompt with slots, and to a long one with early copies. None of
/// its evaluations is only watched.
#[test]
fn llama_server_from_source_with_one_request() {
    for (cache, prompt) in [
        ("auto", "one two three "),
        ("0", &"one two three ".repeat(20)),
    ] {
        let [(expected, _), (answers, figures)] = ["off", "on"].map(|mode| {
            let server = InServer {
                mode,
                cache,
                arguments: &["--no-warmup"],
                variables: &[],
            };
            server.run(&[prompt], 1)
        });
        assert_eq!(answers, expected, "{cache}");
        copied_none_itself(&figures);
        let used = ["cache_hits", "cache_misses", "left_out_bytes"];
        let [hits, misses, left_out] = used.map(|name| count(&figures, name));
        assert_eq!(hits + misses > 0, cache == "auto", "{figures}");
        assert!(left_out > 0, "{figures}");
    }
}

/// Layers on two GPUs, experts in host memory. The scheduler multiplies all of these on the first GPU.
#[test]
fn two_gpus() {
    let commands = [
        "prompt 40",
        "prompt 64",
        "hashes 6",
        "prompt 33",
        "hashes 6",
    ];
    for host in [Setup::default(), Setup::default().built_from_source()] {
        let expected = host.clone().two_gpus().run(&commands).answers;
        let ways = [
            ("LLAMA_POSTFETCH_MODE", "on", "fetch"),
            ("LLAMA_POSTFETCH_CACHE_MB", "26", "fetch"),
            ("LLAMA_POSTFETCH_CACHE_MB", "26", "cpu"),
        ];
        for (name, value, misses) in ways {
            let setup = host.clone().two_gpus().with(name, value);
            let run = setup
                .with("LLAMA_POSTFETCH_CACHE_MISSES", misses)
                .run(&commands);
            let figures = &run.figures;
            assert_eq!(run.answers, expected, "{name} {misses}: {figures}");
            assert!(count(figures, "left_out_bytes") > 0, "{figures}");
            let hits = count(figures, "cache_hits");
            assert_eq!(hits > 0, name == "LLAMA_POSTFETCH_CACHE_MB", "{figures}");
            // The input of a layer on the second GPU is copied to the first.
            let obstacle = figures["obstacle"].as_str().unwrap_or_default();
            let refused = "the CPU computes no experts of some layers, such as layer 3";
            assert_eq!(obstacle.starts_with(refused), misses == "cpu", "{figures}");
            assert_eq!(obstacle.is_empty(), misses == "fetch", "{figures}");
        }
    }
}
