//! Models in real sizes, and hosts with a simulated GPU that moves nothing.

use std::path::Path;

use testkit::host::{DropIn, Host, Program};
use testkit::moe::{Architecture, Moe};
use testkit::sim_ggml::SimGgml;
use testkit::writer::{MXFP4, Q4_K};

/// Layers of the files.
pub const LAYERS: usize = 8;
/// Tokens of a vocabulary.
const TOKENS: usize = 512;
/// The machine.
pub const MACHINE: [(&str, &str); 8] = [
    ("SIM_GGML_COMPUTE", "0"),
    ("SIM_GGML_MEMORY_MB", "65536"),
    ("SIM_GGML_LINK_GBS", "24"),
    ("SIM_GGML_PAGEABLE_GBS", "12"),
    ("SIM_GGML_LATENCY_US", "8"),
    ("SIM_GGML_DEVICE_GBS", "800"),
    ("SIM_GGML_TFLOPS", "60"),
    ("SIM_GGML_LAUNCH_US", "3"),
];

/// Machines of the bandwidth model, GB/s of memory, of the CPU's experts and of the link.
pub const MACHINES: [(&str, f64, f64, f64); 8] = [
    ("2 x DDR4-3200, PCIe 3", 45.0, 38.0, 12.0),
    ("2 x DDR4-3200, PCIe 4", 45.0, 38.0, 24.0),
    ("2 x DDR5-5600, PCIe 4 x4", 75.0, 62.0, 7.0),
    ("2 x DDR5-5600, PCIe 4", 75.0, 62.0, 24.0),
    ("2 x DDR5-5600, PCIe 5", 75.0, 62.0, 50.0),
    ("2 x DDR5-5600, 4 old cores, PCIe 4", 75.0, 20.0, 24.0),
    ("8 x DDR4-3200, PCIe 4", 160.0, 100.0, 24.0),
    ("8 x DDR5-4800, PCIe 5", 250.0, 150.0, 50.0),
];

/// Makes a simulated GPU at speeds of a CPU and a link in GB/s, with more settings. Copies from memory
/// that is not page-locked are never faster than the link.
pub fn simulation(cpu: f64, link: f64, more: &[(&str, &str)]) -> SimGgml {
    let [cpu, pageable, link] = [cpu, link.min(12.0), link].map(|speed| speed.to_string());
    let speeds = [
        ("SIM_GGML_HOST_GBS", cpu.as_str()),
        ("SIM_GGML_LINK_GBS", link.as_str()),
        ("SIM_GGML_PAGEABLE_GBS", pageable.as_str()),
    ];
    SimGgml::new(&[&MACHINE[..], &speeds, more].concat())
}

/// Variables of the drop-in; without any it is not loaded.
pub type Variables = &'static [(&'static str, &'static str)];

/// Which tensors are in host memory.
pub const EXPERTS: &str = "_exps";

/// Names and sizes of models.
pub fn models() -> [(&'static str, Moe); 3] {
    let gpt_oss = Moe {
        architecture: Architecture::GptOss,
        layers: LAYERS,
        experts: 128,
        used: 4,
        width: 2880,
        inner: 2880,
        heads: 64,
        heads_kv: 8,
        head: 64,
        ty: MXFP4,
        tokens: TOKENS,
    };
    let qwen = Moe {
        architecture: Architecture::Llama,
        experts: 512,
        used: 10,
        width: 2048,
        inner: 512,
        heads: 16,
        heads_kv: 2,
        head: 256,
        ty: Q4_K,
        ..gpt_oss
    };
    let mixtral = Moe {
        experts: 8,
        used: 2,
        width: 4096,
        inner: 14336,
        heads: 32,
        heads_kv: 8,
        head: 128,
        ..qwen
    };
    [
        ("GPT-OSS-120B", gpt_oss),
        ("Qwen3-Next-80B", qwen),
        ("Mixtral-8x7B", mixtral),
    ]
}

/// Libraries and options of a host.
pub struct Placed {
    pub program: Program,
    pub options: Vec<String>,
}

/// These tensors in host memory, and contexts of so many tokens.
pub fn placed(on_cpu: &str, tokens: usize) -> Placed {
    Placed {
        program: Program::PythonExpertsOnCpu,
        options: vec![format!("on-cpu={on_cpu}"), format!("tokens={tokens}")],
    }
}

/// Starts a host with a simulated GPU.
pub fn start(
    model: &Path,
    sim: &SimGgml,
    placed: &Placed,
    variables: &[(&'static str, &str)],
) -> Host {
    let drop_in = match variables {
        [] => DropIn::Absent,
        _ => {
            let log = [("LLAMA_SIDECAR_LOG", "warn")];
            let all = log.iter().chain(variables);
            DropIn::On(all.map(|(name, value)| (*name, (*value).into())).collect())
        }
    };
    Host::start_with(placed.program, model, &drop_in, |command| {
        sim.prepare(command);
        command.args(&placed.options);
    })
}
