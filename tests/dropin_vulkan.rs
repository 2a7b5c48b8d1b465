//! The drop-in in a real host with a GPU backend, on a software device: all layers
//! there, or half of them, or none with the device still in the schedule.

mod hosts;

use hosts::{TOKENS, copied, fresh, on, swap_and_back, taken};
use testkit::fixtures::fixture;
use testkit::host::{Host, Program, replace};

#[test]
fn all_layers_on_the_device() {
    swap_and_back(
        Program::NodeVulkan(99),
        "smollm2.gguf",
        &fixture("smollm2-mixed.gguf"),
        8,
    );
}

#[test]
fn half_of_the_layers_on_the_device() {
    swap_and_back(
        Program::NodeVulkan(15),
        "smollm2.gguf",
        &fixture("smollm2-mixed.gguf"),
        8,
    );
}

#[test]
fn no_layer_on_the_device() {
    swap_and_back(
        Program::NodeVulkan(0),
        "smollm2.gguf",
        &fixture("smollm2-mixed.gguf"),
        8,
    );
}

#[test]
fn experts_on_the_device() {
    swap_and_back(
        Program::NodeVulkan(99),
        "moe.gguf",
        &fixture("moe-mixed.gguf"),
        4,
    );
}

/// Swaps come while a text is written: its graph is kept from token to token and must
/// be built again each time.
#[test]
fn swaps_in_the_middle_of_a_text() {
    let (_folder, path) = copied("smollm2.gguf");
    let variant = fixture("smollm2-mixed.gguf");
    let program = Program::NodeVulkan(99);
    let after = fresh(program, &variant);
    let mut host = Host::start(program, &path, &on());
    host.text(4);
    for round in 0..6 {
        host.tell("more 20");
        match round % 2 {
            0 => replace(&path, &variant),
            _ => replace(&path, &fixture("smollm2.gguf")),
        }
        let expected = if round % 2 == 0 { (8, 0) } else { (0, 8) };
        assert_eq!(taken(&host.control("reload")), expected);
        host.line();
    }
    replace(&path, &variant);
    assert_eq!(taken(&host.control("reload")), (8, 0));
    assert_eq!(host.text(TOKENS), after);
    assert!(host.logged("it fails").is_empty());
    assert_eq!(host.end(), Some(0));
}
