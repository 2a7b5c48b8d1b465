//! The simulated GPU in unmodified llama.cpp: what the host computes, and what the simulation
//! finds in the host's own operation.

use std::io::Write;
use std::path::Path;
use std::process::{Command, Stdio};

use testkit::fixtures::{fixture, upstream_libraries};
use testkit::host::{DropIn, Host, Program};
use testkit::mixtures::Mixture;
use testkit::server::{Options, Request, Server};
use testkit::sim_ggml::{Report, SimGgml};

/// Answers of a host to these commands, and the report of its simulated GPU.
fn answers(
    sim: &SimGgml,
    commands: &[&str],
    set: impl FnOnce(&mut Command),
) -> (Vec<String>, Report) {
    let model = fixture("small-moe.gguf");
    let program = Program::PythonExpertsOnCpu;
    let mut host = Host::start_with(program, &model, &DropIn::Absent, |command| {
        sim.prepare(command);
        set(command);
    });
    let answers = commands.iter().map(|command| host.ask(command)).collect();
    assert_eq!(host.end(), Some(0));
    (answers, sim.report())
}

/// A prompt that the device takes with its experts, one that it does not take, and decoding.
const COMMANDS: [&str; 4] = ["prompt 40", "hashes 8", "prompt 5", "text 4"];

fn run(settings: &[(&str, &str)]) -> (Vec<String>, Report) {
    answers(&SimGgml::new(settings), &COMMANDS, |_| {})
}

/// The same commands without a device.
fn on_the_cpu() -> Vec<String> {
    let model = fixture("small-moe.gguf");
    let mut host = Host::start(Program::PythonExpertsOnCpu, &model, &DropIn::Absent);
    let answers = COMMANDS.iter().map(|command| host.ask(command)).collect();
    assert_eq!(host.end(), Some(0));
    answers
}

#[test]
fn logits_are_the_same_in_each_run_and_those_of_the_cpu() {
    let (first, report) = run(&[]);
    assert_eq!(first, run(&[]).0);
    // The kernels are those of the CPU.
    assert_eq!(first, on_the_cpu());
    report.assert_ordered();
    assert!(report.accesses > 1000, "{report:?}");
    assert!(report.calls("graph_compute") > 20, "{report:?}");
    // Gate, up and down of four layers; in the last layer of a prompt, one token is left.
    assert_eq!(report.products.len(), 9);
    assert!(
        report.first().link.to_device.copies_pageable > 0,
        "mapped weights"
    );
}

/// Stock copies routed weights and computes one after the other.
#[test]
fn time_is_virtual_and_nothing_overlaps_in_stock() {
    let (_, fast) = run(&[
        ("SIM_GGML_LINK_GBS", "100"),
        ("SIM_GGML_PAGEABLE_GBS", "100"),
    ]);
    let (_, slow) = run(&[("SIM_GGML_LINK_GBS", "1"), ("SIM_GGML_PAGEABLE_GBS", "1")]);
    assert_eq!(fast.first().overlap_ns, 0);
    assert_eq!(slow.first().overlap_ns, 0);
    assert_eq!(fast.first().kernel_ns, slow.first().kernel_ns);
    assert_eq!(
        fast.first().link.to_device.bytes,
        slow.first().link.to_device.bytes
    );
    let (bytes, copies) = (
        slow.first().link.to_device.bytes,
        &slow.first().link.to_device,
    );
    let copies = copies.copies_locked + copies.copies_pageable;
    let busy = slow.first().link.to_device.busy_ns;
    // 1 GB/s is a byte in each nanosecond, after the latency of each copy.
    assert_eq!(busy, bytes + copies * 8000);
    let end = |report: &Report| report.threads[0].time_ns;
    assert!(end(&slow) > end(&fast), "{slow:?}");
    // One thread, one stream: the stream waits for the host, and never for the link.
    assert_eq!(
        (slow.streams.len(), slow.streams[0].waited_for_link_ns),
        (1, 0)
    );
    let again = run(&[("SIM_GGML_LINK_GBS", "1"), ("SIM_GGML_PAGEABLE_GBS", "1")]).1;
    assert_eq!(end(&slow), end(&again));
}

/// Some of the many calls of `synchronize` are needed, and those are found.
#[test]
fn a_wait_that_is_left_out_is_found() {
    let (logits, whole) = run(&[]);
    let calls = whole.calls("synchronize");
    let mut found = 0;
    for nth in (calls / 12..calls).step_by(calls as usize / 12) {
        let (changed, report) = run(&[("SIM_GGML_IGNORE", &format!("synchronize:{nth}"))]);
        assert_eq!(report.ignored, 1);
        found += u64::from(report.unordered > 0 || changed != logits);
    }
    println!("{found} of 12 calls of synchronize were needed");
    assert!(found > 0);
}

/// The host reports what failed, as it does for any backend.
#[test]
fn calls_fail_on_demand() {
    let host = concat!(env!("CARGO_MANIFEST_DIR"), "/../hosts/python/host.py");
    for (fault, message) in [
        ("graph_compute:9", "AssertionError: -3"),
        ("init_device:1", "no context"),
        ("alloc_buffer:2", "no context"),
    ] {
        let sim = SimGgml::new(&[("SIM_GGML_FAIL", fault)]);
        let mut command = Command::new("python3");
        sim.prepare(&mut command);
        let mut child = command
            .args([
                Path::new(host),
                &upstream_libraries(),
                &fixture("small-moe.gguf"),
            ])
            .arg("experts-on-cpu")
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .expect("the host starts");
        let input = child.stdin.take().expect("piped");
        // A host that has failed reads no commands.
        let _ = (&input).write_all(b"prompt 40\nend\n");
        drop(input);
        let output = child.wait_with_output().expect("a child");
        let log = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{fault}: {log}");
        assert!(log.contains(message), "{fault}: {log}");
        assert_eq!(sim.report().failed, 1, "{fault}");
    }
}

#[test]
fn other_placements() {
    let expected = on_the_cpu();
    for pattern in [
        "ffn_down_exps",
        r"blk\.[01]\.ffn_(up|down|gate)_exps",
        "no tensor",
    ] {
        let (found, report) = answers(&SimGgml::new(&[]), &COMMANDS, |command| {
            command.arg(format!("on-cpu={pattern}"));
        });
        assert_eq!(found, expected, "{pattern}");
        report.assert_ordered();
    }
}

/// Biases of experts are in host memory, too.
#[test]
fn a_model_with_biases_of_experts() {
    let folder = tempfile::tempdir().expect("a folder");
    let model = folder.path().join("model.gguf");
    Mixture::GptOss.write(&model).expect("free space");
    let answers = |sim: Option<&SimGgml>| {
        let program = Program::PythonExpertsOnCpu;
        let mut host = Host::start_with(program, &model, &DropIn::Absent, |command| {
            if let Some(sim) = sim {
                sim.prepare(command);
            }
        });
        let answers = ["prompt 40", "more 8", "prompt 64"].map(|command| host.ask(command));
        assert_eq!(host.end(), Some(0));
        answers
    };
    let sim = SimGgml::new(&[]);
    let found = answers(Some(&sim));
    assert_eq!(found, answers(None));
    // Logits are numbers: their largest is not always the first.
    assert!(found[1].split(' ').any(|token| token != "0"), "{found:?}");
    let report = sim.report();
    report.assert_ordered();
    assert_eq!(report.products.len(), 24);
}

#[test]
fn llama_server_from_source() {
    let model = fixture("small-moe.gguf");
    let mut answers = Vec::new();
    for load in ["mmap", "none"] {
        let sim = SimGgml::new(&[]);
        let mut options = Options::new(1);
        options.drop_in = DropIn::Absent;
        // A build with backends inside loads others only for this option.
        let arguments = ["--device", "SIM0", "-cmoe", "--load-mode", load];
        options.arguments = arguments.map(str::to_owned).to_vec();
        options.variables = sim.variables().to_vec();
        let server = Server::start(&model, &options);
        let request = Request::new(&"one two three ".repeat(20), 8);
        answers.push(server.complete(&request));
        let (status, log) = server.end();
        assert!(status.success(), "{}", log.join("\n"));
        let report = sim.report();
        report.assert_ordered();
        assert!(report.products.len() >= 9, "{report:?}");
        let pageable = report.first().link.to_device.copies_pageable;
        assert_eq!(pageable == 0, load == "none", "{report:?}");
    }
    assert_eq!(answers[0], answers[1]);
}

/// Both ways of a report, and twice the speed is half of the time.
#[test]
fn graphs_of_the_cpu_take_time_on_request() {
    let time = |speed: &str| {
        let sim = SimGgml::new(&[("SIM_GGML_HOST_GBS", speed)]);
        let model = fixture("small-moe.gguf");
        let program = Program::PythonExpertsOnCpu;
        let mut host = Host::start_with(program, &model, &DropIn::Absent, |command| {
            sim.prepare(command);
        });
        host.ask("prompt 5");
        let before = sim.report_now(&mut host);
        host.ask("hashes 4");
        assert_eq!(host.end(), Some(0));
        sim.report().threads[0].time_ns - before.threads[0].time_ns
    };
    let (none, slow, fast) = (time("0"), time("1"), time("2"));
    // A graph rounds its time down to a nanosecond.
    assert!(
        (slow - none).abs_diff(2 * (fast - none)) < 100,
        "{none} {slow} {fast}"
    );
}

/// Makes these steps of `hosts/python/streams.py`; returns what it printed, and the report.
fn steps(settings: &[(&str, &str)], steps: &str) -> (String, Report) {
    let sim = SimGgml::new(settings);
    let mut command = Command::new("python3");
    sim.prepare(&mut command);
    let program = concat!(env!("CARGO_MANIFEST_DIR"), "/../hosts/python/streams.py");
    let output = command
        .args([Path::new(program), &upstream_libraries()])
        .args(steps.split(' '))
        .output()
        .expect("the program starts");
    let log = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{steps}: {log}");
    (
        String::from_utf8_lossy(&output.stdout).trim().to_owned(),
        sim.report(),
    )
}

const ORDERED: &str = "lock copy:b record:b wait:a compute:a sync:a get";

#[test]
fn an_event_orders_two_streams() {
    let (result, report) = steps(&[], ORDERED);
    assert_eq!(result, "3.0 3.0");
    report.assert_ordered();
    assert_eq!(report.first().link.to_device.copies_locked, 1);
    assert!(report.streams[0].waited_for_events_ns > 0);
}

#[test]
fn each_wait_between_two_streams_is_needed() {
    for wait in ["event_record:1", "event_wait:1", "synchronize:1"] {
        let (_, report) = steps(&[("SIM_GGML_IGNORE", wait)], ORDERED);
        assert_eq!(report.ignored, 1);
        assert_eq!(report.unordered, 1, "{wait}: {:?}", report.examples);
    }
}

/// A copy that has ended, as one from pageable memory has when the call returns, orders nothing.
#[test]
fn threads_do_not_order_streams() {
    for (made, unordered) in [
        ("other/copy:b compute:a sync:a get", 1),
        ("other/copy:b other/record:b compute:a sync:a get", 1),
        ("other/copy:b other/sync:b compute:a sync:a get", 1),
        ("other/copy:b other/record:b wait:a compute:a sync:a get", 0),
        ("other/copy:b sync:b compute:a sync:a get", 0),
        ("other/copy:b other/record:b event compute:a sync:a get", 0),
        // Synchronous copies have ended for all.
        ("other/set compute:a sync:a get", 0),
        ("set compute:a other/sync:a get", 1),
        // The copies of the next round, and the product that reads the weights. The wait at the end
        // is for the report, which has what has happened.
        ("copy:b sync:b compute:a copy:b sync:a", 1),
        ("copy:b sync:b compute:a record:a wait:b copy:b sync:a", 0),
    ] {
        let (_, report) = steps(&[], made);
        assert_eq!(report.unordered, unordered, "{made}: {:?}", report.examples);
        assert_eq!(report.unknown_memory, 0);
    }
}

#[test]
fn the_host_sees_a_copy_after_it_has_waited() {
    let seen = |made| steps(&[], made).0;
    let poison = f32::from_bits(0xa5a5_a5a5);
    assert_eq!(seen("set compute:a lock read:a sync:a"), "3.0 3.0");
    assert_eq!(seen("set compute:a lock read:a record:a event"), "3.0 3.0");
    let early = seen("set compute:a lock read:a");
    assert_eq!(early.split(' ').next().unwrap().parse(), Ok(poison as f64));
    let pageable = seen("set compute:a read:a");
    assert_eq!(pageable, "3.0 3.0");
}

#[test]
fn freed_memory_is_not_used() {
    let (_, report) = steps(&[], "set free compute:a sync:a");
    // The product's source, and its result.
    assert_eq!(report.unknown_memory, 2, "{:?}", report.examples);
}

/// As ggml's CUDA backend has it: what comes for the second time is captured, and a type is not compared.
#[test]
fn graphs_are_replayed_while_nothing_changes() {
    let replays = |made| {
        let (result, report) = steps(&[], made);
        report.assert_ordered();
        (result, report.replays)
    };
    let twice = replays("set compute:a compute:a sync:a get");
    assert_eq!(twice, ("3.0 3.0".into(), 0));
    let often = replays("set compute:a compute:a compute:a compute:a sync:a get");
    assert_eq!(often, ("3.0 3.0".into(), 2));
    let moved =
        replays("set compute:a compute:a compute:a move compute:a compute:a compute:a sync:a get");
    assert_eq!(moved, ("24.0 24.0".into(), 2));
    let retyped = replays("set compute:a compute:a compute:a retype compute:a sync:a get");
    assert_eq!(retyped, ("3.0 3.0".into(), 2));
    let (result, report) = steps(
        &[("SIM_GGML_CAPTURE", "0")],
        "set compute:a compute:a compute:a sync:a get",
    );
    assert_eq!((&*result, report.replays), ("3.0 3.0", 0));
}

/// A link of 1 GB/s, and kernels that read 1 GB/s.
#[test]
fn page_locked_copies_overlap_kernels_and_others_hold_up_their_caller() {
    let slow = [
        ("SIM_GGML_LINK_GBS", "1"),
        ("SIM_GGML_PAGEABLE_GBS", "1"),
        ("SIM_GGML_DEVICE_GBS", "1"),
        ("SIM_GGML_LATENCY_US", "0"),
        ("SIM_GGML_LAUNCH_US", "0"),
    ];
    const MEGABYTE: u64 = 1 << 20;
    // The product comes after the first copy, and may run during the second.
    let made = "copy:b record:b wait:a copy:b compute:a sync:b sync:a";
    let (_, pageable) = steps(&slow, made);
    let (_, locked) = steps(&slow, &format!("lock {made}"));
    for report in [&pageable, &locked] {
        assert_eq!(report.first().link.to_device.busy_ns, 2 * MEGABYTE);
        assert_eq!(report.first().kernel_ns, MEGABYTE);
    }
    assert_eq!(
        (pageable.first().overlap_ns, locked.first().overlap_ns),
        (0, MEGABYTE)
    );
    assert_eq!(pageable.threads[0].time_ns, 3 * MEGABYTE);
    assert_eq!(locked.threads[0].time_ns, 2 * MEGABYTE);
}
