use super::*;

pub(super) fn parse(variables: &[(&str, &str)]) -> Config {
    Config::parse(|name| {
        let found = variables.iter().find(|(key, _)| *key == name)?;
        Some(found.1.into())
    })
}

#[test]
fn defaults_without_variables() {
    let config = parse(&[]);
    assert_eq!((config.hotswap, config.log), (false, LevelFilter::Warn));
    assert!(config.rejected.is_empty());
}

#[test]
fn a_switch_is_on_unless_its_value_means_off() {
    let values = [
        ("1", true),
        ("yes", true),
        ("0", false),
        ("off", false),
        ("False", false),
        ("", false),
    ];
    for (value, on) in values {
        for name in ["LLAMA_HOTSWAP_ENABLED", "LLAMA_SIDECAR_CPU_MOE"] {
            let config = parse(&[(name, value)]);
            assert_eq!(config.hotswap || config.cpu_moe, on, "{name}={value}");
            assert!(config.rejected.is_empty());
        }
        let check = parse(&[("LLAMA_HOTSWAP_CHECK", value)]).check_blocks;
        assert_eq!(check, on || value.is_empty(), "{value}");
    }
}

#[test]
fn the_variable_of_hot_swap_for_the_sidecar_alone_decides_where_it_is_set() {
    for (both, alone, on) in [
        ("1", "", true),
        ("1", "0", false),
        ("0", "1", true),
        ("", "1", true),
    ] {
        let config = parse(&[
            ("LLAMA_HOTSWAP_ENABLED", both),
            ("LLAMA_SIDECAR_HOTSWAP", alone),
        ]);
        assert_eq!(config.hotswap, on, "{both:?} {alone:?}");
    }
}

#[test]
fn a_bad_value_of_each_variable_is_reported_and_changes_nothing() {
    let defaults = parse(&[]);
    for variable in VARIABLES {
        let value = match variable.kind {
            Kind::Path | Kind::Switch => continue,
            Kind::Number { .. }
            | Kind::Level
            | Kind::Choice { .. }
            | Kind::Memory
            | Kind::Text(_) => "=",
        };
        let config = parse(&[(variable.name, value)]);
        let sentence = format!("{}={value:?}: ", variable.name);
        assert_eq!(config.rejected.len(), 1, "{}", variable.name);
        assert!(config.rejected[0].starts_with(&sentence), "{config:?}");
        let rejected = Vec::new();
        assert_eq!(Config { rejected, ..config }, defaults, "{}", variable.name);
    }
}

#[test]
fn each_variable_of_the_table_is_read_and_its_default_is_the_one_in_force() {
    let read = std::cell::RefCell::new(std::collections::BTreeSet::new());
    let defaults = Config::parse(|name| {
        read.borrow_mut().insert(name.to_owned());
        None
    });
    let names = VARIABLES.iter().map(|variable| variable.name.to_owned());
    assert_eq!(read.into_inner(), names.collect());
    for variable in VARIABLES {
        if let DefaultValue::Value(value) = variable.default {
            assert_eq!(parse(&[(variable.name, value)]), defaults);
        }
    }
}

#[test]
fn placement_variables_are_checked_and_kept() {
    let config = parse(&[
        ("LLAMA_SIDECAR_SPLIT", "3,1"),
        ("LLAMA_SIDECAR_CPU_MOE", "1"),
        ("LLAMA_SIDECAR_OVERRIDE_TENSOR", "attn=1"),
        ("LLAMA_SIDECAR_STAGING_MB", "2"),
    ]);
    assert_eq!(config.rejected, [""; 0]);
    assert_eq!(config.split.as_deref(), Some(c"3,1"));
    assert_eq!(config.override_tensor.as_deref(), Some(c"attn=1"));
    assert_eq!((config.cpu_moe, config.staging_bytes), (true, 2 << 20));
}

#[test]
fn a_choice_is_one_of_its_words() {
    let values = [
        ("off", ExpertStream::Off, 0),
        ("needed", ExpertStream::Needed, 0),
        ("auto", ExpertStream::Auto, 0),
        ("on", ExpertStream::On, 0),
        ("ON", ExpertStream::Off, 1),
    ];
    for (value, expected, rejected) in values {
        let config = parse(&[("LLAMA_EXPERT_STREAM", value)]);
        assert_eq!(config.expert_stream, expected, "{value}");
        assert_eq!(config.rejected.len(), rejected, "{value}");
    }
}

#[test]
fn a_trace_turns_streaming_on_unless_that_is_set() {
    let path = ("LLAMA_EXPERT_STREAM_TRACE", "/t.json");
    let stream = |value| parse(&[path, ("LLAMA_EXPERT_STREAM", value)]).expert_stream;
    let trace = parse(&[path]);
    assert_eq!(trace.expert_stream, ExpertStream::Auto);
    assert_eq!(trace.expert_stream_trace, Some("/t.json".into()));
    assert_eq!(stream("on"), ExpertStream::On);
    assert_eq!(stream("off"), ExpertStream::Off);
}

#[test]
fn drop_in_variables() {
    let config = parse(&[]);
    assert_eq!(config.poll, Some(Duration::from_secs(1)));
    assert_eq!(
        (config.quiet, &config.control),
        (Duration::from_secs(2), &None)
    );
    assert_eq!((config.check_blocks, config.memory_bytes), (true, None));
    assert!(!config.traces() && !config.strict);
    assert!(parse(&[("LLAMA_SIDECAR_STRICT", "1")]).strict);
    assert!(parse(&[("LLAMA_EXPERT_TRACE_STATS", "1")]).traces());
    assert!(parse(&[("LLAMA_EXPERT_TRACE_OUTPUT", "a.csv")]).traces());
    let config = parse(&[
        ("LLAMA_HOTSWAP_POLL_MS", "0"),
        ("LLAMA_HOTSWAP_QUIET_MS", "0"),
        ("LLAMA_HOTSWAP_CHECK", "0"),
        ("LLAMA_SIDECAR_MEMORY_MB", "3"),
        ("LLAMA_SIDECAR_CONTROL", "/tmp/socket"),
    ]);
    assert_eq!((config.poll, config.quiet), (None, Duration::ZERO));
    assert_eq!(
        (config.check_blocks, config.memory_bytes),
        (false, Some(3 << 20))
    );
    assert_eq!(config.control, Some(OwnPath("/tmp/socket".into())));
}

#[test]
fn with_rounds_files_are_checked_only_on_request() {
    assert!(!parse(&[]).rounds);
    for variable in [
        ("LLAMA_SIDECAR_ROUNDS", "1"),
        ("LLAMA_HOTSWAP_CONTROL_FILE", "control"),
    ] {
        let config = parse(&[variable, ("LLAMA_HOTSWAP_POLL_MS", "20")]);
        assert_eq!((config.rounds, config.poll), (true, None));
    }
    let status = parse(&[("LLAMA_HOTSWAP_STATUS_FILE", "status")]);
    assert_eq!(status.status_file, Some(OwnPath("status".into())));
    assert!(!status.rounds);
}

#[test]
fn paths_take_the_process_id() {
    let control = |path: &str| {
        let parsed = parse(&[("LLAMA_SIDECAR_CONTROL", path)]);
        parsed.control.map(|path| path.now())
    };
    let id = std::process::id();
    assert_eq!(
        control("/run/%p-%p.sock"),
        Some(format!("/run/{id}-{id}.sock").into())
    );
    assert_eq!(control("/run/100%"), Some("/run/100%".into()));
}

#[test]
fn postfetch_variables() {
    let defaults = parse(&[]).postfetch;
    assert!(defaults.enable && defaults.block_on_miss && defaults.dedicated_streams);
    assert!(defaults.page_lock && !defaults.force_cpu && !defaults.debug);
    assert_eq!((defaults.max_transfers, defaults.scratchpad_bytes), (8, 0));
    assert!(defaults.cpu_limit >= 1);
    assert_eq!(defaults.timeout, Duration::from_secs(5));
    let all = [
        ("LLAMA_POSTFETCH_ENABLE", "0"),
        ("LLAMA_POSTFETCH_FORCE_CPU", "1"),
        ("LLAMA_POSTFETCH_BLOCK_ON_MISS", "0"),
        ("LLAMA_POSTFETCH_MAX_TRANSFERS", "3"),
        ("LLAMA_POSTFETCH_SCRATCHPAD_MB", "5"),
        ("LLAMA_POSTFETCH_USE_DEDICATED_STREAMS", "0"),
        ("LLAMA_POSTFETCH_CPU_LIMIT", "6"),
        ("LLAMA_POSTFETCH_PAGE_LOCK", "0"),
        ("LLAMA_POSTFETCH_CACHE_MB", "2"),
        ("LLAMA_POSTFETCH_CACHE_HALF_LIFE", "9"),
        ("LLAMA_POSTFETCH_SPIN_US", "7"),
        ("LLAMA_POSTFETCH_TIMEOUT_MS", "4"),
        ("LLAMA_POSTFETCH_DEBUG", "1"),
    ];
    let set = PostFetch {
        enable: false,
        force_cpu: true,
        block_on_miss: false,
        max_transfers: 3,
        scratchpad_bytes: 5 << 20,
        dedicated_streams: false,
        cpu_limit: 6,
        page_lock: false,
        cache_bytes: 2 << 20,
        cache_half_life: 9,
        spin: Duration::from_micros(7),
        timeout: Duration::from_millis(4),
        debug: true,
    };
    assert_eq!(parse(&all).postfetch, set);
    for (name, value) in [
        ("LLAMA_POSTFETCH_MAX_TRANSFERS", "0"),
        ("LLAMA_POSTFETCH_MAX_TRANSFERS", "1025"),
        ("LLAMA_POSTFETCH_CPU_LIMIT", "0"),
        ("LLAMA_POSTFETCH_SPIN_US", "4294967296"),
        ("LLAMA_POSTFETCH_TIMEOUT_MS", "0"),
        ("LLAMA_POSTFETCH_SCRATCHPAD_MB", "17592186044416"),
        ("LLAMA_POSTFETCH_MODE", "yes"),
    ] {
        let config = parse(&[(name, value)]);
        assert_eq!(config.rejected.len(), 1, "{name}={value}");
        assert_eq!(config.postfetch, defaults);
        assert_eq!(config.program_postfetch.mode, PostFetchMode::Off);
    }
}

#[test]
fn post_fetch_is_on_in_an_unmodified_program_where_its_switch_is_set() {
    let mode = |variables: &[(&str, &str)]| parse(variables).program_postfetch.mode;
    let enabled = ("LLAMA_POSTFETCH_ENABLE", "1");
    assert_eq!(mode(&[enabled]), PostFetchMode::Offloaded);
    assert_eq!(mode(&[("LLAMA_POSTFETCH_ENABLE", "0")]), PostFetchMode::Off);
    assert_eq!(mode(&[("LLAMA_POSTFETCH_DEBUG", "1")]), PostFetchMode::Off);
    for (host, expected) in [("off", PostFetchMode::Off), ("down", PostFetchMode::Down)] {
        assert_eq!(mode(&[enabled, ("LLAMA_POSTFETCH_MODE", host)]), expected);
    }
    let forced = ("LLAMA_POSTFETCH_FORCE_CPU", "1");
    assert_eq!(mode(&[enabled, forced]), PostFetchMode::Off);
}

#[test]
fn each_variable_of_the_trace_counts() {
    assert!(!parse(&[]).traces());
    for name in [
        "STATS",
        "NAMES",
        "PER_LAYER",
        "OUTPUT",
        "ROUTES",
        "SALIENCY",
    ] {
        let name = format!("LLAMA_EXPERT_TRACE_{name}");
        assert!(parse(&[(&name, "1")]).traces(), "{name}");
    }
    assert!(!parse(&[("LLAMA_EXPERT_TRACE_NAMES", "1")]).trace_summary);
    let layers = ("LLAMA_EXPERT_TRACE_PER_LAYER", "1");
    assert!(parse(&[layers]).trace_summary);
    let stats = ("LLAMA_EXPERT_TRACE_STATS", "0");
    assert!(!parse(&[layers, stats]).trace_summary);
    let top = |value| parse(&[("LLAMA_EXPERT_TRACE_TOP", value)]).trace_top;
    assert_eq!((top(""), top("0"), top("10")), (None, None, Some(10)));
}

#[test]
fn postfetch_in_an_unmodified_program() {
    let defaults = parse(&[]).program_postfetch;
    assert_eq!((defaults.mode, defaults.cache), (PostFetchMode::Off, None));
    assert_eq!(defaults.cache_misses, Misses::Auto);
    assert_eq!(parse(&[]).postfetch.cache_half_life, 1);
    assert!(defaults.look_ahead && !defaults.page_lock);
    for (word, mode) in [
        ("on", PostFetchMode::Offloaded),
        ("down", PostFetchMode::Down),
        ("all", PostFetchMode::All),
    ] {
        let all = [
            ("LLAMA_POSTFETCH_MODE", word),
            ("LLAMA_POSTFETCH_CACHE_MB", "3"),
            ("LLAMA_POSTFETCH_CACHE_HALF_LIFE", "9"),
            ("LLAMA_POSTFETCH_CACHE_TRACE", "/t.json"),
            ("LLAMA_POSTFETCH_CACHE_MISSES", "cpu"),
            ("LLAMA_POSTFETCH_CACHE_UPLOADS", "4"),
            ("LLAMA_POSTFETCH_LOOK_AHEAD", "0"),
            ("LLAMA_SIDECAR_PAGE_LOCK", "1"),
        ];
        let set = ProgramPostFetch {
            mode,
            cache: Some(CacheSize::Bytes(3 << 20)),
            cache_trace: Some("/t.json".into()),
            cache_misses: Misses::Cpu,
            cache_uploads: 4,
            look_ahead: false,
            page_lock: true,
        };
        assert_eq!(parse(&all).program_postfetch, set);
        assert_eq!(parse(&all).postfetch.cache_half_life, 9);
        for without in [
            ("LLAMA_POSTFETCH_ENABLE", "0"),
            ("LLAMA_POSTFETCH_FORCE_CPU", "1"),
            ("LLAMA_POSTFETCH_USE_DEDICATED_STREAMS", "0"),
        ] {
            let config = parse(&[all[0], all[1], without]).program_postfetch;
            assert_eq!((config.mode, config.cache), (PostFetchMode::Off, None));
        }
    }
    let auto = parse(&[("LLAMA_POSTFETCH_CACHE_MB", "auto")]).program_postfetch;
    assert_eq!(
        (auto.mode, auto.cache),
        (PostFetchMode::Offloaded, Some(CacheSize::Auto))
    );
    let trace = ("LLAMA_POSTFETCH_CACHE_TRACE", "/t.json");
    let cache = |values: &[_]| parse(values).program_postfetch.cache;
    assert_eq!(cache(&[trace]), Some(CacheSize::Auto));
    assert_eq!(cache(&[trace, ("LLAMA_POSTFETCH_CACHE_MB", "0")]), None);
    let wrong = parse(&[("LLAMA_POSTFETCH_CACHE_MB", "much")]);
    assert_eq!(
        (wrong.program_postfetch.cache, wrong.rejected.len()),
        (None, 1)
    );
}

#[test]
fn a_bad_value_is_named_and_the_default_used() {
    let config = parse(&[("LLAMA_SIDECAR_LOG", "loud")]);
    assert_eq!(config.log, LevelFilter::Warn);
    assert_eq!(config.rejected.len(), 1);
    assert!(config.rejected[0].contains("LLAMA_SIDECAR_LOG=\"loud\""));
    let config = parse(&[
        ("LLAMA_SIDECAR_SPLIT", "1,x"),
        ("LLAMA_SIDECAR_OVERRIDE_TENSOR", "(=1"),
        ("LLAMA_SIDECAR_STAGING_MB", "-1"),
    ]);
    assert_eq!(config.rejected.len(), 3);
    assert_eq!(
        (config.split, config.override_tensor, config.staging_bytes),
        (None, None, 0)
    );
    assert_eq!(
        parse(&[("LLAMA_SIDECAR_LOG", "debug")]).log,
        LevelFilter::Debug
    );
}

/// A value of a variable that is not its default.
fn other(variable: &Variable) -> &'static str {
    let values = ["1", "0", "7", "auto", "on", "cpu", "debug", "3,1", "attn=1"];
    let is_valid = |value: &&str| variable.check(value.as_ref()).is_ok();
    let is_other = |value: &&str| !variable.is_default(value.as_ref());
    let found = values
        .into_iter()
        .find(|value| is_valid(value) && is_other(value));
    found.unwrap_or("1")
}

#[test]
fn a_variable_that_turns_nothing_on_is_reported() {
    // They turn something off, or concern messages.
    const ALONE: [&str; 6] = [
        "LLAMA_POSTFETCH_FORCE_CPU",
        "LLAMA_POSTFETCH_USE_DEDICATED_STREAMS",
        "LLAMA_SIDECAR_JOURNAL",
        "LLAMA_SIDECAR_LOG",
        "LLAMA_SIDECAR_STREAM_SOCKET",
        "LLAMA_POSTFETCH_ENABLE",
    ];
    for variable in VARIABLES {
        let config = parse(&[(variable.name, other(variable))]);
        assert!(config.rejected.is_empty(), "{config:?}");
        let starts = |text: &String| text.starts_with(&variable.title());
        let is_reported = config.without_effect.iter().any(starts);
        let is_alone = ALONE.contains(&variable.name);
        // They are used through the control socket.
        let needs_socket = ["LLAMA_SIDECAR_ROUNDS", "LLAMA_EXPERT_MASKS"].contains(&variable.name);
        // The word that it needs is another variable.
        let is_refused = variable.name == "LLAMA_EXPERT_STREAM_PREFER";
        assert!(
            is_reported == (!config.is_used() || needs_socket || is_refused) || is_alone,
            "{}: {:?}",
            variable.name,
            config.without_effect
        );
    }
}

#[test]
fn a_variable_beside_the_one_that_it_needs_is_not_reported() {
    for all in [
        &[
            ("LLAMA_EXPERT_TRACE_EVERY_S", "5"),
            ("LLAMA_EXPERT_TRACE_OUTPUT", "a.json"),
        ][..],
        &[
            ("LLAMA_HOTSWAP_POLL_MS", "5"),
            ("LLAMA_HOTSWAP_ENABLED", "1"),
        ],
        &[
            ("LLAMA_POSTFETCH_DEBUG", "1"),
            ("LLAMA_POSTFETCH_ENABLE", "1"),
        ],
        &[
            ("LLAMA_SIDECAR_CONTROL", "a"),
            ("LLAMA_EXPERT_TRACE_NAMES", "1"),
        ],
        &[
            ("LLAMA_EXPERT_TRACE_TOP", "5"),
            ("LLAMA_EXPERT_TRACE_PER_LAYER", "1"),
        ],
        &[("LLAMA_EXPERT_TRACE_EVERY_S", "0")],
    ] {
        assert_eq!(parse(all).without_effect, [""; 0], "{all:?}");
    }
    let excluded = parse(&[
        ("LLAMA_POSTFETCH_MODE", "on"),
        ("LLAMA_POSTFETCH_ENABLE", "0"),
    ]);
    assert_eq!(excluded.without_effect.len(), 1, "{excluded:?}");
}

#[test]
fn an_override_can_ignore_case() {
    let rules = overrides("(?i)FFN_.*_EXPS=0").expect("a rule");
    assert!(rules[0].0.is_match("blk.1.ffn_down_exps.weight"));
}
